//! Follows the hub's route table, to know what must not be seen here, and what should run here and how.
//!
//! As a gateway does: by long poll, taking a table only when its generation is higher than that of the one in hand
//! (invariant 5, Monotone plans), and writing it to disk with a checksum before it is used. A spoke that starts while the hub
//! is away scales by the last table that it had. A region that scales nothing keeps none: it has the residency policy that requests bring.
//!
//! Each question names the table in hand, and who asks: the hub widens a residency only when everybody has heard of it
//! ([`scheduler_core::rollout`]). So the residency policy of a table is in force here before the next question.
//!
//! The polls are shorter than a gateway's, because each answer is also the hub's sign of life: while it is silent no replica
//! is let go.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use supervision::Mutex;

use regions::{Catalogue, Generation, RouteTable};
use reqwest::StatusCode;
use scheduler_core::bound::{self, AcceptedGeneration};
use scheduler_core::hubs::Hubs;
use scheduler_core::rollout::{Reader, Role};
use scheduler_core::spoke::Spoke;
use scheduler_core::table_watch;
use scheduler_core::token::Token;
use scheduler_core::wire::route::RouteTableV1;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::backoff;
use crate::events::{TableFollowed, TableNotFollowed, TableNotKept, TableUnusable};

/// How long the hub may hold a question while nothing changes: half of the time after which it counts as silent.
const LONG_POLL: Duration = Duration::from_secs(5);
/// How much longer than that the answer may take.
const GRACE: Duration = Duration::from_secs(3);
/// After this without an answer the hub is silent.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(10);

/// What is known from the hub.
#[derive(Clone, Debug, Default)]
pub(crate) struct Followed {
    /// The newest table.
    pub(crate) table: Option<Arc<RouteTable>>,
    /// When the hub last answered.
    pub(crate) heard: Option<Instant>,
    /// Since when the table is held.
    pub(crate) since: Option<Since>,
}

/// When a table was accepted. One from disk was accepted before this process began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Since {
    at: Instant,
    before: Duration,
}

impl Since {
    fn now() -> Since {
        Since { at: Instant::now(), before: Duration::ZERO }
    }

    fn age(self) -> Duration {
        self.at.elapsed() + self.before
    }
}

impl Followed {
    /// Nobody knows what the hub would want.
    pub(crate) fn hub_is_silent(&self, now: Instant) -> bool {
        self.heard.is_none_or(|heard| now.saturating_duration_since(heard) > SILENT_AFTER)
    }

    fn generation(&self) -> Option<Generation> {
        self.table.as_ref().map(|table| table.generation)
    }

    fn held(&self) -> Option<AcceptedGeneration> {
        let age = self.since.map_or(Duration::ZERO, Since::age);
        self.generation().map(|generation| AcceptedGeneration { generation, age })
    }
}

/// The time by this machine's clock.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Where the table is followed from and kept, and which residency policy it is.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The hubs that may be asked.
    pub(crate) hub: Hubs,
    /// What they are shown.
    pub(crate) fleet: Option<Token>,
    /// The file.
    pub(crate) snapshot: Option<PathBuf>,
    /// By which the table's policy is read.
    pub(crate) catalogue: Arc<Catalogue>,
    /// The region which residency policy it is.
    pub(crate) spoke: Arc<Mutex<Spoke>>,
}

