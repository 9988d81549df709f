//! CPU time of the cores on which this process may run, from which follows the share that other processes used meanwhile.
//!
//! Settings that were measured beside other processes are those of a smaller machine. The load average does not tell: it
//! is a mean over the last minute, and contains this process. So the counters of the kernel are read before and after
//! the measurements. Only the cores of this process count (`taskset`, cpusets of containers): on the others, processes do
//! not disturb it. With a quota of CPU time (`cpu.max` of its cgroup) the share says nothing: the process may not use all of
//! its cores, and those that use the rest do not take its part.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use rustix::thread::{CpuSet, sched_getaffinity};

/// Share of the CPU time that other processes may use. Budgets are compared at 3 %; beyond this, the order of two of them
/// may be that of the disturbance, although each is the median of several runs.
pub const OTHERS_MAX: f64 = 0.10;

/// Reason for which the share of other processes is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownShare {
    /// A cgroup limits the CPU time of the process to less than its cores.
    #[error("a quota of CPU time (cgroup) limits this process to fewer cores than it may run on")]
    CpuQuota,
    /// The system has no /proc, or it does not list the cores.
    #[error("the system does not report the CPU time of the cores of this process")]
    NoCounters,
}

/// Measurement of the CPU time of other processes, from its start on.
pub(super) struct OthersMeter {
    cores: BTreeSet<usize>,
    before: CpuTimes,
}

impl OthersMeter {
    /// Starts the measurement on the cores of the calling thread, which are those of the threads that it starts.
    pub(super) fn start() -> Result<OthersMeter, UnknownShare> {
        // Fails on a machine with more cores than a `CpuSet` has bits.
        let affinity = sched_getaffinity(None).map_err(|_| UnknownShare::NoCounters)?;
        let cores = (0..CpuSet::MAX_CPU).filter(|core| affinity.is_set(*core)).collect();
        // The standard library takes the lower one of affinity and quota.
        check_quota(&cores, available_parallelism().map_err(|_| UnknownShare::NoCounters)?)?;
        let before = CpuTimes::now(&cores).ok_or(UnknownShare::NoCounters)?;
        Ok(OthersMeter { cores, before })
    }

    /// Returns the share of the CPU time of the cores that other processes have used since the start, 0 to 1.
    pub(super) fn share(&self) -> Result<f64, UnknownShare> {
        let after = CpuTimes::now(&self.cores);
        after.and_then(|after| CpuTimes::others_share(self.before, after)).ok_or(UnknownShare::NoCounters)
    }
}

/// Fails if the process may use less CPU time than that of its cores.
fn check_quota(cores: &BTreeSet<usize>, parallelism: NonZeroUsize) -> Result<(), UnknownShare> {
    if parallelism.get() < cores.len() { Err(UnknownShare::CpuQuota) } else { Ok(()) }
}

/// Counters in clock ticks, since the start of the machine and of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CpuTimes {
    /// Ticks of the cores.
    total: u64,
    /// Ticks in which they were idle.
    idle: u64,
    /// Ticks of this process.
    own: u64,
}

impl CpuTimes {
    /// Reads the counters of these cores; `None` where the system has no /proc.
    fn now(cores: &BTreeSet<usize>) -> Option<CpuTimes> {
        let machine = fs::read_to_string("/proc/stat").ok()?;
        let process = fs::read_to_string("/proc/self/stat").ok()?;
        CpuTimes::parse(&machine, &process, cores)
    }

    /// Parses /proc/stat and /proc/self/stat; `None` unless each of the cores is listed.
    fn parse(machine: &str, process: &str, cores: &BTreeSet<usize>) -> Option<CpuTimes> {
        let (mut total, mut idle, mut found) = (0, 0, 0);
        for line in machine.lines() {
            let Some((core, ticks)) = line.strip_prefix("cpu").and_then(|line| line.split_once(' ')) else {
                continue;
            };
            // The first line, without a number, is the sum of all cores.
            if !core.parse().is_ok_and(|core: usize| cores.contains(&core)) {
                continue;
            }
            // user nice system idle iowait irq softirq steal; the time of guests is part of the first two.
            let ticks: Vec<u64> =
                ticks.split_whitespace().take(8).map_while(|ticks| ticks.parse().ok()).collect();
            let [_, _, _, unused, waiting, _, _, _] = ticks[..] else { return None };
            total += ticks.iter().sum::<u64>();
            idle += unused + waiting;
            found += 1;
        }
        if found != cores.len() {
            return None;
        }
        // The name in parentheses may contain spaces. After it, utime and stime are the 12th and 13th.
        let (_, fields) = process.rsplit_once(')')?;
        let mut fields = fields.split_whitespace().skip(11);
        let own = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
        Some(CpuTimes { total, idle, own })
    }

