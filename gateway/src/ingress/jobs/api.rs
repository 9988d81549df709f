//! API of jobs, for gateways: submission, state with result, cancellation, and list.
//!
//! The tenant is the one that the gateway has authenticated. Only gateways reach this API: on a listener with mutual TLS
//! the peer is known by its certificate.

use super::names::{kind, operation, phase_text};
use super::page_query::PageQuery;
use super::readers::{RequestingGateway, accepted_policy};
use super::webhooks::{self, SubmittedBody};
use super::{ClientJobId, JobTraces, RegionalJobQueue, number_of, reserve, seconds};
use crate::body_memory::Reservation;
use crate::idempotency_key;
use crate::ingress::arrival::Arrival;
use crate::ingress::refusals::no_receipt;
use crate::ingress::request::{deployment, milliseconds, text};
use crate::ingress::residency::ResidencyGuard;
use crate::job_lists::{self, LIST_BYTES_MAX};
use crate::listener::AfterResponse;
use crate::receipts::CommitFailed;
use crate::request_body::BodyReader;
use crate::respond::{self, ForwardError, Rejection};
use bytes::Bytes;
use gateway_core::memory::BodyOwner;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use jobs::log::JobLogError;
use jobs::objects::ObjectError;
use jobs::queue_host::{JobView, QueueError, now};
use jobs_core::decide::{JobFilter, SubmissionError};
use jobs_core::job::{
    DurableJob, DurableJobId, IdempotencyKey, JobOutcome, JobPhase, JobSpec, JobStatus, StoredRange,
    UnixMillis,
};
use jobs_core::queue::Cancellation;
use pingora::protocols::http::ServerSession;
use regions::id::{DeploymentName, RegionId};
use regions::residency::ResidencyPolicy;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::jobs::{JOBS, JobKind, WEBHOOK};
use replica_api::priority::Priority;
use ring::digest::{Context, SHA256};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Jobs of a page of the list, by default and at most.
const PAGE_DEFAULT: usize = 20;
const PAGE_MAX: usize = 100;
/// Time after which a client may retry while the queue cannot be read or written.
const UNAVAILABLE_RETRY: Duration = Duration::from_secs(5);
/// The same at a limit of the tenant, and while a disk is full, which take an operator or the end of a job.
const LIMIT_RETRY: Duration = Duration::from_secs(30);

