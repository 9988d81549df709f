//! Region catalogue: the known regions, their locations, and the jurisdictions that contain them.
//!
//! `configs/regions.toml` is edited by hand, and residency depends on it, so its format cannot express contradictions: a
//! row names the narrowest jurisdiction of the region (`us-va`, `de`), its country follows from that code, and the
//! unions follow from one table at the head of the file. After [`Catalogue::parse`] the catalogue is immutable: regions
//! are sorted by id and identified by ordinal, and the regions of each jurisdiction are precomputed as a set.

mod read;

pub use read::read_regions;

use std::collections::{BTreeMap, BTreeSet};

use configuration::Problem;

use crate::accelerator::Accelerators;
use crate::engine::EngineKind;
use crate::geography::GeoPoint;
use crate::id::{AcceleratorType, RegionId};
use crate::jurisdiction::Jurisdiction;
use crate::set::{MAX_REGIONS, RegionIndex, RegionSet};

/// Catalogue that is compiled in.
const BUILTIN: &str = include_str!("../../configs/regions.toml");

/// Region of a cloud.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// `cloud/name`.
    pub id: RegionId,
    /// City or area as the provider names it, in English.
    pub city: String,
    /// Country in which it lies.
    pub country: Jurisdiction,
    /// Centre of the metropolitan area; providers do not publish addresses.
    pub point: GeoPoint,
    /// Every jurisdiction that contains it: subdivision, country, unions.
    pub jurisdictions: BTreeSet<Jurisdiction>,
    /// Engines that are available there, `tensorrt-llm` wherever there are accelerators; empty for a location with gateways
    /// only.
    pub engines: BTreeSet<EngineKind>,
    /// Cost of a replica per hour, in millionths of the operator's currency unit; `None` if unknown.
    pub cost: Option<u64>,
    /// Accelerators that it offers.
    pub accelerators: Accelerators,
}

impl Region {
    /// Returns the cloud of the region, such as `gcp`.
    pub fn cloud(&self) -> &str {
        self.id.cloud()
    }

    /// Returns the narrowest known jurisdiction, a subdivision or a country; it determines all others.
    pub fn narrowest(&self) -> &Jurisdiction {
        let subdivision = |jurisdiction: &&Jurisdiction| jurisdiction.as_str().contains('-');
        self.jurisdictions.iter().find(subdivision).unwrap_or(&self.country)
    }
}

/// All regions that this process knows, in order of id.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalogue {
    regions: Vec<Region>,
    within: BTreeMap<Jurisdiction, RegionSet>,
    accelerator_types: BTreeSet<AcceleratorType>,
}

impl Catalogue {
    /// Parses and validates a catalogue; returns all of its problems on failure.
    pub fn parse(text: &str) -> Result<Catalogue, Vec<Problem>> {
        read::read(text).map(Catalogue::new)
    }

    /// Returns the compiled-in catalogue, `configs/regions.toml`. Every call parses it: call once.
    pub fn builtin() -> Catalogue {
        Catalogue::parse(BUILTIN).expect("a test of this crate parses the compiled-in catalogue")
    }

    fn new(regions: Vec<Region>) -> Catalogue {
        assert!(regions.len() <= MAX_REGIONS, "the reader rejects a longer catalogue");
        assert!(regions.is_sorted_by(|a, b| a.id < b.id), "ids are the keys of a table and unique");
        let mut within: BTreeMap<Jurisdiction, RegionSet> = BTreeMap::new();
        for (ordinal, region) in regions.iter().enumerate() {
            let index = RegionIndex::new(ordinal).expect("the length was asserted above");
            for jurisdiction in &region.jurisdictions {
                within.entry(jurisdiction.clone()).or_insert(RegionSet::EMPTY).insert(index);
            }
        }
        let types = regions.iter().flat_map(|region| region.accelerators.keys().cloned());
        let accelerator_types = types.collect();
        Catalogue { regions, within, accelerator_types }
    }

