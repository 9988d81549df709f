//! A job: its identifier, its request, and its status.

use regions::Priority;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Time in milliseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// Later than every other time: no deadline.
    pub const NEVER: UnixMillis = UnixMillis(u64::MAX);

    /// Returns the time this much later; [`UnixMillis::NEVER`] on overflow.
    pub fn after(self, duration: Duration) -> UnixMillis {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        UnixMillis(self.0.saturating_add(millis))
    }

    /// Returns the time since an earlier one; zero if that is later.
    pub fn since(self, earlier: UnixMillis) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// Identifier of a job: 48 bits of the time of its submission in milliseconds, then 80 random bits, so identifiers sort
/// by time and cannot be guessed. Text: `job_` and 26 characters of Crockford's base 32 in lower case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DurableJobId(u128);

const ID_PREFIX: &str = "job_";
const ID_DIGITS: usize = 26;
const ID_ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const RANDOM_BITS: u32 = 80;

impl DurableJobId {
    #[cfg(test)]
    pub(crate) const FIRST: DurableJobId = DurableJobId(0);

    /// Returns the identifier of a job submitted at this time; only the low 80 bits of `random` are used.
    pub fn new(submitted: UnixMillis, random: u128) -> DurableJobId {
        let time = u128::from(submitted.0 & ((1 << 48) - 1));
        DurableJobId(time << RANDOM_BITS | random & ((1 << RANDOM_BITS) - 1))
    }

    /// Returns the identifier before those of all jobs that were submitted at this time or later.
    pub fn first_at(submitted: UnixMillis) -> DurableJobId {
        DurableJobId(u128::from(submitted.0.min((1 << 48) - 1)) << RANDOM_BITS)
    }

    /// Returns the identifier as a number.
    pub fn get(self) -> u128 {
        self.0
    }

    /// Returns the time of the submission.
    pub fn submitted(self) -> UnixMillis {
        UnixMillis((self.0 >> RANDOM_BITS) as u64)
    }
}

impl fmt::Display for DurableJobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ID_PREFIX)?;
        (0..ID_DIGITS).rev().try_for_each(|digit| {
            let value = (self.0 >> (5 * digit)) & 31;
            fmt::Write::write_char(f, char::from(ID_ALPHABET[value as usize]))
        })
    }
}

impl fmt::Debug for DurableJobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error for a text that does not have the form of a job identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a job id: expected `job_` and 26 characters, as in the response to the submission")]
pub struct InvalidJobId(String);

impl FromStr for DurableJobId {
    type Err = InvalidJobId;

    fn from_str(text: &str) -> Result<DurableJobId, InvalidJobId> {
        let invalid = || InvalidJobId(text.chars().take(64).collect());
        let digits = text.strip_prefix(ID_PREFIX).ok_or_else(invalid)?;
        if digits.len() != ID_DIGITS {
            return Err(invalid());
        }
        let mut value = 0u128;
        for digit in digits.bytes() {
            let digit = ID_ALPHABET.iter().position(|known| *known == digit).ok_or_else(invalid)?;
            // 26 digits have 130 bits, so the first is 7 at most.
            value = value.checked_mul(32).ok_or_else(invalid)? | digit as u128;
        }
        Ok(DurableJobId(value))
    }
}

impl Serialize for DurableJobId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DurableJobId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<DurableJobId, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Operation that a job computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobOperation {
    /// Embeddings of texts.
    Embeddings,
    /// Scores of documents for a query.
    Rerank,
    /// TEI's classification.
    Predict,
    /// vLLM's classification.
    Classify,
}

/// Part of a stored object, which contains the payloads or results of many jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoredRange {
    /// Number of the object in the queue's object store.
    pub object: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// A tenant's idempotency key and the request that used it first. Both are SHA-256 hashes, so that the log contains neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// Hash of the key.
    pub key: [u8; 32],
    /// Hash of the method, the path and the body.
    pub request: [u8; 32],
}

