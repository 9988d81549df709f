//! Tests of the batch planner: invariants after every step (`planner`), and properties over time (`simulator`, on the
//! simulation in `sim`).

mod planner;
mod sim;
mod simulator;

use std::time::{Duration, Instant};

use replica_core::batch::{BatchInput, BatchSettings};

/// Start of simulated time.
#[expect(clippy::disallowed_methods, reason = "an instant cannot be made in any other way")]
pub(crate) fn origin() -> Instant {
    Instant::now()
}

/// Settings for batches of a hundred tokens, at either priority.
pub(crate) fn settings() -> BatchSettings {
    BatchSettings {
        batch_tokens: 100,
        interactive_batch_tokens: 100,
        bulk_share_percent: 25,
        window_max: Duration::from_millis(5),
    }
}

/// Input of the tests: its content, its class, and its length.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Text {
    pub(crate) text: u64,
    pub(crate) class: u8,
    pub(crate) tokens: u64,
}

impl Text {
    pub(crate) fn new(text: u64, tokens: u64) -> Text {
        Text { text, class: 0, tokens }
    }

    pub(crate) fn of_class(self, class: u8) -> Text {
        Text { class, ..self }
    }
}

impl BatchInput for Text {
    type Class = u8;

    fn tokens(&self) -> u64 {
        self.tokens
    }

    fn class(&self) -> u8 {
        self.class
    }
}
