//! Residency policy at the receiving end: what this region may see (invariant 1, Residency).

use super::request::{text, unreadable};
use crate::respond::Rejection;
use gateway_core::residency::AllowedRegions;
use pingora::protocols::http::ServerSession;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId};
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;

/// Rejects requests that this region may not see.
pub(super) struct ResidencyGuard {
    pub(super) region: RegionId,
    pub(super) here: RegionIndex,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) spoke: Arc<Mutex<Spoke>>,
}

impl ResidencyGuard {
    /// Returns the regions of the request's policy. A request whose policy excludes this region is rejected, before its
    /// body is read.
    pub(super) fn allowed_here(&self, session: &ServerSession) -> Result<AllowedRegions, Rejection> {
        let policy = match text(session, headers::RESIDENCY)? {
            Some(policy) => policy.parse().map_err(|error| unreadable(headers::RESIDENCY, &error))?,
            None => ResidencyPolicy::Anywhere,
        };
        let allowed = AllowedRegions::of_policy(&policy, &self.catalogue);
        if allowed.contains(self.here) {
            return Ok(allowed);
        }
        // A gateway sent the request to a region that may not see it. Compare the catalogue and the version of that gateway.
        tracing::error!(region = %self.region, %policy, "request rejected because its residency policy excludes this region");
        let message =
            format!("Region {} is not part of the residency '{policy}'; the body was not read.", self.region);
        Err(Rejection::new(ErrorCode::NotResidentHere, message).of(headers::RESIDENCY))
    }

    /// Checks the same against a gateway with an older route table: a policy that was narrowed since applies at once.
    pub(super) fn check_deployment_policy(&self, deployment: &DeploymentName) -> Result<(), Rejection> {
        if !self.spoke.lock().forbids(deployment) {
            return Ok(());
        }
        let region = &self.region;
        // A gateway with an older route table sent the request. Expected for seconds after a residency policy was
        // narrowed; later, check that all gateways reach a hub.
        tracing::warn!(%region, %deployment, "request rejected because the newest route table excludes this region");
        let message = format!("Region {region} is no longer part of the residency of '{deployment}'.");
        Err(Rejection::new(ErrorCode::NotResidentHere, message).of(headers::DEPLOYMENT))
    }

    /// Rejects the request if the policy is too old: a policy that was narrowed since the last contact with a hub is
    /// unknown here.
    pub(super) fn check_policy_age(&self) -> Result<(), Rejection> {
        let age = self.spoke.lock().policy_age(Instant::now());
        let Some((age, max)) = age.filter(|(age, max)| age > max) else { return Ok(()) };
        let message = format!(
            "This deployment is locked to regions, and no hub has confirmed its residency policy to region {} for {} minutes, \
             longer than policy_max_age ({} minutes); restore its connection to a hub.",
            self.region,
            age.as_secs() / 60,
            max.as_secs() / 60
        );
        Err(Rejection::new(ErrorCode::PolicyTooOld, message))
    }
}
