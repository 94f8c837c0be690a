//! Names that users give to members (`--name`), for messages and the status of the run.

use std::collections::BTreeMap;

use farflung_parallel::membership::View;

use crate::config::member_name::MemberName;

/// Names of the members of all views so far, by their endpoints. A member without a name is called by the
/// number of its endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemberNames(BTreeMap<u32, MemberName>);

impl MemberNames {
    /// Notes the names that the members of a view have told each other.
    pub(super) fn note(&mut self, view: &View, told: impl IntoIterator<Item = Option<MemberName>>) {
        let named = view.members.iter().zip(told).filter_map(|(member, name)| Some((member.slot, name?)));
        self.0.extend(named);
    }

    /// Sets the name of one member.
    pub(super) fn set(&mut self, slot: u32, name: Option<MemberName>) {
        self.0.extend(name.map(|name| (slot, name)));
    }

    /// Returns the name of the member at an endpoint.
    #[must_use]
    pub fn of(&self, slot: u32) -> Option<&MemberName> {
        self.0.get(&slot)
    }

    /// Returns another endpoint of `view` with the name of the one at `slot`, which can join at the same time.
    #[must_use]
    pub fn twin(&self, view: &View, slot: u32) -> Option<u32> {
        let name = self.of(slot)?;
        let mut others = view.members.iter().map(|member| member.slot).filter(|&other| other != slot);
        others.find(|&other| self.of(other) == Some(name))
    }

    /// Returns the words for the member at an endpoint: its name, or `member` and its number.
    #[must_use]
    pub fn called(&self, slot: u32) -> String {
        called(self.of(slot).map(MemberName::as_str), slot)
    }
}

/// Returns the words for the member at an endpoint, which has this name, if it has one.
#[must_use]
pub fn called(name: Option<&str>, slot: u32) -> String {
    name.map_or_else(|| format!("member {slot}"), str::to_owned)
}
