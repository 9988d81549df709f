//! Pace of a queue: the number of inputs for which the replicas of a region have capacity beside other requests.
//!
//! Replicas compute jobs as bulk requests, so an interactive request in a replica's queue is computed before them. A
//! queue of jobs at a replica would still delay the bulk requests of clients, and count as load where gateways select a
//! region. So jobs are sent only while the replicas' queues are shorter than [`BACKLOG`], which is long enough that a
//! replica does not idle between two jobs.

use regions::ewma::Ewma;
use std::time::{Duration, Instant};

/// Queue of the replicas, as time of their computation, at which no further job is sent. A replica reports its queue
/// several times a second, and a job arrives in milliseconds.
pub const BACKLOG: Duration = Duration::from_millis(500);
/// Inputs of a deployment's jobs in flight for each ready replica: as many short texts as fill a batch
/// (`replica_api::limits::BATCH_TOKENS` at 8 tokens each).
pub const IN_FLIGHT_PER_REPLICA: u64 = 64;
/// The same while the speed of the replicas is not measured.
pub const IN_FLIGHT_UNMEASURED: u64 = 2;

/// Capacity of a deployment in a region.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobCapacity {
    /// Ready replicas.
    pub ready: u32,
    /// Requests that wait for a replica to become ready, with the jobs among them.
    pub held: u64,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Measured speed of the replicas; 0 if it is unknown.
    pub tokens_per_second: f64,
}

/// Returns the number of inputs of further jobs that may be sent, beside `in_flight` inputs.
///
/// Without a ready replica one job is sent: like any request it is held, and a replica is started for it.
pub fn free_inputs(capacity: &JobCapacity, in_flight: u64) -> u64 {
    let JobCapacity { ready, held, pending_tokens, tokens_per_second } = *capacity;
    if ready == 0 {
        return u64::from(in_flight == 0);
    }
    // Requests of clients are held: they come first.
    if held > 0 {
        return 0;
    }
    let is_measured = tokens_per_second > 0.0;
    if is_measured && pending_tokens as f64 >= tokens_per_second * BACKLOG.as_secs_f64() {
        return 0;
    }
    let each = if is_measured { IN_FLIGHT_PER_REPLICA } else { IN_FLIGHT_UNMEASURED };
    (each * u64::from(ready)).saturating_sub(in_flight)
}

/// Longest pause of a deployment without a replica.
pub const NO_REPLICA_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Pause of a deployment whose jobs were rejected for lack of capacity.
///
/// Without a replica, for example if the deployment was removed, it doubles with each rejection: a job would otherwise write
/// two entries of the log in each second until it expires. It ends when a replica is ready.
#[derive(Debug, Clone)]
pub struct CapacityPause {
    until: Instant,
    /// Consecutive pauses without a replica.
    without_replica: u32,
}

impl CapacityPause {
    /// Creates a pause that is over.
    pub fn new(now: Instant) -> CapacityPause {
        CapacityPause { until: now, without_replica: 0 }
    }

    /// Begins a pause of this time, or continues it: jobs that were sent together are rejected together.
    pub fn rejected(&mut self, retry_after: Duration, has_replica: bool, now: Instant) {
        if has_replica {
            self.without_replica = 0;
            self.until = self.until.max(now + retry_after);
        } else if now >= self.until {
            let longest = retry_after.max(NO_REPLICA_PAUSE_MAX);
            let factor = 1 << self.without_replica.min(16);
            self.until = now + retry_after.saturating_mul(factor).min(longest);
            self.without_replica += 1;
        }
    }

    /// Whether a job may be sent.
    pub fn is_over(&self, has_replica: bool, now: Instant) -> bool {
        now >= self.until || (has_replica && self.without_replica > 0)
    }
}

/// Shortest time over which a rate is measured.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// Half-life of a rate.
const RATE_HALF_LIFE: Duration = Duration::from_secs(30);

/// Rate at which the inputs of a deployment's jobs are computed, while there are jobs.
#[derive(Debug, Clone)]
pub struct CompletionRate {
    since: Instant,
    inputs: u64,
    rate: Option<Ewma>,
}

