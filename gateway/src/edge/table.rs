//! Follows the hub's route table, and does without the hub. Of several hubs any may be asked: whichever has a table with a
//! higher generation has the newer one.
//!
//! A new table is taken when its generation is higher than the one in hand, never otherwise: a hub restored from an old
//! backup cannot take traffic back to regions that are gone. What is taken is written to disk with its checksum before
//! it is used, so that a gateway which starts while the hub is dead serves from the last good table.
//!
//! Two processes keep the same snapshot for as long as the one hands over to the other, and both go on hearing the hub.
//! So whoever writes holds a lock beside it, looks what is there, and writes only what is newer: the file goes back no more
//! than the table in hand does (invariant 5, Monotone plans), whoever of the two was slower.

use super::view::View;
use crate::config::EdgeConfig;
use crate::metrics::EdgeMetrics;
use rand::Rng;
use regions::route::{Generation, RouteTable};
use scheduler_core::rollout::{Reader, Role};
use scheduler_core::wire::route::RouteTableV1;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long the hub may hold a question while nothing changes.
const LONG_POLL: Duration = Duration::from_secs(20);
/// The same where there is another hub to ask: one that hangs is silent as long, and so is found out sooner.
const LONG_POLL_OF_SEVERAL: Duration = Duration::from_secs(4);
/// And before the first table, for which somebody waits.
const FIRST_POLL_OF_SEVERAL: Duration = Duration::from_millis(500);
/// How much longer than that the answer may take.
const GRACE: Duration = Duration::from_secs(5);
const GRACE_OF_SEVERAL: Duration = Duration::from_secs(1);
/// Between questions to a hub that does not answer; half of it is chance, so that gateways do not return in step.
const PAUSE: Duration = Duration::from_millis(500);

/// What is in hand: nothing before the first table.
pub(crate) type Current = Option<Arc<View>>;

/// The table on disk, if there is a good one.
pub(crate) fn restore(config: &EdgeConfig) -> Current {
    match load(&config.snapshot) {
        Ok(table) => {
            tracing::info!(generation = %table.generation, "serving from the route table on disk");
            Some(Arc::new(View::new(&table, &config.catalogue)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(snapshot = %config.snapshot.display(), %error, "the route table on disk is of no use");
            None
        }
    }
}

/// Follows the hub for ever.
pub(crate) async fn follow(
    config: Arc<EdgeConfig>,
    client: reqwest::Client,
    views: watch::Sender<Current>,
    metrics: Arc<EdgeMetrics>,
) {
    let hubs = &config.hub;
    let reader = Reader { role: Role::Gateway, place: config.place.clone(), boot_id: rand::rng().random() };
    let (mut reachable, mut failures) = (true, 0_usize);
    loop {
        let hub = hubs.now();
        let Err(error) = ask(&config, hub, &client, &reader, &views).await else {
            failures = 0;
            if !std::mem::replace(&mut reachable, true) {
                tracing::info!(hub, "the hub is back");
            }
            continue;
        };
        if matches!(error, AskError::Table(_)) {
            metrics.tables_refused.add(1);
        }
        hubs.failed(hub);
        failures = failures.wrapping_add(1);
        if !failures.is_multiple_of(hubs.count()) {
            tracing::info!(hub, %error, next = %hubs, "a hub cannot be asked; the next one is");
            continue;
        }
        if std::mem::replace(&mut reachable, false) {
            tracing::warn!(hub, %error, "the hub cannot be asked; the table in hand stays");
        }
        let pause = PAUSE.mul_f64(rand::rng().random_range(0.5..1.0));
        tokio::time::sleep(pause).await;
    }
}

#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("it has no table yet")]
    NoTable,
    #[error("its table is refused: {0}")]
    Table(String),
}

async fn ask(
    config: &EdgeConfig,
    hub: &str,
    client: &reqwest::Client,
    reader: &Reader,
    views: &watch::Sender<Current>,
) -> Result<(), AskError> {
    let after = views.borrow().as_ref().map(|view| view.generation);
    let (wait, grace) = match (config.hub.count(), after) {
        (1, _) => (LONG_POLL, GRACE),
        (_, Some(_)) => (LONG_POLL_OF_SEVERAL, GRACE_OF_SEVERAL),
        (_, None) => (FIRST_POLL_OF_SEVERAL, GRACE_OF_SEVERAL),
    };
    let wait_ms = wait.as_millis();
    let url = match after {
        // Which is to say that this one is in hand: what is wider waits until everybody says so.
        Some(after) => format!("{hub}/v1/routes?after={after}&wait_ms={wait_ms}&reader={reader}"),
        None => format!("{hub}/v1/routes?wait_ms={wait_ms}"),
    };
    let answer = client.get(url).timeout(wait + grace).send().await?.error_for_status()?;
    if answer.status() == http::StatusCode::NO_CONTENT {
        let another_may_have_one = after.is_none() && config.hub.count() > 1;
        return if another_may_have_one { Err(AskError::NoTable) } else { Ok(()) };
    }
    let body = answer.bytes().await?;
    let wire = serde_json::from_slice::<RouteTableV1>(&body);
    let wire = wire.map_err(|error| AskError::Table(error.to_string()))?;
    let table = RouteTable::try_from(wire.clone()).map_err(|error| AskError::Table(error.to_string()))?;
    if let Some(after) = after.filter(|after| table.generation <= *after) {
        let offered = table.generation;
        return Err(AskError::Table(format!(
            "generation {offered} is not higher than {after}, which is in hand"
        )));
    }
    let snapshot = config.snapshot.clone();
    let generation = table.generation;
    let saved = tokio::task::spawn_blocking(move || save(&snapshot, &wire, generation)).await;
    if let Err(error) = saved.map_err(io::Error::other).flatten() {
        tracing::warn!(snapshot = %config.snapshot.display(), %error, "the route table cannot be kept on disk");
    }
    tracing::info!(generation = %table.generation, regions = table.regions.len(), "a new route table");
    views.send_replace(Some(Arc::new(View::new(&table, &config.catalogue))));
    Ok(())
}

/// Writes the table beside its place and moves it there, so that a crash leaves the old one or the new one; unless a table
/// as new is there already.
fn save(path: &Path, table: &RouteTableV1, generation: Generation) -> io::Result<()> {
    // Held until the file is closed, also by a process that crashes.
    let lock = fs::File::create(path.with_extension("lock"))?;
    lock.lock()?;
    if load(path).is_ok_and(|there| there.generation >= generation) {
        return Ok(());
    }
    let body = serde_json::to_vec(table)?;
    let beside = path.with_extension("new");
    let mut file = fs::File::create(&beside)?;
    writeln!(file, "{}", checksum(&body))?;
    file.write_all(&body)?;
    file.sync_all()?;
    fs::rename(beside, path)
}

fn load(path: &Path) -> io::Result<RouteTable> {
    let bytes = fs::read(path)?;
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| invalid("it has no checksum"))?;
    let (sum, body) = (&bytes[..end], &bytes[end + 1..]);
    if sum != checksum(body).as_bytes() {
        return Err(invalid("its checksum does not fit"));
    }
    let wire: RouteTableV1 = serde_json::from_slice(body)?;
    RouteTable::try_from(wire).map_err(|error| invalid(&error.to_string()))
}

