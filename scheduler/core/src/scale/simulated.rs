//! This scaler beside two policies that people know, over the same arrivals.
//!
//! *Requests in flight, two windows* is Knative's way: the average over 60 s, and over 6 s where that is twice as much, at
//! 70 % of a target. *Requests in flight, one window* is the way of hosted services: the average over 60 s, and 15 minutes
//! until anything is let go. Both are re-told from their public documentation, in a few lines each.
//!
//! The world is a fluid: work arrives at a rate, and flows off at that of the replicas that are ready; one that is ordered
//! is ready after a while. Nothing is lost: whoever waits is held. What is compared is the most replicas at a time, replicas
//! times seconds (what it costs), the longest wait, and when the queue was empty again.

use super::*;
use crate::some_instant;
use std::fmt;

/// A request of so many tokens, and what one replica does: seventy-five requests a second.
const TOKENS: f64 = 64.0;
const SPEED: u64 = 4800;
const REQUESTS: f64 = SPEED as f64 / TOKENS;
/// Requests that one replica has under way at a time when it is full: 0.2 s each.
const CONCURRENCY: f64 = 15.0;
const STEP: Duration = Duration::from_millis(100);
const MAX: u32 = 40;

/// What the policies see.
struct Look {
    now: Instant,
    arrived: f64,
    waiting: f64,
    ready: u32,
    ordered: Vec<Duration>,
    start: Duration,
}

impl Look {
    fn in_flight(&self) -> f64 {
        let under_way = f64::from(self.ready) * CONCURRENCY;
        let busy = (self.arrived / TICK.as_secs_f64() / REQUESTS * CONCURRENCY).min(under_way);
        if self.waiting > 0.0 { under_way + self.waiting } else { busy }
    }
}

trait Policy {
    fn wanted(&mut self, look: &Look) -> u32;
}

impl Policy for Scaler {
    fn wanted(&mut self, look: &Look) -> u32 {
        let seen = Seen {
            arrived: (look.arrived * TOKENS) as u64,
            backlog: (look.waiting * TOKENS) as u64,
            in_flight: look.in_flight().ceil() as u32,
            ready: look.ready,
            ordered: look.ordered.clone(),
            speed: SPEED,
            start: look.start,
            floor: 0,
            brake: None,
        };
        self.tick(&seen, look.now).replicas
    }
}

/// The last so many looks.
struct Window(VecDeque<(Instant, f64)>);

impl Window {
    fn average(&self, over: Duration, now: Instant) -> f64 {
        let recent = self.0.iter().rev().take_while(|(at, _)| now - *at < over);
        let (sum, count) = recent.fold((0.0, 0), |(sum, count), (_, seen)| (sum + seen, count + 1));
        sum / f64::from(count.max(1))
    }
}

/// Knative's.
struct TwoWindows {
    seen: Window,
    panics: Option<(Instant, u32)>,
}

impl Policy for TwoWindows {
    fn wanted(&mut self, look: &Look) -> u32 {
        let Look { now, ready, .. } = *look;
        self.seen.0.push_back((now, look.in_flight()));
        let target = CONCURRENCY * 0.7;
        let stable = (self.seen.average(Duration::from_secs(60), now) / target).ceil() as u32;
        let panic = (self.seen.average(Duration::from_secs(6), now) / target).ceil() as u32;
        if panic >= 2 * ready.max(1) {
            let most = self.panics.map_or(0, |(_, most)| most).max(panic);
            self.panics = Some((now, most));
        }
        match self.panics {
            Some((since, most)) if now - since < Duration::from_secs(60) => most.max(panic),
            _ => {
                self.panics = None;
                stable
            }
        }
    }
}

/// That of hosted services.
struct OneWindow {
    seen: Window,
    kept: VecDeque<(Instant, u32)>,
}

impl Policy for OneWindow {
    fn wanted(&mut self, look: &Look) -> u32 {
        let now = look.now;
        self.seen.0.push_back((now, look.in_flight()));
        let wanted = (self.seen.average(Duration::from_secs(60), now) / (CONCURRENCY * 0.7)).ceil() as u32;
        // A queue wakes the first one at once.
        let wanted = wanted.max(u32::from(look.in_flight() > 0.0));
        self.kept.push_back((now, wanted));
        self.kept.retain(|(at, _)| now - *at < Duration::from_secs(900));
        self.kept.iter().map(|(_, wanted)| *wanted).max().unwrap_or(0)
    }
}

/// What a run came to.
struct Row {
    peak: u32,
    replica_seconds: f64,
    wait_max: Duration,
    /// From the first arrival until nothing waited any longer.
    clear: Duration,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { peak, replica_seconds, wait_max, clear } = self;
        let (wait, clear) = (wait_max.as_secs_f64(), clear.as_secs());
        write!(
            f,
            "peak {peak:>3}   {replica_seconds:>7.0} replica-seconds   longest wait {wait:>5.1} s   queue gone after {clear:>4} s"
        )
    }
}

