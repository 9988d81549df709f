//! Jobs as a gateway renders them.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::time::Duration;

use crate::scan::DecodeError;

/// Status of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientJobStatus {
    /// It waits.
    Queued,
    /// A replica computes it.
    Running,
    /// It has a result.
    Succeeded,
    /// The model rejected it, or all attempts failed.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// Its deadline or its maximum time in the queue has passed.
    Expired,
}

impl ClientJobStatus {
    /// Every status.
    pub const ALL: [ClientJobStatus; 6] = [
        ClientJobStatus::Queued,
        ClientJobStatus::Running,
        ClientJobStatus::Succeeded,
        ClientJobStatus::Failed,
        ClientJobStatus::Cancelled,
        ClientJobStatus::Expired,
    ];

    /// Returns the name of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            ClientJobStatus::Queued => "queued",
            ClientJobStatus::Running => "running",
            ClientJobStatus::Succeeded => "succeeded",
            ClientJobStatus::Failed => "failed",
            ClientJobStatus::Cancelled => "cancelled",
            ClientJobStatus::Expired => "expired",
        }
    }

    /// Returns the status with this name.
    pub fn of_name(name: &str) -> Option<ClientJobStatus> {
        ClientJobStatus::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// A job, without its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientJob {
    /// Identifier, with the region of its queue.
    pub id: String,
    /// Status.
    pub status: ClientJobStatus,
    /// Operation: `embeddings`, `rerank`, `predict` or `classify`.
    pub operation: String,
    /// Name of the deployment.
    pub model: String,
    /// Priority in the queue.
    pub priority: String,
    /// Number of inputs.
    pub inputs: u64,
    /// Attempts to compute it so far.
    pub attempts: u32,
    /// Time of the submission, seconds since 1970.
    pub created_at: u64,
    /// Deadline, seconds since 1970.
    pub expires_at: Option<u64>,
    /// Time at which it finished, seconds since 1970.
    #[serde(default)]
    pub finished_at: Option<u64>,
    /// Number of the tenant's jobs before it, while it waits.
    #[serde(default)]
    pub position: Option<u64>,
    /// Estimated time until it starts, once a rate was measured.
    #[serde(default)]
    pub estimated_start_seconds: Option<f64>,
    /// Reason of the failure, or of the last failed attempt.
    #[serde(default)]
    pub error: Option<ClientJobReason>,
}

/// Reason of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientJobReason {
    /// Text for a person.
    pub message: String,
}

impl ClientJob {
    /// Returns the reason of the failure; empty if the server states none.
    pub fn reason(&self) -> String {
        self.error.as_ref().map(|error| error.message.clone()).unwrap_or_default()
    }

    /// Returns the estimated time until it starts.
    pub(super) fn estimate(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.estimated_start_seconds?).ok()
    }
}

/// Page of a list of jobs, the newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientJobPage {
    /// Jobs.
    #[serde(rename = "data")]
    pub jobs: Vec<ClientJob>,
    /// Whether there are more, after the last one.
    pub has_more: bool,
    /// Regions whose queue could not be read.
    #[serde(default)]
    pub unavailable_regions: Vec<String>,
}

/// Result of a job, as a part of its body.
#[derive(Deserialize)]
struct ResultWire<'a> {
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
}

/// Reads a job, with its result if it has one.
pub(super) fn job(response: &[u8]) -> Result<(ClientJob, Option<Vec<u8>>), DecodeError> {
    let job = serde_json::from_slice(response).map_err(|error| defect(&error, "job"))?;
    let ResultWire { result } =
        serde_json::from_slice(response).map_err(|error| defect(&error, "result of a job"))?;
    Ok((job, result.map(|result| result.get().as_bytes().to_vec())))
}

/// Reads a page of a list.
pub(super) fn page(response: &[u8]) -> Result<ClientJobPage, DecodeError> {
    serde_json::from_slice(response).map_err(|error| defect(&error, "list of jobs"))
}

fn defect(error: &serde_json::Error, value: &'static str) -> DecodeError {
    if error.is_data() { DecodeError::Shape(value) } else { DecodeError::NotJson }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_with_its_result_as_it_is() {
        let text = r#"{"id":"job_1.a.b","object":"job","status":"succeeded","operation":"embeddings","model":"m",
            "priority":"bulk","inputs":1,"attempts":1,"created_at":5,"expires_at":9,"finished_at":6,"new":1,
            "result": {"data": [1.50]}}"#;
        let (read, result) = job(text.as_bytes()).unwrap();
        assert_eq!(
            (read.id.as_str(), read.status, read.finished_at),
            ("job_1.a.b", ClientJobStatus::Succeeded, Some(6))
        );
        assert_eq!(result.unwrap(), br#"{"data": [1.50]}"#);
        assert_eq!(job(br#"{"id": "a"}"#), Err(DecodeError::Shape("job")));
        assert_eq!(job(&text.as_bytes()[..40]), Err(DecodeError::NotJson));
    }

    #[test]
    fn names_of_statuses_are_those_of_the_api() {
        for status in ClientJobStatus::ALL {
            assert_eq!(serde_json::to_value(status).unwrap(), status.as_str());
            assert_eq!(ClientJobStatus::of_name(status.as_str()), Some(status));
        }
    }
}
