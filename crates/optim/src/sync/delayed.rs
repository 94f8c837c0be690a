//! Averages of fragments of the parameters, which are applied some steps after they were sent.

mod programs;

use std::ops::Range;

use farflung_tensor::{Device, Op, Tensor, TensorError, View};

use super::saved::required;
use super::{StepEnd, SyncSettings, Synchroniser, Timeline};
use crate::finite::is_finite;
use crate::{Average, AverageConfig, OptimError};
use programs::Programs;

/// How a replica applies an average that arrives late.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Merge {
    /// Keeps this share of the replica's own parameters and takes the rest from the common model; 0 takes the
    /// common model alone.
    Mix(f64),
    /// Moves the replica's own parameters by the difference between the common model and the parameters that
    /// were sent. What the replica learned since then is kept in full.
    Rebase,
}

/// Settings of [`Delayed`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DelayedSettings {
    /// Number of steps between two departures of a fragment.
    pub every: u64,
    /// Number of fragments.
    pub fragments: usize,
    /// Number of steps between a departure and the return; 0 waits at once.
    pub delay: u64,
    /// Learning rate of the common model.
    pub outer_lr: f64,
    /// Nesterov momentum of the common model. At 0 there is no momentum buffer.
    pub outer_momentum: f64,
    /// How replicas apply an average.
    pub merge: Merge,
}

/// Local training with a common model, the anchor. The anchor moves by the mean over replicas of
/// `anchor - params`, one fragment after the other, while they train on. Replicas differ even after a
/// synchronisation.
///
/// For each fragment, at the steps of a [`Timeline`]:
///
/// ```text
/// as it leaves:   d = anchor - params, sent
/// as it returns:  v = mu v + mean(d);  anchor -= lr (mean(d) + mu v)
///                 Mix(a): params = a params + (1 - a) anchor     Rebase: params += d + the anchor's move
/// ```
///
/// With one fragment, no delay and `Mix(0)` it is `DiLoCo`. After the last step of a run, the fragment in
/// flight is applied, and then all parameters are averaged once more, without delay.
#[derive(Debug)]
pub struct Delayed {
    average: Average,
    timeline: Timeline,
    settings: DelayedSettings,
    /// Ranges of the elements of each fragment.
    fragments: Vec<Vec<Range<usize>>>,
    programs: Programs,
    outer: Outer,
    /// Next outer state, which is taken once all ranks agreed.
    next: Outer,
    /// `anchor - params` of this replica, as of when the fragment left.
    delta: Tensor,
    /// Mean of `delta` over all replicas, once it arrived.
    mean: Tensor,
    fragment_state: Option<FragmentState>,
    /// Name of `mean` among the states. It includes the timeline's settings, so that another timeline does not
    /// restore it.
    mean_name: String,
    merging: Option<Merging>,
    /// Whether a round of averaging was begun since the method was created or restored.
    opened: bool,
    steps: u64,
    goes_on: bool,
}

/// A fragment between its departure and its return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FragmentState {
    /// Still in flight.
    InFlight(usize),
    /// Its mean has arrived and is not applied yet.
    Arrived(usize),
    /// Its mean was restored from a checkpoint and is not applied yet. The step determines which fragment it
    /// is.
    Restored,
}

/// Elements that the next commit merges.
#[derive(Debug, Clone)]
struct Merging {
    elements: Vec<Range<usize>>,
    /// Whether replicas take the anchor in place of their own parameters.
    takes: bool,
    /// Whether the elements include the layout's first parameter.
    first: bool,
}

/// The common model and its momentum.
#[derive(Debug)]
struct Outer {
    anchor: Tensor,
    momentum: Option<Tensor>,
}

fn part<'a>(tensor: &'a Tensor, range: &Range<usize>) -> Result<View<'a>, TensorError> {
    tensor.view().part(range.start, range.len())
}

fn copy(from: &Tensor, to: &mut Tensor, range: &Range<usize>) -> Result<(), OptimError> {
    let (x, y) = (part(from, range)?, to.view_mut());
    Ok(from.device().run(Op::Cast { x, y: y.part(range.start, range.len())? })?)
}

