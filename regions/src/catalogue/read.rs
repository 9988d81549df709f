//! Reader of the catalogue file.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use configuration::{ConfigField, ConfigFile, ConfigValue, NoLimit, Problem, Rows, Rule, section, segment};

use super::Region;
use crate::accelerator::{Accelerators, COUNT_MAX, Offering, PRICE_MAX, TYPES_MAX, to_millionths};
use crate::engine::EngineKind;
use crate::geography::GeoPoint;
use crate::id::{AcceleratorType, RegionId};
use crate::jurisdiction::Jurisdiction;
use crate::set::MAX_REGIONS;

/// Maximum number of entries with accelerators: a few prices for each type and cloud.
const OFFERINGS_MAX: usize = 4096;

section! {
    /// Catalogue of the known regions, with their coordinates and jurisdictions.
    partial struct CatalogueFile {
        /// Unions of countries: their members, which may be unions.
        unions: Option<Rows<Vec<String>>>;
        /// Regions, in a table for each cloud, under the provider's name.
        regions: Rows<Rows<RegionRow>>, like "{ cloud.name = { in, at, city } }";
        /// Accelerators that regions offer, by type and price.
        accelerators: Vec<OfferingEntry> = Vec::new(), in 0..=OFFERINGS_MAX;
    }
}

section! {
    /// Accelerators of one type in regions of one price.
    partial struct OfferingEntry {
        /// Accelerator type, under the name that deployments use.
        accelerator ("type"): AcceleratorType, like "\"l4\"";
        /// Regions that offer it, as `cloud/name`.
        regions: Vec<String>, in 1.., like "[\"gcp/europe-west4\"]";
        /// Price of one per hour, in the unit of `cost`; unknown if absent.
        price: Option<f64>, in 0.0..=PRICE_MAX, fix "the price of one per hour, as price = 0.71";
        /// Number in each of the regions that the fleet may use, such as a quota; unknown if absent.
        count: Option<u32>, in 1..=COUNT_MAX, fix "or remove it if it is unknown";
    }
}

section! {
    /// Region of a cloud.
    partial struct RegionRow {
        /// Narrowest known jurisdiction: a country of ISO 3166-1, or a subdivision of one.
        jurisdiction ("in"): String, like "\"de\"", check is_country;
        /// Latitude and longitude in degrees.
        at: GeoPoint, like "[50.11, 8.68]";
        /// City, as the provider names it.
        city: String, like "\"Frankfurt\"", check is_not_empty;
        /// Available engines; none for a location with gateways only. A region with accelerators has `tensorrt-llm` too.
        engines: Vec<EngineKind> = vec![EngineKind::Cpu];
        /// Cost of a replica per hour, in any unit; a region without a cost counts as the most expensive.
        cost: Option<f64>, in 0.0..=PRICE_MAX, fix "the cost of a replica per hour, as cost = 0.42";
    }
}

impl ConfigValue for GeoPoint {
    type Limit = NoLimit;
    type Item = GeoPoint;

    fn type_name() -> String {
        "[latitude, longitude]".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<GeoPoint>) -> Option<GeoPoint> {
        let fix = "at = [latitude, longitude] in degrees";
        let numbers = field.items(fix)?;
        let numbers: Vec<_> = numbers.iter().map(|item| f64::read(item, &Rule::default())).collect();
        let numbers = numbers.into_iter().collect::<Option<Vec<f64>>>()?;
        let [lat, lon] = *numbers else {
            field.problem(format!("has {} numbers and is not a point; write {fix}", numbers.len()));
            return None;
        };
        GeoPoint::new(lat, lon).map_err(|error| field.problem(error)).ok()
    }
}

/// Returns the narrowest jurisdiction of a row and its country.
fn jurisdiction(text: &str) -> Option<(Jurisdiction, Jurisdiction)> {
    let narrowest = Jurisdiction::from_str(text).ok()?;
    Some((narrowest.country()?, narrowest))
}

fn is_country(text: &str) -> Result<(), String> {
    let fix = "write a country of ISO 3166-1 (de) or a subdivision of one (us-va)";
    jurisdiction(text).map(drop).ok_or_else(|| format!("is no jurisdiction of a region; {fix}"))
}

fn is_not_empty(text: &str) -> Result<(), String> {
    if text.trim().is_empty() { Err("is empty; write the city".to_owned()) } else { Ok(()) }
}

/// Returns the reference of the keys.
pub(super) fn reference() -> String {
    configuration::reference::<CatalogueFile>("regions.toml")
}

/// Returns the regions of a file in order of id, at least one and at most [`MAX_REGIONS`].
pub(super) fn read(text: &str) -> Result<Vec<Region>, Vec<Problem>> {
    ConfigFile::read(text, read_regions)
}

