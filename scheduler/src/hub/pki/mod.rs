//! Built-in certificate authority of a hub: listener, paths, and the hub's own identity folder.
//!
//! [`service`] has the operations, [`signer`] the signatures, `csr` the requests for certificates, [`init`] the first
//! identities. The decisions are in [`scheduler_core::pki`]. The listener has its own port, so that the other one of the
//! hub requires a certificate, and a firewall can limit who may join.

mod closed_tokens;
mod csr;
pub mod init;
mod service;
mod signer;

pub use closed_tokens::distrust as distrust_tokens;
pub use signer::{SignerError, create_authority};

use std::future::IntoFuture;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, DefaultBodyLimit, RawQuery, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use identity::{ConnectedClient, ConnectionFailures, PeerIdentity, ProcessIdentity, ServerTls, listener};
use regions::Catalogue;
use regions::spiffe::Role;
use replica_api::error::ErrorCode;
use scheduler_api::keys;
use scheduler_api::paths::{self, TrustQuery};
use scheduler_api::pki::{
    CertificatesV1, IssuedV1, JoinV1, NewTokenResponseV1, NewTokenV1, RenewV1, RevocationsV1, RevokeV1,
    RotateV1, RotationV1, TrustV1,
};
use scheduler_client::authority::{KeyRequest, install_issued};
use scheduler_client::identity_folder::IdentityFolder;
use scheduler_core::pki::CLOCK_SKEW_MAX;
use scheduler_core::pki::issue::{self, CSR_BYTES_MAX};
use scheduler_core::pki::trust::{CertificateSerial, TrustState};
use scheduler_store::{Event, Store, Watch};
use supervision::task::{essential, supervise};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::access::Caller;
use super::api::{Body, json_of};
use super::backup;
use super::denials::{Denials, JoinRejection};
use super::operators::OperatorTokens;
use super::{CONNECTIONS_MAX, PEERS, PROTOCOLS};
use super::{HubError, records, stopped};
use crate::config::AuthorityConfig;
use crate::events::{AuthorityStarted, JoinTokensDeleted, OwnCertificateFailed, OwnCertificateRenewed};
use crate::respond::ErrorResponse;
use service::{IssuingAuthority, PkiError, unix_time};
use signer::{AuthoritySigner, CommandSigner, FileSigner};

/// Maximum bytes of a body: a request for a certificate or the certificate of an authority, with its JSON.
const BODY_BYTES_MAX: usize = 4 * CSR_BYTES_MAX;
/// Pause after a failure of the store.
const STORE_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which expired records are deleted, and the hub's own certificate is checked.
const UPKEEP_PERIOD: Duration = Duration::from_secs(60);
/// Part of a certificate's life that is before its issue.
const SKEW: Duration = CLOCK_SKEW_MAX;

/// Shared state of the handlers.
struct PkiApi<S> {
    authority: Arc<IssuingAuthority<S>>,
    trust: watch::Receiver<Option<Arc<TrustState>>>,
    stopping: watch::Receiver<bool>,
    denials: Arc<Denials>,
    tokens: Option<Arc<OperatorTokens>>,
}

impl<S> Clone for PkiApi<S> {
    fn clone(&self) -> PkiApi<S> {
        let PkiApi { authority, trust, stopping, denials, tokens } = self;
        PkiApi {
            authority: authority.clone(),
            trust: trust.clone(),
            stopping: stopping.clone(),
            denials: denials.clone(),
            tokens: tokens.clone(),
        }
    }
}

/// Parts of the hub that the authority shares.
pub(super) struct AuthorityParts<S> {
    /// Listener, which the caller has bound so that a conflict is an error at start.
    pub(super) bound: TcpListener,
    pub(super) store: S,
    pub(super) identity: Arc<ProcessIdentity>,
    pub(super) catalogue: Arc<Catalogue>,
    /// Counters of rejected connections.
    pub(super) refused: Arc<ConnectionFailures>,
    /// Counters of denied requests.
    pub(super) denials: Arc<Denials>,
    /// Authentication of operators with tokens, if it is configured.
    pub(super) tokens: Option<Arc<OperatorTokens>>,
}

