//! Decisions of the edge about one request, without IO, clock or runtime.
//!
//! The modules in the order in which a request passes them:
//!
//! 0. [`connections`]: admission of connections. [`head`], [`trailers`]: rejection of ambiguous requests.
//!    [`flood`]: detection of HTTP/2 floods.
//! 1. [`endpoint`]: mapping of method and path. [`cors`]: web pages that may read the response.
//! 2. [`keys`], [`token_cache`]: authentication. [`tenant`]: permissions and rate limits, with a token [`bucket`] per limit.
//! 3. [`request_options`]: options in headers: timeout, location, narrower residency policy, [`priority`].
//! 4. [`progress`]: timeouts of a body. [`memory`]: memory budget of all bodies. [`encoding`]: content coding of a
//!    body. [`body`]: `model` and cost estimate of the JSON body, read without building a tree.
//! 5. [`residency`]: allowed regions, a type without which nothing is sent. [`shed`]: admission control and load
//!    shedding. [`spill`]: spillover past the primary region, to one that has offered credit. [`job_transfer`]: the same for jobs.
//! 6. [`health`]: health of each region from its reports. [`queue`]: its queueing delay. [`targets`]: observations of
//!    this gateway's own requests: [`latency`] and circuit breakers ([`circuit`]), with evidence from the upstream and
//!    never from the client ([`outlier`]), reset for another process ([`restarts`]). [`cold`]: ranking of regions that would hold a
//!    request until a replica is ready. [`instances`]: spoke instances of each region, and the selection of one. [`job_region`]:
//!    regions for jobs. [`weights`]: the hub's traffic
//!    plan. [`demand`]: the demand that is reported to the hub.
//! 7. [`plan`]: attempts, until there is a response or an error, at the edge and at the ingress. [`outcome`]: failures of an attempt. [`budget`]: retry
//!    budget. [`hedge`]: hedge budget. [`scatter`]: split of a request with very many inputs into sub-requests, and
//!    join of their responses. [`multiplex`]: selection among a region's HTTP/2 connections.
//! 8. [`trail`]: record of the attempts, with [`labels`]. [`timing`]: the `server-timing` header.
//!    [`usage`]: the usage of tenants. [`explanation_archive`]: explanations that are kept on disk.
//! 9. [`receipt`]: receipts that prove all this later, and their audit. [`decimal`]: fast formatting of numbers.
//!
//! The residency policy itself and region selection are in `regions`. Everything here takes the time as an argument;
//! the Pingora shell in `gateway` performs the decisions.

pub mod body;
pub mod bucket;
pub mod budget;
pub mod by_deployment;
pub mod candidate;
pub mod circuit;
pub mod cold;
pub mod connections;
pub mod cors;
pub mod decimal;
pub mod demand;
pub mod encoding;
pub mod endpoint;
pub mod exchange_streams;
pub mod explanation_archive;
pub mod flood;
mod frame;
pub mod head;
pub mod health;
pub mod hedge;
pub mod instances;
pub mod job_region;
pub mod job_transfer;
pub mod keys;
pub mod labels;
pub mod latency;
pub mod memory;
pub mod multiplex;
pub mod outcome;
pub mod outlier;
pub mod plan;
pub mod priority;
pub mod progress;
pub mod proxy_header;
pub mod queue;
pub mod receipt;
pub mod request_options;
pub mod residency;
pub mod restarts;
pub mod route;
pub mod scatter;
pub mod shed;
pub mod spill;
pub mod targets;
pub mod tenant;
pub mod timing;
pub mod token_cache;
pub mod traffic;
pub mod trail;
pub mod trailers;
pub mod usage;
pub mod weights;

/// Returns an arbitrary instant for tests.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant cannot be constructed, and no test depends on its value"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
