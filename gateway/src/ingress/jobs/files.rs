//! API of files, for gateways: upload, list, state, content and deletion.
//!
//! A file is divided into segments when it is stored ([`jobs_core::batch::segment`]), and its content is sent segment by
//! segment, so a download needs the memory of one segment.

use super::api::{
    JobApi, digest, hashed_policy, idempotency_key, json_response, key_conflict, rejected, tenant,
};
use super::names::kind;
use super::page_query::PageQuery;
use super::readers::{RequestingGateway, accepted_policy};
use super::{RegionalJobQueue, reserve, seconds};
use crate::body_memory::Reservation;
use crate::ingress::arrival::Arrival;
use crate::ingress::refusals::no_receipt;
use crate::ingress::request::text;
use crate::job_lists;
use crate::listener::AfterResponse;
use crate::receipts::CommitFailed;
use crate::respond::{self, ForwardError, Rejection};
use bytes::Bytes;
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::memory::BodyOwner;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use jobs::queue_host::{ContentOrigin, Created, FileContent, FileInfo, NewUpload, QueueError};
use jobs_core::batch::id::{BatchFileId, UploadId};
use jobs_core::batch::segment::{self, LineWork};
use jobs_core::batch::state::FileDeletion;
use jobs_core::job::{IdempotencyKey, JobOperation, StoredRange};
use pingora::protocols::http::ServerSession;
use regions::id::{DeploymentName, RegionId};
use replica_api::batches::FILES;
use replica_api::error::ErrorCode;
use replica_api::headers;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::str::FromStr;

/// Files of a page of the list, by default and at most, as in the API of OpenAI.
const PAGE_MAX: usize = 10_000;
/// Purposes of files.
const PURPOSES: [&str; 2] = ["batch", "batch_output"];

impl JobApi {
    /// Stores a file, and responds when it is durable.
    pub(super) async fn upload(
        &self,
        session: &mut ServerSession,
        arrival: &mut Arrival<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        self.residency.allowed_here(session)?;
        let queue = self.queue.as_deref().ok_or_else(|| self.no_queue())?;
        let tenant = tenant(session)?;
        let models = text(session, headers::FILE_MODELS)?.unwrap_or_default();
        let models: BTreeSet<String> =
            models.split(',').filter(|model| !model.is_empty()).map(str::to_owned).collect();
        for model in &models {
            let deployment: DeploymentName = model
                .parse()
                .map_err(|error| crate::ingress::request::unreadable(headers::FILE_MODELS, &error))?;
            self.residency.check_deployment_policy(&deployment)?;
        }
        if arrival.is_locked() {
            self.residency.check_policy_age()?;
        }
        if !arrival.reserve_receipt() {
            return Err(no_receipt(&self.region).into());
        }
        let key = idempotency_key(session)?;
        let name = text(session, headers::FILE_NAME)?;
        let name = name.and_then(|name| serde_json::from_str::<String>(name).ok()).unwrap_or_default();
        let limits = queue.file_limits;
        let file = self.body_reader.file(session, BodyOwner::default(), limits.bytes).await?;
        let residency = accepted_policy(session)?;
        let (content, known, named, policy) =
            (file.bytes.clone(), models.clone(), name.clone(), residency.clone());
        let scan = move || {
            let idempotency = key.map(|key| {
                let mut hashed = vec![named.as_bytes(), &content];
                hashed.extend(hashed_policy(policy.as_deref()));
                let key = digest(&[FILES.as_bytes(), key.as_bytes()]);
                IdempotencyKey { key, request: digest(&hashed) }
            });
            (segment::scan(&content, &known, work), idempotency)
        };
        let (segments, idempotency) = self.body_reader.cpu.run(None, scan).await;
        let segments = segments.map_err(|error| {
            Rejection::new(ErrorCode::InvalidValue, format!("The file is rejected: {error}.")).of("file")
        })?;
        arrival.commit().await.map_err(|CommitFailed| no_receipt(&self.region))?;
        let new = NewUpload {
            tenant: tenant.clone(),
            name,
            text: file.bytes.clone(),
            models,
            segments,
            residency,
            idempotency,
        };
        let stored = queue.recorded(queue.host.store_file(new, limits.tenant_bytes).await);
        let Created { id, is_new } = stored.map_err(|error| match error {
            QueueError::OtherRequest(earlier) => {
                let id = queue.client_id(&BatchFileId::Upload(UploadId(earlier)));
                key_conflict(&format!("the file {id}"))
            }
            other => rejected(other),
        })?;
        let id = BatchFileId::Upload(id);
        queue.metrics.files.add(u64::from(is_new));
        let info = queue.host.file(&tenant, id).ok_or_else(no_such_file)?;
        Ok(json_response(session, 200, queue.shown_file(&info).to_string(), &self.region_header()).await)
    }

    /// Lists the files of a tenant, the newest first.
    pub(super) async fn file_list(
        &self,
        queue: &RegionalJobQueue,
        tenant: &str,
        query: &str,
    ) -> Result<(String, Reservation), Rejection> {
        let page = PageQuery::read(query, (PAGE_MAX, PAGE_MAX), &["purpose", "order"])?;
        let purpose = page.parsed("purpose", "batch or batch_output", |purpose| {
            PURPOSES.into_iter().find(|known| *known == purpose)
        })?;
        page.parsed("order", "desc, the newest first", |order| (order == "desc").then_some(()))?;
        let after = page
            .after_id("the id of the last file of the page before", |id| BatchFileId::from_str(id).ok())?
            .map(|id| (id.number(), id.to_string()));
        let (limit, rows) = (page.limit, queue.host.file_rows(tenant));
        let render = move |queue: &RegionalJobQueue| {
            let files = rows.files();
            let files = files.iter().filter(|file| {
                let key = (file.id.number(), file.id.to_string());
                purpose.is_none_or(|purpose| purpose_of(file.id) == purpose)
                    && after.as_ref().is_none_or(|after| key < *after)
            });
            job_lists::page(files.map(|file| queue.shown_file(file)), limit)
        };
        self.page(tenant, render).await
    }

