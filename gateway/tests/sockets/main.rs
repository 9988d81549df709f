//! Real edges and real doors over real sockets, between scripted hubs, regions and replicas: one story to a module.
//!
//! They are one binary because each that links the gateway with all that it stands on takes longer to link than its tests
//! take to run. Nothing here touches what a process has only one of; what does (the log) is tested in `../record`, and what
//! opens no socket in `../surge`.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod address;
mod cold;
mod edge;
mod front;
mod hop;
mod hub;
mod ingress;
mod overflow;
mod policies;
mod scatter;
mod weights;
mod who;
