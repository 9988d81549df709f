//! Snapshots of the fleet: the sampler that computes them, and the stream of a page.
//!
//! A snapshot is computed and serialised once for all pages, every second and when something urgent has changed, from a clone
//! of the traffic: reports of gateways do not wait for it. A page that does not keep up misses snapshots, and gets the latest:
//! nothing is queued for it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::console::colours;
use ::console::history::HistoryView;
use ::console::open_pages::{PAGES_MAX, TooManyPages, VISITOR_PAGES_MAX};
use ::console::snapshot::{ChartValues, FleetSnapshot, FleetView, TrafficSums, chart_values};
use ::console::traffic::TrafficState;
use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use regions::{Catalogue, RegionId};
use replica_api::error::ErrorCode;
use scheduler_api::apply::RolloutV1;
use scheduler_api::keys;
use scheduler_api::plan::RegionCapacity;
use scheduler_core::registry::representatives;
use scheduler_store::Store;
use serde::Serialize;
use tokio::sync::watch;

use super::context::{Admitted, ConsoleApi};
use super::state::{Console, OpenPage, now_ms};
use crate::hub::api::HubApi;
use crate::hub::{Current, apply, records, stopped};
use crate::respond::ErrorResponse;

/// Interval of the snapshots.
const PERIOD: Duration = Duration::from_secs(1);
/// Minimum interval, however much changes.
const PERIOD_MIN: Duration = Duration::from_millis(200);
/// Time after which the browser connects again.
const RECONNECT_MS: u64 = 1_000;

/// Records of the store that a snapshot shows.
struct FleetRecords {
    rollout: RolloutV1,
    capacity: BTreeMap<RegionId, RegionCapacity>,
}

/// Input of a snapshot.
struct SnapshotInput {
    traffic: TrafficState,
    now: Instant,
    at_ms: u64,
    catalogue: Arc<Catalogue>,
    /// The published table.
    published: Current,
    /// `None` while no page is open, or before the first were read.
    records: Option<Arc<FleetRecords>>,
}

/// Computes snapshots until the hub stops.
pub(super) async fn sample<S: Store>(api: HubApi<S>, console: Arc<Console>) {
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut records = None;
    loop {
        let is_regular = tokio::select! {
            _ = interval.tick() => true,
            () = console.urgent.notified() => false,
        };
        if is_regular {
            let (now, at_ms) = (Instant::now(), now_ms());
            let mut traffic = console.traffic.lock();
            traffic.expire(now, at_ms);
            if let Some(published) = api.current.borrow().clone() {
                traffic.observe_table(&published.table, at_ms);
            }
        }
        let has_pages = console.pages.lock().count() > 0;
        if !has_pages {
            records = None;
            console.snapshot.send_replace(None);
            if !is_regular {
                continue;
            }
        } else if is_regular || records.is_none() {
            match read(&api).await {
                Ok(found) => records = Some(Arc::new(found)),
                // The pages show the last records. The store is reported by the election and the controller.
                Err(_) => tracing::debug!("records for the console not read"),
            }
        }
        let input = SnapshotInput {
            traffic: console.traffic.lock().clone(),
            now: Instant::now(),
            at_ms: now_ms(),
            catalogue: api.catalogue.clone(),
            published: api.current.borrow().clone(),
            records: records.clone(),
        };
        let at_ms = input.at_ms;
        // A panic is logged, and the next snapshot is computed.
        if let Ok((values, body)) = tokio::task::spawn_blocking(move || compute(&input)).await {
            if is_regular {
                console.history.lock().record(values, at_ms);
            }
            if let Some(body) = body {
                console.snapshot.send_replace(Some(body));
            }
        }
        if !is_regular {
            tokio::time::sleep(PERIOD_MIN).await;
        }
    }
}

