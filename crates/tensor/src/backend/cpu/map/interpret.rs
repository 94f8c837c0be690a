//! Interpreter of elementwise programs. It runs one instruction at a time over blocks that stay in L1 cache, so
//! that a program of many instructions costs little more than its memory traffic.

use std::cell::RefCell;

use crate::backend::cpu::simd::{Isa, simd};
use crate::program::{Instr, Program, larger, sign, smaller};

/// Elements per block: 64 registers of a block each fit in L2 cache, and the few in use in L1.
const BLOCK: usize = 128;

type Block = [f32; BLOCK];

simd! {
    /// Runs one instruction over a block. `a` and `b` are its operands.
    fn step<L: Level>(instr: Instr, a: &Block, b: &Block, out: &mut Block) {
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
        fn binary(a: &Block, b: &Block, out: &mut Block, f: impl Fn(f32, f32) -> f32) {
            for i in 0..BLOCK {
                out[i] = f(a[i], b[i]);
            }
        }
        #[inline(always)]
        #[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
        fn unary(a: &Block, out: &mut Block, f: impl Fn(f32) -> f32) {
            for i in 0..BLOCK {
                out[i] = f(a[i]);
            }
        }
        match instr {
            Instr::Add(..) => binary(a, b, out, |a, b| a + b),
            Instr::Sub(..) => binary(a, b, out, |a, b| a - b),
            Instr::Mul(..) => binary(a, b, out, |a, b| a * b),
            Instr::Div(..) => binary(a, b, out, |a, b| a / b),
            Instr::Max(..) => binary(a, b, out, larger),
            Instr::Min(..) => binary(a, b, out, smaller),
            Instr::Sqrt(_) => unary(a, out, f32::sqrt),
            Instr::Abs(_) => unary(a, out, f32::abs),
            Instr::Sign(_) => unary(a, out, sign),
            Instr::Read(_) | Instr::Load(_) | Instr::Scalar(_) | Instr::Const(_) => {}
        }
    }
}

thread_local! {
    /// Results of the instructions for this thread's current block. The buffers are kept between calls.
    static REGISTERS: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
}

/// Returns a whole block of a buffer; `None` if less than a block remains from `start`.
fn block(of: &[f32], start: usize) -> Option<&Block> {
    of.get(start..start + BLOCK)?.try_into().ok()
}

/// Runs `program` on slices of one task. `writes` are updated in place.
pub(super) fn run<const W: usize>(
    isa: Isa,
    program: &Program,
    scalars: &[f32],
    reads: &[&[f32]],
    writes: &mut [&mut [f32]; W],
) {
    let instrs = program.instrs();
    let mut registers = REGISTERS.take();
    registers.resize(instrs.len(), [0.0; BLOCK]);
    for (register, instr) in registers.iter_mut().zip(instrs) {
        match *instr {
            Instr::Scalar(j) => register.fill(scalars[usize::from(j)]),
            Instr::Const(c) => register.fill(c),
            _ => {}
        }
    }
    let len = writes.first().map_or(0, |w| w.len());
    for start in (0..len).step_by(BLOCK) {
        let n = BLOCK.min(len - start);
        for (i, instr) in instrs.iter().enumerate() {
            let (before, rest) = registers.split_at_mut(i);
            let out = &mut rest[0];
            // Whole blocks of buffers are read in place. Only the last, partial ones are copied to registers.
            match *instr {
                Instr::Read(j) if n < BLOCK => {
                    out[..n].copy_from_slice(&reads[usize::from(j)][start..start + n]);
                }
                Instr::Load(j) if n < BLOCK => {
                    out[..n].copy_from_slice(&writes[usize::from(j)][start..start + n]);
                }
                Instr::Read(_) | Instr::Load(_) | Instr::Scalar(_) | Instr::Const(_) => {}
                instr => {
                    let operand = |of: u16| {
                        let of = usize::from(of);
                        let whole = match instrs[of] {
                            Instr::Read(j) => block(reads[usize::from(j)], start),
                            Instr::Load(j) => block(writes[usize::from(j)], start),
                            _ => None,
                        };
                        whole.unwrap_or(&before[of])
                    };
                    if let Some((a, b)) = instr.operands() {
                        step(isa, instr, operand(a), operand(b), out);
                    }
                }
            }
        }
        // Values that are stored exactly as they were loaded must be saved before any buffer is overwritten.
        for &(from, _) in program.stores() {
            if let Instr::Load(j) = instrs[usize::from(from)] {
                registers[usize::from(from)][..n].copy_from_slice(&writes[usize::from(j)][start..start + n]);
            }
        }
        for &(from, to) in program.stores() {
            let from = usize::from(from);
            let value = match instrs[from] {
                Instr::Read(j) => &reads[usize::from(j)][start..start + n],
                _ => &registers[from][..n],
            };
            writes[usize::from(to)][start..start + n].copy_from_slice(value);
        }
    }
    REGISTERS.set(registers);
}
