//! Durable jobs of Meridian (docs/jobs.md): submission, state, results, cancellation, list.
//!
//! A submission always has an idempotency key, the caller's or a new one, so a repeated submission is one job. A result is
//! polled ([`poll`]): a request about a job is small, and one that is held open until the job ends would end with its
//! gateway. Reading is repeated for as long as the server may recover ([`results`]), so a wait survives restarts of gateways
//! and the loss of an endpoint.

mod error;
mod poll;
mod results;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use rand::Rng as _;
use replica_api::headers;
use replica_api::jobs::JOBS;
use replica_api::priority::Priority;

pub use self::error::ClientJobError;
pub use self::results::{ClientJobResults, IN_FLIGHT_DEFAULT};
pub use self::wire::{ClientJob, ClientJobPage, ClientJobStatus};
pub use replica_api::jobs::JobKind;

use super::operation::{BulkJob, OperationRoute, execute};
use super::{Client, ClientError, Preference};
use crate::scan::DecodeError;

/// Timeout of one request about a job: the largest result over a slow link. The default timeout of an attempt is an hour, in
/// which a gateway that hangs would not be noticed.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest identifier of a job at a gateway, bytes.
const ID_BYTES_MAX: usize = 128;
/// Longest idempotency key, bytes.
const KEY_BYTES_MAX: usize = 255;

/// Options of a submission.
#[derive(Clone, Debug, Default)]
pub struct SubmitOptions {
    /// Key with which a repeated submission is the same job; a new one if there is none.
    pub idempotency_key: Option<String>,
    /// Order in the queue; the server's default if there is none.
    pub priority: Option<Priority>,
    /// Time after which the result is of no use.
    pub deadline: Option<Duration>,
    /// Time within which the computation must begin.
    pub max_time_in_queue: Option<Duration>,
}

/// Result of a job that has succeeded.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientJobResult {
    /// The job.
    pub job: ClientJob,
    /// Body that the ordinary request would have returned, JSON.
    pub body: Vec<u8>,
}

/// Filter of a list of jobs, and the page of it.
#[derive(Clone, Debug, Default)]
pub struct ClientJobFilter {
    /// Only jobs with this status.
    pub status: Option<ClientJobStatus>,
    /// Only jobs of this deployment.
    pub model: Option<String>,
    /// Only jobs that were submitted at this time or later, seconds since 1970.
    pub created_after: Option<u64>,
    /// Only jobs that were submitted before this time, seconds since 1970.
    pub created_before: Option<u64>,
    /// Jobs of a page; the server's default if there is none.
    pub limit: Option<usize>,
    /// Last job of the page before.
    pub after: Option<String>,
}

impl Client {
    /// Submits the body of an ordinary request as a job, and returns the job when it is durable.
    pub async fn submit(
        &self,
        kind: JobKind,
        body: &[u8],
        options: &SubmitOptions,
        preference: &Preference,
    ) -> Result<ClientJob, ClientError> {
        let SubmitOptions { idempotency_key, priority, deadline, max_time_in_queue } = options;
        let mut problems = Vec::new();
        let chosen = || format!("client-{:032x}", rand::rng().random::<u128>());
        let key = idempotency_key.clone().unwrap_or_else(chosen);
        if !(1..=KEY_BYTES_MAX).contains(&key.len()) || !key.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        {
            problems.push(format!(
                "idempotency_key: has {} bytes; write 1 to {KEY_BYTES_MAX} printable ASCII characters",
                key.len()
            ));
        }
        let mut decided = vec![(headers::IDEMPOTENCY_KEY.to_owned(), key)];
        decided.extend(priority.map(|priority| (headers::PRIORITY.to_owned(), priority.as_str().to_owned())));
        for (field, name, time) in [
            ("deadline", headers::DEADLINE_MS, deadline),
            ("max_time_in_queue", headers::MAX_TIME_IN_QUEUE_MS, max_time_in_queue),
        ] {
            let Some(time) = time else { continue };
            if time.as_millis() == 0 {
                problems.push(format!("{field} {time:?}: write a time of at least one millisecond"));
            }
            decided.push((name.to_owned(), time.as_millis().to_string()));
        }
        if !problems.is_empty() {
            return Err(ClientError::Invalid(problems));
        }
        let mut preference = limited(preference);
        preference.headers.extend(decided);
        self.call(Method::POST, kind.path(), body, &preference, wire::job).await.map(|(job, _)| job)
    }

    /// Returns the state of a job.
    pub async fn job(&self, id: &str, preference: &Preference) -> Result<ClientJob, ClientJobError> {
        self.read(id, &limited(preference)).await.map(|(job, _)| job)
    }

    /// Waits for the result of a job, at most for `timeout`; without one as long as the job may take. A server that cannot be
    /// reached, or reports that it cannot serve, is polled again, for up to ten minutes.
    pub async fn wait(
        self: &Arc<Client>,
        id: &str,
        timeout: Option<Duration>,
        preference: &Preference,
    ) -> Result<ClientJobResult, ClientJobError> {
        let id = id.to_owned();
        let mut results = self.results(std::iter::once(id.clone()), 1, preference)?;
        let next = async { results.next().await };
        let finished = match timeout {
            None => next.await,
            Some(timeout) => tokio::time::timeout(timeout, next)
                .await
                .map_err(|_| ClientJobError::Timeout { id: id.clone(), timeout })?,
        };
        finished.map_or(Err(ClientJobError::NotFound { id }), |(_, result)| result)
    }

