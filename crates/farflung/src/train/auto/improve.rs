//! What would make a plan faster: each machine and each link of the file twice as fast, one at a time.

use farflung_base::{Bandwidth, Nanos};
use farflung_parallel::{Cluster, Plan, Speed};
use farflung_zoo::GptConfig;

use crate::Result;
use crate::train::Prediction;

/// A change of the file, and the step of the same plan after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Improvement {
    /// The change, for people.
    pub what: String,
    /// A step.
    pub step: Nanos,
}

/// The changes that make a step of `plan` shorter than `step`, the most helpful first.
///
/// Every device is made twice as fast in turn, and every link, line and access link given twice the bandwidth.
///
/// Errors: those of [`Prediction::on`].
pub fn improvements(
    plan: &Plan,
    model: &GptConfig,
    cluster: &Cluster,
    step: Nanos,
) -> Result<Vec<Improvement>> {
    let mut found = Vec::new();
    for (what, changed) in changes(cluster) {
        let changed = Prediction::on(plan, model, &changed)?.step();
        if changed < step {
            found.push(Improvement { what, step: changed });
        }
    }
    found.sort_by_key(|improvement| improvement.step);
    Ok(found)
}

fn changes(cluster: &Cluster) -> Vec<(String, Cluster)> {
    let mut all = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Cluster)| {
        let mut changed = cluster.clone();
        change(&mut changed);
        if changed != *cluster {
            all.push((what, changed));
        }
    };
    add("the default link twice as fast".to_owned(), &|c| {
        if let Some(link) = &mut c.default {
            link.bandwidth = double(link.bandwidth);
        }
    });
    for (at, device) in cluster.devices.iter().enumerate() {
        let name = &device.name;
        add(format!("`{name}` computing twice as fast"), &|c| {
            c.devices[at].speed = match c.devices[at].speed {
                Speed::Flops(rate) => Speed::Flops(rate.saturating_mul(2)),
                Speed::TokensPerSecond(rate) => Speed::TokensPerSecond(rate.saturating_mul(2)),
            };
        });
        add(format!("`{name}` with twice the uplink"), &|c| c.devices[at].up = c.devices[at].up.map(double));
        add(format!("`{name}` with twice the downlink"), &|c| {
            c.devices[at].down = c.devices[at].down.map(double);
        });
    }
    for (at, region) in cluster.regions.iter().enumerate() {
        let name = &region.name;
        add(format!("links inside `{name}` twice as fast"), &|c| {
            if let Some(link) = &mut c.regions[at].inside {
                link.bandwidth = double(link.bandwidth);
            }
        });
        add(format!("region `{name}` with twice the uplink"), &|c| {
            c.regions[at].up = c.regions[at].up.map(double);
        });
        add(format!("region `{name}` with twice the downlink"), &|c| {
            c.regions[at].down = c.regions[at].down.map(double);
        });
    }
    for (at, link) in cluster.links.iter().enumerate() {
        let [a, b] = &link.ends;
        add(format!("the link `{a}` - `{b}` twice as fast"), &|c| {
            let link = &mut c.links[at].link;
            link.bandwidth = double(link.bandwidth);
        });
    }
    all
}

const fn double(bandwidth: Bandwidth) -> Bandwidth {
    Bandwidth(bandwidth.0.saturating_mul(2))
}
