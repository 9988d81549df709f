//! API of batches, for gateways, and the task that ends them.

use super::api::{JobApi, digest, idempotency_key, json_response, key_conflict, rejected, tenant};
use super::files::{no_such_file, of_region};
use super::names::batch_phase_text;
use super::page_query::PageQuery;
use super::readers::RequestingGateway;
use super::{RegionalJobQueue, seconds};
use crate::body_memory::Reservation;
use crate::ingress::arrival::Arrival;
use crate::job_lists;
use crate::listener::AfterResponse;
use crate::metrics::BatchLineOutcome;
use crate::respond::{ForwardError, Rejection};
use gateway_core::memory::BodyOwner;
use jobs::queue_host::{Created, QueueError, now};
use jobs_core::batch::id::{BatchFileId, BatchId, UploadId};
use jobs_core::batch::line;
use jobs_core::batch::segment;
use jobs_core::batch::state::{Batch, BatchPhase, BatchProgress, BatchSpec, FileProblem, UploadedFile};
use jobs_core::job::{IdempotencyKey, JobOperation, UnixMillis};
use pingora::protocols::http::ServerSession;
use regions::id::DeploymentName;
use replica_api::batches::{BATCHES, BatchCall};
use replica_api::error::ErrorCode;
use replica_api::headers;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use telemetry::context::TraceContext;

/// Batches of a page of the list, by default and at most.
const PAGE_DEFAULT: usize = 20;
const PAGE_MAX: usize = 100;
/// Problems of a file that are reported for a batch without a line that can be computed.
const PROBLEMS_MAX: usize = 20;
/// Metadata of a batch, as in the API of OpenAI.
const METADATA_MAX: usize = 16;
const METADATA_KEY_MAX: usize = 64;
const METADATA_VALUE_MAX: usize = 512;
/// Message in place of one that the gateway may not return.
const CONTENT_NOT_PERMITTED: &str =
    "The message is returned only through a gateway in a region that the residency policy allows.";
/// Pause after an error of the queue.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

impl JobApi {
    /// Serves a request about files or batches; an upload has an `arrival`.
    pub(in crate::ingress) async fn batch_call(
        &self,
        session: &mut ServerSession,
        call: BatchCall<'_>,
        query: &str,
        arrival: Option<&mut Arrival<'_>>,
    ) -> Result<AfterResponse, ForwardError> {
        if let (BatchCall::Upload, Some(arrival)) = (call, arrival) {
            return self.upload(session, arrival).await;
        }
        let queue = self.queue.as_deref().ok_or_else(|| self.no_queue())?;
        let tenant = tenant(session)?;
        let gateway = RequestingGateway::of(session, &self.residency.catalogue)?;
        queue.recorded(queue.host.catch_up().await).map_err(rejected)?;
        let shown = match call {
            BatchCall::FileContent(id) => return self.file_content(session, queue, &tenant, id).await,
            BatchCall::Upload => return Err(no_such_file().into()),
            BatchCall::Files | BatchCall::Batches => {
                // The memory is held until the response was written.
                let (list, _memory) = match call {
                    BatchCall::Files => self.file_list(queue, &tenant, query).await?,
                    _ => self.batch_list(queue, &tenant, query, gateway).await?,
                };
                return Ok(json_response(session, 200, list, &self.region_header()).await);
            }
            BatchCall::File(id) => {
                let file = queue.host.file(&tenant, queue.parse_file(id)?).ok_or_else(no_such_file)?;
                queue.shown_file(&file)
            }
            BatchCall::DeleteFile(id) => self.delete_file(queue, &tenant, id).await?,
            BatchCall::Create => self.create(session, queue, tenant, &gateway).await?,
            BatchCall::Batch(id) => self.shown_batch(queue, &tenant, queue.parse_batch(id)?, &gateway)?,
            BatchCall::Cancel(id) => {
                let id = queue.parse_batch(id)?;
                let batch = queue.host.batch(&tenant, id).ok_or_else(no_such_batch)?;
                let cancelled = queue.recorded(queue.host.cancel_batch(id).await).map_err(rejected)?;
                if !cancelled && batch.progress.cancelled.is_none() {
                    let phase = batch_phase_text(batch.phase());
                    let message = format!("The batch is {phase}, so it cannot be cancelled.");
                    return Err(Rejection::new(ErrorCode::BatchFinished, message).into());
                }
                self.shown_batch(queue, &tenant, id, &gateway)?
            }
        };
        Ok(json_response(session, 200, shown.to_string(), &self.region_header()).await)
    }

