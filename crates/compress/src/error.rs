//! What can go wrong, each with the field that is wrong. Knows no codec's details.

use crate::lossless::Packing;
use crate::wire::CodecId;

/// Why a vector could not be encoded, a payload not decoded, or a state not kept.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompressError {
    /// A lossy codec, or any codec with feedback, was given a NaN or an infinity (or `x + e` overflowed).
    #[error("element {index} is {value}, and only finite values can be compressed")]
    NonFinite {
        /// Index into the vector.
        index: usize,
        /// What stood there.
        value: f32,
    },
    /// A finite value is too large for the codec: what it would send, what that decodes as, or what it loses is
    /// beyond the range of f32.
    #[error("element {index} is {value}, and {what} is beyond the range of f32")]
    Overflow {
        /// Index into the vector.
        index: usize,
        /// What stood there, with the residual if there is one.
        value: f32,
        /// What cannot be represented.
        what: &'static str,
    },
    /// Two vectors of one call differ in length.
    #[error("{what} has {found} elements, not the {wanted} of the input")]
    LengthMismatch {
        /// Which argument.
        what: &'static str,
        /// The input's length.
        wanted: usize,
        /// That argument's length.
        found: usize,
    },
    /// A vector's length is not that of the residual that is held for it.
    #[error("the vector has {found} elements, but the residual has {held}: reset or reshard the state first")]
    LengthChanged {
        /// The residual's length.
        held: usize,
        /// The vector's length.
        found: usize,
    },
    /// The state was to be saved or resharded between a compress and its commit or rollback.
    #[error("the state has changes that were neither committed nor rolled back")]
    Uncommitted,
    /// A factor of memory that is not between 0 and 1.
    #[error("the factor {found} of what is remembered is not in 0..=1")]
    Decay {
        /// The factor.
        found: f32,
    },
    /// An entry is not in the saved state.
    #[error("the saved state has no entry {name:?}")]
    MissingState {
        /// The entry's full name.
        name: String,
    },
    /// The bytes do not begin with the magic number.
    #[error("the payload begins with {found:02x?}, not with the magic number {wanted:02x?}")]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
        /// What they must be.
        wanted: [u8; 4],
    },
    /// The payload is of another version of the wire format.
    #[error("the payload has wire version {found}, and this build reads version {wanted}")]
    Version {
        /// The payload's version.
        found: u8,
        /// The supported version.
        wanted: u8,
    },
    /// The payload sets flags that this version does not define.
    #[error("the payload has the unknown flags {found:#06x}")]
    Flags {
        /// All the flags.
        found: u16,
    },
    /// There are more or fewer bytes than the header (or its 28 bytes themselves) ask for.
    #[error("the payload has {found} bytes, not {wanted}")]
    FrameLength {
        /// Bytes that there must be.
        wanted: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// The checksum in the header is not that of the bytes.
    #[error("the payload's checksum is {found:#010x}, and its bytes give {wanted:#010x}")]
    Checksum {
        /// The checksum of the bytes.
        wanted: u32,
        /// The checksum in the header.
        found: u32,
    },
    /// The payload is of another codec.
    #[error("the payload is of codec {found}, not {wanted}")]
    WrongCodec {
        /// The codec that was asked to decode.
        wanted: CodecId,
        /// The payload's codec.
        found: CodecId,
    },
    /// The payload does not hold as many elements as the output has room for.
    #[error("the payload holds {found} elements, and the output has {wanted}")]
    CountMismatch {
        /// The output's length.
        wanted: usize,
        /// The payload's count.
        found: u64,
    },
    /// The body is not as long as its codec makes it for that many elements.
    #[error("the body has {found} bytes, and {codec} makes {wanted} of {count} elements")]
    BodyLength {
        /// The codec.
        codec: CodecId,
        /// The count of elements.
        count: usize,
        /// The bytes that the codec makes.
        wanted: u64,
        /// The bytes of the body.
        found: u64,
    },
    /// A block size that is zero or above [`crate::block::MAX_BLOCK`].
    #[error("the block size is {found}, and must be in 1..={max}")]
    BlockSize {
        /// The block size.
        found: u32,
        /// The largest one.
        max: u32,
    },
    /// The payload is of the right codec with another parameter: the bits of a code.
    #[error("the payload is of codec {codec} with parameter {found}, not {wanted}")]
    Parameter {
        /// The codec.
        codec: CodecId,
        /// The decoder's parameter.
        wanted: u8,
        /// The payload's.
        found: u8,
    },
    /// Bits behind the last code are set.
    #[error("block {block} has bits set behind its last code, which no encoder does")]
    Padding {
        /// The block's index.
        block: usize,
    },
    /// A number in a header that no encoder writes.
    #[error("the scale of block {block} is {found}, which no encoder writes")]
    Scale {
        /// The block's index.
        block: usize,
        /// The scale.
        found: f32,
    },
    /// A code that no encoder writes.
    #[error("element {index} of the payload has the code {code:#x}, which no encoder writes")]
    Code {
        /// The element's index.
        index: usize,
        /// Its code.
        code: u32,
    },
    /// Indices that no encoder writes.
    #[error("the indices {why}")]
    Indices {
        /// What they do, as the sentence's end.
        why: &'static str,
    },
    /// A vector longer than a codec's indices reach.
    #[error("the vector has {len} elements, more than the {max} that this codec can index")]
    TooLong {
        /// The vector's length.
        len: usize,
        /// The longest.
        max: usize,
    },
    /// Feedback around an unbiased mask would count its scale as an error.
    #[error("an unbiased mask cannot have error feedback: use one that does not scale")]
    UnbiasedFeedback,
    /// Not an amount of elements.
    #[error(
        "{text:?} is no amount of elements: write a number (64) or a share (0.01), perhaps with a multiple (0.2x128)"
    )]
    Amount {
        /// What was given.
        text: String,
    },
    /// A protocol was ended before its buffers were averaged, or before it began.
    #[error("the protocol has not exchanged all its buffers")]
    Exchange,
    /// Values that are not so many samples of one length.
    #[error("{found} values are not {samples} samples of {len}")]
    Samples {
        /// The number of samples.
        samples: usize,
        /// The length of each.
        len: usize,
        /// All values.
        found: usize,
    },
    /// A change of a sample that is not held as the sender holds it.
    #[error(
        "the change of sample {id} is to one with checksum {wanted:#010x}, and {found:#010x} is held (0: nothing)"
    )]
    CacheMiss {
        /// The sample.
        id: u64,
        /// The checksum of what the sender holds.
        wanted: u32,
        /// The checksum of what is held here.
        found: u32,
    },
    /// Held samples could not be read or written.
    #[error("failed to {action} held samples: {why}")]
    Store {
        /// What was tried.
        action: &'static str,
        /// The system's kind of error.
        kind: std::io::ErrorKind,
        /// The system's words.
        why: String,
    },
    /// A device's codec is not the host's.
    #[error("on the device, {codec} of {len} elements differs from the host's in {what}")]
    Device {
        /// The codec's name.
        codec: String,
        /// What differs.
        what: &'static str,
        /// The vector's length.
        len: usize,
    },
    /// A packer that this build does not have.
    #[error("this build has no {packing}: enable the feature {packing:?} of farflung-compress", packing = packing.to_string())]
    NotBuilt {
        /// The packer.
        packing: Packing,
    },
    /// A packed body that no packer made, or another one, or that unpacks to more than its codec makes.
    #[error("the payload is for {packing}, but {why}")]
    Packed {
        /// The decoder's packer.
        packing: Packing,
        /// What is wrong, as the sentence's end.
        why: &'static str,
    },
    /// A codec's name with a part that is known, but cannot be as or where it is.
    #[error("codec {name:?}: {part:?} {why}")]
    CodecName {
        /// The whole name.
        name: String,
        /// The part.
        part: String,
        /// What is wrong, as the sentence's end.
        why: &'static str,
    },
    /// No codec has that name.
    #[error(
        "unknown codec {name:?}; the codecs are {}, each also with \"+ef\", and \"+zstd\" or \"+lz4\" at the end",
        crate::spec::names().join(", ")
    )]
    UnknownCodec {
        /// The name.
        name: String,
    },
}

impl CompressError {
    /// Whether an encoder refused a value of its vector: one that is not finite, or too large for the codec.
    /// The vector can still travel as plain f32, and the codec's memory is as it was.
    #[must_use]
    pub const fn refuses_a_value(&self) -> bool {
        matches!(self, Self::NonFinite { .. } | Self::Overflow { .. })
    }

    /// The refusal of a value by a codec within another one: for the element of the outer vector `x` that its
    /// index came from.
    pub(crate) fn moved(self, from: impl FnOnce(usize) -> usize, x: &[f32]) -> Self {
        match self {
            Self::NonFinite { index, value } => Self::NonFinite { index: from(index), value },
            Self::Overflow { index, what, .. } => {
                let index = from(index);
                Self::Overflow { index, value: x[index], what }
            }
            error => error,
        }
    }
}
