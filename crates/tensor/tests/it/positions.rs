//! Positions that are given for each token.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Heads, Op, Result, Rotary, Tensor, TokenPositions};

use super::api::{refused, z};
use super::expect::noise;

const BATCH: usize = 2;
const LEN: usize = 9;
const START: usize = 3;
const COLS: usize = 5;
const ROWS: usize = 15;

/// Embeds tokens and runs the gradient: returns `y` and the gradients of both tables.
fn embed(cpu: &Device, order: &[usize], positions: TokenPositions<'_>) -> Result<[Vec<f32>; 3]> {
    let ids: Vec<u32> = order.iter().map(|&token| token as u32 * 5 % 7).collect();
    let tokens = cpu.tensor(&ids, [BATCH, LEN])?;
    let (table, places) =
        (cpu.tensor(&noise(7 * COLS, 1), [7, COLS])?, cpu.tensor(&noise(ROWS * COLS, 2), [ROWS, COLS])?);
    let mut y = cpu.zeros([BATCH, LEN, COLS])?;
    cpu.run(Op::Embed {
        tokens: tokens.view(),
        first: None,
        positions,
        tokens_table: table.view(),
        positions_table: Some(places.view()),
        y: y.view_mut(),
    })?;
    let dy = cpu.tensor(&rows(&noise(BATCH * LEN * COLS, 3), COLS, order), [BATCH, LEN, COLS])?;
    let (mut d_table, mut d_places) =
        (cpu.tensor(&noise(7 * COLS, 4), [7, COLS])?, cpu.tensor(&noise(ROWS * COLS, 5), [ROWS, COLS])?);
    cpu.run(Op::EmbedGrad {
        tokens: tokens.view(),
        first: None,
        positions,
        dy: dy.view(),
        d_tokens_table: d_table.view_mut(),
        d_positions_table: Some(d_places.view_mut()),
    })?;
    Ok([y.to_vec()?, d_table.to_vec()?, d_places.to_vec()?])
}