/// Runs `policy` for as long, over `rate` requests a second; a replica is ready `start` after it was ordered.
fn run(policy: &mut dyn Policy, start: Duration, seconds: u64, rate: impl Fn(u64) -> f64) -> Row {
    let begin = some_instant();
    let mut row = Row { peak: 0, replica_seconds: 0.0, wait_max: Duration::ZERO, clear: Duration::ZERO };
    let (mut ready, mut ordered): (u32, VecDeque<Instant>) = (0, VecDeque::new());
    // Who came when, first come first served, in requests.
    let mut queue: VecDeque<(Instant, f64)> = VecDeque::new();
    let mut arrived = 0.0f64;
    for step in 1..=seconds * 10 {
        let now = begin + STEP * u32::try_from(step).unwrap();
        while ordered.front().is_some_and(|at| *at <= now) {
            ordered.pop_front();
            ready += 1;
        }
        let came = rate(step / 10) * STEP.as_secs_f64();
        arrived += came;
        queue.push_back((now, came));
        let mut flows = f64::from(ready) * REQUESTS * STEP.as_secs_f64();
        while let Some((at, left)) = queue.front_mut().filter(|_| flows > 0.0) {
            row.wait_max = row.wait_max.max(now - *at);
            let done = left.min(flows);
            *left -= done;
            flows -= done;
            if *left <= 1e-9 {
                queue.pop_front();
            }
        }
        let waiting: f64 = queue.iter().map(|(_, left)| left).sum();
        if waiting > 1e-6 {
            row.clear = now - begin;
        }
        row.replica_seconds += f64::from(ready + ordered.len() as u32) * STEP.as_secs_f64();
        if step % 20 == 0 {
            let left = ordered.iter().map(|at| *at - now).collect();
            let look = Look { now, arrived, waiting, ready, ordered: left, start };
            let wanted = policy.wanted(&look).min(MAX);
            arrived = 0.0;
            let count = ready + ordered.len() as u32;
            (count..wanted).for_each(|_| ordered.push_back(now + start));
            for _ in wanted..count {
                // Whoever is not there yet is let go first.
                if ordered.pop_back().is_none() {
                    ready -= 1;
                }
            }
        }
        row.peak = row.peak.max(ready + ordered.len() as u32);
    }
    row
}

/// The three of them: this one, Knative's, and that of hosted services.
fn all(name: &str, start: Duration, seconds: u64, rate: impl Fn(u64) -> f64) -> [Row; 3] {
    let knobs =
        Scaling { min: 0, max: MAX, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() };
    let mut ours = Scaler::new(knobs, some_instant());
    let mut two = TwoWindows { seen: Window(VecDeque::new()), panics: None };
    let mut one = OneWindow { seen: Window(VecDeque::new()), kept: VecDeque::new() };
    let rows =
        [&mut ours as &mut dyn Policy, &mut two, &mut one].map(|policy| run(policy, start, seconds, &rate));
    println!("{name}, {} s to start", start.as_secs());
    for (who, row) in ["ours", "in flight, two windows", "in flight, one window"].iter().zip(&rows) {
        println!("  {who:<22} {row}");
    }
    rows
}

const START: Duration = Duration::from_secs(30);

#[test]
fn what_comes_from_nothing_and_stays_is_followed_with_half_of_what_others_order() {
    let [ours, two, one] = all("600 requests a second from zero, and they stay", START, 600, |_| 600.0);
    assert!(ours.peak * 2 <= two.peak.min(one.peak), "{} of {}", ours.peak, two.peak);
    assert!(ours.replica_seconds * 1.15 <= two.replica_seconds.min(one.replica_seconds));
    assert!(ours.wait_max <= two.wait_max + Duration::from_secs(5));
}

#[test]
fn a_burst_from_zero_costs_no_more_than_it_is_worth() {
    let burst = |second| if second < 10 { 600.0 } else { 0.0 };
    let [ours, two, one] = all("600 requests a second for 10 s, from zero", START, 900, burst);
    assert!(ours.peak < two.peak.min(one.peak));
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds) * 1.05);
    assert!(ours.wait_max <= START + DRAIN);
}

#[test]
fn a_step_is_followed_and_hardly_overshot() {
    let rate = |second| if second < 300 { 200.0 } else { 1600.0 };
    let [ours, two, one] = all("200, from the 300th second 1600 requests a second", START, 1200, rate);
    assert!(ours.peak <= two.peak.min(one.peak));
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds) * 1.05);
    assert!(ours.wait_max <= two.wait_max.min(one.wait_max) + Duration::from_secs(5));
}

#[test]
fn a_square_wave_is_not_chased() {
    let rate = |second: u64| if (second / 60).is_multiple_of(2) { 1200.0 } else { 120.0 };
    let [ours, two, one] = all("1200 and 120 requests a second, a minute each", START, 3600, rate);
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds));
    assert!(
        ours.wait_max <= two.wait_max + Duration::from_secs(5),
        "what is needed again in a minute is kept"
    );
}

mod burst;
