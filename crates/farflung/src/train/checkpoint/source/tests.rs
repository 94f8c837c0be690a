//! Checkpoints whose pieces do not form the model.

use farflung_zoo::gpt2;
use farflung_zoo::weights::{TensorData, TensorView, write_tensors_to};

use super::*;

fn record(step: u64) -> CheckpointRecord {
    let text = format!(
        r#"{{"rank":0,"world":1,"model":[],"parts":[[0,2]],"stages":1,"sequences":8,"seed":1,"sync":"ddp",
        "codec":"none","data_hash":"","step":{step},"outer_step":0,"rounds":0,
        "totals":{{"time_s":1.0,"wall_s":1.0,"bytes_sent":0,"bytes_received":0}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn model() -> ModelSpec {
    gpt2(2, 1, 4, 8, 11).unwrap()
}

/// Names and shapes of tensors.
type Tensors = Vec<(String, Vec<usize>)>;

fn tensors() -> Tensors {
    model().tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

fn bytes(tensors: &Tensors) -> Vec<u8> {
    let values: Vec<Vec<f32>> = tensors.iter().map(|(_, shape)| vec![0.5; shape.iter().product()]).collect();
    let views: Vec<_> = (tensors.iter().zip(&values))
        .map(|((name, shape), values)| TensorView { name, shape, data: TensorData::F32(values) })
        .collect();
    let mut bytes = Vec::new();
    write_tensors_to(&mut bytes, &views, &BTreeMap::new()).unwrap();
    bytes
}

fn files(step: u64, model: Vec<u8>) -> Files {
    let path = PathBuf::from(format!("step-{step}"));
    let tensors = TensorFiles::Sent { model, optimizer: bytes(&Vec::new()) };
    Files { path, record: record(step), settings: String::new(), tensors }
}

/// Reads the weights of a whole model from the files of some ranks.
fn read(all: Vec<Files>) -> Result<Vec<f32>> {
    let device = farflung_tensor::Device::cpu(1)?;
    let layout = Stage::whole(&model(), &device)?.layout().clone();
    let parts = layout.params().iter().map(|p| (p.name.clone(), 1)).collect();
    let needed = Needed::Parts(OwnTensors { parts, width: AxisShare::whole() });
    Source::new(&model(), all, Residuals::None, needed)?.take_weights(&layout, &(0..layout.len()).into())
}

fn refused(all: Vec<Files>) -> String {
    read(all).unwrap_err().to_string()
}

#[test]
fn pieces_of_several_ranks_are_one_model_however_they_are_cut() {
    let all = tensors();
    let expected = read(vec![files(3, bytes(&all))]).unwrap();
    for cut in 1..=all.len() {
        let (first, second) = all.split_at(cut);
        // The token table is in both, as with a tied head.
        let second = [&all[..1], second].concat();
        let pieces = vec![files(3, bytes(&first.to_vec())), files(3, bytes(&second))];
        assert_eq!(read(pieces).unwrap(), expected, "{cut}");
    }
}

#[test]
fn pieces_that_do_not_form_the_model_are_refused() {
    let all = tensors();
    let without: Tensors = all[1..].to_vec();
    assert!(refused(vec![files(3, bytes(&without))]).contains("a tensor is missing"));
    let foreign = [&all[..], &[("h.7.ln_1.weight".to_owned(), vec![4])]].concat();
    assert!(refused(vec![files(3, bytes(&foreign))]).contains("that the model does not have"));
    let mut other = all.clone();
    other[0].1[0] += 1;
    assert!(refused(vec![files(3, bytes(&other))]).contains("another shape"));
    let (first, second) = all.split_at(3);
    let steps = vec![files(3, bytes(&first.to_vec())), files(4, bytes(&second.to_vec()))];
    assert!(refused(steps).contains("step-4/trainer.json"));
    // The same tensor twice, and two tensors in the same bytes.
    let whole = bytes(&all);
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(whole[8..8 + header].to_vec()).unwrap();
    let doubled = text.replacen(&all[1].0, &all[0].0, 1);
    let overlapping = text.replacen("\"data_offsets\":[176,", "\"data_offsets\":[160,", 1);
    assert_ne!(overlapping, text);
    for header in [doubled, overlapping] {
        let mut changed = (header.len() as u64).to_le_bytes().to_vec();
        changed.extend(header.as_bytes());
        changed.extend(&whole[8 + text.len()..]);
        assert!(refused(vec![files(3, changed)]).contains("model.safetensors"));
    }
}
