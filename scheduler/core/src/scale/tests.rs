//! Single evaluations, and properties of any sequence of them.

use super::*;
use crate::some_instant;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

/// Deployment whose replicas compute 1000 tokens a second each and start in 10 s.
struct ScalerTest {
    scaler: Scaler,
    now: Instant,
}

fn observed(ready: u32) -> ScalingObservation {
    ScalingObservation {
        arrived: 0,
        backlog: 0,
        in_flight: 0,
        ready,
        provisioning: Vec::new(),
        speed: 1000,
        start: 10 * SECOND,
        floor: 0,
        blocker: None,
    }
}

impl ScalerTest {
    fn of(config: Scaling) -> ScalerTest {
        let now = some_instant();
        ScalerTest { scaler: Scaler::new(config, now), now }
    }

    fn tick(&mut self, observed: ScalingObservation) -> ScalingDecision {
        self.now += TICK;
        self.scaler.tick(&observed, self.now)
    }

    /// Runs `seconds` at this arrival rate, with all desired replicas ready; returns their number at the end.
    fn runs(&mut self, rate: u64, seconds: u64, mut count: u32) -> u32 {
        for _ in 0..seconds / TICK.as_secs() {
            count = self
                .tick(ScalingObservation {
                    arrived: rate * TICK.as_secs(),
                    in_flight: rate.min(1) as u32,
                    ..observed(count)
                })
                .replicas;
        }
        count
    }
}

fn config(min: u32, max: u32) -> Scaling {
    Scaling { min, max, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() }
}

#[test]
fn steady_traffic_gets_the_replicas_for_its_target_utilization() {
    let steady = |rate, config| ScalerTest::of(config).runs(rate, 600, 1);
    assert_eq!(steady(750, config(0, 50)), 1);
    assert_eq!(steady(7500, config(0, 50)), 10);
    assert_eq!(steady(7500, config(0, 5)), 5);
    assert_eq!(steady(10, config(3, 5)), 3);
    let half = Scaling { target_utilization: 50, ..config(0, 50) };
    assert_eq!(steady(7500, half), 15);
}

#[test]
fn replicas_being_provisioned_are_not_ordered_again() {
    let mut test = ScalerTest::of(config(0, 100));
    let first = test.tick(ScalingObservation { backlog: 5000, arrived: 2000, ..observed(0) });
    assert_eq!(
        first,
        ScalingDecision { replicas: 1, reason: ScalingReason::ColdStart },
        "the averages need more than one sample"
    );
    let mut count = first.replicas;
    for second in [8, 6, 4] {
        let provisioning = vec![second * SECOND; count as usize];
        let next =
            test.tick(ScalingObservation { backlog: 7000, arrived: 2000, provisioning, ..observed(0) });
        assert!(next.replicas <= 3, "{next:?}");
        count = next.replicas;
    }
}

#[test]
fn a_backlog_is_worked_off() {
    let mut test = ScalerTest::of(config(0, 100));
    test.runs(7500, 300, 13);
    let busy =
        test.tick(ScalingObservation { arrived: 15_000, backlog: 400_000, in_flight: 1, ..observed(13) });
    // 400,000 wait, and 7,500 a second arrive for 10 s, of which 13 replicas compute 13,000 a second.
    assert_eq!(busy, ScalingDecision { replicas: 25, reason: ScalingReason::Backlog });
}

#[test]
fn from_zero_one_replica_is_started_at_once_and_no_more_than_the_limit() {
    let mut test = ScalerTest::of(config(0, 100));
    assert_eq!(test.tick(observed(0)), ScalingDecision { replicas: 0, reason: ScalingReason::ColdStart });
    assert_eq!(
        test.tick(ScalingObservation { backlog: 1, speed: 0, ..observed(0) }),
        ScalingDecision { replicas: 1, reason: ScalingReason::ColdStart }
    );
    let all = test.tick(ScalingObservation { arrived: 1_000_000, ..observed(0) });
    assert_eq!(all, ScalingDecision { replicas: scale_up_limit(0), reason: ScalingReason::ScaleUpLimit });
    let all = test.tick(ScalingObservation { arrived: 1_000_000, ..observed(4) });
    assert_eq!(all, ScalingDecision { replicas: scale_up_limit(4), reason: ScalingReason::ScaleUpLimit });
}

#[test]
fn replicas_are_removed_after_the_delay_and_a_quarter_at_a_time() {
    let mut test = ScalerTest::of(config(0, 100));
    assert_eq!(test.runs(15_000, 300, 20), 20);
    let quiet =
        |test: &mut ScalerTest, count| test.tick(ScalingObservation { arrived: 2, ..observed(count) });
    for _ in 0..85 {
        assert_eq!(quiet(&mut test, 20).replicas, 20, "within three minutes");
    }
    let mut counts = vec![20];
    for _ in 0..200 {
        let count = quiet(&mut test, *counts.last().unwrap()).replicas;
        counts.push(count);
    }
    counts.dedup();
    assert!(counts.windows(2).all(|pair| pair[0] - pair[1] <= (pair[0] / 4).max(1)), "{counts:?}");
    assert_eq!(counts.last(), Some(&1), "{counts:?}");
}

