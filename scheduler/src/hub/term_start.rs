//! Start of a term: gives a new store its epoch, writes the deployments of the hub's file, and reads the store. All
//! writes are guarded by the term.

use regions::{Deployment, Generation};
use scheduler_api::deployment::DeploymentsV1;
use scheduler_api::deployment::{DesiredDeployments, Promotions};
use scheduler_api::keys;
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::hub::{HubInitialState, StoreState, required_epoch};
use scheduler_store::{Compare, KeyRange, KeyValue, Op, Range, Store, StoreError, Term, Txn};

use super::records::{self, RecordError};
use super::{HubError, store_format};
use crate::events::{DeploymentsFileIgnored, RecordUnreadable, StoreRolledBack};

/// State of the store at the start of a term.
pub(super) struct TermStart {
    pub(super) found: HubInitialState,
    /// The revision of the table in the store; 0 if there is none.
    pub(super) routes_at: u64,
    /// The revision of the desired deployments in the store; 0 without a readable record.
    pub(super) deployments_at: u64,
    /// The first revision that is not in `found`.
    pub(super) next: u64,
}

/// Reads the store; returns `None` if the term ends meanwhile. `published_before` is the generation that this hub has
/// published.
pub(super) async fn start<S: Store>(
    store: &S,
    term: &Term,
    deployments: &[Deployment],
    epoch_if_new: u64,
    published_before: Option<Generation>,
) -> Result<Option<TermStart>, HubError> {
    store_format::begin(store, term).await?;
    begin_epoch(store, term, epoch_if_new).await?;
    write_file_deployments(store, term, deployments).await?;
    let Range { entries, revision } = store.range(control_keys()).await?;
    let entry = |key: &str| entries.iter().find(|entry| entry.key == key);
    if entry(keys::LEADER).is_none_or(|leader| leader.create_revision != term.created) {
        return Ok(None);
    }
    // The epoch was there or was written above, unless the store was rolled back in between.
    let Some(epoch) = entry(keys::EPOCH) else { return Ok(None) };
    let epoch_at = epoch.mod_revision;
    let epoch = records::epoch(epoch).map_err(HubError::Record)?;
    let routes = entry(keys::ROUTES);
    let table = routes.map(records::table).transpose().map_err(HubError::Record)?;
    let generation = table.as_ref().map(|table| table.generation);
    let parts = with_prefix(&entries, keys::PLAN).filter_map(|entry| readable(records::part(entry)));
    let plan: Vec<_> = parts.collect();
    let published = plan.iter().map(PlanPart::generation).chain(generation);
    if let Some(published) = published.map(|it| it.epoch).max().filter(|published| *published > epoch) {
        return Err(HubError::EpochFell { epoch, published });
    }
    let mut found = HubInitialState { epoch, table, plan, all: read_all(&entries) };
    if let Some(next) = required_epoch(published_before, epoch, generation) {
        StoreRolledBack { published: published_before, stored: generation, epoch: next }.emit();
        let when = vec![term.guard(), Compare::ModRevision(keys::EPOCH.to_owned(), epoch_at)];
        let value = next.to_string().into_bytes();
        let then = vec![Op::Put { key: keys::EPOCH.to_owned(), value, lease: None }];
        if !store.txn(Txn { when, then }).await?.succeeded {
            // Or the first of two attempts succeeded; then the next start reads the new epoch.
            return Ok(None);
        }
        found.epoch = next;
    }
    let deployments_at = deployments_revision(&entries, &found.all).unwrap_or(0);
    let routes_at = routes.map_or(0, |entry| entry.mod_revision);
    Ok(Some(TermStart { found, routes_at, deployments_at, next: revision + 1 }))
}

/// Returns the range of the keys that the leader reads and watches: all but those of usage.
pub(super) fn control_keys() -> KeyRange {
    KeyRange::Between { from: String::new(), before: keys::USAGE.to_owned() }
}

/// Returns the readable records among these entries; unreadable ones are logged and left out.
pub(super) fn read_all(entries: &[KeyValue]) -> StoreState {
    let spokes = with_prefix(entries, keys::SPOKES).filter_map(|entry| readable(records::spoke(entry)));
    let readers = with_prefix(entries, keys::READERS).filter_map(|entry| readable(records::reader(entry)));
    let drains = with_prefix(entries, keys::DRAINS).filter_map(|entry| readable(records::drain(entry)));
    let demand = with_prefix(entries, keys::DEMAND).filter_map(|entry| readable(records::demand(entry)));
    let tenant_demand =
        with_prefix(entries, keys::TENANT_DEMAND).filter_map(|entry| readable(records::tenant_demand(entry)));
    let wanted = entries.iter().find(|entry| entry.key == keys::DEPLOYMENTS);
    let deployments = wanted.and_then(|entry| readable(records::wanted(entry)));
    let keys = entries.iter().find(|entry| entry.key == keys::CREATED_KEYS);
    let api_keys = keys.and_then(|entry| readable(records::api_keys(entry)));
    let tenants = entries.iter().find(|entry| entry.key == keys::TENANTS);
    StoreState {
        spokes: spokes.collect(),
        deployments,
        tenants: tenants.and_then(|entry| readable(records::tenants(entry))),
        api_keys,
        drains: drains.collect(),
        demand: demand.collect(),
        tenant_demand: tenant_demand.collect(),
        readers: readers.collect(),
    }
}

