//! Exchange with the other spokes of the region ([`scheduler_api::peer`]).
//!
//! While this spoke holds the scaler lease, it has a task for each other spoke ([`follow`]), which sends the next
//! request when the last one was responded to, and at once when the shared state changes; the request that is under way
//! is then dropped. Any other spoke responds ([`PeerExchange::respond`]): at once to a new state, and otherwise when a
//! request finds no replica, or after the time that the scaler has set.
//!
//! `Spoke` decides; requests use the same client and the same certificates as those of gateways.

use super::hold::Hold;
use crate::events::PeerExchangeFailed;
use crate::hop::UpstreamKey;
use crate::listener::AfterResponse;
use crate::metrics::IngressMetrics;
use crate::relay;
use crate::request_body::BodyReader;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::respond::{self, ForwardError, Rejection};
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::memory::BodyOwner;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use pingora::protocols::http::ServerSession;
use regions::HostPort;
use regions::id::InstanceName;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use scheduler_api::paths;
use scheduler_api::peer::{PEER_WAIT_MAX, PeerRequest, PeerRequestV1, PeerResponse, PeerResponseV1};
use scheduler_core::spoke::{PeerReceipt, Spoke};
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::task::supervise;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Interval at which the list of other spokes is compared with the tasks.
const LIST_PERIOD: Duration = Duration::from_millis(100);
/// Timeout of an exchange, beyond the time for which the other spoke holds it, and therefore independent of the timeouts
/// of the exchanges that are not held.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay after a failed exchange.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// Limit on the bytes of a response: the demand for ten thousand deployments with names of maximum length.
const RESPONSE_BYTES_MAX: usize = 4 << 20;

/// State of the exchanges with the other spokes, as the scaler and as another spoke.
pub(super) struct PeerExchange {
    pub(super) here: RegionIndex,
    pub(super) spoke: Arc<Mutex<Spoke>>,
    pub(super) hold: Arc<Hold>,
    /// Connections to the other spokes.
    pub(super) upstream: Upstream,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) metrics: Arc<IngressMetrics>,
    /// Signals to the scaler, and to the probes of replicas.
    pub(super) scaler_wake: Arc<Notify>,
    pub(super) changed: Arc<Notify>,
}

/// Exchanges with the other spokes while this one holds the scaler lease. `shared` is the number of the shared state.
pub(super) async fn follow(exchange: Arc<PeerExchange>, shared: watch::Receiver<u64>) {
    let mut tasks = JoinSet::new();
    let mut by_peer: BTreeMap<(InstanceName, HostPort), AbortHandle> = BTreeMap::new();
    let mut timer = interval(LIST_PERIOD);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        timer.tick().await;
        while tasks.try_join_next().is_some() {}
        let peers = exchange.spoke.lock().peers();
        by_peer.retain(|(name, address), task| {
            let stays = peers.get(name) == Some(address);
            if !stays {
                task.abort();
            }
            stays
        });
        for peer in peers {
            by_peer.entry(peer).or_insert_with_key(|(name, address)| {
                let (exchange, shared) = (exchange.clone(), shared.clone());
                let key = UpstreamKey { region: exchange.here, address: address.clone() };
                let name = name.clone();
                tasks.spawn(supervise("exchange with a spoke", move || {
                    exchanges(exchange.clone(), shared.clone(), name.clone(), key.clone())
                }))
            });
        }
    }
}

