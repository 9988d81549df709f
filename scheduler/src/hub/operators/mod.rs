//! Operators with tokens: the keys of their issuer, and the authentication of a request.
//!
//! ```text
//!  issuer or file ──follow──▶ keys ◀──authenticate── request without a certificate
//!       ▲                                  │ unknown key: at most one fetch a minute
//!       └──────────────────────────────────┘
//! ```
//!
//! [`scheduler_core::operators`] verifies tokens and decides when keys are fetched. The last valid set stays in use while
//! the issuer is unreachable. A hub that starts without one rejects all tokens until it has one; certificates still work.

mod fetch;
pub(super) mod rejection;

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use jwt::TokenProblem;
use jwt::jwks::{self, NamedKey};
use scheduler_client::unix_time;
use scheduler_core::operators::{
    FETCH_PAUSE, FETCH_PERIOD, KeySetSchedule, OperatorRules, READ_PERIOD, TokenOperator, authenticate,
};
use supervision::{Mutex, RwLock};

use super::scrape::HubMetrics;
use crate::config::{KeySource, OperatorsConfig};
use crate::events::{IssuerKeysRejected, IssuerKeysReplaced};
use fetch::KeySetClient;
use rejection::TokenRejection;

/// Authentication of operators with tokens.
pub(super) struct OperatorTokens {
    rules: OperatorRules,
    source: Source,
    keys: RwLock<Arc<Vec<NamedKey>>>,
    schedule: Mutex<KeySetSchedule>,
    /// Last logged problem of the key set.
    problem: Mutex<Option<String>>,
    metrics: Arc<HubMetrics>,
}

enum Source {
    File(std::path::PathBuf),
    Url(KeySetClient),
}

impl OperatorTokens {
    /// Creates the authentication, without keys.
    ///
    /// # Errors
    ///
    /// When the authorities of the issuer's URL cannot be used.
    pub(super) fn new(config: OperatorsConfig, metrics: Arc<HubMetrics>) -> Result<OperatorTokens, String> {
        let OperatorsConfig { rules, keys } = config;
        let (source, period, pause) = match keys {
            KeySource::File(path) => (Source::File(path), READ_PERIOD, READ_PERIOD),
            KeySource::Url { url, authorities } => {
                (Source::Url(KeySetClient::new(url, authorities.as_deref())?), FETCH_PERIOD, FETCH_PAUSE)
            }
        };
        Ok(OperatorTokens {
            rules,
            source,
            keys: RwLock::independent(Arc::default()),
            schedule: Mutex::independent(KeySetSchedule::new(period, pause)),
            problem: Mutex::independent(None),
            metrics,
        })
    }

    /// Authenticates a request by its headers. A token with an unknown key waits for the keys of the issuer, if they may
    /// be fetched again.
    pub(super) async fn authenticate(&self, headers: &HeaderMap) -> Result<TokenOperator, TokenRejection> {
        let authenticated = self.verify(headers).await;
        authenticated.inspect_err(|reason| self.metrics.operators.rejections.count(*reason))
    }

    async fn verify(&self, headers: &HeaderMap) -> Result<TokenOperator, TokenRejection> {
        let token = bearer(headers).ok_or(TokenRejection::Missing)?;
        let verify = || {
            let keys = self.keys.read().clone();
            authenticate(token, &self.rules, unix_time(), |input| jwt::verify(&keys, input))
        };
        match verify() {
            Err(TokenProblem::Key) if self.begin_for_unknown_key() => {
                self.fetch().await;
                Ok(verify()?)
            }
            verified => Ok(verified?),
        }
    }

    fn begin_for_unknown_key(&self) -> bool {
        self.schedule.lock().begin_for_unknown_key(Instant::now())
    }

    /// Keeps the keys current; never returns.
    pub(super) async fn follow(self: Arc<OperatorTokens>) {
        loop {
            let begun = self.schedule.lock().begin_periodic(Instant::now());
            match begun {
                Ok(()) => self.fetch().await,
                Err(left) => tokio::time::sleep(left).await,
            }
        }
    }

    async fn fetch(&self) {
        let fetched = match &self.source {
            Source::File(path) => read_file(path.clone()).await,
            Source::Url(client) => client.fetch().await,
        };
        let read = fetched.and_then(|bytes| jwks::read(&bytes));
        self.schedule.lock().ended(read.is_ok());
        match read {
            Ok(keys) => {
                self.metrics.operators.key_fetches.add(1);
                *self.problem.lock() = None;
                let count = keys.len();
                let has_changed = {
                    let mut current = self.keys.write();
                    let has_changed = **current != keys;
                    *current = Arc::new(keys);
                    has_changed
                };
                if has_changed {
                    IssuerKeysReplaced { issuer: &self.rules.token.issuer, keys: count }.emit();
                }
            }
            Err(problem) => {
                self.metrics.operators.key_fetch_failures.add(1);
                let is_new = self.problem.lock().replace(problem.clone()).as_ref() != Some(&problem);
                if is_new {
                    IssuerKeysRejected { issuer: &self.rules.token.issuer, problem: &problem }.emit();
                }
            }
        }
    }
}

/// Returns the only bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(only), None) = (given.next(), given.next()) else { return None };
    let (scheme, token) = only.as_bytes().split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// Reads a key set, up to one byte more than its maximum size.
async fn read_file(path: std::path::PathBuf) -> Result<Vec<u8>, String> {
    let shown = path.display().to_string();
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(jwks::JWKS_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    });
    let read = read.await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    read.map_err(|error| format!("{shown} cannot be read: {error}"))
}

/// Time limit of a fetch, with the request that waits for it.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
