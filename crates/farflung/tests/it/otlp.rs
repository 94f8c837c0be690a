//! Traces of a run, as received by a collector on the loopback.
#![cfg(feature = "otlp")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use crate::protobuf::{all, number, text};
use crate::tiny::{Run, farflung};

/// The paths and bodies of posts.
type Posts = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// Starts a collector; returns its address and the list of what it receives.
fn collector() -> (String, Posts) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, got) = (format!("http://{}", listener.local_addr().unwrap()), Posts::default());
    let posts = Arc::clone(&got);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                head += &line;
                if line == "\r\n" {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            posts.lock().unwrap().push((head, body));
            reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        }
    });
    (url, got)
}

#[derive(Debug)]
struct Span {
    pid: String,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
    start: u64,
    end: u64,
    attributes: BTreeMap<String, String>,
}

/// Returns the values of attributes as text.
fn attributes(message: &[u8], field: u64) -> BTreeMap<String, String> {
    let one = |pair: Vec<u8>| {
        let value = all(&pair, 2).concat();
        let is_text = !all(&value, 1).is_empty();
        let value =
            if is_text { text(&value, 1) } else { (number(&value, 2) + number(&value, 3)).to_string() };
        (text(&pair, 1), value)
    };
    all(message, field).into_iter().map(one).collect()
}

fn spans(posts: &Posts) -> Vec<Span> {
    let mut spans = Vec::new();
    for (head, body) in posts.lock().unwrap().iter() {
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        assert!(head.to_lowercase().contains("content-type: application/x-protobuf\r\n"), "{head}");
        for resource in all(body, 1) {
            let of = attributes(&all(&resource, 1).concat(), 1);
            assert_eq!(of["service.name"], "farflung");
            for span in all(&resource, 2).iter().flat_map(|scope| all(scope, 2)) {
                spans.push(Span {
                    pid: of["process.pid"].clone(),
                    id: all(&span, 2).concat(),
                    parent: all(&span, 4).concat(),
                    name: text(&span, 5),
                    start: number(&span, 7),
                    end: number(&span, 8),
                    attributes: attributes(&span, 9),
                });
            }
        }
    }
    spans
}

#[test]
fn steps_hold_collectives_and_these_hold_waits_for_peers() {
    let (run, (url, posts)) = (Run::new(), collector());
    let args = run.flags("--steps 3 --codec none --sync ddp");
    let launch = ["launch", "-n", "2", "--", "train", "--otlp", &url];
    let output = farflung().current_dir(run.at("")).args(launch).args(&args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let spans = spans(&posts);
    let named = |name: &'static str| spans.iter().filter(move |span| span.name == name);
    for rank in ["0", "1"] {
        let steps: Vec<&Span> = named("step").filter(|span| span.attributes["rank"] == rank).collect();
        let numbers: Vec<&str> = steps.iter().map(|span| &span.attributes["step"][..]).collect();
        assert_eq!(numbers, ["1", "2", "3"], "rank {rank}");
        for step in steps {
            let within = |span: &&Span| span.parent == step.id && span.pid == step.pid;
            let collectives: Vec<&Span> = named("collective").filter(within).collect();
            assert!(!collectives.is_empty(), "{step:?}");
            for collective in &collectives {
                assert!(
                    step.start <= collective.start && collective.start <= collective.end,
                    "{collective:?}"
                );
                assert!(collective.attributes["op"].len() > 3 && collective.attributes["rank"] == rank);
                assert_eq!(collective.attributes["failed"], "0", "{collective:?}");
            }
            let sent: u64 =
                collectives.iter().map(|span| span.attributes["sent"].parse::<u64>().unwrap()).sum();
            assert!(sent > 0, "{collectives:?}");
        }
    }
    // Each of the two ranks waits only for the other, within one of its own operations.
    let operations: BTreeSet<(&str, &[u8])> =
        named("collective").chain(named("message")).map(|span| (&span.pid[..], &span.id[..])).collect();
    let peers: BTreeSet<&str> = named("wait").map(|span| &span.attributes["peer"][..]).collect();
    assert_eq!(peers, BTreeSet::from(["0", "1"]));
    assert!(named("wait").all(|span| operations.contains(&(&span.pid[..], &span.parent[..]))));
    assert!(named("look").count() > 0);
}

#[test]
fn a_collector_that_is_not_there_costs_no_run() {
    let run = Run::new();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let args = run.args(&format!("--steps 2 --otlp http://{gone}"));
    let output = farflung().current_dir(run.at("")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = farflung().args(["train", "--otlp", "https://127.0.0.1:1"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("run a collector on this machine"), "{said}");
}
