//! State shared by the generator's thread and its owner.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::connection::{Completion, LoadRequest};
use super::requests::Requests;
use super::transport::TlsTarget;
use crate::options::Options;
use crate::record::Record;

/// State shared by the generator's thread and its owner.
pub(crate) struct SharedState {
    pub(crate) requests: Vec<Requests>,
    record: Mutex<Record>,
    /// Requests the end of the run: no further request is started.
    pub(crate) stop: AtomicBool,
    /// Number of requests in flight.
    pub(crate) in_flight: AtomicUsize,
}

impl SharedState {
    pub(crate) fn new(options: &Options, record: Record) -> SharedState {
        let requests = (0..options.tasks.len()).map(|index| Requests::of(options, index)).collect();
        SharedState {
            requests,
            record: Mutex::new(record),
            stop: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
        }
    }

    /// Records the end of a request at `at`.
    pub(super) fn add(&self, in_flight: LoadRequest, completion: Completion, at: Instant) {
        let priority = self.requests[in_flight.intended.task].priority();
        if let Some(sample) = completion.sample(in_flight, priority, at) {
            self.record().add(sample);
        }
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("no panic while the lock is held")
    }
}

/// Address and TLS parameters of the target.
pub(crate) struct ConnectTarget {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<TlsTarget>,
}
