//! Room on a disk for this user: free bytes, a quota, and a limit on the size of files. It does not depend on
//! what is written.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// Returns the bytes that this user may still write in a folder: what is free, and no more than a quota allows.
/// `None` if the file system does not tell.
pub(crate) fn free(folder: &Path) -> Option<u64> {
    let known = rustix::fs::statvfs(folder).ok()?;
    // Some file systems, such as those that programs serve, tell no sizes.
    let free = (known.f_blocks > 0).then(|| known.f_bavail.saturating_mul(known.f_frsize))?;
    Some(quota_left(folder).map_or(free, |left| left.min(free)))
}

/// Reserves room on the disk for all of a file up to its length, if at least as much stays free. Returns false
/// if there is less, or if the file system cannot reserve room.
pub(crate) fn reserve(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let reserve = || {
        let file = File::options().write(true).open(path)?;
        let metadata = file.metadata()?;
        let missing = metadata.len().saturating_sub(metadata.blocks().saturating_mul(512));
        // An attempt that fails may leave the disk full.
        let folder = path.parent().unwrap_or(path);
        if free(folder).is_some_and(|free| missing > free / 2) {
            return Err(ErrorKind::StorageFull.into());
        }
        Ok(rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, metadata.len())?)
    };
    let reserved: io::Result<()> = reserve();
    if let Err(error) = &reserved {
        tracing::debug!(path = %path.display(), %error, "no room was reserved");
    }
    reserved.is_ok()
}

/// Returns the largest size of a file that this process may write; `None` without a limit.
pub(crate) fn largest_file() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// Returns a number that is the same for two folders on one disk of this machine; `None` if it is not known.
pub(crate) fn number(folder: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(folder).ok().map(|metadata| metadata.dev())
}

/// Returns whether a write failed because a disk is full, or because of a limit on the user's files.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// Returns the bytes that a quota of this user, or of its group, leaves on a folder's disk; `None` without a
/// quota. The quotas of a project or of a remote disk are not known here, unless they are in what `statvfs`
/// says.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn quota_left(folder: &Path) -> Option<u64> {
    use std::os::fd::AsRawFd;

    // Quotas do not bind the superuser.
    let user = rustix::process::geteuid();
    if user.is_root() {
        return None;
    }
    let folder = File::open(folder).ok()?;
    let left = |kind: libc::c_int, id: u32| {
        #[expect(unsafe_code, reason = "there is no safe way to ask for a quota")]
        // SAFETY: `dqblk` is a plain C struct for which all zeros are a valid value. The call writes one such
        // struct to `quota`, which outlives the call, and the descriptor is open.
        let quota = unsafe {
            let mut quota: libc::dqblk = std::mem::zeroed();
            let command = libc::QCMD(libc::Q_GETQUOTA, kind);
            let done = libc::syscall(libc::SYS_quotactl_fd, folder.as_raw_fd(), command, id, &raw mut quota);
            (done == 0).then_some(quota)
        }?;
        // Limits are in blocks of 1 KiB; 0 is no limit.
        let limit = quota.dqb_bhardlimit.checked_mul(1024).filter(|&limit| limit > 0)?;
        Some(limit.saturating_sub(quota.dqb_curspace))
    };
    let of_user = left(libc::USRQUOTA, user.as_raw());
    let of_group = left(libc::GRPQUOTA, rustix::process::getegid().as_raw());
    of_user.into_iter().chain(of_group).min()
}

/// Other systems are not asked for quotas.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
fn quota_left(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_folder_has_room_and_a_full_device_is_full() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free(dir.path()).is_some_and(|free| free > 0));
        assert_eq!(free(&dir.path().join("missing")), None);
        let inside = dir.path().join("a");
        std::fs::create_dir(&inside).unwrap();
        assert_eq!(number(&inside), number(dir.path()));
        // A file with holes, and one that is larger than any disk.
        let sparse = dir.path().join("sparse");
        File::create(&sparse).unwrap().set_len(1 << 16).unwrap();
        assert!(reserve(&sparse));
        assert!(std::os::unix::fs::MetadataExt::blocks(&sparse.metadata().unwrap()) >= (1 << 16) / 512);
        File::create(&sparse).unwrap().set_len(1 << 43).unwrap();
        assert!(!reserve(&sparse) && !reserve(&dir.path().join("missing")));
        let mut full = File::options().write(true).open("/dev/full").unwrap();
        assert!(is_full(&full.write_all(b"x").unwrap_err()));
        for (number, full) in
            [(libc::ENOSPC, true), (libc::EDQUOT, true), (libc::EFBIG, true), (libc::EIO, false)]
        {
            assert_eq!(is_full(&io::Error::from_raw_os_error(number)), full, "{number}");
        }
    }
}
