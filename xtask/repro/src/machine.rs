//! Measures limits of this machine, and the memory of this process. Benches compare their figures with these.
//!
//! It does not depend on the figures that are compared with them.

use std::hint::black_box;
use std::time::Instant;

/// Seconds of one measurement.
const STRETCH: f64 = 0.12;

/// Returns the rate of fused multiply-adds of all `threads` together, in GFLOP/s: the best of three
/// measurements, with operands in registers.
pub(crate) fn fma_peak(threads: usize) -> f64 {
    best_of_three(threads, || fma(1 << 16) as f64) / 1e9
}

/// Returns the rate at which `threads` move bytes to and from memory together, in GB/s: the best of three
/// measurements of `y = a x + y` over vectors far larger than a cache.
pub(crate) fn bandwidth(threads: usize) -> f64 {
    let (x, y) = (vec![1.0_f32; 1 << 24], vec![0.5_f32; 1 << 24]);
    best_of_three(threads, || {
        // Each thread has its own vectors. The first call makes them, outside of the measured time.
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

/// Runs `work` repeatedly on `threads` threads at once, in three measurements. Returns the largest sum over all
/// threads of the work per second.
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

/// Runs `rounds` of independent multiply-adds on the widest vectors available, and returns the number of
/// operations.
fn fma(rounds: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512 was detected in the condition above.
            return unsafe { fma_avx512(rounds) };
        }
        #[expect(unsafe_code, reason = "calls a function compiled for instructions that the machine has")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: AVX2 and FMA were detected in the condition above.
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

/// Defines a function with twelve independent chains of vector operations: two units with a latency of 4 or 5
/// cycles need ten in flight.
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

/// Returns the current and the highest resident memory of this process in bytes, if the system reports it.
pub(crate) fn resident() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some((field(&status, "VmRSS:")?, field(&status, "VmHWM:")?))
}

/// Returns the highest resident memory of a process in bytes, while it runs.
pub(crate) fn peak_of(process: u32) -> Option<u64> {
    field(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?, "VmHWM:")
}

/// Returns the highest resident memory of this process in bytes without the pages of its program, which the
/// system drops when memory is short.
pub(crate) fn resident_without_files() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(field(&status, "VmHWM:")?.saturating_sub(field(&status, "RssFile:")?))
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

/// Returns the median: of an even number of values the larger of the two in the middle, of none NaN.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the real time.
#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
