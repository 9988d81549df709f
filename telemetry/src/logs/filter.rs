//! Filter of the log of this process, which operators can change ([`super::http`]).
//!
//! The filter is consulted when `tracing` meets a place in the code for the first time, and for all of them after a change: it caches
//! the decision for each. So neither a disabled event nor an enabled one takes the lock of the filter. `tracing_subscriber::reload`
//! takes one for every event, and the threads of a busy gateway would contend for it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use supervision::Mutex;
use telemetry_core::log_filter::state::LogFilterState;
use telemetry_core::log_filter::{FilterLevel, LogFilter};
use tokio::sync::Notify;
use tracing::callsite::rebuild_interest_cache;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The filter of this process. A process has one subscriber, and so one filter.
static CONTROL: OnceLock<LogControl> = OnceLock::new();

/// Filter of a log, and its changes; clones share it.
#[derive(Clone)]
pub struct LogControl(Arc<Shared>);

struct Shared {
    state: Mutex<LogFilterState>,
    /// Held during a change, so that the events of two changes are in their order.
    changes: Mutex<()>,
    /// Signal that the filter has changed.
    changed: Notify,
}

/// Layer that excludes the events below the levels of the filter, for all layers of its subscriber.
pub struct LogFilterLayer(LogControl);

/// Creates the filter of the log of this process. The layer is for the subscriber of the process.
pub fn start_filter(filter: LogFilter) -> LogFilterLayer {
    let control = LogControl::new(filter);
    // Only tests start several.
    let _ = CONTROL.set(control.clone());
    LogFilterLayer(control)
}

impl LogControl {
    /// Creates a filter that has not been changed yet.
    fn new(filter: LogFilter) -> LogControl {
        let state = Mutex::independent(LogFilterState::new(filter));
        LogControl(Arc::new(Shared { state, changes: Mutex::independent(()), changed: Notify::new() }))
    }

    /// Returns the filter of this process.
    pub fn of_process() -> Option<&'static LogControl> {
        CONTROL.get()
    }

    /// Returns the filter and its changes.
    pub fn state(&self) -> LogFilterState {
        self.0.state.lock().clone()
    }

    /// Changes the filter, for this time or until the process ends.
    pub fn change(&self, filter: LogFilter, lasts: Option<Duration>, now: Instant) {
        let changed = |state: &LogFilterState| Some(state.changed(filter, lasts, now));
        self.replace(changed, |state| {
            let for_s = state.time_left(now).map(|left| left.as_secs());
            // An operator has changed the filter of the log, for `for_s` seconds, or without it until the process ends.
            tracing::info!(filter = %state.current(), for_s, "log filter changed");
        });
    }

    /// Restores the filter at the start of the process when the time of a changed one has ended, for ever.
    pub async fn restore_when_due(&self) {
        loop {
            let until = self.0.state.lock().restored_at();
            match until {
                Some(until) => tokio::select! {
                    () = tokio::time::sleep_until(until.into()) => self.restore(Instant::now()),
                    () = self.0.changed.notified() => {}
                },
                None => self.0.changed.notified().await,
            }
        }
    }

    fn restore(&self, now: Instant) {
        self.replace(
            |state| state.restored(now),
            |state| {
                // The time of a changed filter of the log has ended, and the filter at the start of the process is in use again.
                tracing::info!(filter = %state.current(), "log filter restored");
            },
        );
    }

    /// Replaces the state, if `next` returns another one, and logs that if the filter before or the one after it permits it.
    fn replace(
        &self,
        next: impl FnOnce(&LogFilterState) -> Option<LogFilterState>,
        log: impl Fn(&LogFilterState),
    ) {
        let _turn = self.0.changes.lock();
        let next = next(&self.0.state.lock());
        let Some(next) = next else { return };
        let is_logged_before = tracing::enabled!(Level::INFO);
        if is_logged_before {
            log(&next);
        }
        *self.0.state.lock() = next.clone();
        // This asks the layer about every place, so the lock of the state must be free.
        rebuild_interest_cache();
        if !is_logged_before {
            log(&next);
        }
        self.0.changed.notify_one();
    }

    fn enables(&self, metadata: &Metadata<'_>) -> bool {
        let level = level_of(*metadata.level());
        self.0.state.lock().current().enables(metadata.target(), level)
    }
}

