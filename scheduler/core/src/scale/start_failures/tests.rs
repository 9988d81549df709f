//! Tests of the decision whether a deployment has failed.

use super::*;
use crate::some_instant;

const S: Duration = Duration::from_secs(1);

fn report(reason: StartFailure) -> StartFailureReport {
    StartFailureReport::new(reason, reason.as_str())
}

/// Returns a start that ended at once.
fn ended(reason: StartFailure, at: Instant) -> EndedStart {
    EndedStart { at, lasted: Duration::ZERO, failure: report(reason) }
}

/// Returns the reason after one evaluation.
fn reason(
    failures: &mut StartFailures,
    replicas: &[ReplicaStartState<'_>],
    now: Instant,
) -> Option<StartFailure> {
    failures.observe(replicas.iter().copied(), now).map(|failure| failure.reason)
}

#[test]
fn a_permanent_failure_of_every_replica_fails_the_deployment_at_once() {
    let now = some_instant();
    for permanent in StartFailure::ALL.into_iter().filter(|reason| is_permanent(*reason)) {
        let (missing, other) = (report(permanent), report(StartFailure::ModelUnavailable));
        let mut failures = StartFailures::default();
        let all = [ReplicaStartState::Failing(&other), ReplicaStartState::Failing(&missing)];
        assert_eq!(reason(&mut failures, &all, now), Some(permanent), "the permanent one is the reason");
        assert_eq!(failures.failed(), Some(&missing));
    }
}

/// Violates the rule on purpose: one failed replica beside one that starts is no failed deployment.
#[test]
fn one_failed_replica_of_two_does_not_fail_the_deployment() {
    let now = some_instant();
    let missing = report(StartFailure::ModelMissing);
    let mut failures = StartFailures::default();
    let both = [ReplicaStartState::Failing(&missing), ReplicaStartState::Starting { since: now }];
    for second in 0..3600 {
        assert_eq!(reason(&mut failures, &both, now + S * second), None);
    }
    let later = now + 3600 * S;
    assert_eq!(reason(&mut failures, &both[..1], later), Some(StartFailure::ModelMissing));
    let ready = [ReplicaStartState::Failing(&missing), ReplicaStartState::Ready];
    assert_eq!(reason(&mut failures, &ready, later), None, "one is ready");
}

#[test]
fn a_failure_that_may_end_by_itself_must_last() {
    let now = some_instant();
    for (transient, lasts) in [
        (StartFailure::ModelUnavailable, 3 * S),
        (StartFailure::CrashLoop, 30 * S),
        (StartFailure::Other, 30 * S),
    ] {
        let failure = report(transient);
        let failing = [ReplicaStartState::Failing(&failure)];
        let starting = [ReplicaStartState::Starting { since: now }];
        let mut failures = StartFailures::default();
        let almost = now + lasts - S;
        assert_eq!(reason(&mut failures, &failing, now), None);
        assert_eq!(reason(&mut failures, &failing, almost), None);
        assert_eq!(reason(&mut failures, &starting, almost), None, "it ended");
        assert_eq!(reason(&mut failures, &failing, now + lasts), None, "the time starts again");
        assert_eq!(reason(&mut failures, &failing, now + 2 * lasts - S), None, "{transient:?}");
        assert_eq!(reason(&mut failures, &failing, now + 2 * lasts), Some(transient));
    }
}

#[test]
fn an_unavailable_origin_after_another_failure_must_last_as_well() {
    let now = some_instant();
    let [other, unavailable] = [StartFailure::Other, StartFailure::ModelUnavailable].map(report);
    let [other, unavailable] = [&other, &unavailable].map(|it| [ReplicaStartState::Failing(it)]);
    let mut failures = StartFailures::default();
    assert_eq!(reason(&mut failures, &other, now), None);
    assert_eq!(reason(&mut failures, &unavailable, now + 10 * S), None, "for 0 s");
    assert_eq!(reason(&mut failures, &unavailable, now + 12 * S), None, "for 2 s");
    assert_eq!(reason(&mut failures, &other, now + 29 * S), None);
    assert_eq!(reason(&mut failures, &other, now + 30 * S), Some(StartFailure::Other), "of either kind");

    let both = [other[0], unavailable[0]];
    let mut failures = StartFailures::default();
    assert_eq!(reason(&mut failures, &both, now), None);
    assert_eq!(reason(&mut failures, &both, now + 3 * S), Some(StartFailure::ModelUnavailable));
}

#[test]
fn the_failure_of_an_unavailable_origin_ends_when_bytes_arrive_for_some_seconds_and_not_between_two_starts() {
    let now = some_instant();
    let unavailable = report(StartFailure::ModelUnavailable);
    let (failing, starting) =
        (ReplicaStartState::Failing(&unavailable), ReplicaStartState::Starting { since: now });
    let mut failures = StartFailures::default();
    assert_eq!(reason(&mut failures, &[failing], now), None);
    let mut at = now + MODEL_UNAVAILABLE_AFTER;
    for replicas in [&[failing][..], &[failing, starting], &[]] {
        assert_eq!(reason(&mut failures, replicas, at), Some(StartFailure::ModelUnavailable));
        at += S;
    }
    let almost = at + MODEL_AVAILABLE_AFTER - S;
    for at in [at, almost] {
        assert!(reason(&mut failures, &[starting], at).is_some(), "bytes arrive");
    }
    assert_eq!(reason(&mut failures, &[starting], at + MODEL_AVAILABLE_AFTER), None, "for long enough");
    let later = at + MODEL_AVAILABLE_AFTER + S;
    assert_eq!(reason(&mut failures, &[failing], later), None, "the time starts again");
    let later = later + MODEL_UNAVAILABLE_AFTER;
    assert!(reason(&mut failures, &[failing], later).is_some());
    assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], later), None, "one is ready");
}

