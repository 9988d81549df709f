//! Deployments: the model, its engine, the regions that may see its requests, and the regions that should run it.
//!
//! `configs/deployments.toml` is the file that people change most. Three of its keys are easily confused: `residency` is
//! the residency policy (which regions may *see* a request), `regions` is where the model should *run*, and
//! `routing.order` is a preference among these regions (which of them *takes the traffic*). In place of `regions`, a
//! deployment may state the requirement of its [`placement`], from which the hub chooses its regions.
//! A deployment whose policy permits none of its regions cannot serve any request and is rejected here, before anything
//! starts.

pub mod placement;
mod read;
pub mod scaling;
pub mod timetable;
mod write;

pub use placement::PlacementSpec;
pub use read::{
    DeploymentRule, parse_deployments, parse_deployments_with, read_deployments, read_deployments_with,
    reference,
};
pub use scaling::Scaling;
pub use write::write_deployments;

use crate::catalogue::Catalogue;
use crate::engine::{EngineSpec, Task};
use crate::id::{DeploymentName, RegionId};
use crate::residency::ResidencyPolicy;
use crate::set::{RegionIndex, RegionSet};

/// Maximum number of deployments in a file: ten times the thousand that routing is measured with.
pub const MAX_DEPLOYMENTS: usize = 10_000;

/// Maximum tensor parallelism. One: an engine of several ranks needs a process for each, and `mpirun` to start them.
pub const MAX_TENSOR_PARALLEL: i64 = 1;

/// Deployment: a model under the name that clients use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Name, which clients send in `model`.
    pub name: DeploymentName,
    /// Task of the model.
    pub task: Task,
    /// Source of the model, such as `pypi://package` or `s3://bucket/prefix`, or a directory.
    pub model: String,
    /// Engine and number format.
    pub engine: EngineSpec,
    /// Regions that may see its requests.
    pub residency: ResidencyPolicy,
    /// Regions in which it should run; empty for every region with a spoke. Of a deployment with a `placement`, empty
    /// where an operator states it, and the chosen regions in a route table.
    pub regions: Vec<RegionId>,
    /// Regions in the order in which they take all of its traffic (active-passive); empty for routing to the nearest region.
    /// Each of them is one of `regions`.
    pub order: Vec<RegionId>,
    /// Requirement from which the hub chooses the regions, if they are not listed; absent in a route table, which has the chosen
    /// ones.
    pub placement: Option<PlacementSpec>,
    /// Number of replicas in each of these regions.
    pub scaling: Scaling,
}

impl Deployment {
    /// Returns the regions in which it should run, without those that are missing in the catalogue. While none are chosen
    /// for a `placement`, it may run in any; a route table has no such deployment.
    pub fn placement(&self, catalogue: &Catalogue) -> RegionSet {
        if self.regions.is_empty() {
            catalogue.all()
        } else {
            self.regions.iter().filter_map(|region| catalogue.index_of(region)).collect()
        }
    }

    /// Returns the regions of its order, without those that are missing in the catalogue.
    pub fn ordered_regions(&self, catalogue: &Catalogue) -> Vec<RegionIndex> {
        self.order.iter().filter_map(|region| catalogue.index_of(region)).collect()
    }

    /// Returns the first problem of an order of regions, with the index of the region in it: a region that is listed twice, or
    /// that is not one of `regions`. So an order has at most as many regions as the placement.
    pub fn order_problem(order: &[RegionId], regions: &[RegionId]) -> Option<(usize, String)> {
        order.iter().enumerate().find_map(|(index, region)| {
            if order[..index].contains(region) {
                return Some((index, format!("`{region}` is in `order` twice; keep one")));
            }
            let problem =
                format!("`{region}` is not in `regions` of the deployment; add it there, or remove it here");
            (!regions.contains(region)).then_some((index, problem))
        })
    }
}
