//! The mean of gradients of which each rank keeps a shard alone (Rajbhandari et al. 2020, "ZeRO", stage 2):
//! ranges are sent to the ranks that update them as they become final, a few windows at a time, and are then
//! added to the shard.

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_tensor::{Op, ProgramBuilder, Tensor, TensorError};

use crate::average::with_part;
use crate::reduction_order::{ReductionOrder, ReductionStep};
use crate::{OptimError, ShardCoder, ShardGroups, Shards};

/// Sums ranges of flat buffers over the ranks of a communicator, each into the shard of its owner.
/// Contributions are added in rank order, so that the sums do not depend on who updates what.
///
/// All ranks must start the same ranges in the same order. A rank holds [`Shards::IN_FLIGHT`] windows at a
/// time, whatever the length of the buffers.
///
/// ```
/// use std::sync::Arc;
///
/// use farflung_comm::{Communicator, memory};
/// use farflung_optim::{ShardReduction, Shards};
/// use farflung_tensor::Device;
///
/// let rank = |endpoint: Arc<memory::Memory>| {
///     let comm = Communicator::new(endpoint);
///     let (cpu, me) = (Device::cpu(1)?, comm.rank().index());
///     let shards = Shards::new([3, 1]);
///     let mut own = cpu.zeros(shards.of(me).len())?;
///     let mut reduction = ShardReduction::new(comm, shards, 2);
///     let unit = cpu.tensor(&[me as f32, 10.0, 20.0], 3)?;
///     reduction.start(1..4, &unit, false, &mut own)?; // elements 1 and 2 are of rank 0, element 3 of rank 1
///     reduction.finish(&mut own)?;
///     assert_eq!(own.to_vec::<f32>()?, if me == 0 { vec![0.0, 0.5, 10.0] } else { vec![20.0] });
///     Ok::<_, farflung_optim::OptimError>(())
/// };
/// std::thread::scope(|scope| {
///     for endpoint in memory::cluster(2) {
///         scope.spawn(move || rank(endpoint).unwrap());
///     }
/// });
/// ```
#[derive(Debug)]
pub struct ShardReduction {
    comm: Communicator,
    shards: Shards,
    most: usize,
    coder: ShardCoder,
    groups: Option<InGroup>,
    order: ReductionOrder,
    going: VecDeque<Window>,
}

/// The groups, and this rank's own.
#[derive(Debug)]
struct InGroup {
    groups: ShardGroups,
    /// This rank's group, its communicator, and this rank's number in it.
    own: usize,
    comm: Communicator,
}

/// Values on their way to their owners.
#[derive(Debug)]
struct Window {
    number: usize,
    /// How many of its elements each rank owns.
    lengths: Vec<usize>,
    /// The places in the shard of what this rank gets.
    into: Vec<Range<usize>>,
    /// Whether it is added to what the shard has, instead of overwriting it.
    adds: bool,
    values: ComingValues,
}

#[derive(Debug)]
enum ComingValues {
    /// The means of all elements of this rank, in their part of the window.
    Means(Pending<Result<Vec<f32>, CommError>>),
    /// What the other ranks of the group have of the shares that this rank adds up.
    OfGroup(Pending<Result<Vec<u8>, CommError>>),
    /// The contributions of all ranks, or of all groups, to this rank's elements.
    ToOwner(Pending<Result<Vec<u8>, CommError>>),
}

impl ShardReduction {
    /// Creates a reduction into shards of the ranks of `comm`, in windows of about `most` elements.
    ///
    /// # Panics
    /// If there is not one shard for each rank.
    #[must_use]
    pub fn new(comm: Communicator, shards: Shards, most: usize) -> Self {
        assert_eq!(shards.ranks(), comm.size(), "one shard for each rank");
        let (coder, order) = (ShardCoder::plain(), ReductionOrder::default());
        Self { comm, shards, most, coder, groups: None, order, going: VecDeque::new() }
    }

    /// Encodes what ranks send each other. The sums are of f32, and each owner has its own contribution as the
    /// codec returns it, too.
    #[must_use]
    pub fn with_coder(mut self, coder: ShardCoder) -> Self {
        self.coder = coder;
        self
    }

