//! CPU time of the machine and of this process, from which follows the share that other processes used meanwhile.
//!
//! Settings that were measured beside other processes are those of a smaller machine. The load average does not tell: it
//! is a mean over the last minute, and contains this process. So the counters of the kernel are read before and after
//! the measurements.

use std::fs;

/// Share of the CPU time that other processes may use. Budgets are compared at 3 %; beyond this, the order of two of them
/// may be that of the disturbance, although each is the median of several runs.
pub const OTHERS_MAX: f64 = 0.10;

/// Counters in clock ticks, since the start of the machine and of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuTimes {
    /// Ticks of all cores.
    total: u64,
    /// Ticks in which they were idle.
    idle: u64,
    /// Ticks of this process.
    own: u64,
}

impl CpuTimes {
    /// Reads the counters; `None` where the system has no /proc.
    pub(super) fn now() -> Option<CpuTimes> {
        let machine = fs::read_to_string("/proc/stat").ok()?;
        let process = fs::read_to_string("/proc/self/stat").ok()?;
        CpuTimes::parse(&machine, &process)
    }

    fn parse(machine: &str, process: &str) -> Option<CpuTimes> {
        let line = machine.lines().next()?.strip_prefix("cpu ")?;
        // user nice system idle iowait irq softirq steal; the time of guests is part of the first two.
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|ticks| ticks.parse().ok()).collect();
        let [_, _, _, idle, waiting, _, _, _] = ticks[..] else { return None };
        // The name in parentheses may contain spaces. After it, utime and stime are the 12th and 13th.
        let (_, fields) = process.rsplit_once(')')?;
        let mut fields = fields.split_whitespace().skip(11);
        let own = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
        Some(CpuTimes { total: ticks.iter().sum(), idle: idle + waiting, own })
    }

    /// Returns the share of the CPU time between two readings that other processes used, 0 to 1.
    pub(super) fn others_share(before: CpuTimes, after: CpuTimes) -> Option<f64> {
        let total = after.total.checked_sub(before.total).filter(|total| *total > 0)?;
        let idle = after.idle.saturating_sub(before.idle);
        let own = after.own.saturating_sub(before.own);
        Some(total.saturating_sub(idle).saturating_sub(own) as f64 / total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_others_is_neither_idle_nor_of_this_process() {
        let times = |machine: &str, own: (u64, u64)| {
            let process =
                format!("7 (a (strange) name) R 1 1 1 0 -1 4194304 97 0 0 0 {} {} 0 0 20 0", own.0, own.1);
            CpuTimes::parse(machine, &process)
        };
        let before = times("cpu  100 10 20 800 50 5 5 10 0 0\ncpu0 1 2 3\n", (30, 2)).unwrap();
        assert_eq!(before, CpuTimes { total: 1000, idle: 850, own: 32 });
        // 400 ticks more: 100 idle, 200 of this process, 100 of others, of which 20 are of other virtual machines.
        let after = times("cpu  370 10 30 890 60 5 5 30 0 0\n", (220, 12)).unwrap();
        assert_eq!(CpuTimes::others_share(before, after), Some(0.25));
        assert_eq!(CpuTimes::others_share(before, before), None);
        for (machine, process) in
            [("", "7 (a) R"), ("cpu 1 2", "7 (a) R 1 2 3 4 5 6 7 8 9 10 11 12 13"), ("cpu a", "")]
        {
            assert_eq!(CpuTimes::parse(machine, process), None, "{machine:?}");
        }
    }
}
