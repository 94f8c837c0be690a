//! The table of recovery policies.

use super::policy::Row;
use super::{oobleck, parcae, recycle, restart, varuna};

/// All recovery policies, the simplest first.
pub const POLICIES: [Row; 5] = [restart::ROW, varuna::ROW, oobleck::ROW, recycle::ROW, parcae::ROW];
