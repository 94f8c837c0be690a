//! `farflung watch` beside a real training run: it serves what the run's files contain.

#![cfg(all(unix, feature = "watch"))]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::child::{send, wait_until};
use crate::tiny::{Run, farflung};
use farflung::{StepTimes, events, metrics};
use rustix::process::Signal;
use serde_json::Value;

/// A process that is killed at the end of its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A served page and its address.
struct Page {
    process: Process,
    at: String,
}

/// An answer: its status, its headers in lower case, its body.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Page {
    fn of(run: &Path) -> Self {
        Self::with(run, &[])
    }

    fn with(run: &Path, more: &[&Path]) -> Self {
        let mut command = farflung();
        command.arg("watch").arg(run).args(["--listen", "127.0.0.1:0"]).args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let at = line.trim().strip_prefix("http://").and_then(|at| at.strip_suffix('/')).unwrap().to_owned();
        Self { process: Process(child), at }
    }

    fn open(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        stream.write_all(request.replace('\n', "\r\n").as_bytes()).unwrap();
        stream
    }

    fn ask(&self, request: &str) -> Answer {
        let mut text = String::new();
        self.open(request).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    fn get(&self, path: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.1\nHost: {}\nConnection: close\n\n", self.at))
    }

    fn snapshot(&self) -> Value {
        let answer = self.get("/snapshot");
        assert!(
            answer.status == 200 && answer.head.contains("content-type: application/json"),
            "{}",
            answer.head
        );
        serde_json::from_str(&answer.body).unwrap()
    }

    /// Returns the updates of `/events`, as they arrive.
    fn updates(&self) -> impl Iterator<Item = Value> + use<> {
        let stream = self.open(&format!("GET /events HTTP/1.1\nHost: {}\n\n", self.at));
        let lines = BufReader::new(stream).lines();
        lines.filter_map(|line| Some(serde_json::from_str(line.unwrap().strip_prefix("data: ")?).unwrap()))
    }
}

fn train(run: &Run, args: &str) -> std::process::Command {
    let args = format!("--out {} {args}", run.at("run").display());
    let mut command = farflung();
    command.args(run.args(&args)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn times(path: &Path) -> Vec<StepTimes> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn close(got: &Value, expected: f64) -> bool {
    got.as_f64().is_some_and(|got| (got - expected).abs() <= 1e-9 * expected.abs())
}

fn texts<'a>(values: &'a Value, field: &str) -> Vec<&'a str> {
    values.as_array().unwrap().iter().map(|value| value[field].as_str().unwrap()).collect()
}

