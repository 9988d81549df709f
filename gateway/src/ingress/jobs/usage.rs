//! Usage of tenants by the jobs of a queue, in a ledger of the spoke ([`crate::usage`]).
//!
//! A job counts when its result is stored, and so does each line of a batch with the result of its chunk. The log of the queue accepts one
//! end of each job, so a job that is computed again, because its worker has ended, its lease has passed, or its result could not be
//! stored, counts once; a result that is discarded does not count. The counts since the last write are lost with a spoke that is killed.
//!
//! The region is the one that has computed the job, and the tenant the one that has submitted it.

use super::RegionalJobQueue;
use crate::usage::{LedgerState, UsageRecorder};
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId, TenantId};
use regions::set::RegionIndex;
use scheduler_api::usage::{UsageCounts, UsageDay};
use scheduler_client::hub::ControlPlaneClient;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Usage of an attempt at a job, which counts if its result is stored.
pub(super) struct ComputedUsage {
    /// Tenant that has submitted the job.
    pub(super) tenant: String,
    /// Deployment.
    pub(super) deployment: String,
    /// Region that has computed it, if it is not that of the queue.
    pub(super) target: Option<RegionIndex>,
    /// Requests, inputs and tokens; none after a failure.
    pub(super) counts: UsageCounts,
}

/// Usage by the jobs of a queue.
pub(super) struct JobUsage {
    recorder: Arc<UsageRecorder>,
    /// Region of the queue.
    here: Option<RegionIndex>,
    /// Hubs that store the usage; absent in tests without a hub.
    client: Option<ControlPlaneClient>,
}

impl JobUsage {
    /// Continues the ledgers whose files are named after `files`, or begins one.
    pub(super) fn open(
        files: &Path,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
        client: Option<ControlPlaneClient>,
    ) -> JobUsage {
        let recorder = Arc::new(UsageRecorder::open(files, region, catalogue));
        JobUsage { recorder, here: catalogue.index_of(region), client }
    }

    /// Counts a job whose result was stored now.
    pub(super) fn count(&self, computed: &ComputedUsage) {
        let ComputedUsage { tenant, deployment, target, counts } = computed;
        // Both names were valid when the job was submitted.
        let names = (tenant.parse::<TenantId>(), deployment.parse::<DeploymentName>());
        if let ((Ok(tenant), Ok(deployment)), Some(region)) = (names, target.or(self.here))
            && counts.requests > 0
        {
            let today = UsageDay::of(SystemTime::now());
            self.recorder.count(today, &tenant, &deployment, region, *counts);
        }
    }

    /// Returns the state for the metrics.
    pub(super) fn state(&self) -> LedgerState {
        self.recorder.state()
    }

    /// Writes and reports for ever.
    async fn follow(&self) {
        match &self.client {
            Some(client) => self.recorder.clone().follow(client.clone()).await,
            None => self.recorder.write_periodically().await,
        }
    }

    /// Writes and reports the last counts.
    async fn finish(&self) {
        match &self.client {
            Some(client) => self.recorder.finish(client).await,
            None => self.recorder.write().await,
        }
    }
}

/// Writes and reports the usage by the jobs of a queue, for ever.
pub(in crate::ingress) async fn follow_usage(queue: Arc<RegionalJobQueue>) {
    queue.usage.follow().await;
}

/// Writes and reports the last counts when the spoke stops.
pub(in crate::ingress) async fn finish_usage(queue: Arc<RegionalJobQueue>) {
    queue.usage.finish().await;
}
