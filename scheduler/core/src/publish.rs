//! Construction of the next route table, from registrations, deployments and drains.
//!
//! A new table is published only if it differs from the last one. Gateways install, store and log each generation; a
//! generation without a change would teach operators to ignore generations.

use std::collections::{BTreeMap, BTreeSet};

use crate::invariants;
use crate::rollout::{Staged, StagedTenants};
use regions::{Deployment, DeploymentName, Generation, RegionId, RegionRoute, RouteTable, Tenants};

/// Returns the table that follows `previous`, if anything has changed. A region may serve names that are not deployed
/// (yet, or any longer); the table omits them.
///
/// A higher `epoch` counts as a change: readers that know a higher number of the old epoch accept nothing else.
pub fn publish(
    previous: &RouteTable,
    epoch: u64,
    mut regions: BTreeMap<RegionId, RegionRoute>,
    Staged { deployments, widening, revisions, tenants }: Staged<'_>,
    drains: &BTreeSet<RegionId>,
) -> Option<RouteTable> {
    for (region, route) in &mut regions {
        route.deployments.retain(|name| deployments.contains_key(name));
        route.draining = drains.contains(region);
    }
    let known = previous.generation;
    let deployed = *deployments == previous.deployments && widening == previous.widening;
    let same_tenants = match (&tenants, &previous.tenants) {
        (Some(now), Some(before)) => {
            *now.all == before.all && now.widening == before.widening && now.keys == before.keys
        }
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    };
    let same_revisions = previous.revisions.as_ref() == Some(&revisions);
    if epoch == known.epoch && regions == previous.regions && deployed && same_revisions && same_tenants {
        return None;
    }
    let generation = next_generation(previous, epoch);
    invariants::monotone(known, generation).expect("epochs never fall, and the number has just been raised");
    let tenants = tenants.map(|StagedTenants { all, widening, keys }| Tenants {
        all: all.into_owned(),
        widening,
        keys,
    });
    Some(RouteTable {
        generation,
        regions,
        deployments: deployments.into_owned(),
        widening,
        revisions: Some(revisions),
        tenants,
    })
}

/// Returns the generation of the table that follows `previous`. The number continues across epochs: a restart at one
/// has no benefit and makes logs harder to read.
pub fn next_generation(previous: &RouteTable, epoch: u64) -> Generation {
    Generation { epoch, number: previous.generation.number + 1 }
}

