//! Muon's orthogonalization.

use farflung_tensor::{
    Fuse, MemoryKind, Op, Param, Precision, Program, ProgramBuilder, Shape, Tensor, TensorError, View,
};

use super::Transform;
use crate::OptimError;
use crate::per_tensor::{PerTensor, Tensors};

/// Coefficients of the Newton-Schulz iteration, chosen to raise small singular values fastest.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Number of iterations.
const STEPS: usize = 5;
/// Lower bound of the norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Dimension of a matrix that holds its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// `[outputs, inputs]`, as in PyTorch's `Linear`.
    Rows,
    /// `[inputs, outputs]`, as in GPT-2.
    Columns,
}

/// Scale of Muon's steps, in multiples of the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonScale {
    /// `sqrt(max(1, outputs / inputs))` (Jordan 2024); PyTorch's default, where it is called `original`.
    Original,
    /// `0.2 sqrt(max(outputs, inputs))`: steps about as large as AdamW's, so that both can use one learning
    /// rate (Liu et al. 2025, "Muon is Scalable for LLM Training"); `match_rms_adamw` in PyTorch.
    MatchAdamW,
}

impl MuonScale {
    fn of(self, outputs: usize, inputs: usize) -> f32 {
        let (outputs, inputs) = (outputs as f64, inputs as f64);
        let scale = match self {
            Self::Original => (outputs / inputs).max(1.0).sqrt(),
            Self::MatchAdamW => 0.2 * outputs.max(inputs).sqrt(),
        };
        scale as f32
    }
}

/// Makes the singular values of each matrix about 1 (between 0.7 and 1.2) by five Newton-Schulz iterations in
/// f32, and multiplies the matrix by its [`MuonScale`]. Singular values below about 1/600 of the matrix's l2
/// norm end below 0.7, and 0 stays 0.
///
/// Errors when the chain is built: [`OptimError::NotAMatrix`] for a tensor that does not have two dimensions.
/// Select matrices with [`ChainBuilder::then_for`](crate::ChainBuilder::then_for).
///
/// Source: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks". Differs: products are in
/// f32, not bf16, whatever the device's precision; a tall matrix is not transposed, `X (X^T X)` is computed
/// instead.
#[must_use]
pub fn orthogonalize(scale: MuonScale, outputs: Outputs) -> impl Transform {
    Orthogonalize { scale, outputs }
}

#[derive(Debug)]
struct Orthogonalize {
    scale: MuonScale,
    outputs: Outputs,
}

impl Transform for Orthogonalize {
    fn name(&self) -> &'static str {
        "orthogonalize"
    }
    fn per_tensor(&self) -> Option<&dyn PerTensor> {
        Some(self)
    }
}

impl PerTensor for Orthogonalize {
    fn check(&self, tensor: &Param) -> Result<(), OptimError> {
        matrix(&tensor.name, tensor.shape).map(drop)
    }
    fn rewrite(&self, tensors: &mut Tensors<'_>) -> Result<(), OptimError> {
        let norms = tensors.update_norms()?;
        let combine = combination()?;
        for (i, norm) in norms.into_iter().enumerate() {
            let [rows, cols] = matrix(tensors.name(i), tensors.shape(i))?;
            tensors.scale(i, (1.0 / norm.max(EPS)) as f32)?;
            newton_schulz(&combine, tensors, i, [rows, cols])?;
            let (outputs, inputs) = match self.outputs {
                Outputs::Rows => (rows, cols),
                Outputs::Columns => (cols, rows),
            };
            tensors.scale(i, self.scale.of(outputs, inputs))?;
        }
        Ok(())
    }
}

/// Returns the rows and columns of a tensor.
fn matrix(name: &str, shape: Shape) -> Result<[usize; 2], OptimError> {
    match *shape.dims() {
        [rows, cols] => Ok([rows, cols]),
        _ => Err(OptimError::NotAMatrix { name: name.to_owned(), shape }),
    }
}

/// Builds the program `y = s0 x + s1 y`.
fn combination() -> Result<Program, TensorError> {
    let mut p = ProgramBuilder::new();
    let (x, y, s, t) = (p.read(0), p.load(0), p.scalar(0), p.scalar(1));
    let (x, y) = (p.mul(s, x), p.mul(t, y));
    let sum = p.add(x, y);
    p.store(0, sum);
    p.build()
}

/// Iterates `X = a X + (b A + c A^2) X` with `A = X X^T`. Where `X` is tall, `A = X^T X` and stands right of
/// `X`.
fn newton_schulz(
    combine: &Program,
    tensors: &mut Tensors<'_>,
    i: usize,
    shape: [usize; 2],
) -> Result<(), OptimError> {
    let device = tensors.device().with_precision(Precision::F32).counting_for(MemoryKind::Optimizer);
    let (tall, least) = (shape[0] > shape[1], shape[0].min(shape[1]));
    let square = || device.zeros([least, least]);
    let (mut gram, mut poly, mut moved) = (square()?, square()?, device.zeros(shape)?);
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        let x = tensors.update(i)?;
        device.run(product((x, tall), (x, !tall), &mut gram))?;
        device.run(product((gram.view(), false), (gram.view(), false), &mut poly))?;
        device.run(Op::Map {
            program: combine,
            scalars: &[b, c],
            reads: &[gram.view()],
            writes: &mut [poly.view_mut()],
        })?;
        let (left, right) = if tall { (x, poly.view()) } else { (poly.view(), x) };
        device.run(product((left, false), (right, false), &mut moved))?;
        device.run(Op::Map {
            program: combine,
            scalars: &[1.0, a],
            reads: &[moved.view()],
            writes: &mut [tensors.update_mut(i)?],
        })?;
    }
    Ok(())
}

/// Returns the op `c = a b`. A factor is transposed if its flag is set.
fn product<'a>((a, a_t): (View<'a>, bool), (b, b_t): (View<'a>, bool), c: &'a mut Tensor) -> Op<'a> {
    let c = c.view_mut();
    Op::MatMul { a, a_t, b, b_t, c, accumulate: false, scales: [1.0; 2], fuse: Fuse::None }
}
