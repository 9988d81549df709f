//! Watch on a history in this process, for the embedded and the simulated store.

use std::sync::Arc;
use supervision::Mutex;

use tokio::sync::watch;

use crate::history::History;
use crate::model::{Event, KeyRange, WatchError};
use crate::store::Watch;

/// Watch of the changes to a range of keys.
#[derive(Debug)]
pub struct LocalWatch {
    keys: KeyRange,
    from: u64,
    history: Arc<Mutex<History>>,
    notified: watch::Receiver<()>,
}

impl LocalWatch {
    pub(crate) fn new(
        keys: KeyRange,
        from: u64,
        history: Arc<Mutex<History>>,
        notified: watch::Receiver<()>,
    ) -> LocalWatch {
        LocalWatch { keys, from, history, notified }
    }
}

impl Watch for LocalWatch {
    async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        loop {
            // Marked before the read, so that a change during the read notifies again.
            self.notified.borrow_and_update();
            let read = self.history.lock().read(&self.keys, self.from);
            let (events, next) = read?;
            self.from = next;
            if !events.is_empty() {
                return Ok(events);
            }
            self.notified.changed().await.map_err(|_| WatchError::Closed)?;
        }
    }
}