/// Reads the regions of a catalogue file, in order of id.
pub fn read_regions(document: &ConfigFile<'_>) -> Option<Vec<Region>> {
    let CatalogueFile { unions, regions, accelerators } = document.section()?;
    let unions = read_unions(document, unions.flatten());
    let mut read = Vec::new();
    let Rows(clouds) = regions?;
    let mut rows = 0;
    for (cloud, table) in &clouds {
        for (name, row) in table.iter().flat_map(|Rows(rows)| rows) {
            let path = format!("regions.{}.{}", segment(cloud), segment(name));
            let id = format!("{cloud}/{name}").parse::<RegionId>();
            let id = id.map_err(|error| document.problem(&path, error)).ok();
            read.extend(row.as_ref().and_then(|row| region(id?, row, &unions)));
            rows += 1;
            if rows == MAX_REGIONS + 1 {
                let message = format!("more than {MAX_REGIONS} regions; remove those that you do not use");
                document.problem(&path, message);
            }
        }
    }
    if clouds.iter().all(|(_, table)| matches!(table, Some(Rows(rows)) if rows.is_empty())) {
        let message = "the catalogue has no region; write at least one row under [regions.CLOUD]";
        document.problem("regions", message);
    }
    read.sort_by(|a: &Region, b: &Region| a.id.cmp(&b.id));
    for (index, entry) in accelerators.into_iter().flatten().enumerate() {
        add_offering(document, &format!("accelerators[{index}]"), entry, &mut read);
    }
    Some(read)
}

/// Adds the accelerators of an entry to its regions, which are sorted.
fn add_offering(document: &ConfigFile<'_>, path: &str, entry: OfferingEntry, regions: &mut [Region]) {
    let OfferingEntry {
        accelerator: Some(accelerator),
        regions: Some(names),
        price: Some(price),
        count: Some(count),
    } = entry
    else {
        return;
    };
    let offering = Offering { count, price: price.map(to_millionths) };
    for (index, name) in names.iter().enumerate() {
        let path = format!("{path}.regions[{index}]");
        let Ok(at) = regions.binary_search_by(|region| region.id.as_str().cmp(name)) else {
            let near = configuration::did_you_mean(name, regions.iter().map(|region| region.id.as_str()));
            document.problem(
                &path,
                format!("no region `{name}` in this file{near}; write a region as cloud/name"),
            );
            continue;
        };
        let region = &mut regions[at];
        if region.engines.is_empty() {
            let message = format!("`{name}` has engines = [], so nothing runs there; remove one of the two");
            document.problem(&path, message);
        } else if region.accelerators.insert(accelerator.clone(), offering).is_some() {
            document.problem(&path, format!("`{name}` offers `{accelerator}` twice; keep one"));
        } else if region.accelerators.len() == TYPES_MAX + 1 {
            document.problem(&path, format!("`{name}` offers more than {TYPES_MAX} types; remove some"));
        } else {
            region.engines.insert(EngineKind::TensorrtLlm);
        }
    }
}

fn region(id: RegionId, row: &RegionRow, unions: &Unions) -> Option<Region> {
    let (country, narrowest) = jurisdiction(row.jurisdiction.as_ref()?)?;
    Some(Region {
        id,
        city: row.city.clone()?,
        point: row.at?,
        jurisdictions: containers(&country, narrowest, unions),
        engines: row.engines.iter().flatten().copied().collect(),
        country,
        cost: row.cost?.map(to_millionths),
        accelerators: Accelerators::new(),
    })
}

/// Members of each union, as the file lists them.
type Unions = BTreeMap<Jurisdiction, BTreeSet<Jurisdiction>>;