/// Request about jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingress) enum JobQuery<'a> {
    /// State of a job.
    Read(&'a str),
    /// Cancellation of a job.
    Cancel(&'a str),
    /// Request to send the result of a job to its webhook again.
    Resend(&'a str),
    /// List of jobs, with a query string.
    List(&'a str),
}

impl<'a> JobQuery<'a> {
    /// Returns the request of a method and a path; none if it is another path.
    pub(in crate::ingress) fn of(method: &str, path: &'a str, query: &'a str) -> Option<JobQuery<'a>> {
        let below = path.strip_prefix(JOBS).filter(|_| JobKind::at(path).is_none())?;
        match (method, below.strip_prefix('/')) {
            ("GET", None) if below.is_empty() => Some(JobQuery::List(query)),
            ("GET", Some(id)) => Some(JobQuery::Read(id)),
            ("DELETE", Some(id)) => Some(JobQuery::Cancel(id)),
            ("POST", Some(path)) => path.strip_suffix(WEBHOOK).map(JobQuery::Resend),
            _ => None,
        }
    }
}

/// API of jobs. Without a queue it rejects each request.
#[derive(Clone)]
pub(in crate::ingress) struct JobApi {
    pub(in crate::ingress) region: RegionId,
    pub(in crate::ingress) residency: Arc<ResidencyGuard>,
    pub(in crate::ingress) body_reader: Arc<BodyReader>,
    /// Queue of the region, if it has one.
    pub(in crate::ingress) queue: Option<Arc<RegionalJobQueue>>,
    /// Traces of its jobs, if traces are configured.
    pub(in crate::ingress) traces: Option<Arc<JobTraces>>,
}

impl JobApi {
    /// Serves a request about jobs.
    pub(in crate::ingress) async fn query(
        &self,
        session: &mut ServerSession,
        query: JobQuery<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let queue = self.queue.as_deref().ok_or_else(|| self.no_queue())?;
        let tenant = tenant(session)?;
        let gateway = RequestingGateway::of(session, &self.residency.catalogue)?;
        // Held until the response was written.
        let (result_memory, _list_memory);
        let mut status = 200;
        let body = match query {
            JobQuery::Read(id) => {
                let id = queue.parse(id)?;
                let view = queue.recorded(queue.host.latest_job(&tenant, id).await).map_err(rejected)?;
                if has_content(&view.job) {
                    self.check_job_content(queue, &gateway, id, &view.job)?;
                }
                result_memory = queue.reserve_result(&view.job)?;
                let result = match &result_memory {
                    Some(_) => queue.recorded(queue.host.result(&tenant, id).await).map_err(rejected)?,
                    None => None,
                };
                let shown = self.shown_through(queue, &gateway, id, &view);
                // Up to 256 MiB are copied.
                let bytes = result.as_ref().map_or(0, Bytes::len);
                self.body_reader.cpu.run_on(None, bytes, move || with_result(&shown, result)).await
            }
            JobQuery::Cancel(id) => {
                let id = queue.parse(id)?;
                match queue.recorded(queue.host.cancel(&tenant, id).await).map_err(rejected)? {
                    Cancellation::Confirmed | Cancellation::AlreadyCancelled => {}
                    Cancellation::AlreadyFinished => return Err(finished().into()),
                    Cancellation::BeingDelivered => return Err(being_delivered().into()),
                    Cancellation::Unknown => return Err(rejected(QueueError::Unknown).into()),
                }
                let view = queue.host.job(&tenant, id).map_err(rejected)?;
                self.shown_through(queue, &gateway, id, &view).to_string()
            }
            JobQuery::Resend(id) => {
                let id = queue.parse(id)?;
                webhooks::check_resend(&queue.host.job(&tenant, id).map_err(rejected)?.job)?;
                queue.webhooks.check_secret(&self.region, &tenant)?;
                queue.recorded(queue.host.redeliver(&tenant, id).await).map_err(rejected)?;
                let view = queue.host.job(&tenant, id).map_err(rejected)?;
                // It may have been cancelled meanwhile.
                webhooks::check_resend(&view.job)?;
                status = 202;
                self.shown_through(queue, &gateway, id, &view).to_string()
            }
            JobQuery::List(query) => {
                let (filter, limit) = queue.filter(query, tenant.clone())?;
                let listed = queue.recorded(queue.host.latest_list(&filter, limit + 1).await);
                let jobs = listed.map_err(rejected)?.into_iter();
                let jobs = jobs.map(|(id, job)| {
                    let permits = self.permits_errors(queue, &gateway, id, &job);
                    (id, JobView { job, position: None }, permits)
                });
                let jobs: Vec<_> = jobs.collect();
                let render = move |queue: &RegionalJobQueue| {
                    let shown = |(id, view, permits): &(DurableJobId, JobView, bool)| {
                        queue.shown_with_error(*id, view, *permits)
                    };
                    job_lists::page(jobs.iter().map(shown), limit)
                };
                let page;
                (page, _list_memory) = self.page(&tenant, render).await?;
                page
            }
        };
        Ok(json_response(session, status, body, &[(headers::REGION, self.region.as_str())]).await)
    }

    /// Accepts a job, and responds when it is durable.
    pub(in crate::ingress) async fn submit(
        &self,
        session: &mut ServerSession,
        kind: JobKind,
        arrival: &mut Arrival<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        self.residency.allowed_here(session)?;
        let queue = self.queue.as_deref().ok_or_else(|| self.no_queue())?;
        let tenant = tenant(session)?;
        let deployment = deployment(session)?;
        self.residency.check_deployment_policy(&deployment)?;
        if arrival.is_locked() {
            self.residency.check_policy_age()?;
        }
        if !arrival.reserve_receipt() {
            return Err(no_receipt(&self.region).into());
        }
        let deadline = milliseconds(session, headers::DEADLINE_MS)?;
        let start_by = milliseconds(session, headers::MAX_TIME_IN_QUEUE_MS)?;
        let key = idempotency_key(session)?;
        let priority = text(session, headers::PRIORITY)?;
        let priority = priority.and_then(|priority| priority.parse().ok()).unwrap_or(Priority::Bulk);
        let is_preferred = text(session, headers::PREFER)?.is_some();
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        let parsed = body.bytes.clone();
        let parsed = self.body_reader.cpu.run(None, move || SubmittedBody::parse(kind, parsed)).await;
        let SubmittedBody { inputs, payload, webhook } = parsed.map_err(|refusal| Rejection {
            param: refusal.param,
            ..Rejection::new(refusal.code, refusal.message)
        })?;
        let webhook = match webhooks::named(text(session, headers::WEBHOOK_URL)?, webhook)? {
            Some(url) => Some(queue.webhooks.accept(&self.region, &tenant, &url).await?),
            None => None,
        };
        let residency = accepted_policy(session)?;
        let idempotency = match key {
            Some(key) => {
                let (hashed, deployment, webhook) = (payload.clone(), deployment.clone(), webhook.clone());
                let policy = residency.clone();
                let hash =
                    move || request_digest(kind, &deployment, &hashed, webhook.as_deref(), policy.as_deref());
                let request = self.body_reader.cpu.run_on(None, payload.len(), hash).await;
                Some(IdempotencyKey { key: digest(&[key.as_bytes()]), request })
            }
            None => None,
        };
        let at = now();
        let age = queue.host.config().limits.age;
        let spec = JobSpec {
            tenant: tenant.clone(),
            deployment: deployment.to_string(),
            operation: operation(kind),
            priority,
            inputs,
            payload: StoredRange { object: 0, offset: 0, length: 0 },
            // A job without a deadline would stay for ever if its deployment is removed.
            deadline: Some(at.after(deadline.unwrap_or(age))),
            start_by: start_by.map(|limit| at.after(limit)),
            idempotency,
            webhook,
            chunk: None,
            residency,
            trace: arrival.stages.trace().map(|request| request.context().traceparent()),
        };
        arrival.commit().await.map_err(|CommitFailed| no_receipt(&self.region))?;
        let submitted = queue.recorded(queue.host.submit(spec, payload).await);
        let id = submitted.map_err(|error| queue.rejected(error))?;
        let view = queue.host.job(&tenant, id).map_err(rejected)?;
        if let Some(traces) = &self.traces {
            traces.accepted(arrival, queue, (id, &view.job));
        }
        let location = format!("{JOBS}/{}", ClientJobId { id, region: &queue.region });
        let mut extra = vec![(headers::REGION, self.region.as_str()), ("location", location.as_str())];
        if is_preferred {
            extra.push((headers::PREFERENCE_APPLIED, "respond-async"));
        }
        Ok(json_response(session, 202, queue.shown(id, &view).to_string(), &extra).await)
    }

    /// Renders a page of a list, which may have thousands of rows, on a thread for CPU work, one at a time for each tenant. Returns it
    /// with its memory. The rows are read from the queue before, and what the gateway may return is decided before: these
    /// threads have a low priority, and must not hold a lock that requests take.
    pub(super) async fn page(
        &self,
        tenant: &str,
        render: impl FnOnce(&RegionalJobQueue) -> String + Send + 'static,
    ) -> Result<(String, Reservation), Rejection> {
        let queue = self.queue.clone().ok_or_else(|| self.no_queue())?;
        let memory = reserve(&queue.results, tenant, LIST_BYTES_MAX as u64)?;
        let page = self.body_reader.cpu.run(Some(number_of(tenant)), move || render(&queue)).await;
        Ok((page, memory))
    }

    /// Rejects a request for the content of a job that may not be returned through its gateway.
    fn check_job_content(
        &self,
        queue: &RegionalJobQueue,
        gateway: &RequestingGateway,
        id: DurableJobId,
        job: &DurableJob,
    ) -> Result<(), Rejection> {
        let id = ClientJobId { id, region: &queue.region }.to_string();
        let deployment = [job.spec.deployment.as_str()];
        self.residency.check_content_policy(gateway, &id, job.spec.residency.as_deref(), deployment)
    }

    /// Renders a job without its result, and without an error that its gateway may not return.
    fn shown_through(
        &self,
        queue: &RegionalJobQueue,
        gateway: &RequestingGateway,
        id: DurableJobId,
        view: &JobView,
    ) -> Value {
        queue.shown_with_error(id, view, self.permits_errors(queue, gateway, id, &view.job))
    }

    /// Returns whether the error of a job may be returned through its gateway.
    fn permits_errors(
        &self,
        queue: &RegionalJobQueue,
        gateway: &RequestingGateway,
        id: DurableJobId,
        job: &DurableJob,
    ) -> bool {
        !quotes_input(job) || self.check_job_content(queue, gateway, id, job).is_ok()
    }

    pub(super) fn no_queue(&self) -> Rejection {
        let message = format!("Region {} has no queue of jobs ([jobs] of its spoke).", self.region);
        Rejection::new(ErrorCode::NoJobQueue, message)
    }
}

impl RegionalJobQueue {
    fn parse(&self, id: &str) -> Result<DurableJobId, Rejection> {
        ClientJobId::of_region(id, &self.region).map(|id| id.id).ok_or_else(|| rejected(QueueError::Unknown))
    }

    /// Renders a job without its result, with or without its error.
    fn shown_with_error(&self, id: DurableJobId, view: &JobView, permits_error: bool) -> Value {
        let mut shown = self.shown(id, view);
        if !permits_error && let Some(members) = shown.as_object_mut() {
            members.remove("error");
        }
        shown
    }

    /// Renders a job without its result.
    pub(super) fn shown(&self, id: DurableJobId, view: &JobView) -> Value {
        let JobView { job, position } = view;
        let mut shown = json!({
            "id": ClientJobId { id, region: &self.region }.to_string(),
            "object": "job",
            "status": phase_text(JobPhase::of(job)),
            "operation": kind(job.spec.operation).path().trim_start_matches("/v1/async/"),
            "model": job.spec.deployment,
            "priority": job.spec.priority.as_str(),
            "inputs": job.spec.inputs,
            "attempts": job.attempts,
            "created_at": seconds(id.submitted()),
            "expires_at": job.spec.deadline.map(seconds),
        });
        if let Some(position) = position {
            shown["position"] = json!(position.jobs);
            let estimate = self.start_estimate(&job.spec.deployment, position);
            shown["estimated_start_seconds"] = json!(estimate.map(|estimate| estimate.as_secs_f64()));
        }
        if let JobStatus::Finished { at, .. } = &job.status {
            shown["finished_at"] = json!(seconds(*at));
        }
        if let Some(message) = problem(job) {
            shown["error"] = json!({"message": message});
        }
        if let Some(webhook) = webhooks::shown(job) {
            shown["webhook"] = webhook;
        }
        shown
    }

    /// Reads the query string of a list.
    fn filter(&self, query: &str, tenant: String) -> Result<(JobFilter, usize), Rejection> {
        const OTHERS: [&str; 4] = ["status", "model", "created_after", "created_before"];
        let page = PageQuery::read(query, (PAGE_DEFAULT, PAGE_MAX), &OTHERS)?;
        let seconds = |name: &'static str| {
            let read = |value: &str| value.parse::<u64>().ok().map(|seconds| seconds.saturating_mul(1000));
            page.parsed(name, "seconds since 1970", |value| read(value).map(UnixMillis))
        };
        let phase = |value: &str| JobPhase::ALL.into_iter().find(|phase| phase_text(*phase) == value);
        let phases = format!("one of {}", JobPhase::ALL.map(phase_text).join(", "));
        let deployment = page.parsed("model", "the name of a deployment", |value| {
            value.parse::<DeploymentName>().ok().map(|name| name.to_string())
        })?;
        let until = seconds("created_before")?.map(DurableJobId::first_at);
        let after = page.after_id("the id of the last job of the page before", |id| id.parse().ok())?;
        let filter = JobFilter {
            tenant: Some(tenant),
            status: page.parsed("status", &phases, phase)?,
            deployment,
            since: seconds("created_after")?,
            before: after.into_iter().chain(until).min(),
        };
        Ok((filter, page.limit))
    }

    /// Returns the rejection of a submission.
    fn rejected(&self, error: QueueError) -> Rejection {
        match error {
            QueueError::OtherRequest(id) => {
                let id = ClientJobId { id, region: &self.region };
                key_conflict(&format!("the job {id}"))
            }
            other => rejected(other),
        }
    }
}

/// Returns the tenant that the gateway has authenticated.
pub(super) fn tenant(session: &ServerSession) -> Result<String, Rejection> {
    let tenant = text(session, headers::TENANT)?.filter(|tenant| !tenant.is_empty());
    tenant.map(str::to_owned).ok_or_else(|| {
        let message = format!("Jobs belong to a tenant, which the gateway names in {}.", headers::TENANT);
        Rejection::new(ErrorCode::InvalidHeader, message).of(headers::TENANT)
    })
}

/// Returns the rejection for an error of the queue.
pub(super) fn rejected(error: QueueError) -> Rejection {
    match error {
        QueueError::Rejected(error) => limited(&error),
        QueueError::OtherRequest(_) | QueueError::Unknown => Rejection::new(
            ErrorCode::JobNotFound,
            "There is no such job, or its retention time has passed; the list is GET /v1/async.",
        ),
        QueueError::Log(JobLogError::Full) | QueueError::Objects(ObjectError::Full) => {
            let message =
                "The queue of jobs has no space left; accepted jobs are kept. The operator must free space.";
            Rejection::new(ErrorCode::StorageFull, message).after(LIMIT_RETRY)
        }
        QueueError::Log(JobLogError::Unavailable(_)) | QueueError::Objects(_) | QueueError::Closed => {
            let message = "The queue of jobs cannot be read or written at the moment; accepted jobs are kept. Repeat the \
                           request with the same idempotency key, since the job may have been stored.";
            Rejection::new(ErrorCode::JobsUnavailable, message).after(UNAVAILABLE_RETRY)
        }
    }
}

fn limited(error: &SubmissionError) -> Rejection {
    let message = format!("The job is rejected: {error}.");
    match error {
        SubmissionError::StoredBytes { .. }
        | SubmissionError::Files { .. }
        | SubmissionError::Batches { .. }
        | SubmissionError::FileParts { .. } => {
            Rejection::new(ErrorCode::TooManyFiles, format!("The request is rejected: {error}."))
                .after(LIMIT_RETRY)
        }
        SubmissionError::BatchTokens { .. } | SubmissionError::BatchSize { .. } => {
            let message = format!("The batch is rejected: {error}.");
            Rejection::new(ErrorCode::TooManyJobs, message).after(LIMIT_RETRY)
        }
        SubmissionError::Jobs { .. } | SubmissionError::Bytes { .. } => {
            Rejection::new(ErrorCode::TooManyJobs, message).after(LIMIT_RETRY)
        }
        SubmissionError::Past { field } | SubmissionError::Late { field, .. } => {
            let header =
                if *field == "deadline" { headers::DEADLINE_MS } else { headers::MAX_TIME_IN_QUEUE_MS };
            Rejection::new(ErrorCode::InvalidHeader, message).of(header)
        }
    }
}

fn finished() -> Rejection {
    Rejection::new(ErrorCode::JobFinished, "The job is finished, so it cannot be cancelled.")
}

fn being_delivered() -> Rejection {
    Rejection::new(
        ErrorCode::JobFinished,
        "The result of the job is being sent to its webhook and may have arrived; ask again in a minute.",
    )
}

/// Returns the rejection of a request whose idempotency key belongs to another one.
pub(super) fn key_conflict(owner: &str) -> Rejection {
    let message =
        format!("The idempotency key was used for another request, that of {owner}; use another key.");
    Rejection::new(ErrorCode::IdempotencyConflict, message).of(headers::IDEMPOTENCY_KEY)
}

/// Returns the idempotency key of a request.
pub(super) fn idempotency_key(session: &ServerSession) -> Result<Option<String>, Rejection> {
    let Some(key) = text(session, headers::IDEMPOTENCY_KEY)? else { return Ok(None) };
    idempotency_key::check(key)?;
    Ok(Some(key.to_owned()))
}

/// Returns the reason of a failure, or of the last failed attempt.
fn problem(job: &DurableJob) -> Option<&str> {
    match &job.status {
        JobStatus::Finished { outcome: JobOutcome::Failed { reason }, .. } => Some(reason),
        JobStatus::Finished { outcome: JobOutcome::Expired, .. } => {
            Some("the deadline or the maximum time in the queue has passed")
        }
        JobStatus::Finished { .. } => None,
        JobStatus::Queued { .. } | JobStatus::Running { .. } => job.last_error.as_deref(),
    }
}

/// Returns whether the reason of a failure may quote an input: a model or a replica has written it.
fn quotes_input(job: &DurableJob) -> bool {
    match &job.status {
        JobStatus::Finished { outcome, .. } => matches!(outcome, JobOutcome::Failed { .. }),
        JobStatus::Queued { .. } | JobStatus::Running { .. } => job.last_error.is_some(),
    }
}

/// Returns whether a job is finished with a result, or with a reason that may quote an input.
fn has_content(job: &DurableJob) -> bool {
    let JobStatus::Finished { result, .. } = &job.status else { return false };
    result.is_some() || quotes_input(job)
}

/// Hashes what must be equal in submissions with the same idempotency key.
fn request_digest(
    kind: JobKind,
    deployment: &DeploymentName,
    payload: &[u8],
    webhook: Option<&str>,
    accepted: Option<&str>,
) -> [u8; 32] {
    let mut parts = vec![kind.path().as_bytes(), deployment.as_str().as_bytes(), payload];
    parts.extend(webhook.map(str::as_bytes));
    parts.extend(hashed_policy(accepted));
    digest(&parts)
}

/// Returns the parts of a digest for the accepted policy: the repetition of a request with another policy is another request,
/// since its content could otherwise be read where only the first one allows it. A request without a restriction has none, so
/// its digest is that of an earlier version.
pub(super) fn hashed_policy(accepted: Option<&str>) -> impl Iterator<Item = &[u8]> {
    let restricts = |policy: &&str| policy.parse() != Ok(ResidencyPolicy::Anywhere);
    accepted.filter(restricts).into_iter().flat_map(|policy| [b"residency".as_slice(), policy.as_bytes()])
}

/// Hashes parts, each with its length.
pub(super) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&(part.len() as u64).to_be_bytes());
        context.update(part);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

