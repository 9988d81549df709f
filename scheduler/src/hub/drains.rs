//! Drained regions: one key per region, written by any hub. The leader sees the key through its watch, publishes a
//! table that marks the region as draining, and lowers the region's weights step by step.

use regions::RegionId;
use scheduler_api::plan::DrainV1;
use scheduler_api::{VERSION, keys};
use scheduler_store::Store;

use super::http::HubApi;
use super::records;
use super::spokes::{check_region, store_error};
use crate::events::{DrainCancelled, DrainRequested};
use crate::respond::ErrorResponse;

/// Starts draining a region.
pub(super) async fn drain<S: Store>(api: &HubApi<S>, region: &RegionId) -> Result<DrainV1, ErrorResponse> {
    check_region(api, region)?;
    let drain = DrainV1 { version: VERSION, region: region.to_string() };
    api.store.put(&keys::drain(region), records::bytes(&drain), None).await.map_err(store_error)?;
    DrainRequested { region }.emit();
    Ok(drain)
}

/// Cancels the drain of a region.
pub(super) async fn undrain<S: Store>(api: &HubApi<S>, region: &RegionId) -> Result<(), ErrorResponse> {
    check_region(api, region)?;
    api.store.delete(&keys::drain(region)).await.map_err(store_error)?;
    DrainCancelled { region }.emit();
    Ok(())
}
