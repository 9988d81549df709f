//! Changing residencies, with acknowledgements in any order.

use super::*;
use crate::some_instant;
use proptest::prelude::*;
use regions::{RegionSet, parse_deployments};
use scheduler_api::reader::Role;
use std::sync::LazyLock;

/// Loaded once: a property test creates hundreds of rollouts.
static CATALOGUE: LazyLock<Arc<Catalogue>> = LazyLock::new(|| Arc::new(Catalogue::builtin()));

/// Residencies that include each other, overlap, or are disjoint.
const POLICIES: &[&str] = &["anywhere", "eu", "de", "de,fr", "us", "eu,us", "jp", "us-va,jp", "eea"];

fn deployment(name: &str, policy: &str) -> Deployment {
    let text = format!(
        "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n"
    );
    let mut parsed = parse_deployments(&text, &CATALOGUE).unwrap().remove(0);
    parsed.residency = policy.parse().unwrap();
    parsed
}

fn reader(boot_id: u64) -> Reader {
    let role = if boot_id.is_multiple_of(2) { Role::Gateway } else { Role::Spoke };
    Reader { role, region: "aws/us-east-1".parse().unwrap(), boot_id }
}

/// Hub that publishes tables, and readers that acknowledge them on the command of the test.
struct RolloutTest {
    catalogue: Arc<Catalogue>,
    rollout: Rollout,
    desired: BTreeMap<DeploymentName, Deployment>,
    /// All published tables; the first is empty.
    tables: Vec<RouteTable>,
    /// Index of the table that each known reader runs.
    running: BTreeMap<u64, usize>,
}

impl RolloutTest {
    fn new(settle: Duration) -> RolloutTest {
        let catalogue = CATALOGUE.clone();
        let rollout = Rollout::new(catalogue.clone(), settle, some_instant());
        let (desired, running) = (BTreeMap::new(), BTreeMap::new());
        RolloutTest { catalogue, rollout, desired, tables: vec![RouteTable::empty()], running }
    }

    fn apply(&mut self, name: &str, policy: &str) {
        let deployment = deployment(name, policy);
        self.desired.insert(deployment.name.clone(), deployment);
    }

    /// Publishes the next table, if it differs.
    fn publish(&mut self, in_doubt: bool) {
        let last = self.tables.last().unwrap();
        let generation = Generation { epoch: 1, number: last.generation.number + 1 };
        let Staged { deployments, widening, revisions: _, tenants: _ } =
            self.rollout.stage(&self.desired, last, generation, in_doubt);
        if *deployments == last.deployments && widening == last.widening {
            return;
        }
        let next =
            RouteTable { generation, deployments: deployments.into_owned(), widening, ..RouteTable::empty() };
        self.rollout.persisted(last, &next);
        self.tables.push(next);
    }

    fn acknowledge(&mut self, boot_id: u64, table: usize) {
        self.running.insert(boot_id, table);
        self.rollout.acknowledged(reader(boot_id), self.tables[table].generation);
    }

    fn acknowledge_all(&mut self) {
        let newest = self.tables.len() - 1;
        for boot_id in self.running.keys().copied().collect::<Vec<_>>() {
            self.acknowledge(boot_id, newest);
        }
    }

    fn sent(&self, table: usize, name: &str) -> Option<RegionSet> {
        let name = name.parse::<DeploymentName>().unwrap();
        self.tables[table].deployments.get(&name).map(|known| known.residency.permitted(&self.catalogue))
    }

    fn accepted(&self, table: usize, name: &str) -> Option<RegionSet> {
        let name = name.parse::<DeploymentName>().unwrap();
        accepted_residency(&self.tables[table], &name).map(|accepted| accepted.permitted(&self.catalogue))
    }

    fn residency(&self, name: &str) -> (String, Option<String>) {
        let (last, name) = (self.tables.last().unwrap(), name.parse::<DeploymentName>().unwrap());
        let to = last.widening.get(&name).map(|widening| widening.to.to_string());
        (last.deployments[&name].residency.to_string(), to)
    }
}

