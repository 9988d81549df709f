//! Files and batches at a gateway: uploads, and the region that has each file.
//!
//! A file is in one region, like a job: the nearest one with a queue that the policies of the tenant, of the request and of all
//! deployments that its lines name allow. So the lines are read for their models before a region is selected, and the file is
//! in memory meanwhile, within the memory limits of request bodies. It is then sealed under these policies like any body.
//! A batch is in the region of its file, and all identifiers name the region.

use super::batch_caller::BatchCaller;
use super::jobs::{JobForwarder, PAGE_DEFAULT, submission_key, text, unreachable};
use super::refusals::{no_region_permitted, residency_too_long};
use super::request::RequestContext;
use super::upload_form::{UploadedForm, invalid_file, receive};
use super::view::View;
use crate::idempotency_key;
use crate::listener::AfterResponse;
use crate::relay;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::respond::{ForwardError, Rejection};
use crate::upstream::{BUFFERED_RESPONSE_MAX, UpstreamResponse};
use bytes::Bytes;
use gateway_core::job_region::SubmissionKey;
use gateway_core::residency::{AllowedRegions, Residency};
use http::header::{CONTENT_LENGTH, HOST};
use jobs_core::batch::segment;
use pingora::protocols::http::ServerSession;
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use replica_api::batches::{BATCHES, BatchCall, FILES};
use replica_api::error::ErrorCode;
use replica_api::headers;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Timeout of the connection to a region.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time in which a region stores a file: the largest over a slow link, and its fsync.
const STORE_TIMEOUT: Duration = Duration::from_secs(120);
/// Retry time before the first reports of regions: they are polled five times a second.
const FIRST_REPORT_RETRY: Duration = Duration::from_secs(1);
/// Longest name of a file, bytes. A longer one is cut off.
const NAME_BYTES_MAX: usize = 255;
/// Files of a page of the list if the query does not say, as in the API of OpenAI.
const FILES_PAGE_DEFAULT: usize = 10_000;

/// Request to the region of a file or a batch.
struct RegionRequest<'a> {
    region: RegionIndex,
    method: UpstreamMethod,
    path: String,
    body: Bytes,
    allowed: AllowedRegions,
    /// Idempotency key of the client.
    key: Option<&'a str>,
    /// Span of the client's request, to which the trace of a batch links.
    traceparent: Option<String>,
    kind: RegionRequestKind<'a>,
}

/// Headers of a request to a region beside those of the tenant.
enum RegionRequestKind<'a> {
    /// A file, with the headers that describe it and its policy.
    Upload(Vec<(&'static str, &'a str)>),
    /// A request about what the region has stored: who reads it.
    Read,
}

