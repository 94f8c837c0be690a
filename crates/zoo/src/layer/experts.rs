//! A mixture of experts in place of a feed-forward network: a router chooses some experts for each token, and
//! their outputs are added with its weights (Shazeer et al. 2017, "Outrageously Large Neural Networks").
//!
//! Tokens are taken to the rows of their experts, so that each expert is a few matrix products over its own
//! rows. The router's logits are read on the host, where [`super::routing`] decides. Ranks that divide the
//! width have columns of each expert; each has the whole router.

use std::ops::Range;

use farflung_tensor::{Fuse, Op, Precision, ProgramBuilder, Tensor, TensorError, View, ViewMut};

use super::builder::Builder;
use super::dispatch::{Arrived, Dispatch};
use super::linear::{Side, Units};
use super::routing::{PassShape, Routing};
use super::{Activations, Grads, Kept, Linear, Result, StageContext, Then, dims};
use crate::cut::Cut;
use crate::exchange::Axis;
use crate::naming::Slot;
use crate::spec::{ExpertsSpec, MlpSpec};
use crate::tensor_spec::{ColumnOrder, TensorKind};

/// A mixture of experts.
#[derive(Debug, Clone)]
pub struct Experts {
    spec: ExpertsSpec,
    /// Index of the router's matrix `[C, E]` in the layout.
    router: usize,
    /// This rank's experts.
    own: Vec<Expert>,
    /// The experts of each rank along the view of experts.
    ranges: Vec<Range<usize>>,
    /// Width of a token, and this rank's part of the inner width.
    dim: usize,
    width: usize,
}

/// One expert: `down(silu(gate x) * up x)`, or `down(relu(up x))`.
#[derive(Debug, Clone, Copy)]
struct Expert {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

/// The choices of a pass, as ops take them.
struct Routes {
    routing: Routing,
    /// The token of each row: `[N K, 1]`.
    tokens: Tensor,
    /// The rows of each token: `[N, K]`.
    rows: Tensor,
}

impl Experts {
    pub(super) fn new(builder: &mut Builder, dim: usize, mlp: &MlpSpec, spec: &ExpertsSpec) -> Self {
        let plain = ColumnOrder::AsInMemory;
        let (ranges, rank) = builder.expert_ranges(spec.count);
        let router =
            builder.cut_tensor((Slot::Router, TensorKind::Router), &[dim, spec.count], Cut::Whole, plain);
        let width = mlp.width;
        let mut own = Vec::new();
        for expert in 0..spec.count {
            let is_own = ranges[rank].contains(&expert);
            let made = builder.only_if(is_own, |builder| {
                let mut linear = |slot, side| {
                    let units = Units { side, count: width, sections: &[width], columns: plain };
                    Linear::of_kind(builder, (slot, TensorKind::Expert), dim, units, false)
                };
                Expert {
                    gate: mlp.gated.then(|| linear(Slot::ExpertGate(expert), Side::Outputs)),
                    up: linear(Slot::ExpertUp(expert), Side::Outputs),
                    down: linear(Slot::ExpertDown(expert), Side::Inputs),
                }
            });
            own.extend(is_own.then_some(made));
        }
        Self { spec: *spec, router, own, ranges, dim, width: builder.units(width).len() }
    }

    /// Returns the index of the last parameter of the mixture, plus one.
    pub(super) fn end(&self) -> usize {
        let last = self.own.last().map(|expert| expert.down.params());
        last.map_or(self.router + 1, |(first, count)| first + count)
    }

    fn is_gated(&self) -> bool {
        self.own.iter().any(|expert| expert.gate.is_some())
    }

    /// Returns this rank's experts with the rows of their tokens, without those that have none.
    fn busy<'a>(&'a self, arrived: &'a Arrived) -> impl Iterator<Item = (&'a Expert, Range<usize>)> {
        let all = self.own.iter().zip(arrived.groups.iter().cloned());
        all.filter(|(_, rows)| !rows.is_empty())
    }

