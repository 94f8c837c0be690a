//! Map programs: the interpreter against [`Program::eval`], bit for bit, and programs that must be rejected.
#![expect(clippy::unwrap_used, reason = "a test fails where it panics")]

use farflung_tensor::{Device, Op, Program, ProgramBuilder, Result, TensorError};

/// Programs that together use all instructions.
fn programs() -> Vec<Program> {
    type Binary =
        fn(&mut ProgramBuilder, farflung_tensor::Value, farflung_tensor::Value) -> farflung_tensor::Value;
    let binary: [Binary; 6] = [
        ProgramBuilder::add,
        ProgramBuilder::sub,
        ProgramBuilder::mul,
        ProgramBuilder::div,
        ProgramBuilder::max,
        ProgramBuilder::min,
    ];
    let mut all: Vec<Program> = binary
        .iter()
        .map(|f| {
            let mut b = ProgramBuilder::new();
            let (x, y) = (b.read(0), b.load(0));
            let z = f(&mut b, x, y);
            b.store(0, z);
            b.build().unwrap()
        })
        .collect();
    let mut b = ProgramBuilder::new();
    let (x, s, half) = (b.read(1), b.scalar(1), b.constant(0.5));
    let (root, size, sign) = (b.sqrt(x), b.abs(x), b.sign(x));
    let scaled = b.mul(s, half);
    for (i, v) in [root, size, sign, scaled].into_iter().enumerate() {
        b.store(i as u16, v);
    }
    all.push(b.build().unwrap());
    // Two and three updated buffers. All are loaded before any is stored.
    for buffers in [2, 3] {
        let mut b = ProgramBuilder::new();
        let loaded: Vec<_> = (0..buffers).map(|i| b.load(i)).collect();
        for i in 0..buffers {
            b.store(i, loaded[usize::from((i + 1) % buffers)]);
        }
        all.push(b.build().unwrap());
    }
    all
}

#[test]
fn the_interpreter_gives_the_bits_of_eval() {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE / 8.0,
        f32::MAX,
        1e-30,
        3.25,
    ];
    for len in [0, 1, 7, 255, 256, 257, (1 << 15) + 300] {
        // Columns 0 and 1 have all pairs of special values, because column 1 changes only every 11 elements.
        let column = |k: usize| -> Vec<f32> {
            (0..len).map(|i| special[(i / [1, 11, 3, 5, 2, 7][k] + k) % 11]).collect()
        };
        let (reads, writes) = ([column(0), column(2)], [column(1), column(3), column(4), column(5)]);
        for program in programs() {
            let scalars = &[0.1, 0.3][..program.scalars()];
            for threads in [1, 2, 3] {
                let cpu = Device::cpu(threads).unwrap();
                let r: Vec<_> =
                    reads.iter().take(program.reads()).map(|v| cpu.tensor(v, len).unwrap()).collect();
                let mut w: Vec<_> =
                    writes.iter().take(program.writes()).map(|v| cpu.tensor(v, len).unwrap()).collect();
                let views: Vec<_> = r.iter().map(farflung_tensor::Tensor::view).collect();
                let mut to: Vec<_> = w.iter_mut().map(farflung_tensor::Tensor::view_mut).collect();
                cpu.run(Op::Map { program: &program, scalars, reads: &views, writes: &mut to }).unwrap();
                let got: Vec<Vec<f32>> = w.iter().map(|t| t.to_vec().unwrap()).collect();
                for i in 0..len {
                    let at: Vec<f32> = reads.iter().map(|r| r[i]).collect();
                    let mut want: Vec<f32> = writes.iter().take(program.writes()).map(|w| w[i]).collect();
                    program.eval(scalars, &at, &mut want);
                    for (got, want) in got.iter().zip(want) {
                        // IEEE 754 does not specify the payload of a NaN.
                        let same = got[i].to_bits() == want.to_bits() || got[i].is_nan() && want.is_nan();
                        assert!(same, "{:?}: {} for {want}", program.instrs(), got[i]);
                    }
                }
            }
        }
    }
}

