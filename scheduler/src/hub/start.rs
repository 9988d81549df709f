//! What a hub does before it serves: gives a new store its epoch, lays out what is deployed, reads everything.

use std::collections::BTreeMap;

use regions::Deployment;
use scheduler_core::hub::Found;
use scheduler_core::registry::Standing;
use scheduler_core::wire::keys;
use scheduler_core::wire::route::StoredDeploymentV1;
use scheduler_store::model::TXN_OPS_MAX;
use scheduler_store::{Compare, KeyValue, Op, Range, Store, StoreError, Txn};

use super::HubError;
use super::records::{self, RecordError};
use crate::events::RecordRefused;

/// Where the hub starts from.
pub(super) struct Start {
    pub(super) found: Found,
    /// The revision of the table in the store; 0 if there is none.
    pub(super) routes_at: u64,
    /// The first revision that is not in `found`.
    pub(super) next: u64,
}

/// Everything that stands in the store about spokes and deployments.
pub(super) struct Listed {
    pub(super) spokes: Vec<Standing>,
    pub(super) deployments: Vec<Deployment>,
}

pub(super) async fn start(
    store: &Store,
    deployments: &[Deployment],
    epoch_if_new: u64,
) -> Result<Start, HubError> {
    begin_epoch(store, epoch_if_new).await?;
    lay_out(store, deployments).await?;
    let Range { entries, revision } = store.range("").await?;
    let entry = |key: &str| entries.iter().find(|entry| entry.key == key);
    let epoch = entry(keys::EPOCH).expect("it was put above");
    let epoch = records::epoch(epoch).map_err(HubError::Record)?;
    let routes = entry(keys::ROUTES);
    let table = routes.map(records::table).transpose().map_err(HubError::Record)?;
    if let Some(table) = &table
        && table.generation.epoch > epoch
    {
        return Err(HubError::EpochFell { epoch, table: table.generation.epoch });
    }
    let Listed { spokes, deployments } = listed(&entries);
    let found = Found { epoch, table, spokes, deployments };
    Ok(Start { found, routes_at: routes.map_or(0, |entry| entry.mod_revision), next: revision + 1 })
}

/// What can be read of the spokes and deployments among these entries; the rest is told and left out.
pub(super) fn listed(entries: &[KeyValue]) -> Listed {
    let under = |prefix| entries.iter().filter(move |entry| entry.key.starts_with(prefix));
    let spokes = under(keys::SPOKES).filter_map(|entry| readable(records::standing(entry)));
    let deployments = under(keys::DEPLOYMENTS).filter_map(|entry| readable(records::deployment(entry)));
    Listed { spokes: spokes.collect(), deployments: deployments.collect() }
}

pub(super) fn readable<T>(record: Result<T, RecordError>) -> Option<T> {
    record.map_err(|error| RecordRefused { error: &error }.emit()).ok()
}

/// A store that has no epoch is new, and what its hub publishes must supersede whatever a hub published on a store
/// before it, of which gateways still have a table. So a new store begins with the time: a hub that has lost its disk
/// is believed at once, and nobody has to remember a number. A store that is restored keeps its epoch, and whoever
/// restores it raises that.
async fn begin_epoch(store: &Store, epoch_if_new: u64) -> Result<(), StoreError> {
    let when = vec![Compare::CreateRevision(keys::EPOCH.to_owned(), 0)];
    let value = epoch_if_new.to_string().into_bytes();
    let then = vec![Op::Put { key: keys::EPOCH.to_owned(), value, lease: None }];
    store.txn(Txn { when, then }).await.map(drop)
}

/// Makes `deployments/` hold what the file says, changing only what differs. Not at one revision, since a file may hold
/// more than fits into a transaction; nobody reads it in between.
async fn lay_out(store: &Store, deployments: &[Deployment]) -> Result<(), StoreError> {
    let before = store.range(keys::DEPLOYMENTS).await?.entries;
    let wire = |deployment| records::bytes(&StoredDeploymentV1::from(deployment));
    let mut wanted: BTreeMap<_, _> =
        deployments.iter().map(|deployment| (keys::deployment(&deployment.name), wire(deployment))).collect();
    let mut ops = Vec::new();
    for KeyValue { key, value, .. } in before {
        match wanted.get(&key) {
            Some(same) if **same == *value => drop(wanted.remove(&key)),
            Some(_) => {}
            None => ops.push(Op::Delete { key }),
        }
    }
    ops.extend(wanted.into_iter().map(|(key, value)| Op::Put { key, value, lease: None }));
    for then in ops.chunks(TXN_OPS_MAX) {
        store.txn(Txn { when: Vec::new(), then: then.to_vec() }).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{EngineKind, EngineSpec, Precision, ResidencyPolicy, Task};
    use std::time::Instant;

    fn deployment(name: &str, model: &str) -> Deployment {
        Deployment {
            name: name.parse().unwrap(),
            task: Task::Embed,
            model: model.to_owned(),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            residency: ResidencyPolicy::Anywhere,
            regions: Vec::new(),
        }
    }

    async fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Instant::now()).await.unwrap();
        (dir, store)
    }

    #[tokio::test]
    async fn a_new_store_begins_an_epoch_and_an_old_one_keeps_its_own() {
        let (_dir, store) = store().await;
        assert_eq!(start(&store, &[], 1_700_000_000).await.unwrap().found.epoch, 1_700_000_000);
        assert_eq!(start(&store, &[], 1_800_000_000).await.unwrap().found.epoch, 1_700_000_000);
    }

    #[tokio::test]
    async fn what_the_file_says_is_laid_out_and_nothing_else_is_touched() {
        let (_dir, store) = store().await;
        let many: Vec<_> = (0..=TXN_OPS_MAX).map(|n| deployment(&format!("d{n:03}"), "pypi://m")).collect();
        assert_eq!(start(&store, &many, 1).await.unwrap().found.deployments, many);

        let before = store.range("").await.unwrap();
        assert_eq!(start(&store, &many, 1).await.unwrap().next, before.revision + 1, "nothing has changed");

        let other = [
            deployment("d000", "pypi://other"),
            deployment("d001", "pypi://m"),
            deployment("new", "pypi://m"),
        ];
        assert_eq!(start(&store, &other, 1).await.unwrap().found.deployments, other);
        let kept =
            |range: &Range| range.entries.iter().find(|entry| entry.key == "deployments/d001").cloned();
        assert_eq!(kept(&store.range("").await.unwrap()), kept(&before));
    }

    #[tokio::test]
    async fn a_hub_does_not_start_on_a_store_whose_table_it_cannot_follow() {
        let check = async |epoch: &str, routes: &str, wanted: &str| {
            let (_dir, store) = store().await;
            store.put(keys::EPOCH, epoch.into(), None).await.unwrap();
            store.put(keys::ROUTES, routes.into(), None).await.unwrap();
            let error = start(&store, &[], 1).await.err().expect(wanted).to_string();
            assert!(error.contains(wanted), "{wanted} in {error}");
        };
        let table = r#"{"version":1,"epoch":5,"generation":7,"regions":[],"deployments":[]}"#;
        check("4", table, "empty data folder").await;
        check("five", table, "`meta/epoch`").await;
        check("5", &table[1..], "`routes`").await;
        check("5", &table.replace("\"version\":1", "\"version\":2"), "version 2").await;
    }
}
