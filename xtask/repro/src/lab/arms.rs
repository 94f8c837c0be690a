//! The table of arms, with one row for each method.

#[cfg(test)]
mod all;

use farflung::optim::transform::SyncSchedule;

#[cfg(test)]
pub(crate) use all::ALL;

use super::Sizes;

/// A method that is trained and compared with others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arm {
    /// Name in tables and charts. It is unique.
    pub name: &'static str,
    /// Flags in addition to the setting's.
    pub flags: &'static str,
    /// One-line description for readers who choose a method.
    pub what: &'static str,
    /// Closed form of the payload that a rank sends per step, in bytes; `None` if the payload depends on the
    /// values, or is not checked.
    pub sent: Option<fn(&Sizes) -> f64>,
}

/// Returns the payload per step of a ring all-reduce, or of a scatter and gather of encoded shards: `2 (n - 1)`
/// messages of one shard, once in `sizes.every` steps.
fn scattered(sizes: &Sizes, shard: impl Fn(f64) -> f64) -> f64 {
    2.0 * (sizes.ranks - 1.0) * shard(sizes.params / sizes.ranks) / sizes.every
}

/// Returns the bytes of a message of `values` values in blocks, each with a scale, after a header.
fn blocks(values: f64, bits: f64, block: f64, scale: f64) -> f64 {
    HEADER + values * bits / 8.0 + (values / block).ceil() * scale
}

/// Bytes of a payload's header and of its codec's parameters.
const HEADER: f64 = 32.0;

fn f32_ring(sizes: &Sizes) -> f64 {
    scattered(sizes, |values| 4.0 * values)
}

fn half(sizes: &Sizes) -> f64 {
    scattered(sizes, |values| blocks(values, 16.0, f64::INFINITY, 0.0))
}

fn int8(sizes: &Sizes) -> f64 {
    scattered(sizes, |values| blocks(values, 8.0, 256.0, 2.0))
}

fn min_max(sizes: &Sizes) -> f64 {
    scattered(sizes, |values| blocks(values, 8.0, 4096.0, 32.0))
}

fn sign(sizes: &Sizes) -> f64 {
    scattered(sizes, |values| blocks(values, 1.0, 4096.0, 4.0))
}

const fn arm(name: &'static str, flags: &'static str, what: &'static str) -> Arm {
    Arm { name, flags, what, sent: None }
}

impl Arm {
    const fn sends(self, sent: fn(&Sizes) -> f64) -> Self {
        Self { sent: Some(sent), ..self }
    }
}

/// The arm that all others are compared with.
pub(crate) const F32: Arm = arm("f32", "", "uncompressed gradients, averaged in each step").sends(f32_ring);
/// A single worker, which trains on an eighth of the data.
pub(crate) const ALONE: Arm = arm("one worker", "--workers 1", "no communication, an eighth of the tokens");

/// Gradients in 16 bits.
pub(crate) const F16: Arm = arm("f16", "--codec f16", "gradients in 16 bits").sends(half);
/// `ByteGrad`: gradients in 8 bits without feedback.
pub(crate) const BYTE_GRAD: Arm =
    arm("ByteGrad", "--codec minmax8:4096 --error-feedback false", "gradients in 8 bits, no feedback")
        .sends(min_max);
/// Gradients in 8 bits.
pub(crate) const INT8: Arm = arm("int8", "--codec int8", "gradients in 8 bits with feedback").sends(int8);
/// Gradients in one bit with feedback.
pub(crate) const SIGN: Arm =
    arm("1 bit", "--codec sign", "gradients in one bit with feedback, into AdamW").sends(sign);
/// Gradients in one bit without feedback.
pub(crate) const SIGN_ALONE: Arm = arm(
    "1 bit, no feedback",
    "--codec sign --error-feedback false",
    "a control: what the codec loses is dropped",
)
.sends(sign);

/// `DiLoCo` with averages every 10 steps.
pub(crate) const DILOCO_10: Arm =
    arm("DiLoCo H=10", "--sync diloco --sync-every 10", "averages every 10 steps").sends(f32_ring);
/// `DiLoCo` with averages every 50 steps.
pub(crate) const DILOCO_50: Arm =
    arm("DiLoCo H=50", "--sync diloco --sync-every 50", "averages every 50 steps").sends(f32_ring);
/// `DiLoCo` with averages every 500 steps, as in the paper.
pub(crate) const DILOCO_500: Arm =
    arm("DiLoCo H=500", "--sync diloco --sync-every 500", "averages every 500 steps").sends(f32_ring);
