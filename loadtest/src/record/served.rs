//! Who served a request, as far as its answer says: a region, or several of them in pieces.

use std::fmt;

use regions::RegionId;

/// How many regions are told apart. A catalogue has at most as many; a server that invents names costs no more memory.
pub const REGIONS_MAX: usize = 512;

/// How many sets of regions are told apart that computed an answer together. Few regions make many sets, and a table with more
/// lines says nothing.
pub const TOGETHER_MAX: usize = 64;

/// How many regions one answer may name; a request has no more pieces than that.
const NAMED_MAX: usize = 16;

/// Who served a request, as far as its answer says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Served {
    /// This region.
    By(RegionId),
    /// These regions, a part each: at least two, in the order of their names.
    Together(Vec<RegionId>),
    /// A region beyond the first [`REGIONS_MAX`], a set beyond the first [`TOGETHER_MAX`], or more regions than are read.
    ByAnother,
    /// The answer named none, or there was no answer.
    Unnamed,
}

impl Served {
    /// What an answer's header says: a region, or several with commas between, one for each piece.
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

    /// All regions that are known to have had a part in it.
    pub fn regions(&self) -> &[RegionId] {
        match self {
            Served::By(region) => std::slice::from_ref(region),
            Served::Together(regions) => regions,
            Served::ByAnother | Served::Unnamed => &[],
        }
    }

    /// Of how many like this one a record tells apart; none where there is no other like it.
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
