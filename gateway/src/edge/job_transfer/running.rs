//! Running transfers of the jobs of one region, by group.

use gateway_core::job_transfer::TransferShare;
use scheduler_api::job_transfer::JobGroupV1;
use std::collections::BTreeMap;
use tokio::task::JoinSet;

/// Deployment, tenant and residency policy of a group.
pub(super) type GroupKey = (String, String, String);

/// Returns the key of a group.
pub(super) fn key_of(group: &JobGroupV1) -> GroupKey {
    (group.deployment.clone(), group.tenant.clone(), group.residency.clone())
}

/// Transfers of the jobs of one region that are running.
#[derive(Default)]
pub(super) struct RunningTransfers {
    /// Tasks of the transfers, which return the group; none after a panic.
    pub(super) tasks: JoinSet<Option<GroupKey>>,
    /// Shares of the groups that have a transfer or wait for one.
    shares: BTreeMap<GroupKey, TransferShare>,
    /// Number of transfers that have started.
    started: u64,
}

impl RunningTransfers {
    /// Returns the share of a group.
    pub(super) fn share(&self, key: &GroupKey) -> TransferShare {
        self.shares.get(key).copied().unwrap_or_default()
    }

    /// Counts a transfer of a group.
    pub(super) fn started(&mut self, key: GroupKey) {
        self.started += 1;
        let share = self.shares.entry(key).or_default();
        share.running += 1;
        share.last_started = self.started;
    }

    /// Removes the transfers that have ended.
    pub(super) fn remove_ended(&mut self) {
        while let Some(ended) = self.tasks.try_join_next() {
            // The slot of a task that panicked is free again below, when all have ended.
            if let Ok(Some(key)) = ended
                && let Some(share) = self.shares.get_mut(&key)
            {
                share.running = share.running.saturating_sub(1);
            }
        }
        if self.tasks.is_empty() {
            self.shares.values_mut().for_each(|share| share.running = 0);
        }
    }

    /// Removes the groups without a transfer that do not wait any more.
    pub(super) fn retain(&mut self, waits: impl Fn(&GroupKey) -> bool) {
        self.shares.retain(|key, share| share.running > 0 || waits(key));
    }
}
