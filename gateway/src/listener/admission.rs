//! Admission of connections: limits for each client address, and which connection is closed when there is no place left.
//!
//! [`gateway_core::connections`] decides; here are its lock, and the signal to the connection that is to close.

use crate::metrics::ListenerMetrics;
use gateway_core::connections::{Admission, ClientConnections, ConnectionId, Limits, Source};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use supervision::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// Limits of connections for each client address, and the addresses without a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLimits {
    /// Open at once.
    pub connections: usize,
    /// Of those, the ones that have not sent the whole head of a request yet.
    pub half_open: usize,
    /// Proxies, which many clients stand behind.
    pub exempt: Vec<IpAddr>,
}

/// Half of all of them.
pub(crate) const CONNECTIONS_PER_ADDRESS_MAX: usize = super::CONNECTIONS_MAX / 2;
/// More handshakes than a company behind one address has at once, and a tenth of all connections.
pub(crate) const HALF_OPEN_PER_ADDRESS_MAX: usize = super::CONNECTIONS_MAX / 10;

impl AddressLimits {
    /// For listeners that only gateways connect to.
    pub(super) const NONE: AddressLimits =
        AddressLimits { connections: usize::MAX, half_open: usize::MAX, exempt: Vec::new() };
}

/// The connections of a listener.
pub(super) struct Open {
    exempt: Vec<IpAddr>,
    state: Mutex<State>,
    counts: Arc<ListenerMetrics>,
}

struct State {
    connections: ClientConnections,
    /// Signals that close a connection.
    evicted: BTreeMap<ConnectionId, Arc<Notify>>,
}

/// A connection that was let in, until this is dropped.
pub(super) struct Admitted {
    open: Arc<Open>,
    source: Source,
    id: ConnectionId,
    evicted: Arc<Notify>,
    is_half_open: bool,
}

impl Open {
    pub(super) fn new(limits: AddressLimits, counts: Arc<ListenerMetrics>) -> Open {
        let AddressLimits { connections, half_open, exempt } = limits;
        let limits = Limits { per_source: connections, half_open_per_source: half_open };
        let state = State { connections: ClientConnections::new(limits), evicted: BTreeMap::new() };
        Open { exempt, state: Mutex::new(state), counts }
    }

    /// Lets a connection in, unless its address has as many as it may.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        let (source, exempt) = (Source::of(address), self.exempt.contains(&address.to_canonical()));
        let state = &mut *self.state();
        let Admission::Admitted { id, evicts } = state.connections.open(source, exempt) else { return None };
        state.evict(evicts);
        let evicted = Arc::new(Notify::new());
        state.evicted.insert(id, evicted.clone());
        self.counts.half_open.set(state.connections.half_open());
        Some(Admitted { open: self.clone(), source, id, evicted, is_half_open: true })
    }

    /// Closes a half-open connection for one that was admitted, if there is another.
    pub(super) fn evict_half_open(&self, newest: &Admitted) -> bool {
        let state = &mut *self.state();
        let evicts = state.connections.evict_half_open(newest.id);
        state.evict(evicts);
        evicts.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    fn evict(&mut self, id: Option<ConnectionId>) {
        if let Some(evicted) = id.and_then(|id| self.evicted.get(&id)) {
            evicted.notify_one();
        }
    }
}

impl Admitted {
    /// Comes back when it is to close.
    pub(super) async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// A request's head is whole, or has begun and is not.
    pub(super) fn mark(&mut self, is_half_open: bool) {
        if self.is_half_open != is_half_open {
            self.is_half_open = is_half_open;
            let state = &mut *self.open.state();
            state.connections.mark(self.source, self.id, is_half_open);
            self.open.counts.half_open.set(state.connections.half_open());
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let state = &mut *self.open.state();
        state.connections.close(self.source, self.id);
        state.evicted.remove(&self.id);
        self.open.counts.half_open.set(state.connections.half_open());
    }
}
