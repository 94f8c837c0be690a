//! The CPU backend, which is always built.

mod attention;
mod cast;
mod documents;
mod embed;
mod gelu;
mod gemm;
mod join;
mod loss;
mod map;
mod matmul;
mod norm;
mod parts;
mod pool;
mod positions;
mod reduce;
mod round;
mod rows;
mod simd;
mod storage;
mod swiglu;
mod tile;
mod vector;
mod vmath;

use std::array;

use farflung_base::Pending;

use self::attention::{Attended, Cache, Layout, NewTokens, Over};
use self::documents::Documents;
use self::gemm::Mat;
pub(super) use self::gemm::packed_bytes;
use self::join::Joined;
use self::matmul::{Fused, matmul};
use self::pool::Pool;
use self::positions::Positions;
use self::storage::Buffers;
pub(super) use self::storage::GRAIN;
use super::{Backend, BufferRange, Downloaded, Storage};
use crate::op::{Fuse, Op};
use crate::{DType, Precision, Result, Shape, TensorError, View, ViewMut};

/// The host's CPU.
#[derive(Debug)]
pub(crate) struct Cpu {
    pool: Pool,
    buffers: Buffers,
}

impl Cpu {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let pool = Pool::new(threads).map_err(|e| TensorError::Threads { threads, reason: e.to_string() })?;
        Ok(Self { pool, buffers: Buffers::default() })
    }
}

const IN_HOST: &str = "a cpu tensor is in host memory, and its type was checked";

fn floats<'a>(v: &View<'a>) -> &'a [f32] {
    v.host().expect(IN_HOST)
}

fn floats_mut(v: ViewMut<'_>) -> &mut [f32] {
    v.into_host().expect(IN_HOST)
}

fn ids<'a>(op: &'static str, v: &View<'a>, bound: usize) -> Result<&'a [u32]> {
    let ids: &[u32] = v.host().expect(IN_HOST);
    match ids.iter().position(|&id| id as usize >= bound) {
        Some(position) => Err(TensorError::IdOutOfRange { op, id: ids[position], position, bound }),
        None => Ok(ids),
    }
}

/// Returns the bound of ids of rows of a table, or of a piece of one that begins at the row of id `first`.
fn bound(first: Option<u32>, table: Shape) -> usize {
    first.map_or(table.rows(), |_| usize::MAX)
}