/// Request of a job. It does not change after submission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the tenant who submitted it.
    pub tenant: String,
    /// Name of the deployment.
    pub deployment: String,
    /// Operation.
    pub operation: JobOperation,
    /// Priority in the queue. Replicas compute jobs as bulk requests in either case.
    #[serde(with = "priority_text")]
    pub priority: Priority,
    /// Number of inputs; the unit of the work of a queue.
    pub inputs: u64,
    /// Body of the request.
    pub payload: StoredRange,
    /// Time after which the client has no use for the result: the job expires.
    pub deadline: Option<UnixMillis>,
    /// Time until which the computation must have begun: otherwise the job expires (`max_time_in_queue`).
    pub start_by: Option<UnixMillis>,
    /// Idempotency key of the request.
    pub idempotency: Option<IdempotencyKey>,
    /// URL that receives the result.
    pub webhook: Option<String>,
    /// Chunk of a batch that the job computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<BatchChunkRef>,
    /// Residency policy under which it was accepted, as text; absent if an earlier version has accepted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<String>,
    /// Span of the request that submitted it, as in the header `traceparent`, if the spoke records traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

/// Chunk of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchChunkRef {
    /// Number of the batch.
    pub batch: DurableJobId,
    /// Index of the chunk.
    pub chunk: u32,
    /// Estimated tokens of its inputs, for the limit of the tenant; 0 if an earlier version has created the batch.
    #[serde(default)]
    pub tokens: u64,
}

mod priority_text {
    use super::Priority;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::borrow::Cow;

    pub(super) fn serialize<S: Serializer>(priority: &Priority, serializer: S) -> Result<S::Ok, S::Error> {
        priority.as_str().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Priority, D::Error> {
        Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Exclusive right to compute or deliver a job until a time. It is identified by its token: a record with the token of
/// an earlier lease of the job has no effect, so a slow process cannot change a job that another one has taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobLease {
    /// Sequence number of the entry that granted the lease.
    pub token: u64,
    /// Number of the process.
    pub worker: u64,
    /// End. Later, another process can take the job.
    pub until: UnixMillis,
}

/// Outcome of a finished job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobOutcome {
    /// The result was computed.
    Succeeded,
    /// The request was rejected, or all attempts failed; with the reason for the client.
    Failed {
        /// Reason, without any input.
        reason: String,
    },
    /// The client cancelled it.
    Cancelled,
    /// The deadline or the maximum time in the queue has passed.
    Expired,
}

/// Progress of a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryProgress {
    /// Failed attempts so far.
    pub attempts: u32,
    /// Beginning of the delivery: the end of the job, or the last request to send its result again.
    pub since: UnixMillis,
    /// Reason of the last failed attempt.
    pub last_error: Option<String>,
}

impl DeliveryProgress {
    /// Returns the progress of a delivery that begins at this time.
    pub(crate) fn begun(since: UnixMillis) -> DeliveryProgress {
        DeliveryProgress { attempts: 0, since, last_error: None }
    }

    /// Counts a failed attempt.
    pub(crate) fn failed(&self, reason: &str) -> DeliveryProgress {
        let (attempts, last_error) = (self.attempts + 1, Some(reason.to_owned()));
        DeliveryProgress { attempts, since: self.since, last_error }
    }
}

/// Delivery of the result to the webhook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobDelivery {
    /// The job has no webhook, or nothing to deliver because it was cancelled.
    None,
    /// The next attempt is due at this time.
    Pending {
        /// Progress so far.
        progress: DeliveryProgress,
        /// Time of the next attempt.
        not_before: UnixMillis,
    },
    /// A process sends it.
    Sending {
        /// Progress so far.
        progress: DeliveryProgress,
        /// Lease of that process.
        lease: JobLease,
    },
    /// The target has accepted it.
    Delivered {
        /// Time.
        at: UnixMillis,
        /// Attempts, with the successful one.
        attempts: u32,
    },
    /// No attempt has succeeded, and no further ones are made. The result can be fetched, and sent again on request.
    Abandoned {
        /// Reason, such as the last error of the target.
        reason: String,
        /// Attempts.
        attempts: u32,
    },
    /// The target has responded that it wants no further attempts. The result can be fetched, and sent again on request.
    Stopped {
        /// Reason.
        reason: String,
        /// Attempts.
        attempts: u32,
    },
}

