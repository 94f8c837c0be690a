#![doc = include_str!("../README.md")]

mod error;
mod dtype;
mod shape;
mod device;
mod devices;
mod interrupt;
mod tensor;
mod view;
mod offload;
mod layout;
mod program;
mod op;
mod check;
mod codec;
mod backend;

// Used by everybody: devices, tensors and the operations on them.
pub use device::Device;
pub use devices::{DeviceInfo, DeviceName};
pub use dtype::{DType, Element};
pub use error::{Result, TensorError};
pub use farflung_base::Precision;
pub use interrupt::Interrupt;
pub use layout::{Param, ParamLayout};
pub use offload::Offloaded;
pub use shape::Shape;
pub use tensor::Tensor;
pub use view::{View, ViewMut};

// For a model or an optimizer of your own: operations, and elementwise programs that run in one pass.
pub use backend::MatMulScratchBytes;
pub use op::{Fuse, Op};
pub use program::{Instr, Program, ProgramBuilder, Value};

// For codecs on the device.
pub use codec::{BlockCodec, BlockMask, Code, Codecs, Pattern};