/// Exchanges with one other spoke until cancelled.
async fn exchanges(
    exchange: Arc<PeerExchange>,
    mut shared: watch::Receiver<u64>,
    name: InstanceName,
    key: UpstreamKey,
) {
    let mut is_failing = false;
    loop {
        shared.borrow_and_update();
        let request = exchange.spoke.lock().peer_request(&name, Instant::now());
        let Some(request) = request else {
            // The lease was lost; this task is about to end.
            sleep(LIST_PERIOD).await;
            continue;
        };
        let sent = tokio::select! {
            sent = timeout(request.wait + EXCHANGE_TIMEOUT, send(&exchange.upstream, &key, &request)) => sent,
            Ok(()) = shared.changed() => continue,
        };
        let sent = sent.unwrap_or_else(|late| Err(late.to_string()));
        match sent.and_then(|response| exchange.responded(&name, response)) {
            Ok(()) => is_failing = false,
            Err(error) => {
                let (instance, address, is_new) = (&name, &key.address, !is_failing);
                PeerExchangeFailed { instance, address, error: &error, is_new }
                    .record(&exchange.metrics.peer_failures);
                is_failing = true;
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// Sends a request to another spoke and reads the response.
async fn send(upstream: &Upstream, key: &UpstreamKey, request: &PeerRequest) -> Result<PeerResponse, String> {
    let body = serde_json::to_vec(&PeerRequestV1::from(request)).expect("a request serialises to JSON");
    let body = Bytes::from(body);
    let mut head = RequestHead::new(UpstreamMethod::Post).for_path(paths::PEER_EXCHANGE);
    head.put(HOST.as_str(), AUTHORITY);
    head.put(CONTENT_TYPE.as_str(), "application/json");
    head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
    let received = upstream.send_own(key, &head, &body, RESPONSE_BYTES_MAX).await;
    let (UpstreamResponse { head, body }, _) = received.map_err(|failure| format!("{failure:?}"))?;
    match body {
        ResponseBody::Buffered(body) if head.status.is_success() => {
            let response: PeerResponseV1 =
                serde_json::from_slice(&body).map_err(|error| error.to_string())?;
            response.try_into().map_err(|error: scheduler_api::WireError| error.to_string())
        }
        ResponseBody::Buffered(_) => Err(format!("the spoke responded {}", head.status)),
        ResponseBody::Streamed(_) => Err(format!("the response is longer than {RESPONSE_BYTES_MAX} bytes")),
    }
}

impl PeerExchange {
    /// Records the response of another spoke.
    fn responded(&self, name: &InstanceName, response: PeerResponse) -> Result<(), String> {
        self.metrics.peer_exchanges.add(1);
        let news = self.spoke.lock().peer_responded(name, response, Instant::now());
        let news = news.map_err(|error| error.to_string())?;
        if news.replicas_changed {
            self.changed.notify_one();
        }
        if news.has_woken || news.replicas_changed {
            self.scaler_wake.notify_one();
        }
        Ok(())
    }

    /// Responds to the spoke that scales the region.
    pub(super) async fn respond(&self, session: &mut ServerSession) -> Result<AfterResponse, ForwardError> {
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        let request: PeerRequestV1 = serde_json::from_slice(&body.bytes).map_err(|error| {
            Rejection::new(ErrorCode::InvalidJson, format!("Invalid exchange of a spoke: {error}."))
        })?;
        let invalid = |error: &dyn std::fmt::Display| {
            Rejection::new(ErrorCode::InvalidValue, format!("Invalid exchange of a spoke: {error}."))
        };
        let request = PeerRequest::try_from(request).map_err(|error| invalid(&error))?;
        let receipt = self.spoke.lock().peer_requested(&request, Instant::now());
        let PeerReceipt { is_changed, wait } = receipt.map_err(|error| invalid(&error))?;
        if is_changed {
            self.changed.notify_one();
            self.scaler_wake.notify_one();
        }
        if !wait.is_zero() {
            tokio::select! {
                () = self.woken_since(request.wakes, wait.min(PEER_WAIT_MAX)) => {}
                () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
            }
        }
        let response = self.spoke.lock().peer_response(Instant::now());
        let response = response.expect("the request had an epoch");
        let body =
            serde_json::to_vec(&PeerResponseV1::from(&response)).expect("a response serialises to JSON");
        Ok(respond::ok(session, body, &[]).await)
    }

    /// Returns when there have been other than `known` wakes, or after `wait`.
    async fn woken_since(&self, known: u64, wait: Duration) {
        let woken = async {
            loop {
                // Registered before the comparison, so that no wake is missed.
                let mut woken = pin!(self.hold.woken.notified());
                woken.as_mut().enable();
                if self.spoke.lock().wakes() != known {
                    return;
                }
                woken.await;
            }
        };
        timeout(wait, woken).await.ok();
    }
}
