//! Ending what a device computes, from another thread. It knows no op: a device asks it before each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A switch: while it is raised, every op of the [handles](crate::Device::with_interrupt) that have it fails
/// with [`TensorError::Interrupted`](crate::TensorError::Interrupted). Clones are the same switch.
///
/// ```
/// use farflung_tensor::{Device, Interrupt, TensorError};
///
/// let interrupt = Interrupt::default();
/// let device = Device::cpu(1)?.with_interrupt(&interrupt);
/// interrupt.raise();
/// assert!(matches!(device.zeros(4), Err(TensorError::Interrupted)));
/// interrupt.lower();
/// assert_eq!(device.zeros(4)?.to_vec::<f32>()?, [0.0; 4]);
/// # Ok::<(), TensorError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on ops fail. One that is under way ends first.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// From now on ops run.
    pub fn lower(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether both are the same switch.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether ops fail.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