/// Returns the revision of the desired deployments among these entries; `None` if they could not be read.
pub(super) fn deployments_revision(entries: &[KeyValue], read: &StoreState) -> Option<u64> {
    read.deployments.as_ref()?;
    entries.iter().find(|entry| entry.key == keys::DEPLOYMENTS).map(|entry| entry.mod_revision)
}

fn with_prefix<'a>(entries: &'a [KeyValue], prefix: &str) -> impl Iterator<Item = &'a KeyValue> {
    entries.iter().filter(move |entry| entry.key.starts_with(prefix))
}

pub(super) fn readable<T>(record: Result<T, RecordError>) -> Option<T> {
    record.map_err(|error| RecordUnreadable { error: &error }.emit()).ok()
}

/// Gives a store without an epoch the current time as its epoch. Such a store is new, and the tables published from it
/// must supersede those that a hub published from an earlier store, which gateways still have. With the time as epoch,
/// gateways accept a hub that has lost its disk at once, without an operator keeping numbers. A restored store keeps
/// its epoch, which `meridian restore` raises ([`super::restored`]).
async fn begin_epoch<S: Store>(store: &S, term: &Term, epoch_if_new: u64) -> Result<(), StoreError> {
    let when = vec![term.guard(), Compare::CreateRevision(keys::EPOCH.to_owned(), 0)];
    let value = epoch_if_new.to_string().into_bytes();
    let then = vec![Op::Put { key: keys::EPOCH.to_owned(), value, lease: None }];
    store.txn(Txn { when, then }).await.map(drop)
}

