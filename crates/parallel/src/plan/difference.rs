//! The fields in which two plans differ, and the digest by which ranks check that their plans are equal.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Plan;

/// A blake3 hash of something on which all ranks must agree: a plan's canonical text, a view, or weights.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Creates a digest from the bytes of a hash.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the hash.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// A field in which two plans differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Name of the field, such as `level[0].codec`.
    pub field: String,
    /// Value in the first plan. `None` if that plan does not have the field.
    pub left: Option<String>,
    /// Value in the second plan. `None` if that plan does not have the field.
    pub right: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |side: &Option<String>| side.clone().unwrap_or_else(|| "missing".to_owned());
        write!(f, "`{}` is {} and {}", self.field, value(&self.left), value(&self.right))
    }
}

impl Plan {
    /// Returns the blake3 hash of the canonical text, which is the plan's [`Display`](fmt::Display).
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest(*blake3::hash(self.to_string().as_bytes()).as_bytes())
    }

    /// Returns the fields in which the plans differ, in alphabetical order.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (left, right) = (self.fields(), other.fields());
        let names: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
        let differs = names.into_iter().filter(|name| left.get(*name) != right.get(*name));
        differs
            .map(|name| Difference {
                field: name.clone(),
                left: left.get(name).cloned(),
                right: right.get(name).cloned(),
            })
            .collect()
    }

    /// Returns every field with its value as written in the canonical text.
    #[must_use]
    pub fn fields(&self) -> BTreeMap<String, String> {
        let table: toml::Table = self.to_string().parse().expect("a plan prints TOML");
        let mut fields = BTreeMap::new();
        flatten(String::new(), &toml::Value::Table(table), &mut fields);
        fields
    }
}

fn flatten(path: String, value: &toml::Value, fields: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(path, value, fields);
            }
        }
        toml::Value::Array(values) if values.iter().any(toml::Value::is_table) => {
            for (i, value) in values.iter().enumerate() {
                flatten(format!("{path}[{i}]"), value, fields);
            }
        }
        value => {
            fields.insert(path, value.to_string());
        }
    }
}
