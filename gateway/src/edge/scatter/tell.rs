//! The answer of the whole, on its way to the client.

use super::super::allowances::Taken;
use super::super::request::NotForwarded;
use super::super::request::Request;
use super::joining::Told;
use super::split::Splitter;
use crate::events::Times;
use crate::listener::AfterAnswer;
use crate::metrics::Ending;
use crate::relay;
use bytes::Bytes;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use tokio::sync::mpsc::Receiver;

/// What is noted in a request's account while its answer is told.
pub(super) struct Telling<'a> {
    /// The region of the first piece, and where the time went of the slowest.
    pub(super) answered: &'a mut Option<(RegionIndex, Times)>,
    pub(super) tokens: &'a mut Option<u64>,
    pub(super) ending: &'a mut Ending,
}

impl Splitter {
    /// Writes what is produced, or finds that the client has hung up.
    pub(super) async fn tell(
        &self,
        session: &mut ServerSession,
        request: &Request,
        mut told: Receiver<Told>,
        taken: &mut Taken,
        telling: Telling<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        loop {
            let next = tokio::select! {
                biased;
                next = told.recv() => next,
                () = relay::client_gone(session) => return Err(NotForwarded::ClientGone),
            };
            let written = match next {
                Some(Told::Head(head)) => {
                    taken.used(head.tokens);
                    let (waited, region) = head.slowest;
                    let times = Times { to_head: request.arrived.elapsed(), waited, region };
                    *telling.answered = head.regions.first().map(|(region, _)| (*region, times));
                    *telling.tokens = head.tokens;
                    *telling.ending = Ending::BrokeOff { status: 200 };
                    self.responder.begin_joined(session, request, taken, head).await
                }
                Some(Told::Chunk(chunk)) => session.write_response_body(chunk.into(), false).await,
                Some(Told::End(tokens)) => {
                    taken.used(tokens);
                    *telling.tokens = tokens;
                    *telling.ending = Ending::as_told(session);
                    match session.write_response_body(Bytes::new(), true).await {
                        Ok(()) => return Ok(AfterAnswer::Reuse),
                        Err(error) => Err(error),
                    }
                }
                // The producer has failed and tells so itself.
                None => std::future::pending().await,
            };
            if let Err(error) = written {
                tracing::debug!(%error, "the client left before all of its answer");
                return Ok(AfterAnswer::Close);
            }
        }
    }
}
