//! Residency policies: which regions may see a request. A policy is a hard constraint, not a preference.
//!
//! A policy is read from text: `eu,aws/us-east-1` permits every region in the European Union and one more. Several
//! policies apply to one request (the deployment's, the tenant's, the one in the request header), and each may only
//! *narrow*: the allowed regions are the intersection of the permitted sets, never the union. A list of areas cannot
//! express such an intersection (which areas are in `eu` and in `eea`?), and resolving it to region names would lose the
//! reason. So a policy is a list of *conditions*, written `eu & de,fr`: a region must lie in one of the areas of each.
//!
//! This module does not consider health, load or distance. A policy that permits no region rejects the request. An empty
//! text is an error and is never read as "anywhere": losing a field must not widen the policy. (Google's outage of
//! 12 June 2025 began with a blank policy field.)

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use configuration::{ConfigFile, did_you_mean, section};

use crate::catalogue::Catalogue;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::region_list;
use crate::set::RegionSet;

/// Maximum length of a policy in bytes, both as given and in the canonical form. The canonical form can be the longer
/// one: `eu&de` becomes `de & eu`. Checking both ensures that every accepted policy is accepted again by every process
/// that it is sent to. The names of all regions of the largest cloud fit twice, and so does any header.
pub const MAX_POLICY_LEN: usize = 4096;

/// Text form of a policy without conditions.
const ANYWHERE: &str = "anywhere";

/// Area that a policy can permit: a jurisdiction, or one region.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Area {
    /// Every region in the jurisdiction.
    Jurisdiction(Jurisdiction),
    /// One region.
    Region(RegionId),
}

/// Residency policy: the regions that may see a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResidencyPolicy {
    /// All regions.
    Anywhere,
    /// Regions that meet every condition.
    Only(Conditions),
}

/// Conditions of a policy, all of which a region must meet. At least one condition, each with at least one area.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions(BTreeSet<BTreeSet<Area>>);

/// Error for a text that is not a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// An area of a residency policy is empty, for example between two commas.
    #[error(
        "an area is missing: write jurisdictions or regions with commas between them, such as eu,aws/us-east-1"
    )]
    MissingArea,
    /// The text is neither a jurisdiction nor a region.
    #[error(
        "`{0}` is not an area: write a jurisdiction, such as eu or us-va, or a region, such as aws/us-east-1"
    )]
    NotAnArea(String),
    /// The residency policy is longer than the limit, as written or in its canonical form.
    #[error(
        "a residency policy of {0} bytes (in canonical form, such as `de,fr & eu`) is too long: name jurisdictions instead of regions; {MAX_POLICY_LEN} bytes fit"
    )]
    TooLong(usize),
}

impl ResidencyPolicy {
    /// Returns the policy with one condition: any of these areas. An empty list is an error: it would permit nothing
    /// and has no text form.
    pub fn any_of(areas: impl IntoIterator<Item = Area>) -> Result<ResidencyPolicy, PolicyError> {
        let areas: BTreeSet<Area> = areas.into_iter().collect();
        if areas.is_empty() {
            return Err(PolicyError::MissingArea);
        }
        Ok(ResidencyPolicy::Only(Conditions(BTreeSet::from([areas]))))
    }

    /// Returns the regions that may see the request.
    pub fn permitted(&self, catalogue: &Catalogue) -> RegionSet {
        match self {
            ResidencyPolicy::Anywhere => catalogue.all(),
            ResidencyPolicy::Only(Conditions(conditions)) => {
                conditions.iter().fold(catalogue.all(), |permitted, areas| {
                    let within = areas.iter().map(|area| area.regions(catalogue));
                    permitted.intersect(within.fold(RegionSet::EMPTY, RegionSet::union))
                })
            }
        }
    }

    /// Returns the conjunction of both policies. It permits the intersection of the two permitted sets.
    #[must_use]
    pub fn narrow(&self, other: &ResidencyPolicy) -> ResidencyPolicy {
        match (self, other) {
            (ResidencyPolicy::Anywhere, policy) | (policy, ResidencyPolicy::Anywhere) => policy.clone(),
            (ResidencyPolicy::Only(Conditions(ours)), ResidencyPolicy::Only(Conditions(theirs))) => {
                ResidencyPolicy::Only(Conditions(ours | theirs))
            }
        }
    }

    /// Returns the conjunction of both policies like [`ResidencyPolicy::narrow`], for a policy that is stored or sent.
    ///
    /// # Errors
    ///
    /// If the canonical form is longer than [`MAX_POLICY_LEN`], so that no process could read it back.
    pub fn narrow_checked(&self, other: &ResidencyPolicy) -> Result<ResidencyPolicy, PolicyError> {
        self.narrow(other).check_len()
    }

    fn check_len(self) -> Result<ResidencyPolicy, PolicyError> {
        match self.to_string().len() {
            0..=MAX_POLICY_LEN => Ok(self),
            len => Err(PolicyError::TooLong(len)),
        }
    }