/// Runs the authority until `stopping`.
pub(super) async fn run<S: Store>(
    config: AuthorityConfig,
    parts: AuthorityParts<S>,
    stopping: watch::Receiver<bool>,
) -> Result<(), HubError> {
    let AuthorityParts { bound, store, identity, catalogue, refused, denials, tokens } = parts;
    let AuthorityConfig { listen, dir, signer, validity, identity: folder } = config;
    let external = signer.is_some();
    let signer: Arc<dyn AuthoritySigner> = match signer {
        Some(command) => Arc::new(CommandSigner::new(command, tokio::runtime::Handle::current())),
        None => Arc::new(FileSigner::new(dir.clone())),
    };
    let created_in = (!external).then(|| dir.clone());
    let authority = Arc::new(IssuingAuthority::new(store.clone(), signer, catalogue, validity, created_in));
    let unusable = |error: &dyn std::fmt::Display| HubError::Authority(format!("{listen}: {error}"));
    let tls =
        ServerTls::with_optional_client(&identity, PEERS, PROTOCOLS).map_err(|error| unusable(&error))?;
    let (listener, acceptor) =
        listener::listen(bound, Some(tls), CONNECTIONS_MAX, refused).map_err(|error| unusable(&error))?;
    let (publish, trust) = watch::channel(None);
    let api = PkiApi {
        authority: authority.clone(),
        trust: trust.clone(),
        stopping: stopping.clone(),
        denials,
        tokens,
    };
    let mut tasks = JoinSet::new();
    let beginning = async {
        begin(&authority, &dir).await?;
        restore_closed_tokens(&authority, &folder).await
    };
    tokio::select! {
        begun = beginning => begun?,
        () = stopped(stopping.clone()) => return Ok(()),
    }
    tasks.spawn(supervise("join tokens", {
        let (store, closed, folder) = (store.clone(), authority.closed.clone(), folder.clone());
        move || closed_tokens::follow(store.clone(), closed.clone(), folder.clone(), unix_time)
    }));
    let folder = IdentityFolder::new(folder);
    tasks.spawn(supervise("authority state", {
        let (folder, identity) = (folder.clone(), identity.clone());
        move || follow_trust(store.clone(), publish.clone(), folder.clone(), identity.clone())
    }));
    tasks.spawn(supervise("authority upkeep", {
        let (authority, identity) = (authority.clone(), identity.clone());
        move || upkeep(authority.clone(), folder.clone(), identity.clone(), trust.clone())
    }));
    tasks.spawn(async {
        essential("authority connections", acceptor.run()).await;
    });
    AuthorityStarted { address: listen }.emit();
    let service = router(api).into_make_service_with_connect_info::<ConnectedClient>();
    let server = axum::serve(listener, service).with_graceful_shutdown(stopped(stopping)).into_future();
    let served = server.await.map_err(HubError::Server);
    tasks.shutdown().await;
    served
}

/// Writes the first state to the store, unless there is one.
async fn begin<S: Store>(
    authority: &Arc<IssuingAuthority<S>>,
    dir: &std::path::Path,
) -> Result<(), HubError> {
    loop {
        match authority.store.get(keys::TRUST).await {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => {
                let dir = dir.to_owned();
                let read = tokio::task::spawn_blocking(move || init::read_first(&dir, unix_time())).await;
                let read = read.unwrap_or_else(|error| Err(error.to_string()));
                let (first, certificates) = read.map_err(HubError::Authority)?;
                match authority.begin(first, certificates).await {
                    Ok(()) => return Ok(()),
                    Err(error) => crate::events::StoreFailed { error: &error }.emit(),
                }
            }
            Err(error) => crate::events::StoreFailed { error: &error }.emit(),
        }
        tokio::time::sleep(STORE_PAUSE).await;
    }
}

