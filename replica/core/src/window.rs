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
const COHORTS: usize = 64;
/// Callers that return later than this are not peers: no fixed cost is this long. It is much longer than any batching
/// delay, because an arrival is attributed to the oldest response that is still without one; dropping that response too
/// early would attribute its caller to a response that was sent just now, and predict the same of the next one.
const MEMORY: Duration = Duration::from_millis(100);
/// Weight of the newest sample in a moving average.
const GAIN: f64 = 0.125;
/// Deviations above the mean by which a peer should have returned. TCP's retransmission timer uses four; two are enough
/// here, because missing a straggler costs one fixed cost and not a connection.
const DEVIATIONS: f64 = 2.0;
/// Fewer expected peers than this are not waited for.
const SOMEBODY: f64 = 0.5;

/// Input of [`decide`] when the engine is free and requests are queued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Situation {
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
    pub opened: Option<Instant>,
    /// Expected peers.
    pub expected: Expected,
    /// Longest batching delay.
    pub max: Duration,
}

/// Callers that are expected to return.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Callers that received a response, usually return, and have not returned yet.
    pub peers: f64,
    /// Time by which all of them should have returned.
    pub peers_by: Option<Instant>,
    /// Uncertainty of that time: two deviations to either side.
    pub spread: Duration,
}

/// Decision of the batching delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Compute the queued requests.
    Now(Reason),
    /// Decide again at this time, or when a request arrives.
    Wait(Instant),
}

/// Why a batch starts now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The batch is full.
    Full,
    /// The cost of batches is not known yet.
    CostUnknown,
    /// No callers are expected.
    NobodyExpected,
    /// Callers are expected, and waiting for them would cost more than it saves.
    DoesNotPay,
    /// The maximum delay has passed.
    WaitedEnough,
    /// A deadline is near.
    DeadlineNear,
    /// The other priority has queued requests, for which the engine is not kept idle.
    OtherPriority,
    /// The batch runs between the steps of a bulk batch.
    Between,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Reason; 8] = [
        Reason::Full,
        Reason::CostUnknown,
        Reason::NobodyExpected,
        Reason::DoesNotPay,
        Reason::WaitedEnough,
        Reason::DeadlineNear,
        Reason::OtherPriority,
        Reason::Between,
    ];

    /// Returns the name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Full => "full",
            Reason::CostUnknown => "cost_unknown",
            Reason::NobodyExpected => "nobody_expected",
            Reason::DoesNotPay => "does_not_pay",
            Reason::WaitedEnough => "waited_enough",
            Reason::DeadlineNear => "deadline_near",
            Reason::OtherPriority => "other_priority",
            Reason::Between => "between",
        }
    }
}

/// Decides whether to compute now or to wait.
pub fn decide(situation: &Situation) -> Verdict {
    let Situation { now, tokens, budget, cost, latest_start, opened, expected, max } = *situation;
    if tokens >= budget {
        return Verdict::Now(Reason::Full);
    }
    let Some(cost) = cost else { return Verdict::Now(Reason::CostUnknown) };
    let expects = |by: &Instant| expected.peers >= SOMEBODY && *by > now;
    let Some(by) = expected.peers_by.filter(expects) else {
        let reason = if opened.is_some() { Reason::WaitedEnough } else { Reason::NobodyExpected };
        return Verdict::Now(reason);
    };
    let way_back = by.saturating_duration_since(now).as_secs_f64();
    if expected.spread.as_secs_f64() >= cost.fixed || way_back >= cost.fixed * expected.peers.min(1.0) {
        return Verdict::Now(Reason::DoesNotPay);
    }
    // The total delay never exceeds the gain or the configured maximum, however often the forecast changes.
    let until = by.min(opened.unwrap_or(now) + max.min(duration(cost.fixed)));
    match latest_start {
        Some(latest) if latest <= now => Verdict::Now(Reason::DeadlineNear),
        _ if until <= now => Verdict::Now(Reason::WaitedEnough),
        latest => Verdict::Wait(latest.map_or(until, |latest| latest.min(until))),
    }
}

