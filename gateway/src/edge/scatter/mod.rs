//! Split requests: one request computed in parts by several replicas, with one joined response.
//!
//! `gateway_core::scatter` decides where a body is split, how large a part is, which region gets the next part, and how
//! the responses are joined. This module executes it: every part takes the path of a request (the same allowed regions,
//! the same deadline, attempts of its own), as many parts are in flight as the decision allows, and their responses are
//! joined in order.
//!
//! ```text
//!  produce:       forward, forward … ─▶ received, in any order ─▶ joined, in order ─┐
//!                    ▲ while there is capacity for the responses                    │ chunks
//!  write_joined:  wait for the first chunk, or for the client to disconnect ◀───────┘
//! ```
//!
//! Both run in the task of the request, and the end of either ends the other, so a client that disconnects cancels all
//! parts.
//!
//! **First byte to the client.** The response starts when all parts are received: until then a part that fails finally
//! can still be reported with its own rejection. A response that does not fit into [`BUFFERED_BYTES_MAX`] starts when
//! the buffer is full; a later failure truncates it, because the status has been sent by then. The deadline of the
//! request holds for all parts.
//!
//! **Memory.** The bodies of parts have a budget shared by all split requests ([`capacity`]), and the responses have
//! one per request ([`join_buffer`]).
//!
//! **Charges.** Rate limits are charged once, for the whole request. The tokens of all parts are charged when there is
//! a response; a request that is rejected in the end is not charged, like any other, although some parts were computed.

mod capacity;
pub(in crate::edge) mod join_buffer;
mod part;
mod produce;
mod split;
mod write;

use super::request::Request;
use super::request::RequestContext;
use super::tenant_limiters::TokenReservation;
use super::view::View;
use crate::listener::AfterResponse;
use crate::respond::ForwardError;
use crate::respond::Rejection;
pub(super) use capacity::{PART_BODIES_BYTES_MAX, SPLIT_REQUESTS_MAX, SplitCapacity};
use gateway_core::trail::Trail;
use part::PartFailure;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use split::RequestSplit;
pub(super) use split::Splitter;
use std::sync::Arc;
use tokio::sync::mpsc;
use write::JoinedAccount;

/// Trails of the parts, merged into the trail of the request on drop, so on every outcome.
struct PartTrails<'a> {
    of_parts: Vec<Trail>,
    of_request: &'a mut Trail,
}

impl Drop for PartTrails<'_> {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.of_parts);
        parts.into_iter().for_each(|part| self.of_request.merge(part));
    }
}

impl Splitter {
    /// Has the parts computed and responds with the joined response.
    pub(super) async fn scatter(
        &self,
        session: &mut ServerSession,
        request: &Request,
        view: &Arc<View>,
        split: RequestSplit<'_>,
        reservation: &mut TokenReservation,
        context: &mut RequestContext<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let count = split.sub_requests.len();
        let receipts = context.receipts();
        let failed = {
            let RequestContext { trail, served_by, tokens, outcome, .. } = context;
            let mut trails = PartTrails { of_parts: vec![Trail::default(); count], of_request: trail };
            let (sender, events) = mpsc::channel(1);
            let mut producer =
                Box::pin(self.produce(request, view, split, receipts.as_ref(), &mut trails.of_parts, sender));
            let mut writer = Box::pin(self.write_joined(
                session,
                request,
                events,
                reservation,
                JoinedAccount { served_by, tokens, outcome },
            ));
            tokio::select! {
                biased;
                produced = &mut producer => match produced {
                    Ok(()) => return writer.await,
                    Err((failed, false)) => failed,
                    Err((_, true)) => {
                        // The client received a part of the response and retries. `meridian explain` shows the attempts.
                        tracing::warn!(id = request.id, "joined response truncated because a later part failed");
                        return Ok(AfterResponse::Close);
                    }
                },
                written = &mut writer => return written,
            }
        };
        match failed {
            PartFailure::Response(response) => {
                Ok(self.responder.relay(session, request, reservation, *response, context).await)
            }
            PartFailure::Truncated(region) => Err(self.truncated(region).into()),
            PartFailure::Request(error) => Err(error),
        }
    }

    /// Rejection of a request whose response was truncated.
    fn truncated(&self, region: RegionIndex) -> Rejection {
        let message = format!(
            "The response of region {} was truncated, and no other region computed that part in time; try again.",
            self.config.catalogue.region(region).id
        );
        Rejection::new(ErrorCode::RegionUnreachable, message)
    }
}