/// Returns a matrix operand. `shape` is its shape in memory, before the transposition.
fn operand(values: &[f32], shape: Shape, transposed: bool) -> Mat<'_> {
    let m = Mat::row_major(values, shape.rows(), shape.cols(), shape.cols());
    if transposed { m.t() } else { m }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn allocate(&self, dtype: DType, shape: Shape) -> Result<Box<dyn Storage>> {
        let too_large = TensorError::OutOfMemory { device: "cpu".to_owned(), bytes: usize::MAX };
        self.buffers.take(shape.len().checked_mul(dtype.size()).ok_or(too_large)?)
    }

    fn release(&self, storage: Box<dyn Storage>) {
        self.buffers.give(storage);
    }

    fn upload(&self, bytes: &[u8], to: ViewMut<'_>) -> Result<()> {
        to.into_bytes().expect(IN_HOST).copy_from_slice(bytes);
        Ok(())
    }

    fn start_download(&self, from: BufferRange<'_>) -> Pending<Result<Box<dyn Downloaded>>> {
        Pending::ready(Ok(Box::new(from.host().expect(IN_HOST).to_vec())))
    }

    fn fence(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> (usize, usize) {
        self.buffers.memory()
    }

    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    fn run(&self, op: Op<'_>, precision: Precision) -> Result<()> {
        let pool = &self.pool;
        let name = op.name();
        match op {
            Op::Fill { value, y } => floats_mut(y).fill(value),
            Op::Cast { x, y } => cast::cast(&x, y),
            Op::MatMul { a, a_t, b, b_t, c, accumulate, scales, fuse } => {
                let fused = match fuse {
                    Fuse::None => Fused::None,
                    Fuse::Bias(bias) => Fused::Bias(floats(&bias)),
                    Fuse::BiasGelu { gelu, bias, slope } => {
                        Fused::BiasGelu(gelu, floats(&bias), slope.map(floats_mut))
                    }
                    Fuse::Add { residual } => Fused::Add(floats(&residual)),
                    Fuse::BiasAdd { bias, residual } => Fused::BiasAdd(floats(&bias), floats(&residual)),
                    Fuse::Times { factor } => Fused::Times(floats(&factor)),
                };
                let size = (c.shape().rows(), c.shape().cols());
                round::rounded(pool, precision, [floats(&a), floats(&b)], scales, |[x, y]| {
                    let (x, y) = (operand(x, a.shape(), a_t), operand(y, b.shape(), b_t));
                    matmul(pool, x, y, floats_mut(c), size, accumulate, fused);
                });
            }
            Op::SumRows { x, y, accumulate } => {
                reduce::sum_rows(pool, floats(&x), floats_mut(y), accumulate);
            }
            Op::Norm { norm, x, gain, bias, y, stats } => norm::forward(
                pool,
                norm,
                floats(&x),
                floats(&gain),
                bias.as_ref().map(floats),
                floats_mut(y),
                floats_mut(stats),
            ),
            Op::NormInput { norm, x, gain, stats, dy, residual, dx } => norm::input(
                pool,
                norm.kind,
                floats(&x),
                floats(&gain),
                floats(&stats),
                floats(&dy),
                residual.as_ref().map(floats),
                floats_mut(dx),
            ),
            Op::NormWeight { x, stats, dy, d_gain, d_bias, accumulate } => norm::weight(
                pool,
                floats(&x),
                floats(&stats),
                floats(&dy),
                floats_mut(d_gain),
                d_bias.map(floats_mut),
                accumulate,
            ),
            Op::JoinHeads { heads, rotary, q, k, v, qkv } => {
                let l = Joined::new(name, heads, qkv.shape(), rotary.as_ref())?;
                join::join(pool, l, [&q, &k, &v].map(floats), floats_mut(qkv));
            }
            Op::SplitHeads { heads, rotary, d_qkv, dq, dk, dv } => {
                let l = Joined::new(name, heads, d_qkv.shape(), rotary.as_ref())?;
                join::split(pool, l, floats(&d_qkv), [dq, dk, dv].map(floats_mut));
            }
            Op::SwiGlu { gate, up, y } => swiglu::forward(pool, floats(&gate), floats(&up), floats_mut(y)),
            Op::SwiGluGrad { gate, up, dy } => {
                swiglu::backward(pool, floats_mut(gate), floats_mut(up), floats_mut(dy));
            }
            Op::Attention { heads, mask, qkv, y, lse } => {
                let l = Layout::packed(y.shape(), heads, mask.keys.window());
                let documents = Documents::of_tokens(name, &mask, 0, y.shape())?;
                let (y, lse) = (floats_mut(y), floats_mut(lse));
                let attended = Attended::of(&mask, documents.as_ref());
                attention::train_forward(pool, l, attended, floats(&qkv), y, lse);
            }
            Op::AttentionGrad { heads, mask, qkv, y, lse, dy, d_qkv } => {
                let l = Layout::packed(y.shape(), heads, mask.keys.window());
                let documents = Documents::of_tokens(name, &mask, 0, y.shape())?;
                let read = [&qkv, &y, &lse, &dy].map(floats);
                let attended = Attended::of(&mask, documents.as_ref());
                attention::train_backward(pool, l, attended, read, floats_mut(d_qkv));
            }
            Op::AttentionCached { heads, past, mask, qkv, keys, values, y, lse } => {
                let cache = Cache { past, capacity: keys.shape().dims()[1] };
                let layout = Layout::packed(y.shape(), heads, mask.keys.window());
                let documents = Documents::of_tokens(name, &mask, past, y.shape())?;
                let attended = Attended::of(&mask, documents.as_ref());
                let tokens = NewTokens { layout, cache, attended };
                let (keys, values, lse) = (floats_mut(keys), floats_mut(values), lse.map(floats_mut));
                attention::cached_forward(pool, tokens, floats(&qkv), [keys, values], floats_mut(y), lse);
            }
            Op::AttentionCachedGrad {
                heads,
                past,
                mask,
                qkv,
                keys,
                values,
                y,
                lse,
                dy,
                d_qkv,
                d_keys,
                d_values,
            } => {
                let cache = Cache { past, capacity: keys.shape().dims()[1] };
                let layout = Layout::packed(y.shape(), heads, mask.keys.window());
                let documents = Documents::of_tokens(name, &mask, past, y.shape())?;
                let attended = Attended::of(&mask, documents.as_ref());
                let tokens = NewTokens { layout, cache, attended };
                let read = [&qkv, &keys, &values, &y, &lse, &dy].map(floats);
                let written = [d_qkv, d_keys, d_values].map(floats_mut);
                attention::cached_backward(pool, tokens, read, written);
            }
            Op::AttentionOver { heads, ranges, continues, qkv, keys, values, y, lse } => {
                let over = Over::new(Layout::packed(y.shape(), heads, None), &ranges, keys.shape());
                let read = [&qkv, &keys, &values].map(floats);
                over.forward(pool, read, continues, floats_mut(y), floats_mut(lse));
            }
            Op::AttentionOverGrad { heads, ranges, qkv, keys, values, y, lse, dy, dq, d_keys, d_values } => {
                let over = Over::new(Layout::packed(y.shape(), heads, None), &ranges, keys.shape());
                let read = [&qkv, &keys, &values, &y, &lse, &dy].map(floats);
                over.backward(pool, read, [dq, d_keys, d_values].map(floats_mut));
            }
            Op::Embed { tokens, first, positions, tokens_table, positions_table, y } => {
                let ids = ids(name, &tokens, bound(first, tokens_table.shape()))?;
                let places = positions_table.as_ref().map(|table| table.shape().rows());
                let at = Positions::read(name, &positions, y.shape().dims()[1], places)?;
                let (table, positions) = (floats(&tokens_table), positions_table.as_ref().map(floats));
                embed::forward(pool, (ids, first.unwrap_or(0)), at, table, positions, floats_mut(y));
            }
            Op::EmbedGrad { tokens, first, positions, dy, d_tokens_table, d_positions_table } => {
                let ids = ids(name, &tokens, bound(first, d_tokens_table.shape()))?;
                let places = d_positions_table.as_ref().map(|table| table.shape().rows());
                let at = Positions::read(name, &positions, dy.shape().dims()[1], places)?;
                let (table, positions) = (floats_mut(d_tokens_table), d_positions_table.map(floats_mut));
                embed::backward(pool, (ids, first.unwrap_or(0)), at, floats(&dy), table, positions);
            }
            Op::CombineRows { x, rows, factors, add, y } => {
                let (factors, add) = (factors.as_ref().map(floats), add.as_ref().map(floats));
                let numbers = (rows.host().expect(IN_HOST), rows.shape().cols());
                rows::combine(pool, floats(&x), numbers, factors, add, floats_mut(y));
            }
            Op::RowDots { a, b, rows, y } => {
                let numbers: &[u32] = rows.host().expect(IN_HOST);
                rows::dots(pool, floats(&a), floats(&b), numbers, floats_mut(y));
            }
            Op::CrossEntropy { logits, targets, weights, losses, grad_scale } => {
                let ids = ids(name, &targets, logits.shape().cols())?;
                let weights = weights.as_ref().map(floats);
                loss::cross_entropy(pool, floats_mut(logits), ids, weights, floats_mut(losses), grad_scale);
            }
            Op::LogitStats { logits, first, targets, stats } => {
                let targets = targets.host().expect(IN_HOST);
                loss::stats(pool, floats(&logits), (targets, first), floats_mut(stats));
            }
            Op::LogitGrad { logits, first, targets, weights, log_sums, scale } => {
                let targets = targets.host().expect(IN_HOST);
                let weights = weights.as_ref().map(floats);
                let sums = floats(&log_sums);
                loss::part_grad(pool, floats_mut(logits), (targets, first), weights, sums, scale);
            }
            Op::SumSquares { x, partials } => reduce::sum_squares(pool, floats(&x), floats_mut(partials)),
            Op::Map { program, scalars, reads, writes } => {
                let read = array::from_fn(|i| reads.get(i).map_or(&[][..], floats));
                let mut writes = writes.iter_mut();
                let write =
                    array::from_fn(|_| writes.next().map_or(&mut [][..], |w| floats_mut(w.reborrow())));
                map::run(pool, program, scalars, read, write);
            }
        }
        Ok(())
    }
}
