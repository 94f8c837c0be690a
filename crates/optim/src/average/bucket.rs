//! Buckets: which parameters are sent together, and how they are packed. Does not depend on the network.

use std::ops::Range;

use farflung_base::Pending;
use farflung_tensor::{Op, Param, ParamLayout, Shape, Tensor, TensorError};

use crate::OptimError;
use crate::weigh::weigh_part;

/// A parameter that is sent.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) shape: Shape,
    /// Range of the parameter's elements in the flat buffer.
    pub(super) range: Range<usize>,
    pub(super) bucket: usize,
    /// A number that is the same on all of its holders, whatever they have besides.
    pub(super) key: u64,
    /// Whether the parameter is final in this round.
    pub(super) ready: bool,
}

/// Neighbouring parameters that are reduced together, without the padding between them.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Ranges of the flat buffer without padding, in order.
    pieces: Vec<Range<usize>>,
    /// Positions of `pieces` in the packed buffers.
    parts: Vec<Part>,
    pub(super) fragment: usize,
    /// The entry of `AverageConfig::apart` that its parameters are in.
    pub(super) apart: Option<usize>,
    /// Its number among those of the same holders.
    pub(super) number: usize,
    /// Number of elements of all pieces.
    pub(super) len: usize,
    pub(super) params: usize,
    /// Number of parameters that are not final yet in this round.
    pub(super) missing: usize,
    /// The packed elements of which this rank gets the mean; `None`: all.
    pub(super) own: Option<Range<usize>>,
    /// Packed buffers, kept for the next round.
    pub(super) packed: Option<Packed>,
}

/// A range of the flat buffer, and its place in the packed buffers: the shard and its first element there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    flat: Range<usize>,
    shard: usize,
    at: usize,
}

impl Part {
    /// Returns what of it is in a range of the packed elements, of one shard.
    fn within(&self, own: Option<&Range<usize>>) -> Option<Self> {
        let Some(own) = own else { return Some(self.clone()) };
        let (from, to) = (own.start.max(self.at), own.end.min(self.at + self.flat.len()));
        let flat = self.flat.start + from.checked_sub(self.at)?;
        (from < to).then(|| Self { flat: flat..flat + to - from, shard: self.shard, at: from })
    }
}

/// Packed elements of a bucket.
#[derive(Debug)]
pub(super) enum Packed {
    /// One buffer, as it is sent.
    Plain(Vec<f32>),
    /// One tensor per shard, as codecs take them.
    Coded(Vec<Tensor>),
}

impl Packed {
    /// Returns the packed values of a part, if they are in the host's memory.
    fn host(&self, part: &Part) -> Option<&[f32]> {
        let all = match self {
            Self::Plain(all) => Some(&all[..]),
            Self::Coded(shards) => shards[part.shard].host(),
        };
        Some(&all?[part.at..][..part.flat.len()])
    }

    fn host_mut(&mut self, part: &Part) -> Option<&mut [f32]> {
        let all = match self {
            Self::Plain(all) => Some(&mut all[..]),
            Self::Coded(shards) => shards[part.shard].host_mut(),
        };
        Some(&mut all?[part.at..][..part.flat.len()])
    }

    /// Returns the shard of a part that is not in the host's memory.
    fn shard(&mut self, part: &Part) -> &mut Tensor {
        match self {
            Self::Plain(_) => unreachable!("plain values are in the host's memory"),
            Self::Coded(shards) => &mut shards[part.shard],
        }
    }
}

type Download = Pending<Result<Vec<f32>, TensorError>>;

/// Elements of a bucket, packed or still being downloaded from a device.
#[derive(Debug)]
pub(super) struct Fetch {
    packed: Packed,
    coming: Vec<(Part, Download)>,
}

impl Fetch {
    pub(super) fn is_ready(&self) -> bool {
        self.coming.is_empty()
    }

    pub(super) fn wait(mut self) -> Result<Packed, OptimError> {
        for (part, values) in self.coming {
            let place =
                self.packed.host_mut(&part).expect("downloaded values are copied to the host's memory");
            place.copy_from_slice(&values.wait()?);
        }
        Ok(self.packed)
    }
}

