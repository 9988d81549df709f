//! Lists of the jobs, files and batches of a tenant: the pages of all regions with a queue, merged.
//!
//! All regions get the request at the same time and have one deadline, so that those that do not respond delay a list together, by
//! [`LIST_TIMEOUT`], and are named in `unavailable_regions`; their rows are missing. The memory of a page is reserved before the page
//! is received, and a list has [`PAGES_IN_MEMORY`] of the longest pages in memory at most: the regions keep the others until those
//! before were merged.

use super::batch_caller::BatchCaller;
use super::jobs::JobForwarder;
use super::request::RequestContext;
use crate::body_memory::{BodyError, Reservation};
use crate::job_lists::{LIST_BYTES_MAX, MergedList};
use crate::listener::AfterResponse;
use crate::metrics::RequestOutcome;
use crate::relay;
use crate::request_head::UpstreamMethod;
use crate::respond::{ForwardError, Rejection};
use crate::upstream::{ResponseBody, UpstreamResponse};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use pingora::protocols::http::ServerSession;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::{ErrorBody, ErrorCode};
use replica_api::jobs::JOBS;
use serde_json::{Map, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};

/// Time within which the regions of a list must have sent their pages: many round trips around the world, and the longest page over
/// a slow link.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pages of the maximum length that a list has in memory, beside the merged one.
const PAGES_IN_MEMORY: usize = 4;

/// List that is sent to all regions.
struct ListRequest<'a> {
    /// Path and query.
    target: String,
    caller: &'a BatchCaller<'a>,
    id: &'a str,
    deadline: Instant,
    /// A permit for each byte of the pages in memory.
    bytes: Arc<Semaphore>,
}

/// Page of a region with its memory.
struct ReceivedPage {
    text: Bytes,
    memory: Reservation,
    share: OwnedSemaphorePermit,
}

