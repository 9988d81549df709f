//! A region's decisions, told as what happens to it.

use super::*;
use crate::some_instant;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// A region in which time passes when the test says so.
struct Region {
    spoke: Spoke,
    now: Instant,
}

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

fn well(pending_tokens: u64, tokens_per_second: f64) -> ReplicaStatus {
    let names = BTreeSet::from([name("minilm")]);
    ReplicaStatus {
        model: None,
        names,
        ready: true,
        draining: false,
        pending_tokens,
        interactive_tokens: None,
        tokens_per_second,
    }
}

impl Region {
    fn of(replicas: u16) -> Region {
        let at = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=replicas).map(at).collect());
        Region { spoke, now: some_instant() }
    }

    /// One replica for each pair of pending tokens and tokens per second.
    fn with(replicas: &[(u64, f64)]) -> Region {
        let mut region = Region::of(replicas.len() as u16);
        for (index, (pending, speed)) in replicas.iter().enumerate() {
            region.says(index, well(*pending, *speed));
        }
        region
    }

    fn says(&mut self, index: usize, observed: ReplicaStatus) {
        self.spoke.observe_replica(index, observed, self.now);
    }

    fn select_replica(&mut self, tokens: u64) -> Result<SelectedReplica, NoReplica> {
        self.choose_seeing(tokens, &[])
    }

    /// Whoever is not in `seen` is fine.
    fn choose_seeing(&mut self, tokens: u64, seen: &[(Eligibility, u64)]) -> Result<SelectedReplica, NoReplica> {
        let of = |index| {
            let seen = seen.get(index).copied();
            seen.map_or(PassiveHealth::HEALTHY, |(turn, slowness_permille)| PassiveHealth { turn, slowness_permille })
        };
        self.spoke.select_replica(&name("minilm"), tokens, of, self.now)
    }

    fn chosen(&mut self, tokens: u64) -> usize {
        self.select_replica(tokens).expect("somebody is ready").index
    }

    fn finished(&mut self, choice: &SelectedReplica, outcome: ReplicaOutcome) {
        self.spoke.finished(choice, outcome, self.now);
    }

    fn ready(&self) -> u32 {
        self.spoke.report(1, self.now).deployments[&name("minilm")].ready
    }
}

const NONE_READY: NoReplica = NoReplica::NoneReady { retry_after: RETRY_AFTER };

#[test]
fn a_request_goes_to_the_replica_that_would_be_done_first() {
    let check = |replicas: &[(u64, f64)], tokens: u64, expected: usize| {
        assert_eq!(Region::with(replicas).chosen(tokens), expected, "{replicas:?}, {tokens} tokens");
    };
    check(&[(500, 1000.0), (400, 1000.0)], 100, 1); // less before it
    check(&[(500, 2000.0), (400, 1000.0)], 100, 0); // more before it, and faster
    check(&[(0, 1000.0), (150, 2000.0)], 100, 0); // a short request: the idle one
    check(&[(0, 1000.0), (150, 2000.0)], 1000, 1); // a long one: the fast one
    check(&[(7, 1000.0), (7, 1000.0)], 100, 0); // a tie ends in the number
    check(&[(200, 1000.0), (100, 0.0)], 100, 1); // of unknown speed: as fast as the fastest
    check(&[(200, 0.0), (100, 0.0)], 100, 1); // nobody's is known: fewest tokens
    check(&[(200, f64::NAN), (100, -1.0)], 100, 1); // nor is one that cannot be
    check(&[(u64::MAX, 1000.0), (u64::MAX - 1, 1e-300)], u64::MAX, 0); // nothing overflows
}

