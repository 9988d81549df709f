//! Pieces on their way, until all of them are there.
//!
//! **A piece that is turned away is not the end of the whole.** Where a region says that it has too much to do (429
//! `overloaded`, 503 `saturated`), or that another could help and the plan of the piece had no other or could not pay for
//! one, the piece goes back into the queue. The region gets none before the time it has named; another may have the piece
//! meanwhile. Each further try is paid from the retry budget like any retry, and waits if that is empty. When its tries
//! or its time would not last, the client is given the refusal that the piece was given.
//!
//! **How much is held.** An answer of more than `BUFFERED_RESPONSE_MAX` is not read before [`Joining`] has room for it: it
//! waits in the region and the network. The piece whose turn it is in the answer is always let in, or nothing would move.

use super::super::account::Receipts;
use super::super::refusals::deadline_passed;
use super::super::request::NotForwarded;
use super::super::request::Request;
use super::super::view::View;
use super::joining::{Joining, Told};
use super::piece::{Begun, Failed, Landed, Outcome, Waiting, Whole};
use super::split::Cut;
use super::split::Splitter;
use crate::metrics::PartOutcome;
use crate::respond::{RETRY_AFTER_MS, Rejection};
use futures_util::stream::{FuturesUnordered, StreamExt};
use gateway_core::scatter::dispatch::SubRequestDispatcher;
use gateway_core::scatter::split;
use gateway_core::trail::Trail;
use http::header::RETRY_AFTER;
use regions::health::Health;
use regions::set::RegionIndex;
use replica_core::wire::error::{ErrorCode, Fault, Remedy};
use replica_core::wire::headers;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::SemaphorePermit;
use tokio::sync::mpsc::Sender;

/// RequestTimes that a piece may be turned away; more is no passing fullness.
const TURNED_AWAY_MAX: u32 = 8;
/// How long a piece waits that nobody has told how long to wait, and how long for the retry budget, which earns ten a
/// second.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// The longest wait that is believed; the deadline of no request is further away.
const AGAIN_MAX: Duration = gateway_core::request_options::TIMEOUT_MAX;
/// The least that a region is left alone that has turned a piece away, whatever it has said.
const CLOSED_MIN: Duration = Duration::from_millis(50);

/// The end of a whole without an answer, and whether the client has part of one already.
pub(super) type Unanswered = (Failed, bool);

type UnderWay<'a> = Pin<Box<dyn Future<Output = Landed<'a>> + Send + 'a>>;

/// A piece that may be tried again: when, and who had better not be asked until then.
struct Again {
    wait: Duration,
    by: Option<RegionIndex>,
}

