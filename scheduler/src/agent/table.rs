//! Follower of the hub's route table: source of the region's residency policies and desired deployments.
//!
//! A region without scaling writes no snapshot file: it uses the residency policy that requests carry. The residency policy
//! of a table is in force before the next poll, which acknowledges the table ([`scheduler_client::table`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use backoff::Backoff;
use regions::{Catalogue, Generation, RouteTable};
use scheduler_api::reader::{Reader, Role};
use scheduler_api::route::RouteTableV1;
use scheduler_client::hub::ControlPlaneClient;
use scheduler_client::snapshot::{self, Snapshot};
use scheduler_client::table::{self, TablePoll, TableWatch};
use scheduler_core::spoke::Spoke;
use tokio::sync::watch;

use super::events::TableReceived;

/// Delays while no hub responds. The longest is the lease time, so that a hub that recovers knows every region within
/// two lease times.
pub(crate) const BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(250), max: Duration::from_secs(5) };
/// Time without a response after which the hub counts as silent: two long polls
/// ([`scheduler_core::table_watch::long_poll`]).
pub(crate) const HUB_SILENCE_TIMEOUT: Duration = Duration::from_secs(10);

/// State received from the hub.
#[derive(Clone, Debug, Default)]
pub(crate) struct FollowedTable {
    /// The newest table.
    pub(crate) table: Option<Arc<RouteTable>>,
    /// Time of the hub's last response.
    pub(crate) last_response: Option<Instant>,
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
}

/// Where the table is fetched from and stored, and the spoke that applies its residency policies.
#[derive(Clone, Debug)]
pub(crate) struct TableFollower {
    /// Client of the hubs.
    pub(crate) client: ControlPlaneClient,
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
        let rejected = || self.spoke.lock().count_rejected_table();
        let file = self.snapshot.as_deref();
        let table = file.and_then(|file| snapshot::restore::<RouteTableV1>(file, rejected));
        if let Some(table) = &table {
            self.apply_policies(table);
        }
        FollowedTable { table: table.map(Arc::new), last_response: None }
    }

    /// Puts the residency policies of this table into force in the region.
    fn apply_policies(&self, table: &RouteTable) {
        self.spoke.lock().apply_route_table(table, &self.catalogue);
    }

    /// Returns the identity of the region as a reader of the table.
    fn reader(&self) -> Reader {
        let spoke = self.spoke.lock();
        Reader { role: Role::Spoke, region: spoke.region().clone(), boot_id: spoke.boot_id() }
    }

    /// Follows the hub until cancelled.
    pub(crate) async fn follow(&self, followed: &watch::Sender<FollowedTable>) {
        let snapshot = Snapshot::new(self.snapshot.clone(), followed.borrow().generation());
        let mut watch = TableWatch::new(self.client.clone(), self.reader(), snapshot, BACKOFF);
        loop {
            let newer = match watch.next(|_| {}).await {
                TablePoll::Failed { is_rejected } => {
                    if is_rejected {
                        self.spoke.lock().count_rejected_table();
                    }
                    continue;
                }
                TablePoll::Confirmed => None,
                TablePoll::Newer(table) => {
                    self.apply_policies(&table);
                    TableReceived { generation: table.generation, deployments: table.deployments.len() }
                        .emit();
                    Some(Arc::new(table))
                }
            };
            let now = Instant::now();
            self.spoke.lock().confirm_policy(now);
            followed.send_modify(|followed| {
                followed.table = newer.or(followed.table.take());
                followed.last_response = Some(now);
            });
        }
    }

    /// Deregisters the region as a reader of the table.
    pub(crate) async fn deregister(&self) {
        table::deregister(&self.client, &self.reader()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_is_silent_before_its_first_response_and_after_the_timeout() {
        let now = Instant::now();
        let mut followed = FollowedTable::default();
        assert!(followed.hub_is_silent(now), "no response yet");
        followed.last_response = Some(now);
        assert!(!followed.hub_is_silent(now + HUB_SILENCE_TIMEOUT));
        assert!(followed.hub_is_silent(now + HUB_SILENCE_TIMEOUT + Duration::from_secs(1)));
    }
}