impl Outer {
    fn new(device: &Device, len: usize, momentum: bool) -> Result<Self, OptimError> {
        let momentum = if momentum { Some(device.zeros(len)?) } else { None };
        Ok(Self { anchor: device.zeros(len)?, momentum })
    }

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        [("anchor", &self.anchor)].into_iter().chain(self.momentum.as_ref().map(|v| ("momentum", v)))
    }

    fn tensors_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Tensor)> {
        [("anchor", &mut self.anchor)].into_iter().chain(self.momentum.as_mut().map(|v| ("momentum", v)))
    }

    fn take(&mut self, from: &Self, range: &Range<usize>) -> Result<(), OptimError> {
        let mut all = self.tensors_mut().zip(from.tensors());
        all.try_for_each(|((_, to), (_, from))| copy(from, to, range))
    }
}

impl Delayed {
    /// Creates the method with the parameters of `sync` as its anchor. `sync` also configures the averages;
    /// everything else comes from `settings`.
    ///
    /// Errors: those of [`Timeline::new`] and [`Average::new`]; [`OptimError::Setting`] if the share of
    /// [`Merge::Mix`] is not between 0 and 1.
    pub fn new(sync: SyncSettings<'_>, settings: DelayedSettings) -> Result<Self, OptimError> {
        let SyncSettings { comm, device, layout, average, params, .. } = sync;
        let DelayedSettings { every, fragments, delay, outer_momentum, merge, .. } = settings;
        if let Merge::Mix(value) = merge
            && !(0.0..=1.0).contains(&value)
        {
            let (transform, field, expected) = ("sync", "mixing", "between 0 and 1");
            return Err(OptimError::Setting { transform, field, value, expected });
        }
        let timeline = Timeline::new(every, fragments as u64, delay)?;
        let average = Average::new(comm, device, layout, AverageConfig { fragments, ..average })?;
        let (len, momentum) = (layout.len(), outer_momentum != 0.0);
        let mut outer = Outer::new(device, len, momentum)?;
        copy(params, &mut outer.anchor, &(0..len))?;
        Ok(Self {
            fragments: (0..fragments).map(|fragment| average.fragment(fragment)).collect(),
            average,
            timeline,
            settings,
            programs: Programs::new(momentum)?,
            outer,
            next: Outer::new(device, len, momentum)?,
            delta: device.zeros(len)?,
            mean: device.zeros(len)?,
            fragment_state: None,
            mean_name: format!("mean@{every}.{fragments}.{delay}"),
            merging: None,
            opened: false,
            steps: 0,
            goes_on: false,
        })
    }

    fn device(&self) -> Device {
        self.mean.device().clone()
    }

    /// Sends some fragments, in order.
    fn send(&mut self, params: &Tensor, fragments: Range<usize>, weight: f64) -> Result<(), OptimError> {
        if fragments.start == 0 || !self.opened {
            self.average.open();
            self.opened = true;
        }
        let device = self.device();
        for fragment in fragments {
            for range in &self.fragments[fragment] {
                let (start, len) = (range.start, range.len());
                let reads = &[part(&self.outer.anchor, range)?, part(params, range)?];
                let writes = &mut [self.delta.view_mut().part(start, len)?];
                device.run(Op::Map { program: &self.programs.delta, scalars: &[], reads, writes })?;
                let reads = &[part(&self.delta, range)?];
                let writes = &mut [self.mean.view_mut().part(start, len)?];
                let scalars = &[weight as f32];
                device.run(Op::Map { program: &self.programs.scaled, scalars, reads, writes })?;
            }
            self.average.start_fragment(fragment, &self.mean)?;
        }
        Ok(())
    }

