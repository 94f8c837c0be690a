//! Weights on disk: round trips, comparison with the reference implementation, and invalid files.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use farflung_base::Philox;
use farflung_tensor::{Device, Shape, TensorError};
use farflung_zoo::weights::{
    Dtype, TensorData, TensorFile, TensorView, Weights, WriteOptions, write, write_tensors,
};
use farflung_zoo::{ModelSpec, Stage, ZooError, gpt2};
use serde_json::{Value, json};

fn tiny() -> ModelSpec {
    gpt2(2, 2, 8, 6, 11).unwrap()
}

fn write_tiny(folder: &Path, options: WriteOptions) {
    write(folder, &tiny(), options, |index, spec, out| {
        spec.fill(3, index, out);
        Ok::<(), ZooError>(())
    })
    .unwrap();
}

/// Reads all tensors as one list, in order.
fn read_all(weights: &mut Weights) -> Vec<f32> {
    let mut all = Vec::new();
    for spec in weights.spec().tensors() {
        let mut values = vec![0.0; spec.count()];
        weights.tensor(&spec.name, &mut values).unwrap();
        all.extend(values);
    }
    all
}

fn started() -> Vec<f32> {
    let mut all = Vec::new();
    for (index, spec) in tiny().tensors().iter().enumerate() {
        let mut values = vec![0.0; spec.count()];
        spec.fill(3, index, &mut values);
        all.extend(values);
    }
    all
}

#[test]
fn single_and_sharded_models_come_back() {
    let dir = tempfile::tempdir().unwrap();
    for shard_bytes in [None, Some(1), Some(3000), None] {
        write_tiny(dir.path(), WriteOptions { shard_bytes, ..WriteOptions::default() });
        let mut weights = Weights::open(dir.path()).unwrap();
        assert_eq!(*weights.spec(), tiny());
        assert_eq!(read_all(&mut weights), started(), "{shard_bytes:?}");
        let single = dir.path().join("model.safetensors").exists();
        assert_eq!(single, shard_bytes.is_none());
        assert_eq!(dir.path().join("model.safetensors.index.json").exists(), !single);
    }
    let leftovers = fs::read_dir(dir.path())
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().ends_with(".tmp"));
    assert_eq!(leftovers.count(), 0);
}

#[test]
fn what_a_stage_stores_is_what_it_loads() {
    let cpu = Device::cpu(1).unwrap();
    let stage = Stage::whole(&tiny(), &cpu).unwrap();
    let params = stage.init(5).unwrap();
    let bits = |folder: &Path| {
        let loaded = stage.load(&mut Weights::open(folder).unwrap()).unwrap();
        loaded.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected: Vec<u32> = params.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let dir = tempfile::tempdir().unwrap();
    for shard_bytes in [None, Some(3000)] {
        stage.store(&params, dir.path(), WriteOptions { shard_bytes, ..WriteOptions::default() }).unwrap();
        assert_eq!(bits(dir.path()), expected, "{shard_bytes:?}");
    }
    // The padding is not part of the model: whatever it contains, zeros are read back.
    let mut dirty = params.to_vec::<f32>().unwrap();
    dirty[stage.layout().params()[0].range().end] = 7.0;
    let dirty = cpu.tensor(&dirty, dirty.len()).unwrap();
    stage.store(&dirty, dir.path(), WriteOptions::default()).unwrap();
    assert_eq!(bits(dir.path()), expected);
    // A stage of some layers loads its own part.
    for layers in [0..1, 1..2] {
        let part = Stage::new(&tiny(), layers, &cpu).unwrap();
        let loaded = part.load(&mut Weights::open(dir.path()).unwrap()).unwrap();
        assert_eq!(loaded.to_vec::<f32>().unwrap(), part.init(5).unwrap().to_vec::<f32>().unwrap());
    }
}

#[test]
fn a_refused_store_writes_nothing() {
    let cpu = Device::cpu(1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    for (layers, held) in [(0..1, 1), (1..2, 1)] {
        let part = Stage::new(&tiny(), layers, &cpu).unwrap();
        let refused = part.store(&part.init(1).unwrap(), &folder, WriteOptions::default());
        assert!(matches!(refused, Err(ZooError::Config { field: "layers", value, .. }) if value == held));
    }
    let stage = Stage::whole(&tiny(), &cpu).unwrap();
    let short = cpu.zeros(stage.layout().len() - 1).unwrap();
    let refused = stage.store(&short, &folder, WriteOptions::default());
    assert!(matches!(refused, Err(ZooError::Tensor(TensorError::ShapeMismatch { op: "store", .. }))));
    let words = cpu.tensor(&vec![0_u32; stage.layout().len()], stage.layout().len()).unwrap();
    let refused = stage.store(&words, &folder, WriteOptions::default());
    assert!(matches!(refused, Err(ZooError::Tensor(TensorError::DTypeMismatch { .. }))));
    assert!(!folder.exists());
}

/// Writes a safetensors file with one tensor of ones.
fn file_of_one(path: &Path, name: &str, shape: &[usize]) {
    let values = vec![1.0; shape.iter().product()];
    let tensor = TensorView { name, shape, data: TensorData::F32(&values) };
    write_tensors(path, &[tensor], &BTreeMap::new()).unwrap();
}

#[test]
fn a_header_with_five_dimensions_is_an_error_and_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    write_tiny(dir.path(), WriteOptions::default());
    let path = dir.path().join("model.safetensors");
    file_of_one(&path, "wte.weight", &[11, 2, 2, 2, 1]);
    let file = TensorFile::open(&path).unwrap();
    let found = Shape::new(&file.tensors()["wte.weight"].shape).unwrap_err();
    assert_eq!(found, TensorError::Dimensions { count: 5, most: 4 });
    let message = Weights::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("[11, 2, 2, 2, 1]") && message.contains("[11, 8]"), "{message}");
}

