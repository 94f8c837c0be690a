//! A device that counts buffers and computes nothing. It rounds sizes and reuses buffers as the CPU backend
//! does, so its peak is the peak of the same program there.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use farflung_base::Pending;

use super::cpu::{GRAIN, packed_bytes};
use super::{Backend, BufferRange, Downloaded, MatMulScratchBytes, Storage};
use crate::op::Op;
use crate::{DType, Precision, Result, Shape, TensorError, ViewMut, Work};

/// A buffer without memory.
#[derive(Debug)]
struct Size {
    /// Bytes that the CPU backend would use for it.
    rounded: usize,
    /// Bytes of its elements.
    exact: usize,
}

impl Storage for Size {
    fn host(&self) -> Option<(NonNull<u8>, usize)> {
        None
    }

    fn bytes(&self) -> usize {
        self.rounded
    }
}

#[derive(Debug, Default)]
struct Count {
    /// Number of released buffers, by size in bytes.
    free: BTreeMap<usize, usize>,
    held: usize,
    /// Exact bytes of the buffers in use, and the maximum since it was last reset.
    in_use: usize,
    peak_in_use: usize,
    work: Work,
    /// Maximum bytes that one product packs.
    packed: usize,
    /// Bytes of the largest first and second operand that was rounded, as f32.
    rounded: [usize; 2],
}

/// The counting device.
#[derive(Debug, Default)]
pub(crate) struct CountingBackend(Mutex<Count>);

