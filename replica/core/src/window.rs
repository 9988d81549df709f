//! Batching delay: whether to compute the queued requests now, or to wait for further requests.
//!
//! Most batchers have a timer: every lone request pays for it, for the sake of requests that may never come. This one
//! has no timer. It knows the cost of a batch ([`crate::cost`]) and learns the return times of callers; it waits only
//! for callers that it has reason to expect, and only as long as that pays. [`decide`] is a pure function of this
//! knowledge.
//!
//! **Peers.** Callers that send, wait for the response and send again (every connection pool at its limit) return
//! together, a moment after their responses were sent together. If the engine starts with the first of them, the
//! callers split into two groups that alternate: `n` callers are served in two batches, `2a + bN`, where `a` is the
//! fixed cost and `bN` that of the tokens. Waiting for the peers costs their return time `r` once, and saves one fixed
//! cost: `a + bN + r`. So it pays exactly if `r < a`; here the fraction of the peers that is known to return is the
//! probability of the gain. That fraction and the return time are learnt from every response.
//!
//! **Strangers.** The planner never waits for callers that are independent of each other, whatever their rate. For one
//! batch alone a delay can lower the sum of all latencies; over a long time it does not: strangers queue by themselves
//! while the engine computes, and the delay only moves the idle time before the batch instead of after it. In the
//! simulator (`tests/batch/simulator.rs`), a rule that waits for the next stranger wherever that lowers the sum cost up
//! to 17 % of mean latency and gained nothing, at fixed costs of 0 to 5 ms and from a twentieth of the capacity to one
//! and a half of it. Strangers are not mistaken for peers either: the time between a response and the next stranger has
//! no pattern, and callers whose return time varies by more than the fixed cost are not expected.
//!
//! An idle server expects no callers: the peers have returned or left. It never waits.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cost::{BatchCost, duration};

/// Maximum number of cohorts that are remembered; above it, the oldest are dropped first.
const MAX_COHORTS: usize = 64;
/// Callers that return later than this are not peers: no fixed cost is this long. It is much longer than any batching
/// delay, because an arrival is attributed to the oldest response that is still without one; dropping that response too
/// early would attribute its caller to a response that was sent just now, and predict the same of the next one.
const COHORT_TTL: Duration = Duration::from_millis(100);
/// Weight of the newest sample in a moving average.
const EWMA_WEIGHT: f64 = 0.125;
/// Deviations above the mean by which a peer should have returned. TCP's retransmission timer uses four; two are enough
/// here, because missing a straggler costs one fixed cost and not a connection.
const DEVIATIONS: f64 = 2.0;
/// Fewer expected peers than this are not waited for.
const MIN_EXPECTED_PEERS: f64 = 0.5;

/// Input of [`decide`] when the engine is free and requests are queued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecisionInput {
    /// Current time.
    pub now: Instant,
    /// Queued tokens.
    pub tokens: u64,
    /// Maximum tokens of the batch.
    pub budget: u64,
    /// Cost of batches; unknown at first.
    pub cost: Option<BatchCost>,
    /// Latest start of the batch, for the earliest deadline.
    pub latest_start: Option<Instant>,
    /// Start of the current batching delay, if there is one.
    pub waiting_since: Option<Instant>,
    /// Expected peers.
    pub expected: ExpectedPeers,
    /// Longest batching delay.
    pub max: Duration,
}

/// Callers that are expected to return.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpectedPeers {
    /// Callers that received a response, usually return, and have not returned yet.
    pub peers: f64,
    /// Time by which all of them should have returned.
    pub peers_by: Option<Instant>,
    /// Uncertainty of that time: two deviations to either side.
    pub spread: Duration,
}

/// Decision of the batching delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchDecision {
    /// Compute the queued requests.
    Now(StartReason),
    /// Decide again at this time, or when a request arrives.
    Wait(Instant),
}

/// Why a batch starts now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StartReason {
    /// The batch is full.
    Full,
    /// The cost of batches is not known yet.
    CostUnknown,
    /// No callers are expected.
    NoPeersExpected,
    /// Callers are expected, and waiting for them would cost more than it saves.
    NotWorthwhile,
    /// The maximum delay has passed.
    MaxDelayReached,
    /// A deadline is near.
    DeadlineNear,
    /// The other priority has queued requests, for which the engine is not kept idle.
    OtherPriority,
    /// The batch runs between the steps of a bulk batch.
    BetweenSteps,
}

