//! Tests that execute every plan on counters and compare it with recurrences that do not use plans.

use std::collections::BTreeSet;

use farflung_base::{Bytes, ChainStep, Nanos};
use proptest::prelude::*;

use super::*;

/// Executes a plan: every backward once, from the last layer to the first, each with its inputs available.
/// Returns the time and the peak bytes of kept inputs and full activations.
fn carry_out(plan: &RecomputePlan, layers: &[Layer], input: u64) -> (u64, u64) {
    let mut kept: BTreeSet<u32> = BTreeSet::new();
    let mut all: BTreeSet<u32> = BTreeSet::new();
    let mut at_hand = 0;
    let mut next_backward = layers.len() as u32;
    let (mut time, mut bytes) = (0, 0);
    let size = |i: u32| if i == 0 { input } else { layers[i as usize - 1].output.0 };
    for step in &plan.steps {
        match *step {
            ChainStep::Keep(i) => {
                // A kept input must be the current one, or part of what the previous layer kept.
                assert!(i == at_hand || all.contains(&(i - 1)), "{step}");
                kept.insert(i);
                at_hand = i;
            }
            ChainStep::Forward(i) => {
                assert_eq!(at_hand, i, "{step}");
                at_hand = i + 1;
                time += layers[i as usize].forward.0;
            }
            ChainStep::ForwardAll(i) => {
                assert_eq!(at_hand, i, "{step}");
                assert!(all.insert(i));
                at_hand = i + 1;
                time += layers[i as usize].forward.0;
            }
            ChainStep::Backward(i) => {
                assert!(all.remove(&i), "{step}: nothing was kept");
                assert_eq!(next_backward, i + 1, "{step}");
                next_backward = i;
                time += layers[i as usize].backward.0;
            }
            ChainStep::Restore(i) => {
                assert!(kept.contains(&i) || (i > 0 && all.contains(&(i - 1))), "{step}");
                at_hand = i;
            }
            ChainStep::Drop(i) => assert!(kept.remove(&i), "{step}"),
        }
        let held: u64 = kept.iter().map(|&i| size(i)).sum::<u64>()
            + all.iter().map(|&i| layers[i as usize].saved.0).sum::<u64>();
        bytes = bytes.max(held);
    }
    assert_eq!(next_backward, 0, "every layer went backward");
    (time, bytes)
}

/// Returns the least time by trying everything, directly from the definition.
fn by_trying(layers: &[Layer], memory: Option<u64>) -> Option<u64> {
    let memory = memory?;
    let first = layers.first()?;
    let rest = &layers[1..];
    let own = first.forward.0 + first.backward.0;
    let all = memory
        .checked_sub(first.saved.0)
        .and_then(|left| if rest.is_empty() { Some(own) } else { Some(own + by_trying(rest, Some(left))?) });
    let kept = (1..layers.len()).filter_map(|k| {
        let forwards: u64 = layers[..k].iter().map(|l| l.forward.0).sum();
        let behind = by_trying(&layers[k..], memory.checked_sub(layers[k - 1].output.0))?;
        Some(forwards + behind + by_trying(&layers[..k], Some(memory))?)
    });
    kept.chain(all).min()
}

proptest! {
    #[test]
    fn rotor_is_the_best_and_fits(
        sizes in prop::collection::vec((1_u64..9, 1_u64..9, 1_u64..4, 0_u64..6), 1..7),
        budget in 1_u64..30,
    ) {
        let layer = |&(f, b, output, more): &(u64, u64, u64, u64)| Layer {
            forward: Nanos(f),
            backward: Nanos(b),
            output: Bytes(output),
            saved: Bytes(output + more),
        };
        let layers: Vec<Layer> = sizes.iter().map(layer).collect();
        let plan = rotor(&layers, Bytes(1), Bytes(budget), budget as u32);
        let best = by_trying(&layers, budget.checked_sub(1));
        prop_assert_eq!(plan.as_ref().ok().map(|p| p.time.0), best);
        if let Ok(plan) = plan {
            let (time, bytes) = carry_out(&plan, &layers, 1);
            prop_assert_eq!(time, plan.time.0);
            prop_assert!(bytes <= budget, "{} of {}", bytes, budget);
        }
    }
}

#[test]
fn a_table_that_is_too_large_is_refused_by_its_cells() {
    let layer = Layer { forward: Nanos(1), backward: Nanos(1), output: Bytes(1), saved: Bytes(1) };
    let message = rotor(&[layer; 1 << 7], Bytes(1), Bytes(1000), 1 << 13).unwrap_err().to_string();
    assert_eq!(
        message,
        "134217728 cells of the table of recomputation are too many: at most 67108864 are supported"
    );
}
