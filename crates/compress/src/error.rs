//! The crate's error type. An error says what is wrong, mostly with the found and the expected value.

use crate::lossless::Packing;
use crate::wire::CodecId;

/// Reason why a vector could not be encoded, a payload decoded, a state saved or loaded, a name parsed, or a
/// codec created.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompressError {
    /// Returned by a lossy codec, or by any codec with feedback, for a NaN or an infinity, also if `x + e`
    /// overflowed. Also returned for a NaN or an infinity in a saved residual, a mean, or a threshold.
    #[error("element {index} is {value}, and only finite values can be compressed")]
    NonFinite {
        /// Index into the vector.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A finite value is too large for the codec: the encoded value, the decoded value or the compression error
    /// is beyond the range of f32.
    #[error("element {index} is {value}, and {what} is beyond the range of f32")]
    Overflow {
        /// Index into the vector.
        index: usize,
        /// The value, with the residual added if there is one. If EF21's new estimate is beyond the range: the
        /// value of the vector alone.
        value: f32,
        /// The quantity that cannot be represented.
        what: &'static str,
    },
    /// A vector or an entry of a saved state has another length than needed.
    #[error("{what} has length {found}, expected {wanted}")]
    LengthMismatch {
        /// What has the wrong length.
        what: &'static str,
        /// The needed length.
        wanted: usize,
        /// The length found.
        found: usize,
    },
    /// The vector has another length than the residual that the codec holds.
    #[error("the vector has {found} elements, but the residual has {held}: reset or reshard the state first")]
    LengthChanged {
        /// The residual's length.
        held: usize,
        /// The vector's length.
        found: usize,
    },
    /// The state was saved or resharded after a compress without a commit or rollback.
    #[error("the state has changes that were neither committed nor rolled back")]
    Uncommitted,
    /// A decay factor of the memory is not between 0 and 1.
    #[error("the factor of error feedback or momentum is {found}, expected 0 to 1")]
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
        /// The magic number.
        wanted: [u8; 4],
    },
    /// The payload is of another version of the wire format.
    #[error("the payload has wire version {found}, but this build reads version {wanted}")]
    Version {
        /// The payload's version.
        found: u8,
        /// The supported version.
        wanted: u8,
    },
    /// The payload sets flags that this version does not define.
    #[error("the payload has the unknown flags {found:#06x}")]
    Flags {
        /// All flags of the payload.
        found: u16,
    },
    /// The payload has more or fewer bytes than its header says, or fewer than the header's own 28.
    #[error("the payload has {found} bytes, not {wanted}")]
    FrameLength {
        /// Number of bytes expected.
        wanted: u64,
        /// Number of bytes in the payload.
        found: u64,
    },
    /// The checksum in the header does not match the bytes.
    #[error("the payload's header has checksum {found:#010x}, but its bytes have {wanted:#010x}")]
    Checksum {
        /// The checksum of the bytes.
        wanted: u32,
        /// The checksum in the header.
        found: u32,
    },
    /// The payload is of another codec.
    #[error("the payload is of codec {found}, not {wanted}")]
    WrongCodec {
        /// The codec of the decoder.
        wanted: CodecId,
        /// The payload's codec.
        found: CodecId,
    },
    /// The payload does not hold as many elements as the output.
    #[error("the payload holds {found} elements, but the output has {wanted}")]
    CountMismatch {
        /// The output's length.
        wanted: usize,
        /// The payload's number of elements.
        found: u64,
    },
    /// The body has another length than its codec writes for that number of elements.
    #[error("the body has {found} bytes, but codec {codec} writes {wanted} for {count} elements")]
    BodyLength {
        /// The codec.
        codec: CodecId,
        /// Number of elements.
        count: usize,
        /// Number of bytes that the codec writes.
        wanted: u64,
        /// Number of bytes in the body.
        found: u64,
    },
    /// A size of a codec or protocol (block, chunk, side of a square, rank) is zero or above its maximum.
    #[error("a size of the codec (block, chunk, side or rank) is {found}, expected 1 to {max}")]
    BlockSize {
        /// The size.
        found: u32,
        /// The largest allowed size.
        max: u32,
    },
    /// The payload has the right codec but another parameter, such as the number of bits of a code.
    #[error("the payload is of codec {codec} with parameter {found}, not {wanted}")]
    Parameter {
        /// The codec.
        codec: CodecId,
        /// The decoder's parameter.
        wanted: u8,
        /// The payload's parameter.
        found: u8,
    },
    /// Bits after the last code of a block are set.
    #[error("block {block} has bits set after its last code, which no encoder writes")]
    Padding {
        /// The block's index.
        block: usize,
    },
    /// A block's header is one that no encoder writes. It holds a scale, the block's smallest and largest
    /// value, or the values of the codes.
    #[error("the header of block {block} is invalid: it holds {found}")]
    Scale {
        /// The block's index.
        block: usize,
        /// A number of the header: the invalid one if it is invalid by itself.
        found: f32,
    },
    /// The payload holds a code that no encoder writes.
    #[error("element {index} of the payload has the code {code:#x}, which no encoder writes")]
    Code {
        /// The element's index.
        index: usize,
        /// The invalid code.
        code: u32,
    },
    /// The payload holds indices that no encoder writes.
    #[error("the payload's indices {why}")]
    Indices {
        /// What is wrong, as the end of the sentence.
        why: &'static str,
    },
    /// The vector is longer than the codec can index.
    #[error("the vector has {len} elements, more than the {max} that this codec can index")]
    TooLong {
        /// The vector's length.
        len: usize,
        /// The largest allowed length.
        max: usize,
    },
    /// Error feedback around an unbiased mask is not allowed: it would count the mask's scale as an error.
    #[error(
        "an unbiased mask cannot have error feedback: use a mask that does not scale values, such as random"
    )]
    UnbiasedFeedback,
    /// The text is not an amount of elements.
    #[error(
        "{text:?} is not an amount of elements: write a number such as 64 or a fraction such as 0.01, \
         optionally with a multiple, as in 0.2x128"
    )]
    Amount {
        /// The text.
        text: String,
    },
    /// A protocol was ended before all its buffers were averaged, or before it began.
    #[error("the protocol has not exchanged all its buffers")]
    Exchange,
    /// The number of values is not the number of samples times the length of a sample.
    #[error("{found} values were given, expected {samples} samples of {len} values each")]
    Samples {
        /// Number of samples.
        samples: usize,
        /// Number of values in each sample.
        len: usize,
        /// Number of values given.
        found: usize,
    },
    /// A change of a sample does not match the copy of that sample held here.
    #[error(
        "the change of sample {id} is relative to the sender's copy with checksum {wanted:#010x}, but the \
         copy stored here has checksum {found:#010x} (0: no copy)"
    )]
    CacheMiss {
        /// Id of the sample.
        id: u64,
        /// Checksum of the sender's copy.
        wanted: u32,
        /// Checksum of the receiver's copy.
        found: u32,
    },
    /// Stored samples could not be read or written.
    #[error("failed to {action} stored samples: {why}")]
    Store {
        /// The operation that failed.
        action: &'static str,
        /// Kind of the operating system's error.
        kind: std::io::ErrorKind,
        /// Text of the operating system's error.
        why: String,
    },
    /// A device's codec gives another result than the host's.
    #[error("codec {codec}, {len} elements: device and host differ in {what}")]
    Device {
        /// The codec's name.
        codec: String,
        /// The result that differs.
        what: &'static str,
        /// The vector's length.
        len: usize,
    },
    /// The packer is not compiled into this build.
    #[error(
        "this build has no {packing}: enable the feature {packing:?} of farflung-compress",
        packing = packing.to_string()
    )]
    NotBuilt {
        /// The packer.
        packing: Packing,
    },
    /// A packed body was not made by a packer, was made by another packer, or unpacks to more bytes than the
    /// codec writes.
    #[error("expected a payload packed by {packing}, but {why}")]
    Packed {
        /// The decoder's packer.
        packing: Packing,
        /// What is wrong, as the end of the sentence.
        why: &'static str,
    },
    /// A codec name has a known part with a wrong argument or in a wrong place.
    #[error("codec {name:?}: {part:?} {why}")]
    CodecName {
        /// The whole name.
        name: String,
        /// The wrong part.
        part: String,
        /// What is wrong, as the end of the sentence.
        why: &'static str,
    },
    /// There is no codec with that name.
    #[error(
        "unknown codec {name:?}; the codecs are {}, each also with \"+ef\", and \"+zstd\" or \"+lz4\" at the \
         end",
        crate::spec::names().join(", ")
    )]
    UnknownCodec {
        /// The name.
        name: String,
    },
}

impl CompressError {
    /// Returns true if the encoder rejected a value of the vector because it is not finite or too large for the
    /// codec. The vector can still be sent as plain f32, and the codec's memory is unchanged.
    #[must_use]
    pub const fn is_value_error(&self) -> bool {
        matches!(self, Self::NonFinite { .. } | Self::Overflow { .. })
    }

    /// Converts an error of a nested codec into one about the outer vector `x`. `from` maps an index of the
    /// inner vector to one of `x`.
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
