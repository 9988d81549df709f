//! Residency: which regions may see a request. The residency policy, not a preference.
//!
//! A policy is read from text: `eu,aws/us-east-1` permits every region in the European Union and one more. Several
//! policies meet in one request (the deployment's, the tenant's, the one in the caller's header), and each may only
//! *narrow*: what remains is the intersection of what they permit, never the union. A list of areas cannot express such
//! an intersection (which areas are in `eu` and in `eea`?), and resolving it to region names would forget why. So a policy
//! is a list of *conditions*, written `eu & de,fr`: a region must lie in one of the areas of each.
//!
//! Nothing here looks at health, load or distance, and a policy that permits no region is a refusal. An empty text is no
//! policy at all and is never read as "anywhere": a field that was lost must not free what it locked. (Google's outage of
//! 12 June 2025 began with a blank policy field.)

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::catalogue::Catalogue;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::region_list;
use crate::set::RegionSet;
use crate::suggest::did_you_mean;

/// Longest policy text, in bytes, as it is given and as it is written back (the canonical form, which can be the longer one:
/// `eu&de` becomes `de & eu`). So whatever was read once is read again wherever it is sent. Every region of the largest cloud by name fits twice, and so does any header.
pub const MAX_POLICY_LEN: usize = 4096;

/// How a policy without a condition is written.
const ANYWHERE: &str = "anywhere";

/// Something that a policy can permit: all of a jurisdiction, or one region.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Area {
    /// Every region inside.
    Jurisdiction(Jurisdiction),
    /// This region alone.
    Region(RegionId),
}

/// Which regions may see a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResidencyPolicy {
    /// All of them.
    Anywhere,
    /// Those that meet every condition.
    Only(Conditions),
}

/// Conditions that must all be met. There is at least one, and each names at least one area.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conditions(BTreeSet<BTreeSet<Area>>);

/// A text that is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// An area is missing where one must stand.
    #[error(
        "an area is missing: write jurisdictions or regions with commas between them, such as eu,aws/us-east-1"
    )]
    MissingArea,
    /// An area is of no known form.
    #[error(
        "`{0}` is not an area: write a jurisdiction, such as eu or us-va, or a region, such as aws/us-east-1"
    )]
    NotAnArea(String),
    /// The text is too long.
    #[error(
        "a residency policy of {0} bytes (in canonical form, such as `de,fr & eu`) is too long: name jurisdictions instead of regions; {MAX_POLICY_LEN} bytes fit"
    )]
    TooLong(usize),
}

impl ResidencyPolicy {
    /// The policy of one condition: any of these areas. An empty list permits nothing that could be written down, so it
    /// is an error and not a policy.
    pub fn any_of(areas: impl IntoIterator<Item = Area>) -> Result<ResidencyPolicy, PolicyError> {
        let areas: BTreeSet<Area> = areas.into_iter().collect();
        if areas.is_empty() {
            return Err(PolicyError::MissingArea);
        }
        Ok(ResidencyPolicy::Only(Conditions(BTreeSet::from([areas]))))
    }

    /// The regions that may see the request.
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

    /// Both policies at once. What they permit together is the intersection of what each permits.
    #[must_use]
    pub fn narrow(&self, other: &ResidencyPolicy) -> ResidencyPolicy {
        match (self, other) {
            (ResidencyPolicy::Anywhere, policy) | (policy, ResidencyPolicy::Anywhere) => policy.clone(),
            (ResidencyPolicy::Only(Conditions(ours)), ResidencyPolicy::Only(Conditions(theirs))) => {
                ResidencyPolicy::Only(Conditions(ours | theirs))
            }
        }
    }

    /// Both policies at once, as [`ResidencyPolicy::narrow`] has it, for a policy that is written down or sent.
    ///
    /// # Errors
    ///
    /// When the two together are longer than [`MAX_POLICY_LEN`]: nobody could read them back.
    pub fn joined(&self, other: &ResidencyPolicy) -> Result<ResidencyPolicy, PolicyError> {
        self.narrow(other).that_fits()
    }

    fn that_fits(self) -> Result<ResidencyPolicy, PolicyError> {
        match self.to_string().len() {
            0..=MAX_POLICY_LEN => Ok(self),
            len => Err(PolicyError::TooLong(len)),
        }
    }

