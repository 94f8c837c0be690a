//! Parses the command line. Negative numbers are values rather than flags, the last of several values of a flag
//! counts, and usage errors are printed as `--log-format` says.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches};

use super::Cli;

/// Parses the arguments of this process. Also returns the flags that are given more than once: scripts append
/// flags to override earlier ones, so the last one counts.
///
/// Errors: help, the version or a usage error, to be printed.
pub(super) fn parse() -> Result<(Cli, Vec<String>), clap::Error> {
    let (args, mut command) = (joined(std::env::args_os()), command());
    let matches = command.try_get_matches_from_mut(&args);
    let matches = matches.map_err(|error| match not_utf8(args.iter().skip(1)) {
        Some(text) if error.kind() == ErrorKind::InvalidUtf8 => command.error(ErrorKind::InvalidUtf8, text),
        _ => error,
    })?;
    let repeated = repeated(&command, args.get(1..).unwrap_or_default());
    Cli::from_arg_matches(&matches).map(|cli| (cli, repeated))
}

fn command() -> Command {
    negative_numbers(Cli::command()).args_override_self(true)
}

/// Returns the flags with one value, or none, that these valid arguments contain more than once.
fn repeated(command: &Command, args: &[OsString]) -> Vec<String> {
    let mut command = command;
    let mut given: BTreeMap<String, usize> = BTreeMap::new();
    for word in args.iter().take_while(|arg| *arg != "--").filter_map(|arg| arg.to_str()) {
        if let Some(subcommand) = command.find_subcommand(word) {
            command = subcommand;
            continue;
        }
        let name = word.split('=').next().unwrap_or(word);
        let is_it = |arg: &&Arg| {
            let short = arg.get_short().is_some_and(|short| name == format!("-{short}"));
            short || arg.get_long().is_some_and(|long| name == format!("--{long}"))
        };
        let single = |arg: &&Arg| matches!(arg.get_action(), ArgAction::Set | ArgAction::SetTrue);
        if let Some(arg) = command.get_arguments().filter(is_it).find(single) {
            let shown = arg.get_long().map_or_else(|| name.to_owned(), |long| format!("--{long}"));
            *given.entry(shown).or_default() += 1;
        }
    }
    given.into_iter().filter(|(_, times)| *times > 1).map(|(name, _)| name).collect()
}

/// Returns what to say of the first argument that is not UTF-8. Settings are saved as text, so those of a run
/// cannot be such paths.
fn not_utf8<'a>(args: impl Iterator<Item = &'a OsString>) -> Option<String> {
    let mut before = None;
    for arg in args {
        let text = arg.to_string_lossy().into_owned();
        if arg.to_str().is_some() {
            before = Some(text);
            continue;
        }
        let (flag, value) = match text.split_once('=').filter(|(flag, _)| flag.starts_with("--")) {
            Some((flag, value)) => (Some(flag.to_owned()), value),
            None => (before.filter(|word| word.starts_with('-')), &*text),
        };
        let flag = flag.map_or_else(|| "an argument".to_owned(), |flag| format!("the value of `{flag}`"));
        return Some(format!(
            "{flag} is `{value}`, which is not UTF-8, and settings are saved as text: give a link to it with \
             another name, or change to its folder and give the rest of the path"
        ));
    }
    None
}

/// Allows negative numbers as values of all options; the option's range decides whether one is valid.
fn negative_numbers(command: Command) -> Command {
    let takes = |arg: Arg| {
        let values = arg.get_action().takes_values();
        if values { arg.allow_negative_numbers(true) } else { arg }
    };
    command.mut_args(takes).mut_subcommands(negative_numbers)
}

/// Rewrites `--lr -1e-3` to `--lr=-1e-3`: clap does not recognise a negative number with a negative exponent.
/// Arguments after `--` belong to another command and stay as they are.
fn joined(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    let mut args = args;
    for arg in args.by_ref() {
        let number = arg.to_str().is_some_and(|text| text.starts_with('-') && text.parse::<f64>().is_ok());
        let flag = |before: &OsString| {
            before.to_str().is_some_and(|text| text.starts_with("--") && !text.contains('='))
        };
        let other = arg == "--";
        match joined.last_mut() {
            Some(before) if number && flag(before) => {
                before.push("=");
                before.push(arg);
            }
            _ => joined.push(arg),
        }
        if other {
            break;
        }
    }
    joined.extend(args);
    joined
}