/// Returns the fragment of each parameter that has elements, from the layout's end to its start. Fragments are
/// `count` runs of about the same number of elements. The last one always contains the first parameter, so that
/// parts of a model which share this parameter have it in the same fragment.
pub(super) fn fragments(layout: &ParamLayout, count: usize) -> Vec<usize> {
    let params = || layout.params().iter().rev().filter(|p| !p.shape.is_empty());
    let total: usize = params().map(|p| p.range().len()).sum();
    let mut before = 0;
    let fragment = |param: &Param| {
        let number = before * count / total;
        before += param.range().len();
        number
    };
    let mut of: Vec<usize> = params().map(fragment).collect();
    if let Some(first) = of.last_mut() {
        *first = count - 1;
    }
    of
}

/// Cuts a layout into buckets of at most `bytes`, from its end to its start. A larger parameter is a bucket
/// alone, and no bucket crosses the border of two of `count` [fragments], or has parameters of
/// different entries of `apart`. The slots are in the layout's order, the buckets in the order in which they
/// become complete from the layout's end.
pub(super) fn cut(
    layout: &ParamLayout,
    bytes: usize,
    count: usize,
    apart: &[Vec<Range<usize>>],
) -> (Vec<Slot>, Vec<Bucket>) {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut slots = Vec::new();
    let params = layout.params().iter().rev().filter(|p| !p.shape.is_empty());
    for (param, fragment) in params.zip(fragments(layout, count)) {
        let range = param.range();
        let apart = apart.iter().position(|ranges| ranges.iter().any(|r| r.contains(&range.start)));
        let fits = |b: &Bucket| {
            b.fragment == fragment && (b.len + range.len()).saturating_mul(size_of::<f32>()) <= bytes
        };
        let open = buckets.iter().rposition(|bucket| bucket.apart == apart);
        let index = open.filter(|&index| fits(&buckets[index])).unwrap_or(buckets.len());
        if index == buckets.len() {
            buckets.push(Bucket { fragment, apart, ..Bucket::default() });
        }
        let bucket = &mut buckets[index];
        bucket.len += range.len();
        bucket.params += 1;
        match bucket.pieces.last_mut() {
            Some(next) if next.start == range.end => next.start = range.start,
            _ => bucket.pieces.push(range.clone()),
        }
        let (name, shape) = (param.name.clone(), param.shape);
        slots.push(Slot { name, shape, key: range.start as u64, range, bucket: index, ready: false });
    }
    slots.reverse();
    if !apart.is_empty() {
        key_apart(&mut slots, &buckets, apart.len());
    }
    let buckets = in_order(&mut slots, buckets, apart.len());
    (slots, buckets)
}

/// Keys the parameters by the elements of those of the same holders before them: what else a rank has may
/// differ in length.
fn key_apart(slots: &mut [Slot], buckets: &[Bucket], apart: usize) {
    let mut before = vec![0_u64; 1 + apart];
    for slot in slots {
        let before = &mut before[buckets[slot.bucket].set()];
        slot.key = *before;
        *before += slot.range.len() as u64;
    }
}

/// Sorts the buckets by their last piece, which is nearest to the layout's start.
fn in_order(slots: &mut [Slot], buckets: Vec<Bucket>, apart: usize) -> Vec<Bucket> {
    let mut buckets: Vec<_> = buckets.into_iter().enumerate().collect();
    buckets.sort_by_key(|(_, bucket)| std::cmp::Reverse(bucket.pieces.last().map(|piece| piece.start)));
    let mut now = vec![0; buckets.len()];
    buckets.iter().enumerate().for_each(|(index, (was, _))| now[*was] = index);
    for slot in slots {
        slot.bucket = now[slot.bucket];
    }
    let mut numbers = vec![0; 1 + apart];
    let reversed = |(_, mut bucket): (usize, Bucket)| {
        bucket.pieces.reverse();
        let number = &mut numbers[bucket.set()];
        bucket.number = *number;
        *number += 1;
        bucket
    };
    buckets.into_iter().map(reversed).collect()
}