impl Source {
    /// What is on disk, if it is any good.
    pub(crate) fn restore(&self) -> Followed {
        let Some(snapshot) = &self.snapshot else { return Followed::default() };
        match load(snapshot) {
            Ok((table, age)) => {
                self.heed(&table);
                let since = Since { before: age, ..Since::now() };
                Followed { table: Some(Arc::new(table)), heard: None, since: Some(since) }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Followed::default(),
            Err(error) => {
                self.spoke.lock().count_rejected_table();
                TableUnusable { snapshot, error: &error }.emit();
                Followed::default()
            }
        }
    }

    /// The region goes by the residency policy of this table from now on.
    fn heed(&self, table: &RouteTable) {
        self.spoke.lock().apply_route_table(table, &self.catalogue);
    }

    /// A hub has confirmed the table in hand.
    fn confirm(&self) {
        let mut spoke = self.spoke.lock();
        spoke.confirm_policy(Instant::now());
    }

    /// How the region calls itself before the hub.
    fn reader(&self) -> Reader {
        let spoke = self.spoke.lock();
        Reader { role: Role::Spoke, region: spoke.region().clone(), boot_id: spoke.boot_id() }
    }

    /// Follows the hub for ever.
    pub(crate) async fn follow(&self, client: &reqwest::Client, followed: &watch::Sender<Followed>) {
        let mut failures = 0u32;
        let hubs = u32::try_from(self.hub.count()).expect("there are few hubs");
        loop {
            let hub = self.hub.current();
            let Err(error) = self.ask(hub, client, followed).await else {
                failures = 0;
                continue;
            };
            if matches!(error, AskError::Table(_)) {
                self.spoke.lock().count_rejected_table();
            }
            self.hub.failed(hub);
            failures = failures.saturating_add(1);
            // The next is asked at once; when all have been, it waits before it begins again.
            if failures.is_multiple_of(hubs) {
                if failures == hubs {
                    TableNotFollowed { hub, error: &error }.emit();
                }
                tokio::time::sleep(backoff::pause(failures / hubs, rand::random())).await;
            }
        }
    }

    /// Takes leave of the hub: the region reads no table any longer.
    pub(crate) async fn farewell(&self, client: &reqwest::Client) {
        let word =
            client.delete(format!("{}{}", self.hub.current(), table_watch::deregister_path(&self.reader())));
        let word = self.fleet.iter().fold(word, |word, token| word.bearer_auth(token.secret()));
        // Nobody to tell; silence says the same later.
        word.timeout(table_watch::DEREGISTER_TIMEOUT).send().await.ok();
    }

    async fn ask(
        &self,
        hub: &str,
        client: &reqwest::Client,
        followed: &watch::Sender<Followed>,
    ) -> Result<(), AskError> {
        let after = followed.borrow().generation();
        let url = format!("{hub}{}", table_watch::watch_path(after, &self.reader(), LONG_POLL));
        let question = client.get(url).timeout(LONG_POLL + GRACE);
        let question =
            self.fleet.iter().fold(question, |question, token| question.bearer_auth(token.secret()));
        let answer = question.send().await?.error_for_status()?;
        if answer.status() == StatusCode::NO_CONTENT {
            self.confirm();
            followed.send_modify(|followed| followed.heard = Some(Instant::now()));
            return Ok(());
        }
        let body = answer.bytes().await?;
        let wire = serde_json::from_slice::<RouteTableV1>(&body);
        let wire = wire.map_err(|error| AskError::Table(error.to_string()))?;
        let held = followed.borrow().held();
        let taken = table_watch::accept_table(wire.clone(), held, since_1970());
        let table = taken.map_err(|error| AskError::Table(error.to_string()))?;
        if let Some(snapshot) = self.snapshot.clone() {
            let kept = snapshot.clone();
            let saved = tokio::task::spawn_blocking(move || save(&kept, &wire)).await;
            if let Err(error) = saved.map_err(io::Error::other).flatten() {
                TableNotKept { snapshot: &snapshot, error: &error }.emit();
            }
        }
        self.heed(&table);
        self.confirm();
        TableFollowed { generation: table.generation, deployments: table.deployments.len() }.emit();
        let (heard, since) = (Some(Instant::now()), Some(Since::now()));
        followed.send_replace(Followed { table: Some(Arc::new(table)), heard, since });
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("its table is refused: {0}")]
    Table(String),
}

/// Writes the table beside its place and moves it there, so that a crash leaves the old one or the new one. One spoke writes
/// here, and it takes only what is newer.
fn save(path: &Path, table: &RouteTableV1) -> io::Result<()> {
    let body = serde_json::to_vec(table)?;
    let beside = path.with_extension("new");
    let mut file = fs::File::create(&beside)?;
    writeln!(file, "{}", checksum(&body))?;
    file.write_all(&body)?;
    file.sync_all()?;
    fs::rename(beside, path)
}

/// The table there, and how old it is. One that no hub can have published is of no use: the next that is accepted takes
/// its place.
fn load(path: &Path) -> io::Result<(RouteTable, Duration)> {
    let written = fs::metadata(path).and_then(|file| file.modified());
    let age = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
    let bytes = fs::read(path)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("it has no checksum"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("its checksum does not fit"));
    }
    let wire: RouteTableV1 = serde_json::from_slice(body)?;
    let table = RouteTable::try_from(wire).map_err(|error| invalid(&error.to_string()))?;
    bound::plausible(table.generation, since_1970()).map_err(|error| invalid(&error.to_string()))?;
    Ok((table, age.unwrap_or_default()))
}

