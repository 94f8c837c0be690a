//! The table of recovery policies.

use super::policy::PolicyRow;
use super::{oobleck, parcae, recycle, restart, varuna};

/// All recovery policies, the simplest first.
pub const POLICIES: [PolicyRow; 5] = [restart::ROW, varuna::ROW, oobleck::ROW, recycle::ROW, parcae::ROW];
