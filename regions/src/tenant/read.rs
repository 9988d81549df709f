//! Reader of tenants files: those that an operator applies, and those of a gateway, which name secrets.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::path::PathBuf;

use configuration::{ConfigField, ConfigFile, ConfigValue, NoLimit, Problem, Rule, section, text_values};

use super::{KeyDigest, MAX_KEYS, MAX_RESIDENCY_LEN, MAX_TENANTS, MAX_WEIGHT, TenantLimits, TenantRules};
use crate::catalogue::Catalogue;
use crate::id::{DeploymentName, TenantId};
use crate::priority::Priority;
use crate::residency::ResidencyEntry;

section! {
    /// Tenants to apply.
    partial struct AppliedTenants {
        /// Tenants, one table each.
        tenant: Vec<TenantEntry> = Vec::new(), in 0..=MAX_TENANTS;
        /// Issuers of tokens, which only a gateway's own file has.
        issuer: Option<NotApplicable>;
    }
}

section! {
    /// Tenant: credentials, permitted deployments, residency policy and limits.
    pub partial struct TenantEntry {
        /// Name.
        pub name: TenantId, like "\"acme-search\"";
        /// SHA-256 of its API keys, for `meridian apply`.
        pub key_sha256: Option<Vec<KeyDigest>>, in 0..=MAX_KEYS;
        /// File with its API keys, one per line, for a gateway's own file.
        pub key_file: Option<PathBuf>;
        /// Environment variable with its API keys, for a gateway's own file.
        pub key_env: Option<String>;
        /// Issuer whose tokens identify the tenant; only keys do if absent.
        pub issuer: Option<String>;
        /// Deployments that it may use; all if absent.
        pub deployments: Option<Vec<DeploymentName>>;
        /// Residency policy of its requests, which narrows that of a deployment; all regions if absent.
        pub residency: Option<ResidencyEntry>;
        /// Priorities that it may use; both if absent.
        pub priorities: Option<Vec<Priority>>, in 1.., fix "or remove it to permit both";
        /// Weight of its fair share under overload.
        pub weight: u32 = 1, in 1..=MAX_WEIGHT;
        /// Rate limits; unlimited if absent.
        pub limits: Limits;
    }
}

section! {
    /// Rate limits of a tenant.
    pub struct Limits {
        /// Requests per second.
        requests_per_second: Option<u64>, in 1.., fix "or remove it for no limit";
        /// Inputs per second.
        inputs_per_second: Option<u64>, in 1.., fix "or remove it for no limit";
        /// Tokens per minute.
        tokens_per_minute: Option<u64>, in 1.., fix "or remove it for no limit";
    }
}

text_values! {
    Priority = "\"interactive\" or \"bulk\"",
    KeyDigest = "SHA-256 in hexadecimal digits",
}

/// Value of a key that cannot be applied.
struct NotApplicable;

impl ConfigValue for NotApplicable {
    type Limit = NoLimit;
    type Item = NotApplicable;

    fn type_name() -> String {
        "not in a file for `meridian apply`".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<NotApplicable>) -> Option<NotApplicable> {
        field.problem(
            "[[issuer]] cannot be applied, since it names files; leave it in the gateways' own tenants files",
        );
        None
    }
}

/// Parses a tenants file to apply; returns all of its problems on failure.
pub fn parse_tenants(
    text: &str,
    catalogue: &Catalogue,
) -> Result<BTreeMap<TenantId, TenantRules>, Vec<Problem>> {
    ConfigFile::read(text, |document| read_tenants(document, catalogue))
}

