//! GGUF files: models written here as llama.cpp's converter writes them are those of their folders, in every
//! type of tensor that is read; files that are cut or lie are refused.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

pub(crate) mod file;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use farflung_zoo as zoo;
use file::{Gguf, name_in_file, text};
use half::{bf16, f16};
use serde_json::{Map, Value};
use zoo::weights::{TensorFile, Weights};

/// Folders of models, each with the architecture of its file.
const MODELS: [(&str, &str); 5] = [
    ("llama-mha", "llama"),
    ("llama-gqa-tied", "llama"),
    ("mistral-window", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name)
}

/// A tensor's name, shape and values.
type Named = (String, Vec<usize>, Vec<f32>);

/// Encodes values as a type: its number, the bytes, and what they stand for.
type Encode = fn(&[f32]) -> (u32, Vec<u8>, Vec<f32>);

fn plain(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    (0, values.iter().flat_map(|x| x.to_le_bytes()).collect(), values.to_vec())
}

fn f16s(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    let halves: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let bytes = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
    (1, bytes, halves.into_iter().map(f16::to_f32).collect())
}

fn bf16s(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    let halves: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let bytes = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
    (30, bytes, halves.into_iter().map(bf16::to_f32).collect())
}

fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0_f32, |most, x| most.max(x.abs()))
}

fn q8(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    let (mut bytes, mut meant) = (Vec::new(), Vec::new());
    for block in values.chunks_exact(32) {
        let scale = f16::from_f32(largest(block) / 127.0);
        bytes.extend(scale.to_le_bytes());
        for x in block {
            let q =
                if scale == f16::ZERO { 0 } else { (x / scale.to_f32()).round().clamp(-127.0, 127.0) as i8 };
            bytes.extend(q.to_le_bytes());
            meant.push(scale.to_f32() * f32::from(q));
        }
    }
    (8, bytes, meant)
}

/// Packs 32 numbers of 4 bits: number i is in the low half of byte i, number 16 + i in its high half.
fn pack(q: &[u8]) -> Vec<u8> {
    (0..16).map(|i| q[i] | q[16 + i] << 4).collect()
}

fn four_bits(x: f32) -> u8 {
    x.round().clamp(0.0, 15.0) as u8
}

fn q4_0(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    let (mut bytes, mut meant) = (Vec::new(), Vec::new());
    for block in values.chunks_exact(32) {
        let scale = f16::from_f32(largest(block) / 7.0);
        let q: Vec<u8> = block.iter().map(|x| four_bits(x / scale.to_f32() + 8.0)).collect();
        bytes.extend(scale.to_le_bytes());
        bytes.extend(pack(&q));
        meant.extend(q.iter().map(|&q| scale.to_f32() * (f32::from(q) - 8.0)));
    }
    (2, bytes, meant)
}

fn q4_1(values: &[f32]) -> (u32, Vec<u8>, Vec<f32>) {
    let (mut bytes, mut meant) = (Vec::new(), Vec::new());
    for block in values.chunks_exact(32) {
        let least = block.iter().copied().fold(f32::INFINITY, f32::min);
        let most = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (scale, least) = (f16::from_f32((most - least) / 15.0), f16::from_f32(least));
        let q: Vec<u8> = block.iter().map(|x| four_bits((x - least.to_f32()) / scale.to_f32())).collect();
        bytes.extend(scale.to_le_bytes());
        bytes.extend(least.to_le_bytes());
        bytes.extend(pack(&q));
        meant.extend(q.iter().map(|&q| scale.to_f32() * f32::from(q) + least.to_f32()));
    }
    (3, bytes, meant)
}

/// Returns the names, shapes and values of a folder's tensors.
fn stored(folder: &Path) -> Vec<Named> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("model") || !name.ends_with(".safetensors") {
            continue;
        }
        let mut file = TensorFile::open(&path).unwrap();
        for (name, info) in file.tensors().clone() {
            let mut values = vec![0.0; info.shape.iter().product()];
            file.read_f32(&name, &info.shape, &mut values).unwrap();
            all.push((name, info.shape, values));
        }
    }
    all
}

/// The order of rows of queries and keys that llama.cpp's converter makes: of each head, row 2i is the one at
/// i, and row 2i + 1 the one at half + i.
fn order(rows: usize, heads: usize) -> Vec<usize> {
    let width = rows / heads;
    (0..rows).map(|at| at / width * width + at % width / 2 + at % 2 * (width / 2)).collect()
}

