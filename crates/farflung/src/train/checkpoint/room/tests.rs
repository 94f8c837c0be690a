//! Tests what is refused, and the texts of the errors.

use std::io::ErrorKind::{FileTooLarge, PermissionDenied, QuotaExceeded, StorageFull};

use super::*;

fn size(bytes: u64) -> Size {
    Size::default().with_more_weights(bytes)
}

#[test]
fn what_is_lacking_is_known_before_a_write() {
    let lacks = |bytes, packing, free| lack(size(bytes), packing, free, bytes);
    assert_eq!(lacks(1000, Packing::Plain, Some(1000)), None);
    assert_eq!(lacks(1001, Packing::Plain, Some(1000)), Some(Shortage::Free(1000)));
    assert_eq!(lacks(1001, Packing::Plain, None), None, "a disk that does not tell");
    assert_eq!(lacks(1001, Packing::Zstd, Some(1000)), None, "the packed size is not known");
}

#[test]
fn messages_name_the_folder_and_the_bytes() {
    let no_room = |step, ranks, shortage| {
        NoRoom { folder: "runs/a".into(), step, needed: 1_400_000, ranks, shortage }.to_string()
    };
    assert_eq!(
        no_room(None, 1, Shortage::Free(1_000_000)),
        "there is no room for a checkpoint in runs/a: it needs 1.4 MB, and 1 MB are free; free some space, or \
         give a folder on another disk with `--out`"
    );
    assert_eq!(
        no_room(None, 4, Shortage::Free(0)),
        "there is no room for a checkpoint in runs/a: those of 4 ranks on this disk need 1.4 MB, and 0 B are \
         free; free some space, or give a folder on another disk with `--out`"
    );
    assert_eq!(
        no_room(Some(7), 1, Shortage::FileLimit { file: 900_000, limit: 300_000 }),
        "there is no room for the checkpoint of step 7 in runs/a: it needs 1.4 MB, 900 kB of it in one file, and \
         this process may write 300 kB to a file (`ulimit -f`)"
    );
    let failed = Shortage::Failed { problem: "failed to write x: full".to_owned(), free: Some(5_000_000) };
    assert_eq!(
        no_room(Some(7), 1, failed),
        "there is no room for the checkpoint of step 7 in runs/a: it needs 1.4 MB, and failed to write x: full; \
         5 MB are free without it"
    );
}

#[test]
fn only_a_full_disk_is_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let of = |kind: std::io::ErrorKind| {
        let error = Error::Io { action: "write", path: "x".into(), source: kind.into() };
        failed(error, dir.path(), size(5), 3)
    };
    for kind in [FileTooLarge, QuotaExceeded, StorageFull] {
        assert!(of(kind).is_no_room() && of(kind).exit_code() == 1, "{kind}");
    }
    assert!(!of(PermissionDenied).is_no_room());
}

#[test]
fn a_ranks_disk_reads_back() {
    for disk in [None, Some([7; 16])] {
        let mine = RankDisk { disk, needed: 1 << 40, expected: 7 };
        assert_eq!(RankDisk::of(&mine.to_bytes()), Some(mine));
    }
    assert_eq!(RankDisk::of(&[1, 2]), None);
}

#[test]
fn a_new_checkpoint_is_written_before_the_oldest_is_deleted() {
    // Steps left, steps between checkpoints, number to keep, number there, and the most at the same time.
    for (left, every, keep, there, most) in [
        (100, 0, 2, 0, 1),
        (100, 100, 2, 0, 1),
        (100, 60, 2, 0, 2),
        (100, 10, 2, 0, 3),
        (100, 10, 1, 0, 3),
        (100, 10, 5, 0, 6),
        (100, 10, 5, 4, 2),
        (100, 10, 2, 7, 1),
        (100, 10, 0, 7, 10),
        (0, 10, 2, 1, 1),
    ] {
        assert_eq!(at_once(left, every, keep, there), most, "{left} {every} {keep} {there}");
    }
}
