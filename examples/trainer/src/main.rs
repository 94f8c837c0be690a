//! A trainer of one's own: the loop, the text and one link of the optimizer are here; the rest is picked from
//! farflung's crates. Two workers train a small GPT on the same text and average their gradients as bf16 with
//! error feedback.

mod lion;

use std::error::Error;
use std::sync::Arc;
use std::thread;

use farflung_comm::{Communicator, ReduceOp, memory};
use farflung_compress::CodecSpec;
use farflung_optim::transform::{add_decayed_weights, clip_by_global_norm, scale_by_schedule};
use farflung_optim::{Average, AverageConfig, Chain, Decay, LrSchedule, agree, token_weight};
use farflung_tensor::{Device, Tensor};
use farflung_zoo::layer::Grads;
use farflung_zoo::{
    Corpus, HoldOut, Input, Output, Sampler, Sampling, Shard, Stage, Targets, Tokenizer, generate, gpt2,
    stage, tokenizer,
};

use lion::Lion;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const WORKERS: usize = 2;
const STEPS: u64 = 300;
const BATCH: usize = 8;
/// Charles Dickens, 1859: "A Tale of Two Cities".
const TEXT: &str = "\
    It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, \
    it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of \
    Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing \
    before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period \
    was so far like the present period, that some of its noisiest authorities insisted on its being received, for \
    good or for evil, in the superlative degree of comparison only.";

fn main() -> Result<()> {
    let workers = thread::scope(|scope| {
        let threads: Vec<_> = memory::cluster(WORKERS)
            .into_iter()
            .map(|endpoint| scope.spawn(move || worker(endpoint)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no worker panics")).collect::<Result<Vec<_>>>()
    })?;
    let (first, last) = (workers[0].losses[0], workers[0].losses[STEPS as usize - 1]);
    assert!(last < first / 4.0, "the loss fell from {first} only to {last}");
    for other in &workers[1..] {
        // All replicas apply the same decoded values, so a lossy codec does not make them differ.
        let same = workers[0].params.iter().zip(&other.params).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "the replicas have drifted apart");
    }
    println!("the replicas agree to the last bit");
    Ok(())
}

/// Result of a worker: the loss of each step, averaged over the workers, and the final parameters.
struct Trained {
    losses: Vec<f64>,
    params: Vec<f32>,
}

fn worker(endpoint: Arc<memory::Memory>) -> Result<Trained> {
    let comm = Communicator::new(endpoint);
    let rank = comm.rank().index();

    let bytes = tokenizer::by_name("byte")?;
    let config = gpt2(2, 4, 64, 64, bytes.vocab_size())?;
    let model = Stage::whole(&config, &Device::cpu(1)?)?;
    let (mut params, mut grads) = (model.init(1337)?, model.zeros()?);
    let (text, _) = Corpus::from_bytes("A Tale of Two Cities", TEXT.as_bytes(), &*bytes)?
        .split(HoldOut::Fraction(0.0))?;
    let sampler = Sampler::random(text, 1337, Shard { rank, world: WORKERS, batch: BATCH }, config.context)?;

    let mut chain = Chain::new()
        .then(clip_by_global_norm(1.0))
        .then(Lion { beta1: 0.9, beta2: 0.99 })
        .then(add_decayed_weights(0.1))
        .then(scale_by_schedule(LrSchedule::new(2e-3, 1e-5, 10, STEPS, Decay::Cosine)?))
        .build(model.device(), model.layout())?;
    let codec: CodecSpec = "bf16+ef".parse()?;
    let mut average = Average::new(
        comm.clone(),
        model.device(),
        model.layout(),
        AverageConfig { codec: codec.into(), bucket_bytes: 1 << 16, ..AverageConfig::default() },
    )?;
    if rank == 0 {
        println!("{} parameters, {WORKERS} workers, gradients as {codec}", model.layout().count());
    }

    let tokens = BATCH * config.context;
    let scale = token_weight(WORKERS, (WORKERS * tokens) as u64);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = sampler.batch(step)?;
        let input = Input::Tokens(model.tokens(&batch.inputs, config.context)?);
        let targets = model.tokens(&batch.targets, config.context)?;
        let (output, saved) = model.forward(&params, input, Some(Targets::all(&targets, scale)))?;
        let Output::Losses(output) = output else { unreachable!("a whole model gives losses") };
        let mut loss = [stage::total(&output)? / tokens as f64];

        // A bucket is sent as soon as its gradients are final, while the backward of earlier layers still runs.
        let mut averaging = average.begin();
        let mut left = Ok(());
        model.backward(&params, saved, None, &mut Grads::flat(&mut grads, false), |range, flat| {
            if left.is_ok() {
                left = averaging.ready(range, flat);
            }
        })?;
        left?;
        let averaged = averaging.finish(&mut grads)?;

        // The step is committed only if it can be committed on all workers.
        let prepared = chain.prepare(&grads);
        if agree(&comm, prepared.is_ok())? {
            chain.commit(&mut params, &grads, prepared?)?;
            average.commit();
        } else {
            average.rollback();
        }

        comm.all_reduce(&mut loss, ReduceOp::Mean)?;
        losses.push(loss[0]);
        if rank == 0 && (step % 20 == 0 || step + 1 == STEPS) {
            println!(
                "step {step:3}  loss {:.3}  {} encoded in {} buckets",
                loss[0], averaged.payload, averaged.buckets
            );
        }
    }

    if rank == 0 {
        println!("sample: {:?}", sample(&model, &params, &*bytes)?);
        println!("sent by worker 0: {}", comm.stats().sent.payload);
    }
    Ok(Trained { losses, params: params.to_vec()? })
}

fn sample(model: &Stage, params: &Tensor, bytes: &dyn Tokenizer) -> Result<String> {
    let mut tokens = bytes.encode("it was the ")?;
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    generate(model, params, &tokens.clone(), 60, &greedy, |token| {
        tokens.push(token);
        true
    })?;
    Ok(String::from_utf8_lossy(&bytes.decode(&tokens)?).into_owned())
}
