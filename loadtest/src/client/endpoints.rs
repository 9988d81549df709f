//! Endpoint selection.
//!
//! A request is sent to the endpoint with the fewest requests in flight relative to its weight. A failing endpoint is
//! ejected; the ejection time doubles with each consecutive ejection. An endpoint of weight 0 is a standby, used only while
//! all others are ejected. If all are ejected, the one whose ejection ends first is used, because sending no request at all
//! does not help.

use std::time::{Duration, Instant};

/// Duration of the first ejection.
const SHUNNED_FIRST: Duration = Duration::from_secs(1);
/// Longest ejection.
const SHUNNED_MAX: Duration = Duration::from_secs(30);

/// Endpoints of one operation, by index.
#[derive(Clone, Debug)]
pub struct Endpoints {
    all: Vec<State>,
}

#[derive(Clone, Debug)]
struct State {
    weight: f64,
    in_flight: u32,
    failures_in_a_row: u32,
    shunned_until: Option<Instant>,
}

impl Endpoints {
    /// Creates the selection for endpoints of these weights; at least one.
    pub fn new(weights: impl IntoIterator<Item = f64>) -> Endpoints {
        let state = |weight| State { weight, in_flight: 0, failures_in_a_row: 0, shunned_until: None };
        let all: Vec<State> = weights.into_iter().map(state).collect();
        assert!(!all.is_empty(), "checked with the settings");
        Endpoints { all }
    }

    /// Selects the endpoint of a request and counts the request as in flight. Avoids `not` if there is an equal alternative.
    pub fn pick(&mut self, now: Instant, not: Option<usize>) -> usize {
        let rank = |(place, state): &(usize, &State)| {
            let shunned = state.shunned_until.filter(|until| *until > now);
            let spare = state.weight <= 0.0;
            let load = f64::from(state.in_flight + 1) / if spare { 1.0 } else { state.weight };
            (shunned.is_some(), Some(*place) == not, spare, shunned, load, *place)
        };
        let best = self.all.iter().enumerate().min_by(|one, other| {
            let ((a, b, c, d, load, place), other) = (rank(one), rank(other));
            (a, b, c, d)
                .cmp(&(other.0, other.1, other.2, other.3))
                .then(load.total_cmp(&other.4))
                .then(place.cmp(&other.5))
        });
        let place = best.expect("there is at least one").0;
        self.all[place].in_flight += 1;
        place
    }

    /// Records the end of a request at endpoint `index`; `healthy` is false if the failure is the endpoint's.
    pub fn ended(&mut self, place: usize, well: bool, now: Instant) {
        let state = &mut self.all[place];
        state.in_flight = state.in_flight.saturating_sub(1);
        if well {
            state.failures_in_a_row = 0;
            state.shunned_until = None;
        } else if state.shunned_until.is_none_or(|until| until <= now) {
            // Requests that were in flight during the first failure are no further evidence.
            let lasts = SHUNNED_FIRST * 2u32.saturating_pow(state.failures_in_a_row.min(16));
            state.shunned_until = Some(now + lasts.min(SHUNNED_MAX));
            state.failures_in_a_row += 1;
        }
    }

    /// Records that a request at endpoint `index` was aborted.
    pub fn taken_back(&mut self, place: usize) {
        self.all[place].in_flight = self.all[place].in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_shared_by_weight() {
        let now = Instant::now();
        let mut endpoints = Endpoints::new([3.0, 1.0, 0.0]);
        let mut asked = [0; 3];
        (0..40).for_each(|_| asked[endpoints.pick(now, None)] += 1);
        assert_eq!(asked, [30, 10, 0]);
    }

    #[test]
    fn who_fails_is_shunned_longer_each_time_and_a_spare_steps_in() {
        let now = Instant::now();
        let after = |ms| now + Duration::from_millis(ms);
        let mut endpoints = Endpoints::new([1.0, 0.0]);
        assert_eq!(endpoints.pick(now, None), 0);
        endpoints.ended(0, false, now);
        endpoints.ended(0, false, now);
        assert_eq!(endpoints.pick(after(999), None), 1);
        endpoints.ended(1, true, after(999));
        assert_eq!(endpoints.pick(after(1000), None), 0);
        endpoints.ended(0, false, after(1000));
        assert_eq!(endpoints.pick(after(2999), None), 1, "two seconds the second time");
        endpoints.ended(1, false, after(2999));
        assert_eq!(endpoints.pick(after(2999), None), 0, "all are shunned, and its time is up first");
        endpoints.ended(0, true, after(2999));
        assert_eq!(endpoints.pick(after(2999), None), 0, "well again");
    }

    #[test]
    fn a_second_attempt_goes_elsewhere_where_there_is_an_elsewhere() {
        let now = Instant::now();
        let mut endpoints = Endpoints::new([9.0, 1.0]);
        assert_eq!(endpoints.pick(now, Some(0)), 1);
        endpoints.ended(1, false, now);
        assert_eq!(endpoints.pick(now, Some(0)), 0, "better the same than one that fails");
        assert_eq!(Endpoints::new([1.0]).pick(now, Some(0)), 0);
    }
}