#[test]
fn a_run_that_has_ended_is_shown_as_its_files_say() {
    let run = Run::new();
    assert!(train(&run, "--steps 30 --checkpoint-every 10 --link 20mbit,25ms").status().unwrap().success());
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    let last = rows.last().unwrap();
    let page = Page::of(&run.at("run"));
    let snapshot = page.snapshot();

    assert_eq!((&snapshot["phase"]["name"], &snapshot["run"]["name"]), (&"finished".into(), &"run".into()));
    assert_eq!(snapshot["run"]["steps"], 30);
    let (latest, goodput) = (&snapshot["latest"], &snapshot["goodput"]);
    assert_eq!(
        (&latest["step"], &latest["tokens"], &latest["bytes_sent"]),
        (&last.step.into(), &last.tokens.into(), &last.bytes_sent.into())
    );
    assert!(
        close(&latest["train_loss"], last.train_loss) && close(&latest["val_loss"], last.val_loss.unwrap())
    );
    assert!(close(&goodput["tokens_per_s"], last.tokens as f64 / last.wall_s), "{goodput}");
    assert!(close(&goodput["clock_tokens_per_s"], last.tokens as f64 / last.time_s), "{goodput}");
    let points = snapshot["curve"]["points"].as_array().unwrap();
    assert_eq!(points.len(), rows.len());
    for (point, row) in points.iter().zip(&rows) {
        assert!(point["step"] == row.step && close(&point["loss"], row.train_loss), "{point}");
        assert_eq!(point["bytes_sent"], row.bytes_sent);
    }

    // Members, links, and the times of the steps.
    assert_eq!(texts(&snapshot["members"], "name"), ["worker.0", "worker.1"]);
    let links = snapshot["links"].as_array().unwrap();
    assert!(
        links.len() == 1 && links[0]["bits_per_s"] == 20_000_000 && close(&links[0]["latency_s"], 0.025),
        "{links:?}"
    );
    for (rank, path) in ["run/times.jsonl", "run/ranks/rank-00001/times.jsonl"].iter().enumerate() {
        let told = *times(&run.at(path)).last().unwrap();
        let member = &snapshot["members"][rank];
        assert!(
            member["share"] == 0.5 && member["step"] == 30 && member["bytes_sent"] == told.bytes_sent,
            "{member}"
        );
        let step = &snapshot["timeline"].as_array().unwrap().last().unwrap()["ranks"][rank];
        let sum: f64 =
            ["compute_s", "wait_s", "communicate_s"].iter().map(|part| step[part].as_f64().unwrap()).sum();
        assert!(
            (sum - told.took_s).abs() < 1e-12 && close(&step["compute_s"], told.compute_s()),
            "{step} {told:?}"
        );
    }

    // Each event is shown once, with the ranks that reported it.
    let told = events::read(&run.at("run/events.jsonl")).unwrap();
    let shown = snapshot["events"].as_array().unwrap();
    assert_eq!(shown.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [10, 20, 30]);
    assert_eq!(told.len(), 3);
    assert!(shown.iter().all(|event| event["ranks"] == serde_json::json!([0, 1])), "{shown:?}");
    assert_eq!(shown[2]["text"], "checkpoint saved: step-00000030");
    assert_eq!(snapshot["problems"], serde_json::json!([]));
    // The first update contains everything.
    let update = page.updates().next().unwrap();
    assert_eq!((&update["curve"]["points"], &update["latest"]), (&snapshot["curve"]["points"], latest));
}

#[test]
fn a_live_run_is_followed_step_by_step_until_it_is_stopped() {
    let run = Run::new();
    let training = Process(train(&run, "--steps 1000000 --eval-every 1000000").spawn().unwrap());
    let path = run.at("run/metrics.jsonl");
    wait_until("some steps", || (metrics::read(&path).ok()?.len() > 2).then_some(()));
    let page = Page::of(&run.at("run"));
    let mut updates = page.updates();
    let mut points: Vec<Value> = Vec::new();
    let mut take = |update: &Value| {
        let from = update["curve"]["from"].as_u64().unwrap() as usize;
        assert!(from <= points.len(), "{from} of {}", points.len());
        points.truncate(from);
        points.extend(update["curve"]["points"].as_array().unwrap().iter().cloned());
        let covered: u64 = points.iter().map(|point| point["steps"].as_u64().unwrap()).sum();
        assert_eq!(covered, update["latest"]["step"].as_u64().unwrap());
    };
    let mut steps = Vec::new();
    for update in updates.by_ref().take(4) {
        assert_eq!(update["phase"]["name"], "running");
        take(&update);
        steps.push(update["latest"]["step"].as_u64().unwrap());
    }
    assert!(steps.is_sorted() && steps[0] < steps[3], "{steps:?}");
    // An event that is written is shown, and an invalid line is counted.
    let mut file = File::options().append(true).open(run.at("run/metrics.jsonl")).unwrap();
    send(training.0.id(), Signal::INT);
    let ended =
        updates.by_ref().inspect(&mut take).find(|update| update["phase"]["name"] == "ended").unwrap();
    assert!(ended["phase"]["reason"].as_str().unwrap().contains("SIGINT"), "{}", ended["phase"]);
    drop(training);
    file.write_all(b"{\"step\": \"<script>alert(1)</script>\"}\n{\"half\":").unwrap();
    let bad = updates.find(|update| update["problems"][0]["file"] == "metrics.jsonl").unwrap();
    assert_eq!(bad["problems"][0]["bad_lines"], 1);
    let rows = metrics::read(&path);
    assert!(rows.is_err(), "the file has a bad line");
    // The server ends by a signal, although a browser follows.
    let Page { mut process, .. } = page;
    send(process.0.id(), Signal::TERM);
    assert!(wait_until("its end", || process.0.try_wait().unwrap()).success());
}

