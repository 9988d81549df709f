//! Transfer of requests of jobs to other regions, between a gateway and the region of their queue.
//!
//! ```text
//! POST /spoke/v1/jobs/waiting   which jobs wait for longer than their region needs; held until there are some
//! POST /spoke/v1/jobs/pull      one request, with its ticket, for a region that the gateway has selected
//! POST /spoke/v1/jobs/renew     the ticket continues
//! POST /spoke/v1/jobs/result    the response of that region, which ends the ticket
//! ```
//!
//! A message with a body of a job is a line of JSON, a line break, and the body ([`framed`]): bodies are not parsed on the way.

use super::{MessageVersion, WireError, parsed, reject_too_many};
use regions::{DeploymentName, RegionId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Maximum time for which a region holds a request for waiting jobs.
pub const WAITING_MAX: Duration = Duration::from_secs(5);
/// Maximum time for which a region holds a request for a body.
pub const PULL_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of groups of waiting jobs in a message. If there are more, each message begins at another one.
pub const GROUPS_MAX: usize = 64;
/// Maximum length of the first line of a message with a body.
pub const LINE_BYTES_MAX: usize = 16 << 10;

/// Response to `POST /spoke/v1/jobs/waiting`: what this gateway may transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingJobsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Waiting jobs by group.
    pub groups: Vec<WaitingGroupV1>,
}

/// Waiting jobs with the same allowed regions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingGroupV1 {
    /// Group.
    #[serde(flatten)]
    pub group: JobGroupV1,
    /// Number of jobs.
    pub jobs: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
}

/// Jobs that a gateway decides about together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGroupV1 {
    /// Name of the deployment.
    pub deployment: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Residency policy under which the jobs were accepted.
    pub residency: String,
}

/// `POST /spoke/v1/jobs/pull`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PullRequestV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Group of the jobs.
    #[serde(flatten)]
    pub group: JobGroupV1,
    /// Region that computes the request.
    pub target: String,
    /// Ready replicas there, by its last report.
    pub ready: u32,
    /// Tokens that are queued or being computed there.
    pub pending_tokens: u64,
    /// Measured speed there; 0 if it is unknown.
    pub tokens_per_second: f64,
}

/// First line of the response to it; the body of the request follows. Without a request the response is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulledRequestV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Number of the ticket.
    pub ticket: u64,
    /// Identifier of the request.
    pub id: String,
    /// Path at the replica.
    pub path: String,
    /// Duration of the ticket, in milliseconds. A renewal begins it again.
    pub lease_ms: u64,
    /// Header `traceparent` of the request, if the region records traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// `POST /spoke/v1/jobs/renew`. The response is 200, or 404 if the ticket has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewalV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Number of the ticket.
    pub ticket: u64,
}

/// First line of `POST /spoke/v1/jobs/result`; the body of the response follows. The response is 200, or 404 if the ticket has
/// ended: then the result is discarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReturnedV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Number of the ticket.
    pub ticket: u64,
    /// Status of the response of the region. Absent if no region has responded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Error code of the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Time after which a retry is useful, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// Reason why no region has responded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Tokens that the region has computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
}

/// Pull of a request, as read.
#[derive(Clone, Debug, PartialEq)]
pub struct PullRequest {
    /// Name of the deployment.
    pub deployment: DeploymentName,
    /// Name of the tenant.
    pub tenant: String,
    /// Residency policy, as in the message about waiting jobs.
    pub residency: String,
    /// Region that computes the request.
    pub target: RegionId,
    /// Ready replicas there.
    pub ready: u32,
    /// Tokens that are queued or being computed there.
    pub pending_tokens: u64,
    /// Measured speed there.
    pub tokens_per_second: f64,
}

impl TryFrom<PullRequestV1> for PullRequest {
    type Error = WireError;

    fn try_from(message: PullRequestV1) -> Result<PullRequest, WireError> {
        let PullRequestV1 { version: _, group, target, ready, pending_tokens, tokens_per_second } = message;
        let JobGroupV1 { deployment, tenant, residency } = group;
        if !tokens_per_second.is_finite() || tokens_per_second < 0.0 {
            return Err(WireError::new("tokens_per_second", "is not a speed; expected 0 or more"));
        }
        let (deployment, target) = (parsed("deployment", &deployment)?, parsed("target", &target)?);
        Ok(PullRequest { deployment, tenant, residency, target, ready, pending_tokens, tokens_per_second })
    }
}

