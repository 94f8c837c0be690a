//! A transformer block as a graph of operators over a mesh of devices: the ways to divide each operator, and
//! the costs of changing layouts.

use farflung_base::{Bytes, Link, Nanos};

use super::{Operator, OperatorEdge, OperatorGraph, OperatorStrategy};
use crate::TensorEfficiency;

/// Sizes of a block and its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// Number of tokens in a microbatch.
    pub tokens: u64,
    /// Number of tokens in a sequence.
    pub context: u64,
    /// Number of values in a hidden state.
    pub width: u64,
    /// Number of heads of queries.
    pub queries: u64,
    /// Number of heads of keys and values. Columns are divided only between them.
    pub heads: u64,
    /// Values of a token's queries, keys and values.
    pub qkv: u64,
    /// Values of a token's queries, and of the output of attention.
    pub attended: u64,
    /// Inner width of the feed-forward network.
    pub inner: u64,
    /// Whether the feed-forward network has a gate beside its first matrix.
    pub gated: bool,
    /// Vectors of a norm: gain, and bias if there is one.
    pub vectors: u64,
}

#[cfg(test)]
impl BlockShape {
    /// Returns GPT-2's block.
    pub(super) const fn gpt(tokens: u64, context: u64, width: u64, heads: u64) -> Self {
        let (qkv, inner) = (3 * width, 4 * width);
        Self {
            tokens,
            context,
            width,
            queries: heads,
            heads,
            qkv,
            attended: width,
            inner,
            gated: false,
            vectors: 2,
        }
    }
}

/// One axis of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshAxis {
    /// Number of devices.
    pub size: u32,
    /// Link between two devices along the axis.
    pub link: Link,
}

/// Equal devices along two axes. An axis with one device has no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMesh {
    /// The axes.
    pub axes: [MeshAxis; 2],
    /// Operations per second of each device.
    pub flops: u64,
    /// Percentage of that speed that remains when products are divided.
    pub efficiency: TensorEfficiency,
    /// Number of microbatches per average of gradients.
    pub microbatches: u32,
}

/// How the devices along one axis of the mesh divide an operator or a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Not divided: all devices along the axis have, or compute, the same.
    Whole,
    /// Divided by tokens.
    Rows,
    /// Divided by columns of the output.
    Columns,
    /// Divided by columns of the input, over which a product sums.
    Inner,
}

/// How each of the two axes divides an operator or a tensor.
type Cuts = [Cut; 2];

/// An operator with the layouts of its input and output.
struct Shaped {
    operator: Operator,
    /// Layout of the input, and below of the output, for each strategy.
    takes: Vec<Cuts>,
    gives: Vec<Cuts>,
}

/// Memory that an operator needs on devices.
struct Held<W> {
    /// Function from a division to the bytes of weights on each device.
    weights: W,
    /// Number of f32 values per token kept for the backward pass.
    kept: u64,
    /// Whether the input has the same layout as the output.
    same_layout: bool,
}

struct Maker<'a> {
    shape: &'a BlockShape,
    mesh: &'a DeviceMesh,
}

const F32: u64 = 4;

