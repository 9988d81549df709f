//! Autoscaler of one deployment in one region.
//!
//! Common autoscalers count requests in flight. That count grows with slow replica starts as much as with more traffic,
//! so while the first replica starts they order ten, and remove them once it is ready. This autoscaler uses three more
//! inputs: the rate at which work *arrives*, the speed of one replica, and the replicas *already being provisioned*,
//! with the time until they are ready. From these it projects the backlog to the time at which a replica ordered now
//! would be ready:
//!
//! ```text
//! rate    = max(arrivals over 3 s, 0.8 · arrivals over 60 s)                       tokens per second
//! backlog = waiting + rate · start time - work done by ready and provisioned replicas until then
//! desired = rate / (utilization · speed)                                           while the backlog stays small
//!         = rate / speed + backlog / (20 s · speed)                                otherwise, if that is more
//! ```
//!
//! Scaling up is immediate, limited by [`scale_up_limit`]. Scaling down follows the highest recommendation of the last
//! [`Scaling::scale_down_delay`] (three start times, if that is longer), by a quarter of the replicas at a time, unless
//! a [`ScaleDownBlocker`] is active. A deployment without requests for [`Scaling::zero_after`] is scaled to zero.
//!
//! The observations are those of all spokes of the region ([`spokes`]); one of them scales.
//!
//! [`step`] turns the desired number into replicas to start, to drain and to keep; [`starts`] records start times, and
//! [`restarts`] limits restarts of crashed replicas, and [`devices`] gives each process a device of its machine. The control loop is `scheduler::scaling`.
//!
//! The autoscaler is pure: one [`Scaler::tick`] per evaluation, with the observations as an argument. The settings have
//! the names known from Knative and from hosted services; the tests in `simulated` compare it with such policies over
//! the same arrivals.

pub mod devices;
pub mod restarts;
pub mod start_failures;
pub mod starts;
pub mod step;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use regions::Scaling;
use regions::ewma::Ewma;

/// Interval between evaluations.
pub const TICK: Duration = Duration::from_secs(2);

/// Half-life of the short average of arrivals (about 3 s). The long one follows [`Scaling::autoscaling_window`] (60 s).
const FAST_HALF_LIFE: Duration = Duration::from_secs(2);
/// Weight of the long average against the short one: a lull of seconds is not a decrease in traffic.
const SLOW_PERCENT: u32 = 80;
/// Backlog that is ignored, as time at the current arrival rate: a batch or two.
const BACKLOG_TOLERANCE: Duration = Duration::from_millis(200);
/// Time in which a backlog is to be worked off. A shorter time orders more replicas that are needed for less time.
const BACKLOG_DRAIN_TIME: Duration = Duration::from_secs(20);
/// Maximum utilization of the remaining replicas after scaling down.
const DOWN_UTILIZATION_PERCENT: u32 = 60;
/// Share of the replicas that is removed at a time.
const DOWN_PERCENT: u32 = 25;
/// Minimum delay of scaling down, in start times of a replica.
const SCALE_DOWN_DELAY_STARTS: u32 = 3;
/// Maximum number of stored recommendations; longer delays are stored at a coarser resolution.
const RECOMMENDATIONS_MAX: usize = 512;

/// Returns the highest number of replicas after one evaluation with `count` replicas: three times as many plus four.
/// From zero this suffices for most loads, and three evaluations later for any.
pub fn scale_up_limit(count: u32) -> u32 {
    count.saturating_mul(3).saturating_add(4)
}

/// Reason for not scaling down, whatever the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleDownBlocker {
    /// The hub is unreachable, so the floors that it would set are unknown.
    HubUnreachable,
    /// The region receives spillover of other regions.
    ReceivesSpillover,
    /// A new revision is being rolled out.
    RolloutInProgress,
    /// A replica crashed recently.
    ReplicaCrashed,
}

impl ScalingReason {
    /// All reasons.
    pub const ALL: [ScalingReason; 13] = [
        ScalingReason::Rate,
        ScalingReason::Backlog,
        ScalingReason::Concurrency,
        ScalingReason::ColdStart,
        ScalingReason::Floor,
        ScalingReason::Max,
        ScalingReason::ScaleUpLimit,
        ScalingReason::ScaleDownDelay,
        ScalingReason::Blocked(ScaleDownBlocker::HubUnreachable),
        ScalingReason::Blocked(ScaleDownBlocker::ReceivesSpillover),
        ScalingReason::Blocked(ScaleDownBlocker::RolloutInProgress),
        ScalingReason::Blocked(ScaleDownBlocker::ReplicaCrashed),
        ScalingReason::Idle,
    ];

