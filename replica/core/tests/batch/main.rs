//! The batch manager: what holds after every step (`planner`), and what holds over time (`simulator`, in the world of
//! `sim`).

mod planner;
mod sim;
mod simulator;

use std::time::{Duration, Instant};

use replica_core::batch::{BatchInput, BatchSettings};

/// Where a test's time begins; it goes on only as the test says.
#[expect(clippy::disallowed_methods, reason = "an instant cannot be made in any other way")]
pub(crate) fn origin() -> Instant {
    Instant::now()
}

/// Batches of a hundred tokens, on either priority.
pub(crate) fn settings() -> BatchSettings {
    BatchSettings {
        batch_tokens: 100,
        interactive_batch_tokens: 100,
        bulk_share_percent: 25,
        window_max: Duration::from_millis(5),
    }
}

/// An input: what it says, what kind of answer it wants, and how long it is.
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
