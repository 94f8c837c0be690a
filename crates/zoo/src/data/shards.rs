//! Distribution of a text over replicas: all of it for each, or for each some of its files, or some clusters of
//! its chunks.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use super::kmeans::clusters;
use super::tokens::Split;
use crate::ZooError;

/// How training data is distributed over replicas. `Display` and `FromStr` use the same text.
///
/// ```
/// use farflung_zoo::data::Sharding;
///
/// assert_eq!("kmeans:8".parse(), Ok(Sharding::KMeans(8)));
/// assert_eq!(Sharding::Files.to_string(), "files");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharding {
    /// Every replica draws from the whole text.
    #[default]
    Random,
    /// Each replica gets some of the documents: files of a folder, or texts between end-of-text tokens.
    Files,
    /// Chunks of the text are grouped into this number of clusters by similarity. Each replica gets some of the
    /// clusters.
    KMeans(u32),
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Files => f.write_str("files"),
            Self::KMeans(count) => write!(f, "kmeans:{count}"),
        }
    }
}

/// Error: the text is not a kind of [`Sharding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected random, files, or kmeans:K with a number of clusters from 1 to {MOST_CLUSTERS}")]
pub struct NoSharding;

/// Maximum number of clusters. With more, clusters would be too small to be meaningful.
const MOST_CLUSTERS: u32 = 4096;

impl FromStr for Sharding {
    type Err = NoSharding;

    fn from_str(text: &str) -> Result<Self, NoSharding> {
        match text {
            "random" => Ok(Self::Random),
            "files" => Ok(Self::Files),
            _ => {
                let count = text.strip_prefix("kmeans:").and_then(|count| count.parse().ok());
                count.filter(|count| (1..=MOST_CLUSTERS).contains(count)).map(Self::KMeans).ok_or(NoSharding)
            }
        }
    }
}

/// The ranges of a split that each replica trains on. A pure function of tokens, seed, context and number of
/// replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    of_replicas: Vec<Arc<[Range<usize>]>>,
}

/// Number of sequences per chunk that is clustered.
const CHUNK_SEQUENCES: usize = 16;

impl Shards {
    /// Distributes a split over replicas. A part is a document or a cluster. Parts are assigned by decreasing
    /// length, each to the replica with the fewest tokens so far (the first one in a tie). Ranges that are too
    /// short for a sequence are left out.
    ///
    /// Returns `None` for [`Sharding::Random`].
    ///
    /// Errors: [`ZooError::Shards`] if there are fewer parts than replicas.
    pub fn new(
        sharding: Sharding,
        split: &Split,
        context: usize,
        replicas: usize,
        seed: u64,
    ) -> Result<Option<Self>, ZooError> {
        let parts = match sharding {
            Sharding::Random => return Ok(None),
            Sharding::Files => split.documents().into_iter().map(|document| vec![document]).collect(),
            Sharding::KMeans(count) => in_clusters(split, context, count as usize, seed),
        };
        let long = |range: &Range<usize>| range.len() > context;
        let parts = parts.into_iter().map(|ranges| ranges.into_iter().filter(long).collect());
        let mut parts: Vec<Vec<Range<usize>>> = parts.filter(|ranges: &Vec<_>| !ranges.is_empty()).collect();
        if parts.len() < replicas {
            let (kind, found) = (sharding.to_string(), parts.len());
            return Err(ZooError::Shards { kind, found, replicas, context });
        }
        let tokens = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum::<usize>();
        parts.sort_by_key(|ranges| std::cmp::Reverse(tokens(ranges)));
        let mut of_replicas: Vec<Vec<Range<usize>>> = vec![Vec::new(); replicas];
        for part in parts {
            let least = (0..replicas).min_by_key(|&replica| tokens(&of_replicas[replica]));
            of_replicas[least.unwrap_or(0)].extend(part);
        }
        for ranges in &mut of_replicas {
            ranges.sort_by_key(|range| range.start);
        }
        Ok(Some(Self { of_replicas: of_replicas.into_iter().map(Arc::from).collect() }))
    }

    /// Returns the ranges of a replica, in text order.
    ///
    /// # Panics
    /// If `replica` is out of range.
    #[must_use]
    pub fn of(&self, replica: usize) -> &Arc<[Range<usize>]> {
        &self.of_replicas[replica]
    }

