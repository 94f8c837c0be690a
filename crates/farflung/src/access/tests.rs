//! Tests which files and variables let a process join, and the errors otherwise.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

/// Returns the variables of a process whose home is `home`.
fn env<'a>(home: &'a Path, more: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    move |name| match name {
        "FARFLUNG_HOME" => Some(home.display().to_string()),
        name => more.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()),
    }
}

const RANK_1: [(&str, &str); 2] = [("RANK", "1"), ("WORLD_SIZE", "2")];

fn with(args: &AccessArgs, home: &Path, more: &[(&str, &str)]) -> Result<LaunchEnv> {
    args.detect(env(home, &[&RANK_1[..], more].concat())).map(Option::unwrap)
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_process_without_a_home_is_told_each_variable_that_would_give_one() {
    let text = Home::new(None, |_| None).unwrap_err().to_string();
    for variable in ["FARFLUNG_HOME", "XDG_CONFIG_HOME", "HOME"] {
        let env = |name: &str| Some("/a".to_owned()).filter(|_| name == variable);
        assert!(text.contains(variable) && Home::new(None, env).is_ok(), "{variable}: {text}");
    }
}

#[test]
fn off_the_loopback_a_proof_or_leave_is_needed() {
    let home = tempfile::tempdir().unwrap();
    let none = AccessArgs::default();
    assert!(!with(&none, home.path(), &[]).unwrap().security.is_encrypted());
    let far = [("MASTER_ADDR", "10.0.0.1")];
    let refused = with(&none, home.path(), &far).unwrap_err();
    let text = refused.to_string();
    assert!(
        refused.exit_code() == 2 && text.contains("10.0.0.1:29500") && text.contains("--insecure"),
        "{text}"
    );
    let insecure = AccessArgs { insecure: true, ..AccessArgs::default() };
    assert!(!with(&insecure, home.path(), &far).unwrap().security.is_encrypted());
    let secret = [("MASTER_ADDR", "10.0.0.1"), (SECRET, "sixteen bytes it is")];
    assert!(with(&none, home.path(), &secret).unwrap().security.is_encrypted());
    // A process that gives a secret must also give its rank.
    let file = AccessArgs { secret_file: Some(home.path().join("secret")), ..AccessArgs::default() };
    fs::write(home.path().join("secret"), "sixteen bytes it is").unwrap();
    mode(&home.path().join("secret"), 0o600);
    assert!(file.detect(env(home.path(), &[])).unwrap_err().to_string().contains("RANK is not"));
    // A job of one process needs no proof, and makes no key.
    let home = tempfile::tempdir().unwrap();
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "10.0.0.1")];
    assert!(none.detect(env(home.path(), &alone)).unwrap().is_some());
    assert!(!home.path().join("key").exists());
    let peers = |host: &str| {
        none.among_peers(&[format!("{host}:1"), "127.0.0.1:2".to_owned()], env(home.path(), &[]))
    };
    assert!(peers("[::1]").is_ok() && matches!(peers("10.0.0.1"), Err(Error::Unprotected { .. })));
}

#[test]
fn a_key_is_made_once_for_its_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::new(None, env(&folder.path().join("new"), &[])).unwrap();
    let keys: Vec<_> = std::thread::scope(|scope| {
        let made: Vec<_> = (0..8).map(|_| scope.spawn(|| home.identity().unwrap().public())).collect();
        made.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(keys.iter().all(|key| *key == keys[0]));
    let path = folder.path().join("new/key");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);

    mode(&path, 0o640);
    let exposed = home.identity().unwrap_err().to_string();
    assert!(exposed.contains("640") && exposed.contains("chmod 600"), "{exposed}");
    mode(&path, 0o600);
    fs::write(&path, b"short").unwrap();
    let short = home.identity().unwrap_err().to_string();
    assert!(short.contains("5 bytes") && short.contains("32"), "{short}");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(home.identity().is_err());
}

#[test]
fn a_key_belongs_to_one_process_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::new(None, env(folder.path(), &[])).unwrap();
    home.identity().unwrap();
    let claim = home.claim().unwrap();
    let refused = home.claim().unwrap_err();
    let text = refused.to_string();
    assert!(refused.exit_code() == 2 && text.contains("--key-file"), "{text}");
    assert!(text.contains(&folder.path().join("key").display().to_string()), "{text}");
    // Its holder, and those that only ask, still read it.
    home.identity().unwrap();
    drop(claim);
    drop(home.claim().unwrap());
}

