//! Console of the hub: a page for browsers, on a listener of its own.
//!
//! ```text
//!  gateways ──/v1/traffic──▶ state ──sampler──▶ snapshot ──server-sent events──▶ page
//!                              ▲                   ▲
//!                       lookups of a page       table, store
//! ```
//!
//! [`console`] decides; this module adds the clock, the random numbers, the locks and the listener. The store is read at most
//! once a second, and only while a page is open. `docs/decisions/console.md` has the reasons.

mod auth;
mod context;
mod drills;
mod fleet_client;
mod server;
pub(super) mod state;
mod stream;

use std::future::IntoFuture;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use ::console::sessions::{LOGIN_TTL, Secret};
use ::console::traffic::TooManyGateways;
use axum::Json;
use axum::extract::State;
use identity::{AcceptedPeers, ConnectedClient, ServerTls, Transport, listener};
use rand::TryRngCore;
use rand::rngs::OsRng;
use regions::spiffe::Role;
use replica_api::error::ErrorCode;
use scheduler_api::VERSION;
use scheduler_api::paths;
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_api::traffic::{
    ConsoleLoginV1, GatewayTraffic, TRAFFIC_IDLE_PERIOD, TRAFFIC_PERIOD, TrafficReportV1, TrafficResponseV1,
};
use scheduler_store::Store;
use supervision::task::essential;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::access::Caller;
use super::api::{Body, HubApi, json};
use crate::config::ConsoleConfig;
use crate::respond::ErrorResponse;
use context::ConsoleApi;
use fleet_client::FleetClient;
use state::Console;

/// Maximum number of open connections: some of each page.
const CONNECTIONS_MAX: usize = 512;
/// Peers that may connect over TLS.
const PEERS: AcceptedPeers = AcceptedPeers { roles: &[Role::Viewer, Role::Operator], same_region: &[] };
const PROTOCOLS: &[&[u8]] = &[b"h2", b"http/1.1"];

/// Returns 256 random bits.
fn secret() -> Result<Secret, ErrorResponse> {
    let mut bytes = [0; 32];
    OsRng.try_fill_bytes(&mut bytes).map_err(|error| {
        ErrorResponse::new(ErrorCode::Internal, format!("The system has no random numbers: {error}."))
    })?;
    Ok(Secret::from_random(bytes))
}

/// Receives the traffic of a gateway, and requests routing decisions from it.
pub(super) async fn traffic<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    body: Body,
) -> Result<Json<TrafficResponseV1>, ErrorResponse> {
    let mut report = GatewayTraffic::try_from(json::<TrafficReportV1>(body)?)?;
    let region = report.gateway.region.clone();
    api.check_region(&region)?;
    caller.check_region(&api, &region, paths::TRAFFIC)?;
    // The catalogue bounds the number of regions, whatever names a gateway makes up.
    report.regions.retain(|region, _| api.catalogue.get(region).is_some());
    let too_many = |TooManyGateways| {
        let message = format!("The maximum of {GATEWAYS_MAX} gateways report to this console; stop some.");
        ErrorResponse::new(ErrorCode::Overloaded, message).with_field("gateway")
    };
    let (next, (explain, search)) = match &api.console {
        Some(console) => (TRAFFIC_PERIOD, console.record(report).map_err(too_many)?),
        None => (TRAFFIC_IDLE_PERIOD, (Vec::new(), Vec::new())),
    };
    let next_ms = u64::try_from(next.as_millis()).unwrap_or(u64::MAX);
    Ok(Json(TrafficResponseV1 { version: VERSION, next_ms, explain, search }))
}

/// Creates a link that signs the caller in.
pub(super) async fn create_login<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
) -> Result<Json<ConsoleLoginV1>, ErrorResponse> {
    let Some(console) = &api.console else {
        let message = "This hub has no console; add [console] with listen to its configuration.";
        return Err(ErrorResponse::new(ErrorCode::NotFound, message));
    };
    let login = secret()?;
    let visitor = auth::visitor(&caller).ok_or_else(auth::not_permitted)?;
    console.sessions.lock().create_login(login, visitor, Instant::now());
    let url = format!("{}/#login={}", console.origin.url(), login.expose());
    Ok(Json(ConsoleLoginV1 { version: VERSION, url, expires_s: LOGIN_TTL.as_secs() }))
}

/// Binds the listener of the console, if it is configured.
pub(super) async fn bind(
    config: Option<&ConsoleConfig>,
    transport: &Transport,
) -> Result<Option<(Arc<Console>, TcpListener)>, super::HubError> {
    let Some(config) = config else { return Ok(None) };
    let bound = super::bind(config.listen).await?;
    let address =
        bound.local_addr().map_err(|source| super::HubError::Bind { address: config.listen, source })?;
    let fleet = config.drills.clone().map(FleetClient::new).transpose();
    let fleet = fleet.map_err(|error| super::HubError::Drills(error.to_string()))?;
    let console = Console::new(config, address, is_tls(address, transport), fleet);
    Ok(Some((Arc::new(console), bound)))
}

/// Returns whether browsers connect over TLS: everywhere but on this machine, if the hub has an identity.
fn is_tls(address: SocketAddr, transport: &Transport) -> bool {
    transport.identity().is_some() && !address.ip().is_loopback()
}

/// Starts the tasks of the console.
pub(super) fn start<S: Store>(
    tasks: &mut JoinSet<()>,
    bound: TcpListener,
    transport: &Transport,
    api: &HubApi<S>,
) -> io::Result<()> {
    let Some(console) = api.console.clone() else { return Ok(()) };
    let is_tls = is_tls(bound.local_addr()?, transport);
    let tls = transport.identity().filter(|_| is_tls);
    let tls = tls.map(|identity| ServerTls::new(identity, PEERS, PROTOCOLS)).transpose();
    let tls = tls.map_err(io::Error::other)?;
    let (listener, acceptor) = listener::listen(bound, tls, CONNECTIONS_MAX, api.refused.clone())?;
    let acceptor = acceptor.of_persons();
    tasks.spawn(async {
        essential("console connections", acceptor.run()).await;
    });
    let has_identity = transport.identity().is_some();
    let service = server::router(ConsoleApi { hub: api.clone(), console: console.clone(), has_identity });
    let service = service.into_make_service_with_connect_info::<ConnectedClient>();
    // It is aborted with the other tasks; streams end when the hub stops.
    let server = axum::serve(listener, service).into_future();
    tasks.spawn(async {
        essential("console", async { drop(server.await) }).await;
    });
    let api = api.clone();
    tasks.spawn(supervision::task::supervise("console sampler", move || {
        stream::sample(api.clone(), console.clone())
    }));
    Ok(())
}
