//! Reads how much memory this process may use, from `/proc/meminfo` and the limits of its control groups.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Available {
    /// Bytes available now, swap included: a run that swaps is slow, but it runs.
    pub(super) free: u64,
    /// Bytes that all processes together may use.
    pub(super) total: u64,
}

/// Reads `proc` and `sys` below `root`; `None` if there is no `proc/meminfo`.
pub(super) fn available(root: &Path) -> Option<Available> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib.saturating_mul(1024))
    };
    let (mut free, mut total) = (field("MemAvailable")?, field("MemTotal")?);
    for group in groups(root) {
        if let Some((limit, used)) = group.limit_and_used() {
            free = free.min(limit.saturating_sub(used));
            total = total.min(limit);
        }
    }
    let (free_swap, total_swap) = (field("SwapFree").unwrap_or(0), field("SwapTotal").unwrap_or(0));
    Some(Available { free: free.saturating_add(free_swap), total: total.saturating_add(total_swap) })
}

/// A control group's folder and the names of its files.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` with cached files, which count as used but are freed on demand.
    cached: [&'static str; 2],
}

impl Group {
    /// Returns the limit and the used bytes; `None` without a limit.
    fn limit_and_used(&self) -> Option<(u64, u64)> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let limit = read(self.limit)?.trim().parse().ok()?;
        let used: u64 = read(self.used)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let cached = |name: &&str| -> Option<u64> {
            stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        };
        let cached = self.cached.iter().filter_map(cached).fold(0, u64::saturating_add);
        Some((limit, used.saturating_sub(cached)))
    }
}

/// Returns the control groups of this process and all their ancestors, for cgroup v1 and v2. In a container the
/// limit may be at the root of the mount instead of at the listed path.
fn groups(root: &Path) -> Vec<Group> {
    let list = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in list.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(kinds), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (mount, limit, used, cached) = if kinds.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current", ["inactive_file ", "active_file "])
        } else if kinds.split(',').any(|kind| kind == "memory") {
            let cached = ["total_inactive_file ", "total_active_file "];
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", cached)
        } else {
            continue;
        };
        let mut around = Path::new(path.trim_start_matches('/'));
        loop {
            groups.push(Group { folder: root.join(mount).join(around), limit, used, cached });
            match around.parent() {
                Some(parent) => around = parent,
                None => break,
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:    600 kB\nSwapTotal: 100 kB\nSwapFree: 50 kB\n";

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn kib(root: &tempfile::TempDir) -> Option<(u64, u64)> {
        available(root.path()).map(|memory| (memory.free / 1024, memory.total / 1024))
    }

    #[test]
    fn a_machine_has_what_is_available_and_its_swap() {
        assert_eq!(kib(&machine(&[("proc/meminfo", MEMINFO)])), Some((650, 1100)));
        assert_eq!(kib(&machine(&[])), None);
        assert_eq!(kib(&machine(&[("proc/meminfo", "MemTotal: what\n")])), None);
    }

    #[test]
    fn the_tightest_control_group_around_counts_without_its_cached_files() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/jobs/mine\n"),
            ("sys/fs/cgroup/jobs/mine/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/mine/memory.current", "1024\n"),
            ("sys/fs/cgroup/jobs/memory.max", "409600\n"),
            ("sys/fs/cgroup/jobs/memory.current", "204800\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\nactive_file 1024\ninactive_file 101376\n"),
        ]);
        assert_eq!(kib(&root), Some((300 + 50, 400 + 100)));
    }

    #[test]
    fn groups_of_the_first_version_and_of_containers_count() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "204800\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "102400\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 51200\n"),
        ];
        assert_eq!(kib(&machine(&files)), Some((150 + 50, 200 + 100)));
    }
}
