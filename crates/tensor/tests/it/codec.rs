//! The device codecs against plain host arithmetic that follows the text of the wire format: bytes, encoding
//! errors, decoded values, and rejected inputs. The tests run on the first adapter; in CI this is a software
//! rasteriser.
#![cfg(feature = "wgpu")]
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_base::Philox;
use farflung_tensor::{BlockCodec, BlockMask, Code, DType, Device, Pattern};

/// Sums runs of 1024 terms in 32 lanes, then the lanes in a tree.
fn sum(terms: &[f32]) -> f32 {
    let mut total = 0.0;
    for run in terms.chunks(1024) {
        let mut lanes = [0.0_f32; 32];
        for row in run.chunks(32) {
            row.iter().zip(&mut lanes).for_each(|(term, lane)| *lane += term);
        }
        for width in [16, 8, 4, 2, 1] {
            (0..width).for_each(|j| lanes[j] += lanes[j + width]);
        }
        total += lanes[0];
    }
    total
}

/// Returns the scale of a block and the factor of its elements; `None` for a block of zeros.
fn fit(code: Code, v: &[f32]) -> Option<(f32, f32)> {
    let m = v.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    if m < 2.0_f32.powi(-100) {
        return None;
    }
    let count = v.len() as f32;
    let exponent = ((m.to_bits() >> 23).cast_signed() - 127).clamp(-126, 126);
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    match code {
        Code::SignL1 => {
            let e = if m < power(100) { 0 } else { exponent };
            let terms: Vec<f32> = v.iter().map(|v| (v * power(-e)).abs()).collect();
            Some(((sum(&terms) / count * power(e)).min(m), 0.0))
        }
        Code::SignL2 => {
            let terms: Vec<f32> = v.iter().map(|v| (v * power(-exponent)).powi(2)).collect();
            Some((((sum(&terms) / count).sqrt() * power(exponent)).min(m), 0.0))
        }
        Code::Int4 | Code::Int8 => {
            let q = if code == Code::Int4 { 7.0 } else { 127.0 };
            let scale = f32::from_bits(((m * (1.0 / q)).to_bits() + 0xffff) & 0xffff_0000);
            if q * scale == f32::INFINITY {
                return Some((f32::from_bits((f32::MAX / q).to_bits() & 0xffff_0000), q / m));
            }
            Some((scale, 1.0 / scale))
        }
    }
}