impl JobForwarder {
    /// Serves a request about files or batches.
    pub(super) async fn batch_call(
        &self,
        session: &mut ServerSession,
        call: BatchCall<'_>,
        caller: BatchCaller<'_>,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let (method, id, suffix) = match call {
            BatchCall::Upload => return self.upload(session, caller, context).await,
            BatchCall::Create => return self.create_batch(session, caller, context).await,
            BatchCall::Files => {
                return self.page(session, (FILES, FILES_PAGE_DEFAULT), caller, context).await;
            }
            BatchCall::Batches => return self.page(session, (BATCHES, PAGE_DEFAULT), caller, context).await,
            BatchCall::File(id) => (UpstreamMethod::Get, id, ""),
            BatchCall::FileContent(id) => (UpstreamMethod::Get, id, "/content"),
            BatchCall::DeleteFile(id) => (UpstreamMethod::Delete, id, ""),
            BatchCall::Batch(id) => (UpstreamMethod::Get, id, ""),
            BatchCall::Cancel(id) => (UpstreamMethod::Post, id, "/cancel"),
        };
        let collection = if call.path().starts_with(FILES) { FILES } else { BATCHES };
        let (region, allowed) = self.region_of_own(id, &caller, collection)?;
        let path = format!("{collection}/{id}{suffix}");
        let request = RegionRequest {
            region,
            method,
            path: path.clone(),
            body: Bytes::new(),
            allowed,
            key: None,
            traceparent: None,
            kind: RegionRequestKind::Read,
        };
        let response = self.exchange(session, request, &caller, &context.id).await?;
        self.check_content_redirect(&response, &path)?;
        Ok(self.relay(session, region, response, context).await)
    }

    /// Creates a batch in the region of its file.
    async fn create_batch(
        &self,
        session: &mut ServerSession,
        caller: BatchCaller<'_>,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let body = caller.body_reader.body(session, caller.owner).await?;
        crate::body_memory::check_batch_body(&body.bytes)?;
        let parsed: Value = serde_json::from_slice(&body.bytes).map_err(|error| {
            Rejection::new(ErrorCode::InvalidJson, format!("The body is not JSON: {error}."))
        })?;
        let id = parsed["input_file_id"].as_str().ok_or_else(|| {
            let message =
                "The field 'input_file_id' is missing: the id in the response to the upload of the file.";
            Rejection::new(ErrorCode::MissingField, message).of("input_file_id")
        })?;
        let (region, allowed) = self.region_of_own(id, &caller, FILES)?;
        let key = text(session, headers::IDEMPOTENCY_KEY)?.map(str::to_owned);
        let request = RegionRequest {
            region,
            method: UpstreamMethod::Post,
            path: BATCHES.to_owned(),
            body: body.bytes.clone(),
            allowed,
            key: key.as_deref(),
            traceparent: context.trace.as_ref().map(|trace| trace.context().traceparent()),
            kind: RegionRequestKind::Read,
        };
        let response = self.exchange(session, request, &caller, &context.id).await?;
        Ok(self.relay(session, region, response, context).await)
    }

    /// Stores a file in a region.
    async fn upload(
        &self,
        session: &mut ServerSession,
        caller: BatchCaller<'_>,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        // The client learns of a mistake in the key before it sends the file.
        let key = text(session, headers::IDEMPOTENCY_KEY)?.map(str::to_owned);
        key.as_deref().map_or(Ok(()), idempotency_key::check)?;
        let UploadedForm { name, file } = receive(session, caller.body_reader, caller.owner).await?;
        let content = file.bytes.clone();
        let tenant = caller.tenant;
        let models = caller.body_reader.cpu.run(Some(tenant.index), move || segment::models(&content)).await;
        let models = models.map_err(|error| invalid_file(&format!("{error}")))?;
        let view = caller.view;
        let known: Vec<_> = models.iter().filter_map(|model| view.deployment(model, tenant)).collect();
        let own = tenant.residency.narrow_checked(caller.requested);
        let mut policy = own.map_err(|error| {
            Rejection::new(ErrorCode::InvalidHeader, format!("{} is not valid: {error}.", headers::RESIDENCY))
        })?;
        let mut allowed = AllowedRegions::of_policy(&policy, &self.catalogue);
        let mut registered = RegionSet::all(self.catalogue.iter().count());
        for routed in &known {
            let deployment = &routed.deployment;
            policy = policy
                .narrow_checked(&deployment.residency)
                .map_err(|error| residency_too_long(&deployment.name, tenant, &error))?;
            let before = allowed;
            allowed = allowed.and(routed.allowed);
            registered = registered.intersect(routed.registered);
            if allowed.is_empty() && !before.is_empty() && known.len() > 1 {
                return Err(no_common_region(&deployment.name).into());
            }
            if allowed.is_empty() {
                let of_deployment = *routed.allowed;
                return Err(no_region_permitted(
                    tenant,
                    deployment,
                    of_deployment,
                    caller.requested,
                    &self.catalogue,
                )
                .into());
            }
        }
        if allowed.is_empty() {
            let message = format!(
                "The header {} and the residency policy of the tenant '{}' together permit no region.",
                headers::RESIDENCY,
                tenant.id
            );
            return Err(Rejection::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY).into());
        }
        let submission = submission_key(session, tenant, FILES)?;
        let region = self.region_for(view, &allowed, registered, submission)?;
        let residency = Residency::of(&policy);
        let names: Vec<&str> = known.iter().map(|routed| routed.deployment.name.as_str()).collect();
        let (name, names) = (header_text(&name), names.join(","));
        let mut further = vec![(headers::FILE_NAME, name.as_str()), (headers::FILE_MODELS, names.as_str())];
        if residency.is_locked() {
            further.push((headers::RESIDENCY, residency.as_str()));
        }
        let request = RegionRequest {
            region,
            method: UpstreamMethod::Post,
            path: FILES.to_owned(),
            body: file.bytes.clone(),
            allowed,
            key: key.as_deref(),
            traceparent: None,
            kind: RegionRequestKind::Upload(further),
        };
        let response = self.exchange(session, request, &caller, &context.id).await?;
        Ok(self.relay(session, region, response, context).await)
    }

    /// Selects the region for a file: that of an earlier upload with the same idempotency key, else the nearest allowed one with a
    /// queue, of those that serve its deployments if there are any.
    fn region_for(
        &self,
        view: &View,
        allowed: &AllowedRegions,
        registered: RegionSet,
        key: Option<SubmissionKey>,
    ) -> Result<RegionIndex, Rejection> {
        let (mut states, now) = (self.region_monitor.states(), Instant::now());
        let routed = allowed.intersect(view.routed);
        let earlier = key.and_then(|key| states.keyed_submissions.region(&key));
        let eligible = states.job_regions(routed, registered, registered, view.draining, earlier);
        if let Some(region) = states.nearest(eligible, now) {
            if let Some(key) = key {
                states.record_submission(key, region, now);
            }
            return Ok(region);
        }
        // Regions say in their reports whether they have a queue: just after the start of this gateway that is unknown.
        if routed.iter().any(|region| states.fleet.region_health(region) == Health::Unknown) {
            let message =
                "The regions have not reported yet whether they have a queue of jobs; repeat the request.";
            return Err(Rejection::new(ErrorCode::JobsUnavailable, message).after(FIRST_REPORT_RETRY));
        }
        let message = "No region that the residency policies of the file's models and of this request allow has a queue of \
                       jobs; ask the operator to add [jobs] to a spoke.";
        Err(Rejection::new(ErrorCode::NoJobQueue, message))
    }

    /// Returns the region that an identifier names, if the policies of the tenant and of the request allow it.
    fn region_of_own(
        &self,
        id: &str,
        caller: &BatchCaller<'_>,
        collection: &str,
    ) -> Result<(RegionIndex, AllowedRegions), Rejection> {
        let region = self.region_of(id).ok_or_else(|| unknown(collection))?;
        let BatchCaller { tenant, requested, .. } = caller;
        let allowed = AllowedRegions::of_policy(&tenant.residency, &self.catalogue)
            .and(AllowedRegions::of_policy(requested, &self.catalogue));
        if allowed.contains(region) {
            return Ok((region, allowed));
        }
        let message = format!(
            "'{id}' is in region {}, which the residency policies of the tenant '{}' ('{}') and of the request ('{requested}') do \
             not both allow.",
            self.catalogue.region(region).id,
            tenant.id,
            tenant.residency,
        );
        Err(Rejection::new(ErrorCode::RegionNotPermitted, message))
    }

    /// Sends a request to the region of a file, and waits for the head of the response.
    async fn exchange(
        &self,
        session: &mut ServerSession,
        request: RegionRequest<'_>,
        caller: &BatchCaller<'_>,
        id: &str,
    ) -> Result<UpstreamResponse, ForwardError> {
        let RegionRequest { region, method, path, body, allowed, key, traceparent, kind } = request;
        let name = &self.catalogue.region(region).id;
        let address = self.region_monitor.states().instances.job_host(region, Instant::now()).cloned();
        let address = address.filter(|_| caller.view.address(region).is_some());
        let address = address.ok_or_else(|| unreachable(name))?;
        let mut head = RequestHead::new(method).for_path(path);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
        head.put(headers::REQUEST_ID, id);
        head.put(headers::TENANT, caller.tenant.id.as_str());
        if let Some(key) = key {
            head.put(headers::IDEMPOTENCY_KEY, key);
        }
        if let Some(traceparent) = traceparent {
            head.put(headers::TRACEPARENT, traceparent);
        }
        match kind {
            RegionRequestKind::Upload(headers) => {
                headers.into_iter().for_each(|(name, value)| head.put(name, value));
            }
            RegionRequestKind::Read => self.identify(&mut head, caller.tenant),
        }
        let open = || {
            allowed.open(region, address.clone()).map_err(|_| {
                Rejection::new(ErrorCode::RegionNotPermitted, format!("Region {name} is not allowed."))
            })
        };
        let send = async {
            loop {
                let sealed = allowed.seal(body.clone());
                let sent =
                    self.upstream.send(open()?, CONNECT_TIMEOUT, head.clone(), sealed, BUFFERED_RESPONSE_MAX);
                match sent.await {
                    Ok(response) => return Ok(response),
                    // Another idle connection or a new one: the number of idle ones is finite.
                    Err(gateway_core::outcome::AttemptFailure::StaleConnection) => {}
                    Err(failure) => {
                        // The region of a file or a batch did not respond (`failure`); the client gets 503.
                        tracing::debug!(id, ?failure, "request about a file or a batch failed");
                        return Err(unreachable(name));
                    }
                }
            }
        };
        tokio::select! {
            biased;
            response = tokio::time::timeout(STORE_TIMEOUT, send) => Ok(response.map_err(|_| unreachable(name))??),
            () = relay::client_disconnected(session) => Err(ForwardError::ClientDisconnected),
        }
    }
}

