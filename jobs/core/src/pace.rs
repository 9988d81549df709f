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

/// Requests of one chunk in flight at most.
pub const CHUNK_IN_FLIGHT_MAX: usize = 8;
/// Shortest pause of a chunk without capacity.
const CHUNK_PAUSE_MIN: Duration = Duration::from_millis(50);
/// All pauses of a chunk since its last response at most, while none of its requests is in flight. Then it is computed again later.
const CHUNK_PAUSES_MAX: Duration = Duration::from_secs(30);

/// Window of the requests of a chunk of a batch: how many are in flight, and how long it pauses without capacity.
///
/// A request without capacity is repeated while others are in flight or some have been computed: all of that would be lost with
/// the attempt. In another region the window is reduced to the requests that are in flight then, and grows by one with each
/// response, as in the slow start of TCP: it adapts to the gateways that take them.
#[derive(Debug, Clone)]
pub struct ChunkWindow {
    size: usize,
    size_min: usize,
    until: Option<Instant>,
    /// Sum of the pauses since the last response.
    paused: Duration,
    /// The same without the present pause.
    paused_before: Duration,
    has_responses: bool,
}

impl ChunkWindow {
    /// Creates the window of a chunk that the replicas of its region compute.
    pub fn of_region() -> ChunkWindow {
        let size = CHUNK_IN_FLIGHT_MAX;
        let (paused, paused_before) = (Duration::ZERO, Duration::ZERO);
        ChunkWindow { size, size_min: size, until: None, paused, paused_before, has_responses: false }
    }

    /// Creates the window of a chunk for another region. It was taken for one gateway, which computes one request at a time, and
    /// for one free ticket.
    pub fn of_transfer() -> ChunkWindow {
        ChunkWindow { size: 1, size_min: 1, ..ChunkWindow::of_region() }
    }

    /// Returns whether another request may be sent beside those in flight.
    pub fn permits(&self, in_flight: usize, now: Instant) -> bool {
        in_flight < self.size && self.pause(now).is_none()
    }

    /// Returns the end of the pause; none if there is none now.
    pub fn pause(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }

    /// Records the response to a request. A pause continues, and its rest counts.
    pub fn computed(&mut self, now: Instant) {
        self.size = (self.size + 1).min(CHUNK_IN_FLIGHT_MAX);
        let rest = self.pause(now).map_or(Duration::ZERO, |until| until - now);
        (self.paused, self.paused_before, self.has_responses) = (rest, Duration::ZERO, true);
    }

    /// Records that a request had no capacity, while `in_flight` others are in flight. Returns whether it is repeated after the
    /// pause; otherwise the attempt at the chunk ends.
    pub fn rejected(&mut self, in_flight: usize, retry_after: Duration, now: Instant) -> bool {
        // Requests that were sent together are rejected together: the first of them has begun the pause of the others.
        let is_paused = self.pause(now).is_some();
        let paused = if is_paused { self.paused_before } else { self.paused };
        let left = CHUNK_PAUSES_MAX.saturating_sub(paused);
        if in_flight == 0 && (!self.has_responses || left.is_zero()) {
            return false;
        }
        self.size = in_flight.clamp(self.size_min, CHUNK_IN_FLIGHT_MAX);
        if !is_paused {
            let pause = retry_after.clamp(CHUNK_PAUSE_MIN, CHUNK_PAUSES_MAX);
            // With nothing left, others are in flight, and one of them may have a response.
            let pause = if left.is_zero() { pause } else { pause.min(left) };
            (self.until, self.paused_before) = (Some(now + pause), paused);
            self.paused = paused.saturating_add(pause);
        }
        true
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
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn a_chunk_without_capacity_is_not_given_up_while_its_requests_are_in_flight() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut window = ChunkWindow::of_transfer();
        for _ in 1..CHUNK_IN_FLIGHT_MAX {
            window.computed(start);
        }
        assert!(window.permits(CHUNK_IN_FLIGHT_MAX - 1, start));
        assert!(!window.permits(CHUNK_IN_FLIGHT_MAX, start));
        // One gateway has one of eight requests, and the others were not taken.
        for in_flight in (1..CHUNK_IN_FLIGHT_MAX).rev() {
            assert!(window.rejected(in_flight, second, start), "{in_flight}");
        }
        assert_eq!(window.pause(start), Some(start + second), "rejected together, one pause");
        assert!(!window.permits(0, start));
        assert!(window.permits(0, start + second) && !window.permits(1, start + second));
        window.computed(start + second);
        assert!(window.permits(1, start + second) && !window.permits(2, start + second));
        for _ in 0..2 * CHUNK_IN_FLIGHT_MAX {
            window.computed(start + second);
        }
        assert!(window.permits(CHUNK_IN_FLIGHT_MAX - 1, start + second));
        assert!(!window.permits(CHUNK_IN_FLIGHT_MAX, start + second));
        let mut window = ChunkWindow::of_region();
        assert!(window.rejected(1, second, start));
        assert!(
            window.permits(CHUNK_IN_FLIGHT_MAX - 1, start + second),
            "other requests reach other replicas"
        );
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn a_chunk_with_responses_waits_for_capacity_up_to_a_limit_and_another_one_not_at_all() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert!(!ChunkWindow::of_region().rejected(0, Duration::ZERO, at(0)), "nothing would be lost");
        let mut window = ChunkWindow::of_region();
        window.computed(at(0));
        for seconds in [0, 10, 20] {
            assert!(window.rejected(0, Duration::from_secs(10), at(seconds)));
        }
        assert!(!window.rejected(0, Duration::from_secs(10), at(30)), "after pauses of 30 s");
        window.computed(at(30));
        assert!(window.rejected(0, Duration::MAX, at(30)));
        assert_eq!(window.pause(at(30)), Some(at(60)), "the longest pause");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn all_pauses_of_a_chunk_without_a_response_are_30_seconds() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let long = Duration::from_secs(25);
        let mut window = ChunkWindow::of_region();
        window.computed(at(0));
        assert!(window.rejected(0, long, at(0)) && window.rejected(0, long, at(25)));
        assert_eq!(window.pause(at(25)), Some(at(30)));
        assert!(!window.rejected(0, long, at(30)));

        // Requests that are sent together have the same pause, also the longest one.
        let mut window = ChunkWindow::of_region();
        window.computed(at(0));
        let mut rejected = |seconds| {
            let each = (0..CHUNK_IN_FLIGHT_MAX).rev();
            each.map(|in_flight| window.rejected(in_flight, Duration::MAX, at(seconds))).collect::<Vec<_>>()
        };
        assert_eq!(rejected(0), [true; CHUNK_IN_FLIGHT_MAX]);
        assert_eq!(rejected(30).iter().filter(|repeated| !**repeated).count(), 1, "the last one in flight");

        // The rest of a pause counts after a response.
        let mut window = ChunkWindow::of_region();
        window.computed(at(0));
        assert!(window.rejected(1, long, at(0)));
        window.computed(at(10));
        assert!(window.rejected(0, long, at(25)));
        assert_eq!(window.pause(at(25)), Some(at(40)), "15 s of the first pause, and 15 s");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn a_chunk_for_another_region_begins_with_one_request() {
        let now = Instant::now();
        let mut window = ChunkWindow::of_transfer();
        assert!(window.permits(0, now) && !window.permits(1, now));
        window.computed(now);
        assert!(window.permits(1, now) && !window.permits(2, now));
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
