//! Settings of mixtures of experts, which override those of the model.

use farflung_zoo::ModelSpec;
use farflung_zoo::spec::Capacity;

use super::TrainConfig;
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
        Ok(())
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
