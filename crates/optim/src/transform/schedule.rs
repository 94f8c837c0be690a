//! The learning rate.

use farflung_tensor::Value;

use super::{Emit, StepInfo, Transform};
use crate::LrSchedule;

/// Multiplies the update by the learning rate, and by the parameter group's factor of it. The chain subtracts
/// the update of its last link from the parameters.
#[must_use]
pub fn scale_by_schedule(schedule: LrSchedule) -> impl Transform {
    ScaleBySchedule { schedule }
}

#[derive(Debug)]
struct ScaleBySchedule {
    schedule: LrSchedule,
}

impl Transform for ScaleBySchedule {
    fn name(&self) -> &'static str {
        "schedule"
    }
    fn scalar_count(&self) -> u16 {
        1
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        out.push((info.lr * self.schedule.rate(info.step)) as f32);
    }
    fn rate(&self, step: u64) -> Option<f64> {
        Some(self.schedule.rate(step))
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let rate = e.program.scalar(e.scalars);
        e.program.mul(rate, update)
    }
}
