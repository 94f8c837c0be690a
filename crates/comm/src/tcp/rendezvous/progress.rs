//! The words for how far each rank of a rendezvous came: which ones wait, which ones never connected, and which
//! connections were refused.

use std::collections::BTreeMap;
use std::fmt::Display;

use farflung_base::Rank;

use crate::secure::Refused;
use crate::tcp::stream::Stream;

/// Greatest number of ranks or connections in one entry.
const SHOWN: usize = 8;

/// Ranks that were missing when a wait ended.
#[derive(Debug, Default)]
pub(super) struct Absence {
    pub(super) ranks: Vec<Rank>,
    /// How far each rank came, one entry per group of ranks.
    pub(super) progress: Vec<String>,
}

/// Returns the first of `all`, separated by commas, and the number of the others.
fn some_of<T: Display>(all: &[T]) -> String {
    let shown = all.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Describes the ranks that are missing on a rank that others connect to. `refused_ranks` are the reasons for
/// which it refused ranks that greeted; `waiting` are connections that have not greeted.
pub(super) fn of_absent(
    absent: Vec<Rank>,
    streams: &[Option<Stream>],
    refused_ranks: &BTreeMap<Rank, String>,
    refused: &Refused,
    waiting: &[String],
) -> Absence {
    let mut progress = Vec::new();
    let (refused_here, silent): (Vec<Rank>, Vec<Rank>) =
        absent.iter().partition(|rank| refused_ranks.contains_key(rank));
    for rank in refused_here.iter().take(SHOWN) {
        progress.push(format!("{rank} {}", refused_ranks[rank]));
    }
    let strangers: Vec<String> = refused
        .last_of_each()
        .into_iter()
        .map(|(ip, reason)| format!("{ip} ({reason})"))
        .filter(|_| refused_here.is_empty())
        .collect();
    if !silent.is_empty() {
        // A connection that is refused before its greeting has not told its rank.
        let how = if strangers.is_empty() && waiting.is_empty() { "never connected" } else { "did not join" };
        progress.push(format!("{} {how}", some_of(&silent)));
    }
    if !strangers.is_empty() {
        progress.push(format!("connections were refused from {}", some_of(&strangers)));
    }
    if !waiting.is_empty() {
        progress.push(format!("connected, but sent no whole greeting: {}", some_of(waiting)));
    }
    let connected = |(rank, stream): (usize, &Option<Stream>)| {
        let address = stream.as_ref()?.address().map_or_else(String::new, |at| format!(" from {at}"));
        Some(format!("{}{address}", Rank(rank as u32)))
    };
    let waits: Vec<String> = streams.iter().enumerate().filter_map(connected).collect();
    if !waits.is_empty() {
        progress.push(format!("connected and waiting: {}", some_of(&waits)));
    }
    Absence { ranks: absent, progress }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(
        absent: &[u32],
        reasons: &BTreeMap<Rank, String>,
        refused: &Refused,
        waiting: &[String],
    ) -> String {
        let absent = absent.iter().copied().map(Rank).collect();
        of_absent(absent, &[], reasons, refused, waiting).progress.join("; ")
    }

    #[test]
    fn each_rank_is_in_one_group() {
        let refused = Refused::default();
        assert_eq!(said(&[1], &BTreeMap::new(), &refused, &[]), "rank 1 never connected");
        let many: Vec<u32> = (1..12).collect();
        let all = said(&many, &BTreeMap::new(), &refused, &[]);
        assert!(all.ends_with("rank 8 and 3 more never connected"), "{all}");
        let reasons = BTreeMap::from([(Rank(1), "was refused: the job id differs".to_owned())]);
        assert_eq!(
            said(&[1, 2], &reasons, &refused, &[]),
            "rank 1 was refused: the job id differs; rank 2 never connected"
        );
    }

    #[test]
    fn connections_without_a_rank_are_told_by_their_address() {
        let refused = Refused::default();
        refused.note(Some("10.0.0.7:5".parse().unwrap()), "wrong secret", &"the join secret was not proven");
        let text = said(&[1], &BTreeMap::new(), &refused, &["10.0.0.8:6".to_owned()]);
        assert_eq!(
            text,
            "rank 1 did not join; connections were refused from 10.0.0.7 (the join secret was not proven); \
             connected, but sent no whole greeting: 10.0.0.8:6"
        );
    }
}
