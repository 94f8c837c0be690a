//! Model folders as people have them: names with the prefixes of wrappers, tied weights under either name, JSON
//! with a byte-order mark, other names of files, and other files in place of weights.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use farflung_zoo::weights::{TensorData, TensorView, Weights, WriteOptions, write, write_tensors};
use farflung_zoo::{ModelSpec, ZooError, gpt2};

fn tiny() -> ModelSpec {
    gpt2(2, 2, 8, 6, 11).unwrap()
}

/// A tensor by name and shape, with its values.
type Named = (String, Vec<usize>, Vec<f32>);

/// Returns the tensors of a model.
fn tensors() -> Vec<Named> {
    let named = |(index, spec): (usize, farflung_zoo::TensorSpec)| {
        let mut values = vec![0.0; spec.count()];
        spec.fill(3, index, &mut values);
        (spec.name, spec.shape, values)
    };
    tiny().tensors().into_iter().enumerate().map(named).collect()
}

/// Gives tensors other names.
fn rename(tensors: &mut [Named], new: impl Fn(&str) -> String) {
    for (name, _, _) in tensors {
        *name = new(name);
    }
}

/// Writes `config.json` and `model.safetensors` with these tensors and this metadata.
fn folder(tensors: &[Named], metadata: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path());
    write_file(&dir.path().join("model.safetensors"), tensors, metadata);
    dir
}

fn write_model(folder: &Path) {
    write(folder, &tiny(), WriteOptions::default(), |index, _, out| {
        out.copy_from_slice(&tensors()[index].2);
        Ok::<(), ZooError>(())
    })
    .unwrap();
}

fn write_file(path: &Path, tensors: &[Named], metadata: &[(&str, &str)]) {
    let view = |(name, shape, values)| TensorView { name, shape, data: TensorData::F32(values) };
    let views: Vec<_> = tensors.iter().map(|(name, shape, values)| view((name, shape, values))).collect();
    let metadata: BTreeMap<_, _> =
        metadata.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    write_tensors(path, &views, &metadata).unwrap();
}

/// Returns the tensors that are read from a folder or a file.
fn read(path: &Path) -> Result<Vec<Named>, ZooError> {
    let mut weights = Weights::open(path)?;
    let tensor = |spec: farflung_zoo::TensorSpec| {
        let mut values = vec![0.0; spec.count()];
        weights.tensor(&spec.name, &mut values)?;
        Ok((spec.name, spec.shape, values))
    };
    tiny().tensors().into_iter().map(tensor).collect()
}

fn refused(path: &Path, expected: &[&str]) {
    let message = read(path).unwrap_err().to_string();
    assert!(expected.iter().all(|words| message.contains(words)), "{message} / {expected:?}");
}

#[test]
fn prefixes_of_wrappers_are_left_out() {
    for prefix in [
        "transformer.",
        "_orig_mod.transformer.",
        "module.transformer.",
        "module._orig_mod.transformer.",
        "model.transformer.",
        "_orig_mod.module.model.transformer.",
        "model.",
        "gpt.net.",
    ] {
        let mut named = tensors();
        rename(&mut named, |name| format!("{prefix}{name}"));
        named.push((format!("{prefix}h.0.attn.bias"), vec![1, 1, 6, 6], vec![1.0; 36]));
        named.push((format!("{prefix}h.1.attn.masked_bias"), vec![], vec![-1e4]));
        assert_eq!(read(folder(&named, &[]).path()).unwrap(), tensors(), "{prefix}");
    }
    // Blocks that are compiled one by one.
    let mut named = tensors();
    rename(&mut named, |name| name.replace("h.1.", "h.1._orig_mod."));
    assert_eq!(read(folder(&named, &[]).path()).unwrap(), tensors());
}

