//! Jobs that other regions compute: what waits, and what the worker takes for them.

use super::{QueueError, QueueHost, TakenJob, now};
use jobs_core::decide::JobWorker;
use jobs_core::transfer::{self, JobBacklog, TransferGroup};

impl QueueHost {
    /// Returns the waiting work of a deployment, with the groups that may be transferred.
    pub fn backlog(&self, deployment: &str) -> JobBacklog {
        let mut applied = self.shared.applied.lock();
        transfer::backlog(&mut applied.queue, deployment, &self.shared.config.computation, now())
    }

    /// Takes jobs of a group for another region: at most `count`, up to this number of inputs.
    pub async fn take_for_transfer(
        &self,
        group: &TransferGroup,
        (count, inputs): (usize, u64),
        worker: JobWorker,
    ) -> Result<Vec<TakenJob>, QueueError> {
        let record = {
            let mut applied = self.shared.applied.lock();
            let policy = &self.shared.config.computation;
            transfer::take(&mut applied.queue, group, (count, inputs), policy, worker, now())
        };
        self.shared.lease(record).await
    }
}