fn checksum(body: &[u8]) -> String {
    Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::extract::{RawQuery, State};
    use axum::http::{HeaderMap, StatusCode};
    use axum::response::{IntoResponse, Response};

    fn wire(number: u64) -> RouteTableV1 {
        let wire = serde_json::json!({"version": 1, "epoch": 1, "generation": number, "deployments": [], "regions": []});
        serde_json::from_value(wire).unwrap()
    }

    /// A hub that answers with one table after the other, and then that nothing has changed.
    async fn hub(answers: Vec<RouteTableV1>) -> (String, Arc<Mutex<Vec<String>>>) {
        type Shared = (Arc<Mutex<Vec<RouteTableV1>>>, Arc<Mutex<Vec<String>>>);
        async fn routes(
            State((answers, asked)): State<Shared>,
            RawQuery(query): RawQuery,
            headers: HeaderMap,
        ) -> Response {
            let shown = headers.get("authorization").map_or("nothing", |shown| shown.to_str().unwrap());
            asked.lock().push(format!("{} {shown}", query.unwrap_or_default()));
            match answers.lock().pop() {
                Some(table) => axum::Json(table).into_response(),
                None => StatusCode::NO_CONTENT.into_response(),
            }
        }
        let asked = Arc::new(Mutex::new(Vec::new()));
        let shared: Shared = (Arc::new(Mutex::new(answers.into_iter().rev().collect())), asked.clone());
        let router = axum::Router::new().route("/v1/routes", axum::routing::get(routes)).with_state(shared);
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        tokio::spawn(axum::serve(socket, router).into_future());
        (url, asked)
    }

    fn number(followed: &Followed) -> Option<u64> {
        followed.generation().map(|generation| generation.number)
    }

    /// Invariant 5, Monotone plans.
    #[tokio::test]
    async fn only_what_is_newer_is_taken_and_found_again_without_the_hub() {
        let dir = tempfile::tempdir().unwrap();
        let (hub, asked) = hub(vec![wire(3), wire(2), wire(3), wire(u64::MAX), wire(4)]).await;
        let snapshot = dir.path().join("routes");
        let (region, catalogue) = ("aws/us-east-1".parse().unwrap(), Arc::new(Catalogue::builtin()));
        let spoke = Arc::new(Mutex::new(Spoke::new(region, 255, Vec::new())));
        let hubs = Hubs::read(serde_json::from_value(serde_json::json!(hub)).unwrap()).unwrap();
        let source = Source {
            hub: hubs,
            fleet: Some(Token::read("token-of-the-fleet").unwrap()),
            snapshot: Some(snapshot.clone()),
            catalogue,
            spoke,
        };
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let followed = watch::Sender::new(source.restore());
        assert!(followed.borrow().hub_is_silent(Instant::now()), "nobody has answered yet");
        for (taken, expected) in [(true, 3), (false, 3), (false, 3), (false, 3), (true, 4), (true, 4)] {
            assert_eq!(source.ask(&hub, &client, &followed).await.is_ok(), taken, "{expected}");
            assert_eq!(number(&followed.borrow()), Some(expected));
            assert_eq!(number(&source.restore()), Some(expected), "it was on disk before it was used");
        }
        assert_eq!(
            asked.lock().last().unwrap(),
            "after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&wait_ms=5000 Bearer token-of-the-fleet"
        );
        let now = Instant::now();
        assert!(!followed.borrow().hub_is_silent(now), "also an answer without a table is one");
        assert!(followed.borrow().hub_is_silent(now + SILENT_AFTER + Duration::from_secs(1)));
        fs::write(&snapshot, "torn").unwrap();
        assert_eq!(number(&source.restore()), None);
        save(&snapshot, &wire(u64::MAX)).unwrap();
        assert_eq!(number(&source.restore()), None, "no hub has published that");
    }
}