/// Returns whether `meridian restore` has restored the hub of an identity folder without its store, and the hub has not
/// started since.
pub(super) async fn is_restored(folder: std::path::PathBuf) -> bool {
    let read = tokio::task::spawn_blocking(move || closed_tokens::read(&folder)).await;
    read.is_ok_and(|read| read.is_incomplete)
}

/// Reads the tokens that were used or revoked; after a restoration, it deletes all tokens of the store instead.
async fn restore_closed_tokens<S: Store>(
    authority: &IssuingAuthority<S>,
    folder: &std::path::Path,
) -> Result<(), HubError> {
    let unusable = |error: &dyn std::fmt::Display| HubError::Authority(error.to_string());
    let from = folder.to_owned();
    let read = tokio::task::spawn_blocking(move || closed_tokens::read(&from)).await;
    let closed_tokens::ReadTokens { tokens, is_incomplete } = read.map_err(|error| unusable(&error))?;
    if is_incomplete {
        loop {
            match authority.delete_all_tokens().await {
                Ok(tokens) => break JoinTokensDeleted { tokens }.emit(),
                Err(error) => crate::events::StoreFailed { error: &error }.emit(),
            }
            tokio::time::sleep(STORE_PAUSE).await;
        }
        let (to, none) = (folder.to_owned(), tokens.clone());
        let written = tokio::task::spawn_blocking(move || closed_tokens::write(&to, &none)).await;
        let written = written.unwrap_or_else(|error| Err(io::Error::other(error)));
        written.map_err(|error| unusable(&format!("{}: {error}", folder.display())))?;
    }
    *authority.closed.lock() = tokens;
    Ok(())
}

/// Follows the record of the trusted state: publishes it to the polls, and applies it to this hub.
async fn follow_trust<S: Store>(
    store: S,
    publish: watch::Sender<Option<Arc<TrustState>>>,
    folder: IdentityFolder,
    identity: Arc<ProcessIdentity>,
) {
    loop {
        if let Ok(range) = store.range(keys::TRUST).await {
            for entry in range.entries.iter().filter(|entry| entry.key == keys::TRUST) {
                apply(records::trust(entry), &publish, &folder, &identity).await;
            }
            let mut watch = store.watch(keys::TRUST, range.revision + 1);
            while let Ok(events) = watch.next().await {
                for event in events {
                    if let Event::Put(entry) = event
                        && entry.key == keys::TRUST
                    {
                        apply(records::trust(&entry), &publish, &folder, &identity).await;
                    }
                }
            }
        }
        tokio::time::sleep(STORE_PAUSE).await;
    }
}

async fn apply(
    read: Result<TrustState, records::RecordError>,
    publish: &watch::Sender<Option<Arc<TrustState>>>,
    folder: &IdentityFolder,
    identity: &Arc<ProcessIdentity>,
) {
    let Some(offered) = super::term_start::readable(read) else { return };
    let folder = folder.clone();
    let written = tokio::task::spawn_blocking(move || {
        let current = folder.trust().ok().flatten();
        let accepted = offered.clone().accept(current.as_ref(), unix_time());
        if let Some(accepted) = &accepted {
            folder.write_trust(accepted)?;
        }
        Ok::<_, io::Error>(accepted.or(current).unwrap_or(offered))
    });
    match written.await {
        Ok(Ok(state)) => {
            let serials = state.revoked.keys().filter_map(|serial| serial.as_str().parse().ok()).collect();
            let list = identity::RevocationList { generation: state.generation, serials };
            identity.revocations().accept(list);
            publish.send_replace(Some(Arc::new(state)));
        }
        Ok(Err(error)) => OwnCertificateFailed { error: &error }.emit(),
        Err(error) => OwnCertificateFailed { error: &error }.emit(),
    }
}

