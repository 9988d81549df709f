//! Autoscaling settings of a deployment, per region.
//!
//! The settings have the names known from Knative and from hosted services. The algorithm is in `scheduler_core::scale`;
//! this module defines the valid values. A value that could never take effect is rejected, together with all other
//! problems: a `zero_after` that `min` overrides should fail when it is written, not be discovered at night.
//!
//! A deployment without settings has one replica in each region.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::timetable::{TIMETABLE_ENTRIES_MAX, TimetableEntry};
use configuration::duration;

/// Maximum replicas of one deployment in one region: the number whose status one spoke polls five times a second.
pub const REPLICAS_MAX: u32 = 256;
/// Maximum target concurrency of one replica: a spoke sends no more requests at a time to one.
pub const CONCURRENCY_MAX: u32 = 1024;
/// Valid averaging windows. Shorter ones hold only one or two measurements; longer ones do not reflect current traffic.
pub const WINDOW: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// Valid scale-down delays. A replica that was not needed for an hour is not needed.
pub const DELAY: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
/// Valid idle times before scaling to zero. A shorter one ends between two requests of one client; for a longer one write
/// `never`.
pub const ZERO_AFTER: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);
/// Idle time before scaling to zero if `min` is 0 and no time is set.
const ZERO_AFTER_DEFAULT: Duration = Duration::from_secs(300);

/// Autoscaling settings, checked by [`Scaling::problems`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scaling {
    /// Minimum replica count. 0 permits scaling to zero.
    pub min: u32,
    /// Maximum replica count.
    pub max: u32,
    /// Target of concurrent requests per replica; for models whose throughput in tokens is a poor measure of load.
    pub concurrency_target: Option<u32>,
    /// Target utilization of a replica, in percent.
    pub target_utilization: u32,
    /// Time over which traffic is averaged.
    pub autoscaling_window: Duration,
    /// Time for which replicas are kept after they were last needed.
    pub scale_down_delay: Duration,
    /// Time without requests after which the deployment is scaled to zero; `None` for never.
    pub zero_after: Option<Duration>,
    /// Higher minimum replica counts at times of the week.
    pub timetable: Vec<TimetableEntry>,
}

impl Default for Scaling {
    /// One replica, fixed; the other values did well in a simulation of bursts, steps and waves.
    fn default() -> Scaling {
        Scaling {
            min: 1,
            max: 1,
            concurrency_target: None,
            target_utilization: 75,
            autoscaling_window: Duration::from_secs(60),
            scale_down_delay: Duration::from_secs(180),
            zero_after: None,
            timetable: Vec::new(),
        }
    }
}