impl JobForwarder {
    /// Responds with the list at a path of the tenant's jobs, files or batches. `page` is the path, and the number of rows of a
    /// page if the query does not say.
    pub(super) async fn page(
        &self,
        session: &mut ServerSession,
        page: (&'static str, usize),
        caller: BatchCaller<'_>,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let query = session.req_header().uri.query().unwrap_or_default().to_owned();
        let list = self.list(page, &query, &caller, &context.id);
        let (list, memory) = tokio::select! {
            biased;
            list = list => list?,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        let after = self.responder.local(session, list.into_bytes(), &context.id).await;
        drop(memory);
        context.outcome = RequestOutcome::of_session(session);
        Ok(after)
    }

    /// Returns the list at `path` of the tenant's jobs, files or batches in all regions that its policy and that of the request
    /// allow, the newest first, and its memory.
    async fn list(
        &self,
        (path, page_default): (&'static str, usize),
        query: &str,
        caller: &BatchCaller<'_>,
        id: &str,
    ) -> Result<(String, Reservation), ForwardError> {
        // The last one applies, as in the region.
        let limit = query.split('&').filter_map(|pair| pair.strip_prefix("limit=")).next_back();
        let limit = limit.and_then(|limit| limit.parse().ok()).unwrap_or(page_default);
        let request = ListRequest {
            target: if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") },
            caller,
            id,
            deadline: Instant::now() + LIST_TIMEOUT,
            bytes: Arc::new(Semaphore::new(PAGES_IN_MEMORY * LIST_BYTES_MAX)),
        };
        let (sender, pages) = mpsc::unbounded_channel();
        // At the same time, so that a merge does not count as time of a region.
        let (unavailable, (list, invalid, mut memory)) =
            tokio::try_join!(self.receive(&request, sender), merge(pages, caller, limit))?;
        let mut further = Map::new();
        // As in the API of OpenAI.
        if path != JOBS {
            let (first, last) = list.ends().unzip();
            further.extend([("first_id".to_owned(), json!(first)), ("last_id".to_owned(), json!(last))]);
        }
        let unavailable = unavailable.union(invalid);
        if !unavailable.is_empty() {
            let names = unavailable.iter().map(|region| self.catalogue.region(region).id.as_str());
            further.insert("unavailable_regions".to_owned(), names.collect());
        }
        let bytes = list.bytes();
        let BatchCaller { body_reader, tenant, .. } = caller;
        memory.grow_to(2 * bytes).inspect_err(|error| body_reader.count_rejection(error))?;
        let render = move || list.render(&further);
        let text = body_reader.cpu.run_on(Some(tenant.index), bytes, render).await;
        Ok((text, memory))
    }

    /// Requests the pages of all regions and passes them on as they arrive. Returns the regions without a page.
    async fn receive(
        &self,
        request: &ListRequest<'_>,
        pages: mpsc::UnboundedSender<(RegionIndex, ReceivedPage)>,
    ) -> Result<RegionSet, ForwardError> {
        let BatchCaller { tenant, view, requested, .. } = request.caller;
        let with_jobs = self.region_monitor.states().instances.regions_with_jobs();
        let permitted = |policy: &ResidencyPolicy| policy.permitted(&self.catalogue);
        let allowed = permitted(&tenant.residency).intersect(permitted(requested));
        let regions = with_jobs.intersect(allowed).intersect(view.routed);
        let received = regions.iter().map(async |region| {
            let page = timeout_at(request.deadline, self.region_page(request, region)).await;
            (region, page.unwrap_or(Ok(None)))
        });
        let mut received: FuturesUnordered<_> = received.collect();
        let mut unavailable = RegionSet::EMPTY;
        while let Some((region, page)) = received.next().await {
            match page? {
                // The receiver is gone only if the list has failed.
                Some(page) => drop(pages.send((region, page))),
                None => unavailable.insert(region),
            }
        }
        Ok(unavailable)
    }

    /// Receives the page of a region; none if it cannot be reached or has no page.
    async fn region_page(
        &self,
        ListRequest { target, caller, id, bytes, .. }: &ListRequest<'_>,
        region: RegionIndex,
    ) -> Result<Option<ReceivedPage>, ForwardError> {
        let BatchCaller { tenant, view, body_reader, owner, .. } = caller;
        // No byte of the page is received before its memory is reserved.
        let sent = self.send(UpstreamMethod::Get, target.clone(), region, tenant, view, id, 0);
        let Some(UpstreamResponse { head, body: ResponseBody::Streamed(body) }) = sent.await else {
            return Ok(None);
        };
        let length = body.declared().unwrap_or(LIST_BYTES_MAX).min(LIST_BYTES_MAX);
        let Ok(permits) = u32::try_from(length) else { return Ok(None) };
        let Ok(share) = bytes.clone().acquire_many_owned(permits).await else { return Ok(None) };
        let mut memory = body_reader.reservation(*owner);
        memory.grow_to(length).inspect_err(|error| body_reader.count_rejection(error))?;
        // Once: a vector that grows takes up to twice its length.
        let page = Vec::with_capacity(length);
        let Ok(text) = body.read_after(page, LIST_BYTES_MAX, &self.upstream).await else { return Ok(None) };
        match head.status.as_u16() {
            200 => Ok(Some(ReceivedPage { text, memory, share })),
            400 => Err(invalid_query(&text).into()),
            _ => Ok(None),
        }
    }
}

/// Merges pages as they arrive. Returns the list, the regions whose page is no list, and the memory of the list.
async fn merge(
    mut pages: mpsc::UnboundedReceiver<(RegionIndex, ReceivedPage)>,
    BatchCaller { tenant, body_reader, owner, .. }: &BatchCaller<'_>,
    limit: usize,
) -> Result<(MergedList, RegionSet, Reservation), ForwardError> {
    let mut memory = body_reader.reservation(*owner);
    let (mut list, mut invalid) = (MergedList::default(), RegionSet::EMPTY);
    while let Some((region, ReceivedPage { text, memory: of_page, share })) = pages.recv().await {
        let reserved: Result<(), BodyError> = memory.grow_to(list.bytes() + text.len());
        reserved.inspect_err(|error| body_reader.count_rejection(error))?;
        let (bytes, mut merged) = (text.len(), std::mem::take(&mut list));
        let merge = move || (merged.add(&text, limit), merged);
        let is_list;
        (is_list, list) = body_reader.cpu.run_on(Some(tenant.index), bytes, merge).await;
        drop((of_page, share));
        if !is_list {
            invalid.insert(region);
        }
    }
    Ok((list, invalid, memory))
}

/// Returns the rejection of a query that a region has rejected.
fn invalid_query(body: &[u8]) -> Rejection {
    let message = serde_json::from_slice::<ErrorBody>(body).map(|body| body.error.message);
    Rejection::new(ErrorCode::InvalidValue, message.unwrap_or_else(|_| "The query is not valid.".to_owned()))
}