/// nanoGPT's layers are PyTorch's, whose matrices are `[outputs, inputs]`. By default, it trains without
/// biases.
#[test]
fn matrices_of_linear_layers_and_models_without_biases_are_read() {
    let mut named = tensors();
    for (name, shape, values) in &mut named {
        if let (true, &[inputs, outputs]) = (name.starts_with("h."), &shape[..]) {
            *values = (0..outputs * inputs).map(|i| values[i % inputs * outputs + i / inputs]).collect();
            *shape = vec![outputs, inputs];
        }
        *name = format!("_orig_mod.transformer.{name}");
    }
    let biased = folder(&named, &[]);
    assert_eq!(read(biased.path()).unwrap(), tensors());
    assert!(!Weights::open(biased.path()).unwrap().lacks_biases());
    // All must be stored alike.
    let mut mixed = named.clone();
    mixed.iter_mut().find(|(name, _, _)| name.ends_with("h.1.mlp.c_fc.weight")).unwrap().1.reverse();
    refused(folder(&mixed, &[]).path(), &["h.1.mlp.c_fc.weight", "[8, 32]", "[32, 8]"]);
    let is_bias = |name: &str| name.rsplit('.').next() == Some("bias");
    named.retain(|(name, _, _)| !is_bias(name));
    // A constant buffer is no bias.
    named.push(("_orig_mod.transformer.h.0.attn.bias".to_owned(), vec![1, 1, 6, 6], vec![1.0; 36]));
    let mut expected = tensors();
    expected.iter_mut().filter(|(name, _, _)| is_bias(name)).for_each(|(_, _, values)| values.fill(0.0));
    let unbiased = folder(&named, &[]);
    assert_eq!(read(unbiased.path()).unwrap(), expected);
    assert!(Weights::open(unbiased.path()).unwrap().lacks_biases());
    // One that is missing among others is an error.
    let mut one = tensors();
    one.retain(|(name, _, _)| name != "h.1.ln_2.bias");
    refused(folder(&one, &[]).path(), &["no tensor `h.1.ln_2.bias`"]);
}

#[test]
fn one_tensor_under_two_names_must_have_the_same_values() {
    let twice = |change: f32| {
        let mut named = tensors();
        let mut copies = named.clone();
        copies[5].2[3] += change;
        rename(&mut named, |name| format!("model.{name}"));
        named.extend(
            copies.into_iter().map(|(name, shape, values)| (format!("compiled.{name}"), shape, values)),
        );
        folder(&named, &[])
    };
    assert_eq!(read(twice(0.0).path()).unwrap(), tensors());
    let name = &tensors()[5].0;
    refused(twice(1.0).path(), &[&format!("`model.{name}` differs from `compiled.{name}`"), "both are"]);
}

#[test]
fn tied_weights_have_either_name() {
    let named = |tables: &[&str]| {
        let mut all = tensors();
        let (_, shape, values) = all.remove(0);
        rename(&mut all, |name| format!("transformer.{name}"));
        all.extend(tables.iter().map(|&name| (name.to_owned(), shape.clone(), values.clone())));
        all
    };
    let (head, table) = ("lm_head.weight", "transformer.wte.weight");
    for (stored, metadata) in [
        (&[head][..], &[][..]),
        (&[table], &[]),
        (&[head, table], &[]),
        // As `save_model` writes them.
        (&[table], &[("format", "pt"), (head, table)]),
        (&[head], &[("format", "pt"), (table, head)]),
    ] {
        let dir = folder(&named(stored), metadata);
        assert_eq!(read(dir.path()).unwrap(), tensors(), "{stored:?} {metadata:?}");
    }
    let mut untied = named(&[head, table]);
    untied.iter_mut().find(|(name, _, _)| name == head).unwrap().2[7] += 1.0;
    refused(folder(&untied, &[]).path(), &["`lm_head.weight` differs from `transformer.wte.weight`", "tied"]);
    let mut wrong = named(&[table]);
    wrong.push((head.to_owned(), vec![12, 8], vec![0.0; 96]));
    refused(folder(&wrong, &[]).path(), &["lm_head.weight", "[12, 8]", "[11, 8]"]);
    // A name of another tensor leads nowhere.
    refused(folder(&named(&[]), &[(table, "transformer.wpe.weights")]).path(), &["no tensor `wte.weight`"]);
}

#[test]
fn json_files_may_have_a_byte_order_mark_and_pythons_numbers() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        &tiny(),
        WriteOptions { shard_bytes: Some(3000), ..WriteOptions::default() },
        |i, _, out| {
            out.copy_from_slice(&tensors()[i].2);
            Ok::<(), ZooError>(())
        },
    )
    .unwrap();
    for name in ["config.json", "model.safetensors.index.json"] {
        let path = dir.path().join(name);
        let text = fs::read_to_string(&path).unwrap().replace('\n', "\r\n").replace("0.02", "NaN");
        fs::write(&path, format!("\u{FEFF}{text}")).unwrap();
        assert_eq!(read(dir.path()).unwrap(), tensors(), "{name}");
        let utf16: Vec<u8> = format!("\u{FEFF}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect();
        fs::write(&path, utf16).unwrap();
        assert_eq!(read(dir.path()).unwrap(), tensors(), "{name} in UTF-16");
    }
}

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21464d7a\nsize 548105171\n";

