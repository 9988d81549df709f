//! Drained regions: one key per region, written by any hub. The leader sees the key through its watch, publishes a
//! table that marks the region as draining, and lowers the region's weights step by step.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use regions::RegionId;
use scheduler_api::plan::DrainV1;
use scheduler_api::{VERSION, keys, parsed};
use scheduler_store::Store;

use super::api::HubApi;
use super::records;
use crate::events::{DrainCancelled, DrainRequested};
use crate::respond::ErrorResponse;

/// Starts draining a region.
pub(super) async fn drain<S: Store>(
    State(api): State<HubApi<S>>,
    Path(region): Path<(String, String)>,
) -> Result<Json<DrainV1>, ErrorResponse> {
    let region = known_region(&api, &region)?;
    let drain = DrainV1 { version: VERSION, region: region.to_string() };
    api.store.put(&keys::drain(&region), records::bytes(&drain), None).await?;
    DrainRequested { region: &region }.emit();
    Ok(Json(drain))
}

/// Cancels the drain of a region.
pub(super) async fn undrain<S: Store>(
    State(api): State<HubApi<S>>,
    Path(region): Path<(String, String)>,
) -> Result<StatusCode, ErrorResponse> {
    let region = known_region(&api, &region)?;
    api.store.delete(&keys::drain(&region)).await?;
    DrainCancelled { region: &region }.emit();
    Ok(StatusCode::NO_CONTENT)
}

fn known_region<S>(api: &HubApi<S>, (cloud, name): &(String, String)) -> Result<RegionId, ErrorResponse> {
    let region = parsed("region", &format!("{cloud}/{name}"))?;
    api.check_region(&region)?;
    Ok(region)
}
