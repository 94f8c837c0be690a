//! Tests files of lines that were cut, damaged, moved, or cannot be written.

use std::fs;

use super::*;

fn line(step: u64) -> String {
    format!("{{\"step\":{step}}}\n")
}

fn text(steps: impl IntoIterator<Item = u64>) -> String {
    steps.into_iter().map(line).collect()
}

#[derive(Serialize)]
struct Step {
    step: u64,
}

/// Returns the names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_line_that_a_crash_has_cut_off_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    let zeros = line(1) + &"\0".repeat(5000);
    for (before, kept) in [
        (text(1..=2), text(1..=2)),
        (line(1) + "{\"st", line(1)),
        ("{".to_owned(), String::new()),
        (zeros, line(1)),
    ] {
        fs::write(&path, before).unwrap();
        LineFile::new(path.clone()).append(&Step { step: 3 });
        assert_eq!(fs::read_to_string(&path).unwrap(), kept + &line(3));
    }
    assert_eq!(names(dir.path()), ["lines"]);
}

#[test]
fn lines_of_later_steps_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    for (up_to, left, last) in [(9, 5, Some(5)), (3, 3, Some(3)), (0, 0, None)] {
        fs::write(&path, text(1..=5) + "{\"ste").unwrap();
        let (_, found) = LineFile::open(path.clone(), step_of, up_to).unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap(), found), (text(1..=left), last));
    }
    assert_eq!(names(dir.path()), ["lines"]);
}

#[test]
fn a_damaged_file_is_put_aside_and_its_good_lines_are_kept() {
    let noise: Vec<u8> = (0..100_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let long = vec![b'x'; (16 << 20) + 5];
    let damages: [&[u8]; 8] = [
        b"\n",
        b"{}\n",
        b"not a line\n",
        b"\0\0\0\n",
        b"{\"step\":-1}\n",
        b"{\"step\":1}{\"step\":2}\n",
        &[&noise[..], b"\n"].concat(),
        &[&long[..], b"\n"].concat(),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    for (number, damage) in (1..).zip(damages) {
        let before = [text(1..=2).as_bytes(), damage, text(3..=4).as_bytes()].concat();
        fs::write(&path, &before).unwrap();
        let (mut file, last) = LineFile::open(path.clone(), step_of, 3).unwrap();
        assert_eq!(last, Some(3), "damage {number}");
        file.append(&Step { step: 4 });
        assert_eq!(fs::read_to_string(&path).unwrap(), text(1..=4), "damage {number}");
        let aside = dir.path().join(format!("lines.damaged-{number}"));
        assert!(fs::read(aside).unwrap() == before, "an earlier one is not overwritten");
    }
    assert_eq!(names(dir.path()).len(), 1 + damages.len());
    // Nothing but noise.
    fs::write(&path, b"\xff\xfe").unwrap();
    assert_eq!(LineFile::open(path.clone(), step_of, 9).unwrap().1, None);
    assert_eq!(fs::read(&path).unwrap(), b"");
    assert!(dir.path().join("lines.damaged-9").exists());
}

#[test]
fn lines_that_are_not_in_order_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    fs::write(&path, text([1, 9, 2])).unwrap();
    LineFile::open(path.clone(), step_of, 5).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), text(1..=2));
    assert_eq!(names(dir.path()), ["lines", "lines.damaged-1"]);
}

#[test]
fn a_file_that_is_moved_deleted_or_cut_meanwhile_is_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("lines"), dir.path().join("lines.1"));
    let mut file = LineFile::new(path.clone());
    file.append(&Step { step: 1 });
    fs::rename(&path, &moved).unwrap();
    file.append(&Step { step: 2 });
    assert_eq!([&path, &moved].map(|path| fs::read_to_string(path).unwrap()), [line(2), line(1)]);
    fs::remove_file(&path).unwrap();
    file.append(&Step { step: 3 });
    // As `copytruncate` does: no hole of zeros is left.
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    file.append(&Step { step: 4 });
    assert_eq!(fs::read_to_string(&path).unwrap(), line(4));
    // Replaced by another file, with noise.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "noise\n").unwrap();
    file.append(&Step { step: 5 });
    assert_eq!(fs::read_to_string(&path).unwrap(), line(5));
    assert_eq!(names(dir.path()), ["lines", "lines.1", "lines.damaged-1"]);
}

#[test]
fn a_folder_or_a_pipe_in_its_place_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    fs::create_dir(&path).unwrap();
    let error = LineFile::open(path.clone(), step_of, 0).unwrap_err().to_string();
    assert!(error.contains("lines is a folder, expected a file"), "{error}");
    fs::remove_dir(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = LineFile::open(path.clone(), step_of, 0).unwrap_err().to_string();
    assert!(error.contains("lines is a pipe or a device, expected a file"), "{error}");
    LineFile::new(path).append(&Step { step: 1 });
}

#[test]
fn half_a_line_is_removed_when_it_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines");
    fs::write(&path, line(1)).unwrap();
    let mut file = LineFile::new(path.clone());
    // This file cannot be written.
    file.file = Some(File::open(&path).unwrap());
    file.append(&Step { step: 2 });
    assert_eq!((file.dropped, file.has_warned), (1, true));
    file.append(&Step { step: 3 });
    assert_eq!((file.dropped, fs::read_to_string(&path).unwrap()), (0, text([1, 3])));
}
