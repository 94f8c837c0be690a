//! Copies of parameters on devices that round differently are made equal between steps, each among its holders.

use super::{Trainer, by_number};
use crate::Result;
use crate::train::apart::HeldApart;
use crate::train::executor::Executor;
use crate::train::resync::Drift;
use crate::train::tied::{TableExchange, TiedTable};

impl Trainer {
    /// Compares the copies of what several ranks hold and makes them equal, if that is due.
    pub(super) fn compare(&mut self) -> Result<Option<Drift>> {
        let Executor { comm, parts, placement, tied, .. } = &mut self.executor;
        let Some(mut comparison) = self.resync.after_step(self.step, comm) else { return Ok(None) };
        for (number, part) in by_number(parts, placement) {
            let (len, held) = (part.stage.layout().len(), self.apart.get(&number));
            if let Some(holders) = self.holders.get(&number).filter(|_| len > 0 && part.weights.is_none()) {
                let apart = part.sync.as_ref().is_some_and(|sync| sync.replicas_differ());
                let common = part.sync.as_mut().and_then(|sync| sync.common_mut());
                if let Some(same) = common.or((!apart).then_some(&mut part.params)) {
                    for (holders, range) in HeldApart::pieces(held, holders, len) {
                        comparison.mend(holders, same, range)?;
                    }
                }
            }
        }
        // The table is equal in all pipelines now, but its two copies in a pipeline may differ. On one rank
        // they get the same updates on the same device.
        if let TiedTable::Across(TableExchange { between, stage, .. }) = tied {
            let part = parts.get_mut(stage).expect("it is this rank's user of the table");
            if part.weights.is_none() {
                let table = part.table();
                comparison.mend(&between.group, &mut part.params, table)?;
            }
        }
        let found = comparison.done()?;
        if found.distance > 0.0 {
            for part in parts.values_mut() {
                if let Some(sync) = part.sync.as_mut().filter(|sync| !sync.replicas_differ()) {
                    sync.on_params_set(&part.params)?;
                }
            }
        }
        Ok(Some(found))
    }
}
