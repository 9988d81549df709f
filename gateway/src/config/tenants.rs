//! Tenants file of a gateway, `tenants.toml`: keys, permissions and limits of tenants. The file and the key files that it
//! names are reloaded while a gateway runs ([`TenantsFile`]).

use super::issuers::{self, IssuerEntry};
use crate::edge::tenants::tenant;
use crate::tokens::Issuer;
use configuration::{ConfigFile, Environment, Files, Problem, section};
use gateway_core::keys::{Digest, KeyRing};
use regions::catalogue::Catalogue;
use regions::tenant::{TenantEntry, rules};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

section! {
    /// Tenants of a gateway, or tenants to apply.
    pub(super) partial struct GatewayTenants {
        /// Tenants, one table each.
        tenant: Vec<TenantEntry> = Vec::new();
        /// Issuers of tokens, for a gateway's own file.
        issuer: Vec<IssuerEntry> = Vec::new();
    }
}

/// Source of a gateway's own tenants, which can be read repeatedly.
#[derive(Clone)]
pub struct TenantsFile {
    path: PathBuf,
    /// Environment variables with secrets, as of the start of the process.
    environment: Option<Arc<Environment>>,
    catalogue: Arc<Catalogue>,
}

/// Content of a gateway's tenants file, and a digest of all its inputs: the text and the keys.
pub(crate) struct TenantsRead {
    pub(crate) keys: KeyRing,
    pub(crate) issuers: Vec<Issuer>,
    pub(crate) digest: Digest,
}