    /// Returns the fragment that is due after this step, once its mean has arrived.
    fn arrived_fragment(&mut self, after: StepEnd) -> Result<Option<usize>, OptimError> {
        let due = after.last || self.timeline.returns(after.step).is_some();
        let Some(flight) = self.fragment_state.filter(|_| due) else { return Ok(None) };
        Ok(match flight {
            FragmentState::InFlight(fragment) => {
                self.average.finish_fragments(&mut self.mean)?;
                Some(fragment)
            }
            FragmentState::Arrived(fragment) => Some(fragment),
            FragmentState::Restored => self.timeline.away(after.step.saturating_sub(1)),
        })
    }

    /// Sets the elements that the next commit merges.
    fn set_merging(&mut self, fragments: Range<usize>, takes: bool) {
        let first = fragments.end == self.fragments.len();
        let elements = self.fragments[fragments].concat();
        self.merging = Some(Merging { elements, takes, first });
    }

    /// Returns the shares of the replica's own parameters and of the anchor; `None` for [`Merge::Rebase`],
    /// unless `takes` is set.
    fn parts(&self, takes: bool) -> Option<[f32; 2]> {
        match self.settings.merge {
            _ if takes => Some([0.0, 1.0]),
            Merge::Mix(own) => Some([own as f32, (1.0 - own) as f32]),
            Merge::Rebase => None,
        }
    }
}

