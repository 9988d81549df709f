//! Context that a drill file is checked against.

use regions::{Catalogue, Deployment};

/// Loads the deployments of the named file, or the default of `meridian up` for `None`; errors are messages.
pub type DeploymentLoader<'a> = dyn Fn(Option<&str>) -> Result<Vec<Deployment>, Vec<String>> + 'a;

/// Context that a drill file is checked against.
pub struct ReadContext<'a> {
    /// All known regions.
    pub catalogue: &'a Catalogue,
    /// Loader of deployment files.
    pub deployments: &'a DeploymentLoader<'a>,
    /// Whether the drill runs against an existing deployment.
    pub against: bool,
}
