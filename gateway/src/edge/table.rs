//! Follows the hub's route table, and does without the hub.
//!
//! A new table is taken when its generation is higher than the one in hand, never otherwise: a hub restored from an old
//! backup cannot take traffic back to regions that are gone. What is taken is written to disk with its checksum before
//! it is used, so that a gateway which starts while the hub is dead serves from the last good table.

use super::view::View;
use crate::config::EdgeConfig;
use rand::Rng;
use regions::route::RouteTable;
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
/// How much longer than that the answer may take.
const GRACE: Duration = Duration::from_secs(5);
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
pub(crate) async fn follow(config: Arc<EdgeConfig>, client: reqwest::Client, views: watch::Sender<Current>) {
    let mut reachable = true;
    loop {
        match ask(&config, &client, &views).await {
            Ok(()) => {
                if !std::mem::replace(&mut reachable, true) {
                    tracing::info!(hub = config.hub, "the hub is back");
                }
            }
            Err(error) => {
                if std::mem::replace(&mut reachable, false) {
                    tracing::warn!(hub = config.hub, %error, "the hub cannot be asked; the table in hand stays");
                }
                let pause = PAUSE.mul_f64(rand::rng().random_range(0.5..1.0));
                tokio::time::sleep(pause).await;
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("its table is refused: {0}")]
    Table(String),
}

async fn ask(
    config: &EdgeConfig,
    client: &reqwest::Client,
    views: &watch::Sender<Current>,
) -> Result<(), AskError> {
    let after = views.borrow().as_ref().map(|view| view.generation);
    let wait_ms = LONG_POLL.as_millis();
    let url = match after {
        Some(after) => format!("{}/v1/routes?after={after}&wait_ms={wait_ms}", config.hub),
        None => format!("{}/v1/routes?wait_ms={wait_ms}", config.hub),
    };
    let answer = client.get(url).timeout(LONG_POLL + GRACE).send().await?.error_for_status()?;
    if answer.status() == http::StatusCode::NO_CONTENT {
        return Ok(());
    }
    let wire: RouteTableV1 = answer.json().await?;
    let table = RouteTable::try_from(wire.clone()).map_err(|error| AskError::Table(error.to_string()))?;
    if let Some(after) = after.filter(|after| table.generation <= *after) {
        let offered = table.generation;
        return Err(AskError::Table(format!(
            "generation {offered} is not higher than {after}, which is in hand"
        )));
    }
    let snapshot = config.snapshot.clone();
    let saved = tokio::task::spawn_blocking(move || save(&snapshot, &wire)).await;
    if let Err(error) = saved.map_err(io::Error::other).flatten() {
        tracing::warn!(snapshot = %config.snapshot.display(), %error, "the route table cannot be kept on disk");
    }
    tracing::info!(generation = %table.generation, regions = table.regions.len(), "a new route table");
    views.send_replace(Some(Arc::new(View::new(&table, &config.catalogue))));
    Ok(())
}

/// Writes the table beside its place and moves it there, so that a crash leaves the old one or the new one.
fn save(path: &Path, table: &RouteTableV1) -> io::Result<()> {
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