impl Synchroniser for Delayed {
    fn gradients(&mut self) -> Option<&mut Average> {
        None
    }
    fn is_due(&self, after: StepEnd) -> bool {
        after.last || self.timeline.returns(after.step).is_some()
    }
    fn exchange(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<(), OptimError> {
        (self.merging, self.goes_on) = (None, false);
        if let Some(fragment) = self.arrived_fragment(after)? {
            self.set_merging(fragment..fragment + 1, false);
            // All fragments are then averaged once more, without delay.
            self.goes_on = after.last;
            return Ok(());
        }
        let all = 0..self.timeline.fragments();
        let leaves = self.timeline.leaves(after.step).filter(|_| self.timeline.delay() == 0);
        let now = if after.last { Some(all) } else { leaves.map(|fragment| fragment..fragment + 1) };
        if let Some(fragments) = now {
            self.send(params, fragments.clone(), weight)?;
            self.average.finish_fragments(&mut self.mean)?;
            self.set_merging(fragments, after.last);
        }
        Ok(())
    }
    fn exchanged(&mut self) -> Option<&mut Tensor> {
        self.merging.as_ref().filter(|merging| merging.first).map(|_| &mut self.mean)
    }
    fn prepare(&mut self) -> Result<(), OptimError> {
        let Some(merging) = &self.merging else { return Ok(()) };
        let device = self.mean.device().clone();
        let scalars = [self.settings.outer_lr as f32, self.settings.outer_momentum as f32];
        for range in &merging.elements {
            self.next.take(&self.outer, range)?;
            let (start, len) = (range.start, range.len());
            let program = &self.programs.step;
            let reads = &[part(&self.mean, range)?];
            let anchor = self.next.anchor.view_mut().part(start, len)?;
            match &mut self.next.momentum {
                None => {
                    let (scalars, writes) = (&scalars[..1], &mut [anchor]);
                    device.run(Op::Map { program, scalars, reads, writes })?;
                }
                Some(momentum) => {
                    let writes = &mut [anchor, momentum.view_mut().part(start, len)?];
                    device.run(Op::Map { program, scalars: &scalars, reads, writes })?;
                }
            }
            for (name, tensor) in self.next.tensors() {
                if !is_finite(part(tensor, range)?)? {
                    let name = if name == "anchor" { "parameters" } else { name };
                    return Err(OptimError::StepNotFinite { name: name.to_owned() });
                }
            }
        }
        Ok(())
    }
    fn commit(&mut self, params: &mut Tensor) -> Result<(), OptimError> {
        let device = self.device();
        if let Some(merging) = self.merging.take() {
            let parts = self.parts(merging.takes);
            for range in &merging.elements {
                let (start, len) = (range.start, range.len());
                let part = |tensor| part(tensor, range);
                let writes = &mut [params.view_mut().part(start, len)?];
                match parts {
                    Some([0.0, _]) => copy(&self.next.anchor, params, range)?,
                    Some(parts) => {
                        let (program, reads) = (&self.programs.mix, &[part(&self.next.anchor)?]);
                        device.run(Op::Map { program, scalars: &parts, reads, writes })?;
                    }
                    None => {
                        let (before, after) = (part(&self.outer.anchor)?, part(&self.next.anchor)?);
                        let (program, reads) = (&self.programs.rebase, &[before, after, part(&self.delta)?]);
                        device.run(Op::Map { program, scalars: &[], reads, writes })?;
                    }
                }
                self.outer.take(&self.next, range)?;
            }
            self.average.commit();
            self.fragment_state = None;
            self.steps += 1;
        }
        Ok(())
    }
    fn start_exchanges(&mut self, params: &Tensor, after: StepEnd, weight: f64) -> Result<bool, OptimError> {
        let leaves = self.timeline.leaves(after.step).filter(|_| self.timeline.delay() > 0 && !after.last);
        if let Some(fragment) = leaves {
            self.send(params, fragment..fragment + 1, weight)?;
            self.fragment_state = Some(FragmentState::InFlight(fragment));
        }
        Ok(leaves.is_some())
    }
    fn needs_another_exchange(&self) -> bool {
        self.goes_on
    }
    fn common(&self) -> Option<&Tensor> {
        Some(&self.outer.anchor)
    }
    fn common_mut(&mut self) -> Option<&mut Tensor> {
        Some(&mut self.outer.anchor)
    }
    fn wait_in_flight(&mut self) -> Result<(), OptimError> {
        if let Some(FragmentState::InFlight(fragment)) = self.fragment_state {
            self.average.finish_fragments(&mut self.mean)?;
            self.average.commit();
            self.fragment_state = Some(FragmentState::Arrived(fragment));
        }
        Ok(())
    }
    fn drop_in_flight(&mut self) {
        self.fragment_state = None;
        self.average.open();
    }
    fn rollback(&mut self) {
        self.merging = None;
        self.average.rollback();
    }
    fn on_params_set(&mut self, params: &Tensor) -> Result<(), OptimError> {
        let all = 0..params.shape().len();
        copy(params, &mut self.outer.anchor, &all)
    }
    fn steps(&self) -> u64 {
        self.steps
    }
    fn states(&self) -> Vec<(&str, &Tensor)> {
        let came = matches!(self.fragment_state, Some(FragmentState::Arrived(_) | FragmentState::Restored));
        let mut states: Vec<(&str, &Tensor)> = self.outer.tensors().collect();
        states.extend(came.then_some((self.mean_name.as_str(), &self.mean)));
        states
    }
    fn own_states(&self) -> Vec<(&str, &Tensor)> {
        self.fragment_state.map(|_| ("delta", &self.delta)).into_iter().collect()
    }
    fn restore(&mut self, steps: u64, get: &dyn Fn(&str) -> Option<Vec<f32>>) -> Result<(), OptimError> {
        let expected = self.mean.shape().len();
        let found = |name: &str| required(get, name, expected);
        let outer = self.outer.tensors().map(|(name, _)| found(name)).collect::<Result<Vec<_>, _>>()?;
        let flight = match (get(&self.mean_name), get("delta")) {
            (Some(_), Some(_)) => Some((found(&self.mean_name)?, found("delta")?)),
            _ => None,
        };
        for ((_, tensor), values) in self.outer.tensors_mut().zip(outer) {
            tensor.write(&values)?;
        }
        if let Some((mean, delta)) = &flight {
            self.mean.write(mean)?;
            self.delta.write(delta)?;
        }
        self.fragment_state = flight.map(|_| FragmentState::Restored);
        (self.steps, self.opened, self.merging) = (steps, false, None);
        Ok(())
    }
    fn average(&self) -> &Average {
        &self.average
    }
    fn average_mut(&mut self) -> &mut Average {
        &mut self.average
    }
}