impl Bucket {
    /// Returns a number for the set of its holders, from 0 on.
    fn set(&self) -> usize {
        self.apart.map_or(0, |entry| 1 + entry)
    }

    /// Sets the shards into which the elements are packed from the next round on.
    pub(super) fn place(&mut self, shards: &[Range<usize>]) {
        self.parts.clear();
        self.packed = None;
        let mut start = 0;
        for piece in &self.pieces {
            for (shard, range) in shards.iter().enumerate() {
                let common = range.start.max(start)..range.end.min(start + piece.len());
                if !common.is_empty() {
                    let flat = piece.start + common.start - start..piece.start + common.end - start;
                    self.parts.push(Part { flat, shard, at: common.start - range.start });
                }
            }
            start += piece.len();
        }
    }

    /// Returns the ranges of the flat buffer, in order.
    pub(super) fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    /// Starts to fetch the elements from `flat`, into the buffers of the last round if these came back,
    /// otherwise into `new` ones.
    pub(super) fn fetch(
        &mut self,
        flat: &Tensor,
        new: impl FnOnce(usize) -> Result<Packed, OptimError>,
    ) -> Result<Fetch, OptimError> {
        let mut packed = self.packed.take().map_or_else(|| new(self.len), Ok)?;
        let mut coming = Vec::new();
        for part in &self.parts {
            let x = flat.view().part(part.flat.start, part.flat.len())?;
            match (x.host(), packed.host_mut(part)) {
                (Some(values), Some(place)) => place.copy_from_slice(values),
                (None, Some(_)) => coming.push((part.clone(), x.start_to_vec())),
                (_, None) => {
                    let y = packed.shard(part).view_mut().part(part.at, part.flat.len())?;
                    flat.device().run(Op::Cast { x, y })?;
                }
            }
        }
        Ok(Fetch { packed, coming })
    }

    /// Writes the packed means to their places in `flat`.
    pub(super) fn unpack(&mut self, flat: &mut Tensor) -> Result<(), OptimError> {
        let packed = self.packed.as_mut().expect("the mean of the bucket has arrived");
        let device = flat.device().clone();
        for part in self.parts.iter().filter_map(|part| part.within(self.own.as_ref())) {
            let part = &part;
            let mut y = flat.view_mut().part(part.flat.start, part.flat.len())?;
            if let Some(values) = packed.host(part) {
                y.write(values)?;
            } else {
                let x = packed.shard(part).view().part(part.at, part.flat.len())?;
                device.run(Op::Cast { x, y })?;
            }
        }
        Ok(())
    }

    /// Multiplies the elements in `flat`.
    pub(super) fn weigh(&self, flat: &mut Tensor, factor: f64) -> Result<(), OptimError> {
        self.pieces.iter().try_for_each(|piece| weigh_part(flat, piece.clone(), factor))
    }
}

#[cfg(test)]
#[expect(
    clippy::float_cmp,
    clippy::single_range_in_vec_init,
    reason = "copies are exact, and pieces are ranges"
)]
mod tests {
    use super::*;
    use farflung_tensor::Device;

    fn layout(lens: &[usize]) -> ParamLayout {
        ParamLayout::new(lens.iter().enumerate().map(|(i, &n)| (format!("p{i}"), Shape::from(n))))
    }

    #[test]
    fn buckets_run_from_the_end_to_the_start_and_hold_no_padding() {
        let (slots, buckets) = cut(&layout(&[64, 64, 10, 0, 200, 3]), 4 * 128, 1, &[]);
        // 3 and 200 do not fit together; 200 is too large and is a bucket alone; 10 + 64 fit, and 64 more do
        // not.
        let seen: Vec<_> = buckets.iter().map(|b| (b.pieces.clone(), b.len, b.params)).collect();
        assert_eq!(
            seen,
            [(vec![448..451], 3, 1), (vec![192..392], 200, 1), (vec![64..138], 74, 2), (vec![0..64], 64, 1)]
        );
        assert_eq!(slots.iter().map(|s| s.bucket).collect::<Vec<_>>(), [3, 2, 2, 1, 0]);
        assert_eq!(cut(&layout(&[]), 1, 1, &[]).1.len(), 0);
    }

