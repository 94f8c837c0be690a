//! A run's metrics, as fetched by Prometheus.
#![cfg(feature = "prometheus")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use crate::tiny::{Run, farflung};
use rustix::process::Signal;

/// Returns the answer with its head; `None` if the port is not open.
fn ask(port: u16, host: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Returns samples by name and labels. The format is line by line: comments begin with `#`; a sample is a name
/// with labels, a space and a number.
fn samples(answer: &str) -> BTreeMap<String, f64> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/plain; version=0.0.4"), "{head}");
    let samples = body.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let parse = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    samples.map(parse).collect()
}

/// Finds a port that is free together with the next one.
fn two_free_ports() -> u16 {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        if first < u16::MAX && [first, first + 1].iter().all(is_free) {
            return first;
        }
    }
}

#[test]
fn each_process_serves_its_losses_bytes_times_peers_and_operations() {
    let (run, port) = (Run::new(), two_free_ports());
    let args = run.flags(&format!("--steps 1000000 --codec none --sync ddp --prometheus {port}"));
    let mut job = farflung()
        .current_dir(run.at(""))
        .args(["launch", "-n", "2", "--", "train"])
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    for rank in [0, 1_u16] {
        let of = |rest: &str| format!("{{{rest}rank=\"{rank}\"}}").replace("}{", ",");
        let step = format!("farflung_now{{rank=\"{rank}\",what=\"step\"}}");
        let seen = crate::child::wait_until("three steps", || {
            let seen = samples(&ask(port + rank, "127.0.0.1")?);
            seen.get(&step).is_some_and(|&step| step >= 3.0).then_some(seen)
        });
        let value = |name: &str| *seen.get(name).unwrap_or_else(|| panic!("{name} in {seen:?}"));
        // A model of two layers on batches of 8 tokens: with 2 ranks, 16 per step.
        assert!((value(&format!("farflung_tokens_total{}", of(""))) - 16.0 * value(&step)).abs() < 0.5);
        let other = 1 - rank;
        let labels = |way: &str| format!("{{peer=\"{other}\",rank=\"{rank}\",way=\"{way}\"}}");
        let sent = value(&format!("farflung_peer_bytes_total{}", labels("sent")));
        assert!(
            sent > 1000.0 && sent <= value(&format!("farflung_bytes_total{{rank=\"{rank}\",way=\"sent\"}}"))
        );
        if cfg!(target_os = "linux") {
            let path = format!("{{peer=\"{other}\",rank=\"{rank}\",which=\"smoothed\"}}");
            assert!((1e-6..5.0).contains(&value(&format!("farflung_peer_round_trip_seconds{path}"))));
        }
        let reduced = |(name, calls): (&String, &f64)| {
            name.starts_with("farflung_operations_total") && name.contains("all_reduce") && *calls >= 3.0
        };
        assert!(seen.iter().any(reduced), "{seen:?}");
        assert!(seen.keys().any(|name| name.starts_with("farflung_operation_wait_seconds_total")
            && name.contains(&format!("peer=\"{other}\""))));
        let loss = seen.get("farflung_now{rank=\"0\",what=\"train_loss\"}");
        assert_eq!(loss.is_some_and(|loss| (1.0..20.0).contains(loss)), rank == 0, "{seen:?}");
    }
    // A request with the name of another site, which could resolve to this machine, is refused.
    assert!(ask(port, "evil.example").unwrap().starts_with("HTTP/1.1 403"));
    assert!(ask(port, "localhost:9464").unwrap().starts_with("HTTP/1.1 200"));
    crate::child::send(job.id(), Signal::TERM);
    job.wait().unwrap();
    assert!(ask(port, "127.0.0.1").is_none());
}

#[test]
fn an_address_that_is_none_or_taken_is_refused_before_the_run() {
    let run = Run::new();
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    for (address, why) in [(&taken[..], &taken[..]), ("here", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT")]
    {
        let output = farflung()
            .current_dir(run.at(""))
            .args(run.args(&format!("--steps 1 --prometheus {address}")))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{address}: {said}");
    }
}