    /// Sends the content of a file.
    pub(super) async fn file_content(
        &self,
        session: &mut ServerSession,
        queue: &RegionalJobQueue,
        tenant: &str,
        client_id: &str,
    ) -> Result<AfterResponse, ForwardError> {
        let gateway = RequestingGateway::of(session, &self.residency.catalogue)?;
        let id = queue.parse_file(client_id)?;
        let ContentOrigin { residency, deployments } =
            queue.host.origin(tenant, id).ok_or_else(no_such_file)?;
        let deployments = deployments.iter().map(String::as_str);
        self.residency.check_content_policy(&gateway, client_id, residency.as_deref(), deployments)?;
        let FileContent { bytes, parts } = queue.host.content(tenant, id).ok_or_else(no_such_file)?;
        let length = |part: &Vec<StoredRange>| part.iter().map(|range| range.length).sum::<u64>();
        // Held until the response was written.
        let memory = reserve(&queue.results, tenant, parts.iter().map(length).max().unwrap_or_default())?;
        let mut parts = parts.iter();
        // The first part is read before the head is sent: an error of the store is still a response.
        let mut next = match parts.next() {
            Some(part) => queue.recorded(queue.host.read_part(tenant, id, part).await).map_err(rejected)?,
            None => Bytes::new(),
        };
        let mut head = respond::head(200, &self.region_header());
        respond::put(&mut head, CONTENT_TYPE.as_str(), "application/jsonl");
        respond::put(&mut head, CONTENT_LENGTH.as_str(), &bytes.to_string());
        let send = async {
            respond::begin(session, head).await.ok()?;
            loop {
                session.write_response_body(next, false).await.ok()?;
                let Some(part) = parts.next() else { break };
                next = queue.recorded(queue.host.read_part(tenant, id, part).await).ok()?;
            }
            session.write_response_body(Bytes::new(), true).await.ok()
        };
        let sent = send.await;
        drop(memory);
        // A response that is cut off can only be recognised by its closed connection.
        Ok(if sent.is_some() { AfterResponse::Reuse } else { AfterResponse::Close })
    }

    /// Deletes a file.
    pub(super) async fn delete_file(
        &self,
        queue: &RegionalJobQueue,
        tenant: &str,
        id: &str,
    ) -> Result<Value, Rejection> {
        let file = queue.parse_file(id)?;
        match queue.recorded(queue.host.delete_file(tenant, file).await).map_err(rejected)? {
            FileDeletion::Deleted => Ok(json!({"id": id, "object": "file", "deleted": true})),
            FileDeletion::Unknown => Err(no_such_file()),
            FileDeletion::InUse => {
                let message =
                    "A batch that has not ended reads the file; cancel the batch first, or wait for its end.";
                Err(Rejection::new(ErrorCode::FileInUse, message))
            }
        }
    }

    pub(super) fn region_header(&self) -> [(&'static str, &str); 1] {
        [(headers::REGION, self.region.as_str())]
    }
}

impl RegionalJobQueue {
    /// Reads the identifier of a file of this region.
    pub(super) fn parse_file(&self, id: &str) -> Result<BatchFileId, Rejection> {
        of_region(id, &self.region).and_then(|id| id.parse().ok()).ok_or_else(no_such_file)
    }

    /// Returns the identifier of a file or a batch for clients, with the region of the queue.
    pub(super) fn client_id(&self, id: &dyn std::fmt::Display) -> String {
        format!("{id}.{}", self.region.as_str().replace('/', "."))
    }

    /// Renders a file.
    pub(super) fn shown_file(&self, file: &FileInfo) -> Value {
        let FileInfo { id, name, bytes, created, expires } = file;
        json!({
            "id": self.client_id(id),
            "object": "file",
            "bytes": bytes,
            "created_at": seconds(*created),
            "expires_at": seconds(*expires),
            "filename": name,
            "purpose": purpose_of(*id),
            "status": "processed",
            "status_details": null,
        })
    }
}

/// Returns an identifier without its region; none if that is another one.
pub(super) fn of_region<'a>(id: &'a str, region: &RegionId) -> Option<&'a str> {
    let (id, of) = id.split_once('.')?;
    (of == region.as_str().replace('/', ".")).then_some(id)
}

fn purpose_of(id: BatchFileId) -> &'static str {
    match id {
        BatchFileId::Upload(_) => PURPOSES[0],
        BatchFileId::Output(_) | BatchFileId::Errors(_) => PURPOSES[1],
    }
}

/// Estimates the work of a body; one input for an invalid one, which the worker rejects.
fn work(operation: JobOperation, body: &[u8]) -> LineWork {
    let inputs = kind(operation).inputs(body).unwrap_or(1);
    LineWork { inputs, tokens: (body.len() as u64 / BYTES_PER_TOKEN).max(inputs) }
}

pub(super) fn no_such_file() -> Rejection {
    let message = "There is no such file, or it was deleted, or its retention time has passed; the list is GET /v1/files.";
    Rejection::new(ErrorCode::FileNotFound, message)
}
