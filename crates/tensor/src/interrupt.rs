//! A flag that stops the ops of a device from another thread. The device checks it before each op.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag shared by its clones. While it is raised, every [`Op`](crate::Op) started through a
/// [handle](crate::Device::with_interrupt) with this flag fails with
/// [`TensorError::Interrupted`](crate::TensorError::Interrupted).
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
    /// Raises the flag: new ops fail. An op that is already running completes.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Lowers the flag: ops run again.
    pub fn lower(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Returns whether both are clones of the same flag.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether the flag is raised.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
