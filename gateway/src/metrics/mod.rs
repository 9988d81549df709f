//! What a gateway has done since it started, for `/metrics`.
//!
//! Only [`crate::events`] counts what happens: an event that is logged is counted, and the reverse. Every family is an
//! array of atomics, one for each combination of its labels, so that to count is one addition that waits for nobody;
//! that is possible because labels are closed sets: endpoints, error codes, causes and ends of attempts, the regions of
//! the catalogue, the tenants of the newest table. Limits that were reached are counted where they are held ([`bounds`]),
//! since often there is no request to tell of it. What is a state and not an event (budgets, health, room) is asked of
//! its owner when somebody scrapes.

mod bounds;
mod edge;
mod histogram;
mod ingress;
mod label;
mod panics;
mod tenants;
mod text;

pub(crate) use bounds::{Closed, HopEvent, ListenerMetrics, Names, NotHeldBy, NotTaken, Piece, Tally, Turn};
pub(crate) use edge::EdgeMetrics;
pub(crate) use histogram::Histogram;
pub(crate) use ingress::{HoldMetrics, IngressMetrics};
pub(crate) use label::{Asked, Ending, Priority, Protocol, Stage};
pub(crate) use panics::render as render_panics;
pub(crate) use text::{CONTENT_TYPE, Kind, Text};

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A total, or a number that rises and falls.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Counts `n` more. Totals are independent of each other, so no order among them is promised.
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// One less, of a number that falls too.
    pub(crate) fn less(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// A number that is known whole.
    pub(crate) fn set(&self, n: usize) {
        self.0.store(n as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One `T` for each of a fixed number of things, made when the thing is first heard of: a catalogue has hundreds of
/// regions, of which a fleet uses a few.
struct Lazily<T>(Box<[OnceLock<Box<T>>]>);

impl<T: Default> Lazily<T> {
    fn new(len: usize) -> Lazily<T> {
        Lazily((0..len).map(|_| OnceLock::new()).collect())
    }

    fn of(&self, at: usize) -> &T {
        self.0[at].get_or_init(Box::default)
    }

    /// Those that were heard of.
    fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.0.iter().enumerate().filter_map(|(at, cell)| Some((at, &**cell.get()?)))
    }
}
