//! Connections by a site's certificates. Ranks of the site meet and compute the bits of an in-memory cluster. A
//! certificate from another authority or an expired one is refused, and so is a host's certificate with another
//! name. The side that refuses gives that reason; either side can be the one that refuses.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::time::Duration;

use crate::common::{free_port, memory_cluster, on_ranks, tcp_by};
use farflung_base::Rank;
use farflung_comm::secure::{Certificates, Identity, JoinSecret, PublicKey, Security};
use farflung_comm::tcp::{Config, join};
use farflung_comm::{CommError, Communicator, ReduceOp, Refusal};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
    date_time_ymd,
};

/// A certificate authority, and its certificate as PEM. All authorities that `new` makes have the same name, as
/// an impostor's would.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "the site");
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Creates an intermediate authority below this one, and its certificate.
    fn below(&self) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.distinguished_name.push(DnType::CommonName, "a department");
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Issues a certificate for these names; returns it and its key as PEM.
    fn issue(&self, names: &[&str], key: &KeyPair, year: i32) -> (String, String) {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        (params.signed_by(key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    fn certificates(&self, names: &[&str], year: i32) -> Certificates {
        let (chain, key) = self.issue(names, &KeyPair::generate().unwrap(), year);
        Certificates::from_pem(self.pem.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap()
    }

    fn security(&self) -> Security {
        Security::by_certificates(&self.certificates(&["127.0.0.1"], 4000), None, Vec::new())
    }
}

fn sums(comm: &Communicator) -> Vec<u32> {
    let mut x: Vec<f32> = (0..100_000).map(|i| (i * 31 + 7 * comm.rank().0) as f32 / 97.0).collect();
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x.iter().map(|v| v.to_bits()).collect()
}

/// Lets rank 0 and rank 1 meet with these settings; returns the result of each.
fn meet(master: &Security, other: &Security, place: &str) -> [Result<Vec<u32>, CommError>; 2] {
    let port = free_port();
    let config = |rank, place: &str, security: &Security| {
        let mut config = Config::new(rank, 2, format!("{place}:{port}"));
        // Rank 1 ends at once if it is refused, and rank 0 by its limit: with the same one, either could end
        // first.
        config.deadline = Duration::from_secs(if rank == 0 { 3 } else { 8 });
        config.security = security.clone();
        config
    };
    let (zero, one) = (config(0, "127.0.0.1", master), config(1, place, other));
    std::thread::scope(|scope| {
        let ranks = [zero, one]
            .map(|config| scope.spawn(move || join(&config).map(|tcp| sums(&Communicator::new(tcp)))));
        ranks.map(|rank| rank.join().unwrap())
    })
}

#[test]
fn ranks_of_a_site_compute_the_bits_of_memory() {
    let site = Authority::new();
    let expected = on_ranks(memory_cluster(3), |comm| sums(&comm));
    let cluster =
        tcp_by(3, &format!("127.0.0.1:{}", free_port()), |config| config.security = site.security());
    assert_eq!(on_ranks(cluster, |comm| sums(&comm)), expected);
    // The ranks above 0 are identified by the keys of their certificates, so those need no address as a name.
    let nameless = |config: &mut Config| {
        let names: &[&str] = if config.rank == 0 { &["127.0.0.1"] } else { &["a.site"] };
        config.security = Security::by_certificates(&site.certificates(names, 4000), None, Vec::new());
    };
    let cluster = tcp_by(3, &format!("127.0.0.1:{}", free_port()), nameless);
    assert_eq!(on_ranks(cluster, |comm| sums(&comm)), expected);
}

#[test]
fn a_host_is_known_by_the_name_that_was_asked_for_and_keys_may_be_of_any_kind() {
    let site = Authority::new();
    let department = site.below();
    for algorithm in [&PKCS_ECDSA_P384_SHA384, &PKCS_ED25519] {
        let (own, key) = department.issue(&["localhost"], &KeyPair::generate_for(algorithm).unwrap(), 4000);
        let chain = own + &department.pem;
        let host = Certificates::from_pem(site.pem.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap();
        let host = Security::by_certificates(&host, None, Vec::new());
        // The certificate does not have the address as a name.
        let [refused, other] = meet(&host, &site.security(), "127.0.0.1");
        let said = other.unwrap_err().to_string();
        assert!(refused.is_err() && said.contains("certificate of another name"), "{said}");
        // The port differs each time, and a name applies only to its own place.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let place = format!("localhost:{port}");
        let named = Security::by_certificates(&site.certificates(&["x"], 4000), None, vec![place.clone()]);
        std::thread::scope(|scope| {
            let ranks =
                [(0, &host, format!("127.0.0.1:{port}")), (1, &named, place)].map(|(rank, own, at)| {
                    let mut config = Config::new(rank, 2, at);
                    config.deadline = Duration::from_secs(20);
                    config.security = own.clone();
                    scope.spawn(move || sums(&Communicator::new(join(&config).unwrap())))
                });
            let [zero, one] = ranks.map(|rank| rank.join().unwrap());
            assert_eq!(zero, one);
        });
    }
}

#[test]
fn others_are_refused_and_named_on_the_side_that_refuses() {
    let (site, other) = (Authority::new(), Authority::new());
    let kinds = |security: &Security| security.refused().counts().keys().copied().collect::<Vec<_>>();
    let by = |certificates| Security::by_certificates(&certificates, None, Vec::new());

    // The client rejects the server's certificate, and fails at once.
    for (server, kind) in [
        (other.security(), "certificate of another authority"),
        (by(site.certificates(&["127.0.0.1"], 2020)), "expired certificate"),
        (by(site.certificates(&["10.9.8.7", "a.site"], 4000)), "certificate of another name"),
    ] {
        let [master, rank] = meet(&server, &site.security(), "127.0.0.1");
        let said = rank.unwrap_err().to_string();
        assert!(said.contains(kind), "{kind}: {said}");
        let CommError::Missing { ranks, .. } = master.unwrap_err() else { unreachable!("{kind}") };
        assert_eq!((ranks, kinds(&server)), (vec![Rank(1)], vec!["silent"]), "{kind}");
    }

    // The server rejects the client's certificate, and logs the reason. The client trusts the site.
    let (chain, key) = other.issue(&["127.0.0.1"], &KeyPair::generate().unwrap(), 4000);
    let stranger = Certificates::from_pem(site.pem.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap();
    for (client, kind) in [
        (by(stranger), "certificate of another authority"),
        (by(site.certificates(&["127.0.0.1"], 2020)), "expired certificate"),
    ] {
        let server = site.security();
        let [master, rank] = meet(&server, &client, "127.0.0.1");
        assert!(matches!(master.unwrap_err(), CommError::Missing { .. }), "{kind}");
        assert!(rank.is_err() && kinds(&server) == [kind], "{kind}: {:?} {rank:?}", kinds(&server));
    }
}

#[test]
fn keys_and_certificates_do_not_meet_and_a_secret_counts_beside_them() {
    let site = Authority::new();
    let secret = |text: &[u8]| JoinSecret::from_text(text).unwrap();
    let raw = Security::by_secret(&Identity::generate().unwrap(), &secret(b"sixteen letters and more"));
    for (a, b) in [(&raw, &site.security()), (&site.security(), &raw)] {
        assert!(meet(a, b, "127.0.0.1").iter().all(Result::is_err));
    }
    let with = |text: &[u8]| {
        Security::by_certificates(&site.certificates(&["127.0.0.1"], 4000), Some(&secret(text)), Vec::new())
    };
    let [zero, one] =
        meet(&with(b"sixteen letters and more"), &with(b"sixteen letters and more"), "127.0.0.1");
    assert_eq!(zero.unwrap(), one.unwrap());
    let server = with(b"sixteen letters and more");
    let [_, one] = meet(&server, &with(b"sixteen other letters here"), "127.0.0.1");
    let refused = one.unwrap_err();
    assert!(matches!(refused, CommError::Refused { reason: Refusal::Secret, .. }), "{refused}");
    let [_, one] = meet(&server, &site.security(), "127.0.0.1");
    assert!(matches!(one.unwrap_err(), CommError::Refused { reason: Refusal::Secret, .. }));
}

#[test]
fn an_allow_list_names_the_keys_of_certificates() {
    let site = Authority::new();
    let own = site.certificates(&["127.0.0.1"], 4000);
    let key = own.own_key();
    let rank = Security::by_certificates(&own, None, Vec::new());
    let master = |allowed: PublicKey| site.security().allowing([allowed]);
    let [zero, one] = meet(&master(key), &rank, "127.0.0.1");
    assert_eq!(zero.unwrap(), one.unwrap());
    let [_, one] = meet(&master(PublicKey::new([7; 32])), &rank, "127.0.0.1");
    let refused = one.unwrap_err();
    assert!(matches!(refused, CommError::Refused { reason: Refusal::Key, .. }), "{refused}");
}

#[test]
fn texts_that_hold_no_certificates_say_which_and_why() {
    let site = Authority::new();
    let (chain, key) = site.issue(&["a.site"], &KeyPair::generate().unwrap(), 4000);
    let other = KeyPair::generate().unwrap().serialize_pem();
    let broken = chain.replace('M', "N");
    for (authority, chain, key, what) in [
        ("", &chain[..], &key[..], "authority"),
        (&site.pem, "", &key, "certificate"),
        (&site.pem, &broken, &key, "certificate"),
        (&site.pem, &chain, "", "key"),
        (&site.pem, &chain, &other, "key"),
        (&key, &chain, &key, "authority"),
    ] {
        let fault =
            Certificates::from_pem(authority.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap_err();
        assert_eq!(fault.what, what, "{fault}");
        assert!(!fault.problem.is_empty() && !fault.to_string().contains("PRIVATE"));
    }
    let whole = Certificates::from_pem(site.pem.as_bytes(), chain.as_bytes(), key.as_bytes()).unwrap();
    assert_eq!(format!("{whole:?}"), "Certificates(1 roots, a chain of 1)");
}
