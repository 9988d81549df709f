//! Regions that their operators want emptied: a key each, which whoever is asked writes. The leader sees it there as it sees
//! everything else, publishes a table that says so, and plans the region's weights away step by step.

use regions::RegionId;
use scheduler_core::wire::plan::DrainV1;
use scheduler_core::wire::{VERSION, keys};
use scheduler_store::Store;

use super::http::Desk;
use super::records;
use super::spokes::{known, refusal};
use crate::events::{DrainAsked, DrainUndone};
use crate::respond::Refusal;

/// Wants a region emptied.
pub(super) async fn drain<S: Store>(desk: &Desk<S>, region: &RegionId) -> Result<DrainV1, Refusal> {
    known(desk, region)?;
    let drain = DrainV1 { version: VERSION, region: region.to_string() };
    desk.store.put(&keys::drain(region), records::bytes(&drain), None).await.map_err(refusal)?;
    DrainAsked { region }.emit();
    Ok(drain)
}

/// Wants it used again.
pub(super) async fn undrain<S: Store>(desk: &Desk<S>, region: &RegionId) -> Result<(), Refusal> {
    known(desk, region)?;
    desk.store.delete(&keys::drain(region)).await.map_err(refusal)?;
    DrainUndone { region }.emit();
    Ok(())
}