#[test]
fn what_requests_have_seen_of_a_replica_weighs_more_than_its_word() {
    use Eligibility::*;
    let full = Err(NoReplica::Full { retry_after: RETRY_AFTER });
    let check = |seen: [(Eligibility, u64); 2], expected: Result<usize, NoReplica>| {
        let mut region = Region::with(&[(0, 1000.0), (1900, 1000.0)]);
        let chosen = region.choose_seeing(100, &seen).map(|choice| choice.index);
        assert_eq!(chosen, expected, "{seen:?}");
    };
    check([(Open, 1000), (Open, 1000)], Ok(0));
    check([(Open, 20_000), (Open, 1000)], Ok(0)); // 2 s each, and a tie
    check([(Open, 20_001), (Open, 1000)], Ok(1)); // it says that it is idle, and is twenty times slower
    check([(LastResort, 1000), (Open, 1000)], Ok(1));
    check([(LastResort, 1000), (LastResort, 1000)], Ok(0));
    check([(LastResort, 1000), (Full, 1000)], Ok(0));
    check([(Full, 1000), (Open, 1000)], Ok(1));
    check([(Full, 1000), (Full, 1000)], full);
    check([(Tried, 1000), (Full, 1000)], full);
    check([(Tried, 1000), (Open, 9000)], Ok(1));
    check([(Tried, 1000), (Tried, 1000)], Err(NONE_READY));
    check([(Open, u64::MAX), (Open, u64::MAX)], Ok(0));
}

