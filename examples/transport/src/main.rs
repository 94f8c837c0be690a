//! Runs farflung's collectives over a transport that is defined here, and compares the results with those over
//! memory.

mod unix;

use std::error::Error;
use std::sync::Arc;
use std::thread;

use farflung_comm::{CommError, Communicator, ReduceOp, Transport, memory};

const RANKS: usize = 4;
const LEN: usize = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let expected = means(memory::cluster(RANKS))?;
    let over_sockets = means(unix::cluster(RANKS)?)?;
    assert_eq!(over_sockets, expected, "collectives give the same bits over every transport");
    println!("{LEN} values averaged over {RANKS} ranks: {} ... {}", expected[0][0], expected[0][LEN - 1]);
    println!("over Unix sockets: the same bits as over memory");
    println!("a rank that leaves: {}", after_a_loss(unix::cluster(2)?));
    Ok(())
}

/// Averages a vector of each rank; returns the results by rank.
fn means<T: Transport + 'static>(endpoints: Vec<Arc<T>>) -> Result<Vec<Vec<f32>>, CommError> {
    let average = |endpoint: Arc<T>| {
        let comm = Communicator::new(endpoint);
        let mut values: Vec<f32> = (0..LEN).map(|i| (i + comm.rank().index()) as f32 / 3.0).collect();
        comm.all_reduce(&mut values, ReduceOp::Mean)?;
        comm.barrier()?;
        Ok(values)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            endpoints.into_iter().map(|endpoint| scope.spawn(move || average(endpoint))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// Returns the error of the rank that remains after the other has left.
fn after_a_loss<T: Transport + 'static>(mut endpoints: Vec<Arc<T>>) -> CommError {
    drop(endpoints.pop());
    let remaining = Communicator::new(endpoints.remove(0));
    remaining.all_reduce(&mut [1.0_f32], ReduceOp::Sum).expect_err("the other rank has left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_bits_of_the_memory_transport() {
        for ranks in [1, 2, 5] {
            let over_sockets = means(unix::cluster(ranks).unwrap()).unwrap();
            assert_eq!(over_sockets, means(memory::cluster(ranks)).unwrap());
        }
    }

    #[test]
    fn a_peer_that_has_left_is_named() {
        let error = after_a_loss(unix::cluster(2).unwrap());
        assert!(matches!(error, CommError::PeerDown { peer, .. } if peer.0 == 1), "{error}");
    }
}
