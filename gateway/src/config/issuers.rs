//! `[[issuer]]` sections of `tenants.toml`: issuers of accepted tokens, and the rules for them.

use crate::tokens::{Issuer, Source};
use gateway_core::jwt::{IssuerRules, LEEWAY_DEFAULT, LEEWAY_MAX, TENANT_CLAIM_DEFAULT};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawIssuer {
    name: String,
    audience: String,
    keys_file: Option<PathBuf>,
    secret_file: Option<PathBuf>,
    tenant_claim: Option<String>,
    leeway_seconds: Option<u64>,
}

/// Validated issuers.
pub(super) struct Issuers {
    /// Names of all issuers, including invalid ones, so that a tenant that refers to an invalid issuer is not a second
    /// problem.
    pub(super) names: BTreeSet<String>,
    /// Valid issuers.
    pub(super) open: Vec<Issuer>,
}

/// Validates the issuers and reads their keys. Relative paths are relative to `base`.
pub(super) fn read(raw: Vec<RawIssuer>, base: &Path, problems: &mut Vec<String>) -> Issuers {
    let mut issuers = Issuers { names: BTreeSet::new(), open: Vec::new() };
    for raw in raw {
        let name = raw.name.clone();
        let mut found = Vec::new();
        if !issuers.names.insert(name.clone()) {
            found.push("is defined twice; keep one entry".to_owned());
        }
        issuers.open.extend(read_issuer(raw, base, &mut found));
        problems.extend(found.into_iter().map(|problem| format!("issuer \"{name}\": {problem}")));
    }
    issuers
}

fn read_issuer(raw: RawIssuer, base: &Path, problems: &mut Vec<String>) -> Option<Issuer> {
    let RawIssuer { name, audience, keys_file, secret_file, tenant_claim, leeway_seconds } = raw;
    let tenant_claim = tenant_claim.unwrap_or_else(|| TENANT_CLAIM_DEFAULT.to_owned());
    for (key, value) in [("name", &name), ("audience", &audience), ("tenant_claim", &tenant_claim)] {
        if value.is_empty() {
            problems.push(format!("{key} = \"\" matches no token; write the value in the token"));
        }
    }
    let leeway = leeway_seconds.map_or(LEEWAY_DEFAULT, Duration::from_secs);
    if leeway > LEEWAY_MAX {
        let max = LEEWAY_MAX.as_secs();
        problems.push(format!("leeway_seconds = {}; the maximum is {max}", leeway.as_secs()));
    }
    let source = match (keys_file, secret_file) {
        (Some(path), None) => Some(Source::Jwks(base.join(path))),
        (None, Some(path)) => Some(Source::Secret(base.join(path))),
        (None, None) | (Some(_), Some(_)) => {
            problems.push("needs one of keys_file and secret_file".to_owned());
            None
        }
    };
    let rules = IssuerRules { issuer: name, audience, tenant_claim, leeway };
    Issuer::open(rules, source?).map_err(|problem| problems.push(problem)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        #[derive(Deserialize)]
        struct File {
            issuer: Vec<RawIssuer>,
        }
        let file: File = toml::from_str(text).expect("TOML");
        let mut problems = Vec::new();
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("secret"), "a".repeat(32)).expect("a file");
        read(file.issuer, dir.path(), &mut problems);
        problems
    }

    #[test]
    fn all_problems_are_reported_at_once_with_their_issuer() {
        let good =
            "[[issuer]]\nname = \"good\"\naudience = \"m\"\nsecret_file = \"secret\"\nleeway_seconds = 300\n";
        assert_eq!(problems(good), [""; 0]);
        let found = problems(&format!(
            "{good}{good}\
             [[issuer]]\nname = \"bare\"\naudience = \"\"\nleeway_seconds = 301\n\
             [[issuer]]\nname = \"both\"\naudience = \"m\"\nkeys_file = \"k\"\nsecret_file = \"secret\"\n\
             [[issuer]]\nname = \"gone\"\naudience = \"m\"\nkeys_file = \"nowhere\"\n\
             [[issuer]]\nname = \"keys\"\naudience = \"m\"\nkeys_file = \"secret\"\ntenant_claim = \"\"\n"
        ));
        let expected = [
            ("good", "twice"),
            ("bare", "audience"),
            ("bare", "leeway_seconds = 301; the maximum is 300"),
            ("bare", "keys_file and secret_file"),
            ("both", "keys_file and secret_file"),
            ("gone", "cannot be read"),
            ("keys", "tenant_claim"),
            ("keys", "not JSON"),
        ];
        for (issuer, word) in expected {
            let prefix = format!("issuer \"{issuer}\": ");
            let reported = found.iter().any(|problem| problem.starts_with(&prefix) && problem.contains(word));
            assert!(reported, "{word} of {issuer} in {found:#?}");
        }
        assert_eq!(found.len(), expected.len(), "{found:#?}");
    }
}
