//! Probing of the replicas in the spoke's list.
//!
//! The region file lists static replicas, and the scaler adds and removes others at any time. Each replica has a task
//! that polls its status; a new replica is polled at once, because requests may be waiting for it.

use super::probe::{self, ReplicaProber};
use std::collections::BTreeMap;
use std::sync::Arc;
use supervision::task::supervise;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

/// Follows the list; `changed` signals a new one.
pub(super) async fn replicas(prober: Arc<ReplicaProber>, changed: Arc<Notify>) {
    let mut probes = JoinSet::new();
    let mut by_number: BTreeMap<usize, AbortHandle> = BTreeMap::new();
    loop {
        let replicas = prober.replicas.refresh();
        by_number.retain(|number, probe| {
            let stays = replicas.contains_key(number);
            if !stays {
                probe.abort();
            }
            stays
        });
        for (number, address) in replicas {
            by_number.entry(number).or_insert_with(|| {
                let prober = prober.clone();
                probes.spawn(supervise("replica status", move || {
                    probe::watch(number, address.clone(), prober.clone())
                }))
            });
        }
        // The estimates for provisioning replicas may have changed as well.
        prober.hold.call();
        prober.log_failures();
        tokio::select! {
            () = changed.notified() => {}
            // Only aborted probes end.
            Some(_) = probes.join_next() => {}
        }
    }
}