/// Writes the deployments of the hub's file to the store, as long as no operator has applied deployments; applied ones
/// take precedence. An unreadable record is left too, since it may have been applied.
async fn write_file_deployments<S: Store>(
    store: &S,
    term: &Term,
    deployments: &[Deployment],
) -> Result<(), StoreError> {
    let named = deployments.iter().map(|deployment| (deployment.name.clone(), deployment.clone()));
    let mut ours = DesiredDeployments {
        applied: false,
        deployments: named.collect(),
        promotions: Promotions::default(),
    };
    let revision = match store.get(keys::DEPLOYMENTS).await? {
        None => 0,
        Some(entry) => match records::wanted(&entry) {
            Ok(theirs) if theirs.applied => {
                if !ours.deployments.is_empty() && theirs.deployments != ours.deployments {
                    DeploymentsFileIgnored.emit();
                }
                return Ok(());
            }
            Ok(theirs) if theirs.deployments == ours.deployments => return Ok(()),
            Ok(theirs) => {
                ours.promotions = theirs.promotions;
                entry.mod_revision
            }
            Err(_) => return Ok(()),
        },
    };
    let when = vec![term.guard(), Compare::ModRevision(keys::DEPLOYMENTS.to_owned(), revision)];
    let value = records::packed(&DeploymentsV1::from(&ours));
    let then = vec![Op::Put { key: keys::DEPLOYMENTS.to_owned(), value, lease: None }];
    // If it fails, an operator has applied a change at the same time, or the term is over.
    store.txn(Txn { when, then }).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};
    use scheduler_store::SimStore;
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    fn deployment(name: &str, model: &str) -> Deployment {
        Deployment {
            name: name.parse().unwrap(),
            task: Task::Embed,
            model: model.to_owned(),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            residency: ResidencyPolicy::Anywhere,
            regions: Vec::new(),
            order: Vec::new(),
            placement: None,
            scaling: Scaling::default(),
        }
    }

    async fn store() -> (SimStore, Term) {
        let store = SimStore::new();
        let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        let term = store.campaign(keys::LEADER, b"one".to_vec(), lease).await.unwrap();
        (store, term)
    }

    async fn begun(
        store: &SimStore,
        term: &Term,
        deployments: &[Deployment],
        epoch_if_new: u64,
    ) -> TermStart {
        start(store, term, deployments, epoch_if_new, None).await.unwrap().expect("the term has not ended")
    }

    #[tokio::test]
    async fn a_new_store_begins_an_epoch_and_an_old_one_keeps_its_own() {
        let (store, term) = store().await;
        assert_eq!(begun(&store, &term, &[], 1_700_000_000).await.found.epoch, 1_700_000_000);
        assert_eq!(begun(&store, &term, &[], 1_800_000_000).await.found.epoch, 1_700_000_000);
    }

    fn names(start: &TermStart) -> Vec<&str> {
        let wanted = start.found.all.deployments.iter();
        wanted.flat_map(|wanted| wanted.deployments.keys()).map(|name| name.as_str()).collect()
    }

    #[tokio::test]
    async fn the_files_deployments_are_used_until_an_operator_applies_some() {
        let (store, term) = store().await;
        let file = [deployment("a", "pypi://m"), deployment("b", "pypi://m")];
        assert_eq!(names(&begun(&store, &term, &file, 1).await), ["a", "b"]);
        let before = store.range("").await.unwrap();
        assert_eq!(begun(&store, &term, &file, 1).await.next, before.revision + 1, "nothing has changed");
        assert_eq!(names(&begun(&store, &term, &file[1..], 1).await), ["b"]);

        let applied = DesiredDeployments {
            applied: true,
            deployments: BTreeMap::from([("c".parse().unwrap(), deployment("c", "pypi://m"))]),
            promotions: Promotions::default(),
        };
        let value = records::packed(&DeploymentsV1::from(&applied));
        store.put(keys::DEPLOYMENTS, value, None).await.unwrap();
        assert_eq!(names(&begun(&store, &term, &file, 1).await), ["c"]);
    }

    #[tokio::test]
    async fn a_term_starts_without_reading_usage() {
        let (store, term) = store().await;
        let day = scheduler_api::usage::UsageDay(20_000);
        store
            .put(&keys::usage(day, &"aws/us-east-1".parse().unwrap(), 1), b"{".to_vec(), None)
            .await
            .unwrap();
        store.put(&keys::drain(&"aws/us-east-1".parse().unwrap()), b"{".to_vec(), None).await.unwrap();
        let read: Vec<_> =
            store.range(control_keys()).await.unwrap().entries.into_iter().map(|it| it.key).collect();
        assert_eq!(read, ["drains/aws/us-east-1", "leader"]);
        let next = begun(&store, &term, &[], 1).await.next;
        assert_eq!(next, store.range("").await.unwrap().revision + 1, "the watch begins after the read");
    }

    #[tokio::test]
    async fn an_unreadable_record_of_deployments_is_not_overwritten() {
        for poison in ["", "{}", r#"{"version":1,"applied":true,"deployments":[{}]}"#, "[]", "\u{1}\u{2}"] {
            let (store, term) = store().await;
            store.put(keys::DEPLOYMENTS, poison.into(), None).await.unwrap();
            let start = begun(&store, &term, &[deployment("a", "pypi://m")], 1).await;
            assert_eq!(start.found.all.deployments, None, "{poison}");
            assert_eq!(&*store.get(keys::DEPLOYMENTS).await.unwrap().unwrap().value, poison.as_bytes());
        }
    }

    #[tokio::test]
    async fn a_hub_does_not_start_on_a_store_with_an_unreadable_or_newer_table() {
        let check = async |epoch: &str, routes: &str, expected: &str| {
            let (store, term) = store().await;
            store.put(keys::EPOCH, epoch.into(), None).await.unwrap();
            store.put(keys::ROUTES, routes.into(), None).await.unwrap();
            let error = start(&store, &term, &[], 1, None).await.err().expect(expected).to_string();
            assert!(error.contains(expected), "{expected} in {error}");
        };
        let (store, term) = store().await;
        store.put(keys::EPOCH, "4".into(), None).await.unwrap();
        let part = r#"{"version":1,"epoch":5,"generation":7,"gateway":"aws/us-east-1","rows":[]}"#;
        store.put("plan/weights/aws/us-east-1", part.into(), None).await.unwrap();
        let error = start(&store, &term, &[], 1, None).await.err().expect("a plan of a later epoch");
        assert!(error.to_string().contains("epoch 5"), "{error}");

        let table = r#"{"version":1,"epoch":5,"generation":7,"regions":[],"deployments":[]}"#;
        check("4", table, "empty data folder").await;
        check("five", table, "`meta/epoch`").await;
        check("5", &table[1..], "`routes`").await;
        check("5", &table.replace("\"version\":1", "\"version\":2"), "version 2").await;
    }

    #[tokio::test]
    async fn an_expired_term_writes_nothing() {
        let (store, term) = store().await;
        store.lease_revoke(term.lease).await.unwrap();
        let many = [deployment("a", "pypi://m")];
        assert!(start(&store, &term, &many, 1, None).await.unwrap().is_none());
        assert_eq!(store.range("").await.unwrap().entries, []);
    }

    #[tokio::test]
    async fn a_rolled_back_store_begins_a_new_epoch() {
        let (store, term) = store().await;
        let routes = r#"{"version":1,"epoch":5,"generation":7,"regions":[],"deployments":[]}"#;
        store.put(keys::EPOCH, b"5".to_vec(), None).await.unwrap();
        store.put(keys::ROUTES, routes.into(), None).await.unwrap();
        let epoch = async |published: &str| {
            let published = Some(published.parse().unwrap());
            start(&store, &term, &[], 1, published).await.unwrap().unwrap().found.epoch
        };
        assert_eq!(epoch("5.7").await, 5);
        assert_eq!(epoch("5.9").await, 6);
        assert_eq!(&*store.get(keys::EPOCH).await.unwrap().unwrap().value, b"6");
        assert_eq!(epoch("5.9").await, 6, "once is enough");
    }
}
