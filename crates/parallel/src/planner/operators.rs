//! Alpa's inner level: chooses by an integer program how each operator of a graph is divided over a mesh of
//! devices.

mod block;

use farflung_base::{Bytes, Nanos};
use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

use crate::ParallelError;
pub use block::{BlockShape, DeviceMesh, MeshAxis, block};

/// One way to compute an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorStrategy {
    /// Name for display.
    pub name: String,
    /// Time of computation and of the strategy's collectives.
    pub cost: Nanos,
    /// Bytes of weights on each device.
    pub weights: Bytes,
    /// Bytes of activations of a microbatch that each device keeps for the backward pass.
    pub activations: Bytes,
}

/// Memory limit of the devices of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes of state per byte of weights: 4 for weights, gradients and two moments.
    pub copies: u64,
    /// Number of microbatches whose activations are kept at the same time.
    pub microbatches: u64,
    /// Memory of each device.
    pub bytes: Bytes,
}

impl MemoryLimit {
    /// Returns the bytes that a strategy needs on each device.
    const fn taken(&self, strategy: &OperatorStrategy) -> u64 {
        let state = strategy.weights.0.saturating_mul(self.copies);
        state.saturating_add(strategy.activations.0.saturating_mul(self.microbatches))
    }
}

/// An operator and the strategies to compute it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operator {
    /// Name for display.
    pub name: String,
    /// The strategies; at least one.
    pub strategies: Vec<OperatorStrategy>,
}

/// A tensor that one operator produces and another uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorEdge {
    /// Index of the producing operator.
    pub from: usize,
    /// Index of the using operator.
    pub to: usize,
    /// Time to change the layout: `[strategy of from][strategy of to]`.
    pub change: Vec<Vec<Nanos>>,
}

/// Operators and the tensors between them. Edges may form cycles: a block's output is the next block's input.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OperatorGraph {
    /// The operators.
    pub operators: Vec<Operator>,
    /// The tensors between operators.
    pub edges: Vec<OperatorEdge>,
}

/// A strategy for each operator, and the total cost.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Sharding {
    /// Index of each operator's strategy.
    pub strategies: Vec<usize>,
    /// Total time of all operators and changes of layout.
    pub cost: Nanos,
}

impl OperatorGraph {
    /// Returns the cost of a choice. [`Nanos::MAX`] if it does not have one valid strategy for each operator.
    #[must_use]
    pub fn cost(&self, strategies: &[usize]) -> Nanos {
        if strategies.len() != self.operators.len() {
            return Nanos::MAX;
        }
        let own =
            self.operators.iter().zip(strategies).map(|(operator, &at)| {
                operator.strategies.get(at).map_or(Nanos::MAX, |strategy| strategy.cost)
            });
        let changes = self.edges.iter().map(|edge| {
            let row = edge.change.get(strategies[edge.from]);
            row.and_then(|row| row.get(strategies[edge.to])).copied().unwrap_or(Nanos::MAX)
        });
        own.chain(changes).fold(Nanos::ZERO, Nanos::saturating_add)
    }

    /// Returns the bytes on each device for a choice. `None` if it does not have one valid strategy for each
    /// operator.
    #[must_use]
    pub fn memory(&self, strategies: &[usize], limit: &MemoryLimit) -> Option<Bytes> {
        let of = |(operator, &at): (&Operator, &usize)| operator.strategies.get(at).map(|s| limit.taken(s));
        let each: Option<Vec<u64>> = self.operators.iter().zip(strategies).map(of).collect();
        let whole = strategies.len() == self.operators.len();
        each.filter(|_| whole).map(|each| Bytes(each.into_iter().fold(0, u64::saturating_add)))
    }

