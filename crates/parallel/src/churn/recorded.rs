//! Recorded traces of spot machines, included in the crate, by name.

use super::Trace;
use crate::ParallelError;
use crate::shipped::{Shipped, parsed};

/// All included traces, as text that [`Trace`] parses. The first lines of each name the source.
pub const RECORDED: [Shipped; 2] = [
    Shipped {
        name: "ec2-p3",
        about: "32 spot machines with a V100 each, for 11 hours (Bamboo)",
        text: include_str!("../../traces/ec2-p3.txt"),
    },
    Shipped {
        name: "ec2-g4dn",
        about: "24 spot machines with a T4 each, for 10.5 hours (Bamboo)",
        text: include_str!("../../traces/ec2-g4dn.txt"),
    },
];

/// Parses the recorded trace of this name.
///
/// Errors: [`ParallelError::UnknownName`].
///
/// ```
/// let trace = farflung_parallel::churn::recorded("ec2-p3")?;
/// assert_eq!((trace.machines, trace.losses()), (32, 167));
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
pub fn recorded(name: &str) -> Result<Trace, ParallelError> {
    parsed(&RECORDED, "recorded trace", name)
}

#[cfg(test)]
mod tests {
    use farflung_base::Nanos;

    use super::*;

    /// The numbers of machines are those of the record, counted by hand from its rows at these minutes (of the
    /// record, which begin 25 and 15 minutes earlier than the traces).
    #[test]
    fn the_machines_that_are_there_are_those_of_the_record() {
        let p3 = [(59, 15), (71, 32), (269, 19), (408, 18), (508, 11), (682, 10)];
        let g4dn = [(28, 14), (120, 6), (200, 2), (239, 14), (425, 17), (646, 5)];
        for (name, begin, counts) in [("ec2-p3", 25, p3), ("ec2-g4dn", 15, g4dn)] {
            let trace = recorded(name).unwrap();
            for (minute, count) in counts {
                let until = Nanos((minute - begin) * 60_000_000_000 + 59_000_000_000);
                let changes = trace.changes.iter().take_while(|change| change.at <= until);
                let there = changes.fold(trace.machines as usize, |there, change| {
                    there + change.back.len() - change.lost.len()
                });
                assert_eq!(there, count, "{name} at minute {minute}");
            }
        }
        assert!(recorded("ec2").unwrap_err().to_string().contains("ec2-g4dn"));
    }
}
