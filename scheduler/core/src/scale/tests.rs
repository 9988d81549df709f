//! One look at a time, and what must hold of any sequence of them.

use super::*;
use crate::some_instant;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

/// A deployment whose replicas do 1000 tokens a second each and start in 10 s.
struct Story {
    scaler: Scaler,
    now: Instant,
}

fn seen(ready: u32) -> Seen {
    Seen {
        arrived: 0,
        backlog: 0,
        in_flight: 0,
        ready,
        ordered: Vec::new(),
        speed: 1000,
        start: 10 * SECOND,
        floor: 0,
        brake: None,
    }
}

impl Story {
    fn of(knobs: Scaling) -> Story {
        let now = some_instant();
        Story { scaler: Scaler::new(knobs, now), now }
    }

    fn tick(&mut self, seen: Seen) -> Wanted {
        self.now += TICK;
        self.scaler.tick(&seen, self.now)
    }

    /// `seconds` in which so many tokens a second arrive, with all the replicas that are wanted; how many at the end.
    fn runs(&mut self, rate: u64, seconds: u64, mut count: u32) -> u32 {
        for _ in 0..seconds / TICK.as_secs() {
            count = self
                .tick(Seen { arrived: rate * TICK.as_secs(), in_flight: rate.min(1) as u32, ..seen(count) })
                .replicas;
        }
        count
    }
}

fn knobs(min: u32, max: u32) -> Scaling {
    Scaling { min, max, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() }
}

#[test]
fn steady_traffic_has_what_it_needs_at_the_utilization_that_was_asked_for() {
    let steady = |rate, knobs| Story::of(knobs).runs(rate, 600, 1);
    assert_eq!(steady(750, knobs(0, 50)), 1);
    assert_eq!(steady(7500, knobs(0, 50)), 10);
    assert_eq!(steady(7500, knobs(0, 5)), 5);
    assert_eq!(steady(10, knobs(3, 5)), 3);
    let half = Scaling { target_utilization: 50, ..knobs(0, 50) };
    assert_eq!(steady(7500, half), 15);
}

#[test]
fn what_is_already_ordered_is_not_ordered_again() {
    let mut story = Story::of(knobs(0, 100));
    let first = story.tick(Seen { backlog: 5000, arrived: 2000, ..seen(0) });
    assert_eq!(first, Wanted { replicas: 1, why: Why::Wake }, "a second's arrivals are no rate yet");
    let mut count = first.replicas;
    for second in [8, 6, 4] {
        let ordered = vec![second * SECOND; count as usize];
        let next = story.tick(Seen { backlog: 7000, arrived: 2000, ordered, ..seen(0) });
        assert!(next.replicas <= 3, "{next:?}");
        count = next.replicas;
    }
}

#[test]
fn a_backlog_is_worked_off_and_not_only_kept() {
    let mut story = Story::of(knobs(0, 100));
    story.runs(7500, 300, 13);
    let busy = story.tick(Seen { arrived: 15_000, backlog: 400_000, in_flight: 1, ..seen(13) });
    // 400,000 wait, and 7,500 a second come for 10 s, of which 13 replicas do 13,000 a second.
    assert_eq!(busy, Wanted { replicas: 25, why: Why::Backlog });
}

#[test]
fn from_nothing_one_is_woken_at_once_and_no_more_are_ordered_than_may_be() {
    let mut story = Story::of(knobs(0, 100));
    assert_eq!(story.tick(seen(0)), Wanted { replicas: 0, why: Why::Wake });
    assert_eq!(story.tick(Seen { backlog: 1, speed: 0, ..seen(0) }), Wanted { replicas: 1, why: Why::Wake });
    let all = story.tick(Seen { arrived: 1_000_000, ..seen(0) });
    assert_eq!(all, Wanted { replicas: up_max(0), why: Why::Paced });
    let all = story.tick(Seen { arrived: 1_000_000, ..seen(4) });
    assert_eq!(all, Wanted { replicas: up_max(4), why: Why::Paced });
}

#[test]
fn none_is_let_go_before_its_time_and_then_a_quarter_at_a_time() {
    let mut story = Story::of(knobs(0, 100));
    assert_eq!(story.runs(15_000, 300, 20), 20);
    let quiet = |story: &mut Story, count| story.tick(Seen { arrived: 2, ..seen(count) });
    for _ in 0..85 {
        assert_eq!(quiet(&mut story, 20).replicas, 20, "within three minutes");
    }
    let mut counts = vec![20];
    for _ in 0..200 {
        let count = quiet(&mut story, *counts.last().unwrap()).replicas;
        counts.push(count);
    }
    counts.dedup();
    assert!(counts.windows(2).all(|pair| pair[0] - pair[1] <= (pair[0] / 4).max(1)), "{counts:?}");
    assert_eq!(counts.last(), Some(&1), "{counts:?}");
}