    /// Checks that edges join existing operators and that the sizes of their tables match those operators.
    fn check(&self) -> Result<(), ParallelError> {
        let count = |at: usize| self.operators.get(at).map_or(0, |operator| operator.strategies.len());
        let wrong = |field: &str, value: String, expected: &str| ParallelError::Plan {
            field: field.to_owned(),
            value,
            expected: expected.to_owned(),
        };
        for (at, operator) in self.operators.iter().enumerate() {
            if operator.strategies.is_empty() {
                return Err(wrong(
                    &format!("operators[{at}]"),
                    operator.name.clone(),
                    "at least one strategy",
                ));
            }
        }
        for (at, edge) in self.edges.iter().enumerate() {
            let (rows, columns) = (count(edge.from), count(edge.to));
            let fits = edge.change.len() == rows && edge.change.iter().all(|row| row.len() == columns);
            if rows == 0 || columns == 0 || !fits {
                let value = format!("{} to {}", edge.from, edge.to);
                let expected = "a cost for each pair of strategies of two operators";
                return Err(wrong(&format!("edges[{at}]"), value, expected));
            }
        }
        Ok(())
    }
}

/// Returns the strategies with the least cost.
///
/// Minimises `sum_v s_v (c_v + d_v) + sum_(v,u) s_v R_vu s_u` over one-hot `s_v`. The products are linearised
/// with one variable for each pair of strategies of an edge; their row sums equal `s_v` and their column sums
/// `s_u`. These variables need not be integers, because the one-hot sums leave only one possible value. Source:
/// Zheng et al. 2022, "Alpa", section 4.2, equation 1. The solver computes in f64 with a tolerance of `1e-7`:
/// among choices whose costs differ by less than this fraction of the largest cost, any may be returned.
///
/// Errors: [`ParallelError::Plan`] for an invalid graph, or if the solver fails.
pub fn choose(graph: &OperatorGraph) -> Result<Sharding, ParallelError> {
    graph.check()?;
    let found = solve(graph, None).map_err(|error| gave_up(graph, &error.to_string()))?;
    found.ok_or_else(|| gave_up(graph, "the solver was interrupted"))
}

/// Returns the strategies with the least cost among those that fit in the devices' memory. `None` if there are
/// none.
///
/// As [`choose`] with one more constraint, `sum_v s_v m_v <= limit`. Differs: Alpa's published program has no
/// such constraint and checks memory only for its result, so it rejects a stage for which a slower division
/// would fit.
///
/// Errors: as [`choose`].
pub fn choose_within(graph: &OperatorGraph, limit: &MemoryLimit) -> Result<Option<Sharding>, ParallelError> {
    graph.check()?;
    // Because of its tolerance, the solver may return a choice slightly above the limit. If so, solves again
    // with a lower limit.
    let mut room = *limit;
    loop {
        let found = match solve(graph, Some(&room)) {
            Err(microlp::Error::Infeasible) => return Ok(None),
            found => found.map_err(|error| gave_up(graph, &error.to_string()))?,
        };
        let found = found.ok_or_else(|| gave_up(graph, "the solver was interrupted"))?;
        match graph.memory(&found.strategies, limit) {
            Some(taken) if taken <= limit.bytes => return Ok(Some(found)),
            Some(taken) if room.bytes.0 > 0 => {
                let over = taken.0.saturating_sub(limit.bytes.0);
                room.bytes = Bytes(room.bytes.0.saturating_sub(2 * over.max(1)));
            }
            _ => return Ok(None),
        }
    }
}

fn gave_up(graph: &OperatorGraph, problem: &str) -> ParallelError {
    ParallelError::Plan {
        field: "operators".to_owned(),
        value: format!("{} operators", graph.operators.len()),
        expected: format!("an integer program that can be solved: {problem}"),
    }
}

