//! The scheduler's parts: the hub, the agent by which a region speaks to it, and what starts and stops a region's replicas.
//!
//! * [`hub`] knows the spokes by their leases, keeps what it knows in a store, and publishes the route table.
//! * [`agent`] stands in every spoke. It registers the region, says what is ready there, and works for ever without a
//!   hub: nothing that a client can see waits for it.
//!
//! * [`scaling`] stands there too, where somebody can start replicas: it follows the route table, decides how many there
//!   should be, and has an `actuator` bring that about. [`keeper`] ends replicas that nobody looks after any longer.
//!
//! All are thin. What is decided is in `scheduler_core`, what is kept is in `scheduler_store`; here are the sockets, the
//! clock and the files. In reading order beside these: [`config`] reads their files, `respond` refuses, `events`
//! says what happened.

pub mod agent;
pub mod config;
pub mod hub;
pub mod keeper;
pub mod scaling;

mod actuator;
mod events;
mod respond;
