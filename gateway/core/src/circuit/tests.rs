//! Tests of the circuit breaker, as sequences of request outcomes.

use super::*;
use crate::some_instant;
use AttemptOutcome::*;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MIDDLE: Permille = Permille(500);

struct CircuitScenario {
    circuits: Circuits<u8>,
    now: Instant,
}

impl CircuitScenario {
    fn of(count: u8) -> CircuitScenario {
        let mut circuits = Circuits::default();
        circuits.set_targets(0..count);
        CircuitScenario { circuits, now: some_instant() }
    }

    fn record(&mut self, key: u8, outcome: &[AttemptOutcome]) -> bool {
        outcome.iter().fold(false, |_, outcome| {
            self.circuits.record(key, OutlierEvidence::of(*outcome), MIDDLE, self.now)
        })
    }

    fn after(&mut self, wait: Duration) -> &mut CircuitScenario {
        self.now += wait;
        self
    }

    fn state(&self, key: u8) -> BreakerState {
        self.circuits.state(key, self.now)
    }

    /// From ejected to recovering, by a successful probe.
    fn recovers(&mut self, key: u8) {
        while !matches!(self.state(key), BreakerState::HalfOpen { probe: Probe::Idle }) {
            self.after(100 * MS);
        }
        self.circuits.began(key, self.now);
        assert_eq!(self.state(key), BreakerState::HalfOpen { probe: Probe::InFlight });
        self.record(key, &[Success]);
    }
}

#[test]
fn two_timeouts_or_three_failures_in_a_row_or_half_of_twenty_requests_in_a_second_eject() {
    let check = |outcome: &[AttemptOutcome], ejected: bool| {
        let mut scenario = CircuitScenario::of(2);
        assert_eq!(scenario.record(0, outcome), ejected, "{outcome:?}");
    };
    check(&[Timeout], false);
    check(&[Timeout, Timeout], true);
    check(&[Timeout, Success, Timeout], false);
    check(&[ConnectionFailure, ConnectionFailure], false);
    check(&[ConnectionFailure, ConnectionFailure, ConnectionFailure], true);
    check(&[ConnectionFailure, ConnectionFailure, Success, ConnectionFailure], false);
    check(&[ConnectionFailure, Timeout, ConnectionFailure], false);
    let half = |of: usize| -> Vec<AttemptOutcome> { [Success, ServerError].repeat(of / 2) };
    check(&half(18), false);
    check(&half(20), true);
    check(&[Success, Success, ServerError].repeat(20), false);
    check(&[ServerError; 19], false);
    check(&[ServerError; 20], true);
}

#[test]
fn the_error_rate_is_counted_within_one_second() {
    let mut scenario = CircuitScenario::of(2);
    assert!(!scenario.record(0, &[ServerError; 19]));
    assert!(!scenario.after(ERROR_RATE_WINDOW).record(0, &[ServerError; 19]));
    assert!(scenario.after(ERROR_RATE_WINDOW - MS).record(0, &[ServerError]));
}

/// Known failure of circuit breakers: load slows all targets down, and all of them are ejected.
#[test]
fn no_target_is_ejected_when_all_time_out() {
    let mut scenario = CircuitScenario::of(3);
    for _ in 0..10 {
        for key in 0..3 {
            assert!(!scenario.record(key, &[Timeout]));
        }
    }
    scenario.record(2, &[Success]);
    assert!(scenario.record(0, &[Timeout]), "another target is healthy now");
}

#[test]
fn at_most_a_third_are_ejected_but_one_of_two_and_never_the_last() {
    for (count, most) in [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3)] {
        let mut scenario = CircuitScenario::of(count);
        let is_ejected = (0..count).filter(|key| scenario.record(*key, &[Timeout, Timeout])).count();
        assert_eq!(is_ejected, most, "of {count}");
    }
}

#[test]
fn the_ejection_time_doubles_up_to_half_a_minute_with_a_jitter_of_a_fifth() {
    let mut scenario = CircuitScenario::of(2);
    scenario.record(0, &[Timeout, Timeout]);
    for lasts in [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000].map(Duration::from_millis) {
        assert_eq!(scenario.state(0), BreakerState::Ejected { until: scenario.now + lasts });
        assert!(matches!(scenario.after(lasts - MS).state(0), BreakerState::Ejected { .. }));
        assert_eq!(scenario.after(MS).state(0), BreakerState::HalfOpen { probe: Probe::Idle });
        scenario.circuits.began(0, scenario.now);
        assert!(scenario.record(0, &[Timeout]), "a probe that fails");
    }
    for (draw, lasts) in [(0, 400), (1000, 600)] {
        let mut scenario = CircuitScenario::of(2);
        scenario.record(0, &[Timeout]);
        scenario.circuits.record(0, OutlierEvidence::of(Timeout), Permille::new(draw), scenario.now);
        assert_eq!(scenario.state(0), BreakerState::Ejected { until: scenario.now + lasts * MS });
    }
}

