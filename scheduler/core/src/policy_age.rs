//! Age of the residency policies of a process: the time since a hub last confirmed its route table.
//!
//! While no hub is reachable, gateways and spokes serve from the table that they have, for days if necessary, and do
//! not learn of policies that were narrowed in the meantime. Past a maximum age, requests of deployments with a
//! residency policy are therefore rejected.
//!
//! The age is measured by two clocks, and the larger value counts. The monotonic clock cannot be set back, but it stops
//! while a machine is suspended and restarts with the machine; only the wall clock covers the time in which a process
//! was not running.

use std::time::Duration;

/// Default maximum age.
pub const POLICY_MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Lowest configurable maximum age. A hub confirms an unchanged table every 20 s.
pub const POLICY_MAX_AGE_MIN: Duration = Duration::from_secs(60);
/// Highest configurable maximum age.
pub const POLICY_MAX_AGE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Point in time by both clocks, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// Milliseconds since a fixed point of this process.
    pub monotonic_ms: u64,
    /// Milliseconds since 1970.
    pub unix_ms: u64,
}

impl ClockReading {
    /// Returns the moment of a confirmation that an earlier process recorded by the wall clock.
    pub fn restored(confirmed_unix_ms: u64, now: ClockReading) -> ClockReading {
        let age_ms = now.unix_ms.saturating_sub(confirmed_unix_ms);
        ClockReading { monotonic_ms: now.monotonic_ms.saturating_sub(age_ms), unix_ms: confirmed_unix_ms }
    }

    /// Returns the age of a confirmation at this moment.
    pub fn age(self, now: ClockReading) -> Duration {
        let monotonic = now.monotonic_ms.saturating_sub(self.monotonic_ms);
        let wall = now.unix_ms.saturating_sub(self.unix_ms);
        Duration::from_millis(monotonic.max(wall))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(monotonic_ms: u64, unix_ms: u64) -> ClockReading {
        ClockReading { monotonic_ms, unix_ms }
    }

    #[test]
    fn the_clock_with_the_larger_age_counts() {
        let confirmed = moment(1_000, 50_000);
        let check =
            |now: ClockReading, age_ms: u64| assert_eq!(confirmed.age(now), Duration::from_millis(age_ms));
        check(confirmed, 0);
        check(moment(4_000, 53_000), 3_000);
        check(moment(4_000, 10_000), 3_000);
        check(moment(1_500, 90_000), 40_000);
        check(moment(0, 0), 0);
    }

    #[test]
    fn the_age_continues_across_a_restart() {
        let now = moment(1 << 40, 90_000);
        let confirmed = ClockReading::restored(50_000, now);
        assert_eq!(confirmed.age(now), Duration::from_secs(40));
        assert_eq!(
            confirmed.age(moment((1 << 40) + 5_000, 20_000)),
            Duration::from_secs(45),
            "the clock was set back"
        );
        assert_eq!(ClockReading::restored(99_000, now).age(now), Duration::ZERO, "confirmed in the future");
    }
}