impl StartReason {
    /// All reasons.
    pub const ALL: [StartReason; 8] = [
        StartReason::Full,
        StartReason::CostUnknown,
        StartReason::NoPeersExpected,
        StartReason::NotWorthwhile,
        StartReason::MaxDelayReached,
        StartReason::DeadlineNear,
        StartReason::OtherPriority,
        StartReason::BetweenSteps,
    ];

    /// Returns the name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            StartReason::Full => "full",
            StartReason::CostUnknown => "cost_unknown",
            StartReason::NoPeersExpected => "no_peers_expected",
            StartReason::NotWorthwhile => "not_worthwhile",
            StartReason::MaxDelayReached => "max_delay_reached",
            StartReason::DeadlineNear => "deadline_near",
            StartReason::OtherPriority => "other_priority",
            StartReason::BetweenSteps => "between_steps",
        }
    }
}

/// Decides whether to compute now or to wait.
pub fn decide(input: &DecisionInput) -> BatchDecision {
    let DecisionInput { now, tokens, budget, cost, latest_start, waiting_since, expected, max } = *input;
    if tokens >= budget {
        return BatchDecision::Now(StartReason::Full);
    }
    let Some(cost) = cost else { return BatchDecision::Now(StartReason::CostUnknown) };
    let is_expected = |by: &Instant| expected.peers >= MIN_EXPECTED_PEERS && *by > now;
    let Some(by) = expected.peers_by.filter(is_expected) else {
        let reason =
            if waiting_since.is_some() { StartReason::MaxDelayReached } else { StartReason::NoPeersExpected };
        return BatchDecision::Now(reason);
    };
    let return_time = by.saturating_duration_since(now).as_secs_f64();
    if expected.spread.as_secs_f64() >= cost.fixed || return_time >= cost.fixed * expected.peers.min(1.0) {
        return BatchDecision::Now(StartReason::NotWorthwhile);
    }
    // The total delay never exceeds the gain or the configured maximum, however often the forecast changes.
    let until = by.min(waiting_since.unwrap_or(now) + max.min(duration(cost.fixed)));
    match latest_start {
        Some(latest) if latest <= now => BatchDecision::Now(StartReason::DeadlineNear),
        _ if until <= now => BatchDecision::Now(StartReason::MaxDelayReached),
        latest => BatchDecision::Wait(latest.map_or(until, |latest| latest.min(until))),
    }
}

/// Callers that received their responses together.
#[derive(Clone, Copy, Debug)]
struct Cohort {
    at: Instant,
    responded: u32,
    returned: u32,
    last_return_after: f64,
}

/// Learns the return times of callers, and tracks the current batching delay.
#[derive(Clone, Debug)]
pub struct Window {
    max: Duration,
    cohorts: VecDeque<Cohort>,
    /// Fraction of the callers that returns within [`COHORT_TTL`] of a response.
    return_rate: f64,
    /// Mean time until the last caller of a cohort has returned, in seconds, and its deviation.
    return_time: Option<(f64, f64)>,
    waiting_since: Option<Instant>,
}

impl Window {
    /// Creates a window with a maximum delay of `max`; 0 turns it off.
    pub fn new(max: Duration) -> Window {
        Window { max, cohorts: VecDeque::new(), return_rate: 0.0, return_time: None, waiting_since: None }
    }

    /// Records the arrival of a request.
    pub fn arrived(&mut self, now: Instant) {
        self.expire_cohorts(now);
        if let Some(cohort) = self.cohorts.iter_mut().find(|cohort| cohort.returned < cohort.responded) {
            cohort.returned += 1;
            cohort.last_return_after = now.saturating_duration_since(cohort.at).as_secs_f64();
        }
    }

    /// Records that `requests` responses were sent together.
    pub fn responded(&mut self, now: Instant, requests: usize) {
        self.expire_cohorts(now);
        if requests == 0 {
            return;
        }
        if self.cohorts.len() == MAX_COHORTS
            && let Some(oldest) = self.cohorts.pop_front()
        {
            self.learn(oldest);
        }
        let responded = u32::try_from(requests).unwrap_or(u32::MAX);
        self.cohorts.push_back(Cohort { at: now, responded, returned: 0, last_return_after: 0.0 });
    }