impl Splitter {
    /// Starts pieces while there is room, joins what arrives, and tells it.
    pub(super) async fn produce(
        &self,
        request: &Request,
        view: &Arc<View>,
        cut: Cut<'_>,
        receipts: Option<&Receipts<'_>>,
        trails: &mut [Trail],
        tell: Sender<Told>,
    ) -> Result<(), Unanswered> {
        let Cut { cutting, pieces, places, turn } = cut;
        let _turn = match turn {
            Some(turn) => turn,
            None => self.turn(request).await.map_err(|refusal| (refusal.into(), false))?,
        };
        let whole = Whole { request, view, cutting: &cutting, receipts };
        let deadline = request.arrived + request.timeout;
        let mut spread = SubRequestDispatcher::new(&places);
        let mut joining = Joining::new(&cutting);
        // By number, so that the first is the one that the answer waits for: nothing behind it can end without it.
        let mut waiting: BTreeMap<usize, _> = pieces.into_iter().enumerate().zip(trails).map(new).collect();
        let mut begun: BTreeMap<usize, (Waiting<'_>, RegionIndex, Begun)> = BTreeMap::new();
        let mut under_way: FuturesUnordered<UnderWay<'_>> = FuturesUnordered::new();
        loop {
            // When there is something to do though nothing has landed.
            let mut wake = deadline;
            while let Some((_, next)) = waiting.first_key_value() {
                let now = Instant::now();
                let bytes = cutting.body_bytes(request.body.bytes.len(), &next.piece);
                let place = self.scattering.body_now(bytes);
                // Only who holds no room may wait for some.
                let has_place = place.is_some() || under_way.is_empty();
                if !has_place || !joining.has_room_for(next.number, under_way.len() + begun.len()) {
                    break;
                }
                if next.not_before > now {
                    wake = wake.min(next.not_before);
                    break;
                }
                let Some(region) = self.next_place(&mut spread, next.piece.tokens, request, now) else {
                    wake = wake.min(spread.next_accepting(now).unwrap_or(deadline));
                    break;
                };
                if next.turned_away > 0 && !self.watch.known().budgets.retry.withdraw(now) {
                    spread.ended(region, next.piece.tokens);
                    wake = wake.min(now + AGAIN_AFTER);
                    break;
                }
                let (_, next) = waiting.pop_first().expect("it is the first");
                under_way.push(Box::pin(self.ask_for(whole, next, region, joining.revision(), place)));
            }
            while let Some(next) = begun.first_entry() {
                let (number, bytes) = (*next.key(), next.get().2.bytes);
                if !joining.lets_in(number, bytes).map_err(|refusal| (refusal.into(), joining.begun))? {
                    break;
                }
                let (waiting, region, begun) = next.remove();
                under_way.push(Box::pin(self.read_on(whole, waiting, region, begun)));
            }
            let unanswered = under_way.len() + begun.len();
            let all_there = unanswered == 0 && waiting.is_empty();
            if all_there {
                joining.finish();
            } else if waiting.keys().next().is_some_and(|next| !joining.has_room_for(*next, unanswered)) {
                joining.make_room(unanswered).map_err(|refusal| (refusal.into(), false))?;
            }
            if joining.is_told() {
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(landed) = under_way.next() => {
                    let Landed { region, waiting: mut landed, outcome } = landed;
                    let (number, tokens) = (landed.number, landed.piece.tokens);
                    match outcome {
                        Outcome::Begun(answer) => drop(begun.insert(number, (landed, region, answer))),
                        Outcome::Arrived(arrived) if joining.is_of_one_model(arrived.source.revision) => {
                            self.metrics.parts.count(PartOutcome::Succeeded);
                            spread.ended(region, tokens);
                            joining.arrived(number, arrived).map_err(|refusal| (refusal.into(), joining.begun))?;
                        }
                        outcome => {
                            let failed = match outcome {
                                Outcome::Failed(failed) => failed,
                                Outcome::Arrived(_) | Outcome::Begun(_) => model_changed(request).into(),
                            };
                            spread.ended(region, tokens);
                            joining.left(number);
                            let now = Instant::now();
                            match again(&failed) {
                                Some(Again { wait, by: Some(by) }) => spread.reject_until(by, now + wait.max(CLOSED_MIN)),
                                Some(Again { wait, by: None }) => landed.not_before = now + wait,
                                None => {
                                    self.metrics.parts.count(PartOutcome::Failed);
                                    return Err((failed, joining.begun));
                                }
                            }
                            let in_time = landed.not_before < deadline && self.someone_opens(request, &spread, deadline);
                            if landed.turned_away == TURNED_AWAY_MAX || !in_time {
                                self.metrics.parts.count(PartOutcome::Failed);
                                return Err((of_the_whole(failed, request), joining.begun));
                            }
                            self.metrics.parts.count(PartOutcome::Rejected);
                            landed.turned_away += 1;
                            landed.why = Some(failed);
                            waiting.insert(number, landed);
                        }
                    }
                }
                told = tell.reserve(), if joining.has_something_to_tell() => match told {
                    Ok(room) => room.send(joining.next()),
                    // Nobody listens any more; the one who did knows why.
                    Err(_) => std::future::pending().await,
                },
                () = tokio::time::sleep_until(wake.into()), if !all_there => {
                    if Instant::now() >= deadline {
                        let why = waiting.into_values().find_map(|waiting| waiting.why);
                        let failed = why.unwrap_or_else(|| deadline_passed(request.timeout).into());
                        return Err((failed, joining.begun));
                    }
                }
            }
        }
    }

    /// Waits for the request's turn, as long as it has time.
    async fn turn(&self, request: &Request) -> Result<SemaphorePermit<'_>, Rejection> {
        let left = (request.arrived + request.timeout).saturating_duration_since(Instant::now());
        let turn = tokio::time::timeout(left, self.scattering.turn()).await;
        turn.map_err(|_| deadline_passed(request.timeout))
    }

