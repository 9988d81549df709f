//! Controller of the leader: feeds changes of the store and timers into the state machine, and executes its commands.
//!
//! It is the only writer of `routes` and `plan/` while its term lasts: every write is guarded by the term, and a write
//! of the table also by the revision of the previous table. Plans are computed on a separate thread, since that can
//! take some tens of milliseconds. It takes no decisions; [`scheduler_core::hub`] does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Catalogue, DeploymentName, RegionId, RouteTable};
use scheduler_api::keys;
use scheduler_api::placements::{DecidedPlacements, PlacementsRecord, PlacementsV1};
use scheduler_api::plan::TrafficClass;
use scheduler_api::route::RouteTableV1;
use scheduler_core::bound::PublishRateLimiter;
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::hub::{Event, HubCommand, HubState};
use scheduler_core::placement::Infeasible;
use scheduler_core::plan::{TrafficPlan, plan};
use scheduler_core::rollout::Rollout;
use scheduler_core::shares::ShareChanges;
use scheduler_store::model::{TXN_BYTES_MAX, TXN_OPS_MAX};
use scheduler_store::{self as store, Compare, Op, Store, StoreError, Term, Txn, Watch, WatchError};
use supervision::task::{blocking, joined};
use tokio::task::{JoinHandle, spawn_blocking, yield_now};
use tokio::time::{sleep, sleep_until};

use super::publisher::Publisher;
use super::term_start::{TermStart, control_keys, deployments_revision, read_all, readable};
use super::{HubError, records};
use crate::events::{
    FailoverCapacityChanged, InfeasiblePlacementsChanged, LeadershipLost, MassLeaseExpiry,
    MassLeaseExpiryOver, PlacementChanged, SeveralJobQueuesChanged, SpokeLeaseEnded, StoreRelisted,
};

/// Delay after a failed call of the store, of the leader and of a candidate.
pub(super) const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Grace periods for readers and spokes that are silent.
#[derive(Clone, Copy)]
pub(super) struct GracePeriods {
    /// Time for which a region without a spoke keeps its route.
    pub(super) lapsed_keep: Duration,
    /// Time after the start of a term during which no residency is widened.
    pub(super) settle: Duration,
}

/// Controller of the route table and the plan.
pub(super) struct Controller<'a, S: Store> {
    hub: HubState,
    term: Term,
    store: S,
    watch: S::Watch,
    publisher: &'a Publisher,
    /// The last known revision of `routes`.
    routes_at: u64,
    /// Revision of the desired deployments that the state machine has; 0 without a readable record.
    deployments_at: u64,
    /// Table whose write the store has not confirmed.
    unconfirmed: Option<RouteTable>,
    mass_expiry: bool,
    /// The plan that is being computed.
    planning: Option<JoinHandle<TrafficPlan>>,
    /// Classes last logged as short of capacity.
    short: BTreeSet<TrafficClass>,
    /// Regions last logged with several queues of jobs.
    several_job_queues: BTreeSet<RegionId>,
    /// Deployments last logged with an infeasible placement, and the key of the constraint.
    infeasible_placements: BTreeMap<DeploymentName, &'static str>,
    /// Regions of the deployments that state a placement, in the table published last by this leader.
    placements: Option<BTreeMap<DeploymentName, Vec<RegionId>>>,
    /// Minimum interval between tables; readers reject tables that are published faster.
    pace: PublishRateLimiter,
}

