//! Admission of connections: limits per client address, and selection of the connection that is closed when the limit
//! of all connections is reached.
//!
//! [`gateway_core::connections`] decides; this module adds the lock and the signal to the connection that must close.

use crate::metrics::ListenerMetrics;
use gateway_core::connections::{Admission, ClientConnections, ConnectionId, Limits, Source};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use supervision::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// Default maximum of open connections. At 5 kB for an idle one, 15 kB with TLS (docs/benchmarks.md), that is 50 and
/// 150 MB; the next one waits in the kernel's queue, and the connection that has been idle for longest is closed for it.
pub(crate) const CONNECTIONS_MAX: usize = 10_000;
/// Limits of connections per client address, and the addresses without a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLimits {
    /// Maximum number of open connections.
    pub connections: usize,
    /// Maximum number of those that have not sent the complete head of a request yet.
    pub half_open: usize,
    /// Addresses without limits, such as proxies with many clients behind them.
    pub exempt: Vec<IpAddr>,
}

/// Default: half of all connections.
pub(crate) const CONNECTIONS_PER_ADDRESS_MAX: usize = CONNECTIONS_MAX / 2;
/// Default: more handshakes than a company behind one address has at once, and a tenth of all connections.
pub(crate) const HALF_OPEN_PER_ADDRESS_MAX: usize = CONNECTIONS_MAX / 10;

impl AddressLimits {
    /// No limits, for listeners that only gateways connect to.
    pub(super) const NONE: AddressLimits =
        AddressLimits { connections: usize::MAX, half_open: usize::MAX, exempt: Vec::new() };
}

/// Open connections of a listener.
pub(super) struct OpenConnections {
    exempt: Vec<IpAddr>,
    state: Mutex<State>,
    counts: Arc<ListenerMetrics>,
}

struct State {
    connections: ClientConnections,
    /// Signals that close a connection.
    evicted: BTreeMap<ConnectionId, Arc<Notify>>,
}

/// Admission of a connection; ends on drop.
pub(super) struct AdmittedConnection {
    open: Arc<OpenConnections>,
    source: Source,
    id: ConnectionId,
    evicted: Arc<Notify>,
    is_half_open: bool,
}

impl OpenConnections {
    pub(super) fn new(limits: AddressLimits, counts: Arc<ListenerMetrics>) -> OpenConnections {
        let AddressLimits { connections, half_open, exempt } = limits;
        let limits = Limits { per_source: connections, half_open_per_source: half_open };
        let state = State { connections: ClientConnections::new(limits), evicted: BTreeMap::new() };
        OpenConnections { exempt, state: Mutex::new(state), counts }
    }

    /// Admits a connection unless its address has reached its limit.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<AdmittedConnection> {
        self.admit_source(address, self.exempt.contains(&address.to_canonical()))
    }

    /// Admits a connection of a load balancer, whose client is not known yet.
    pub(super) fn admit_load_balancer(self: &Arc<Self>, address: IpAddr) -> AdmittedConnection {
        self.admit_source(address, true).expect("an exempt source has no limit")
    }

    fn admit_source(self: &Arc<Self>, address: IpAddr, exempt: bool) -> Option<AdmittedConnection> {
        let source = Source::of(address);
        let state = &mut *self.state();
        let Admission::Admitted { id, evicts } = state.connections.open(source, exempt) else { return None };
        state.evict(evicts);
        let evicted = Arc::new(Notify::new());
        state.evicted.insert(id, evicted.clone());
        self.counts.half_open.set(state.connections.half_open());
        Some(AdmittedConnection { open: self.clone(), source, id, evicted, is_half_open: true })
    }

    /// Closes a half-open connection in favour of `newest`; returns whether there was one.
    pub(super) fn evict_half_open(&self, newest: &AdmittedConnection) -> bool {
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

impl AdmittedConnection {
    /// Completes when the connection must close.
    pub(super) async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// Sets whether the connection waits for the rest of a request head.
    pub(super) fn mark(&mut self, is_half_open: bool) {
        if self.is_half_open != is_half_open {
            self.is_half_open = is_half_open;
            let state = &mut *self.open.state();
            state.connections.mark(self.source, self.id, is_half_open);
            self.open.counts.half_open.set(state.connections.half_open());
        }
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        let state = &mut *self.open.state();
        state.connections.close(self.source, self.id);
        state.evicted.remove(&self.id);
        self.open.counts.half_open.set(state.connections.half_open());
    }
}