    /// Returns the expected peers.
    pub fn expected(&mut self, now: Instant) -> ExpectedPeers {
        self.expire_cohorts(now);
        let Some((mean, deviation)) = self.return_time else { return ExpectedPeers::default() };
        let after = mean + DEVIATIONS * deviation;
        let spread = duration(2.0 * DEVIATIONS * deviation);
        let mut expected = ExpectedPeers { spread, ..ExpectedPeers::default() };
        for cohort in &self.cohorts {
            let by = cohort.at + duration(after);
            let outstanding = f64::from(cohort.responded) * self.return_rate - f64::from(cohort.returned);
            if outstanding > 0.0 && by > now {
                expected.peers += outstanding;
                expected.peers_by = expected.peers_by.max(Some(by));
            }
        }
        expected
    }

    /// Decides, and tracks the start of the batching delay.
    pub fn decide(&mut self, input: DecisionInput) -> BatchDecision {
        let decision = decide(&DecisionInput { waiting_since: self.waiting_since, max: self.max, ..input });
        match decision {
            BatchDecision::Wait(..) => self.waiting_since = self.waiting_since.or(Some(input.now)),
            BatchDecision::Now(_) => self.waiting_since = None,
        }
        decision
    }

    /// Ends the batching delay, because the queue is empty or the engine has other work.
    pub fn stop_waiting(&mut self) {
        self.waiting_since = None;
    }

    /// Returns the start of the current batching delay.
    pub fn waiting_since(&self) -> Option<Instant> {
        self.waiting_since
    }

    /// Learns from the cohorts that have expired.
    fn expire_cohorts(&mut self, now: Instant) {
        while let Some(oldest) = self.cohorts.front().copied()
            && now.saturating_duration_since(oldest.at) > COHORT_TTL
        {
            self.cohorts.pop_front();
            self.learn(oldest);
        }
    }