/// Deletes expired records, and renews the hub's own certificate, which needs no connection.
async fn upkeep<S: Store>(
    authority: Arc<IssuingAuthority<S>>,
    folder: IdentityFolder,
    identity: Arc<ProcessIdentity>,
    mut trust: watch::Receiver<Option<Arc<TrustState>>>,
) {
    let mut chance: f64 = rand::random();
    loop {
        let applied = trust.borrow_and_update().as_ref().map(|state| state.generation);
        let next = match renew_own(&authority, &folder, &identity, chance, applied).await {
            Ok(OwnCertificate::Kept(until)) => until.min(UPKEEP_PERIOD),
            Ok(OwnCertificate::Renewed) => {
                chance = rand::random();
                UPKEEP_PERIOD
            }
            Err(error) => {
                OwnCertificateFailed { error: &error }.emit();
                UPKEEP_PERIOD
            }
        };
        // It is repeated; until then, expired records only occupy the store.
        authority.delete_expired(unix_time()).await.ok();
        tokio::select! {
            changed = trust.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(next) => {}
        }
    }
}

/// Certificate of the hub itself, after a check.
enum OwnCertificate {
    /// It is renewed after this time.
    Kept(Duration),
    /// It was renewed.
    Renewed,
}

/// Renews the hub's own certificate if it is due, and acknowledges the generation of the trusted state that the hub
/// applies, like a process that polls.
async fn renew_own<S: Store>(
    authority: &IssuingAuthority<S>,
    folder: &IdentityFolder,
    identity: &Arc<ProcessIdentity>,
    chance: f64,
    applied: Option<u64>,
) -> Result<OwnCertificate, PkiError> {
    let invalid = |error: &dyn std::fmt::Display| PkiError::Invalid(error.to_string());
    let Some(membership) = folder.membership().map_err(|error| invalid(&error))? else {
        return Ok(OwnCertificate::Kept(UPKEEP_PERIOD));
    };
    let signer = authority.signing_authority().await?;
    let now = unix_time();
    let is_old = signer.to_string() != membership.authority;
    let serial: CertificateSerial = scheduler_api::parsed("serial", &membership.serial)?;
    if let Some(generation) = applied {
        authority.applied(&serial, generation).await?;
    }
    let due = issue::renewal(membership.period(), is_old, chance, now);
    if due > now {
        return Ok(OwnCertificate::Kept(due - now));
    }
    let KeyRequest { key, csr } = KeyRequest::generate().map_err(|error| invalid(&error))?;
    let issued = authority.renew(identity.own(), &serial, &csr, now).await?;
    let (folder, addresses) = (folder.clone(), membership.addresses);
    let installed = tokio::task::spawn_blocking(move || install_issued(&folder, &issued, &key, addresses));
    let installed = installed.await.map_err(|error| invalid(&error))?.map_err(|error| invalid(&error))?;
    OwnCertificateRenewed { serial: &installed.serial, expires_s: installed.not_after_s }.emit();
    Ok(OwnCertificate::Renewed)
}

/// Access that a path of the authority requires.
#[derive(Clone, Copy, Debug)]
struct Callers {
    roles: &'static [Role],
    /// Whether a token is enough; otherwise the path is about the certificate of the caller.
    is_for_tokens: bool,
}

/// Every certificate of the fleet.
const MEMBERS: Callers = Callers { roles: &Role::ALL, is_for_tokens: false };
/// Processes that start replicas.
const SPOKES: Callers = Callers { roles: &[Role::Spoke], is_for_tokens: false };
/// Persons that may read.
const READERS: Callers = Callers { roles: &[Role::Operator, Role::Viewer], is_for_tokens: true };
/// Persons that may change.
const OPERATORS: Callers = Callers { roles: &[Role::Operator], is_for_tokens: true };

