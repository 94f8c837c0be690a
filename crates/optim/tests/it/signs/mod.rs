//! The 1-bit all-reduce of 1-bit Adam's paper in f64, as plain loops.

use std::collections::BTreeMap;

/// One side of the paper's all-reduce: signs times the mean magnitude, with error feedback.
#[derive(Default, Clone)]
struct Feedback {
    error: Vec<f64>,
}

impl Feedback {
    fn compress(&mut self, x: &[f64]) -> Vec<f64> {
        self.error.resize(x.len(), 0.0);
        let sum: Vec<f64> = x.iter().zip(&self.error).map(|(x, e)| x + e).collect();
        let scale = sum.iter().map(|x| x.abs()).sum::<f64>() / sum.len() as f64;
        let sent: Vec<f64> = sum.iter().map(|&x| if x < 0.0 { -scale } else { scale }).collect();
        self.error = sum.iter().zip(&sent).map(|(x, s)| x - s).collect();
        sent
    }
}

/// All-reduce of means in equal shards, compressed on both sides.
#[derive(Default, Clone)]
pub(crate) struct Reduce {
    workers: BTreeMap<(usize, usize), Feedback>,
    servers: BTreeMap<usize, Feedback>,
}

impl Reduce {
    pub(crate) fn mean(&mut self, each: &[Vec<f64>]) -> Vec<f64> {
        let (n, len) = (each.len(), each[0].len());
        let mut mean = Vec::new();
        for owner in 0..n {
            let shard = len * owner / n..len * (owner + 1) / n;
            let mut sum = vec![0.0; shard.len()];
            for (rank, values) in each.iter().enumerate() {
                let sent = self.workers.entry((rank, owner)).or_default().compress(&values[shard.clone()]);
                sum.iter_mut().zip(sent).for_each(|(s, x)| *s += x / n as f64);
            }
            mean.extend(self.servers.entry(owner).or_default().compress(&sum));
        }
        mean
    }
}

/// Returns the mean of each element.
pub(crate) fn plain_mean(each: &[Vec<f64>]) -> Vec<f64> {
    (0..each[0].len()).map(|i| each.iter().map(|x| x[i]).sum::<f64>() / each.len() as f64).collect()
}