impl WaitingJobsV1 {
    /// Returns the groups.
    ///
    /// # Errors
    ///
    /// If there are more than [`GROUPS_MAX`].
    pub fn into_groups(self) -> Result<Vec<WaitingGroupV1>, WireError> {
        let WaitingJobsV1 { version: _, groups } = self;
        reject_too_many("groups", groups.len(), GROUPS_MAX)?;
        Ok(groups)
    }
}

/// Returns the first line of a message and, after it, the body.
pub fn framed(line: &impl Serialize, body: &[u8]) -> Vec<u8> {
    let mut message = serde_json::to_vec(line).expect("a message serialises to JSON");
    message.reserve_exact(1 + body.len());
    message.push(b'\n');
    message.extend_from_slice(body);
    message
}

/// Reads the first line of a message. Returns it with the position of the body.
///
/// # Errors
///
/// If there is no line, if it is too long, or if it is not such a message.
pub fn first_line<T: DeserializeOwned>(message: &[u8]) -> Result<(T, usize), WireError> {
    let searched = &message[..message.len().min(LINE_BYTES_MAX + 1)];
    let end = searched.iter().position(|byte| *byte == b'\n');
    let end =
        end.ok_or_else(|| WireError::new("line", format!("no line of {LINE_BYTES_MAX} bytes at most")))?;
    let line = serde_json::from_slice(&message[..end]).map_err(|error| WireError::new("line", error))?;
    Ok((line, end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VERSION;

    fn pull() -> PullRequestV1 {
        let group = JobGroupV1 {
            deployment: "minilm".to_owned(),
            tenant: "a".to_owned(),
            residency: "eu".to_owned(),
        };
        let target = "aws/eu-central-1".to_owned();
        PullRequestV1 {
            version: VERSION,
            group,
            target,
            ready: 2,
            pending_tokens: 10,
            tokens_per_second: 1000.0,
        }
    }

    #[test]
    fn a_message_with_a_body_is_read_back() {
        let line = ReturnedV1 {
            version: VERSION,
            ticket: u64::MAX,
            status: Some(200),
            error: None,
            retry_after_ms: None,
            reason: None,
            tokens: Some(7),
        };
        for body in [&b""[..], b"{\"data\":\n[]}\n", &[0xff, b'\n']] {
            let message = framed(&line, body);
            let (read, at): (ReturnedV1, usize) = first_line(&message).unwrap();
            assert_eq!((read, &message[at..]), (line.clone(), body));
        }
    }

    #[test]
    fn the_longest_line_is_read_and_a_longer_one_is_not() {
        let mut line = serde_json::to_vec(&RenewalV1 { version: VERSION, ticket: 1 }).unwrap();
        line.resize(LINE_BYTES_MAX, b' ');
        line.push(b'\n');
        assert!(first_line::<RenewalV1>(&line).is_ok());
        line.insert(0, b' ');
        assert!(first_line::<RenewalV1>(&line).is_err());
        assert!(first_line::<RenewalV1>(b"{\"version\": 1, \"ticket\": 1}").is_err(), "no line break");
        assert!(first_line::<RenewalV1>(b"{\"version\": 2, \"ticket\": 1}\n").is_err(), "another version");
    }

    #[test]
    fn a_pull_is_read_and_an_invalid_one_is_rejected_with_its_field() {
        let text = serde_json::to_string(&pull()).unwrap();
        let read: PullRequestV1 = serde_json::from_str(&text).unwrap();
        assert_eq!(PullRequest::try_from(read).unwrap().target.as_str(), "aws/eu-central-1");
        let rejected = |change: fn(&mut PullRequestV1)| {
            let mut message = pull();
            change(&mut message);
            PullRequest::try_from(message).unwrap_err().field
        };
        assert_eq!(rejected(|it| it.target = "x".to_owned()), "target");
        assert_eq!(rejected(|it| it.group.deployment = "/".to_owned()), "deployment");
        assert_eq!(rejected(|it| it.tokens_per_second = -1.0), "tokens_per_second");
        assert_eq!(rejected(|it| it.tokens_per_second = f64::NAN), "tokens_per_second");
    }

    #[test]
    fn the_maximum_number_of_groups_is_accepted_and_one_more_is_not() {
        let groups = |count| WaitingJobsV1 {
            version: VERSION,
            groups: vec![WaitingGroupV1 { group: pull().group, jobs: 1, bytes: 1 }; count],
        };
        assert_eq!(groups(GROUPS_MAX).into_groups().unwrap().len(), GROUPS_MAX);
        assert!(groups(GROUPS_MAX + 1).into_groups().is_err());
    }
}