fn checksum(body: &[u8]) -> String {
    Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, number: u64) -> io::Result<()> {
        let wire = serde_json::json!({
            "version": 1, "epoch": 1, "generation": number, "deployments": [],
            // As long as it takes for a torn write to show.
            "regions": (0..200).map(|at| serde_json::json!({
                "id": format!("aws/region-{at}"), "endpoint": "127.0.0.1:1", "deployments": [],
            })).collect::<Vec<_>>(),
        });
        let wire: RouteTableV1 = serde_json::from_value(wire).expect("a table as a hub sends it");
        let table = RouteTable::try_from(wire.clone()).expect("a good table");
        save(path, &wire, table.generation)
    }

    fn there(path: &Path) -> u64 {
        load(path).expect("a good table is there").generation.number
    }

    /// Invariant 5, Monotone plans.
    #[test]
    fn the_snapshot_never_goes_back_whoever_writes_last() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("routes");
        for (written, expected) in [(3, 3), (2, 3), (3, 3), (4, 4), (1, 4)] {
            write(&path, written).expect("it is written or left");
            assert_eq!(there(&path), expected, "after {written}");
        }
        // One that is of no use is in nobody's way.
        fs::write(&path, "torn").expect("it is written");
        write(&path, 1).expect("it is written");
        assert_eq!(there(&path), 1);
    }

    #[test]
    fn two_who_write_at_once_leave_a_whole_table_and_the_newest() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("routes");
        write(&path, 1).expect("it is written");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    let mut before = 1;
                    for round in 0..25 {
                        write(path, 2 + 4 * round + writer).expect("it is written or left");
                        let now = there(path);
                        assert!(now >= before && now >= 2 + 4 * round + writer, "{before} {now}");
                        before = now;
                    }
                });
            }
        });
        assert_eq!(there(&path), 2 + 4 * 24 + 3);
    }
}