    async fn create(
        &self,
        session: &mut ServerSession,
        queue: &RegionalJobQueue,
        tenant: String,
        gateway: &RequestingGateway,
    ) -> Result<Value, ForwardError> {
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        crate::body_memory::check_batch_body(&body.bytes)?;
        let idempotency = idempotency_key(session)?.map(|key| IdempotencyKey {
            key: digest(&[BATCHES.as_bytes(), key.as_bytes()]),
            request: digest(&[&body.bytes]),
        });
        // Before the checks, which may have another outcome now: the input file may be deleted.
        let earlier = queue.host.with_key(&tenant, idempotency);
        if let Some(id) = earlier.map_err(|error| queue.rejected_batch(error))? {
            return Ok(self.shown_batch(queue, &tenant, BatchId(id), gateway)?);
        }
        let body: Value = serde_json::from_slice(&body.bytes).map_err(|error| {
            Rejection::new(ErrorCode::InvalidJson, format!("The body is not JSON: {error}."))
        })?;
        let id = queue.parse_file(required(&body, "input_file_id")?)?;
        let BatchFileId::Upload(id) = id else {
            return Err(invalid("input_file_id", "the id of an uploaded file", &body["input_file_id"]).into());
        };
        let endpoint = required(&body, "endpoint")?;
        let operation = JobOperation::of_url(endpoint)
            .ok_or_else(|| invalid("endpoint", &format!("one of {}", line::urls()), &body["endpoint"]))?;
        let completion_window = required(&body, "completion_window")?;
        let age = queue.host.config().limits.age;
        let window = parse_window(completion_window).filter(|window| *window <= age).ok_or_else(|| {
            let expected = format!("a number and a unit, as in 24h or 7d, at most {} s", age.as_secs());
            invalid("completion_window", &expected, &body["completion_window"])
        })?;
        let metadata = metadata(&body["metadata"])?;
        let file = queue.host.upload(&tenant, id).ok_or_else(no_such_file)?;
        for model in &file.models {
            if let Ok(deployment) = model.parse::<DeploymentName>() {
                self.residency.check_deployment_policy(&deployment)?;
            }
        }
        let problems = match segment::computable(&file.segments).contains_key(operation.url()) {
            true => Vec::new(),
            false => self.file_problems(queue, (&tenant, id), &file, operation).await?,
        };
        let total = file.segments.iter().map(|segment| segment.requests).sum();
        let spec = BatchSpec {
            tenant: tenant.clone(),
            file: id,
            operation,
            completion_window: completion_window.to_owned(),
            expires: now().after(window),
            metadata,
            total,
            problems,
            residency: file.residency.clone(),
            models: file.models.clone(),
            idempotency,
            trace: self.caller_span(session),
        };
        let created = queue.recorded(queue.host.create_batch(spec, queue.file_limits.tenant_bytes).await);
        let Created { id, is_new } = created.map_err(|error| queue.rejected_batch(error))?;
        queue.metrics.batches.add(u64::from(is_new));
        Ok(self.shown_batch(queue, &tenant, id, gateway)?)
    }

