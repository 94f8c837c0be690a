//! Jobs of several processes with a site's certificates: the same results as without, and errors that say why.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Output, Stdio};

use crate::tiny::{Run, farflung};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};

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
    let args = run.args(&format!("--steps 3 --sync ddp --deadline 5s --out run-{port}-{rank} {more}"));
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
