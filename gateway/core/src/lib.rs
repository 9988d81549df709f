//! One request's fate at the edge, decided without IO, clock or runtime.
//!
//! In the order in which a request meets them:
//!
//! 0. [`connections`] — which connections are let in; [`head`], [`chunks`], [`trailers`] — whether what came is a request that everybody reads
//!    alike; [`flood`] — whether an HTTP/2 client only keeps
//!    us busy.
//! 1. [`endpoint`] — method and path say what is asked for. [`cors`] — which web pages may read the response.
//! 2. [`keys`], [`jwt`] — who asks; [`tenant`] — what they may use and how much of it, kept by a [`bucket`] per limit.
//! 3. [`ask`] — what the headers ask for: time, place, narrower policy, and a [`priority`].
//! 4. [`progress`] — how slowly a body may arrive, and [`memory`] — how much all of them may take; [`encoding`] — what a body is
//!    packed in; [`body`] — the `model` that the JSON body names and the work that it
//!    brings, read without building a tree.
//! 5. [`residency`] — which regions may see it: a type without which nothing is sent. [`shed`] — whether there is room for it,
//!    and who goes first when there is not; [`spill`] — whether it goes past the nearest region, because another has
//!    offered to take it. [`spiffe`] — who a region proves to be.
//! 6. [`health`] — what this gateway knows of each region from its reports, and [`queue`] — how long what waits there will
//!    take; [`targets`] — what its own requests have seen of each: how long an answer takes ([`pace`]) and who is left alone
//!    for a while ([`circuit`]), for what the upstream did and never for what a client did ([`outlier`]). [`cold`] — where it would
//!    be held until a replica is ready, and whether that is worth it. [`weights`] — what the hub plans for requests like it;
//!    [`demand`] — what the hub is told of them.
//! 7. [`plan`] — attempts, one after the other, until there is an answer or a refusal; [`outcome`] says what an
//!    attempt can come to, [`budget`] what a second one costs and [`hedge`] what a race. [`scatter`] cuts a request with
//!    very many inputs into pieces, each a request of its own, and joins their answers.
//!    [`multiplex`] — which of a region's connections an attempt goes over, where many share one.
//! 8. [`trail`] — what became of each attempt, in [`words`]; [`timing`] — where the time went, for the client to read.
//! 9. [`receipt`] — what proves all this later, and the audit that reads it. [`decimal`] writes the numbers in all of these.
//!
//! The residency policy (which regions may see the request at all) and the choice among them are in `regions`. Everything here
//! takes the time as an argument; the Pingora shell in `gateway` does as it is told.

pub mod ask;
pub mod body;
pub mod bucket;
pub mod budget;
pub mod chunks;
pub mod circuit;
pub mod cold;
pub mod connections;
pub mod cors;
pub mod decimal;
pub mod demand;
pub mod encoding;
pub mod endpoint;
pub mod flood;
pub mod head;
pub mod health;
pub mod hedge;
pub mod jwt;
pub mod keys;
pub mod memory;
pub mod multiplex;
pub mod outcome;
pub mod outlier;
pub mod pace;
pub mod plan;
pub mod priority;
pub mod progress;
pub mod queue;
pub mod receipt;
pub mod residency;
pub mod route;
pub mod scatter;
pub mod shed;
pub mod spiffe;
pub mod spill;
pub mod targets;
pub mod tenant;
pub mod timing;
pub mod trail;
pub mod trailers;
pub mod weights;
pub mod words;

/// Some instant for tests to count from.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant cannot be made from nothing, and no test looks at which it is"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