    fn next_place(
        &self,
        spread: &mut SubRequestDispatcher,
        tokens: u64,
        request: &Request,
        now: Instant,
    ) -> Option<RegionIndex> {
        let known = self.watch.known();
        let health = |region| known.fleet.health(region, &request.deployment);
        let region = spread.next(tokens, health, now)?;
        assert!(
            request.allowed.contains(region),
            "a piece is sent only where its request is allowed (invariant 1, Residency)"
        );
        Some(region)
    }

    /// Whether somebody who lives takes pieces before the deadline.
    fn someone_opens(&self, request: &Request, spread: &SubRequestDispatcher, deadline: Instant) -> bool {
        let known = self.watch.known();
        let lives = |region| known.fleet.health(region, &request.deployment) != Health::Down;
        spread.accepting_before(deadline).any(lives)
    }
}

/// Whether a piece that failed so may be tried again at all.
fn again(failed: &Failed) -> Option<Again> {
    let (code, wait, by) = match failed {
        Failed::BrokeOff(_) => return Some(Again { wait: Duration::ZERO, by: None }),
        Failed::Not(NotForwarded::ClientGone) => return None,
        Failed::Not(NotForwarded::Refused(refusal)) => (refusal.code, refusal.retry_after, None),
        Failed::Refused(answered) => {
            let text = |name: &str| answered.answer.head.headers.get(name)?.to_str().ok();
            let number = |name| text(name).and_then(|number| number.parse().ok());
            let wait = number(RETRY_AFTER_MS).map(Duration::from_millis);
            let wait = wait.or(number(RETRY_AFTER.as_str()).map(Duration::from_secs));
            (ErrorCode::parse(text(headers::ERROR)?)?, wait, Some(answered.region))
        }
    };
    let passes = match (code.fault(), code.remedy()) {
        (Fault::Capacity | Fault::Network, Remedy::Wait | Remedy::Elsewhere) => true,
        // One replica of several is gone; that something which cannot happen did is no reason to do it again.
        (Fault::Replica, _) => code == ErrorCode::ReplicaUnreachable,
        (Fault::Caller | Fault::Quota | Fault::Policy, _) | (_, Remedy::Nothing) => false,
    };
    passes.then(|| Again { wait: wait.unwrap_or(AGAIN_AFTER).min(AGAIN_MAX), by })
}

/// A piece was computed by another model than those before it: it is computed again, by theirs.
fn model_changed(request: &Request) -> Rejection {
    let message = format!(
        "The model of '{}' changed while the parts of this request were computed; send the request again.",
        request.deployment
    );
    Rejection::new(ErrorCode::ModelChanged, message).after(AGAIN_AFTER)
}

/// What a piece failed of, as its client is told: nobody has the model any longer that the other pieces were computed by.
fn of_the_whole(failed: Failed, request: &Request) -> Failed {
    let code = match &failed {
        Failed::Refused(answered) => {
            let value = answered.answer.head.headers.get(headers::ERROR);
            value.and_then(|value| value.to_str().ok()).and_then(ErrorCode::parse)
        }
        Failed::BrokeOff(_) | Failed::Not(_) => None,
    };
    if code == Some(ErrorCode::ModelRevisionUnavailable) { model_changed(request).into() } else { failed }
}

/// A piece that was not sent anywhere yet.
fn new<'t>(((number, piece), trail): ((usize, split::SubRequest), &'t mut Trail)) -> (usize, Waiting<'t>) {
    (number, Waiting { number, piece, trail, turned_away: 0, why: None, not_before: Instant::now() })
}
