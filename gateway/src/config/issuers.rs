//! `[[issuer]]` sections of `tenants.toml`: issuers of accepted tokens, and the rules for them.

use crate::tokens::{Issuer, IssuerRules, Source};
use configuration::{ConfigFile, Files, section};
use jwt::{LEEWAY_MAX, TokenRules};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// Default of the claim that names the tenant.
const TENANT_CLAIM_DEFAULT: &str = "tenant";
/// Default of the tolerated difference between the clocks of issuer and gateway.
const LEEWAY_DEFAULT: Duration = Duration::from_secs(30);

section! {
    /// Issuer of tokens (JWT), instead of keys or in addition.
    pub(super) partial struct IssuerEntry {
        /// Exact value of the claim `iss`.
        name: String, like "\"https://login.example.com/\"", check is_not_empty;
        /// Required value in the claim `aud`.
        audience: String, like "\"meridian\"", check is_not_empty;
        /// JSON Web Key Set with public keys.
        keys_file: Option<PathBuf>;
        /// File with a secret for HS256, instead of `keys_file`.
        secret_file: Option<PathBuf>;
        /// Claim with the tenant's name.
        tenant_claim: String = TENANT_CLAIM_DEFAULT.to_owned(), check is_not_empty;
        /// Permitted clock difference in seconds.
        leeway_seconds: u64 = LEEWAY_DEFAULT.as_secs(), in 0..=LEEWAY_MAX.as_secs();
    }
}

fn is_not_empty(text: &str) -> Result<(), String> {
    if text.is_empty() { Err("matches no token; write the value in the token".to_owned()) } else { Ok(()) }
}

/// Validated issuers.
pub(super) struct Issuers {
    /// Names of all issuers, including invalid ones, so that a tenant that refers to an invalid issuer is not a second
    /// problem.
    pub(super) names: BTreeSet<String>,
    /// Valid issuers.
    pub(super) open: Vec<Issuer>,
}

/// Validates the issuers and reads their keys.
pub(super) fn read(document: &ConfigFile<'_>, files: &Files<'_>, entries: Vec<IssuerEntry>) -> Issuers {
    let mut issuers = Issuers { names: BTreeSet::new(), open: Vec::new() };
    for (index, entry) in entries.into_iter().enumerate() {
        let path = format!("issuer[{index}]");
        if entry.name.as_ref().is_some_and(|name| !issuers.names.insert(name.clone())) {
            document.problem(&path, "is defined twice; keep one entry");
        }
        issuers.open.extend(entry.open(document, files, &path));
    }
    issuers
}

impl IssuerEntry {
    fn open(self, document: &ConfigFile<'_>, files: &Files<'_>, path: &str) -> Option<Issuer> {
        let IssuerEntry { name, audience, keys_file, secret_file, tenant_claim, leeway_seconds } = self;
        let (key, source) = match (keys_file?, secret_file?) {
            (Some(path), None) => ("keys_file", Source::Jwks(files.path(path))),
            (None, Some(path)) => ("secret_file", Source::Secret(files.path(path))),
            (None, None) | (Some(_), Some(_)) => {
                document.problem(path, "needs one of keys_file and secret_file");
                return None;
            }
        };
        // The file is read also where other keys are invalid, so that its problems are reported with theirs.
        let token = TokenRules {
            issuer: name.unwrap_or_default(),
            audience: audience.unwrap_or_default(),
            leeway: leeway_seconds.map_or(LEEWAY_DEFAULT, Duration::from_secs),
        };
        let rules = IssuerRules { token, tenant_claim: tenant_claim.unwrap_or_default() };
        let opened = Issuer::open(rules, source);
        opened.map_err(|problem| document.problem(&format!("{path}.{key}"), problem)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("secret"), "a".repeat(32)).expect("a file");
        section! {
            /// File with issuers.
            struct File {
                /// Issuers.
                issuer: Vec<IssuerEntry>;
            }
        }
        let files = Files { base: dir.path(), environment: None };
        let read = ConfigFile::read(text, |document| {
            Some(read(document, &files, document.section::<File>()?.issuer))
        });
        read.err().unwrap_or_default().iter().map(ToString::to_string).collect()
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
            ("bare", "leeway_seconds: 301 is out of range; write a whole number from 0 to 300"),
            ("bare", "keys_file and secret_file"),
            ("both", "keys_file and secret_file"),
            ("gone", "cannot be read"),
            ("keys", "tenant_claim"),
            ("keys", "not JSON"),
        ];
        for (issuer, word) in expected {
            let name = format!("issuer \"{issuer}\": ");
            let reported = found.iter().any(|problem| problem.contains(&name) && problem.contains(word));
            assert!(reported, "{word} of {issuer} in {found:#?}");
        }
        assert_eq!(found.len(), expected.len(), "{found:#?}");
    }
}