/// `DiLoCo` with averages every 50 steps in 8 bits.
pub(crate) const DILOCO_INT8: Arm = arm(
    "DiLoCo H=50, int8",
    "--sync diloco --sync-every 50 --codec int8",
    "averages every 50 steps in 8 bits",
)
.sends(int8);

/// `DiLoCo` in which each replica trains on different files.
pub(crate) const DILOCO_FILES: Arm = arm(
    "DiLoCo H=50, files",
    "--sync diloco --sync-every 50 --shards files",
    "averages every 50 steps, each replica trains on its own files",
)
.sends(f32_ring);
/// `DiLoCo` in which each replica trains on a different cluster of similar text.
pub(crate) const DILOCO_KMEANS: Arm = arm(
    "DiLoCo H=50, kmeans:8",
    "--sync diloco --sync-every 50 --shards kmeans:8",
    "averages every 50 steps, each replica trains on a cluster of similar chunks",
)
.sends(f32_ring);

/// Returns the payload of `PowerSGD`: the two factors of each matrix, and all values of vectors and small
/// matrices, averaged by rings.
fn power_sgd(sizes: &Sizes, rank: f64) -> f64 {
    let values = |shape: &Vec<f64>| match shape[..] {
        [rows, columns] if rank * (rows + columns) < rows * columns => rank * (rows + columns),
        _ => shape.iter().product(),
    };
    let all = sizes.tensors.iter().map(values).sum::<f64>();
    2.0 * (sizes.ranks - 1.0) / sizes.ranks * 4.0 * all
}

/// `PowerSGD` with products of rank 4.
pub(crate) const POWER_SGD_4: Arm =
    arm("PowerSGD rank 4", "--codec powersgd:4", "matrices as products of rank 4, with error feedback")
        .sends(|sizes| power_sgd(sizes, 4.0));
/// `PowerSGD` with products of rank 1.
pub(crate) const POWER_SGD_1: Arm =
    arm("PowerSGD rank 1", "--codec powersgd:1", "matrices as products of rank 1, with error feedback")
        .sends(|sizes| power_sgd(sizes, 1.0));

/// A hundredth of the gradients with momentum correction before the selection, and no momentum in the
/// optimizer.
pub(crate) const DGC: Arm = arm(
    "DGC 1 %",
    "--codec dgc:0.01 --beta1 0 --lr 1e-3 --min-lr 1e-4",
    "a hundredth of the gradients with momentum correction, into AdamW without a first moment",
);
/// `DGC` with a density that falls over a tenth of the steps.
pub(crate) const DGC_FALLING: Arm = arm(
    "DGC 1 %, density warm-up",
    "--codec dgc:0.01 --density-warmup 200 --beta1 0 --lr 1e-3 --min-lr 1e-4",
    "as DGC 1 %, but starts with a quarter of the gradients and then sends fewer and fewer",
);
/// The largest hundredth of the gradients with feedback.
pub(crate) const TOP_K: Arm =
    arm("top 1 %", "--codec topk:0.01", "the largest hundredth of the gradients, with feedback, into AdamW");
/// The largest hundredth of the gradients without feedback.
pub(crate) const TOP_K_ALONE: Arm = arm(
    "top 1 %, no feedback",
    "--codec topk:0.01 --error-feedback false",
    "a control: elements that are not selected are dropped",
);

/// Fraction of the steps in which 1-bit Adam, 1-bit LAMB and `QAdam` send uncoded values.
const WARMUP: f64 = 0.15;

/// 1-bit Adam: momentum in one bit.
pub(crate) const ONEBIT_ADAM: Arm = arm(
    "1-bit Adam",
    "--optimizer onebit-adam --codec sign",
    "momentum in one bit with feedback; the first 15 % of the steps as f32",
)
.sends(|sizes| WARMUP * f32_ring(sizes) + (1.0 - WARMUP) * sign(sizes));
/// 1-bit LAMB: LAMB's momentum in one bit.
pub(crate) const ONEBIT_LAMB: Arm = arm(
    "1-bit LAMB",
    "--optimizer onebit-lamb --codec sign",
    "LAMB's momentum in one bit with feedback; the first 15 % of the steps as f32",
)
.sends(|sizes| WARMUP * f32_ring(sizes) + (1.0 - WARMUP) * sign(sizes));
/// LAMB, for comparison with 1-bit LAMB.
pub(crate) const LAMB: Arm =
    arm("LAMB", "--optimizer lamb", "a control: gradients as f32 into LAMB").sends(f32_ring);
