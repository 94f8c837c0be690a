//! The CSV form of schedules in `PyTorch`: a line per rank, a cell per action, as `_PipelineScheduleRuntime`
//! loads and dumps it.

use super::{ComputeOrder, Lowered, Op};
use crate::ParallelError;

/// Suffix that `PyTorch` writes after an overlapped pair.
const OVERLAP: &str = "OVERLAP_F_B";

impl ComputeOrder {
    /// Parses the compute-only form, or the form with communication. Messages, reductions and gathers in the
    /// text are ignored, because [`Schedule::new`](super::Schedule::new) generates its own. Empty cells, in
    /// which the rank waits, are ignored too.
    ///
    /// Errors: as [`ComputeOrder::from_lists`]; [`ParallelError::ScheduleLine`] for a cell that cannot be
    /// parsed, with its line.
    ///
    /// ```
    /// use farflung_parallel::pipeline::ComputeOrder;
    ///
    /// let order = ComputeOrder::from_csv("0F0,0SEND_F0,0RECV_B0,,0B0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n")?;
    /// assert_eq!(order.to_string(), "r0: 0F0 0B0\nr1: 1F0 1I0 1W0\n");
    /// assert_eq!(order.to_csv(), "0F0,0B0\n1F0,1I0,1W0\n");
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    pub fn from_csv(text: &str) -> Result<Self, ParallelError> {
        let mut lists = Vec::new();
        for (line, row) in (1..).zip(text.lines()) {
            let fault = |cause| ParallelError::ScheduleLine { line, cause: Box::new(cause) };
            let mut list = Vec::new();
            for cell in row.split(',').map(|cell| cell.trim().trim_matches('"')) {
                if cell.is_empty() {
                    continue;
                }
                match cell.strip_suffix(OVERLAP).unwrap_or(cell).parse().map_err(fault)? {
                    Lowered::Compute(op) => list.push(op),
                    Lowered::Move { .. } => {}
                }
            }
            lists.push(list);
        }
        Self::from_lists(lists)
    }

    /// Writes the compute-only form.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let cell = |op: &Op| match op {
            Op::Run(action) => action.to_string(),
            Op::Overlap { .. } => format!("{op}{OVERLAP}"),
        };
        let row = |list: &Vec<Op>| list.iter().map(cell).collect::<Vec<_>>().join(",") + "\n";
        self.lists().iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Method, Settings};

    /// `PyTorch`'s file `test/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv`.
    const DUAL_PIPE_V: &str = include_str!("../../tests/vectors/dualpipev_4rank_10mb.csv");

    #[test]
    fn pytorchs_file_is_our_schedule() {
        let ours = Method::DualPipeV.order(&Settings::new(4, 10)).unwrap();
        assert_eq!(ComputeOrder::from_csv(DUAL_PIPE_V).unwrap(), ours);
        assert_eq!(ours.to_csv(), DUAL_PIPE_V);
    }

    #[test]
    fn every_method_reads_back() {
        for method in Method::ALL {
            let order = method.order(&Settings::new(4, 8)).unwrap();
            let read = ComputeOrder::from_csv(&order.to_csv()).unwrap();
            assert_eq!(read.with_updates(order.updates()), order, "{method}");
        }
    }

    #[test]
    fn a_bad_cell_is_named_with_its_line() {
        let message = ComputeOrder::from_csv("0F0,0B0\n1F0,what\n").unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("`what`"), "{message}");
    }
}
