//! Follower of the hub's route table: source of the region's residency policies and desired deployments.
//!
//! Like a gateway, it long-polls, accepts a table only if its generation is higher than the current one (invariant 5,
//! Monotone plans), and writes it to disk with a checksum before using it. A spoke that starts while the hub is
//! unreachable scales by its last table. A region without scaling writes no snapshot: it uses the residency policy that
//! requests carry.
//!
//! Each poll carries the generation of the current table and the identity of the reader: the hub widens a residency
//! only when every reader has the table ([`scheduler_core::rollout`]). So the residency policy of a table is in force
//! here before the next poll.
//!
//! The polls are shorter than a gateway's, because each response is also the hub's heartbeat: no replica is terminated
//! while the hub is silent.

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
use crate::events::{SnapshotUnusable, SnapshotWriteFailed, TablePollFailed, TableReceived};

/// Time for which the hub may hold a poll without a change: half of [`HUB_SILENCE_TIMEOUT`].
const LONG_POLL: Duration = Duration::from_secs(5);
/// Additional time for the response.
const RESPONSE_GRACE: Duration = Duration::from_secs(3);
/// Time without a response after which the hub counts as silent.
pub(crate) const HUB_SILENCE_TIMEOUT: Duration = Duration::from_secs(10);

/// State received from the hub.
#[derive(Clone, Debug, Default)]
pub(crate) struct FollowedTable {
    /// The newest table.
    pub(crate) table: Option<Arc<RouteTable>>,
    /// Time of the hub's last response.
    pub(crate) last_response: Option<Instant>,
    /// Time at which the table was accepted.
    pub(crate) since: Option<AcceptedAt>,
}

/// Time at which a table was accepted. A table from disk was accepted before this process started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcceptedAt {
    at: Instant,
    before: Duration,
}

impl AcceptedAt {
    fn now() -> AcceptedAt {
        AcceptedAt { at: Instant::now(), before: Duration::ZERO }
    }

    fn age(self) -> Duration {
        self.at.elapsed() + self.before
    }
}

impl FollowedTable {
    /// Returns whether the hub is silent, so that its present targets are unknown.
    pub(crate) fn hub_is_silent(&self, now: Instant) -> bool {
        self.last_response
            .is_none_or(|last_response| now.saturating_duration_since(last_response) > HUB_SILENCE_TIMEOUT)
    }

    fn generation(&self) -> Option<Generation> {
        self.table.as_ref().map(|table| table.generation)
    }

    fn current(&self) -> Option<AcceptedGeneration> {
        let age = self.since.map_or(Duration::ZERO, AcceptedAt::age);
        self.generation().map(|generation| AcceptedGeneration { generation, age })
    }
}

/// Returns the wall-clock time.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Where the table is fetched from and stored, and the spoke that applies its residency policies.
#[derive(Clone, Debug)]
pub(crate) struct TableFollower {
    /// The hubs to poll.
    pub(crate) hub: Hubs,
    /// Token sent to the hubs.
    pub(crate) fleet: Option<Token>,
    /// File of the snapshot.
    pub(crate) snapshot: Option<PathBuf>,
    /// Catalogue for evaluating the table's policies.
    pub(crate) catalogue: Arc<Catalogue>,
    /// The spoke whose residency policies the table sets.
    pub(crate) spoke: Arc<Mutex<Spoke>>,
}

