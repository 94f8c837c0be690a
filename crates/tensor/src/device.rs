//! Devices, which store tensors and run ops. A process may use several devices of different kinds.

use std::fmt;
use std::sync::Arc;

use farflung_base::{MemoryByKind, MemoryKind};

use crate::backend::cpu::Cpu;
use crate::backend::sizes::CountingBackend;
use crate::backend::{Backend, MatMulScratchBytes};
use crate::memory_counts::{MemoryCounts, Place};
use crate::{Interrupt, Precision, Result, Work};

/// A handle on a device. Clones refer to the same device.
#[derive(Clone)]
pub struct Device {
    opened: Arc<Opened<dyn Backend>>,
    precision: Precision,
    interrupt: Interrupt,
    kind: MemoryKind,
}

/// What all handles on a device share.
struct Opened<B: ?Sized> {
    counts: MemoryCounts,
    backend: B,
}

impl Device {
    fn new(backend: impl Backend + 'static) -> Self {
        Self {
            opened: Arc::new(Opened { counts: MemoryCounts::default(), backend }),
            precision: Precision::default(),
            interrupt: Interrupt::default(),
            kind: MemoryKind::default(),
        }
    }

    /// Opens the host's CPU with `threads` threads in total. Results are bit-identical for any number of
    /// threads.
    pub fn cpu(threads: usize) -> Result<Self> {
        Ok(Self::new(Cpu::new(threads)?))
    }

    /// Creates a device that counts memory and work, and computes nothing. Its tensors have shapes but no
    /// values, and [`Device::memory`] returns the bytes that they would use on [`Device::cpu`]. With it, the
    /// real training code predicts its own memory use.
    #[must_use]
    pub fn sizes() -> Self {
        Self::new(CountingBackend::default())
    }

    /// Opens a GPU through Vulkan, Metal or DirectX: the adapter that [`Device::list`] shows as `wgpu:index`.
    #[cfg(feature = "wgpu")]
    pub fn wgpu(index: usize) -> Result<Self> {
        Ok(Self::new(crate::backend::cube::open::adapters::open_nth(index)?))
    }

    /// Opens an NVIDIA GPU through CUDA.
    #[cfg(feature = "cuda")]
    pub fn cuda(index: usize) -> Result<Self> {
        Ok(Self::new(crate::backend::cube::open::cuda(index)?))
    }

    /// Returns a handle on the same device whose matrix products round their operands to `precision`. Tensors
    /// created through one handle can be used through the other.
    #[must_use]
    pub fn with_precision(&self, precision: Precision) -> Self {
        Self { precision, ..self.clone() }
    }

    /// Returns a handle on the same device with the given interrupt: its ops, and those of tensors created
    /// through it, fail while `interrupt` is raised.
    #[must_use]
    pub fn with_interrupt(&self, interrupt: &Interrupt) -> Self {
        Self { interrupt: interrupt.clone(), ..self.clone() }
    }

    /// Returns a handle on the same device that counts the tensors created through it as of this kind of
    /// memory: see [`Device::memory_by_kind`]. A handle counts activations unless another kind is given.
    #[must_use]
    pub fn counting_for(&self, kind: MemoryKind) -> Self {
        Self { kind, ..self.clone() }
    }

    /// Returns the type to which matrix products round their operands.
    #[must_use]
    pub const fn precision(&self) -> Precision {
        self.precision
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupt.is_raised()
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &self.opened.backend
    }

    pub(crate) const fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(crate) fn counts(&self) -> &MemoryCounts {
        &self.opened.counts
    }

    /// Returns the name of the device, such as `cpu`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.backend().name()
    }

    /// Waits for all ops started before, and returns errors of the device that occurred in them.
    pub fn fence(&self) -> Result<()> {
        self.backend().fence()
    }

    /// Returns the bytes currently allocated for tensors (in use or kept for reuse), and the maximum so far.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        self.backend().memory()
    }

    /// Returns the bytes currently allocated, by what they were used for when tensors used the most since the
    /// last [`Device::reset_peak`]. What is kept for reuse counts as activations, unless another kind had it at
    /// another time; so do buffers of ops while they run. The sum is that of [`Device::memory`].
    #[must_use]
    pub fn memory_by_kind(&self) -> MemoryByKind {
        self.counts().divide(self.memory().0)
    }

    /// Returns the bytes of the buffers of all tensors that exist now, by what they are used for.
    #[must_use]
    pub fn in_use_by_kind(&self) -> MemoryByKind {
        self.counts().now(Place::Device)
    }

    /// Returns the bytes of the host's memory to which tensors were moved ([`crate::Tensor::offload`]), when
    /// these were the most since the last [`Device::reset_peak`]. None move if the device's memory is the
    /// host's.
    #[must_use]
    pub fn offloaded_by_kind(&self) -> MemoryByKind {
        self.counts().at_peak(Place::Host)
    }

    /// Returns the host memory that matrix products use in addition to tensors. Only [`Device::sizes`] counts
    /// it.
    #[must_use]
    pub fn operands(&self) -> MatMulScratchBytes {
        self.backend().operands()
    }

    /// Returns whether the device only counts: its tensors have no values.
    #[must_use]
    pub fn is_counting(&self) -> bool {
        self.backend().is_counting()
    }

    /// Returns the sum of the costs of all ops run so far. Only [`Device::sizes`] counts it; it is zero on
    /// every other device.
    #[must_use]
    pub fn work(&self) -> Work {
        self.backend().work()
    }

    /// Returns the bytes of the elements of all tensors that exist now. Only [`Device::sizes`] counts them, and
    /// it does not round them as [`Device::memory`] does; zero on every other device.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.backend().in_use().0
    }

    /// Returns the maximum of [`Device::in_use`] since the last [`Device::reset_peak`].
    #[must_use]
    pub fn peak_in_use(&self) -> usize {
        self.backend().in_use().1
    }

    /// Sets [`Device::peak_in_use`], and the peaks by kind, to the bytes in use now: to measure the temporary
    /// bytes of what follows.
    pub fn reset_peak(&self) {
        self.backend().reset_peak();
        self.counts().reset_peak();
    }

    /// Returns whether both handles refer to the same device.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.opened, &other.opened)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.backend(), f)
    }
}