/// `QAdam`: momentum in 8 bits.
pub(crate) const QADAM: Arm = arm(
    "QAdam",
    "--optimizer qadam --codec minmax8:4096",
    "momentum in 8 bits; the first 15 % of the steps as f32",
)
.sends(|sizes| WARMUP * f32_ring(sizes) + (1.0 - WARMUP) * min_max(sizes));

/// Returns the payload of 0/1 Adam. It sends gradients as f32 in steps that change the variance, and in one bit
/// in the other steps before the variance is frozen. After that it sends what local steps have gathered, in one
/// bit.
fn zero_one(sizes: &Sizes) -> f64 {
    let steps = sizes.steps as u64;
    let freeze = (steps * 15).div_ceil(100);
    let most = sizes.every as u64;
    let rounds = SyncSchedule { freeze, variance_doubling: 16, local_doubling: steps.div_ceil(5), most };
    let each = Sizes { every: 1.0, ..sizes.clone() };
    let (plain, packed) = (f32_ring(&each), sign(&each));
    let sent = |step| match () {
        () if rounds.varies(step) => plain,
        () if rounds.synchronises(step) || step + 1 == steps => packed,
        () => 0.0,
    };
    (0..steps).map(sent).sum::<f64>() / sizes.steps
}

/// 0/1 Adam: local steps whose results are averaged in one bit.
pub(crate) const ZERO_ONE_ADAM: Arm = arm(
    "0/1 Adam",
    "--optimizer zero-one-adam --codec sign",
    "gradients in one bit while the variance changes more and more rarely, then local steps",
)
.sends(zero_one);

/// Streaming `DiLoCo`: fragments of the parameters are sent in 4 bits.
pub(crate) const STREAMING: Arm = arm(
    "streaming DiLoCo H=50, E3M0",
    "--sync streaming --sync-every 50 --codec e3m0 --error-feedback false",
    "four fragments of the parameters in 4 bits, one after the other, applied one step late",
);
/// Streaming `DiLoCo` with fragments as f32.
pub(crate) const STREAMING_F32: Arm = arm(
    "streaming DiLoCo H=50",
    "--sync streaming --sync-every 50 --sync-delay 6",
    "four fragments of the parameters, one after the other, applied six steps late",
);
/// Streaming `DiLoCo` with fragments as f32, mixed with the worker's own values as in the paper.
pub(crate) const STREAMING_MIXED: Arm = arm(
    "streaming DiLoCo H=50, mixed by half",
    "--sync streaming --sync-every 50 --sync-delay 6 --mixing 0.5",
    "as streaming DiLoCo H=50, but each worker keeps half of its own values",
);
/// Streaming `DiLoCo` whose fragments are applied without delay.
pub(crate) const FRAGMENTS: Arm = arm(
    "DiLoCo H=50 in fragments",
    "--sync streaming --sync-every 50 --sync-delay 0",
    "a control: four fragments, for which workers wait",
);

/// `CocktailSGD`.
pub(crate) const COCKTAIL: Arm = arm(
    "CocktailSGD",
    "--sync cocktail --codec rolling:10/topk:0.2/int4",
    "the largest fifth of a tenth of the elements, which changes in turn, in 4 bits, one step late",
);
/// `CocktailSGD`'s delay with int4 instead of its selections.
pub(crate) const COCKTAIL_INT4: Arm =
    arm("a step late, int4", "--sync cocktail --codec int4", "parameters averaged in 4 bits, a step late");
/// `CocktailSGD`'s delay without compression: BAGUA's decentralised algorithm in which all workers are
/// neighbours.
pub(crate) const COCKTAIL_F32: Arm =
    arm("a step late", "--sync cocktail --codec none", "a control: parameters averaged as f32, a step late")
        .sends(f32_ring);
/// `CocktailSGD` with top-k only, at the same number of bytes.
pub(crate) const TOP_TWO: Arm = arm(
    "a step late, top 2 %",
    "--sync cocktail --codec topk:0.02/int4",
    "a control: only the largest elements",
);
/// `CocktailSGD` with the rolling mask only, at the same number of bytes.
pub(crate) const MASK: Arm = arm(
    "a step late, rolling 2 %",
    "--sync cocktail --codec rolling:50/int4",
    "a control: only elements in turn",
);