impl Scaling {
    /// Keys of the settings in a file.
    pub const KEYS: &'static [&'static str] = &[
        "min",
        "max",
        "concurrency_target",
        "target_utilization",
        "autoscaling_window",
        "scale_down_delay",
        "zero_after",
        "timetable",
    ];

    /// Returns the default of `zero_after`: `None` unless `min` is 0.
    pub fn zero_after_default(min: u32) -> Option<Duration> {
        (min == 0).then_some(ZERO_AFTER_DEFAULT)
    }

    /// Returns the same settings for a region that can run at most this number of replicas, one or more.
    #[must_use]
    pub fn limited_to(&self, replicas: u32) -> Scaling {
        let limit = |count: u32| count.min(replicas.max(1));
        let timetable = self.timetable.iter();
        let timetable = timetable.map(|entry| TimetableEntry { min: limit(entry.min), ..entry.clone() });
        let (min, max, timetable) = (limit(self.min), limit(self.max), timetable.collect());
        Scaling { min, max, timetable, ..self.clone() }
    }

    /// Returns the number of replicas of a region that its cost is computed with: the highest minimum of the week, and one for
    /// a deployment that scales to zero, because the next request starts one.
    pub fn minimum_of_the_week(&self) -> u32 {
        let timetable = self.timetable.iter().map(|entry| entry.min);
        timetable.chain([self.min, 1]).max().unwrap_or(1)
    }

    /// Returns all problems of these values, each with the key to change.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let Scaling {
            min,
            max,
            concurrency_target,
            target_utilization,
            autoscaling_window,
            scale_down_delay,
            zero_after,
            timetable,
        } = self;
        let mut problems = Vec::new();
        if !(1..=REPLICAS_MAX).contains(max) {
            // Without `max`, the maximum is the minimum.
            let key = if min == max && *min > REPLICAS_MAX { "min" } else { "max" };
            problems.push((key, format!("`{key}` is {max}: write 1 to {REPLICAS_MAX}")));
        }
        if min > max {
            let problem = format!("`min` ({min}) is greater than `max` ({max}): lower `min` or raise `max`");
            problems.push(("min", problem));
        }
        if let Some(target) = concurrency_target.filter(|target| !(1..=CONCURRENCY_MAX).contains(target)) {
            let fix = format!("write 1 to {CONCURRENCY_MAX}, or remove it to scale by throughput only");
            problems.push(("concurrency_target", format!("`concurrency_target` is {target}: {fix}")));
        }
        if !(1..=100).contains(target_utilization) {
            let problem =
                format!("`target_utilization` is {target_utilization}: write a percentage, 1 to 100");
            problems.push(("target_utilization", problem));
        }
        let mut within = |key, time: Duration, range: RangeInclusive<Duration>| {
            if !range.contains(&time) {
                let [time, from, to] = [time, *range.start(), *range.end()].map(duration::write);
                problems.push((key, format!("`{key}` is {time}: write a time from {from} to {to}")));
            }
        };
        within("autoscaling_window", *autoscaling_window, WINDOW);
        within("scale_down_delay", *scale_down_delay, DELAY);
        if let Some(after) = zero_after {
            within("zero_after", *after, ZERO_AFTER);
            if *min > 0 {
                let problem =
                    format!("`zero_after` has no effect if `min` is {min}: write min = 0, or \"never\"");
                problems.push(("zero_after", problem));
            }
        }
        if timetable.len() > TIMETABLE_ENTRIES_MAX {
            let problem =
                format!("`timetable` has {} entries: at most {TIMETABLE_ENTRIES_MAX} fit", timetable.len());
            problems.push(("timetable", problem));
        }
        for TimetableEntry { from, to, min: scheduled_min, .. } in timetable {
            if from == to {
                let problem = format!("`timetable` has an entry from {from} to {to}: write another end time");
                problems.push(("timetable", problem));
            }
            if !(1..=*max).contains(scheduled_min) {
                let problem = format!(
                    "`timetable` has an entry with min = {scheduled_min}: write 1 to `max`, which is {max}"
                );
                problems.push(("timetable", problem));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(min: u32) -> TimetableEntry {
        let [from, to] = ["07:00", "19:00"].map(|text| text.parse().unwrap());
        TimetableEntry { days: "mon".parse().unwrap(), from, to, min }
    }

    #[track_caller]
    fn check(scaling: &Scaling, keys: &[&str]) {
        let problems = scaling.problems();
        let found: Vec<_> = problems.iter().map(|(key, _)| *key).collect();
        assert_eq!(found, keys, "{problems:?}");
        assert!(found.iter().all(|key| Scaling::KEYS.contains(key)));
    }

    #[test]
    fn every_value_is_accepted_at_its_limits_and_rejected_past_them() {
        let of = |change: &dyn Fn(&mut Scaling)| {
            let mut scaling = Scaling { max: REPLICAS_MAX, ..Scaling::default() };
            change(&mut scaling);
            scaling
        };
        let ms = Duration::from_millis(1);
        check(&Scaling::default(), &[]);
        check(&of(&|it| it.min = REPLICAS_MAX), &[]);
        check(&of(&|it| it.max = REPLICAS_MAX + 1), &["max"]);
        check(&of(&|it| (it.min, it.max) = (0, 0)), &["max"]);
        check(&of(&|it| (it.min, it.max) = (REPLICAS_MAX + 1, REPLICAS_MAX + 1)), &["min"]);
        check(&of(&|it| it.min = REPLICAS_MAX + 1), &["min"]);
        for (target, keys) in [(0, &["concurrency_target"][..]), (1, &[]), (CONCURRENCY_MAX, &[])] {
            check(&of(&|it| it.concurrency_target = Some(target)), keys);
        }
        check(&of(&|it| it.concurrency_target = Some(CONCURRENCY_MAX + 1)), &["concurrency_target"]);
        for (percent, keys) in
            [(0, &["target_utilization"][..]), (1, &[]), (100, &[]), (101, &["target_utilization"])]
        {
            check(&of(&|it| it.target_utilization = percent), keys);
        }
        check(&of(&|it| it.autoscaling_window = *WINDOW.start()), &[]);
        check(&of(&|it| it.autoscaling_window = *WINDOW.start() - ms), &["autoscaling_window"]);
        check(&of(&|it| it.autoscaling_window = *WINDOW.end() + ms), &["autoscaling_window"]);
        check(&of(&|it| it.scale_down_delay = *DELAY.end()), &[]);
        check(&of(&|it| it.scale_down_delay = *DELAY.end() + ms), &["scale_down_delay"]);
        let zero = |min, after| of(&|it| (it.min, it.zero_after) = (min, Some(after)));
        check(&zero(0, *ZERO_AFTER.start()), &[]);
        check(&zero(0, *ZERO_AFTER.start() - ms), &["zero_after"]);
        check(&zero(0, *ZERO_AFTER.end() + ms), &["zero_after"]);
        check(&zero(1, *ZERO_AFTER.start()), &["zero_after"]);
        let timetable = |entries: usize, min: u32| of(&|it| it.timetable = vec![entry(min); entries]);
        check(&timetable(TIMETABLE_ENTRIES_MAX, REPLICAS_MAX), &[]);
        check(&timetable(TIMETABLE_ENTRIES_MAX + 1, 1), &["timetable"]);
        check(&timetable(1, REPLICAS_MAX + 1), &["timetable"]);
        check(&timetable(1, 0), &["timetable"]);
        let never = TimetableEntry { to: entry(1).from, ..entry(1) };
        check(&of(&|it| it.timetable = vec![never.clone()]), &["timetable"]);
    }

    #[test]
    fn settings_within_the_limit_of_a_region_stay_valid() {
        let wide = Scaling { min: 3, max: 8, timetable: vec![entry(1), entry(6)], ..Scaling::default() };
        let narrow = wide.limited_to(2);
        check(&narrow, &[]);
        assert_eq!((narrow.min, narrow.max), (2, 2));
        assert_eq!(narrow.timetable.iter().map(|entry| entry.min).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(wide.limited_to(8), wide);
        check(&wide.limited_to(0), &[]);
        let zero = Scaling { min: 0, max: 8, zero_after: Some(ZERO_AFTER_DEFAULT), ..Scaling::default() };
        assert_eq!(zero.limited_to(1), Scaling { max: 1, ..zero });
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let wrong = Scaling {
            min: 9,
            max: 3,
            concurrency_target: Some(0),
            target_utilization: 0,
            autoscaling_window: Duration::ZERO,
            scale_down_delay: Duration::from_secs(4000),
            zero_after: Some(Duration::ZERO),
            timetable: vec![entry(0)],
        };
        let mut keys = Scaling::KEYS.to_vec();
        keys.retain(|key| *key != "max");
        keys.insert(keys.len() - 1, "zero_after");
        check(&wrong, &keys);
    }
}
