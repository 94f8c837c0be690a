//! The price of training, if a file contains prices, and its energy, if the file contains powers.

use farflung_base::Nanos;
use farflung_parallel::{Cluster, Machine, Plan};

/// Number of tokens for which costs are given.
const TOKENS: f64 = 1e9;

/// Costs of a billion tokens on the machines of a plan. Machines of the file that the plan does not use cost
/// nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RunningCosts {
    /// Price in the file's currency; `None` unless each machine has a price.
    pub price: Option<f64>,
    /// Energy in kilowatt hours; `None` unless each machine has a power.
    pub energy: Option<f64>,
}

/// Returns the costs of a plan whose step of `tokens` tokens takes `step`.
#[must_use]
pub fn running_costs(plan: &Plan, cluster: &Cluster, tokens: u64, step: Nanos) -> RunningCosts {
    let names = cluster.rank_names();
    let machines: Vec<&Machine> = names
        .iter()
        .zip(cluster.ranks())
        .filter(|(name, _)| plan.machines.contains(name))
        .map(|(_, machine)| machine)
        .collect();
    let hours = step.as_secs_f64() / 3600.0 * TOKENS / (tokens.max(1) as f64);
    let sum = |each: &dyn Fn(&Machine) -> Option<f64>| {
        machines.iter().map(|machine| each(machine)).sum::<Option<f64>>().map(|sum| sum * hours)
    };
    RunningCosts {
        price: sum(&|machine| machine.price.map(|price| price.0 as f64 / 1e6)),
        energy: sum(&|machine| machine.power.map(|power| power.0 as f64 / 1e3)),
    }
}