/// Builds the graph of a block. On each axis of the mesh, an operator can be undivided or divided as follows:
/// products by tokens (data parallelism), by output columns or by input columns (Megatron's two kinds);
/// attention by tokens or heads; norms by tokens; sums of the residual stream in any way. The block's output is
/// the next block's input.
///
/// Costs are for one microbatch, forward and backward, in f32: computation, ring collectives, and a
/// microbatch's share of the average of gradients. A change of layout is paid in both directions. Activations
/// are those that farflung's trainer keeps, for GPT-2 `16 width + heads + 4` values per token if nothing is
/// divided.
#[must_use]
pub fn block(shape: &BlockShape, mesh: &DeviceMesh) -> OperatorGraph {
    let maker = Maker { shape, mesh };
    let BlockShape { width, qkv, attended, inner, .. } = *shape;
    let wider = if shape.gated { 2 * inner } else { inner };
    let operators = [
        maker.layouts("input"),
        maker.norm("norm of attention"),
        maker.product("queries, keys, values", width, qkv, true, width),
        maker.attention(),
        maker.product("output of attention", attended, width, false, attended),
        maker.layouts("sum behind attention"),
        maker.norm("norm of feed-forward"),
        maker.product("feed-forward, wider", width, wider, false, width),
        // Keeps two buffers: the input of the product and the slope of the activation, or gate and factor.
        maker.product("feed-forward, back", inner, width, false, 2 * inner),
        maker.layouts("sum behind feed-forward"),
    ];
    let edge = |from: usize, to: usize, columns: u64| maker.edge(&operators, from, to, columns);
    let edges = vec![
        edge(0, 1, width),
        edge(1, 2, width),
        edge(2, 3, qkv),
        edge(3, 4, attended),
        edge(4, 5, width),
        edge(0, 5, width),
        edge(5, 6, width),
        edge(6, 7, width),
        edge(7, 8, inner),
        edge(8, 9, width),
        edge(5, 9, width),
        edge(9, 0, width),
    ];
    OperatorGraph { operators: operators.into_iter().map(|shaped| shaped.operator).collect(), edges }
}

