//! What this machine can do at most, and what this process holds: the figures that others are measured against.
//!
//! It refuses to know what is compared with them.

use std::hint::black_box;
use std::time::Instant;

/// Seconds of a measured stretch.
const STRETCH: f64 = 0.12;

/// Fused multiply-adds of all `threads` together, GFLOP/s: the best of three stretches, each operation on
/// registers.
pub(crate) fn fma_peak(threads: usize) -> f64 {
    best_of_three(threads, || fma(1 << 16) as f64) / 1e9
}

/// Bytes that `threads` move to and from memory together, GB/s: the best of three stretches of `y = a x + y`
/// over vectors far larger than a cache.
pub(crate) fn bandwidth(threads: usize) -> f64 {
    let (x, y) = (vec![1.0_f32; 1 << 24], vec![0.5_f32; 1 << 24]);
    best_of_three(threads, || {
        // Each thread has its own vectors, made outside of the measured stretch by the first pass over them.
        thread_local! {
            static VECTORS: std::cell::RefCell<(Vec<f32>, Vec<f32>)> = const {
                std::cell::RefCell::new((Vec::new(), Vec::new()))
            };
        }
        VECTORS.with_borrow_mut(|(a, b)| {
            if a.is_empty() {
                (*a, *b) = (x.clone(), y.clone());
            }
            for (b, a) in b.iter_mut().zip(&*a) {
                *b += black_box(0.5) * a;
            }
            black_box(&b);
            12.0 * b.len() as f64
        })
    }) / 1e9
}

/// Runs `work` over and over on so many threads at once; the most that all of them did in a second.
fn best_of_three(threads: usize, work: impl Fn() -> f64 + Sync) -> f64 {
    let rate = || {
        work();
        let start = now();
        let mut done = 0.0;
        while start.elapsed().as_secs_f64() < STRETCH {
            done += work();
        }
        done / start.elapsed().as_secs_f64()
    };
    let all = || {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(rate)).collect();
            threads.into_iter().map(|t| t.join().unwrap_or(0.0)).sum::<f64>()
        })
    };
    (0..3).map(|_| all()).fold(0.0, f64::max)
}

/// Operations done by `rounds` of independent multiply-adds, on the widest vectors there are.
fn fma(rounds: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has AVX-512, as the condition has found.
            return unsafe { fma_avx512(rounds) };
        }
        #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the machine has AVX2 and FMA, as the condition has found.
            return unsafe { fma_avx2(rounds) };
        }
    }
    let mut sums = [1.0_f32; 32];
    let (x, y) = (black_box(0.999_f32), black_box(0.001_f32));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * x + y;
        }
    }
    black_box(sums);
    rounds * 2 * 32
}

/// Defines a function of twelve chains of vectors: two units with a latency of 4 or 5 need ten in flight.
#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($name:ident, $features:literal, $lanes:literal, $splat:ident, $fma:ident) => {
        #[target_feature(enable = $features)]
        fn $name(rounds: u64) -> u64 {
            use std::arch::x86_64::{$fma, $splat};
            let (x, y) = ($splat(black_box(0.999)), $splat(black_box(0.001)));
            let mut sums = [$splat(1.0); 12];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = $fma(*sum, x, y);
                }
            }
            black_box(sums);
            rounds * 2 * $lanes * 12
        }
    };
}
#[cfg(target_arch = "x86_64")]
chains!(fma_avx2, "avx2,fma", 8, _mm256_set1_ps, _mm256_fmadd_ps);
#[cfg(target_arch = "x86_64")]
chains!(fma_avx512, "avx512f", 16, _mm512_set1_ps, _mm512_fmadd_ps);

/// Memory of this process now and at most so far, in bytes, where the system tells.
pub(crate) fn resident() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}

/// The middle of some times.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The real time.
#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
