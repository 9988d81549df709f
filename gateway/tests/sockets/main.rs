//! Real gateways and real ingresses over real sockets, between scripted hubs, regions and replicas; one topic per
//! module.
//!
//! They are one binary because linking the gateway takes longer than running its tests. Nothing here uses
//! process-global state; the tests of the log, which does, are in `../record`, and those without sockets in `../surge`.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod access;
mod address;
mod batch_requests;
mod batches;
mod cold;
#[path = "../../../resolver/tests/dns_server/mod.rs"]
#[expect(dead_code, reason = "the tests of the resolver use all of it")]
mod dns_server;
mod edge;
mod exchange;
mod hop;
mod hub;
mod ingress;
mod job_transfers;
mod job_usage;
mod jobs;
mod listener;
mod lists;
mod overflow;
mod policies;
mod readers;
mod reports;
mod scatter;
mod streams;
mod webhooks;
mod weights;
