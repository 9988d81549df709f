//! Layer of the subscriber that applies the filter of the log.

use telemetry_core::log_filter::{FilterLevel, LogFilter};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Layer that excludes the events below the levels of a filter, for all layers of its subscriber.
///
/// `tracing` caches the decision for each place in the code, so an event costs no further one.
pub struct LogFilterLayer(LogFilter);

impl LogFilterLayer {
    /// Creates the layer.
    pub fn new(filter: LogFilter) -> LogFilterLayer {
        LogFilterLayer(filter)
    }

    fn enables(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enables(metadata.target(), level_of(*metadata.level()))
    }
}

impl<S: Subscriber> Layer<S> for LogFilterLayer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enables(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        self.enables(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.0.lowest_level() {
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

    #[test]
    fn only_events_that_the_filter_enables_reach_the_export() {
        let filter = LogFilter::parse("warn,chatty=debug,silent=off", FilterLevel::Info).expect("valid");
        let queue = LogQueue::default();
        let export = LogLayer::new(queue.clone(), LogLevel::Info);
        let subscriber = registry().with(LogFilterLayer::new(filter)).with(export);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("below the default");
            tracing::warn!("of the default");
            tracing::info!(target: "chatty::module", "of the target");
            tracing::debug!(target: "chatty::module", "below the level of the export");
            tracing::error!(target: "silent", "switched off");
        });
        let messages: Vec<_> = queue.take_batch().into_iter().filter_map(|event| event.message).collect();
        assert_eq!(messages, ["of the default", "of the target"]);
    }
}
