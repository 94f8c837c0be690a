//! Tests of the executor. A worker that computes numbers gets the same gradients as one process, whatever the
//! order of work. A worker with a virtual clock needs exactly the simulated time.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank, StageId};
use farflung_parallel::pipeline::{
    Action, ArrivalExecutor, ArrivalRule, Boundary, ComputeKind, ComputeOrder, Content, Executor, Lowered,
    LoweredKind, Lowering, Message, Method, PipelineCost, Placement, PollArrivals, Progress, Schedule,
    Settings, StageCost, Worker, simulate,
};

/// A message with its time of arrival and its number.
type Letter = (Message, Nanos, u64);

/// A worker with a virtual clock. Its stages are affine maps over wrapping integers, so that a wrong input
/// changes the result.
struct Numbers {
    placement: Placement,
    cost: PipelineCost,
    slices: u64,
    clock: Nanos,
    wires: BTreeMap<Rank, Nanos>,
    to: BTreeMap<Rank, Sender<Letter>>,
    from: BTreeMap<Rank, Receiver<Letter>>,
    /// For each forward, its input and the gradient of its output (0 before `I`). Kept until the backward, or
    /// until `W` if the backward is split.
    saved: BTreeMap<(StageId, u32, u16), (u64, u64)>,
    /// Sum of weight gradients, by part of the model.
    grads: BTreeMap<u32, u64>,
    reduced: Vec<StageId>,
    stepped: Vec<Action>,
    /// Content and time of arrival of every message, as a checkpoint would store it.
    log: BTreeMap<Message, (Nanos, u64)>,
}

fn forward(part: u32, x: u64) -> u64 {
    x.wrapping_mul(2 * u64::from(part) + 3).wrapping_add(7)
}

fn backward(part: u32, dy: u64) -> u64 {
    dy.wrapping_mul(2 * u64::from(part) + 3)
}

impl Numbers {
    fn key(action: Action) -> (StageId, u32, u16) {
        (action.stage, action.microbatch, action.slice)
    }
}

impl Worker for Numbers {
    type Data = u64;
    type Pending = (Rank, Message);
    type Error = String;

    fn compute(&mut self, action: Action, input: Option<u64>) -> Result<Option<u64>, String> {
        let part = self.placement.part(action.stage);
        self.clock += Nanos(self.cost.stages[part as usize].time(action.kind).0 / self.slices);
        let key = Self::key(action);
        let weigh = |grads: &mut BTreeMap<u32, u64>, x: u64, dy: u64| {
            let grad = grads.entry(part).or_default();
            *grad = grad.wrapping_add(x.wrapping_mul(dy));
        };
        let output = match action.kind {
            ComputeKind::Forward => {
                let x = input.unwrap_or(100 + u64::from(action.microbatch) * 10 + u64::from(action.slice));
                self.saved.insert(key, (x, 0));
                Some(forward(part, x))
            }
            ComputeKind::Backward | ComputeKind::BackwardInput => {
                let dy = input.unwrap_or(1);
                let (x, _) = self.saved[&key];
                if action.kind == ComputeKind::Backward {
                    self.saved.remove(&key);
                    weigh(&mut self.grads, x, dy);
                } else {
                    self.saved.insert(key, (x, dy));
                }
                Some(backward(part, dy))
            }
            ComputeKind::BackwardWeight => {
                let (x, dy) = self.saved.remove(&key).ok_or("W without I")?;
                weigh(&mut self.grads, x, dy);
                None
            }
            ComputeKind::Recompute => None,
            ComputeKind::Step => {
                self.stepped.push(action);
                None
            }
        };
        if let (Some(message), Some(data)) = (Message::made_by(action, &self.placement), output) {
            self.log.insert(message, (self.clock, data));
        }
        Ok(output)
    }

    fn send(&mut self, to: Rank, message: Message, data: u64) -> Result<(), String> {
        let boundary = &self.cost.boundaries[self.placement.part(message.from.min(message.to())) as usize];
        let bytes = Bytes(boundary.forward.0 / self.slices);
        let wire = self.wires.entry(to).or_default();
        *wire = (*wire).max(self.clock) + boundary.link.bandwidth.transfer(bytes);
        let letter = (message, *wire + boundary.link.latency, data);
        self.to[&to].send(letter).map_err(|_| "the peer is gone".to_owned())
    }

    fn receive(&mut self, from: Rank, message: Message) -> Result<(Rank, Message), String> {
        Ok((from, message))
    }

    fn wait(&mut self, (from, message): (Rank, Message)) -> Result<u64, String> {
        while !self.log.contains_key(&message) {
            let (got, arrival, data) = self.from[&from].recv().map_err(|_| "the peer is gone".to_owned())?;
            self.log.insert(got, (arrival, data));
        }
        let (arrival, data) = self.log[&message];
        self.clock = self.clock.max(arrival);
        Ok(data)
    }