#[test]
fn half_precision_rounds_to_nearest() {
    for (dtype, most) in [(Dtype::F16, 1.0 / 2048.0), (Dtype::Bf16, 1.0 / 256.0)] {
        let dir = tempfile::tempdir().unwrap();
        write_tiny(dir.path(), WriteOptions { dtype, ..WriteOptions::default() });
        let read = read_all(&mut Weights::open(dir.path()).unwrap());
        for (a, b) in read.iter().zip(started()) {
            assert!((a - b).abs() <= b.abs() * most + 1e-7, "{dtype:?}: {a} {b}");
        }
    }
}

#[test]
fn the_reference_implementation_reads_what_we_write_and_we_what_it_writes() {
    let dir = tempfile::tempdir().unwrap();
    write_tiny(dir.path(), WriteOptions::default());
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.len(), tiny().tensors().len());
    assert_eq!(theirs.tensor("h.1.mlp.c_fc.weight").unwrap().shape(), [8, 32]);
    // A file of the reference implementation, with the prefix, the old buffers and a tied head.
    let mask = vec![0_u8; 4 * 36];
    let mut all: Vec<(String, safetensors::tensor::TensorView<'_>)> =
        theirs.tensors().into_iter().map(|(name, t)| (format!("transformer.{name}"), t)).collect();
    let view = |shape: &[usize], data| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data).unwrap()
    };
    all.push(("transformer.h.0.attn.bias".to_owned(), view(&[1, 1, 6, 6], &mask)));
    all.push(("transformer.h.0.attn.masked_bias".to_owned(), view(&[], &mask[..4])));
    all.push(("lm_head.weight".to_owned(), theirs.tensor("wte.weight").unwrap()));
    fs::write(&path, safetensors::serialize(all.clone(), None).unwrap()).unwrap();
    assert_eq!(read_all(&mut Weights::open(dir.path()).unwrap()), started());
    // An untied head is rejected.
    let other = vec![0; 11 * 8 * 4];
    all.pop();
    all.push(("lm_head.weight".to_owned(), view(&[11, 8], &other)));
    fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
    let message = Weights::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("lm_head.weight") && message.contains("tied"), "{message}");
}

