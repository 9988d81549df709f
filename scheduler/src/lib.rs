//! The scheduler's two parts: the hub, and the agent by which a region speaks to it.
//!
//! * [`hub`] knows the spokes by their leases, keeps what it knows in a store, and publishes the route table.
//! * [`agent`] stands in every spoke. It registers the region, says what is ready there, and works for ever without a
//!   hub: nothing that a client can see waits for it.
//!
//! Both are thin. What is decided is in `scheduler_core`, what is kept is in `scheduler_store`; here are the sockets, the
//! clock and the files. In reading order beside these two: [`config`] reads their files, `respond` refuses, `events`
//! says what happened.

pub mod agent;
pub mod config;
pub mod hub;

mod events;
mod respond;
