//! Regions that served a request, according to its response: one, or several for a split request.

use std::fmt;

use regions::RegionId;

/// Maximum number of distinct regions, that of a catalogue; bounds the memory if a server invents names.
pub const REGIONS_MAX: usize = 512;

/// Maximum number of distinct sets of regions. Few regions form many sets, and a longer table is not readable.
pub const TOGETHER_MAX: usize = 64;

/// Maximum number of regions in one response; a request has no more parts.
const NAMED_MAX: usize = 16;

/// Regions that served a request, according to its response.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Served {
    /// One region.
    By(RegionId),
    /// Several regions, a part each: at least two, in order of names.
    Together(Vec<RegionId>),
    /// A region above [`REGIONS_MAX`], a set above [`REGION_SETS_MAX`], or more regions than are parsed.
    ByAnother,
    /// The response names no region, or there is no response.
    Unnamed,
}

impl Served {
    /// Parses the response header: one region, or one per part separated by commas.
    pub fn read(header: &str) -> Served {
        let mut regions = Vec::new();
        for name in header.split(',') {
            let Ok(region) = name.trim().parse::<RegionId>() else { return Served::Unnamed };
            if let Err(place) = regions.binary_search(&region) {
                regions.insert(place, region);
            }
            if regions.len() > NAMED_MAX {
                return Served::ByAnother;
            }
        }
        match regions.len() {
            1 => regions.pop().map_or(Served::Unnamed, Served::By),
            _ => Served::Together(regions),
        }
    }

    /// Returns all known regions.
    pub fn regions(&self) -> &[RegionId] {
        match self {
            Served::By(region) => std::slice::from_ref(region),
            Served::Together(regions) => regions,
            Served::ByAnother | Served::Unnamed => &[],
        }
    }

    /// Returns the limit of distinct entries of this type; `None` for those without a limit.
    pub(super) fn alike_max(&self) -> Option<usize> {
        match self {
            Served::By(_) => Some(REGIONS_MAX),
            Served::Together(_) => Some(TOGETHER_MAX),
            Served::ByAnother | Served::Unnamed => None,
        }
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Served::By(region) => write!(f, "{region}"),
            Served::Together(regions) => {
                for (place, region) in regions.iter().enumerate() {
                    write!(f, "{}{region}", if place == 0 { "" } else { " + " })?;
                }
                Ok(())
            }
            Served::ByAnother => f.write_str("(further regions)"),
            Served::Unnamed => f.write_str("(no region)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_each_region_that_had_a_part_in_it() {
        let check =
            |header: &str, expected: &str| assert_eq!(Served::read(header).to_string(), expected, "{header}");
        check("aws/us-east-1", "aws/us-east-1");
        check(" aws/us-east-1 , gcp/europe-west4", "aws/us-east-1 + gcp/europe-west4");
        check("gcp/europe-west4,aws/us-east-1,gcp/europe-west4", "aws/us-east-1 + gcp/europe-west4");
        check("aws/us-east-1,aws/us-east-1", "aws/us-east-1");
        for wrong in ["", ",", "aws/us-east-1,", "somewhere", "aws/us-east-1;gcp/europe-west4"] {
            check(wrong, "(no region)");
        }
        let many =
            |count: usize| (0..count).map(|number| format!("a/{number}")).collect::<Vec<_>>().join(",");
        assert_eq!(Served::read(&many(NAMED_MAX)).regions().len(), NAMED_MAX);
        assert_eq!(Served::read(&many(NAMED_MAX + 1)), Served::ByAnother);
    }
}
