//! Keeps the route table: waits for the store and the clock, tells the machine, does what it says.
//!
//! The only task that writes `routes`. It never decides anything; see [`scheduler_core::hub`] for what it is told to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::RouteTable;
use scheduler_core::hub::{Command, Event, Hub};
use scheduler_core::wire::keys;
use scheduler_core::wire::route::RouteTableV1;
use scheduler_store::{self as store, Compare, Op, Store, StoreError, Txn, Watch, WatchError};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::start::{Listed, Start, listed, readable};
use super::{Current, HubError, Published, records, told};
use crate::events::{Relisting, SpokeGone, StoreFailing, StoreRecovered, TablePublished};

/// How often leases are looked through: often enough that one ends within a twentieth of its time.
const LOOK_PERIOD: Duration = Duration::from_millis(250);

/// The keeper of the route table.
pub(super) struct Keeper {
    hub: Hub,
    store: Store,
    watch: Watch,
    publish: watch::Sender<Current>,
    /// The revision at which this hub knows `routes` to be.
    routes_at: u64,
    /// A table of which the store said that it might not have been written.
    unconfirmed: Option<RouteTable>,
    failing: bool,
}

impl Keeper {
    pub(super) fn new(
        start: Start,
        lapsed_keep: Duration,
        store: Store,
        publish: watch::Sender<Current>,
    ) -> Keeper {
        let Start { found, routes_at, next } = start;
        let watch = store.watch("", next);
        let hub = Hub::new(found, lapsed_keep, Instant::now());
        Keeper { hub, store, watch, publish, routes_at, unconfirmed: None, failing: false }
    }

    /// Keeps it until `stopping` says so.
    pub(super) async fn keep(mut self, stopping: watch::Receiver<bool>) -> Result<(), HubError> {
        let stop = told(stopping);
        tokio::pin!(stop);
        let mut look = interval(LOOK_PERIOD);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.obey().await?;
            let wakeup = until(self.hub.next_wakeup());
            tokio::select! {
                changes = self.watch.next() => match changes {
                    Ok(changes) => self.take(changes),
                    Err(error @ (WatchError::Compacted { .. } | WatchError::FromTheFuture { .. })) => {
                        Relisting { error: &error }.emit();
                        self.relist(&mut look).await?;
                    }
                    Err(WatchError::Closed) => return Err(StoreError::Closed.into()),
                },
                _ = look.tick() => {
                    let expired = self.store.expire(Instant::now()).await;
                    self.note(&expired.map(drop));
                }
                () = wakeup => self.hub.handle_timeout(Instant::now()),
                () = &mut stop => return Ok(()),
            }
        }
    }

    fn take(&mut self, changes: Vec<store::Event>) {
        let events = changes.iter().filter_map(records::event).filter_map(readable);
        for event in events.collect::<Vec<_>>() {
            if let Event::SpokeGone { region, boot_id } = &event {
                SpokeGone { region, boot_id: *boot_id }.emit();
            }
            self.tell(event);
        }
    }

    /// Reads everything anew, after the watch has broken off; the store may need a while.
    async fn relist(&mut self, look: &mut tokio::time::Interval) -> Result<(), HubError> {
        loop {
            match self.store.range("").await {
                Ok(range) => {
                    let Listed { spokes, deployments } = listed(&range.entries);
                    self.tell(Event::Listed { spokes, deployments });
                    self.watch = self.store.watch("", range.revision + 1);
                    return Ok(());
                }
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                Err(error) => {
                    self.note(&Err(error));
                    look.tick().await;
                }
            }
        }
    }

    fn tell(&mut self, event: Event) {
        self.hub.handle(event, Instant::now());
    }

    async fn obey(&mut self) -> Result<(), HubError> {
        while let Some(command) = self.hub.poll() {
            match command {
                Command::Persist(table) => self.persist(table).await?,
                Command::Publish(table) => self.publish(table),
            }
        }
        Ok(())
    }

    /// Writes the table on top of the last one that this hub knows of, or not at all.
    async fn persist(&mut self, table: RouteTable) -> Result<(), HubError> {
        let when = vec![Compare::ModRevision(keys::ROUTES.to_owned(), self.routes_at)];
        let value = records::bytes(&RouteTableV1::from(&table));
        let then = vec![Op::Put { key: keys::ROUTES.to_owned(), value, lease: None }];
        let outcome = self.store.txn(Txn { when, then }).await;
        self.note(&outcome.clone().map(drop));
        match outcome {
            Ok(outcome) if outcome.succeeded => {
                self.routes_at = outcome.revision;
                self.unconfirmed = None;
                self.tell(Event::Persisted(table));
            }
            Ok(_) => self.adopt().await?,
            Err(_) => {
                self.unconfirmed = Some(table);
                self.tell(Event::NotPersisted);
            }
        }
        Ok(())
    }

    /// Somebody has written `routes`: this hub itself, if it is the table of which the store did not know. Or another
    /// hub, and then this one has nothing more to say.
    async fn adopt(&mut self) -> Result<(), HubError> {
        let entry = match self.store.get(keys::ROUTES).await {
            Ok(entry) => entry.ok_or(HubError::Deposed)?,
            Err(error) => {
                self.note(&Err(error));
                self.tell(Event::NotPersisted);
                return Ok(());
            }
        };
        let theirs = records::table(&entry).map_err(HubError::Record)?;
        match self.unconfirmed.take() {
            Some(ours) if ours == theirs => {
                self.routes_at = entry.mod_revision;
                self.tell(Event::Persisted(ours));
                Ok(())
            }
            Some(_) | None => Err(HubError::Deposed),
        }
    }

    fn publish(&mut self, table: RouteTable) {
        let (regions, deployments) = (table.regions.len(), table.deployments.len());
        TablePublished { generation: table.generation, regions, deployments }.emit();
        let body = records::bytes(&RouteTableV1::from(&table)).into();
        self.publish.send_replace(Some(Arc::new(Published { table, body })));
    }

    /// Tells when the store begins to fail and when it works again.
    fn note(&mut self, outcome: &Result<(), StoreError>) {
        match outcome {
            Ok(()) if std::mem::take(&mut self.failing) => StoreRecovered.emit(),
            Err(error) if !std::mem::replace(&mut self.failing, true) => StoreFailing { error }.emit(),
            Ok(()) | Err(_) => {}
        }
    }
}

