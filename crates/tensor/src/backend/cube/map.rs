//! Elementwise programs: one generated kernel per program.

#![expect(
    clippy::needless_pass_by_value,
    reason = "values that a kernel is specialised for are passed by value"
)]

use cubecl::prelude::*;

use crate::{Instr, Program};

/// [`Instr`] as a compile-time argument of the kernel. Constants are stored as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Code {
    Read(usize),
    Load(usize),
    Scalar(usize),
    Const(u32),
    Add(usize, usize),
    Sub(usize, usize),
    Mul(usize, usize),
    Div(usize, usize),
    Sqrt(usize),
    Abs(usize),
    Max(usize, usize),
    Min(usize, usize),
    Sign(usize),
}

/// A program as a compile-time argument of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Source {
    code: Vec<Code>,
    stores: Vec<(usize, usize)>,
    writes: usize,
}

impl From<&Program> for Source {
    fn from(program: &Program) -> Self {
        let code = program.instrs().iter().map(|&instr| {
            let two = |a: u16, b: u16| (usize::from(a), usize::from(b));
            match instr {
                Instr::Read(i) => Code::Read(i.into()),
                Instr::Load(i) => Code::Load(i.into()),
                Instr::Scalar(i) => Code::Scalar(i.into()),
                Instr::Const(c) => Code::Const(c.to_bits()),
                Instr::Add(a, b) => Code::Add(two(a, b).0, two(a, b).1),
                Instr::Sub(a, b) => Code::Sub(two(a, b).0, two(a, b).1),
                Instr::Mul(a, b) => Code::Mul(two(a, b).0, two(a, b).1),
                Instr::Div(a, b) => Code::Div(two(a, b).0, two(a, b).1),
                Instr::Sqrt(a) => Code::Sqrt(a.into()),
                Instr::Abs(a) => Code::Abs(a.into()),
                Instr::Max(a, b) => Code::Max(two(a, b).0, two(a, b).1),
                Instr::Min(a, b) => Code::Min(two(a, b).0, two(a, b).1),
                Instr::Sign(a) => Code::Sign(a.into()),
            }
        });
        Self {
            code: code.collect(),
            stores: program.stores().iter().map(|&(from, to)| (from.into(), to.into())).collect(),
            writes: program.writes(),
        }
    }
}

/// One buffer of a program.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Lane {
    values: Box<[f32]>,
}

/// Runs the program, one element per unit (thread).
#[cube(launch)]
pub(super) fn map(
    reads: &Sequence<Lane>,
    writes: &mut Sequence<Lane>,
    scalars: &Sequence<f32>,
    len: u32,
    #[comptime] source: Source,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let mut loaded = Sequence::<f32>::new();
        #[unroll]
        for i in 0..comptime!(source.writes) {
            loaded.push(writes.index(i).values[at]);
        }
        let mut values = Sequence::<f32>::new();
        #[unroll]
        for i in 0..comptime!(source.code.len()) {
            let value = step(&values, reads, &loaded, scalars, at, comptime!(source.code[i]));
            values.push(value);
        }
        #[unroll]
        for i in 0..comptime!(source.stores.len()) {
            let from = comptime!(source.stores[i].0);
            let to = comptime!(source.stores[i].1);
            writes.index_mut(to).values[at] = *values.index(from);
        }
    }
}

/// Evaluates one instruction.
#[cube]
fn step(
    values: &Sequence<f32>,
    reads: &Sequence<Lane>,
    loaded: &Sequence<f32>,
    scalars: &Sequence<f32>,
    at: usize,
    #[comptime] code: Code,
) -> f32 {
    match code {
        Code::Read(i) => reads.index(i).values[at],
        Code::Load(i) => *loaded.index(i),
        Code::Scalar(i) => *scalars.index(i),
        Code::Const(bits) => f32::new(comptime!(f32::from_bits(bits))),
        Code::Add(a, b) => *values.index(a) + *values.index(b),
        Code::Sub(a, b) => *values.index(a) - *values.index(b),
        Code::Mul(a, b) => *values.index(a) * *values.index(b),
        Code::Div(a, b) => *values.index(a) / *values.index(b),
        Code::Sqrt(a) => f32::sqrt(*values.index(a)),
        Code::Abs(a) => f32::abs(*values.index(a)),
        Code::Max(a, b) => select(*values.index(b) > *values.index(a), *values.index(b), *values.index(a)),
        Code::Min(a, b) => select(*values.index(b) < *values.index(a), *values.index(b), *values.index(a)),
        Code::Sign(a) => sign(*values.index(a)),
    }
}

/// Returns 1 or -1; the operand itself if it is zero or NaN.
#[cube]
fn sign(x: f32) -> f32 {
    select(x > 0.0, f32::new(1.0), select(x < 0.0, f32::new(-1.0), x))
}