    /// Returns the share of the CPU time between two readings that other processes used, 0 to 1; `None` if no time passed.
    fn others_share(before: CpuTimes, after: CpuTimes) -> Option<f64> {
        let total = after.total.checked_sub(before.total).filter(|total| *total > 0)?;
        let idle = after.idle.saturating_sub(before.idle);
        let own = after.own.saturating_sub(before.own);
        Some(total.saturating_sub(idle).saturating_sub(own) as f64 / total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(own: (u64, u64)) -> String {
        format!("7 (a (strange) name) R 1 1 1 0 -1 4194304 97 0 0 0 {} {} 0 0 20 0", own.0, own.1)
    }

    #[test]
    fn the_share_of_others_is_neither_idle_nor_of_this_process() {
        let times = |machine: &str, own| CpuTimes::parse(machine, &process(own), &[0].into());
        let before = times("cpu  1 2 3\ncpu0 100 10 20 800 50 5 5 10 0 0\n", (30, 2)).unwrap();
        assert_eq!(before, CpuTimes { total: 1000, idle: 850, own: 32 });
        // 400 ticks more: 100 idle, 200 of this process, 100 of others, of which 20 are of other virtual machines.
        let after = times("cpu0 370 10 30 890 60 5 5 30 0 0\n", (220, 12)).unwrap();
        assert_eq!(CpuTimes::others_share(before, after), Some(0.25));
        assert_eq!(CpuTimes::others_share(before, before), None);
        let own = "7 (a) R 1 2 3 4 5 6 7 8 9 10 11 12 13";
        for (machine, process) in
            [("", own), ("cpu0 1 2", own), ("cpu0 a", own), ("cpu0 1 2 3 4 5 6 7 8", "7 (a) R")]
        {
            assert_eq!(CpuTimes::parse(machine, process, &[0].into()), None, "{machine:?}");
        }
    }

    #[test]
    fn only_the_cores_of_this_process_count() {
        let stat = |busy: [u64; 3]| {
            let mut text = "cpu  9999 0 0 0 0 0 0 0 0 0\n".to_owned();
            for (core, busy) in [(1, busy[0]), (2, busy[1]), (12, busy[2])] {
                text.push_str(&format!("cpu{core} {busy} 0 0 {} 0 0 0 0 0 0\n", 1000 - busy));
            }
            text + "intr 12345\nctxt 678\n"
        };
        let share = |cores: &[usize]| {
            let cores = cores.iter().copied().collect();
            let before = CpuTimes { total: 0, idle: 0, own: 0 };
            let after = CpuTimes::parse(&stat([0, 500, 900]), &process((100, 0)), &cores)?;
            CpuTimes::others_share(before, after)
        };
        assert_eq!(share(&[1]), Some(0.0), "processes of other cores do not count");
        assert_eq!(share(&[2]), Some(0.4));
        assert_eq!(share(&[1, 2]), Some(0.2));
        assert_eq!(share(&[12]), Some(0.8));
        assert_eq!(share(&[1, 3]), None, "core 3 is not listed");
    }

    #[test]
    fn a_quota_below_the_cores_makes_the_share_unknown() {
        let check = |parallelism| check_quota(&[4, 5].into(), NonZeroUsize::new(parallelism).unwrap());
        assert_eq!(check(1), Err(UnknownShare::CpuQuota));
        assert_eq!((check(2), check(3)), (Ok(()), Ok(())));
    }

    #[test]
    fn the_share_of_this_machine_is_measured_or_its_absence_has_a_reason() {
        let share = OthersMeter::start().and_then(|meter| {
            // The counters have a resolution of a hundredth of a second.
            let cores = meter.cores.clone();
            while CpuTimes::now(&cores).is_some_and(|now| now.total == meter.before.total) {
                std::thread::yield_now();
            }
            meter.share()
        });
        assert!(
            share.is_ok_and(|share| (0.0..=1.0).contains(&share)) || share == Err(UnknownShare::CpuQuota)
        );
    }
}