/// Callers that received their responses together.
#[derive(Clone, Copy, Debug)]
struct Cohort {
    at: Instant,
    answered: u32,
    back: u32,
    last_back_after: f64,
}

/// Learns the return times of callers, and tracks the current batching delay.
#[derive(Clone, Debug)]
pub struct Window {
    max: Duration,
    cohorts: VecDeque<Cohort>,
    /// Fraction of the callers that returns within [`COHORT_TTL`] of a response.
    part_back: f64,
    /// Mean time until the last caller of a cohort has returned, in seconds, and its deviation.
    back_after: Option<(f64, f64)>,
    opened: Option<Instant>,
}

impl Window {
    /// Creates a window with a maximum delay of `max`; 0 turns it off.
    pub fn new(max: Duration) -> Window {
        Window { max, cohorts: VecDeque::new(), part_back: 0.0, back_after: None, opened: None }
    }

    /// Records the arrival of a request.
    pub fn arrived(&mut self, now: Instant) {
        self.forget(now);
        if let Some(cohort) = self.cohorts.iter_mut().find(|cohort| cohort.back < cohort.answered) {
            cohort.back += 1;
            cohort.last_back_after = now.saturating_duration_since(cohort.at).as_secs_f64();
        }
    }

    /// Records that `requests` responses were sent together.
    pub fn answered(&mut self, now: Instant, requests: usize) {
        self.forget(now);
        if requests == 0 {
            return;
        }
        if self.cohorts.len() == COHORTS
            && let Some(oldest) = self.cohorts.pop_front()
        {
            self.learn(oldest);
        }
        let answered = u32::try_from(requests).unwrap_or(u32::MAX);
        self.cohorts.push_back(Cohort { at: now, answered, back: 0, last_back_after: 0.0 });
    }

    /// Returns the expected peers.
    pub fn expected(&mut self, now: Instant) -> Expected {
        self.forget(now);
        let Some((mean, deviation)) = self.back_after else { return Expected::default() };
        let after = mean + DEVIATIONS * deviation;
        let spread = duration(2.0 * DEVIATIONS * deviation);
        let mut expected = Expected { spread, ..Expected::default() };
        for cohort in &self.cohorts {
            let by = cohort.at + duration(after);
            let coming = f64::from(cohort.answered) * self.part_back - f64::from(cohort.back);
            if coming > 0.0 && by > now {
                expected.peers += coming;
                expected.peers_by = expected.peers_by.max(Some(by));
            }
        }
        expected
    }

    /// Decides, and tracks the start of the batching delay.
    pub fn ask(&mut self, situation: Situation) -> Verdict {
        let verdict = decide(&Situation { opened: self.opened, max: self.max, ..situation });
        match verdict {
            Verdict::Wait(..) => self.opened = self.opened.or(Some(situation.now)),
            Verdict::Now(_) => self.opened = None,
        }
        verdict
    }

    /// Ends the batching delay, because the queue is empty or the engine has other work.
    pub fn close(&mut self) {
        self.opened = None;
    }

    /// Returns the start of the current batching delay.
    pub fn opened(&self) -> Option<Instant> {
        self.opened
    }

    /// Learns from the cohorts that have expired.
    fn forget(&mut self, now: Instant) {
        while let Some(oldest) = self.cohorts.front().copied()
            && now.saturating_duration_since(oldest.at) > MEMORY
        {
            self.cohorts.pop_front();
            self.learn(oldest);
        }
    }

