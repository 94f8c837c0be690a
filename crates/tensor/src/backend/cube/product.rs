//! Matrix products: rounding of the operands, cubek's kernels, and the elementwise op that follows. The kernel
//! is chosen by types and shapes and never by timing: equal products run equal kernels.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::zspace::Tiling;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::matmul::strategy::Strategy;
use cubek::std::InputBinding;
use half::{bf16, f16};

use super::operand::Operand;
use super::storage::Buffer;
use super::{Cube, bytes, matmul, u32_of};
use crate::op::{Fuse, Gelu};
use crate::{Precision, Result, View, ViewMut};

/// A row-major matrix in memory, possibly read transposed.
#[derive(Clone)]
struct Matrix {
    binding: TensorBinding,
    elem: ElemType,
}

impl Matrix {
    fn new(operand: &Operand, elem: ElemType, rows: usize, cols: usize, transposed: bool) -> Self {
        let (shape, strides) = if transposed { ([cols, rows], [1, cols]) } else { ([rows, cols], [cols, 1]) };
        let binding = TensorBinding {
            handle: operand.handle().binding(),
            shape: shape.into(),
            strides: strides.into(),
            tiling: Tiling::UNTILED,
        };
        Self { binding, elem }
    }

    fn input(self) -> InputBinding {
        InputBinding::new(self.binding, self.elem)
    }
}

impl Cube {
    /// Computes `c = a b`, accumulated in f32.
    fn product(&self, a: &Matrix, b: &Matrix, c: &Matrix) -> Result<()> {
        let types = MatmulElems::from_globals(&MatmulGlobalElems { lhs: a.elem, rhs: b.elem, out: c.elem });
        let launch = |strategy| {
            let strategy = Strategy::MultiLevel(strategy);
            let (a, b, c) = (a.clone().input(), b.clone().input(), c.binding.clone());
            launch_ref(&strategy, &self.client, a, b, c, &mut types.clone())
        };
        // Use tensor cores if they support the types. If they do not support the shape, fall back to the plain
        // kernel.
        let cmma = &self.client.properties().features.matmul.cmma;
        let accelerated = cmma.iter().any(|m| (m.a_type, m.b_type, m.cd_type) == (a.elem, b.elem, c.elem));
        if accelerated
            && launch(multi_level::Strategy::SimpleCyclicCmma(BlueprintStrategy::default())).is_ok()
        {
            return Ok(());
        }
        launch(multi_level::Strategy::SimpleUnit(BlueprintStrategy::default()))
            .map_err(|e| self.failed("matmul", format!("{e:?}")))
    }

    /// Returns an operand in the given precision: converted to the 16-bit type if the device has it, else
    /// rounded to values of that type but stored as f32.
    fn in_precision(
        &self,
        x: &Operand,
        view: &View<'_>,
        transposed: bool,
        precision: Precision,
        scale: f32,
    ) -> Result<(Matrix, Option<Buffer>)> {
        let (rows, cols, len) = (view.shape().rows(), view.shape().cols(), view.len());
        let f32s = f32::elem_type_native();
        let half = match precision {
            Precision::F32 => return Ok((Matrix::new(x, f32s, rows, cols, transposed), None)),
            Precision::Bf16 => bf16::elem_type_native(),
            Precision::F16 => f16::elem_type_native(),
        };
        let bf16 = precision == Precision::Bf16;
        let native = self.client.properties().supports_type(half);
        let (elem, size) = if native { (half, 2) } else { (f32s, 4) };
        let buffer = self.scratch(len * size)?;
        let to = Self::whole(&buffer);
        if native {
            let (count, dim) = self.each(len.div_ceil(2));
            bytes::narrow::launch(&self.client, count, dim, x.arg(), to.arg(), scale, u32_of(len), bf16);
        } else {
            let (count, dim) = self.each(len);
            bytes::round::launch(&self.client, count, dim, x.arg(), to.arg(), scale, u32_of(len), bf16);
        }
        Ok((Matrix::new(&to, elem, rows, cols, transposed), Some(buffer)))
    }