    /// Returns the region with this name.
    pub fn get(&self, id: &RegionId) -> Option<&Region> {
        self.index_of(id).map(|index| self.region(index))
    }

    /// Returns the ordinal of the region with this name.
    pub fn index_of(&self, id: &RegionId) -> Option<RegionIndex> {
        self.regions.binary_search_by(|region| region.id.cmp(id)).ok().and_then(RegionIndex::new)
    }

    /// Returns the region with this ordinal, which must come from this catalogue.
    pub fn region(&self, index: RegionIndex) -> &Region {
        &self.regions[index.as_usize()]
    }

    /// Returns an iterator over all regions with their ordinals, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (RegionIndex, &Region)> {
        self.regions.iter().enumerate().map(|(ordinal, region)| {
            (RegionIndex::new(ordinal).expect("a catalogue is never longer than MAX_REGIONS"), region)
        })
    }

    /// Returns the number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns whether the catalogue is empty; the reader rejects such a catalogue.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Returns the set of all regions.
    pub fn all(&self) -> RegionSet {
        RegionSet::all(self.len())
    }

    /// Returns the regions inside a jurisdiction; empty if no region lies there.
    pub fn within(&self, jurisdiction: &Jurisdiction) -> RegionSet {
        self.within.get(jurisdiction).copied().unwrap_or(RegionSet::EMPTY)
    }

    /// Returns the accelerator types that any region offers.
    pub fn accelerator_types(&self) -> &BTreeSet<AcceleratorType> {
        &self.accelerator_types
    }

    /// Returns every jurisdiction that contains a region, in order.
    pub fn jurisdictions(&self) -> impl Iterator<Item = &Jurisdiction> {
        self.within.keys()
    }

    /// Returns the reference of the keys of a catalogue file.
    pub fn reference() -> String {
        read::reference()
    }

    /// Returns suggestions for the unknown name `text`: similar names, the name without its cloud, or regions in that
    /// city. At most three, best first.
    pub fn nearest_names(&self, text: &str) -> Vec<&str> {
        let named: Vec<&str> = self
            .regions
            .iter()
            .filter(|region| {
                region.id.name().eq_ignore_ascii_case(text) || region.city.eq_ignore_ascii_case(text)
            })
            .map(|region| region.id.as_str())
            .take(configuration::MAX_SUGGESTIONS)
            .collect();
        if named.is_empty() {
            configuration::nearest(text, self.regions.iter().map(|region| region.id.as_str()))
        } else {
            named
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinal_identifies_its_region() {
        let catalogue = Catalogue::builtin();
        for (index, region) in catalogue.iter() {
            assert_eq!(catalogue.index_of(&region.id), Some(index));
            assert_eq!(catalogue.region(index).id, region.id);
        }
        assert_eq!(catalogue.index_of(&"aws/mars-1".parse().unwrap()), None);
    }

    #[test]
    fn the_narrowest_jurisdiction_is_that_of_the_regions_row() {
        let catalogue = Catalogue::builtin();
        let narrowest =
            |id: &str| catalogue.get(&id.parse().unwrap()).unwrap().narrowest().as_str().to_owned();
        assert_eq!(
            (narrowest("aws/us-east-1"), narrowest("aws/eu-central-1")),
            ("us-va".into(), "de".into())
        );
    }

    #[test]
    fn suggestions_cover_misspelt_names_names_without_cloud_and_cities() {
        let catalogue = Catalogue::builtin();
        assert_eq!(catalogue.nearest_names("aws/us-esat-1")[0], "aws/us-east-1");
        assert_eq!(catalogue.nearest_names("westeurope"), ["azure/westeurope"]);
        assert_eq!(catalogue.nearest_names("DALLAS"), ["gcp/us-south1", "ibm/us-south", "vultr/dfw"]);
        assert_eq!(
            catalogue.nearest_names("frankfurt"),
            ["aws/eu-central-1", "azure/germanywestcentral", "digitalocean/fra1"]
        );
        assert!(catalogue.nearest_names("olympus mons").is_empty());
    }
}