    /// Returns the number of replicas.
    pub(super) fn replicas(&self) -> usize {
        self.of_replicas.len()
    }

    /// Returns the number of tokens of each replica.
    pub fn tokens(&self) -> impl Iterator<Item = usize> {
        self.of_replicas.iter().map(|ranges| ranges.iter().map(Range::len).sum())
    }
}

/// Returns the ranges of each cluster. Adjacent chunks of a cluster are merged.
fn in_clusters(split: &Split, context: usize, count: usize, seed: u64) -> Vec<Vec<Range<usize>>> {
    let chunk = context.saturating_add(1).saturating_mul(CHUNK_SEQUENCES);
    let mut parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); count];
    for (i, cluster) in clusters(split, chunk, count, seed).into_iter().enumerate() {
        let range = i * chunk..((i + 1) * chunk).min(split.len());
        match parts[cluster].last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => parts[cluster].push(range),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Corpus, HoldOut};
    use crate::tokenizer::Byte;

    /// Creates a corpus of documents, each a repeated letter with the given length.
    fn split(texts: &[(u8, usize)]) -> Split {
        let texts: Vec<Vec<u8>> = texts.iter().map(|&(letter, len)| vec![letter; len]).collect();
        let corpus = Corpus::from_texts("letters", texts.iter().map(Vec::as_slice), &Byte).unwrap();
        corpus.split(HoldOut::Tokens(0)).unwrap().0
    }

    fn letters(split: &Split, ranges: &[Range<usize>]) -> Vec<u32> {
        let mut tokens = Vec::new();
        for range in ranges {
            split.append_to(range.start, range.len(), &mut tokens);
        }
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn names_print_as_they_parse() {
        for name in ["random", "files", "kmeans:3"] {
            assert_eq!(name.parse::<Sharding>().unwrap().to_string(), name);
        }
        for name in ["", "kmeans", "kmeans:0", "kmeans:-1", "kmeans:99999", "file"] {
            assert_eq!(name.parse::<Sharding>(), Err(NoSharding), "{name}");
        }
    }

    #[test]
    fn files_are_whole_and_shared_out_by_length() {
        let split = split(&[(b'a', 100), (b'b', 50), (b'c', 70), (b'd', 5), (b'e', 30)]);
        let shards = Shards::new(Sharding::Files, &split, 8, 2, 1).unwrap().unwrap();
        // 100 tokens go to the first replica, 70 and 50 to the second, 30 to the first. 5 tokens are too short
        // for a sequence.
        assert_eq!(letters(&split, shards.of(0)), [b'a', b'e'].map(u32::from));
        assert_eq!(letters(&split, shards.of(1)), [b'b', b'c'].map(u32::from));
        assert_eq!(shards.tokens().collect::<Vec<_>>(), [130, 120]);
        assert_eq!(**shards.of(1), [100..150, 150..220]);
    }

    #[test]
    fn fewer_documents_than_replicas_are_refused() {
        let split = split(&[(b'a', 100), (b'b', 50), (b'c', 3)]);
        let message = Shards::new(Sharding::Files, &split, 8, 3, 1).unwrap_err().to_string();
        assert!(message.contains("files") && message.contains('2') && message.contains('3'), "{message}");
        assert_eq!(Shards::new(Sharding::Random, &split, 8, 9, 1).unwrap(), None);
    }

    #[test]
    fn clusters_are_what_is_alike_and_the_same_each_time() {
        // Two kinds of text alternate. A chunk is 16 sequences of 4 tokens and a target.
        let chunk = 5 * CHUNK_SEQUENCES;
        let turns: Vec<_> = (0..6).map(|i| (if i % 2 == 0 { b'x' } else { b'y' }, 3 * chunk)).collect();
        let split = split(&turns);
        for seed in 0..20 {
            let shards = Shards::new(Sharding::KMeans(2), &split, 4, 2, seed).unwrap().unwrap();
            assert_eq!(shards.tokens().collect::<Vec<_>>(), [9 * chunk, 9 * chunk], "{seed}");
            for replica in 0..2 {
                assert_eq!(letters(&split, shards.of(replica)).len(), 1, "{seed}");
                assert_eq!(shards.of(replica).len(), 3);
            }
            assert_eq!(Shards::new(Sharding::KMeans(2), &split, 4, 2, seed).unwrap().unwrap(), shards);
        }
    }
}
