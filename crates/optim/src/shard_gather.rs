//! Gathers of ranges of flat buffers of which each rank keeps a shard alone (Rajbhandari et al. 2020, "ZeRO",
//! stage 3): a range is there for as long as it is needed.

use std::ops::Range;

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator};
use farflung_tensor::Tensor;

use crate::average::with_part;
use crate::{OptimError, ShardCoder, ShardGroups, Shards};

impl Shards {
    /// Starts to gather a range of the flat buffers from the ranks that have it. `own` has this rank's shard
    /// alone, all of it; all ranks get them as `coder` returns them. A collective: all ranks must start the
    /// same ranges in the same order.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use farflung_comm::{Communicator, memory};
    /// use farflung_optim::{ShardCoder, Shards};
    /// use farflung_tensor::Device;
    ///
    /// let rank = |endpoint: Arc<memory::Memory>| {
    ///     let comm = Communicator::new(endpoint);
    ///     let own: &[f32] = if comm.rank().0 == 0 { &[1.0, 2.0, 3.0] } else { &[4.0] };
    ///     let own = Device::cpu(1)?.tensor(own, own.len())?;
    ///     let coming = Shards::new([3, 1]).start_gather(&comm, &(1..4), &own, ShardCoder::plain())?;
    ///     assert_eq!(coming.wait()?, [2.0, 3.0, 4.0]);
    ///     Ok::<_, farflung_optim::OptimError>(())
    /// };
    /// std::thread::scope(|scope| {
    ///     for endpoint in memory::cluster(2) {
    ///         scope.spawn(move || rank(endpoint).unwrap());
    ///     }
    /// });
    /// ```
    ///
    /// Errors: those of the device, and of the codec.
    ///
    /// # Panics
    /// If `own` or the communicator has another size.
    pub fn start_gather(
        &self,
        comm: &Communicator,
        range: &Range<usize>,
        own: &Tensor,
        mut coder: ShardCoder,
    ) -> Result<GatheredRange, OptimError> {
        let me = comm.rank().index();
        let sizes = (own.shape().len(), comm.size());
        assert_eq!(sizes, (self.of(me).len(), self.ranks()), "a shard of this rank and these ranks");
        let there = self.within(range);
        let lengths = there.lengths();
        let mut values = Vec::with_capacity(lengths[me]);
        for piece in self.of(me).within(range) {
            with_part(own, piece.own(), |part| values.extend_from_slice(part))?;
        }
        let place = |piece: &Range<usize>| piece.start - range.start..piece.end - range.start;
        let places = there.ranges().map(place).collect();
        let coming = if coder.spec().is_none() {
            let mut all = vec![0.0; lengths.iter().sum()];
            let at = lengths[..me].iter().sum::<usize>();
            all[at..at + values.len()].copy_from_slice(&values);
            Coming::Plain(comm.start_gather_from_owners(all, &lengths))
        } else {
            let counts: Vec<usize> = lengths.iter().map(|&len| coder.bytes_of(len)).collect();
            let mut bytes = vec![0; counts[..me].iter().sum()];
            coder.encode(&values, &mut bytes)?;
            bytes.resize(counts.iter().sum(), 0);
            Coming::Coded(comm.start_gather_from_owners(bytes, &counts), coder, lengths)
        };
        Ok(GatheredRange { places, coming })
    }
}

