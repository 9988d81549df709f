//! Residencies that change while readers hear of it in any order.

use super::*;
use crate::some_instant;
use proptest::prelude::*;
use regions::{RegionSet, parse_deployments};
use std::sync::LazyLock;

/// Read once: a property makes hundreds of worlds.
static CATALOGUE: LazyLock<Arc<Catalogue>> = LazyLock::new(|| Arc::new(Catalogue::builtin()));

/// Residencies of which some lie in others, some overlap, and some have nothing in common.
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

/// A hub that publishes, and readers that hear of it when a test says so.
struct World {
    catalogue: Arc<Catalogue>,
    rollout: Rollout,
    desired: BTreeMap<DeploymentName, Deployment>,
    /// Every table that was published; the first is empty.
    tables: Vec<RouteTable>,
    /// Which of them each reader that is known runs.
    running: BTreeMap<u64, usize>,
}

impl World {
    fn new(settle: Duration) -> World {
        let catalogue = CATALOGUE.clone();
        let rollout = Rollout::new(catalogue.clone(), settle, some_instant());
        let (desired, running) = (BTreeMap::new(), BTreeMap::new());
        World { catalogue, rollout, desired, tables: vec![RouteTable::empty()], running }
    }

    fn apply(&mut self, name: &str, policy: &str) {
        let deployment = deployment(name, policy);
        self.desired.insert(deployment.name.clone(), deployment);
    }

    /// Publishes the next table, if it says anything new.
    fn publish(&mut self, doubt: bool) {
        let last = self.tables.last().unwrap();
        let generation = Generation { epoch: 1, number: last.generation.number + 1 };
        let Staged { deployments, widening, revisions: _, tenants: _ } =
            self.rollout.stage(&self.desired, last, generation, doubt);
        if *deployments == last.deployments && widening == last.widening {
            return;
        }
        let next =
            RouteTable { generation, deployments: deployments.into_owned(), widening, ..RouteTable::empty() };
        self.rollout.persisted(last, &next);
        self.tables.push(next);
    }

    fn hears(&mut self, boot_id: u64, table: usize) {
        self.running.insert(boot_id, table);
        self.rollout.acknowledged(reader(boot_id), self.tables[table].generation);
    }

    fn hear_all(&mut self) {
        let newest = self.tables.len() - 1;
        for boot_id in self.running.keys().copied().collect::<Vec<_>>() {
            self.hears(boot_id, newest);
        }
    }

    fn sent(&self, table: usize, name: &str) -> Option<RegionSet> {
        let name = name.parse::<DeploymentName>().unwrap();
        self.tables[table].deployments.get(&name).map(|known| known.residency.permitted(&self.catalogue))
    }

    fn taken(&self, table: usize, name: &str) -> Option<RegionSet> {
        let name = name.parse::<DeploymentName>().unwrap();
        taken(&self.tables[table], &name).map(|taken| taken.permitted(&self.catalogue))
    }

    fn says(&self, name: &str) -> (String, Option<String>) {
        let (last, name) = (self.tables.last().unwrap(), name.parse::<DeploymentName>().unwrap());
        let to = last.widening.get(&name).map(|widening| widening.to.to_string());
        (last.deployments[&name].residency.to_string(), to)
    }
}

#[track_caller]
fn says(world: &World, residency: &str, to: Option<&str>) {
    assert_eq!(world.says("m"), (residency.to_owned(), to.map(str::to_owned)));
}

#[test]
fn what_is_narrower_is_in_the_next_table_and_what_is_wider_waits_for_everybody() {
    let mut world = World::new(Duration::ZERO);
    world.apply("m", "eu,us");
    world.publish(false);
    says(&world, "eu,us", None);
    world.hears(1, 1);
    world.hears(2, 1);

    world.apply("m", "eu");
    world.publish(false);
    says(&world, "eu", None);

    world.apply("m", "anywhere");
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    world.hears(1, 3);
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    world.hears(2, 2);
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    world.hears(2, 3);
    world.publish(true);
    says(&world, "eu", Some("anywhere"));
    world.publish(false);
    says(&world, "anywhere", None);
}

#[test]
fn what_moves_is_nowhere_until_everybody_knows_where_to() {
    let mut world = World::new(Duration::ZERO);
    world.apply("m", "eu");
    world.publish(false);
    world.hears(1, 1);
    world.apply("m", "us");
    world.publish(false);
    says(&world, "eu & us", Some("us"));
    assert_eq!(world.sent(2, "m"), Some(RegionSet::EMPTY));
    world.hears(1, 2);
    world.publish(false);
    says(&world, "us", None);
}

#[test]
fn whoever_is_gone_is_not_waited_for_and_a_new_term_waits_for_whoever_may_come_back() {
    let now = some_instant();
    let mut world = World::new(SETTLE_TIME);
    world.rollout = Rollout::new(world.catalogue.clone(), SETTLE_TIME, now);
    world.apply("m", "eu");
    world.publish(false);
    assert_eq!(world.rollout.next_wakeup(&world.tables[1]), None, "nothing waits");
    world.apply("m", "anywhere");
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    assert_eq!(world.rollout.next_wakeup(&world.tables[2]), Some(now + SETTLE_TIME));
    world.rollout.tick(now + SETTLE_TIME - Duration::from_nanos(1));
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    world.rollout.tick(now + SETTLE_TIME);
    world.hears(1, 1);
    world.publish(false);
    says(&world, "eu", Some("anywhere"));
    world.rollout.gone(&reader(1));
    world.publish(false);
    says(&world, "anywhere", None);
}

