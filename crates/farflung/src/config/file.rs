//! Reads settings from a TOML file. Each key is a flag's name; unknown keys and invalid values are errors with
//! their line.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use toml::{Spanned, Value};

use super::given::BY_DEFAULT;
use super::nearest::nearest;
use super::{TrainArgs, dashed};
use crate::{Error, Result};

impl TrainArgs {
    /// Reads settings from a TOML file, whose keys are the flags' names, such as `eval-every`. A value followed
    /// by the comment [`BY_DEFAULT`] is used, but does not count as given.
    ///
    /// Errors: [`Error::Io`], [`Error::ConfigSyntax`], [`Error::UnknownKey`] with the nearest known key,
    /// [`Error::ConfigValue`] with what was expected. The last two contain the line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(Error::io("read the config file", path))?;
        Self::from_toml(&text, path)
    }

    /// Reads settings from TOML text; `path` is used in error messages.
    pub fn from_toml(text: &str, path: &Path) -> Result<Self> {
        let entries: BTreeMap<Spanned<String>, Spanned<Value>> = toml::from_str(text)
            .map_err(|e| Error::ConfigSyntax { path: path.to_owned(), source: Box::new(e) })?;
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);

        let mut args = Self::default();
        for (key, value) in entries {
            let line = 1 + text[..key.span().start].matches('\n').count();
            let written = key.into_inner();
            let Some(&name) = Self::KEYS.iter().find(|name| dashed(name) == written) else {
                let known: Vec<String> = TrainArgs::KEYS.iter().map(|name| dashed(name)).collect();
                let nearest = nearest(&written, known.iter().map(String::as_str)).map(str::to_owned);
                return Err(Error::UnknownKey { path: path.to_owned(), line, key: written, nearest });
            };
            let rest = text[value.span().end..].lines().next().unwrap_or_default();
            if rest.trim() == BY_DEFAULT {
                args.by_default.insert(name);
            }
            let value = value.into_inner();
            args.set(name, &value).map_err(|expected| Error::ConfigValue {
                path: path.to_owned(),
                line,
                key: written,
                value: value.to_string(),
                expected,
            })?;
        }
        Ok(args)
    }
}