    fn start_transfer(&mut self, kind: LoweredKind, stage: StageId, _: u32, _: u16) -> Result<(), String> {
        if kind == LoweredKind::Reduce {
            self.reduced.push(stage);
        }
        Ok(())
    }

    fn restore_output(&mut self, message: Message) -> Result<u64, String> {
        let kept = self.log.get(&message).map(|&(_, data)| data);
        kept.ok_or_else(|| format!("{message} was not kept"))
    }
}

/// Reports the messages that are in the channels now, in real time.
impl PollArrivals for Numbers {
    fn arrived(&mut self, awaited: &mut [&mut (Rank, Message)]) -> Option<usize> {
        for from in self.from.values() {
            self.log.extend(from.try_iter().map(|(message, arrival, data)| (message, (arrival, data))));
        }
        awaited.iter().position(|(_, message)| self.log.contains_key(message))
    }

    fn first(&mut self, awaited: &mut [&mut (Rank, Message)]) -> usize {
        loop {
            match self.arrived(awaited) {
                Some(first) => return first,
                None => std::thread::yield_now(),
            }
        }
    }
}

/// Unequal stages and links, some with low bandwidth.
fn uneven(order: &ComputeOrder) -> PipelineCost {
    let depth = u64::from(order.placement().depth());
    let stage = |g: u64| StageCost {
        forward: Nanos(100 + 20 * (g % 3)),
        input: Nanos(120 + 10 * (g % 2)),
        weight: Nanos(80 + 20 * (g % 4)),
        recompute: Nanos(90),
        ..StageCost::UNIT
    };
    let boundary = |g: u64| {
        let link = Link { bandwidth: Bandwidth(8_000_000_000), latency: Nanos(10 + 40 * (g % 3)) };
        let bytes = Bytes(30 * (1 + g % 4));
        Boundary { link, forward: bytes, backward: bytes }
    };
    PipelineCost {
        stages: (0..depth).map(stage).collect(),
        boundaries: (0..depth - 1).map(boundary).collect(),
        ..PipelineCost::uniform(order, StageCost::UNIT, Boundary::latency(Nanos::ZERO))
    }
}

/// Creates a worker for each rank, connected by channels.
fn workers(order: &ComputeOrder, cost: &PipelineCost) -> Vec<Numbers> {
    let ranks = order.placement().ranks();
    let mut workers: Vec<Numbers> = (0..ranks)
        .map(|_| Numbers {
            placement: order.placement().clone(),
            cost: cost.clone(),
            slices: u64::from(order.slices()),
            clock: Nanos::ZERO,
            wires: BTreeMap::new(),
            to: BTreeMap::new(),
            from: BTreeMap::new(),
            saved: BTreeMap::new(),
            grads: BTreeMap::new(),
            reduced: Vec::new(),
            stepped: Vec::new(),
            log: BTreeMap::new(),
        })
        .collect();
    for a in 0..ranks {
        for b in (0..ranks).filter(|&b| b != a) {
            let (to, from) = channel();
            workers[a as usize].to.insert(Rank(b), to);
            workers[b as usize].from.insert(Rank(a), from);
        }
    }
    workers
}

/// Runs every rank in its own thread. Returns the workers.
fn run_all(
    schedule: &Schedule,
    cost: &PipelineCost,
    each: impl Fn(Rank, &mut Numbers) + Sync,
) -> Vec<Numbers> {
    let mut workers = workers(schedule.order(), cost);
    std::thread::scope(|scope| {
        for (rank, worker) in (0..).map(Rank).zip(&mut workers) {
            let each = &each;
            scope.spawn(move || each(rank, worker));
        }
    });
    workers
}

/// Returns the gradients of one process, by part of the model.
fn reference(order: &ComputeOrder) -> BTreeMap<u32, u64> {
    let depth = order.placement().depth();
    let mut grads = BTreeMap::new();
    for (microbatch, slice) in
        (0..u64::from(order.microbatches())).flat_map(|m| (0..u64::from(order.slices())).map(move |s| (m, s)))
    {
        let mut inputs = vec![100 + 10 * microbatch + slice];
        for part in 0..depth {
            inputs.push(forward(part, inputs[part as usize]));
        }
        let mut dy = 1_u64;
        for part in (0..depth).rev() {
            let grad: &mut u64 = grads.entry(part).or_default();
            *grad = grad.wrapping_add(inputs[part as usize].wrapping_mul(dy));
            dy = backward(part, dy);
        }
    }
    grads
}

fn total(workers: &[Numbers]) -> BTreeMap<u32, u64> {
    let mut grads = BTreeMap::new();
    for (&part, &grad) in workers.iter().flat_map(|w| &w.grads) {
        let sum: &mut u64 = grads.entry(part).or_default();
        *sum = sum.wrapping_add(grad);
    }
    grads
}

