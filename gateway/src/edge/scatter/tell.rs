//! The answer of the whole, on its way to the client.

use super::super::admit::Request;
use super::super::allowances::Taken;
use super::super::forward::{Edge, NotForwarded};
use super::joining::{Head, Told};
use crate::events::Times;
use crate::listener::{self, AfterAnswer};
use crate::metrics::Ending;
use crate::relay;
use crate::respond;
use bytes::Bytes;
use http::Version;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::headers;
use tokio::sync::mpsc::Receiver;

/// What is noted in a request's account while its answer is told.
pub(super) struct Telling<'a> {
    /// The region of the first piece, and where the time went of the slowest.
    pub(super) answered: &'a mut Option<(RegionIndex, Times)>,
    pub(super) tokens: &'a mut Option<u64>,
    pub(super) ending: &'a mut Ending,
}

impl Edge {
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
                    self.begin(session, request, taken, head).await
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

    async fn begin(
        &self,
        session: &mut ServerSession,
        request: &Request,
        taken: &Taken,
        head: Head,
    ) -> pingora::Result<()> {
        let Head {
            length,
            content_type,
            revision,
            regions,
            attempts,
            parts,
            tokens,
            slowest: (waited, timing),
        } = head;
        // One of each region that has answered, in their order; they lead to the others, which have the same request.
        let receipts: Vec<_> =
            regions.iter().filter_map(|(_, receipt)| receipt.map(|id| id.to_string())).collect();
        let receipts = receipts.join(",");
        let id = |(region, _)| self.config.catalogue.region(region).id.as_str();
        let regions = regions.into_iter().map(id).collect::<Vec<_>>().join(",");
        let timing = timing.gateway_header(request.arrived.elapsed(), waited);
        let left = taken.headers();
        let parts = parts.to_string();
        let (attempts, tokens) = (attempts.to_string(), tokens.map(|tokens| tokens.to_string()));
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, &regions),
            (headers::ATTEMPTS, &attempts),
            (headers::PARTS, &parts),
            (headers::SERVER_TIMING, &timing),
        ];
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let revision = revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let cors = self.cors(session);
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        extra.extend((!receipts.is_empty()).then_some((headers::RECEIPT, receipts.as_str())));
        // Of an answer that is still being computed nobody knows.
        extra.extend(tokens.as_deref().filter(|_| length.is_some()).map(|tokens| (headers::TOKENS, tokens)));
        let mut answer = respond::head(200, &extra);
        if let Some(content_type) = content_type {
            answer.headers.insert(CONTENT_TYPE, content_type);
        }
        match length {
            Some(length) => respond::put(&mut answer, CONTENT_LENGTH.as_str(), &length.to_string()),
            // HTTP/2 frames by itself, and HTTP/1.0 by closing.
            None if !session.is_http2() && session.req_header().version == Version::HTTP_11 => {
                respond::put(&mut answer, TRANSFER_ENCODING.as_str(), "chunked");
            }
            None => {}
        }
        listener::heed_notice(session);
        respond::begin(session, answer).await
    }
}
