//! Finds changes of a topology file that make a plan faster: doubles the speed of each machine and each link,
//! one at a time, and determines the bottleneck among them.

use farflung_base::{Bandwidth, Nanos};
use farflung_parallel::{Cluster, Plan, Speed};
use farflung_zoo::ModelSpec;

use super::side_by_side::side_by_side;
use crate::Result;
use crate::train::Prediction;
use crate::train::costs::Machines;

/// A change of the topology file, and the step time of the same plan after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Improvement {
    /// Description of the change.
    pub what: String,
    /// Name of the machine or link that changes.
    of: String,
    /// Time of a step after the change.
    pub step: Nanos,
}

/// The machine or link that limits the step time more than any other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bottleneck {
    /// Description of the machine or link.
    pub what: String,
    /// Time of a step if this machine or link took no time.
    pub step: Nanos,
}

/// Factor by which a machine or link is made faster to simulate that it takes no time.
const FREE: u64 = 1_000_000_000;

/// Returns the bottleneck: the machine or link of the first change in `found`, with the step time of the same
/// plan if this machine or link took no time. `None` if `found` is empty.
///
/// Errors: those of [`Prediction::on`].
pub fn bottleneck(
    plan: &Plan,
    model: &ModelSpec,
    cluster: &Cluster,
    found: &[Improvement],
) -> Result<Option<Bottleneck>> {
    let Some(first) = found.first() else { return Ok(None) };
    let freed = changes(cluster, FREE).into_iter().find(|change| change.what == first.of);
    let step =
        |change: Change| Prediction::on(plan, model, &change.cluster).map(|predicted| predicted.step());
    let what = first.of.clone();
    Ok(freed.map(step).transpose()?.map(|step| Bottleneck { what, step }))
}

/// Returns the changes that make a step of `plan` shorter than `step`, the most helpful first.
///
/// Each device in turn is made twice as fast, and each link, line and access link is given twice the bandwidth.
///
/// Errors: those of [`Prediction::on`].
pub fn improvements(
    plan: &Plan,
    model: &ModelSpec,
    cluster: &Cluster,
    step: Nanos,
) -> Result<Vec<Improvement>> {
    let now = Machines::of_plan(plan, model, cluster)?;
    let changes = changes(cluster, 2);
    let sooner = Nanos(step.0.saturating_sub(1));
    let steps = side_by_side(&changes, |Change { cluster, .. }| {
        // Machines and links that the plan does not use have no effect.
        if Machines::of_plan(plan, model, cluster)? == now {
            return Ok(None);
        }
        Prediction::within(plan, model, cluster, sooner)
    })?;
    let mut found = Vec::new();
    for (Change { what: of, .. }, changed) in changes.into_iter().zip(steps) {
        if let Some(changed) = changed {
            found.push(Improvement { what: format!("{of} twice as fast"), of, step: changed.step() });
        }
    }
    found.sort_by_key(|improvement| improvement.step);
    Ok(found)
}

/// A file in which one thing is faster.
struct Change {
    what: String,
    cluster: Cluster,
}

fn changes(cluster: &Cluster, factor: u64) -> Vec<Change> {
    let faster = |bandwidth: Bandwidth| Bandwidth(bandwidth.0.saturating_mul(factor));
    let mut all = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Cluster)| {
        let mut changed = cluster.clone();
        change(&mut changed);
        if changed != *cluster {
            all.push(Change { what, cluster: changed });
        }
    };
    add("the default link".to_owned(), &|c| {
        if let Some(link) = &mut c.default {
            link.bandwidth = faster(link.bandwidth);
        }
    });
    for (at, device) in cluster.devices.iter().enumerate() {
        let name = &device.name;
        add(format!("computing on `{name}`"), &|c| {
            c.devices[at].speed = match c.devices[at].speed {
                Speed::Flops(rate) => Speed::Flops(rate.saturating_mul(factor)),
                Speed::TokensPerSecond(rate) => Speed::TokensPerSecond(rate.saturating_mul(factor)),
            };
        });
        add(format!("the uplink of `{name}`"), &|c| c.devices[at].up = c.devices[at].up.map(faster));
        add(format!("the downlink of `{name}`"), &|c| {
            c.devices[at].down = c.devices[at].down.map(faster);
        });
    }
    for (at, region) in cluster.regions.iter().enumerate() {
        let name = &region.name;
        add(format!("links inside `{name}`"), &|c| {
            if let Some(link) = &mut c.regions[at].inside {
                link.bandwidth = faster(link.bandwidth);
            }
        });
        add(format!("the uplink of region `{name}`"), &|c| {
            c.regions[at].up = c.regions[at].up.map(faster);
        });
        add(format!("the downlink of region `{name}`"), &|c| {
            c.regions[at].down = c.regions[at].down.map(faster);
        });
    }
    for (at, link) in cluster.links.iter().enumerate() {
        let [a, b] = &link.ends;
        add(format!("the link `{a}` - `{b}`"), &|c| {
            let link = &mut c.links[at].link;
            link.bandwidth = faster(link.bandwidth);
        });
    }
    all
}
