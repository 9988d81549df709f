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
mod tell;

use super::account::Account;
use super::admit::Request;
use super::allowances::Taken;
use super::forward::{Edge, NotForwarded};
use super::refusals::too_many_inputs;
use super::view::View;
use crate::listener::AfterAnswer;
use crate::metrics::Turn;
use crate::respond::Refusal;
use gateway_core::scatter::dispatch::{self, SPLIT_INPUTS_MIN, SPLIT_TOKENS_MIN, SplitPlan, SplitTarget};
use gateway_core::scatter::split::{SPECIAL_TOKENS, SplittableBody, SubRequest};
use gateway_core::tenant::Cost;
use gateway_core::trail::Trail;
use piece::Failed;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
pub(super) use room::{AT_ONCE_MAX, PIECES_BYTES_MAX, Room};
use std::sync::Arc;
use std::time::Duration;
use tell::Telling;
use tokio::sync::{SemaphorePermit, mpsc};

/// A request that is worth cutting, and how.
pub(super) struct Cut<'a> {
    cutting: Arc<SplittableBody>,
    pieces: Vec<SubRequest>,
    places: Vec<SplitTarget>,
    /// Its turn; one that must be cut can wait for it.
    turn: Option<SemaphorePermit<'a>>,
}

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

impl Edge {
    /// How the request is cut, if it is worth it. A small one is not even looked at.
    pub(super) async fn cut(&self, request: &Request, view: &View) -> Result<Option<Cut<'_>>, Refusal> {
        let Cost { inputs, tokens } = request.cost;
        if inputs < SPLIT_INPUTS_MIN && tokens < SPLIT_TOKENS_MIN {
            return Ok(None);
        }
        let tokens = tokens.saturating_add(inputs * SPECIAL_TOKENS);
        let places = self.places(request, view);
        let Some(scale) = dispatch::plan_split(inputs, tokens, &places) else { return Ok(None) };
        let SplitPlan { sub_request_tokens, targets: places } = scale;
        let turn = self.scattering.turn_now();
        if turn.is_none() && !dispatch::must_be_split(inputs, tokens) {
            self.metrics.turns.count(Turn::Whole);
            return Ok(None);
        }
        let (path, body) = (request.path, request.body.bytes.clone());
        let cutting =
            self.intake.cpu.run(Some(request.tenant.index), move || SplittableBody::read(path, &body)).await;
        let Some(cutting) = cutting.map_err(too_many_inputs)? else { return Ok(None) };
        let pieces = cutting.sub_requests(sub_request_tokens);
        let worth_it = pieces.len() > 1;
        if worth_it {
            self.metrics.turns.count(if turn.is_some() { Turn::AtOnce } else { Turn::Waited });
        }
        Ok(worth_it.then(|| Cut { cutting: Arc::new(cutting), pieces, places, turn }))
    }

    /// The regions that could take the request, best first, and what they say of their room.
    fn places(&self, request: &Request, view: &View) -> Vec<SplitTarget> {
        let selection = self.choose(request, view, *request.allowed, &request.about());
        let known = self.watch.known();
        let place = |region: RegionIndex, rtt: Duration| {
            let load = known.load(region, &request.deployment);
            let tokens_per_second = load.tokens_per_second as u64;
            SplitTarget {
                region,
                rtt,
                replicas: load.ready.max(1),
                pending_tokens: load.pending_tokens,
                tokens_per_second,
            }
        };
        // Nothing is spread over a region that is being emptied, while there is another.
        let only_draining = selection.order.iter().all(|candidate| candidate.score.draining);
        let order = selection.order.iter().filter(|candidate| only_draining || !candidate.score.draining);
        // Pieces go where something is ready; where nothing is, to whoever would hold the whole.
        let holds = |region| known.held_for(region, &request.deployment).is_some();
        let warm = order.clone().filter(|candidate| !holds(candidate.region));
        let warm: Vec<_> = warm.map(|candidate| place(candidate.region, candidate.score.rtt)).collect();
        if !warm.is_empty() {
            return warm;
        }
        order.take(1).map(|candidate| place(candidate.region, candidate.score.rtt)).collect()
    }

    /// Has the pieces computed, and answers with what they make together.
    pub(super) async fn scatter(
        &self,
        session: &mut ServerSession,
        request: &Request,
        view: &Arc<View>,
        cut: Cut<'_>,
        taken: &mut Taken,
        account: &mut Account<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        let count = cut.pieces.len();
        let receipts = account.receipts();
        let failed = {
            let Account { trail, answered, tokens, ending, .. } = account;
            let mut trails = Trails { of_pieces: vec![Trail::default(); count], whole: trail };
            let (tell, told) = mpsc::channel(1);
            let mut producer =
                Box::pin(self.produce(request, view, cut, receipts.as_ref(), &mut trails.of_pieces, tell));
            let mut teller =
                Box::pin(self.tell(session, request, told, taken, Telling { answered, tokens, ending }));
            tokio::select! {
                biased;
                produced = &mut producer => match produced {
                    Ok(()) => return teller.await,
                    Err((failed, false)) => failed,
                    Err((_, true)) => {
                        tracing::warn!(id = request.id, "an answer broke off: one of its later pieces failed");
                        return Ok(AfterAnswer::Close);
                    }
                },
                told = &mut teller => return told,
            }
        };
        match failed {
            Failed::Refused(answered) => Ok(self.relay(session, request, taken, *answered, account).await),
            Failed::BrokeOff(region) => Err(self.broke_off(region).into()),
            Failed::Not(why) => Err(why),
        }
    }

    fn broke_off(&self, region: RegionIndex) -> Refusal {
        let message = format!(
            "The answer of region {} broke off, and nobody else has computed that part in time; try again.",
            self.config.catalogue.region(region).id
        );
        Refusal::new(ErrorCode::RegionUnreachable, message)
    }
}
