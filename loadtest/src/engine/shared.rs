//! State shared by the generator's thread and its owner.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, MutexGuard};

use super::requests::Requests;
use super::stream::Tls;
use crate::options::Options;
use crate::record::Record;

/// State shared by the generator's thread and its owner.
pub(crate) struct Shared {
    pub(crate) requests: Vec<Requests>,
    record: Mutex<Record>,
    /// Requests the end of the run: no further request is started.
    pub(crate) stop: AtomicBool,
    /// Number of requests in flight.
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

/// Address and TLS parameters of the target.
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Tls>,
}