fn read_unions(document: &ConfigFile<'_>, rows: Option<Rows<Vec<String>>>) -> Unions {
    let mut unions = Unions::new();
    let mut mentioned: Vec<(Jurisdiction, String)> = Vec::new();
    let mut named: Vec<(Jurisdiction, String)> = Vec::new();
    for (key, row) in rows.map(|Rows(rows)| rows).into_iter().flatten() {
        let path = format!("unions.{}", segment(&key));
        let name = match key.parse::<Jurisdiction>() {
            Ok(name) if name.is_union() => name,
            Ok(name) => {
                document.problem(&path, format!("`{name}` is a country's code; give the union another name"));
                continue;
            }
            Err(error) => {
                document.problem(&path, error);
                continue;
            }
        };
        named.push((name.clone(), path.clone()));
        let members = unions.entry(name).or_default();
        for (index, text) in row.iter().flatten().enumerate() {
            let path = format!("{path}[{index}]");
            match text.parse::<Jurisdiction>() {
                Ok(member) if !members.insert(member.clone()) => {
                    document.problem(&path, format!("`{member}` is in `{key}` twice; keep one"));
                }
                Ok(member) => mentioned.push((member, path)),
                Err(error) => document.problem(&path, error),
            }
        }
    }
    for (member, path) in mentioned {
        if member.country().is_none() && !unions.contains_key(&member) {
            let message =
                format!("`{member}` is neither a country of ISO 3166-1 nor a union of this table; write one");
            document.problem(&path, message);
        }
    }
    for (name, path) in named {
        if unions.get(&name).is_some_and(|members| containing(&unions, members, &name)) {
            document.problem(&path, format!("the union `{name}` contains itself; remove it"));
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
    fn accelerators_are_read_for_each_of_their_regions() {
        let rows = "a = { in = \"de\", at = [50, 8], city = \"A\" }\nb = { in = \"fr\", at = [48, 2], city = \"B\" }";
        let more = "[[accelerators]]\ntype = \"l4\"\nregions = [\"x/a\", \"x/b\"]\nprice = 0.71\n\
                    [[accelerators]]\ntype = \"h100\"\nregions = [\"x/a\"]\ncount = 8\n";
        let catalogue = Catalogue::parse(&format!("{}{more}", file(rows))).unwrap();
        let region = |id: &str| catalogue.get(&id.parse().unwrap()).unwrap().clone();
        let offering = |count, price| Offering { count, price };
        let named = |name: &str| name.parse::<AcceleratorType>().unwrap();
        let expected =
            [(named("h100"), offering(Some(8), None)), (named("l4"), offering(None, Some(710_000)))];
        assert_eq!(region("x/a").accelerators, Accelerators::from(expected));
        assert_eq!(region("x/b").accelerators.len(), 1);
        assert!(region("x/a").engines.contains(&EngineKind::TensorrtLlm));
        assert_eq!(catalogue.accelerator_types().len(), 2);
    }

    #[test]
    fn an_invalid_offering_is_rejected() {
        let rows = "a = { in = \"de\", at = [50, 8], city = \"A\" }\nb = { in = \"fr\", at = [48, 2], city = \"B\", engines = [] }";
        let first = file(rows).lines().count() + 1;
        let check = |entry: &str, at: usize, part: &str| {
            check(&format!("{}[[accelerators]]\n{entry}\n", file(rows)), &[(first + at, part)]);
        };
        check("type = \"l4\"\nregions = [\"x/c\"]", 2, "no region `x/c` in this file; did you mean x/a");
        check("type = \"l4\"\nregions = [\"x/b\"]", 2, "has engines = []");
        check("type = \"l4\"\nregions = [\"x/a\", \"x/a\"]", 2, "offers `l4` twice");
        check("type = \"l 4\"\nregions = [\"x/a\"]", 1, "is not a type of accelerator");
        check("type = \"l4\"\nregions = []", 2, "has 0 entries");
        check("type = \"l4\"\nregions = [\"x/a\"]\nprice = -1", 3, "as price = 0.71");
        check("type = \"l4\"\nregions = [\"x/a\"]\ncount = 0", 3, "or remove it if it is unknown");
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
                (
                    FIRST_ROW + 1,
                    "regions.x.b.in: \"xx\" is no jurisdiction of a region; write a country of ISO 3166-1",
                ),
                (FIRST_ROW + 2, "regions.x.c.in: \"eu\" is no jurisdiction of a region; write a country"),
                (FIRST_ROW + 3, "regions.x.d.at: is a string; write at = [latitude, longitude]"),
                (FIRST_ROW + 3, "unknown key `citty`; did you mean city?; the keys are in, at, city"),
                (FIRST_ROW + 3, "regions.x.d.city: is missing; write city = \"Frankfurt\""),
                (FIRST_ROW + 3, "regions.x.d.in: is missing; write in = \"de\""),
                (FIRST_ROW + 4, "regions.x.e: is a list; write a table"),
                (FIRST_ROW + 5, "regions.x.f g.at: has 3 numbers and is not a point"),
                (FIRST_ROW + 5, "regions.x.f g.city: \"\" is empty"),
                (FIRST_ROW + 5, "regions.x.f g: `x/f g` is not a region: write cloud/name"),
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
                (6, "unions.big: is a string; write a list"),
                (9, "unknown key `region`; did you mean regions?"),
            ],
        );
    }

    #[test]
    fn a_file_without_regions_or_with_invalid_toml_is_rejected() {
        check("", &[(1, "regions: is missing")]);
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
