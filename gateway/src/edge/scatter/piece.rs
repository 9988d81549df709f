//! One piece: from its body to its part of the answer.

use super::super::account::Receipts;
use super::super::policy::Permit;
use super::super::race::Answered;
use super::super::request::NotForwarded;
use super::super::request::Request;
use super::super::router::Routable;
use super::super::view::View;
use super::super::watch::chance;
use super::joining::{Arrived, PIECE_ANSWER_MAX, Source, too_much};
use super::split::Splitter;
use crate::request_body::BufferedBody;
use crate::respond::{self, Rejection};
use crate::upstream::{ResponseBody, StreamedBody, UpstreamResponse};
use bytes::{Bytes, BytesMut};
use gateway_core::scatter::join::{InvalidResponse, PartialResponse};
use gateway_core::scatter::split::{self, SplittableBody, SubRequest};
use gateway_core::tenant::Cost;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::Trail;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use regions::ModelRevision;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

/// Answers that are read as quickly as they would be handed to another thread.
const INLINE_BYTES: usize = 64 << 10;

/// What all pieces of a request share.
#[derive(Clone, Copy)]
pub(super) struct Whole<'a> {
    pub(super) request: &'a Request,
    pub(super) view: &'a Arc<View>,
    pub(super) cutting: &'a Arc<SplittableBody>,
    /// What the identifiers of its receipts are made of, if its client is to be given some.
    pub(super) receipts: Option<&'a Receipts<'a>>,
}

/// A piece that nobody computes yet, or computes no longer.
pub(super) struct Waiting<'t> {
    /// Which, from 0.
    pub(super) number: usize,
    pub(super) piece: SubRequest,
    pub(super) trail: &'t mut Trail,
    /// How often it was turned away, and how it was the last time.
    pub(super) turned_away: u32,
    pub(super) why: Option<Failed>,
    /// It is not sent anywhere before.
    pub(super) not_before: Instant,
}

/// A piece that is over, or at least at the beginning of its answer.
pub(super) struct Landed<'t> {
    /// Where it was sent first.
    pub(super) region: RegionIndex,
    pub(super) waiting: Waiting<'t>,
    pub(super) outcome: Outcome,
}

pub(super) enum Outcome {
    Arrived(Arrived),
    /// Its answer is large, and is read when there is room for it.
    Begun(Begun),
    Failed(Failed),
}

/// An answer of which only the head was read.
pub(super) struct Begun {
    source: Source,
    coming: Box<StreamedBody>,
    /// That it will have.
    pub(super) bytes: usize,
}

/// Why there is no answer to a piece, and so none to the whole, if nobody else has one.
pub(super) enum Failed {
    /// A region's own refusal.
    Refused(Box<Answered>),
    /// The answer of this region broke off while it was read.
    BrokeOff(RegionIndex),
    Not(NotForwarded),
}

impl From<NotForwarded> for Failed {
    fn from(why: NotForwarded) -> Failed {
        Failed::Not(why)
    }
}

impl From<Rejection> for Failed {
    fn from(refusal: Rejection) -> Failed {
        Failed::Not(refusal.into())
    }
}