/// Solves the program. `None` if it was interrupted.
fn solve(graph: &OperatorGraph, limit: Option<&MemoryLimit>) -> Result<Option<Sharding>, microlp::Error> {
    let costs = graph.operators.iter().flat_map(|operator| operator.strategies.iter().map(|s| s.cost.0));
    let changes = graph.edges.iter().flat_map(|edge| edge.change.iter().flatten().map(|change| change.0));
    let largest = costs.chain(changes).max().unwrap_or(0).max(1) as f64;
    let scaled = |cost: Nanos| cost.0 as f64 * 1000.0 / largest;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let mut chosen: Vec<Vec<Variable>> = Vec::new();
    for operator in &graph.operators {
        let each: Vec<Variable> = operator
            .strategies
            .iter()
            .map(|strategy| problem.add_binary_var(scaled(strategy.cost)))
            .collect();
        let one: Vec<(Variable, f64)> = each.iter().map(|&variable| (variable, 1.0)).collect();
        problem.add_constraint(one, ComparisonOp::Eq, 1.0);
        chosen.push(each);
    }
    for edge in &graph.edges {
        let mut pair = |&cost: &Nanos| problem.add_var(scaled(cost), (0.0, 1.0));
        let pairs: Vec<Vec<Variable>> =
            edge.change.iter().map(|row| row.iter().map(&mut pair).collect()).collect();
        let mut equal = |sum: Vec<Variable>, to: Variable| {
            let terms = sum.into_iter().map(|variable| (variable, 1.0)).chain([(to, -1.0)]);
            problem.add_constraint(terms.collect::<Vec<_>>(), ComparisonOp::Eq, 0.0);
        };
        for (row, &from) in pairs.iter().zip(&chosen[edge.from]) {
            equal(row.clone(), from);
        }
        for (column, &to) in chosen[edge.to].iter().enumerate() {
            equal(pairs.iter().map(|row| row[column]).collect(), to);
        }
    }
    if let Some(limit) = limit {
        let of = |(each, operator): (&Vec<Variable>, &Operator)| -> Vec<(Variable, f64)> {
            let share = |s: &OperatorStrategy| limit.taken(s) as f64 / limit.bytes.0.max(1) as f64;
            each.iter().copied().zip(operator.strategies.iter().map(share)).collect()
        };
        let taken: Vec<(Variable, f64)> = chosen.iter().zip(&graph.operators).flat_map(of).collect();
        let room = if limit.bytes.0 == 0 { 0.0 } else { 1.0 };
        problem.add_constraint(taken, ComparisonOp::Le, room);
    }
    let Ok(solution) = problem.solve()?.into_solution() else { return Ok(None) };
    let most = |each: &Vec<Variable>| {
        let value = |at: &usize| solution.var_value(each[*at]);
        (0..each.len()).max_by(|a, b| value(a).total_cmp(&value(b))).unwrap_or(0)
    };
    let strategies: Vec<usize> = chosen.iter().map(most).collect();
    let cost = graph.cost(&strategies);
    Ok(Some(Sharding { strategies, cost }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    const FREE: MemoryLimit = MemoryLimit { copies: 4, microbatches: 3, bytes: Bytes(u64::MAX) };

    /// Returns the least cost over all choices that the limit allows.
    fn by_brute_force(graph: &OperatorGraph, limit: &MemoryLimit) -> Option<Nanos> {
        let counts: Vec<usize> = graph.operators.iter().map(|operator| operator.strategies.len()).collect();
        let choice = |mut number: usize| -> Vec<usize> {
            let digit = |&count: &usize| {
                let digit = number % count;
                number /= count;
                digit
            };
            counts.iter().map(digit).collect()
        };
        let all = 0..counts.iter().product::<usize>();
        let fits = |choice: &Vec<usize>| graph.memory(choice, limit).unwrap() <= limit.bytes;
        all.map(choice).filter(fits).map(|choice| graph.cost(&choice)).min()
    }

    fn random(draw: &mut SeededRng) -> OperatorGraph {
        let mut cost = |bound: usize| Nanos(draw.below(bound) as u64);
        let counts: Vec<usize> = (0..=cost(6).0).map(|_| 1 + cost(4).0 as usize).collect();
        let mut strategy = || OperatorStrategy {
            name: String::new(),
            cost: cost(40),
            weights: Bytes(cost(20).0),
            activations: Bytes(cost(10).0),
        };
        let mut operator = |&count: &usize| Operator {
            name: String::new(),
            strategies: (0..count).map(|_| strategy()).collect(),
        };
        let operators = counts.iter().map(&mut operator).collect();
        let edges = (0..cost(9).0)
            .map(|_| {
                let (from, to) = (cost(counts.len()).0 as usize, cost(counts.len()).0 as usize);
                let change = (0..counts[from]).map(|_| (0..counts[to]).map(|_| cost(60)).collect()).collect();
                OperatorEdge { from, to, change }
            })
            .filter(|edge| edge.from != edge.to)
            .collect();
        OperatorGraph { operators, edges }
    }

    #[test]
    fn no_choice_is_cheaper() {
        let mut draw = SeededRng::new(10, 0);
        for round in 0..300 {
            let graph = random(&mut draw);
            let found = choose(&graph).unwrap();
            assert_eq!(Some(found.cost), by_brute_force(&graph, &FREE), "round {round}: {graph:?}");
            assert_eq!(graph.cost(&found.strategies), found.cost);
        }
    }

    #[test]
    fn no_choice_that_fits_is_cheaper() {
        let mut draw = SeededRng::new(11, 0);
        let (mut none, mut dearer) = (0, 0);
        for round in 0..300 {
            let graph = random(&mut draw);
            let free = choose(&graph).unwrap();
            let all = graph.memory(&free.strategies, &FREE).unwrap().0;
            // The limit is between one fifth and six fifths of the memory of the cheapest choice.
            let limit = MemoryLimit { bytes: Bytes(all * (1 + draw.below(6) as u64) / 5), ..FREE };
            let found = choose_within(&graph, &limit).unwrap();
            let best = by_brute_force(&graph, &limit);
            assert_eq!(found.as_ref().map(|found| found.cost), best, "round {round}: {limit:?} {graph:?}");
            none += u32::from(found.is_none());
            dearer += u32::from(found.is_some_and(|found| found.cost > free.cost));
        }
        assert!((30..200).contains(&none) && dearer > 20, "{none} {dearer}");
    }

    #[test]
    fn a_block_on_four_devices_has_the_least_of_all_choices() {
        let shape = BlockShape::gpt(256, 128, 64, 4);
        let mut seen = std::collections::BTreeSet::new();
        for (link, microbatches) in
            [("100gbit,1us", 1), ("1gbit,50us", 1), ("10gbit,10us", 16), ("1mbit,1ms", 1)]
        {
            let axis = |size| MeshAxis { size, link: link.parse().unwrap() };
            let mesh = DeviceMesh {
                axes: [axis(1), axis(4)],
                flops: 1_000_000_000_000,
                efficiency: crate::TensorEfficiency::default(),
                microbatches,
            };
            let graph = block(&shape, &mesh);
            let found = choose(&graph).unwrap();
            assert_eq!(Some(found.cost), by_brute_force(&graph, &FREE), "{link}");
            let all = graph.memory(&found.strategies, &FREE).unwrap().0;
            for percent in [90, 60, 40] {
                let limit = MemoryLimit { bytes: Bytes(all * percent / 100), ..FREE };
                let within = choose_within(&graph, &limit).unwrap().map(|within| within.cost);
                assert_eq!(within, by_brute_force(&graph, &limit), "{link} {percent}%");
            }
            seen.insert(found.strategies);
        }
        // At different speeds of the links, different strategies are best.
        assert!(seen.len() > 1, "{seen:?}");
    }

    #[test]
    fn graphs_that_are_none_are_refused() {
        let (weights, activations) = (Bytes(2), Bytes(1));
        let strategy = OperatorStrategy { name: String::new(), cost: Nanos(1), weights, activations };
        let operator = Operator { name: "norm".to_owned(), strategies: vec![strategy] };
        let mut graph = OperatorGraph { operators: vec![operator], edges: Vec::new() };
        assert_eq!(choose(&graph).unwrap().cost, Nanos(1));
        for (bytes, fits) in [(0, false), (10, false), (11, true)] {
            let limit = MemoryLimit { bytes: Bytes(bytes), ..FREE };
            assert_eq!(choose_within(&graph, &limit).unwrap().is_some(), fits, "{bytes}");
        }
        graph.edges = vec![OperatorEdge { from: 0, to: 1, change: vec![vec![Nanos(0)]] }];
        assert!(choose(&graph).unwrap_err().to_string().contains("edges[0]"));
        graph.operators[0].strategies.clear();
        assert!(choose(&graph).unwrap_err().to_string().contains("norm"));
    }
}
