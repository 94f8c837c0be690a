//! Stores in files.

use std::fs;
use std::sync::Arc;

use farflung_store::{Arrays, BLOCK, Layout, Store, StoreError, Stream};

struct Buffer(Vec<u8>);

impl Arrays for Buffer {
    fn array(&self, _: usize) -> &[u8] {
        &self.0
    }

    fn array_mut(&mut self, _: usize) -> &mut [u8] {
        &mut self.0
    }
}

fn layout(identity: u8, pieces: usize) -> Layout {
    Layout::new([identity; 32], 1, vec![BLOCK as u64; pieces], 10)
}

#[test]
fn other_files_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("thesis");
    for text in [&b"x"[..], &[b'x'; 3 * BLOCK], &[0; 7]] {
        fs::write(&path, text).unwrap();
        assert!(matches!(Store::open(&path, layout(1, 2)), Err(StoreError::Foreign { .. })));
        assert_eq!(fs::read(&path).unwrap(), text);
    }
    fs::remove_file(&path).unwrap();
    let store = Store::open(&path, layout(1, 2)).unwrap();
    assert!(matches!(Store::open(&path, layout(1, 2)), Err(StoreError::Locked { .. })));
    drop(store);
    for other in [layout(2, 2), layout(1, 3)] {
        assert!(matches!(Store::open(&path, other), Err(StoreError::OtherLayout { .. })));
    }
    assert_eq!(Store::open(&path, layout(1, 2)).unwrap().generations().unwrap(), []);
    let missing = Store::open(&dir.path().join("missing/store"), layout(1, 2)).unwrap_err();
    assert!(missing.to_string().contains("missing/store"), "{missing}");
}

#[test]
fn a_store_that_does_not_fit_on_the_disk_is_refused_before_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let huge = Layout::new([0; 32], 1, vec![1 << 50; 4], 10);
    let needed = huge.file_bytes();
    match Store::open(&path, huge).unwrap_err() {
        StoreError::Room { needed: said, free, .. } => assert!(said == needed && free < needed),
        error => panic!("{error}"),
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn long_records_are_refused_and_buffers_need_not_be_aligned() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), layout(1, 2)).unwrap();
    let store = Arc::new(store);
    let mut stream = Stream::new(Arc::clone(&store), None, vec![Buffer(vec![0; BLOCK])], 1);
    stream.begin(1);
    for byte in [1, 2] {
        let mut buffer = stream.take().unwrap();
        buffer.0.fill(byte);
        stream.give(buffer, &[]).unwrap();
    }
    assert!(matches!(stream.commit(vec![0; 5000]), Err(StoreError::Record { found: 5000, .. })));
    stream.commit(b"one".to_vec()).unwrap();
    stream.wait().unwrap();
    let path = dir.path().join("store");
    assert_eq!(Store::newest_in(&path, 10).unwrap(), Some(1));
    fs::write(dir.path().join("other"), [7; 3 * BLOCK]).unwrap();
    assert_eq!(Store::newest_in(&dir.path().join("other"), 10).unwrap(), None);
    assert!(Store::newest_in(&dir.path().join("missing"), 10).is_err());
    let mut values = vec![0; BLOCK + 1];
    store.read(1, 1, 0, &mut values[1..]).unwrap();
    assert_eq!(values[1..], [2; BLOCK]);
}
