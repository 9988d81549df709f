//! Reads the gateway's own file of tenants again when it or a key file changes, so that a key which was deleted opens
//! nothing a few seconds later.
//!
//! All of it is read every two seconds, as a whole: modification times lie (a mounted secret is a link that is swung, and
//! two writes can share one tick), and some files of a few KiB cost less than a key that should be dead. What cannot be used
//! changes nothing: those that were known stay, the problem is logged once and counted, and the next attempt follows in two
//! seconds. `[[issuer]]` tables are read at start only; the keys of issuers are followed by [`crate::tokens`].
//!
//! Once an operator has applied tenants (`meridian apply`) the file does not count any longer, and is not read.

use super::table::Current;
use super::tenants::Tenants;
use crate::config::{TenantsFile, TenantsRead};
use crate::metrics::EdgeMetrics;
use crate::tokens::Issuer;
use gateway_core::keys::Digest;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Interval at which the files are read: a revoked key is accepted no longer than this.
const RELOAD_PERIOD: Duration = Duration::from_secs(2);

/// Content of the files when they were last read.
#[derive(PartialEq, Eq)]
enum Found {
    /// Content in use.
    Used(Digest),
    /// Something that cannot be used, for these reasons.
    Refused(Vec<String>),
}

/// Follows the file for ever. `issuers` are those that it named at start.
pub(super) async fn follow(
    file: TenantsFile,
    issuers: Vec<Issuer>,
    tenants: Arc<Tenants>,
    views: watch::Sender<Current>,
    metrics: Arc<EdgeMetrics>,
) {
    let path = file.path().display().to_string();
    let mut last: Option<Found> = None;
    let mut beat = tokio::time::interval(RELOAD_PERIOD);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while tenants.applied().is_none() {
        beat.tick().await;
        let reading = file.clone();
        let Ok(read) = tokio::task::spawn_blocking(move || reading.read()).await else { continue };
        let read = read.and_then(|read| match same(&read.issuers, &issuers) {
            true => Ok(read),
            false => Err(vec!["[[issuer]] tables have changed: restart the gateway to use them".to_owned()]),
        });
        match read {
            Ok(TenantsRead { keys, digest, .. }) => {
                // The first reading is what the process began with, or what has changed since.
                if last.replace(Found::Used(digest)) == Some(Found::Used(digest)) {
                    continue;
                }
                views.send_if_modified(|current| {
                    let Some(keys) = tenants.file_changed(&keys) else { return false };
                    *current = current.as_ref().map(|view| Arc::new(view.for_tenants(keys)));
                    true
                });
                metrics.tenants_reloaded.add(1);
                tracing::info!(path, tenants = keys.tenants().len(), "tenants file read");
            }
            Err(problems) => {
                let found = Found::Refused(problems);
                if last.as_ref() == Some(&found) {
                    continue;
                }
                if let Found::Refused(problems) = &found {
                    tracing::warn!(
                        path,
                        ?problems,
                        "tenants file rejected; the tenants and keys in use stay"
                    );
                }
                metrics.tenants_refused.add(1);
                last = Some(found);
            }
        }
    }
}

fn same(now: &[Issuer], before: &[Issuer]) -> bool {
    now.len() == before.len()
        && now.iter().zip(before).all(|(now, before)| now.has_same_configuration(before))
}