/// Makes the file of a folder. Returns it, and what each tensor is expected to be, by its name in the folder.
fn written(name: &str, architecture: &str, encode: Encode) -> (Gguf, Vec<Named>) {
    let folder = folder(name);
    let config: Map<String, Value> =
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut out = Gguf::described(architecture, &config);
    // A list of texts, as that of a tokenizer, is passed over.
    let list = [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &text("a"), &text("bc")].concat();
    out.fields.push(("tokenizer.ggml.tokens".to_owned(), 9, list));
    let mut expected = Vec::new();
    for (known, shape, values) in stored(&folder) {
        let heads = match () {
            () if architecture != "llama" => None,
            () if known.contains("q_proj") => config["num_attention_heads"].as_u64(),
            () if known.contains("k_proj") => config["num_key_value_heads"].as_u64(),
            () => None,
        };
        let width = values.len() / shape[0];
        let order = order(shape[0], heads.unwrap_or(1) as usize);
        let order = if heads.is_some() { order } else { (0..shape[0]).collect() };
        let rows: Vec<f32> =
            order.iter().flat_map(|row| values[row * width..][..width].iter().copied()).collect();
        // As there, vectors and rows that are no whole blocks are of the widest type.
        let is_whole = shape.len() == 2 && width % 32 == 0;
        let (kind, bytes, meant) = if is_whole { encode(&rows) } else { plain(&rows) };
        let mut back = vec![0.0; values.len()];
        for (at, row) in order.into_iter().enumerate() {
            back[row * width..][..width].copy_from_slice(&meant[at * width..][..width]);
        }
        out.tensors.push((name_in_file(&known), shape.clone(), kind, bytes));
        expected.push((known, shape, back));
    }
    (out, expected)
}

/// Reads all tensors.
fn all(path: &Path) -> Vec<(String, Vec<f32>)> {
    let mut weights = Weights::open(path).unwrap();
    let tensors = weights.spec().tensors();
    let read = |spec: zoo::TensorSpec| {
        let mut values = vec![0.0; spec.count()];
        weights.tensor(&spec.name, &mut values).unwrap();
        (spec.name, values)
    };
    tensors.into_iter().map(read).collect()
}

#[test]
fn a_model_is_that_of_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (name, architecture) in MODELS {
        let (file, _) = written(name, architecture, plain);
        fs::write(&path, file.bytes()).unwrap();
        let (found, expected) = (Weights::open(&path).unwrap(), Weights::open(&folder(name)).unwrap());
        assert_eq!(found.spec(), expected.spec(), "{name}");
        assert_eq!(all(&path), all(&folder(name)), "{name}");
    }
}

/// Puts the experts of each block into one tensor, as files of today have them.
fn stack_experts(file: &mut Gguf) {
    // By name, the experts of a tensor are in order.
    let tensors = std::mem::take(&mut file.tensors);
    let (mut of_experts, mut all): (Vec<_>, Vec<_>) =
        tensors.into_iter().partition(|(name, ..)| name.split('.').count() == 5);
    of_experts.sort();
    for (name, shape, kind, data) in of_experts {
        let (stem, _) = name.strip_suffix(".weight").unwrap().rsplit_once('.').unwrap();
        let name = format!("{stem}_exps.weight");
        match all.last_mut().filter(|last| last.0 == name) {
            Some((_, shape, _, all)) => {
                shape[0] += 1;
                all.extend(data);
            }
            None => all.push((name, [&[1], &shape[..]].concat(), kind, data)),
        }
    }
    file.tensors = all;
}

/// Experts are tensors of their own in old files, and in one tensor of a block in those of today.
#[test]
fn experts_are_those_of_the_folder_in_files_of_both_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let expected = Weights::open(&folder("mixtral")).unwrap();
    for encode in [plain, q8] as [Encode; 2] {
        let (mut file, meant) = written("mixtral", "llama", encode);
        for stacked in [false, true] {
            if stacked {
                let before = file.tensors.len();
                stack_experts(&mut file);
                assert_eq!(file.tensors.len(), before - 2 * 3 * 3);
            }
            fs::write(&path, file.bytes()).unwrap();
            let found = Weights::open(&path).unwrap();
            // Files do not tell how experts were balanced.
            let losses = expected.spec().mixtures().next().unwrap().1.losses;
            assert_eq!(found.spec().clone().with_router_losses(losses), *expected.spec());
            let mut weights = found;
            for (name, shape, values) in &meant {
                let spec = weights.spec().tensors().into_iter().find(|spec| spec.name == *name).unwrap();
                let mut read = vec![0.0; spec.count()];
                weights.tensor(name, &mut read).unwrap();
                let (stored_shape, stored) = zoo::weights::to_stored(weights.spec().names, &spec, &read);
                assert!((&stored_shape, &stored[..]) == (shape, &values[..]), "{name} {shape:?}");
            }
        }
        // More experts than the file has, too many, and none of a token.
        for (key, value, said) in [
            ("llama.expert_count", 5_u32, "block_sparse_moe.gate.weight"),
            ("llama.expert_count", 1 << 20, "num_local_experts"),
            ("llama.expert_used_count", 0, "num_experts_per_tok"),
        ] {
            let mut wrong = Gguf { fields: file.fields.clone(), tensors: file.tensors.clone() };
            wrong.fields.iter_mut().find(|field| field.0 == key).unwrap().2 = value.to_le_bytes().to_vec();
            assert!(refused(&wrong.bytes()).contains(said), "{}", refused(&wrong.bytes()));
        }
    }
}