/// Returns whether the arguments before `--` set `--log-format json`. Used for usage errors, when parsing
/// failed and no parsed arguments exist.
pub(super) fn wants_json(args: impl Iterator<Item = OsString>) -> bool {
    let args: Vec<_> = args.take_while(|arg| arg != "--").collect();
    args.iter().any(|arg| arg == "--log-format=json")
        || args.windows(2).any(|pair| pair[0] == "--log-format" && pair[1] == "json")
}

/// Returns the message of a usage error, without the usage text below it.
pub(super) fn said(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "a command is missing".to_owned();
    }
    let text = error.render().to_string();
    let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|mark| text.find(mark)).min();
    let text = &text[..end.unwrap_or(text.len())];
    text.strip_prefix("error: ").unwrap_or(text).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_of_every_command_takes_a_number_below_zero() {
        fn check(command: &Command, seen: &mut usize) {
            for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
                assert!(arg.is_allow_negative_numbers_set(), "{} of {}", arg.get_id(), command.get_name());
                *seen += 1;
            }
            command.get_subcommands().for_each(|command| check(command, seen));
        }
        let mut seen = 0;
        check(&negative_numbers(Cli::command()), &mut seen);
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn the_last_value_of_a_flag_counts_and_the_flag_is_told() {
        let all = |args: &str| {
            let args: Vec<OsString> = args.split(' ').map(OsString::from).collect();
            let mut command = command();
            let matches = command.try_get_matches_from_mut(&args).unwrap();
            let (_, of_command) = matches.subcommand().unwrap();
            let steps = of_command
                .try_get_raw("steps")
                .ok()
                .flatten()
                .map(|mut values| values.next_back().unwrap().to_str().unwrap().to_owned());
            (steps, repeated(&command, &args[1..]))
        };
        let of = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(all("f train --steps 5 --steps=7"), (Some("7".to_owned()), of(&["--steps"])));
        assert_eq!(all("f train --quiet --steps 5 --quiet"), (Some("5".to_owned()), of(&["--quiet"])));
        assert_eq!(all("f --log-format json train --log-format json").1, of(&["--log-format"]));
        // A flag that is a list, and the flags of another command.
        assert_eq!(all("f ticket --address a:1 --address b:2").1, of(&[]));
        assert_eq!(all("f launch -n 2 -- train --steps 5 --steps 7").1, of(&[]));
        assert_eq!(all("f launch -n 2 --nproc 3 -- train").1, of(&["--nproc"]));
    }

    #[test]
    fn numbers_below_zero_are_joined_with_their_flags() {
        let all = |args: &str| {
            let args = joined(args.split(' ').map(OsString::from));
            args.into_iter().map(|arg| arg.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(all("f train --lr -1e-3 --clip -.5"), "f train --lr=-1e-3 --clip=-.5");
        assert_eq!(all("f schedule -p -4 --file -x"), "f schedule -p -4 --file -x");
        assert_eq!(all("f launch -n 2 -- train --lr -1e-3"), "f launch -n 2 -- train --lr -1e-3");
        assert_eq!(all("f --a=1 -2"), "f --a=1 -2");
    }

    #[cfg(unix)]
    #[test]
    fn an_argument_that_is_not_utf8_is_named_with_its_flag() {
        use std::os::unix::ffi::OsStringExt;

        let said = |args: &[&[u8]]| {
            let args: Vec<_> = args.iter().map(|arg| OsString::from_vec(arg.to_vec())).collect();
            not_utf8(args.iter())
        };
        let text = said(&[b"train", b"--data", b"caf\xe9/b.txt"]).unwrap();
        assert!(
            text.starts_with("the value of `--data` is `caf\u{fffd}/b.txt`, which is not UTF-8"),
            "{text}"
        );
        assert!(said(&[b"train", b"--out=caf\xe9"]).unwrap().starts_with("the value of `--out` is"));
        assert!(said(&[b"caf\xe9"]).unwrap().starts_with("an argument is"));
        assert_eq!(said(&[b"train", "--data=é".as_bytes()]), None);
    }

    #[test]
    fn the_form_of_the_log_is_known_from_wrong_arguments_too() {
        let json = |args: &str| wants_json(args.split(' ').map(OsString::from));
        assert!(json("train --stepz 3 --log-format json") && json("--log-format=json fly"));
        assert!(!json("train --log-format text") && !json("launch -n 2 -- train --log-format json"));
    }
}