impl<S: Subscriber> Layer<S> for LogFilterLayer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.0.enables(metadata) { Interest::always() } else { Interest::never() }
    }

    /// Called only for places whose decision is not cached.
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        self.0.enables(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.0.0.state.lock().current().lowest_level() {
            FilterLevel::Off => LevelFilter::OFF,
            FilterLevel::Error => LevelFilter::ERROR,
            FilterLevel::Warn => LevelFilter::WARN,
            FilterLevel::Info => LevelFilter::INFO,
            FilterLevel::Debug => LevelFilter::DEBUG,
            FilterLevel::Trace => LevelFilter::TRACE,
        })
    }
}

/// Returns the level of an event as that of a filter.
fn level_of(level: Level) -> FilterLevel {
    match level {
        Level::ERROR => FilterLevel::Error,
        Level::WARN => FilterLevel::Warn,
        Level::INFO => FilterLevel::Info,
        Level::DEBUG => FilterLevel::Debug,
        Level::TRACE => FilterLevel::Trace,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LogLayer, LogQueue};
    use super::*;
    use crate::config::LogLevel;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::registry;

    const HOUR: Duration = Duration::from_secs(3600);

    fn filter(text: &str) -> LogFilter {
        LogFilter::parse(text, FilterLevel::Info).expect("valid")
    }

    /// Returns the messages of the events that `emit` creates and that are exported.
    fn exported(at_start: &str, level: LogLevel, emit: impl FnOnce(&LogControl)) -> Vec<String> {
        let (queue, control) = (LogQueue::default(), LogControl::new(filter(at_start)));
        let export = LogLayer::new(queue.clone(), level);
        let subscriber = registry().with(LogFilterLayer(control.clone())).with(export);
        tracing::subscriber::with_default(subscriber, || emit(&control));
        queue.take_batch().into_iter().filter_map(|event| event.message).collect()
    }

    #[test]
    fn only_events_that_the_filter_enables_reach_the_export() {
        let messages = exported("warn,chatty=debug,silent=off", LogLevel::Info, |_| {
            tracing::info!("below the default");
            tracing::warn!("of the default");
            tracing::info!(target: "chatty::module", "of the target");
            tracing::debug!(target: "chatty::module", "below the level of the export");
            tracing::error!(target: "silent", "switched off");
        });
        assert_eq!(messages, ["of the default", "of the target"]);
    }

    #[test]
    fn a_change_applies_to_places_that_have_logged_before() {
        let detail = |text: &str| tracing::debug!(target: "module", "{text}");
        let messages = exported("info", LogLevel::Trace, |control| {
            let now = Instant::now();
            detail("before");
            control.change(filter("module=debug"), Some(HOUR), now);
            detail("during");
            control.restore(now + HOUR - Duration::from_secs(1));
            detail("until its time");
            control.restore(now + HOUR);
            detail("after");
        });
        assert_eq!(messages, ["log filter changed", "during", "until its time", "log filter restored"]);
    }

    #[test]
    fn a_change_is_logged_if_the_filter_before_or_after_it_permits_that() {
        let messages = |from: &str, to: &str| {
            exported(from, LogLevel::Trace, |control| control.change(filter(to), None, Instant::now()))
        };
        for (from, to, count) in
            [("info", "debug", 1), ("info", "off", 1), ("off", "info", 1), ("error", "warn", 0)]
        {
            assert_eq!(messages(from, to).len(), count, "{from} {to}");
        }
    }

    #[tokio::test]
    async fn the_filter_is_restored_at_its_time() {
        let control = LogControl::new(filter("info"));
        let task = tokio::spawn({
            let control = control.clone();
            async move { control.restore_when_due().await }
        });
        control.change(filter("debug"), Some(Duration::from_millis(1)), Instant::now());
        while control.state().current() != &filter("info") {
            tokio::task::yield_now().await;
        }
        task.abort();
    }
}