#[test]
fn one_request_is_the_probe_and_the_others_are_not_admitted_until_it_ends() {
    let mut scenario = CircuitScenario::of(2);
    scenario.record(0, &[Timeout, Timeout]);
    scenario.after(500 * MS);
    assert!(scenario.state(0).admits(Permille::new(999)));
    scenario.circuits.began(0, scenario.now);
    assert!(!scenario.state(0).admits(Permille::new(0)));
    scenario.circuits.probe_cancelled(0, scenario.now);
    assert_eq!(
        scenario.state(0),
        BreakerState::HalfOpen { probe: Probe::Idle },
        "its client disconnected; another request may be the probe"
    );
    scenario.circuits.began(0, scenario.now);
    assert_eq!(
        scenario.after(PROBE_TIMEOUT - MS).state(0),
        BreakerState::HalfOpen { probe: Probe::InFlight }
    );
    assert_eq!(
        scenario.after(MS).state(0),
        BreakerState::HalfOpen { probe: Probe::Idle },
        "its outcome was never reported"
    );
    scenario.circuits.began(0, scenario.now);
    scenario.circuits.hedge_won(0, MIDDLE, scenario.now);
    assert_eq!(
        scenario.state(0),
        BreakerState::Ejected { until: scenario.now + SECOND },
        "a probe that loses a race has failed"
    );
    scenario.circuits.hedge_won(1, MIDDLE, scenario.now);
    assert_eq!(scenario.state(1), BreakerState::Closed, "a lost race is no failure");
}

#[test]
fn the_traffic_share_of_a_recovering_target_grows() {
    let mut scenario = CircuitScenario::of(2);
    scenario.record(0, &[Timeout, Timeout]);
    scenario.recovers(0);
    let share = |scenario: &CircuitScenario| match scenario.state(0) {
        BreakerState::Recovering { traffic_share } => traffic_share.get(),
        other => panic!("{other:?}"),
    };
    assert_eq!(share(&scenario), 100);
    scenario.after(RAMP_UP / 2);
    assert_eq!(share(&scenario), 550);
    assert!(scenario.state(0).admits(Permille::new(549)) && !scenario.state(0).admits(Permille::new(550)));
    assert_eq!(scenario.after(RAMP_UP / 2).state(0), BreakerState::Closed);
}

#[test]
fn the_ejection_count_of_a_flapping_target_is_kept_for_a_minute_of_health() {
    for (other_is_healthy, lasts) in [(RAMP_UP, 1000), (RAMP_UP + EJECTION_COUNT_RESET, 500)] {
        let mut scenario = CircuitScenario::of(2);
        scenario.record(0, &[Timeout, Timeout]);
        scenario.recovers(0);
        scenario.after(RAMP_UP).record(0, &[Success]);
        scenario.after(other_is_healthy).record(0, &[Success]);
        scenario.record(0, &[Timeout, Timeout]);
        assert_eq!(
            scenario.state(0),
            BreakerState::Ejected { until: scenario.now + lasts * MS },
            "{other_is_healthy:?}"
        );
    }
}

fn any_outcome() -> impl Strategy<Value = AttemptOutcome> {
    prop::sample::select(vec![Success, ServerError, ConnectionFailure, Timeout])
}

proptest! {
    #[test]
    fn a_target_is_left_and_at_most_a_third_are_ejected_after_any_events(
        count in 1u8..10,
        events in prop::collection::vec((0u8..10, any_outcome(), 0u16..=1000, 0u32..400), 0..300),
    ) {
        let mut scenario = CircuitScenario::of(count);
        for (key, outcome, draw, wait_ms) in events {
            scenario.after(wait_ms * MS);
            let key = key % count;
            scenario.circuits.began(key, scenario.now);
            scenario.circuits.record(key, OutlierEvidence::of(outcome), Permille::new(draw), scenario.now);
            let is_ejected = (0..count).filter(|key| matches!(
                scenario.state(*key),
                BreakerState::Ejected { .. } | BreakerState::HalfOpen { .. }
            )).count();
            prop_assert!(is_ejected <= (usize::from(count) / 3).max(1) && is_ejected < usize::from(count));
        }
    }
}
