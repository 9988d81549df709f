//! Control plane of Meridian: the hub, and the agent and the autoscaler of a region.
//!
//! * [`hub`] tracks the spokes by their leases, keeps its state in a store, and publishes the route table.
//! * [`agent`] runs in every spoke. It registers the region and reports which deployments are ready. It works without a
//!   hub for any time: no client request waits for it.
//! * [`scaling`] runs in spokes that can start replicas: it follows the route table, decides the desired number of
//!   replicas, and has an `actuator` start and stop them. [`heartbeat`] ends replicas whose spoke has not come back.
//!
//! All are imperative shells. The decisions are in `scheduler_core`, the stored state in `scheduler_store`; this crate
//! has the sockets, the clock and the files. Besides the above, in reading order: [`config`] parses the configuration
//! files, `respond` renders errors, `events` and `log` log.

pub mod agent;
pub mod config;
pub mod heartbeat;
pub mod hub;
pub mod scaling;

mod actuator;
mod events;
mod log;
mod respond;

/// Variable with the join token of a process. The processes that it starts must not inherit it.
pub const JOIN_TOKEN_VARIABLE: &str = "MERIDIAN_JOIN_TOKEN";

/// Variable with the socket of systemd for the state of a process, which is not that of the processes that it starts.
const NOTIFY_SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
