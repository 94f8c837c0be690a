//! Processes that meet over QUIC, on the loopback only: the same bits as over TCP, with tickets, through a
//! relay, and under `launch`. A build without the feature reports which feature is missing.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::{Command, Output, Stdio};

use crate::tiny::{Run, farflung};

/// Returns the `farflung` command with a home in the run's folder, like a separate machine.
fn on(run: &Run, machine: &str) -> Command {
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at(machine)).current_dir(run.at(""));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn launch(run: &Run, flags: &str) -> Output {
    let words: Vec<String> = ["launch", "-n", "2", "--"].map(str::to_owned).to_vec();
    on(run, "home").args(words).args(run.args(&format!("--steps 3 --sync ddp {flags}"))).output().unwrap()
}

#[cfg(not(feature = "iroh"))]
#[test]
fn a_build_without_it_says_how_to_build_one_with_it() {
    let run = Run::new();
    let failed = launch(&run, "--transport iroh");
    assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
    assert!(said(&failed).contains("--features iroh"), "{}", said(&failed));
    let failed = on(&run, "home").args(["relay", "--listen", "127.0.0.1:0"]).output().unwrap();
    assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
    assert!(said(&failed).contains("--features iroh"), "{}", said(&failed));
    let failed = launch(&run, "--relay http://127.0.0.1:1");
    assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
    assert!(said(&failed).contains("--features iroh"), "{}", said(&failed));
    for flags in [["--transport", "iroh"], ["--relay", "http://127.0.0.1:1"]] {
        let host = ["host", "--listen", "127.0.0.1:0", "--out", "hosted"];
        let failed = on(&run, "home").args(host).args(flags).output().unwrap();
        assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
        assert!(said(&failed).contains("--features iroh"), "{}", said(&failed));
    }
}

#[cfg(feature = "iroh")]
mod with_it {
    use std::fs;
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::net::UdpSocket;
    use std::path::{Path, PathBuf};
    use std::process::Child;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;
    use crate::child::Guarded;

