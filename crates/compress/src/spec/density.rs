//! A selection's share of the elements, and another in its place: what a warm-up of the density needs.

use super::{CodecSpec, Stage};
use crate::Amount;

impl CodecSpec {
    /// The share of the elements that `topk:SHARE`, `sampled:SHARE` or `dgc:SHARE` keeps, in millionths; `None`
    /// for a codec that keeps a count of them, or all.
    ///
    /// ```
    /// use farflung_compress::CodecSpec;
    ///
    /// let spec: CodecSpec = "dgc:0.001".parse()?;
    /// assert_eq!(spec.density(), Some(1000));
    /// assert_eq!(spec.with_density(250_000), "dgc:0.25".parse()?);
    /// assert_eq!("topk:64".parse::<CodecSpec>()?.density(), None);
    /// # Ok::<(), farflung_compress::CompressError>(())
    /// ```
    #[must_use]
    pub fn density(&self) -> Option<u32> {
        self.stages.iter().flatten().find_map(|stage| match stage {
            Stage::TopK(amount) | Stage::Sampled(amount) => amount.share(),
            _ => None,
        })
    }

    /// The same with another share, where it keeps a share.
    #[must_use]
    pub fn with_density(mut self, millionths: u32) -> Self {
        for stage in self.stages.iter_mut().flatten() {
            if let Stage::TopK(amount) | Stage::Sampled(amount) = stage
                && amount.share().is_some()
            {
                *amount = Amount::millionths(millionths).multiple_of(amount.multiple());
                break;
            }
        }
        self
    }
}
