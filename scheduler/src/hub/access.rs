//! Access control of the hub: which peers may use which path, by [`scheduler_api::paths::HUB_ENDPOINTS`].
//!
//! It is a layer around all paths, so a handler cannot forget it, and it runs before a body is read. The handlers verify
//! that a peer acts for its own region ([`Caller::check_region`]). A process has a certificate; a person has one, or a
//! token of an identity provider where the hub is configured for it ([`super::operators`]). A token opens only the paths
//! of the roles `viewer` and `operator`. A hub without an identity serves this machine only, and there every client may
//! do everything.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath, Request, State};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use identity::{ClientIdentity, ConnectedClient, PeerIdentity};
use regions::RegionId;
use regions::spiffe::Role;
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::paths;
use scheduler_core::operators::TokenOperator;
use scheduler_store::Store;

use super::api::HubApi;
use super::denials::{DenialReason, Denials};
use super::operators::OperatorTokens;
use super::operators::rejection::TokenRejection;
use crate::respond::ErrorResponse;

/// Authenticated sender of a request.
#[derive(Clone, Debug)]
pub(super) enum Caller {
    /// Process of this machine, of a hub without an identity.
    Local,
    /// Owner of a certificate.
    Certified(PeerIdentity),
    /// Owner of a token.
    Token(TokenOperator),
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ErrorResponse> {
        let unknown = || ErrorResponse::new(ErrorCode::Internal, "The caller of the request is unknown.");
        parts.extensions.get::<Caller>().cloned().ok_or_else(unknown)
    }
}

impl Caller {
    /// Authenticates the sender of a request. `is_for_tokens`: whether the path is open to tokens.
    pub(super) async fn authenticate(
        peer: &ConnectedClient,
        is_for_tokens: bool,
        headers: &HeaderMap,
        path: &str,
        (tokens, denials): (Option<&OperatorTokens>, &Denials),
    ) -> Result<Caller, ErrorResponse> {
        let address = peer.address;
        match &peer.identity {
            ClientIdentity::Plaintext => Ok(Caller::Local),
            ClientIdentity::Verified(identity) => Ok(Caller::Certified(identity.clone())),
            ClientIdentity::Anonymous => match tokens.filter(|_| is_for_tokens) {
                Some(tokens) => {
                    let authenticated = tokens.authenticate(headers).await;
                    authenticated
                        .map(Caller::Token)
                        .map_err(|reason| unauthenticated(reason, address, path, denials))
                }
                None => {
                    let problem = "a client without a certificate may not use this path";
                    denials.record(&address.ip().to_string(), DenialReason::Role, path, problem);
                    let message =
                        "This path needs a client certificate of the fleet; join with a token first.";
                    Err(ErrorResponse::new(HubErrorCode::Forbidden, message))
                }
            },
        }
    }

    /// Verifies that the sender has one of these roles.
    ///
    /// # Errors
    ///
    /// The rejection, with the role that the sender has and those that it needs.
    pub(super) fn check_role(
        &self,
        roles: &[Role],
        (method, path): (&str, &str),
        denials: &Denials,
    ) -> Result<(), ErrorResponse> {
        let (name, role) = match self {
            Caller::Local => return Ok(()),
            Caller::Certified(peer) => (peer.id.to_string(), Some(peer.role())),
            Caller::Token(operator) => (format!("token of {}", operator.subject), operator.role),
        };
        if role.is_some_and(|role| roles.contains(&role)) {
            return Ok(());
        }
        let allowed = roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ");
        let message = match role {
            Some(role) => format!("the role {role} may not send {method} to this path"),
            None => format!("a token without a role may not send {method} to this path"),
        };
        denials.record(&name, DenialReason::Role, path, &message);
        let fix = match role {
            Some(_) => "",
            None => "; operators.viewers and operators.operators of the hub name the values that give a role",
        };
        Err(ErrorResponse::new(HubErrorCode::Forbidden, format!("{message}; it is open to: {allowed}{fix}.")))
    }

    /// Verifies that a peer acts for the region in its certificate; operators act for every region.
    pub(super) fn check_region<S: Store>(
        &self,
        api: &HubApi<S>,
        region: &RegionId,
        path: &str,
    ) -> Result<(), ErrorResponse> {
        let Caller::Certified(peer) = self else { return Ok(()) };
        match peer.id.region() {
            None => Ok(()),
            Some(own) if own == region => Ok(()),
            Some(own) => {
                let message = format!("a {} of {own} may not act for {region}", peer.role());
                api.denials.record(&peer.id.to_string(), DenialReason::Region, path, &message);
                let fix = "send the request from that region, with an identity of it";
                Err(ErrorResponse::new(HubErrorCode::Forbidden, format!("{message}; {fix}."))
                    .with_field("region"))
            }
        }
    }

    /// Verifies the same, and that the peer has the role of a reader of the route table.
    pub(super) fn check_reader<S: Store>(
        &self,
        api: &HubApi<S>,
        reader: &scheduler_api::reader::Reader,
        path: &str,
    ) -> Result<(), ErrorResponse> {
        let needed = match reader.role {
            scheduler_api::reader::Role::Gateway => Role::Gateway,
            scheduler_api::reader::Role::Spoke => Role::Spoke,
        };
        let (name, role) = match self {
            Caller::Local => return Ok(()),
            Caller::Certified(peer) if peer.role() == needed => {
                return self.check_region(api, &reader.region, path);
            }
            Caller::Certified(peer) => (peer.id.to_string(), peer.role().as_str()),
            Caller::Token(operator) => (format!("token of {}", operator.subject), "token"),
        };
        let message = format!("a {role} may not acknowledge route tables as a {needed}");
        api.denials.record(&name, DenialReason::Role, path, &message);
        Err(ErrorResponse::new(HubErrorCode::Forbidden, format!("{message}.")).with_field("reader"))
    }
}

fn unauthenticated(
    reason: TokenRejection,
    address: SocketAddr,
    path: &str,
    denials: &Denials,
) -> ErrorResponse {
    denials.record_unauthenticated(address.ip(), reason, path);
    let message = format!("{}.", reason.message());
    ErrorResponse::unauthorized(message, !matches!(reason, TokenRejection::Missing))
}

/// Admits a request if the role of its peer may use the path.
pub(super) async fn check<S: Store>(
    State(api): State<HubApi<S>>,
    ConnectInfo(peer): ConnectInfo<ConnectedClient>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.extensions().get().map_or("", MatchedPath::as_str).to_owned();
    let Some(roles) = paths::roles(request.method().as_str(), &path) else {
        let message = "This path does not support the method.";
        return ErrorResponse::new(ErrorCode::MethodNotAllowed, message).into_response();
    };
    let is_for_tokens = roles.contains(&Role::Operator);
    let means = (api.tokens.as_deref(), &*api.denials);
    let admitted = match Caller::authenticate(&peer, is_for_tokens, request.headers(), &path, means).await {
        Ok(caller) => {
            let checked = caller.check_role(roles, (request.method().as_str(), &path), &api.denials);
            checked.map(|()| caller)
        }
        Err(rejected) => Err(rejected),
    };
    match admitted {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(rejected) => rejected.into_response(),
    }
}