impl<'a, S: Store> Controller<'a, S> {
    pub(super) fn new(
        start: TermStart,
        term: Term,
        grace_periods: GracePeriods,
        catalogue: Arc<Catalogue>,
        store: S,
        publisher: &'a Publisher,
    ) -> Controller<'a, S> {
        let TermStart { found, routes_at, deployments_at, next } = start;
        let watch = store.watch(control_keys(), next);
        let (now, GracePeriods { lapsed_keep, settle }) = (Instant::now(), grace_periods);
        let rollout = Rollout::new(catalogue.clone(), settle, now);
        let hub = HubState::new(found, catalogue, lapsed_keep, rollout, now);
        let (unconfirmed, mass_expiry, planning, short) = (None, false, None, BTreeSet::new());
        let pace = PublishRateLimiter::new(now);
        Controller {
            hub,
            term,
            store,
            watch,
            publisher,
            routes_at,
            deployments_at,
            unconfirmed,
            mass_expiry,
            planning,
            short,
            several_job_queues: BTreeSet::new(),
            infeasible_placements: BTreeMap::new(),
            placements: None,
            pace,
        }
    }

    /// Runs until the term is over.
    pub(super) async fn run(mut self) -> Result<LeadershipLost, HubError> {
        loop {
            if let Some(lost) = self.execute().await? {
                return Ok(lost);
            }
            self.publisher.metrics.spokes.set(self.hub.registered_spokes());
            self.log_several_job_queues();
            self.log_infeasible_placements();
            let wakeup = wait_until(self.hub.next_wakeup());
            tokio::select! {
                changes = self.watch.next() => match changes {
                    Ok(changes) => self.apply_changes(changes),
                    Err(error @ WatchError::Compacted { .. }) => {
                        StoreRelisted { error: &error }.emit();
                        self.relist().await?;
                    }
                    Err(error @ WatchError::FutureRevision { .. }) => {
                        StoreRelisted { error: &error }.emit();
                        return Ok(LeadershipLost::StoreRolledBack);
                    }
                    Err(WatchError::Closed) => return Err(StoreError::Closed.into()),
                },
                () = wakeup => self.hub.handle_timeout(Instant::now()),
                plan = planned(&mut self.planning) => {
                    self.handle(Event::PlanComputed(plan));
                    self.log_short_classes();
                }
            }
            self.log_mass_expiry();
        }
    }

    fn apply_changes(&mut self, changes: Vec<store::Event>) {
        for change in &changes {
            let Some(event) = records::event(change).and_then(readable) else { continue };
            if let (Event::DeploymentsChanged(_), store::Event::Put(entry)) = (&event, change) {
                self.deployments_at = entry.mod_revision;
            }
            if let Event::SpokeRemoved { region, boot_id } = &event {
                SpokeLeaseEnded { region, boot_id: *boot_id }.emit();
                self.publisher.metrics.leases_ended.add(1);
            }
            self.handle(event);
        }
    }

    /// Lists the store again after the watch was interrupted; retries until the store responds.
    async fn relist(&mut self) -> Result<(), HubError> {
        loop {
            match self.store.range(control_keys()).await {
                Ok(range) => {
                    let all = read_all(&range.entries);
                    if let Some(revision) = deployments_revision(&range.entries, &all) {
                        self.deployments_at = revision;
                    }
                    self.handle(Event::Listed(all));
                    self.watch = self.store.watch(control_keys(), range.revision + 1);
                    self.publisher.report_store(None);
                    return Ok(());
                }
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                Err(error) => {
                    self.publisher.report_store(Some(&error));
                    sleep(STORE_RETRY_DELAY).await;
                }
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.hub.handle(event, Instant::now());
    }

    fn log_mass_expiry(&mut self) {
        let suspected = self.hub.suspects_store_failure();
        self.publisher.metrics.mass_expiry.set(usize::from(suspected));
        match (std::mem::replace(&mut self.mass_expiry, suspected), suspected) {
            (false, true) => MassLeaseExpiry.emit(),
            (true, false) => MassLeaseExpiryOver.emit(),
            (false, false) | (true, true) => {}
        }
    }

    /// Logs a change of the regions with several queues of jobs.
    fn log_several_job_queues(&mut self) {
        let regions = self.hub.regions_with_several_job_queues();
        self.publisher.metrics.several_job_queues.set(regions.len());
        if !regions.iter().copied().eq(&self.several_job_queues) {
            self.several_job_queues = regions.into_iter().cloned().collect();
            SeveralJobQueuesChanged { regions: &self.several_job_queues }.emit();
        }
    }

    /// Logs a change of the deployments whose placement is infeasible, or of the constraint that fails. The numbers of a
    /// constraint, such as the cost of the cheapest set, change with each price and are not logged again.
    fn log_infeasible_placements(&mut self) {
        let infeasible = self.hub.infeasible_placements();
        self.publisher.metrics.infeasible_placements.set(infeasible.len());
        if !is_logged(infeasible, &self.infeasible_placements) {
            let constraints = infeasible.iter().map(|(name, constraint)| (name.clone(), constraint.key()));
            self.infeasible_placements = constraints.collect();
            InfeasiblePlacementsChanged { deployments: infeasible }.emit();
        }
    }

    /// Logs the deployments for which `table` has other regions than the last one. The first table of a term repeats what
    /// the last leader has logged.
    fn log_placements(&mut self, table: &RouteTable) {
        let placements = self.hub.placed_regions(table);
        if let Some(before) = &self.placements {
            let changed = placements.iter().filter(|(name, regions)| before.get(*name) != Some(*regions));
            changed.for_each(|(deployment, regions)| PlacementChanged { deployment, regions }.emit());
        }
        self.placements = Some(placements);
    }

    /// Logs a change of the classes that would not survive the loss of a region.
    fn log_short_classes(&mut self) {
        let short = self.hub.uncovered_classes();
        self.publisher.metrics.uncovered_classes.set(short.len());
        if *short != self.short {
            self.short = short.clone();
            FailoverCapacityChanged { classes: &self.short }.emit();
        }
    }

    async fn next_command(&mut self) -> Option<HubCommand> {
        if self.hub.has_pending_placements() {
            // Between two parts of the work: the lease is kept alive by the same task.
            yield_now().await;
        }
        self.hub.poll()
    }

    async fn execute(&mut self) -> Result<Option<LeadershipLost>, HubError> {
        while let Some(command) = self.next_command().await {
            match command {
                HubCommand::Persist(table) => {
                    if let Some(lost) = self.persist(table).await? {
                        return Ok(Some(lost));
                    }
                }
                HubCommand::Publish(table) => {
                    self.log_placements(&table);
                    self.publisher.publish(table);
                }
                HubCommand::Plan(problem, before) => {
                    let metrics = self.publisher.metrics.clone();
                    self.planning = Some(spawn_blocking(move || {
                        let begin = Instant::now();
                        let plan = plan(&problem, &before);
                        metrics.plan_seconds.observe(begin.elapsed());
                        plan
                    }));
                }
                HubCommand::PersistPlan(parts) => {
                    if let Some(lost) = self.persist_plan(parts).await? {
                        return Ok(Some(lost));
                    }
                }
                HubCommand::PublishPlan(parts) => self.publisher.publish_plan(parts),
                HubCommand::PersistShares(changes) => {
                    if let Some(lost) = self.persist_shares(changes).await? {
                        return Ok(Some(lost));
                    }
                }
                HubCommand::PersistPlacements(decided) => {
                    if let Some(lost) = self.persist_placements(decided).await? {
                        return Ok(Some(lost));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Writes these parts of the plan, guarded by the term; returns the reason if the term is over.
    async fn persist_plan(&mut self, parts: Vec<PlanPart>) -> Result<Option<LeadershipLost>, HubError> {
        let (puts, parts) = blocking(move || {
            let put = |part: &PlanPart| (records::key_of(part), records::packed_part(part));
            (parts.iter().map(put).collect::<Vec<_>>(), parts)
        })
        .await;
        let event = match self.write(into_transactions(puts)).await? {
            Write::Done => Event::PlanPersisted(parts),
            Write::Failed => Event::PlanPersistFailed,
            Write::Rejected => return Ok(Some(LeadershipLost::WriteRejected)),
        };
        self.handle(event);
        Ok(None)
    }

    /// Writes shares and deletes those of gateways that are gone, guarded by the term; returns the reason if the term is
    /// over.
    async fn persist_shares(&mut self, changes: ShareChanges) -> Result<Option<LeadershipLost>, HubError> {
        let ShareChanges { issued, removed } = changes;
        let packed = blocking(move || {
            let put = |shares| {
                let part = PlanPart::Shares(shares);
                (records::key_of(&part), records::packed_part(&part))
            };
            issued.into_iter().map(put).collect::<Vec<_>>()
        });
        let mut transactions = into_transactions(packed.await);
        // A gateway is deleted after the others are written: the highest number must always be in the store.
        let deletes: Vec<_> =
            removed.iter().map(|gateway| Op::Delete { key: keys::shares(gateway) }).collect();
        transactions.extend(deletes.chunks(TXN_OPS_MAX).map(<[Op]>::to_vec));
        let event = match self.write(transactions).await? {
            Write::Done => {
                self.publisher.remove_shares(&removed);
                Event::SharesPersisted
            }
            Write::Failed => Event::SharesPersistFailed,
            Write::Rejected => return Ok(Some(LeadershipLost::WriteRejected)),
        };
        self.handle(event);
        Ok(None)
    }

    /// Writes the decisions on placements, guarded by the term; returns the reason if the term is over.
    async fn persist_placements(
        &mut self,
        decided: DecidedPlacements,
    ) -> Result<Option<LeadershipLost>, HubError> {
        let record = PlacementsRecord { term: self.term.created, revision: self.deployments_at, decided };
        let packed = blocking(move || records::packed(&PlacementsV1::from(&record))).await;
        let puts = vec![(keys::PLACEMENTS.to_owned(), packed)];
        let event = match self.write(into_transactions(puts)).await? {
            Write::Done => Event::PlacementsPersisted,
            Write::Failed => Event::PlacementsPersistFailed,
            Write::Rejected => return Ok(Some(LeadershipLost::WriteRejected)),
        };
        self.handle(event);
        Ok(None)
    }

    /// Executes transactions, guarded by the term.
    async fn write(&self, transactions: Vec<Vec<Op>>) -> Result<Write, HubError> {
        for then in transactions {
            match self.store.txn(Txn { when: vec![self.term.guard()], then }).await {
                Ok(outcome) if outcome.succeeded => self.publisher.report_store(None),
                Ok(_) => return Ok(Write::Rejected),
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                Err(error) => {
                    self.publisher.report_store(Some(&error));
                    return Ok(Write::Failed);
                }
            }
        }
        Ok(Write::Done)
    }

    /// Writes the table, guarded by the term and the last known revision of the table.
    async fn persist(&mut self, table: RouteTable) -> Result<Option<LeadershipLost>, HubError> {
        sleep(self.pace.next(Instant::now())).await;
        let when = vec![self.term.guard(), Compare::ModRevision(keys::ROUTES.to_owned(), self.routes_at)];
        let then = vec![Op::Put {
            key: keys::ROUTES.to_owned(),
            value: records::packed(&RouteTableV1::from(&table)),
            lease: None,
        }];
        match self.store.txn(Txn { when, then }).await {
            Ok(outcome) if outcome.succeeded => {
                self.publisher.report_store(None);
                self.routes_at = outcome.revision;
                self.unconfirmed = None;
                self.handle(Event::Persisted(table));
                Ok(None)
            }
            Ok(_) => self.adopt(table).await,
            Err(StoreError::Closed) => Err(StoreError::Closed.into()),
            Err(error) => {
                self.publisher.report_store(Some(&error));
                self.unconfirmed = Some(table);
                self.handle(Event::PersistFailed);
                Ok(None)
            }
        }
    }

    /// Handles a failed guard. Either `routes` holds a table that this hub wrote in an attempt without a response; or
    /// the term is over or the store was replaced, and this hub stops writing.
    async fn adopt(&mut self, table: RouteTable) -> Result<Option<LeadershipLost>, HubError> {
        let entry = match self.store.get(keys::ROUTES).await {
            Ok(entry) => entry,
            Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
            Err(error) => {
                self.publisher.report_store(Some(&error));
                self.unconfirmed = Some(table);
                self.handle(Event::PersistFailed);
                return Ok(None);
            }
        };
        let Some(entry) = entry.filter(|entry| entry.mod_revision != self.routes_at) else {
            return Ok(Some(LeadershipLost::WriteRejected));
        };
        let theirs = records::table(&entry).map_err(HubError::Record)?;
        if theirs != table && self.unconfirmed.as_ref() != Some(&theirs) {
            return Ok(Some(LeadershipLost::WriteRejected));
        }
        self.unconfirmed = None;
        self.routes_at = entry.mod_revision;
        self.handle(Event::Persisted(theirs));
        Ok(None)
    }
}

/// Returns whether these deployments were logged with these constraints, whatever their numbers were.
fn is_logged(
    infeasible: &BTreeMap<DeploymentName, Infeasible>,
    logged: &BTreeMap<DeploymentName, &'static str>,
) -> bool {
    let constraints = infeasible.iter().map(|(name, constraint)| (name, constraint.key()));
    constraints.eq(logged.iter().map(|(name, key)| (name, *key)))
}

/// Outcome of guarded writes.
enum Write {
    Done,
    /// The outcome is unknown or a failure.
    Failed,
    /// The term is over.
    Rejected,
}

/// Groups puts into as few transactions as their limits allow.
pub(super) fn into_transactions(puts: Vec<(String, Vec<u8>)>) -> Vec<Vec<Op>> {
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

/// Waits for the plan that is being computed; pending for ever if there is none.
async fn planned(planning: &mut Option<JoinHandle<TrafficPlan>>) -> TrafficPlan {
    let Some(task) = planning else { return std::future::pending().await };
    let plan = joined(task).await;
    *planning = None;
    plan
}

/// Waits until `wakeup`; pending for ever without one.
async fn wait_until(wakeup: Option<Instant>) {
    match wakeup {
        Some(wakeup) => sleep_until(wakeup.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Current;
    use super::super::term_start::start;
    use super::*;
    use regions::HostPort;
    use scheduler_store::SimStore;
    use tokio::sync::watch;

    /// A store with a term on it, and the publisher of its leader.
    async fn leading() -> (SimStore, Term, Publisher, watch::Receiver<Current>) {
        let store = SimStore::new();
        let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        let term = store.campaign(keys::LEADER, b"one".to_vec(), lease).await.unwrap();
        let (publish, current) = watch::channel(None);
        (store, term, Publisher::new(publish, Arc::default(), Arc::default()), current)
    }

    async fn controller<'a>(
        store: &SimStore,
        term: &Term,
        publisher: &'a Publisher,
    ) -> Controller<'a, SimStore> {
        let start = start(store, term, &[], 1, None).await.unwrap().unwrap();
        let grace_periods = GracePeriods { lapsed_keep: Duration::from_secs(60), settle: Duration::ZERO };
        Controller::new(
            start,
            term.clone(),
            grace_periods,
            Arc::new(Catalogue::builtin()),
            store.clone(),
            publisher,
        )
    }

    fn spoke(boot_id: u64) -> (String, Vec<u8>) {
        let region = "aws/us-east-1".parse().unwrap();
        let value = format!(
            r#"{{"version":1,"region":"{region}","instance":"{boot_id}","endpoint":"10.0.0.1:{boot_id}","boot_id":{boot_id},"deployments":[]}}"#
        );
        (keys::spoke(&region, boot_id), value.into_bytes())
    }

    async fn register(store: &SimStore, boot_id: u64) {
        let (key, value) = spoke(boot_id);
        store.put(&key, value, None).await.unwrap();
    }

    fn table(number: u64) -> RouteTable {
        let generation = regions::Generation { epoch: 1, number };
        RouteTable { generation, ..RouteTable::empty() }
    }

    async fn write(store: &SimStore, table: &RouteTable) {
        store.put(keys::ROUTES, records::bytes(&RouteTableV1::from(table)), None).await.unwrap();
    }

    fn published(current: &watch::Receiver<Current>) -> Vec<u64> {
        current.borrow().iter().map(|published| published.table.generation.number).collect()
    }

    #[tokio::test]
    async fn a_controller_that_finds_another_hubs_table_stops_publishing() {
        let (store, term, publisher, current) = leading().await;
        let controller = controller(&store, &term, &publisher).await;
        write(&store, &table(7)).await;
        register(&store, 1).await;
        assert_eq!(controller.run().await.unwrap(), LeadershipLost::WriteRejected);
        assert_eq!(published(&current), [0; 0]);
    }

    #[tokio::test]
    async fn writes_after_the_end_of_the_term_are_rejected() {
        let (store, term, publisher, current) = leading().await;
        let controller = controller(&store, &term, &publisher).await;
        let other = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        store.lease_revoke(term.lease).await.unwrap();
        store.campaign(keys::LEADER, b"other".to_vec(), other).await.unwrap();
        register(&store, 1).await;
        assert_eq!(controller.run().await.unwrap(), LeadershipLost::WriteRejected);
        assert_eq!((published(&current), store.get(keys::ROUTES).await), (vec![], Ok(None)));
    }

    #[tokio::test]
    async fn an_unconfirmed_table_is_adopted_if_the_store_has_it() {
        let (store, term, publisher, current) = leading().await;
        let mut controller = controller(&store, &term, &publisher).await;
        write(&store, &table(1)).await;
        controller.unconfirmed = Some(table(1));
        register(&store, 1).await;
        let changes = controller.watch.next().await.unwrap();
        controller.apply_changes(changes);
        assert_eq!(controller.execute().await.unwrap(), None);
        assert_eq!(published(&current), [2], "the first table is this hub's, the second has the change");
        let kept = store.get(keys::ROUTES).await.unwrap().unwrap();
        assert_eq!(records::table(&kept).map(|table| table.generation.number), Ok(2));
        assert_eq!(controller.routes_at, kept.mod_revision);
    }

    /// A store over a network retries; the first attempt may be the reason why the guard of the second one fails.
    #[tokio::test]
    async fn a_table_written_by_the_first_of_two_attempts_counts_as_written() {
        let (store, term, publisher, current) = leading().await;
        let mut controller = controller(&store, &term, &publisher).await;
        register(&store, 1).await;
        let changes = controller.watch.next().await.unwrap();
        controller.apply_changes(changes);
        let Some(HubCommand::Persist(next)) = controller.hub.poll() else { panic!("a table") };
        write(&store, &next).await;
        assert_eq!(controller.persist(next).await.unwrap(), None);
        assert_eq!(controller.execute().await.unwrap(), None);
        assert_eq!(published(&current), [1]);
    }

    #[test]
    fn a_plan_is_written_in_as_few_transactions_as_possible() {
        let check = |sizes: &[usize], expected: &[usize]| {
            let put = |(number, size): (usize, &usize)| (format!("{number:03}"), vec![0; size - 3]);
            let all = into_transactions(sizes.iter().enumerate().map(put).collect());
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), expected);
        };
        check(&[], &[]);
        check(&[TXN_BYTES_MAX], &[1]);
        check(&[TXN_BYTES_MAX / 2; 4], &[2, 2]);
        check(&[TXN_BYTES_MAX / 2 + 1; 2], &[1, 1]);
        check(&[3; TXN_OPS_MAX + 1], &[TXN_OPS_MAX, 1]);
    }

    #[test]
    fn infeasible_placements_are_logged_again_only_if_the_deployments_or_the_constraints_change() {
        let (one, two): (DeploymentName, DeploymentName) = ("a".parse().unwrap(), "b".parse().unwrap());
        let cost = |cheapest| Infeasible::Cost { cheapest, max_cost: 1 };
        let logged = BTreeMap::from([(one.clone(), cost(2).key())]);
        assert!(is_logged(&BTreeMap::from([(one.clone(), cost(3))]), &logged), "only the price has changed");
        let regions = Infeasible::Regions { eligible: 1, candidates: 2, min_regions: 2 };
        assert!(!is_logged(&BTreeMap::from([(one.clone(), regions)]), &logged));
        assert!(!is_logged(&BTreeMap::from([(one, cost(2)), (two, cost(2))]), &logged));
        assert!(!is_logged(&BTreeMap::new(), &logged));
    }

    #[tokio::test]
    async fn decisions_on_placements_are_recorded_with_the_term_and_the_revision_of_the_deployments() {
        let (store, term, publisher, _current) = leading().await;
        let mut controller = controller(&store, &term, &publisher).await;
        register(&store, 1).await;
        let desired = |more: &str| {
            format!(
                r#"{{"version":1,"applied":true,"deployments":[{{"name":"m","task":"embed","model":"pypi://m",
                "engine":{{"kind":"cpu","precision":"f32"}},"residency":null,"regions":[],
                "placement":{{"min_regions":1}}}}]{more}}}"#
            )
        };
        // The second one changes no deployment.
        for more in ["", r#","held":["m"]"#] {
            store.put(keys::DEPLOYMENTS, desired(more).into(), None).await.unwrap();
            while controller.deployments_at
                < store.get(keys::DEPLOYMENTS).await.unwrap().unwrap().mod_revision
            {
                let changes = controller.watch.next().await.unwrap();
                controller.apply_changes(changes);
            }
            assert_eq!(controller.execute().await.unwrap(), None);
            let entry = store.get(keys::PLACEMENTS).await.unwrap().expect("the record");
            let record = records::placements(&entry).unwrap();
            let applied = store.get(keys::DEPLOYMENTS).await.unwrap().unwrap().mod_revision;
            assert_eq!((record.term, record.revision), (term.created, applied));
            assert_eq!(record.decided.len(), 1);
        }
    }

    #[tokio::test]
    async fn unreadable_deployments_change_nothing() {
        let (store, term, publisher, current) = leading().await;
        let mut controller = controller(&store, &term, &publisher).await;
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
            let changes = controller.watch.next().await.unwrap();
            controller.apply_changes(changes);
            controller.execute().await.unwrap();
            let table = current.borrow().as_ref().map(|published| published.table.clone()).unwrap();
            assert_eq!(table.deployments.keys().map(|name| name.as_str()).collect::<Vec<_>>(), [names]);
        }
        store.delete(keys::DEPLOYMENTS).await.unwrap();
        let changes = controller.watch.next().await.unwrap();
        controller.apply_changes(changes);
        assert_eq!(controller.execute().await.unwrap(), None);
        assert_eq!(
            current.borrow().as_ref().unwrap().table.deployments.len(),
            1,
            "a deleted record removes nothing"
        );
    }

    #[tokio::test]
    async fn an_unreadable_spoke_is_left_out_and_the_others_stay() {
        let (store, term, publisher, current) = leading().await;
        let mut controller = controller(&store, &term, &publisher).await;
        store.put("spokes/aws/us-east-1/01", b"{}".to_vec(), None).await.unwrap();
        register(&store, 2).await;
        let changes = controller.watch.next().await.unwrap();
        controller.apply_changes(changes);
        controller.execute().await.unwrap();
        let ports = current.borrow().as_ref().map(|published| {
            published
                .table
                .regions
                .values()
                .flat_map(|route| route.instances.values())
                .map(HostPort::port)
                .collect::<Vec<_>>()
        });
        assert_eq!(ports, Some(vec![2]));
    }
}
