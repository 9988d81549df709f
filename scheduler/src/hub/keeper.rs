//! Keeps the route table and the plan: waits for the store and the clock, tells the machine, does what it says.
//!
//! The only one who writes `routes` and what is under `plan/`, for as long as its term lasts: every write is guarded by the
//! term, and that of a table by the table that it stands on. A plan is made on a thread of its own, since that may take
//! some tens of milliseconds. It never decides anything; see [`scheduler_core::hub`] for what it is told to do.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Catalogue, RouteTable};
use scheduler_core::bound::PublishRateLimiter;
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::hub::{Event, HubCommand, HubState};
use scheduler_core::plan::{TrafficClass, TrafficPlan, plan};
use scheduler_core::rollout::Rollout;
use scheduler_core::wire::keys;
use scheduler_core::wire::route::RouteTableV1;
use scheduler_store::model::{TXN_BYTES_MAX, TXN_OPS_MAX};
use scheduler_store::{self as store, Compare, Op, Store, StoreError, Term, Txn, Watch, WatchError};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, sleep_until};

use super::board::Board;
use super::start::{Start, everything, readable};
use super::{HubError, records};
use crate::events::{Deposed, LeasesHeld, LeasesLetGo, LossNotBorne, Relisting, SpokeGone};

/// After a reading that failed.
const RETRY: Duration = Duration::from_secs(1);

/// How long those are waited for who are not heard of.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// A region without a spoke keeps its route.
    pub(super) lapsed_keep: Duration,
    /// Nothing is widened while a term is young.
    pub(super) settle: Duration,
}

/// The keeper of the route table.
pub(super) struct Keeper<'a, S: Store> {
    hub: HubState,
    term: Term,
    store: S,
    watch: S::Watch,
    board: &'a Board,
    /// The revision at which this hub knows `routes` to be.
    routes_at: u64,
    /// A table of which the store said that it might not have been written.
    unconfirmed: Option<RouteTable>,
    holding: bool,
    /// The plan that is being made.
    planning: Option<JoinHandle<TrafficPlan>>,
    /// Classes that were told to be short.
    short: BTreeSet<TrafficClass>,
    /// How often tables are published; readers reject what is published faster.
    pace: PublishRateLimiter,
}

