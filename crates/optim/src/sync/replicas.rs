//! Decentralised training with compressed messages. Neighbours hold a replica of each worker's parameters, and
//! workers send compressed changes of these replicas.

use farflung_compress::{Compressor, Payload, PayloadRef, RoundKey};
use farflung_tensor::Tensor;

use super::exchange::{Exchange, NeighbourMessage, Packing, from_bytes, to_bytes};
use super::mean::{CommonMean, copy};
use super::neighbours::{Graph, Neighbour};
use super::saved::optional;
use super::{Buffers, OWN_COPIES, StepEnd, SyncMethod, SyncSettings, Synchroniser};
use crate::{Average, AverageConfig, OptimError};

/// Row of [`METHODS`](super::METHODS) for [`Replicas`] in which a worker's parameters equal its replica.
///
/// Source: Gan et al. 2021, "BAGUA", `low_precision_decentralized`; Tang et al. 2018, "Communication
/// compression for decentralized training", DCD-PSGD.
pub const LOW_PRECISION: SyncMethod = SyncMethod {
    name: "low-precision",
    summary: "as d-psgd, but changes of parameters are sent, in 8 bits",
    each_step: false,
    reads: &["sync-every"],
    overlaps: true,
    replicas_differ: true,
    timed: false,
    every: None,
    codec: Some("minmax8"),
    codes_server_changes: false,
    compensates: true,
    changing_weights: false,
    outer_momentum: None,
    on_member_loss: OWN_COPIES,
    // Held: own replica, those of both neighbours, the mean. Saved: own replica, own parameters.
    buffers: |_| Buffers { held: 4, saved: 2 },
    build: |s| Ok(Box::new(Replicas::new(s, Rule::Sent)?)),
};

/// Row of [`METHODS`](super::METHODS) for [`Replicas`] in which a worker's parameters differ from its replica.
///
/// Source: Koloskova et al. 2019, "Decentralized stochastic optimization and gossip algorithms with compressed
/// communication", Alg. 2 (`CHOCO-SGD`).
pub const CHOCO: SyncMethod = SyncMethod {
    name: "choco",
    summary: "as low-precision, for codecs that lose more; a step moves by --consensus-rate of the distance \
              to the neighbours",
    reads: &["sync-every", "consensus-rate"],
    codec: Some("sign"),
    build: |s| {
        let rate = s.consensus_rate;
        Ok(Box::new(Replicas::new(s, Rule::Consensus { rate })?))
    },
    ..LOW_PRECISION
};

/// Rule by which a worker updates its parameters `x` from its own replica `w` and its neighbours' replicas
/// `w_j`, and computes the change `u` that it sends. `C` is the codec.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// `u = C(x - w + sum W_ij (w_j - w))`, and `x = w + u`.
    Sent,
    /// `x += rate sum W_ij (w_j - w)`, and `u = C(x - w)`.
    Consensus {
        /// Part of the distance to its neighbours that a worker moves. It must be small if the codec loses
        /// much.
        rate: f64,
    },
}

/// Workers on a ring whose weights `W` are those of [`Graph::weighted`]. A worker's replica is held by the
/// worker itself and by its neighbours, and starts as the initial parameters. After each step a worker sends a
/// change `u` by a [`Rule`], and all holders of its replica add `u` to it. A message has the time of the next
/// step to arrive, and no rule needs it sooner.
///
/// What a codec loses of a difference stays in the difference, so codecs work without error feedback. Workers
/// always differ a little; the model of the run is their mean, averaged as f32. A resumed run begins with a
/// round in which whole replicas are sent as f32. Differs from CHOCO-SGD: neighbours' replicas are used one
/// step later.
#[derive(Debug)]
pub struct Replicas {
    rule: Rule,
    every: u64,
    packing: Packing,
    codec: Box<dyn Compressor>,
    seed: u64,
    /// Replica of this worker, which its neighbours hold too.
    own: Tensor,
    /// Replicas of neighbours, in the order of the graph.
    others: Vec<Vec<f32>>,
    /// Whether `others` is valid.
    known: bool,
    flight: Option<Exchange>,
    /// Weights of all workers.
    weights: Vec<f64>,
    mean: CommonMean,
    rounds: u64,
}

impl Replicas {
    /// Creates the method on a ring over the ranks of `settings`.
    ///
    /// Errors: those of [`Average::new`]; [`OptimError::Setting`] if a rate is not above 0 and at most 1;
    /// [`OptimError::NotACodec`] for a protocol in place of a codec.
    pub fn new(settings: SyncSettings<'_>, rule: Rule) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, every, params, weights, .. } = settings;
        if let Rule::Consensus { rate: value } = rule
            && !(value > 0.0 && value <= 1.0)
        {
            let (transform, field, expected) = ("sync", "consensus-rate", "above 0 and at most 1");
            return Err(OptimError::Setting { transform, field, value, expected });
        }
        let codec = average.codec.memoryless()?;
        let seed = average.seed;
        // The mean is the model that is evaluated and saved, so it is averaged without a codec.
        let average = AverageConfig { codec: super::Coding::default(), warmup: 0, ..average };
        let mut own = device.zeros(layout.len())?;
        copy(params, &mut own)?;
        let packing = Packing::new(layout);
        let average = Average::new(comm, device, layout, average)?;
        let values = packing.pack(params)?;
        let others = neighbours(&average, &weights).into_iter().map(|_| values.clone()).collect();
        Ok(Self {
            rule,
            every: every.max(1),
            packing,
            codec,
            seed,
            own,
            others,
            known: true,
            flight: None,
            mean: CommonMean::new(average, &weights, device, layout)?,
            weights,
            rounds: 0,
        })
    }