/// Reads a tenants file to apply: without names of secrets. A tenant may have neither a key nor an issuer, because an
/// operator may create its keys.
pub fn read_tenants(
    document: &ConfigFile<'_>,
    catalogue: &Catalogue,
) -> Option<BTreeMap<TenantId, TenantRules>> {
    let entries = document.section::<AppliedTenants>()?.tenant?;
    let mut owners: BTreeMap<KeyDigest, &TenantId> = BTreeMap::new();
    for (index, TenantEntry { name, key_sha256, .. }) in entries.iter().enumerate() {
        let path = format!("tenant[{index}]");
        for key in ["key_file", "key_env"].map(|key| format!("{path}.{key}")) {
            if document.has(&key) {
                let fix = "write key_sha256 = [\"…\"], printed by `printf %s KEY | sha256sum`";
                document.problem(&key, format!("secrets are not applied; {fix}"));
            }
        }
        let keys = key_sha256.as_ref().map(|keys| keys.as_deref().unwrap_or_default());
        for (key, name) in keys.unwrap_or_default().iter().zip(std::iter::repeat(name)) {
            let Some(name) = name else { continue };
            if let Some(other) = owners.insert(*key, name).filter(|other| *other != name) {
                let problem = format!("`{other}` has one of its keys too; use another key");
                document.problem(&format!("{path}.key_sha256"), problem);
            }
        }
    }
    let rules = rules(document, entries, catalogue);
    Some(rules.into_iter().flatten().map(|rules| (rules.id.clone(), rules)).collect())
}

/// Validates the entries of the key `tenant`; `None` for an invalid one.
pub fn rules(
    document: &ConfigFile<'_>,
    entries: Vec<TenantEntry>,
    catalogue: &Catalogue,
) -> Vec<Option<TenantRules>> {
    let mut names = BTreeSet::new();
    let mut validate = |(index, entry): (usize, TenantEntry)| {
        let path = format!("tenant[{index}]");
        if entry.name.as_ref().is_some_and(|name| !names.insert(name.clone())) {
            document.problem(&path, "it is in the file twice; keep one entry");
        }
        entry.rules(document, &path, catalogue)
    };
    entries.into_iter().enumerate().map(&mut validate).collect()
}

impl TenantEntry {
    fn rules(self, document: &ConfigFile<'_>, path: &str, catalogue: &Catalogue) -> Option<TenantRules> {
        let residency = self
            .residency
            .and_then(|given| ResidencyEntry::policy(given, document, path, MAX_RESIDENCY_LEN, catalogue));
        let Limits { requests_per_second, inputs_per_second, tokens_per_minute } = self.limits?;
        let limit = |limit: Option<u64>| limit.and_then(NonZeroU64::new);
        let mut priorities: BTreeSet<_> = self.priorities?.into_iter().flatten().collect();
        Some(TenantRules {
            id: self.name?,
            keys: self.key_sha256?.into_iter().flatten().collect(),
            issuer: self.issuer?,
            deployments: self.deployments?.map(|names| names.into_iter().collect()),
            residency: residency?,
            priority: priorities.pop_first().filter(|_| priorities.is_empty()),
            weight: self.weight?,
            limits: TenantLimits {
                requests_per_second: limit(requests_per_second),
                inputs_per_second: limit(inputs_per_second),
                tokens_per_minute: limit(tokens_per_minute),
            },
        })
    }
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
        read.map_err(|found| found.into_iter().map(|Problem { line, message, .. }| (line, message)).collect())
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
                    priorities = [\"fast\"]\nlimits = { inputs_per_second = 0 }\nwieght = 1\n";
        let problems = read(text).unwrap_err();
        for (line, part) in [
            (1, "[[issuer]] cannot be applied"),
            (3, "name: `a b`"),
            (4, "64 hexadecimal digits"),
            (5, "weight: 1001 is out of range; write a whole number from 1 to 1000"),
            (6, "priorities: has 0 entries; write 1 or more, or remove it"),
            (9, "secrets are not applied"),
            (10, "deployments: `a/b`"),
            (11, "atlantis"),
            (12, "write interactive or bulk"),
            (13, "limits.inputs_per_second: 0 is out of range; write a whole number, 1 or more"),
            (14, "did you mean weight"),
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
