//! Reading tenants' files: from TOML to checked rules, or to everything that is wrong with them.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use toml::Spanned;
use toml::de::DeValue;

use super::{
    KeyDigest, MAX_KEYS, MAX_RESIDENCY_LEN, MAX_TENANTS, MAX_WEIGHT, TenantLimits, TenantPriority,
    TenantRules,
};
use crate::catalogue::Catalogue;
use crate::document::{self, Problem, Problems, Table, residency};
use crate::id::{DeploymentName, TenantId};

const KEYS: [&str; 8] =
    ["name", "key_sha256", "issuer", "deployments", "residency", "priorities", "weight", "limits"];
/// What stands in a gateway's own file and never in a store.
const SECRETS: [&str; 2] = ["key_file", "key_env"];
const LIMITS: [&str; 3] = ["requests_per_second", "inputs_per_second", "tokens_per_minute"];

/// Reads a file of tenants, or says everything that is wrong with it.
pub fn parse_tenants(
    text: &str,
    catalogue: &Catalogue,
) -> Result<BTreeMap<TenantId, TenantRules>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the file".to_owned(), entries: tree.get_ref(), span: 0..0 };
    if let Some(issuer) = root.entries.get("issuer") {
        problems.note(
            issuer.span(),
            "[[issuer]] is not applied, since it names files: leave it in the gateways' own tenants files",
        );
    }
    root.refuse_other_keys(&["tenant", "issuer"], &mut problems);
    let tenants = match root.entries.get("tenant") {
        None => BTreeMap::new(),
        Some(value) => read_tenants(value, catalogue, &mut problems),
    };
    problems.or(|| tenants)
}

fn read_tenants<'d>(
    value: &'d Spanned<DeValue<'d>>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> BTreeMap<TenantId, TenantRules> {
    let mut tenants = BTreeMap::new();
    let Some(list) = value.get_ref().as_array() else {
        problems.note(value.span(), "`tenant` is not a list: write [[tenant]] in double brackets above each");
        return tenants;
    };
    if list.len() > MAX_TENANTS {
        problems.note(value.span(), format!("{} tenants: at most {MAX_TENANTS} fit", list.len()));
        return tenants;
    }
    let mut whose: BTreeMap<KeyDigest, TenantId> = BTreeMap::new();
    for (place, item) in list.iter().enumerate() {
        let what = match item.get_ref().get("name").and_then(|name| name.get_ref().as_str()) {
            Some(name) => format!("tenant `{name}`"),
            None => format!("tenant {}", place + 1),
        };
        let Some(table) = Table::of(what, item, problems) else { continue };
        let Some(tenant) = read_tenant(&table, catalogue, problems) else { continue };
        for key in &tenant.keys {
            if let Some(other) = whose.insert(*key, tenant.id.clone()).filter(|other| *other != tenant.id) {
                let at = table.entries.get("key_sha256").map_or(table.span.clone(), Spanned::span);
                problems
                    .note(at, format!("{}: `{other}` has one of its keys: give each its own", table.what));
            }
        }
        if tenants.contains_key(&tenant.id) {
            problems.note(table.span.clone(), format!("{} is there twice: keep one entry", table.what));
        }
        tenants.insert(tenant.id.clone(), tenant);
    }
    tenants
}

fn read_tenant(table: &Table<'_>, catalogue: &Catalogue, problems: &mut Problems<'_>) -> Option<TenantRules> {
    let mut secret = false;
    for key in SECRETS {
        if let Some(value) = table.entries.get(key) {
            secret = true;
            let instead = "no secret goes to a hub: write key_sha256 = [\"…\"], what `printf %s KEY | sha256sum` prints";
            problems.note(value.span(), format!("{}: `{key}`: {instead}", table.what));
        }
    }
    table.refuse_other_keys(&[&KEYS[..], &SECRETS].concat(), problems);
    let id = table.parsed::<TenantId>("name", "\"acme-search\"", problems);
    let keys = read_keys(table, problems);
    let issuer = table.if_there("issuer", Table::text, problems);
    let deployments = read_deployments(table, problems);
    let residency = residency::read(table, MAX_RESIDENCY_LEN, catalogue, problems);
    let priority = read_priority(table, problems);
    let weight = table.if_there("weight", Table::number, problems);
    if let Some(Some(given)) =
        weight.filter(|weight| weight.is_some_and(|it| !(1..=MAX_WEIGHT).contains(&it)))
    {
        let at = table.entries.get("weight").map_or(table.span.clone(), Spanned::span);
        problems.note(at, format!("{}: `weight` is {given}: write 1 to {MAX_WEIGHT}", table.what));
    }
    let limits = read_limits(table, problems);
    let (keys, issuer) = (keys?, issuer?.map(|(text, _)| text.to_owned()));
    if keys.is_empty() && issuer.is_none() && !secret {
        let message = "it has neither key_sha256 nor an issuer, so nobody could come in as it: write one";
        problems.note(table.span.clone(), format!("{}: {message}", table.what));
    }
    Some(TenantRules {
        id: id?,
        keys,
        issuer,
        deployments: deployments?,
        residency: residency?,
        priority: priority?,
        weight: weight?.unwrap_or(1),
        limits: limits?,
    })
}

