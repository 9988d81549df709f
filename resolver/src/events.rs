//! Log lines and metrics of the resolution of names.

use metrics::{Counter, Family, labels, metric_set};
use regions::HostName;
use resolver_core::names::{NAMES_MAX, NameChange, QueryFailure};

labels! {
    /// Result of a DNS query.
    pub enum QueryResult {
        /// The name has addresses.
        Found = "found",
        /// The name has no address.
        NoAddresses = "no_addresses",
        /// No server answered in time.
        Unavailable = "unavailable",
    }
}

metric_set! {
    /// Resolution of names.
    pub struct ResolverMetrics<'a> {
        /// DNS queries, by result.
        queries: &'a Family<QueryResult> = "meridian_{role}_dns_queries_total" ["result"],
        /// Changes of the addresses of a name.
        changes: &'a Counter = "meridian_{role}_dns_changes_total",
        /// Addresses of names that failed or were slower than another address, and are tried last for a time.
        demoted: &'a Counter = "meridian_{role}_dns_addresses_demoted_total",
        /// Names in use.
        names: usize = "meridian_{role}_dns_names",
        /// Limit on names in use.
        names_max: usize = "meridian_{role}_dns_names_max",
        /// Names whose last query failed; their last addresses are used, for a day at most.
        failing: usize = "meridian_{role}_dns_names_failing",
    }
}

/// Counters of a resolver.
#[derive(Default)]
pub(crate) struct ResolverCounts {
    queries: Family<QueryResult>,
    changes: Counter,
    pub(crate) demoted: Counter,
}

impl ResolverCounts {
    pub(crate) fn metrics(&self, names: usize, failing: usize) -> ResolverMetrics<'_> {
        let ResolverCounts { queries, changes, demoted } = self;
        ResolverMetrics { queries, changes, demoted, names, names_max: NAMES_MAX, failing }
    }
}

/// End of a DNS query.
pub(crate) struct NameEvent<'a> {
    pub(crate) name: &'a HostName,
    pub(crate) outcome: Result<(), QueryFailure>,
    pub(crate) change: NameChange,
}

impl NameEvent<'_> {
    pub(crate) fn record(self, counts: &ResolverCounts) {
        let NameEvent { name, outcome, change } = self;
        counts.queries.count(match outcome {
            Ok(()) => QueryResult::Found,
            Err(QueryFailure::NoAddresses(_)) => QueryResult::NoAddresses,
            Err(QueryFailure::Unavailable) => QueryResult::Unavailable,
        });
        match change {
            NameChange::None => {}
            NameChange::Changed { addresses } => {
                counts.changes.add(1);
                // New requests use connections to the new addresses; requests in flight finish on the old ones.
                tracing::info!(%name, ?addresses, "addresses of a name changed");
            }
            NameChange::Failing { failure, kept } => {
                let cause = match failure {
                    QueryFailure::NoAddresses(_) => "the name has no address",
                    QueryFailure::Unavailable => "no DNS server answers",
                };
                // The last addresses stay in use, for a day at most if no server answers. Check the name and the servers.
                tracing::warn!(%name, cause, kept, "failed to resolve a name");
            }
            NameChange::GivenUp => {
                counts.changes.add(1);
                // No connection to this name can be opened until it has an address again. Correct the DNS record, or
                // the name in the configuration.
                tracing::error!(%name, "name has no address any more");
            }
            // DNS returns addresses for the name again.
            NameChange::Restored => tracing::info!(%name, "name resolved again"),
        }
    }
}
