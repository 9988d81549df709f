//! How many replicas of a deployment each of its regions should have, as people set it.
//!
//! The knobs have the names that people know from Knative and from hosted services. What they decide together is in
//! `scheduler_core::scale`; here is which values there are. A value that could never do what it says is refused, together
//! with all others, so that nobody finds out at night that `zero_after` was overruled by `min` all along.
//!
//! A deployment that says nothing has one replica in each region, as it had before there was anything to set.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::timetable::{SHIFTS_MAX, Shift};
use crate::duration;

/// The most replicas of one deployment in one region: as many as one spoke asks for their status five times a second.
pub const REPLICAS_MAX: u32 = 256;
/// Requests at a time that one replica can be meant to have: a spoke sends no more to one.
pub const CONCURRENCY_MAX: u32 = 1024;
/// Averages over less than a look or two say nothing, and over more than an hour nothing of now.
pub const WINDOW: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// A replica that was not needed for an hour is not needed.
pub const DELAY: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
/// What is shorter than a second ends between two requests of one client; what is longer than a day is `never`.
pub const ZERO_AFTER: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);
/// When there may be none and nobody says when.
const ZERO_AFTER_DEFAULT: Duration = Duration::from_secs(300);

/// What people set, checked by [`Scaling::problems`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scaling {
    /// Never fewer. 0 lets it go to zero.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// Requests at a time that one replica should have; for models whose speed says little.
    pub concurrency_target: Option<u32>,
    /// How full a replica should be, in percent.
    pub target_utilization: u32,
    /// Over how long traffic is averaged.
    pub autoscaling_window: Duration,
    /// For how long what was needed is kept.
    pub scale_down_delay: Duration,
    /// For how long nobody must have asked until there is none; never, if absent.
    pub zero_after: Option<Duration>,
    /// Never fewer at these times.
    pub timetable: Vec<Shift>,
}

impl Default for Scaling {
    /// One, always; the rest are the values that a simulation over bursts, steps and waves was content with.
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
    /// The keys, as they are written.
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

    /// When nobody says how long: only where there may be none at all.
    pub fn zero_after_default(min: u32) -> Option<Duration> {
        (min == 0).then_some(ZERO_AFTER_DEFAULT)
    }

    /// Everything that is wrong with these values, each under the key that is to be changed.
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
            problems.push(("max", format!("`max` is {max}: write 1 to {REPLICAS_MAX}")));
        }
        if min > max {
            problems.push(("min", format!("`min` is {min} and `max` is {max}: write no more than `max`")));
        }
        if let Some(target) = concurrency_target.filter(|target| !(1..=CONCURRENCY_MAX).contains(target)) {
            let wanted = format!("write 1 to {CONCURRENCY_MAX}, or leave it out to go by speed alone");
            problems.push(("concurrency_target", format!("`concurrency_target` is {target}: {wanted}")));
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
                    format!("`zero_after` never comes where `min` is {min}: write min = 0, or \"never\"");
                problems.push(("zero_after", problem));
            }
        }
        if timetable.len() > SHIFTS_MAX {
            let problem = format!("`timetable` has {} entries: at most {SHIFTS_MAX} fit", timetable.len());
            problems.push(("timetable", problem));
        }
        for Shift { from, to, min: floor, .. } in timetable {
            if from == to {
                let problem = format!("`timetable` has an entry from {from} to {to}: write when it ends");
                problems.push(("timetable", problem));
            }
            if !(1..=*max).contains(floor) {
                let problem =
                    format!("`timetable` has an entry with min = {floor}: write 1 to `max`, which is {max}");
                problems.push(("timetable", problem));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shift(min: u32) -> Shift {
        let [from, to] = ["07:00", "19:00"].map(|text| text.parse().unwrap());
        Shift { days: "mon".parse().unwrap(), from, to, min }
    }

    #[track_caller]
    fn check(scaling: &Scaling, keys: &[&str]) {
        let problems = scaling.problems();
        let found: Vec<_> = problems.iter().map(|(key, _)| *key).collect();
        assert_eq!(found, keys, "{problems:?}");
        assert!(found.iter().all(|key| Scaling::KEYS.contains(key)));
    }

    #[test]
    fn every_value_is_taken_at_its_limits_and_refused_past_them() {
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
        let timetable = |shifts: usize, min: u32| of(&|it| it.timetable = vec![shift(min); shifts]);
        check(&timetable(SHIFTS_MAX, REPLICAS_MAX), &[]);
        check(&timetable(SHIFTS_MAX + 1, 1), &["timetable"]);
        check(&timetable(1, REPLICAS_MAX + 1), &["timetable"]);
        check(&timetable(1, 0), &["timetable"]);
        let never = Shift { to: shift(1).from, ..shift(1) };
        check(&of(&|it| it.timetable = vec![never.clone()]), &["timetable"]);
    }

    #[test]
    fn everything_that_is_wrong_is_told_at_once() {
        let wrong = Scaling {
            min: 9,
            max: 3,
            concurrency_target: Some(0),
            target_utilization: 0,
            autoscaling_window: Duration::ZERO,
            scale_down_delay: Duration::from_secs(4000),
            zero_after: Some(Duration::ZERO),
            timetable: vec![shift(0)],
        };
        let mut keys = Scaling::KEYS.to_vec();
        keys.retain(|key| *key != "max");
        keys.insert(keys.len() - 1, "zero_after");
        check(&wrong, &keys);
    }
}
