//! Authentication: API keys of the tenants, and signed tokens of their issuers.

use super::refusals::{invalid_api_key, invalid_token};
use super::request_head::single;
use crate::respond::Rejection;
use crate::tokens::TokenVerifier;
use gateway_core::jwt;
use gateway_core::keys::{Credential, Digest, KeyRing};
use gateway_core::tenant::Tenant;
use http::header::AUTHORIZATION;
use pingora::protocols::http::ServerSession;
use replica_api::headers;
use std::sync::Arc;
use std::time::SystemTime;

/// Authenticator of client requests.
pub(super) struct Authenticator {
    pub(super) tokens: Arc<TokenVerifier>,
}

/// Authenticated tenant, and its key unless it was authenticated by a token.
pub(super) struct Authenticated {
    pub(super) tenant: Arc<Tenant>,
    pub(super) key: Option<Digest>,
}

impl Authenticator {
    /// Authenticates the request: the tenant, and its key unless it was a token.
    pub(super) fn tenant(&self, session: &ServerSession, ring: &KeyRing) -> Result<Authenticated, Rejection> {
        let authorization = session.get_header(AUTHORIZATION).map(http::HeaderValue::as_bytes);
        let keys = [single(session, headers::API_KEY)?, single(session, headers::X_API_KEY)?];
        let credential = Credential::of_request(authorization, keys).map_err(invalid_api_key)?;
        match ring.tenant(&credential) {
            Ok(tenant) => Ok(Authenticated { tenant: tenant.clone(), key: Some(credential.digest) }),
            Err(_) if !self.tokens.is_empty() && jwt::has_token_shape(credential.secret) => {
                let tenant =
                    self.tokens.tenant(&credential, ring, SystemTime::now()).map_err(invalid_token)?;
                Ok(Authenticated { tenant, key: None })
            }
            Err(problem) => Err(invalid_api_key(problem)),
        }
    }
}
