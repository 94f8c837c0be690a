//! Unpacks compressed files, with a bound on what a small file may become.

use std::path::Path;

use super::SourceError;
use crate::file_kind::Compression;

/// A file may become this many times as long. Text rarely exceeds 10; nothing but repetitions exceeds this.
#[cfg(feature = "compressed")]
const MOST_TIMES: u64 = 256;
/// A file may always become this long, in bytes.
#[cfg(feature = "compressed")]
const LEAST_LIMIT: u64 = 16 << 20;
/// Memory that a decoder may use for its window, in KiB: 256 MiB. `xz -9` needs 64 MiB.
#[cfg(feature = "compressed")]
const MOST_WINDOW_KIB: u32 = 256 << 10;

/// Unpacks a whole file, which may consist of several streams. Memory grows with what is unpacked, not with
/// what a header claims.
///
/// Errors: [`SourceError::Packed`] if the file is damaged or its end is missing; [`SourceError::Bomb`].
#[cfg(feature = "compressed")]
pub(in crate::data) fn unpack(
    path: &Path,
    format: Compression,
    packed: &[u8],
) -> Result<Vec<u8>, SourceError> {
    use std::io::Read;

    let limit = (packed.len() as u64).saturating_mul(MOST_TIMES).max(LEAST_LIMIT);
    let mut unpacked = Vec::new();
    let read = match format {
        Compression::Gzip => gunzip(packed, limit + 1, &mut unpacked),
        Compression::Zstd => zstd::stream::read::Decoder::with_buffer(packed)
            .and_then(|decoder| decoder.take(limit + 1).read_to_end(&mut unpacked)),
        Compression::Xz => lzma_rust2::XzReader::new_mem_limit(packed, true, MOST_WINDOW_KIB)
            .take(limit + 1)
            .read_to_end(&mut unpacked),
        Compression::Bzip2 => {
            bzip2::read::MultiBzDecoder::new(packed).take(limit + 1).read_to_end(&mut unpacked)
        }
    };
    if let Err(error) = read {
        let (path, problem) = (path.to_owned(), error.to_string());
        return Err(SourceError::Packed { path, format, unpacked: unpacked.len() as u64, problem });
    }
    if unpacked.len() as u64 > limit {
        return Err(SourceError::Bomb { path: path.to_owned(), format, packed: packed.len() as u64, limit });
    }
    Ok(unpacked)
}

/// Unpacks the members of a gzip file, up to `most` bytes. Zeros after the last member are padding, as for
/// gzip(1): tapes and some archives fill their blocks with them.
#[cfg(feature = "compressed")]
fn gunzip(packed: &[u8], most: u64, unpacked: &mut Vec<u8>) -> std::io::Result<usize> {
    use std::io::Read;

    let mut rest = packed;
    loop {
        let mut member = flate2::bufread::GzDecoder::new(rest);
        let left = most.saturating_sub(unpacked.len() as u64);
        member.by_ref().take(left).read_to_end(unpacked)?;
        if unpacked.len() as u64 >= most {
            return Ok(unpacked.len());
        }
        rest = member.into_inner();
        if rest.iter().all(|&byte| byte == 0) {
            return Ok(unpacked.len());
        }
    }
}

/// Returns an error: this build reads no compressed files.
#[cfg(not(feature = "compressed"))]
pub(in crate::data) fn unpack(path: &Path, _: Compression, _: &[u8]) -> Result<Vec<u8>, SourceError> {
    Err(SourceError::NotText {
        path: path.to_owned(),
        what: "a compressed file, and this build reads none".to_owned(),
        advice: "unpack it, or build with the feature `compressed`",
    })
}

#[cfg(all(test, feature = "compressed"))]
mod tests {
    use std::io::Write;

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
        encoder.write_all(text).expect("memory can be written");
        encoder.finish().expect("memory can be written")
    }

    fn bzip2(text: &[u8]) -> Vec<u8> {
        let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
        encoder.write_all(text).expect("memory can be written");
        encoder.finish().expect("memory can be written")
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        zstd::encode_all(text, 3).expect("memory can be written")
    }

    /// The output of `printf 'one line of text\n' | xz -9`: this crate builds no encoder of xz.
    const XZ: &[u8] =
        b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4F\x02\0!\x01\x1c\0\0\0\x10\xcfX\xcc\x01\0\x10one line of text\n\
        \0\0\0\0\xae\x0d\x04\xb6\xdd}\x08{\0\x01)\x112\x0ap\x0e\x1f\xb6\xf3}\x01\0\0\0\0\x04YZ";

    #[test]
    fn what_was_packed_comes_back_in_one_or_several_streams() {
        let text = b"one line of text\n".to_vec();
        let packings = [
            (Compression::Gzip, gzip(&text)),
            (Compression::Bzip2, bzip2(&text)),
            (Compression::Zstd, zstd(&text)),
            (Compression::Xz, XZ.to_vec()),
        ];
        for (packing, packed) in packings {
            let unpacked = unpack(Path::new("a"), packing, &packed).unwrap();
            assert_eq!(unpacked, text, "{packing:?}");
            let twice = unpack(Path::new("a"), packing, &packed.repeat(2)).unwrap();
            assert_eq!(twice, text.repeat(2), "{packing:?}");
            for end in [packed.len() - 1, packed.len() - 5, packed.len() / 2, 11] {
                let error = unpack(Path::new("a"), packing, &packed[..end]).unwrap_err();
                assert!(matches!(error, SourceError::Packed { .. }), "{packing:?} cut at {end}: {error}");
            }
        }
    }

    #[test]
    fn zeros_behind_a_gzip_file_are_padding_and_other_bytes_are_not() {
        let text = b"one line of text\n".to_vec();
        for padded in [vec![0; 1], vec![0; 10_240]] {
            let packed = [gzip(&text), gzip(&text), padded].concat();
            assert_eq!(unpack(Path::new("a"), Compression::Gzip, &packed).unwrap(), text.repeat(2));
        }
        for more in [&b"\0\0x"[..], b"more"] {
            let error =
                unpack(Path::new("a"), Compression::Gzip, &[&gzip(&text)[..], more].concat()).unwrap_err();
            assert!(matches!(error, SourceError::Packed { .. }), "{error}");
        }
    }

    #[test]
    fn bombs_are_refused_before_they_fill_the_memory() {
        let zeros = vec![0; (LEAST_LIMIT + 1) as usize];
        for (packing, packed) in [
            (Compression::Gzip, gzip(&zeros)),
            (Compression::Bzip2, bzip2(&zeros)),
            (Compression::Zstd, zstd(&zeros)),
        ] {
            let error = unpack(Path::new("a"), packing, &packed).unwrap_err();
            assert!(matches!(error, SourceError::Bomb { .. }), "{packing:?}: {error}");
        }
        assert_eq!(
            unpack(Path::new("a"), Compression::Gzip, &gzip(&zeros[1..])).unwrap().len(),
            zeros.len() - 1
        );
    }
}
