//! Conversions between f32 and the 16-bit floats, to nearest, ties to even.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::backend::BufferRange;
use crate::{DType, View, ViewMut};

/// Computes `y = x`, with conversion of the type. The pair of types has been checked.
pub(super) fn cast(x: &View<'_>, y: ViewMut<'_>) {
    let in_host = "a cpu tensor is in host memory";
    match (x.dtype(), y.dtype()) {
        (DType::F32, DType::F16) => {
            y.into_host::<f16>().expect(in_host).convert_from_f32_slice(x.host().expect(in_host));
        }
        (DType::F32, DType::Bf16) => {
            y.into_host::<bf16>().expect(in_host).convert_from_f32_slice(x.host().expect(in_host));
        }
        (DType::F16, DType::F32) => {
            x.host::<f16>().expect(in_host).convert_to_f32_slice(y.into_host().expect(in_host));
        }
        (DType::Bf16, DType::F32) => {
            x.host::<bf16>().expect(in_host).convert_to_f32_slice(y.into_host().expect(in_host));
        }
        _ => copy(&x.raw(), y),
    }
}

fn copy(from: &BufferRange<'_>, y: ViewMut<'_>) {
    let to = y.into_bytes().expect("a cpu tensor is in host memory");
    to.copy_from_slice(from.host().expect("a cpu tensor is in host memory"));
}
