//! Computes the time that a run would have taken with other ways of synchronising: the table at the end of a
//! training run. It only computes with the figures of the run and measures nothing itself.

use std::fmt;

use farflung_base::{Bytes, Link, Nanos, Rank};

use crate::average::AllReduceTime;
use crate::{
    Algorithm, Codec, Cost, Mesh, ModelShape, Overlap, ParallelError, RankCost, Replicas, Sync, Timeline,
    simulate_replicas,
};

/// The figures of the run. Its ranks are equal, and every pair has the same link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WhatIf {
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of ranks.
    pub ranks: u32,
    /// Link between any two ranks.
    pub link: Link,
    /// Number of optimizer steps of the run.
    pub steps: u32,
    /// Time of one rank's forward and backward in one step, treated as one microbatch.
    pub compute: Nanos,
    /// Time of one rank's optimizer in one step.
    pub optimizer: Nanos,
    /// Maximum number of buckets in rows with overlap. The fastest power of two up to it is used.
    pub buckets: u32,
    /// Codec of the run. F32 is compared too.
    pub codec: Codec,
    /// Number of local steps in `DiLoCo` rows. 1 or less: no such rows.
    pub every: u32,
}

/// One method by which the run could have synchronised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComparisonRow {
    /// The method of synchronising.
    pub sync: Sync,
    /// Algorithm of averages.
    pub algorithm: Algorithm,
    /// Codec of the values sent.
    pub codec: Codec,
    /// Time of the whole run.
    pub time: Nanos,
    /// Bytes that a rank sends in the whole run.
    pub sent: Bytes,
}

/// The compared rows. The first is plain synchronous f32 training, the baseline for the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The run that is compared.
    pub run: WhatIf,
    /// The rows; at least the baseline.
    pub rows: Vec<ComparisonRow>,
}

impl WhatIf {
    /// Algorithms considered for the averages of equal ranks.
    pub const ALGORITHMS: [Algorithm; 3] = [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct];

    /// Computes the rows. `price` returns the times of collectives.
    ///
    /// The baseline is a ring all-reduce of f32 gradients after each backward. The other rows use the fastest
    /// of [`WhatIf::ALGORITHMS`] for which `price` returns a time: ddp with overlap and `DiLoCo`, each in f32
    /// and in the run's codec.
    ///
    /// Errors: [`ParallelError::Zero`] for no parameters or steps; [`ParallelError::EmptyAxis`] for no ranks;
    /// [`ParallelError::TooManyRanks`] above [`Mesh::MAX_RANKS`].
    pub fn answer(&self, price: AllReduceTime<'_>) -> Result<Answer, ParallelError> {
        if self.steps == 0 {
            return Err(ParallelError::Zero { of: "the run".to_owned(), field: "steps" });
        }
        let plain = Sync::Ddp { overlap: Overlap::None, buckets: 1 };
        let overlapped = (0..32).map(|i| 1 << i).take_while(|&b| b <= self.buckets.max(1));
        let overlapped = overlapped.map(|buckets| Sync::Ddp { overlap: Overlap::WithBackward, buckets });
        let mut rows = vec![self.row(&[plain], &Codec::F32, &[Algorithm::Ring], price)?];
        let mut codecs = vec![Codec::F32];
        if self.codec != Codec::F32 {
            codecs.push(self.codec.clone());
        }
        let mut ways = vec![overlapped.collect::<Vec<_>>()];
        if self.every > 1 {
            ways.push(vec![Sync::DiLoCo { every: self.every }]);
        }
        for syncs in ways {
            for codec in &codecs {
                rows.push(self.row(&syncs, codec, &Self::ALGORITHMS, price)?);
            }
        }
        Ok(Answer { run: self.clone(), rows })
    }

    fn row(
        &self,
        syncs: &[Sync],
        codec: &Codec,
        algorithms: &[Algorithm],
        price: AllReduceTime<'_>,
    ) -> Result<ComparisonRow, ParallelError> {
        let ways = syncs.iter().flat_map(|&s| algorithms.iter().map(move |&a| (s, a)));
        let rows = ways
            .map(|(sync, algorithm)| self.run(sync, codec, algorithm, price))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(rows.into_iter().min_by_key(|row| row.time).expect("there are algorithms"))
    }

