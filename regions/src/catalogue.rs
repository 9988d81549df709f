//! The catalogue: which regions there are, where they stand, and which jurisdictions contain them.
//!
//! `configs/regions.toml` is data that a person edits and that policy hangs on, so it is written to be unable to contradict
//! itself: a row names the narrowest jurisdiction that holds the region (`us-va`, `de`), its country follows from that
//! code, and the unions follow from the one table at the head of the file. After [`Catalogue::parse`] nothing changes:
//! regions stand in order of their ids, an ordinal stands for a region, and each jurisdiction is a ready-made set.

mod read;

use std::collections::{BTreeMap, BTreeSet};

use crate::deployment::EngineKind;
use crate::document::Problem;
use crate::geography::GeoPoint;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::set::{MAX_REGIONS, RegionIndex, RegionSet};
use crate::suggest;

/// The file that is compiled in.
const BUILTIN: &str = include_str!("../../configs/regions.toml");

/// One region of one cloud.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// `cloud/name`.
    pub id: RegionId,
    /// The city or area as the provider names it, in English.
    pub city: String,
    /// The country on whose soil it stands.
    pub country: Jurisdiction,
    /// The middle of the metropolitan area; providers do not publish addresses.
    pub point: GeoPoint,
    /// Every jurisdiction that contains it: subdivision, country, unions.
    pub jurisdictions: BTreeSet<Jurisdiction>,
    /// What runs models there; nothing in a place that has gateways only.
    pub engines: BTreeSet<EngineKind>,
    /// What a replica costs there an hour, in millionths of whatever the operator counts in; `None` where nobody says.
    pub cost: Option<u64>,
}

impl Region {
    /// The cloud that runs it, such as `gcp`.
    pub fn cloud(&self) -> &str {
        self.id.cloud()
    }

    /// The narrowest jurisdiction that is known to contain it, from which the others follow: a subdivision or a country.
    pub fn narrowest(&self) -> &Jurisdiction {
        let subdivision = |jurisdiction: &&Jurisdiction| jurisdiction.as_str().contains('-');
        self.jurisdictions.iter().find(subdivision).unwrap_or(&self.country)
    }
}

/// Every region that this process knows, in order of id.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalogue {
    regions: Vec<Region>,
    within: BTreeMap<Jurisdiction, RegionSet>,
}

impl Catalogue {
    /// Reads a catalogue, or says everything that is wrong with it.
    pub fn parse(text: &str) -> Result<Catalogue, Vec<Problem>> {
        read::read(text).map(Catalogue::new)
    }

    /// The catalogue that is compiled in, `configs/regions.toml`. It is parsed on each call: call once.
    pub fn builtin() -> Catalogue {
        Catalogue::parse(BUILTIN).expect("a test of this crate parses the compiled-in catalogue")
    }

    fn new(regions: Vec<Region>) -> Catalogue {
        assert!(regions.len() <= MAX_REGIONS, "the reader refuses a longer catalogue");
        assert!(regions.is_sorted_by(|a, b| a.id < b.id), "ids are keys of one table: unique");
        let mut within: BTreeMap<Jurisdiction, RegionSet> = BTreeMap::new();
        for (ordinal, region) in regions.iter().enumerate() {
            let index = RegionIndex::new(ordinal).expect("the length was asserted above");
            for jurisdiction in &region.jurisdictions {
                within.entry(jurisdiction.clone()).or_insert(RegionSet::EMPTY).insert(index);
            }
        }
        Catalogue { regions, within }
    }

    /// The region of this name.
    pub fn get(&self, id: &RegionId) -> Option<&Region> {
        self.index_of(id).map(|index| self.region(index))
    }

    /// The ordinal of the region of this name.
    pub fn index_of(&self, id: &RegionId) -> Option<RegionIndex> {
        self.regions.binary_search_by(|region| region.id.cmp(id)).ok().and_then(RegionIndex::new)
    }

    /// The region with this ordinal, which must come from this catalogue.
    pub fn region(&self, index: RegionIndex) -> &Region {
        &self.regions[index.as_usize()]
    }

    /// Every region with its ordinal, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (RegionIndex, &Region)> {
        self.regions.iter().enumerate().map(|(ordinal, region)| {
            (RegionIndex::new(ordinal).expect("a catalogue is never longer than MAX_REGIONS"), region)
        })
    }

    /// How many regions there are.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether there is no region; the reader refuses such a catalogue.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Every region, as a set.
    pub fn all(&self) -> RegionSet {
        RegionSet::all(self.len())
    }

    /// The regions inside a jurisdiction; none if no region lies there.
    pub fn within(&self, jurisdiction: &Jurisdiction) -> RegionSet {
        self.within.get(jurisdiction).copied().unwrap_or(RegionSet::EMPTY)
    }

    /// Every jurisdiction in which a region lies, in order.
    pub fn jurisdictions(&self) -> impl Iterator<Item = &Jurisdiction> {
        self.within.keys()
    }

    /// The names that somebody who typed `text` may have meant: a slip of the finger, a name without its cloud, or a
    /// city. At most three, best first.
    pub fn nearest_names(&self, text: &str) -> Vec<&str> {
        let named: Vec<&str> = self
            .regions
            .iter()
            .filter(|region| {
                region.id.name().eq_ignore_ascii_case(text) || region.city.eq_ignore_ascii_case(text)
            })
            .map(|region| region.id.as_str())
            .take(suggest::MAX_SUGGESTIONS)
            .collect();
        if named.is_empty() {
            suggest::nearest(text, self.regions.iter().map(|region| region.id.as_str()))
        } else {
            named
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinal_leads_back_to_its_region() {
        let catalogue = Catalogue::builtin();
        for (index, region) in catalogue.iter() {
            assert_eq!(catalogue.index_of(&region.id), Some(index));
            assert_eq!(catalogue.region(index).id, region.id);
        }
        assert_eq!(catalogue.index_of(&"aws/mars-1".parse().unwrap()), None);
    }

    #[test]
    fn the_narrowest_jurisdiction_of_a_region_is_the_one_of_its_row() {
        let catalogue = Catalogue::builtin();
        let narrowest =
            |id: &str| catalogue.get(&id.parse().unwrap()).unwrap().narrowest().as_str().to_owned();
        assert_eq!(
            (narrowest("aws/us-east-1"), narrowest("aws/eu-central-1")),
            ("us-va".into(), "de".into())
        );
    }

    #[test]
    fn a_misspelt_name_a_bare_name_and_a_city_lead_to_the_region() {
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