impl<'a, S: Store> Keeper<'a, S> {
    pub(super) fn new(
        start: Start,
        term: Term,
        patience: Patience,
        catalogue: Arc<Catalogue>,
        store: S,
        board: &'a Board,
    ) -> Keeper<'a, S> {
        let Start { found, routes_at, next } = start;
        let watch = store.watch("", next);
        let (now, Patience { lapsed_keep, settle }) = (Instant::now(), patience);
        let rollout = Rollout::new(catalogue.clone(), settle, now);
        let hub = HubState::new(found, catalogue, lapsed_keep, rollout, now);
        let (unconfirmed, holding, planning, short) = (None, false, None, BTreeSet::new());
        let pace = PublishRateLimiter::new(now);
        Keeper { hub, term, store, watch, board, routes_at, unconfirmed, holding, planning, short, pace }
    }

    /// Keeps it until the term is over.
    pub(super) async fn keep(mut self) -> Result<Deposed, HubError> {
        loop {
            if let Some(deposed) = self.obey().await? {
                return Ok(deposed);
            }
            let wakeup = until(self.hub.next_wakeup());
            tokio::select! {
                changes = self.watch.next() => match changes {
                    Ok(changes) => self.take(changes),
                    Err(error @ WatchError::Compacted { .. }) => {
                        Relisting { error: &error }.emit();
                        self.relist().await?;
                    }
                    Err(error @ WatchError::FromTheFuture { .. }) => {
                        Relisting { error: &error }.emit();
                        return Ok(Deposed::SetBack);
                    }
                    Err(WatchError::Closed) => return Err(StoreError::Closed.into()),
                },
                () = wakeup => self.hub.handle_timeout(Instant::now()),
                plan = made(&mut self.planning) => {
                    self.tell(Event::PlanComputed(plan));
                    self.tell_of_short();
                }
            }
            self.tell_of_held();
        }
    }

    fn take(&mut self, changes: Vec<store::Event>) {
        let events = changes.iter().filter_map(records::event).filter_map(readable);
        for event in events.collect::<Vec<_>>() {
            if let Event::SpokeRemoved { region, boot_id } = &event {
                SpokeGone { region, boot_id: *boot_id }.emit();
            }
            self.tell(event);
        }
    }

    /// Reads everything anew, after the watch has broken off; the store may need a while.
    async fn relist(&mut self) -> Result<(), HubError> {
        loop {
            match self.store.range("").await {
                Ok(range) => {
                    self.tell(Event::Listed(everything(&range.entries)));
                    self.watch = self.store.watch("", range.revision + 1);
                    self.board.note(None);
                    return Ok(());
                }
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                Err(error) => {
                    self.board.note(Some(&error));
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn tell(&mut self, event: Event) {
        self.hub.handle(event, Instant::now());
    }

    fn tell_of_held(&mut self) {
        let holds = self.hub.suspects_store_failure();
        match (std::mem::replace(&mut self.holding, holds), holds) {
            (false, true) => LeasesHeld.emit(),
            (true, false) => LeasesLetGo.emit(),
            (false, false) | (true, true) => {}
        }
    }

    /// Tells when other classes could not bear the loss of a region than before.
    fn tell_of_short(&mut self) {
        let short = self.hub.uncovered_classes();
        if *short != self.short {
            self.short = short.clone();
            LossNotBorne { classes: &self.short }.emit();
        }
    }

    async fn obey(&mut self) -> Result<Option<Deposed>, HubError> {
        while let Some(command) = self.hub.poll() {
            match command {
                HubCommand::Persist(table) => {
                    if let Some(deposed) = self.persist(table).await? {
                        return Ok(Some(deposed));
                    }
                }
                HubCommand::Publish(table) => self.board.publish(table),
                HubCommand::Plan(problem, before) => {
                    self.planning = Some(spawn_blocking(move || plan(&problem, &before)));
                }
                HubCommand::PersistPlan(parts) => {
                    if let Some(deposed) = self.persist_plan(parts).await? {
                        return Ok(Some(deposed));
                    }
                }
                HubCommand::PublishPlan(parts) => self.board.publish_plan(parts),
            }
        }
        Ok(None)
    }

    /// Writes these parts of the plan in this term, or says that they may not stand there.
    async fn persist_plan(&mut self, parts: Vec<PlanPart>) -> Result<Option<Deposed>, HubError> {
        let packing = spawn_blocking(move || {
            let put = |part: &PlanPart| (records::key_of(part), records::packed_part(part));
            (parts.iter().map(put).collect::<Vec<_>>(), parts)
        });
        let (puts, parts) = packing.await.expect("packing does not panic");
        for then in in_transactions(puts) {
            match self.store.txn(Txn { when: vec![self.term.guard()], then }).await {
                Ok(outcome) if outcome.succeeded => self.board.note(None),
                Ok(_) => return Ok(Some(Deposed::Refused)),
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                Err(error) => {
                    self.board.note(Some(&error));
                    self.tell(Event::PlanPersistFailed);
                    return Ok(None);
                }
            }
        }
        self.tell(Event::PlanPersisted(parts));
        Ok(None)
    }

    /// Writes the table in this term, on top of the last one that this hub knows of, or not at all.
    async fn persist(&mut self, table: RouteTable) -> Result<Option<Deposed>, HubError> {
        sleep(self.pace.next(Instant::now())).await;
        let when = vec![self.term.guard(), Compare::ModRevision(keys::ROUTES.to_owned(), self.routes_at)];
        let then = vec![Op::Put {
            key: keys::ROUTES.to_owned(),
            value: records::packed(&RouteTableV1::from(&table)),
            lease: None,
        }];
        match self.store.txn(Txn { when, then }).await {
            Ok(outcome) if outcome.succeeded => {
                self.board.note(None);
                self.routes_at = outcome.revision;
                self.unconfirmed = None;
                self.tell(Event::Persisted(table));
                Ok(None)
            }
            Ok(_) => self.adopt(table).await,
            Err(StoreError::Closed) => Err(StoreError::Closed.into()),
            Err(error) => {
                self.board.note(Some(&error));
                self.unconfirmed = Some(table);
                self.tell(Event::PersistFailed);
                Ok(None)
            }
        }
    }

    /// The guard has failed. Either `routes` is what this hub itself has written, at a try of which it never heard; or
    /// the term is over, or the store is not the one that it was, and then this hub has nothing more to say.
    async fn adopt(&mut self, table: RouteTable) -> Result<Option<Deposed>, HubError> {
        let entry = match self.store.get(keys::ROUTES).await {
            Ok(entry) => entry,
            Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
            Err(error) => {
                self.board.note(Some(&error));
                self.unconfirmed = Some(table);
                self.tell(Event::PersistFailed);
                return Ok(None);
            }
        };
        let Some(entry) = entry.filter(|entry| entry.mod_revision != self.routes_at) else {
            return Ok(Some(Deposed::Refused));
        };
        let theirs = records::table(&entry).map_err(HubError::Record)?;
        if theirs != table && self.unconfirmed.as_ref() != Some(&theirs) {
            return Ok(Some(Deposed::Refused));
        }
        self.unconfirmed = None;
        self.routes_at = entry.mod_revision;
        self.tell(Event::Persisted(theirs));
        Ok(None)
    }
}

/// As many puts in each transaction as it takes.
fn in_transactions(puts: Vec<(String, Vec<u8>)>) -> Vec<Vec<Op>> {
    let (mut all, mut bytes): (Vec<Vec<Op>>, usize) = (Vec::new(), 0);
    for (key, value) in puts {
        let more = key.len() + value.len();
        let fits = |last: &&mut Vec<Op>| last.len() < TXN_OPS_MAX && bytes + more <= TXN_BYTES_MAX;
        let put = Op::Put { key, value, lease: None };
        match all.last_mut().filter(fits) {
            Some(last) => {
                bytes += more;
                last.push(put);
            }
            None => {
                bytes = more;
                all.push(vec![put]);
            }
        }
    }
    all
}

/// The plan that is being made, once it is; for ever, while none is.
async fn made(planning: &mut Option<JoinHandle<TrafficPlan>>) -> TrafficPlan {
    let Some(making) = planning else { return std::future::pending().await };
    let plan = making.await.expect("planning does not panic");
    *planning = None;
    plan
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
    use super::super::Current;
    use super::super::start::start;
    use super::*;
    use scheduler_store::Sim;
    use tokio::sync::watch;

    /// A store with a term on it, and the board of whoever has it.
    async fn led() -> (Sim, Term, Board, watch::Receiver<Current>) {
        let store = Sim::new();
        let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        let term = store.campaign(keys::LEADER, b"one".to_vec(), lease).await.unwrap();
        let (publish, current) = watch::channel(None);
        (store, term, Board::new(publish, Arc::default()), current)
    }

    async fn keeper<'a>(store: &Sim, term: &Term, board: &'a Board) -> Keeper<'a, Sim> {
        let start = start(store, term, &[], 1, None).await.unwrap().unwrap();
        let patience = Patience { lapsed_keep: Duration::from_secs(60), settle: Duration::ZERO };
        Keeper::new(start, term.clone(), patience, Arc::new(Catalogue::builtin()), store.clone(), board)
    }

    fn spoke(boot_id: u64) -> (String, Vec<u8>) {
        let region = "aws/us-east-1".parse().unwrap();
        let value = format!(
            r#"{{"version":1,"region":"{region}","endpoint":"10.0.0.1:{boot_id}","boot_id":{boot_id},"deployments":[]}}"#
        );
        (keys::spoke(&region, boot_id), value.into_bytes())
    }

    async fn register(store: &Sim, boot_id: u64) {
        let (key, value) = spoke(boot_id);
        store.put(&key, value, None).await.unwrap();
    }

    fn table(number: u64) -> RouteTable {
        let generation = regions::Generation { epoch: 1, number };
        RouteTable { generation, ..RouteTable::empty() }
    }

    async fn write(store: &Sim, table: &RouteTable) {
        store.put(keys::ROUTES, records::bytes(&RouteTableV1::from(table)), None).await.unwrap();
    }

    fn published(current: &watch::Receiver<Current>) -> Vec<u64> {
        current.borrow().iter().map(|published| published.table.generation.number).collect()
    }

    #[tokio::test]
    async fn a_hub_that_finds_the_table_of_another_publishes_nothing_more_in_its_term() {
        let (store, term, board, current) = led().await;
        let keeper = keeper(&store, &term, &board).await;
        write(&store, &table(7)).await;
        register(&store, 1).await;
        assert_eq!(keeper.keep().await.unwrap(), Deposed::Refused);
        assert_eq!(published(&current), [0; 0]);
    }

    #[tokio::test]
    async fn what_is_written_after_the_term_is_over_is_refused() {
        let (store, term, board, current) = led().await;
        let keeper = keeper(&store, &term, &board).await;
        let other = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        store.lease_revoke(term.lease).await.unwrap();
        store.campaign(keys::LEADER, b"other".to_vec(), other).await.unwrap();
        register(&store, 1).await;
        assert_eq!(keeper.keep().await.unwrap(), Deposed::Refused);
        assert_eq!((published(&current), store.get(keys::ROUTES).await), (vec![], Ok(None)));
    }

    #[tokio::test]
    async fn a_table_of_which_the_store_did_not_know_is_taken_for_ours_if_it_is() {
        let (store, term, board, current) = led().await;
        let mut keeper = keeper(&store, &term, &board).await;
        write(&store, &table(1)).await;
        keeper.unconfirmed = Some(table(1));
        register(&store, 1).await;
        let changes = keeper.watch.next().await.unwrap();
        keeper.take(changes);
        assert_eq!(keeper.obey().await.unwrap(), None);
        assert_eq!(published(&current), [2], "ours was the first, and what is new is the second");
        let kept = store.get(keys::ROUTES).await.unwrap().unwrap();
        assert_eq!(records::table(&kept).map(|table| table.generation.number), Ok(2));
        assert_eq!(keeper.routes_at, kept.mod_revision);
    }

    /// A store over a network tries twice; the first try may be what made the guard of the second fail.
    #[tokio::test]
    async fn a_table_that_was_written_at_the_first_of_two_tries_is_taken_for_written() {
        let (store, term, board, current) = led().await;
        let mut keeper = keeper(&store, &term, &board).await;
        register(&store, 1).await;
        let changes = keeper.watch.next().await.unwrap();
        keeper.take(changes);
        let Some(HubCommand::Persist(next)) = keeper.hub.poll() else { panic!("a table") };
        write(&store, &next).await;
        assert_eq!(keeper.persist(next).await.unwrap(), None);
        assert_eq!(keeper.obey().await.unwrap(), None);
        assert_eq!(published(&current), [1]);
    }

    #[test]
    fn a_plan_is_written_in_as_few_transactions_as_take_it() {
        let check = |sizes: &[usize], expected: &[usize]| {
            let put = |(number, size): (usize, &usize)| (format!("{number:03}"), vec![0; size - 3]);
            let all = in_transactions(sizes.iter().enumerate().map(put).collect());
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), expected);
        };
        check(&[], &[]);
        check(&[TXN_BYTES_MAX], &[1]);
        check(&[TXN_BYTES_MAX / 2; 4], &[2, 2]);
        check(&[TXN_BYTES_MAX / 2 + 1; 2], &[1, 1]);
        check(&[3; TXN_OPS_MAX + 1], &[TXN_OPS_MAX, 1]);
    }

    #[tokio::test]
    async fn what_is_wanted_and_cannot_be_read_changes_nothing_until_it_can() {
        let (store, term, board, current) = led().await;
        let mut keeper = keeper(&store, &term, &board).await;
        let one = |name: &str| {
            format!(
                r#"{{"version":1,"applied":true,"deployments":[{{"name":"{name}","task":"embed","model":"pypi://m",
                "engine":{{"kind":"cpu","precision":"f32"}},"residency":"eu","regions":[]}}]}}"#
            )
        };
        let huge = one(&"x".repeat(1_000_000));
        let blank = one("m").replace("\"eu\"", "\"\"");
        let lost = one("m").replace("\"residency\":\"eu\",", "");
        let all = one("m").replace("[{", "{").replace("}]", "}");
        for (value, names) in [
            (one("m").as_str(), "m"),
            ("", "m"),
            (&blank, "m"),
            (&lost, "m"),
            (&huge, "m"),
            (&all, "m"),
            (&one("n"), "n"),
        ] {
            store.put(keys::DEPLOYMENTS, value.into(), None).await.unwrap();
            let changes = keeper.watch.next().await.unwrap();
            keeper.take(changes);
            keeper.obey().await.unwrap();
            let table = current.borrow().as_ref().map(|published| published.table.clone()).unwrap();
            assert_eq!(table.deployments.keys().map(|name| name.as_str()).collect::<Vec<_>>(), [names]);
        }
        store.delete(keys::DEPLOYMENTS).await.unwrap();
        let changes = keeper.watch.next().await.unwrap();
        keeper.take(changes);
        assert_eq!(keeper.obey().await.unwrap(), None);
        assert_eq!(
            current.borrow().as_ref().unwrap().table.deployments.len(),
            1,
            "nothing says that it shall go"
        );
    }

    #[tokio::test]
    async fn a_spoke_that_cannot_be_read_is_left_out_and_the_others_stay() {
        let (store, term, board, current) = led().await;
        let mut keeper = keeper(&store, &term, &board).await;
        store.put("spokes/aws/us-east-1/01", b"{}".to_vec(), None).await.unwrap();
        register(&store, 2).await;
        let changes = keeper.watch.next().await.unwrap();
        keeper.take(changes);
        keeper.obey().await.unwrap();
        let ports = current.borrow().as_ref().map(|published| {
            published.table.regions.values().map(|route| route.endpoint.port()).collect::<Vec<_>>()
        });
        assert_eq!(ports, Some(vec![2]));
    }
}
