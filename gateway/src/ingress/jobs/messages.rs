//! Messages to webhooks: what they contain, and the task that sends them.

use super::api::with_result;
use super::names::phase_text;
use super::{ClientJobId, JobTraces, RegionalJobQueue};
use crate::events::WebhookAttemptEnded;
use crate::metrics::WebhookAttemptOutcome;
use jobs::queue_host::{JobView, QueueError, TakenJob};
use jobs::webhook::sender::{WebhookHost, WebhookMessage};
use jobs::webhook::signature::WebhookSecret;
use jobs::webhook::timestamp;
use jobs_core::decide::DeliveryEnd;
use jobs_core::job::{JobPhase, JobStatus};
use jobs_core::record::DeliveryOutcome;
use jobs_core::webhook::MESSAGE_RESULT_BYTES_MAX;
use replica_api::jobs::JOBS;
use scheduler_core::spoke::Spoke;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;

/// Messages about the jobs of a queue.
struct QueueMessages {
    queue: Arc<RegionalJobQueue>,
    spoke: Arc<Mutex<Spoke>>,
    traces: Option<Arc<JobTraces>>,
}

impl WebhookHost for QueueMessages {
    fn message(&self, taken: &TakenJob) -> WebhookMessage {
        message(&self.queue, taken)
    }

    fn secrets(&self, tenant: &str) -> Vec<WebhookSecret> {
        self.queue.webhooks.secrets_of(tenant)
    }

    fn is_draining(&self) -> bool {
        self.spoke.lock().is_draining()
    }

    fn ended(
        &self,
        taken: &TakenJob,
        began: Instant,
        end: &DeliveryEnd,
        follows: &Result<DeliveryOutcome, QueueError>,
    ) {
        let reason = match end {
            DeliveryEnd::Failed { reason, .. } => Some(reason.as_str()),
            DeliveryEnd::Accepted | DeliveryEnd::Gone => None,
        };
        let outcome = match follows {
            Ok(DeliveryOutcome::Delivered) => WebhookAttemptOutcome::Delivered,
            Ok(DeliveryOutcome::Retry { .. }) => WebhookAttemptOutcome::Failed,
            Ok(DeliveryOutcome::Abandoned { .. }) => WebhookAttemptOutcome::Abandoned,
            Ok(DeliveryOutcome::Stopped { .. }) => WebhookAttemptOutcome::Stopped,
            Err(error) => {
                self.queue.recorded::<()>(Err(error.clone())).ok();
                WebhookAttemptOutcome::NotRecorded
            }
        };
        if let Some(traces) = &self.traces {
            traces.delivered(&self.queue, taken, began, outcome);
        }
        WebhookAttemptEnded { id: taken.id, outcome, reason }.record(&self.queue.metrics);
    }
}

/// Returns the message about a finished job: its type, and the job as `GET` returns it, with its result. The state of the
/// delivery is left out: a message cannot contain the outcome of its own delivery.
fn message(queue: &RegionalJobQueue, taken: &TakenJob) -> WebhookMessage {
    let (job, id) = (&taken.job, ClientJobId { id: taken.id, region: &queue.region }.to_string());
    let mut data = queue.shown(taken.id, &JobView { job: Arc::new(job.clone()), position: None });
    if let Some(members) = data.as_object_mut() {
        members.remove("webhook");
    }
    let (at, result) = match &job.status {
        JobStatus::Finished { at, result, .. } => (*at, *result),
        JobStatus::Queued { .. } | JobStatus::Running { .. } => (taken.id.submitted(), None),
    };
    let result = match result {
        Some(range) if range.length > MESSAGE_RESULT_BYTES_MAX => {
            data["result_url"] = json!(format!("{JOBS}/{id}"));
            data["result_bytes"] = json!(range.length);
            None
        }
        Some(_) => Some(taken.body.clone()),
        None => None,
    };
    let (status, time) = (phase_text(JobPhase::of(job)), timestamp(at));
    let data = with_result(&data, result);
    let body = format!(r#"{{"type":"job.{status}","timestamp":"{time}","data":{data}}}"#);
    WebhookMessage { id, body: body.into() }
}

/// Sends the results of a queue to their webhooks; forever.
pub(in crate::ingress) async fn send(
    queue: Arc<RegionalJobQueue>,
    spoke: Arc<Mutex<Spoke>>,
    traces: Option<Arc<JobTraces>>,
) {
    let host = queue.host.clone();
    let messages = QueueMessages { queue: queue.clone(), spoke, traces };
    match queue.webhooks.sender(Arc::new(messages)) {
        Some(sender) => Arc::new(sender).run(host, rand::random()).await,
        None => std::future::pending().await,
    }
}
