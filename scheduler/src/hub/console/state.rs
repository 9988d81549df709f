//! State of the console.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use ::console::history::ChartHistory;
use ::console::lookups::Lookups;
use ::console::open_pages::{OpenPages, PAGES_MAX, TooManyPages};
use ::console::origin::ConsoleOrigin;
use ::console::searches::Searches;
use ::console::sessions::Sessions;
use ::console::traffic::{ReportUrgency, TooManyGateways, TrafficState};
use axum::body::Bytes;
use metrics::Total;
use scheduler_api::plan::GatewayBoot;
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_api::traffic::{GatewayTraffic, SearchV1};
use supervision::Mutex;
use tokio::sync::{Notify, watch};

use super::fleet_client::FleetClient;
use crate::config::ConsoleConfig;
use crate::hub::scrape::ConsoleMetrics;

/// State of the console.
pub(in crate::hub) struct Console {
    pub(super) origin: ConsoleOrigin,
    pub(super) traffic: Mutex<TrafficState>,
    pub(super) history: Mutex<ChartHistory>,
    pub(super) sessions: Mutex<Sessions>,
    pub(super) lookups: Mutex<Lookups>,
    pub(super) searches: Mutex<Searches>,
    /// A lookup or a search has ended.
    pub(super) looked_up: watch::Sender<()>,
    /// A change is worth showing at once.
    pub(super) urgent: Notify,
    /// The last snapshot as JSON; `None` while no page is open.
    pub(super) snapshot: watch::Sender<Option<Bytes>>,
    pub(super) pages: Mutex<OpenPages>,
    /// Local fleet in which this hub runs, for drills.
    pub(super) fleet: Option<FleetClient>,
}

/// Open page; it is closed when this is dropped.
pub(super) struct OpenPage {
    console: Arc<Console>,
    visitor: String,
}

impl OpenPage {
    /// Opens a page.
    pub(super) fn open(console: &Arc<Console>, visitor: &str) -> Result<OpenPage, TooManyPages> {
        console.pages.lock().open(visitor)?;
        Ok(OpenPage { console: console.clone(), visitor: visitor.to_owned() })
    }
}

impl Drop for OpenPage {
    fn drop(&mut self) {
        self.console.pages.lock().close(&self.visitor);
    }
}

impl Console {
    /// Creates the console of a listener at `listen`, in this local fleet.
    pub(super) fn new(
        config: &ConsoleConfig,
        listen: SocketAddr,
        is_tls: bool,
        fleet: Option<FleetClient>,
    ) -> Console {
        Console {
            origin: ConsoleOrigin::new(listen, is_tls, config.url.as_deref()),
            traffic: Mutex::independent(TrafficState::default()),
            history: Mutex::independent(ChartHistory::default()),
            sessions: Mutex::independent(Sessions::default()),
            lookups: Mutex::independent(Lookups::default()),
            searches: Mutex::independent(Searches::new(rand::random())),
            looked_up: watch::Sender::new(()),
            urgent: Notify::new(),
            snapshot: watch::Sender::new(None),
            pages: Mutex::independent(OpenPages::default()),
            fleet,
        }
    }

    /// Adds a report of a gateway. Returns the requests that the gateway is to explain, and its searches.
    pub(super) fn record(
        &self,
        mut report: GatewayTraffic,
    ) -> Result<(Vec<String>, Vec<SearchV1>), TooManyGateways> {
        let (now, gateway) = (Instant::now(), report.gateway.clone());
        let explained = std::mem::take(&mut report.explained);
        let searched = std::mem::take(&mut report.searched);
        if self.traffic.lock().record(report, now, now_ms())? == ReportUrgency::Urgent {
            self.urgent.notify_one();
        }
        let mut lookups = self.lookups.lock();
        let mut ended: Vec<bool> =
            explained.into_iter().map(|(id, found)| lookups.record(&gateway, &id, found)).collect();
        let pending = lookups.pending_for(&gateway, now);
        drop(lookups);
        let mut searches = self.searches.lock();
        let found = searched.into_iter().map(|(number, found)| searches.record(&gateway, number, found));
        ended.extend(found);
        let searching = searches.pending_for(&gateway, now);
        drop(searches);
        if ended.contains(&true) {
            self.looked_up.send_replace(());
        }
        Ok((pending, searching))
    }

    /// Returns the metrics.
    pub(in crate::hub) fn metrics(&self) -> ConsoleMetrics {
        let pages = self.pages.lock().count();
        let traffic = self.traffic.lock();
        ConsoleMetrics {
            gateways: traffic.gateway_count(),
            gateways_max: GATEWAYS_MAX,
            gateways_evicted: Total(traffic.evicted),
            pages,
            pages_max: PAGES_MAX,
        }
    }

    /// Returns the gateways that report.
    pub(super) fn gateways(&self) -> BTreeSet<GatewayBoot> {
        self.traffic.lock().live().map(|traffic| traffic.gateway.clone()).collect()
    }
}

/// Returns the time in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