/// D-PSGD on a ring.
pub(crate) const D_PSGD: Arm =
    arm("D-PSGD", "--sync d-psgd", "parameters mixed with both neighbours on a ring")
        .sends(|sizes| 8.0 * sizes.params);
/// BAGUA's changing pairs of workers.
pub(crate) const SHIFT_ONE: Arm =
    arm("shift-one", "--sync shift-one", "parameters mixed in pairs that change")
        .sends(|sizes| 4.0 * sizes.params);
/// Mixing on an exponential graph.
pub(crate) const EXPONENTIAL: Arm = arm(
    "exponential",
    "--sync exponential",
    "parameters mixed with the worker 1, 2 or 4 ranks before, in turn",
)
.sends(|sizes| 4.0 * sizes.params);

/// Stochastic gradient push. Each message has a weight of four bytes in addition to the parameters.
pub(crate) const SGP: Arm = arm(
    "SGP",
    "--sync sgp",
    "parameters and their weight sent to the worker 1, 2 or 4 ranks after, in turn, and divided",
)
.sends(|sizes| beside_a_mean(sizes, 4.0 * sizes.params + 4.0));

/// `DeMo` with 32 coefficients per chunk.
pub(crate) const DEMO: Arm =
    arm("DeMo k=32", "--recipe demo --lr 5e-3", "32 of 4096 DCT coefficients of each worker's own momentum");
/// `DeMo` with 4 coefficients per chunk in one bit, as in Psyche.
pub(crate) const DISTRO: Arm =
    arm("DeMo k=4, 1 bit", "--recipe distro --lr 4e-3", "the signs of 4 of 4096 DCT coefficients");
/// `DeMo` without the transform: 32 elements per chunk.
pub(crate) const DEMO_PLAIN: Arm = arm(
    "DeMo k=32, no DCT",
    "--recipe demo --lr 5e-3 --codec topk:32of4096/none+ef:0.999",
    "a control: 32 of 4096 elements without the transform",
);
/// `DeMo` without feedback, which is its momentum.
pub(crate) const DEMO_ALONE: Arm = arm(
    "DeMo k=32, no momentum",
    "--recipe demo --lr 5e-3 --codec dct:64/topk:32of4096 --error-feedback false",
    "control: values that are not sent are dropped",
);
/// Signum: the sign of the momentum of gradients that are averaged as f32.
pub(crate) const SIGNUM: Arm = arm(
    "Signum",
    "--optimizer signum --lr 1e-3",
    "the sign of the momentum of gradients that are sent as f32",
)
.sends(f32_ring);

/// `SparseLoCo`.
pub(crate) const SPARSELOCO: Arm = arm(
    "SparseLoCo H=30",
    "--recipe sparseloco --outer-lr 2",
    "every 30 steps 64 of 4096 elements in 2 bits",
);
/// `SparseLoCo` without feedback.
pub(crate) const SPARSELOCO_ALONE: Arm = arm(
    "SparseLoCo H=30, no feedback",
    "--recipe sparseloco --outer-lr 2 --codec topk:64of4096/meanstd2 --error-feedback false",
    "a control: elements that are not selected are dropped",
);
/// `SparseLoCo` with Muon as the inner optimizer.
pub(crate) const SPARSE_MUON: Arm = arm(
    "SparseLoCo H=30, Muon",
    "--recipe sparseloco --optimizer muon --outer-lr 3",
    "Muon, and every 30 steps 64 of 4096 elements in 2 bits",
);
/// `DiLoCo` with averages every 100 steps in 8 bits.
pub(crate) const DILOCO_100_INT8: Arm = arm(
    "DiLoCo H=100, int8",
    "--sync diloco --sync-every 100 --codec int8",
    "averages every 100 steps in 8 bits",
)
.sends(int8);
/// `MuLoCo`: `DiLoCo` with Muon as the inner optimizer.
pub(crate) const MULOCO: Arm =
    arm("MuLoCo H=30", "--recipe muloco", "Muon, and averages every 30 steps in 2 bits with feedback");
/// `MuLoCo` with averages every 100 steps.
pub(crate) const MULOCO_100: Arm = arm(
    "MuLoCo H=100",
    "--recipe muloco --sync-every 100 --outer-momentum 0.6",
    "Muon, and averages every 100 steps in 2 bits with feedback",
);
/// Muon with gradients averaged at each step.
pub(crate) const MUON: Arm = arm("Muon", "--optimizer muon", "gradients as f32 into Muon").sends(f32_ring);

