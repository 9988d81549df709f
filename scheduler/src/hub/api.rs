//! State that the hub's HTTP handlers share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use identity::{ConnectionFailures, Transport};
use regions::{Catalogue, RegionId};
use replica_api::error::ErrorCode;
use scheduler_api::plan::{GatewayDemand, TenantDemand};
use serde::de::DeserializeOwned;
use supervision::health::HealthCheck;
use tokio::sync::{Semaphore, mpsc, watch};

use super::console::state::Console;
use super::demand_bases::DemandBases;
use super::demands::GatewayReports;
use super::denials::Denials;
use super::operators::OperatorTokens;
use super::plans::PublishedPlan;
use super::readers::ReaderReport;
use super::scrape::HubMetrics;
use super::usage_records::UsageState;
use super::{Current, PublishedTable};
use crate::respond::ErrorResponse;

/// Maximum bytes of a request body: ten thousand deployments with the longest names, ready and with their capacity.
pub(super) const BODY_BYTES_MAX: usize = 2 << 20;
const _: () = assert!(scheduler_api::traffic::TRAFFIC_BYTES_MAX <= BODY_BYTES_MAX, "every report is read");

/// State shared by the handlers.
#[derive(Clone)]
pub(super) struct HubApi<S> {
    pub(super) store: S,
    pub(super) catalogue: Arc<Catalogue>,
    /// Transport of the hub, whose certificate has metrics.
    pub(super) transport: Transport,
    pub(super) lease_ttl: Duration,
    /// Queue of reports about which reader runs which table.
    pub(super) readers: mpsc::Sender<ReaderReport>,
    pub(super) current: watch::Receiver<Current>,
    /// The published plan.
    pub(super) plans: Arc<PublishedPlan>,
    /// Demand that gateways have reported to this hub.
    pub(super) demands: Arc<GatewayReports<GatewayDemand>>,
    /// Last demand of each gateway, of which the next report has the changes.
    pub(super) demand_bases: Arc<DemandBases>,
    /// Demand of tenants that gateways have reported to this hub.
    pub(super) tenant_demands: Arc<GatewayReports<TenantDemand>>,
    /// Limits of the usage of tenants.
    pub(super) usage: Arc<UsageState>,
    pub(super) polls: Arc<Semaphore>,
    /// Permits for requests that compute placements.
    pub(super) placement_reports: Arc<Semaphore>,
    pub(super) stopping: watch::Receiver<bool>,
    /// A gateway with a newer table than this hub was observed. Logged once, since the gateway repeats its poll.
    pub(super) reader_ahead: Arc<AtomicBool>,
    /// Checks of the hub's own state, one at a time.
    pub(super) health: HealthCheck,
    pub(super) metrics: Arc<HubMetrics>,
    pub(super) denials: Arc<Denials>,
    /// Authentication of operators with tokens, if it is configured.
    pub(super) tokens: Option<Arc<OperatorTokens>>,
    /// Connections that were rejected.
    pub(super) refused: Arc<ConnectionFailures>,
    /// Console, if this hub has one.
    pub(super) console: Option<Arc<Console>>,
}

impl<S> HubApi<S> {
    /// Returns the published table.
    pub(super) fn published(&self) -> Result<Arc<PublishedTable>, ErrorResponse> {
        let not_yet = || ErrorResponse::new(ErrorCode::NotReady, "No route table has been published yet.");
        self.current.borrow().clone().ok_or_else(not_yet)
    }

    /// Rejects a region that is not in the catalogue, with similar names as a hint.
    pub(super) fn check_region(&self, region: &RegionId) -> Result<(), ErrorResponse> {
        if self.catalogue.get(region).is_some() {
            return Ok(());
        }
        let near = self.catalogue.nearest_names(region.as_str());
        let hint =
            if near.is_empty() { String::new() } else { format!("; did you mean {}?", near.join(" or ")) };
        let message = format!("`region`: {region} is not in the hub's catalogue{hint}.");
        Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("region"))
    }
}

/// Body of a request. Handlers parse it after the path and the query.
pub(super) type Body = Result<Bytes, BytesRejection>;

/// Parses a body of at most [`BODY_BYTES_MAX`].
pub(super) fn json<T: DeserializeOwned>(body: Body) -> Result<T, ErrorResponse> {
    json_of(body, BODY_BYTES_MAX)
}

/// Parses a body; `bytes_max` is the limit that its path has.
pub(super) fn json_of<T: DeserializeOwned>(body: Body, bytes_max: usize) -> Result<T, ErrorResponse> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ErrorResponse::new(ErrorCode::BodyTooLarge, format!("The body has more than {bytes_max} bytes."))
        }
        _ => ErrorResponse::new(ErrorCode::InvalidJson, "The body is incomplete."),
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| ErrorResponse::new(ErrorCode::InvalidJson, format!("The body: {error}.")))
}