/// Adds the result to a rendered job. The result is JSON that a replica has written; it is not parsed again.
pub(super) fn with_result(shown: &Value, result: Option<Bytes>) -> String {
    let mut text = shown.to_string();
    if let Some(result) = result.as_deref().and_then(|result| std::str::from_utf8(result).ok()) {
        text.truncate(text.len() - 1);
        text.push_str(",\"result\":");
        text.push_str(result);
        text.push('}');
    }
    text
}

pub(super) async fn json_response(
    session: &mut ServerSession,
    status: u16,
    body: String,
    extra: &[(&'static str, &str)],
) -> AfterResponse {
    let mut head = respond::head(status, extra);
    respond::put(&mut head, CONTENT_TYPE.as_str(), "application/json");
    respond::put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
    respond::whole(session, head, body.into()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_and_a_path_are_a_request_about_jobs() {
        for (method, path, call) in [
            ("POST", "/v1/async/embeddings", None),
            ("GET", "/v1/async/embeddings", None),
            ("GET", "/v1/async", Some(JobQuery::List("q"))),
            ("GET", "/v1/async/job_1", Some(JobQuery::Read("job_1"))),
            ("DELETE", "/v1/async/job_1", Some(JobQuery::Cancel("job_1"))),
            ("POST", "/v1/async/job_1", None),
            ("POST", "/v1/async/job_1/webhook", Some(JobQuery::Resend("job_1"))),
            ("GET", "/v1/asyncx", None),
            ("DELETE", "/v1/async", None),
        ] {
            assert_eq!(JobQuery::of(method, path, "q"), call, "{method} {path}");
        }
    }

    #[test]
    fn a_result_is_added_to_the_job() {
        let shown = json!({"id": "a", "status": "succeeded"});
        let text = with_result(&shown, Some(Bytes::from("{\"x\": [1]}")));
        let parsed: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((&parsed["id"], &parsed["result"]["x"][0]), (&json!("a"), &json!(1)));
        assert_eq!(with_result(&shown, None), shown.to_string());
    }

    #[test]
    fn a_request_with_another_residency_policy_has_another_digest() {
        let deployment: DeploymentName = "m".parse().expect("a name");
        let digest =
            |webhook, policy| request_digest(JobKind::Embeddings, &deployment, b"x", webhook, policy);
        let plain = digest(None, None);
        assert_eq!(plain, digest(None, Some("anywhere")), "an earlier version has stored no policy");
        let hook = Some("https://example.com");
        let digests = [plain, digest(None, Some("eu")), digest(None, Some("us")), digest(hook, None)];
        let digests: std::collections::BTreeSet<_> =
            digests.into_iter().chain([digest(hook, Some("eu"))]).collect();
        assert_eq!(digests.len(), 5);
    }

    #[test]
    fn digests_depend_on_the_borders_of_the_parts() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
    }
}