/// Returns the payload per step of a run that sends `step` bytes in each step but the last, and averages all
/// parameters as f32 after the last.
fn beside_a_mean(sizes: &Sizes, step: f64) -> f64 {
    let mean = 2.0 * (sizes.ranks - 1.0) / sizes.ranks * 4.0 * sizes.params;
    step + (mean - step) / sizes.steps
}

/// `NoLoCo`: outer steps in random pairs of workers.
pub(crate) const NOLOCO: Arm =
    arm("NoLoCo H=50", "--sync noloco --sync-every 50", "outer steps every 50 steps, in random pairs");
/// BAGUA's low-precision ring: changes of parameters in 8 bits to both neighbours.
pub(crate) const LOW_PRECISION: Arm = arm(
    "low-precision ring",
    "--sync low-precision --codec minmax8:4096",
    "changes of parameters in 8 bits to both neighbours on a ring",
)
.sends(|sizes| beside_a_mean(sizes, 2.0 * blocks(sizes.params, 8.0, 4096.0, 32.0)));
/// `CHOCO-SGD`: changes of parameters in one bit to both neighbours.
pub(crate) const CHOCO: Arm = arm(
    "CHOCO-SGD, 1 bit",
    "--sync choco --codec sign",
    "changes of parameters in one bit to both neighbours on a ring",
)
.sends(|sizes| beside_a_mean(sizes, 2.0 * blocks(sizes.params, 1.0, 4096.0, 4.0)));

/// Returns the payload of Moniqua: to each of two neighbours, cells of `bits` bits per element and an
/// eight-byte check.
fn moniqua(sizes: &Sizes, bits: f64) -> f64 {
    beside_a_mean(sizes, 2.0 * ((sizes.params * bits / 8.0).ceil() + 8.0))
}

/// Moniqua: parameters modulo a bound, in 8 bits to both neighbours.
pub(crate) const MONIQUA_8: Arm = arm(
    "Moniqua, 8 bits",
    "--sync moniqua --moniqua-bits 8 --consensus-rate 1",
    "parameters modulo a bound in 8 bits to both neighbours on a ring, without additional memory",
)
.sends(|sizes| moniqua(sizes, 8.0));
/// Moniqua in one bit.
pub(crate) const MONIQUA_1: Arm = arm(
    "Moniqua, 1 bit",
    "--sync moniqua --moniqua-bits 1 --consensus-rate 0.02",
    "parameters modulo a bound in one bit to both neighbours on a ring, without additional memory",
)
.sends(|sizes| moniqua(sizes, 1.0));

/// The largest hundredth of the gradients, encoded once and sent to all workers.
pub(crate) const TOP_K_GATHERED: Arm = arm(
    "top 1 %, all-gather",
    "--codec topk:0.01 --algorithm all-gather",
    "the largest hundredth of the gradients sent to all workers, with feedback, into AdamW",
);
/// Momentum-corrected gradients, encoded once and sent to all workers.
pub(crate) const DGC_GATHERED: Arm = arm(
    "DGC 1 %, all-gather",
    "--codec dgc:0.01 --algorithm all-gather --beta1 0 --lr 1e-3 --min-lr 1e-4",
    "as DGC 1 %, but each worker sends its selection to all others",
);

/// Matrix products with operands in bf16.
pub(crate) const BF16: Arm =
    arm("products in bf16", "--precision bf16", "operands of matrix products in bf16").sends(f32_ring);
/// Matrix products with operands in f16.
pub(crate) const F16_PRODUCTS: Arm =
    arm("products in f16", "--precision f16", "operands of matrix products in f16, scaled losses")
        .sends(f32_ring);

