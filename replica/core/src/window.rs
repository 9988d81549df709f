//! Whether to compute what waits, or to wait a moment for company.
//!
//! Most batchers have a timer: every lone request pays for it, for the sake of company that may never come. This one has
//! none. It knows what a batch costs ([`crate::cost`]) and learns who comes when; it waits only for somebody whom it
//! has reason to expect, and only as long as that pays. [`decide`] is a pure function of what is known.
//!
//! **Peers.** Callers that send, wait for the answer and send again (every connection pool at its limit) come back
//! together, a moment after they were answered together. If the engine begins with whoever is there first, the callers
//! split into two groups that take turns: `n` callers are served in two batches, `2a + bN`, where `a` is the fixed cost and
//! `bN` that of the tokens. Waiting for the peers costs their way back `r` once, and saves one fixed part: `a + bN + r`.
//! So it pays exactly if `r < a`, here with the part of the peers that is known to come back as the probability of the
//! gain. That part and that way back are learnt from every answer.
//!
//! **Strangers.** Callers that know nothing of each other are never waited for, however fast they come. For one batch alone
//! a wait can lower the sum of all latencies; over a long time it does not: while the engine computes, strangers gather by
//! themselves, and whoever waited has only moved the idle time before the batch instead of after it. The simulator
//! (`tests/batch/simulator.rs`) was given a rule that waits for the next stranger wherever that lowers the sum: it cost up
//! to 17 % of mean latency and gained nowhere, at fixed costs of 0 to 5 ms and from a twentieth of the capacity to one
//! and a half of it. Strangers are not taken for peers either: the time between an answer and the next stranger has no
//! pattern, and nobody is expected whose way back varies by more than the fixed cost.
//!
//! An idle server has nobody to expect: the peers are back or gone. It never waits.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cost::{BatchCost, duration};

/// Answers that are remembered at once; with more of them within [`MEMORY`], the oldest are forgotten first.
const COHORTS: usize = 64;
/// Who comes back later than this is nobody's peer: no fixed cost is so long. It is much longer than any wait, because an
/// arrival belongs to the oldest answer that is still without one; whoever forgets that answer too soon takes its caller
/// for one who was answered just now, and expects the same of the next.
const MEMORY: Duration = Duration::from_millis(100);
/// The weight of the newest in a learnt mean.
const GAIN: f64 = 0.125;
/// Deviations beyond the mean by which a peer is back: as TCP's timer has it, but two and not four, because what is
/// lost by missing a straggler is a fixed part and not a connection.
const DEVIATIONS: f64 = 2.0;
/// Fewer expected peers than this are nobody.
const SOMEBODY: f64 = 0.5;

/// What is known when the engine is free and something waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Situation {
    /// Now.
    pub now: Instant,
    /// Tokens that wait.
    pub tokens: u64,
    /// Tokens that the batch may have.
    pub budget: u64,
    /// What batches cost; unknown at first.
    pub cost: Option<BatchCost>,
    /// When the batch has to begin, for whoever has the earliest deadline.
    pub latest_start: Option<Instant>,
    /// Since when they have been waiting for company, if they have.
    pub opened: Option<Instant>,
    /// Who is expected.
    pub expected: Expected,
    /// The longest that anybody waits for company.
    pub max: Duration,
}

/// Who is expected.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Callers that were answered, come back as a rule, and are not back yet.
    pub peers: f64,
    /// When they should all be back.
    pub peers_by: Option<Instant>,
    /// How much sooner or later than thought that may be: two deviations to either side.
    pub spread: Duration,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Compute what is there.
    Now(Reason),
    /// Ask again at this time, or when something has come.
    Wait(Instant),
}

/// Why nobody is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The batch is full without.
    Full,
    /// What batches cost is not known yet.
    CostUnknown,
    /// Nobody is expected.
    NobodyExpected,
    /// Somebody is, and it would cost more than it gains.
    DoesNotPay,
    /// It was waited for as long as it may be.
    WaitedEnough,
    /// A deadline is near.
    DeadlineNear,
    /// The other priority has work, for which the engine is not kept idle.
    OtherPriority,
    /// It goes between the steps of a batch of bulk.
    Between,
}

impl Reason {
    /// All of them.
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

    /// As metrics call it.
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

/// Compute now, or wait.
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
    // However often the forecast moves: never longer than the gain, and than a person allows.
    let until = by.min(opened.unwrap_or(now) + max.min(duration(cost.fixed)));
    match latest_start {
        Some(latest) if latest <= now => Verdict::Now(Reason::DeadlineNear),
        _ if until <= now => Verdict::Now(Reason::WaitedEnough),
        latest => Verdict::Wait(latest.map_or(until, |latest| latest.min(until))),
    }
}

