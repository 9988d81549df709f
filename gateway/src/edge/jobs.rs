//! Durable jobs at a gateway: which requests become jobs, and which region has each.
//!
//! A submission is read, limited, routed and forwarded like the ordinary request, among the regions with a queue, and to the
//! first of them only: two queues would compute it twice. It always has an idempotency key, the client's or a new one, so
//! that the gateway may send it again to the same queue.
//!
//! The identifier of a job ends with the region of its queue, so a gateway needs no record of jobs. A request about a job is
//! sent to that region if the residency policy of the tenant allows it: otherwise a result could leave its jurisdiction. The
//! region returns a result only through a gateway that the policies of the job allow ([`super::readers`]).

use super::region_monitor::RegionMonitor;
use super::request::RequestContext;
use super::request::single;
use super::responder::Responder;
use super::view::View;
use crate::hop::UpstreamKey;
use crate::listener::AfterResponse;
use crate::metrics::RequestOutcome;
use crate::relay::{self, ForwardedHeaders};
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::respond::{ForwardError, Rejection};
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::endpoint::ForwardTarget;
use gateway_core::job_region::SubmissionKey;
use gateway_core::tenant::Tenant;
use http::header::{CONTENT_LENGTH, HOST};
use pingora::protocols::http::ServerSession;
use rand::Rng;
use regions::catalogue::Catalogue;
use regions::health::Health;
use regions::id::{DeploymentName, RegionId};
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::jobs::{JOBS, JobKind, WEBHOOK};
use replica_api::priority::Priority;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::request::RequestTrace;

/// Timeout of a request about jobs: the largest result over a slow link.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Longest identifier of a job: that of the queue, and the longest name of a region.
const ID_BYTES_MAX: usize = 128;
/// Number of jobs of a page if the query does not say.
pub(super) const PAGE_DEFAULT: usize = 20;
/// Retry time while the region of a job is unreachable.
const UNREACHABLE_RETRY: Duration = Duration::from_secs(3);
/// Retry time before the first reports of regions: they are polled five times a second.
const FIRST_REPORT_RETRY: Duration = Duration::from_secs(1);
/// Preference of a client that wants a job (RFC 7240).
const RESPOND_ASYNC: &str = "respond-async";

/// Requests about jobs.
pub(super) struct JobForwarder {
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) responder: Arc<Responder>,
}

/// Returns the headers of a request that are forwarded; those of a submission have its idempotency key.
pub(super) fn forwarded_headers(
    session: &ServerSession,
    path: &str,
    priority: Priority,
    trace: Option<&RequestTrace>,
) -> Result<ForwardedHeaders, Rejection> {
    let priority = (headers::PRIORITY, priority.as_str());
    if JobKind::at(path).is_none() {
        return Ok(ForwardedHeaders::of(session, &[priority], trace));
    }
    let chosen = || format!("gateway-{:032x}", rand::rng().random::<u128>());
    let key = text(session, headers::IDEMPOTENCY_KEY)?.map_or_else(chosen, str::to_owned);
    let mut decided = vec![priority, (headers::IDEMPOTENCY_KEY, key.as_str())];
    for name in [headers::DEADLINE_MS, headers::MAX_TIME_IN_QUEUE_MS, headers::WEBHOOK_URL] {
        decided.extend(text(session, name)?.map(|value| (name, value)));
    }
    if prefers_job(session) {
        decided.push((headers::PREFER, RESPOND_ASYNC));
    }
    Ok(ForwardedHeaders::of(session, &decided, trace))
}

/// Returns the idempotency key that the client gave a submission or an upload; `path` is that of the collection.
pub(super) fn submission_key(
    session: &ServerSession,
    tenant: &Tenant,
    path: &str,
) -> Result<Option<SubmissionKey>, Rejection> {
    let key = text(session, headers::IDEMPOTENCY_KEY)?;
    Ok(key.map(|key| SubmissionKey::new(&tenant.id, path, key)))
}