    /// Computes the router's product: `c = a b`, in f32.
    fn router_product(
        cx: &StageContext<'_>,
        (a, a_t): (&Tensor, bool),
        (b, b_t): (View<'_>, bool),
        (c, accumulate): (ViewMut<'_>, bool),
    ) -> Result<()> {
        let (a, scales, fuse) = (a.view(), [1.0; 2], Fuse::None);
        let device = cx.device.with_precision(Precision::F32);
        Ok(device.run(Op::MatMul { a, a_t, b, b_t, c, accumulate, scales, fuse })?)
    }

    /// Returns the choices for the router's logits.
    fn routes(&self, cx: &StageContext<'_>, logits: &Tensor) -> Result<Routes> {
        let [sequences, tokens, _] = dims(logits)?;
        let shape = PassShape { sequences, tokens };
        let routing = if cx.device.is_counting() {
            Routing::even(&self.spec, shape)
        } else {
            Routing::new(&self.spec, shape, &logits.to_vec::<f32>()?)
        };
        let tokens = cx.device.tensor(&routing.tokens, [routing.tokens.len(), 1])?;
        let rows = cx.device.tensor(&routing.rows, [shape.all(), self.spec.per_token])?;
        Ok(Routes { routing, tokens, rows })
    }

    /// Returns the tokens at the rows of their experts: `[N K, C]`.
    fn at_rows(
        cx: &StageContext<'_>,
        x: &Tensor,
        routes: &Routes,
        weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [b, t, c] = dims(x)?;
        let mut y = cx.empty([routes.tokens.shape().len(), c])?;
        cx.device.run(Op::CombineRows {
            x: x.view().reshape([b * t, c])?,
            rows: routes.tokens.view(),
            factors: weights.map(Tensor::view),
            add: None,
            y: y.view_mut(),
        })?;
        Ok(y)
    }

    /// Returns the output for `x`, and `then` what is added to it.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        then: &Then<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let [b, t, c] = dims(x)?;
        let mut logits = cx.empty([b, t, self.spec.count])?;
        let router = cx.param(self.router)?;
        Self::router_product(cx, (x, false), (router, false), (logits.view_mut(), false))?;
        let routes = self.routes(cx, &logits)?;
        let routing = &routes.routing;
        let dispatch = Dispatch::new(cx, &self.ranges, routing);
        let (inputs, arrived) = dispatch.send(Self::at_rows(cx, x, &routes, None)?)?;
        let mut up = cx.empty([arrived.room, self.width])?;
        let mut gate = self.is_gated().then(|| cx.empty(up.shape())).transpose()?;
        for (expert, rows) in self.busy(&arrived) {
            let x = part(&inputs, &rows, self.dim)?;
            expert.up.rows_forward(cx, x, part_mut(&mut up, &rows, self.width)?)?;
            if let (Some(linear), Some(gate)) = (&expert.gate, &mut gate) {
                linear.rows_forward(cx, x, part_mut(gate, &rows, self.width)?)?;
            }
        }
        match arrived.counts(cx)? {
            Some(counts) => {
                saved.put(Kept::ExpertInputs, inputs);
                saved.put(Kept::ArrivedCounts, counts);
            }
            None => drop(inputs),
        }
        let used = arrived.used();
        let activated = if let Some(gate) = &gate {
            let mut product = cx.empty(up.shape())?;
            cx.device.run(Op::SwiGlu {
                gate: part(gate, &used, self.width)?,
                up: part(&up, &used, self.width)?,
                y: part_mut(&mut product, &used, self.width)?,
            })?;
            saved.put(Kept::Up, up);
            product
        } else {
            relu(cx, part_mut(&mut up, &used, self.width)?)?;
            up
        };
        let mut outputs = cx.empty([arrived.room, c])?;
        for (expert, rows) in self.busy(&arrived) {
            let x = part(&activated, &rows, self.width)?;
            expert.down.rows_forward(cx, x, part_mut(&mut outputs, &rows, c)?)?;
        }
        match gate {
            Some(gate) => saved.put(Kept::Gate, gate),
            None => saved.put(Kept::Activated, activated),
        }
        let outputs = dispatch.back(outputs, &arrived)?;
        let adds = cx.exchange.rank(Axis::Tensor) == 0;
        let add = match then {
            Then::Nothing => None,
            Then::Add(residual) => adds.then_some(*residual),
            Then::AddPart(part) => Some(*part),
            Then::Gelu(..) => unreachable!("no activation follows a feed-forward network"),
        };
        let weights = cx.device.tensor(routing.weights(), routes.rows.shape())?;
        let mut y = cx.empty([b, t, c])?;
        cx.device.run(Op::CombineRows {
            x: outputs.view(),
            rows: routes.rows.view(),
            factors: Some(weights.view()),
            add: add.map(|add| add.view().reshape([b * t, c])).transpose()?,
            y: y.view_mut().reshape([b * t, c])?,
        })?;
        cx.sum(&mut y)?;
        saved.put(Kept::ExpertOutputs, outputs);
        if saved.keeps() {
            saved.routed = Some(routing.routed());
        }
        saved.put(Kept::RouterLogits, logits);
        Ok(y)
    }

    /// Returns the gradient of the input, given that of the output. If ranks divide the experts, it is this
    /// rank's part of the sum.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let [b, t, c] = dims(dy)?;
        let routes = self.routes(cx, saved.get(Kept::RouterLogits))?;
        let routing = &routes.routing;
        let count = routing.rows.len();
        let d_logits = self.d_logits(cx, &routes, &saved.take(Kept::ExpertOutputs), dy)?;
        let weights = cx.device.tensor(&routing.weights_of_rows(), [count, 1])?;
        let dispatch = Dispatch::new(cx, &self.ranges, routing);
        let (d_outputs, arrived) = dispatch.send(Self::at_rows(cx, dy, &routes, Some(&weights))?)?;
        let mut d_activated = cx.empty([arrived.room, self.width])?;
        for (expert, rows) in self.busy(&arrived) {
            let (dy, dx) = (part(&d_outputs, &rows, c)?, part_mut(&mut d_activated, &rows, self.width)?);
            expert.down.rows_backward(cx, dy, dx, false)?;
        }
        let used = arrived.used();
        let mut d_rows = cx.empty([arrived.room, c])?;
        if self.is_gated() {
            let (mut d_gate, mut d_up) = (saved.take(Kept::Gate), saved.take(Kept::Up));
            cx.device.run(Op::SwiGluGrad {
                gate: part_mut(&mut d_gate, &used, self.width)?,
                up: part_mut(&mut d_up, &used, self.width)?,
                dy: part_mut(&mut d_activated, &used, self.width)?,
            })?;
            for (expert, rows) in self.busy(&arrived) {
                let [of_gate, of_up] = [&d_gate, &d_up].map(|d| part(d, &rows, self.width));
                expert.up.rows_backward(cx, of_up?, part_mut(&mut d_rows, &rows, c)?, false)?;
                if let Some(gate) = &expert.gate {
                    gate.rows_backward(cx, of_gate?, part_mut(&mut d_rows, &rows, c)?, true)?;
                }
            }
            saved.put(Kept::Gate, d_gate);
            saved.put(Kept::Up, d_up);
            // The op has overwritten it by the output of the activation.
            saved.put(Kept::Activated, d_activated);
        } else {
            let activated = part(saved.get(Kept::Activated), &used, self.width)?;
            relu_grad(cx, activated, part_mut(&mut d_activated, &used, self.width)?)?;
            for (expert, rows) in self.busy(&arrived) {
                let (dy, dx) = (part(&d_activated, &rows, self.width)?, part_mut(&mut d_rows, &rows, c)?);
                expert.up.rows_backward(cx, dy, dx, false)?;
            }
            saved.put(Kept::UpGrad, d_activated);
        }
        let d_rows = dispatch.back(d_rows, &arrived)?;
        // Each rank has the whole router; one of them adds its part.
        let mut dx = cx.empty([b, t, c])?;
        let adds = cx.exchange.rank(Axis::Tensor) == 0;
        let mut of_router = adds.then(|| cx.empty([b, t, c])).transpose()?;
        if let Some(of_router) = &mut of_router {
            let router = cx.param(self.router)?;
            Self::router_product(cx, (&d_logits, false), (router, true), (of_router.view_mut(), false))?;
        }
        cx.device.run(Op::CombineRows {
            x: d_rows.view(),
            rows: routes.rows.view(),
            factors: None,
            add: of_router.as_ref().map(|add| add.view().reshape([b * t, c])).transpose()?,
            y: dx.view_mut().reshape([b * t, c])?,
        })?;
        saved.put(Kept::RouterGrad, d_logits);
        saved.put(Kept::ExpertOutputGrad, d_outputs);
        Ok(dx)
    }