    fn learn(&mut self, Cohort { answered, back, last_back_after, .. }: Cohort) {
        self.part_back += GAIN * (f64::from(back) / f64::from(answered) - self.part_back);
        if back == 0 {
            return;
        }
        // The first sample gets the largest deviation, as in TCP (RFC 6298).
        let Some((mean, deviation)) = &mut self.back_after else {
            self.back_after = Some((last_back_after, last_back_after / 2.0));
            return;
        };
        let error = last_back_after - *mean;
        *mean += GAIN * error;
        *deviation += GAIN * (error.abs() - *deviation);
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
    fn situation(now: Instant) -> Situation {
        Situation {
            now,
            tokens: 10,
            budget: 500,
            cost: Some(BatchCost { fixed: 2e-3, per_token: 1e-4 }),
            latest_start: None,
            opened: None,
            expected: Expected::default(),
            max: MAX,
        }
    }

    fn peers(number: f64, by: Instant) -> Expected {
        Expected { peers: number, peers_by: Some(by), spread: MS }
    }

    #[test]
    fn there_is_no_delay_without_expected_peers() {
        let now = origin();
        assert_eq!(decide(&situation(now)), Verdict::Now(Reason::NobodyExpected));
        assert_eq!(decide(&Situation { cost: None, ..situation(now) }), Verdict::Now(Reason::CostUnknown));
    }

    #[test]
    fn the_delay_lasts_for_peers_that_return_within_the_fixed_cost() {
        let now = origin();
        let check = |number: f64, back: Duration, expected: Verdict| {
            let expected_peers = peers(number, now + back);
            assert_eq!(
                decide(&Situation { expected: expected_peers, ..situation(now) }),
                expected,
                "{number}, {back:?}"
            );
        };
        check(3.0, MS, Verdict::Wait(now + MS));
        check(3.0, 2 * MS, Verdict::Now(Reason::DoesNotPay));
        check(0.6, MS, Verdict::Wait(now + MS));
        check(0.6, MS + MS / 2, Verdict::Now(Reason::DoesNotPay));
        check(0.4, MS, Verdict::Now(Reason::NobodyExpected));
        let vague = Expected { spread: 2 * MS, ..peers(3.0, now + MS) };
        let decided = decide(&Situation { expected: vague, ..situation(now) });
        assert_eq!(decided, Verdict::Now(Reason::DoesNotPay), "callers without a regular return time are not peers");
    }

    #[test]
    fn a_full_batch_and_a_near_deadline_start_without_delay() {
        let now = origin();
        let waiting = Situation { expected: peers(3.0, now + MS), ..situation(now) };
        assert_eq!(
            decide(&Situation { tokens: 500, ..waiting }),
            Verdict::Now(Reason::Full),
            "at the budget"
        );
        assert!(matches!(decide(&Situation { tokens: 499, ..waiting }), Verdict::Wait(..)), "one below it");
        let near = |latest: Instant| decide(&Situation { latest_start: Some(latest), ..waiting });
        assert_eq!(near(now), Verdict::Now(Reason::DeadlineNear));
        assert_eq!(near(now + MS / 2), Verdict::Wait(now + MS / 2));
    }

    #[test]
    fn the_total_delay_is_bounded() {
        let now = origin();
        let always = |opened: Instant, max: Duration| {
            let expected = peers(3.0, now + MS);
            decide(&Situation { expected, opened: Some(opened), max, ..situation(now) })
        };
        assert_eq!(always(now - MS, MAX), Verdict::Wait(now + MS));
        assert_eq!(always(now - 2 * MS, MAX), Verdict::Now(Reason::WaitedEnough), "the fixed cost");
        assert_eq!(always(now - MS, MS), Verdict::Now(Reason::WaitedEnough), "the configured maximum");
        assert_eq!(always(now, Duration::ZERO), Verdict::Now(Reason::WaitedEnough), "turned off");
    }

    #[test]
    fn callers_that_return_are_expected_and_strangers_are_not() {
        let mut window = Window::new(MAX);
        let mut now = origin();
        // Four callers, each of which returns half a millisecond after its response; responses every 20 ms.
        for _ in 0..50 {
            window.answered(now, 4);
            now += MS / 2;
            (0..4).for_each(|_| window.arrived(now));
            now += 20 * MS;
        }
        window.answered(now, 4);
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
                window.answered(now, batch as usize);
                let expected = window.expected(now);
                if matches!(decide(&Situation { expected, ..situation(now) }), Verdict::Wait(_)) {
                    waits += 1;
                }
            }
            assert!(waits <= 10, "{waits} waits of 200 for {batch} every {every} ms");
        }
    }
}
