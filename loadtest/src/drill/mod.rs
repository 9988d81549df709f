//! Drills: timed fault injections under load, with expectations about the outcome.
//!
//! A drill file ([`read()`]) names an environment, loads, steps on one clock, and expectations. Everything that can be
//! checked in advance is checked in advance, and all problems are reported at once: every region exists, the environment
//! supports each action ([`action`]), and each expectation is measurable ([`expectation`]), over at least one second and with
//! enough requests for its percentile.
//!
//! This module performs no I/O. The caller (`meridian drill`) starts the environment, generates the load of [`plan`],
//! executes the steps and records [`observations`]; then [`evaluate()`] compares. So drills can be tested without an
//! environment, and a result can be evaluated again from its record.
//!
//! Reading order: [`drill`](self) (the types), [`action`], [`expectation`], [`read()`], [`plan`], [`observations`],
//! [`evaluate()`], [`timeline`].

pub mod action;
pub mod expectation;
mod judge;
pub mod plan;
mod read;
pub mod seen;
pub mod timeline;

use std::time::Duration;

use regions::{DeploymentName, RegionId};

pub use action::Action;
pub use expectation::Expectation;
pub use judge::{Verdict, judge};
pub use read::{Deployments, Surroundings, read};
pub use timeline::{Event, Outcome};

/// Validated drill.
#[derive(Clone, Debug, PartialEq)]
pub struct Drill {
    /// One sentence that states the purpose.
    pub about: String,
    /// Duration of the load.
    pub lasts: Duration,
    /// Initial time that does not count as "before": connections are being opened and no statistics exist yet.
    pub warm_up: Duration,
    /// Environment in which the drill runs.
    pub world: World,
    /// Loads.
    pub loads: Vec<Load>,
    /// Steps in order of time.
    pub steps: Vec<Step>,
    /// Expectations.
    pub expectations: Vec<Expectation>,
}

/// Environment that a drill requires.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    /// Regions; the gateway is located in the first.
    pub regions: Vec<RegionId>,
    /// Store of the hubs.
    pub store: Store,
    /// Number of hubs.
    pub hubs: u32,
    /// File in the format of configs/deployments.toml, as written in the drill; `None` for the default of `meridian up`.
    pub deployments: Option<String>,
    /// Engine of the replicas.
    pub engine: Engine,
    /// Capacity of the environment in requests per second, if given; for scripted replicas in inputs per second.
    pub capacity: Option<f64>,
}

/// Store of the hubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// File of the only hub.
    Embedded,
    /// etcd cluster of three members.
    Etcd,
}

/// Engine of the replicas.
#[derive(Clone, Debug, PartialEq)]
pub enum Engine {
    /// Real models of the deployments on the CPU engine.
    Cpu,
    /// Scripted replicas, which respond after a fixed time without computing. A region's capacity is then the configured one
    /// and does not depend on the CPU time that a machine with all processes of the environment has left.
    Scripted {
        /// Rate of one replica.
        inputs_per_second: u32,
        /// Number of replicas in each region, in the order of the regions.
        replicas: Vec<u32>,
    },
}

/// Load of one group of clients.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
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
pub struct Step {
    /// Time since the start of the load.
    pub at: Duration,
    /// Actions, each as written in the file and as parsed.
    pub actions: Vec<(String, Action)>,
}