impl TableFollower {
    /// Loads the snapshot, if it is usable.
    pub(crate) fn restore(&self) -> FollowedTable {
        let Some(snapshot) = &self.snapshot else { return FollowedTable::default() };
        match load(snapshot) {
            Ok((table, age)) => {
                self.apply_policies(&table);
                let since = AcceptedAt { before: age, ..AcceptedAt::now() };
                FollowedTable { table: Some(Arc::new(table)), last_response: None, since: Some(since) }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => FollowedTable::default(),
            Err(error) => {
                self.spoke.lock().count_rejected_table();
                SnapshotUnusable { snapshot, error: &error }.emit();
                FollowedTable::default()
            }
        }
    }

    /// Puts the residency policies of this table into force in the region.
    fn apply_policies(&self, table: &RouteTable) {
        self.spoke.lock().apply_route_table(table, &self.catalogue);
    }

    /// Records that a hub has confirmed the current table.
    fn confirm(&self) {
        let mut spoke = self.spoke.lock();
        spoke.confirm_policy(Instant::now());
    }

    /// Returns the identity of the region as a reader of the table.
    fn reader(&self) -> Reader {
        let spoke = self.spoke.lock();
        Reader { role: Role::Spoke, region: spoke.region().clone(), boot_id: spoke.boot_id() }
    }

    /// Follows the hub until cancelled.
    pub(crate) async fn follow(&self, client: &reqwest::Client, followed: &watch::Sender<FollowedTable>) {
        let mut failures = 0u32;
        let hubs = u32::try_from(self.hub.count()).expect("the number of hubs is limited");
        loop {
            let hub = self.hub.current();
            let Err(error) = self.poll(hub, client, followed).await else {
                failures = 0;
                continue;
            };
            if matches!(error, FetchError::Table(_)) {
                self.spoke.lock().count_rejected_table();
            }
            self.hub.failed(hub);
            failures = failures.saturating_add(1);
            // The next hub is tried at once; after all have failed, it waits for the backoff delay.
            if failures.is_multiple_of(hubs) {
                if failures == hubs {
                    TablePollFailed { hub, error: &error }.emit();
                }
                tokio::time::sleep(backoff::pause(failures / hubs, rand::random())).await;
            }
        }
    }

    /// Deregisters the region as a reader of the table.
    pub(crate) async fn deregister(&self, client: &reqwest::Client) {
        let request =
            client.delete(format!("{}{}", self.hub.current(), table_watch::deregister_path(&self.reader())));
        let request = self.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()));
        // On failure, the reader's lease expires.
        request.timeout(table_watch::DEREGISTER_TIMEOUT).send().await.ok();
    }

    async fn poll(
        &self,
        hub: &str,
        client: &reqwest::Client,
        followed: &watch::Sender<FollowedTable>,
    ) -> Result<(), FetchError> {
        let after = followed.borrow().generation();
        let url = format!("{hub}{}", table_watch::watch_path(after, &self.reader(), LONG_POLL));
        let request = client.get(url).timeout(LONG_POLL + RESPONSE_GRACE);
        let request = self.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()));
        let response = request.send().await?.error_for_status()?;
        if response.status() == StatusCode::NO_CONTENT {
            self.confirm();
            followed.send_modify(|followed| followed.last_response = Some(Instant::now()));
            return Ok(());
        }
        let body = response.bytes().await?;
        let wire = serde_json::from_slice::<RouteTableV1>(&body);
        let wire = wire.map_err(|error| FetchError::Table(error.to_string()))?;
        let current = followed.borrow().current();
        let taken = table_watch::accept_table(wire.clone(), current, since_1970());
        let table = taken.map_err(|error| FetchError::Table(error.to_string()))?;
        if let Some(snapshot) = self.snapshot.clone() {
            let path = snapshot.clone();
            let saved = tokio::task::spawn_blocking(move || save(&path, &wire)).await;
            if let Err(error) = saved.map_err(io::Error::other).flatten() {
                SnapshotWriteFailed { snapshot: &snapshot, error: &error }.emit();
            }
        }
        self.apply_policies(&table);
        self.confirm();
        TableReceived { generation: table.generation, deployments: table.deployments.len() }.emit();
        let (last_response, since) = (Some(Instant::now()), Some(AcceptedAt::now()));
        followed.send_replace(FollowedTable { table: Some(Arc::new(table)), last_response, since });
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("route table rejected: {0}")]
    Table(String),
}

/// Writes the table to a temporary file and renames it, so that a crash leaves the old one or the new one. One spoke
/// writes here, and only newer tables.
fn save(path: &Path, table: &RouteTableV1) -> io::Result<()> {
    let body = serde_json::to_vec(table)?;
    let temporary = path.with_extension("new");
    let mut file = fs::File::create(&temporary)?;
    writeln!(file, "{}", checksum(&body))?;
    file.write_all(&body)?;
    file.sync_all()?;
    fs::rename(temporary, path)
}

