//! One request, computed in pieces by many replicas at once, and answered as one.
//!
//! `gateway_core::scatter` decides where a body is cut, how large a piece is, who gets the next one and what the answers
//! make together. Here it is done: pieces go the way of every request ([`Edge::go`]: the same allowed set, the same
//! deadline, attempts of their own), as many at once as the decision allows, and their answers are put in order.
//!
//! ```text
//!  produce:  start ─▶ go … go … go ─▶ arrived, in any order ─▶ joined, in order ─┐
//!                 ▲ while there is room for their answers                        │ chunks
//!  tell:     wait for the first chunk, or for the client to hang up ◀────────────┘
//! ```
//!
//! Both run in the request's own task; whoever ends first ends the other, so a client that hangs up takes all pieces
//! along.
//!
//! **When the client sees the first byte.** When all pieces are there: then a piece that finally fails can still be told
//! as what it is, with that piece's refusal. An answer that does not fit into [`HELD_MAX`] is begun when that is full;
//! what fails later cuts it off, which is the only honest end that is left. The request's deadline holds for all pieces.
//!
//! **What is held.** Bodies of pieces have a room of their own ([`room`]), answers one for each request ([`joining`]).
//!
//! **What it costs.** Limits are taken once, for the whole. The tokens of all pieces are charged when there is an answer;
//! a request that is refused in the end is not charged, like any other, though some pieces were computed.

mod joining;
mod piece;
mod produce;
mod room;
mod split;
mod tell;

use super::account::Account;
use super::allowances::Taken;
use super::request::{NotForwarded, Request};
use super::view::View;
use crate::listener::AfterResponse;
use crate::respond::Rejection;
use gateway_core::trail::Trail;
pub(super) use joining::JoinedHead;
use piece::Failed;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
pub(super) use room::{AT_ONCE_MAX, PIECES_BYTES_MAX, Room};
use split::Cut;
pub(super) use split::Splitter;
use std::sync::Arc;
use tell::Telling;
use tokio::sync::mpsc;

/// The trails of the pieces, which become that of the request however it ends.
struct Trails<'a> {
    of_pieces: Vec<Trail>,
    whole: &'a mut Trail,
}

impl Drop for Trails<'_> {
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.of_pieces);
        pieces.into_iter().for_each(|piece| self.whole.merge(piece));
    }
}

impl Splitter {
    /// Has the pieces computed, and answers with what they make together.
    pub(super) async fn scatter(
        &self,
        session: &mut ServerSession,
        request: &Request,
        view: &Arc<View>,
        cut: Cut<'_>,
        taken: &mut Taken,
        account: &mut Account<'_>,
    ) -> Result<AfterResponse, NotForwarded> {
        let count = cut.pieces.len();
        let receipts = account.receipts();
        let failed = {
            let Account { trail, answered, tokens, outcome, .. } = account;
            let mut trails = Trails { of_pieces: vec![Trail::default(); count], whole: trail };
            let (tell, told) = mpsc::channel(1);
            let mut producer =
                Box::pin(self.produce(request, view, cut, receipts.as_ref(), &mut trails.of_pieces, tell));
            let mut teller =
                Box::pin(self.tell(session, request, told, taken, Telling { answered, tokens, outcome }));
            tokio::select! {
                biased;
                produced = &mut producer => match produced {
                    Ok(()) => return teller.await,
                    Err((failed, false)) => failed,
                    Err((_, true)) => {
                        tracing::warn!(id = request.id, "an answer broke off: one of its later pieces failed");
                        return Ok(AfterResponse::Close);
                    }
                },
                told = &mut teller => return told,
            }
        };
        match failed {
            Failed::Refused(answered) => {
                Ok(self.responder.relay(session, request, taken, *answered, account).await)
            }
            Failed::BrokeOff(region) => Err(self.broke_off(region).into()),
            Failed::Not(why) => Err(why),
        }
    }

    fn broke_off(&self, region: RegionIndex) -> Rejection {
        let message = format!(
            "The answer of region {} broke off, and nobody else has computed that part in time; try again.",
            self.config.catalogue.region(region).id
        );
        Rejection::new(ErrorCode::RegionUnreachable, message)
    }
}
