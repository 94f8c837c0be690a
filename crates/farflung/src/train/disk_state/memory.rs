//! The memory of pieces: tensors that files are read into and written from.

use farflung_store::{Arrays, BLOCK, checksum};
use farflung_tensor::{Device, MemoryByKind, MemoryKind, Tensor, TensorError, View};

use crate::Result;

/// Returns the bytes of an array of this many elements: whole blocks.
pub(super) const fn padded(elements: usize) -> usize {
    (elements * size_of::<f32>()).next_multiple_of(BLOCK)
}

/// Makes the buffers of pieces.
#[derive(Debug)]
pub(super) struct PieceMemory {
    /// The device of the buffers, which is the host.
    host: Device,
    /// The device of the optimizer, if it is not the host.
    pub(super) away: Option<Device>,
    pub(super) states: usize,
    /// Whether buffers have a copy of the parameters, after the states: they are on another device, or change
    /// when other shards are gathered. Else parameters are written after the states, from where they are,
    /// while the next pass runs.
    pub(super) copies_params: bool,
    /// Elements of an array.
    longest: usize,
}

impl PieceMemory {
    /// Prepares for arrays of at most `longest` elements. `is_whole` tells whether no other rank updates a
    /// shard of the same parameters.
    pub(super) fn new(device: &Device, states: usize, (longest, is_whole): (usize, bool)) -> Result<Self> {
        // A device that only counts counts as the host.
        let is_host = device.is_counting() || device.zeros(1)?.host::<f32>().is_some();
        let cpu = || Ok::<_, TensorError>(Device::cpu(1)?.counting_for(MemoryKind::Optimizer));
        let host = if is_host { device.clone() } else { cpu()? };
        let longest = padded(longest) / size_of::<f32>();
        let away = (!is_host).then(|| device.clone());
        Ok(Self { host, away, states, copies_params: !is_host || !is_whole, longest })
    }

    /// Returns the bytes of buffers in the host's memory. If that is the memory of the optimizer's device, the
    /// device counts them.
    pub(super) fn held_on_host(&self) -> MemoryByKind {
        self.away.as_ref().map_or_else(MemoryByKind::default, |_| self.host.in_use_by_kind())
    }

    /// Returns buffers of whole pieces.
    pub(super) fn buffers(&self, count: usize) -> Result<Vec<PieceTensors>> {
        let arrays = self.states + usize::from(self.copies_params);
        (0..count).map(|_| self.piece(arrays)).collect()
    }

    /// Returns a buffer of one array.
    pub(super) fn single(&self) -> Result<PieceTensors> {
        self.piece(1)
    }

    /// Returns tensors on the optimizer's device for the states of a piece.
    pub(super) fn on_device(&self, device: &Device) -> Result<Vec<Tensor>> {
        (0..self.states).map(|_| Ok(device.zeros(self.longest)?)).collect()
    }

    fn piece(&self, arrays: usize) -> Result<PieceTensors> {
        let array = |_| Ok(self.host.zeros(self.longest)?);
        Ok(PieceTensors { arrays: (0..arrays).map(array).collect::<Result<_>>()? })
    }
}

/// The arrays of a piece: states, then perhaps parameters. In the host's memory, unless the device only counts.
#[derive(Debug)]
pub(super) struct PieceTensors {
    pub(super) arrays: Vec<Tensor>,
}

impl PieceTensors {
    /// Returns the values of an array, and what is behind them.
    pub(super) fn values(&self, array: usize) -> &[f32] {
        self.arrays[array].host().unwrap_or_default()
    }

    /// Returns the values of an array for writing.
    pub(super) fn values_mut(&mut self, array: usize) -> &mut [f32] {
        self.arrays[array].host_mut().unwrap_or_default()
    }

    /// Copies the parameters of the piece, if it has an array for them after its `states`. Otherwise returns
    /// their checksum, since they are written later.
    ///
    /// Errors: those of the device.
    pub(super) fn take_params(&mut self, params: View<'_>, states: usize) -> Result<Vec<u32>, TensorError> {
        let copied = if params.host::<f32>().is_none() { params.to_vec::<f32>()? } else { Vec::new() };
        let values = params.host::<f32>().unwrap_or(&copied);
        if self.arrays.len() == states {
            return Ok(vec![checksum(bytemuck::cast_slice(values))]);
        }
        // A device that only counts has no values.
        if let Some(into) = self.values_mut(states).get_mut(..values.len()) {
            into.copy_from_slice(values);
        }
        Ok(Vec::new())
    }

    /// Returns the first bytes of an array for writing.
    pub(super) fn bytes_mut(&mut self, array: usize, bytes: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(self.values_mut(array))[..bytes]
    }
}

impl Arrays for PieceTensors {
    fn array(&self, number: usize) -> &[u8] {
        bytemuck::cast_slice(self.values(number))
    }

    fn array_mut(&mut self, number: usize) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.values_mut(number))
    }
}