/// Callers that were answered together.
#[derive(Clone, Copy, Debug)]
struct Cohort {
    at: Instant,
    answered: u32,
    back: u32,
    last_back_after: f64,
}

/// Learns who comes when, and remembers whether anybody is being waited for.
#[derive(Clone, Debug)]
pub struct Window {
    max: Duration,
    cohorts: VecDeque<Cohort>,
    /// The part of the answered callers that comes back within [`MEMORY`].
    part_back: f64,
    /// When the last of them is back, in seconds, and how much that deviates.
    back_after: Option<(f64, f64)>,
    opened: Option<Instant>,
}

impl Window {
    /// Nobody waits longer than `max` for company; 0 turns it off.
    pub fn new(max: Duration) -> Window {
        Window { max, cohorts: VecDeque::new(), part_back: 0.0, back_after: None, opened: None }
    }

    /// A request came in.
    pub fn arrived(&mut self, now: Instant) {
        self.forget(now);
        if let Some(cohort) = self.cohorts.iter_mut().find(|cohort| cohort.back < cohort.answered) {
            cohort.back += 1;
            cohort.last_back_after = now.saturating_duration_since(cohort.at).as_secs_f64();
        }
    }

    /// So many requests were answered together.
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

    /// Who is expected.
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

    /// Decides, and remembers since when somebody has been waited for.
    pub fn ask(&mut self, situation: Situation) -> Verdict {
        let verdict = decide(&Situation { opened: self.opened, max: self.max, ..situation });
        match verdict {
            Verdict::Wait(..) => self.opened = self.opened.or(Some(situation.now)),
            Verdict::Now(_) => self.opened = None,
        }
        verdict
    }

    /// Nothing waits any more, or the engine has other work.
    pub fn close(&mut self) {
        self.opened = None;
    }

    /// Since when somebody has been waited for.
    pub fn opened(&self) -> Option<Instant> {
        self.opened
    }

    /// Learns from the cohorts whose time is over.
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
        // The first is taken with as much doubt as there can be, as TCP does (RFC 6298).
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

    /// One request of ten tokens waits; a batch costs 2 ms and 0.1 ms for each token.
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
    fn nobody_is_waited_for_without_a_reason_to_expect_him() {
        let now = origin();
        assert_eq!(decide(&situation(now)), Verdict::Now(Reason::NobodyExpected));
        assert_eq!(decide(&Situation { cost: None, ..situation(now) }), Verdict::Now(Reason::CostUnknown));
    }

    #[test]
    fn peers_are_waited_for_exactly_if_they_are_back_within_the_fixed_cost() {
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
        assert_eq!(decided, Verdict::Now(Reason::DoesNotPay), "who may come at any time is no peer");
    }

    #[test]
    fn a_full_batch_and_a_near_deadline_wait_for_nobody() {
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
    fn the_sum_of_all_waits_is_bounded() {
        let now = origin();
        let always = |opened: Instant, max: Duration| {
            let expected = peers(3.0, now + MS);
            decide(&Situation { expected, opened: Some(opened), max, ..situation(now) })
        };
        assert_eq!(always(now - MS, MAX), Verdict::Wait(now + MS));
        assert_eq!(always(now - 2 * MS, MAX), Verdict::Now(Reason::WaitedEnough), "the fixed cost");
        assert_eq!(always(now - MS, MS), Verdict::Now(Reason::WaitedEnough), "what a person allows");
        assert_eq!(always(now, Duration::ZERO), Verdict::Now(Reason::WaitedEnough), "turned off");
    }

    #[test]
    fn callers_that_come_back_are_expected_and_strangers_are_not() {
        let mut window = Window::new(MAX);
        let mut now = origin();
        // Four callers, each back half a millisecond after its answer, answered every 20 ms.
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
        assert!((0.5..=1.0).contains(&window.expected(now + MS / 4).peers), "three of them are back");
        assert_eq!(window.expected(now + 2 * MS).peers, 0.0, "whoever is late is not expected any longer");
    }

    #[test]
    fn strangers_are_not_taken_for_peers() {
        // In batches of so many every so many milliseconds, as many as come.
        for (batch, every) in [(1, 50), (1, 5), (5, 10), (20, 20)] {
            let (mut window, mut now) = (Window::new(MAX), origin());
            let mut waits = 0;
            for round in 0..200u32 {
                for n in 0..batch {
                    // Evenly, but for a jitter that has no pattern.
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
