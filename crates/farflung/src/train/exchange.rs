//! An exchange of the gradients of the two parts that share the token table, window by window: a table may be
//! most of what a rank has room for.

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::{Pending, Rank};
use farflung_comm::{CommError, Communicator};
use farflung_tensor::{Tensor, View};

use crate::config::choice::StatePlace;
use crate::floats::{floats, le_bytes};
use crate::{Error, Result};

/// Number of values of a window.
const WINDOW: usize = 1 << 20;
/// Number of tags of an exchange. Windows use them in turn.
const TAGS: u32 = 1 << 12;

/// Returns the number of windows that are on their way at a time: all, so that links never wait for the
/// ranks, or few, where memory is what a run has least of.
pub(super) fn ahead(state: StatePlace) -> usize {
    if state == StatePlace::Disk { 4 } else { usize::MAX }
}

/// Returns the bytes that an exchange holds at most, besides the gradients of a table of this many bytes.
pub(super) fn held(table: u64, ahead: usize) -> u64 {
    let window = (WINDOW * size_of::<f32>()) as u64;
    let ahead = table.div_ceil(window).min(ahead as u64);
    // What is sent and what arrives, and the window that is added up.
    (2 * ahead + 1) * window.min(table)
}

/// The ranks between which windows go.
#[derive(Debug, Clone)]
pub(super) struct Between {
    pub(super) group: Communicator,
    /// The ranks that take this rank's windows.
    pub(super) to: Vec<Rank>,
    /// The rank whose windows it takes.
    pub(super) from: Rank,
    /// Number of the exchange among those of the group.
    pub(super) round: u32,
    /// Number of windows on their way at a time.
    pub(super) ahead: usize,
}

/// A window on its way to other ranks.
type Sent = Vec<Pending<std::result::Result<(), CommError>>>;

impl Between {
    /// Returns the tag of the window that begins at element `start` of a table.
    fn tag(&self, start: usize) -> u32 {
        self.round.wrapping_mul(TAGS).wrapping_add((start / WINDOW) as u32 % TAGS)
    }

    fn send(&self, start: usize, values: &View<'_>) -> Result<Sent> {
        let values = values.to_vec::<f32>()?;
        let send = |&other| self.group.start_send(other, self.tag(start), le_bytes(&values));
        Ok(self.to.iter().map(send).collect())
    }

    /// Sends a range of a buffer.
    pub(super) fn give(&self, buffer: &Tensor, table: &Range<usize>) -> Result<()> {
        let mut leaving = VecDeque::new();
        for window in windows(table) {
            let values = buffer.view().part(window.start, window.len())?;
            leaving.push_back(self.send(window.start - table.start, &values)?);
            if leaving.len() == self.ahead {
                wait(leaving.pop_front())?;
            }
        }
        leaving.into_iter().try_for_each(|sent| wait(Some(sent)))
    }

    /// Overwrites a range of a buffer by what the other rank sends.
    pub(super) fn take(&self, buffer: &mut Tensor, table: &Range<usize>) -> Result<()> {
        for window in windows(table) {
            let bytes = self.group.recv(self.from, self.tag(window.start - table.start))?;
            let values = received(&bytes, window.len())?;
            buffer.view_mut().part(window.start, window.len())?.write(&values)?;
        }
        Ok(())
    }
}

fn wait(sent: Option<Sent>) -> Result<()> {
    Ok(sent.into_iter().flatten().try_for_each(Pending::wait)?)
}

/// Returns the windows of a range, in order.
pub(super) fn windows(of: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = of.end;
    of.clone().step_by(WINDOW).map(move |start| start..end.min(start + WINDOW))
}

fn received(bytes: &[u8], count: usize) -> Result<Vec<f32>> {
    let (message, problem) =
        ("a part of the token table".to_owned(), "does not have the length of that part");
    floats(bytes, count).ok_or(Error::Message { message, problem })
}

/// An exchange of both parts' gradients that has been started.
#[derive(Debug)]
pub(super) struct Exchange {
    between: Between,
    /// Where the table begins.
    start: usize,
    /// The windows on their way, and those after them.
    coming: VecDeque<Coming>,
    later: VecDeque<Range<usize>>,
}

