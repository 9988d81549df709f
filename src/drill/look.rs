//! Who looks on: asks the gateway how it sees regions, and every hub for its table, ten times a second, each by itself, so
//! that one that is silent keeps nobody else waiting.

use loadtest::drill::Event;
use loadtest::drill::seen::{Seen, Sight, Table};
use regions::{Generation, RegionId};
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Between two looks.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// How long an answer may take; who is paused gives none.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What has been seen and done so far.
pub(super) struct Notes {
    start: Instant,
    kept: Mutex<(Seen, Vec<Event>)>,
}

impl Notes {
    pub(super) fn begin(start: Instant) -> Notes {
        Notes { start, kept: Mutex::default() }
    }

    /// Something is done.
    pub(super) fn did(&self, text: &str) {
        self.kept().1.push(Event { at: self.start.elapsed(), done: true, text: text.to_owned() });
    }

    pub(super) fn end(self) -> (Seen, Vec<Event>) {
        self.kept.into_inner()
    }

    fn kept(&self) -> MutexGuard<'_, (Seen, Vec<Event>)> {
        self.kept.lock()
    }

    fn region(&self, region: &RegionId, sight: Sight) {
        let (at, kept) = (self.start.elapsed(), &mut *self.kept());
        let first = kept.0.region_at(region, at).is_none();
        let draining = if sight.draining { ", draining" } else { "" };
        let text = format!("the gateway sees {region} {}{draining}", sight.health);
        if kept.0.region(at, region, sight) && !first {
            kept.1.push(Event { at, done: false, text });
        }
    }

    fn table(&self, reader: &str, table: Table) {
        let (at, kept) = (self.start.elapsed(), &mut *self.kept());
        let first = !kept.0.tables_at(at).contains_key(reader);
        if kept.0.table(at, reader, table) && !first {
            kept.1.push(Event { at, done: false, text: format!("{reader} has table {}", table.generation) });
        }
    }
}

/// Whom to ask.
#[derive(Default)]
pub(super) struct Readers {
    gateway: Option<SocketAddr>,
    hubs: Vec<(String, SocketAddr)>,
    /// What the hubs are shown.
    token: Option<String>,
}

impl Readers {
    /// A gateway by its operations port, and all hubs, which are shown this token.
    pub(super) fn of(gateway: SocketAddr, hubs: &[SocketAddr], token: String) -> Readers {
        let named = |(at, hub): (usize, &SocketAddr)| (format!("hub {}", at + 1), *hub);
        let hubs = hubs.iter().enumerate().map(named).collect();
        Readers { gateway: Some(gateway), hubs, token: Some(token) }
    }

    /// Looks for ever.
    pub(super) async fn look(&self, notes: &Notes) {
        let gateway = async {
            match self.gateway {
                Some(address) => {
                    ask(format!("http://{address}/routes"), None, |routes| gateway(&routes, notes)).await
                }
                None => std::future::pending().await,
            }
        };
        // At most five, polled where they stand.
        let [one, two, three, four, five] = std::array::from_fn(|at| async move {
            match self.hubs.get(at) {
                Some((name, address)) => {
                    let url = format!("http://{address}/v1/routes");
                    ask(url, self.token.as_deref(), |table| hub(name, &table, notes)).await;
                }
                None => std::future::pending().await,
            }
        });
        tokio::join!(gateway, one, two, three, four, five);
    }
}

async fn ask(url: String, token: Option<&str>, mut note: impl FnMut(Value)) {
    let Ok(client) = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build() else { return };
    let mut look = tokio::time::interval(LOOK_PERIOD);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let request = token.iter().fold(client.get(&url), |request, token| request.bearer_auth(token));
        if let Ok(answer) = request.send().await
            && let Ok(value) = answer.json().await
        {
            note(value);
        }
    }
}

fn gateway(routes: &Value, notes: &Notes) {
    for row in routes["regions"].as_array().into_iter().flatten() {
        let region = row["region"].as_str().and_then(|region| region.parse().ok());
        if let (Some(region), Some(health)) = (region, row["health"].as_str()) {
            let draining = row["draining"].as_bool().unwrap_or(false);
            notes.region(&region, Sight { health: health.to_owned(), draining });
        }
    }
    if let Some(generation) = routes["generation"].as_str().and_then(|text| text.parse().ok()) {
        notes.table("gateway", Table { generation, content: None });
    }
}

fn hub(name: &str, table: &Value, notes: &Notes) {
    let (Some(epoch), Some(number)) = (table["epoch"].as_u64(), table["generation"].as_u64()) else { return };
    let mut hasher = DefaultHasher::new();
    // Its keys in order, whoever wrote it.
    table.to_string().hash(&mut hasher);
    notes.table(name, Table { generation: Generation { epoch, number }, content: Some(hasher.finish()) });
}
