//! Masks that do not fit their tokens are refused.

use farflung_tensor::{Device, Heads, Mask, Op, Result, Rotary, Tensor, TokenPositions};

use super::api::{refused, z};

/// Documents that are not contiguous, or that do not fit the tokens.
#[test]
fn documents_that_are_not_contiguous_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (heads, table) = (Heads::equal(2), z(&cpu, &[9, 2]));
    let (qkv, mut y, mut lse) = (z(&cpu, &[2, 3, 12]), z(&cpu, &[2, 3, 4]), z(&cpu, &[2, 2, 3]));
    let (mut keys, mut values, mut joined) = (z(&cpu, &[2, 7, 4]), z(&cpu, &[2, 7, 4]), z(&cpu, &[2, 3, 12]));
    let (ids, words) = (cpu.tensor(&[0_u32; 6], [2, 3]).unwrap(), z(&cpu, &[3, 4]));
    let mut run = |starts: &Tensor, past: usize| {
        let documents = Some(starts.view());
        let mask = Mask { documents, ..Mask::default() };
        let (y_, lse_) = (y.view_mut(), lse.view_mut());
        let whole = cpu.run(Op::Attention { heads, mask, qkv: qkv.view(), y: y_, lse: lse_ });
        let (keys, values, q) = (keys.view_mut(), values.view_mut(), qkv.view());
        let cached = cpu.run(Op::AttentionCached {
            heads,
            past,
            mask,
            qkv: q,
            keys,
            values,
            y: y.view_mut(),
            lse: None,
        });
        let positions = TokenPositions::From { start: past, documents };
        let rotary = Some(Rotary { table: table.view(), positions });
        let part = z(&cpu, &[2, 3, 4]);
        let (q, k, v) = (part.view(), part.view(), part.view());
        let join = cpu.run(Op::JoinHeads { heads, rotary, q, k, v, qkv: joined.view_mut() });
        let (tokens_table, tokens) = (words.view(), ids.view());
        let y = y.view_mut();
        let embed =
            cpu.run(Op::Embed { tokens, first: None, positions, tokens_table, positions_table: None, y });
        [whole, cached, join, embed]
    };
    let starts = |starts: &[u32; 6]| cpu.tensor(starts, [2, 3]).unwrap();
    assert!(run(&starts(&[0, 1, 1, 0, 0, 2]), 0).iter().all(Result::is_ok));
    let [whole, rest @ ..] = run(&starts(&[2, 5, 5, 4, 4, 4]), 4);
    refused(whole, &["attention", "position 0", "begins at 2"]);
    assert!(rest.iter().all(Result::is_ok));
    for (wrong, position, start) in [
        (&[0, 2, 2, 0, 0, 0], 1, 2),
        (&[0, 1, 0, 0, 0, 0], 2, 0),
        (&[0, 0, 0, 1, 1, 1], 0, 1),
        (&[0, 0, u32::MAX, 0, 0, 0], 2, u32::MAX),
    ] {
        let (position, start) = (format!("position {position}"), format!("begins at {start}"));
        for found in run(&starts(wrong), 0) {
            refused(found, &[&position, &start]);
        }
    }
    for found in run(&cpu.tensor(&[0_u32; 3], 3).unwrap(), 0) {
        refused(found, &["[3]", "[2, 3]"]);
    }
    for found in run(&z(&cpu, &[2, 3]), 0) {
        refused(found, &["u32", "f32"]);
    }
}

/// Prefixes that end after the tokens of their document, or not at one token.
#[test]
fn prefixes_that_do_not_fit_their_documents_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let heads = Heads::equal(2);
    let (qkv, mut y, mut lse) = (z(&cpu, &[2, 3, 12]), z(&cpu, &[2, 3, 4]), z(&cpu, &[2, 2, 3]));
    let (mut keys, mut values) = (z(&cpu, &[2, 7, 4]), z(&cpu, &[2, 7, 4]));
    let mut run = |ends: &Tensor, starts: Option<&Tensor>, past: usize| {
        let (documents, prefixes) = (starts.map(Tensor::view), Some(ends.view()));
        let mask = Mask { documents, prefixes, ..Mask::default() };
        let (y_, lse_) = (y.view_mut(), lse.view_mut());
        let whole = cpu.run(Op::Attention { heads, mask, qkv: qkv.view(), y: y_, lse: lse_ });
        let (keys, values, qkv, y) = (keys.view_mut(), values.view_mut(), qkv.view(), y.view_mut());
        let cached = cpu.run(Op::AttentionCached { heads, past, mask, qkv, keys, values, y, lse: None });
        [whole, cached]
    };
    let ids = |ids: &[u32; 6]| cpu.tensor(ids, [2, 3]).unwrap();
    assert!(run(&ids(&[0, 0, 0, 3, 3, 3]), None, 0).iter().all(Result::is_ok));
    let apart = ids(&[0, 1, 1, 0, 0, 2]);
    assert!(run(&ids(&[1, 0, 0, 2, 2, 3]), Some(&apart), 0).iter().all(Result::is_ok));
    let [whole, cached] = run(&ids(&[7; 6]), None, 4);
    refused(whole, &["attention", "position 0", "ends before 7", "at most 3"]);
    assert!(cached.is_ok());
    for (wrong, starts, position, end) in [
        (&[0, 0, 0, 4, 4, 4], None, 0, 4),
        (&[2, 2, 1, 0, 0, 0], None, 2, 1),
        (&[2, 3, 3, 0, 0, 0], Some(&apart), 0, 2),
        (&[1, 3, 2, 0, 0, 0], Some(&apart), 2, 2),
        (&[u32::MAX; 6], None, 0, u32::MAX),
    ] {
        let (position, end) = (format!("position {position}"), format!("before {end}"));
        for found in run(&ids(wrong), starts, 0) {
            refused(found, &[&position, &end]);
        }
    }
    for found in run(&cpu.tensor(&[0_u32; 3], 3).unwrap(), None, 0) {
        refused(found, &["[3]", "[2, 3]"]);
    }
}