async fn read<S: Store>(api: &HubApi<S>) -> Result<FleetRecords, ErrorResponse> {
    let spokes = api.store.range(keys::SPOKES).await?.entries;
    let spokes: Vec<_> = spokes.iter().filter_map(|entry| records::spoke(entry).ok()).collect();
    let capacity = representatives(&spokes)
        .into_iter()
        .map(|(region, spoke)| (region.clone(), spoke.registration.capacity.clone()))
        .collect();
    let rollout = apply::rollout(State(api.clone())).await?.0;
    Ok(FleetRecords { rollout, capacity })
}

/// Returns the values of the charts, and the snapshot as JSON; `None` before the first route table.
fn compute(input: &SnapshotInput) -> (ChartValues, Option<Bytes>) {
    let SnapshotInput { traffic, now, at_ms, catalogue, published, records } = input;
    let sums = TrafficSums::of(traffic, *now);
    let body = published.as_ref().zip(records.as_deref()).and_then(|(published, records)| {
        let FleetRecords { rollout, capacity } = records;
        let fleet = FleetView { catalogue, table: &published.table, rollout, capacity };
        let snapshot = FleetSnapshot::new(fleet, traffic, &sums, (*now, *at_ms));
        serde_json::to_vec(&snapshot).ok().map(Bytes::from)
    });
    (chart_values(&sums), body)
}

/// Data that a page needs before its first snapshot.
#[derive(Serialize)]
struct PageData<'a> {
    /// Classes of the colours of the regions.
    colours: BTreeMap<&'a str, String>,
    #[serde(flatten)]
    history: HistoryView<'a>,
}

/// Returns the samples of the last five minutes, and the colours of the regions.
pub(super) async fn history<S: Store>(State(api): State<ConsoleApi<S>>) -> Result<Response, ErrorResponse> {
    let colours = colours::classes(&api.hub.catalogue);
    let body = serde_json::to_vec(&PageData { colours, history: api.console.history.lock().view() });
    let body = body.map_err(|error| ErrorResponse::new(ErrorCode::Internal, error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Stream of a page.
struct PageStream<S> {
    api: ConsoleApi<S>,
    admitted: Admitted,
    snapshots: watch::Receiver<Option<Bytes>>,
    /// Held while the page is open.
    _page: OpenPage,
}

/// Streams snapshots until the page, the session of the person or the hub ends.
pub(super) async fn events<S: Store>(
    State(api): State<ConsoleApi<S>>,
    Extension(admitted): Extension<Admitted>,
) -> Result<Response, ErrorResponse> {
    let page = OpenPage::open(&api.console, &admitted.visitor.name).map_err(|too_many| {
        let message = match too_many {
            TooManyPages::All => format!("{PAGES_MAX} pages of this console are open; close one."),
            TooManyPages::OfVisitor => {
                format!("{VISITOR_PAGES_MAX} pages of this console are open for you; close one.")
            }
        };
        ErrorResponse::new(ErrorCode::Overloaded, message)
    })?;
    let mut snapshots = api.console.snapshot.subscribe();
    snapshots.mark_changed();
    api.console.urgent.notify_one();
    let begin = Bytes::from(format!("retry: {RECONNECT_MS}\n\n"));
    let page = PageStream { api, admitted, snapshots, _page: page };
    let events = stream::unfold((Some(begin), page), |(begin, mut page)| async move {
        let event = match begin {
            Some(begin) => begin,
            None => page.next().await?,
        };
        Some((Ok::<_, Infallible>(event), (None, page)))
    });
    Ok(([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response())
}

impl<S: Store> PageStream<S> {
    /// Returns the next snapshot as an event; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let is_new = tokio::select! {
                changed = self.snapshots.changed() => { changed.ok()?; true }
                () = stopped(self.api.hub.stopping.clone()) => return None,
                // Without a route table there are no snapshots, and a session ends all the same.
                () = tokio::time::sleep(PERIOD) => false,
            };
            if !self.api.is_admitted(&self.admitted) {
                return None;
            }
            let latest = if is_new { self.snapshots.borrow_and_update().clone() } else { None };
            if let Some(body) = latest {
                return Some(Bytes::from([b"data: ", body.as_ref(), b"\n\n"].concat()));
            }
        }
    }
}