impl Splitter {
    /// Has a piece computed, `region` being asked first. Its answer is of the model revision that is `required`, if one is. Without a `place` for its body it waits for one.
    pub(super) async fn ask_for<'t>(
        &self,
        whole: Whole<'_>,
        waiting: Waiting<'t>,
        region: RegionIndex,
        required: Option<ModelRevision>,
        place: Option<OwnedSemaphorePermit>,
    ) -> Landed<'t> {
        let Whole { request, view, cutting, receipts } = whole;
        let piece = &waiting.piece;
        let place = match place {
            Some(place) => place,
            None => self.scattering.body(cutting.body_bytes(request.body.bytes.len(), piece)).await,
        };
        let body = BufferedBody::piece(cutting.body(&request.body.bytes, piece).into(), place);
        let cost = Cost { inputs: piece.inputs.len() as u64, tokens: piece.tokens };
        let outcome = match self
            .forward_part(request, view, (body, cost), region, required, waiting.trail)
            .await
        {
            Ok(answered) if answered.answer.head.status.is_success() => {
                let Answered { answer: UpstreamResponse { head, body }, region, waited } = answered;
                let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
                let attempt = waiting.trail.attempts().last();
                let source = Source {
                    region,
                    content_type: head.headers.get(CONTENT_TYPE).cloned(),
                    revision: text(headers::MODEL_REVISION).and_then(|revision| revision.parse().ok()),
                    attempts: waiting.trail.count(),
                    waited,
                    timing: RegionTiming::parse(text(headers::SERVER_TIMING).unwrap_or_default()),
                    tokens: text(headers::TOKENS).and_then(|tokens| tokens.parse().ok()),
                    receipt: receipts.zip(attempt).map(|(receipts, attempt)| receipts.of(attempt)),
                };
                match body {
                    ResponseBody::Buffered(body) => self.part(cutting, &waiting.piece, source, body).await,
                    ResponseBody::Streamed(coming) => {
                        let declared = text(CONTENT_LENGTH.as_str()).and_then(|length| length.parse().ok());
                        let bytes = declared.unwrap_or(PIECE_ANSWER_MAX);
                        Outcome::Begun(Begun { source, coming, bytes })
                    }
                }
            }
            Ok(answered) => Outcome::Failed(refused(answered, cutting.field, waiting.piece.inputs.start)),
            Err(why) => Outcome::Failed(why.into()),
        };
        Landed { region, waiting, outcome }
    }

    /// Routes a part by the newest route table, `region` first, and forwards it.
    async fn forward_part(
        &self,
        request: &Request,
        view: &Arc<View>,
        (body, cost): (BufferedBody, Cost),
        region: RegionIndex,
        required: Option<ModelRevision>,
        trail: &mut Trail,
    ) -> Result<Answered, NotForwarded> {
        let mut permit = Permit::of(request, view);
        self.policy.renew(request, &mut permit)?;
        let chance = chance();
        let (about, allowed) = (request.about_part(cost, chance), *permit.allowed);
        let (client, registered) = (request.client, request.registered);
        let part = Routable { view: &permit.view, about, allowed, registered, client };
        let route = self.router.route_part(&part, region);
        let part = request.part(body, cost, (chance, route), required);
        self.forwarder.forward(&part, permit, trail).await
    }

    /// Reads the rest of an answer for which there is room now.
    pub(super) async fn read_on<'t>(
        &self,
        whole: Whole<'_>,
        waiting: Waiting<'t>,
        region: RegionIndex,
        begun: Begun,
    ) -> Landed<'t> {
        let Begun { source, mut coming, bytes } = begun;
        let mut body = BytesMut::with_capacity(bytes);
        let outcome = loop {
            match coming.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= bytes => body.extend_from_slice(&chunk),
                Ok(Some(_)) => break Outcome::Failed(too_much().into()),
                Ok(None) => {
                    coming.finish(&self.upstream);
                    break self.part(whole.cutting, &waiting.piece, source, body.freeze()).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "an answer to a piece broke off");
                    break Outcome::Failed(Failed::BrokeOff(source.region));
                }
            }
        };
        Landed { region, waiting, outcome }
    }

    /// The part of an answer that is there.
    async fn part(
        &self,
        cutting: &SplittableBody,
        piece: &SubRequest,
        source: Source,
        body: Bytes,
    ) -> Outcome {
        let (shape, inputs, large) = (cutting.shape, piece.inputs.clone(), body.len() > INLINE_BYTES);
        let read = move || PartialResponse::read(shape, &body, inputs.len(), inputs.start);
        let part = if large { spawn_blocking(read).await.expect("reading does not panic") } else { read() };
        match part {
            Ok(part) => Outcome::Arrived(Arrived { part, source }),
            Err(why) => Outcome::Failed(self.not_joinable(piece, source.region, why).into()),
        }
    }

    fn not_joinable(&self, piece: &SubRequest, region: RegionIndex, why: InvalidResponse) -> Rejection {
        let region = self.config.catalogue.region(region).id.as_str();
        tracing::error!(region, inputs = ?piece.inputs, why = why.reason, "an answer to a piece is none");
        let message = format!(
            "What region {region} answered to inputs {} to {} is no answer to them: {}.",
            piece.inputs.start,
            piece.inputs.end - 1,
            why.reason
        );
        Rejection::new(ErrorCode::Internal, message)
    }
}

/// A region's refusal of a piece, as of the whole.
fn refused(mut answered: Answered, field: &str, first: usize) -> Failed {
    if let ResponseBody::Buffered(body) = &answered.answer.body {
        let body = split::rebase_input_index(body, field, first);
        respond::put(&mut answered.answer.head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        answered.answer.body = ResponseBody::Buffered(body.into());
    }
    Failed::Refused(Box::new(answered))
}
