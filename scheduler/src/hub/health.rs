//! `/livez` and `/readyz` of a hub. The checks take the locks that the other paths take, on a separate thread and
//! within a timeout ([`supervision::health`]), so that a hub that cannot serve requests does not report itself as
//! healthy.

use axum::extract::State;
use replica_api::error::ErrorCode;
use scheduler_store::Store;

use super::api::HubApi;
use crate::respond::ErrorResponse;

/// Returns success if the hub can serve requests, now or later.
pub(super) async fn live<S: Store>(State(api): State<HubApi<S>>) -> Result<&'static str, ErrorResponse> {
    locks(&api).await.map(|()| "alive\n")
}

/// Returns success if the hub has published a table and can serve requests.
pub(super) async fn ready<S: Store>(State(api): State<HubApi<S>>) -> Result<&'static str, ErrorResponse> {
    locks(&api).await?;
    api.published().map(|_| "ready\n")
}

async fn locks<S: Store>(api: &HubApi<S>) -> Result<(), ErrorResponse> {
    let (plans, demands, current) = (api.plans.clone(), api.demands.clone(), api.current.clone());
    let tenant_demands = api.tenant_demands.clone();
    let check = move || {
        plans.places();
        demands.gateways();
        tenant_demands.gateways();
        drop(current.borrow());
        Ok(())
    };
    api.health.probe(check).await.map_err(|problem| ErrorResponse::new(ErrorCode::NotReady, problem))
}
