//! Observer of a drill: polls each gateway's view of the regions and every hub's route table ten times a second. Each is
//! polled separately, so that a process without a response does not delay the others. A gateway that stops responding is an
//! observation as well: its last view of the regions is no longer that of a gateway that sends requests.

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
    /// Is called for each event.
    on_event: Box<dyn Fn(&Event)>,
}

impl ObservationLog {
    pub(super) fn begin(start: Instant, on_event: impl Fn(&Event) + 'static) -> ObservationLog {
        ObservationLog { start, entries: Mutex::default(), on_event: Box::new(on_event) }
    }

    fn push(&self, events: &mut Vec<Event>, event: Event) {
        (self.on_event)(&event);
        events.push(event);
    }

    /// Records an executed action.
    pub(super) fn record_action(&self, text: &str) {
        let event = Event { at: self.start.elapsed(), is_action: true, text: text.to_owned() };
        self.push(&mut self.entries().1, event);
    }

    pub(super) fn end(self) -> (DrillObservations, Vec<Event>) {
        self.entries.into_inner()
    }

    fn entries(&self) -> MutexGuard<'_, (DrillObservations, Vec<Event>)> {
        self.entries.lock()
    }

    fn region(&self, gateway: &str, region: &RegionId, observation: RegionObservation) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        let draining = if observation.draining { ", draining" } else { "" };
        let text = format!("{gateway} reports {region} {}{draining}", observation.health);
        if entries.0.region(at, gateway, region, observation) {
            self.push(&mut entries.1, Event { at, is_action: false, text });
        }
    }

    fn unreachable(&self, gateway: &str) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        if entries.0.unreachable(at, gateway) {
            let text = format!("{gateway} does not respond");
            self.push(&mut entries.1, Event { at, is_action: false, text });
        }
    }

    fn reachable(&self, gateway: &str) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        if entries.0.is_unreachable(gateway) {
            let text = format!("{gateway} responds again");
            self.push(&mut entries.1, Event { at, is_action: false, text });
        }
    }

    fn table(&self, reader: &str, table: TableObservation) {
        let (at, entries) = (self.start.elapsed(), &mut *self.entries());
        let first = !entries.0.tables_at(at).contains_key(reader);
        if entries.0.table(at, reader, table) && !first {
            let text = format!("{reader} has table {}", table.generation);
            self.push(&mut entries.1, Event { at, is_action: false, text });
        }
    }
}

/// Processes to poll.
#[derive(Default)]
pub(crate) struct Observer {
    gateways: Vec<(String, SocketAddr)>,
    hubs: Vec<(String, OperatorClient)>,
}

impl Observer {
    /// Creates an observer of gateways, by their operations addresses, and of all hubs, with the identity of an operator.
    pub(crate) fn new(
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
            poll(read, |routes| match routes {
                Some(routes) => gateway(name, &routes, log),
                None => log.unreachable(name),
            })
            .await;
        });
        // There are at most five hubs; their futures are polled in this task.
        let [one, two, three, four, five] = std::array::from_fn(|at| async move {
            match self.hubs.get(at) {
                Some((name, client)) => {
                    let read = async || client.get(paths::ROUTES).await.ok();
                    poll(read, |table| table.iter().for_each(|table| hub(name, table, log))).await;
                }
                None => std::future::pending().await,
            }
        });
        tokio::join!(join_all(gateways), one, two, three, four, five, std::future::pending::<()>());
    }
}

/// Reads repeatedly, and passes on each response; `None` if there was none within the timeout.
async fn poll(read: impl AsyncFn() -> Option<Value>, mut note: impl FnMut(Option<Value>)) {
    let mut ticks = tokio::time::interval(POLL_PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        note(read().await);
    }
}

fn gateway(name: &str, routes: &Value, log: &ObservationLog) {
    let rows = routes["regions"].as_array().map_or(&[][..], Vec::as_slice);
    if !rows.is_empty() {
        log.reachable(name);
    }
    for row in rows {
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const NEAR: &str = "aws/us-east-1";
    const FAR: &str = "gcp/europe-west4";

    /// Serves `routes` on this listener until it is dropped.
    async fn serve(listener: TcpListener, routes: &str) {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            let length = routes.len();
            let response =
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{routes}");
            if read > 0 {
                // The client may have stopped meanwhile.
                stream.write_all(response.as_bytes()).await.ok();
            }
        }
    }

    /// Waits until the log has an event that contains `text`.
    async fn event(log: &ObservationLog, text: &str) {
        while !log.entries().1.iter().any(|event| event.text.contains(text)) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_gateway_that_stops_and_starts_is_observed_once_each() {
        let routes =
            format!(r#"{{"generation": "1.7", "regions": [{{"region": "{FAR}", "health": "healthy"}}]}}"#);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let observer = Observer::new(&[(NEAR.parse().unwrap(), address)], &[], Path::new("unused")).unwrap();
        let (log, far) = (ObservationLog::begin(Instant::now(), |_| {}), FAR.parse().unwrap());
        let regions = || log.entries().0.region_at(&far, log.start.elapsed()).len();
        let story = async {
            tokio::select! {
                () = serve(listener, &routes) => unreachable!("the listener is open"),
                () = async { while regions() == 0 { tokio::task::yield_now().await } } => {}
            }
            event(&log, "gateway does not respond").await;
            assert_eq!(regions(), 0, "it uses no region");
            let listener = TcpListener::bind(address).await.unwrap();
            tokio::select! {
                () = serve(listener, &routes) => unreachable!("the listener is open"),
                () = event(&log, "gateway responds again") => {}
            }
        };
        tokio::select! {
            () = observer.run(&log) => unreachable!("the observer does not end"),
            ended = tokio::time::timeout(Duration::from_secs(30), story) => ended.expect("the events are observed"),
        }
        let (observations, events) = log.end();
        assert_eq!(observations.region_at(&far, Duration::MAX).len(), 1, "it uses regions again");
        let texts: Vec<_> = events.iter().map(|event| event.text.as_str()).collect();
        assert_eq!(texts, ["gateway does not respond", "gateway responds again"]);
    }
}
