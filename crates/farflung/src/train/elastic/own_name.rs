//! Refuses a newcomer whose name (`--name`) another member has.

use super::promises::Promised;
use super::status::Status;
use crate::config::member_name::MemberName;
use crate::{Error, Result};

/// Checks that no member of the run has this name, by the status of the run that a member has sent. Members of
/// the last view of this machine's folder may have it: one of them is this machine, which was a member before,
/// and which the others may not have missed yet. `before` is what the folder says of this run.
///
/// Errors: [`Error::Setting`].
pub(super) fn check(name: &MemberName, status: Option<&Status>, before: Option<&Promised>) -> Result<()> {
    let former = |slot: u32| {
        before.is_some_and(|before| before.state.view.members.iter().any(|member| member.slot == slot))
    };
    let mut members = status.iter().flat_map(|status| &status.members);
    let Some(other) =
        members.find(|member| member.name.as_deref() == Some(name.as_str()) && !former(member.slot))
    else {
        return Ok(());
    };
    let at = other.address.as_deref().map_or_else(String::new, |address| format!(" at {address}"));
    let expected = format!("another name, because member {}{at} has this one", other.slot);
    Err(Error::Setting { field: "name", value: name.to_string(), expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::value::Setting as _;

    #[test]
    fn a_name_that_a_member_has_is_refused_with_that_member() {
        let member = serde_json::json!({
            "slot": 7, "name": "shed", "address": "10.0.0.7:29500", "joined": 1, "share": 0.5, "answers": true,
        });
        let member = serde_json::from_value(member).unwrap();
        let status = Status { members: vec![member], ..Status::default() };
        let of = |name: &str| check(&MemberName::parse(name).unwrap(), Some(&status), None);
        of("attic").unwrap();
        let error = of("shed").unwrap_err().to_string();
        assert!(
            ["`name`", "shed", "member 7", "10.0.0.7"].iter().all(|word| error.contains(word)),
            "{error}"
        );
        check(&MemberName::parse("shed").unwrap(), None, None).unwrap();
    }
}
