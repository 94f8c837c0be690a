//! The interpreter of elementwise programs: an instruction at a time over blocks that stay in the first-level cache, so
//! that a program of many instructions costs little more than the memory it moves.

use super::pool::Pool;
use super::simd::{Isa, simd};
use crate::program::{Instr, MAX_BUFFERS, MAX_INSTRS, Program, larger, sign, smaller};

/// Elements per block: 64 registers of it fit the second-level cache, the few in use the first.
const BLOCK: usize = 256;
/// Elements per task.
const TASK: usize = 1 << 15;

type Block = [f32; BLOCK];

simd! {
    /// One instruction over a block; `r` holds the results of the earlier ones.
    fn step<L: Level>(instr: Instr, r: &[Block], out: &mut Block) {
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
        let at = |i: u16| &r[usize::from(i)];
        match instr {
            Instr::Add(a, b) => binary(at(a), at(b), out, |a, b| a + b),
            Instr::Sub(a, b) => binary(at(a), at(b), out, |a, b| a - b),
            Instr::Mul(a, b) => binary(at(a), at(b), out, |a, b| a * b),
            Instr::Div(a, b) => binary(at(a), at(b), out, |a, b| a / b),
            Instr::Max(a, b) => binary(at(a), at(b), out, larger),
            Instr::Min(a, b) => binary(at(a), at(b), out, smaller),
            Instr::Sqrt(a) => unary(at(a), out, f32::sqrt),
            Instr::Abs(a) => unary(at(a), out, f32::abs),
            Instr::Sign(a) => unary(at(a), out, sign),
            Instr::Read(_) | Instr::Load(_) | Instr::Scalar(_) | Instr::Const(_) => {}
        }
    }
}

/// Runs `program` on chunk-sized slices; `writes` are rewritten.
fn run_task<const W: usize>(isa: Isa, program: &Program, scalars: &[f32], reads: &[&[f32]], writes: [&mut [f32]; W]) {
    let instrs = program.instrs();
    let mut registers = [[0.0; BLOCK]; MAX_INSTRS];
    for (i, instr) in instrs.iter().enumerate() {
        match *instr {
            Instr::Scalar(j) => registers[i].fill(scalars[usize::from(j)]),
            Instr::Const(c) => registers[i].fill(c),
            _ => {}
        }
    }
    let len = writes.first().map_or(0, |w| w.len());
    for start in (0..len).step_by(BLOCK) {
        let n = BLOCK.min(len - start);
        for (i, instr) in instrs.iter().enumerate() {
            let (before, rest) = registers.split_at_mut(i);
            match *instr {
                Instr::Read(j) => rest[0][..n].copy_from_slice(&reads[usize::from(j)][start..start + n]),
                Instr::Load(j) => rest[0][..n].copy_from_slice(&writes[usize::from(j)][start..start + n]),
                Instr::Scalar(_) | Instr::Const(_) => {}
                instr => step(isa, instr, before, &mut rest[0]),
            }
        }
        for &(from, to) in program.stores() {
            writes[usize::from(to)][start..start + n].copy_from_slice(&registers[usize::from(from)][..n]);
        }
    }
}

/// Runs `program` over whole buffers of one length. Unused entries of `reads` and `writes` are empty.
pub(super) fn run(
    pool: &Pool,
    program: &Program,
    scalars: &[f32],
    reads: [&[f32]; MAX_BUFFERS],
    writes: [&mut [f32]; MAX_BUFFERS],
) {
    let isa = Isa::detect();
    let part = |t: usize| reads.map(|r| r.get(t * TASK..).map_or(&r[..0], |r| &r[..r.len().min(TASK)]));
    match (program.writes(), writes) {
        (0, _) => {}
        (1, [a, ..]) => pool.for_chunks([(a, TASK)], |t, w| run_task(isa, program, scalars, &part(t), w)),
        (2, [a, b, ..]) => {
            pool.for_chunks([(a, TASK), (b, TASK)], |t, w| run_task(isa, program, scalars, &part(t), w));
        }
        (3, [a, b, c, _]) => pool
            .for_chunks([(a, TASK), (b, TASK), (c, TASK)], |t, w| run_task(isa, program, scalars, &part(t), w)),
        (_, [a, b, c, d]) => pool.for_chunks([(a, TASK), (b, TASK), (c, TASK), (d, TASK)], |t, w| {
            run_task(isa, program, scalars, &part(t), w);
        }),
    }
}
