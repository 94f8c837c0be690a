//! Tensors, views, costs of ops, and errors: each error names the op, and the shapes or types that do not fit.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{
    DType, Device, Fuse, Gelu, Heads, Mask, Norm, NormKind, Op, Result, Rotary, Shape, Tensor, TensorError,
    TokenPositions,
};

pub(super) fn z(cpu: &Device, dims: &[usize]) -> Tensor {
    cpu.zeros(Shape::new(dims).unwrap()).unwrap()
}

/// Asserts that `result` is an error whose message contains all of `parts`.
#[track_caller]
pub(super) fn refused(result: Result<()>, parts: &[&str]) {
    let message = result.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` lacks `{part}`");
    }
}

#[test]
fn tensors_views_and_parts() {
    let cpu = Device::cpu(1).unwrap();
    let mut t = cpu.tensor(&[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0], [2, 3]).unwrap();
    assert_eq!((t.shape().dims(), t.dtype(), t.device().name()), (&[2, 3][..], DType::F32, "cpu"));
    let part = t.view().part(2, [2, 2]).unwrap();
    assert_eq!(
        (part.to_vec::<f32>().unwrap(), part.len(), part.shape().cols()),
        (vec![2.0, 3.0, 4.0, 5.0], 4, 2)
    );
    // Offsets within a part are relative to the part.
    assert_eq!(part.part(1, 2).unwrap().to_vec::<f32>().unwrap(), [3.0, 4.0]);
    assert_eq!(part.host::<f32>().unwrap(), [2.0, 3.0, 4.0, 5.0]);
    assert!(part.part(3, 2).is_err() && part.part(5, 0).is_err() && part.part(usize::MAX, 2).is_err());
    assert!(part.part(4, 0).unwrap().is_empty());
    assert_eq!(
        t.view().part(7, 1).unwrap_err(),
        TensorError::OutOfBounds { op: "part", start: 7, end: 8, len: 6 }
    );
    assert!(t.view().reshape([3, 2]).is_ok() && t.view().reshape(7).is_err());
    assert!(t.view().part(0, [1 << 63, 2]).is_err() && t.view().reshape([1 << 63, 4]).is_err());

    let (mut left, right) = t.view_mut().split_at(2).unwrap();
    assert_eq!((left.len(), right.len()), (2, 4));
    left.write(&[9.0_f32, 8.0]).unwrap();
    right.into_host::<f32>().unwrap()[3] = 7.0;
    assert_eq!(t.host::<f32>().unwrap(), [9.0, 8.0, 2.0, 3.0, 4.0, 7.0]);
    assert!(t.view_mut().split_at(7).is_err());
    assert!(t.view_mut().split_at(6).unwrap().1.is_empty());
    t.host_mut::<f32>().unwrap().fill(1.0);
    assert_eq!(t.view_mut().part(1, 2).unwrap().as_view().to_vec::<f32>().unwrap(), [1.0, 1.0]);

    assert!(t.host::<u32>().is_none() && t.host_mut::<u32>().is_none());
    assert!(matches!(t.to_vec::<u32>(), Err(TensorError::DTypeMismatch { op: "to_vec", .. })));
    assert!(matches!(t.write(&[1_u32; 6]), Err(TensorError::DTypeMismatch { op: "write", .. })));
    assert!(matches!(t.write(&[1.0_f32; 5]), Err(TensorError::ShapeMismatch { op: "write", .. })));
    assert!(cpu.tensor(&[1.0_f32; 5], [2, 3]).is_err());
    assert!(matches!(cpu.empty(DType::F32, [usize::MAX, 2]), Err(TensorError::OutOfMemory { .. })));
    assert!(matches!(cpu.empty(DType::U8, usize::MAX), Err(TensorError::OutOfMemory { .. })));
    assert!(cpu.same(t.device()) && cpu.same(&cpu.clone()) && !cpu.same(&Device::cpu(1).unwrap()));
    cpu.fence().unwrap();
}

#[test]
fn buffers_are_reused() {
    let cpu = Device::cpu(2).unwrap();
    let mut first = None;
    for _ in 0..5 {
        let (a, b) = (z(&cpu, &[100, 33]), z(&cpu, &[7]));
        assert_eq!(a.host::<f32>().unwrap().as_ptr().align_offset(256), 0);
        drop((a, b));
        assert_eq!(*first.get_or_insert(cpu.memory()), cpu.memory());
    }
    let (held, peak) = cpu.memory();
    assert!(held >= 13_200 && held == peak, "{held} {peak}");
}

#[test]
fn shapes_types_and_devices_that_do_not_fit_are_refused() {
    let (cpu, other) = (Device::cpu(1).unwrap(), Device::cpu(1).unwrap());
    let (a, b, mut c) = (z(&cpu, &[2, 3]), z(&cpu, &[4, 5]), z(&cpu, &[2, 5]));
    let ids = cpu.tensor(&[0_u32, 1, 2, 3], [2, 2]).unwrap();
    let matmul = |a: &Tensor, b: &Tensor, c: &mut Tensor| {
        let (a, b, c) = (a.view(), b.view(), c.view_mut());
        cpu.run(Op::MatMul {
            a,
            a_t: false,
            b,
            b_t: false,
            c,
            accumulate: false,
            scales: [1.0; 2],
            fuse: Fuse::None,
        })
    };
    refused(matmul(&a, &b, &mut c), &["matmul", "[2, 3]", "[4, 5]"]);
    refused(matmul(&z(&cpu, &[2, 4]), &b, &mut z(&cpu, &[5, 2])), &["matmul", "[5, 2]", "[2, 5]"]);
    refused(matmul(&ids, &b, &mut c), &["matmul", "f32", "u32"]);
    refused(matmul(&z(&other, &[2, 4]), &b, &mut c), &["matmul", "is on cpu"]);
    let (short, long) = (z(&cpu, &[4]), z(&cpu, &[6, 5]));
    for bad in 0..5 {
        let (a, mut slope) = (z(&cpu, &[2, 4]), z(&cpu, &[6, 5]));
        let bias = z(&cpu, &[5]);
        let fuse = match bad {
            4 => Fuse::Add { residual: long.view() },
            0 => Fuse::Bias(short.view()),
            1 => Fuse::BiasGelu { gelu: Gelu::Tanh, bias: bias.view(), slope: Some(slope.view_mut()) },
            2 => Fuse::BiasAdd { bias: bias.view(), residual: long.view() },
            _ => Fuse::Times { factor: long.view() },
        };
        let (a, b, c) = (a.view(), b.view(), c.view_mut());
        let wrong = if bad == 0 { "[4]" } else { "[6, 5]" };
        refused(
            cpu.run(Op::MatMul { a, a_t: false, b, b_t: false, c, accumulate: true, scales: [1.0; 2], fuse }),
            &["matmul", wrong],
        );
    }

    let mut half = cpu.empty(DType::F16, 6).unwrap();
    refused(cpu.run(Op::Fill { value: 1.0, y: half.view_mut() }), &["fill", "f32", "f16"]);
    refused(cpu.run(Op::Cast { x: b.view(), y: half.view_mut() }), &["cast", "[4, 5]", "[6]"]);
    refused(cpu.run(Op::Cast { x: ids.view(), y: z(&cpu, &[4]).view_mut() }), &["cast", "u32"]);
    refused(
        cpu.run(Op::Cast { x: half.view(), y: cpu.empty(DType::Bf16, 6).unwrap().view_mut() }),
        &["cast", "bf16"],
    );
    let mut wrong = z(&cpu, &[4]);
    refused(
        cpu.run(Op::SumRows { x: a.view(), y: wrong.view_mut(), accumulate: false }),
        &["sum_rows", "[4]", "[3]"],
    );
    refused(
        cpu.run(Op::SumSquares { x: a.view(), partials: wrong.view_mut() }),
        &["sum_squares", "[4]", "[1]"],
    );

    let (gain, four) = (z(&cpu, &[3]), z(&cpu, &[4]));
    let (mut y, mut stats) = (z(&cpu, &[2, 3]), z(&cpu, &[2, 2]));
    let norm = Norm { kind: NormKind::Layer, eps: 1e-5 };
    let (x, bias) = (a.view(), Some(gain.view()));
    let y_ = y.view_mut();
    refused(
        cpu.run(Op::Norm { norm, x, gain: four.view(), bias, y: y_, stats: stats.view_mut() }),
        &["norm", "[4]", "[3]"],
    );
    let mut bad = z(&cpu, &[3]);
    refused(
        cpu.run(Op::Norm { norm, x, gain: gain.view(), bias, y: y.view_mut(), stats: bad.view_mut() }),
        &["norm", "[3]", "[4]"],
    );
    let (gain, stats_) = (gain.view(), stats.view());
    let (dy, residual) = (b.view(), None);
    refused(
        cpu.run(Op::NormInput { norm, x, gain, stats: stats_, dy, residual, dx: y.view_mut() }),
        &["norm_input", "[4, 5]", "[2, 3]"],
    );
    let (d_gain, d_bias) = (wrong.view_mut(), Some(bad.view_mut()));
    let op = Op::NormWeight { x, stats: stats_, dy: x, d_gain, d_bias, accumulate: false };
    refused(cpu.run(op), &["norm_weight", "[4]", "[3]"]);
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (qkv, mut y, mut lse) = (z(&cpu, &[2, 3, 12]), z(&cpu, &[2, 3, 4]), z(&cpu, &[2, 2, 3]));
    for (query, kv) in [(0, 0), (3, 3), (4, 0), (4, 3), (0, 1), (usize::MAX, 1), (1, usize::MAX)] {
        let heads = Heads { query, kv };
        let op = Op::Attention {
            heads,
            mask: Mask::default(),
            qkv: qkv.view(),
            y: y.view_mut(),
            lse: lse.view_mut(),
        };
        assert_eq!(op.flops(), 2 * 2 * 6 * 4 * 2);
        refused(cpu.run(op), &["attention", &format!("{query} heads"), &format!("{kv} heads"), "width of 4"]);
    }
    for (query, kv) in [(4, 4), (2, 1), (1, 1)] {
        let heads = Heads { query, kv };
        let op = Op::Attention {
            heads,
            mask: Mask::default(),
            qkv: qkv.view(),
            y: y.view_mut(),
            lse: lse.view_mut(),
        };
        refused(cpu.run(op), &["attention", if query == 2 { "[2, 3, 8]" } else { "[2, 2, 3]" }]);
    }
    let flat = z(&cpu, &[6, 12]);
    let op = Op::Attention {
        heads: Heads::equal(2),
        mask: Mask::default(),
        qkv: flat.view(),
        y: y.view_mut(),
        lse: lse.view_mut(),
    };
    refused(cpu.run(op), &["attention", "[6, 12]"]);
    // Costs are computed without a panic also for an op with invalid shapes.
    let mut vector = z(&cpu, &[24]);
    let op = Op::Attention {
        heads: Heads::equal(2),
        mask: Mask::default(),
        qkv: flat.view(),
        y: vector.view_mut(),
        lse: lse.view_mut(),
    };
    assert!(op.flops() < 1000 && op.bytes() > 0);
    refused(cpu.run(op), &["attention", "[24]"]);
    let (y_, dy, short) = (z(&cpu, &[2, 3, 4]), z(&cpu, &[2, 2, 4]), z(&cpu, &[5]));
    let mut d_qkv = z(&cpu, &[2, 3, 12]);
    let (q, l) = (qkv.view(), lse.view());
    let op = Op::AttentionGrad {
        heads: Heads::equal(2),
        mask: Mask::default(),
        qkv: q,
        y: y_.view(),
        lse: l,
        dy: dy.view(),
        d_qkv: d_qkv.view_mut(),
    };
    refused(cpu.run(op), &["attention_grad", "[2, 2, 4]", "[6, 4]"]);
    let op = Op::AttentionGrad {
        heads: Heads::equal(2),
        mask: Mask::default(),
        qkv: q,
        y: y_.view(),
        lse: short.view(),
        dy: y_.view(),
        d_qkv: d_qkv.view_mut(),
    };
    refused(cpu.run(op), &["attention_grad", "[5]", "[2, 2, 3]"]);
    for past in [3, usize::MAX] {
        let (mut k, mut v) = (z(&cpu, &[2, 5, 4]), z(&cpu, &[2, 5, 4]));
        let (keys, values) = (k.view_mut(), v.view_mut());
        let op = Op::AttentionCached {
            heads: Heads::equal(2),
            past,
            mask: Mask::default(),
            qkv: q,
            keys,
            values,
            y: y.view_mut(),
            lse: None,
        };
        refused(cpu.run(op), &["attention_cached", "[2, 5, 4]"]);
        let (mut k, mut v) = (z(&cpu, &[2, 5, 4]), z(&cpu, &[2, 6, 4]));
        let op = Op::AttentionCachedGrad {
            heads: Heads::equal(2),
            past: 2,
            mask: Mask::default(),
            qkv: q,
            keys: y_.view(),
            values: y_.view(),
            y: y_.view(),
            lse: l,
            dy: y_.view(),
            d_qkv: d_qkv.view_mut(),
            d_keys: k.view_mut(),
            d_values: v.view_mut(),
        };
        refused(cpu.run(op), &["attention_cached_grad", "[2, 3, 4]", "[2, 5, 4]"]);
    }
}

#[test]
fn caches_of_grouped_queries_have_the_width_of_the_keys() {
    let cpu = Device::cpu(1).unwrap();
    let heads = Heads { query: 4, kv: 2 };
    let (qkv, mut y) = (z(&cpu, &[2, 3, 16]), z(&cpu, &[2, 3, 8]));
    for (width, fits) in [(4, true), (8, false)] {
        let (mut keys, mut values) = (z(&cpu, &[2, 3, width]), z(&cpu, &[2, 3, width]));
        let (keys, values) = (keys.view_mut(), values.view_mut());
        let op = Op::AttentionCached {
            heads,
            past: 0,
            mask: Mask::default(),
            qkv: qkv.view(),
            keys,
            values,
            y: y.view_mut(),
            lse: None,
        };
        // Keys and values are read once for each sequence, not once for each head of queries.
        assert_eq!(op.bytes(), 4 * (96 + 48 + 2 * 24));
        if fits {
            cpu.run(op).unwrap();
        } else {
            refused(cpu.run(op), &["attention_cached", "[2, 3, 8]", "[2, 3, 4]"]);
        }
    }
}

fn rotary(table: &Tensor, start: usize) -> Rotary<'_> {
    Rotary { table: table.view(), positions: TokenPositions::From { start, documents: None } }
}

#[test]
fn heads_that_do_not_join_or_split_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (good, heads) = (z(&cpu, &[5, 4]), Heads { query: 2, kv: 1 });
    // Two sequences of three tokens, heads of width 5.
    let shapes = [[2, 3, 10], [2, 3, 5], [2, 3, 5], [2, 3, 20]];
    let mut tensors = shapes.map(|dims| z(&cpu, &dims));
    let mut check = |heads: Heads, rotary: Option<Rotary<'_>>, parts: &[&str]| {
        let [q, k, v, qkv] = &mut tensors;
        let (q_, k_, v_, to) = (q.view(), k.view(), v.view(), qkv.view_mut());
        refused(
            cpu.run(Op::JoinHeads { heads, rotary, q: q_, k: k_, v: v_, qkv: to }),
            &[&["join_heads"], parts].concat(),
        );
        let (d_qkv, dq, dk, dv) = (qkv.view(), q.view_mut(), k.view_mut(), v.view_mut());
        refused(
            cpu.run(Op::SplitHeads { heads, rotary, d_qkv, dq, dk, dv }),
            &[&["split_heads"], parts].concat(),
        );
    };
    check(Heads { query: 2, kv: 0 }, None, &["2 heads", "0 heads", "width of 10"]);
    check(Heads { query: 3, kv: 3 }, None, &["3 heads", "width of 10"]);
    check(Heads { query: 2, kv: 2 }, None, &["[2, 3, 20]", "[2, 3, 30]"]);
    check(heads, Some(rotary(&good, 3)), &["[5, 4]", "[6, 4]"]);
    check(heads, Some(rotary(&good, usize::MAX)), &["[5, 4]"]);
    for (cols, expected) in [(3, "[3, 2]"), (6, "[3, 4]")] {
        let table = z(&cpu, &[5, cols]);
        check(heads, Some(rotary(&table, 0)), &[&format!("[5, {cols}]"), expected]);
    }
    let ids = cpu.tensor(&[0_u32; 20], [5, 4]).unwrap();
    check(heads, Some(rotary(&ids, 0)), &["f32", "u32"]);
    for wrong in 0..4 {
        let mut tensors = shapes.map(|dims| z(&cpu, &dims));
        tensors[wrong] = z(&cpu, &[2, 2, shapes[wrong][2]]);
        let [q, k, v, qkv] = &mut tensors;
        let found = format!("[2, 2, {}]", shapes[wrong][2]);
        let (q_, k_, v_, to) = (q.view(), k.view(), v.view(), qkv.view_mut());
        let join = Op::JoinHeads { heads, rotary: None, q: q_, k: k_, v: v_, qkv: to };
        refused(cpu.run(join), &["join_heads", if wrong == 0 { "[2, 2, 20]" } else { &found }]);
        let (d_qkv, dq, dk, dv) = (qkv.view(), q.view_mut(), k.view_mut(), v.view_mut());
        let split = Op::SplitHeads { heads, rotary: None, d_qkv, dq, dk, dv };
        refused(cpu.run(split), &["split_heads", if wrong == 0 { "[2, 2, 20]" } else { &found }]);
    }
}

#[test]
fn gates_and_optional_biases_that_do_not_fit_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (mut a, mut b, mut short) = (z(&cpu, &[2, 3]), z(&cpu, &[6]), z(&cpu, &[5]));
    let op = Op::SwiGlu { gate: a.view(), up: short.view(), y: b.view_mut() };
    refused(cpu.run(op), &["swiglu", "[5]", "[2, 3]"]);
    let op = Op::SwiGlu { gate: a.view(), up: b.view(), y: short.view_mut() };
    refused(cpu.run(op), &["swiglu", "[5]", "[2, 3]"]);
    let op = Op::SwiGluGrad { gate: a.view_mut(), up: b.view_mut(), dy: short.view_mut() };
    refused(cpu.run(op), &["swiglu_grad", "[5]", "[2, 3]"]);
    let op = Op::SwiGluGrad { gate: a.view_mut(), up: short.view_mut(), dy: b.view_mut() };
    refused(cpu.run(op), &["swiglu_grad", "[5]", "[2, 3]"]);

    let norm = Norm { kind: NormKind::Rms, eps: 1e-6 };
    let (x, gain, mut stats, mut y) = (z(&cpu, &[2, 3]), z(&cpu, &[3]), z(&cpu, &[2, 2]), z(&cpu, &[2, 3]));
    let (bias, stats_) = (Some(short.view()), stats.view_mut());
    let op = Op::Norm { norm, x: x.view(), gain: gain.view(), bias, y: y.view_mut(), stats: stats_ };
    refused(cpu.run(op), &["norm", "[5]", "[3]"]);
    let mut d_gain = z(&cpu, &[3]);
    let (d_gain, d_bias) = (d_gain.view_mut(), Some(short.view_mut()));
    let op =
        Op::NormWeight { x: x.view(), stats: stats.view(), dy: x.view(), d_gain, d_bias, accumulate: false };
    refused(cpu.run(op), &["norm_weight", "[5]", "[3]"]);
}

#[test]
fn embeddings_and_ids_that_do_not_fit_are_refused() {
    let cpu = Device::cpu(1).unwrap();
    let (ids, table, places) =
        (cpu.tensor(&[0_u32, 1, 2, 9], [2, 2]).unwrap(), z(&cpu, &[5, 3]), z(&cpu, &[4, 3]));
    let (mut out, mut dy_out) = (z(&cpu, &[2, 2, 3]), z(&cpu, &[2, 2, 3]));
    let mut embed = |start: usize, ids: &Tensor, places: &Tensor| {
        let (tokens, tokens_table, positions_table) = (ids.view(), table.view(), Some(places.view()));
        cpu.run(Op::Embed {
            tokens,
            first: None,
            positions: TokenPositions::From { start, documents: None },
            tokens_table,
            positions_table,
            y: out.view_mut(),
        })
    };
    refused(embed(0, &ids, &places), &["embed", "9", "position 3", "5"]);
    refused(embed(3, &ids, &places), &["embed", "[4, 3]", "[5, 3]"]);
    refused(embed(usize::MAX, &ids, &places), &["embed", "[4, 3]"]);
    refused(embed(0, &places, &places), &["embed", "u32", "f32"]);
    refused(embed(0, &ids, &z(&cpu, &[4, 2])), &["embed", "[4, 2]"]);
    let (mut d_table, mut d_places, dy) = (z(&cpu, &[5, 3]), z(&cpu, &[1, 3]), z(&cpu, &[2, 2, 3]));
    let (tokens, d_tokens_table, d_positions_table) =
        (ids.view(), d_table.view_mut(), Some(d_places.view_mut()));
    refused(
        cpu.run(Op::EmbedGrad {
            tokens,
            first: None,
            positions: TokenPositions::From { start: 0, documents: None },
            dy: dy.view(),
            d_tokens_table,
            d_positions_table,
        }),
        &["embed_grad", "[1, 3]", "[2, 3]"],
    );
    // Without positions, only the table of tokens must fit.
    let (tokens, d_tokens_table) = (ids.view(), places.view());
    let op = Op::Embed {
        tokens,
        first: None,
        positions: TokenPositions::From { start: 9, documents: None },
        tokens_table: d_tokens_table,
        positions_table: None,
        y: dy_out.view_mut(),
    };
    refused(cpu.run(op), &["embed", "9", "position 3", "4"]);
    let (tokens, d_tokens_table) = (ids.view(), d_places.view_mut());
    let op = Op::EmbedGrad {
        tokens,
        first: None,
        positions: TokenPositions::From { start: 0, documents: None },
        dy: dy.view(),
        d_tokens_table,
        d_positions_table: None,
    };
    refused(cpu.run(op), &["embed_grad", "1"]);

    let (mut logits, mut losses) = (z(&cpu, &[4, 9]), z(&cpu, &[4]));
    let (x, targets) = (logits.view_mut(), ids.view());
    refused(
        cpu.run(Op::CrossEntropy {
            logits: x,
            targets,
            weights: None,
            losses: losses.view_mut(),
            grad_scale: None,
        }),
        &["cross_entropy", "9"],
    );
    let (x, targets) = (logits.view_mut(), ids.view().part(0, 3).unwrap());
    refused(
        cpu.run(Op::CrossEntropy {
            logits: x,
            targets,
            weights: None,
            losses: losses.view_mut(),
            grad_scale: None,
        }),
        &["cross_entropy", "[3]", "[4]"],
    );
}

#[test]
fn costs() {
    let cpu = Device::cpu(1).unwrap();
    let (a, b, mut c, bias) = (z(&cpu, &[3, 2]), z(&cpu, &[3, 5]), z(&cpu, &[2, 5]), z(&cpu, &[5]));
    for (accumulate, fused, bytes) in [(false, false, 31), (true, false, 41), (false, true, 36)] {
        let fuse = if fused { Fuse::Bias(bias.view()) } else { Fuse::None };
        let op = Op::MatMul {
            a: a.view(),
            a_t: true,
            b: b.view(),
            b_t: false,
            c: c.view_mut(),
            accumulate,
            scales: [1.0; 2],
            fuse,
        };
        assert_eq!((op.flops(), op.bytes()), (2 * 2 * 3 * 5, bytes * 4));
    }
    let mut half = cpu.empty(DType::F16, 10).unwrap();
    let op = Op::Cast { x: c.view(), y: half.view_mut() };
    assert_eq!((op.flops(), op.bytes()), (0, 60));
    let (qkv, dy) = (z(&cpu, &[2, 4, 24]), z(&cpu, &[2, 4, 8]));
    let (mut y, mut d_qkv) = (z(&cpu, &[2, 4, 8]), z(&cpu, &[2, 4, 24]));
    let lse = z(&cpu, &[2, 2, 4]);
    let (q, l) = (qkv.view(), lse.view());
    let op = Op::AttentionGrad {
        heads: Heads::equal(2),
        mask: Mask::default(),
        qkv: q,
        y: dy.view(),
        lse: l,
        dy: dy.view(),
        d_qkv: d_qkv.view_mut(),
    };
    // Five products over the 10 pairs of query and key in each of two sequences.
    assert_eq!((op.flops(), op.bytes()), (5 * 2 * 10 * 8 * 2, 4 * (192 + 64 + 16 + 64 + 192)));
    // Where documents begin is read too; the operations are counted as if there were one.
    let starts = cpu.tensor(&[0_u32; 8], [2, 4]).unwrap();
    let op = Op::AttentionGrad {
        heads: Heads::equal(2),
        mask: Mask { documents: Some(starts.view()), ..Mask::default() },
        qkv: q,
        y: dy.view(),
        lse: l,
        dy: dy.view(),
        d_qkv: d_qkv.view_mut(),
    };
    assert_eq!((op.flops(), op.bytes()), (5 * 2 * 10 * 8 * 2, 4 * (192 + 64 + 16 + 64 + 192 + 8)));
    // Decoding token by token has the same total cost as the whole pass.
    let (mut k, mut v) = (z(&cpu, &[2, 4, 8]), z(&cpu, &[2, 4, 8]));
    let mut total = 0;
    for past in 0..4 {
        let (q, y) = (qkv.view().part(0, [2, 1, 24]).unwrap(), y.view_mut().part(0, [2, 1, 8]).unwrap());
        total += Op::AttentionCached {
            heads: Heads::equal(2),
            past,
            mask: Mask::default(),
            qkv: q,
            keys: k.view_mut(),
            values: v.view_mut(),
            y,
            lse: None,
        }
        .flops();
    }
    // Queries and keys of two sequences of four tokens are rotated, with one table for both sequences.
    let (rotated, heads, parts) = (z(&cpu, &[6, 2]), Heads { query: 4, kv: 1 }, [16, 4, 4]);
    let [q_part, k_part, v_part] = parts.map(|width| z(&cpu, &[2, 4, width]));
    let rotary = Some(rotary(&rotated, 2));
    let (q_, k_, v_) = (q_part.view(), k_part.view(), v_part.view());
    let op = Op::JoinHeads { heads, rotary, q: q_, k: k_, v: v_, qkv: d_qkv.view_mut() };
    assert_eq!((op.flops(), op.bytes()), (3 * 8 * 5 * 2, 4 * (2 * 192 + 4 * 2)));
    let mut lse = z(&cpu, &[2, 2, 4]);
    assert_eq!(
        total,
        Op::Attention {
            heads: Heads::equal(2),
            mask: Mask::default(),
            qkv: q,
            y: y.view_mut(),
            lse: lse.view_mut()
        }
        .flops()
    );
}