    /// Computes `c = a b`, or `c += a b`, and then `fuse`.
    pub(super) fn matmul(
        &self,
        [(a, a_t), (b, b_t)]: [(&View<'_>, bool); 2],
        precision: Precision,
        scales: [f32; 2],
        c: &ViewMut<'_>,
        accumulate: bool,
        fuse: Fuse<'_>,
    ) -> Result<()> {
        let (m, n) = (c.shape().rows(), c.shape().cols());
        let len = m * n;
        let (x, y, out) = (self.read(a)?, self.read(b)?, self.write(c)?);
        if a.is_empty() {
            if !accumulate {
                self.fill(&out, len, 0.0);
            }
        } else {
            let (left, left_copy) = self.in_precision(&x, a, a_t, precision, scales[0])?;
            let (right, right_copy) = self.in_precision(&y, b, b_t, precision, scales[1])?;
            // Operands rounded in f32 are already divided by their scale; the product of 16-bit operands is
            // not.
            let of = |m: &Matrix, scale| if m.elem == f32::elem_type_native() { 1.0 } else { scale };
            let factor: f32 = 1.0 / of(&left, scales[0]) / of(&right, scales[1]);
            let result = |to: &Operand| Matrix::new(to, f32::elem_type_native(), m, n, false);
            if accumulate {
                let scratch = self.scratch(len * 4)?;
                let sum = Self::whole(&scratch);
                self.product(&left, &right, &result(&sum))?;
                let (count, dim) = self.each(len);
                matmul::add::launch(&self.client, count, dim, out.arg(), sum.arg(), factor, u32_of(len));
                self.pool.give(scratch);
            } else {
                self.product(&left, &right, &result(&out))?;
                if (factor - 1.0).abs() > 0.0 {
                    let (count, dim) = self.each(len);
                    matmul::scale::launch(&self.client, count, dim, out.arg(), factor, u32_of(len));
                }
            }
            for copy in [left_copy, right_copy].into_iter().flatten() {
                self.pool.give(copy);
            }
        }
        let (count, dim) = self.each(len);
        let (len, cols) = (u32_of(len), u32_of(n));
        match fuse {
            Fuse::None => {}
            Fuse::Bias(bias) => {
                let bias = self.read(&bias)?;
                matmul::add_bias::launch(&self.client, count, dim, out.arg(), bias.arg(), len, cols);
                self.write_back([bias]);
            }
            Fuse::BiasGelu { gelu, bias, slope } => {
                let bias = self.read(&bias)?;
                let keep = slope.is_some();
                let slope = slope.map(|s| self.write(&s)).transpose()?;
                let to = slope.as_ref().unwrap_or(&bias).arg();
                matmul::add_bias_gelu::launch(
                    &self.client,
                    count,
                    dim,
                    out.arg(),
                    bias.arg(),
                    to,
                    len,
                    cols,
                    keep,
                    gelu == Gelu::Erf,
                );
                self.write_back([bias].into_iter().chain(slope));
            }
            Fuse::Add { residual } => {
                let residual = self.read(&residual)?;
                matmul::add::launch(&self.client, count, dim, out.arg(), residual.arg(), 1.0, len);
                self.write_back([residual]);
            }
            Fuse::BiasAdd { bias, residual } => {
                let (bias, residual) = (self.read(&bias)?, self.read(&residual)?);
                let args = (out.arg(), bias.arg(), residual.arg());
                matmul::add_bias_residual::launch(
                    &self.client,
                    count,
                    dim,
                    args.0,
                    args.1,
                    args.2,
                    len,
                    cols,
                );
                self.write_back([bias, residual]);
            }
            Fuse::Times { factor } => {
                let factor = self.read(&factor)?;
                matmul::times::launch(&self.client, count, dim, out.arg(), factor.arg(), len);
                self.write_back([factor]);
            }
        }
        self.write_back([x, y, out]);
        Ok(())
    }
}
