//! Endpoint selection.
//!
//! A request is sent to the endpoint with the fewest requests in flight relative to its weight, and to equally loaded
//! ones in turn. The requests of all operations of a client count. A failing endpoint is ejected; the ejection time
//! doubles with each consecutive ejection. An endpoint of weight 0 is a standby, used only while all others are ejected.
//! If all are ejected, the one whose ejection ends first is used, because sending no request at all does not help.

use std::time::{Duration, Instant};

use backoff::Backoff;

/// Durations of consecutive ejections. Independent of the gateway's, which ejects regions and not endpoints of a client.
/// Without jitter: one client ejects endpoints one by one.
const EJECTION_TIMES: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(30) };

/// Endpoints of a client, by index.
#[derive(Clone, Debug)]
pub struct EndpointSelector {
    all: Vec<EndpointState>,
    /// Requests so far.
    picks: u64,
}

#[derive(Clone, Debug)]
struct EndpointState {
    weight: f64,
    in_flight: u32,
    /// Number of the latest request.
    last_pick: u64,
    consecutive_failures: u32,
    ejected_until: Option<Instant>,
}

impl EndpointSelector {
    /// Creates the selection for endpoints of these weights; at least one.
    pub fn new(weights: impl IntoIterator<Item = f64>) -> EndpointSelector {
        let state = |weight| EndpointState {
            weight,
            in_flight: 0,
            last_pick: 0,
            consecutive_failures: 0,
            ejected_until: None,
        };
        let all: Vec<EndpointState> = weights.into_iter().map(state).collect();
        assert!(!all.is_empty(), "checked with the settings");
        EndpointSelector { all, picks: 0 }
    }

    /// Selects the endpoint of a request and counts the request as in flight. Avoids `avoid` if there is an equal
    /// alternative.
    pub fn pick(&mut self, now: Instant, avoid: Option<usize>) -> usize {
        let rank = |(index, state): &(usize, &EndpointState)| {
            let ejected = state.ejected_until.filter(|until| *until > now);
            let standby = state.weight <= 0.0;
            let load = f64::from(state.in_flight + 1) / if standby { 1.0 } else { state.weight };
            (ejected.is_some(), Some(*index) == avoid, standby, ejected, load, state.last_pick)
        };
        let best = self.all.iter().enumerate().min_by(|one, other| {
            let ((a, b, c, d, load, last_pick), other) = (rank(one), rank(other));
            (a, b, c, d)
                .cmp(&(other.0, other.1, other.2, other.3))
                .then(load.total_cmp(&other.4))
                .then(last_pick.cmp(&other.5))
        });
        let index = best.expect("there is at least one").0;
        self.start(index);
        index
    }

    /// Counts a request to endpoint `index` as in flight.
    pub fn start(&mut self, index: usize) {
        self.picks += 1;
        self.all[index].in_flight += 1;
        self.all[index].last_pick = self.picks;
    }

    /// Records the end of a request at endpoint `index`; `healthy` is false if the failure is the endpoint's.
    pub fn finished(&mut self, index: usize, healthy: bool, now: Instant) {
        let state = &mut self.all[index];
        state.in_flight = state.in_flight.saturating_sub(1);
        if healthy {
            state.consecutive_failures = 0;
            state.ejected_until = None;
        } else if state.ejected_until.is_none_or(|until| until <= now) {
            // Requests that were in flight during the first failure are no further evidence.
            state.consecutive_failures += 1;
            state.ejected_until = Some(now + EJECTION_TIMES.delay(state.consecutive_failures));
        }
    }

    /// Records that a request at endpoint `index` was aborted.
    pub fn aborted(&mut self, index: usize) {
        self.all[index].in_flight = self.all[index].in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_shared_by_weight() {
        let now = Instant::now();
        let mut endpoints = EndpointSelector::new([3.0, 1.0, 0.0]);
        let mut counts = [0; 3];
        (0..40).for_each(|_| counts[endpoints.pick(now, None)] += 1);
        assert_eq!(counts, [30, 10, 0]);
    }

    #[test]
    fn requests_that_follow_one_another_alternate_between_equal_endpoints() {
        let now = Instant::now();
        let mut endpoints = EndpointSelector::new([1.0, 1.0, 1.0]);
        let picks: Vec<usize> = (0..6)
            .map(|_| {
                let index = endpoints.pick(now, None);
                endpoints.finished(index, true, now);
                index
            })
            .collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn a_failing_endpoint_is_ejected_for_longer_each_time_and_a_standby_takes_over() {
        let now = Instant::now();
        let after = |ms| now + Duration::from_millis(ms);
        let mut endpoints = EndpointSelector::new([1.0, 0.0]);
        assert_eq!(endpoints.pick(now, None), 0);
        endpoints.finished(0, false, now);
        endpoints.finished(0, false, now);
        assert_eq!(endpoints.pick(after(999), None), 1);
        endpoints.finished(1, true, after(999));
        assert_eq!(endpoints.pick(after(1000), None), 0);
        endpoints.finished(0, false, after(1000));
        assert_eq!(endpoints.pick(after(2999), None), 1, "the second ejection lasts two seconds");
        endpoints.finished(1, false, after(2999));
        assert_eq!(endpoints.pick(after(2999), None), 0, "all are ejected, and its ejection ends first");
        endpoints.finished(0, true, after(2999));
        assert_eq!(endpoints.pick(after(2999), None), 0, "healthy again");
    }

    #[test]
    fn a_retry_avoids_the_failed_endpoint_if_there_is_another() {
        let now = Instant::now();
        let mut endpoints = EndpointSelector::new([9.0, 1.0]);
        assert_eq!(endpoints.pick(now, Some(0)), 1);
        endpoints.finished(1, false, now);
        assert_eq!(endpoints.pick(now, Some(0)), 0, "the same endpoint rather than a failing one");
        assert_eq!(EndpointSelector::new([1.0]).pick(now, Some(0)), 0);
    }
}
