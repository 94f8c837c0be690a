//! Runs independent simulations on all cores. Results do not depend on the number of threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::Result;

/// Applies `work` to each item; results are in the order of the items.
///
/// Errors: that of the first item with an error.
pub(super) fn side_by_side<T: Sync, O: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores.min(items.len()) < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<O>)>> = Mutex::new(Vec::with_capacity(items.len()));
    thread::scope(|scope| {
        for _ in 0..cores.min(items.len()) {
            scope.spawn(|| {
                while let Some((at, item)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    items.get(at).map(|item| (at, item))
                } {
                    let result = work(item);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn results_stand_in_the_order_of_the_items_and_the_first_error_is_told() {
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(
            side_by_side(&items, |&n| Ok(n * n)).unwrap(),
            items.iter().map(|n| n * n).collect::<Vec<_>>()
        );
        let refused =
            |value: u64| Error::Setting { field: "n", value: value.to_string(), expected: String::new() };
        let said = side_by_side(&items, |&n| if n % 30 == 7 { Err(refused(n)) } else { Ok(n) });
        assert!(said.unwrap_err().to_string().contains("`n` is 7,"));
    }
}
