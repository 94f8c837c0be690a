#![doc = include_str!("../README.md")]

mod error;
mod dtype;
mod shape;
mod device;
mod devices;
mod interrupt;
mod memory_counts;
mod tensor;
mod view;
mod offload;
mod layout;
mod program;
mod work;
mod op;
mod tile_mask;
mod check;
mod codec;
mod backend;

// For all users: devices, tensors and the operations on them.
pub use device::Device;
pub use devices::{DeviceInfo, DeviceName};
pub use dtype::{DType, Element};
pub use error::{Result, TensorError};
pub use farflung_base::{MemoryByKind, MemoryKind, Precision};
pub use interrupt::Interrupt;
pub use layout::{Param, ParamLayout};
pub use offload::Offloaded;
pub use shape::Shape;
pub use tensor::{SharedTensor, Tensor};
pub use view::{View, ViewMut};

// For users who write their own model or optimizer: operations, and elementwise programs that run in one pass.
pub use backend::MatMulScratchBytes;
pub use op::{AttendedKeys, Fuse, Gelu, Heads, KeyRanges, Mask, Norm, NormKind, Op, Rotary, TokenPositions};
pub use program::{Instr, Program, ProgramBuilder, Value};
pub use tile_mask::TileMask;
pub use work::Work;

// For users who run codecs on the device.
pub use codec::{BlockCodec, BlockMask, Code, Codecs, Pattern};