/// Loads the table and its age. A table that no hub can have published is rejected; the next accepted table replaces
/// it.
fn load(path: &Path) -> io::Result<(RouteTable, Duration)> {
    let written = fs::metadata(path).and_then(|file| file.modified());
    let age = written.ok().and_then(|written| SystemTime::now().duration_since(written).ok());
    let bytes = fs::read(path)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let end =
        bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("the checksum is missing"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("the checksum does not match"));
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

    /// Starts a hub that responds with each of these tables in turn, and then with 204.
    async fn hub(responses: Vec<RouteTableV1>) -> (String, Arc<Mutex<Vec<String>>>) {
        type Shared = (Arc<Mutex<Vec<RouteTableV1>>>, Arc<Mutex<Vec<String>>>);
        async fn routes(
            State((responses, polls)): State<Shared>,
            RawQuery(query): RawQuery,
            headers: HeaderMap,
        ) -> Response {
            let token = headers.get("authorization").map_or("nothing", |token| token.to_str().unwrap());
            polls.lock().push(format!("{} {token}", query.unwrap_or_default()));
            match responses.lock().pop() {
                Some(table) => axum::Json(table).into_response(),
                None => StatusCode::NO_CONTENT.into_response(),
            }
        }
        let polls = Arc::new(Mutex::new(Vec::new()));
        let shared: Shared = (Arc::new(Mutex::new(responses.into_iter().rev().collect())), polls.clone());
        let router = axum::Router::new().route("/v1/routes", axum::routing::get(routes)).with_state(shared);
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        tokio::spawn(axum::serve(socket, router).into_future());
        (url, polls)
    }

    fn number(followed: &FollowedTable) -> Option<u64> {
        followed.generation().map(|generation| generation.number)
    }

    /// Invariant 5, Monotone plans.
    #[tokio::test]
    async fn only_newer_tables_are_accepted_and_the_last_one_is_restored_without_the_hub() {
        let dir = tempfile::tempdir().unwrap();
        let (hub, polls) = hub(vec![wire(3), wire(2), wire(3), wire(u64::MAX), wire(4)]).await;
        let snapshot = dir.path().join("routes");
        let (region, catalogue) = ("aws/us-east-1".parse().unwrap(), Arc::new(Catalogue::builtin()));
        let spoke = Arc::new(Mutex::new(Spoke::new(region, 255, Vec::new())));
        let hubs = Hubs::one(hub.clone());
        let source = TableFollower {
            hub: hubs,
            fleet: Some(Token::read("token-of-the-fleet").unwrap()),
            snapshot: Some(snapshot.clone()),
            catalogue,
            spoke,
        };
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let followed = watch::Sender::new(source.restore());
        assert!(followed.borrow().hub_is_silent(Instant::now()), "no response yet");
        for (taken, expected) in [(true, 3), (false, 3), (false, 3), (false, 3), (true, 4), (true, 4)] {
            assert_eq!(source.poll(&hub, &client, &followed).await.is_ok(), taken, "{expected}");
            assert_eq!(number(&followed.borrow()), Some(expected));
            assert_eq!(number(&source.restore()), Some(expected), "written to disk before use");
        }
        assert_eq!(
            polls.lock().last().unwrap(),
            "after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&wait_ms=5000 Bearer token-of-the-fleet"
        );
        let now = Instant::now();
        assert!(!followed.borrow().hub_is_silent(now), "a 204 counts as a response too");
        assert!(followed.borrow().hub_is_silent(now + HUB_SILENCE_TIMEOUT + Duration::from_secs(1)));
        fs::write(&snapshot, "torn").unwrap();
        assert_eq!(number(&source.restore()), None);
        save(&snapshot, &wire(u64::MAX)).unwrap();
        assert_eq!(number(&source.restore()), None, "no hub can have published that generation");
    }
}