impl TenantsFile {
    pub(super) fn new(path: PathBuf, files: &Files<'_>, catalogue: &Arc<Catalogue>) -> TenantsFile {
        let environment = files.environment.cloned().map(Arc::new);
        TenantsFile { path, environment, catalogue: catalogue.clone() }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file and the key files that it names; returns all problems.
    pub(crate) fn read(&self) -> Result<TenantsRead, Vec<Problem>> {
        let text = std::fs::read_to_string(&self.path).map_err(|error| {
            vec![Problem { file: None, line: 1, message: format!("cannot be read: {error}") }]
        })?;
        self.parse(&text)
    }

    pub(super) fn parse(&self, text: &str) -> Result<TenantsRead, Vec<Problem>> {
        let base = self.path.parent().unwrap_or(Path::new(""));
        let files = Files { base, environment: self.environment.as_deref() };
        let (keys, issuers) =
            ConfigFile::read(text, |document| read_tenants(document, &files, &self.catalogue))?;
        // The key digests are sorted, so reordering a key file does not change the digest.
        let digest = Digest::of(&[text.as_bytes(), &keys.fingerprint()].concat());
        Ok(TenantsRead { keys, issuers, digest })
    }
}

/// Reads a gateway's tenants file: the rules, the API keys and the issuers.
pub fn read_tenants(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    catalogue: &Catalogue,
) -> Option<(KeyRing, Vec<Issuer>)> {
    let GatewayTenants { tenant: entries, issuer } = document.section()?;
    let issuers = issuers::read(document, files, issuer.unwrap_or_default());
    let entries = entries?;
    if entries.is_empty() && issuers.names.is_empty() && document.is_valid() {
        let problem =
            "no [[tenant]] has a key, so every request would be rejected; add one, or remove the file";
        document.problem("", problem);
    }
    let keys: Vec<_> = entries
        .iter()
        .enumerate()
        .map(|(index, entry)| {
            let path = format!("tenant[{index}]");
            if let Some(issuer) = entry.issuer.as_ref()?.as_ref().filter(|it| !issuers.names.contains(*it)) {
                let problem = format!("\"{issuer}\": no [[issuer]] has this name; add one");
                document.problem(&format!("{path}.issuer"), problem);
            }
            read_keys(document, files, &path, entry)
        })
        .collect();
    let mut owners = BTreeMap::new();
    for (index, (entry, keys)) in entries.iter().zip(&keys).enumerate() {
        let Some(name) = &entry.name else { continue };
        let own = keys.iter().flatten().map(|key| (key.clone(), name.clone()));
        let taken = own.filter_map(|(key, name)| {
            owners.insert(key, name).filter(|other| Some(other) != entry.name.as_ref())
        });
        if taken.count() > 0 {
            let problem = "has the key of another tenant; use a separate key for each";
            document.problem(&format!("tenant[{index}]"), problem);
        }
    }
    let mut ring = KeyRing::default();
    for (rules, keys) in rules(document, entries, catalogue).into_iter().zip(keys) {
        let Some(rules) = rules else { continue };
        // A name or a key that occurs twice is a problem already.
        let is_new = ring.add(tenant(&rules, 0));
        let keys = keys.filter(|_| is_new).unwrap_or_default();
        keys.iter().filter(|key| ring.add_key(key, &rules.id)).count();
    }
    Some((ring, issuers.open))
}

/// Reads the API keys of a tenant: from a file, one a line, or from the environment, never from the TOML. A tenant with
/// an issuer needs none.
fn read_keys(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    path: &str,
    entry: &TenantEntry,
) -> Option<Vec<String>> {
    let TenantEntry { key_file, key_env, issuer, .. } = entry;
    if document.has(&format!("{path}.key_sha256")) {
        let problem = "is for `meridian apply`; write key_file or key_env in a gateway's own file";
        document.problem(&format!("{path}.key_sha256"), problem);
        return None;
    }
    let (file, variable) = (key_file.as_ref()?.as_deref(), key_env.as_ref()?.as_deref());
    if file.is_none() && variable.is_none() {
        if issuer.as_ref()?.is_none() {
            document.problem(path, "needs one of key_file and key_env, or an issuer");
        }
        return None;
    }
    files.secret(document, &format!("{path}.key"), file, variable, |text| {
        let lines = text.lines().map(str::trim).filter(|key| !key.is_empty());
        let keys: Vec<String> = lines.map(str::to_owned).collect();
        if keys.is_empty() { Err("holds an empty key; write one key per line".to_owned()) } else { Ok(keys) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_core::keys::Credential;
    use gateway_core::priority::Priorities;
    use gateway_core::tenant::RateLimits;
    use replica_api::priority::Priority;
    use std::num::NonZeroU64;

    fn parse(text: &str) -> Result<KeyRing, Vec<String>> {
        let environment = [("DOCS_KEY", "s3cret"), ("TWO_KEYS", "old\nnew\n"), ("EMPTY", " ")];
        let environment = environment.into_iter().collect();
        let files = Files { base: Path::new("/nowhere"), environment: Some(&environment) };
        let read = ConfigFile::read(text, |document| read_tenants(document, &files, &Catalogue::builtin()));
        read.map(|(ring, _)| ring).map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_example_is_valid_with_and_without_its_commented_keys() {
        let text = include_str!("../../../configs/tenants.toml").replace("MERIDIAN_KEY", "DOCS_KEY");
        let plain = parse(&text).expect("as written");
        assert_eq!(plain.tenants().map(|tenant| tenant.limits).collect::<Vec<_>>(), [RateLimits::default()]);
        let shown = text.replace("# deployments", "deployments").replace("# residency", "residency");
        let shown = parse(
            &shown
                .replace("# limits", "limits")
                .replace("# priorities", "priorities")
                .replace("# weight", "weight"),
        )
        .expect("with all commented keys");
        let tenant = shown.tenants().next().expect("one");
        assert_eq!(tenant.residency.to_string(), "eu");
        assert_eq!((tenant.priorities, tenant.weight.get()), (Priorities::Only(Priority::Bulk), 2));
        assert_eq!(tenant.limits.tokens_per_minute, NonZeroU64::new(2_000_000));
        assert!(tenant.may_use(&"minilm".parse().unwrap()) && !tenant.may_use(&"other".parse().unwrap()));
    }

    #[test]
    fn a_tenant_may_have_two_keys_while_it_changes_them() {
        let ring = parse("[[tenant]]\nname = \"a\"\nkey_env = \"TWO_KEYS\"").expect("two keys");
        for key in ["Bearer old", "Bearer new"] {
            let credential = Credential::read(Some(key.as_bytes())).expect(key);
            assert_eq!(ring.tenant(&credential, || std::time::Duration::ZERO).expect(key).id.as_str(), "a");
        }
    }

    #[test]
    fn a_residency_without_regions_is_rejected_with_a_suggestion() {
        let with = |allow: &str| {
            let text = format!(
                "[[tenant]]\nname = \"docs\"\nkey_env = \"DOCS_KEY\"\nresidency = {{ allow = [{allow}] }}"
            );
            parse(&text).map(drop)
        };
        assert_eq!(with("\"eu\", \"aws/us-east-1\""), Ok(()));
        for (allow, near) in [
            ("\"euu\"", "`euu`; did you mean eu"),
            ("\"eu\", \"aws/us-esat-1\"", "`aws/us-esat-1` in the catalogue; did you mean aws/us-east-1"),
        ] {
            let problems = with(allow).expect_err(allow);
            assert_eq!(problems.len(), 1, "{problems:?}");
            for part in ["tenant \"docs\": residency.allow: ", near] {
                assert!(problems[0].contains(part), "{part} in {problems:?}");
            }
        }
    }

    #[test]
    fn all_problems_are_reported_at_once_with_their_tenant() {
        let problems = parse(
            "[[tenant]]\nname = \"docs team\"\nkey_env = \"DOCS_KEY\"\n\
             [[tenant]]\nname = \"docs\"\nissuer = \"absent\"\nkey_env = \"NOT_SET\"\nresidency = { allow = [] }\n\
             [[tenant]]\nname = \"bare\"\ndeployments = [\"a b\"]\npriorities = [\"bulk\", \"fast\"]\nlimits = { inputs_per_second = 0 }\n\
             [[tenant]]\nname = \"bare\"\npriorities = []\nweight = 1001\nkey_env = \"EMPTY\"\n\
             [[tenant]]\nname = \"one\"\nweight = 0\nkey_env = \"DOCS_KEY\"\n[[tenant]]\nname = \"two\"\nkey_env = \"DOCS_KEY\"",
        );
        let problems = problems.err().expect("many problems");
        for (tenant, word) in [
            ("docs team", "letters"),
            ("docs", "NOT_SET"),
            ("docs", "no [[issuer]]"),
            ("docs", "residency.allow"),
            ("bare", "key_file and key_env"),
            ("bare", "a b"),
            ("bare", "fast"),
            ("bare", "priorities: has 0 entries"),
            ("bare", "weight: 1001 is out of range; write a whole number from 1 to 1000"),
            ("one", "weight: 0"),
            ("bare", "inputs_per_second: 0"),
            ("bare", "empty"),
            ("bare", "twice"),
            ("two", "another tenant"),
        ] {
            let name = format!("tenant \"{tenant}\": ");
            assert!(
                problems.iter().any(|problem| problem.contains(&name) && problem.contains(word)),
                "{word} of {tenant} in {problems:#?}"
            );
        }
        assert_eq!(problems.len(), 14, "{problems:#?}");
        assert_eq!(parse("").err().expect("no tenant").len(), 1);
    }
}