fn no_common_region(deployment: &dyn std::fmt::Display) -> Rejection {
    let message = format!(
        "No region is permitted: a file is stored in one region, and no region that '{deployment}' permits is permitted by the \
         other models of the file, the tenant and the request; split the file by model."
    );
    Rejection::new(ErrorCode::RegionNotPermitted, message).of("file")
}

fn unknown(collection: &str) -> Rejection {
    match collection {
        FILES => {
            let message = "There is no such file: its id is the one in the response to its upload, and GET /v1/files lists all.";
            Rejection::new(ErrorCode::FileNotFound, message)
        }
        _ => {
            let message = "There is no such batch: its id is the one in the response to its creation, and GET /v1/batches lists \
                           all.";
            Rejection::new(ErrorCode::BatchNotFound, message)
        }
    }
}

/// Returns a text as a JSON string in ASCII, for a header.
fn header_text(text: &str) -> String {
    let cut = text.floor_char_boundary(NAME_BYTES_MAX);
    let quoted = json!(text[..cut]).to_string();
    let mut ascii = String::with_capacity(quoted.len());
    for character in quoted.chars() {
        if (' '..='~').contains(&character) {
            ascii.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(ascii, "\\u{unit:04x}").expect("a string grows");
            }
        }
    }
    ascii
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_header_and_keeps_its_characters() {
        for name in ["batch.jsonl", "a \"b\" \\ c", "größe 😀\u{7f}.jsonl", "x\r\ny"] {
            let text = header_text(name);
            assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text}");
            assert_eq!(serde_json::from_str::<String>(&text).expect("JSON"), name);
        }
        assert_eq!(header_text(&"ü".repeat(200)).len(), 2 + 6 * (NAME_BYTES_MAX / 2));
    }
}
