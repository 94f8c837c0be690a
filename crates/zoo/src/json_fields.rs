//! Fields of a `config.json`, checked as they are read.

use std::path::Path;

use serde_json::{Map, Value};

use crate::ZooError;

/// The fields of an object. A null field is one that is missing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    /// The field that contains the object, with a dot behind it; empty for the file itself.
    within: &'a str,
    json: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) const fn new(path: &'a Path, json: &'a Map<String, Value>) -> Self {
        Self { path, within: "", json }
    }

    /// Returns a field's value.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.json.get(field).filter(|value| !value.is_null())
    }

    /// Returns whether a field is there and null.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.json.get(field).is_some_and(Value::is_null)
    }

    /// Returns the fields of a field that is an object. `within` is its name with a dot behind it.
    pub(crate) fn object(&self, field: &str, within: &'a str) -> Result<Option<Self>, ZooError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let json = value.as_object().ok_or_else(|| self.wrong(field, "an object or null".to_owned()))?;
        Ok(Some(Self { within, json, ..*self }))
    }

    /// Returns the error of a field.
    pub(crate) fn wrong(&self, field: &str, expected: String) -> ZooError {
        let found = self.get(field).map_or_else(|| "missing".to_owned(), ToString::to_string);
        let field = format!("{}{field}", self.within);
        ZooError::JsonField { path: self.path.to_owned(), field, found, expected }
    }

    /// Checks that a field that is there has one of these values.
    pub(crate) fn one_of(&self, field: &str, values: &[Value]) -> Result<(), ZooError> {
        if self.get(field).is_none_or(|found| values.contains(found)) {
            return Ok(());
        }
        let expected = values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
        Err(self.wrong(field, expected))
    }

    /// Checks that a field is not there.
    pub(crate) fn unsupported(&self, field: &str, expected: &str) -> Result<(), ZooError> {
        if self.get(field).is_none() { Ok(()) } else { Err(self.wrong(field, expected.to_owned())) }
    }

    /// Returns a whole number.
    pub(crate) fn number(&self, field: &str) -> Result<usize, ZooError> {
        let value = self.get(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        value.ok_or_else(|| self.wrong(field, "a whole number".to_owned()))
    }

    /// Returns a whole number, or the default if the field is missing.
    pub(crate) fn number_or(&self, field: &str, default: usize) -> Result<usize, ZooError> {
        if self.get(field).is_some() { self.number(field) } else { Ok(default) }
    }

    /// Returns a number.
    pub(crate) fn real(&self, field: &str) -> Result<f64, ZooError> {
        let value = self.get(field).and_then(Value::as_f64);
        value.ok_or_else(|| self.wrong(field, "a number".to_owned()))
    }

    /// Returns a number, or the default if the field is missing.
    pub(crate) fn real_or(&self, field: &str, default: f64) -> Result<f64, ZooError> {
        if self.get(field).is_some() { self.real(field) } else { Ok(default) }
    }

    /// Returns true or false, or the default if the field is missing.
    pub(crate) fn flag_or(&self, field: &str, default: bool) -> Result<bool, ZooError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(field, "true or false".to_owned()))
    }

    /// Checks a description of a model, and names an invalid field as the file has it. `names` are pairs of the
    /// names in the description and in the file.
    pub(crate) fn checked<T>(
        &self,
        result: Result<T, ZooError>,
        names: &[(&str, &str)],
    ) -> Result<T, ZooError> {
        let in_file = |field: &str| {
            let known = names.iter().find(|(ours, _)| *ours == field);
            known.map_or(field, |&(_, file)| file).to_owned()
        };
        result.map_err(|error| match error {
            ZooError::Config { field, expected, .. } | ZooError::RealField { field, expected, .. } => {
                let expected = names.iter().fold(expected.to_owned(), |text, (ours, file)| {
                    text.replace(&format!("`{ours}`"), &format!("`{file}`"))
                });
                self.wrong(&in_file(field), expected)
            }
            other => other,
        })
    }
}

/// Returns a number with as many digits as its type needs, so that `1e-5` is written as such.
pub(crate) fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}
