//! Regions that served a request, according to its response: one, or several for a split request.

use std::fmt;

use regions::RegionId;

/// Maximum number of distinct regions, that of a catalogue; bounds the memory if a server invents names.
pub const REGIONS_MAX: usize = 512;

/// Maximum number of distinct sets of regions. Few regions form many sets, and a longer table is not readable.
pub const REGION_SETS_MAX: usize = 64;

/// Maximum number of regions in one response; a request has no more parts.
const REGIONS_PER_RESPONSE_MAX: usize = 16;

/// Regions that served a request, according to its response.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServingRegions {
    /// One region.
    One(RegionId),
    /// Several regions, a part each: at least two, in order of names.
    Several(Vec<RegionId>),
    /// A region above [`REGIONS_MAX`], a set above [`REGION_SETS_MAX`], or more regions than are parsed.
    Other,
    /// The response names no region, or there is no response.
    Unknown,
}

impl ServingRegions {
    /// Parses the response header: one region, or one per part separated by commas.
    pub fn parse(header: &str) -> ServingRegions {
        let mut regions = Vec::new();
        for name in header.split(',') {
            let Ok(region) = name.trim().parse::<RegionId>() else { return ServingRegions::Unknown };
            if let Err(index) = regions.binary_search(&region) {
                regions.insert(index, region);
            }
            if regions.len() > REGIONS_PER_RESPONSE_MAX {
                return ServingRegions::Other;
            }
        }
        match regions.len() {
            1 => regions.pop().map_or(ServingRegions::Unknown, ServingRegions::One),
            _ => ServingRegions::Several(regions),
        }
    }

    /// Returns all known regions.
    pub fn regions(&self) -> &[RegionId] {
        match self {
            ServingRegions::One(region) => std::slice::from_ref(region),
            ServingRegions::Several(regions) => regions,
            ServingRegions::Other | ServingRegions::Unknown => &[],
        }
    }

    /// Returns the limit of distinct entries of this type; `None` for those without a limit.
    pub(super) fn distinct_max(&self) -> Option<usize> {
        match self {
            ServingRegions::One(_) => Some(REGIONS_MAX),
            ServingRegions::Several(_) => Some(REGION_SETS_MAX),
            ServingRegions::Other | ServingRegions::Unknown => None,
        }
    }
}

impl fmt::Display for ServingRegions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServingRegions::One(region) => write!(f, "{region}"),
            ServingRegions::Several(regions) => {
                for (index, region) in regions.iter().enumerate() {
                    write!(f, "{}{region}", if index == 0 { "" } else { " + " })?;
                }
                Ok(())
            }
            ServingRegions::Other => f.write_str("(further regions)"),
            ServingRegions::Unknown => f.write_str("(no region)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_regions_of_the_header_are_parsed() {
        let check = |header: &str, expected: &str| {
            assert_eq!(ServingRegions::parse(header).to_string(), expected, "{header}")
        };
        check("aws/us-east-1", "aws/us-east-1");
        check(" aws/us-east-1 , gcp/europe-west4", "aws/us-east-1 + gcp/europe-west4");
        check("gcp/europe-west4,aws/us-east-1,gcp/europe-west4", "aws/us-east-1 + gcp/europe-west4");
        check("aws/us-east-1,aws/us-east-1", "aws/us-east-1");
        for wrong in ["", ",", "aws/us-east-1,", "somewhere", "aws/us-east-1;gcp/europe-west4"] {
            check(wrong, "(no region)");
        }
        let many =
            |count: usize| (0..count).map(|number| format!("a/{number}")).collect::<Vec<_>>().join(",");
        assert_eq!(
            ServingRegions::parse(&many(REGIONS_PER_RESPONSE_MAX)).regions().len(),
            REGIONS_PER_RESPONSE_MAX
        );
        assert_eq!(ServingRegions::parse(&many(REGIONS_PER_RESPONSE_MAX + 1)), ServingRegions::Other);
    }
}