/// Status of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStatus {
    /// Waits for a worker.
    Queued {
        /// Earliest start, after a failed attempt.
        not_before: UnixMillis,
    },
    /// A worker computes it.
    Running {
        /// Lease of the worker.
        lease: JobLease,
    },
    /// Done.
    Finished {
        /// Outcome.
        outcome: JobOutcome,
        /// Stored result: the body of the response, also of a failed job that has one.
        result: Option<StoredRange>,
        /// Time.
        at: UnixMillis,
        /// Delivery of the result.
        delivery: JobDelivery,
    },
}

/// A job of the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DurableJob {
    /// Request.
    pub spec: JobSpec,
    /// Sequence number of the entry that submitted it.
    pub sequence: u64,
    /// Number of leases for its computation that ended without a result, except those that were released as not the
    /// job's fault. A job that ends its worker each time reaches the limit.
    pub attempts: u32,
    /// Reason of the last failed attempt.
    pub last_error: Option<String>,
    /// Status.
    pub status: JobStatus,
}

impl DurableJob {
    /// Whether the job is done.
    pub fn is_finished(&self) -> bool {
        matches!(self.status, JobStatus::Finished { .. })
    }

    /// Returns the lease for its computation or its delivery.
    pub fn lease(&self) -> Option<JobLease> {
        match &self.status {
            JobStatus::Running { lease }
            | JobStatus::Finished { delivery: JobDelivery::Sending { lease, .. }, .. } => Some(*lease),
            _ => None,
        }
    }

    /// Returns the time at which it expires unless it is finished by then.
    pub fn expires(&self) -> UnixMillis {
        let deadline = self.spec.deadline.unwrap_or(UnixMillis::NEVER);
        match self.status {
            JobStatus::Queued { .. } => deadline.min(self.spec.start_by.unwrap_or(UnixMillis::NEVER)),
            JobStatus::Running { .. } => deadline,
            JobStatus::Finished { .. } => UnixMillis::NEVER,
        }
    }
}

/// Status of a job, in the words of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobPhase {
    /// Waits.
    Queued,
    /// Is computed.
    Running,
    /// Has a result.
    Succeeded,
    /// Has failed.
    Failed,
    /// Was cancelled.
    Cancelled,
    /// Has expired.
    Expired,
}

impl JobPhase {
    /// All of them.
    pub const ALL: [JobPhase; 6] = [
        JobPhase::Queued,
        JobPhase::Running,
        JobPhase::Succeeded,
        JobPhase::Failed,
        JobPhase::Cancelled,
        JobPhase::Expired,
    ];

    /// Returns the status of a job.
    pub fn of(job: &DurableJob) -> JobPhase {
        match &job.status {
            JobStatus::Queued { .. } => JobPhase::Queued,
            JobStatus::Running { .. } => JobPhase::Running,
            JobStatus::Finished { outcome: JobOutcome::Succeeded, .. } => JobPhase::Succeeded,
            JobStatus::Finished { outcome: JobOutcome::Failed { .. }, .. } => JobPhase::Failed,
            JobStatus::Finished { outcome: JobOutcome::Cancelled, .. } => JobPhase::Cancelled,
            JobStatus::Finished { outcome: JobOutcome::Expired, .. } => JobPhase::Expired,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ids_keep_their_text_and_their_order(times: [u32; 2], random: [u128; 2]) {
            let ids: Vec<_> = (0..2).map(|i| DurableJobId::new(UnixMillis(times[i].into()), random[i])).collect();
            for id in &ids {
                prop_assert_eq!(id.to_string().parse(), Ok(*id));
                prop_assert_eq!(id.to_string().len(), 30);
            }
            prop_assert_eq!(ids[0].submitted(), UnixMillis(times[0].into()));
            prop_assert_eq!(ids[0].cmp(&ids[1]), ids[0].to_string().cmp(&ids[1].to_string()));
        }
    }

    #[test]
    fn other_texts_are_no_ids() {
        let good = DurableJobId::new(UnixMillis(1), 7).to_string();
        assert!(good.parse::<DurableJobId>().is_ok());
        let overflow = format!("job_8{}", "0".repeat(25));
        for text in
            ["", "job_", &good[4..], &good[..29], &good.to_uppercase(), &overflow, "job_üüüüüüüüüüüüü"]
        {
            assert!(text.parse::<DurableJobId>().is_err(), "{text}");
        }
    }
}
