//! Access control of the hub: which peers may use which path, by [`scheduler_api::paths::HUB_ENDPOINTS`].
//!
//! It is a layer around all paths, so a handler cannot forget it, and it runs before a body is read. The handlers verify
//! that a peer acts for its own region ([`Caller::check_region`]). A hub without an identity serves this machine only, and
//! there every client may do everything.

use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use identity::{ConnectedClient, PeerIdentity};
use regions::RegionId;
use regions::spiffe::Role;
use scheduler_api::paths;
use scheduler_store::Store;

use super::api::HubApi;
use super::denials::DenialReason;
use crate::respond::{Code, ErrorResponse};

/// Peer that sent a request; none over plaintext.
#[derive(Clone, Debug)]
pub(super) struct Caller(pub(super) Option<PeerIdentity>);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ErrorResponse> {
        let found = parts.extensions.get::<ConnectInfo<ConnectedClient>>();
        let unknown = || ErrorResponse::new(Code::Internal, "The connection of the request is unknown.");
        found.map(|ConnectInfo(peer)| Caller(peer.identity.clone())).ok_or_else(unknown)
    }
}

impl Caller {
    /// Verifies that a peer acts for the region in its certificate; operators act for every region.
    pub(super) fn check_region<S: Store>(
        &self,
        api: &HubApi<S>,
        region: &RegionId,
        path: &str,
    ) -> Result<(), ErrorResponse> {
        let Some(peer) = &self.0 else { return Ok(()) };
        match peer.id.region() {
            None => Ok(()),
            Some(own) if own == region => Ok(()),
            Some(own) => {
                let message = format!("a {} of {own} may not act for {region}", peer.role());
                api.denials.record(peer, DenialReason::Region, path, &message);
                let fix = "send the request from that region, with an identity of it";
                Err(ErrorResponse::new(Code::Forbidden, format!("{message}; {fix}.")).with_field("region"))
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
        let Some(peer) = &self.0 else { return Ok(()) };
        let role = match reader.role {
            scheduler_api::reader::Role::Gateway => Role::Gateway,
            scheduler_api::reader::Role::Spoke => Role::Spoke,
        };
        if peer.role() != role {
            let message = format!("a {} may not acknowledge route tables as a {role}", peer.role());
            api.denials.record(peer, DenialReason::Role, path, &message);
            return Err(ErrorResponse::new(Code::Forbidden, format!("{message}.")).with_field("reader"));
        }
        self.check_region(api, &reader.region, path)
    }
}

/// Admits a request if the role of its peer may use the path.
pub(super) async fn check<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    request: Request,
    next: Next,
) -> Response {
    let path = request.extensions().get().map_or("", MatchedPath::as_str);
    let Some(roles) = paths::roles(request.method().as_str(), path) else {
        let message = "This path does not support the method.";
        return ErrorResponse::new(Code::MethodNotAllowed, message).into_response();
    };
    let Some(peer) = &caller.0 else { return next.run(request).await };
    if roles.contains(&peer.role()) {
        return next.run(request).await;
    }
    let allowed = roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ");
    let message = format!("the role {} may not send {} to this path", peer.role(), request.method());
    api.denials.record(peer, DenialReason::Role, path, &message);
    ErrorResponse::new(Code::Forbidden, format!("{message}; it is open to: {allowed}.")).into_response()
}
