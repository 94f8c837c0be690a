//! The way of rows to the experts that have them and back, where ranks divide the experts: each rank sends the
//! rows of its own tokens to the ranks of their experts, and gets the outputs back in the same order.
//!
//! An expert's rows are in the order of the ranks that sent them, and then of their tokens, so that results
//! have the same bits each time.

use std::ops::Range;

use farflung_tensor::{Op, Tensor};

use super::routing::Routing;
use super::{Result, StageContext};
use crate::ZooError;
use crate::exchange::{ArrivedRows, Axis};

/// The rows of a pass on their way.
pub(super) struct Dispatch<'a> {
    cx: &'a StageContext<'a>,
    /// The experts of each rank.
    ranges: &'a [Range<usize>],
    routing: &'a Routing,
}

/// The rows of this rank's experts.
pub(super) struct Arrived {
    /// Those of each expert, in order.
    pub(super) groups: Vec<Range<usize>>,
    /// Number of rows of buffers for them.
    pub(super) room: usize,
    /// The order in which they came; `None` if no other rank has experts.
    order: Option<Order>,
}

struct Order {
    /// The numbers of rows that each rank sent to each of this rank's experts.
    counts: Vec<Vec<u32>>,
    /// Takes rows from the order of senders to that of experts.
    to_experts: Tensor,
    /// Takes them back.
    to_senders: Tensor,
}

impl Arrived {
    /// Returns the number of rows that are used, from the first on.
    pub(super) fn used(&self) -> Range<usize> {
        0..self.groups.last().map_or(0, |group| group.end)
    }

    /// Returns the numbers of rows that each rank sent to each of this rank's experts; `None` if no other rank
    /// has experts.
    pub(super) fn counts(&self, cx: &StageContext<'_>) -> Result<Option<Tensor>> {
        let Some(Order { counts, .. }) = &self.order else { return Ok(None) };
        let each = counts.first().map_or(0, Vec::len);
        Ok(Some(cx.device.tensor(&counts.concat(), [counts.len(), each])?))
    }
}

impl<'a> Dispatch<'a> {
    pub(super) const fn new(
        cx: &'a StageContext<'a>,
        ranges: &'a [Range<usize>],
        routing: &'a Routing,
    ) -> Self {
        Self { cx, ranges, routing }
    }

    fn is_alone(&self) -> bool {
        self.ranges.len() == 1
    }

    /// Returns the numbers of this rank's rows for each expert of each rank.
    fn counts(&self) -> Vec<Vec<u32>> {
        let of = |expert: usize| self.routing.rows_of(expert).len() as u32;
        self.ranges.iter().map(|experts| experts.clone().map(of).collect()).collect()
    }

    /// Returns the experts of this rank.
    fn own(&self) -> &Range<usize> {
        &self.ranges[self.cx.exchange.rank(Axis::Expert)]
    }

    /// Sends rows `[N K, C]`, by expert, to the experts' ranks. Returns those for this rank's experts.
    pub(super) fn send(&self, rows: Tensor) -> Result<(Tensor, Arrived)> {
        if self.is_alone() {
            return Ok((rows, self.arrived_alone()));
        }
        let exchange = self.cx.exchange;
        let ArrivedRows { rows, counts } =
            exchange.all_to_all_rows(Axis::Expert, &rows, &self.counts(), None)?;
        let arrived = self.ordered(counts)?;
        if arrived.room != rows.shape().rows() {
            return Err(ZooError::StageInput {
                expected: "as many rows of each rank as it tells for experts",
            });
        }
        let rows = match &arrived.order {
            Some(order) => self.taken(&rows, &order.to_experts)?,
            None => rows,
        };
        Ok((rows, arrived))
    }

    /// Returns where the rows of this rank's experts are, as [`Dispatch::send`] did. `counts` is what
    /// [`Arrived::counts`] was.
    pub(super) fn again(&self, counts: Option<&Tensor>) -> Result<Arrived> {
        let Some(counts) = counts else { return Ok(self.arrived_alone()) };
        if self.cx.device.is_counting() {
            // All ranks send what this one keeps.
            let own = self.cx.exchange.rank(Axis::Expert);
            return self.ordered(vec![self.counts()[own].clone(); self.ranges.len()]);
        }
        let each = counts.shape().cols().max(1);
        self.ordered(counts.to_vec::<u32>()?.chunks(each).map(<[u32]>::to_vec).collect())
    }

    fn arrived_alone(&self) -> Arrived {
        let groups = self.own().clone().map(|expert| self.routing.rows_of(expert)).collect();
        Arrived { groups, room: self.routing.rows.len(), order: None }
    }

    /// Orders rows by expert that came by sender, in these numbers for each expert.
    fn ordered(&self, counts: Vec<Vec<u32>>) -> Result<Arrived> {
        let experts = self.own().len();
        if counts.iter().any(|of_rank| of_rank.len() != experts) || counts.len() != self.ranges.len() {
            return Err(ZooError::StageInput { expected: "a number of rows for each expert of each rank" });
        }
        let mut starts = Vec::new();
        let mut room = 0;
        for of_rank in &counts {
            let mut of_experts = Vec::new();
            for &count in of_rank {
                of_experts.push(room);
                room += count as usize;
            }
            starts.push(of_experts);
        }
        let (mut to_experts, mut groups) = (Vec::with_capacity(room), Vec::new());
        for expert in 0..experts {
            let begin = to_experts.len();
            for (starts, counts) in starts.iter().zip(&counts) {
                let start = starts[expert] as u32;
                to_experts.extend(start..start + counts[expert]);
            }
            groups.push(begin..to_experts.len());
        }
        let mut to_senders = vec![0_u32; room];
        for (at, &row) in to_experts.iter().enumerate() {
            to_senders[row as usize] = at as u32;
        }
        let tensor = |rows: &[u32]| self.cx.device.tensor(rows, [rows.len(), 1]);
        let (to_experts, to_senders) = (tensor(&to_experts)?, tensor(&to_senders)?);
        Ok(Arrived { groups, room, order: Some(Order { counts, to_experts, to_senders }) })
    }

    /// Sends the rows of this rank's experts back to the ranks of their tokens. Returns those of this rank's
    /// tokens, `[N K, C]`, by expert.
    pub(super) fn back(&self, rows: Tensor, arrived: &Arrived) -> Result<Tensor> {
        let Some(Order { counts, to_senders, .. }) = &arrived.order else { return Ok(rows) };
        let rows = self.taken(&rows, to_senders)?;
        let (used, cols) = (self.routing.used(), rows.shape().cols());
        let came = self.cx.exchange.all_to_all_rows(Axis::Expert, &rows, counts, Some(used))?;
        let mut all = self.cx.empty([self.routing.rows.len(), cols])?;
        if self.cx.device.is_counting() {
            return Ok(all);
        }
        if came.counts != self.counts() {
            return Err(ZooError::StageInput {
                expected: "the outputs of as many rows as were sent to experts",
            });
        }
        let (filled, rest) = all.view_mut().split_at(used * cols)?;
        self.cx.device.run(Op::Cast { x: came.rows.view(), y: filled })?;
        self.cx.device.run(Op::Fill { value: 0.0, y: rest })?;
        Ok(all)
    }

    /// Returns rows in another order.
    fn taken(&self, rows: &Tensor, order: &Tensor) -> Result<Tensor> {
        let mut y = self.cx.empty(rows.shape())?;
        let (x, rows) = (rows.view(), order.view());
        self.cx.device.run(Op::CombineRows { x, rows, factors: None, add: None, y: y.view_mut() })?;
        Ok(y)
    }
}
