//! A watch on a history in this process: the embedded store's and the simulated one's.

use std::sync::Arc;
use supervision::Mutex;

use tokio::sync::watch;

use crate::history::History;
use crate::model::{Event, WatchError};
use crate::store::Watch;

/// The changes under a prefix.
#[derive(Debug)]
pub struct LocalWatch {
    prefix: String,
    from: u64,
    history: Arc<Mutex<History>>,
    bell: watch::Receiver<()>,
}

impl LocalWatch {
    pub(crate) fn new(
        prefix: String,
        from: u64,
        history: Arc<Mutex<History>>,
        bell: watch::Receiver<()>,
    ) -> LocalWatch {
        LocalWatch { prefix, from, history, bell }
    }
}

impl Watch for LocalWatch {
    async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        loop {
            // Seen before it is read, so that what comes in between rings again.
            self.bell.borrow_and_update();
            let read = self.history.lock().read(&self.prefix, self.from);
            let (events, next) = read?;
            self.from = next;
            if !events.is_empty() {
                return Ok(events);
            }
            self.bell.changed().await.map_err(|_| WatchError::Closed)?;
        }
    }
}