/// Waits until then, or for ever.
async fn until(wakeup: Option<Instant>) {
    match wakeup {
        Some(wakeup) => sleep_until(wakeup.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::super::start::start;
    use super::*;

    /// A keeper of an empty store in epoch 1, and what it gives out.
    async fn keeper(dir: &tempfile::TempDir) -> (Keeper, watch::Receiver<Current>) {
        let store = Store::open(&dir.path().join("store"), Instant::now()).await.unwrap();
        let start = start(&store, &[], 1).await.unwrap();
        let (publish, current) = watch::channel(None);
        (Keeper::new(start, Duration::from_secs(60), store, publish), current)
    }

    fn spoke(boot_id: u64) -> (String, Vec<u8>) {
        let region = "aws/us-east-1".parse().unwrap();
        let value = format!(
            r#"{{"version":1,"region":"{region}","endpoint":"10.0.0.1:{boot_id}","boot_id":{boot_id},"deployments":[]}}"#
        );
        (keys::spoke(&region, boot_id), value.into_bytes())
    }

    fn table(number: u64) -> RouteTable {
        let generation = regions::Generation { epoch: 1, number };
        RouteTable { generation, ..RouteTable::empty() }
    }

    async fn write(store: &Store, table: &RouteTable) {
        store.put(keys::ROUTES, records::bytes(&RouteTableV1::from(table)), None).await.unwrap();
    }

    fn published(current: &watch::Receiver<Current>) -> Vec<u64> {
        current.borrow().iter().map(|published| published.table.generation.number).collect()
    }

    #[tokio::test]
    async fn a_hub_that_finds_the_table_of_another_publishes_nothing_more_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (keeper, current) = keeper(&dir).await;
        let store = keeper.store.clone();
        write(&store, &table(7)).await;
        let (key, value) = spoke(1);
        store.put(&key, value, None).await.unwrap();
        let (_stop, stopping) = watch::channel(false);
        let outcome = keeper.keep(stopping).await;
        assert!(matches!(outcome, Err(HubError::Deposed)), "{outcome:?}");
        assert_eq!(published(&current), [0; 0]);
    }

    #[tokio::test]
    async fn a_table_of_which_the_store_did_not_know_is_taken_for_ours_if_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (mut keeper, current) = keeper(&dir).await;
        write(&keeper.store, &table(1)).await;
        keeper.unconfirmed = Some(table(1));
        let (key, value) = spoke(1);
        let standing = records::standing(&store::KeyValue {
            key,
            value: value.into(),
            create_revision: 9,
            mod_revision: 9,
            lease: None,
        });
        keeper.tell(Event::SpokeStands(standing.unwrap()));
        keeper.obey().await.unwrap();
        assert_eq!(published(&current), [2], "ours was the first, and what is new is the second");
        let kept = keeper.store.get(keys::ROUTES).await.unwrap().unwrap();
        assert_eq!(records::table(&kept).map(|table| table.generation.number), Ok(2));
        assert_eq!(keeper.routes_at, kept.mod_revision);
    }

    #[tokio::test]
    async fn a_spoke_that_cannot_be_read_is_left_out_and_the_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (mut keeper, current) = keeper(&dir).await;
        keeper.store.put("spokes/aws/us-east-1/01", b"{}".to_vec(), None).await.unwrap();
        let (key, value) = spoke(2);
        keeper.store.put(&key, value, None).await.unwrap();
        let changes = keeper.watch.next().await.unwrap();
        keeper.take(changes);
        keeper.obey().await.unwrap();
        let ports = current.borrow().as_ref().map(|published| {
            published.table.regions.values().map(|route| route.endpoint.port()).collect::<Vec<_>>()
        });
        assert_eq!(ports, Some(vec![2]));
    }
}