#[test]
fn none_is_let_go_while_somebody_knows_better() {
    for brake in [Brake::HubSilent, Brake::TakesOverflow, Brake::RollsOut, Brake::Crashed] {
        let mut story = Story::of(knobs(0, 100));
        story.now += Duration::from_secs(3600);
        let wanted = story.tick(Seen { brake: Some(brake), ..seen(20) });
        assert_eq!(wanted, Wanted { replicas: 20, why: Why::Brake(brake) });
        assert_eq!(story.tick(seen(20)), Wanted { replicas: 0, why: Why::Zero });
    }
}

#[test]
fn to_zero_goes_what_nobody_has_asked_for_and_only_where_that_is_wanted() {
    let after = |knobs: Scaling, seconds: u64| {
        let mut story = Story::of(knobs);
        story.tick(Seen { arrived: 10, ..seen(1) });
        story.runs(0, seconds, 1)
    };
    assert_eq!((after(knobs(0, 9), 298), after(knobs(0, 9), 300)), (1, 0));
    assert_eq!(after(knobs(1, 9), 3600), 1);
    assert_eq!(after(Scaling { zero_after: None, ..knobs(0, 9) }, 36_000), 1);
}

#[test]
fn what_sleeps_is_not_woken_by_what_averages_remember() {
    for window in [1, 60, 3600] {
        let window = Duration::from_secs(window);
        let mut story = Story::of(Scaling { autoscaling_window: window, ..knobs(0, 9) });
        assert_eq!(story.runs(3000, 600, 1), 4);
        assert_eq!(story.runs(0, 300, 4), 0, "{window:?}");
        assert!((0..1800).all(|_| story.runs(0, 2, 0) == 0), "{window:?}");
        let mut crashed =
            (0..1800).map(|_| story.tick(Seen { brake: Some(Brake::Crashed), ..seen(0) }).replicas);
        assert!(crashed.all(|replicas| replicas == 0), "{window:?}: nor by a brake");
        assert!(story.tick(Seen { arrived: 10, backlog: 10, ..seen(0) }).replicas >= 1, "but by who asks");
    }
}

#[test]
fn a_floor_is_kept_and_no_more_than_the_most() {
    let mut story = Story::of(knobs(0, 5));
    assert_eq!(story.tick(Seen { floor: 3, ..seen(0) }), Wanted { replicas: 3, why: Why::Floor });
    assert_eq!(story.tick(Seen { floor: 9, ..seen(0) }), Wanted { replicas: 5, why: Why::Floor });
}

#[test]
fn who_counts_requests_at_a_time_gets_what_they_ask_for() {
    let knobs = Scaling { concurrency_target: Some(32), ..knobs(0, 100) };
    let wanted = Story::of(knobs).tick(Seen { in_flight: 240, speed: 0, ..seen(5) });
    assert_eq!(wanted, Wanted { replicas: 10, why: Why::Concurrency });
}

#[test]
fn knobs_that_change_change_what_is_wanted_and_forget_nothing() {
    let mut story = Story::of(knobs(0, 50));
    assert_eq!(story.runs(7500, 600, 1), 10);
    story.scaler.set_knobs(Scaling { autoscaling_window: Duration::from_secs(30), ..knobs(0, 5) });
    assert_eq!(story.runs(7500, 2, 10), 5, "no more than there may be now");
    story.scaler.set_knobs(Scaling { target_utilization: 50, ..knobs(0, 50) });
    assert_eq!(story.runs(7500, 2, 5), 15, "what arrives is still known");
}

#[test]
fn every_reason_has_a_name_of_its_own() {
    let names: std::collections::BTreeSet<_> = Why::ALL.iter().map(|why| why.name()).collect();
    assert_eq!(names.len(), Why::ALL.len());
}

proptest! {
    /// Whatever is seen in whatever order: within min and max, at the floor, no more ordered at once than may be, and
    /// none let go while there is a brake.
    #[test]
    fn whatever_is_seen_the_bounds_hold(
        looks in prop::collection::vec(
            (0u64..10_000_000, 0u64..10_000_000, 0u32..5000, 0u32..40, 0usize..10, 0u64..5000, 0u64..300, 0u32..20, any::<bool>()),
            1..60,
        ),
        min in 0u32..5,
        more in 0u32..60,
    ) {
        let mut story = Story::of(knobs(min, min + more));
        for (arrived, backlog, in_flight, ready, ordered, speed, start, floor, braked) in looks {
            let ordered = vec![SECOND; ordered];
            let count = ready + ordered.len() as u32;
            let brake = braked.then_some(Brake::RollsOut);
            let seen = Seen {
                arrived, backlog, in_flight, ready, ordered, speed, start: Duration::from_secs(start), floor, brake,
            };
            let wanted = story.tick(seen).replicas;
            prop_assert!((min..=min + more).contains(&wanted));
            prop_assert!(wanted >= floor.min(min + more));
            prop_assert!(wanted <= up_max(count).max(floor).max(min));
            prop_assert!(!braked || wanted >= count.min(min + more), "{wanted} of {count}");
            prop_assert!(story.scaler.needed.len() <= REMEMBERED_MAX);
        }
    }
}
