//! Long poll of the hub's route table. With several hubs any of them may be polled: the table with the higher generation
//! is the newer one.
//!
//! A reader that has received a table asks for the changes of the next one ([`scheduler_api::route::changes`]), so that a
//! new table costs as much as has changed. If they do not apply, the next poll asks for the whole table.
//!
//! A table is accepted only if its generation is higher than the current one, so a hub restored from an old backup cannot
//! send traffic to removed regions, and is written to disk before it is returned ([`crate::snapshot`]). Each poll names the
//! generation of the current table and the reader, and so acknowledges that the reader runs this table: the hub widens a
//! residency only when every reader has it ([`scheduler_core::rollout`]). So a returned table must be in force before the
//! next poll.

use backoff::Backoff;
use http::Method;
use regions::RouteTable;
use scheduler_api::paths;
use scheduler_api::reader::Reader;
use scheduler_api::route::RouteTableV1;
use scheduler_api::route::changes::{self, ChangesError, RoutesV1};
use scheduler_core::table_watch::{self, DEREGISTER_TIMEOUT};
use serde::de::IgnoredAny;

use crate::hub::{ControlPlaneClient, HubConnection, HubFailure, HubRequest};
use crate::snapshot::Snapshot;

/// Watch of the route table by one reader.
#[derive(Debug)]
pub struct TableWatch {
    hub: HubConnection,
    reader: Reader,
    snapshot: Snapshot,
    /// Last accepted table, as the hub has it, to which changes are applied. `None`: the next poll asks for a whole table.
    base: Option<RouteTableV1>,
}

/// Result of one poll.
#[derive(Debug)]
pub enum TablePoll {
    /// The hub has confirmed the current table.
    Confirmed,
    /// The hub has a newer table, which is on disk.
    Newer(RouteTable),
    /// There is no valid response.
    Failed {
        /// The hub sent a table or changes, which were rejected.
        is_rejected: bool,
    },
}

impl TableWatch {
    /// Creates the watch of a reader, whose current table is in `snapshot`.
    pub fn new(
        client: ControlPlaneClient,
        reader: Reader,
        snapshot: Snapshot,
        backoff: Backoff,
    ) -> TableWatch {
        TableWatch { hub: HubConnection::new(client, "route table", backoff), reader, snapshot, base: None }
    }

    /// Polls the current hub. `complete` may add to a newer table before it is written to disk.
    pub async fn next(&mut self, complete: impl FnOnce(&mut RouteTable)) -> TablePoll {
        let TableWatch { hub, reader, snapshot, base } = self;
        hub.ready().await;
        let (after, hubs) = (snapshot.generation(), hub.client().hubs().count());
        let poll = table_watch::long_poll(reader.role, hubs, after.is_some());
        let path = paths::routes(after, reader, base.is_some(), poll.wait);
        let request = HubRequest::new(Method::GET, path, poll.timeout());
        let polled = hub.call(&request, async |response: Option<RoutesV1>| match response {
            Some(response) => {
                let table = match received(base, response) {
                    Ok(table) => table,
                    Err(error @ ChangesError::Unrequested) => {
                        return Err(HubFailure::Invalid(error.to_string()));
                    }
                    Err(error) => {
                        // The hub has another version, or a defect. The whole table is requested at once.
                        tracing::warn!(%error, "changes of the route table rejected");
                        return Ok(TablePoll::Failed { is_rejected: true });
                    }
                };
                let sent = table.clone();
                let complete = |table: &mut RouteTable| {
                    complete(table);
                    Ok(())
                };
                let accepted = snapshot.accept(table, complete).await?;
                *base = Some(sent);
                Ok(TablePoll::Newer(accepted))
            }
            None if table_watch::requires_table(reader.role, hubs, after.is_some()) => {
                Err(HubFailure::NoTable)
            }
            None => Ok(TablePoll::Confirmed),
        });
        polled.await.unwrap_or_else(|error| TablePoll::Failed {
            is_rejected: matches!(error.failure, HubFailure::Invalid(_)),
        })
    }
}

/// Returns the table in a response; takes the current table if the response has changes of it.
fn received(base: &mut Option<RouteTableV1>, response: RoutesV1) -> Result<RouteTableV1, ChangesError> {
    match (response, base.take()) {
        (RoutesV1::Table(table), _) => Ok(*table),
        (RoutesV1::Changes(changes), Some(base)) => changes::apply(base, changes),
        (RoutesV1::Changes(_), None) => Err(ChangesError::Unrequested),
    }
}

/// Deregisters a reader that shuts down, so that a change of a residency policy does not wait until the hub drops it.
pub async fn deregister(client: &ControlPlaneClient, reader: &Reader) {
    let path = paths::reader(reader);
    // On failure, the hub drops the silent reader later.
    client.send::<IgnoredAny>(&HubRequest::new(Method::DELETE, path, DEREGISTER_TIMEOUT)).await.ok();
}