fn schedules() -> impl Iterator<Item = (Method, Schedule)> {
    let sizes = [(1, 4), (2, 4), (4, 8), (6, 12)];
    let all = Method::ALL.into_iter().flat_map(move |method| sizes.map(|size| (method, size)));
    all.filter_map(|(method, (p, m))| {
        let settings = Settings { slices: 2, ..Settings::new(p, m) };
        let order = method.order(&settings).ok()?;
        let order = if p == 2 { order.with_recompute() } else { order };
        let lowering = Lowering { replicas: true, offload: Some(4), ..Lowering::default() };
        Some((method, Schedule::new(order, &lowering).expect("a method's order lowers")))
    })
}

#[test]
fn every_schedule_computes_what_one_process_does_in_the_predicted_time() {
    for (method, schedule) in schedules() {
        let order = schedule.order();
        let cost = uneven(order);
        let workers = run_all(&schedule, &cost, |rank, worker| {
            farflung_parallel::pipeline::run(&schedule, rank, worker).unwrap();
        });
        if !order.is_forward_only() {
            assert_eq!(total(&workers), reference(order), "{method}");
            assert!(workers.iter().all(|w| w.saved.is_empty()), "{method}");
            if method.is_synchronous() {
                let stages = order.placement().stages() as usize;
                assert_eq!(workers.iter().map(|w| w.stepped.len()).sum::<usize>(), stages, "{method}");
                assert_eq!(workers.iter().map(|w| w.reduced.len()).sum::<usize>(), stages, "{method}");
            }
        }
        let predicted = simulate(order, &cost).unwrap();
        for (rank, worker) in (0..).map(Rank).zip(&workers) {
            let end = predicted.slots(rank).last().map(|slot| slot.end);
            assert_eq!(Some(worker.clock), end, "{method}, {rank} of {}", workers.len());
        }
    }
}

/// Each rank drops its executor again and again and resumes from its saved position.
#[test]
fn a_saved_position_goes_on() {
    for (method, schedule) in schedules().filter(|(_, s)| !s.order().is_forward_only()) {
        let workers = run_all(&schedule, &uneven(schedule.order()), |rank, worker| {
            let mut executor = Executor::new(&schedule, rank);
            for steps in 1.. {
                if executor.step(worker).unwrap() == Progress::Done {
                    break;
                }
                if steps % 3 == 0 {
                    let at = executor.at();
                    executor = Executor::resume(&schedule, rank, at, worker).unwrap();
                    assert_eq!(executor.at(), at);
                }
            }
        });
        assert_eq!(total(&workers), reference(schedule.order()), "{method}");
    }
}

#[test]
fn a_failure_stops_before_the_entry_that_failed() {
    let order = Method::GPipe.order(&Settings::new(2, 2)).unwrap();
    let schedule = Schedule::new(order, &Lowering::default()).unwrap();
    let cost = uneven(schedule.order());
    let mut one = workers(schedule.order(), &cost).swap_remove(0);
    one.to.clear();
    let (closed, _) = channel();
    one.to.insert(Rank(1), closed);
    let mut executor = Executor::new(&schedule, Rank(0));
    assert_eq!(executor.run(&mut one), Err("the peer is gone".to_owned()));
    let entry = schedule.lists()[0][executor.at()];
    assert_eq!(entry, "0SEND_F0".parse::<Lowered>().unwrap());
}

/// `PipeDream` updates after each backward, 2BW after as many as there are stages.
#[test]
fn asynchronous_schedules_step_as_their_rules_say() {
    for (method, steps) in [(Method::PipeDream, 8), (Method::PipeDream2Bw, 2)] {
        let order = method.order(&Settings::new(4, 8)).unwrap();
        let schedule = Schedule::new(order, &Lowering::default()).unwrap();
        for list in schedule.lists() {
            let step = |e: &&Lowered| e.to_string().contains("STEP");
            assert_eq!(list.iter().filter(step).count(), steps, "{method}");
        }
    }
}

#[test]
fn whatever_arrives_when_the_gradients_are_those_of_one_process() {
    for (p, m, in_flight) in [(1, 3, 1), (2, 6, 2), (4, 9, 1), (4, 9, 6), (5, 12, 5)] {
        for again in [false, true] {
            let settings = Settings { memory: Some(in_flight), ..Settings::new(p, m) };
            let order = Method::Varuna.order(&settings).unwrap();
            let rule = Method::Varuna.arrivals(&settings).unwrap();
            assert_eq!(rule, ArrivalRule { in_flight });
            let cost = uneven(&order);
            let order = rule.order_at(&order, &cost).unwrap();
            let order = if again { order.with_recompute() } else { order };
            let schedule = Schedule::new(order, &Lowering { replicas: true, ..Lowering::default() }).unwrap();
            let workers = run_all(&schedule, &cost, |rank, worker| {
                ArrivalExecutor::new(&schedule, rank, rule).unwrap().run(worker).unwrap();
            });
            assert_eq!(total(&workers), reference(schedule.order()), "{p} {m}");
            let done = |w: &Numbers| w.saved.is_empty() && (w.stepped.len(), w.reduced.len()) == (1, 1);
            assert!(workers.iter().all(done), "{p} {m}");
        }
    }
}