/// A replica that gets 8 KiB a second has its 64 KiB every eight seconds, and reports no failure for three of them.
#[test]
fn the_failure_of_a_slow_origin_does_not_end_with_each_piece_that_arrives() {
    let now = some_instant();
    let unavailable = report(StartFailure::ModelUnavailable);
    for is_current in [false, true] {
        let mut failures = StartFailures::default();
        for second in 0..600u32 {
            let at = now + S * second;
            let state = if second % 8 < 3 {
                ReplicaStartState::Starting { since: now }
            } else {
                ReplicaStartState::Failing(&unavailable)
            };
            let failed = if is_current {
                failures.observe_current([state], at)
            } else {
                failures.observe([state], at)
            };
            assert_eq!(failed.is_some(), second >= 6, "second {second}");
        }
    }
}

#[test]
fn a_replica_that_waits_for_the_pull_of_another_one_is_ignored_beside_a_failure_and_else_starts() {
    let now = some_instant();
    let unavailable = report(StartFailure::ModelUnavailable);
    let failing = ReplicaStartState::Failing(&unavailable);
    let waiting = ReplicaStartState::Waiting { since: now };
    let starting = ReplicaStartState::Starting { since: now };
    let later = now + MODEL_UNAVAILABLE_AFTER;
    let after = |replicas: &[ReplicaStartState<'_>]| {
        let mut failures = StartFailures::default();
        assert_eq!(reason(&mut failures, replicas, now), None);
        reason(&mut failures, replicas, later)
    };
    for both in [[failing, waiting], [waiting, failing]] {
        assert_eq!(after(&both), Some(StartFailure::ModelUnavailable), "it waits for the same origin");
    }
    assert_eq!(after(&[failing, waiting, starting]), None, "one starts normally");
    assert_eq!(after(&[waiting, waiting]), None);

    let mut failures = StartFailures::default();
    let crash = ended(StartFailure::CrashLoop, now + S);
    (0..FAILED_STARTS).for_each(|_| failures.start_ended(crash.clone()));
    assert_eq!(reason(&mut failures, &[waiting], now + S), None, "it has outlasted those that ended");
}

#[test]
fn three_starts_that_end_within_the_window_fail_the_deployment_and_two_do_not() {
    let now = some_instant();
    let crash = |at: u32| ended(StartFailure::CrashLoop, now + S * at);
    let mut failures = StartFailures::default();
    for at in [0, 1] {
        failures.start_ended(crash(at));
        assert_eq!(reason(&mut failures, &[], now + S * at), None);
    }
    failures.start_ended(crash(3));
    let next = [ReplicaStartState::Starting { since: now + 3 * S }];
    assert_eq!(reason(&mut failures, &next, now + 3 * S), Some(StartFailure::CrashLoop));
    assert_eq!(
        reason(&mut failures, &next, now + 3600 * S),
        Some(StartFailure::CrashLoop),
        "until one is ready"
    );

    let mut slow = StartFailures::default();
    for at in [0, 400, 800, 1200] {
        slow.start_ended(crash(at));
        assert_eq!(reason(&mut slow, &[], now + S * at), None, "they are not within the window");
    }
}