#[derive(Debug)]
struct Coming {
    window: Range<usize>,
    theirs: Pending<std::result::Result<Vec<u8>, CommError>>,
    sent: Sent,
}

impl Exchange {
    /// Starts to exchange a range of gradients, which must not change until they are added up.
    pub(super) fn start(between: Between, grads: &Tensor, table: Range<usize>) -> Result<Self> {
        let (start, later) = (table.start, windows(&table).collect());
        let mut this = Self { between, start, coming: VecDeque::new(), later };
        while this.coming.len() < this.between.ahead && this.begin(grads)? {}
        Ok(this)
    }

    /// Begins the next window, and returns whether there was one.
    fn begin(&mut self, grads: &Tensor) -> Result<bool> {
        let Some(window) = self.later.pop_front() else { return Ok(false) };
        let start = window.start - self.start;
        let theirs = self.between.group.start_recv(self.between.from, self.between.tag(start));
        let sent = self.between.send(start, &grads.view().part(window.start, window.len())?)?;
        self.coming.push_back(Coming { window, theirs, sent });
        Ok(true)
    }

    /// Replaces the gradients by the sum, which has the same bits on both sides.
    pub(super) fn add_to(mut self, grads: &mut Tensor) -> Result<()> {
        while let Some(Coming { window, theirs, sent }) = self.coming.pop_front() {
            let theirs = received(&theirs.wait()?, window.len())?;
            wait(Some(sent))?;
            let mut part = grads.view_mut().part(window.start, window.len())?;
            let mut sum = part.as_view().to_vec::<f32>()?;
            sum.iter_mut().zip(&theirs).for_each(|(sum, theirs)| *sum += theirs);
            part.write(&sum)?;
            drop((sum, theirs));
            self.begin(grads)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use farflung_comm::memory;
    use farflung_tensor::Device;

    use super::*;

    #[test]
    fn tables_of_any_number_of_windows_are_added_up_and_copied() {
        for (len, ahead) in [(1, 4), (WINDOW, 4), (6 * WINDOW + 5, 4), (3 * WINDOW, usize::MAX)] {
            let table = 3..3 + len;
            let ranks: Vec<_> = std::thread::scope(|scope| {
                let rank = |endpoint| {
                    let group = Communicator::new(endpoint);
                    let (own, table) = (group.rank().0, 3..3 + len);
                    let other = Rank(1 - own);
                    let (to, from) = (vec![other], other);
                    let between =
                        |round| Between { group: group.clone(), to: to.clone(), from, round, ahead };
                    let value = |at: usize| (at % 1000) as f32 + own as f32;
                    let values: Vec<f32> = (0..len + 5).map(value).collect();
                    let mut grads = Device::cpu(1).unwrap().tensor(&values, values.len()).unwrap();
                    Exchange::start(between(7), &grads, table.clone()).unwrap().add_to(&mut grads).unwrap();
                    let sums = grads.to_vec::<f32>().unwrap();
                    match own {
                        0 => between(8).give(&grads, &(0..len + 5)).unwrap(),
                        _ => between(8).take(&mut grads, &(0..len + 5)).unwrap(),
                    }
                    [sums, grads.to_vec::<f32>().unwrap()]
                };
                let all: Vec<_> =
                    memory::cluster(2).into_iter().map(|end| scope.spawn(move || rank(end))).collect();
                all.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let [one, other] = &ranks[..] else { unreachable!("two ranks") };
            let sum = |at: usize| ((2 * (at % 1000) + 1) as f32).to_bits();
            assert!(table.clone().all(|at| one[0][at].to_bits() == sum(at)));
            assert!(one[0][table.clone()] == other[0][table] && one[0][..3] != other[0][..3]);
            assert!(one[1] == one[0] && other[1] == one[0]);
        }
        let few = [40, 4 << 20, 5 << 20, 1 << 30].map(|table| held(table, 4));
        assert_eq!(few, [120, 12 << 20, 20 << 20, 36 << 20]);
        assert_eq!(held(1 << 30, usize::MAX), (2 << 30) + (4 << 20));
    }
}
