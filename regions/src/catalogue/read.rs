//! Parser and validator of the catalogue file. Reports all problems at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::Region;
use crate::document::{self, Problem, Problems, Table};
use crate::engine::EngineKind;
use crate::geography::GeoPoint;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::set::MAX_REGIONS;

/// Maximum cost of a replica per hour. A larger value is probably in another unit.
const COST_MAX: f64 = 1e6;

/// Returns the regions of a file in order of id, at least one and at most [`MAX_REGIONS`].
pub(super) fn read(text: &str) -> Result<Vec<Region>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the catalogue".to_owned(), entries: tree.get_ref(), span: 0..0 };
    root.refuse_other_keys(&["unions", "regions"], &mut problems);

    let unions = read_unions(&root, &mut problems);
    let mut regions = read_regions(&root, &unions, &mut problems);
    regions.sort_by(|a, b| a.id.cmp(&b.id));
    problems.or(|| regions)
}

/// Members of each union, as the file lists them.
type Unions = BTreeMap<Jurisdiction, BTreeSet<Jurisdiction>>;

fn read_unions(root: &Table<'_>, problems: &mut Problems<'_>) -> Unions {
    let mut unions = Unions::new();
    let mut mentioned: Vec<(Jurisdiction, Range<usize>)> = Vec::new();
    let Some(value) = root.entries.get("unions") else {
        return unions;
    };
    let Some(table) = Table::of("`unions`".to_owned(), value, problems) else {
        return unions;
    };
    for (key, value) in table.entries {
        let name = match key.get_ref().parse::<Jurisdiction>() {
            Ok(name) if name.is_union() => name,
            Ok(name) => {
                problems
                    .note(key.span(), format!("`{name}` is a country's code: give the union another name"));
                continue;
            }
            Err(error) => {
                problems.note(key.span(), error.to_string());
                continue;
            }
        };
        let members = unions.entry(name).or_default();
        for (text, at) in table.texts(key.get_ref(), value, problems).unwrap_or_default() {
            match text.parse::<Jurisdiction>() {
                Ok(member) if !members.insert(member.clone()) => {
                    problems.note(at, format!("`{member}` is in `{}` twice: keep one", key.get_ref()));
                }
                Ok(member) => mentioned.push((member, at)),
                Err(error) => problems.note(at, error.to_string()),
            }
        }
    }
    for (member, at) in mentioned {
        if member.country().is_none() && !unions.contains_key(&member) {
            problems
                .note(at, format!("`{member}` is neither a country of ISO 3166-1 nor a union of this table"));
        }
    }
    for (key, _) in table.entries {
        let name = key.get_ref().parse::<Jurisdiction>().ok();
        if name
            .is_some_and(|name| unions.get(&name).is_some_and(|members| containing(&unions, members, &name)))
        {
            problems.note(key.span(), format!("the union `{}` contains itself: remove it", key.get_ref()));
        }
    }
    unions
}

/// Returns whether `target` is among `members` or, recursively, among their members.
fn containing(unions: &Unions, members: &BTreeSet<Jurisdiction>, target: &Jurisdiction) -> bool {
    let mut visited: BTreeSet<&Jurisdiction> = BTreeSet::new();
    let mut open: Vec<&Jurisdiction> = members.iter().collect();
    while let Some(member) = open.pop() {
        if member == target {
            return true;
        }
        if visited.insert(member) {
            open.extend(unions.get(member).into_iter().flatten());
        }
    }
    false
}

