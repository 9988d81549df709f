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
//! **What it costs.** Limits are taken once, for the whole. The tokens of all pieces are charged when there is an answer;
//! a request that is refused in the end is not charged, like any other, though some pieces were computed.

mod joining;

use super::account::Account;
use super::admit::Request;
use super::allowances::Taken;
use super::attempts::Answered;
use super::forward::{Edge, NotForwarded};
use super::refusals::{deadline_passed, too_many_inputs};
use super::view::View;
use crate::events::Times;
use crate::listener::AfterAnswer;
use crate::metrics::Ending;
use crate::relay;
use crate::respond::{self, Refusal};
use crate::upstream::{Answer, AnswerBody};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use gateway_core::scatter::cut::{self, Cutting, Piece, TOKENS_AROUND};
use gateway_core::scatter::join::{NotJoinable, Part};
use gateway_core::scatter::spread::{self, CUT_INPUTS_MIN, CUT_TOKENS_MIN, Place, Scale, Spread};
use gateway_core::tenant::Cost;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::Trail;
use http::Version;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use joining::{Arrived, HELD_MAX, Head, Joining, Told, too_much};
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;

/// What is noted in a request's account while its answer is told.
struct Telling<'a> {
    /// The region of the first piece, and where the time went of the slowest.
    answered: &'a mut Option<(RegionIndex, Times)>,
    tokens: &'a mut Option<u64>,
    ending: &'a mut Ending,
}

/// Requests that are computed in pieces at once; a quarter of a gigabyte is held for them at most. One more goes whole if
/// a replica can take it, and waits if none can.
const AT_ONCE_MAX: usize = 4;
/// Answers that are read as quickly as they would be handed to another thread.
const INLINE_BYTES: usize = 64 << 10;

/// Room for requests that are computed in pieces.
pub(super) fn at_once() -> Semaphore {
    Semaphore::new(AT_ONCE_MAX)
}

/// A request that is worth cutting, and how.
pub(super) struct Cut<'a> {
    cutting: Arc<Cutting>,
    pieces: Vec<Piece>,
    places: Vec<Place>,
    /// Its turn; one that must be cut can wait for it.
    turn: Option<SemaphorePermit<'a>>,
}

/// Why there is no answer to the whole.
enum Failed {
    /// A region's own refusal of a piece.
    Refused(Box<Answered>),
    Not(NotForwarded),
}

impl From<NotForwarded> for Failed {
    fn from(why: NotForwarded) -> Failed {
        Failed::Not(why)
    }
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Failed {
        Failed::Not(refusal.into())
    }
}

/// The trails of the pieces, which become that of the request however it ends.
struct Trails<'a> {
    of_pieces: Vec<Trail>,
    whole: &'a mut Trail,
}

impl Drop for Trails<'_> {
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.of_pieces);
        pieces.into_iter().for_each(|piece| self.whole.absorb(piece));
    }
}

