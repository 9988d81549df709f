//! Parser and validator of tenants files. Reports all problems at once.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use toml::Spanned;
use toml::de::DeValue;

use super::{KeyDigest, MAX_KEYS, MAX_RESIDENCY_LEN, MAX_TENANTS, MAX_WEIGHT, TenantLimits, TenantRules};
use crate::catalogue::Catalogue;
use crate::document::{self, Problem, Problems, Table, residency};
use crate::id::{DeploymentName, TenantId};
use crate::priority::Priority;

const KEYS: [&str; 8] =
    ["name", "key_sha256", "issuer", "deployments", "residency", "priorities", "weight", "limits"];
/// Keys that are valid in a gateway's own tenants file only, because they refer to secrets.
const SECRETS: [&str; 2] = ["key_file", "key_env"];
const LIMITS: [&str; 3] = ["requests_per_second", "inputs_per_second", "tokens_per_minute"];

/// Parses a tenants file; returns all of its problems on failure.
pub fn parse_tenants(
    text: &str,
    catalogue: &Catalogue,
) -> Result<BTreeMap<TenantId, TenantRules>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the file".to_owned(), entries: tree.get_ref(), span: 0..0 };
    if let Some(issuer) = root.entries.get("issuer") {
        problems.note(
            issuer.span(),
            "[[issuer]] cannot be applied, since it names files: leave it in the gateways' own tenants files",
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
    let mut owners: BTreeMap<KeyDigest, TenantId> = BTreeMap::new();
    for (index, item) in list.iter().enumerate() {
        let what = match item.get_ref().get("name").and_then(|name| name.get_ref().as_str()) {
            Some(name) => format!("tenant `{name}`"),
            None => format!("tenant {}", index + 1),
        };
        let Some(table) = Table::of(what, item, problems) else { continue };
        let Some(tenant) = read_tenant(&table, catalogue, problems) else { continue };
        for key in &tenant.keys {
            if let Some(other) = owners.insert(*key, tenant.id.clone()).filter(|other| *other != tenant.id) {
                let at = table.entries.get("key_sha256").map_or(table.span.clone(), Spanned::span);
                problems
                    .note(at, format!("{}: `{other}` has one of its keys too: use another key", table.what));
            }
        }
        if tenants.contains_key(&tenant.id) {
            problems.note(table.span.clone(), format!("{} is in the file twice: keep one entry", table.what));
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
            let fix =
                "secrets are not applied: write key_sha256 = [\"…\"], printed by `printf %s KEY | sha256sum`";
            problems.note(value.span(), format!("{}: `{key}`: {fix}", table.what));
        }
    }
    table.refuse_other_keys(&[&KEYS[..], &SECRETS].concat(), problems);
    let id = table.parsed::<TenantId>("name", "\"acme-search\"", problems);
    let keys = read_keys(table, problems);
    let issuer = table.optional("issuer", Table::text, problems);
    let deployments = read_deployments(table, problems);
    let residency = residency::read(table, MAX_RESIDENCY_LEN, catalogue, problems);
    let priority = read_priority(table, problems);
    let weight = table.optional("weight", Table::number, problems);
    if let Some(Some(given)) =
        weight.filter(|weight| weight.is_some_and(|it| !(1..=MAX_WEIGHT).contains(&it)))
    {
        let at = table.entries.get("weight").map_or(table.span.clone(), Spanned::span);
        problems.note(at, format!("{}: `weight` is {given}: write 1 to {MAX_WEIGHT}", table.what));
    }
    let limits = read_limits(table, problems);
    let (keys, issuer) = (keys?, issuer?.map(|(text, _)| text.to_owned()));
    if keys.is_empty() && issuer.is_none() && !secret {
        let message =
            "it has neither key_sha256 nor an issuer, so no request can authenticate as it: write one";
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
    let Some(list) = table.optional("key_sha256", Table::texts, problems)? else {
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
    let Some(list) = table.optional("deployments", Table::texts, problems)? else {
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

fn read_priority(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<Option<Priority>> {
    let Some(list) = table.optional("priorities", Table::texts, problems)? else {
        return Some(None);
    };
    if list.is_empty() {
        let at = table.entries.get("priorities").map_or(table.span.clone(), Spanned::span);
        let message = "`priorities` is empty: name one, or remove it to permit both";
        problems.note(at, format!("{}: {message}", table.what));
    }
    let mut priorities = BTreeSet::new();
    for (text, at) in list {
        match text.parse::<Priority>() {
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
        let given = limits.optional(key, Table::number, problems)?;
        let limit = given.map(|given| NonZeroU64::new(given.into()));
        if limit == Some(None) {
            let at = limits.entries.get(key).map_or(limits.span.clone(), Spanned::span);
            let message = format!("`{key}` is 0: write 1 or more, or remove it for no limit");
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

    fn valid_file() -> String {
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
    fn tenants_round_trip_through_a_file() {
        let tenants = read(&valid_file()).unwrap();
        let acme = tenants.values().next().unwrap();
        assert_eq!((acme.keys.len(), acme.priority, acme.weight), (1, Some(Priority::Bulk), 2));
        assert_eq!(acme.residency.to_string(), "eu");
        assert_eq!(acme.limits.tokens_per_minute, NonZeroU64::new(3));
        assert_eq!(read(&write_tenants(tenants.values()).unwrap()), Ok(tenants));
        let minimal = format!(
            "[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{KEY}\"]\npriorities = [\"bulk\", \"interactive\"]\n"
        );
        let tenants = read(&minimal).unwrap();
        let a = tenants.values().next().unwrap();
        assert_eq!((a.deployments.as_ref(), a.priority, a.weight), (None, None, 1));
        assert_eq!(read(&write_tenants(tenants.values()).unwrap()), Ok(tenants));
        assert_eq!(read("tenant = []"), Ok(BTreeMap::new()));
        assert_eq!(write_tenants([]).unwrap(), "tenant = []\n");
    }

    #[test]
    fn all_problems_are_reported_with_their_lines() {
        let text = "issuer = []\n[[tenant]]\nname = \"a b\"\nkey_sha256 = [\"s3cret\"]\nweight = 1001\npriorities = []\n\
                    [[tenant]]\nname = \"b\"\nkey_file = \"key\"\ndeployments = [\"a/b\"]\nresidency = { allow = [\"atlantis\"] }\n\
                    priorities = [\"fast\"]\nlimits = { inputs_per_second = 0 }\nwieght = 1\n[[tenant]]\nname = \"c\"\n";
        let problems = read(text).unwrap_err();
        for (line, part) in [
            (1, "[[issuer]] cannot be applied"),
            (3, "`name`"),
            (4, "64 hexadecimal digits"),
            (5, "`weight` is 1001: write 1 to 1000"),
            (6, "`priorities` is empty"),
            (9, "secrets are not applied"),
            (10, "`deployments`"),
            (11, "atlantis"),
            (12, "write interactive or bulk"),
            (13, "`inputs_per_second` is 0"),
            (14, "did you mean weight"),
            (15, "neither key_sha256 nor an issuer"),
        ] {
            let reported = problems.iter().any(|(at, problem)| *at == line && problem.contains(part));
            assert!(reported, "line {line}: {part} in {problems:#?}");
        }
        assert!(!format!("{problems:?}").contains("s3cret"), "a key is not repeated");
        let twice = read(&(valid_file() + &valid_file())).unwrap_err();
        assert!(twice.len() == 1 && twice[0].1.contains("in the file twice"), "{twice:?}");
        let shared = read(&(valid_file() + &valid_file().replace("\"acme\"", "\"other\""))).unwrap_err();
        assert!(shared.len() == 1 && shared[0].1.contains("`acme` has one of its keys"), "{shared:?}");
    }

    #[test]
    fn keys_and_tenants_are_accepted_up_to_their_limits() {
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