#[test]
fn unsupported_configs_are_refused_with_the_field() {
    let dir = tempfile::tempdir().unwrap();
    write_tiny(dir.path(), WriteOptions::default());
    let path = dir.path().join("config.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let with = |field: &str, value: Value| {
        let mut json = good.clone();
        json[field] = value;
        fs::write(&path, json.to_string()).unwrap();
        Weights::open(dir.path())
    };
    assert!(with("some_key_of_tomorrow", json!([1, 2])).is_ok());
    assert!(with("n_inner", json!(32)).is_ok());
    let cases = [
        ("model_type", json!("opt")),
        ("activation_function", json!("relu")),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("layer_norm_epsilon", json!(-1e-6)),
        ("n_inner", json!(0)),
        ("n_layer", json!(-2)),
        ("n_embd", Value::Null),
        ("n_ctx", json!(7)),
        ("vocab_size", json!(1.5)),
        ("n_layer", json!(0)),
        ("n_head", json!(3)),
        ("n_embd", json!(1 << 30)),
        ("vocab_size", json!(1_u64 << 40)),
    ];
    for (field, value) in cases {
        let message = with(field, value).unwrap_err().to_string();
        assert!(message.contains(field) && message.contains("config.json"), "{message}");
    }
    // A shape that contradicts the tensors, too many layers, and too few.
    for (field, value, named) in [
        ("vocab_size", 12, "wte.weight"),
        ("n_inner", 31, "h.0.mlp.c_fc.weight"),
        ("n_layer", 3, "h.2.ln_1.weight"),
        ("n_layer", 1, "h.1."),
        ("n_layer", 1 << 14, "h.2.ln_1.weight"),
    ] {
        let message = with(field, json!(value)).unwrap_err().to_string();
        assert!(message.contains(named), "{message}");
    }
    let message = with("n_head", json!(3)).unwrap_err().to_string();
    assert!(message.contains("`n_head` is 3, expected a divisor of `n_embd`"), "{message}");
    fs::write(&path, "{").unwrap();
    assert!(Weights::open(dir.path()).unwrap_err().to_string().contains("config.json"));
    assert!(matches!(Weights::open(&dir.path().join("none")), Err(ZooError::Io { .. })));
}

#[test]
fn an_index_cannot_point_out_of_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    write_tiny(dir.path(), WriteOptions { shard_bytes: Some(3000), ..WriteOptions::default() });
    for file in ["../model.safetensors", "/etc/passwd", "a/b", "", ".."] {
        let index = json!({"weight_map": {"wte.weight": file}}).to_string();
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let message = Weights::open(dir.path()).unwrap_err().to_string();
        assert!(message.contains("weight_map.wte.weight"), "{message}");
    }
}

fn named_file(path: &Path) {
    let tensors = [
        TensorView { name: "moment", shape: &[2, 3], data: TensorData::F32(&[1., -2., 3., 4., 5., 6.]) },
        TensorView { name: "counter", shape: &[5], data: TensorData::U8(b"bytes") },
    ];
    write_tensors(path, &tensors, &BTreeMap::from([("step".to_owned(), "7".to_owned())])).unwrap();
}

#[test]
fn named_tensors_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("optimizer.safetensors");
    named_file(&path);
    let mut file = TensorFile::open(&path).unwrap();
    let mut moment = [0.0; 6];
    file.read_f32("moment", &[2, 3], &mut moment).unwrap();
    assert_eq!(moment.to_vec(), vec![1., -2., 3., 4., 5., 6.]);
    assert_eq!(file.read_u8("counter").unwrap(), b"bytes");
    assert_eq!(file.metadata()["step"], "7");
    let errors = [
        file.read_f32("moment", &[3, 2], &mut moment),
        file.read_f32("moment", &[2, 3], &mut [0.0; 5]),
        file.read_f32("counter", &[5], &mut [0.0; 5]),
        file.read_u8("moment").map(drop),
    ];
    for error in errors {
        let message = error.unwrap_err().to_string();
        assert!(message.contains("optimizer.safetensors") && message.contains('`'), "{message}");
    }
    assert!(file.read_u8("absent").unwrap_err().to_string().contains("absent"));
    let twice = TensorView { name: "a", shape: &[1], data: TensorData::U8(&[1]) };
    assert!(write_tensors(&path, &[twice, twice], &BTreeMap::new()).is_err());
    let short = TensorView { name: "a", shape: &[2], data: TensorData::U8(&[1]) };
    assert!(write_tensors(&path, &[short], &BTreeMap::new()).is_err());
    assert!(TensorFile::open(&path).is_ok(), "a refused write leaves the old file");
}

