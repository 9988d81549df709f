//! Tests with two hubs on one simulated store, with paused time.

use regions::RouteTable;
use scheduler_store::SimStore;

use super::super::Current;
use super::*;

/// Hub that takes part in the election.
struct RunningHub {
    current: watch::Receiver<Current>,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<Result<(), HubError>>,
}

impl RunningHub {
    fn start(store: &SimStore, name: &str) -> RunningHub {
        let (publish, current) = watch::channel(None);
        let (stop, stopping) = watch::channel(false);
        let candidate = ElectionCandidate {
            store: store.clone(),
            publisher: Publisher::new(publish, Arc::default(), Arc::default()),
            name: name.to_owned(),
            deployments: Vec::new(),
            epoch_if_new: 4,
            grace_periods: GracePeriods {
                lapsed_keep: Duration::from_secs(60),
                settle: Duration::from_secs(15),
            },
            catalogue: Arc::new(Catalogue::builtin()),
            lease: Mutex::independent(None),
        };
        RunningHub { current, stop, task: tokio::spawn(candidate.run(stopping)) }
    }

    async fn wait_until(&mut self, holds: impl Fn(&RouteTable) -> bool) -> RouteTable {
        let holds = |current: &Current| current.as_ref().is_some_and(|published| holds(&published.table));
        let found = self.current.wait_for(holds).await.unwrap();
        found.as_ref().map(|published| published.table.clone()).unwrap()
    }

    async fn stop(self) {
        self.stop.send_replace(true);
        self.task.await.unwrap().unwrap();
    }
}

async fn leader(store: &SimStore) -> Option<String> {
    let entry = store.get(keys::LEADER).await.unwrap();
    entry.map(|entry| String::from_utf8(entry.value.to_vec()).unwrap())
}

async fn wait_for_leader(store: &SimStore, name: &str) {
    while leader(store).await.as_deref() != Some(name) {
        sleep(Duration::from_millis(50)).await;
    }
}

async fn register(store: &SimStore, boot_id: u64) {
    let region = "aws/us-east-1".parse().unwrap();
    let value = format!(
        r#"{{"version":1,"region":"{region}","instance":"{boot_id}","endpoint":"10.0.0.1:{boot_id}","boot_id":{boot_id},"deployments":[]}}"#
    );
    store.put(&keys::spoke(&region, boot_id), value.into_bytes(), None).await.unwrap();
}

fn at(table: &RouteTable, port: u16) -> bool {
    table.regions.values().flat_map(|route| route.instances.values()).any(|endpoint| endpoint.port() == port)
}

#[tokio::test(start_paused = true)]
async fn a_follower_publishes_the_leaders_table_and_takes_over_when_it_resigns() {
    let store = SimStore::new();
    let mut one = RunningHub::start(&store, "one");
    wait_for_leader(&store, "one").await;
    let mut other = RunningHub::start(&store, "other");
    register(&store, 1).await;
    let led = one.wait_until(|table| at(table, 1)).await;
    assert_eq!(other.wait_until(|table| at(table, 1)).await, led);
    assert_eq!(leader(&store).await.as_deref(), Some("one"));

    one.stop().await;
    wait_for_leader(&store, "other").await;
    register(&store, 2).await;
    let next = other.wait_until(|table| at(table, 2)).await;
    assert!(next.generation > led.generation);
    other.stop().await;
    assert_eq!(leader(&store).await, None, "a stopped hub resigns");
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_lease_expired_follows_and_is_elected_again() {
    let store = SimStore::new();
    let mut one = RunningHub::start(&store, "one");
    register(&store, 1).await;
    let before = one.wait_until(|table| at(table, 1)).await;
    let entry = store.get(keys::LEADER).await.unwrap().unwrap();
    store.lease_revoke(entry.lease.unwrap()).await.unwrap();
    wait_for_leader(&store, "one").await;
    let anew = store.get(keys::LEADER).await.unwrap().unwrap();
    assert!(anew.create_revision > entry.create_revision, "another term");
    register(&store, 2).await;
    let after = one.wait_until(|table| at(table, 2)).await;
    assert!(after.generation > before.generation && after.generation.epoch == before.generation.epoch);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_published_table_stays_in_force_while_the_store_is_unavailable() {
    let store = SimStore::new();
    let mut one = RunningHub::start(&store, "one");
    register(&store, 1).await;
    let before = one.wait_until(|table| at(table, 1)).await;
    store.set_unavailable(true);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(one.current.borrow().as_ref().unwrap().table, before);
    store.set_unavailable(false);
    register(&store, 2).await;
    let after = one.wait_until(|table| at(table, 2)).await;
    assert_eq!(after.generation.number, before.generation.number + 1);
    one.stop().await;
}

/// The copy is of the same term, so neither the lease nor the guard of the term reveals the rollback.
#[tokio::test(start_paused = true)]
async fn a_rolled_back_store_begins_a_new_epoch_and_no_generation_falls() {
    let store = SimStore::new();
    let mut one = RunningHub::start(&store, "one");
    register(&store, 1).await;
    one.wait_until(|table| at(table, 1)).await;
    let copy = store.snapshot();
    let mut seen = Vec::new();
    for boot_id in 2..6 {
        register(&store, boot_id).await;
        seen.push(one.wait_until(|table| at(table, u16::try_from(boot_id).unwrap())).await.generation);
    }
    store.restore(copy, Instant::now());
    register(&store, 9).await;
    let after = one.wait_until(|table| at(table, 9)).await.generation;
    seen.push(after);
    assert!(seen.is_sorted() && after.epoch == 5, "{seen:?}");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_unavailable_store_is_waited_for() {
    let store = SimStore::new();
    store.set_unavailable(true);
    let mut one = RunningHub::start(&store, "one");
    sleep(Duration::from_secs(30)).await;
    assert!(!one.task.is_finished() && one.current.borrow().is_none());
    store.set_unavailable(false);
    assert_eq!(one.wait_until(|_| true).await.generation.to_string(), "4.1");
    one.stop().await;
}
