//! Counters of the exchange between ranks and their peers: in a run's metrics, in its report, and in a probe.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::tiny::{Run, farflung};
use farflung::peer_counters::PeerCountersLine;
use farflung::{PathCounters, PeerCounters, metrics};

fn succeed(args: &[String]) -> String {
    let output = farflung().args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn launched(command: &[String]) -> String {
    let launch = ["launch", "-n", "3", "--"].map(str::to_owned);
    succeed(&launch.into_iter().chain(command.iter().cloned()).collect::<Vec<_>>())
}

fn is_plausible(path: &PathCounters) -> bool {
    path.packets > 0
        && path.retransmissions <= path.packets
        && path.queueing_s().is_some_and(|queueing| queueing < 5.0)
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_over_sockets_have_bytes_round_trips_and_packets_of_each_peer() {
    let run = Run::new();
    let out = run.at("run").display().to_string();
    let mut train = vec!["train".to_owned()];
    train.extend(run.flags(&format!("--out {out} --steps 3 --codec none --algorithm ring")));
    let text = launched(&train);
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    assert_eq!(rows.len(), 3);
    for row in &rows {
        let peers: Vec<u32> = row.peers.iter().map(|peer| peer.peer).collect();
        assert_eq!(peers, [1, 2], "{row:?}");
        assert!(row.peers.iter().all(|peer| is_plausible(&peer.path.unwrap())), "{row:?}");
        // The counters are read before the evaluation of a step, so the bytes of all peers are at most those of
        // the run.
        let sent: u64 = row.peers.iter().map(|peer| peer.bytes_sent).sum();
        assert!(0 < sent && sent <= row.bytes_sent, "{row:?}");
    }
    assert!(rows.windows(2).all(|pair| pair[0].peers[0].bytes_sent < pair[1].peers[0].bytes_sent));
    for rank in [1, 2] {
        let path = run.at(&format!("run/ranks/rank-{rank:05}/peers.jsonl"));
        let lines: Vec<PeerCountersLine> = std::fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let steps: Vec<(u64, u32)> = lines.iter().map(|line| (line.step, line.rank)).collect();
        assert_eq!(steps, [(1, rank), (2, rank), (3, rank)]);
        // A rank may read its counters before or after a later message is sent, so the bytes have only bounds.
        let of_rank_0 = lines[2].peers.iter().find(|peer| peer.peer == 0).unwrap();
        let [before, after] = [1, 2].map(|row: usize| rows[row].peers[rank as usize - 1].bytes_sent);
        let received = of_rank_0.bytes_received;
        assert!((before..2 * after).contains(&received), "received {received}, sent {before} to {after}");
        assert!(lines.iter().flat_map(|line| &line.peers).all(|peer| is_plausible(&peer.path.unwrap())));
    }
    assert!(!run.at("run/peers.jsonl").exists());
    for peer in ["peer 1            sent it ", "peer 2            sent it "] {
        assert!(text.contains(peer) && text.contains("packets sent again"), "{text}");
    }
    let report = std::fs::read(run.at("run/report.json")).unwrap();
    let report: farflung::train::Report = serde_json::from_slice(&report).unwrap();
    assert_eq!(report.peers, rows[2].peers);
}

#[test]
fn simulated_ranks_have_the_bytes_of_each_peer_alone() {
    let run = Run::new();
    let out = run.at("run").display().to_string();
    let args =
        run.args(&format!("--out {out} --workers 3 --steps 2 --codec none --eval-every 0 --check-every 0"));
    succeed(&args);
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    let row = &rows[0];
    assert!(row.peers.iter().all(|peer| peer.path.is_none()), "{row:?}");
    // A step without evaluation: its bytes are those of its peers.
    assert_eq!(row.peers.iter().map(|peer| peer.bytes_sent).sum::<u64>(), row.bytes_sent);
    assert_eq!(row.peers.iter().map(|peer| peer.bytes_received).sum::<u64>(), row.bytes_received);
    assert!(!run.at("run/ranks/rank-00001/peers.jsonl").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_probe_tells_what_was_counted_of_each_pair_behind_the_links() {
    let probe = ["net", "probe", "--bytes", "2000000"].map(str::to_owned);
    let text = launched(&probe);
    let cluster: farflung::parallel::Cluster = text.parse().unwrap();
    assert_eq!(cluster.links.len(), 3);
    for pair in ["0 to rank-1", "0 to rank-2", "1 to rank-2"] {
        let line = text.lines().find(|line| line.starts_with(&format!("# rank-{pair}: sent 6")));
        let line = line.unwrap_or_else(|| unreachable!("{pair} in {text}"));
        assert!(line.contains(" MB, received ") && line.contains("; round trip "), "{line}");
        assert!(line.contains(" packets sent again, queued ") && !line.contains("round trip - "), "{line}");
    }
}

#[test]
fn rows_of_runs_before_there_were_counters_still_read() {
    let old = r#"{"step":1,"time_s":1.0,"wall_s":1.0,"tokens":8,"train_loss":2.0,"val_loss":null,"bytes_sent":1,"bytes_received":1,"tokens_per_s":8.0}"#;
    let row: farflung::StepMetrics = serde_json::from_str(old).unwrap();
    assert_eq!(row.peers, [] as [PeerCounters; 0]);
}
