//! Drills: timed fault injections under load, with expectations about the outcome.
//!
//! A drill file ([`read()`]) names a fleet, loads, steps on one clock, and expectations. Everything that can be
//! checked in advance is checked in advance, and all problems are reported at once: every region exists, the fleet
//! supports each action ([`action`]), and each expectation is measurable ([`expectation`]), over at least one second
//! and with enough requests for its percentile.
//!
//! This module performs no I/O. The caller (`meridian drill`) starts the fleet, generates the load of [`plan`],
//! executes the steps and records [`observations`]; then [`evaluate()`] compares. So drills can be tested without an
//! fleet, and a result can be evaluated again from its record.
//!
//! Reading order: [`drill`](self) (the types), [`action`], [`expectation`], [`read()`], [`plan`], [`observations`],
//! [`evaluate()`], [`timeline`].

pub mod action;
mod evaluation;
pub mod expectation;
pub mod observations;
pub mod plan;
mod read;
pub mod timeline;

use std::time::Duration;

use regions::{DeploymentName, RegionId};

pub use action::Action;
pub use evaluation::{ExpectationResult, evaluate};
pub use expectation::Expectation;
pub use read::{DeploymentLoader, ReadContext, read, read_document, reference};
pub use timeline::{DrillResult, Event};

/// Maximum number of regions of a fleet on one machine (`meridian up`, `meridian drill`).
pub const LOCAL_REGIONS_MAX: usize = 12;
/// Maximum number of hubs of a fleet on one machine, on one store.
pub const LOCAL_HUBS_MAX: u32 = 5;
/// Maximum number of spokes of a region on one machine.
pub const LOCAL_SPOKES_MAX: u32 = 4;

/// Validated drill.
#[derive(Clone, Debug, PartialEq)]
pub struct Drill {
    /// One sentence that states the purpose.
    pub description: String,
    /// Duration of the load.
    pub duration: Duration,
    /// Initial time that does not count as "before": connections are being opened and no statistics exist yet.
    pub warm_up: Duration,
    /// DrillFleet in which the drill runs.
    pub fleet: DrillFleet,
    /// Loads.
    pub loads: Vec<ClientLoad>,
    /// Steps in order of time.
    pub steps: Vec<DrillStep>,
    /// Expectations.
    pub expectations: Vec<Expectation>,
}

/// DrillFleet that a drill requires.
#[derive(Clone, Debug, PartialEq)]
pub struct DrillFleet {
    /// Regions; a gateway is near each of them.
    pub regions: Vec<RegionId>,
    /// Store of the hubs.
    pub store: DrillStore,
    /// Number of hubs.
    pub hubs: u32,
    /// Number of spokes in each region.
    pub spokes: u32,
    /// File in the format of configs/deployments.toml, as written in the drill; `None` for the default of `meridian
    /// up`.
    pub deployments: Option<String>,
    /// Engine of the replicas.
    pub engine: DrillEngine,
    /// Capacity of the fleet in requests per second, if given; for scripted replicas in inputs per second.
    pub capacity: Option<f64>,
}

/// Store of the hubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrillStore {
    /// File of the only hub.
    Embedded,
    /// etcd cluster of three members.
    Etcd,
}

/// Engine of the replicas.
#[derive(Clone, Debug, PartialEq)]
pub enum DrillEngine {
    /// Real models of the deployments on the CPU engine.
    Cpu,
    /// Scripted replicas, which respond after a fixed time without computing. A region's capacity is then the
    /// configured one and does not depend on the CPU time that a machine with all processes of the fleet has left.
    Scripted {
        /// Rate of one replica.
        inputs_per_second: u32,
        /// Number of replicas in each region, in the order of the regions.
        replicas: Vec<u32>,
    },
}

/// Load of one group of clients.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientLoad {
    /// Name for expectations and surges.
    pub name: String,
    /// Deployment that requests name.
    pub model: DeploymentName,
    /// Region at whose location the clients are.
    pub near: RegionId,
    /// Requests per second outside surges.
    pub rate: f64,
    /// `constant` or `poisson`.
    pub arrival: String,
    /// Texts per request.
    pub inputs: usize,
    /// Timeout of a request.
    pub timeout: Duration,
}

/// Actions at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct DrillStep {
    /// Time since the start of the load.
    pub at: Duration,
    /// Actions, each as written in the file and as parsed.
    pub actions: Vec<(String, Action)>,
}
