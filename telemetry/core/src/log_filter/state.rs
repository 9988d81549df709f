//! Filter of a process, which can be changed for a time.

use super::LogFilter;
use std::time::{Duration, Instant};

/// Filter of a process, and the time at which the one at its start is restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilterState {
    at_start: LogFilter,
    current: LogFilter,
    until: Option<Instant>,
}

impl LogFilterState {
    /// Creates the state of a process that has started.
    pub fn new(at_start: LogFilter) -> LogFilterState {
        LogFilterState { current: at_start.clone(), at_start, until: None }
    }

    /// Returns the filter.
    pub fn current(&self) -> &LogFilter {
        &self.current
    }

    /// Returns the filter at the start of the process.
    pub fn at_start(&self) -> &LogFilter {
        &self.at_start
    }

    /// Returns the time at which the filter at the start is restored.
    pub fn restored_at(&self) -> Option<Instant> {
        self.until
    }

    /// Returns the time until then.
    pub fn time_left(&self, now: Instant) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(now))
    }

    /// Returns the state after a change of the filter: for this time, or until the process ends. The filter at the start has no end.
    #[must_use]
    pub fn changed(&self, filter: LogFilter, lasts: Option<Duration>, now: Instant) -> LogFilterState {
        let until = lasts.filter(|_| filter != self.at_start).and_then(|lasts| now.checked_add(lasts));
        LogFilterState { at_start: self.at_start.clone(), current: filter, until }
    }

    /// Returns the state in which the filter at the start is restored, if its time has come.
    pub fn restored(&self, now: Instant) -> Option<LogFilterState> {
        self.until.filter(|until| *until <= now).map(|_| LogFilterState::new(self.at_start.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::FilterLevel;
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn filter(text: &str) -> LogFilter {
        LogFilter::parse(text, FilterLevel::Info).unwrap()
    }

    #[expect(clippy::disallowed_methods, reason = "an instant is needed, any one")]
    fn begun() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_changed_filter_ends_at_its_time() {
        let (start, now) = (LogFilterState::new(filter("info")), begun());
        assert_eq!((start.restored_at(), start.restored(now + MINUTE)), (None, None));
        let changed = start.changed(filter("debug"), Some(MINUTE), now);
        assert_eq!(changed.current(), &filter("debug"));
        assert_eq!(changed.at_start(), &filter("info"));
        assert_eq!(changed.time_left(now + MINUTE / 4), Some(MINUTE * 3 / 4));
        assert_eq!(changed.restored(now + MINUTE - Duration::from_nanos(1)), None);
        assert_eq!(changed.time_left(now + 2 * MINUTE), Some(Duration::ZERO));
        assert_eq!(changed.restored(now + MINUTE), Some(start));
    }

    #[test]
    fn a_further_change_replaces_the_time() {
        let (start, now) = (LogFilterState::new(filter("info")), begun());
        let first = start.changed(filter("debug"), Some(MINUTE), now);
        let second = first.changed(filter("trace"), Some(MINUTE), now + MINUTE / 2);
        assert_eq!(second.restored(now + MINUTE), None);
        assert_eq!(second.restored(now + MINUTE * 3 / 2), Some(start.clone()));
        let lasting = second.changed(filter("debug"), None, now);
        assert_eq!((lasting.restored_at(), lasting.at_start()), (None, &filter("info")));
        assert_eq!(lasting.changed(filter("info"), Some(MINUTE), now), start, "there is nothing to restore");
    }
}
