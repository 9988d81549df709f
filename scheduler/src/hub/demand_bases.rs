//! Last demand of each gateway, of which its next report has the changes ([`scheduler_api::plan::DemandReportV1`]).
//!
//! It is the demand as reported, and not as written to the store, which differs by small changes ([`super::demands`]).

use std::collections::BTreeMap;
use std::time::Instant;

use scheduler_api::error::HubErrorCode;
use scheduler_api::plan::{DemandReportError, DemandReportV1, DemandV1, GatewayBoot};
use scheduler_api::report::GATEWAYS_MAX;
use supervision::Mutex;

use super::demands::GATEWAY_EXPIRY;
use crate::respond::ErrorResponse;

/// Last demand of each gateway, with its time; of at most [`GATEWAYS_MAX`] gateways.
#[derive(Default)]
pub(super) struct DemandBases(Mutex<BTreeMap<GatewayBoot, (DemandV1, Instant)>>);

impl DemandBases {
    /// Returns the demand of a report.
    pub(super) fn restore(
        &self,
        gateway: &GatewayBoot,
        report: DemandReportV1,
    ) -> Result<DemandV1, ErrorResponse> {
        let base = self.0.lock().get(gateway).map(|(demand, _)| demand.clone());
        report.restore(base.as_ref()).map_err(|error| match error {
            DemandReportError::Invalid(error) => error.into(),
            error @ DemandReportError::UnknownBase => {
                ErrorResponse::new(HubErrorCode::UnknownBase, format!("The report: {error}."))
            }
        })
    }

    /// Keeps a demand that is recorded. Without a slot, the next report of the gateway must be complete.
    pub(super) fn keep(&self, gateway: GatewayBoot, demand: DemandV1, now: Instant) {
        let mut all = self.0.lock();
        if all.len() >= GATEWAYS_MAX && !all.contains_key(&gateway) {
            all.retain(|_, (_, at)| now.saturating_duration_since(*at) <= GATEWAY_EXPIRY);
        }
        if all.len() < GATEWAYS_MAX || all.contains_key(&gateway) {
            all.insert(gateway, (demand, now));
        }
    }
}