    /// Sends `bytes` to both neighbours and starts to receive theirs.
    fn start(&self, bytes: &[u8]) -> Exchange {
        let comm = self.mean.average.communicator();
        Exchange::start(comm, Graph::Ring.weighted(comm.rank().0, &self.weights, 0), self.rounds, bytes)
    }

    /// Adds to the replicas of neighbours the changes that these neighbours sent.
    fn arrive(&mut self) -> Result<(), OptimError> {
        let Some(flight) = self.flight.take() else { return Ok(()) };
        let mut change = vec![0.0; self.packing.len()];
        for (NeighbourMessage { bytes, .. }, other) in flight.wait()?.iter().zip(&mut self.others) {
            self.codec.decompress(PayloadRef::parse(bytes)?, &mut change)?;
            other.iter_mut().zip(&change).for_each(|(w, u)| *w += u);
        }
        Ok(())
    }

    /// Receives neighbours' replicas as the neighbours themselves hold them.
    fn receive_replicas(&mut self) -> Result<(), OptimError> {
        let own = self.packing.pack(&self.own)?;
        let arrived = self.start(&to_bytes(&own)).wait()?;
        let read = |arrived: &NeighbourMessage| from_bytes(&arrived.bytes, own.len(), arrived.from);
        self.others = arrived.iter().map(read).collect::<Result<_, _>>()?;
        self.known = true;
        Ok(())
    }

    /// Moves `x` towards the neighbours: adds `rate` times the weighted differences between their replicas and
    /// the own one.
    fn approach(&self, x: &mut [f32], own: &[f32], rate: f64) {
        for (Neighbour { weight, .. }, other) in
            neighbours(&self.mean.average, &self.weights).iter().zip(&self.others)
        {
            let part = (rate * weight) as f32;
            x.iter_mut()
                .zip(other.iter().zip(own))
                .for_each(|(x, (theirs, own))| *x += part * (theirs - own));
        }
    }
}

/// Returns the ranks whose replicas a rank holds, with their weights on the ring.
fn neighbours(average: &Average, weights: &[f64]) -> Vec<Neighbour> {
    Graph::Ring.weighted(average.communicator().rank().0, weights, 0).from
}

impl Synchroniser for Replicas {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn mix(&mut self, params: &mut Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        if !self.known {
            self.receive_replicas()?;
        }
        self.arrive()?;
        let mut x = self.packing.pack(params)?;
        let mut own = self.packing.pack(&self.own)?;
        match self.rule {
            Rule::Sent => self.approach(&mut x, &own, 1.0),
            Rule::Consensus { rate } => self.approach(&mut x, &own, rate),
        }
        let difference: Vec<f32> = x.iter().zip(&own).map(|(x, own)| x - own).collect();
        let rank = self.mean.average.communicator().rank();
        let key = RoundKey { seed: self.seed, round: self.rounds, shard: 0, rank };
        let mut payload = Payload::new();
        self.codec.compress(&difference, key, &mut payload)?;
        let mut sent = difference;
        self.codec.decompress(payload.view(), &mut sent)?;
        own.iter_mut().zip(&sent).for_each(|(w, u)| *w += u);
        self.packing.unpack(&own, &mut self.own)?;
        let x = if self.rule == Rule::Sent { &own } else { &x };
        self.packing.unpack(x, params)?;
        if !after.last {
            self.flight = Some(self.start(payload.as_bytes()));
        }
        self.rounds += 1;
        Ok(())
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.step.is_multiple_of(self.every) || after.last
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, _: f64) -> Result<(), OptimError> {
        self.mean.exchange(params, after.last)
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.mean.exchanged()
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        self.mean.prepare()
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        self.mean.commit(params)
    }
    fn replicas_differ(&self) -> bool {
        true
    }
    fn gather_common(&mut self, params: &Tensor) -> Result<(), OptimError> {
        self.mean.gather(params)
    }
    fn common(&self) -> Option<&Tensor> {
        self.mean.common()
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        self.arrive()
    }
    fn drop_in_flight(&mut self) {
        (self.flight, self.known) = (None, false);
        self.mean.average.open();
    }
    fn rollback(&mut self) {
        self.mean.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        copy(params, &mut self.own)
    }
    fn steps(&self) -> u64 {
        self.rounds
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        Vec::new()
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        vec![("replica", &self.own)]
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.own.shape().len();
        if let Some(own) = optional(get, "replica", expected)? {
            self.own.write(&own)?;
        }
        // Neighbours may have started anew, or may have dropped what was in flight.
        (self.rounds, self.known, self.flight) = (steps, false, None);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.mean.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.mean.average
    }
}
