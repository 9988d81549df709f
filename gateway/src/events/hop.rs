//! What goes wrong between edge and region before a request is sent: at the edge, where one region is meant, and at a
//! region's door, where anybody can knock.

use crate::hop::Cause;
use crate::metrics::{Count, Kind, Text};
use regions::set::RegionIndex;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// How often strangers at a door are told of, for each cause.
const TOLD_PERIOD: Duration = Duration::from_secs(1);

/// How often what went wrong.
#[derive(Debug, Default)]
pub(crate) struct HopFailures {
    counts: [Count; Cause::ALL.len()],
    /// When it was last told, and how many since.
    told: [Mutex<Option<(Instant, u64)>>; Cause::ALL.len()],
}

impl HopFailures {
    /// As one family of counters.
    pub(crate) fn render(&self, text: &mut Text, name: &str, help: &str) {
        text.head(name, Kind::Counter, help);
        for cause in Cause::ALL {
            text.sample(name, &[("cause", cause.as_str())], self.counts[cause as usize].get());
        }
    }

    /// Counts, and says whether it is time to tell: of how many that were not told.
    fn count(&self, cause: Cause, now: Instant) -> Option<u64> {
        self.counts[cause as usize].add(1);
        let mut told = self.told[cause as usize].lock();
        match &mut *told {
            Some((at, silent)) if now.saturating_duration_since(*at) < TOLD_PERIOD => {
                *silent += 1;
                None
            }
            told => told.replace((now, 0)).map_or(Some(0), |(_, silent)| Some(silent)),
        }
    }
}

/// A region could not be talked to.
pub(crate) struct HopFailed<'a> {
    pub(crate) region: RegionIndex,
    pub(crate) address: SocketAddr,
    pub(crate) cause: Cause,
    pub(crate) why: &'a dyn std::fmt::Display,
    /// It was not the same the last time.
    pub(crate) news: bool,
}

impl HopFailed<'_> {
    pub(crate) fn record(self, failures: &HopFailures) {
        let HopFailed { region, address, cause, why, news } = self;
        failures.counts[cause as usize].add(1);
        if news {
            let (region, cause) = (region.as_usize(), cause.as_str());
            tracing::error!(region, %address, cause, %why, "edge and region do not come together");
        }
    }
}

/// Somebody was not let in.
pub(crate) struct HopRefused<'a> {
    pub(crate) cause: Cause,
    pub(crate) why: &'a str,
}

impl HopRefused<'_> {
    pub(crate) fn record(self, failures: &HopFailures) {
        let HopRefused { cause, why } = self;
        if let Some(untold) = failures.count(cause, Instant::now()) {
            tracing::warn!(cause = cause.as_str(), why, untold, "a connection is not taken");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_are_counted_every_time_and_told_once_a_second_for_each_cause() {
        let (failures, begin) = (HopFailures::default(), Instant::now());
        let told = |cause, millis| failures.count(cause, begin + Duration::from_millis(millis));
        assert_eq!(told(Cause::NotTls, 0), Some(0));
        assert_eq!(told(Cause::NotTls, 999), None);
        assert_eq!(told(Cause::Untrusted, 999), Some(0));
        assert_eq!(told(Cause::NotTls, 1000), Some(1));
        assert_eq!(failures.counts[Cause::NotTls as usize].get(), 3);
    }

    #[test]
    fn the_order_of_the_list_is_that_of_the_enum() {
        for (place, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, place);
        }
    }
}
