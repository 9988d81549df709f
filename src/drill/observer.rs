//! Observer of a drill: polls each gateway's view of the regions and every hub's route table ten times a second. Each is
//! polled separately, so that a process without a response does not delay the others.

use crate::apply;
use crate::cli::CallerOptions;
use futures_util::future::join_all;
use loadtest::drill::Event;
use loadtest::drill::observations::{DrillObservations, RegionObservation, TableObservation};
use regions::{Generation, RegionId};
use scheduler_api::paths;
use scheduler_client::operator::OperatorClient;
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Polling period.
const POLL_PERIOD: Duration = Duration::from_millis(100);
/// Timeout of a request; a paused process does not respond.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Observations and executed actions so far.
pub(super) struct ObservationLog {
    start: Instant,
    entries: Mutex<(DrillObservations, Vec<Event>)>,
}

impl ObservationLog {
    pub(super) fn begin(start: Instant) -> ObservationLog {
        ObservationLog { start, entries: Mutex::default() }
    }

    /// Records an executed action.
    pub(super) fn record_action(&self, text: &str) {
        self.entries().1.push(Event { at: self.start.elapsed(), is_action: true, text: text.to_owned() });
    }

    pub(super) fn end(self) -> (DrillObservations, Vec<Event>) {
        self.entries.into_inner()
    }

    fn entries(&self) -> MutexGuard<'_, (DrillObservations, Vec<Event>)> {
        self.entries.lock()
    }

    fn region(&self, gateway: &str, region: &RegionId, observation: RegionObservation) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        let first = !entries.0.region_at(region, at).contains_key(gateway);
        let draining = if observation.draining { ", draining" } else { "" };
        let text = format!("{gateway} reports {region} {}{draining}", observation.health);
        if entries.0.region(at, gateway, region, observation) && !first {
            entries.1.push(Event { at, is_action: false, text });
        }
    }

    fn table(&self, reader: &str, table: TableObservation) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        let first = !entries.0.tables_at(at).contains_key(reader);
        if entries.0.table(at, reader, table) && !first {
            entries.1.push(Event {
                at,
                is_action: false,
                text: format!("{reader} has table {}", table.generation),
            });
        }
    }
}

/// Processes to poll.
#[derive(Default)]
pub(super) struct Observer {
    gateways: Vec<(String, SocketAddr)>,
    hubs: Vec<(String, OperatorClient)>,
}

impl Observer {
    /// Creates an observer of gateways, by their operations addresses, and of all hubs, with the identity of an operator.
    pub(super) fn new(
        gateways: &[(RegionId, SocketAddr)],
        hubs: &[SocketAddr],
        identity: &Path,
    ) -> anyhow::Result<Observer> {
        let named = |(at, hub): (usize, &SocketAddr)| {
            let caller = CallerOptions { identity: Some(identity.to_owned()), ..CallerOptions::default() };
            let client = apply::client(&format!("https://{hub}"), &caller, TIMEOUT);
            Ok((format!("hub {}", at + 1), client.map_err(anyhow::Error::msg)?))
        };
        let hubs = hubs.iter().enumerate().map(named).collect::<anyhow::Result<_>>()?;
        let gateways = match gateways {
            [(_, only)] => vec![("gateway".to_owned(), *only)],
            several => several.iter().map(|(near, address)| (format!("gateway {near}"), *address)).collect(),
        };
        Ok(Observer { gateways, hubs })
    }

    /// Polls forever.
    pub(super) async fn run(&self, log: &ObservationLog) {
        let Ok(client) = &reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build() else { return };
        // There are at most twelve gateways; their futures are polled in this task, like those of the hubs.
        let gateways = self.gateways.iter().map(|(name, address)| async move {
            let url = format!("http://{address}/routes");
            let read = async || client.get(&url).send().await.ok()?.json().await.ok();
            poll(read, |routes| gateway(name, &routes, log)).await;
        });
        // There are at most five hubs; their futures are polled in this task.
        let [one, two, three, four, five] = std::array::from_fn(|at| async move {
            match self.hubs.get(at) {
                Some((name, client)) => {
                    let read = async || client.get(paths::ROUTES).await.ok();
                    poll(read, |table| hub(name, &table, log)).await;
                }
                None => std::future::pending().await,
            }
        });
        tokio::join!(join_all(gateways), one, two, three, four, five, std::future::pending::<()>());
    }
}

async fn poll(read: impl AsyncFn() -> Option<Value>, mut note: impl FnMut(Value)) {
    let mut ticks = tokio::time::interval(POLL_PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(value) = read().await {
            note(value);
        }
    }
}

fn gateway(name: &str, routes: &Value, log: &ObservationLog) {
    for row in routes["regions"].as_array().into_iter().flatten() {
        let region = row["region"].as_str().and_then(|region| region.parse().ok());
        if let (Some(region), Some(health)) = (region, row["health"].as_str()) {
            let draining = row["draining"].as_bool().unwrap_or(false);
            log.region(name, &region, RegionObservation { health: health.to_owned(), draining });
        }
    }
    if let Some(generation) = routes["generation"].as_str().and_then(|text| text.parse().ok()) {
        log.table(name, TableObservation { generation, content: None });
    }
}

fn hub(name: &str, table: &Value, log: &ObservationLog) {
    let (Some(epoch), Some(number)) = (table["epoch"].as_u64(), table["generation"].as_u64()) else { return };
    let mut hasher = DefaultHasher::new();
    // serde_json sorts the keys, so equal tables have equal hashes.
    table.to_string().hash(&mut hasher);
    log.table(
        name,
        TableObservation { generation: Generation { epoch, number }, content: Some(hasher.finish()) },
    );
}
