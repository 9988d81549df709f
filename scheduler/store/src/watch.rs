//! A watch: the changes under a prefix, from a revision on, in order and without a gap.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::history::History;
use crate::model::{Event, WatchError};

/// The changes under a prefix.
#[derive(Debug)]
pub struct Watch {
    prefix: String,
    from: u64,
    history: Arc<Mutex<History>>,
    bell: watch::Receiver<()>,
}

impl Watch {
    pub(crate) fn new(
        prefix: String,
        from: u64,
        history: Arc<Mutex<History>>,
        bell: watch::Receiver<()>,
    ) -> Watch {
        Watch { prefix, from, history, bell }
    }

    /// Waits for changes and returns all there are, at least one. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// When there is a gap: some changes that it was to return are no longer known. Every later call says so too.
    pub async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        loop {
            // Seen before it is read, so that what comes in between rings again.
            self.bell.borrow_and_update();
            let read =
                self.history.lock().expect("nothing panics that holds it").read(&self.prefix, self.from);
            let (events, next) = read?;
            self.from = next;
            if !events.is_empty() {
                return Ok(events);
            }
            self.bell.changed().await.map_err(|_| WatchError::Closed)?;
        }
    }
}