    /// Returns the results of jobs as they finish. At most `in_flight` requests, and as many results, are held at a time.
    pub fn results<I: Iterator<Item = String>>(
        self: &Arc<Client>,
        ids: I,
        in_flight: usize,
        preference: &Preference,
    ) -> Result<ClientJobResults<I>, ClientError> {
        ClientJobResults::new(Arc::clone(self), ids, in_flight, preference)
    }

    /// Cancels a job; one that was cancelled before is no error.
    pub async fn cancel(&self, id: &str, preference: &Preference) -> Result<ClientJob, ClientJobError> {
        let mut preference = limited(preference);
        // The job is finished: that does not change.
        preference.retries.final_statuses.push(409);
        let called = self.call(Method::DELETE, &job_path(id)?, b"", &preference, wire::job).await;
        called.map(|(job, _)| job).map_err(|error| ClientJobError::of_call(id, error))
    }

    /// Returns a page of the tenant's jobs in all regions, the newest first.
    pub async fn jobs(
        &self,
        filter: &ClientJobFilter,
        preference: &Preference,
    ) -> Result<ClientJobPage, ClientError> {
        let path = list_path(filter)?;
        self.call(Method::GET, &path, b"", &limited(preference), wire::page).await
    }

    /// Reads a job, with its result if it has one.
    async fn read(
        &self,
        id: &str,
        preference: &Preference,
    ) -> Result<(ClientJob, Option<Vec<u8>>), ClientJobError> {
        let called = self.call(Method::GET, &job_path(id)?, b"", preference, wire::job).await;
        called.map_err(|error| ClientJobError::of_call(id, error))
    }

    /// Sends one request, with the retries and the endpoints of an operation.
    async fn call<T>(
        &self,
        method: Method,
        path: &str,
        body: &[u8],
        preference: &Preference,
        read: fn(&[u8]) -> Result<T, DecodeError>,
    ) -> Result<T, ClientError> {
        let mut value = None;
        let request = 0..1;
        let job = BulkJob {
            requests: vec![request],
            body: |_| body.to_vec(),
            read: |_, _, response: &[u8]| {
                value = Some(read(response)?);
                Ok(())
            },
        };
        let route = OperationRoute { method, ..self.route(path) };
        execute(route, job, preference, &mut |_| {}).await?;
        Ok(value.expect("a complete operation has read its response"))
    }
}

/// Returns the preference of a request about a job.
fn limited(preference: &Preference) -> Preference {
    let attempt_timeout = preference.attempt_timeout.min(CALL_TIMEOUT);
    Preference { attempt_timeout, hedge_after: None, ..preference.clone() }
}

/// Returns the path of a job.
fn job_path(id: &str) -> Result<String, ClientError> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(is_valid) {
        return Ok(format!("{JOBS}/{id}"));
    }
    let shown: String = id.chars().take(64).collect();
    let problem = format!("job id {shown:?}: is not one; write that of the response to the submission");
    Err(ClientError::Invalid(vec![problem]))
}

/// Returns the path of a list with its query.
fn list_path(filter: &ClientJobFilter) -> Result<String, ClientError> {
    let ClientJobFilter { status, model, created_after, created_before, limit, after } = filter;
    let mut query = Vec::new();
    let mut problems = Vec::new();
    query.extend(status.map(|status| format!("status={}", status.as_str())));
    for (name, value) in [("model", model), ("after", after)] {
        let Some(value) = value else { continue };
        // The characters of names and identifiers, none of which a query escapes.
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/');
        if value.is_empty() || !value.bytes().all(is_valid) {
            problems.push(format!("{name} {value:?}: is not a name; write one as in a job"));
        }
        query.push(format!("{name}={value}"));
    }
    query.extend(created_after.map(|seconds| format!("created_after={seconds}")));
    query.extend(created_before.map(|seconds| format!("created_before={seconds}")));
    query.extend(limit.map(|limit| format!("limit={limit}")));
    if !problems.is_empty() {
        return Err(ClientError::Invalid(problems));
    }
    Ok(if query.is_empty() { JOBS.to_owned() } else { format!("{JOBS}?{}", query.join("&")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_segment_of_a_path() {
        assert_eq!(job_path("job_1.aws.us-east-1").unwrap(), "/v1/async/job_1.aws.us-east-1");
        assert!(job_path(&"a".repeat(ID_BYTES_MAX)).is_ok());
        for wrong in ["", "a/b", "a?b", "a b", "a\r\nb", &"a".repeat(ID_BYTES_MAX + 1)] {
            assert!(matches!(job_path(wrong), Err(ClientError::Invalid(_))), "{wrong:?}");
        }
    }

    #[test]
    fn a_filter_is_a_query() {
        assert_eq!(list_path(&ClientJobFilter::default()).unwrap(), "/v1/async");
        let filter = ClientJobFilter {
            status: Some(ClientJobStatus::Failed),
            model: Some("minilm".to_owned()),
            created_after: Some(1),
            created_before: Some(2),
            limit: Some(3),
            after: Some("job_1.aws.us-east-1".to_owned()),
        };
        let path = "/v1/async?status=failed&model=minilm&after=job_1.aws.us-east-1&created_after=1&created_before=2&limit=3";
        assert_eq!(list_path(&filter).unwrap(), path);
        let wrong = ClientJobFilter { model: Some("a&limit=1".to_owned()), ..ClientJobFilter::default() };
        assert!(matches!(list_path(&wrong), Err(ClientError::Invalid(_))));
    }
}