#[test]
fn values_are_those_that_each_type_of_tensor_stands_for() {
    let dir = tempfile::tempdir().unwrap();
    let (path, copy) = (dir.path().join("model.gguf"), dir.path().join("copy"));
    fs::create_dir(&copy).unwrap();
    for encode in [f16s, bf16s, q8, q4_0, q4_1] as [Encode; 5] {
        for (name, architecture) in MODELS {
            let (file, expected) = written(name, architecture, encode);
            fs::write(&path, file.bytes()).unwrap();
            // The same values in a folder.
            let views = expected.iter().map(|(name, shape, values)| {
                let data = zoo::weights::TensorData::F32(values);
                zoo::weights::TensorView { name, shape, data }
            });
            fs::copy(folder(name).join("config.json"), copy.join("config.json")).unwrap();
            zoo::weights::write_tensors(
                &copy.join("model.safetensors"),
                &views.collect::<Vec<_>>(),
                &BTreeMap::new(),
            )
            .unwrap();
            assert!(file.tensors.iter().any(|(_, _, kind, _)| *kind != 0), "{name}");
            assert_eq!(all(&path), all(&copy), "{name}");
        }
    }
}

/// Returns why a file is refused.
fn refused(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    Weights::open(&path).unwrap_err().to_string()
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let (file, _) = written("llama-mha", "llama", plain);
    let whole = file.bytes();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let data: usize = file.tensors.iter().map(|tensor| tensor.3.len().next_multiple_of(32)).sum();
    let head = whole.len() - data;
    for length in (0..head).chain((head..whole.len()).step_by(997)).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(Weights::open(&path).is_err(), "{length} of {} bytes", whole.len());
    }
}