    /// Returns the areas if the policy has exactly one condition.
    pub fn only_condition(&self) -> Option<&BTreeSet<Area>> {
        match self {
            ResidencyPolicy::Anywhere => None,
            ResidencyPolicy::Only(Conditions(conditions)) => {
                conditions.first().filter(|_| conditions.len() == 1)
            }
        }
    }

    /// Returns the problems of the policy with respect to a catalogue: areas that contain no region. Such an area is
    /// valid and permits nothing, which is rarely intended.
    pub fn check(&self, catalogue: &Catalogue) -> Vec<String> {
        match self {
            ResidencyPolicy::Anywhere => Vec::new(),
            ResidencyPolicy::Only(Conditions(conditions)) => {
                let areas: BTreeSet<&Area> = conditions.iter().flatten().collect();
                areas.into_iter().filter_map(|area| area.check(catalogue).err()).collect()
            }
        }
    }
}

impl Area {
    /// Returns the regions in the area.
    pub fn regions(&self, catalogue: &Catalogue) -> RegionSet {
        match self {
            Area::Jurisdiction(jurisdiction) => catalogue.within(jurisdiction),
            Area::Region(region) => catalogue.index_of(region).into_iter().collect(),
        }
    }

    /// Checks that the area contains a region of the catalogue; the error suggests similar names.
    pub fn check(&self, catalogue: &Catalogue) -> Result<(), String> {
        match self {
            Area::Region(region) => region_list::find_region(region.as_str(), catalogue).map(|_| ()),
            Area::Jurisdiction(jurisdiction) if catalogue.within(jurisdiction).is_empty() => {
                let hint =
                    did_you_mean(jurisdiction.as_str(), catalogue.jurisdictions().map(Jurisdiction::as_str));
                Err(format!("no region of the catalogue lies in `{jurisdiction}`{hint}"))
            }
            Area::Jurisdiction(_) => Ok(()),
        }
    }
}

section! {
    /// Residency policy of a deployment or a tenant.
    pub struct ResidencyEntry {
        /// Areas whose regions may see requests: jurisdictions (`de`, `us-va`, `eu`) or regions (`aws/us-east-1`).
        allow: Vec<String>, in 1.., like "[\"eu\"]", fix "since an empty list permits nothing, or remove `residency` to permit all regions";
    }
}

impl ResidencyEntry {
    /// Validates the key `residency` of the table at `path`: of at most `len_max` bytes, with areas that contain regions.
    /// An absent key permits all regions.
    pub fn policy(
        given: Option<ResidencyEntry>,
        document: &ConfigFile<'_>,
        path: &str,
        len_max: usize,
        catalogue: &Catalogue,
    ) -> Option<ResidencyPolicy> {
        let Some(ResidencyEntry { allow }) = given else { return Some(ResidencyPolicy::Anywhere) };
        let path = format!("{path}.residency.allow");
        let area = |(index, text): (usize, &String)| {
            let area = text.parse::<Area>().map_err(|error| error.to_string());
            area.and_then(|area| area.check(catalogue).map(|()| area))
                .map_err(|problem| document.problem(&format!("{path}[{index}]"), problem))
                .ok()
        };
        let areas: Vec<_> = allow.iter().enumerate().map(area).collect();
        let policy = ResidencyPolicy::any_of(areas.into_iter().collect::<Option<Vec<Area>>>()?).ok()?;
        let len = policy.to_string().len();
        if len > len_max {
            let fix = "name jurisdictions instead of regions";
            document.problem(&path, format!("has {len} bytes, of {len_max} that fit; {fix}"));
        }
        (len <= len_max).then_some(policy)
    }
}

impl FromStr for Area {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Area, PolicyError> {
        let not_an_area = || PolicyError::NotAnArea(text.chars().take(64).collect());
        if text.is_empty() {
            Err(PolicyError::MissingArea)
        } else if text.contains('/') {
            text.parse().map(Area::Region).map_err(|_| not_an_area())
        } else {
            text.parse().map(Area::Jurisdiction).map_err(|_| not_an_area())
        }
    }
}

impl FromStr for ResidencyPolicy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<ResidencyPolicy, PolicyError> {
        if text.len() > MAX_POLICY_LEN {
            return Err(PolicyError::TooLong(text.len()));
        }
        if text.trim() == ANYWHERE {
            return Ok(ResidencyPolicy::Anywhere);
        }
        let conditions: Result<BTreeSet<BTreeSet<Area>>, PolicyError> = text
            .split('&')
            .map(|condition| condition.split(',').map(|area| area.trim().parse::<Area>()).collect())
            .collect();
        ResidencyPolicy::Only(Conditions(conditions?)).check_len()
    }
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Area::Jurisdiction(jurisdiction) => jurisdiction.fmt(f),
            Area::Region(region) => region.fmt(f),
        }
    }
}