/// Joins heads, and splits gradients: returns `qkv`, and the gradients of queries, keys and values.
fn join(cpu: &Device, order: &[usize], positions: TokenPositions<'_>) -> Result<[Vec<f32>; 4]> {
    let heads = Heads { query: 2, kv: 1 };
    let of = |width: usize, seed| {
        cpu.tensor(&rows(&noise(BATCH * LEN * width, seed), width, order), [BATCH, LEN, width])
    };
    let (q, k, v, d_qkv) = (of(12, 1)?, of(6, 2)?, of(6, 3)?, of(24, 4)?);
    let table = cpu.tensor(&noise(ROWS * 4, 5), [ROWS, 4])?;
    let rotary = Some(Rotary { table: table.view(), positions });
    let mut qkv = cpu.zeros([BATCH, LEN, 24])?;
    cpu.run(Op::JoinHeads { heads, rotary, q: q.view(), k: k.view(), v: v.view(), qkv: qkv.view_mut() })?;
    let [mut dq, mut dk, mut dv] =
        [cpu.zeros([BATCH, LEN, 12])?, cpu.zeros([BATCH, LEN, 6])?, cpu.zeros([BATCH, LEN, 6])?];
    let (to_q, to_k, to_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    cpu.run(Op::SplitHeads { heads, rotary, d_qkv: d_qkv.view(), dq: to_q, dk: to_k, dv: to_v })?;
    Ok([qkv.to_vec()?, dq.to_vec()?, dk.to_vec()?, dv.to_vec()?])
}

/// Returns rows in another order.
fn rows(x: &[f32], cols: usize, order: &[usize]) -> Vec<f32> {
    order.iter().flat_map(|&row| x[row * cols..][..cols].to_vec()).collect()
}

#[test]
fn tokens_have_what_is_at_their_positions() {
    let cpu = Device::cpu(2).unwrap();
    let at = |positions: &[usize]| {
        let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
        cpu.tensor(&positions, [BATCH, LEN]).unwrap()
    };
    let n = BATCH * LEN;
    let own: Vec<usize> = (0..n).collect();
    let starts: Vec<u32> = [0, 0, 0, 6, 6, 6, 6, 10, 11].repeat(BATCH);
    let begins = cpu.tensor(&starts, [BATCH, LEN]).unwrap();
    for documents in [None, Some(&begins)] {
        let position = |i: usize| START + i % LEN - documents.map_or(0, |_| starts[i] as usize);
        let positions: Vec<usize> = (0..n).map(position).collect();
        let from = TokenPositions::From { start: START, documents: documents.map(Tensor::view) };
        let same = at(&positions);
        let same = TokenPositions::At(same.view());
        assert_eq!(embed(&cpu, &own, from).unwrap(), embed(&cpu, &own, same).unwrap());
        assert_eq!(join(&cpu, &own, from).unwrap(), join(&cpu, &own, same).unwrap());

        // Tokens in another order, also of another sequence, take their positions along.
        let order: Vec<usize> = (0..n).map(|i| i * 7 % n).collect();
        let moved = at(&order.iter().map(|&i| positions[i]).collect::<Vec<_>>());
        let moved = TokenPositions::At(moved.view());
        let (whole, found) = (embed(&cpu, &own, from).unwrap(), embed(&cpu, &order, moved).unwrap());
        assert_eq!(found[0], rows(&whole[0], COLS, &order));
        for (found, want) in found[1..].iter().zip(&whole[1..]) {
            assert!(found.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?} {want:?}");
        }
        let (whole, found) = (join(&cpu, &own, from).unwrap(), join(&cpu, &order, moved).unwrap());
        for ((found, whole), cols) in found.iter().zip(&whole).zip([24, 12, 6, 6]) {
            assert_eq!(*found, rows(whole, cols, &order));
        }
    }
}

#[test]
fn positions_that_the_table_does_not_have_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let own: Vec<usize> = (0..BATCH * LEN).collect();
    let mut positions = [ROWS as u32 - 1; BATCH * LEN];
    let tensor = |positions: &[u32]| cpu.tensor(positions, [BATCH, LEN]).unwrap();
    let run = |positions: &Tensor| {
        let positions = TokenPositions::At(positions.view());
        (embed(&cpu, &own, positions).map(drop), join(&cpu, &own, positions).map(drop))
    };
    let (embedded, joined) = run(&tensor(&positions));
    embedded.unwrap();
    joined.unwrap();
    for (token, wrong) in [(11, u32::MAX), (0, 15)] {
        positions[token] = wrong;
        let parts = [format!("token {token} "), format!("position {wrong}"), "below 15".to_owned()];
        let parts = parts.each_ref().map(String::as_str);
        let (embedded, joined) = run(&tensor(&positions));
        refused(embedded, &[&["embed"], &parts[..]].concat());
        refused(joined, &[&["join_heads"], &parts[..]].concat());
        // Without a table of positions, nothing is read at them.
        let (ids, table, positions) = (tensor(&[0; 18]), z(&cpu, &[7, COLS]), tensor(&positions));
        let mut y = z(&cpu, &[BATCH, LEN, COLS]);
        let (tokens, tokens_table, y) = (ids.view(), table.view(), y.view_mut());
        let positions = TokenPositions::At(positions.view());
        cpu.run(Op::Embed { tokens, first: None, positions, tokens_table, positions_table: None, y })
            .unwrap();
        positions_of_gradients_are_refused(&cpu, token, wrong);
    }
    let (embedded, joined) = run(&cpu.tensor(&[0_u32; 4], 4).unwrap());
    refused(embedded, &["embed", "[4]", "[2, 9]"]);
    refused(joined, &["join_heads", "[4]", "[2, 9]"]);
    let (embedded, joined) = run(&z(&cpu, &[BATCH, LEN]));
    refused(embedded, &["embed", "u32", "f32"]);
    refused(joined, &["join_heads", "u32", "f32"]);
}

/// The gradients refuse what the ops do.
fn positions_of_gradients_are_refused(cpu: &Device, token: usize, wrong: u32) {
    let mut positions = [0; 18];
    positions[token] = wrong;
    let (at, ids) =
        (cpu.tensor(&positions, [BATCH, LEN]).unwrap(), cpu.tensor(&[0_u32; 18], [BATCH, LEN]).unwrap());
    let positions = TokenPositions::At(at.view());
    let (mut d_table, mut d_places, dy) = (z(cpu, &[7, 4]), z(cpu, &[15, 4]), z(cpu, &[BATCH, LEN, 4]));
    let embedded = cpu.run(Op::EmbedGrad {
        tokens: ids.view(),
        first: None,
        positions,
        dy: dy.view(),
        d_tokens_table: d_table.view_mut(),
        d_positions_table: Some(d_places.view_mut()),
    });
    refused(embedded, &["embed_grad", &format!("token {token} "), &format!("position {wrong}"), "below 15"]);
    let (angles, d_qkv) = (z(cpu, &[15, 4]), z(cpu, &[BATCH, LEN, 12]));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| z(cpu, &[BATCH, LEN, 4]));
    let split = cpu.run(Op::SplitHeads {
        heads: Heads::equal(1),
        rotary: Some(Rotary { table: angles.view(), positions }),
        d_qkv: d_qkv.view(),
        dq: dq.view_mut(),
        dk: dk.view_mut(),
        dv: dv.view_mut(),
    });
    refused(split, &["split_heads", &format!("token {token} "), &format!("position {wrong}"), "below 15"]);
}