impl CompletionRate {
    /// Creates a rate without a measurement.
    pub fn new(now: Instant) -> CompletionRate {
        CompletionRate { since: now, inputs: 0, rate: None }
    }

    /// Begins a measurement: the first job after an idle time has started.
    pub fn started(&mut self, now: Instant) {
        (self.since, self.inputs) = (now, 0);
    }

    /// Counts inputs of a job that has been computed.
    pub fn completed(&mut self, inputs: u64, now: Instant) {
        self.inputs = self.inputs.saturating_add(inputs);
        let took = now.saturating_duration_since(self.since);
        if took < RATE_WINDOW {
            return;
        }
        let sample = self.inputs as f64 / took.as_secs_f64();
        match &mut self.rate {
            Some(rate) => rate.add(sample, now),
            None => self.rate = Some(Ewma::new(RATE_HALF_LIFE, sample, now)),
        }
        self.started(now);
    }

    /// Returns the inputs per second; none before the first measurement.
    pub fn inputs_per_second(&self) -> Option<f64> {
        self.rate.as_ref().map(Ewma::get).filter(|rate| *rate > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: JobCapacity = JobCapacity { ready: 2, held: 0, pending_tokens: 0, tokens_per_second: 1000.0 };

    #[test]
    fn jobs_fill_idle_replicas_up_to_the_limit() {
        assert_eq!(free_inputs(&IDLE, 0), 2 * IN_FLIGHT_PER_REPLICA);
        assert_eq!(free_inputs(&IDLE, 2 * IN_FLIGHT_PER_REPLICA - 1), 1);
        assert_eq!(free_inputs(&IDLE, 2 * IN_FLIGHT_PER_REPLICA), 0);
        assert_eq!(free_inputs(&IDLE, 2 * IN_FLIGHT_PER_REPLICA + 1), 0);
        let unmeasured = JobCapacity { tokens_per_second: 0.0, pending_tokens: 9, ..IDLE };
        assert_eq!(free_inputs(&unmeasured, 0), 2 * IN_FLIGHT_UNMEASURED);
    }

    #[test]
    fn no_job_is_sent_to_a_queue_of_half_a_second() {
        assert!(free_inputs(&JobCapacity { pending_tokens: 499, ..IDLE }, 0) > 0);
        assert_eq!(free_inputs(&JobCapacity { pending_tokens: 500, ..IDLE }, 0), 0);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn a_rate_is_measured_without_the_idle_time() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut rate = CompletionRate::new(at(0));
        assert_eq!(rate.inputs_per_second(), None);
        rate.started(at(1000));
        rate.completed(30, at(1000));
        rate.completed(30, at(1002));
        assert_eq!(rate.inputs_per_second(), Some(30.0));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn a_deployment_without_a_replica_pauses_longer_each_time_and_not_at_all_with_one() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let second = Duration::from_secs(1);
        let mut pause = CapacityPause::new(at(0));
        assert!(pause.is_over(false, at(0)));
        pause.rejected(second, false, at(0));
        pause.rejected(second, false, at(0));
        assert!(pause.is_over(false, at(1)), "two jobs that were sent together count once");
        let mut now = 1;
        for seconds in [2, 4, 8, 16, 30, 30] {
            pause.rejected(second, false, at(now));
            assert!(!pause.is_over(false, at(now + seconds - 1)) && pause.is_over(false, at(now + seconds)));
            now += seconds;
        }
        pause.rejected(second, false, at(now));
        assert!(pause.is_over(true, at(now)), "a replica is ready");
        pause.rejected(second, true, at(now + 30));
        assert!(!pause.is_over(true, at(now + 30)) && pause.is_over(true, at(now + 31)));
        pause.rejected(second, false, at(now + 31));
        assert!(pause.is_over(false, at(now + 32)), "the first one again");
    }

    #[test]
    fn held_requests_come_first() {
        assert_eq!(free_inputs(&JobCapacity { held: 1, ..IDLE }, 0), 0);
    }

    #[test]
    fn one_job_wakes_a_deployment_without_a_replica() {
        let asleep = JobCapacity { ready: 0, held: 0, ..IDLE };
        assert_eq!((free_inputs(&asleep, 0), free_inputs(&asleep, 1)), (1, 0));
    }
}
