//! The learning rate.

use farflung_tensor::Value;

use super::{Emit, StepInfo, Transform};
use crate::LrSchedule;

/// Multiplies by the learning rate, and by its factor in the parameter's group. The chain subtracts what its
/// last link gives.
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
        out.push(self.schedule.rate(info.step) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let p = &mut *e.program;
        let mut rate = p.scalar(e.scalars);
        // A factor of 1 would cost an instruction, and AdamW's step would not be one that is compiled ahead.
        if (e.group.lr as f32).to_bits() != 1.0_f32.to_bits() {
            let factor = p.constant(e.group.lr as f32);
            rate = p.mul(factor, rate);
        }
        p.mul(rate, update)
    }
}
