//! Fields of the losses of routers. What the losses are over is a field of our own; without it, it is what
//! `transformers` does for the family.

use serde_json::{Map, Value, json};

use crate::ZooError;
use crate::json_fields::Fields;
use crate::spec::{BalanceOver, ExpertsSpec, RouterLosses};

const BALANCE: &str = "router_aux_loss_coef";
const OVER: &str = "router_aux_loss_over";
const Z: &str = "router_z_loss_coef";

/// Names of fields in a description and in `config.json`.
pub(super) const NAMES: [(&str, &str); 2] = [("balance loss", BALANCE), ("z loss", Z)];

/// Reads the losses of experts whose other fields are known. The balancing loss of `transformers` is larger
/// than ours by the number of experts per token.
///
/// Errors: [`ZooError::JsonField`] with the field.
pub(super) fn read(fields: &Fields<'_>, experts: &ExpertsSpec) -> Result<RouterLosses, ZooError> {
    let known = experts.losses;
    let per_token = experts.per_token as f64;
    let over = match fields.get(OVER) {
        None => known.over,
        Some(found) => {
            let over = found.as_str().and_then(BalanceOver::from_name);
            let names = BalanceOver::ALL.map(|over| format!("{:?}", over.name())).join(" or ");
            over.ok_or_else(|| fields.wrong(OVER, names))?
        }
    };
    let balance = fields.real_or(BALANCE, known.balance / per_token)? * per_token;
    Ok(RouterLosses { balance, over, z: fields.real_or(Z, known.z)? })
}

/// Returns the fields of the losses.
pub(super) fn write(experts: &ExpertsSpec) -> Map<String, Value> {
    let RouterLosses { balance, over, z } = experts.losses;
    let mut json = Map::from_iter([(BALANCE.to_owned(), json!(balance / experts.per_token as f64))]);
    json.insert(OVER.to_owned(), over.name().into());
    // A file without the field has the family's, which need not be 0.
    json.insert(Z.to_owned(), z.into());
    json
}