/// Rejects a webhook of a request that does not become a job: its client would wait for the message and ignore the response.
pub(super) fn check_no_webhook(session: &ServerSession, has_webhook: bool) -> Result<(), Rejection> {
    let (code, kind, param) = match single(session, headers::WEBHOOK_URL)? {
        Some(_) => (ErrorCode::InvalidHeader, "header", headers::WEBHOOK_URL),
        None if has_webhook => (ErrorCode::InvalidValue, "field", "webhook"),
        None => return Ok(()),
    };
    let message = format!(
        "Only a job has a webhook, and this request does not become one; send it to {JOBS}/…, or with the header 'prefer: \
         {RESPOND_ASYNC}' while a region has a queue of jobs, or remove the {kind} '{param}'."
    );
    Err(Rejection::new(code, message).of(param))
}

/// Rejects a submission if no allowed region has a queue.
pub(super) fn check_queue(
    region_monitor: &RegionMonitor,
    catalogue: &Catalogue,
    routed: RegionSet,
    allowed: RegionSet,
    deployment: &DeploymentName,
) -> Result<(), Rejection> {
    let states = region_monitor.states();
    let with_jobs = states.instances.regions_with_jobs();
    if !with_jobs.intersect(allowed).is_empty() {
        return Ok(());
    }
    // Regions say in their reports whether they have a queue: just after the start of this gateway that is unknown.
    if allowed.intersect(routed).iter().any(|region| states.fleet.region_health(region) == Health::Unknown) {
        let message =
            "The regions have not reported yet whether they have a queue of jobs; repeat the request.";
        return Err(Rejection::new(ErrorCode::JobsUnavailable, message).after(FIRST_REPORT_RETRY));
    }
    drop(states);
    let names: Vec<&str> = with_jobs.iter().map(|region| catalogue.region(region).id.as_str()).collect();
    let message = if names.is_empty() {
        "No region has a queue of jobs; ask the operator to add [jobs] to a spoke, or send the ordinary request.".to_owned()
    } else {
        format!(
            "No region that the residency policy of '{deployment}' and of this request allows has a queue of jobs; the regions \
             with one are {}.",
            names.join(", ")
        )
    };
    Err(Rejection::new(ErrorCode::NoJobQueue, message))
}

