//! What an executor exchanges with other ranks during a pass.

use farflung_base::{Pending, Rank};
use farflung_comm::{CommError, Communicator, WaitMode};
use farflung_parallel::pipeline::{Content, Message, PollArrivals};
use farflung_tensor::{DType, Tensor};

use super::{Executor, Flow, Pass};
use crate::floats::{floats, le_bytes};
use crate::train::boundary::BoundaryMessage;
use crate::train::kept_pass::KeptMessage;
use crate::train::spent::add_since;
use crate::{Error, Result};

/// How messages of a pass reach other ranks.
#[derive(Debug)]
pub(in crate::train) enum Wires {
    /// Over a communicator. A stop cancels its operations sooner than those of the executor's other one.
    Linked(Communicator),
    /// Nothing is sent: only the size of the largest message is counted, in bytes, for an executor on a device
    /// that only counts.
    Counted(u64),
}

/// A message that may still be in flight.
type Bytes = Pending<Result<Vec<u8>, CommError>>;

/// A message that another rank sends, unless the computation that needs it was done before the pass.
#[derive(Debug)]
pub(in crate::train) struct Awaited {
    message: Message,
    arrival: Arrival,
}

#[derive(Debug)]
enum Arrival {
    Bytes(Bytes),
    Kept,
    Counted,
}

impl Executor {
    /// Returns the number of a message's microbatch and the numbers of its samples, over all steps and
    /// replicas. `None` in an evaluation, which sends values unencoded and leaves the codecs' state unchanged.
    fn boundary_message(&self, message: Message) -> Option<(u64, Vec<u64>)> {
        let Pass::Training { first } = self.pass else { return None };
        let microbatch = first + u64::from(message.microbatch);
        Some((microbatch, self.source.windows_of(microbatch)))
    }

    /// Returns a tag that is unique among the messages of a pass.
    fn tag(&self, message: Message) -> u32 {
        let microbatch = message.from.0 * self.passing + message.microbatch;
        let cell = microbatch * self.slices.len() as u32 + u32::from(message.slice);
        2 * cell + u32::from(message.content == Content::Gradient)
    }

    /// Returns a message as it is sent.
    fn encoded(&mut self, message: Message, data: &Tensor) -> Result<Vec<u8>> {
        let values = data.to_vec::<f32>()?;
        let coded = match self.boundary_message(message) {
            Some((microbatch, samples)) => {
                self.boundaries.encode(BoundaryMessage { message, samples: &samples, microbatch }, &values)?
            }
            None => None,
        };
        let mut bytes = coded.unwrap_or_else(|| le_bytes(&values));
        if self.pass != Pass::Evaluation {
            self.routers.append(message.microbatch, &mut bytes);
        }
        let Message { microbatch, content, .. } = message;
        self.kept.keep(KeptMessage { microbatch, content }, &bytes);
        Ok(bytes)
    }

    /// Returns whether another rank needs a message in this pass.
    fn needs(&self, Message { from, content, microbatch, .. }: Message) -> bool {
        self.kept.needs(microbatch, self.placement.part(from), content)
    }

    /// Returns the shape of a message's values.
    fn message_shape(&self, message: Message) -> [usize; 3] {
        let positions = self.positions(message.slice).len();
        let own = self.parts.values().next().map_or(positions, |part| part.stage.own_positions(positions));
        [self.source.batch(), own, self.dim]
    }

    pub(super) fn send_message(&mut self, to: Rank, message: Message, data: Flow) -> Result<()> {
        if matches!(self.wires, Wires::Counted(_)) {
            self.count(message);
            return Ok(());
        }
        let bytes = match data {
            Flow::Values(values) => self.encoded(message, &values)?,
            Flow::Kept if !self.needs(message) => return Ok(()),
            Flow::Kept => {
                let Message { microbatch, content, .. } = message;
                let kept = self.kept.sent(KeptMessage { microbatch, content }).map(<[u8]>::to_vec);
                // Only messages that were kept are announced to the other ranks.
                let problem = "was not kept";
                kept.ok_or_else(|| Error::Message { message: message.to_string(), problem })?
            }
        };
        let Wires::Linked(messages) = &self.wires else { return Ok(()) };
        if self.needs(message) {
            let to = self.pipeline[to.index()];
            let sending = messages.start_send(to, self.tag(message), bytes);
            self.sending.push(sending);
        }
        Ok(())
    }