/// Violates the rule on purpose: replicas that become ready between their crashes are unstable, not failed.
#[test]
fn replicas_that_become_ready_and_crash_again_and_again_do_not_fail_the_deployment() {
    let now = some_instant();
    let mut failures = StartFailures::default();
    for second in 0..100 {
        let at = now + S * second;
        failures.start_ended(ended(StartFailure::CrashLoop, at));
        failures.start_ended(ended(StartFailure::CrashLoop, at));
        assert_eq!(reason(&mut failures, &[ReplicaStartState::Starting { since: at }], at), None);
        assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], at), None);
    }
}

#[test]
fn a_failed_deployment_recovers_with_a_ready_replica_and_not_with_a_start() {
    let now = some_instant();
    let missing = report(StartFailure::ModelMissing);
    let mut failures = StartFailures::default();
    assert!(reason(&mut failures, &[ReplicaStartState::Failing(&missing)], now).is_some());
    assert!(reason(&mut failures, &[ReplicaStartState::Starting { since: now + S }], now + S).is_some());
    assert!(reason(&mut failures, &[], now + S).is_some(), "between two starts");
    assert_eq!(reason(&mut failures, &[ReplicaStartState::Ready], now + 2 * S), None);
    assert_eq!(
        reason(&mut failures, &[ReplicaStartState::Starting { since: now + 3 * S }], now + 3 * S),
        None
    );
}

#[test]
fn a_replica_that_ended_with_a_permanent_failure_fails_the_deployment_unless_another_one_was_starting() {
    let now = some_instant();
    let (before, after) =
        ([ReplicaStartState::Starting { since: now }], [ReplicaStartState::Starting { since: now + 2 * S }]);
    let mut failures = StartFailures::default();
    failures.start_ended(ended(StartFailure::DiskFull, now + S));
    assert_eq!(reason(&mut failures, &before, now + 2 * S), None, "it may become ready");
    assert_eq!(
        reason(&mut failures, &after, now + 2 * S),
        Some(StartFailure::DiskFull),
        "it is a further attempt"
    );
}

#[test]
fn a_replica_that_has_outlasted_those_that_ended_may_become_ready_and_a_younger_one_is_a_further_attempt() {
    let now = some_instant();
    let crash = |at: u32| EndedStart { lasted: 5 * S, ..ended(StartFailure::CrashLoop, now + S * at) };
    let mut failures = StartFailures::default();
    [10, 20, 30].into_iter().for_each(|at| failures.start_ended(crash(at)));
    let [old, young] = [24, 25].map(|since| ReplicaStartState::Starting { since: now + S * since });
    assert_eq!(reason(&mut failures, &[old, young], now + 30 * S), None, "one has started for 6 s");
    assert_eq!(reason(&mut failures, &[young], now + 30 * S), Some(StartFailure::CrashLoop), "it has ended");
}

#[test]
fn starts_that_never_become_ready_within_their_timeout_fail_the_deployment() {
    let now = some_instant();
    let lasted = Duration::from_secs(600);
    let mut failures = StartFailures::default();
    for (start, expected) in [(1, None), (2, None), (3, Some(StartFailure::CrashLoop))] {
        let at = now + (lasted + S) * start;
        failures.start_ended(EndedStart { lasted, ..ended(StartFailure::CrashLoop, at) });
        let next = [ReplicaStartState::Starting { since: at }];
        assert_eq!(reason(&mut failures, &next, at), expected, "start {start}");
    }
}

#[test]
fn an_ended_start_is_forgotten_after_the_window() {
    let now = some_instant();
    let later = now + FAILED_STARTS_WITHIN + S;
    for reason_of_end in [StartFailure::CrashLoop, StartFailure::DiskFull] {
        let mut failures = StartFailures::default();
        (0..FAILED_STARTS).for_each(|_| failures.start_ended(ended(reason_of_end, now)));
        let next = [ReplicaStartState::Starting { since: later }];
        assert_eq!(reason(&mut failures, &next, later), None, "learned late, for example by another scaler");
    }
}
