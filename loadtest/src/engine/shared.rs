//! What the generator's thread and its owner both look at.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, MutexGuard};

use super::requests::Requests;
use super::stream::Tls;
use crate::options::Options;
use crate::record::Record;

/// What the thread and its owner both look at.
pub(crate) struct Shared {
    pub(crate) requests: Vec<Requests>,
    record: Mutex<Record>,
    /// No further request is to start.
    pub(crate) stop: AtomicBool,
    /// How many are on their way.
    pub(crate) in_flight: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(options: &Options, record: Record) -> Shared {
        let requests = (0..options.tasks.len()).map(|place| Requests::of(options, place)).collect();
        Shared {
            requests,
            record: Mutex::new(record),
            stop: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
        }
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("nobody panics while adding to the record")
    }
}

/// Where requests go and how.
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Tls>,
}
