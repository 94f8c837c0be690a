//! Families against `transformers`: logits, losses, all gradients, five steps of AdamW and greedy text, of
//! models in one part and in two. The expected values, and how they were made, are in `fixtures/families/`.

pub(crate) mod comparison;

use std::fs;
use std::path::PathBuf;

use comparison::{FAMILIES, PREFIX, UNDIVIDED, distances, distances_of_pieces, expected, parts};
use farflung_tensor as tensor;
use farflung_zoo as zoo;
use serde_json::Value;
use zoo::layer::rotary_table;
use zoo::weights::{Dtype, TensorFile, TokenIds, Weights, WriteOptions, config_from_text, config_text};
use zoo::{ModelSpec, Resize};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name)
}

/// Logits, loss, gradients, losses of five steps, and greedy text.
#[test]
fn models_in_one_part_and_in_two_are_those_of_transformers() {
    for name in FAMILIES {
        for cuts in [&[][..], &[1]] {
            let found = distances(&folder(name), cuts).unwrap();
            // There is no greedy text of a model without a published family.
            let of_whole = if name == "switch-gpt2" { 5 } else { 6 };
            assert_eq!(found.len(), if cuts.is_empty() { of_whole } else { 3 }, "{name} {cuts:?}");
            for distance in found {
                let comparison::Distance { what, at, off, mark } = distance;
                assert!(off <= mark, "{name} {cuts:?}: {what}: {off} at {at}, expected at most {mark}");
            }
        }
    }
}

/// Prompts that are read in both directions, as GPT-JT was trained: `transformers` with such a mask on GPT-J.
#[test]
fn prefixes_are_read_in_both_directions() {
    let mut found = distances(&folder(PREFIX), &[]).unwrap();
    found.extend(distances(&folder(PREFIX), &[1]).unwrap());
    found.extend(distances_of_pieces(&folder(PREFIX)).unwrap());
    assert_eq!(found.len(), 4 + 3 + 4);
    for comparison::Distance { what, at, off, mark } in found {
        assert!(off <= mark, "{what}: {off} at {at}, expected at most {mark}");
    }
}

/// Logits, loss, gradients and losses of five steps.
#[test]
fn models_on_two_ranks_that_divide_their_width_are_those_of_transformers() {
    for name in FAMILIES {
        let found = distances_of_pieces(&folder(name));
        if name == UNDIVIDED {
            let refused = found.err().unwrap().to_string();
            assert!(refused.contains("enough key-value heads for each rank"), "{refused}");
            continue;
        }
        let found = found.unwrap();
        assert_eq!(found.len(), 4, "{name}");
        for comparison::Distance { what, at, off, mark } in found {
            assert!(off <= mark, "{name}: {what}: {off} at {at}, expected at most {mark}");
        }
    }
}

#[test]
fn what_is_written_is_what_was_read() {
    for name in FAMILIES {
        let [(stage, params)] = &parts(&folder(name), &[]).unwrap()[..] else { panic!("one part") };
        let to = tempfile::tempdir().unwrap();
        let dtype = if name.ends_with("bf16") { Dtype::Bf16 } else { Dtype::F32 };
        stage.store(params, to.path(), WriteOptions { dtype, ..WriteOptions::default() }).unwrap();
        let mut again = Weights::open(to.path()).unwrap();
        assert_eq!(again.spec(), stage.spec());
        assert!(stage.load(&mut again).unwrap().host::<f32>() == params.host::<f32>(), "{name}");
        // The files have the names and shapes of those that were read.
        let written = TensorFile::open(&to.path().join("model.safetensors")).unwrap();
        for shard in fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()) {
            if shard.file_name().unwrap().to_str().unwrap().starts_with("model")
                && shard.extension().unwrap() != "json"
            {
                for (tensor, info) in TensorFile::open(&shard).unwrap().tensors() {
                    let same = &written.tensors()[&stage.spec().names.in_model(tensor)];
                    assert_eq!((&same.shape, &same.dtype), (&info.shape, &info.dtype), "{name}: {tensor}");
                }
            }
        }
    }
}

