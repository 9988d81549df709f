//! Writes the joined response of a split request to the client.

use super::super::request::Request;
use super::super::tenant_limiters::TokenReservation;
use super::join_buffer::JoinedEvent;
use super::split::Splitter;
use crate::events::RequestTimes;
use crate::listener::AfterResponse;
use crate::metrics::RequestOutcome;
use crate::relay;
use crate::respond::ForwardError;
use bytes::Bytes;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use tokio::sync::mpsc::Receiver;

/// Fields of the request context that are set while the joined response is written.
pub(super) struct JoinedAccount<'a> {
    /// Region of the first part, and the times of the slowest part.
    pub(super) served_by: &'a mut Option<(RegionIndex, RequestTimes)>,
    pub(super) tokens: &'a mut Option<u64>,
    pub(super) outcome: &'a mut RequestOutcome,
}

impl Splitter {
    /// Writes the events of the producer until the response ends or the client disconnects.
    pub(super) async fn write_joined(
        &self,
        session: &mut ServerSession,
        request: &Request,
        mut events: Receiver<JoinedEvent>,
        reservation: &mut TokenReservation,
        account: JoinedAccount<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        loop {
            let next = tokio::select! {
                biased;
                next = events.recv() => next,
                () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
            };
            let written = match next {
                Some(JoinedEvent::Head(head)) => {
                    reservation.record_usage(head.tokens);
                    let (waited, region) = head.slowest;
                    let times = RequestTimes { to_head: request.arrived.elapsed(), waited, region };
                    *account.served_by = head.regions.first().map(|(region, _)| (*region, times));
                    *account.tokens = head.tokens;
                    *account.outcome = RequestOutcome::Truncated { status: 200 };
                    self.responder.begin_joined(session, request, reservation, head).await
                }
                Some(JoinedEvent::Chunk(chunk)) => session.write_response_body(chunk.into(), false).await,
                Some(JoinedEvent::End(tokens)) => {
                    reservation.record_usage(tokens);
                    *account.tokens = tokens;
                    *account.outcome = RequestOutcome::of_session(session);
                    match session.write_response_body(Bytes::new(), true).await {
                        Ok(()) => return Ok(AfterResponse::Reuse),
                        Err(error) => Err(error),
                    }
                }
                // The producer has failed, and its result ends the request.
                None => std::future::pending().await,
            };
            if let Err(error) = written {
                // A client closed its connection while the joined response of a split request was sent.
                tracing::debug!(%error, "client disconnected before the end of the response");
                return Ok(AfterResponse::Close);
            }
        }
    }
}