impl Shards {
    /// Like [`Shards::start_gather`], where ranks are in groups: of each owner's part, one rank of each group
    /// gets the bytes, and passes them on inside the group, whose communicator is `own`. What enters a group
    /// is then as much as for one rank of it.
    ///
    /// Errors: as [`Shards::start_gather`].
    ///
    /// # Panics
    /// As [`Shards::start_gather`].
    pub fn start_gather_by_groups(
        &self,
        (comm, own_group): (&Communicator, &Communicator),
        groups: &ShardGroups,
        range: &Range<usize>,
        own: &Tensor,
        mut coder: ShardCoder,
    ) -> Result<GatheredRange, OptimError> {
        let (me, ranks) = (comm.rank().index(), comm.size());
        let sizes = (own.shape().len(), ranks);
        assert_eq!(sizes, (self.of(me).len(), self.ranks()), "a shard of this rank and these ranks");
        let there = self.within(range);
        let lengths = there.lengths();
        let mut values = Vec::with_capacity(lengths[me]);
        for piece in self.of(me).within(range) {
            with_part(own, piece.own(), |part| values.extend_from_slice(part))?;
        }
        let mut part = Vec::new();
        coder.encode(&values, &mut part)?;
        let size = |len: usize| coder.bytes_of(len);
        let sent: Vec<usize> = (0..ranks).map(|to| groups.entering((me, to), &lengths, size)).collect();
        let received: Vec<usize> =
            (0..ranks).map(|from| groups.entering((from, me), &lengths, size)).collect();
        let bytes = part.repeat(sent.iter().filter(|&&bytes| bytes > 0).count());
        let entering = comm.start_uneven_all_to_all(&bytes, &sent, &received);
        let place = |piece: &Range<usize>| piece.start - range.start..piece.end - range.start;
        let places: Vec<Vec<Range<usize>>> =
            (0..ranks).map(|rank| there.of(rank).ranges().iter().map(place).collect()).collect();
        // The order in which the ranks of the group have what they pass on.
        let group = groups.of(me);
        let passed: Vec<Vec<usize>> = groups.members()[group]
            .iter()
            .map(|&member| groups.of_adder(group, member, &lengths).map(|(owner, _)| owner).collect())
            .collect();
        let of_owner = |owner: &usize| places[*owner].clone();
        let in_order = passed.iter().flatten().flat_map(of_owner).collect();
        let lengths = passed.iter().map(|owners| owners.iter().map(|&owner| lengths[owner]).collect());
        let lengths = lengths.collect();
        let coming = Coming::Entering { entering, own_group: own_group.clone(), coder, lengths };
        Ok(GatheredRange { places: in_order, coming })
    }
}

/// A range of flat buffers on its way from the ranks that have shards of it.
#[derive(Debug)]
#[must_use = "the values are on their way"]
pub struct GatheredRange {
    /// The places in the range of what arrives, in its order.
    places: Vec<Range<usize>>,
    coming: Coming,
}

#[derive(Debug)]
enum Coming {
    Plain(Pending<Result<Vec<f32>, CommError>>),
    /// The bytes of each rank's part, and the lengths of the parts.
    Coded(Pending<Result<Vec<u8>, CommError>>, ShardCoder, Vec<usize>),
    /// The bytes of the parts that this rank passes on in its group; the lengths of the parts of each member.
    Entering {
        entering: Pending<Result<Vec<u8>, CommError>>,
        own_group: Communicator,
        coder: ShardCoder,
        lengths: Vec<Vec<usize>>,
    },
}

/// Decodes vectors of these lengths, one after another.
fn decoded(coder: &ShardCoder, bytes: &[u8], lengths: &[usize]) -> Result<Vec<f32>, OptimError> {
    let (mut from, mut at) = (0, 0);
    let mut values = vec![0.0; lengths.iter().sum()];
    for len in lengths {
        let end = from + coder.bytes_of(*len);
        coder.decode(bytes.get(from..end).unwrap_or_default(), &mut values[at..at + len])?;
        (from, at) = (end, at + len);
    }
    Ok(values)
}

impl GatheredRange {
    /// Waits for the values, in the order of the flat buffers.
    ///
    /// Errors: a peer that was lost; bytes that no codec writes.
    pub fn wait(self) -> Result<Vec<f32>, OptimError> {
        let values = match self.coming {
            Coming::Plain(values) => values.wait()?,
            Coming::Coded(bytes, coder, lengths) => decoded(&coder, &bytes.wait()?, &lengths)?,
            Coming::Entering { entering, own_group, coder, lengths } => {
                let entered = entering.wait()?;
                let of = |lengths: &Vec<usize>| lengths.iter().map(|&len| coder.bytes_of(len)).sum::<usize>();
                let counts: Vec<usize> = lengths.iter().map(of).collect();
                let mut all = vec![0; counts[..own_group.rank().index()].iter().sum()];
                all.extend(entered);
                all.resize(counts.iter().sum(), 0);
                let all = own_group.start_gather_from_owners(all, &counts).wait()?;
                decoded(&coder, &all, &lengths.concat())?
            }
        };
        if self.places.is_sorted_by_key(|place| place.start) {
            return Ok(values);
        }
        let (mut ordered, mut at) = (vec![0.0; values.len()], 0);
        for place in self.places {
            let part = &values[at..at + place.len()];
            at += part.len();
            ordered[place].copy_from_slice(part);
        }
        Ok(ordered)
    }
}
