//! Elementwise arithmetic as data. The CPU interprets the program; a GPU backend generates a kernel from it.
//! This way optimizer transforms need no ops of their own.
//!
//! A program reads some buffers, updates others in place, and takes scalars that may change from run to run
//! (such as a learning rate). On CPUs, each instruction rounds once, as IEEE 754 specifies, and none are fused:
//! all CPUs give the same bits. A GPU may round quotients and roots differently, or fuse a product with a sum.

use std::ops::{Add, Div, Mul, Sub};

use crate::{Result, TensorError};

/// One instruction. Operands are indices of earlier instructions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Instr {
    /// Element of read-only buffer `.0`.
    Read(u16),
    /// Element of updated buffer `.0`, as it was before the program.
    Load(u16),
    /// Scalar argument `.0`.
    Scalar(u16),
    /// A constant.
    Const(f32),
    /// Sum of two values.
    Add(u16, u16),
    /// Difference of two values.
    Sub(u16, u16),
    /// Product of two values.
    Mul(u16, u16),
    /// Quotient of two values.
    Div(u16, u16),
    /// Square root of a value.
    Sqrt(u16),
    /// Absolute value of a value.
    Abs(u16),
    /// The larger operand; the first one if either is NaN.
    Max(u16, u16),
    /// The smaller operand; the first one if either is NaN.
    Min(u16, u16),
    /// 1 or -1; the operand itself if it is zero or NaN.
    Sign(u16),
}

impl Instr {
    /// Returns the operands; a single operand is returned twice.
    pub(crate) const fn operands(self) -> Option<(u16, u16)> {
        match self {
            Self::Read(_) | Self::Load(_) | Self::Scalar(_) | Self::Const(_) => None,
            Self::Sqrt(a) | Self::Abs(a) | Self::Sign(a) => Some((a, a)),
            Self::Add(a, b)
            | Self::Sub(a, b)
            | Self::Mul(a, b)
            | Self::Div(a, b)
            | Self::Max(a, b)
            | Self::Min(a, b) => Some((a, b)),
        }
    }
}

/// A validated program. [`ProgramBuilder::build`] creates it.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    instrs: Vec<Instr>,
    stores: Vec<(u16, u16)>,
    reads: usize,
    writes: usize,
    scalars: usize,
}

impl Program {
    /// Returns the number of read-only buffers.
    #[must_use]
    pub const fn reads(&self) -> usize {
        self.reads
    }

    /// Returns the number of updated buffers.
    #[must_use]
    pub const fn writes(&self) -> usize {
        self.writes
    }

    /// Returns the number of scalar arguments.
    #[must_use]
    pub const fn scalars(&self) -> usize {
        self.scalars
    }

    /// Returns the instructions in order.
    #[must_use]
    pub fn instrs(&self) -> &[Instr] {
        &self.instrs
    }

    /// Returns pairs (instruction, updated buffer): the result of the instruction is stored in the buffer at
    /// the end.
    #[must_use]
    pub fn stores(&self) -> &[(u16, u16)] {
        &self.stores
    }

    /// Returns the number of arithmetic operations per element.
    #[must_use]
    pub fn flops(&self) -> usize {
        let free =
            |i: &&Instr| !matches!(i, Instr::Read(_) | Instr::Load(_) | Instr::Scalar(_) | Instr::Const(_));
        self.instrs.iter().filter(free).count()
    }
}

/// A value within a [`ProgramBuilder`]: the result of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value(u16);

/// Builder of a [`Program`].
///
/// ```
/// use farflung_tensor::{Device, Op, ProgramBuilder};
/// // y = y + s * x
/// let mut b = ProgramBuilder::new();
/// let (x, y, s) = (b.read(0), b.load(0), b.scalar(0));
/// let sx = b.mul(s, x);
/// let sum = b.add(y, sx);
/// b.store(0, sum);
/// let program = b.build()?;
///
/// let cpu = Device::cpu(1)?;
/// let x = cpu.tensor(&[1.0_f32, 2.0], 2)?;
/// let mut y = cpu.tensor(&[10.0_f32, 20.0], 2)?;
/// cpu.run(Op::Map {
///     program: &program,
///     scalars: &[0.5],
///     reads: &[x.view()],
///     writes: &mut [y.view_mut()],
/// })?;
/// assert_eq!(y.to_vec::<f32>()?, [10.5, 21.0]);
/// # Ok::<(), farflung_tensor::TensorError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ProgramBuilder {
    instrs: Vec<Instr>,
    stores: Vec<(u16, u16)>,
}

