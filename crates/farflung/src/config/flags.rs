//! The settings as flags of a command: one flag per setting, `--config` and `--print-config`, with the defaults
//! in `--help`.

use std::any::TypeId;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use super::{TrainArgs, TrainConfig};
use crate::{Error, Result};

/// All flags of a run; to be flattened into a command.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainFlags {
    /// The settings given as flags.
    pub args: TrainArgs,
    /// A file with settings; flags override it.
    pub config: Option<PathBuf>,
    /// Print the resulting settings and exit.
    pub print_config: bool,
}

impl TrainFlags {
    /// Returns the resulting settings: see [`TrainConfig::resolve`].
    pub fn resolve(self) -> Result<TrainConfig> {
        TrainConfig::resolve(self.args, self.config.as_deref()).map_err(Error::of_input)
    }
}

impl Args for TrainFlags {
    fn augment_args(command: Command) -> Command {
        let defaults = TrainConfig::default();
        let switch = TypeId::of::<bool>();
        TrainArgs::augment_args(command)
            .mut_args(|arg| {
                let default = arg.get_long().and_then(|name| defaults.get(name));
                let help = arg.get_help().map(ToString::to_string);
                // `--quiet` alone means true; `--overlap false` switches off a setting whose default is true.
                let arg = match default {
                    Some(toml::Value::Boolean(_)) if arg.get_value_parser().type_id() == switch => {
                        arg.num_args(0..=1).default_missing_value("true")
                    }
                    _ => arg,
                };
                match (help, default) {
                    (Some(help), Some(default)) => arg.help(format!("{help} [default: {default}]")),
                    _ => arg,
                }
            })
            .arg(
                Arg::new("config")
                    .long("config")
                    .value_name("FILE")
                    .value_parser(clap::value_parser!(PathBuf))
                    .help("TOML file whose keys are the names of flags; flags override it"),
            )
            .arg(
                Arg::new("print_config")
                    .long("print-config")
                    .action(clap::ArgAction::SetTrue)
                    .help("Print all settings in the format of --config, and exit"),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TrainFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self {
            args: TrainArgs::from_arg_matches(matches)?,
            config: matches.get_one("config").cloned(),
            print_config: matches.get_flag("print_config"),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        TrainFlags::augment_args(Command::new("train"))
    }

    fn parse(args: &[&str]) -> Result<TrainFlags, clap::Error> {
        let matches = command().try_get_matches_from([&["train"], args].concat())?;
        TrainFlags::from_arg_matches(&matches)
    }

    #[test]
    fn switches_take_a_value_or_none() {
        let flags = parse(&["--quiet", "--overlap", "false", "--json", "--steps", "3"]).unwrap();
        let given = flags.args.clone();
        assert_eq!((given.quiet, given.overlap, given.json), (Some(true), Some(false), Some(true)));
        assert_eq!((given.error_feedback, given.steps), (None, Some(3)));
        assert_eq!(flags.resolve().unwrap().steps, 3);
        assert!(parse(&["--quiet", "perhaps"]).is_err());
    }

    #[test]
    fn a_wrong_flag_says_what_was_expected() {
        let message = parse(&["--link", "100mbit"]).unwrap_err().to_string();
        assert!(message.contains("--link <LINK>") && message.contains("such as `100mbit,20ms`"), "{message}");
        let message = parse(&["--worker", "3"]).unwrap_err().to_string();
        assert!(message.contains("--workers"), "{message}");
    }

    #[test]
    fn help_shows_every_flag_with_its_default() {
        command().debug_assert();
        let help = command().render_help().to_string();
        for key in TrainArgs::KEYS {
            assert!(help.contains(&format!("--{}", super::super::dashed(key))), "{key}");
        }
        assert!(help.contains("Optimizer steps [default: ") && help.contains("Workers and links:"), "{help}");
    }
}
