//! Order of messages that are started one after the other, on every transport.

use crate::common::{TRANSPORTS, on_ranks};
use farflung_base::Rank;

#[test]
fn messages_of_one_tag_come_in_the_order_of_their_start() {
    for (name, cluster) in TRANSPORTS {
        on_ranks(cluster(3), |comm| {
            let (n, me) = (comm.size() as u32, comm.rank().0);
            let (next, last) = (Rank((me + 1) % n), Rank((me + n - 1) % n));
            // A message longer than all windows goes first, so that room is short while the others are started.
            let long = comm.start_send(next, 9, vec![me as u8; 12 << 20]);
            let message = |i: u32| vec![i as u8; if i % 7 == 3 { 600_000 } else { 4 }];
            let sent: Vec<_> = (0..200).map(|i| comm.start_send(next, i % 5, message(i))).collect();
            for tag in (0..5).rev() {
                for turn in 0..40 {
                    assert!(
                        comm.recv(last, tag).unwrap() == message(5 * turn + tag),
                        "{name}: {tag}, {turn}"
                    );
                }
            }
            assert_eq!(comm.recv(last, 9).unwrap().len(), 12 << 20, "{name}");
            sent.into_iter().chain([long]).for_each(|sent| sent.wait().unwrap());
        });
    }
}