    fn free() -> u16 {
        UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    fn rank(run: &Run, machine: &str, rank: usize, more: &str) -> Child {
        let mut command = on(run, machine);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        let transport = if more.contains("--transport") { "" } else { "--transport iroh" };
        let args = format!("--steps 3 --sync ddp {transport} --ticket-file ticket {more}");
        command.args(run.args(&args)).spawn().unwrap()
    }

    fn ticket(run: &Run, addresses: &[&str]) {
        let addresses = addresses.iter().flat_map(|address| ["--address", address]);
        let made = on(run, "a").arg("ticket").args(addresses).args(["--out", "ticket"]).output().unwrap();
        assert!(made.status.success(), "{}", said(&made));
    }

    /// Returns the losses and the weights of a run.
    fn trained(folder: &Path) -> (Vec<String>, Vec<u8>) {
        let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let loss =
            |line: &str| line.split("\"train_loss\":").nth(1).unwrap().split(',').next().unwrap().to_owned();
        let weights = weights(folder).expect("a run that ends leaves a checkpoint");
        (text.lines().map(loss).collect(), fs::read(weights).unwrap())
    }

    fn weights(folder: &Path) -> Option<PathBuf> {
        fs::read_dir(folder).unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            if path.is_dir() {
                weights(&path)
            } else {
                path.file_name().is_some_and(|name| name == "model.safetensors").then_some(path)
            }
        })
    }

    /// Returns the result of the same processes over TCP.
    fn over_tcp(run: &Run) -> (Vec<String>, Vec<u8>) {
        let output = launch(run, "--transport tcp --out tcp");
        assert!(output.status.success(), "{}", said(&output));
        let trained = trained(&run.at("tcp"));
        assert_eq!(trained.0.len(), 3);
        trained
    }

    #[test]
    fn two_processes_with_a_ticket_train_to_the_bits_of_tcp() {
        let run = Run::new();
        ticket(&run, &[&format!("127.0.0.1:{}", free())]);
        let ranks = [rank(&run, "a", 0, "--out quic"), rank(&run, "b", 1, "--out quic")];
        for output in ranks.map(|rank| rank.wait_with_output().unwrap()) {
            assert!(output.status.success(), "{}", said(&output));
        }
        assert!(trained(&run.at("quic")) == over_tcp(&run));
    }

    #[test]
    fn two_processes_that_meet_at_a_relay_train_to_the_bits_of_tcp() {
        let run = Run::new();
        let mut relay = on(&run, "relay").args(["relay", "--listen", "127.0.0.1:0"]).spawn().unwrap();
        let mut output = BufReader::new(relay.stdout.take().unwrap());
        let mut url = String::new();
        output.read_line(&mut url).unwrap();
        ticket(&run, &[url.trim()]);
        let ranks = [rank(&run, "a", 0, "--out quic"), rank(&run, "b", 1, "--out quic")];
        for output in ranks.map(|rank| rank.wait_with_output().unwrap()) {
            assert!(output.status.success(), "{}", said(&output));
        }
        kill_process(Pid::from_raw(relay.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert!(relay.wait().unwrap().success());
        let carried: u64 = rest.trim().strip_suffix(" bytes carried").unwrap().parse().unwrap();
        assert!(carried > 1000, "the ranks met elsewhere: {carried} bytes");
        assert!(trained(&run.at("quic")) == over_tcp(&run));
    }

    /// Starts a relay, which ends with the test; returns its URL.
    fn relay(run: &Run) -> (Killed, String) {
        let mut relay = on(run, "relay").args(["relay", "--listen", "127.0.0.1:0"]).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(relay.stdout.take().unwrap()).read_line(&mut url).unwrap();
        (Killed(relay), url.trim().to_owned())
    }

    /// A process that is killed at the end of the test.
    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Starts a rank of three, which logs by which network it is connected to each other one.
    fn of_three(run: &Run, number: usize, more: &str) -> Child {
        let mut command = on(run, &format!("machine-{number}"));
        command.env("RANK", number.to_string()).env("WORLD_SIZE", "3").env("RUST_LOG", "farflung=info");
        let args = format!("--steps 3 --sync ddp --workers 3 --out mixed {more}");
        command.args(run.args(&args)).spawn().unwrap()
    }

    /// Returns for each rank the networks by which it is connected to the others, in their order.
    fn networks(ranks: [Child; 3]) -> [Vec<String>; 3] {
        ranks.map(|rank| {
            let output = rank.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            let said = said(&output);
            let connected = said.lines().filter_map(|line| line.split_once("connected over "));
            connected.map(|(_, network)| network[..3].to_lowercase()).collect()
        })
    }

    fn three_over_tcp(run: &Run) -> (Vec<String>, Vec<u8>) {
        let args = run.args("--steps 3 --sync ddp --workers 3 --transport tcp --out tcp");
        let output = on(run, "home").args(["launch", "-n", "3", "--"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        trained(&run.at("tcp"))
    }

    #[test]
    fn a_rank_that_tcp_does_not_reach_trains_over_quic_with_others_over_shared_memory() {
        let run = Run::new();
        let (_relay, url) = relay(&run);
        let host = format!("127.0.0.1:{}", free());
        // Where rank 2 runs, no process of the job listens at the address of its ticket, and rank 0 is reached
        // over the relay.
        ticket(&run, &["127.0.0.1:1", &url]);
        fs::rename(run.at("ticket"), run.at("far")).unwrap();
        ticket(&run, &[&host, &url]);
        fs::rename(run.at("a"), run.at("machine-0")).unwrap();
        let ranks = [(0, "ticket"), (1, "ticket"), (2, "far")];
        let ranks = ranks.map(|(number, ticket)| of_three(&run, number, &format!("--ticket-file {ticket}")));
        let found = networks(ranks);
        assert_eq!(found, [vec!["tcp", "qui"], vec!["tcp", "tcp"], vec!["qui", "tcp"]]);
        assert!(trained(&run.at("mixed")) == three_over_tcp(&run));
    }

    #[test]
    fn ranks_with_auto_and_with_iroh_train_in_one_run() {
        let run = Run::new();
        let (_relay, url) = relay(&run);
        ticket(&run, &[&format!("127.0.0.1:{}", free())]);
        fs::rename(run.at("a"), run.at("machine-0")).unwrap();
        let ranks = ["auto", "iroh", "auto"].into_iter().enumerate();
        let ranks: Vec<Child> = ranks
            .map(|(number, transport)| {
                let more = format!("--transport {transport} --relay {url} --ticket-file ticket");
                of_three(&run, number, &more)
            })
            .collect();
        let found = networks(ranks.try_into().unwrap());
        assert_eq!(found, [vec!["qui", "tcp"], vec!["qui", "qui"], vec!["tcp", "qui"]]);
        assert!(trained(&run.at("mixed")) == three_over_tcp(&run));
        // `launch` gives each process a ticket and a key.
        let args = run.args(&format!("--steps 3 --sync ddp --workers 3 --relay {url} --out launched"));
        let output = on(&run, "home").args(["launch", "-n", "3", "--"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(trained(&run.at("launched")) == trained(&run.at("mixed")));
    }

    #[test]
    fn launch_gives_each_process_a_key_and_all_a_ticket() {
        let run = Run::new();
        let output = launch(&run, "--transport iroh --out quic");
        assert!(output.status.success(), "{}", said(&output));
        assert!(trained(&run.at("quic")) == over_tcp(&run));
        assert!(!run.at("home").exists(), "keys of the job lie in a folder that ends with it");
    }

    #[test]
    fn what_cannot_work_says_what_to_do() {
        let run = Run::new();
        let failed = launch(&run, "--transport iroh --key-file key");
        assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
        assert!(said(&failed).contains("a key for each process"), "{}", said(&failed));
        fs::write(run.at("hosts"), "a\nb\n").unwrap();
        let words = ["launch", "--hosts", "hosts", "--", "train", "--transport", "iroh"];
        let failed = on(&run, "home").args(words).output().unwrap();
        assert!(said(&failed).contains("--ticket-file"), "{}", said(&failed));
        // Both ranks have the key of rank 0.
        ticket(&run, &[&format!("127.0.0.1:{}", free())]);
        let _first = Guarded(rank(&run, "a", 0, "--deadline 60s"));
        let failed = rank(&run, "a", 1, "--deadline 60s").wait_with_output().unwrap();
        assert_eq!(failed.status.code(), Some(2), "{}", said(&failed));
        assert!(said(&failed).contains("--key-file or FARFLUNG_HOME"), "{}", said(&failed));
        // A ticket that contains only relays cannot be used with TCP.
        ticket(&run, &["http://127.0.0.1:3340"]);
        let failed = rank(&run, "a", 0, "--transport tcp").wait_with_output().unwrap();
        assert!(said(&failed).contains("the ticket contains only relays"), "{}", said(&failed));
    }
}
