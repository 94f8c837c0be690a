//! Parameters that are written to the disk while the next pass reads them.

use std::ops::Range;

use farflung_store::LateArrays;
use farflung_tensor::SharedTensor;

/// The parameters of all pieces after a step.
#[derive(Debug)]
pub(super) struct LateParams {
    pub(super) params: SharedTensor,
    pub(super) pieces: Vec<Range<usize>>,
}

impl LateArrays for LateParams {
    fn fill(&self, piece: usize, _: usize, bytes: &mut [u8]) {
        let values = self.params.host::<f32>().map_or(&[][..], |all| &all[self.pieces[piece].clone()]);
        let values: &[u8] = bytemuck::cast_slice(values);
        bytes[..values.len()].copy_from_slice(values);
        bytes[values.len()..].fill(0);
    }
}