/// `DiLoCo` in which slower workers take fewer local steps.
pub(crate) const DILOCO_BY_SPEED: Arm = arm(
    "DiLoCo H=10, by speed",
    "--sync diloco --sync-every 10 --local-steps by-speed",
    "averages every 10 steps, of which slower workers take fewer",
);
/// Asynchronous local steps with delayed Nesterov.
pub(crate) const ASYNC: Arm = arm(
    "async H=10, by speed",
    "--sync async --sync-every 10 --local-steps by-speed",
    "each worker updates the model on servers every 10 steps and waits for no other worker",
);
/// Asynchronous local steps with changes in 8 bits.
pub(crate) const ASYNC_INT8: Arm = arm(
    "async H=10, by speed, int8",
    "--sync async --sync-every 10 --local-steps by-speed --codec int8",
    "as async H=10, with changes in 8 bits with feedback; models come back as f32",
);
/// Asynchronous local steps without outer momentum.
pub(crate) const ASYNC_PLAIN: Arm = arm(
    "async H=10, by speed, no momentum",
    "--sync async --sync-every 10 --local-steps by-speed --outer-lr 1 --outer-momentum 0",
    "as async H=10, without outer momentum",
);
/// Asynchronous SGD with a parameter server.
pub(crate) const PARAMETER_SERVER: Arm = arm(
    "parameter server",
    "--sync parameter-server --local-steps by-speed",
    "each step updates the model on servers, and the worker continues from the result",
);
/// Asynchronous SGD with a bound on the steps between workers.
pub(crate) const BOUNDED_STALE: Arm = arm(
    "bounded staleness 4",
    "--sync bounded-stale --staleness 4 --local-steps by-speed",
    "a parameter server whose workers are at most four steps apart",
);
/// Decoupled `DiLoCo`.
pub(crate) const DECOUPLED: Arm = arm(
    "decoupled H=10, by speed",
    "--sync decoupled --sync-every 10 --local-steps by-speed",
    "outer steps over more than half of the workers, those that are ready first",
);

/// `HALoS`: asynchronous local steps on two levels of servers.
pub(crate) const HALOS: Arm = arm(
    "HALoS H=10, by speed",
    "--sync halos --sync-every 10 --local-steps by-speed",
    "as async, with a server in each region that sends its changes to a world server",
);

/// BAGUA's asynchronous model averaging.
pub(crate) const ASYNC_AVERAGE: Arm = arm(
    "asynchronous averaging",
    "--sync async-average --average-interval 5ms --local-steps by-speed",
    "parameters of all workers are averaged in the background every 5 ms, while training continues",
);

/// Local SGD: plain averages of parameters every 5 steps.
pub(crate) const LOCAL_5: Arm = arm(
    "local SGD H=5",
    "--sync diloco --sync-every 5 --outer-lr 1 --outer-momentum 0",
    "plain averages of parameters every 5 steps",
)
.sends(f32_ring);
/// Local SGD with averages every 10 steps.
pub(crate) const LOCAL_10: Arm = arm(
    "local SGD H=10",
    "--sync diloco --sync-every 10 --outer-lr 1 --outer-momentum 0",
    "plain averages of parameters every 10 steps",
)
.sends(f32_ring);
/// Local SGD with averages every 50 steps, as for GPT-JT.
pub(crate) const LOCAL_50: Arm = arm(
    "local SGD H=50",
    "--sync diloco --sync-every 50 --outer-lr 1 --outer-momentum 0",
    "plain averages of parameters every 50 steps",
)
.sends(f32_ring);
/// Local Adam: parameters and both moments are averaged every 10 steps.
pub(crate) const LOCAL_ADAM: Arm = arm(
    "local Adam H=10",
    "--sync des-loc --sync-every 10 --first-moment-every 10 --second-moment-every 10",
    "parameters and both of Adam's moments are averaged every 10 steps",
)
.sends(|sizes| 3.0 * f32_ring(sizes));
/// `DES-LOC` with the ratios of periods of the paper: moments are averaged 3 and 6 times less often than
/// parameters.
pub(crate) const DES_LOC: Arm = arm(
    "DES-LOC H=10",
    "--sync des-loc --sync-every 10",
    "parameters are averaged every 10 steps, Adam's moments every 30 and 60",
)
.sends(|sizes| {
    let count = |every: f64| (sizes.steps / every).floor();
    let meetings = (sizes.steps / sizes.every).ceil();
    f32_ring(sizes) * sizes.every / sizes.steps * (meetings + count(30.0) + count(60.0))
});
/// Eager `DiLoCo` with averages every 10 steps.
pub(crate) const EAGER_10: Arm = arm(
    "eager DiLoCo H=10",
    "--sync eager --sync-every 10",
    "averages every 10 steps, each of which may take the next 10 steps to arrive",
);
/// Eager `DiLoCo` with averages every 50 steps.
pub(crate) const EAGER_50: Arm = arm(
    "eager DiLoCo H=50",
    "--sync eager --sync-every 50",
    "averages every 50 steps, each of which may take the next 50 steps to arrive",
);
/// Event-triggered averages.
pub(crate) const EVENT: Arm = arm(
    "event-triggered",
    "--sync event --trigger 0.02",
    "a tensor goes to both neighbours once it has changed by 2 % of its norm",
);
