//! Reloads the tenants file of the gateway and its key files, so that a deleted key is rejected within a few seconds.
//!
//! All files are read every two seconds: modification times are unreliable (a mounted secret is a symbolic link that is
//! replaced, and two writes can share one clock tick), and reading some files of a few KiB is cheap compared to
//! accepting a revoked key. An invalid file changes nothing: the tenants in use stay, the problem is logged once and
//! counted, and the next attempt follows in two seconds. `[[issuer]]` tables are read only at start; [`crate::tokens`]
//! follows the keys of issuers.
//!
//! Once an operator has applied tenants (`meridian apply`) the file is no longer used, and not read.

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

/// Result of the last read of the files.
#[derive(PartialEq, Eq)]
enum LastRead {
    /// Valid content, with this digest.
    Accepted(Digest),
    /// Invalid content, with these problems.
    Rejected(Vec<String>),
}

/// Reloads the file until tenants are applied. `issuers` are those of the file at start.
pub(super) async fn follow(
    file: TenantsFile,
    issuers: Vec<Issuer>,
    tenants: Arc<Tenants>,
    views: watch::Sender<Current>,
    metrics: Arc<EdgeMetrics>,
) {
    let path = file.path().display().to_string();
    let mut last: Option<LastRead> = None;
    let mut interval = tokio::time::interval(RELOAD_PERIOD);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while tenants.applied_tenants().is_none() {
        interval.tick().await;
        let reading = file.clone();
        let Ok(read) = tokio::task::spawn_blocking(move || reading.read()).await else { continue };
        let read = read.map_err(|found| configuration::named(file.path(), found));
        let read = read.and_then(|read| match same_issuers(&read.issuers, &issuers) {
            true => Ok(read),
            false => Err(vec!["[[issuer]] tables changed; restart the gateway to use them".to_owned()]),
        });
        match read {
            Ok(TenantsRead { keys, digest, .. }) => {
                // The first read finds the content of the start, or a change since then.
                if last.replace(LastRead::Accepted(digest)) == Some(LastRead::Accepted(digest)) {
                    continue;
                }
                views.send_if_modified(|current| {
                    let Some(keys) = tenants.file_changed(&keys) else { return false };
                    *current = current.as_ref().map(|view| Arc::new(view.for_tenants(keys)));
                    true
                });
                metrics.tenants_reloaded.add(1);
                // The tenants file has changed, and its tenants and keys are in use.
                tracing::info!(path, tenants = keys.tenants().len(), "tenants file reloaded");
            }
            Err(problems) => {
                let rejected = LastRead::Rejected(problems);
                if last.as_ref() == Some(&rejected) {
                    continue;
                }
                if let LastRead::Rejected(problems) = &rejected {
                    // Correct the problems; the file is read again when it changes.
                    tracing::warn!(
                        path,
                        ?problems,
                        "tenants file rejected; keeping the current tenants and keys"
                    );
                }
                metrics.tenants_refused.add(1);
                last = Some(rejected);
            }
        }
    }
}

fn same_issuers(now: &[Issuer], before: &[Issuer]) -> bool {
    now.len() == before.len()
        && now.iter().zip(before).all(|(now, before)| now.has_same_configuration(before))
}
