//! SWARM's stochastic wiring: interleaved weighted round robin over the measured rates of a stage's peers.

use crate::ParallelError;

/// Time of a backward task relative to a forward task.
const BACKWARD: f64 = 2.5;

/// Weight of a new measurement in the exponential average.
const SMOOTHING: f64 = 0.1;

/// The measured rate of a peer: a bias-corrected exponential average of the seconds per task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerRate {
    average: f64,
    /// Remaining weight of the initial value 0 of `average`, for bias correction.
    bias: f64,
    /// Tasks per second assumed before the first measurement.
    initial: f64,
}

impl PeerRate {
    /// Creates a rate without measurements, which is `initial` tasks per second.
    #[must_use]
    pub const fn new(initial: f64) -> Self {
        Self { average: 0.0, bias: 1.0, initial }
    }

    /// Returns the rate after another task that took this many seconds.
    #[must_use]
    pub fn measured(mut self, seconds: f64) -> Self {
        self.average = (1.0 - SMOOTHING) * self.average + SMOOTHING * seconds;
        self.bias *= 1.0 - SMOOTHING;
        self
    }

    /// Returns the rate in tasks per second.
    #[must_use]
    pub fn tasks_per_second(&self) -> f64 {
        if self.bias < 1.0 && self.average > 0.0 { (1.0 - self.bias) / self.average } else { self.initial }
    }
}

/// A trainer's state about the peers of one stage: their measured rates and the work assigned to them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Wiring {
    peers: Vec<Peer>,
}

#[derive(Debug, Clone, PartialEq)]
struct Peer {
    /// Work assigned to the peer, in seconds at its own rate.
    load: f64,
    rate: PeerRate,
    /// Whether the peer failed and has not been renewed since.
    is_banned: bool,
}

impl Wiring {
    /// Adds a peer and returns its number. It starts with the lowest load of the other peers: with 0 it would
    /// get all tasks until its load had caught up.
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

    /// Assigns a forward task of `samples` samples to the peer with the lowest load and returns its number; the
    /// lower number if equal. The peer's load grows by the time that the task takes on it. Returns `None` if
    /// all peers are banned.
    ///
    /// Source: Ryabinin et al. 2023, "SWARM", algorithm 1, as released. Differs: the released code breaks ties
    /// at random.
    pub fn forward(&mut self, samples: f64) -> Option<usize> {
        self.give(samples)
    }

    /// Assigns a backward task as [`Wiring::forward`] does. It takes 2.5 times as long as a forward task.
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

    /// Records the time of a task on a peer, in seconds.
    pub fn measured(&mut self, peer: usize, seconds: f64) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.rate = peer.rate.measured(seconds);
        }
    }

    /// Bans a failed peer: it gets no tasks until [`Wiring::renew`].
    pub fn ban(&mut self, peer: usize) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.is_banned = true;
        }
    }

    /// Ends the ban of a peer. It continues with its own load or the lowest load of the other peers, whichever
    /// is higher.
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
        // Bias-corrected average: (0.9 * 0.1 * 0.5 + 0.1 * 1.0) / (1 - 0.81) seconds.
        let twice = once.measured(1.0);
        assert!((twice.tasks_per_second() - 0.19 / 0.145).abs() < 1e-12);
        let mut wiring = wiring(&[1.0, 1.0]);
        wiring.measured(0, 0.25);
        assert_eq!(sequence(&mut wiring, 6).iter().filter(|&&peer| peer == 0).count(), 4);
        let mut back = self::wiring(&[1.0, 1.0]);
        assert_eq!((back.backward(1.0), back.forward(1.0), back.forward(1.0)), (Some(0), Some(1), Some(1)));
    }
}