    /// Returns the gradient of the router's logits, from the experts' outputs and the gradient of the
    /// mixture's.
    fn d_logits(
        &self,
        cx: &StageContext<'_>,
        routes: &Routes,
        outputs: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let [b, t, c] = dims(dy)?;
        let mut d_weights = cx.empty([1, routes.routing.rows.len()])?;
        cx.device.run(Op::RowDots {
            a: outputs.view(),
            b: dy.view().reshape([b * t, c])?,
            rows: routes.tokens.view(),
            y: d_weights.view_mut(),
        })?;
        cx.sum(&mut d_weights)?;
        let d_logits = routes.routing.d_logits(&d_weights.to_vec::<f32>()?, cx.router);
        Ok(cx.device.tensor(&d_logits, [b, t, self.spec.count])?)
    }

    /// Computes the weight gradients, given the input `x`.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: &Activations,
        x: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let d_logits = saved.get(Kept::RouterGrad);
        let accumulate = grads.accumulate();
        let [d_router] = grads.of(cx.layout, self.router)?;
        Self::router_product(cx, (x, true), (d_logits.view(), false), (d_router, accumulate))?;
        let routes = self.routes(cx, saved.get(Kept::RouterLogits))?;
        let counts = (self.ranges.len() > 1).then(|| saved.get(Kept::ArrivedCounts));
        let arrived = Dispatch::new(cx, &self.ranges, &routes.routing).again(counts)?;
        let gathered;
        let inputs = if counts.is_some() {
            saved.get(Kept::ExpertInputs)
        } else {
            gathered = Self::at_rows(cx, x, &routes, None)?;
            &gathered
        };
        let d_outputs = saved.get(Kept::ExpertOutputGrad);
        let (activated, d_up) =
            (saved.get(Kept::Activated), saved.get(if self.is_gated() { Kept::Up } else { Kept::UpGrad }));
        for (expert, rows) in self.own.iter().zip(&arrived.groups) {
            let x = part(inputs, rows, self.dim)?;
            let (inner, dy) = (part(activated, rows, self.width)?, part(d_outputs, rows, self.dim)?);
            expert.down.rows_weight(cx, inner, dy, grads)?;
            expert.up.rows_weight(cx, x, part(d_up, rows, self.width)?, grads)?;
            if let Some(gate) = &expert.gate {
                gate.rows_weight(cx, x, part(saved.get(Kept::Gate), rows, self.width)?, grads)?;
            }
        }
        Ok(())
    }
}