    /// Returns the span of the gateway that sends the request, if traces are recorded: a request about batches has none here.
    fn caller_span(&self, session: &ServerSession) -> Option<String> {
        self.traces.as_ref()?;
        let span = session.get_header(headers::TRACEPARENT)?;
        TraceContext::parse(span.as_bytes()).map(|span| span.traceparent())
    }

    /// Returns the first problems of a file of which no line can be computed.
    async fn file_problems(
        &self,
        queue: &RegionalJobQueue,
        (tenant, id): (&str, UploadId),
        file: &Arc<UploadedFile>,
        operation: JobOperation,
    ) -> Result<Vec<FileProblem>, Rejection> {
        let mut problems = Vec::new();
        for (index, segment) in file.segments.iter().enumerate() {
            let range = [segment.range];
            let read = queue.host.read_part(tenant, BatchFileId::Upload(id), &range).await;
            let read = queue.recorded(read).map_err(rejected)?;
            let file = file.clone();
            let scan = move || {
                let requests = segment::requests(&read, &file.segments[index], &file.models, operation);
                // A message names what the line has, so its length is limited where the line is read.
                let problems = requests.filter_map(|(line, request)| {
                    let error = request.err()?;
                    Some(FileProblem { code: error.code.to_owned(), message: error.message, line })
                });
                problems.take(PROBLEMS_MAX).collect::<Vec<_>>()
            };
            problems.extend(self.body_reader.cpu.run(None, scan).await);
            if problems.len() >= PROBLEMS_MAX {
                break;
            }
        }
        problems.truncate(PROBLEMS_MAX);
        Ok(problems)
    }

    /// Lists the batches of a tenant, the newest first.
    async fn batch_list(
        &self,
        queue: &RegionalJobQueue,
        tenant: &str,
        query: &str,
        gateway: RequestingGateway,
    ) -> Result<(String, Reservation), Rejection> {
        let page = PageQuery::read(query, (PAGE_DEFAULT, PAGE_MAX), &[])?;
        let after =
            page.after_id("the id of the last batch of the page before", |id| BatchId::from_str(id).ok())?;
        let limit = page.limit;
        let batches = queue.host.batches(tenant, after, limit + 1).into_iter().map(|(id, batch)| {
            let permits = self.permits_problems(queue, id, &batch, &gateway);
            (id, batch, permits)
        });
        let batches: Vec<_> = batches.collect();
        let render = move |queue: &RegionalJobQueue| {
            let shown = |(id, batch, permits): &(BatchId, Arc<Batch>, bool)| {
                queue.shown_with_problems(*id, batch, *permits)
            };
            job_lists::page(batches.iter().map(shown), limit)
        };
        self.page(tenant, render).await
    }

    fn shown_batch(
        &self,
        queue: &RegionalJobQueue,
        tenant: &str,
        id: BatchId,
        gateway: &RequestingGateway,
    ) -> Result<Value, Rejection> {
        let batch = queue.host.batch(tenant, id).ok_or_else(no_such_batch)?;
        let permits = self.permits_problems(queue, id, &batch, gateway);
        Ok(queue.shown_with_problems(id, &batch, permits))
    }

    /// Returns whether messages about the lines of a batch may be returned through its gateway: they quote identifiers and
    /// values of the lines.
    fn permits_problems(
        &self,
        queue: &RegionalJobQueue,
        id: BatchId,
        batch: &Batch,
        gateway: &RequestingGateway,
    ) -> bool {
        let spec = &batch.spec;
        if spec.problems.is_empty() {
            return true;
        }
        let origin = queue.host.batch_origin(&spec.tenant, id).unwrap_or_default();
        let deployments = origin.deployments.iter().map(String::as_str);
        self.residency.check_content_policy(gateway, "", spec.residency.as_deref(), deployments).is_ok()
    }
}

impl RegionalJobQueue {
    /// Renders a batch, with or without messages about its lines.
    fn shown_with_problems(&self, id: BatchId, batch: &Batch, permits_problems: bool) -> Value {
        let mut shown = self.render(id, batch);
        if !permits_problems {
            for problem in shown["errors"]["data"].as_array_mut().into_iter().flatten() {
                problem["message"] = json!(CONTENT_NOT_PERMITTED);
            }
        }
        shown
    }