#[track_caller]
fn check_residency(test: &RolloutTest, residency: &str, to: Option<&str>) {
    assert_eq!(test.residency("m"), (residency.to_owned(), to.map(str::to_owned)));
}

#[test]
fn a_narrower_residency_is_in_the_next_table_and_a_wider_one_waits_for_all_readers() {
    let mut test = RolloutTest::new(Duration::ZERO);
    test.apply("m", "eu,us");
    test.publish(false);
    check_residency(&test, "eu,us", None);
    test.acknowledge(1, 1);
    test.acknowledge(2, 1);

    test.apply("m", "eu");
    test.publish(false);
    check_residency(&test, "eu", None);

    test.apply("m", "anywhere");
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    test.acknowledge(1, 3);
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    test.acknowledge(2, 2);
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    test.acknowledge(2, 3);
    test.publish(true);
    check_residency(&test, "eu", Some("anywhere"));
    test.publish(false);
    check_residency(&test, "anywhere", None);
}

#[test]
fn a_residency_that_moves_is_empty_until_all_readers_acknowledged() {
    let mut test = RolloutTest::new(Duration::ZERO);
    test.apply("m", "eu");
    test.publish(false);
    test.acknowledge(1, 1);
    test.apply("m", "us");
    test.publish(false);
    check_residency(&test, "eu & us", Some("us"));
    assert_eq!(test.sent(2, "m"), Some(RegionSet::EMPTY));
    test.acknowledge(1, 2);
    test.publish(false);
    check_residency(&test, "us", None);
}

#[test]
fn a_removed_reader_is_not_waited_for_and_a_new_term_waits_for_the_settle_time() {
    let now = some_instant();
    let mut test = RolloutTest::new(SETTLE_TIME);
    test.rollout = Rollout::new(test.catalogue.clone(), SETTLE_TIME, now);
    test.apply("m", "eu");
    test.publish(false);
    assert_eq!(test.rollout.next_wakeup(&test.tables[1]), None, "nothing waits");
    test.apply("m", "anywhere");
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    assert_eq!(test.rollout.next_wakeup(&test.tables[2]), Some(now + SETTLE_TIME));
    test.rollout.tick(now + SETTLE_TIME - Duration::from_nanos(1));
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    test.rollout.tick(now + SETTLE_TIME);
    test.acknowledge(1, 1);
    test.publish(false);
    check_residency(&test, "eu", Some("anywhere"));
    test.rollout.remove_reader(&reader(1));
    test.publish(false);
    check_residency(&test, "anywhere", None);
}

#[test]
fn a_name_that_returns_is_not_new_to_a_reader_that_missed_its_removal() {
    let check = |acknowledged: usize, expected: (&str, Option<&str>)| {
        let mut test = RolloutTest::new(Duration::ZERO);
        test.apply("m", "eu");
        test.publish(false);
        test.acknowledge(1, 1);
        test.desired.clear();
        test.publish(false);
        test.acknowledge(1, acknowledged);
        // Acknowledgements reach the hub between two tables.
        test.apply("other", "eu");
        test.publish(false);
        test.apply("m", "anywhere");
        test.publish(false);
        check_residency(&test, expected.0, expected.1);
    };
    check(1, ("eu", Some("anywhere")));
    check(2, ("anywhere", None));
}

#[test]
fn an_interim_residency_after_many_changes_still_fits_into_a_table() {
    let mut test = RolloutTest::new(Duration::ZERO);
    let all: Vec<String> = test.catalogue.iter().map(|(_, region)| region.id.to_string()).collect();
    test.apply("m", "anywhere");
    test.publish(false);
    test.acknowledge(1, 1);
    for step in 0..40 {
        // Each policy excludes other regions than the previous one, so that all of them must be intersected.
        let some: Vec<_> = all.iter().enumerate().filter(|(at, _)| (at + step) % 7 != 0).collect();
        let policy: Vec<_> = some.iter().map(|(_, id)| id.as_str()).take(60).collect();
        test.apply("m", &policy.join(","));
        test.publish(false);
        let (residency, _) = test.residency("m");
        assert!(residency.len() <= DEPLOYMENT_LEN_MAX, "{} bytes", residency.len());
        let newest = test.tables.len() - 1;
        let desired = test.desired.values().next().unwrap().residency.permitted(&test.catalogue);
        let before = test.sent(newest - 1, "m").unwrap();
        assert!(test.sent(newest, "m").unwrap().is_subset(&desired.intersect(before)));
    }
    test.acknowledge_all();
    test.publish(false);
    assert_eq!(test.residency("m").1, None);
}

