//! SWARM's stochastic wiring: interleaved weighted round robin over the measured rates of a stage's peers.

use crate::ParallelError;

/// Tasks of a backward pass take this many times a forward's.
const BACKWARD: f64 = 2.5;

/// How much of a new measurement an average takes.
const SMOOTHING: f64 = 0.1;

/// A measured rate: an exponential average of seconds a task, without the bias of its start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerRate {
    average: f64,
    /// What is left of the start's weight.
    bias: f64,
    /// Tasks a second before anything was measured.
    initial: f64,
}

impl PeerRate {
    /// Before anything was measured.
    #[must_use]
    pub const fn new(initial: f64) -> Self {
        Self { average: 0.0, bias: 1.0, initial }
    }

    /// Takes up that a task took so many seconds.
    #[must_use]
    pub fn measured(mut self, seconds: f64) -> Self {
        self.average = (1.0 - SMOOTHING) * self.average + SMOOTHING * seconds;
        self.bias *= 1.0 - SMOOTHING;
        self
    }

    /// Tasks a second.
    #[must_use]
    pub fn tasks_per_second(&self) -> f64 {
        if self.bias < 1.0 && self.average > 0.0 { (1.0 - self.bias) / self.average } else { self.initial }
    }
}

/// What a trainer knows of the peers of one stage.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Wiring {
    peers: Vec<Peer>,
}

#[derive(Debug, Clone, PartialEq)]
struct Peer {
    /// Work that it was given, in seconds of its own.
    load: f64,
    rate: PeerRate,
    /// Whether it failed and has not been heard of since.
    is_banned: bool,
}

impl Wiring {
    /// Adds a peer; gives its number. It starts at the least load of the others: at 0 it would get all tasks
    /// until it has caught up with them.
    ///
    /// Errors: [`ParallelError::Zero`] for a rate that is not positive.
    pub fn join(&mut self, rate: PeerRate) -> Result<usize, ParallelError> {
        if rate.tasks_per_second().is_nan() || rate.tasks_per_second() <= 0.0 {
            let of = format!("peer {}", self.peers.len());
            return Err(ParallelError::Zero { of, field: "rate" });
        }
        let load = self.loads().fold(f64::INFINITY, f64::min);
        let load = if load.is_finite() { load } else { 0.0 };
        self.peers.push(Peer { load, rate, is_banned: false });
        Ok(self.peers.len() - 1)
    }

    fn loads(&self) -> impl Iterator<Item = f64> {
        self.peers.iter().filter(|peer| !peer.is_banned).map(|peer| peer.load)
    }

    /// The peer for a forward task of a size in samples: the one of the least load, ties to the lower number.
    /// Its load grows by the time that the task takes it. `None` where all are banned.
    ///
    /// Source: Ryabinin et al. 2023, "SWARM", algorithm 1, as released; there ties are decided by chance.
    pub fn forward(&mut self, samples: f64) -> Option<usize> {
        self.give(samples)
    }

    /// The same for a backward task, which takes 2.5 times as long.
    pub fn backward(&mut self, samples: f64) -> Option<usize> {
        self.give(BACKWARD * samples)
    }

    fn give(&mut self, size: f64) -> Option<usize> {
        let alive = self.peers.iter().enumerate().filter(|(_, peer)| !peer.is_banned);
        let (number, _) = alive.min_by(|(_, a), (_, b)| a.load.total_cmp(&b.load))?;
        let peer = &mut self.peers[number];
        peer.load += size / peer.rate.tasks_per_second();
        Some(number)
    }

    /// Takes up what a task took.
    pub fn measured(&mut self, peer: usize, seconds: f64) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.rate = peer.rate.measured(seconds);
        }
    }

    /// A peer failed: it gets nothing until it is renewed.
    pub fn ban(&mut self, peer: usize) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.is_banned = true;
        }
    }

    /// A banned peer was heard of again: it goes on at the least load of the others, or its own if that is
    /// more.
    pub fn renew(&mut self, peer: usize) {
        let least = self.loads().fold(f64::INFINITY, f64::min);
        if let Some(peer) = self.peers.get_mut(peer).filter(|peer| peer.is_banned) {
            peer.is_banned = false;
            if least.is_finite() {
                peer.load = peer.load.max(least);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wiring(rates: &[f64]) -> Wiring {
        let mut wiring = Wiring::default();
        for &rate in rates {
            wiring.join(PeerRate::new(rate)).unwrap();
        }
        wiring
    }

    fn sequence(wiring: &mut Wiring, tasks: usize) -> Vec<usize> {
        (0..tasks).map(|_| wiring.forward(1.0).unwrap()).collect()
    }

    #[test]
    fn tasks_interleave_by_rate() {
        let mut three = wiring(&[4.0, 2.0, 1.0]);
        assert_eq!(sequence(&mut three, 14), [0, 1, 2, 0, 0, 1, 0, 0, 1, 2, 0, 0, 1, 0]);
        let all = sequence(&mut wiring(&[4.0, 2.0, 1.0]), 700);
        assert_eq!([0, 1, 2].map(|peer| all.iter().filter(|&&p| p == peer).count()), [400, 200, 100]);
        assert_eq!(sequence(&mut wiring(&[3.0, 1.0]), 8), [0, 1, 0, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn a_newcomer_gets_its_share_and_no_more() {
        let mut two = wiring(&[1.0, 1.0]);
        sequence(&mut two, 100);
        two.join(PeerRate::new(1.0)).unwrap();
        let next = sequence(&mut two, 30);
        assert_eq!(next.iter().filter(|&&peer| peer == 2).count(), 10);
        assert!(two.join(PeerRate::new(0.0)).is_err() && two.join(PeerRate::new(f64::NAN)).is_err());
    }

    #[test]
    fn banned_peers_get_nothing_until_they_are_renewed() {
        let mut two = wiring(&[1.0, 1.0]);
        two.ban(0);
        assert_eq!(sequence(&mut two, 3), [1, 1, 1]);
        two.renew(0);
        assert_eq!(sequence(&mut two, 4), [0, 1, 0, 1]);
        two.ban(0);
        two.ban(1);
        assert_eq!(two.forward(1.0), None);
    }

    #[test]
    fn the_average_has_no_bias_at_its_start() {
        let once = PeerRate::new(1.0).measured(0.5);
        assert!((once.tasks_per_second() - 2.0).abs() < 1e-12);
        // (0.9 * 0.1 * 0.5 + 0.1 * 1.0) / (1 - 0.81).
        let twice = once.measured(1.0);
        assert!((twice.tasks_per_second() - 0.19 / 0.145).abs() < 1e-12);
        let mut wiring = wiring(&[1.0, 1.0]);
        wiring.measured(0, 0.25);
        assert_eq!(sequence(&mut wiring, 6).iter().filter(|&&peer| peer == 0).count(), 4);
        let mut back = self::wiring(&[1.0, 1.0]);
        assert_eq!((back.backward(1.0), back.forward(1.0), back.forward(1.0)), (Some(0), Some(1), Some(1)));
    }
}
