//! Reading the catalogue's file: from TOML to checked regions, or to everything that is wrong with it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::Region;
use crate::deployment::EngineKind;
use crate::document::{self, Problem, Problems, Table};
use crate::geography::GeoPoint;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::set::MAX_REGIONS;

/// The dearest hour of a replica: beyond it somebody has written another unit.
const COST_MAX: f64 = 1e6;

/// The regions of a file in order of id, at least one and at most [`MAX_REGIONS`].
pub(super) fn read(text: &str) -> Result<Vec<Region>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the catalogue".to_owned(), entries: tree.get_ref(), span: 0..0 };
    root.refuse_other_keys(&["unions", "regions"], &mut problems);

    let unions = read_unions(&root, &mut problems);
    let mut regions = read_regions(&root, &unions, &mut problems);
    regions.sort_by(|a, b| a.id.cmp(&b.id));
    problems.or(|| regions)
}

/// Members by union, as the file lists them.
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
                    problems.note(at, format!("`{member}` stands twice in `{}`: keep one", key.get_ref()));
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
            problems.note(key.span(), format!("the union `{}` contains itself: take it out", key.get_ref()));
        }
    }
    unions
}

/// Whether `target` is among `members`, or among theirs, and so on down.
fn containing(unions: &Unions, members: &BTreeSet<Jurisdiction>, target: &Jurisdiction) -> bool {
    let mut seen: BTreeSet<&Jurisdiction> = BTreeSet::new();
    let mut open: Vec<&Jurisdiction> = members.iter().collect();
    while let Some(member) = open.pop() {
        if member == target {
            return true;
        }
        if seen.insert(member) {
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
                let message = format!("more than {MAX_REGIONS} regions: leave out those that you do not use");
                problems.note(name.span(), message);
            }
        }
    }
    if clouds.entries.values().all(|cloud| cloud.get_ref().as_table().is_some_and(DeTable::is_empty)) {
        problems.note(clouds.span, "there is no region: write at least one row under [regions.CLOUD]");
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
    let place = read_place(&table, problems);
    let engines = read_engines(&table, problems);
    let point = read_point(&table, problems);
    let city = table.need_text("city", "\"Frankfurt\"", problems);
    if let Some((_, at)) = city.as_ref().filter(|(city, _)| city.trim().is_empty()) {
        problems.note(at.clone(), format!("{}: `city` is empty: write the city", table.what));
    }
    let cost = read_cost(&table, problems);
    let (country, narrowest) = place?;
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

/// What a replica costs there an hour, if the row says, in millionths.
fn read_cost(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<u64> {
    let value = table.entries.get("cost")?;
    let cost = number(value.get_ref()).filter(|cost| (0.0..=COST_MAX).contains(cost));
    if cost.is_none() {
        let wanted = format!("write what a replica costs an hour, from 0 to {COST_MAX}, as cost = 0.42");
        problems.note(value.span(), format!("{}: `cost` is not a price: {wanted}", table.what));
    }
    cost.map(|cost| (cost * 1e6).round() as u64)
}

/// The country of a row and the narrowest jurisdiction that it names.
fn read_place(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<(Jurisdiction, Jurisdiction)> {
    let (text, at) = table.need_text("in", "\"de\"", problems)?;
    let jurisdiction = text.parse::<Jurisdiction>().ok();
    match jurisdiction.and_then(|narrowest| Some((narrowest.country()?, narrowest))) {
        Some(place) => Some(place),
        None => {
            let wanted = "write a country of ISO 3166-1 (de) or a subdivision of one (us-va)";
            problems.note(at, format!("{}: `in` is `{text}`: {wanted}", table.what));
            None
        }
    }
}

/// What runs models there: processors are everywhere, unless a row says otherwise.
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
            format!("{}: `at` is not a place: write at = [latitude, longitude] in degrees", table.what);
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

/// Everything that contains a region: the two codes of its row, and every union with a member among what contains it.
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

    /// One line per region; `{}` is where a test puts what it is about.
    fn file(rows: &str) -> String {
        format!("[unions]\neu = [\"de\", \"fr\"]\neea = [\"eu\", \"no\"]\n[regions.x]\n{rows}\n")
    }

    /// Where the rows of [`file`] begin.
    const FIRST_ROW: usize = 5;

    #[track_caller]
    fn check(text: &str, expected: &[(usize, &str)]) {
        let problems = Catalogue::parse(text).expect_err("the file has mistakes");
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, (line, part)) in problems.iter().zip(expected) {
            assert_eq!(problem.line, *line, "{problem}");
            assert!(problem.message.contains(part), "`{problem}` does not say `{part}`");
        }
    }

    #[test]
    fn a_price_is_kept_in_millionths_and_is_one_or_is_refused() {
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
    fn a_region_lies_in_its_subdivision_its_country_and_the_unions_of_unions() {
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
    fn every_mistake_in_a_file_is_told_at_once_with_its_line() {
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
                (FIRST_ROW, "90.5,0 is off the globe: write a latitude from -90 to 90"),
                (FIRST_ROW + 1, "region x/b: `in` is `xx`: write a country of ISO 3166-1"),
                (FIRST_ROW + 2, "region x/c: `in` is `eu`: write a country"),
                (FIRST_ROW + 3, "region x/d: `at` is not a place: write at = [latitude, longitude]"),
                (FIRST_ROW + 3, "region x/d: `city` is missing: write city = \"Frankfurt\""),
                (FIRST_ROW + 3, "region x/d: `in` is missing: write in = \"de\""),
                (FIRST_ROW + 3, "unknown key `citty`; did you mean city?; the keys are in, at, city"),
                (FIRST_ROW + 4, "region x/e is a list: write a table"),
                (FIRST_ROW + 5, "`x/f g` is not a region: write cloud/name"),
                (FIRST_ROW + 5, "region x/f g: `at` is not a place"),
                (FIRST_ROW + 5, "region x/f g: `city` is empty"),
                (FIRST_ROW + 7, "`h` stands here a second time"),
            ],
        );
    }

    #[test]
    fn a_union_that_cannot_be_is_refused() {
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
                (3, "`de` stands twice in `eu`"),
                (3, "`e1` is not a jurisdiction"),
                (3, "`xx` is neither a country of ISO 3166-1 nor a union of this table"),
                (4, "the union `one` contains itself"),
                (5, "the union `two` contains itself"),
                (6, "`big` is a text: write a list of texts"),
                (9, "unknown key `region`; did you mean regions?"),
            ],
        );
    }

    #[test]
    fn a_file_without_regions_or_without_sense_is_refused() {
        check("", &[(1, "`regions` is missing")]);
        check("[regions]\n", &[(1, "there is no region")]);
        check("[regions.x]\n", &[(1, "there is no region")]);
        check("\n[regions.x\n", &[(2, "this is not TOML")]);
    }

    #[test]
    fn a_catalogue_at_its_limit_is_read_and_one_region_more_is_refused() {
        let rows = |count: usize| -> String {
            (0..count).map(|n| format!("r{n} = {{ in = \"de\", at = [0, 0], city = \"C\" }}\n")).collect()
        };
        assert_eq!(Catalogue::parse(&file(&rows(MAX_REGIONS))).unwrap().all().len(), MAX_REGIONS);
        let problems = Catalogue::parse(&file(&rows(MAX_REGIONS + 1))).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert!(problems[0].message.contains("more than 512 regions"), "{}", problems[0]);
    }
}
