//! Keeps an eye on exactly those replicas that there are.
//!
//! The list is the spoke's: the file of a region names some for ever, and whoever starts replicas adds and takes away others
//! at any time. Each has a task that asks it how it is; a replica that has come is asked at once, because somebody may be
//! waiting for it.

use super::{Ingress, probe};
use std::collections::BTreeMap;
use std::sync::Arc;
use supervision::task::supervise;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

/// Follows the list for ever; `changed` tells when it is another.
pub(super) async fn replicas(door: Arc<Ingress>, client: reqwest::Client, changed: Arc<Notify>) {
    let mut asking = JoinSet::new();
    let mut by_number: BTreeMap<usize, AbortHandle> = BTreeMap::new();
    loop {
        let there = door.replicas.refresh();
        by_number.retain(|number, asking| {
            let stays = there.contains_key(number);
            if !stays {
                asking.abort();
            }
            stays
        });
        for (number, address) in there {
            by_number.entry(number).or_insert_with(|| {
                let (client, spoke) = (client.clone(), door.spoke.clone());
                let hold = door.hold.clone();
                asking.spawn(supervise("replica status", move || {
                    probe::watch(number, address, client.clone(), spoke.clone(), hold.clone())
                }))
            });
        }
        // What is known of those who are on their way may be different as well.
        door.hold.call();
        tokio::select! {
            () = changed.notified() => {}
            // Only those end that were told to.
            Some(_) = asking.join_next() => {}
        }
    }
}
