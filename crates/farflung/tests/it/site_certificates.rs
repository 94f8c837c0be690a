//! Jobs of several processes with a site's certificates: the same results as without, and errors that say why.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Output, Stdio};

use crate::child::{send, wait_until_or};
use crate::tiny::{Run, farflung};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustix::process::Signal;

/// Writes an authority's certificate, and a certificate that it made for this machine until `year`, to the
/// run's folder.
fn issue(run: &Run, site: &str, year: i32) {
    let (key, own) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut authority = CertificateParams::new([]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let put = |name: &str, text: &str, mode| {
        let path = run.at(&format!("{site}.{name}"));
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    put("ca", &authority.self_signed(&key).unwrap().pem(), 0o644);
    let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    params.not_after = date_time_ymd(year, 1, 1);
    let issuer = Issuer::new(authority, key);
    put("cert", &params.signed_by(&own, &issuer).unwrap().pem(), 0o644);
    put("key", &own.serialize_pem(), 0o600);
}

fn rank(run: &Run, rank: usize, host: &str, port: u16, more: &str) -> Child {
    // Rank 1 ends at once if it is refused, and rank 0 by its limit: with the same one, either could end first.
    let deadline = if rank == 0 { "5s" } else { "60s" };
    let args = format!("--steps 3 --sync ddp --deadline {deadline} --out run-{port}-{rank} {more}");
    let args = run.args(&args);
    let mut command = farflung();
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_PORT", port.to_string());
    command.env("MASTER_ADDR", host).env("FARFLUNG_HOME", run.at("home")).current_dir(run.at(""));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).args(args).spawn().unwrap()
}

/// Starts both ranks with these files.
fn both(run: &Run, host: &str, sites: [&str; 2]) -> (u16, [Output; 2]) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let files = |site: &str| match site {
        "" => String::new(),
        site => format!("--tls-ca {site}.ca --tls-cert {site}.cert --tls-key {site}.key"),
    };
    let ranks = [0, 1].map(|number| rank(run, number, host, port, &files(sites[number])));
    (port, ranks.map(|child| child.wait_with_output().unwrap()))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn losses(run: &Run, port: u16) -> Vec<String> {
    let rows = farflung::metrics::read(&run.at(&format!("run-{port}-0/metrics.jsonl"))).unwrap();
    rows.iter().map(|row| row.train_loss.to_string()).collect()
}

#[test]
fn a_site_trains_with_its_certificates_and_others_are_told_why_they_do_not() {
    let run = Run::new();
    issue(&run, "site", 4000);
    issue(&run, "other", 4000);
    issue(&run, "old", 2020);
    let (clear, outputs) = both(&run, "localhost", ["", ""]);
    assert!(outputs.iter().all(|output| output.status.success()), "{}", said(&outputs[0]));
    let (port, outputs) = both(&run, "localhost", ["site", "site"]);
    assert!(
        outputs.iter().all(|output| output.status.success()),
        "{} {}",
        said(&outputs[0]),
        said(&outputs[1])
    );
    assert_eq!(losses(&run, port), losses(&run, clear));

    for (host, sites, why) in [
        ("localhost", ["other", "site"], "certificate of another authority"),
        ("localhost", ["old", "old"], "expired certificate"),
        ("127.0.0.1", ["site", "site"], "certificate of another name"),
    ] {
        let (_, [zero, one]) = both(&run, host, sites);
        assert!(!zero.status.success() && !one.status.success(), "{why}");
        assert!(said(&one).contains(why), "{why}: {}", said(&one));
        assert!(!said(&one).contains("PRIVATE"));
    }
}

#[test]
fn files_that_are_missing_exposed_or_something_else_are_named() {
    let run = Run::new();
    issue(&run, "site", 4000);
    let port = 1;
    let fails = |more: &str| {
        let output = rank(&run, 1, "localhost", port, more).wait_with_output().unwrap();
        assert!(!output.status.success(), "{more}");
        said(&output)
    };
    assert!(fails("--tls-ca site.ca").contains("must be given together"));
    assert!(
        fails("--tls-ca site.key --tls-cert site.cert --tls-key site.key")
            .contains("a PEM file with the authority")
    );
    fs::write(run.at("wrong.key"), fs::read(run.at("site.ca")).unwrap()).unwrap();
    fs::set_permissions(run.at("wrong.key"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(
        fails("--tls-ca site.ca --tls-cert site.cert --tls-key wrong.key")
            .contains("a PEM file with the key")
    );
    fs::set_permissions(run.at("site.key"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(fails("--tls-ca site.ca --tls-cert site.cert --tls-key site.key").contains("site.key"));
}

/// A process that is killed at the end of the test.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a command of a member, whose output goes to a file.
fn member(run: &Run, name: &str, site: &str, words: &[&str]) -> Member {
    let files = format!("--tls-ca {site}.ca --tls-cert {site}.cert --tls-key {site}.key");
    let log = fs::File::create(run.at(&format!("{name}.log"))).unwrap();
    let mut command = farflung();
    command.env("FARFLUNG_HOME", run.at("home")).current_dir(run.at("")).args(words);
    command.args(files.split(' ')).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Member(command.spawn().unwrap())
}

#[test]
fn members_come_and_go_with_certificates_and_no_ticket() {
    let run = Run::new();
    issue(&run, "site", 4000);
    issue(&run, "other", 4000);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (listen, at) = (format!("127.0.0.1:{port}"), format!("localhost:{port}"));
    let flags =
        run.flags(&format!("--steps 1000000 --out host --listen {listen} --address {at} --deadline 2s"));
    let words: Vec<&str> = ["host"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    let log = |name: &str| fs::read_to_string(run.at(&format!("{name}.log"))).unwrap_or_default();
    let host = member(&run, "host", "site", &words);
    wait_until_or(|| log("host"), || log("host").contains(&format!("join --at {at} --tls-ca")).then_some(()));
    assert!(!run.at("host/run.ticket").exists() && !run.at("home").exists());
    let data = run.at("text.txt").display().to_string();
    let join = |name: &str, site: &str, at: &str| {
        let words =
            ["join", "--at", at, "--listen", "127.0.0.1:0", "--threads", "1", "--data", &data, "--out", name];
        member(&run, name, site, &words)
    };
    let has = |name: &str, count: usize| {
        let events = fs::read_to_string(run.at(&format!("{name}/events.jsonl"))).unwrap_or_default();
        let mut changes = events.lines().filter(|line| line.contains("\"event\":\"members\""));
        changes.next_back().is_some_and(|line| line.contains(&format!("\"members\":{count},"))).then_some(())
    };
    let said = |name: &'static str| move || format!("{}\n{}", log("host"), log(name));
    let a = join("a", "site", &at);
    wait_until_or(said("a"), || has("host", 2));
    // Another site's certificate, and a name that the certificate does not contain.
    for (name, site, at, why) in [
        ("other", "other", &at, "certificate of another authority"),
        ("named", "site", &listen, "certificate of another name"),
    ] {
        let mut refused = join(name, site, at);
        assert!(!refused.0.wait().unwrap().success());
        assert!(log(name).contains(why), "{}", log(name));
    }
    let _b = join("b", "site", &at);
    wait_until_or(said("b"), || has("host", 3));
    let mut status = member(&run, "status", "site", &["status", "--at", &at]);
    assert!(status.0.wait().unwrap().success(), "{}", log("status"));
    assert!(log("status").contains(" (answers)"), "{}", log("status"));
    // The others go on without the host, so it joins again as a newcomer, at the addresses of the others that
    // it knows.
    send(host.0.id(), Signal::STOP);
    wait_until_or(said("b"), || has("b", 2));
    send(host.0.id(), Signal::CONT);
    wait_until_or(said("b"), || has("b", 3));
    assert!(log("host").contains("joins again as a newcomer"), "{}", log("host"));
    send(a.0.id(), Signal::KILL);
    wait_until_or(said("b"), || has("b", 2));
}

#[test]
fn members_prove_a_secret_beside_their_certificates_and_the_page_asks_them() {
    let run = Run::new();
    issue(&run, "site", 4000);
    for (name, secret) in [("secret", "a secret of the site, 26 b"), ("other", "another secret, 26 bytes..")]
    {
        fs::write(run.at(name), secret).unwrap();
        fs::set_permissions(run.at(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (listen, at) = (format!("127.0.0.1:{port}"), format!("localhost:{port}"));
    let flags = format!("--steps 1000000 --out host --listen {listen} --address {at} --secret-file secret");
    let flags = run.flags(&flags);
    let words: Vec<&str> = ["host"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    let log = |name: &str| fs::read_to_string(run.at(&format!("{name}.log"))).unwrap_or_default();
    let _host = member(&run, "host", "site", &words);
    wait_until_or(|| log("host"), || log("host").contains("--tls-key FILE --secret-file FILE").then_some(()));
    for (name, more) in [("none", &[][..]), ("wrong", &["--secret-file", "other"])] {
        let mut refused = member(&run, name, "site", &[&["status", "--at", &at][..], more].concat());
        assert!(!refused.0.wait().unwrap().success(), "{name}");
        assert!(log(name).contains("secret"), "{}", log(name));
    }
    let data = run.at("text.txt").display().to_string();
    let asks = ["--at", &at, "--secret-file", "secret"];
    let join = ["join", "--listen", "127.0.0.1:0", "--threads", "1", "--data", &data, "--out", "a"];
    let _a = member(&run, "a", "site", &[&join[..], &asks].concat());
    let said = || format!("{}\n{}", log("host"), log("a"));
    wait_until_or(said, || run.at("a/metrics.jsonl").exists().then_some(()));
    let mut status = member(&run, "status", "site", &[&["status"][..], &asks].concat());
    assert!(status.0.wait().unwrap().success(), "{}", log("status"));
    assert!(log("status").contains(" (answers)"), "{}", log("status"));
    #[cfg(feature = "watch")]
    {
        use std::io::{Read as _, Write as _};
        use std::net::TcpStream;

        let words = ["watch", "host", "--listen", "127.0.0.1:0"];
        let _page = member(&run, "page", "site", &[&words[..], &asks].concat());
        let page = || log("page").lines().find_map(|line| line.strip_prefix("http://").map(str::to_owned));
        let page = wait_until_or(|| log("page"), page);
        let page = page.trim_end_matches('/');
        let asked = || {
            let mut stream = TcpStream::connect(page).unwrap();
            let request = format!("GET /snapshot HTTP/1.1\r\nHost: {page}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            (answer.matches(&format!("\"{at}\"")).count() > 0).then_some(())
        };
        wait_until_or(|| log("page"), asked);
    }
}

#[test]
fn processes_of_one_machine_are_launched_with_certificates() {
    let run = Run::new();
    issue(&run, "site", 4000);
    let flags = run.flags("--steps 1000000 --out host --listen 127.0.0.1:0 --deadline 5s");
    let words = ["launch", "--elastic", "2:2", "--", "host"];
    let words: Vec<&str> = words.into_iter().chain(flags.iter().map(String::as_str)).collect();
    let log = || fs::read_to_string(run.at("launch.log")).unwrap_or_default();
    let mut launched = member(&run, "launch", "site", &words);
    for folder in ["host", "host/members/1"] {
        wait_until_or(log, || run.at(folder).join("metrics.jsonl").exists().then_some(()));
    }
    assert!(!run.at("host/run.ticket").exists() && run.at("host/run.addresses").exists());
    send(launched.0.id(), Signal::TERM);
    assert_eq!(launched.0.wait().unwrap().code(), Some(143), "{}", log());
}