fn read_regions(root: &Table<'_>, unions: &Unions, problems: &mut Problems<'_>) -> Vec<Region> {
    let mut regions = Vec::new();
    let Some(value) = root.need("regions", "{ cloud.name = { in, at, city } }", problems) else {
        return regions;
    };
    let Some(clouds) = Table::of("`regions`".to_owned(), value, problems) else {
        return regions;
    };
    for (cloud, value) in clouds.entries {
        let what = format!("cloud {}", cloud.get_ref());
        let Some(table) = Table::of(what, value, problems) else {
            continue;
        };
        for (name, row) in table.entries {
            regions.extend(read_region(cloud.get_ref(), name, row, unions, problems));
            if regions.len() == MAX_REGIONS + 1 {
                let message = format!("more than {MAX_REGIONS} regions: remove those that you do not use");
                problems.note(name.span(), message);
            }
        }
    }
    if clouds.entries.values().all(|cloud| cloud.get_ref().as_table().is_some_and(DeTable::is_empty)) {
        problems
            .note(clouds.span, "the catalogue has no region: write at least one row under [regions.CLOUD]");
    }
    regions
}

fn read_region<'d>(
    cloud: &str,
    name: &Spanned<DeString<'d>>,
    row: &'d Spanned<DeValue<'d>>,
    unions: &Unions,
    problems: &mut Problems<'_>,
) -> Option<Region> {
    let text = format!("{cloud}/{}", name.get_ref());
    let id = text.parse::<RegionId>().map_err(|error| problems.note(name.span(), error.to_string())).ok();
    let table = Table::of(format!("region {text}"), row, problems)?;
    table.refuse_other_keys(&["in", "at", "city", "engines", "cost"], problems);
    let jurisdiction = read_jurisdiction(&table, problems);
    let engines = read_engines(&table, problems);
    let point = read_point(&table, problems);
    let city = table.need_text("city", "\"Frankfurt\"", problems);
    if let Some((_, at)) = city.as_ref().filter(|(city, _)| city.trim().is_empty()) {
        problems.note(at.clone(), format!("{}: `city` is empty: write the city", table.what));
    }
    let cost = read_cost(&table, problems);
    let (country, narrowest) = jurisdiction?;
    Some(Region {
        id: id?,
        city: city?.0.to_owned(),
        point: point?,
        jurisdictions: containers(&country, narrowest, unions),
        engines: engines?,
        country,
        cost,
    })
}