fn read_keys(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<BTreeSet<KeyDigest>> {
    let Some(list) = table.if_there("key_sha256", Table::texts, problems)? else {
        return Some(BTreeSet::new());
    };
    if list.len() > MAX_KEYS {
        let at = table.entries.get("key_sha256").map_or(table.span.clone(), Spanned::span);
        problems.note(at, format!("{}: {} keys: at most {MAX_KEYS} fit", table.what, list.len()));
        return None;
    }
    let mut keys = BTreeSet::new();
    for (text, at) in list {
        match text.parse::<KeyDigest>() {
            Ok(key) => drop(keys.insert(key)),
            Err(error) => problems.note(at, format!("{}: `key_sha256`: {error}", table.what)),
        }
    }
    Some(keys)
}

fn read_deployments(
    table: &Table<'_>,
    problems: &mut Problems<'_>,
) -> Option<Option<BTreeSet<DeploymentName>>> {
    let Some(list) = table.if_there("deployments", Table::texts, problems)? else {
        return Some(None);
    };
    let mut names = BTreeSet::new();
    for (text, at) in list {
        match text.parse::<DeploymentName>() {
            Ok(name) => drop(names.insert(name)),
            Err(error) => problems.note(at, format!("{}: `deployments`: {error}", table.what)),
        }
    }
    Some(Some(names))
}

fn read_priority(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<Option<TenantPriority>> {
    let Some(list) = table.if_there("priorities", Table::texts, problems)? else {
        return Some(None);
    };
    if list.is_empty() {
        let at = table.entries.get("priorities").map_or(table.span.clone(), Spanned::span);
        let message = "`priorities` is empty: name one, or leave it out for both";
        problems.note(at, format!("{}: {message}", table.what));
    }
    let mut priorities = BTreeSet::new();
    for (text, at) in list {
        match text.parse::<TenantPriority>() {
            Ok(priority) => drop(priorities.insert(priority)),
            Err(error) => problems.note(at, format!("{}: `priorities`: {error}", table.what)),
        }
    }
    Some(priorities.pop_first().filter(|_| priorities.is_empty()))
}

fn read_limits(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<TenantLimits> {
    let Some(value) = table.entries.get("limits") else {
        return Some(TenantLimits::default());
    };
    let limits = Table::of(format!("{}: `limits`", table.what), value, problems)?;
    limits.refuse_other_keys(&LIMITS, problems);
    let [requests_per_second, inputs_per_second, tokens_per_minute] = LIMITS.map(|key| {
        let given = limits.if_there(key, Table::number, problems)?;
        let limit = given.map(|given| NonZeroU64::new(given.into()));
        if limit == Some(None) {
            let at = limits.entries.get(key).map_or(limits.span.clone(), Spanned::span);
            let message = format!("`{key}` is 0: write 1 or more, or leave it out for no limit");
            problems.note(at, format!("{}: {message}", limits.what));
        }
        Some(limit.flatten())
    });
    Some(TenantLimits {
        requests_per_second: requests_per_second?,
        inputs_per_second: inputs_per_second?,
        tokens_per_minute: tokens_per_minute?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::write_tenants;
    use super::*;

    const KEY: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    fn sound() -> String {
        format!(
            "[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"{KEY}\"]\nissuer = \"https://login.example/\"\n\
             deployments = [\"minilm\"]\nresidency = {{ allow = [\"eu\"] }}\npriorities = [\"bulk\"]\nweight = 2\n\
             limits = {{ requests_per_second = 1, inputs_per_second = 2, tokens_per_minute = 3 }}\n"
        )
    }

    fn read(text: &str) -> Result<BTreeMap<TenantId, TenantRules>, Vec<(usize, String)>> {
        let read = parse_tenants(text, &Catalogue::builtin());
        read.map_err(|found| found.into_iter().map(|Problem { line, message }| (line, message)).collect())
    }

    #[test]
    fn what_is_written_is_read_and_written_again_as_it_was() {
        let tenants = read(&sound()).unwrap();
        let acme = tenants.values().next().unwrap();
        assert_eq!((acme.keys.len(), acme.priority, acme.weight), (1, Some(TenantPriority::Bulk), 2));
        assert_eq!(acme.residency.to_string(), "eu");
        assert_eq!(acme.limits.tokens_per_minute, NonZeroU64::new(3));
        assert_eq!(read(&write_tenants(tenants.values()).unwrap()), Ok(tenants));
        let least = format!(
            "[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{KEY}\"]\npriorities = [\"bulk\", \"interactive\"]\n"
        );
        let tenants = read(&least).unwrap();
        let a = tenants.values().next().unwrap();
        assert_eq!((a.deployments.as_ref(), a.priority, a.weight), (None, None, 1));
        assert_eq!(read(&write_tenants(tenants.values()).unwrap()), Ok(tenants));
        assert_eq!(read("tenant = []"), Ok(BTreeMap::new()));
        assert_eq!(write_tenants([]).unwrap(), "tenant = []\n");
    }

    #[test]
    fn everything_that_is_wrong_is_told_at_once_with_its_line() {
        let text = "issuer = []\n[[tenant]]\nname = \"a b\"\nkey_sha256 = [\"s3cret\"]\nweight = 1001\npriorities = []\n\
                    [[tenant]]\nname = \"b\"\nkey_file = \"key\"\ndeployments = [\"a/b\"]\nresidency = { allow = [\"atlantis\"] }\n\
                    priorities = [\"fast\"]\nlimits = { inputs_per_second = 0 }\nwieght = 1\n[[tenant]]\nname = \"c\"\n";
        let problems = read(text).unwrap_err();
        for (line, part) in [
            (1, "[[issuer]] is not applied"),
            (3, "`name`"),
            (4, "64 hexadecimal digits"),
            (5, "`weight` is 1001: write 1 to 1000"),
            (6, "`priorities` is empty"),
            (9, "no secret goes to a hub"),
            (10, "`deployments`"),
            (11, "atlantis"),
            (12, "there are interactive and bulk"),
            (13, "`inputs_per_second` is 0"),
            (14, "did you mean weight"),
            (15, "neither key_sha256 nor an issuer"),
        ] {
            let told = problems.iter().any(|(at, problem)| *at == line && problem.contains(part));
            assert!(told, "line {line}: {part} in {problems:#?}");
        }
        assert!(!format!("{problems:?}").contains("s3cret"), "a key is not repeated");
        let twice = read(&(sound() + &sound())).unwrap_err();
        assert!(twice.len() == 1 && twice[0].1.contains("there twice"), "{twice:?}");
        let shared = read(&(sound() + &sound().replace("\"acme\"", "\"other\""))).unwrap_err();
        assert!(shared.len() == 1 && shared[0].1.contains("`acme` has one of its keys"), "{shared:?}");
    }

    #[test]
    fn as_much_as_fits_is_taken_and_one_more_is_not() {
        let keys = |count: usize| {
            let keys: Vec<_> = (0..count).map(|key| format!("\"{key:064x}\"")).collect();
            format!("[[tenant]]\nname = \"a\"\nkey_sha256 = [{}]\n", keys.join(", "))
        };
        assert!(read(&keys(MAX_KEYS)).is_ok());
        assert!(read(&keys(MAX_KEYS + 1)).unwrap_err()[0].1.contains("at most 8"));
        let tenants = |count: usize| -> String {
            (0..count).map(|at| format!("[[tenant]]\nname = \"t{at}\"\nissuer = \"i\"\n")).collect()
        };
        assert_eq!(read(&tenants(MAX_TENANTS)).unwrap().len(), MAX_TENANTS);
        assert!(read(&tenants(MAX_TENANTS + 1)).unwrap_err()[0].1.contains("at most 4000"));
    }
}
