//! Comma-separated list of regions, as typed by a person: `aws/us-east-1,gcp/europe-west4`.

use std::collections::BTreeSet;

use crate::catalogue::Catalogue;
use crate::id::RegionId;

/// Parses a comma-separated list of regions, in the order given; returns all of its problems on failure.
pub fn parse_region_list(text: &str, catalogue: &Catalogue) -> Result<Vec<RegionId>, Vec<String>> {
    let mut regions: Vec<RegionId> = Vec::new();
    let mut problems: Vec<String> = Vec::new();
    let mut listed: BTreeSet<&str> = BTreeSet::new();
    for (position, item) in text.split(',').map(str::trim).enumerate() {
        if item.is_empty() {
            problems.push(format!(
                "region {} of the list is empty: write cloud/name, such as gcp/europe-west4",
                position + 1
            ));
            continue;
        }
        if !listed.insert(item) {
            problems.push(format!("`{item}` is in the list twice: keep one"));
            continue;
        }
        match find_region(item, catalogue) {
            Ok(region) => regions.push(region),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(regions) } else { Err(problems) }
}

/// Returns the region with this name, or an error with up to three suggestions.
pub fn find_region(text: &str, catalogue: &Catalogue) -> Result<RegionId, String> {
    let parsed = text.parse::<RegionId>();
    if let Ok(id) = &parsed
        && catalogue.index_of(id).is_some()
    {
        return Ok(id.clone());
    }
    let near = catalogue.nearest_names(text);
    Err(match parsed {
        _ if !near.is_empty() => {
            format!("no region `{text}` in the catalogue; did you mean {}?", near.join(" or "))
        }
        Ok(_) => {
            format!("no region `{text}` in the catalogue; configs/regions.toml lists all of them")
        }
        Err(error) => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<&[&str], &[&str]>) {
        let found = parse_region_list(text, &Catalogue::builtin());
        match (found, expected) {
            (Ok(regions), Ok(expected)) => {
                let names: Vec<&str> = regions.iter().map(RegionId::as_str).collect();
                assert_eq!(names, expected, "{text}");
            }
            (Err(problems), Err(expected)) => {
                assert_eq!(problems.len(), expected.len(), "{text}: {problems:?}");
                for (problem, part) in problems.iter().zip(expected) {
                    assert!(problem.contains(part), "{text}: `{problem}` does not contain `{part}`");
                }
            }
            (found, expected) => panic!("{text}: {found:?} is not {expected:?}"),
        }
    }

    #[test]
    fn a_list_keeps_its_order() {
        check("oci/ap-tokyo-1, aws/us-east-1", Ok(&["oci/ap-tokyo-1", "aws/us-east-1"]));
    }

    #[test]
    fn all_problems_of_a_list_are_reported_with_suggestions() {
        check(
            "aws/us-esat-1,,gcp/europe-west4,gcp/europe-west4,nowhere",
            Err(&[
                "did you mean aws/us-east-1",
                "region 2 of the list is empty",
                "`gcp/europe-west4` is in the list twice",
                "write cloud/name",
            ]),
        );
        check("", Err(&["region 1 of the list is empty"]));
        check("europe-west4", Err(&["did you mean gcp/europe-west4?"]));
        check("frankfurt", Err(&["did you mean aws/eu-central-1"]));
        check("mars/olympus-mons", Err(&["configs/regions.toml lists all of them"]));
    }
}