#[test]
fn a_ticket_names_the_host_and_where_it_is() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let home = Home::new(None, env(ours.path(), &[])).unwrap();
    let expiry = 1 << 40;
    let ticket = || Ticket {
        addresses: vec!["[fd00::1]:4000".to_owned(), "home.example:4001".to_owned()],
        host: home.identity().unwrap().public(),
        secret: home.join_secret().unwrap().until(expiry),
        expiry,
    };
    let word = ticket().word().unwrap();
    let path = theirs.path().join("ticket");
    fs::write(&path, &word).unwrap();
    mode(&path, 0o600);
    let by_file = AccessArgs { ticket_file: Some(path.clone()), ..AccessArgs::default() };
    let found = with(&by_file, theirs.path(), &[]).unwrap();
    assert_eq!((found.master_addr.as_str(), found.master_port), ("fd00::1", 4000));
    assert_eq!(found.more_addresses, ["home.example:4001"]);
    assert!(found.security.is_encrypted());
    // A variable overrides the address in the ticket; the ticket may be in a variable too.
    let by_variable = [(TICKET, word.as_str()), ("MASTER_ADDR", "10.0.0.9")];
    let found = with(&AccessArgs::default(), theirs.path(), &by_variable).unwrap();
    assert!(
        found.security.is_encrypted() && found.master_addr == "10.0.0.9" && found.more_addresses.is_empty()
    );

    // Rank 0 must be the host that made the ticket.
    let rank_0 = [("RANK", "0"), ("WORLD_SIZE", "2")];
    assert!(by_file.detect(env(ours.path(), &rank_0)).unwrap().unwrap().security.is_encrypted());
    let other = by_file.detect(env(theirs.path(), &rank_0)).unwrap_err();
    assert!(other.to_string().contains("a ticket of") && other.exit_code() == 2, "{other}");
    home.rotate().unwrap();
    let old = by_file.detect(env(ours.path(), &rank_0)).unwrap_err();
    assert!(old.to_string().contains("--rotate"), "{old}");

    mode(&path, 0o644);
    assert!(matches!(with(&by_file, theirs.path(), &[]), Err(Error::Exposed { mode: 0o644, .. })));
    mode(&path, 0o600);
    fs::write(&path, &word[..40]).unwrap();
    let cut = with(&by_file, theirs.path(), &[]).unwrap_err();
    let cause = std::error::Error::source(&cut).unwrap().to_string();
    assert!(cause.contains("copy all of it") && cut.exit_code() == 2, "{cut}: {cause}");
}

#[test]
fn an_allow_list_has_a_key_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let key = Home::new(None, env(folder.path(), &[])).unwrap().identity().unwrap().public();
    let path = folder.path().join("allow");
    fs::write(&path, format!("# friends\n{key} # Ada\n\n")).unwrap();
    assert_eq!(allowed(&path).unwrap().into_iter().collect::<Vec<_>>(), [key]);
    // As an editor writes it.
    fs::write(&path, format!("\u{FEFF}{key}\r\n")).unwrap();
    assert_eq!(allowed(&path).unwrap().into_iter().collect::<Vec<_>>(), [key]);
    fs::write(&path, format!("{key}\nssh-ed25519 AAAA\n")).unwrap();
    let wrong = allowed(&path).unwrap_err().to_string();
    assert!(wrong.contains("allow:2") && wrong.contains("52 characters"), "{wrong}");
}

#[test]
fn a_ticket_that_a_shell_has_written_in_another_encoding_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::new(None, env(folder.path(), &[])).unwrap();
    let expiry = u64::MAX;
    let secret = home.join_secret().unwrap().until(expiry);
    let host = home.identity().unwrap().public();
    let ticket = Ticket { addresses: vec!["127.0.0.1:29500".to_owned()], host, secret, expiry };
    let text = format!("{}\r\n", ticket.word().unwrap());
    let utf16: Vec<u8> = format!("\u{FEFF}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    let path = folder.path().join("run.ticket");
    for bytes in [text.clone().into_bytes(), format!("\u{FEFF}{text}").into_bytes(), utf16] {
        fs::write(&path, bytes).unwrap();
        mode(&path, 0o600);
        assert_eq!(ticket_of(&path).unwrap().word().unwrap(), text.trim_end());
    }
}