impl Maker<'_> {
    /// Returns every combination of these divisions on the two axes. An axis with one device never divides.
    fn ways(&self, cuts: &[Cut]) -> Vec<Cuts> {
        let of = |axis: usize| if self.mesh.axes[axis].size > 1 { cuts } else { &[Cut::Whole][..] };
        of(0).iter().flat_map(|&a| of(1).iter().map(move |&b| [a, b])).collect()
    }

    /// Returns the number of parts into which the axes with this kind of division divide an operator.
    fn parts(&self, cuts: Cuts, cut: Cut) -> u64 {
        let size = |axis: usize| if cuts[axis] == cut { u64::from(self.mesh.axes[axis].size) } else { 1 };
        size(0) * size(1)
    }

    /// Returns the time of operations that are divided over all axes that are not whole.
    fn compute(&self, operations: u64, cuts: Cuts) -> Nanos {
        let all = u64::from(self.mesh.axes[0].size) * u64::from(self.mesh.axes[1].size);
        let thinner = self.parts(cuts, Cut::Columns) * self.parts(cuts, Cut::Inner);
        let percent = self.mesh.efficiency.percent(thinner as u32);
        let operations = u128::from(operations) * 100 / u128::from(percent);
        let rate = u128::from(self.mesh.flops.max(1)) * u128::from(all / self.parts(cuts, Cut::Whole));
        Nanos(u64::try_from(operations * 1_000_000_000 / rate).unwrap_or(u64::MAX))
    }

    /// Returns the time of `rounds (n - 1)` messages of an n-th of `bytes` around an axis.
    fn ring(&self, axis: usize, bytes: u64, rounds: u64) -> Nanos {
        let MeshAxis { size, link } = self.mesh.axes[axis];
        let part = link.time(Bytes(bytes.div_ceil(u64::from(size))));
        Nanos(part.0.saturating_mul(rounds * u64::from(size - 1)))
    }

    /// Creates an operator with a strategy for each of these divisions.
    fn shaped(
        &self,
        name: &str,
        ways: &[Cuts],
        cost: impl Fn(Cuts) -> Nanos,
        held: &Held<impl Fn(Cuts) -> u64>,
    ) -> Shaped {
        let inner_or_whole = |cut: Cut| if cut == Cut::Inner { Cut::Columns } else { Cut::Whole };
        let takes = |cuts: Cuts| cuts.map(|cut| if cut == Cut::Rows { cut } else { inner_or_whole(cut) });
        let gives = |cuts: Cuts| cuts.map(|cut| if cut == Cut::Inner { Cut::Whole } else { cut });
        // Kept values have the layout of the input. In attention, columns of heads stay on their device.
        let kept = |cuts: Cuts| {
            let taken = if held.same_layout { cuts } else { takes(cuts) };
            let parts = self.parts(taken, Cut::Rows) * self.parts(taken, Cut::Columns);
            (self.shape.tokens * held.kept * F32).div_ceil(parts)
        };
        let strategies = ways.iter().map(|&cuts| OperatorStrategy {
            name: self.name(cuts),
            cost: cost(cuts),
            weights: Bytes((held.weights)(cuts)),
            activations: Bytes(kept(cuts)),
        });
        let operator = Operator { name: name.to_owned(), strategies: strategies.collect() };
        let layouts = |of: &dyn Fn(Cuts) -> Cuts| ways.iter().map(|&cuts| of(cuts)).collect();
        let takes = if held.same_layout { ways.to_vec() } else { layouts(&takes) };
        Shaped { takes, gives: layouts(&gives), operator }
    }

    fn name(&self, cuts: Cuts) -> String {
        let word = |axis: usize| match cuts[axis] {
            Cut::Whole => "whole",
            Cut::Rows => "tokens",
            Cut::Columns => "columns",
            Cut::Inner => "inner",
        };
        let used = (0..2).filter(|&axis| self.mesh.axes[axis].size > 1).map(word);
        let words: Vec<&str> = used.collect();
        if words.is_empty() { "alone".to_owned() } else { words.join(" x ") }
    }

    /// Creates an operator without work that only has a layout.
    fn layouts(&self, name: &str) -> Shaped {
        let ways = self.ways(&[Cut::Whole, Cut::Rows, Cut::Columns]);
        let held = Held { weights: |_| 0, kept: 0, same_layout: true };
        self.shaped(name, &ways, |_| Nanos::ZERO, &held)
    }

    fn norm(&self, name: &str) -> Shaped {
        let vectors = self.shape.vectors * self.shape.width;
        let gradients = |cuts: Cuts| {
            let on = (0..2).filter(|&axis| cuts[axis] == Cut::Rows);
            on.map(|axis| self.ring(axis, vectors * F32, 2)).sum::<Nanos>()
        };
        let average = |cuts| Nanos(gradients(cuts).0 / u64::from(self.mesh.microbatches.max(1)));
        // Keeps the input, its mean and its deviation.
        let held = Held { weights: |_| vectors * F32, kept: self.shape.width + 2, same_layout: false };
        self.shaped(name, &self.ways(&[Cut::Whole, Cut::Rows]), average, &held)
    }

    /// Creates the product of tokens with a matrix of `inner` by `columns`. With `by_heads`, columns are
    /// divided only between heads. Keeps `kept` values per token for the backward pass.
    fn product(&self, name: &str, inner: u64, columns: u64, by_heads: bool, kept: u64) -> Shaped {
        let tokens = self.shape.tokens;
        let mut ways = self.ways(&[Cut::Whole, Cut::Rows, Cut::Columns, Cut::Inner]);
        let grain = if by_heads { self.shape.heads } else { columns };
        ways.retain(|&cuts| {
            grain.is_multiple_of(self.parts(cuts, Cut::Columns))
                && inner.is_multiple_of(self.parts(cuts, Cut::Inner))
        });
        let local = |cuts: Cuts, value: u64, cut: Cut| value.div_ceil(self.parts(cuts, cut));
        let cost = |cuts: Cuts| {
            let (rows, wide, deep) = (
                local(cuts, tokens, Cut::Rows),
                local(cuts, columns, Cut::Columns),
                local(cuts, inner, Cut::Inner),
            );
            let collective = |axis: usize| match cuts[axis] {
                Cut::Whole => Nanos::ZERO,
                // Time to average the gradients of the weights.
                Cut::Rows => {
                    Nanos(self.ring(axis, deep * wide * F32, 2).0 / u64::from(self.mesh.microbatches.max(1)))
                }
                // A product divided by output columns sums the gradient of its input; one divided by input
                // columns sums its output.
                Cut::Columns => self.ring(axis, rows * deep * F32, 2),
                Cut::Inner => self.ring(axis, rows * wide * F32, 2),
            };
            self.compute(6 * tokens * inner * columns, cuts)
                .saturating_add(collective(0))
                .saturating_add(collective(1))
        };
        let weights = |cuts: Cuts| local(cuts, columns, Cut::Columns) * local(cuts, inner, Cut::Inner) * F32;
        self.shaped(name, &ways, cost, &Held { weights, kept, same_layout: false })
    }

    fn attention(&self) -> Shaped {
        let BlockShape { tokens, context, queries, heads, qkv, attended, .. } = *self.shape;
        let mut ways = self.ways(&[Cut::Whole, Cut::Rows, Cut::Columns]);
        ways.retain(|&cuts| heads.is_multiple_of(self.parts(cuts, Cut::Columns)));
        let cost = |cuts| self.compute(12 * tokens * context * attended, cuts);
        // Keeps queries, keys, values, and the logarithm of each head's sum.
        self.shaped(
            "attention",
            &ways,
            cost,
            &Held { weights: |_| 0, kept: qkv + queries, same_layout: true },
        )
    }

    /// Creates the edge for a tensor of `columns` columns between two operators.
    fn edge(&self, operators: &[Shaped], from: usize, to: usize, columns: u64) -> OperatorEdge {
        let bytes = self.shape.tokens * columns * F32;
        let both = |&a: &Cuts, &b: &Cuts| self.change(bytes, a, b).saturating_add(self.change(bytes, b, a));
        let row = |a: &Cuts| operators[to].takes.iter().map(|b| both(a, b)).collect();
        OperatorEdge { from, to, change: operators[from].gives.iter().map(row).collect() }
    }

    /// Returns the time to change a layout. Along an axis that divided the tensor and no longer does, devices
    /// gather the parts. Along an axis that divides it in another way, devices exchange parts.
    fn change(&self, bytes: u64, from: Cuts, to: Cuts) -> Nanos {
        let one = |axis: usize| {
            if from[axis] == to[axis] || from[axis] == Cut::Whole {
                return Nanos::ZERO;
            }
            let other =
                if from[1 - axis] == Cut::Whole { 1 } else { u64::from(self.mesh.axes[1 - axis].size) };
            let gathered = bytes.div_ceil(other);
            match to[axis] {
                Cut::Whole => self.ring(axis, gathered, 1),
                _ => self.ring(axis, gathered.div_ceil(u64::from(self.mesh.axes[axis].size)), 1),
            }
        };
        one(0).saturating_add(one(1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::choose;
    use super::*;

    fn mesh(link: &str, size: u32, microbatches: u32) -> DeviceMesh {
        let axis = |size| MeshAxis { size, link: link.parse().unwrap() };
        DeviceMesh {
            axes: [axis(1), axis(size)],
            flops: 10_000_000_000_000,
            efficiency: TensorEfficiency::default(),
            microbatches,
        }
    }

    fn chosen(shape: &BlockShape, mesh: &DeviceMesh) -> Vec<String> {
        let graph = block(shape, mesh);
        let found = choose(&graph).unwrap();
        let name = |(operator, &at): (&Operator, &usize)| operator.strategies[at].name.clone();
        graph.operators.iter().zip(&found.strategies).map(name).collect()
    }

    /// With many tokens and few weights, data parallelism is chosen. With few tokens and many weights,
    /// Megatron's division by columns, then by rows of the matrix (`inner`), is chosen.
    #[test]
    fn tokens_or_weights_travel_whichever_are_fewer() {
        let many = BlockShape::gpt(65_536, 128, 256, 4);
        assert!(chosen(&many, &mesh("10gbit,1us", 4, 1)).iter().all(|name| name == "tokens"));
        let few = BlockShape::gpt(128, 128, 4096, 32);
        let mut mesh = mesh("100gbit,1us", 4, 1);
        let names = chosen(&few, &mesh);
        for (at, cut) in [(2, "columns"), (3, "columns"), (4, "inner"), (7, "columns"), (8, "inner")] {
            assert_eq!(names[at], cut, "{names:?}");
        }
        // Products that run much slower when divided are not divided.
        mesh.efficiency = TensorEfficiency::new(vec![20, 3]).unwrap();
        assert!(chosen(&few, &mesh).iter().all(|name| !["columns", "inner"].contains(&name.as_str())));
    }

    /// The communication of Megatron's block is four sums of the hidden states and nothing else, if norms and
    /// residuals are whole.
    #[test]
    fn megatrons_cuts_cost_four_sums() {
        let shape = BlockShape::gpt(512, 128, 1024, 16);
        let mesh = mesh("100gbit,1us", 8, 1);
        let graph = block(&shape, &mesh);
        let cuts =
            ["whole", "whole", "columns", "columns", "inner", "whole", "whole", "columns", "inner", "whole"];
        let at = |(operator, cut): (&Operator, &&str)| {
            operator.strategies.iter().position(|strategy| strategy.name == **cut).unwrap()
        };
        let choice: Vec<usize> = graph.operators.iter().zip(&cuts).map(at).collect();
        let operations = 6_u64 * 512 * 12 * 1024 * 1024 + 12 * 512 * 128 * 1024;
        let computing = operations as f64 / 8.0 / 10e12;
        let part = mesh.axes[1].link.time(Bytes(512 * 1024 * 4 / 8)).as_secs_f64();
        let sums = 4.0 * 2.0 * 7.0 * part;
        let cost = graph.cost(&choice).as_secs_f64();
        assert!((cost / (computing + sums) - 1.0).abs() < 1e-4, "{cost} {computing} {sums}");
        assert!(choose(&graph).unwrap().cost <= graph.cost(&choice));
    }

    /// Returns the bytes that each device keeps.
    fn kept(graph: &OperatorGraph, cuts: &[&str]) -> u64 {
        let of = |(operator, cut): (&Operator, &&str)| {
            operator.strategies.iter().find(|strategy| strategy.name == **cut).unwrap().activations.0
        };
        graph.operators.iter().zip(cuts).map(of).sum()
    }

    /// An undivided block keeps the same activations as the trainer. Megatron's division divides the tensors
    /// between two products, but not the inputs of norms and first products.
    #[test]
    fn activations_are_kept_as_they_go_in() {
        let shape = BlockShape::gpt(512, 128, 1024, 16);
        let alone = block(&shape, &mesh("1gbit,1us", 1, 1));
        let values = 16 * 1024 + 16 + 4;
        assert_eq!(kept(&alone, &["alone"; 10]), 512 * F32 * values);
        let eight = block(&shape, &mesh("1gbit,1us", 8, 1));
        assert_eq!(kept(&eight, &["tokens"; 10]), 512 * F32 * values / 8);
        let megatron =
            ["whole", "whole", "columns", "columns", "inner", "whole", "whole", "columns", "inner", "whole"];
        let whole = 4 * 1024 + 4;
        assert_eq!(kept(&eight, &megatron), 512 * F32 * (whole + (12 * 1024 + 16) / 8));
    }

    #[test]
    fn two_axes_and_one_device() {
        let shape = BlockShape::gpt(4096, 512, 512, 8);
        assert!(chosen(&shape, &mesh("1gbit,1us", 1, 1)).iter().all(|name| name == "alone"));
        let axis = |size, link: &str| MeshAxis { size, link: link.parse().unwrap() };
        let mesh = DeviceMesh {
            axes: [axis(2, "10gbit,10us"), axis(4, "400gbit,1us")],
            flops: 10_000_000_000_000,
            efficiency: TensorEfficiency::default(),
            microbatches: 64,
        };
        // Between machines, tokens are divided.
        let names = chosen(&shape, &mesh);
        assert!(names[2].starts_with("tokens x ") && names[7].starts_with("tokens x "), "{names:?}");
    }
}