#[test]
fn a_name_that_comes_back_is_no_new_one_to_whoever_has_not_heard_that_it_was_gone() {
    let check = |heard: usize, expected: (&str, Option<&str>)| {
        let mut world = World::new(Duration::ZERO);
        world.apply("m", "eu");
        world.publish(false);
        world.hears(1, 1);
        world.desired.clear();
        world.publish(false);
        world.hears(1, heard);
        // What readers say reaches the hub between two tables.
        world.apply("other", "eu");
        world.publish(false);
        world.apply("m", "anywhere");
        world.publish(false);
        says(&world, expected.0, expected.1);
    };
    check(1, ("eu", Some("anywhere")));
    check(2, ("anywhere", None));
}

#[test]
fn a_residency_that_has_changed_often_meanwhile_still_fits_into_a_table() {
    let mut world = World::new(Duration::ZERO);
    let all: Vec<String> = world.catalogue.iter().map(|(_, region)| region.id.to_string()).collect();
    world.apply("m", "anywhere");
    world.publish(false);
    world.hears(1, 1);
    for step in 0..40 {
        // Each leaves out others than the one before, so that all of them have to be met.
        let some: Vec<_> = all.iter().enumerate().filter(|(at, _)| (at + step) % 7 != 0).collect();
        let policy: Vec<_> = some.iter().map(|(_, id)| id.as_str()).take(60).collect();
        world.apply("m", &policy.join(","));
        world.publish(false);
        let (said, _) = world.says("m");
        assert!(said.len() <= DEPLOYMENT_LEN_MAX, "{} bytes", said.len());
        let newest = world.tables.len() - 1;
        let desired = world.desired.values().next().unwrap().residency.permitted(&world.catalogue);
        let before = world.sent(newest - 1, "m").unwrap();
        assert!(world.sent(newest, "m").unwrap().is_subset(&desired.intersect(before)));
    }
    world.hear_all();
    world.publish(false);
    assert_eq!(world.says("m").1, None);
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
        doubt: bool,
    },
    /// A reader that is there takes a newer table, by so many.
    Hears {
        reader: u64,
        newer: usize,
    },
    /// One comes, with any table on its disk.
    Comes {
        reader: u64,
        table: usize,
    },
    Gone {
        reader: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..2usize, 0..POLICIES.len()).prop_map(|(name, policy)| Step::Apply { name, policy }),
        1 => (0..2usize).prop_map(|name| Step::Remove { name }),
        4 => any::<bool>().prop_map(|doubt| Step::Publish { doubt }),
        4 => (0..4u64, 0..4usize).prop_map(|(reader, newer)| Step::Hears { reader, newer }),
        1 => (0..4u64, 0..8usize).prop_map(|(reader, table)| Step::Comes { reader, table }),
        1 => (0..4u64).prop_map(|reader| Step::Gone { reader }),
    ]
}

const NAMES: [&str; 2] = ["m", "n"];

proptest! {
    /// Whoever sends by a table, to a reader that is known and runs an older one: what is sent is taken. The other way
    /// round a refusal is what narrowing is for.
    #[test]
    fn whatever_the_order_of_acknowledgements_nobody_is_sent_what_it_has_not_heard_of(
        steps in proptest::collection::vec(step(), 1..60)
    ) {
        let mut world = World::new(Duration::ZERO);
        for step in steps {
            let tables = world.tables.len();
            match step {
                Step::Apply { name, policy } => world.apply(NAMES[name], POLICIES[policy]),
                Step::Remove { name } => drop(world.desired.remove(NAMES[name])),
                Step::Publish { doubt } => world.publish(doubt),
                Step::Hears { reader, newer } => {
                    if let Some(table) = world.running.get(&reader).copied() {
                        world.hears(reader, (table + newer).min(tables - 1));
                    }
                }
                Step::Comes { reader, table } => {
                    if !world.running.contains_key(&reader) {
                        world.hears(reader, table.min(tables - 1));
                    }
                }
                Step::Gone { reader: gone } => {
                    world.running.remove(&gone);
                    world.rollout.gone(&reader(gone));
                }
            }
            if world.tables.len() == tables {
                continue;
            }
            let newest = world.tables.len() - 1;
            for name in NAMES {
                let Some(sent) = world.sent(newest, name) else { continue };
                let desired = world.desired[&name.parse::<DeploymentName>().unwrap()].residency.permitted(&world.catalogue);
                prop_assert!(sent.is_subset(&desired), "never more than the operator wants");
                let grew = world.sent(newest - 1, name).is_some_and(|before| !sent.is_subset(&before));
                for (reader, table) in world.running.iter().filter(|_| grew) {
                    let Some(taken) = world.taken(*table, name) else { continue };
                    prop_assert_eq!(invariants::heard(sent, taken), Ok(()), "{} at reader {}", name, reader);
                }
            }
        }
        // And what is desired comes about once everybody has heard.
        for _ in 0..3 {
            world.publish(false);
            world.hear_all();
        }
        prop_assert_eq!(&world.tables.last().unwrap().deployments, &world.desired);
        prop_assert!(world.tables.last().unwrap().widening.is_empty());
    }
}