    /// Simulates one period and, if the periods do not divide the steps, the shorter last one.
    fn run(
        &self,
        sync: Sync,
        codec: &Codec,
        algorithm: Algorithm,
        price: AllReduceTime<'_>,
    ) -> Result<ComparisonRow, ParallelError> {
        // The number of ranks is checked before memory for each rank is allocated.
        Mesh::data(self.ranks)?;
        let shares = vec![1; self.ranks as usize];
        let replicas = Replicas { sync, algorithm, codec: codec.clone(), shares };
        let shape = ModelShape::dense(self.parameters, 1, u64::from(self.ranks));
        let forward = Nanos(self.compute.0 / 3);
        let rank = RankCost {
            forward,
            backward: self.compute.saturating_sub(forward),
            optimizer: self.optimizer,
            outer: Nanos::ZERO,
        };
        let cost = Cost { ranks: vec![rank; self.ranks as usize] };
        let price = |values| price(algorithm, codec, values).unwrap_or(Nanos::MAX);
        let simulated = |steps| simulate_replicas(&replicas, &shape, &cost, steps, &price);
        let period = sync.period().min(self.steps);
        let (periods, rest) = (u64::from(self.steps / period), self.steps % period);
        let parts = [(simulated(period)?, periods), (simulated(rest)?, 1)];
        let total = |part: &dyn Fn(&Timeline) -> u64| {
            parts.iter().fold(0_u64, |sum, (t, n)| sum.saturating_add(part(t).saturating_mul(*n)))
        };
        let time = Nanos(total(&|t| t.makespan().0));
        let sent = Bytes(total(&|t| t.sent(Rank(0)).0));
        Ok(ComparisonRow { sync, algorithm, codec: codec.clone(), time, sent })
    }
}

impl Answer {
    /// Returns the baseline: plain synchronous f32 training.
    ///
    /// # Panics
    /// If `rows` is empty.
    #[must_use]
    pub fn plain(&self) -> &ComparisonRow {
        self.rows.first().expect("the plain row is always there")
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run = &self.run;
        writeln!(f, "{} steps on {} ranks over {}:", run.steps, run.ranks, run.link)?;
        writeln!(
            f,
            "{:<26} {:<17} {:<6} {:>10} {:>10} {:>9} {:>9}",
            "sync", "all-reduce", "codec", "time", "sent", "x faster", "x fewer"
        )?;
        let plain = self.plain();
        for row in &self.rows {
            let ratio = |a: u64, b: u64| a as f64 / b.max(1) as f64;
            writeln!(
                f,
                "{:<26} {:<17} {:<6} {:>10} {:>10} {:>9.2} {:>9.2}",
                row.sync.to_string(),
                row.algorithm,
                row.codec,
                row.time,
                row.sent,
                ratio(plain.time.0, row.time.0),
                ratio(plain.sent.0, row.sent.0)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::average::closed_forms;

    fn asked(run: &WhatIf) -> Result<Answer, ParallelError> {
        run.answer(&closed_forms::price(run.ranks.max(1), run.link))
    }

    fn run() -> WhatIf {
        WhatIf {
            parameters: 1_000_000,
            ranks: 4,
            link: "20mbit,25ms".parse().unwrap(),
            steps: 105,
            compute: Nanos::from_millis(300),
            optimizer: Nanos::from_millis(10),
            buckets: 4,
            codec: Codec::INT8,
            every: 50,
        }
    }

    #[test]
    fn plain_is_the_closed_form_and_diloco_sends_less_by_the_periods() {
        let answer = asked(&run()).unwrap();
        // 2*3*25 ms + 1.5 * 4 MB at 20 Mbit/s = 2.55 s, after 310 ms of compute.
        assert_eq!(answer.plain().time, Nanos::from_millis(105 * (310 + 2_550)));
        assert_eq!(answer.plain().sent, Bytes(105 * 6_000_000));
        let diloco = &answer.rows[3];
        assert_eq!(diloco.sync, Sync::DiLoCo { every: 50 });
        // The run has two whole periods and one of 5 steps. Halving-doubling saves two of the six latencies.
        assert_eq!(diloco.algorithm, Algorithm::HalvingDoubling);
        assert_eq!(diloco.time, Nanos::from_millis(105 * 310 + 3 * 2_500));
        assert_eq!(diloco.sent, Bytes(3 * 6_000_000));
        insta::assert_snapshot!(answer.to_string());
    }

    #[test]
    fn no_rows_that_say_the_same() {
        let answer = asked(&WhatIf { codec: Codec::F32, every: 1, ..run() }).unwrap();
        assert_eq!(answer.rows.len(), 2);
        let zero = asked(&WhatIf { steps: 0, ..run() });
        assert!(zero.unwrap_err().to_string().contains("steps"));
        assert!(asked(&WhatIf { ranks: 0, ..run() }).is_err());
        let short = asked(&WhatIf { steps: 3, ..run() }).unwrap();
        assert_eq!(short.rows[3].sent, Bytes(6_000_000));
    }
}