    /// Returns the rejection of the creation of a batch.
    fn rejected_batch(&self, error: QueueError) -> Rejection {
        match error {
            QueueError::Unknown => no_such_file(),
            QueueError::OtherRequest(earlier) => {
                key_conflict(&format!("the batch {}", self.client_id(&BatchId(earlier))))
            }
            other => rejected(other),
        }
    }

    fn parse_batch(&self, id: &str) -> Result<BatchId, Rejection> {
        of_region(id, &self.region).and_then(|id| id.parse().ok()).ok_or_else(no_such_batch)
    }

    /// Renders a batch as in the API of OpenAI.
    fn render(&self, id: BatchId, batch: &Batch) -> Value {
        let Batch { spec, progress, .. } = batch;
        let phase = batch.phase();
        let BatchProgress { completed, failed, output_bytes, error_bytes, .. } = *progress;
        let BatchProgress { started, cancelled, finalizing, ended, output_deleted, errors_deleted, .. } =
            *progress;
        let at = |time: Option<UnixMillis>| time.map(seconds);
        let ended_as = |other: BatchPhase| if phase == other { at(ended) } else { None };
        let file = |file: BatchFileId, bytes: u64, deleted: bool| {
            (ended.is_some() && bytes > 0 && !deleted).then(|| self.client_id(&file))
        };
        let problem = |problem: &FileProblem| {
            let FileProblem { code, message, line } = problem;
            json!({"code": code, "message": message, "line": line, "param": null})
        };
        let errors: Vec<_> = spec.problems.iter().map(problem).collect();
        let errors = match errors.is_empty() {
            true => Value::Null,
            false => json!({"object": "list", "data": errors}),
        };
        json!({
            "id": self.client_id(&id),
            "object": "batch",
            "endpoint": spec.operation.url(),
            "errors": errors,
            "input_file_id": self.client_id(&BatchFileId::Upload(spec.file)),
            "completion_window": spec.completion_window,
            "status": batch_phase_text(phase),
            "output_file_id": file(BatchFileId::Output(id), output_bytes, output_deleted),
            "error_file_id": file(BatchFileId::Errors(id), error_bytes, errors_deleted),
            "created_at": seconds(id.created()),
            "in_progress_at": at(started),
            "expires_at": seconds(spec.expires),
            "finalizing_at": at(finalizing),
            "completed_at": ended_as(BatchPhase::Completed),
            "failed_at": ended_as(BatchPhase::Failed),
            "expired_at": ended_as(BatchPhase::Expired),
            "cancelling_at": at(cancelled),
            "cancelled_at": ended_as(BatchPhase::Cancelled),
            "request_counts": {"total": spec.total, "completed": completed, "failed": failed},
            "metadata": spec.metadata,
        })
    }
}

/// Writes the error files of the batches of which all chunks have ended.
pub(in crate::ingress) async fn finalize(queue: Arc<RegionalJobQueue>) {
    let mut changes = queue.host.changes();
    loop {
        changes.borrow_and_update();
        let mut has_failed = false;
        for id in queue.host.finalizing_batches() {
            has_failed |= queue.recorded(queue.host.finalize_batch(id).await).is_err();
        }
        if has_failed {
            tokio::time::sleep(ERROR_PAUSE).await;
        } else if changes.changed().await.is_err() {
            // The queue is closed: the process ends.
            return std::future::pending().await;
        }
    }
}

/// Counts the lines of an ended chunk.
pub(super) fn count_lines(queue: &RegionalJobQueue, completed: u32, failed: u32) {
    for (outcome, lines) in [(BatchLineOutcome::Completed, completed), (BatchLineOutcome::Failed, failed)] {
        queue.metrics.batch_lines.of(outcome).add(lines.into());
    }
}