#[test]
fn angles_of_rotary_embeddings_are_those_of_transformers() {
    let cases = expected(&folder("rope")).unwrap()["cases"].as_array().unwrap().clone();
    let mut compared = 0;
    for case in &cases {
        let rope = &case["rope_parameters"];
        let [context, length] =
            ["max_position_embeddings", "sequence_length"].map(|field| case[field].as_u64());
        if length > context {
            // A dynamic base changes with the text: such texts are refused.
            continue;
        }
        // As a model's file has them.
        let config = serde_json::json!({
            "model_type": "gpt_neox",
            "hidden_size": case["head_dim"],
            "intermediate_size": 8,
            "max_position_embeddings": context,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "rope_parameters": rope,
            "rotary_pct": 1.0,
            "vocab_size": 8,
        });
        let spec = config_from_text("config.json".as_ref(), &config.to_string()).unwrap();
        let rotary = spec.blocks[0].block.attention.rotary.unwrap();
        // What is written is read as the same.
        let written = config_text(&spec, Dtype::F32, &TokenIds::default());
        assert_eq!(config_from_text("config.json".as_ref(), &written).unwrap(), spec, "{}", case["title"]);
        let numbers = |json: &Value| -> Vec<f64> { serde_json::from_value(json.clone()).unwrap() };
        let width = 2 * numbers(&case["inv_freq"]).len();
        assert_eq!(rotary.width, width, "{}", case["title"]);
        let last = numbers(&case["positions"]).into_iter().fold(0.0, f64::max) as usize;
        let table = rotary_table(&rotary, last + 1);
        for (i, position) in numbers(&case["positions"]).into_iter().enumerate() {
            let row = &table[position as usize * width..][..width];
            let half = width / 2;
            for (at, of) in [(0, "cos"), (half, "sin")] {
                for (got, want) in row[at..at + half].iter().zip(numbers(&case[of][i])) {
                    assert!((f64::from(*got) - want).abs() < 2e-6, "{}: {of} {got} {want}", case["title"]);
                }
            }
        }
        compared += 1;
    }
    assert_eq!((compared, cases.len()), (8, 9));
}

#[test]
fn what_changes_the_result_and_is_not_known_is_refused_by_name() {
    let json: Value =
        serde_json::from_slice(&fs::read(folder("llama3-rope-bf16").join("config.json")).unwrap()).unwrap();
    let with = |pointer: &[&str], value: Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut json = json.clone();
        let mut at = &mut json;
        for key in pointer {
            at = &mut at[*key];
        }
        *at = value;
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        Weights::open(dir.path()).unwrap_err().to_string()
    };
    for (pointer, value, said) in [
        (&["rope_scaling", "rope_type"][..], "longrope".into(), "`rope_scaling.rope_type` is \"longrope\""),
        (&["rope_scaling", "factor"], Value::Null, "`rope_scaling.factor` is missing"),
        (&["rope_scaling"], "yes".into(), "`rope_scaling` is \"yes\""),
        (&["hidden_act"], "gelu".into(), "`hidden_act` is \"gelu\""),
        (&["quantization_config"], serde_json::json!({"bits": 4}), "`quantization_config` is {\"bits\":4}"),
        (&["partial_rotary_factor"], 0.5.into(), "`partial_rotary_factor` is 0.5"),
        (
            &["num_key_value_heads"],
            3.into(),
            "`num_key_value_heads` is 3, expected a divisor of `num_attention_heads`",
        ),
        (&["head_dim"], 15.into(), "`head_dim` is 15"),
        (&["num_hidden_layers"], 1_u64.checked_shl(40).into(), "`num_hidden_layers` is 1099511627776"),
        (&["rope_theta"], 0.into(), "`rope_theta` is 0"),
        (&["rms_norm_eps"], (-1).into(), "`rms_norm_eps` is -1"),
        (&["model_type"], "mamba".into(), "`model_type` is \"mamba\", expected \"gpt2\" or \"gptj\" or"),
    ] {
        let message = with(pointer, value);
        assert!(message.contains(said), "{message}");
    }
}

#[test]
fn a_preset_in_another_size_keeps_its_kind() {
    let sizes = Resize { layers: Some(3), heads: Some(8), dim: Some(256), ..Default::default() };
    let small = ModelSpec::preset("tinyllama-1.1b").unwrap().resized(sizes).unwrap();
    let block = small.blocks[0].block;
    assert_eq!((small.layers(), block.attention.heads.query, block.attention.heads.kv), (3, 8, 1));
    assert_eq!((block.attention.head_dim, block.mlp.width), (32, 704));
    assert_eq!(block.attention.rotary.unwrap().width, 32);
    let wrong = Resize { heads: Some(7), ..Default::default() };
    assert!(ModelSpec::preset("tinyllama-1.1b").unwrap().resized(wrong).is_err());
}