/// A worker on one of two ranks. A script defines after how many ops each message arrives.
struct Scripted {
    script: BTreeMap<Message, usize>,
    done: Vec<String>,
}

impl Worker for Scripted {
    type Data = ();
    type Pending = Message;
    type Error = String;

    fn compute(&mut self, action: Action, _: Option<()>) -> Result<Option<()>, String> {
        self.done.push(action.to_string());
        Ok(Some(()))
    }
    fn send(&mut self, _: Rank, _: Message, (): ()) -> Result<(), String> {
        Ok(())
    }
    fn receive(&mut self, _: Rank, message: Message) -> Result<Message, String> {
        Ok(message)
    }
    fn wait(&mut self, message: Message) -> Result<(), String> {
        if self.script[&message] > self.done.len() { Err(format!("{message} is not there")) } else { Ok(()) }
    }
    fn start_transfer(&mut self, _: LoweredKind, _: StageId, _: u32, _: u16) -> Result<(), String> {
        Ok(())
    }
    fn restore_output(&mut self, message: Message) -> Result<(), String> {
        Err(message.to_string())
    }
}

impl PollArrivals for Scripted {
    fn arrived(&mut self, awaited: &mut [&mut Message]) -> Option<usize> {
        awaited.iter().position(|message| self.script[message] <= self.done.len())
    }
    fn first(&mut self, awaited: &mut [&mut Message]) -> usize {
        let first = (0..awaited.len()).min_by_key(|&i| self.script[awaited[i]]).expect("one is awaited");
        // No op is ready, so time passes until the first message arrives.
        let now = self.script[awaited[first]].max(self.done.len());
        self.done.resize(now, "-".to_owned());
        first
    }
}

#[test]
fn a_backward_runs_when_its_gradient_is_there_and_a_forward_while_it_is_late() {
    let settings = Settings { memory: Some(3), ..Settings::new(2, 4) };
    let order = Method::Varuna.order(&settings).unwrap();
    let rule = Method::Varuna.arrivals(&settings).unwrap();
    let ops = |order: &ComputeOrder, rank: u32, arrivals: [usize; 4]| {
        let schedule = Schedule::new(order.clone(), &Lowering::default()).unwrap();
        let content = if rank == 0 { Content::Gradient } else { Content::Activation };
        let message = |m: u32| Message { from: StageId(1 - rank), content, microbatch: m, slice: 0 };
        let script = (0..4).map(message).zip(arrivals).collect();
        let mut worker = Scripted { script, done: Vec::new() };
        ArrivalExecutor::new(&schedule, Rank(rank), rule).unwrap().run(&mut worker).unwrap();
        worker.done.join(" ")
    };
    // In these three cases, the gradients arrive early, later, and late. At most three microbatches are in
    // flight.
    assert_eq!(ops(&order, 0, [1, 2, 3, 4]), "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0STEP3");
    assert_eq!(ops(&order, 0, [2, 3, 9, 9]), "0F0 0F1 0B0 0B1 0F2 0F3 - - - 0B2 0B3 0STEP3");
    assert_eq!(ops(&order, 0, [5, 6, 6, 9]), "0F0 0F1 0F2 - - 0B0 0B1 0B2 0F3 0B3 0STEP3");
    // The last stage has its gradients immediately.
    assert_eq!(ops(&order, 1, [0, 0, 5, 6]), "1F0 1B0 1F1 1B1 - 1F2 1B2 1F3 1B3 1STEP3");
    // Freed activations are recomputed while the gradient is late.
    let again = order.clone().with_recompute();
    assert_eq!(ops(&again, 0, [5, 5, 5, 5]).matches("0R").count(), 4);
    assert!(ops(&again, 0, [5, 5, 5, 5]).starts_with("0F0 0F1 0F2 0R0 - 0B0"));
    // Schedules that the rule does not support are an error.
    for (method, found) in [(Method::ZbH1, "backwards that are split"), (Method::Hanayo, "several stages")] {
        let order = method.order(&Settings::new(2, 4)).unwrap();
        let schedule = Schedule::new(order, &Lowering::default()).unwrap();
        let refused = ArrivalExecutor::new(&schedule, Rank(1), rule).unwrap_err().to_string();
        assert!(refused.contains(found), "{refused}");
    }
}