fn no_such_batch() -> Rejection {
    let message = "There is no such batch, or its retention time has passed; the list is GET /v1/batches.";
    Rejection::new(ErrorCode::BatchNotFound, message)
}

fn required<'a>(body: &'a Value, field: &'static str) -> Result<&'a str, Rejection> {
    match &body[field] {
        Value::String(text) => Ok(text),
        Value::Null => {
            let message = format!("The field '{field}' is missing.");
            Err(Rejection::new(ErrorCode::MissingField, message).of(field))
        }
        other => Err(invalid(field, "a string", other)),
    }
}

fn invalid(field: &'static str, expected: &str, value: &Value) -> Rejection {
    let value: String = value.to_string().chars().take(64).collect();
    let message = format!("The field '{field}' is {value}; write {expected}.");
    Rejection::new(ErrorCode::InvalidValue, message).of(field)
}

fn metadata(value: &Value) -> Result<BTreeMap<String, String>, Rejection> {
    let expected = format!(
        "an object of at most {METADATA_MAX} strings, with names of at most {METADATA_KEY_MAX} and values of at most \
         {METADATA_VALUE_MAX} characters"
    );
    let rejection = || invalid("metadata", &expected, value);
    let entries = match value {
        Value::Null => return Ok(BTreeMap::new()),
        Value::Object(entries) if entries.len() <= METADATA_MAX => entries,
        _ => return Err(rejection()),
    };
    let entry = |(name, value): (&String, &Value)| {
        let value = value.as_str().filter(|value| value.chars().count() <= METADATA_VALUE_MAX)?;
        (name.chars().count() <= METADATA_KEY_MAX).then(|| (name.clone(), value.to_owned()))
    };
    entries.iter().map(entry).collect::<Option<_>>().ok_or_else(rejection)
}

/// Parses a number of seconds, minutes, hours or days.
fn parse_window(text: &str) -> Option<Duration> {
    let unit = match text.bytes().last()? {
        b's' => 1,
        b'm' => 60,
        b'h' => 3600,
        b'd' => 24 * 3600,
        _ => return None,
    };
    // The text is stored.
    let digits = &text[..text.len() - 1];
    let is_number = digits.len() <= 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse::<u32>().ok().filter(|number| is_number && *number > 0)?;
    Some(Duration::from_secs(u64::from(number) * unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use replica_api::jobs::JobKind;

    #[test]
    fn windows_are_numbers_with_a_unit() {
        for (text, seconds) in
            [("24h", Some(86_400)), ("7d", Some(604_800)), ("90s", Some(90)), ("5m", Some(300))]
        {
            assert_eq!(parse_window(text), seconds.map(Duration::from_secs), "{text}");
        }
        for text in ["", "h", "0h", "-1h", "+1h", "00000000024h", "24", "24 h", "1.5h", "24hours", "ü"] {
            assert_eq!(parse_window(text), None, "{text}");
        }
    }

    #[test]
    fn metadata_is_a_small_object_of_strings() {
        assert_eq!(metadata(&Value::Null), Ok(BTreeMap::new()));
        assert_eq!(metadata(&json!({"a": "b"})), Ok([("a".to_owned(), "b".to_owned())].into()));
        let many: BTreeMap<_, _> = (0..=METADATA_MAX).map(|number| (number.to_string(), "x")).collect();
        for wrong in
            [json!([]), json!({"a": 1}), json!(many), json!({"a": "x".repeat(METADATA_VALUE_MAX + 1)})]
        {
            assert!(metadata(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_urls_of_lines_are_the_paths_of_ordinary_requests() {
        for operation in JobOperation::ALL {
            assert_eq!(super::super::names::kind(operation).computed_path(), operation.url());
        }
        assert_eq!(JobKind::ALL.len(), JobOperation::ALL.len());
    }
}