/// Returns some rows of a matrix of `cols` columns.
fn part<'a>(all: &'a Tensor, rows: &Range<usize>, cols: usize) -> std::result::Result<View<'a>, TensorError> {
    all.view().part(rows.start * cols, [rows.len(), cols])
}

/// Returns some rows of a matrix of `cols` columns, to be written.
fn part_mut<'a>(
    all: &'a mut Tensor,
    rows: &Range<usize>,
    cols: usize,
) -> std::result::Result<ViewMut<'a>, TensorError> {
    all.view_mut().part(rows.start * cols, [rows.len(), cols])
}

/// Replaces values by the larger of them and 0.
fn relu(cx: &StageContext<'_>, x: ViewMut<'_>) -> Result<()> {
    let mut p = ProgramBuilder::new();
    let (value, zero) = (p.load(0), p.constant(0.0));
    let larger = p.max(value, zero);
    p.store(0, larger);
    let program = &p.build()?;
    Ok(cx.device.run(Op::Map { program, scalars: &[], reads: &[], writes: &mut [x] })?)
}

/// Replaces gradients of the outputs `y` of [`relu`] by those of its inputs.
fn relu_grad(cx: &StageContext<'_>, y: View<'_>, dy: ViewMut<'_>) -> Result<()> {
    let mut p = ProgramBuilder::new();
    let (output, gradient) = (p.read(0), p.load(0));
    // An output is positive where the input is, and else 0.
    let slope = p.sign(output);
    let product = p.mul(slope, gradient);
    p.store(0, product);
    let program = &p.build()?;
    Ok(cx.device.run(Op::Map { program, scalars: &[], reads: &[y], writes: &mut [dy] })?)
}
