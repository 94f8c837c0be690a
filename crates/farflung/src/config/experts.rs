//! Settings of mixtures of experts, which override those of the model.

use farflung_parallel::Mesh;
use farflung_zoo::ModelSpec;
use farflung_zoo::spec::Capacity;

use super::TrainConfig;
use super::pools::Numbers;
use super::validate::check;
use crate::{Error, Result};

impl TrainConfig {
    pub(super) fn validate_experts(&self) -> Result<()> {
        for (field, value) in [("balance-loss", self.balance_loss), ("z-loss", self.z_loss)] {
            if let Some(value) = value {
                check(field, &value, value >= 0.0 && value.is_finite(), "0 or more")?;
            }
        }
        if let Some(factor) = self.capacity_factor {
            check("capacity-factor", &factor, factor > 0.0 && factor.is_finite(), "more than 0")?;
        }
        let most = Mesh::MAX_RANKS;
        let good = (1..=most as usize).contains(&self.expert);
        check("expert", &self.expert, good, &format!("1 to {most}"))?;
        if let Some(Numbers(weights)) = &self.expert_weights {
            let shown = weights.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let expected = format!("{} numbers, one for each replica of `expert`", self.expert);
            check("expert-weights", &shown, weights.len() == self.expert, &expected)?;
        }
        Ok(())
    }

    /// Returns how the replicas of a group divide experts, as a plan has it.
    pub(crate) fn expert_weights(&self) -> Vec<u32> {
        match &self.expert_weights {
            _ if self.expert < 2 => Vec::new(),
            Some(Numbers(weights)) => weights.clone(),
            None => vec![1; self.expert],
        }
    }

    /// Returns the model with the settings of its experts.
    ///
    /// Errors: [`Error::Setting`] if a setting is given and the model has no experts.
    pub(crate) fn with_experts(&self, mut model: ModelSpec) -> Result<ModelSpec> {
        let given = [
            ("balance-loss", self.balance_loss.map(|value| value.to_string())),
            ("balance-over", self.balance_over.map(|over| over.name().to_owned())),
            ("z-loss", self.z_loss.map(|value| value.to_string())),
            ("capacity-factor", self.capacity_factor.map(|value| value.to_string())),
        ];
        let given = given.into_iter().find_map(|(field, value)| Some((field, value?)));
        if let Some((field, value)) = given.filter(|_| model.mixtures().next().is_none()) {
            let expected = "no value, because the model has no experts".to_owned();
            return Err(Error::Setting { field, value, expected });
        }
        for experts in model.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut()) {
            let losses = &mut experts.losses;
            losses.balance = self.balance_loss.unwrap_or(losses.balance);
            losses.z = self.z_loss.unwrap_or(losses.z);
            losses.over = self.balance_over.unwrap_or(losses.over);
            experts.capacity = self.capacity_factor.map_or(experts.capacity, Capacity::Factor);
        }
        Ok(model)
    }
}
