//! Local arrival rate of a region.
//!
//! Arrivals are counted in periods of one report interval, over the last second. The rate is the maximum of the last
//! complete period and the average over the second: a surge is visible after one period, and one quiet period in heavy
//! traffic does not count as spare capacity.

use std::collections::BTreeMap;
use std::time::Instant;

use regions::DeploymentName;
use scheduler_api::report::EXCHANGE_PERIOD;

/// Number of complete periods in the window.
const WINDOW_PERIODS: usize = 5;

/// Arrived tokens, by deployment.
#[derive(Debug, Default)]
pub(super) struct Arrivals(BTreeMap<DeploymentName, RecentArrivals>);

/// Tokens of the current period and of the complete ones, the current one first.
#[derive(Clone, Copy, Debug)]
struct RecentArrivals {
    tokens: [u64; 1 + WINDOW_PERIODS],
    /// Start of the current period.
    since: Instant,
}

impl Arrivals {
    pub(super) fn record(&mut self, deployment: &DeploymentName, tokens: u64, now: Instant) {
        if let Some(recent) = self.0.get_mut(deployment) {
            *recent = recent.at(now);
            recent.tokens[0] = recent.tokens[0].saturating_add(tokens);
        } else {
            let mut recent = RecentArrivals { tokens: [0; 1 + WINDOW_PERIODS], since: now };
            recent.tokens[0] = tokens;
            self.0.insert(deployment.clone(), recent);
        }
    }

    /// Returns the arrival rate, in tokens per period.
    pub(super) fn per_period(&self, deployment: &DeploymentName, now: Instant) -> u64 {
        let Some(recent) = self.0.get(deployment) else { return 0 };
        let [_, last, ..] = recent.at(now).tokens;
        let whole = &recent.at(now).tokens[1..];
        last.max(whole.iter().fold(0, |sum: u64, tokens| sum.saturating_add(*tokens)) / WINDOW_PERIODS as u64)
    }
}

impl RecentArrivals {
    fn at(mut self, now: Instant) -> RecentArrivals {
        let passed = now.saturating_duration_since(self.since).as_millis() / EXCHANGE_PERIOD.as_millis();
        let passed = usize::try_from(passed).unwrap_or(usize::MAX);
        if passed > WINDOW_PERIODS {
            return RecentArrivals { tokens: [0; 1 + WINDOW_PERIODS], since: now };
        }
        self.tokens.rotate_right(passed);
        self.tokens[..passed].fill(0);
        self.since += EXCHANGE_PERIOD * u32::try_from(passed).expect("at most the periods of the window");
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn a_surge_counts_after_one_period_and_a_lull_does_not() {
        let (mut arrivals, start) = (Arrivals::default(), some_instant());
        let name: DeploymentName = "d".parse().unwrap();
        let at = |period: u32| start + EXCHANGE_PERIOD * period;
        for period in 0..5 {
            arrivals.record(&name, 100, at(period));
        }
        assert_eq!(arrivals.per_period(&name, at(4)), 100, "the last complete period");
        assert_eq!(arrivals.per_period(&name, at(5)), 100);
        arrivals.record(&name, 600, at(5));
        assert_eq!(arrivals.per_period(&name, at(5)), 100, "the current period is not complete");
        assert_eq!(arrivals.per_period(&name, at(6)), 600);
        assert_eq!(arrivals.per_period(&name, at(7)), 180, "the average over the second");
        assert_eq!(arrivals.per_period(&name, at(60)), 0);
        assert_eq!(arrivals.per_period(&"other".parse().unwrap(), at(6)), 0);
    }
}