/// Returns the names in `ready` that are not deployed.
pub fn unknown<'a>(
    ready: &'a BTreeSet<DeploymentName>,
    deployments: &'a BTreeMap<DeploymentName, Deployment>,
) -> impl Iterator<Item = &'a DeploymentName> {
    ready.iter().filter(|name| !deployments.contains_key(*name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regions::{EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};
    use regions::{TenantId, TenantRules};
    use std::borrow::Cow;

    fn deployments(names: &[&str]) -> BTreeMap<DeploymentName, Deployment> {
        let one = |name: &&str| {
            let name: DeploymentName = name.parse().unwrap();
            let engine = EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 };
            let model = "pypi://m".to_owned();
            let (task, residency) = (Task::Embed, ResidencyPolicy::Anywhere);
            let (regions, order, placement, scaling) = (Vec::new(), Vec::new(), None, Scaling::default());
            (
                name.clone(),
                Deployment { name, task, model, engine, residency, regions, order, placement, scaling },
            )
        };
        names.iter().map(one).collect()
    }

    fn staged(deployments: &BTreeMap<DeploymentName, Deployment>) -> Staged<'_> {
        Staged {
            deployments: Cow::Borrowed(deployments),
            widening: BTreeMap::new(),
            revisions: BTreeMap::new(),
            tenants: None,
        }
    }

    fn routes(region: &str, ready: &[&str]) -> BTreeMap<RegionId, RegionRoute> {
        let ready = ready.iter().map(|name| name.parse().unwrap()).collect();
        let instances = BTreeMap::from([("a".parse().unwrap(), ([10, 0, 0, 1], 1).into())]);
        let route = RegionRoute { instances, deployments: ready, draining: false };
        BTreeMap::from([(region.parse().unwrap(), route)])
    }

    #[test]
    fn no_change_gives_no_new_generation() {
        let (all, none) = (deployments(&["a"]), BTreeSet::new());
        let first =
            publish(&RouteTable::empty(), 1, routes("aws/us-east-1", &["a"]), staged(&all), &none).unwrap();
        assert_eq!(first.generation.to_string(), "1.1");
        assert_eq!(publish(&first, 1, routes("aws/us-east-1", &["a"]), staged(&all), &none), None);
        let less = publish(&first, 1, routes("aws/us-east-1", &[]), staged(&all), &none).unwrap();
        assert_eq!(less.generation.to_string(), "1.2");
        let renewed = publish(&less, 2, routes("aws/us-east-1", &[]), staged(&all), &none).unwrap();
        assert_eq!(renewed.generation.to_string(), "2.3");
    }

    #[test]
    fn a_region_is_published_as_draining_until_its_drain_is_cancelled() {
        let (all, ready) = (deployments(&["a"]), routes("aws/us-east-1", &["a"]));
        let drains = BTreeSet::from(["aws/us-east-1".parse().unwrap(), "oci/ap-tokyo-1".parse().unwrap()]);
        let first = publish(&RouteTable::empty(), 1, ready.clone(), staged(&all), &BTreeSet::new()).unwrap();
        let next = publish(&first, 1, ready.clone(), staged(&all), &drains).unwrap();
        assert!(next.regions.values().all(|route| route.draining));
        assert_eq!(publish(&next, 1, ready.clone(), staged(&all), &drains), None);
        let last = publish(&next, 1, ready.clone(), staged(&all), &BTreeSet::new()).unwrap();
        assert_eq!(last.regions, ready);
    }

    #[test]
    fn a_name_is_omitted_until_it_is_deployed() {
        let ready = routes("aws/us-east-1", &["a", "b"]);
        let (one, two, none) = (deployments(&["a"]), deployments(&["a", "b"]), BTreeSet::new());
        let first = publish(&RouteTable::empty(), 1, ready.clone(), staged(&one), &none).unwrap();
        assert_eq!(first.regions, routes("aws/us-east-1", &["a"]));
        let next = publish(&first, 1, ready, staged(&two), &none).unwrap();
        assert_eq!(next.regions, routes("aws/us-east-1", &["a", "b"]));
    }

    #[test]
    fn changed_tenants_give_a_new_generation_and_unchanged_ones_do_not() {
        let (all, none) = (deployments(&["a"]), BTreeSet::new());
        let tenants = |text: &str| regions::parse_tenants(text, &regions::Catalogue::builtin()).unwrap();
        let one = tenants("[[tenant]]\nname = \"acme\"\nissuer = \"i\"\n");
        let next = |last: &RouteTable, tenants: Option<&BTreeMap<TenantId, TenantRules>>| {
            let staged_tenants = |all| StagedTenants {
                all: Cow::Borrowed(all),
                widening: BTreeMap::new(),
                keys: BTreeMap::new(),
            };
            let staged = Staged { tenants: tenants.map(staged_tenants), ..staged(&all) };
            publish(last, 1, routes("aws/us-east-1", &["a"]), staged, &none)
        };
        let first = next(&RouteTable::empty(), None).unwrap();
        let second = next(&first, Some(&one)).unwrap();
        assert_eq!(second.tenants.as_ref().unwrap().all, one);
        assert_eq!(next(&second, Some(&one)), None);
        let no_tenants = BTreeMap::new();
        assert_eq!(next(&second, Some(&no_tenants)).unwrap().tenants, Some(Tenants::default()));
    }

    proptest! {
        #[test]
        fn generations_always_rise(
            steps in proptest::collection::vec((0..3usize, 0..3usize, any::<bool>()), 1..20)
        ) {
            let (regions, ready) = (["aws/us-east-1", "oci/ap-tokyo-1", "gcp/europe-west4"], ["a", "b", "c"]);
            let mut table = RouteTable::empty();
            let mut epoch = 1;
            for (region, count, restored) in steps {
                epoch += u64::from(restored);
                let all = deployments(&ready[..count]);
                let drained = restored.then(|| regions[region].parse().unwrap());
                let (routes, drains) = (routes(regions[region], &ready), BTreeSet::from_iter(drained));
                if let Some(next) = publish(&table, epoch, routes, staged(&all), &drains) {
                    prop_assert_eq!(invariants::monotone(table.generation, next.generation), Ok(()));
                    table = next;
                }
            }
        }
    }
}
