//! Elementwise programs over flat buffers. Recognised programs run in a precompiled loop, others in the
//! interpreter. Both give the bits of [`Program::eval`].

mod interpret;
mod known;

use super::pool::Pool;
use super::simd::Isa;
use crate::program::{MAX_BUFFERS, Program};
use known::FusedExpression;

/// Elements per task.
const TASK: usize = 1 << 15;

/// Runs `program` over whole buffers of equal length. Unused entries of `reads` and `writes` are empty.
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
        (1, [a, ..]) => {
            pool.for_chunks([(a, TASK)], |t, mut w| interpret::run(isa, program, scalars, &part(t), &mut w));
        }
        (2, [a, b, ..]) => {
            pool.for_chunks([(a, TASK), (b, TASK)], |t, mut w| {
                interpret::run(isa, program, scalars, &part(t), &mut w);
            });
        }
        (3, [a, b, c, _]) => {
            let known = FusedExpression::find(program, scalars);
            pool.for_chunks([(a, TASK), (b, TASK), (c, TASK)], |t, mut w| match &known {
                Some(known) => known.run(isa, &part(t), w),
                None => interpret::run(isa, program, scalars, &part(t), &mut w),
            });
        }
        (_, [a, b, c, d]) => pool.for_chunks([(a, TASK), (b, TASK), (c, TASK), (d, TASK)], |t, mut w| {
            interpret::run(isa, program, scalars, &part(t), &mut w);
        }),
    }
}
