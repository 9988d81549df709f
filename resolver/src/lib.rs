//! Addresses of names, and connections to them.
//!
//! [`Resolver`] is shared by all parts of a process that connect to endpoints by name. It resolves a name when it is
//! first used and again whenever its answer expires, so that only the first connection to a name waits for DNS.
//! `resolver_core` decides about validity and order; this crate has the sockets, the tasks and the clock.
//!
//! - [`dns`]: the DNS client.
//! - [`connect`]: TCP connection to an endpoint with several addresses.
//! - [`http`]: the resolver as that of an HTTP client.
//! - [`events`]: log lines and metrics.

pub mod connect;
mod dns;
mod events;
mod http;

pub use connect::ConnectError;
pub use events::ResolverMetrics;
pub use resolver_core::config::DnsSection;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use dns::DnsClient;
use events::{NameEvent, ResolverCounts};
use regions::{Host, HostName, HostPort};
use resolver_core::names::{DueQueries, NameCache, NameLookup, QueryFailure};
use supervision::Mutex;
use supervision::task::{contained, supervise};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;

/// Maximum number of queries in progress; further ones wait.
const QUERIES_MAX: usize = 32;
/// Longest pause of the refresh task; it is also woken by every new name.
const REFRESH_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Resolver of the names of a process, and the opener of connections to them; clones share its cache.
#[derive(Clone)]
pub struct Resolver(Arc<Shared>, SourceAddress);

/// Source address of connections; the system's choice if absent.
#[derive(Clone, Copy, Debug, Default)]
struct SourceAddress(Option<IpAddr>);

struct Shared {
    cache: Mutex<NameCache>,
    client: DnsClient,
    queries: Arc<Semaphore>,
    /// Number of queries that have ended.
    ended: watch::Sender<u64>,
    wake: Arc<Notify>,
    counts: ResolverCounts,
    /// Queries, and the task that refreshes answers. They end when this is dropped.
    tasks: Mutex<JoinSet<()>>,
}

/// Error when a name has no known address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} {}", match .failure {
    QueryFailure::NoAddresses(_) => "has no address",
    QueryFailure::Unavailable => "cannot be resolved: no DNS server answers",
})]
pub struct ResolutionError {
    name: HostName,
    failure: QueryFailure,
}

impl Resolver {
    /// Creates a resolver; must be called in the runtime in which its tasks run.
    pub fn new(section: &DnsSection) -> Resolver {
        Resolver::of_client(DnsClient::new(section))
    }

    /// Returns a resolver with the same DNS servers and a cache of its own, for names that clients select: a client with many
    /// names must not replace those of the fleet in the cache.
    #[must_use]
    pub fn with_own_cache(&self) -> Resolver {
        Resolver::of_client(self.0.client.clone())
    }

    /// Returns a resolver with the same cache whose connections come from this local address; the system's choice if absent.
    #[must_use]
    pub fn with_source_address(&self, address: Option<IpAddr>) -> Resolver {
        Resolver(self.0.clone(), SourceAddress(address))
    }

    fn of_client(client: DnsClient) -> Resolver {
        let shared = Arc::new(Shared {
            cache: Mutex::new(NameCache::default()),
            client,
            queries: Arc::new(Semaphore::new(QUERIES_MAX)),
            ended: watch::Sender::new(0),
            wake: Arc::default(),
            counts: ResolverCounts::default(),
            tasks: Mutex::independent(JoinSet::new()),
        });
        let (weak, wake) = (Arc::downgrade(&shared), shared.wake.clone());
        let refresh = supervise("names", move || refresh(weak.clone(), wake.clone()));
        shared.tasks.lock().spawn(refresh);
        Resolver(shared, SourceAddress::default())
    }

    /// Returns whether a connection to this address of an endpoint may be used for new requests.
    pub fn is_current(&self, endpoint: &HostPort, address: IpAddr) -> bool {
        match endpoint.host() {
            Host::Ip(ip) => *ip == address,
            Host::Name(name) if name.is_localhost() => address.is_loopback(),
            Host::Name(name) => self.0.cache.lock().is_current(name, address),
        }
    }

    /// Returns the metrics.
    pub fn metrics(&self) -> ResolverMetrics<'_> {
        let (names, failing) = {
            let cache = self.0.cache.lock();
            (cache.len(), cache.failing())
        };
        self.0.counts.metrics(names, failing)
    }

    /// Returns the addresses of a host in the order in which connections to them are attempted. Waits for the first
    /// answer if there is none.
    ///
    /// # Errors
    ///
    /// When the name has no address, or no DNS server answers.
    pub async fn addresses(&self, host: &Host) -> Result<Vec<IpAddr>, ResolutionError> {
        let name = match host {
            Host::Ip(ip) => return Ok(vec![*ip]),
            Host::Name(name) if name.is_localhost() => {
                return Ok(vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]);
            }
            Host::Name(name) => name,
        };
        // Subscribed before the lookup, so that no end of a query is missed in between.
        let mut ended = self.0.ended.subscribe();
        loop {
            let lookup = self.0.cache.lock().lookup(name, Instant::now());
            match lookup {
                NameLookup::Known(_) => {
                    return Ok(self.0.cache.lock().candidates(
                        name,
                        rand::random_range(0..usize::MAX),
                        Instant::now(),
                    ));
                }
                NameLookup::Failed(failure) => return Err(ResolutionError { name: name.clone(), failure }),
                NameLookup::Unknown { query } => {
                    if query {
                        self.0.query(name.clone());
                    }
                    // The sender is in `self`.
                    ended.changed().await.ok();
                }
            }
        }
    }
}

impl Shared {
    /// Starts a query, which is not owned by the caller: others may wait for it.
    fn query(self: &Arc<Shared>, name: HostName) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        let (shared, client, queries) = (Arc::downgrade(self), self.client.clone(), self.queries.clone());
        tasks.spawn(async move {
            let _permit = queries.acquire().await;
            let result = contained("DNS query", client.query(&name)).await;
            let Some(shared) = shared.upgrade() else { return };
            let result = result.unwrap_or(Err(QueryFailure::Unavailable));
            let outcome = result.as_ref().map(|_| ()).map_err(|failure| *failure);
            let change = shared.cache.lock().ended(&name, result, Instant::now());
            NameEvent { name: &name, outcome, change }.record(&shared.counts);
            shared.ended.send_modify(|ended| *ended += 1);
            shared.wake.notify_one();
        });
    }
}

/// Sends the queries that are due, for ever.
async fn refresh(shared: Weak<Shared>, wake: Arc<Notify>) {
    loop {
        let next = {
            let Some(shared) = shared.upgrade() else { return };
            let DueQueries { names, next } = shared.cache.lock().due(Instant::now());
            names.into_iter().for_each(|name| shared.query(name));
            next
        };
        let pause = next.map_or(REFRESH_PAUSE_MAX, |next| next.saturating_duration_since(Instant::now()));
        tokio::time::timeout(pause.min(REFRESH_PAUSE_MAX), wake.notified()).await.ok();
    }
}