fn eval(
    a: f32,
    b: f32,
    f: impl Fn(&mut ProgramBuilder, farflung_tensor::Value, farflung_tensor::Value) -> farflung_tensor::Value,
) -> f32 {
    let mut builder = ProgramBuilder::new();
    let (x, y) = (builder.read(0), builder.read(1));
    let z = f(&mut builder, x, y);
    builder.store(0, z);
    let mut out = [0.0];
    builder.build().unwrap().eval(&[], &[a, b], &mut out);
    out[0]
}

#[test]
fn rules_for_nan_and_zero() {
    let nan = f32::NAN;
    assert!(eval(nan, 1.0, ProgramBuilder::max).is_nan() && eval(nan, 1.0, ProgramBuilder::min).is_nan());
    assert_eq!((eval(1.0, nan, ProgramBuilder::max), eval(1.0, nan, ProgramBuilder::min)), (1.0, 1.0));
    assert_eq!((eval(2.0, 3.0, ProgramBuilder::max), eval(2.0, 3.0, ProgramBuilder::min)), (3.0, 2.0));
    for (x, sign) in [(0.0_f32, 0.0_f32), (-0.0, -0.0), (1e-40, 1.0), (-7.0, -1.0), (f32::NEG_INFINITY, -1.0)]
    {
        assert_eq!(eval(x, 0.0, |b, x, _| b.sign(x)).to_bits(), sign.to_bits());
    }
    assert!(eval(nan, 0.0, |b, x, _| b.sign(x)).is_nan());
    // 0 and -0 are different constants.
    let down = eval(1.0, 0.0, |b, x, _| {
        let zero = b.constant(0.0);
        let minus = b.constant(-0.0);
        assert_ne!(zero, minus);
        b.div(x, minus)
    });
    assert_eq!(down.to_bits(), f32::NEG_INFINITY.to_bits());
}

fn build(write: impl FnOnce(&mut ProgramBuilder)) -> Result<Program> {
    let mut b = ProgramBuilder::new();
    write(&mut b);
    b.build()
}

#[test]
fn bad_programs_are_refused() {
    let bad = |r: Result<Program>, wanted: &str| {
        let error = r.unwrap_err();
        assert!(matches!(error, TensorError::BadProgram { .. }), "{error:?}");
        assert_eq!(error.to_string(), format!("map program: {wanted}"));
    };
    let read = build(|b| {
        b.read(4);
    });
    bad(read, "number of read buffers is 5, expected at most 4");
    let updated = build(|b| {
        let x = b.read(0);
        b.store(u16::MAX, x);
    });
    bad(updated, "number of updated buffers is 65536, expected at most 4");
    let long = build(|b| {
        let mut x = b.read(0);
        for _ in 0..64 {
            x = b.add(x, x);
        }
        b.store(0, x);
    });
    bad(long, "number of instructions is 65, expected at most 64");
    let mut other = ProgramBuilder::new();
    let x = other.read(0);
    let foreign = other.abs(x);
    let operand = build(|b| {
        let y = b.abs(foreign);
        b.store(0, y);
    });
    bad(operand, "index of an operand is 1, expected below 0");
    bad(build(|b| b.store(0, foreign)), "index of an operand is 1, expected below 0");

    let cpu = Device::cpu(1).unwrap();
    let program = build(|b| {
        let (x, s) = (b.read(0), b.scalar(0));
        let y = b.mul(x, s);
        b.store(0, y);
    })
    .unwrap();
    assert_eq!((program.reads(), program.writes(), program.scalars(), program.flops()), (1, 1, 1, 1));
    let (x, short, mut y) = (cpu.zeros(5).unwrap(), cpu.zeros(4).unwrap(), cpu.zeros(5).unwrap());
    let mut run = |scalars: &[f32], reads: &[_]| {
        cpu.run(Op::Map { program: &program, scalars, reads, writes: &mut [y.view_mut()] })
    };
    run(&[1.0], &[x.view()]).unwrap();
    let error = run(&[], &[x.view()]).unwrap_err().to_string();
    assert_eq!(error, "map program: number of scalars is 0, expected exactly 1");
    assert!(run(&[1.0], &[]).is_err());
    let message = run(&[1.0], &[short.view()]).unwrap_err().to_string();
    assert!(message.contains("map") && message.contains("[4]") && message.contains("[5]"), "{message}");
    assert!(
        cpu.run(Op::Map { program: &program, scalars: &[1.0], reads: &[x.view()], writes: &mut [] }).is_err()
    );
}