impl Edge {
    /// How the request is cut, if it is worth it. A small one is not even looked at.
    pub(super) async fn cut(&self, request: &Request, view: &View) -> Result<Option<Cut<'_>>, Refusal> {
        let Cost { inputs, tokens } = request.cost;
        if inputs < CUT_INPUTS_MIN && tokens < CUT_TOKENS_MIN {
            return Ok(None);
        }
        let tokens = tokens.saturating_add(inputs * TOKENS_AROUND);
        let places = self.places(request, view);
        let Some(scale) = spread::scale(inputs, tokens, &places) else { return Ok(None) };
        let Scale { piece_tokens, places } = scale;
        let turn = self.scattering.try_acquire().ok();
        if turn.is_none() && !spread::must_be_cut(inputs, tokens) {
            return Ok(None);
        }
        let (path, body) = (request.path, request.body.bytes.clone());
        let cutting =
            spawn_blocking(move || Cutting::read(path, &body)).await.expect("cutting does not panic");
        let Some(cutting) = cutting.map_err(too_many_inputs)? else { return Ok(None) };
        let pieces = cutting.pieces(piece_tokens);
        let worth_it = pieces.len() > 1;
        Ok(worth_it.then(|| Cut { cutting: Arc::new(cutting), pieces, places, turn }))
    }

    /// The regions that could take the request, best first, and what they say of their room.
    fn places(&self, request: &Request, view: &View) -> Vec<Place> {
        let selection = self.choose(request, view, &request.about());
        let known = self.watch.known();
        let place = |region: RegionIndex, rtt: Duration| {
            let load = known.load(region, &request.deployment);
            let tokens_per_second = load.tokens_per_second as u64;
            Place {
                region,
                rtt,
                replicas: load.ready.max(1),
                pending_tokens: load.pending_tokens,
                tokens_per_second,
            }
        };
        selection.order.iter().map(|candidate| place(candidate.region, candidate.score.rtt)).collect()
    }

    /// Has the pieces computed, and answers with what they make together.
    pub(super) async fn scatter(
        &self,
        session: &mut ServerSession,
        request: &Request,
        view: &View,
        cut: Cut<'_>,
        taken: &mut Taken<'_>,
        account: &mut Account<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        let count = cut.pieces.len();
        let failed = {
            let Account { trail, answered, tokens, ending, .. } = account;
            let mut trails = Trails { of_pieces: vec![Trail::default(); count], whole: trail };
            let (tell, told) = mpsc::channel(1);
            let mut producer = Box::pin(self.produce(request, view, cut, &mut trails.of_pieces, tell));
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
            Failed::Not(why) => Err(why),
        }
    }

    /// Starts pieces while there is room, joins what arrives, and tells it. Of a failure it also says whether the client
    /// has part of an answer already.
    async fn produce(
        &self,
        request: &Request,
        view: &View,
        cut: Cut<'_>,
        trails: &mut [Trail],
        tell: Sender<Told>,
    ) -> Result<(), (Failed, bool)> {
        let Cut { cutting, pieces, places, turn } = cut;
        let _turn = match turn {
            Some(turn) => turn,
            None => self.turn(request).await.map_err(|refusal| (refusal.into(), false))?,
        };
        let mut spread = Spread::new(&places);
        let mut joining = Joining::new(&cutting);
        let mut waiting = pieces.into_iter().enumerate().zip(trails).peekable();
        let mut under_way = FuturesUnordered::new();
        loop {
            while let Some(((_, piece), _)) = waiting.peek() {
                if !joining.has_room_for_another(under_way.len()) {
                    break;
                }
                let Some(region) = self.next_place(&mut spread, piece.tokens, request) else { break };
                let ((number, piece), trail) = waiting.next().expect("it was peeked at");
                under_way.push(self.piece(request, view, &cutting, number, piece, region, trail));
            }
            if under_way.is_empty() && waiting.peek().is_none() {
                joining.finish();
            } else if waiting.peek().is_some() && !joining.has_room_for_another(under_way.len()) {
                joining.make_room(under_way.len()).map_err(|refusal| (refusal.into(), false))?;
            }
            if joining.is_told() {
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(landed) = under_way.next() => {
                    let Landed { number, region, tokens, arrived } = landed;
                    spread.ended(region, tokens);
                    joining.arrived(number, arrived.map_err(|failed| (failed, joining.begun))?);
                }
                told = tell.reserve(), if joining.has_something_to_tell() => match told {
                    Ok(room) => room.send(joining.next()),
                    // Nobody listens any more; the one who did knows why.
                    Err(_) => std::future::pending().await,
                },
            }
        }
    }

    /// Waits for the request's turn, as long as it has time.
    async fn turn(&self, request: &Request) -> Result<SemaphorePermit<'_>, Refusal> {
        let left = (request.arrived + request.timeout).saturating_duration_since(Instant::now());
        let turn = tokio::time::timeout(left, self.scattering.acquire()).await;
        Ok(turn.map_err(|_| deadline_passed(request.timeout))?.expect("it is never closed"))
    }

    fn next_place(&self, spread: &mut Spread, tokens: u64, request: &Request) -> Option<RegionIndex> {
        let known = self.watch.known();
        let region = spread.next(tokens, |region| known.fleet.health(region, &request.deployment))?;
        assert!(
            request.allowed.contains(region),
            "a piece is sent only where its request is allowed (invariant 1, Lawful)"
        );
        Some(region)
    }

    /// One piece, from its body to its part of the answer.
    #[expect(
        clippy::too_many_arguments,
        reason = "what a piece is made of, once, in the one place that makes them"
    )]
    async fn piece(
        &self,
        whole: &Request,
        view: &View,
        cutting: &Arc<Cutting>,
        number: usize,
        piece: Piece,
        region: RegionIndex,
        trail: &mut Trail,
    ) -> Landed {
        let tokens = piece.tokens;
        let arrived = self.computed(whole, view, cutting, piece, region, trail).await;
        Landed { number, region, tokens, arrived }
    }

    async fn computed(
        &self,
        whole: &Request,
        view: &View,
        cutting: &Arc<Cutting>,
        piece: Piece,
        region: RegionIndex,
        trail: &mut Trail,
    ) -> Result<Arrived, Failed> {
        let cost = Cost { inputs: piece.inputs.len() as u64, tokens: piece.tokens };
        let body = Bytes::from(cutting.body(&whole.body.bytes, &piece));
        let request = whole.piece(body, cost, region, HELD_MAX);
        let answered = self.go(&request, view, trail).await?;
        if !answered.answer.head.status.is_success() {
            return Err(refused(answered, cutting.field, piece.inputs.start));
        }
        let Answered { answer: Answer { head, body }, region, waited } = answered;
        let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let (shape, inputs) = (cutting.shape, piece.inputs.clone());
        let part = match body {
            AnswerBody::Whole(body) => {
                let large = body.len() > INLINE_BYTES;
                let read = move || Part::read(shape, &body, inputs.len(), inputs.start);
                let part =
                    if large { spawn_blocking(read).await.expect("reading does not panic") } else { read() };
                part.map_err(|why| self.not_joinable(&piece, region, why))?
            }
            AnswerBody::Coming(_) => return Err(too_much().into()),
        };
        Ok(Arrived {
            part,
            content_type: head.headers.get(CONTENT_TYPE).cloned(),
            region,
            attempts: trail.count(),
            waited,
            timing: RegionTiming::parse(text(headers::SERVER_TIMING).unwrap_or_default()),
            tokens: text(headers::TOKENS).and_then(|tokens| tokens.parse().ok()),
        })
    }

    fn not_joinable(&self, piece: &Piece, region: RegionIndex, why: NotJoinable) -> Refusal {
        let region = self.config.catalogue.region(region).id.as_str();
        tracing::error!(region, inputs = ?piece.inputs, why = why.why, "an answer to a piece is none");
        let message = format!(
            "What region {region} answered to inputs {} to {} is no answer to them: {}.",
            piece.inputs.start,
            piece.inputs.end - 1,
            why.why
        );
        Refusal::new(ErrorCode::Internal, message)
    }

    /// Writes what is produced, or finds that the client has hung up.
    async fn tell(
        &self,
        session: &mut ServerSession,
        request: &Request,
        mut told: Receiver<Told>,
        taken: &mut Taken<'_>,
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
                    *telling.answered = head.regions.first().map(|region| (*region, times));
                    *telling.tokens = head.tokens;
                    *telling.ending = Ending::BrokeOff { status: 200 };
                    self.begin(session, request, head).await
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

    async fn begin(&self, session: &mut ServerSession, request: &Request, head: Head) -> pingora::Result<()> {
        let Head { length, content_type, regions, attempts, tokens, slowest: (waited, timing) } = head;
        let regions: Vec<_> =
            regions.into_iter().map(|region| self.config.catalogue.region(region).id.as_str()).collect();
        let regions = regions.join(",");
        let timing = timing.at_the_edge(request.arrived.elapsed(), waited);
        let left = self.allowances.headers(&request.tenant);
        let (attempts, tokens) = (attempts.to_string(), tokens.map(|tokens| tokens.to_string()));
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, &regions),
            (headers::ATTEMPTS, &attempts),
            (headers::SERVER_TIMING, &timing),
        ];
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
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
        respond::begin(session, answer).await
    }
}

/// A piece that is over.
struct Landed {
    number: usize,
    /// Where it was sent first.
    region: RegionIndex,
    tokens: u64,
    arrived: Result<Arrived, Failed>,
}

/// A region's refusal of a piece, as of the whole.
fn refused(mut answered: Answered, field: &str, first: usize) -> Failed {
    if let AnswerBody::Whole(body) = &answered.answer.body {
        let body = cut::as_of_the_whole(body, field, first);
        respond::put(&mut answered.answer.head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        answered.answer.body = AnswerBody::Whole(body.into());
    }
    Failed::Refused(Box::new(answered))
}