fn router<S: Store>(api: PkiApi<S>) -> Router {
    let only = |paths: Router<PkiApi<S>>, callers: Callers| {
        let api = api.clone();
        paths.route_layer(from_fn(
            move |ConnectInfo(peer): ConnectInfo<ConnectedClient>, request: Request, next: Next| {
                authorize(callers, api.clone(), peer, request, next)
            },
        ))
    };
    let anyone = Router::new().route(paths::JOIN, post(join::<S>));
    let members = Router::new().route(paths::RENEW, post(renew::<S>)).route(paths::TRUST, get(trust::<S>));
    let spokes = Router::new().route(paths::REPLICA, post(issue_for_replicas::<S>));
    let readers = Router::new()
        .route(paths::CERTIFICATES, get(certificates::<S>))
        .route(paths::ROTATION, get(rotation::<S>));
    let operators = Router::new()
        .route(paths::JOIN_TOKENS, post(create_token::<S>))
        .route(paths::REVOKE, post(revoke::<S>))
        .route(paths::ROTATION, post(rotate::<S>))
        .route(paths::BACKUP, get(read_store::<S>));
    anyone
        .merge(only(members, MEMBERS))
        .merge(only(spokes, SPOKES))
        .merge(only(readers, READERS))
        .merge(only(operators, OPERATORS))
        .fallback(async || ErrorResponse::new(ErrorCode::NotFound, "The authority has no such path."))
        .method_not_allowed_fallback(async || {
            ErrorResponse::new(ErrorCode::MethodNotAllowed, "This path does not support the method.")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(contained))
        .with_state(api)
}

/// Limits the damage of a panic to the request that caused it.
async fn contained(request: Request, next: Next) -> Response {
    supervision::request::contain(next.run(request)).await.unwrap_or_else(
        |supervision::request::Panicked(reason)| {
            // A defect. The request received an error and no other one is affected. Report it with the line `panicked`.
            tracing::error!(reason, "request to the authority panicked");
            ErrorResponse::new(ErrorCode::Internal, "The request failed because of a defect of this hub.")
                .into_response()
        },
    )
}

/// Checks the role of a caller, before the body is read.
async fn authorize<S: Store>(
    Callers { roles, is_for_tokens }: Callers,
    api: PkiApi<S>,
    peer: ConnectedClient,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path().to_owned();
    let means = (api.tokens.as_deref(), &*api.denials);
    let authenticated = Caller::authenticate(&peer, is_for_tokens, request.headers(), &path, means).await;
    let caller = match authenticated {
        Ok(caller) => caller,
        Err(rejected) => return rejected.into_response(),
    };
    if let Err(denied) = caller.check_role(roles, (request.method().as_str(), &path), &api.denials) {
        return denied.into_response();
    }
    if let Caller::Certified(identity) = caller {
        request.extensions_mut().insert(identity);
    }
    next.run(request).await
}

/// Identity of a caller with a certificate, which [`authorize`] has verified.
type AuthorizedPeer = axum::Extension<PeerIdentity>;

fn serial_of(peer: &PeerIdentity) -> Result<CertificateSerial, PkiError> {
    Ok(scheduler_api::parsed("serial", &peer.serial.to_string())?)
}

async fn join<S: Store>(
    State(api): State<PkiApi<S>>,
    ConnectInfo(caller): ConnectInfo<ConnectedClient>,
    body: Body,
) -> Result<Json<IssuedV1>, ErrorResponse> {
    let request = json_of(body, BODY_BYTES_MAX);
    let request = request.inspect_err(|_| api.denials.joins.count(JoinRejection::InvalidRequest));
    let JoinV1 { version: _, secret, csr } = request?;
    let joined = api.authority.join(&secret, &csr, caller.address.ip(), unix_time()).await;
    if let Some(reason) = joined.as_ref().err().and_then(PkiError::join_rejection) {
        api.denials.joins.count(reason);
    }
    Ok(Json(joined?))
}

async fn renew<S: Store>(
    State(api): State<PkiApi<S>>,
    axum::Extension(peer): AuthorizedPeer,
    body: Body,
) -> Result<Json<IssuedV1>, ErrorResponse> {
    let RenewV1 { version: _, csr } = json_of(body, BODY_BYTES_MAX)?;
    Ok(Json(api.authority.renew(&peer.id, &serial_of(&peer)?, &csr, unix_time()).await?))
}

async fn issue_for_replicas<S: Store>(
    State(api): State<PkiApi<S>>,
    axum::Extension(peer): AuthorizedPeer,
    body: Body,
) -> Result<Json<IssuedV1>, ErrorResponse> {
    let RenewV1 { version: _, csr } = json_of(body, BODY_BYTES_MAX)?;
    Ok(Json(api.authority.issue_for_replicas(&peer.id, &serial_of(&peer)?, &csr, unix_time()).await?))
}

/// Responds with a newer trusted state as soon as there is one, or with `null` if there is none within the requested
/// time.
async fn trust<S: Store>(
    State(api): State<PkiApi<S>>,
    axum::Extension(peer): AuthorizedPeer,
    RawQuery(query): RawQuery,
) -> Result<Json<Option<TrustV1>>, ErrorResponse> {
    let TrustQuery { after, wait } = TrustQuery::parse(query.as_deref().unwrap_or_default())?;
    if let Some(after) = after {
        api.authority.applied(&serial_of(&peer)?, after).await?;
    }
    let mut current = api.trust.clone();
    let is_newer = |state: &Option<Arc<TrustState>>| {
        state.as_ref().is_some_and(|state| after.is_none_or(|after| state.generation > after))
    };
    let found = tokio::select! {
        biased;
        found = current.wait_for(is_newer) => found.ok().and_then(|state| state.clone()),
        () = tokio::time::sleep(wait) => None,
        () = stopped(api.stopping.clone()) => None,
    };
    Ok(Json(found.map(|state| TrustV1::from(&*state))))
}

async fn create_token<S: Store>(
    State(api): State<PkiApi<S>>,
    body: Body,
) -> Result<Json<NewTokenResponseV1>, ErrorResponse> {
    let request: NewTokenV1 = json_of(body, BODY_BYTES_MAX)?;
    Ok(Json(api.authority.create_token(request, unix_time()).await?))
}

async fn certificates<S: Store>(State(api): State<PkiApi<S>>) -> Result<Json<CertificatesV1>, ErrorResponse> {
    Ok(Json(api.authority.list(unix_time()).await?))
}

async fn revoke<S: Store>(
    State(api): State<PkiApi<S>>,
    peer: Option<AuthorizedPeer>,
    body: Body,
) -> Result<Json<RevocationsV1>, ErrorResponse> {
    let request: RevokeV1 = json_of(body, BODY_BYTES_MAX)?;
    let own = peer.map(|axum::Extension(peer)| serial_of(&peer)).transpose()?;
    Ok(Json(api.authority.revoke(&request, own.as_ref(), unix_time()).await?))
}

async fn rotation<S: Store>(State(api): State<PkiApi<S>>) -> Result<Json<RotationV1>, ErrorResponse> {
    Ok(Json(api.authority.rotation(unix_time()).await?))
}

async fn rotate<S: Store>(
    State(api): State<PkiApi<S>>,
    body: Body,
) -> Result<Json<RotationV1>, ErrorResponse> {
    let request: RotateV1 = json_of(body, BODY_BYTES_MAX)?;
    Ok(Json(api.authority.rotate(request, unix_time()).await?))
}

async fn read_store<S: Store>(State(api): State<PkiApi<S>>) -> Result<Response, ErrorResponse> {
    let content = backup::content(&api.authority.store).await?;
    Ok(Json(content).into_response())
}

/// Returns an authority for tests of records.
#[cfg(test)]
pub(super) fn test_authority() -> scheduler_core::pki::trust::TrustedAuthority {
    let dir = tempfile::tempdir().unwrap();
    create_authority(&dir.path().join("authority"), "m", Duration::from_secs(1_800_000_000)).unwrap()
}