impl CountingBackend {
    fn count(&self) -> MutexGuard<'_, Count> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for CountingBackend {
    fn name(&self) -> &'static str {
        "sizes"
    }

    fn allocate(&self, dtype: DType, shape: Shape) -> Result<Box<dyn Storage>> {
        let too_large = || TensorError::OutOfMemory { device: "sizes".to_owned(), bytes: usize::MAX };
        let bytes = shape.len().checked_mul(dtype.size()).ok_or_else(too_large)?;
        let size = bytes.max(1).checked_next_multiple_of(GRAIN).ok_or_else(too_large)?;
        let mut count = self.count();
        match count.free.get_mut(&size) {
            Some(free) if *free > 0 => *free -= 1,
            _ => count.held = count.held.checked_add(size).ok_or_else(too_large)?,
        }
        count.in_use += bytes;
        count.peak_in_use = count.peak_in_use.max(count.in_use);
        Ok(Box::new(Size { rounded: size, exact: bytes }))
    }

    fn release(&self, storage: Box<dyn Storage>) {
        let any: Box<dyn Any> = storage;
        if let Ok(size) = any.downcast::<Size>() {
            let mut count = self.count();
            *count.free.entry(size.rounded).or_default() += 1;
            count.in_use -= size.exact;
        }
    }

    fn upload(&self, _: &[u8], _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }

    /// Returns zeros, as there are no values.
    fn start_download(&self, from: BufferRange<'_>) -> Pending<Result<Box<dyn Downloaded>>> {
        Pending::ready(Ok(Box::new(vec![0_u8; from.range.len()])))
    }

    fn run(&self, op: Op<'_>, precision: Precision) -> Result<()> {
        let mut count = self.count();
        count.work += op.work();
        if let Op::MatMul { a, a_t, b, c, .. } = op {
            let (m, n) = (c.shape().rows(), c.shape().cols());
            let k = if a_t { a.shape().rows() } else { a.shape().cols() };
            count.packed = count.packed.max(packed_bytes((m, n, k), a_t));
            if precision != Precision::F32 {
                for (most, operand) in count.rounded.iter_mut().zip([&a, &b]) {
                    *most = (*most).max(operand.shape().len() * size_of::<f32>());
                }
            }
        }
        Ok(())
    }

    fn fence(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> (usize, usize) {
        // Released buffers are kept for reuse, so the bytes held never decrease and are also the maximum.
        let held = self.count().held;
        (held, held)
    }

    fn operands(&self) -> MatMulScratchBytes {
        let count = self.count();
        MatMulScratchBytes { packed: count.packed, rounded: count.rounded.iter().sum() }
    }

    fn is_counting(&self) -> bool {
        true
    }

    fn work(&self) -> Work {
        self.count().work
    }

    fn in_use(&self) -> (usize, usize) {
        let count = self.count();
        (count.in_use, count.peak_in_use)
    }

    fn reset_peak(&self) {
        let mut count = self.count();
        count.peak_in_use = count.in_use;
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Device, Fuse, Op, Precision, Work};

    /// The same program uses the same memory on both devices.
    #[test]
    fn it_counts_what_the_cpu_takes() {
        let memory = |device: Device| {
            let a = device.zeros([100, 300]).unwrap();
            let mut b = device.empty(DType::F32, [100, 300]).unwrap();
            device.run(Op::Cast { x: a.view(), y: b.view_mut() }).unwrap();
            drop(b);
            let c = device.zeros([299, 100]).unwrap();
            let d = device.tensor(&[1_u32; 7], 7).unwrap();
            drop((a, c, d));
            device.memory()
        };
        let seen = memory(Device::sizes());
        assert_eq!(seen, memory(Device::cpu(1).unwrap()));
        assert_eq!(seen.0, 2 * 30 * 4096 + 4096, "the third buffer is the second again");
    }

    #[test]
    fn a_product_packs_its_operands_and_rounds_them() {
        let operands = |precision| {
            let device = Device::sizes().with_precision(precision);
            let a = device.zeros([64, 300]).unwrap();
            let b = device.zeros([300, 40]).unwrap();
            let mut c = device.zeros([64, 40]).unwrap();
            let product = Op::MatMul {
                a: a.view(),
                a_t: false,
                b: b.view(),
                b_t: false,
                c: c.view_mut(),
                accumulate: false,
                scales: [1.0; 2],
                fuse: Fuse::None,
            };
            device.run(product).unwrap();
            device.operands()
        };
        let f32 = operands(Precision::F32);
        assert!((300 * 40 * 4..300 * 48 * 4 + 64).contains(&f32.packed), "all of the second: {f32:?}");
        assert_eq!((f32.rounded, operands(Precision::Bf16).rounded), (0, (64 * 300 + 300 * 40) * 4));
    }

    #[test]
    fn it_counts_the_exact_bytes_in_use_and_their_peak() {
        let device = Device::sizes();
        let a = device.zeros([10, 3]).unwrap();
        let counted = || (device.in_use(), device.peak_in_use());
        assert_eq!(counted(), (120, 120));
        let b = device.empty(DType::Bf16, 7).unwrap();
        let before = device.memory();
        drop((device.empty(DType::U8, 5).unwrap(), b));
        assert_eq!(counted(), (120, 139));
        device.reset_peak();
        assert_eq!(counted(), (120, 120));
        // A buffer that is taken again counts with its own bytes.
        let c = device.empty(DType::F32, 2).unwrap();
        assert_eq!((counted(), device.memory().0), ((128, 128), before.0 + 4096));
        drop((a, c));
        assert_eq!(counted(), (0, 128));
        let cpu = Device::cpu(1).unwrap();
        let _kept = cpu.zeros(9).unwrap();
        cpu.reset_peak();
        assert_eq!((cpu.in_use(), cpu.peak_in_use(), cpu.work()), (0, 0, Work::default()));
    }

    #[test]
    fn it_counts_the_work_of_all_ops() {
        let device = Device::sizes();
        let a = device.zeros([4, 6]).unwrap();
        assert_eq!(device.work(), Work { bytes: 96, ..Work::default() });
        let before = device.work();
        let (b, mut c) = (device.zeros([6, 5]).unwrap(), device.zeros([4, 5]).unwrap());
        let product = Op::MatMul {
            a: a.view(),
            a_t: false,
            b: b.view(),
            b_t: false,
            c: c.view_mut(),
            accumulate: false,
            scales: [1.0; 2],
            fuse: Fuse::None,
        };
        let filled = 4 * (30 + 20);
        let expected = Work { products: product.flops(), bytes: product.bytes() + filled, ..Work::default() };
        device.run(product).unwrap();
        assert_eq!((device.work() - before, expected.flops()), (expected, 240));
        // A sum that is greater than any number stops at the greatest.
        let x = device.empty(DType::U8, 1 << 62).unwrap();
        for _ in 0..3 {
            let mut y = device.empty(DType::U8, 1 << 62).unwrap();
            device.run(Op::Cast { x: x.view(), y: y.view_mut() }).unwrap();
        }
        assert_eq!(device.work().bytes, u64::MAX);
    }

    #[test]
    fn a_model_larger_than_any_memory_takes_none() {
        let device = Device::sizes();
        let x = device.zeros([1 << 20, 1 << 20]).unwrap();
        assert_eq!((device.memory().1, x.device().name()), (1 << 42, "sizes"));
        assert!(device.zeros([1 << 31, 1 << 31]).is_err(), "more than there are addresses");
    }
}
