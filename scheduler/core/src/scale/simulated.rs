//! Comparison of this autoscaler with two well-known policies over the same arrivals.
//!
//! *Requests in flight, two windows* is the policy of Knative: the average over 60 s, or over 6 s where that is twice
//! as much, at 70 % of a target. *Requests in flight, one window* is the policy of hosted services: the average over 60
//! s, and 15 minutes until anything is scaled down. Both follow their public documentation, in a few lines each.
//!
//! The simulation is a fluid model: work arrives at a rate and is processed at the speed of the ready replicas; an
//! ordered replica is ready after its start time. No request is lost: all that wait are held. Compared are the peak
//! number of replicas, replica-seconds (the cost), the longest wait, and the time until the queue is empty again.

use super::*;
use crate::some_instant;
use std::fmt;

/// Tokens per request, and the speed of one replica: seventy-five requests a second.
const TOKENS: f64 = 64.0;
const SPEED: u64 = 4800;
const REQUESTS: f64 = SPEED as f64 / TOKENS;
/// Requests in flight at a fully loaded replica: 0.2 s each.
const CONCURRENCY: f64 = 15.0;
const STEP: Duration = Duration::from_millis(100);
const MAX: u32 = 40;

/// Input of the policies.
struct PolicyInput {
    now: Instant,
    arrived: f64,
    waiting: f64,
    ready: u32,
    provisioning: Vec<Duration>,
    start: Duration,
}

impl PolicyInput {
    fn in_flight(&self) -> f64 {
        let capacity = f64::from(self.ready) * CONCURRENCY;
        let busy = (self.arrived / TICK.as_secs_f64() / REQUESTS * CONCURRENCY).min(capacity);
        if self.waiting > 0.0 { capacity + self.waiting } else { busy }
    }
}

trait ScalingPolicy {
    fn desired(&mut self, input: &PolicyInput) -> u32;
}

impl ScalingPolicy for Scaler {
    fn desired(&mut self, input: &PolicyInput) -> u32 {
        let observed = ScalingObservation {
            arrived: (input.arrived * TOKENS) as u64,
            backlog: (input.waiting * TOKENS) as u64,
            in_flight: input.in_flight().ceil() as u32,
            ready: input.ready,
            provisioning: input.provisioning.clone(),
            speed: SPEED,
            start: input.start,
            floor: 0,
            blocker: None,
        };
        self.tick(&observed, input.now).replicas
    }
}

/// Most recent observations.
struct Window(VecDeque<(Instant, f64)>);

impl Window {
    fn average(&self, over: Duration, now: Instant) -> f64 {
        let recent = self.0.iter().rev().take_while(|(at, _)| now - *at < over);
        let (sum, count) = recent.fold((0.0, 0), |(sum, count), (_, observed)| (sum + observed, count + 1));
        sum / f64::from(count.max(1))
    }
}

/// ScalingPolicy of Knative.
struct TwoWindows {
    observed: Window,
    panics: Option<(Instant, u32)>,
}

