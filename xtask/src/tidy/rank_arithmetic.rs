//! Finds divisions and remainders by a number of stages or of a pipeline's ranks. Where a rank stands is asked
//! of the plan or of its mesh, so that a further axis does not make every such line wrong.

/// Crates that know no pipeline: there, `ranks` are those of a communicator.
const WITHOUT_PIPELINES: &[&str] = &["base", "comm", "compress", "optim", "tensor", "zoo"];

/// Files in which such a division is right, and why.
const EXEMPT: &[(&str, &str)] = &[
    ("crates/parallel/src/mesh.rs", "it is where ranks become coordinates"),
    (
        "crates/parallel/src/pipeline/placement.rs",
        "it places stages on the ranks of one pipeline, going round or forth and back: stages are not ranks",
    ),
    (
        "crates/parallel/src/pipeline/cost.rs",
        "all copies of a model in a pipeline share the costs of its parts",
    ),
    ("crates/parallel/src/planner/regional/all_reduce.rs", "bytes are divided into a shard for each rank"),
    ("crates/parallel/src/swarm/rebalance.rs", "it is a mean over stages"),
];

/// Names of numbers of stages, or of ranks of a pipeline.
const COUNTS: &[&str] = &["stages", "ranks", "per_pipeline"];

/// What divides by what follows it.
const DIVIDES: &[&str] = &[
    "/ ",
    "% ",
    "/= ",
    "%= ",
    ".div_ceil(",
    ".div_euclid(",
    ".rem_euclid(",
    ".checked_div(",
    ".checked_rem(",
    ".chunks(",
    ".chunks_exact(",
    ".step_by(",
];

/// Conversions around a number.
const CONVERSIONS: &[&str] = &["u128::from(", "u64::from(", "u32::from(", "f64::from(", "usize::from("];

/// Returns what is wrong with a line of Rust, if it computes where a rank stands.
pub(super) fn in_line(path: &str, line: &str) -> Option<String> {
    let krate = path.strip_prefix("crates/")?.split('/').next()?;
    let exempt = EXEMPT.iter().any(|(file, _)| *file == path);
    if exempt || WITHOUT_PIPELINES.contains(&krate) || line.trim_start().starts_with("//") {
        return None;
    }
    let code = line.split(" // ").next().unwrap_or(line);
    let divided = DIVIDES.iter().flat_map(|op| code.match_indices(op)).find(|(at, op)| {
        let (before, after) = (&code[..*at], &code[at + op.len()..]);
        // The operators stand between blanks; in a text such as `tokens/ranks` they do not.
        (op.starts_with('.') || before.is_empty() || before.ends_with(' ')) && is_count(after)
    });
    // Only of a rank: that a number of machines forms whole pipelines may be asked in this way.
    let multiple = code.match_indices(".is_multiple_of(").find(|(at, op)| {
        let word = code[..*at].trim_end_matches(')').trim_end_matches(" + 1").trim_end_matches(".0");
        ends_with_word(word, "rank") && is_count(&code[at + op.len()..])
    });
    let numbered = code.match_indices(" * ").find(|(at, op)| {
        let factor = code[..*at].trim_end_matches(" as usize").trim_end_matches(" as u32");
        ends_with_word(factor, "replica") && is_count(&code[at + op.len()..])
    });
    let (_, op) = divided.or(multiple).or(numbered)?;
    let op = op.trim().trim_end_matches('(');
    Some(format!(
        "`{op}` and a number of stages or ranks: ask `Plan::at`, `rank`, `group` or `Mesh`, or `whole_pipelines`"
    ))
}

/// Returns whether code begins with a number of stages or ranks: a path that ends in its name, or a method of
/// the number such as `max`.
fn is_count(code: &str) -> bool {
    let bare = |code: &str| code.trim_start_matches(['(', '&', '*']).to_owned();
    let mut code = bare(code);
    for conversion in CONVERSIONS {
        code = bare(code.strip_prefix(conversion).unwrap_or(&code));
    }
    let end = code.find(|c: char| !(c.is_alphanumeric() || "_.()".contains(c))).unwrap_or(code.len());
    let (path, rest) = code.split_at(end);
    let mut segments = path.split('.').peekable();
    while let Some(segment) = segments.next() {
        let (name, call) = segment.split_at(segment.find(['(', ')']).unwrap_or(segment.len()));
        if COUNTS.contains(&name) {
            let ended = call.strip_prefix("()").unwrap_or(call).starts_with(')');
            return match segments.peek() {
                // An empty segment is the end of a range, `..`.
                Some(next) if !ended && !next.is_empty() => {
                    ["max(", "len(", "into("].iter().any(|method| next.starts_with(method))
                }
                _ => ended || !rest.starts_with('['),
            };
        }
        // Another call or a closed parenthesis: what is divided by is something else.
        if !call.is_empty() && call != "()" {
            return false;
        }
    }
    false
}

/// Returns whether code ends with this word.
fn ends_with_word(code: &str, word: &str) -> bool {
    let before = code.strip_suffix(word);
    before.is_some_and(|before| !before.ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/farflung/src/train/steps.rs";

    #[test]
    fn rank_arithmetic_is_found() {
        for line in [
            "    let (replica, position) = (rank / stages, rank % stages);",
            "    let position = rank.0 % self.stages();",
            "    Some(PlanPosition { replica: rank / plan.stages(), position })",
            "        / config.stages.max(1);",
            "    let replicas = world / stages as usize;",
            "    let each = total / u64::from(plan.stages());",
            "    let replica = comm.rank().0 / placement.ranks();",
            "    let replica = rank.div_euclid(job.plan.stages());",
            "    let pipelines = slots.chunks(plan.stages() as usize).zip(shares);",
            "    let firsts = ranks.iter().step_by(self.stages);",
            "    let part = &parts[rank % parts.stages.len()];",
            "    rank %= stages;",
            "    let last = (rank.0 + 1).is_multiple_of(plan.stages());",
            "    let first = replica * plan.stages();",
            "    let at = slots.get(replica as usize * stages..);",
            "    let row = rank / stages; // which pipeline",
        ] {
            assert!(in_line(PATH, line).is_some(), "{line}");
        }
    }

    #[test]
    fn other_divisions_are_not() {
        for line in [
            "    // rank / stages",
            "    let replicas = whole_pipelines(world, stages);",
            "    let at = plan.at(rank); // rather than rank / stages",
            "    let path = \"run/ranks/rank-00001\";",
            "    let each = layers / parts;",
            "    let in_flight = all.div_ceil(stages[0].replicas);",
            "    let most = memory / settings.ranks.saturating_sub(1).max(1);",
            "    let mean = sum / stages_of(plan);",
            "    let half = time / ranks_done.max(1);",
            "    if !world.is_multiple_of(stages) {",
            "    let all = self.replicas * placement.ranks();",
            "    let share = bytes / pools.sizes(stages);",
        ] {
            assert_eq!(in_line(PATH, line), None, "{line}");
        }
    }

    #[test]
    fn crates_without_pipelines_and_files_with_a_reason_are_left_out() {
        let line = "    let next = (rank + 1) % ranks;";
        assert!(in_line("crates/parallel/src/plan.rs", line).is_some());
        assert!(in_line("crates/a-new-crate/src/lib.rs", line).is_some());
        for path in ["crates/comm/src/steps.rs", "xtask/repro/src/lab.rs"] {
            assert_eq!(in_line(path, line), None, "{path}");
        }
        for (path, why) in EXEMPT {
            assert_eq!(in_line(path, line), None, "{why}");
            assert!(crate::shell::root().join(path).is_file(), "{path}");
        }
    }
}