    /// Returns the name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            ScalingReason::Rate => "rate",
            ScalingReason::Backlog => "backlog",
            ScalingReason::Concurrency => "concurrency",
            ScalingReason::ColdStart => "cold_start",
            ScalingReason::Floor => "floor",
            ScalingReason::Max => "max",
            ScalingReason::ScaleUpLimit => "scale_up_limit",
            ScalingReason::ScaleDownDelay => "scale_down_delay",
            ScalingReason::Blocked(ScaleDownBlocker::HubUnreachable) => "hub_unreachable",
            ScalingReason::Blocked(ScaleDownBlocker::ReceivesSpillover) => "receives_spillover",
            ScalingReason::Blocked(ScaleDownBlocker::RolloutInProgress) => "rollout_in_progress",
            ScalingReason::Blocked(ScaleDownBlocker::ReplicaCrashed) => "replica_crashed",
            ScalingReason::Idle => "idle",
        }
    }
}

/// Input of one evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingObservation {
    /// Tokens that arrived since the last evaluation, including held requests and excluding retries.
    pub arrived: u64,
    /// Tokens that are queued or held.
    pub backlog: u64,
    /// Requests that are running, queued or held.
    pub in_flight: u32,
    /// Ready replicas.
    pub ready: u32,
    /// Remaining start time of each replica that is being provisioned.
    pub provisioning: Vec<Duration>,
    /// Speed of one replica, in tokens per second; 0 while unknown.
    pub speed: u64,
    /// 90th percentile of the start times.
    pub start: Duration,
    /// Current minimum: from the hub, against the loss of another region, or from the timetable.
    pub floor: u32,
    /// Reason for not scaling down, if any.
    pub blocker: Option<ScaleDownBlocker>,
}

/// Factor that determined a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScalingReason {
    /// Arrival rate.
    Rate,
    /// Current backlog, and its growth until a further replica is ready.
    Backlog,
    /// Requests in flight.
    Concurrency,
    /// Requests are waiting and there is no replica.
    ColdStart,
    /// [`Scaling::min`], or [`ScalingObservation::floor`].
    Floor,
    /// [`Scaling::max`].
    Max,
    /// More replicas are desired than one evaluation may add.
    ScaleUpLimit,
    /// The replicas were needed within the scale-down delay.
    ScaleDownDelay,
    /// Scaling down is blocked.
    Blocked(ScaleDownBlocker),
    /// No requests for [`Scaling::zero_after`].
    Idle,
}

/// Decision of one evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingDecision {
    /// Desired number of replicas, ready and provisioning together.
    pub replicas: u32,
    /// Deciding factor.
    pub reason: ScalingReason,
}

/// Autoscaler of one deployment in one region.
#[derive(Clone, Debug)]
pub struct Scaler {
    /// Settings, except the timetable: it depends on the wall clock and arrives as a
    /// [floor](ScalingObservation::floor).
    config: Scaling,
    last: Instant,
    fast: Ewma,
    slow: Ewma,
    /// Recommendations in decreasing order; the first is the maximum over the scale-down delay.
    recommendations: VecDeque<(Instant, u32)>,
    /// Time of the last evaluation with requests.
    last_request: Instant,
}

impl Scaler {
    /// Creates a scaler without observations.
    pub fn new(config: Scaling, now: Instant) -> Scaler {
        Scaler {
            last: now,
            fast: Ewma::new(FAST_HALF_LIFE, 0.0, now),
            slow: Ewma::new(half_life(&config), 0.0, now),
            recommendations: VecDeque::new(),
            last_request: now,
            config,
        }
    }

    /// Replaces the settings; the averages stay.
    pub fn set_config(&mut self, config: Scaling) {
        if config.autoscaling_window != self.config.autoscaling_window {
            self.slow = Ewma::new(half_life(&config), self.slow.get(), self.last);
        }
        self.config = config;
    }

    /// Evaluates one observation.
    pub fn tick(&mut self, observed: &ScalingObservation, now: Instant) -> ScalingDecision {
        self.record_arrivals(observed, now);
        let count = observed.ready.saturating_add(observed.provisioning.len() as u32);
        // Averages never reach zero, so their tail is ignored for an idle deployment.
        let (required, reason) =
            if self.is_idle(now) { (0, ScalingReason::Idle) } else { self.required_replicas(observed) };
        self.record_recommendation(observed, now);
        let floor = self.config.min.max(observed.floor).min(self.config.max);
        if required > count {
            let limited = required.min(scale_up_limit(count));
            let (replicas, reason) =
                if limited < required { (limited, ScalingReason::ScaleUpLimit) } else { (required, reason) };
            return self.bounded(replicas, reason, floor);
        }
        if self.is_idle(now) && observed.blocker.is_none() {
            return self.bounded(0, ScalingReason::Idle, floor);
        }
        let peak = self.recommendations.front().map_or(0, |(_, replicas)| *replicas).max(required).max(1);
        if peak >= count {
            let reason = if required == count { reason } else { ScalingReason::ScaleDownDelay };
            return self.bounded(count, reason, floor);
        }
        if let Some(blocker) = observed.blocker {
            return self.bounded(count, ScalingReason::Blocked(blocker), floor);
        }
        let at_once = (count * DOWN_PERCENT / 100).max(1);
        self.bounded(peak.max(count - at_once), ScalingReason::Rate, floor)
    }