impl ScalingPolicy for TwoWindows {
    fn desired(&mut self, input: &PolicyInput) -> u32 {
        let PolicyInput { now, ready, .. } = *input;
        self.observed.0.push_back((now, input.in_flight()));
        let target = CONCURRENCY * 0.7;
        let stable = (self.observed.average(Duration::from_secs(60), now) / target).ceil() as u32;
        let panic = (self.observed.average(Duration::from_secs(6), now) / target).ceil() as u32;
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

/// ScalingPolicy of hosted services.
struct OneWindow {
    observed: Window,
    history: VecDeque<(Instant, u32)>,
}

impl ScalingPolicy for OneWindow {
    fn desired(&mut self, input: &PolicyInput) -> u32 {
        let now = input.now;
        self.observed.0.push_back((now, input.in_flight()));
        let desired =
            (self.observed.average(Duration::from_secs(60), now) / (CONCURRENCY * 0.7)).ceil() as u32;
        // A waiting request starts the first replica at once.
        let desired = desired.max(u32::from(input.in_flight() > 0.0));
        self.history.push_back((now, desired));
        self.history.retain(|(at, _)| now - *at < Duration::from_secs(900));
        self.history.iter().map(|(_, desired)| *desired).max().unwrap_or(0)
    }
}

/// Result of a run.
struct Row {
    peak: u32,
    replica_seconds: f64,
    wait_max: Duration,
    /// Time from the first arrival until the queue was empty.
    clear: Duration,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { peak, replica_seconds, wait_max, clear } = self;
        let (wait, clear) = (wait_max.as_secs_f64(), clear.as_secs());
        write!(
            f,
            "peak {peak:>3}   {replica_seconds:>7.0} replica-seconds   longest wait {wait:>5.1} s   queue empty after {clear:>4} s"
        )
    }
}

/// Runs `policy` for this time at `rate` requests a second; a replica is ready `start` after its order.
fn run(policy: &mut dyn ScalingPolicy, start: Duration, seconds: u64, rate: impl Fn(u64) -> f64) -> Row {
    let begin = some_instant();
    let mut row = Row { peak: 0, replica_seconds: 0.0, wait_max: Duration::ZERO, clear: Duration::ZERO };
    let (mut ready, mut provisioning): (u32, VecDeque<Instant>) = (0, VecDeque::new());
    // Arrival times and remaining requests, first come first served.
    let mut queue: VecDeque<(Instant, f64)> = VecDeque::new();
    let mut arrived = 0.0f64;
    for step in 1..=seconds * 10 {
        let now = begin + STEP * u32::try_from(step).unwrap();
        while provisioning.front().is_some_and(|at| *at <= now) {
            provisioning.pop_front();
            ready += 1;
        }
        let arriving = rate(step / 10) * STEP.as_secs_f64();
        arrived += arriving;
        queue.push_back((now, arriving));
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
        row.replica_seconds += f64::from(ready + provisioning.len() as u32) * STEP.as_secs_f64();
        if step % 20 == 0 {
            let left = provisioning.iter().map(|at| *at - now).collect();
            let input = PolicyInput { now, arrived, waiting, ready, provisioning: left, start };
            let desired = policy.desired(&input).min(MAX);
            arrived = 0.0;
            let count = ready + provisioning.len() as u32;
            (count..desired).for_each(|_| provisioning.push_back(now + start));
            for _ in desired..count {
                // Replicas that are not ready are removed first.
                if provisioning.pop_back().is_none() {
                    ready -= 1;
                }
            }
        }
        row.peak = row.peak.max(ready + provisioning.len() as u32);
    }
    row
}

/// Runs all three policies: this autoscaler, Knative's, and that of hosted services.
fn all(name: &str, start: Duration, seconds: u64, rate: impl Fn(u64) -> f64) -> [Row; 3] {
    let config =
        Scaling { min: 0, max: MAX, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() };
    let mut ours = Scaler::new(config, some_instant());
    let mut two = TwoWindows { observed: Window(VecDeque::new()), panics: None };
    let mut one = OneWindow { observed: Window(VecDeque::new()), history: VecDeque::new() };
    let rows = [&mut ours as &mut dyn ScalingPolicy, &mut two, &mut one]
        .map(|policy| run(policy, start, seconds, &rate));
    println!("{name}, {} s to start", start.as_secs());
    for (name, row) in ["ours", "in flight, two windows", "in flight, one window"].iter().zip(&rows) {
        println!("  {name:<22} {row}");
    }
    rows
}

const START: Duration = Duration::from_secs(30);

#[test]
fn a_lasting_load_from_zero_is_followed_with_half_the_replicas_of_other_policies() {
    let [ours, two, one] = all("600 requests a second from zero, constant", START, 600, |_| 600.0);
    assert!(ours.peak * 2 <= two.peak.min(one.peak), "{} of {}", ours.peak, two.peak);
    assert!(ours.replica_seconds * 1.15 <= two.replica_seconds.min(one.replica_seconds));
    assert!(ours.wait_max <= two.wait_max + Duration::from_secs(5));
}

#[test]
fn a_burst_from_zero_costs_no_more_than_with_other_policies() {
    let burst = |second| if second < 10 { 600.0 } else { 0.0 };
    let [ours, two, one] = all("600 requests a second for 10 s, from zero", START, 900, burst);
    assert!(ours.peak < two.peak.min(one.peak));
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds) * 1.05);
    assert!(ours.wait_max <= START + BACKLOG_DRAIN_TIME);
}

#[test]
fn a_step_is_followed_with_little_overshoot() {
    let rate = |second| if second < 300 { 200.0 } else { 1600.0 };
    let [ours, two, one] = all("200 requests a second, 1600 from second 300", START, 1200, rate);
    assert!(ours.peak <= two.peak.min(one.peak));
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds) * 1.05);
    assert!(ours.wait_max <= two.wait_max.min(one.wait_max) + Duration::from_secs(5));
}

#[test]
fn a_square_wave_is_not_chased() {
    let rate = |second: u64| if (second / 60).is_multiple_of(2) { 1200.0 } else { 120.0 };
    let [ours, two, one] = all("1200 and 120 requests a second, one minute each", START, 3600, rate);
    assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds));
    assert!(
        ours.wait_max <= two.wait_max + Duration::from_secs(5),
        "replicas needed again within a minute are kept"
    );
}

mod burst;