/// Returns the body of `v`, the encoding error, and the decoded values; `None` if a value is not finite.
fn encode(codec: BlockCodec, v: &[f32]) -> Option<(Vec<u8>, Vec<f32>, Vec<f32>)> {
    let (code, width) = (codec.code(), codec.code().bits() as usize);
    let mut body = codec.parameters().to_vec();
    let mut decoded = Vec::new();
    if v.iter().any(|v| !v.is_finite()) {
        return None;
    }
    for v in v.chunks(codec.block() as usize) {
        let fit = fit(code, v);
        let scale = fit.map_or(0.0, |(scale, _)| scale);
        body.extend_from_slice(&scale.to_le_bytes()[4 - code.header()..]);
        let mut codes = vec![0_u8; v.len()];
        for (v, c) in v.iter().zip(&mut codes) {
            let Some((scale, factor)) = fit else {
                decoded.push(0.0);
                continue;
            };
            if width == 1 {
                *c = u8::from(v.is_sign_negative());
                decoded.push(scale.copysign(*v));
            } else {
                let integer = (v * factor).round_ties_even() as i8;
                *c = integer as u8 & (((1_u16 << width) - 1) as u8);
                decoded.push(f32::from(integer) * scale);
            }
        }
        // Full runs are stored as eight words of interleaved codes, the rest in order.
        let (runs, rest) =
            codes.split_at(if width == 8 { 0 } else { codes.len() / (256 / width) * (256 / width) });
        for run in runs.chunks(256 / width) {
            let mut words = [0_u32; 8];
            for (i, c) in run.iter().enumerate() {
                words[i % 8] |= u32::from(*c) << (width * (i / 8));
            }
            body.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        for codes in rest.chunks(8 / width) {
            body.push(codes.iter().enumerate().map(|(i, c)| c << (i * width)).sum());
        }
    }
    let lost = v.iter().zip(&decoded).map(|(v, d)| v - d).collect();
    Some((body, lost, decoded))
}

struct Bench {
    gpu: Device,
    cases: usize,
}

impl Bench {
    /// Encodes `x`, or `x` plus the residual `e`, from views that begin at element `at`, and decodes it again.
    fn compare(&mut self, codec: BlockCodec, x: &[f32], e: Option<&[f32]>, at: usize) {
        let (gpu, n) = (&self.gpu, x.len());
        let codecs = gpu.codecs().unwrap();
        let what = format!("{codec:?}, {n} from {at}, residual {}", e.is_some());
        let shifted = |x: &[f32]| gpu.tensor(&[&vec![7.0; at], x].concat(), at + n).unwrap();
        let (x_there, mut after) = (shifted(x), shifted(x));
        let before = shifted(e.unwrap_or(x));
        let mut out = gpu.tensor(&vec![u32::MAX; 1 + codec.words(n)], 1 + codec.words(n)).unwrap();
        let before = e.map(|_| before.view().part(at, n).unwrap());
        let lost = e.map(|_| after.view_mut().part(at, n).unwrap());
        let from = x_there.view().part(at, n).unwrap();
        codecs.encode(codec, from, before, lost, out.view_mut()).unwrap();
        let words: Vec<u32> = out.to_vec().unwrap();
        let v: Vec<f32> = e.map_or(x.to_vec(), |e| x.iter().zip(e).map(|(x, e)| x + e).collect());
        self.cases += 1;
        let Some((body, lost, decoded)) = encode(codec, &v) else {
            assert_eq!(words[0], 1, "{what}");
            return;
        };
        let found: Vec<u8> = words[1..].iter().flat_map(|w| w.to_le_bytes()).collect();
        let differs = found.iter().zip(&body).position(|(f, b)| f != b);
        assert_eq!((words[0], differs), (0, None), "{what}: {:?}", &v[..n.min(4)]);
        assert!(found[body.len()..].iter().all(|b| *b == 0));
        if e.is_some() {
            let found: Vec<f32> = after.view().part(at, n).unwrap().to_vec().unwrap();
            let differs = (0..n).find(|&i| found[i].to_bits() != lost[i].to_bits());
            assert_eq!(differs.map(|i| (i, v[i], found[i], lost[i])), None, "{what}");
        }
        let body = gpu.tensor(&words[1..], words.len() - 1).unwrap();
        let (verdict, found) = self.decode(codec, &body.view().to_vec().unwrap(), n, at);
        assert_eq!(verdict, 0, "{what}");
        let differs = (0..n).find(|&i| found[i].to_bits() != decoded[i].to_bits());
        assert_eq!(differs.map(|i| (i, found[i], decoded[i])), None, "{what}");
    }

    fn decode(&self, codec: BlockCodec, words: &[u32], n: usize, at: usize) -> (u32, Vec<f32>) {
        let body = self.gpu.tensor(words, words.len()).unwrap();
        let (mut y, mut verdict) = (self.gpu.zeros(at + n).unwrap(), self.gpu.empty(DType::U32, 1).unwrap());
        let to = y.view_mut().part(at, n).unwrap();
        self.gpu.codecs().unwrap().decode(codec, body.view(), to, verdict.view_mut()).unwrap();
        (verdict.to_vec::<u32>().unwrap()[0], y.view().part(at, n).unwrap().to_vec().unwrap())
    }
}

fn codecs() -> Vec<BlockCodec> {
    let forms = [
        (Code::SignL1, 4096),
        (Code::SignL2, 100),
        (Code::Int8, 256),
        (Code::Int8, 33),
        (Code::Int4, 128),
        (Code::Int4, 71),
    ];
    forms.map(|(code, block)| BlockCodec::new(code, block).unwrap()).to_vec()
}

#[test]
fn bytes_residuals_and_values_are_those_of_the_wire_format() {
    let mut bench = Bench { gpu: Device::wgpu(0).unwrap(), cases: 0 };
    for codec in codecs() {
        for n in [0, 1, 31, 257, 1000, 9001] {
            for (stream, size) in [1e-41, 1e-38, 1e-30, 1e-3, 1.0, 3e4, 1e37].into_iter().enumerate() {
                let (mut x, mut e) = (vec![0.0; n], vec![0.0; n]);
                Philox::new(1, stream as u64).fill_normal(size, &mut x);
                Philox::new(2, stream as u64).fill_normal(size / 50.0, &mut e);
                let e = (stream % 2 == n % 2).then_some(&*e);
                bench.compare(codec, &x, e, if stream == 4 { 3 } else { 0 });
            }
        }
        for x in
            [vec![0.0; 300], vec![-0.0; 300], vec![f32::MAX; 300], vec![1.0, f32::MIN, f32::from_bits(1)]]
        {
            bench.compare(codec, &x, None, 0);
            bench.compare(codec, &x, Some(&vec![0.0; x.len()]), 0);
        }
        // One value at the threshold for blocks of zeros, among many subnormals.
        let mut x: Vec<f32> = (0..3000).map(|i| f32::from_bits(i * 2789)).collect();
        x[1500] = 2.0_f32.powi(-100);
        bench.compare(codec, &x, None, 0);
        bench.compare(codec, &x, Some(&x), 0);
        for (at, bad) in [(0, f32::NAN), (299, f32::INFINITY), (77, f32::NEG_INFINITY)] {
            let mut x = vec![1.0; 300];
            x[at] = bad;
            bench.compare(codec, &x, None, 0);
            bench.compare(codec, &vec![1.0; 300], Some(&x), 0);
        }
        bench.compare(codec, &[f32::MAX; 5], Some(&[f32::MAX; 5]), 0);
    }
    assert_eq!(bench.cases, 6 * (6 * 7 + 8 + 2 + 6 + 1));
}

/// Returns whether the wire format forbids this body: no encoder writes it.
fn refused(codec: BlockCodec, words: &[u32], n: usize) -> bool {
    let body: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let (width, header, block) =
        (codec.code().bits() as usize, codec.code().header(), codec.block() as usize);
    let mut at = 4;
    (0..n).step_by(block).any(|start| {
        let count = block.min(n - start);
        let (head, codes) = (&body[at..at + header], at + header);
        at = codes + (count * width).div_ceil(8);
        let codes = &body[codes..at];
        if head.iter().all(|b| *b == 0) {
            return codes.iter().any(|b| *b != 0);
        }
        let mut scale = [0; 4];
        scale[4 - header..].copy_from_slice(head);
        let scale = f32::from_le_bytes(scale);
        let used = count * width % 8;
        let padding = used != 0 && codes[codes.len() - 1] >> used != 0;
        match codec.code() {
            Code::SignL1 | Code::SignL2 => padding || !scale.is_finite() || scale < f32::MIN_POSITIVE,
            Code::Int4 => {
                let lowest = codes.iter().any(|b| b & 15 == 8 || b >> 4 == 8);
                padding || lowest || !(scale * 7.0).is_finite() || scale < 2.0_f32.powi(-116)
            }
            Code::Int8 => codes.contains(&0x80) || !(scale * 127.0).is_finite() || scale < 2.0_f32.powi(-116),
        }
    })
}

#[test]
fn what_no_encoder_writes_is_refused() {
    let bench = Bench { gpu: Device::wgpu(0).unwrap(), cases: 0 };
    let draws = Philox::new(3, 0);
    for codec in codecs() {
        let (n, mut both) = (301, [0; 2]);
        let mut x = vec![0.0; n];
        draws.fill_normal(1.0, &mut x);
        // Up to 71 zeros, from the start of the second block on if there is one: whole blocks, if these are
        // short.
        x[codec.block() as usize % n..].iter_mut().take(71).for_each(|x| *x = 0.0);
        let (mut body, ..) = encode(codec, &x).unwrap();
        body.resize(codec.words(n) * 4, 0);
        for case in 0..150 {
            let mut spoilt = body.clone();
            let [kind, at, with, _] = draws.block(1 << 20 | case);
            let at = 4 + at as usize % (codec.bytes(n) - 4);
            match kind % 3 {
                0 => spoilt[at] ^= 1 << (with % 8),
                1 => spoilt[at] = [0, 1, 0x7f, 0x80, 0xff][with as usize % 5],
                _ => spoilt[at..codec.bytes(n)].fill(with as u8),
            }
            let words: Vec<u32> =
                spoilt.chunks(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
            let wanted = refused(codec, &words, n);
            assert_eq!(
                bench.decode(codec, &words, n, 0).0,
                u32::from(wanted),
                "{codec:?} {case}: {kind} {at} {with}"
            );
            both[usize::from(wanted)] += 1;
        }
        assert!(both[0] > 0 && both[1] > 0, "{codec:?} {both:?}");
    }
}

#[test]
fn masks_are_drawn_gathered_and_put_back() {
    let gpu = Device::wgpu(0).unwrap();
    let codecs = gpu.codecs().unwrap();
    for pattern in [Pattern::Rolling, Pattern::Permuted, Pattern::Random] {
        for (len, stride, multiple) in
            [(1_u32, 1_u32, 1), (1000, 7, 1), (1001, 10, 16), (5000, 3, 128), (9, 4_000_000_000, 1)]
        {
            let key = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];
            let (draws, phase) =
                (Philox::new(key[0], key[1]), if pattern == Pattern::Random { 0 } else { stride / 3 * 2 });
            let all: Vec<u32> = (0..len.div_ceil(stride))
                .map(|j| {
                    let drawn = draws.below(u64::from(j), u64::from(stride));
                    let within = match pattern {
                        Pattern::Rolling => u64::from(phase),
                        Pattern::Permuted => (drawn + u64::from(phase)) % u64::from(stride),
                        Pattern::Random => drawn,
                    };
                    u64::from(j) * u64::from(stride) + within
                })
                .filter(|i| *i < u64::from(len))
                .map(|i| i as u32)
                .collect();
            let taken = all.len() as u32;
            let (kept, gap) = (taken - taken % multiple, taken / 3);
            let mut wanted = all.clone();
            wanted.drain(gap as usize..(gap + taken - kept) as usize);
            let mask = BlockMask { pattern, stride, phase, kept, taken, gap, stream: key };
            let mut indices = gpu.empty(DType::U32, kept as usize).unwrap();
            codecs.mask(mask, indices.view_mut()).unwrap();
            assert_eq!(indices.to_vec::<u32>().unwrap(), wanted, "{mask:?}");

            let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let x = gpu.tensor(&values, values.len()).unwrap();
            let (mut there, mut back) = (gpu.zeros(wanted.len()).unwrap(), gpu.zeros(values.len()).unwrap());
            codecs.gather(x.view(), indices.view(), there.view_mut()).unwrap();
            codecs.put(there.view(), indices.view(), back.view_mut()).unwrap();
            let mut expected = vec![0.0; values.len()];
            for i in wanted {
                expected[i as usize] = i as f32;
            }
            assert_eq!(back.to_vec::<f32>().unwrap(), expected, "{mask:?}");
        }
    }
}

#[test]
fn sums_keep_subnormals_and_say_what_is_not_finite() {
    let gpu = Device::wgpu(0).unwrap();
    let codecs = gpu.codecs().unwrap();
    let mut verdict = gpu.empty(DType::U32, 1).unwrap();
    for size in [0.0, 1e-44, 1e-39, 1e-37, 1e-20, 1.0, 1e38] {
        let (mut a, mut b) = (vec![0.0; 700], vec![0.0; 700]);
        Philox::new(1, 0).fill_normal(size, &mut a);
        Philox::new(2, 0).fill_normal(size / 3.0, &mut b);
        let (x, e) = (gpu.tensor(&a, 700).unwrap(), gpu.tensor(&b, 700).unwrap());
        let mut y = gpu.zeros(700).unwrap();
        codecs.sum(x.view(), e.view(), y.view_mut(), verdict.view_mut()).unwrap();
        let compare = |found: &[f32], wanted: &[f32]| {
            let differs = (0..700).find(|&i| found[i].to_bits() != wanted[i].to_bits());
            assert_eq!(differs.map(|i| (a[i], b[i], found[i], wanted[i])), None);
            u32::from(wanted.iter().any(|v| !v.is_finite()))
        };
        let wanted: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let refused = compare(&y.to_vec::<f32>().unwrap(), &wanted);
        assert_eq!(verdict.to_vec::<u32>().unwrap(), [refused]);
        codecs.difference(x.view(), e.view(), y.view_mut(), verdict.view_mut()).unwrap();
        let wanted: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        let refused = compare(&y.to_vec::<f32>().unwrap(), &wanted);
        assert_eq!(verdict.to_vec::<u32>().unwrap(), [refused]);
        codecs.finite(x.view(), verdict.view_mut()).unwrap();
        assert_eq!(verdict.to_vec::<u32>().unwrap(), [0]);
    }
    let x = gpu.tensor(&[1.0, f32::NAN], 2).unwrap();
    codecs.finite(x.view(), verdict.view_mut()).unwrap();
    assert_eq!(verdict.to_vec::<u32>().unwrap(), [1]);
}

/// Returns the indices of the `kept` largest magnitudes of each chunk; of equal ones, the first.
fn largest(x: &[f32], chunk: usize, kept: usize) -> Vec<u32> {
    let mut indices = Vec::new();
    for (c, part) in x.chunks(chunk).enumerate() {
        let mut order: Vec<usize> = (0..part.len()).collect();
        order.sort_by_key(|i| u32::MAX - part[*i].abs().to_bits());
        order.truncate(kept);
        order.sort_unstable();
        indices.extend(order.iter().map(|i| (c * chunk + i) as u32));
    }
    indices
}

#[test]
fn the_largest_of_a_vector_and_of_its_chunks_are_found_in_order() {
    let gpu = Device::wgpu(0).unwrap();
    let codecs = gpu.codecs().unwrap();
    let draws = Philox::new(9, 0);
    // Chunks for one workgroup and for several; some have a short chunk at the end.
    for (n, chunk, kept) in [
        (1, 1, 1),
        (300, 300, 7),
        (4096, 4096, 4096),
        (5000, 64, 4),
        (5000, 33, 40),
        (4500, 1, 1),
        (4097, 4097, 41),
        (20_011, 50_000, 1),
        (20_011, 20_011, 2500),
        (20_011, 20_011, 20_000),
        (20_011, 9000, 300),
        (18_005, 9000, 300),
    ] {
        for kind in 0..5 {
            let mut x = vec![0.0; n];
            draws.fill_normal([1.0, 1e-41, 1e37, 2.0, 0.0][kind], &mut x);
            if kind == 3 {
                // Many elements have the same magnitude, with equal or opposite signs.
                x = x.into_iter().map(f32::round).collect();
            }
            if kind == 2 {
                x[n / 2] = f32::NAN;
                x[n / 3] = f32::NEG_INFINITY;
            }
            let at = kind % 2;
            let there = gpu.tensor(&[&vec![7.0; at], &x[..]].concat(), at + n).unwrap();
            let wanted = largest(&x, chunk, kept);
            let mut indices = gpu.empty(DType::U32, wanted.len()).unwrap();
            let from = there.view().part(at, n).unwrap();
            codecs.largest(from, chunk, kept, indices.view_mut()).unwrap();
            assert_eq!(indices.to_vec::<u32>().unwrap(), wanted, "{n} {chunk} {kept} {kind}");
        }
    }
    let (x, mut indices) = (gpu.zeros(10).unwrap(), gpu.empty(DType::U32, 4).unwrap());
    let error = codecs.largest(x.view(), 5, 3, indices.view_mut()).unwrap_err();
    assert!(error.to_string().contains("largest"), "{error}");
}

/// Computes `(A X) A^T` of each square, or `(A^T X) A` if `inverse`.
fn squares(x: &[f32], a: &[f32], side: usize, inverse: bool) -> Vec<f32> {
    let a = |row: usize, column: usize| if inverse { a[column * side + row] } else { a[row * side + column] };
    let mut y = x.to_vec();
    for square in y.chunks_exact_mut(side * side) {
        let at = |i: usize| (i / side, i % side);
        let half: Vec<f32> = (0..side * side)
            .map(at)
            .map(|(row, column)| (0..side).fold(0.0, |sum, k| sum + a(row, k) * square[k * side + column]))
            .collect();
        for (i, y) in square.iter_mut().enumerate() {
            let (row, column) = at(i);
            *y = (0..side).fold(0.0, |sum, k| sum + half[row * side + k] * a(column, k));
        }
    }
    y
}

#[test]
fn squares_are_transformed_to_the_bit() {
    let gpu = Device::wgpu(0).unwrap();
    let codecs = gpu.codecs().unwrap();
    for (side, n) in [(1, 5), (3, 100), (8, 700), (20, 1000), (64, 4100)] {
        let mut a = vec![0.0; side * side];
        Philox::new(4, side as u64).fill_normal(0.3, &mut a);
        a[0] = 1e-17;
        let matrix = gpu.tensor(&a, [side, side]).unwrap();
        for size in [1e-43, 1e-41, 3e-38, 1e-36, 1e-30, 1e-22, 1.0, 1e35] {
            let mut x = vec![0.0; n];
            Philox::new(5, 0).fill_normal(size, &mut x);
            // Values of very different sizes, and many zeros, as in sparse data.
            x.iter_mut().step_by(3).for_each(|x| *x *= 1e-15);
            x.iter_mut().skip(1).step_by(3).for_each(|x| *x *= 0.0);
            let (there, mut y) = (gpu.tensor(&x, n).unwrap(), gpu.zeros(n).unwrap());
            for inverse in [false, true] {
                codecs.squares(there.view(), matrix.view(), inverse, y.view_mut()).unwrap();
                let (wanted, found) = (squares(&x, &a, side, inverse), y.to_vec::<f32>().unwrap());
                let differs = (0..n).find(|&i| found[i].to_bits() != wanted[i].to_bits());
                assert_eq!(differs.map(|i| (i, found[i], wanted[i])), None, "{side} {size:e} {inverse}");
            }
        }
    }
    let (x, matrix, mut y) = (gpu.zeros(8).unwrap(), gpu.zeros([2, 4]).unwrap(), gpu.zeros(8).unwrap());
    let error = codecs.squares(x.view(), matrix.view(), false, y.view_mut()).unwrap_err();
    assert!(error.to_string().contains("squares"), "{error}");
}

#[test]
fn the_host_has_codecs_of_its_own_and_operands_are_checked() {
    assert!(Device::cpu(1).unwrap().codecs().is_none());
    assert_eq!(BlockCodec::new(Code::Int8, 0), None);
    assert_eq!(BlockCodec::new(Code::Int8, (1 << 20) + 1), None);
    let gpu = Device::wgpu(0).unwrap();
    let codec = BlockCodec::new(Code::Int8, 256).unwrap();
    let x = gpu.zeros(100).unwrap();
    let mut out = gpu.empty(DType::U32, codec.words(100)).unwrap();
    let error = gpu.codecs().unwrap().encode(codec, x.view(), None, None, out.view_mut()).unwrap_err();
    assert!(error.to_string().contains("encode"), "{error}");
}
