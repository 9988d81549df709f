//! Service-level objectives and goodput.
//!
//! `p99=50ms` requires that 99 of 100 requests receive a valid response within 50 ms of their intended start. Failed
//! requests count against the objective: a fast rejection is not a served request. *Goodput* counts the requests that
//! meet the latency of the objective.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::limits::{TIMEOUT_MAX, span};
use crate::record::Group;

/// Latency objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// Required share of requests, 0 to 1.
    pub quantile: f64,
    /// Maximum latency of these requests.
    pub within: Duration,
}

impl Objective {
    /// Counts the requests that succeeded within the latency.
    pub fn good(&self, group: &Group) -> u64 {
        group.latencies().within(self.within)
    }

    /// Returns whether the group meets the objective; false for an empty group.
    pub fn is_met(&self, group: &Group) -> bool {
        let requests = group.requests();
        requests > 0 && self.good(group) as f64 >= self.quantile * requests as f64
    }
}

impl FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Objective, String> {
        let wrong = || format!("{text:?}: write a percentile and a time, like p99=50ms or p99.9=1s");
        let (percentile, within) = text.split_once('=').ok_or_else(wrong)?;
        let percentile: f64 =
            percentile.trim().strip_prefix('p').and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
        let within = span(within.trim()).filter(|within| *within <= TIMEOUT_MAX).ok_or_else(wrong)?;
        if !(percentile > 0.0 && percentile < 100.0) {
            return Err(format!("{text:?}: a percentile lies between 0 and 100, like p99"));
        }
        // Avoids 0.9990000000000001, since the share is displayed.
        Ok(Objective { quantile: (percentile * 1e4).round() / 1e6, within })
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}={:?}", (self.quantile * 1e6).round() / 1e4, self.within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::{RequestFailure, Sample};
    use crate::record::{Record, tests::sample};

    #[test]
    fn an_objective_is_a_percentile_and_a_time() {
        for text in ["p99=50ms", "p99.9=1s", "p50=1.5s"] {
            assert_eq!(text.parse::<Objective>().unwrap().to_string(), text);
        }
        for wrong in
            ["", "p99", "99=50ms", "p99=50", "p0=1s", "p100=1s", "p-1=1s", "p99=0s", "p99=2h", "pNaN=1s"]
        {
            assert!(wrong.parse::<Objective>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_failed_request_counts_against_the_objective() {
        let objective: Objective = "p90=50ms".parse().unwrap();
        let check = |quick: usize, slow: usize, failed: usize, expected: bool| {
            let mut record = Record::default();
            (0..quick).for_each(|_| record.add(sample(None, 0, 50)));
            (0..slow).for_each(|_| record.add(sample(None, 0, 60)));
            for _ in 0..failed {
                record.add(Sample { outcome: Err(RequestFailure::ConnectionClosed), ..sample(None, 0, 1) });
            }
            assert_eq!(objective.good(&record.total()), quick as u64);
            assert_eq!(objective.is_met(&record.total()), expected, "{quick} {slow} {failed}");
        };
        check(90, 10, 0, true);
        check(89, 11, 0, false);
        check(90, 0, 10, true);
        check(89, 0, 11, false);
        check(0, 0, 0, false);
    }
}
