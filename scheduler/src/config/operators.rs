//! Reader of the section `[operators]` of `hub.toml`.

use std::path::PathBuf;
use std::time::Duration;

use configuration::{ConfigFile, Files, section};
use jwt::{LEEWAY_MAX, TokenRules};
use scheduler_core::operators::{OperatorRules, ROLE_VALUES_MAX, ROLES_CLAIM};
use url::Url;

section! {
    /// Tokens (JWT) of an identity provider (OpenID Connect), with which persons use the hub and `meridian pki` without a
    /// certificate; none are accepted without this table.
    pub(super) partial struct OperatorsSection {
        /// Exact value of the claim `iss`.
        issuer: String, like "\"https://login.example.com\"", check is_not_empty;
        /// Required value in the claim `aud`.
        audience: String, like "\"meridian\"", check is_not_empty;
        /// JSON Web Key Set of the issuer, which is read again every 5 seconds.
        jwks_file: Option<PathBuf>;
        /// URL of the key set, instead of the file; it is fetched every 10 minutes, and for a token with an unknown key.
        jwks_url: Option<String>;
        /// Certificates of the authorities of that URL, PEM; those of the system if absent.
        jwks_ca: Option<PathBuf>;
        /// Claim with the roles: a text or a list of texts.
        roles_claim: String = ROLES_CLAIM.to_owned(), check is_not_empty;
        /// Values of that claim that give the role `viewer`, which only reads.
        viewers: Vec<String> = vec!["viewer".to_owned()], in 0..=ROLE_VALUES_MAX;
        /// Values of that claim that give the role `operator`, which reads and writes.
        operators: Vec<String> = vec!["operator".to_owned()], in 0..=ROLE_VALUES_MAX;
        /// Permitted difference between the clocks of the issuer and the hub.
        leeway: Duration = LEEWAY_MAX, in Duration::ZERO..=LEEWAY_MAX;
    }
}

fn is_not_empty(text: &str) -> Result<(), String> {
    if text.is_empty() { Err("matches no token; write the value in the token".to_owned()) } else { Ok(()) }
}

/// Source of the issuer's keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// File with a key set.
    File(PathBuf),
    /// Key set that is fetched.
    Url {
        /// Its URL, with `https`.
        url: Url,
        /// Certificates of its authorities; those of the system if absent.
        authorities: Option<PathBuf>,
    },
}

/// Configuration of operators with tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorsConfig {
    /// Rules for tokens.
    pub rules: OperatorRules,
    /// Keys.
    pub keys: KeySource,
}

/// Reads the section. `is_tls`: whether the hub has an identity; without TLS, anyone on the path could read a token.
pub(super) fn read(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    section: Option<OperatorsSection>,
    is_tls: bool,
) -> Option<Option<OperatorsConfig>> {
    let Some(section) = section else { return Some(None) };
    let OperatorsSection { issuer, audience, jwks_file, jwks_url, jwks_ca, roles_claim, viewers, .. } =
        section;
    if !is_tls {
        document.problem(
            "operators",
            "needs the identity of the hub, because tokens need TLS; add [identity] with dir",
        );
    }
    let keys = match (jwks_file?, jwks_url?, jwks_ca?) {
        (Some(file), None, None) => Some(KeySource::File(files.path(file))),
        (None, Some(text), ca) => match Url::parse(&text) {
            Ok(url) if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() => {
                let problem =
                    "has a user, a password or a part after #, which are not sent; write https://HOST/PATH";
                document.problem("operators.jwks_url", problem);
                None
            }
            Ok(url) if url.scheme() == "https" && url.has_host() => {
                Some(KeySource::Url { url, authorities: ca.map(|path| files.path(path)) })
            }
            Ok(_) | Err(_) => {
                let problem = format!("\"{text}\" is not a URL with https; write https://HOST/PATH");
                document.problem("operators.jwks_url", problem);
                None
            }
        },
        (Some(_), None, Some(_)) => {
            document.problem("operators.jwks_ca", "belongs to jwks_url; remove it");
            None
        }
        (None, None, _) | (Some(_), Some(_), _) => {
            document.problem("operators", "needs one of jwks_file and jwks_url: the keys of the issuer");
            None
        }
    };
    let token = TokenRules { issuer: issuer?, audience: audience?, leeway: section.leeway? };
    let rules =
        OperatorRules { token, roles_claim: roles_claim?, viewers: viewers?, operators: section.operators? };
    if !is_tls {
        return None;
    }
    Some(Some(OperatorsConfig { rules, keys: keys? }))
}