impl fmt::Display for ResidencyPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let conditions = match self {
            ResidencyPolicy::Anywhere => return f.write_str(ANYWHERE),
            ResidencyPolicy::Only(Conditions(conditions)) => conditions,
        };
        for (index, areas) in conditions.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { " & " })?;
            for (index, area) in areas.iter().enumerate() {
                f.write_str(if index == 0 { "" } else { "," })?;
                area.fmt(f)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> ResidencyPolicy {
        text.parse().unwrap()
    }

    #[test]
    fn the_canonical_form_of_a_policy_is_sorted_and_parses_back() {
        let cases = [
            ("anywhere", "anywhere"),
            ("eu", "eu"),
            (" EU , aws/us-east-1,de", "de,eu,aws/us-east-1"),
            ("eu & de,fr", "de,fr & eu"),
            ("eu,eu & eu", "eu"),
        ];
        for (given, expected) in cases {
            assert_eq!(policy(given).to_string(), expected);
            assert_eq!(policy(expected), policy(given));
        }
    }

    #[test]
    fn an_empty_text_is_never_read_as_anywhere() {
        for text in ["", " ", ",", "eu,", "eu &", "& eu", "eu,,de"] {
            assert_eq!(text.parse::<ResidencyPolicy>(), Err(PolicyError::MissingArea), "{text:?}");
        }
        assert_eq!(ResidencyPolicy::any_of([]), Err(PolicyError::MissingArea));
        for text in ["anywhere,eu", "eu & anywhere", "europe!", "aws/", "e"] {
            assert!(matches!(text.parse::<ResidencyPolicy>(), Err(PolicyError::NotAnArea(_))), "{text:?}");
        }
    }

    #[test]
    fn a_policy_at_the_length_limit_is_accepted_and_one_byte_more_is_rejected() {
        let at_limit = format!("eu,{}de", " ".repeat(MAX_POLICY_LEN - 5));
        assert_eq!(policy(&at_limit), policy("de,eu"));
        let past_limit = format!("{at_limit} ");
        assert_eq!(past_limit.parse::<ResidencyPolicy>(), Err(PolicyError::TooLong(MAX_POLICY_LEN + 1)));
    }

    /// Returns `count` different conditions of one jurisdiction each, without spaces.
    fn conditions(count: usize) -> String {
        let letters = || 'a'..='z';
        let codes = letters()
            .flat_map(|a| letters().flat_map(move |b| letters().map(move |c| format!("us-{a}{b}{c}"))));
        codes.take(count).collect::<Vec<_>>().join("&")
    }

    #[test]
    fn the_length_limit_applies_to_the_canonical_form() {
        // Six bytes per condition, and three more for ` & ` in canonical form.
        let (fits, one_more) = (conditions(455), conditions(456));
        assert_eq!(policy(&fits).to_string().len(), 4092);
        assert_eq!(policy(&policy(&fits).to_string()), policy(&fits));
        assert!(one_more.len() <= MAX_POLICY_LEN, "the given form alone would fit");
        assert_eq!(one_more.parse::<ResidencyPolicy>(), Err(PolicyError::TooLong(4101)));
    }

    #[test]
    fn narrowing_fails_when_the_canonical_form_is_too_long() {
        let half = policy(&conditions(455));
        assert_eq!(half.narrow_checked(&ResidencyPolicy::Anywhere), Ok(half.clone()));
        let too_long = half.narrow_checked(&policy("eu"));
        assert_eq!(too_long.map_err(|error| error.to_string().contains("4097")), Err(true));
        assert_eq!(policy("eu").narrow_checked(&policy("de,fr")), Ok(policy("de,fr & eu")));
    }

    #[test]
    fn a_policy_permits_exactly_the_regions_in_its_areas() {
        let catalogue = Catalogue::builtin();
        let cases = [
            ("eu", "aws/eu-central-1", true),
            ("eu", "aws/eu-west-2", false),
            ("uk", "aws/eu-west-2", true),
            ("eea", "azure/norwayeast", true),
            ("eu", "azure/norwayeast", false),
            ("eu", "azure/switzerlandnorth", false),
            ("us-va", "aws/us-east-1", true),
            ("us-va", "aws/us-east-2", false),
            ("aws/us-east-1", "oci/us-ashburn-1", false),
            ("eu & de", "gcp/europe-west3", true),
            ("eu & de", "gcp/europe-west4", false),
            ("eu & us", "gcp/europe-west4", false),
            ("anywhere", "oci/ap-tokyo-1", true),
        ];
        for (text, region, expected) in cases {
            let index = catalogue.index_of(&region.parse().unwrap()).unwrap();
            assert_eq!(policy(text).permitted(&catalogue).contains(index), expected, "{text} and {region}");
        }
    }

    #[test]
    fn an_area_without_regions_is_reported_with_suggestions() {
        let catalogue = Catalogue::builtin();
        assert_eq!(policy("eu,us-va,aws/us-east-1 & eea").check(&catalogue), Vec::<String>::new());
        let problems = policy("eu,eau,aq & aws/us-esat-1").check(&catalogue);
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems.iter().any(|problem| problem.contains("`aq`")), "{problems:?}");
        assert!(problems.iter().any(|problem| problem.contains("`eau`; did you mean")), "{problems:?}");
        assert!(
            problems.iter().any(|problem| problem.contains("did you mean aws/us-east-1")),
            "{problems:?}"
        );
    }
}