#[derive(Clone, Debug)]
enum Step {
    Apply {
        name: usize,
        policy: usize,
    },
    Remove {
        name: usize,
    },
    Publish {
        in_doubt: bool,
    },
    /// A known reader advances by this many tables.
    Acknowledge {
        reader: u64,
        newer: usize,
    },
    /// A reader starts with any table in its snapshot.
    Start {
        reader: u64,
        table: usize,
    },
    Expire {
        reader: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..2usize, 0..POLICIES.len()).prop_map(|(name, policy)| Step::Apply { name, policy }),
        1 => (0..2usize).prop_map(|name| Step::Remove { name }),
        4 => any::<bool>().prop_map(|in_doubt| Step::Publish { in_doubt }),
        4 => (0..4u64, 0..4usize).prop_map(|(reader, newer)| Step::Acknowledge { reader, newer }),
        1 => (0..4u64, 0..8usize).prop_map(|(reader, table)| Step::Start { reader, table }),
        1 => (0..4u64).prop_map(|reader| Step::Expire { reader }),
    ]
}

const NAMES: [&str; 2] = ["m", "n"];

proptest! {
    /// Requests that a reader of the newest table sends are accepted by every known reader of an older table. In the
    /// other direction, a rejection is the purpose of narrowing.
    #[test]
    fn no_reader_gets_requests_that_it_has_not_acknowledged_as_allowed(
        steps in proptest::collection::vec(step(), 1..60)
    ) {
        let mut test = RolloutTest::new(Duration::ZERO);
        for step in steps {
            let tables = test.tables.len();
            match step {
                Step::Apply { name, policy } => test.apply(NAMES[name], POLICIES[policy]),
                Step::Remove { name } => drop(test.desired.remove(NAMES[name])),
                Step::Publish { in_doubt } => test.publish(in_doubt),
                Step::Acknowledge { reader, newer } => {
                    if let Some(table) = test.running.get(&reader).copied() {
                        test.acknowledge(reader, (table + newer).min(tables - 1));
                    }
                }
                Step::Start { reader, table } => {
                    if !test.running.contains_key(&reader) {
                        test.acknowledge(reader, table.min(tables - 1));
                    }
                }
                Step::Expire { reader: expired } => {
                    test.running.remove(&expired);
                    test.rollout.remove_reader(&reader(expired));
                }
            }
            if test.tables.len() == tables {
                continue;
            }
            let newest = test.tables.len() - 1;
            for name in NAMES {
                let Some(sent) = test.sent(newest, name) else { continue };
                let desired = test.desired[&name.parse::<DeploymentName>().unwrap()].residency.permitted(&test.catalogue);
                prop_assert!(sent.is_subset(&desired), "never wider than desired");
                let grew = test.sent(newest - 1, name).is_some_and(|before| !sent.is_subset(&before));
                for (reader, table) in test.running.iter().filter(|_| grew) {
                    let Some(accepted) = test.accepted(*table, name) else { continue };
                    prop_assert_eq!(invariants::acknowledged_before_widened(sent, accepted), Ok(()), "{} at reader {}", name, reader);
                }
            }
        }
        // The desired policies are published once all readers have acknowledged.
        for _ in 0..3 {
            test.publish(false);
            test.acknowledge_all();
        }
        prop_assert_eq!(&test.tables.last().unwrap().deployments, &test.desired);
        prop_assert!(test.tables.last().unwrap().widening.is_empty());
    }
}