#[test]
fn other_files_in_place_of_a_models_are_called_by_what_they_are() {
    let cases: [(&[u8], &[&str]); 6] = [
        (POINTER.as_bytes(), &["Git LFS pointer", "548105171 bytes", "git lfs pull"]),
        (
            b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>",
            &["HTML page", "download it again"],
        ),
        (b"PK\x03\x04\0\0\0\0\0\0\0\0", &["zip archive", "PyTorch", "save_pretrained"]),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", &["pickle", "PyTorch"]),
        (b"", &["is empty", "download"]),
        (&[0; 5000], &["begins with zero bytes", "download"]),
    ];
    for (bytes, expected) in cases {
        for name in ["model.safetensors", "config.json", "model.safetensors.index.json"] {
            let dir = tempfile::tempdir().unwrap();
            write(
                dir.path(),
                &tiny(),
                WriteOptions {
                    shard_bytes: (name.contains("index")).then_some(3000),
                    ..WriteOptions::default()
                },
                |i, _, out| {
                    out.copy_from_slice(&tensors()[i].2);
                    Ok::<(), ZooError>(())
                },
            )
            .unwrap();
            fs::write(dir.path().join(name), bytes).unwrap();
            refused(dir.path(), &[expected, &[name]].concat());
        }
    }
    let dir = folder(&tensors(), &[]);
    fs::write(dir.path().join("model.safetensors"), "Entry not found").unwrap();
    refused(dir.path(), &["model.safetensors", "a text that begins with \"Entry not found\""]);
    // A JSON file that is a text has the parser's error.
    fs::write(dir.path().join("config.json"), "{\"n_layer\": 2,}").unwrap();
    assert!(matches!(read(dir.path()).unwrap_err(), ZooError::Json { .. }));
}

#[test]
fn a_download_that_was_cut_is_called_so() {
    let dir = folder(&tensors(), &[]);
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    refused(dir.path(), &["model.safetensors", "the file is not complete"]);
}

#[test]
fn files_of_other_names_are_found_or_named() {
    let dir = folder(&tensors(), &[]);
    let at = |name: &str| dir.path().join(name);
    let rename = |from: &str, to: &str| fs::rename(at(from), at(to)).unwrap();
    rename("model.safetensors", "gpt2-fine-tuned.safetensors");
    // An adapter is not a model.
    write_file(&at("adapter_model.safetensors"), &[], &[]);
    assert_eq!(read(dir.path()).unwrap(), tensors());
    assert_eq!(read(&at("gpt2-fine-tuned.safetensors")).unwrap(), tensors());
    // Of two, one must be given.
    write_file(&at("other.safetensors"), &tensors()[..3], &[]);
    refused(dir.path(), &["`gpt2-fine-tuned.safetensors`, `other.safetensors`", "give the path of one"]);
    assert_eq!(read(&at("gpt2-fine-tuned.safetensors")).unwrap(), tensors());
    // Shards without an index.
    fs::remove_file(at("gpt2-fine-tuned.safetensors")).unwrap();
    fs::remove_file(at("other.safetensors")).unwrap();
    write_file(&at("model-00001-of-00002.safetensors"), &tensors()[..3], &[]);
    refused(dir.path(), &["`model-00001-of-00002.safetensors`", "all parts"]);
    write_file(&at("model-00002-of-00002.safetensors"), &tensors()[3..], &[]);
    assert_eq!(read(dir.path()).unwrap(), tensors());
    // Other formats only.
    fs::remove_file(at("model-00001-of-00002.safetensors")).unwrap();
    fs::remove_file(at("model-00002-of-00002.safetensors")).unwrap();
    refused(dir.path(), &["no model.safetensors", "model.safetensors.index.json"]);
    fs::write(at("pytorch_model.bin"), "PK\x03\x04").unwrap();
    refused(dir.path(), &["no model.safetensors, but `pytorch_model.bin`", "save_pretrained"]);
    rename("pytorch_model.bin", "model.safetensors.gz");
    refused(dir.path(), &["no model.safetensors, but `model.safetensors.gz`", "unpack it first"]);
    rename("model.safetensors.gz", "gpt2.Q4_1.gguf");
    refused(dir.path(), &["no model.safetensors, but `gpt2.Q4_1.gguf`", "give the path of the file"]);
    // A link to a file that was not copied with it.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../../blobs/4d7a", at("model.safetensors")).unwrap();
        refused(dir.path(), &["model.safetensors` is a link to `../../blobs/4d7a`, which does not exist"]);
    }
}