    fn learn(&mut self, Cohort { responded, returned, last_return_after, .. }: Cohort) {
        self.return_rate += EWMA_WEIGHT * (f64::from(returned) / f64::from(responded) - self.return_rate);
        if returned == 0 {
            return;
        }
        // The first sample gets the largest deviation, as in TCP (RFC 6298).
        let Some((mean, deviation)) = &mut self.return_time else {
            self.return_time = Some((last_return_after, last_return_after / 2.0));
            return;
        };
        let error = last_return_after - *mean;
        *mean += EWMA_WEIGHT * error;
        *deviation += EWMA_WEIGHT * (error.abs() - *deviation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an instant cannot be made in any other way")]
    fn origin() -> Instant {
        Instant::now()
    }

    const MS: Duration = Duration::from_millis(1);
    const MAX: Duration = Duration::from_millis(5);

    /// One request of ten tokens is queued; a batch costs 2 ms and 0.1 ms for each token.
    fn input(now: Instant) -> DecisionInput {
        DecisionInput {
            now,
            tokens: 10,
            budget: 500,
            cost: Some(BatchCost { fixed: 2e-3, per_token: 1e-4 }),
            latest_start: None,
            waiting_since: None,
            expected: ExpectedPeers::default(),
            max: MAX,
        }
    }

    fn peers(number: f64, by: Instant) -> ExpectedPeers {
        ExpectedPeers { peers: number, peers_by: Some(by), spread: MS }
    }

    #[test]
    fn there_is_no_delay_without_expected_peers() {
        let now = origin();
        assert_eq!(decide(&input(now)), BatchDecision::Now(StartReason::NoPeersExpected));
        assert_eq!(
            decide(&DecisionInput { cost: None, ..input(now) }),
            BatchDecision::Now(StartReason::CostUnknown)
        );
    }

    #[test]
    fn the_delay_lasts_for_peers_that_return_within_the_fixed_cost() {
        let now = origin();
        let check = |number: f64, returned: Duration, expected: BatchDecision| {
            let expected_peers = peers(number, now + returned);
            assert_eq!(
                decide(&DecisionInput { expected: expected_peers, ..input(now) }),
                expected,
                "{number}, {returned:?}"
            );
        };
        check(3.0, MS, BatchDecision::Wait(now + MS));
        check(3.0, 2 * MS, BatchDecision::Now(StartReason::NotWorthwhile));
        check(0.6, MS, BatchDecision::Wait(now + MS));
        check(0.6, MS + MS / 2, BatchDecision::Now(StartReason::NotWorthwhile));
        check(0.4, MS, BatchDecision::Now(StartReason::NoPeersExpected));
        let vague = ExpectedPeers { spread: 2 * MS, ..peers(3.0, now + MS) };
        let decided = decide(&DecisionInput { expected: vague, ..input(now) });
        assert_eq!(
            decided,
            BatchDecision::Now(StartReason::NotWorthwhile),
            "callers without a regular return time are not peers"
        );
    }

    #[test]
    fn a_full_batch_and_a_near_deadline_start_without_delay() {
        let now = origin();
        let waiting = DecisionInput { expected: peers(3.0, now + MS), ..input(now) };
        assert_eq!(
            decide(&DecisionInput { tokens: 500, ..waiting }),
            BatchDecision::Now(StartReason::Full),
            "at the budget"
        );
        assert!(
            matches!(decide(&DecisionInput { tokens: 499, ..waiting }), BatchDecision::Wait(..)),
            "one below it"
        );
        let near = |latest: Instant| decide(&DecisionInput { latest_start: Some(latest), ..waiting });
        assert_eq!(near(now), BatchDecision::Now(StartReason::DeadlineNear));
        assert_eq!(near(now + MS / 2), BatchDecision::Wait(now + MS / 2));
    }

    #[test]
    fn the_total_delay_is_bounded() {
        let now = origin();
        let always = |waiting_since: Instant, max: Duration| {
            let expected = peers(3.0, now + MS);
            decide(&DecisionInput { expected, waiting_since: Some(waiting_since), max, ..input(now) })
        };
        assert_eq!(always(now - MS, MAX), BatchDecision::Wait(now + MS));
        assert_eq!(
            always(now - 2 * MS, MAX),
            BatchDecision::Now(StartReason::MaxDelayReached),
            "the fixed cost"
        );
        assert_eq!(
            always(now - MS, MS),
            BatchDecision::Now(StartReason::MaxDelayReached),
            "the configured maximum"
        );
        assert_eq!(
            always(now, Duration::ZERO),
            BatchDecision::Now(StartReason::MaxDelayReached),
            "turned off"
        );
    }

    #[test]
    fn callers_that_return_are_expected_and_strangers_are_not() {
        let mut window = Window::new(MAX);
        let mut now = origin();
        // Four callers, each of which returns half a millisecond after its response; responses every 20 ms.
        for _ in 0..50 {
            window.responded(now, 4);
            now += MS / 2;
            (0..4).for_each(|_| window.arrived(now));
            now += 20 * MS;
        }
        window.responded(now, 4);
        let expected = window.expected(now);
        assert!((3.5..=4.0).contains(&expected.peers), "{expected:?}");
        let by = expected.peers_by.expect("a time") - now;
        assert!(by >= MS / 2 && by < MS, "{by:?}");
        (0..3).for_each(|_| window.arrived(now + MS / 4));
        assert!((0.5..=1.0).contains(&window.expected(now + MS / 4).peers), "three of them have returned");
        assert_eq!(window.expected(now + 2 * MS).peers, 0.0, "late callers are not expected any longer");
    }

    #[test]
    fn strangers_are_not_mistaken_for_peers() {
        // Batches of `batch` requests every `every` milliseconds, at the arrival rate.
        for (batch, every) in [(1, 50), (1, 5), (5, 10), (20, 20)] {
            let (mut window, mut now) = (Window::new(MAX), origin());
            let mut waits = 0;
            for round in 0..200u32 {
                for n in 0..batch {
                    // Evenly spaced, with a jitter that has no pattern.
                    let jitter = (round * 7919 + n * 104_729) % 1000;
                    window.arrived(now + every * MS * n / batch + every * MS * jitter / 1000 / batch);
                }
                now += every * MS;
                window.responded(now, batch as usize);
                let expected = window.expected(now);
                if matches!(decide(&DecisionInput { expected, ..input(now) }), BatchDecision::Wait(_)) {
                    waits += 1;
                }
            }
            assert!(waits <= 10, "{waits} waits of 200 for {batch} every {every} ms");
        }
    }
}