    fn bounded(&self, replicas: u32, reason: ScalingReason, floor: u32) -> ScalingDecision {
        if replicas > self.config.max {
            return ScalingDecision { replicas: self.config.max, reason: ScalingReason::Max };
        }
        if replicas < floor {
            return ScalingDecision { replicas: floor, reason: ScalingReason::Floor };
        }
        ScalingDecision { replicas, reason }
    }

    fn record_arrivals(&mut self, observed: &ScalingObservation, now: Instant) {
        let passed = now.saturating_duration_since(self.last);
        if passed.is_zero() {
            return;
        }
        let rate = observed.arrived as f64 / passed.as_secs_f64();
        self.fast.add(rate, now);
        self.slow.add(rate, now);
        self.last = now;
        if observed.arrived > 0 || observed.backlog > 0 || observed.in_flight > 0 {
            self.last_request = now;
        }
    }

    /// Returns the arrival rate, in tokens per second.
    fn rate(&self) -> f64 {
        self.fast.get().max(self.slow.get() * f64::from(SLOW_PERCENT) / 100.0)
    }

    /// Returns the number of replicas that the current load requires, and the deciding factor.
    fn required_replicas(&self, observed: &ScalingObservation) -> (u32, ScalingReason) {
        let cold_start = u32::from(observed.backlog > 0 || observed.in_flight > 0 || observed.arrived > 0);
        let mut required = (cold_start, ScalingReason::ColdStart);
        let mut or = |replicas: u32, reason: ScalingReason| {
            if replicas > required.0 {
                required = (replicas, reason);
            }
        };
        if observed.speed > 0 {
            let (rate, speed) = (self.rate(), observed.speed as f64);
            or(
                round_up(rate * 100.0 / (f64::from(self.config.target_utilization) * speed)),
                ScalingReason::Rate,
            );
            let start = observed.start.as_secs_f64();
            let ready = f64::from(observed.ready) * start;
            let provisioning: f64 =
                observed.provisioning.iter().map(|left| (start - left.as_secs_f64()).max(0.0)).sum();
            let then = observed.backlog as f64 + rate * start - (ready + provisioning) * speed;
            if then > BACKLOG_TOLERANCE.as_secs_f64() * rate {
                or(
                    round_up(rate / speed + then / (BACKLOG_DRAIN_TIME.as_secs_f64() * speed)),
                    ScalingReason::Backlog,
                );
            }
        }
        if let Some(target) = self.config.concurrency_target {
            let full = f64::from(target) * f64::from(self.config.target_utilization) / 100.0;
            or(round_up(f64::from(observed.in_flight) / full), ScalingReason::Concurrency);
        }
        required
    }

    /// Records the number of replicas that would suffice now, as a lower bound during the scale-down delay.
    fn record_recommendation(&mut self, observed: &ScalingObservation, now: Instant) {
        let mut enough = u32::from(now == self.last_request);
        if observed.speed > 0 {
            let full = f64::from(DOWN_UTILIZATION_PERCENT) / 100.0 * observed.speed as f64;
            enough = enough.max(round_up(self.fast.get().max(self.slow.get()) / full));
        }
        if let Some(target) = self.config.concurrency_target {
            let full = f64::from(target) * f64::from(DOWN_UTILIZATION_PERCENT) / 100.0;
            enough = enough.max(round_up(f64::from(observed.in_flight) / full));
        }
        let delay = self.config.scale_down_delay.max(observed.start * SCALE_DOWN_DELAY_STARTS);
        while self.recommendations.back().is_some_and(|(_, replicas)| *replicas <= enough) {
            self.recommendations.pop_back();
        }
        // Above the maximum, the last entry is extended instead. It is higher, so no replica is removed early.
        if self.recommendations.len() < RECOMMENDATIONS_MAX {
            self.recommendations.push_back((now, enough));
        } else if let Some((at, _)) = self.recommendations.back_mut() {
            *at = now;
        }
        while self.recommendations.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > delay) {
            self.recommendations.pop_front();
        }
    }

    /// Returns whether the deployment has been idle for long enough to scale to zero.
    fn is_idle(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.last_request);
        self.config.zero_after.is_some_and(|after| since >= after)
    }
}

/// Returns the half-life of the long average.
fn half_life(config: &Scaling) -> Duration {
    config.autoscaling_window.mul_f64(std::f64::consts::LN_2).max(FAST_HALF_LIFE)
}

/// Rounds up to whole replicas.
fn round_up(replicas: f64) -> u32 {
    // A value marginally above an integer counts as that integer, because sums of fractions are inexact.
    (replicas - 1e-6).ceil().clamp(0.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
