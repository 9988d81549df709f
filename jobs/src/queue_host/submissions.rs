//! Submissions: those that wait at the same time are written together.

use super::{JobSubmission, QueueError, Shared, check_recent, now, since_epoch};
use crate::space::StoredContent;
use jobs_core::decide;
use jobs_core::job::{DurableJobId, JobSpec, StoredRange};
use jobs_core::queue::{RecordEffect, TenantUsage};
use jobs_core::record::JobRecord;
use rand::Rng;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;

/// Submissions that are written together, and the sum of their payloads in bytes.
const BATCH_MAX: usize = 512;
const BATCH_BYTES: usize = 16 << 20;

impl Shared {
    /// Writes submissions as they arrive, until the last handle is dropped.
    pub(super) async fn write_submissions(&self, mut inbox: mpsc::Receiver<JobSubmission>) {
        while let Some(first) = inbox.recv().await {
            let mut bytes = first.payload.len();
            let mut batch = vec![first];
            while batch.len() < BATCH_MAX
                && bytes < BATCH_BYTES
                && let Ok(next) = inbox.try_recv()
            {
                bytes += next.payload.len();
                batch.push(next);
            }
            self.write(batch).await;
        }
    }

    /// Writes submissions together and responds to each. The job of a client that has disconnected is durable all the same.
    async fn write(&self, batch: Vec<JobSubmission>) {
        let (mut accepted, mut usages) = (Vec::new(), HashMap::<String, TenantUsage>::new());
        {
            let applied = self.applied.lock();
            for submission in batch {
                let JobSubmission { spec, payload, .. } = &submission;
                let bytes = payload.len() as u64;
                let usage =
                    usages.entry(spec.tenant.clone()).or_insert_with(|| applied.queue.usage(&spec.tenant));
                // A repeated submission adds nothing, so it is not rejected by a limit.
                let known =
                    spec.idempotency.is_some_and(|key| applied.queue.with_key(&spec.tenant, &key).is_some());
                match decide::check_submission(*usage, &self.config.limits, spec, bytes, now()) {
                    Err(error) if !known => drop(submission.respond.send(Err(error.into()))),
                    _ => {
                        usage.jobs += 1;
                        usage.bytes += bytes;
                        accepted.push(submission);
                    }
                }
            }
        }
        if accepted.is_empty() {
            return;
        }
        let payloads: Vec<_> = accepted.iter().map(|submission| submission.payload.clone()).collect();
        let written = async {
            // Payloads that no record can follow would stay until a sweep.
            self.catch_up().await?;
            self.objects.check_space(StoredContent::NewWork).await?;
            let ranges = self.objects.put(&payloads, since_epoch()).await?;
            self.submitted(&accepted, ranges).await
        };
        let written = written.await;
        match written {
            Ok(responses) => {
                for (submission, response) in accepted.into_iter().zip(responses) {
                    submission.respond.send(response).ok();
                }
            }
            Err(error) => {
                for submission in accepted {
                    submission.respond.send(Err(error.clone())).ok();
                }
            }
        }
    }

    async fn submitted(
        &self,
        accepted: &[JobSubmission],
        ranges: Vec<StoredRange>,
    ) -> Result<Vec<Result<DurableJobId, QueueError>>, QueueError> {
        let mut ids = Vec::with_capacity(accepted.len());
        check_recent(&ranges)?;
        let records = accepted.iter().zip(ranges.clone()).map(|(submission, payload)| {
            let id = DurableJobId::new(now(), rand::rng().random());
            ids.push(id);
            JobRecord::Submitted { id, spec: Box::new(JobSpec { payload, ..submission.spec.clone() }) }
        });
        let records = records.collect();
        let (_, effects) = self.append(records).await?;
        let repeated =
            ranges.into_iter().zip(&effects).filter(|(_, effect)| **effect != RecordEffect::Submitted);
        self.discard(repeated.map(|(range, _)| range).collect());
        let response = |(id, effect)| match effect {
            RecordEffect::AlreadyExists { id, same_request: true } => {
                self.repeated.fetch_add(1, Ordering::Relaxed);
                Ok(id)
            }
            RecordEffect::AlreadyExists { id, .. } => Err(QueueError::OtherRequest(id)),
            _ => {
                self.accepted.fetch_add(1, Ordering::Relaxed);
                Ok(id)
            }
        };
        Ok(ids.into_iter().zip(effects).map(response).collect())
    }
}
