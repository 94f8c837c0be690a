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

pub use backend::MatMulScratchBytes;
pub use codec::{BlockCodec, BlockMask, Code, Codecs, Pattern};
pub use device::Device;
pub use devices::{DeviceInfo, DeviceName};
pub use dtype::{DType, Element};
pub use error::{Result, TensorError};
pub use farflung_base::Precision;
pub use interrupt::Interrupt;
pub use layout::{Param, ParamLayout};
pub use offload::Offloaded;
pub use op::{Fuse, Op};
pub use program::{Instr, Program, ProgramBuilder, Value};
pub use shape::Shape;
pub use tensor::Tensor;
pub use view::{View, ViewMut};