/// No byte of the description makes reading panic or take memory that the file does not have.
#[test]
fn a_file_with_a_changed_byte_is_read_or_refused() {
    let (file, _) = written("qwen3", "qwen3", q8);
    let whole = file.bytes();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let data: usize = file.tensors.iter().map(|tensor| tensor.3.len().next_multiple_of(32)).sum();
    let mut refused = 0;
    for at in 0..whole.len() - data {
        for to in [0xFF, 0x00, 0x7F] {
            let mut bytes = whole.clone();
            bytes[at] = to;
            fs::write(&path, &bytes).unwrap();
            let Ok(mut weights) = Weights::open(&path) else {
                refused += 1;
                continue;
            };
            for spec in weights.spec().tensors() {
                weights.tensor(&spec.name, &mut vec![0.0; spec.count()]).unwrap();
            }
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// A tensor that no model has.
fn sinks(file: &Gguf) -> (String, Vec<usize>, u32, Vec<u8>) {
    let (_, shape, kind, data) = file.tensors[0].clone();
    ("blk.0.attn_sinks".to_owned(), shape, kind, data)
}

fn field<'a>(file: &'a mut Gguf, name: &str) -> &'a mut (String, u32, Vec<u8>) {
    file.fields.iter_mut().find(|field| field.0 == name).unwrap()
}

/// A tensor under the name that it has in folders.
fn doubled(file: &Gguf) -> (String, Vec<usize>, u32, Vec<u8>) {
    let (_, shape, kind, data) =
        file.tensors.iter().find(|tensor| tensor.0 == "output.weight").unwrap().clone();
    ("lm_head.weight".to_owned(), shape, kind, data)
}

#[test]
fn the_scaled_positions_of_llama_3_are_told_from_the_divisors_of_their_frequencies() {
    use zoo::spec::RotaryScaling;

    let (mut file, _) = written("llama-mha", "llama", plain);
    field(&mut file, "llama.rope.freq_base").2 = 500_000_f32.to_le_bytes().to_vec();
    let width = field(&mut file, "llama.rope.dimension_count").2.clone();
    let width = u32::from_le_bytes(width.try_into().unwrap()) as usize;
    // As transformers computes them, by wavelengths.
    let divisors = |factor: f64, low: f64| -> Vec<u8> {
        let divisor = |pair: usize| {
            let length = 2.0 * std::f64::consts::PI * 500_000_f64.powf(2.0 * pair as f64 / width as f64);
            let smooth = (8192.0 / length - low) / (4.0 - low);
            if length < 8192.0 / 4.0 {
                1.0
            } else if length > 8192.0 / low {
                factor
            } else {
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..width / 2).flat_map(|pair| (divisor(pair) as f32).to_le_bytes()).collect()
    };
    let with = |divisors: Vec<u8>| {
        let count = divisors.len() / 4;
        let mut file = Gguf { fields: file.fields.clone(), tensors: file.tensors.clone() };
        file.tensors.insert(0, ("rope_freqs.weight".to_owned(), vec![count], 0, divisors));
        file.bytes()
    };
    let folder = tempfile::tempdir().unwrap();
    for factor in [8.0, 32.0] {
        let path = folder.path().join("model.gguf");
        fs::write(&path, with(divisors(factor, 1.0))).unwrap();
        let scaling = Weights::open(&path).unwrap().spec().blocks[0].block.attention.rotary.unwrap().scaling;
        let expected =
            RotaryScaling::Llama3 { factor, low_turns: 1.0, high_turns: 4.0, original_context: 8192 };
        assert_eq!(scaling, expected);
    }
    for (wrong, expected) in [
        (divisors(8.0, 2.0), "another way than LLaMA 3.1"),
        (vec![0; 2 * width], "another way"),
        (vec![0; 4], "no divisor for each pair"),
        ([f32::NAN.to_le_bytes(); 2].concat().repeat(width / 4), "another way"),
    ] {
        let error = refused(&with(wrong));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let make = |change: fn(&mut Gguf)| {
        let (mut file, _) = written("llama-mha", "llama", plain);
        change(&mut file);
        refused(&file.bytes())
    };
    for (found, expected) in [
        (
            make(|file| file.fields[0].2 = text("gemma")),
            "general.architecture` is \"gemma\", expected \"llama\" or",
        ),
        (make(|file| drop(file.fields.remove(0))), "general.architecture` is missing"),
        (make(|file| file.fields.push(file.fields[1].clone())), "has the key `llama.block_count` twice"),
        (make(|file| file.fields[1].1 = 13), "unknown type 13"),
        (make(|file| file.tensors.push(file.tensors[0].clone())), "twice"),
        (make(|file| file.tensors[3].3.truncate(32)), "overlap"),
        (make(|file| file.tensors[1].2 = 12), "Q4_K, expected F32, F16, BF16, Q8_0, Q4_0, Q4_1 or Q6_K"),
        (
            make(|file| file.tensors[0].0 = "rope_freqs.weight".to_owned()),
            "`rope_freqs.weight` has no divisor for each pair",
        ),
        (
            make(|file| {
                let more = sinks(file);
                file.tensors.push(more);
            }),
            "`blk.0.attn_sinks` is not part of the model",
        ),
        (make(|file| file.tensors[0].1 = vec![usize::MAX, 9]), "has the shape"),
        (make(|file| file.u32("split.count", &3.into())), "is one of 3 parts"),
        (make(|file| file.f32("llama.rope.scaling.yarn_beta_fast", &8.into())), "yarn_beta_fast` is there"),
        (make(|file| file.f32("llama.logit_scale", &2.into())), "llama.logit_scale` is there"),
        (
            make(|file| field(file, "llama.rope.freq_base").2 = f32::NAN.to_le_bytes().to_vec()),
            "NaN, expected a finite number",
        ),
        (
            make(|file| {
                let more = doubled(file);
                file.tensors.push(more);
            }),
            "under two names",
        ),
        (make(|file| file.u32("llama.expert_count", &8.into())), "block_sparse_moe.gate.weight"),
        (make(|file| file.fields.remove(1).1 = 0), "num_hidden_layers` is missing"),
    ] {
        assert!(found.contains(expected), "{found}\n{expected}");
    }
    let (file, _) = written("llama-mha", "llama", plain);
    let mut bytes = file.bytes();
    bytes[4] = 1;
    assert!(refused(&bytes).contains("is of version 1, expected 2 or 3"));
    for (at, what) in [(8, "bytes of tensors"), (16, "bytes of values")] {
        let mut bytes = file.bytes();
        bytes[at..at + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        let found = refused(&bytes);
        assert!(found.contains(what), "{found}");
    }
}
