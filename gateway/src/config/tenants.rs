//! Tenants file, `tenants.toml`: keys, permissions and limits of tenants. The file and the key files that it names are
//! reloaded while a gateway runs ([`TenantsFile`]).

use super::issuers::{self, RawIssuer};
use crate::tokens::Issuer;
use gateway_core::keys::{Digest, KeyRing};
use gateway_core::priority::Priorities;
use gateway_core::tenant::{RateLimits, Tenant, WEIGHT_MAX};
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, TenantId};
use regions::residency::ResidencyPolicy;
use regions::tenant::MAX_RESIDENCY_LEN;
use replica_api::priority;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenants {
    #[serde(default)]
    issuer: Vec<RawIssuer>,
    #[serde(default)]
    tenant: Vec<RawTenant>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenant {
    name: String,
    issuer: Option<String>,
    key_file: Option<PathBuf>,
    key_env: Option<String>,
    deployments: Option<Vec<String>>,
    residency: Option<RawResidency>,
    priorities: Option<Vec<String>>,
    weight: Option<i64>,
    #[serde(default)]
    limits: RawLimits,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawResidency {
    allow: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLimits {
    requests_per_second: Option<i64>,
    inputs_per_second: Option<i64>,
    tokens_per_minute: Option<i64>,
}

/// Source of a gateway's own tenants, which can be read repeatedly.
#[derive(Clone)]
pub struct TenantsFile {
    path: PathBuf,
    /// Environment variables with secrets, as of the start of the process.
    environment: Arc<BTreeMap<String, String>>,
    catalogue: Arc<Catalogue>,
}

/// Content of a gateway's tenants file, and a digest of all its inputs: the text and the keys.
pub(crate) struct TenantsRead {
    pub(crate) keys: KeyRing,
    pub(crate) issuers: Vec<Issuer>,
    pub(crate) digest: Digest,
}

impl TenantsFile {
    pub(super) fn new(
        path: PathBuf,
        environment: &BTreeMap<String, String>,
        catalogue: &Arc<Catalogue>,
    ) -> TenantsFile {
        TenantsFile { path, environment: Arc::new(environment.clone()), catalogue: catalogue.clone() }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file and the key files that it names; returns all problems.
    pub(crate) fn read(&self) -> Result<TenantsRead, Vec<String>> {
        let text =
            std::fs::read_to_string(&self.path).map_err(|error| vec![format!("cannot be read: {error}")])?;
        let base = self.path.parent().unwrap_or(Path::new(""));
        let mut problems = Vec::new();
        let (keys, issuers) = read(&text, base, &self.environment, Some(&self.catalogue), &mut problems);
        if !problems.is_empty() {
            return Err(problems);
        }
        // The key digests are sorted, so reordering a key file does not change the digest.
        let digest = Digest::of(&[text.as_bytes(), &keys.fingerprint()].concat());
        Ok(TenantsRead { keys, issuers, digest })
    }
}

/// Validates a gateway's tenants file. Relative paths are relative to `base`.
///
/// # Errors
///
/// Returns all problems, each with its tenant or issuer.
pub fn check_tenants(
    text: &str,
    base: &Path,
    environment: &BTreeMap<String, String>,
    catalogue: &Catalogue,
) -> Result<(), Vec<String>> {
    let mut problems = Vec::new();
    read(text, base, environment, Some(catalogue), &mut problems);
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Reads the tenants of `text`. Relative paths are relative to `base`.
pub(super) fn read(
    text: &str,
    base: &Path,
    environment: &BTreeMap<String, String>,
    catalogue: Option<&Catalogue>,
    problems: &mut Vec<String>,
) -> (KeyRing, Vec<Issuer>) {
    let mut ring = KeyRing::default();
    let RawTenants { issuer: issuers, tenant: tenants } = match toml::from_str(text) {
        Ok(raw) => raw,
        Err(error) => {
            problems.push(error.to_string());
            return (ring, Vec::new());
        }
    };
    let before = problems.len();
    let issuers = issuers::read(issuers, base, problems);
    for raw in tenants {
        let name = raw.name.clone();
        let mut found = Vec::new();
        let keys = read_keys(&raw, base, environment);
        let keys = keys.map_err(|problem| found.push(problem)).unwrap_or_default();
        let known = |issuer: &String| issuers.names.contains(issuer);
        if let Some(issuer) = raw.issuer.as_ref().filter(|issuer| !known(issuer)) {
            found.push(format!("issuer = \"{issuer}\": no [[issuer]] has this name"));
        }
        if let Some(tenant) = read_tenant(raw, catalogue, &mut found) {
            let id = tenant.id.clone();
            if !ring.add(tenant) {
                found.push("is defined twice; keep one entry".to_owned());
            }
            if !keys.iter().all(|key| ring.add_key(key, &id)) {
                found.push("has the key of another tenant; use a separate key for each".to_owned());
            }
        }
        problems.extend(found.into_iter().map(|problem| format!("tenant \"{name}\": {problem}")));
    }
    if ring.is_empty() && issuers.open.is_empty() && problems.len() == before {
        problems.push(
            "no [[tenant]] has a key, so every request would be rejected; add one, or remove the file"
                .to_owned(),
        );
    }
    (ring, issuers.open)
}

fn read_tenant(raw: RawTenant, catalogue: Option<&Catalogue>, problems: &mut Vec<String>) -> Option<Tenant> {
    let RawTenant {
        name,
        issuer,
        key_file: _,
        key_env: _,
        deployments,
        residency,
        priorities,
        weight,
        limits,
    } = raw;
    let id = name.parse::<TenantId>().map_err(|_| {
        problems.push("a name may contain only letters, digits, '.', '_' and '-'".to_owned());
    });
    let deployments = deployments.map(|names| {
        let parse = |name: &String| {
            name.parse::<DeploymentName>()
                .map_err(|error| problems.push(format!("deployments contains \"{name}\": {error}")))
                .ok()
        };
        names.iter().filter_map(parse).collect()
    });
    let residency = match residency {
        None => ResidencyPolicy::Anywhere,
        Some(RawResidency { allow }) => read_residency(&allow, catalogue, problems),
    };
    let priorities = read_priorities(priorities, problems);
    let weight = match weight.map_or(Some(1), |weight| u32::try_from(weight).ok()).and_then(NonZeroU32::new) {
        Some(weight) if weight.get() <= WEIGHT_MAX => weight,
        Some(_) | None => {
            problems.push(format!(
                "weight = {} is out of range; use 1 to {WEIGHT_MAX}",
                weight.unwrap_or_default()
            ));
            NonZeroU32::MIN
        }
    };
    let RawLimits { requests_per_second, inputs_per_second, tokens_per_minute } = limits;
    let mut limit = |key: &str, given: Option<i64>| {
        let given = given?;
        let limit = u64::try_from(given).ok().and_then(NonZeroU64::new);
        if limit.is_none() {
            problems.push(format!(
                "limits.{key} = {given} is out of range; use 1 or more, or remove it for no limit"
            ));
        }
        limit
    };
    let limits = RateLimits {
        requests_per_second: limit("requests_per_second", requests_per_second),
        inputs_per_second: limit("inputs_per_second", inputs_per_second),
        tokens_per_minute: limit("tokens_per_minute", tokens_per_minute),
    };
    Some(Tenant { id: id.ok()?, index: 0, issuer, deployments, residency, priorities, weight, limits })
}

/// Reads the residency policy of a tenant. An area without regions is a problem: it allows none, which is a typing
/// error.
fn read_residency(
    allow: &[String],
    catalogue: Option<&Catalogue>,
    problems: &mut Vec<String>,
) -> ResidencyPolicy {
    let policy: ResidencyPolicy = match allow.join(",").parse() {
        Ok(policy) => policy,
        Err(error) => {
            problems.push(format!("residency.allow = {allow:?}: {error}"));
            return ResidencyPolicy::Anywhere;
        }
    };
    let length = policy.to_string().len();
    if length > MAX_RESIDENCY_LEN {
        problems.push(format!(
            "residency.allow has {length} bytes, the maximum is {MAX_RESIDENCY_LEN}; name jurisdictions instead of \
             regions"
        ));
        return ResidencyPolicy::Anywhere;
    }
    // An unreadable catalogue is reported separately.
    let found = catalogue.map(|catalogue| policy.check(catalogue)).unwrap_or_default();
    problems.extend(found.into_iter().map(|problem| format!("residency.allow = {allow:?}: {problem}")));
    policy
}

fn read_priorities(names: Option<Vec<String>>, problems: &mut Vec<String>) -> Priorities {
    let Some(names) = names else { return Priorities::default() };
    let mut priorities = BTreeSet::new();
    for name in &names {
        match priority::parse(name.as_bytes()) {
            Some(priority) => drop(priorities.insert(priority)),
            None => problems.push(format!("priorities contains \"{name}\"; use \"interactive\" or \"bulk\"")),
        }
    }
    match (priorities.pop_first(), priorities.pop_first()) {
        (Some(_), Some(_)) => Priorities::Both,
        (Some(only), None) => Priorities::Only(only),
        (None, _) => {
            if names.is_empty() {
                problems.push("priorities = [] allows none; name one, or remove it for both".to_owned());
            }
            Priorities::default()
        }
    }
}

/// Reads the API keys of a tenant: from a file, one a line, or from the environment, never from the TOML. A tenant with
/// an issuer needs none.
fn read_keys(
    raw: &RawTenant,
    base: &Path,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<String>, String> {
    let text = match (&raw.key_file, &raw.key_env) {
        (None, None) if raw.issuer.is_some() => return Ok(Vec::new()),
        (Some(path), None) => std::fs::read_to_string(base.join(path))
            .map_err(|error| format!("key_file = \"{}\" cannot be read: {error}", path.display()))?,
        (None, Some(variable)) => environment
            .get(variable)
            .cloned()
            .ok_or_else(|| format!("key_env = \"{variable}\" is not set in the environment"))?,
        (None, None) | (Some(_), Some(_)) => {
            return Err("needs one of key_file and key_env, or an issuer".to_owned());
        }
    };
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() { Err("the key is empty".to_owned()) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_core::keys::Credential;

    fn parse(text: &str) -> Result<KeyRing, Vec<String>> {
        let environment = [("DOCS_KEY", "s3cret"), ("TWO_KEYS", "old\nnew\n"), ("EMPTY", " ")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut problems = Vec::new();
        let catalogue = Catalogue::builtin();
        let (ring, _) = read(text, Path::new("/nowhere"), &environment, Some(&catalogue), &mut problems);
        if problems.is_empty() { Ok(ring) } else { Err(problems) }
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
        assert_eq!((tenant.priorities, tenant.weight.get()), (Priorities::Only(priority::Priority::Bulk), 2));
        assert_eq!(tenant.limits.tokens_per_minute, NonZeroU64::new(2_000_000));
        assert!(tenant.may_use(&"minilm".parse().unwrap()) && !tenant.may_use(&"other".parse().unwrap()));
    }

    #[test]
    fn a_tenant_may_have_two_keys_while_it_changes_them() {
        let ring = parse("[[tenant]]\nname = \"a\"\nkey_env = \"TWO_KEYS\"").expect("two keys");
        for key in ["Bearer old", "Bearer new"] {
            let credential = Credential::read(Some(key.as_bytes())).expect(key);
            assert_eq!(ring.tenant(&credential).expect(key).id.as_str(), "a");
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
        for (allow, near) in [("\"euu\"", "did you mean eu"), ("\"eu\", \"aws/us-esat-1\"", "aws/us-east-1")]
        {
            let problems = with(allow).expect_err(allow);
            assert_eq!(problems.len(), 1, "{problems:?}");
            for part in ["tenant \"docs\": residency.allow = ", allow, near] {
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
            ("bare", "priorities = []"),
            ("bare", "weight = 1001 is out of range; use 1 to 1000"),
            ("one", "weight = 0"),
            ("bare", "inputs_per_second = 0"),
            ("bare", "empty"),
            ("bare", "twice"),
            ("two", "another tenant"),
        ] {
            let prefix = format!("tenant \"{tenant}\": ");
            assert!(
                problems.iter().any(|problem| problem.starts_with(&prefix) && problem.contains(word)),
                "{word} of {tenant} in {problems:#?}"
            );
        }
        assert_eq!(problems.len(), 14, "{problems:#?}");
        assert_eq!(parse("").err().expect("no tenant").len(), 1);
    }
}
