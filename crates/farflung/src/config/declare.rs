//! The macro that declares the settings of a run from one list.

/// The type of a resolved setting: its own type if it has a default, else `Option`.
macro_rules! resolved {
    ($ty:ty) => { Option<$ty> };
    ($ty:ty, $default:expr) => { $ty };
}

/// The value of a resolved setting.
macro_rules! resolve {
    ($given:expr) => {
        $given
    };
    ($given:expr, $default:expr) => {
        $given.unwrap_or_else(|| $default.into())
    };
}

/// A resolved setting as a TOML value, or `None` if it has no value.
macro_rules! printed {
    ($field:expr) => {
        $field.as_ref().map(Setting::value)
    };
    ($field:expr, $default:expr) => {
        Some(Setting::value(&$field))
    };
}

/// Declares `RunSettings`: row by row, drops the settings that a plan decides, and collects the others.
macro_rules! run_settings {
    ([$($done:tt)*] [$wish:ident] [] [$ty:ty] $($rest:tt)*) => {
        run_settings! { [$($done)*] $($rest)* }
    };
    ([$($done:tt)*] [] [$run:ident] [$ty:ty] $($rest:tt)*) => {
        run_settings! { [$($done)* $run: $ty,] $($rest)* }
    };
    ([$($run:ident: $ty:ty,)+]) => {
        /// The settings of a run that do not become part of its plan, with all defaults filled in.
        #[derive(Debug, Clone, PartialEq)]
        pub struct RunSettings {
            $(
                #[doc = concat!("As [`TrainConfig::", stringify!($run), "`].")]
                pub $run: $ty,
            )+
        }

        impl TrainConfig {
            /// Returns the settings that do not become part of the run's plan.
            #[must_use]
            pub fn run_settings(&self) -> RunSettings {
                RunSettings { $($run: self.$run.clone(),)+ }
            }
        }
    };
}

/// Declares `TrainArgs` (the settings as given), `TrainConfig` (the resolved settings) and `RunSettings` (those
/// that a plan does not decide) from one list. A plan decides the settings with an `@` before their names.
macro_rules! settings {
    ($($heading:literal {
        $($(#[doc = $doc:literal])+ $(@$wish:ident)? $($run:ident)?: $ty:ty, $metavar:literal
            $(, $default:expr)? $(=> $own:literal)?;)+
    })+) => {
        all_settings! {
            $($heading {
                $($(#[doc = $doc])+ $($wish)? $($run)?: $ty, $metavar $(, $default)? $(=> $own)?;)+
            })+
        }

        run_settings! {
            [] $($([$($wish)?] [$($run)?] [resolved!($ty $(, $default)?)])+)+
        }

        impl TrainArgs {
            /// The settings that a plan decides, by field name.
            pub const DECIDED: &'static [&'static str] = &[$($($(stringify!($wish),)?)+)+];
        }
    };
}

/// Declares `TrainArgs` and `TrainConfig` from the list of all settings. Ranks of a job compare a setting when
/// they meet, unless its row ends with `=>` and the reason why it may differ between ranks.
macro_rules! all_settings {
    ($($heading:literal {
        $($(#[doc = $doc:literal])+ $name:ident: $ty:ty, $metavar:literal $(, $default:expr)? $(=> $own:literal)?;)+
    })+) => {
        /// The settings of a run as given; `None` for those that were not given.
        #[derive(Debug, Clone, Default, PartialEq, clap::Args)]
        pub struct TrainArgs {
            $($(
                $(#[doc = $doc])+
                #[arg(long, value_name = $metavar, help_heading = $heading,
                      value_parser = <$ty as Setting>::from_flag)]
                pub $name: Option<$ty>,
            )+)+
            /// Settings that a file marks as defaults ([`BY_DEFAULT`](given::BY_DEFAULT)): they have a value
            /// but do not count as given.
            #[arg(skip)]
            pub by_default: BTreeSet<&'static str>,
        }

        /// The settings of a run with all defaults filled in; `None` only if leaving a setting out has a
        /// meaning.
        #[derive(Debug, Clone, PartialEq)]
        pub struct TrainConfig {
            $($($(#[doc = $doc])+ pub $name: resolved!($ty $(, $default)?),)+)+
            /// The settings that were given by a flag or file.
            pub given: Given,
        }

        impl TrainArgs {
            /// The field names of all settings, in the order of `--help`.
            pub const KEYS: &'static [&'static str] = &[$($(stringify!($name),)+)+];

            /// The settings that may differ between the ranks of a job.
            pub const PER_RANK: &'static [PerRankSetting] =
                &[$($($(PerRankSetting { name: stringify!($name), why: $own },)?)+)+];

            /// Returns these settings; a setting that is not given here is taken from `other`.
            #[must_use]
            pub fn or(self, other: Self) -> Self {
                let mut by_default = self.by_default.clone();
                by_default.extend(other.by_default.difference(&self.given()));
                Self { $($($name: self.$name.or(other.$name),)+)+ by_default }
            }

            /// Returns the names of the settings that were given.
            #[must_use]
            pub fn given(&self) -> BTreeSet<&'static str> {
                let all = [$($(self.$name.is_some().then_some(stringify!($name)),)+)+];
                all.into_iter().flatten().filter(|name| !self.by_default.contains(name)).collect()
            }

            /// Returns the names and values of the settings that were given.
            #[must_use]
            pub fn given_values(&self) -> Vec<(&'static str, String)> {
                let all = [$($((stringify!($name), self.$name.as_ref().map(|v| Setting::value(v).to_string())),)+)+];
                let given = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
                given.filter(|(name, _)| !self.by_default.contains(name)).collect()
            }

            /// Clears one setting.
            fn forget(&mut self, key: &str) {
                match key {
                    $($(stringify!($name) => self.$name = None,)+)+
                    _ => {}
                }
            }

            /// Sets one setting from a TOML value. Errors: the values that are allowed, if the value is not one
            /// of them.
            fn set(&mut self, key: &str, value: &toml::Value) -> Result<(), String> {
                match key {
                    $($(stringify!($name) => {
                        let expected = || <$ty>::wanted(value.as_str().unwrap_or_default());
                        self.$name = Some(<$ty>::from_toml(value).ok_or_else(expected)?);
                    })+)+
                    _ => return Err(format!("one of {}", Self::KEYS.join(" "))),
                }
                Ok(())
            }
        }

        impl TrainConfig {
            /// Fills in the defaults, without checking values.
            fn fill(args: TrainArgs) -> Self {
                let given = Given::Only(args.given());
                let (min_lr, codec, outer_momentum) = (args.min_lr, args.codec, args.outer_momentum);
                let sync = args.sync;
                let own = args.optimizer_defaults();
                let mut config = Self { $($($name: resolve!(args.$name $(, $default)?),)+)+ given };
                config.min_lr = min_lr.unwrap_or(config.lr / LR_OVER_MIN_LR);
                own.fill(&mut config);
                config.take_mesh();
                config.take_pools();
                if sync.is_none() {
                    config.take_sync_of_row();
                }
                if codec.is_none() {
                    config.take_codec_of_rows();
                }
                if outer_momentum.is_none() {
                    config.take_outer_momentum_of_row();
                }
                config
            }

            /// Returns the headings with the settings below them; `None` for a setting without a value.
            fn entries(&self) -> Vec<(&'static str, Vec<(&'static str, Option<toml::Value>)>)> {
                vec![$(($heading, vec![$((stringify!($name), printed!(self.$name $(, $default)?)),)+]),)+]
            }
        }
    };
}
