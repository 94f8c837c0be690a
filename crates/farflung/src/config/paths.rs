//! Settings of paths through shared modules.

use farflung_parallel::Mesh;

use super::TrainConfig;
use super::pools::Numbers;
use super::validate::check;
use crate::Result;

impl TrainConfig {
    pub(super) fn validate_paths(&self) -> Result<()> {
        let most = u64::from(Mesh::MAX_RANKS);
        if let Some(Numbers(modules)) = &self.paths {
            let shown = modules.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            let paths = modules.iter().try_fold(1_u64, |all, &n| all.checked_mul(n.into()));
            let good = !modules.is_empty() && paths.is_some_and(|paths| (1..=most).contains(&paths));
            let expected = format!("numbers of modules of at least 1, whose product is at most {most}");
            check("paths", &shown, good, &expected)?;
        }
        let most = 1 << 20;
        let good = (1..=most).contains(&self.route_tokens);
        check("route-tokens", &self.route_tokens, good, &format!("1 to {most}"))
    }

    /// Returns the number of paths; 1 if all replicas train one model.
    pub(crate) fn path_count(&self) -> usize {
        let modules = self.paths.iter().flat_map(|Numbers(modules)| modules);
        modules.fold(1_usize, |all, &n| all.saturating_mul(n as usize))
    }
}
