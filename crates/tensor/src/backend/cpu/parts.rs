//! Division of slices into parts that tasks write in parallel.

use std::marker::PhantomData;

use super::pool::Pool;

/// A slice cut into chunks of equal length (the last may be shorter). Each chunk is borrowed once.
struct Chunks<'a> {
    pointer: *mut f32,
    len: usize,
    chunk: usize,
    owner: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint chunks of one slice")]
// SAFETY: shared between tasks only inside `Pool::for_chunks`, where each task uses only the chunk of its own
// index.
unsafe impl Sync for Chunks<'_> {}

impl Pool {
    /// Calls `task(i, [chunk i of each slice])` for all `i`, in parallel. Each entry of `slices` is a slice and
    /// its chunk length; all must have the same number of chunks.
    pub(super) fn for_chunks<const N: usize>(
        &self,
        slices: [(&mut [f32], usize); N],
        task: impl Fn(usize, [&mut [f32]; N]) + Sync,
    ) {
        let all = slices.map(|(slice, chunk)| Chunks {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            chunk,
            owner: PhantomData,
        });
        let count = |c: &Chunks<'_>| if c.chunk == 0 { 0 } else { c.len.div_ceil(c.chunk) };
        let tasks = all.first().map_or(0, count);
        assert!(all.iter().all(|c| count(c) == tasks), "all slices must have the same number of chunks");
        let all = &all;
        self.run(tasks, |i| {
            let parts = std::array::from_fn(|j| {
                let c = &all[j];
                let start = i * c.chunk;
                let len = c.chunk.min(c.len - start);
                #[expect(unsafe_code, reason = "tasks write disjoint chunks of one slice")]
                // SAFETY: chunk i is within the slice, which is borrowed exclusively for this call. `run` calls
                // each i once, and chunks of different i do not overlap.
                unsafe {
                    std::slice::from_raw_parts_mut(c.pointer.add(start), len)
                }
            });
            task(i, parts);
        });
    }
}

/// Returns the number of matrix rows per task: enough work to pay for scheduling, and independent of the number
/// of threads.
pub(super) const fn rows_per_task(cols: usize) -> usize {
    let rows = 16_384 / if cols == 0 { 1 } else { cols };
    if rows == 0 { 1 } else { rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_once() {
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let mut a = vec![0.0; 10];
            let mut b = vec![0.0; 4];
            pool.for_chunks([(&mut a, 3), (&mut b, 1)], |i, [a, b]| {
                for x in a.iter_mut() {
                    *x += i as f32;
                }
                b[0] += a.len() as f32;
            });
            assert_eq!(a, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]);
            assert_eq!(b, [3.0, 3.0, 3.0, 1.0]);
            pool.for_chunks([(&mut [], 3)], |_, _| panic!("nothing to do"));
        }
    }
}