    /// Counts a message, on wires that only count.
    fn count(&mut self, message: Message) {
        let size = (self.message_shape(message).iter().product::<usize>() * size_of::<f32>()) as u64;
        if let Wires::Counted(largest) = &mut self.wires {
            *largest = size.max(*largest);
        }
    }

    pub(super) fn post_message(&self, from: Rank, message: Message) -> Awaited {
        let arrival = match &self.wires {
            _ if !self.needs(message) => Arrival::Kept,
            Wires::Counted(_) => Arrival::Counted,
            Wires::Linked(messages) => {
                Arrival::Bytes(messages.start_recv(self.pipeline[from.index()], self.tag(message)))
            }
        };
        Awaited { message, arrival }
    }

    pub(super) fn take_message(&mut self, Awaited { message, arrival }: Awaited) -> Result<Flow> {
        let shape = self.message_shape(message);
        let pending = match arrival {
            Arrival::Kept => return Ok(Flow::Kept),
            Arrival::Counted => {
                self.count(message);
                return Ok(Flow::Values(self.device.empty(DType::F32, shape)?));
            }
            Arrival::Bytes(pending) => pending,
        };
        let begun = self.comm.now();
        let bytes = pending.wait()?;
        add_since(begun, &self.comm, &mut self.spent.wait);
        let too_short = || Error::Message {
            message: message.to_string(),
            problem: "does not have the length of a microbatch's hidden states",
        };
        let bytes = match self.pass {
            Pass::Training { .. } => self.routers.take(message.microbatch, &bytes).ok_or_else(too_short)?,
            Pass::Evaluation => &bytes,
        };
        let count = shape.iter().product();
        let coded = match self.boundary_message(message) {
            Some((microbatch, samples)) => self.boundaries.decode(
                BoundaryMessage { message, samples: &samples, microbatch },
                bytes,
                count,
            )?,
            None => None,
        };
        let values = coded.or_else(|| floats(bytes, count)).ok_or_else(too_short)?;
        Ok(Flow::Values(self.device.tensor(&values, shape)?))
    }
}

impl PollArrivals for Executor {
    fn arrived(&mut self, awaited: &mut [&mut Awaited]) -> Option<usize> {
        match awaited.iter().position(|awaited| !awaited.is_on_its_way()) {
            Some(here) => Some(here),
            None => self.comm.first(&mut on_their_way(awaited), WaitMode::Now),
        }
    }

    fn first(&mut self, awaited: &mut [&mut Awaited]) -> usize {
        if let Some(here) = awaited.iter().position(|awaited| !awaited.is_on_its_way()) {
            return here;
        }
        // `first` returns `None` only if the network has ended. Waiting for the first message then returns the
        // error.
        let begun = self.comm.now();
        let first = self.comm.first(&mut on_their_way(awaited), WaitMode::UntilOne).unwrap_or(0);
        add_since(begun, &self.comm, &mut self.spent.wait);
        first
    }
}

impl Awaited {
    const fn is_on_its_way(&self) -> bool {
        matches!(self.arrival, Arrival::Bytes(_))
    }
}

fn on_their_way<'a>(awaited: &'a mut [&mut Awaited]) -> Vec<&'a mut Bytes> {
    let bytes = awaited.iter_mut().filter_map(|awaited| match &mut awaited.arrival {
        Arrival::Bytes(bytes) => Some(bytes),
        Arrival::Kept | Arrival::Counted => None,
    });
    bytes.collect()
}