    /// Adds up gradients in groups of ranks before they go to their owners: what leaves a group is then as much
    /// as for one rank of it (Wang et al. 2023, "ZeRO++"). `own` is the communicator of this rank's group.
    /// Sums are then of groups, in their order.
    #[must_use]
    pub fn in_groups(mut self, groups: ShardGroups, own: Communicator) -> Self {
        let group = groups.of(self.comm.rank().index());
        self.groups = Some(InGroup { groups, own: group, comm: own });
        self.order = ReductionOrder::new(true);
        self
    }

    /// Starts the mean of a range of the flat buffers, whose values `unit` has. What arrives meanwhile goes to
    /// `own`, this rank's shard: it is added there if `adds`, and overwrites values otherwise.
    ///
    /// Errors: a peer that was lost; those of the codec; those of the device.
    ///
    /// # Panics
    /// If `unit` or `own` has another length.
    pub fn start(
        &mut self,
        range: Range<usize>,
        unit: &Tensor,
        adds: bool,
        own: &mut Tensor,
    ) -> Result<(), OptimError> {
        assert_eq!(unit.shape().len(), range.len(), "the values of the range");
        let me = self.comm.rank().index();
        assert_eq!(own.shape().len(), self.shards.of(me).len(), "the sums of the shard");
        for window in self.shards.within(&range).windows(self.most) {
            for step in self.order.start() {
                if let ReductionStep::Start(number) = step {
                    let mut values = Vec::with_capacity(window.lengths().iter().sum());
                    for piece in window.ranges() {
                        let place = piece.start - range.start..piece.end - range.start;
                        with_part(unit, place, |part| values.extend_from_slice(part))?;
                    }
                    let into =
                        window.of(me).ranges().iter().flat_map(|range| self.shards.of(me).within(range));
                    let into = into.map(|piece| piece.own()).collect();
                    let lengths = window.lengths();
                    let values = self.send(values, &lengths)?;
                    self.going.push_back(Window { number, lengths, into, adds, values });
                } else {
                    self.step(step, own)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for all that was started.
    ///
    /// Errors: as [`ShardReduction::start`].
    pub fn finish(&mut self, own: &mut Tensor) -> Result<(), OptimError> {
        self.order.finish().into_iter().try_for_each(|step| self.step(step, own))
    }

    /// Drops what is on its way, with the step.
    pub fn clear(&mut self) {
        self.going.clear();
        self.order = ReductionOrder::new(self.groups.is_some());
    }

    /// Sends the values of a window on the first part of their way.
    fn send(&mut self, values: Vec<f32>, lengths: &[usize]) -> Result<ComingValues, OptimError> {
        let Some(InGroup { groups, own, comm }) = &self.groups else {
            if self.coder.spec().is_none() {
                let means = self.comm.start_reduce_scatter_in_order(values, lengths, ReduceOp::Mean);
                return Ok(ComingValues::Means(means));
            }
            let mut bytes = Vec::new();
            let sent: Vec<usize> = lengths.iter().map(|&len| self.coder.bytes_of(len)).collect();
            let mut rest = &values[..];
            for &len in lengths {
                let (part, behind) = rest.split_at(len);
                self.coder.encode(part, &mut bytes)?;
                rest = behind;
            }
            let received = vec![sent[self.comm.rank().index()]; lengths.len()];
            let coming = self.comm.start_uneven_all_to_all(&bytes, &sent, &received);
            return Ok(ComingValues::ToOwner(coming));
        };
        let starts: Vec<usize> = lengths
            .iter()
            .scan(0, |end, len| {
                *end += len;
                Some(*end - len)
            })
            .collect();
        // Inside a group values are sent as they are.
        let mut plain = ShardCoder::plain();
        let sent = groups.inside(*own, lengths, |len| plain.bytes_of(len));
        let mut bytes = Vec::with_capacity(sent.iter().sum());
        for &member in &groups.members()[*own] {
            let parts = groups.of_adder(*own, member, lengths);
            let block: Vec<f32> =
                parts.flat_map(|(owner, len)| &values[starts[owner]..starts[owner] + len]).copied().collect();
            plain.encode(&block, &mut bytes)?;
        }
        let received = vec![sent[comm.rank().index()]; sent.len()];
        Ok(ComingValues::OfGroup(comm.start_uneven_all_to_all(&bytes, &sent, &received)))
    }

    fn step(&mut self, step: ReductionStep, own: &mut Tensor) -> Result<(), OptimError> {
        match step {
            ReductionStep::Start(_) => Ok(()),
            ReductionStep::PassOn(number) => self.pass_on(number),
            ReductionStep::Arrive(_) => self.arrive(own),
        }
    }

    /// Waits for the sums of the own group, and sends them to their owners.
    fn pass_on(&mut self, number: usize) -> Result<(), OptimError> {
        let (Some(InGroup { groups, own, .. }), Some(window)) =
            (&self.groups, self.going.iter_mut().find(|window| window.number == number))
        else {
            return Ok(());
        };
        let (me, ranks) = (self.comm.rank().index(), self.comm.size());
        let coming =
            std::mem::replace(&mut window.values, ComingValues::Means(Pending::ready(Ok(Vec::new()))));
        let ComingValues::OfGroup(coming) = coming else { return Ok(()) };
        let parts: Vec<(usize, usize)> = groups.of_adder(*own, me, &window.lengths).collect();
        let len = parts.iter().map(|(_, len)| len).sum();
        let sums = added(&ShardCoder::plain(), &coming.wait()?, len, groups.members()[*own].len())?;
        let mut bytes = Vec::new();
        let (mut sent, mut at) = (vec![0; ranks], 0);
        for (owner, len) in parts {
            let before = bytes.len();
            self.coder.encode(&sums[at..at + len], &mut bytes)?;
            sent[owner] = bytes.len() - before;
            at += len;
        }
        let from = |from| groups.between((from, me), &window.lengths, |len| self.coder.bytes_of(len));
        let received: Vec<usize> = (0..ranks).map(from).collect();
        window.values = ComingValues::ToOwner(self.comm.start_uneven_all_to_all(&bytes, &sent, &received));
        Ok(())
    }

    /// Waits for the oldest window.
    fn arrive(&mut self, own: &mut Tensor) -> Result<(), OptimError> {
        let Some(Window { lengths, into, adds, values, .. }) = self.going.pop_front() else { return Ok(()) };
        let (me, ranks) = (self.comm.rank().index(), self.comm.size());
        let (values, mut at) = match values {
            ComingValues::Means(values) => (values.wait()?, lengths[..me].iter().sum::<usize>()),
            ComingValues::ToOwner(bytes) | ComingValues::OfGroup(bytes) => {
                let times = self.groups.as_ref().map_or(ranks, |all| all.groups.members().len());
                let mut sums = added(&self.coder, &bytes.wait()?, lengths[me], times)?;
                for sum in &mut sums {
                    *sum /= ranks as f32;
                }
                (sums, 0)
            }
        };
        for range in into {
            let part = &values[at..at + range.len()];
            at += range.len();
            if adds {
                add(own, range, part)?;
            } else {
                own.view_mut().part(range.start, range.len())?.write(part)?;
            }
        }
        Ok(())
    }
}

/// Returns the sum of `times` vectors of `len` values, one after another in `bytes`.
fn added(coder: &ShardCoder, bytes: &[u8], len: usize, times: usize) -> Result<Vec<f32>, OptimError> {
    let each = coder.bytes_of(len);
    let (mut sums, mut next) = (vec![0.0; len], vec![0.0; len]);
    for i in 0..times {
        let vector = bytes.get(i * each..(i + 1) * each).unwrap_or_default();
        coder.decode(vector, if i == 0 { &mut sums } else { &mut next })?;
        if i > 0 {
            sums.iter_mut().zip(&next).for_each(|(sum, value)| *sum += value);
        }
    }
    Ok(sums)
}

/// Adds values to a range of a buffer.
fn add(y: &mut Tensor, range: Range<usize>, values: &[f32]) -> Result<(), OptimError> {
    if let Some(y) = y.host_mut::<f32>() {
        y[range].iter_mut().zip(values).for_each(|(y, value)| *y += value);
        return Ok(());
    }
    let mut p = ProgramBuilder::new();
    let (own, more) = (p.load(0), p.read(0));
    let sum = p.add(own, more);
    p.store(0, sum);
    let (program, device) = (&p.build()?, y.device().clone());
    let x = device.tensor(values, values.len())?;
    let y = y.view_mut().part(range.start, range.len())?;
    let run: Result<(), TensorError> =
        device.run(Op::Map { program, scalars: &[], reads: &[x.view()], writes: &mut [y] });
    Ok(run?)
}