#[test]
fn headers_that_lie_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lie.safetensors");
    let try_header = |claimed: Option<u64>, header: &str, data: usize| {
        let mut bytes = claimed.unwrap_or(header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        fs::write(&path, bytes).unwrap();
        TensorFile::open(&path).map(drop)
    };
    let one = |dtype: &str, shape: &str, from: u64, to: u64| {
        format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
    };
    assert!(try_header(None, &one("F32", "[2]", 0, 8), 8).is_ok());
    let two = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    let same = r#"{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
    let cases = [
        (try_header(None, &one("F32", "[2]", 0, 8), 7), "`x` has invalid offsets"),
        (try_header(None, &one("F32", "[3]", 0, 8), 8), "`x` has shape [3] and type F32"),
        (try_header(None, &one("F16", "[2]", 0, 8), 8), "`x` has shape [2] and type F16"),
        (try_header(None, &one("F32", "[2]", 8, 0), 8), "`x` has invalid offsets"),
        (try_header(None, &one("F32", "[4611686018427387904,4]", 0, 8), 8), "`x` has shape"),
        (try_header(None, &one("F32", "[2]", 0, u64::MAX), 8), "`x` has invalid offsets"),
        (try_header(None, &one("F32", "[-1]", 0, 8), 8), "`x` is not a valid description of a tensor"),
        (try_header(None, &one("F32", "[2]", 0, 8), 9), "describes 8 of 9"),
        (try_header(None, &one("F32", "[1]", 4, 8), 8), "`x` begins at byte 4"),
        (try_header(None, two, 6), "`x` begins at byte 2"),
        (try_header(None, same, 0), "`x` occurs twice"),
        (try_header(Some(u64::MAX), "{}", 0), "claims 18446744073709551615 bytes"),
        (try_header(Some(3), "{}", 0), "claims 3 bytes"),
        (try_header(None, "[1]", 0), "is not a JSON object"),
        (try_header(None, &"[".repeat(100_000), 0), "is not a JSON object"),
    ];
    for (result, expected) in cases {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("lie.safetensors"), "{message} / {expected}");
    }
}

/// With a type of unknown size the data need not have the length of the shape, so nothing may be allocated by
/// the shape: here the two tables would be 16 TiB each.
#[test]
fn tensors_of_unknown_types_are_refused_before_anything_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let config = gpt2(1, 1, 1 << 18, 1, 1 << 24).unwrap();
    let text =
        farflung_zoo::weights::config_text(&config, Dtype::F32, &farflung_zoo::weights::TokenIds::default());
    fs::write(dir.path().join("config.json"), text).unwrap();
    let open = |head: &str, others: &str| {
        let tensors = config.tensors().into_iter().map(|spec| (spec.name, spec.shape, others));
        let head = ("lm_head.weight".to_owned(), vec![config.vocab, config.dim], head);
        let header: serde_json::Map<String, Value> = tensors
            .chain([head])
            .map(|(name, shape, dtype)| {
                (name, json!({"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}))
            })
            .collect();
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        Weights::open(dir.path()).unwrap_err()
    };
    let error = open("F4", "F4");
    assert!(matches!(&error, ZooError::TensorDtype { found, .. } if found == "F4"), "{error}");
    let error = open("F4", "F32");
    assert!(matches!(&error, ZooError::TensorEntry { .. }), "{error}");

    // Only the head has an unknown type.
    write_tiny(dir.path(), WriteOptions::default());
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let end = bytes.len() - 8 - length;
    header["lm_head.weight"] = json!({"dtype": "F4", "shape": [11, 8], "data_offsets": [end, end]});
    let header = header.to_string();
    let data = &bytes[8 + length..];
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()).unwrap();
    let error = Weights::open(dir.path()).unwrap_err();
    assert!(matches!(&error, ZooError::TensorDtype { tensor, .. } if tensor == "lm_head.weight"), "{error}");
}

#[test]
fn damaged_files_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    named_file(&path);
    let good = fs::read(&path).unwrap();
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        assert!(TensorFile::open(&path).is_err(), "{length} bytes");
    }
    let rng = Philox::new(11, 0);
    for round in 0..2000 {
        let mut bytes = good.clone();
        for change in 0..=rng.below(round * 16, 3) {
            let at = rng.below(round * 16 + 2 * change + 1, bytes.len() as u64) as usize;
            bytes[at] = rng.below(round * 16 + 2 * change + 2, 256) as u8;
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(mut file) = TensorFile::open(&path) {
            // Tensors that the modified header still describes must be backed by bytes of the file.
            let tensors = file.tensors().clone();
            for (name, info) in tensors {
                let count = info.shape.iter().product::<usize>();
                assert!(count <= good.len() || info.dtype != "F32");
                let _ = file.read_f32(&name, &info.shape, &mut vec![0.0; count.min(good.len())]);
                let _ = file.read_u8(&name);
            }
        }
    }
}