#[test]
fn a_member_is_asked_who_is_there() {
    let run = Run::new();
    let mut host = farflung();
    let args = format!(
        "--listen 127.0.0.1:0 --steps 1000000 --eval-every 1000000 --out {}",
        run.at("host").display()
    );
    host.arg("host").args(run.flags(&args)).env("FARFLUNG_HOME", run.at("home")).stdin(Stdio::null());
    let _host = Process(host.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let ticket = run.at("host/run.ticket");
    wait_until("the ticket", || (ticket.exists() && run.at("host/metrics.jsonl").exists()).then_some(()));
    let key = run.at("key");
    let page = Page::with(&run.at("host"), &["--ticket-file".as_ref(), &ticket, "--key-file".as_ref(), &key]);
    let asked = |update: &Value| update["members"][0]["address"].is_string();
    let update = page.updates().find(asked).unwrap();
    let member = &update["members"][0];
    assert!(
        member["name"] == "member 0" && member["share"] == 1.0 && member["presence"] == "here",
        "{member}"
    );
    assert!(
        close(&update["goodput"]["unchanged"], 1.0) && update["problems"] == serde_json::json!([]),
        "{update}"
    );
}

#[test]
fn other_sites_and_other_methods_are_refused() {
    let run = Run::new();
    assert!(train(&run, "--steps 1").status().unwrap().success());
    let page = Page::of(&run.at("run"));
    let html = page.get("/");
    assert!(html.status == 200 && html.body.contains("<!doctype html>") && html.body.ends_with("</html>\n"));
    let policy = html.head.lines().find(|line| line.starts_with("content-security-policy: ")).unwrap();
    let nonce = policy.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(html.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert!(!page.get("/").head.contains(nonce), "a nonce is of one answer");
    let inside = html.body.replace("http://www.w3.org/2000/svg", "").replace("url(#", "");
    for outside in ["http://", "https://", "src=", "url(", "@import", "innerHTML"] {
        assert!(!inside.contains(outside), "{outside}");
    }
    let here = format!("Host: {}", page.at);
    for (line, host, status) in [
        ("GET /snapshot", "Host: evil.example", 421),
        ("GET /snapshot", "Host: localhost:1", 200),
        ("GET /snapshot", "Accept: */*", 400),
        ("POST /snapshot", &here, 405),
        ("HEAD /", &here, 405),
        ("GET /../config.toml", &here, 404),
    ] {
        let request = format!("{line} HTTP/1.1\n{host}\nConnection: close\n\n");
        let answer = page.ask(&request);
        assert_eq!(answer.status, status, "{request}");
        for header in
            ["x-content-type-options: nosniff", "content-security-policy: ", "cache-control: no-store"]
        {
            assert!(answer.head.contains(header), "{request}{}", answer.head);
        }
    }
}

#[test]
fn what_cannot_be_shown_is_said() {
    let run = Run::new();
    let said = |args: &[&str]| {
        let output = farflung().arg("watch").args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = said(&[run.at("nowhere").to_str().unwrap()]);
    assert!(code == Some(1) && text.contains("nowhere"), "{text}");
    std::fs::create_dir(run.at("thesis")).unwrap();
    std::fs::write(run.at("thesis/a.tex"), "x").unwrap();
    let (code, text) = said(&[run.at("thesis").to_str().unwrap()]);
    assert!(code == Some(2) && text.contains("expected the folder of a run"), "{text}");
    std::fs::write(run.at("metrics.jsonl"), "").unwrap();
    let here = run.at("");
    let (code, text) = said(&[here.to_str().unwrap(), "--listen", "203.0.113.1:1"]);
    assert!(code == Some(1) && text.contains("failed to listen at 203.0.113.1:1"), "{text}");
}