impl JobForwarder {
    /// Returns the target of a request: that of a job if the client prefers one and there is a queue.
    pub(super) fn preferred<'a>(
        &self,
        session: &ServerSession,
        target: ForwardTarget<'a>,
    ) -> ForwardTarget<'a> {
        let Some(kind) = JobKind::of_computed(target.path).filter(|_| prefers_job(session)) else {
            return target;
        };
        match self.region_monitor.states().instances.regions_with_jobs().is_empty() {
            // A preference that cannot be met is ignored (RFC 7240, 2).
            true => target,
            false => ForwardTarget { path: kind.path(), ..target },
        }
    }

    /// Forwards a request about a job to the region of its queue.
    pub(super) async fn forward(
        &self,
        session: &mut ServerSession,
        method: UpstreamMethod,
        id: &str,
        tenant: &Tenant,
        view: &View,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let region = self.region_of(id).ok_or_else(no_such_job)?;
        let name = &self.catalogue.region(region).id;
        if !tenant.residency.permitted(&self.catalogue).contains(region) {
            return Err(not_permitted(id, name, tenant).into());
        }
        // The only POST below a job.
        let below = if method == UpstreamMethod::Post { WEBHOOK } else { "" };
        let path = format!("{JOBS}/{id}{below}");
        let sent = self.send(method, path.clone(), region, tenant, view, &context.id, BUFFERED_RESPONSE_MAX);
        let response = tokio::select! {
            biased;
            response = sent => response.ok_or_else(|| unreachable(name))?,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        self.check_content_redirect(&response, &path)?;
        Ok(self.relay(session, region, response, context).await)
    }

    /// Relays the response of a region about a job, a file or a batch.
    pub(super) async fn relay(
        &self,
        session: &mut ServerSession,
        region: RegionIndex,
        response: UpstreamResponse,
        context: &mut RequestContext<'_>,
    ) -> AfterResponse {
        let name = self.catalogue.region(region).id.as_str();
        let cors = self.responder.cors(session);
        let mut extra = vec![(headers::REQUEST_ID, context.id.as_str()), (headers::REGION, name)];
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::forward_response(session, response, &self.upstream, &extra).await;
        context.outcome = match after {
            AfterResponse::Reuse => RequestOutcome::of_session(session),
            AfterResponse::Close => RequestOutcome::of_session(session).truncated(),
        };
        after
    }

    /// Sends a request without a body to the queue of a region. None if it cannot be reached.
    #[expect(clippy::too_many_arguments, reason = "a request, its destination, and a limit")]
    pub(super) async fn send(
        &self,
        method: UpstreamMethod,
        path: String,
        region: RegionIndex,
        tenant: &Tenant,
        view: &View,
        id: &str,
        whole_max: usize,
    ) -> Option<UpstreamResponse> {
        let address = {
            let states = self.region_monitor.states();
            states.instances.job_host(region, Instant::now()).cloned()
        };
        let address = address.filter(|_| view.address(region).is_some())?;
        let mut head = RequestHead::new(method).for_path(path);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_LENGTH.as_str(), "0");
        head.put(headers::REQUEST_ID, id);
        head.put(headers::TENANT, tenant.id.as_str());
        self.identify(&mut head, tenant);
        let key = UpstreamKey { region, address };
        let none = Bytes::new();
        let sent = self.upstream.send_own(&key, &head, &none, whole_max);
        match tokio::time::timeout(TIMEOUT, sent).await {
            Ok(Ok((response, _))) => Some(response),
            Ok(Err(failure)) => {
                // The region of a job did not respond (`failure`); the client gets 503 or, in a list, the name of the region.
                tracing::debug!(id, ?failure, "request about a job failed");
                None
            }
            Err(_) => None,
        }
    }

    /// Adds what the region needs to decide whether this gateway may return content: the region of the gateway, and the newest
    /// policy of the tenant.
    pub(super) fn identify(&self, head: &mut RequestHead, tenant: &Tenant) {
        head.put(headers::GATEWAY_REGION, self.responder.config.region.as_str());
        if tenant.residency != ResidencyPolicy::Anywhere {
            head.put(headers::RESIDENCY, tenant.residency.to_string());
        }
    }

    /// Returns the region that the identifier of a job names.
    pub(super) fn region_of(&self, id: &str) -> Option<RegionIndex> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        let (_, region) =
            id.split_once('.').filter(|_| id.len() <= ID_BYTES_MAX && id.bytes().all(is_valid))?;
        let named = |(_, known): &(RegionIndex, &regions::catalogue::Region)| {
            known.id.as_str().replace('/', ".") == region
        };
        self.catalogue.iter().find(named).map(|(index, _)| index)
    }
}

/// Returns whether the client prefers a job.
fn prefers_job(session: &ServerSession) -> bool {
    let values = session.req_header().headers.get_all(headers::PREFER);
    let mut preferences =
        values.iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    preferences.any(|preference| preference.trim().eq_ignore_ascii_case(RESPOND_ASYNC))
}

pub(super) fn text<'a>(session: &'a ServerSession, name: &'static str) -> Result<Option<&'a str>, Rejection> {
    let value = single(session, name)?.map(std::str::from_utf8).transpose().ok();
    let is_text = |value: &&str| value.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    match value {
        Some(None) => Ok(None),
        Some(Some(value)) if is_text(&value) => Ok(Some(value)),
        _ => {
            let message = format!("{name} is not printable ASCII; write it in these characters.");
            Err(Rejection::new(ErrorCode::InvalidHeader, message).of(name))
        }
    }
}

fn no_such_job() -> Rejection {
    let message = "There is no such job: its identifier is the one in the response to its submission, and GET /v1/async lists \
                   all jobs.";
    Rejection::new(ErrorCode::JobNotFound, message)
}

fn not_permitted(id: &str, region: &RegionId, tenant: &Tenant) -> Rejection {
    let message = format!(
        "The job '{id}' is in region {region}, which the residency policy '{}' of the tenant '{}' does not allow.",
        tenant.residency, tenant.id
    );
    Rejection::new(ErrorCode::RegionNotPermitted, message)
}

pub(super) fn unreachable(region: &RegionId) -> Rejection {
    let message = format!(
        "The queue of jobs of region {region} cannot be reached at the moment; accepted jobs are kept."
    );
    Rejection::new(ErrorCode::JobsUnavailable, message).after(UNREACHABLE_RETRY)
}