#[test]
fn a_replica_that_was_late_is_not_taken_for_dead() {
    let mut region = Region::with(&[(0, 1000.0)]);
    let choice = region.select_replica(100).unwrap();
    region.finished(&choice, ReplicaOutcome::TimedOut);
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_burst_between_two_words_of_the_replicas_is_spread() {
    let mut region = Region::with(&[(0, 1000.0), (0, 1000.0), (0, 2000.0)]);
    let mut sent = [0; 3];
    for _ in 0..40 {
        sent[region.chosen(100)] += 1;
    }
    assert_eq!(sent, [10, 10, 20]);
}

#[test]
fn what_has_ended_no_longer_counts() {
    let mut region = Region::with(&[(0, 1000.0), (50, 1000.0)]);
    let first = region.select_replica(100).unwrap();
    assert_eq!((first.index, region.select_replica(100).unwrap().index), (0, 1));
    region.finished(&first, ReplicaOutcome::Responded);
    assert_eq!(region.chosen(100), 0);
}

#[test]
fn a_request_whose_end_nobody_told_is_forgotten_at_the_next_word() {
    let mut region = Region::with(&[(0, 1000.0), (50, 1000.0)]);
    drop(region.select_replica(1_000_000));
    assert_eq!(region.chosen(1), 1);
    region.says(0, well(0, 1000.0));
    assert_eq!(region.chosen(1), 0);
}

#[test]
fn a_replicas_word_and_our_own_count_are_not_added_up() {
    let mut region = Region::with(&[(0, 1000.0)]);
    let ours = region.select_replica(100).unwrap();
    region.says(0, well(120, 1000.0)); // the same request, in real tokens
    let pending =
        |region: &Region| region.spoke.report(1, region.now).deployments[&name("minilm")].pending_tokens;
    assert_eq!(pending(&region), 120);
    region.finished(&ours, ReplicaOutcome::Responded);
    assert_eq!(pending(&region), 20, "reckoned forward from 120, by our estimate");
    region.says(0, well(0, 1000.0));
    assert_eq!(pending(&region), 0);
}

#[test]
fn a_replica_that_failed_is_left_alone_until_it_is_heard_again() {
    let mut region = Region::with(&[(0, 1000.0), (500, 1000.0)]);
    let first = region.select_replica(100).unwrap();
    region.finished(&first, ReplicaOutcome::Failed);
    assert_eq!((region.chosen(1), region.ready()), (1, 1));
    region.spoke.replica_failed(1, region.now);
    assert_eq!((region.select_replica(1), region.ready()), (Err(NONE_READY), 0));
    region.says(0, well(0, 1000.0));
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_caller_who_gives_up_does_not_take_the_replica_from_others() {
    let mut region = Region::with(&[(0, 1000.0)]);
    let choice = region.select_replica(100).unwrap();
    region.finished(&choice, ReplicaOutcome::Canceled);
    assert_eq!((region.chosen(1), region.ready()), (0, 1));
}

#[test]
fn a_replica_that_was_not_heard_for_too_long_is_not_ready() {
    for (silence, ready) in [(STATUS_AGE_MAX, 2), (STATUS_AGE_MAX + MS, 1)] {
        let mut region = Region::with(&[(0, 1000.0), (500, 1000.0)]);
        region.now += silence;
        region.says(1, well(500, 1000.0));
        assert_eq!(region.ready(), ready, "{silence:?}");
        assert_eq!(region.chosen(1), 2 - ready as usize);
    }
}

#[test]
fn when_nobody_was_heard_the_last_state_stands() {
    let mut region = Region::with(&[(0, 1000.0), (500, 1000.0)]);
    region.spoke.replica_failed(0, region.now);
    region.now += 3600 * 1000 * MS;
    assert_eq!((region.chosen(1), region.ready()), (1, 1));
    // One bad sign is a sign: whoever gives it was heard, and so this process is not all_silent.
    region.spoke.replica_failed(0, region.now);
    assert_eq!((region.select_replica(1), region.ready()), (Err(NONE_READY), 0));
}

#[test]
fn only_a_replica_that_takes_work_is_ready() {
    let starting = ReplicaStatus { ready: false, ..well(0, 0.0) };
    let leaving = ReplicaStatus { draining: true, ..well(0, 1000.0) };
    let other = ReplicaStatus { names: BTreeSet::from([name("other")]), ..well(0, 1000.0) };
    for (observed, refusal) in [(starting, NONE_READY), (leaving, NONE_READY), (other, NoReplica::UnknownDeployment)]
    {
        let mut region = Region::of(1);
        region.says(0, observed.clone());
        assert_eq!(region.select_replica(1), Err(refusal), "{observed:?}");
    }
    let mut unheard = Region::of(1);
    assert_eq!(unheard.select_replica(1), Err(NONE_READY), "nobody knows yet what it answers to");
    assert_eq!(Region::of(0).select_replica(1), Err(NoReplica::UnknownDeployment));
}

#[test]
fn a_report_names_everything_that_the_region_answers_to() {
    let mut region = Region::with(&[(30, 1000.0), (12, 500.0), (0, 0.0)]);
    let both = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    region.says(1, ReplicaStatus { names: both, interactive_tokens: Some(5), ..well(12, 500.0) });
    let starting = ReplicaStatus { names: BTreeSet::from([name("later")]), ready: false, ..well(0, 0.0) };
    region.says(2, starting);

    let load = |ready, pending_tokens, interactive_tokens, tokens_per_second| DeploymentLoad {
        ready,
        ready_in: None,
        pending_tokens,
        interactive_tokens,
        tokens_per_second,
        granted_tokens: 0,
    };
    let deployments = BTreeMap::from([
        (name("later"), load(0, 0, None, 0.0)),
        (name("minilm"), load(2, 42, None, 1500.0)),
        (name("minilm-eu"), load(1, 12, Some(5), 500.0)),
    ]);
    let of = "aws/us-east-1".parse().unwrap();
    let expected = Report { region: of, boot_id: 7, sequence: 3, deployments, draining: false };
    assert_eq!(region.spoke.report(3, region.now), expected);
    let ready = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    assert_eq!(region.spoke.deployments_ready(region.now), ready);
}

#[test]
fn a_draining_region_says_so_and_still_serves_what_comes() {
    let mut region = Region::with(&[(0, 1000.0)]);
    region.spoke.set_draining();
    assert!(region.spoke.report(1, region.now).draining);
    assert!(region.spoke.deployments_ready(region.now).is_empty());
    assert_eq!(region.chosen(1), 0);
}

/// A starved machine's only replica said nothing for 2 s; its region refused 13 requests that it would have answered.
#[test]
fn a_replica_that_is_late_is_left_only_for_one_that_is_not_until_it_must_be_frozen() {
    let late = |silence: Duration, replicas: &[(u64, f64)]| {
        let mut region = Region::with(replicas);
        region.now += silence;
        for index in 1..replicas.len() {
            region.says(index, well(1_000_000, 1000.0));
        }
        region.spoke.replica_late(0, region.now);
        region.select_replica(1).map(|choice| choice.index)
    };
    assert_eq!(late(SILENCE_MAX, &[(0, 1000.0)]), Ok(0));
    assert_eq!(late(SILENCE_MAX + MS, &[(0, 1000.0)]), Err(NONE_READY));
    assert_eq!(late(STATUS_AGE_MAX, &[(0, 1000.0), (0, 1000.0)]), Ok(0));
    assert_eq!(late(STATUS_AGE_MAX + MS, &[(0, 1000.0), (0, 1000.0)]), Ok(1));
    let mut never = Region::of(1);
    never.spoke.replica_late(0, never.now);
    assert_eq!(never.select_replica(1), Err(NONE_READY));
}

/// What a gateway that wants all it can get is granted of `deployment`, at a region to which `own` tokens come a period.
fn granted(region: &mut Region, own: u64, deployment: &str) -> u64 {
    for _ in 0..5 {
        region.spoke.arrived(&name(deployment), own, TrafficOrigin::Local, region.now);
        region.spoke.arrived(&name(deployment), 1_000_000, TrafficOrigin::Spillover, region.now);
        region.now += GRANT_PERIOD;
    }
    let names = region.spoke.deployments_ready(region.now);
    let wanted = names.into_iter().map(|name| (name, 1_000_000)).collect();
    let gateway = Gateway { place: "50.1,8.7".to_owned(), boot_id: 1 };
    let report = region.spoke.answer(&ExchangeRequest { gateway, sequence: 1, wanted }, region.now);
    let granted = report.deployments[&name(deployment)].granted_tokens;
    assert_eq!(region.spoke.granted(&name(deployment)), granted);
    granted
}

#[test]
fn a_region_offers_what_it_can_take_beyond_what_comes_by_itself() {
    // A period is a fifth of a second.
    let check = |replicas: &[(u64, f64)], own: u64, expected: u64| {
        assert_eq!(
            granted(&mut Region::with(replicas), own, "minilm"),
            expected,
            "{replicas:?}, {own} a period"
        );
    };
    check(&[(0, 10_000.0)], 0, 1800);
    check(&[(0, 10_000.0), (0, 5_000.0)], 0, 2700);
    check(&[(0, 10_000.0)], 1000, 800); // others' overflow is not its own
    check(&[(0, 10_000.0)], 1801, 0);
    check(&[(2000, 10_000.0)], 1000, 800); // a period's work waits
    check(&[(2001, 10_000.0)], 1000, 240);
    check(&[(0, 0.0)], 0, 0); // nobody knows what it can take
    check(&[(0, f64::INFINITY)], 0, 0);
    let mut draining = Region::with(&[(0, 10_000.0)]);
    draining.spoke.set_draining();
    assert_eq!(granted(&mut draining, 0, "minilm"), 0);
}

#[test]
fn deployments_on_the_same_replicas_share_what_is_spare() {
    let mut region = Region::with(&[(0, 10_000.0), (0, 10_000.0)]);
    let both = BTreeSet::from([name("minilm"), name("minilm-eu")]);
    region.says(1, ReplicaStatus { names: both.clone(), ..well(0, 10_000.0) });
    assert_eq!(granted(&mut region, 0, "minilm-eu"), 1800, "half of what both replicas can take");
    let mut region = Region::with(&[(0, 10_000.0)]);
    region.says(0, ReplicaStatus { names: both, ..well(0, 10_000.0) });
    assert_eq!(granted(&mut region, 1000, "minilm-eu"), 400, "what comes for one is not there for the other");
}