impl ProgramBuilder {
    /// Creates an empty program.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn push(&mut self, instr: Instr) -> Value {
        if let Some(known) = self.instrs.iter().position(|i| same(*i, instr)) {
            return Value(known as u16);
        }
        self.instrs.push(instr);
        Value((self.instrs.len() - 1) as u16)
    }

    /// Reads the element of read-only buffer `index`.
    pub fn read(&mut self, index: u16) -> Value {
        self.push(Instr::Read(index))
    }

    /// Reads the element of updated buffer `index`, as it was before the program.
    pub fn load(&mut self, index: u16) -> Value {
        self.push(Instr::Load(index))
    }

    /// Reads scalar argument `index`.
    pub fn scalar(&mut self, index: u16) -> Value {
        self.push(Instr::Scalar(index))
    }

    /// Returns a constant.
    pub fn constant(&mut self, value: f32) -> Value {
        self.push(Instr::Const(value))
    }

    /// Stores `value` in updated buffer `index` at the end. A later store to the same buffer replaces it.
    pub fn store(&mut self, index: u16, value: Value) {
        self.stores.retain(|(_, to)| *to != index);
        self.stores.push((value.0, index));
    }

    /// Returns the square root of `a`.
    pub fn sqrt(&mut self, a: Value) -> Value {
        self.push(Instr::Sqrt(a.0))
    }

    /// Returns the absolute value of `a`.
    pub fn abs(&mut self, a: Value) -> Value {
        self.push(Instr::Abs(a.0))
    }

    /// Returns 1 or -1 with the sign of `a`, or `a` itself if it is zero or NaN.
    pub fn sign(&mut self, a: Value) -> Value {
        self.push(Instr::Sign(a.0))
    }

    /// Validates the program. The number of buffers of a kind, or of scalars, is the largest index used plus
    /// one.
    pub fn build(self) -> Result<Program> {
        let count = |f: fn(&Instr) -> Option<u16>| {
            self.instrs.iter().filter_map(f).map(|i| usize::from(i) + 1).max().unwrap_or(0)
        };
        let reads = count(|i| if let Instr::Read(n) = i { Some(*n) } else { None });
        let loads = count(|i| if let Instr::Load(n) = i { Some(*n) } else { None });
        let scalars = count(|i| if let Instr::Scalar(n) = i { Some(*n) } else { None });
        let stored = self.stores.iter().map(|(_, to)| usize::from(*to) + 1).max().unwrap_or(0);
        if self.instrs.len() > MAX_INSTRS {
            return Err(TensorError::BadProgram {
                what: "number of instructions",
                found: self.instrs.len(),
                relation: "at most",
                bound: MAX_INSTRS,
            });
        }
        // A `Value` of another builder may refer to a later instruction or to none.
        let operands = self.instrs.iter().enumerate().filter_map(|(i, instr)| Some((instr.operands()?, i)));
        let operands = operands.flat_map(|((a, b), i)| [(a, i), (b, i)]);
        let stores = self.stores.iter().map(|&(from, _)| (from, self.instrs.len()));
        for (j, bound) in operands.chain(stores) {
            let found = usize::from(j);
            if found >= bound {
                let what = "index of an operand";
                return Err(TensorError::BadProgram { what, found, relation: "below", bound });
            }
        }
        let writes = loads.max(stored);
        for (what, found) in [("number of read buffers", reads), ("number of updated buffers", writes)] {
            if found > MAX_BUFFERS {
                let (relation, bound) = ("at most", MAX_BUFFERS);
                return Err(TensorError::BadProgram { what, found, relation, bound });
            }
        }
        Ok(Program { instrs: self.instrs, stores: self.stores, reads, writes, scalars })
    }
}

/// Returns whether two instructions give the same bits. Unlike `==`, it distinguishes 0 from -0.
fn same(a: Instr, b: Instr) -> bool {
    match (a, b) {
        (Instr::Const(a), Instr::Const(b)) => a.to_bits() == b.to_bits(),
        _ => a == b,
    }
}

/// Maximum number of instructions, so that the registers of [`Program::eval`] fit on the stack.
pub(crate) const MAX_INSTRS: usize = 64;

/// Maximum number of buffers of each kind.
pub(crate) const MAX_BUFFERS: usize = 4;

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident => $instr:ident),*) => {
        impl ProgramBuilder {
            $($(#[$doc])*
            pub fn $name(&mut self, a: Value, b: Value) -> Value {
                self.push(Instr::$instr(a.0, b.0))
            })*
        }
    };
}
binary!(
    /// Adds `a` and `b`.
    add => Add,
    /// Subtracts `b` from `a`.
    sub => Sub,
    /// Multiplies `a` and `b`.
    mul => Mul,
    /// Divides `a` by `b`.
    div => Div,
    /// Returns the larger of two values, or the first one if either is NaN.
    max => Max,
    /// Returns the smaller of two values, or the first one if either is NaN.
    min => Min
);

/// Evaluation of one element, the reference for every interpreter.
impl Program {
    /// Runs the program on one element of each buffer and updates `writes`.
    ///
    /// # Panics
    /// If there are fewer scalars or elements than the program uses.
    pub fn eval(&self, scalars: &[f32], reads: &[f32], writes: &mut [f32]) {
        let mut r = [0.0_f32; MAX_INSTRS];
        for (i, instr) in self.instrs.iter().enumerate() {
            let at = |j: u16| r[usize::from(j)];
            r[i] = match *instr {
                Instr::Read(j) => reads[usize::from(j)],
                Instr::Load(j) => writes[usize::from(j)],
                Instr::Scalar(j) => scalars[usize::from(j)],
                Instr::Const(c) => c,
                Instr::Add(a, b) => at(a).add(at(b)),
                Instr::Sub(a, b) => at(a).sub(at(b)),
                Instr::Mul(a, b) => at(a).mul(at(b)),
                Instr::Div(a, b) => at(a).div(at(b)),
                Instr::Sqrt(a) => at(a).sqrt(),
                Instr::Abs(a) => at(a).abs(),
                Instr::Max(a, b) => larger(at(a), at(b)),
                Instr::Min(a, b) => smaller(at(a), at(b)),
                Instr::Sign(a) => sign(at(a)),
            };
        }
        for &(from, to) in &self.stores {
            writes[usize::from(to)] = r[usize::from(from)];
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "one select instruction in vectorised loops")]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "one select instruction in vectorised loops")]
pub(crate) fn smaller(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "one select instruction in vectorised loops")]
pub(crate) fn sign(a: f32) -> f32 {
    if a == 0.0 || a.is_nan() { a } else { 1.0_f32.copysign(a) }
}
