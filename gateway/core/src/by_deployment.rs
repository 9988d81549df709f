//! Values by deployment and region, or by deployment and spoke instance, such as reported loads and credits.
//!
//! Regions report all of their deployments at once, and a request needs one deployment in all regions. So the deployment comes
//! first: a request finds its deployment with one search over names, and each region of it by a number.

use regions::id::DeploymentName;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Values of each deployment by region (or instance).
#[derive(Clone, Debug)]
pub struct ByDeployment<T, K = RegionIndex>(BTreeMap<DeploymentName, BTreeMap<K, T>>);

impl<T, K> Default for ByDeployment<T, K> {
    fn default() -> ByDeployment<T, K> {
        ByDeployment(BTreeMap::new())
    }
}

impl<T, K: Copy + Ord> ByDeployment<T, K> {
    /// Sets the value of a deployment in `region`; `None` removes it.
    pub fn set(&mut self, region: K, deployment: &DeploymentName, value: Option<T>) {
        match (self.0.get_mut(deployment), value) {
            (Some(regions), Some(value)) => drop(regions.insert(region, value)),
            (Some(regions), None) => {
                regions.remove(&region);
                if regions.is_empty() {
                    self.0.remove(deployment);
                }
            }
            (None, Some(value)) => drop(self.0.insert(deployment.clone(), BTreeMap::from([(region, value)]))),
            (None, None) => {}
        }
    }

    /// Removes the values of other regions.
    pub fn retain_regions(&mut self, is_retained: impl Fn(K) -> bool) {
        self.0.retain(|_, regions| {
            regions.retain(|region, _| is_retained(*region));
            !regions.is_empty()
        });
    }

    /// Returns the values of a deployment by region; `None` if no region has one.
    pub fn of(&self, deployment: &DeploymentName) -> Option<&BTreeMap<K, T>> {
        self.0.get(deployment)
    }

    /// Returns the value of a deployment in a region.
    pub fn get(&self, region: K, deployment: &DeploymentName) -> Option<&T> {
        self.of(deployment)?.get(&region)
    }

    /// Returns the values of a deployment for a range of keys, to be changed.
    pub fn range_mut(
        &mut self,
        keys: RangeInclusive<K>,
        deployment: &DeploymentName,
    ) -> impl Iterator<Item = &mut T> {
        let all = self.0.get_mut(deployment);
        all.into_iter().flat_map(move |all| all.range_mut(keys.clone()).map(|(_, value)| value))
    }

    /// Returns the deployments that have a value in `region`.
    pub fn in_region(&self, region: K) -> impl Iterator<Item = (&DeploymentName, &T)> {
        self.0.iter().filter_map(move |(name, regions)| Some((name, regions.get(&region)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The values of each region are those that were set last, after any sequence of changes and removals.
        #[test]
        fn the_values_of_a_region_are_those_that_were_set_last(
            changes in prop::collection::vec((0usize..4, "[a-d]", prop::option::of(0u8..9)), 0..80),
            retained in 0usize..4,
        ) {
            let at = |region| RegionIndex::new(region).unwrap();
            let (mut table, mut expected) = (ByDeployment::default(), BTreeMap::new());
            for (region, name, value) in changes {
                let name: DeploymentName = name.parse().unwrap();
                table.set(at(region), &name, value);
                let values: &mut BTreeMap<DeploymentName, u8> = expected.entry(region).or_default();
                match value {
                    Some(value) => drop(values.insert(name, value)),
                    None => drop(values.remove(&name)),
                }
            }
            for _ in 0..2 {
                for (region, values) in &expected {
                    prop_assert!(table.in_region(at(*region)).eq(values));
                }
                prop_assert!(table.0.values().all(|regions| !regions.is_empty()));
                table.retain_regions(|region| region.as_usize() < retained);
                expected.retain(|region, _| *region < retained);
            }
        }
    }
}
