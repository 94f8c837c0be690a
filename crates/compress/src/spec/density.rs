//! Reads and replaces the share of elements that a selection keeps. The warm-up of the density uses it.

use super::{CodecSpec, Stage};
use crate::Amount;

impl CodecSpec {
    /// Returns the share of the elements that `topk:SHARE`, `sampled:SHARE` or `dgc:SHARE` keeps, in
    /// millionths. Returns `None` for any other codec, such as `topk:64` or a mask.
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

    /// Replaces the share that a selection keeps. A codec without such a share is returned unchanged.
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