#[test]
fn no_replica_is_removed_while_scaling_down_is_blocked() {
    for blocker in [
        ScaleDownBlocker::HubUnreachable,
        ScaleDownBlocker::ReceivesSpillover,
        ScaleDownBlocker::RolloutInProgress,
        ScaleDownBlocker::ReplicaCrashed,
    ] {
        let mut test = ScalerTest::of(config(0, 100));
        test.now += Duration::from_secs(3600);
        let desired = test.tick(ScalingObservation { blocker: Some(blocker), ..observed(20) });
        assert_eq!(desired, ScalingDecision { replicas: 20, reason: ScalingReason::Blocked(blocker) });
        assert_eq!(test.tick(observed(20)), ScalingDecision { replicas: 0, reason: ScalingReason::Idle });
    }
}

#[test]
fn an_idle_deployment_is_scaled_to_zero_only_if_configured() {
    let after = |config: Scaling, seconds: u64| {
        let mut test = ScalerTest::of(config);
        test.tick(ScalingObservation { arrived: 10, ..observed(1) });
        test.runs(0, seconds, 1)
    };
    assert_eq!((after(config(0, 9), 298), after(config(0, 9), 300)), (1, 0));
    assert_eq!(after(config(1, 9), 3600), 1);
    assert_eq!(after(Scaling { zero_after: None, ..config(0, 9) }, 36_000), 1);
}

#[test]
fn a_deployment_at_zero_is_not_started_by_its_averages() {
    for window in [1, 60, 3600] {
        let window = Duration::from_secs(window);
        let mut test = ScalerTest::of(Scaling { autoscaling_window: window, ..config(0, 9) });
        assert_eq!(test.runs(3000, 600, 1), 4);
        assert_eq!(test.runs(0, 300, 4), 0, "{window:?}");
        assert!((0..1800).all(|_| test.runs(0, 2, 0) == 0), "{window:?}");
        let mut crashed = (0..1800).map(|_| {
            test.tick(ScalingObservation { blocker: Some(ScaleDownBlocker::ReplicaCrashed), ..observed(0) })
                .replicas
        });
        assert!(crashed.all(|replicas| replicas == 0), "{window:?}: not by a blocker either");
        assert!(
            test.tick(ScalingObservation { arrived: 10, backlog: 10, ..observed(0) }).replicas >= 1,
            "but by a request"
        );
    }
}

#[test]
fn a_floor_is_kept_up_to_the_maximum() {
    let mut test = ScalerTest::of(config(0, 5));
    assert_eq!(
        test.tick(ScalingObservation { floor: 3, ..observed(0) }),
        ScalingDecision { replicas: 3, reason: ScalingReason::Floor }
    );
    assert_eq!(
        test.tick(ScalingObservation { floor: 9, ..observed(0) }),
        ScalingDecision { replicas: 5, reason: ScalingReason::Floor }
    );
}

#[test]
fn a_concurrency_target_determines_the_number_of_replicas() {
    let config = Scaling { concurrency_target: Some(32), ..config(0, 100) };
    let desired = ScalerTest::of(config).tick(ScalingObservation { in_flight: 240, speed: 0, ..observed(5) });
    assert_eq!(desired, ScalingDecision { replicas: 10, reason: ScalingReason::Concurrency });
}

#[test]
fn changed_settings_apply_at_once_and_the_averages_stay() {
    let mut test = ScalerTest::of(config(0, 50));
    assert_eq!(test.runs(7500, 600, 1), 10);
    test.scaler.set_config(Scaling { autoscaling_window: Duration::from_secs(30), ..config(0, 5) });
    assert_eq!(test.runs(7500, 2, 10), 5, "the maximum was lowered");
    test.scaler.set_config(Scaling { target_utilization: 50, ..config(0, 50) });
    assert_eq!(test.runs(7500, 2, 5), 15, "the arrival rate is still known");
}

#[test]
fn every_reason_has_a_unique_name() {
    let names: std::collections::BTreeSet<_> =
        ScalingReason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), ScalingReason::ALL.len());
}

proptest! {
    /// Any sequence of observations: the decision is between min and max and at least the floor, adds no more than the
    /// limit, and removes no replica while there is a blocker.
    #[test]
    fn any_observations_keep_the_bounds(
        observations in prop::collection::vec(
            (0u64..10_000_000, 0u64..10_000_000, 0u32..5000, 0u32..40, 0usize..10, 0u64..5000, 0u64..300, 0u32..20, any::<bool>()),
            1..60,
        ),
        min in 0u32..5,
        more in 0u32..60,
    ) {
        let mut test = ScalerTest::of(config(min, min + more));
        for (arrived, backlog, in_flight, ready, provisioning, speed, start, floor, is_blocked) in observations {
            let provisioning = vec![SECOND; provisioning];
            let count = ready + provisioning.len() as u32;
            let blocker = is_blocked.then_some(ScaleDownBlocker::RolloutInProgress);
            let observed = ScalingObservation {
                arrived, backlog, in_flight, ready, provisioning, speed, start: Duration::from_secs(start), floor, blocker,
            };
            let desired = test.tick(observed).replicas;
            prop_assert!((min..=min + more).contains(&desired));
            prop_assert!(desired >= floor.min(min + more));
            prop_assert!(desired <= scale_up_limit(count).max(floor).max(min));
            prop_assert!(!is_blocked || desired >= count.min(min + more), "{desired} of {count}");
            prop_assert!(test.scaler.recommendations.len() <= RECOMMENDATIONS_MAX);
        }
    }
}