    #[test]
    fn parameters_that_are_held_apart_are_in_buckets_of_their_own() {
        let (slots, buckets) = cut(&layout(&[64, 64, 64, 64, 64]), 128 * 4, 1, &[vec![64..128, 192..256]]);
        let seen: Vec<_> = buckets.iter().map(|b| (b.pieces.clone(), b.apart)).collect();
        assert_eq!(
            seen,
            [(vec![128..192, 256..320], None), (vec![64..128, 192..256], Some(0)), (vec![0..64], None)]
        );
        assert_eq!(slots.iter().map(|s| s.bucket).collect::<Vec<_>>(), [2, 1, 0, 1, 0]);
    }

    #[test]
    fn what_all_hold_is_numbered_alike_whatever_is_held_apart() {
        let numbered = |apart_len: usize| {
            let layout = layout(&[64, apart_len, 64, apart_len, 10]);
            let params = layout.params();
            let apart = [vec![params[1].range(), params[3].range()]];
            let (slots, buckets) = cut(&layout, 64 * 4, 1, &apart);
            let all = slots.iter().filter(|slot| buckets[slot.bucket].apart.is_none());
            all.map(|slot| (slot.key, buckets[slot.bucket].number)).collect::<Vec<_>>()
        };
        assert_eq!(numbered(64), [(0, 2), (64, 1), (128, 0)]);
        assert_eq!(numbered(640), numbered(64));
    }

    #[test]
    fn fragments_are_about_as_long_and_no_bucket_lies_in_two() {
        // The first parameter is in the last fragment, however long it is.
        assert_eq!(fragments(&layout(&[100, 10, 10, 10, 10]), 2), [0, 0, 0, 0, 1]);
        assert_eq!(fragments(&layout(&[10, 10, 10, 0, 10]), 4), [0, 1, 2, 3]);
        assert_eq!(fragments(&layout(&[10, 30]), 4), [0, 3]);
        assert!(fragments(&layout(&[]), 4).is_empty());
        let (_, buckets) = cut(&layout(&[10, 10, 10, 10]), usize::MAX, 2, &[]);
        assert_eq!(buckets.iter().map(|b| (b.fragment, b.len)).collect::<Vec<_>>(), [(0, 20), (1, 20)]);
    }

    #[test]
    fn unpacking_undoes_packing_and_leaves_padding_alone() {
        let layout = layout(&[65, 3, 64]);
        let (_, mut buckets) = cut(&layout, usize::MAX, 1, &[]);
        let cpu = Device::cpu(1).unwrap();
        let values: Vec<f32> = (0..layout.len()).map(|i| i as f32).collect();
        let flat = cpu.tensor(&values, layout.len()).unwrap();
        buckets[0].place(&[0..60, 60..70, 70..70, 70..132]);
        let shards = |_| {
            let shards = [60, 10, 0, 62].map(|n| cpu.zeros(n));
            Ok(Packed::Coded(shards.into_iter().collect::<Result<_, _>>()?))
        };
        let packed = buckets[0].fetch(&flat, shards).unwrap().wait().unwrap();
        let Packed::Coded(shards) = &packed else { panic!("{packed:?}") };
        let held: Vec<f32> = shards.iter().flat_map(|s| s.to_vec::<f32>().unwrap()).collect();
        assert_eq!(held, [&values[..65], &values[128..131], &values[192..]].concat());
        buckets[0].packed = Some(packed);
        let mut out = cpu.zeros(layout.len()).unwrap();
        buckets[0].unpack(&mut out).unwrap();
        let out = out.to_vec::<f32>().unwrap();
        for (i, v) in out.iter().enumerate() {
            let parameter = i < 65 || (128..131).contains(&i) || i >= 192;
            assert_eq!(*v, if parameter { i as f32 } else { 0.0 });
        }
    }
}
