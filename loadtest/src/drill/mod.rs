//! A drill: at this moment do that, and expect the other within so long.
//!
//! A drill is a file that a person reads aloud before pressing the button ([`read()`]): which world, which load, which steps
//! on one clock, and what must hold. Everything that can be known beforehand is checked beforehand, all problems at once: that
//! every region exists, that the world can do each action ([`action`]), and that each expectation can be measured at all
//! ([`expectation`]): over at least a second, from enough requests for its percentile.
//!
//! This module decides and does nothing. Whoever runs a drill (`meridian drill`) makes the world, puts the load of [`plan`]
//! on it, does the steps, and notes what it sees ([`seen`]); then [`judge()`] compares. So what a drill means can be
//! tested without a world, and an outcome can be judged again from its record.
//!
//! Reading order: [`drill`](self) (the types), [`action`], [`expectation`], [`read()`], [`plan`], [`seen`], [`judge()`], [`timeline`].

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

/// A drill that can be run.
#[derive(Clone, Debug, PartialEq)]
pub struct Drill {
    /// What it shows, in a sentence.
    pub about: String,
    /// How long load is put on.
    pub lasts: Duration,
    /// What of its beginning is not counted as "before": connections are made, nobody knows anybody yet.
    pub warm_up: Duration,
    /// Where it happens.
    pub world: World,
    /// Who asks meanwhile.
    pub loads: Vec<Load>,
    /// What is done, in the order of time.
    pub steps: Vec<Step>,
    /// What must hold.
    pub expectations: Vec<Expectation>,
}

/// The world that a drill wants.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    /// The first is where the gateway stands.
    pub regions: Vec<RegionId>,
    /// What the hubs stand on.
    pub store: Store,
    /// How many there are.
    pub hubs: u32,
    /// A file as configs/deployments.toml, as it was written; none is what `up` has.
    pub deployments: Option<String>,
    /// What computes.
    pub engine: Engine,
    /// Requests a second that all of it can answer, where somebody has said so; of scripted replicas, inputs a second.
    pub capacity: Option<f64>,
}

/// What hubs keep what they know in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// A file of the one hub's own.
    Embedded,
    /// Three members of a real etcd.
    Etcd,
}

/// What computes in the regions.
#[derive(Clone, Debug, PartialEq)]
pub enum Engine {
    /// What is deployed: real models.
    Cpu,
    /// Nothing: replicas take their time and answer. So a region's capacity is what it is said to be, and not what is left
    /// of a machine on which a whole world stands.
    Scripted {
        /// Of one replica.
        inputs_per_second: u32,
        /// In each region, in their order.
        replicas: Vec<u32>,
    },
}

/// Some callers.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// By which expectations and surges name them.
    pub name: String,
    /// What they ask for.
    pub model: DeploymentName,
    /// Where they are: at this region's place.
    pub near: RegionId,
    /// Requests a second, but for surges.
    pub rate: f64,
    /// `constant` or `poisson`.
    pub arrival: String,
    /// Texts in each request.
    pub inputs: usize,
    /// How long a request may take.
    pub timeout: Duration,
}

/// Something that is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// When.
    pub at: Duration,
    /// What, as it was written, and as it is understood.
    pub actions: Vec<(String, Action)>,
}