    /// The areas, if any of them will do and nothing else is asked for.
    pub fn only_condition(&self) -> Option<&BTreeSet<Area>> {
        match self {
            ResidencyPolicy::Anywhere => None,
            ResidencyPolicy::Only(Conditions(conditions)) => {
                conditions.first().filter(|_| conditions.len() == 1)
            }
        }
    }

    /// What is wrong with the policy in the light of a catalogue: areas in which no region lies. Such an area permits
    /// nothing, which is valid but hardly what its author meant.
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
    /// The regions inside.
    pub fn regions(&self, catalogue: &Catalogue) -> RegionSet {
        match self {
            Area::Jurisdiction(jurisdiction) => catalogue.within(jurisdiction),
            Area::Region(region) => catalogue.index_of(region).into_iter().collect(),
        }
    }

    /// Whether a region of the catalogue lies inside; if none does, what may have been meant.
    pub fn check(&self, catalogue: &Catalogue) -> Result<(), String> {
        match self {
            Area::Region(region) => region_list::known(region.as_str(), catalogue).map(|_| ()),
            Area::Jurisdiction(jurisdiction) if catalogue.within(jurisdiction).is_empty() => {
                let hint =
                    did_you_mean(jurisdiction.as_str(), catalogue.jurisdictions().map(Jurisdiction::as_str));
                Err(format!("no region of the catalogue lies in `{jurisdiction}`{hint}"))
            }
            Area::Jurisdiction(_) => Ok(()),
        }
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
        ResidencyPolicy::Only(Conditions(conditions?)).that_fits()
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
        for (place, areas) in conditions.iter().enumerate() {
            f.write_str(if place == 0 { "" } else { " & " })?;
            for (place, area) in areas.iter().enumerate() {
                f.write_str(if place == 0 { "" } else { "," })?;
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
    fn a_policy_is_written_back_as_it_was_read_but_sorted() {
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
    fn a_blank_is_never_read_as_anywhere() {
        for text in ["", " ", ",", "eu,", "eu &", "& eu", "eu,,de"] {
            assert_eq!(text.parse::<ResidencyPolicy>(), Err(PolicyError::MissingArea), "{text:?}");
        }
        assert_eq!(ResidencyPolicy::any_of([]), Err(PolicyError::MissingArea));
        for text in ["anywhere,eu", "eu & anywhere", "europe!", "aws/", "e"] {
            assert!(matches!(text.parse::<ResidencyPolicy>(), Err(PolicyError::NotAnArea(_))), "{text:?}");
        }
    }

    #[test]
    fn a_policy_at_the_limit_is_read_and_one_byte_more_is_not() {
        let at_limit = format!("eu,{}de", " ".repeat(MAX_POLICY_LEN - 5));
        assert_eq!(policy(&at_limit), policy("de,eu"));
        let past_limit = format!("{at_limit} ");
        assert_eq!(past_limit.parse::<ResidencyPolicy>(), Err(PolicyError::TooLong(MAX_POLICY_LEN + 1)));
    }

    /// So many conditions of one jurisdiction each, all different, without a space.
    fn conditions(count: usize) -> String {
        let letters = || 'a'..='z';
        let codes = letters()
            .flat_map(|a| letters().flat_map(move |b| letters().map(move |c| format!("us-{a}{b}{c}"))));
        codes.take(count).collect::<Vec<_>>().join("&")
    }

    #[test]
    fn a_policy_is_limited_by_what_is_written_back() {
        // Six bytes each, and three more for ` & ` in canonical form.
        let (fits, one_more) = (conditions(455), conditions(456));
        assert_eq!(policy(&fits).to_string().len(), 4092);
        assert_eq!(policy(&policy(&fits).to_string()), policy(&fits));
        assert!(one_more.len() <= MAX_POLICY_LEN, "as it is given, it would fit");
        assert_eq!(one_more.parse::<ResidencyPolicy>(), Err(PolicyError::TooLong(4101)));
    }

    #[test]
    fn policies_are_joined_as_long_as_what_is_written_of_them_fits() {
        let half = policy(&conditions(455));
        assert_eq!(half.joined(&ResidencyPolicy::Anywhere), Ok(half.clone()));
        assert_eq!(half.joined(&policy("eu")).map_err(|error| error.to_string().contains("4097")), Err(true));
        assert_eq!(policy("eu").joined(&policy("de,fr")), Ok(policy("de,fr & eu")));
    }

    #[test]
    fn a_policy_permits_the_regions_inside_its_areas_and_no_other() {
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
    fn an_area_in_which_no_region_lies_is_told_with_what_was_probably_meant() {
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
