//! Events of a deployment that has failed in a region.

use regions::RegionId;
use scheduler_api::start_failure::FailedModel;
use scheduler_core::spoke::FailureChange;

/// The failure of a deployment in this region has begun, has another reason now, or has ended.
pub(crate) struct DeploymentFailureChanged<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) change: FailureChange,
}

impl DeploymentFailureChanged<'_> {
    pub(crate) fn record(self) {
        let DeploymentFailureChanged { region, change: FailureChange { deployment, failed } } = self;
        match failed {
            Some(FailedModel { model, failure, task: _, engine: _ }) => {
                let (reason, failure) = (failure.reason.as_str(), failure.message);
                // No replica of a deployment can start in this region, for `reason`, and its requests are rejected at once, so
                // that gateways use other regions. The starts go on. Correct what `failure` names: the model reference, its
                // permissions, the disk, or the cause of the crash; docs/runbook.md has a line for each reason.
                tracing::error!(%region, %deployment, model, reason, failure, "deployment failed");
            }
            None => {
                // A replica is ready, another model was applied, or the deployment was removed.
                tracing::info!(%region, %deployment, "deployment no longer failed");
            }
        }
    }
}