/// Reads the cost of a replica per hour, in millionths; `None` if the row has none.
fn read_cost(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<u64> {
    let value = table.entries.get("cost")?;
    let cost = number(value.get_ref()).filter(|cost| (0.0..=COST_MAX).contains(cost));
    if cost.is_none() {
        let fix = format!("write the cost of a replica per hour, from 0 to {COST_MAX}, as cost = 0.42");
        problems.note(value.span(), format!("{}: `cost` is not a price: {fix}", table.what));
    }
    cost.map(|cost| (cost * 1e6).round() as u64)
}

/// Reads the narrowest jurisdiction of a row; returns its country and itself.
fn read_jurisdiction(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<(Jurisdiction, Jurisdiction)> {
    let (text, at) = table.need_text("in", "\"de\"", problems)?;
    let jurisdiction = text.parse::<Jurisdiction>().ok();
    match jurisdiction.and_then(|narrowest| Some((narrowest.country()?, narrowest))) {
        Some(pair) => Some(pair),
        None => {
            let fix = "write a country of ISO 3166-1 (de) or a subdivision of one (us-va)";
            problems.note(at, format!("{}: `in` is `{text}`: {fix}", table.what));
            None
        }
    }
}

/// Reads the engines of a row. The CPU engine is the default.
fn read_engines(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<BTreeSet<EngineKind>> {
    let Some(value) = table.entries.get("engines") else {
        return Some(BTreeSet::from([EngineKind::Cpu]));
    };
    let mut engines = BTreeSet::new();
    for (text, at) in table.texts("engines", value, problems)? {
        match text.parse::<EngineKind>() {
            Ok(engine) => drop(engines.insert(engine)),
            Err(error) => problems.note(at, format!("{}: `engines`: {error}", table.what)),
        }
    }
    Some(engines)
}

fn read_point(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<GeoPoint> {
    let value = table.need("at", "[50.11, 8.68]", problems)?;
    let numbers: Option<Vec<f64>> =
        value.get_ref().as_array().and_then(|list| list.iter().map(|item| number(item.get_ref())).collect());
    let Some([lat, lon]) = numbers.as_deref() else {
        let message =
            format!("{}: `at` is not a point: write at = [latitude, longitude] in degrees", table.what);
        problems.note(value.span(), message);
        return None;
    };
    GeoPoint::new(*lat, *lon)
        .map_err(|error| problems.note(value.span(), format!("{}: {error}", table.what)))
        .ok()
}

fn number(value: &DeValue<'_>) -> Option<f64> {
    let digits = match value {
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
        DeValue::Float(float) => float.as_str(),
        _ => return None,
    };
    digits.parse().ok()
}

/// Returns all jurisdictions of a region: the two codes of its row, and every union with a member among them,
/// recursively.
fn containers(country: &Jurisdiction, narrowest: Jurisdiction, unions: &Unions) -> BTreeSet<Jurisdiction> {
    let mut containers = BTreeSet::from([country.clone(), narrowest]);
    loop {
        let wider: Vec<Jurisdiction> = unions
            .iter()
            .filter(|(union, members)| !containers.contains(union) && !members.is_disjoint(&containers))
            .map(|(union, _)| union.clone())
            .collect();
        if wider.is_empty() {
            return containers;
        }
        containers.extend(wider);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;

    /// Returns a catalogue file with these rows, one region per line.
    fn file(rows: &str) -> String {
        format!("[unions]\neu = [\"de\", \"fr\"]\neea = [\"eu\", \"no\"]\n[regions.x]\n{rows}\n")
    }

    /// Line of the first row in [`file`].
    const FIRST_ROW: usize = 5;

    #[track_caller]
    fn check(text: &str, expected: &[(usize, &str)]) {
        let problems = Catalogue::parse(text).expect_err("the file has mistakes");
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, (line, part)) in problems.iter().zip(expected) {
            assert_eq!(problem.line, *line, "{problem}");
            assert!(problem.message.contains(part), "`{problem}` does not contain `{part}`");
        }
    }

    #[test]
    fn a_cost_is_stored_in_millionths_and_an_invalid_one_is_rejected() {
        let row = |cost: &str| file(&format!("a = {{ in = \"de\", at = [50, 8], city = \"A\"{cost} }}"));
        let read = |cost: &str| Catalogue::parse(&row(cost)).unwrap().iter().next().unwrap().1.cost;
        assert_eq!(read(""), None);
        assert_eq!((read(", cost = 0.42"), read(", cost = 0")), (Some(420_000), Some(0)));
        assert_eq!(read(", cost = 1000000"), Some(1_000_000_000_000));
        for wrong in ["1000000.1", "-1", "nan", "\"0.42\""] {
            check(&row(&format!(", cost = {wrong}")), &[(FIRST_ROW, "cost = 0.42")]);
        }
    }

    #[test]
    fn a_region_lies_in_its_subdivision_its_country_and_nested_unions() {
        let text = file("a = { in = \"DE-he\", at = [50.11, 8], city = \"Frankfurt\" }");
        let catalogue = Catalogue::parse(&text).unwrap();
        let region = catalogue.get(&"x/a".parse().unwrap()).unwrap();
        let jurisdictions: Vec<&str> = region.jurisdictions.iter().map(Jurisdiction::as_str).collect();
        assert_eq!(jurisdictions, ["de", "de-he", "eea", "eu"]);
        assert_eq!((region.cloud(), region.city.as_str(), region.country.as_str()), ("x", "Frankfurt", "de"));
        assert_eq!((region.point.lat(), region.point.lon()), (50.11, 8.0));
        for code in ["de", "de-he", "eea", "eu"] {
            assert_eq!(catalogue.within(&code.parse().unwrap()).len(), 1, "{code}");
        }
        for code in ["fr", "no", "us", "de-by"] {
            assert!(catalogue.within(&code.parse().unwrap()).is_empty(), "{code}");
        }
    }

    #[test]
    fn all_problems_of_a_file_are_reported_with_their_lines() {
        let rows = [
            "a = { in = \"de\", at = [90.5, 0], city = \"Nowhere\" }",
            "b = { in = \"xx\", at = [0, 0], city = \"Utopia\" }",
            "c = { in = \"eu\", at = [0, 0], city = \"Europe\" }",
            "d = { at = \"50,8\", citty = \"Frankfurt\" }",
            "e = [1]",
            "\"f g\" = { in = \"de\", at = [0, 0, 0], city = \"\" }",
            "h = { in = \"fr\", at = [0, 0], city = \"Paris\" }",
            "h = { in = \"fr\", at = [0, 0], city = \"Paris\" }",
        ];
        check(
            &file(&rows.join("\n")),
            &[
                (FIRST_ROW, "90.5,0 is out of range: write a latitude from -90 to 90"),
                (FIRST_ROW + 1, "region x/b: `in` is `xx`: write a country of ISO 3166-1"),
                (FIRST_ROW + 2, "region x/c: `in` is `eu`: write a country"),
                (FIRST_ROW + 3, "region x/d: `at` is not a point: write at = [latitude, longitude]"),
                (FIRST_ROW + 3, "region x/d: `city` is missing: write city = \"Frankfurt\""),
                (FIRST_ROW + 3, "region x/d: `in` is missing: write in = \"de\""),
                (FIRST_ROW + 3, "unknown key `citty`; did you mean city?; the keys are in, at, city"),
                (FIRST_ROW + 4, "region x/e is a list: write a table"),
                (FIRST_ROW + 5, "`x/f g` is not a region: write cloud/name"),
                (FIRST_ROW + 5, "region x/f g: `at` is not a point"),
                (FIRST_ROW + 5, "region x/f g: `city` is empty"),
                (FIRST_ROW + 7, "duplicate key `h`"),
            ],
        );
    }

    #[test]
    fn an_invalid_union_is_rejected() {
        let unions = [
            "[unions]",
            "de = [\"fr\"]",
            "eu = [\"de\", \"de\", \"xx\", \"e1\"]",
            "one = [\"two\", \"de\"]",
            "two = [\"one\"]",
            "big = \"de\"",
            "[regions.x]",
            "a = { in = \"de\", at = [0, 0], city = \"Frankfurt\" }",
            "[region]",
        ];
        check(
            &unions.join("\n"),
            &[
                (2, "`de` is a country's code"),
                (3, "`de` is in `eu` twice"),
                (3, "`e1` is not a jurisdiction"),
                (3, "`xx` is neither a country of ISO 3166-1 nor a union of this table"),
                (4, "the union `one` contains itself"),
                (5, "the union `two` contains itself"),
                (6, "`big` is a string: write a list of strings"),
                (9, "unknown key `region`; did you mean regions?"),
            ],
        );
    }

    #[test]
    fn a_file_without_regions_or_with_invalid_toml_is_rejected() {
        check("", &[(1, "`regions` is missing")]);
        check("[regions]\n", &[(1, "the catalogue has no region")]);
        check("[regions.x]\n", &[(1, "the catalogue has no region")]);
        check("\n[regions.x\n", &[(2, "invalid TOML")]);
    }

    #[test]
    fn a_catalogue_at_its_limit_is_accepted_and_one_region_more_is_rejected() {
        let rows = |count: usize| -> String {
            (0..count).map(|n| format!("r{n} = {{ in = \"de\", at = [0, 0], city = \"C\" }}\n")).collect()
        };
        assert_eq!(Catalogue::parse(&file(&rows(MAX_REGIONS))).unwrap().all().len(), MAX_REGIONS);
        let problems = Catalogue::parse(&file(&rows(MAX_REGIONS + 1))).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert!(problems[0].message.contains("more than 512 regions"), "{}", problems[0]);
    }
}
