//! The policy of a request, checked again before each of its attempts.
//!
//! A request may be in flight for minutes. In that time its tenant may be removed, its key revoked, its deployment removed or
//! the residency of the tenant or the deployment narrowed. The request is then not sent again, or only to regions that are
//! still allowed. A newer table never widens the allowed regions of a request beyond those it was admitted with.
//!
//! As long as there is no newer table the check is one pointer comparison. Hedges, retries and the parts of a split request
//! are all checked, because they all pass through the forwarder.
//!
//! A gateway without a response from any hub for longer than `policy_max_age` may have missed a narrowed policy. It rejects
//! requests of locked deployments and serves all others.

use super::policy_clock::PolicyClock;
use super::refusals::{key_removed, no_region, policy_too_old, residency_too_long, unknown_model};
use super::request::Request;
use super::table::Current;
use super::view::{Terms, View};
use crate::config::EdgeConfig;
use crate::respond::Rejection;
use gateway_core::residency::AllowedRegions;
use gateway_core::trail::PolicyVersion;
use std::sync::Arc;
use tokio::sync::watch;

/// Regions and policy under which a request may be sent now.
#[derive(Clone)]
pub(super) struct Permit {
    /// Newest route table.
    pub(super) view: Arc<View>,
    /// Regions that are allowed both under that table and under the table with which the request was admitted.
    pub(super) allowed: AllowedRegions,
    pub(super) policy: Arc<PolicyVersion>,
}

impl Permit {
    /// Returns the permit with which the request was admitted.
    pub(super) fn of(request: &Request, view: &Arc<View>) -> Permit {
        Permit { view: view.clone(), allowed: request.allowed, policy: request.policy.clone() }
    }

    /// Returns the policy if it differs from the one with which the request was admitted.
    pub(super) fn newer_than(&self, request: &Request) -> Option<Arc<PolicyVersion>> {
        (!Arc::ptr_eq(&self.policy, &request.policy)).then(|| self.policy.clone())
    }
}

/// Checks requests in flight against the newest route table.
pub(super) struct PolicyGuard {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) policy_clock: Arc<PolicyClock>,
}

impl PolicyGuard {
    /// Updates a permit to the newest route table.
    ///
    /// # Errors
    ///
    /// The rejection, when the request may not be sent to any region any more.
    pub(super) fn renew(&self, request: &Request, permit: &mut Permit) -> Result<(), Rejection> {
        self.policy_clock.check(&permit.policy.residency).map_err(policy_too_old)?;
        let view = match &*self.views.borrow() {
            Some(view) if !Arc::ptr_eq(view, &permit.view) => view.clone(),
            Some(_) | None => return Ok(()),
        };
        let tenant = view.keys.current_for(&request.tenant, request.key.as_ref()).ok_or_else(key_removed)?;
        let routed = view
            .deployment(request.deployment.as_str(), tenant)
            .ok_or_else(|| unknown_model(request.deployment.as_str(), &view, tenant))?;
        let Terms { policy, allowed } = routed
            .terms(tenant, &request.requested_residency, &self.config.catalogue)
            .map_err(|error| residency_too_long(&request.deployment, tenant, &error))?;
        let both = allowed.and(request.allowed);
        if both.is_empty() {
            return Err(no_region(&request.deployment, &policy.residency, tenant));
        }
        permit.policy = match both == allowed {
            true => policy,
            false => Arc::new(PolicyVersion { allowed: *both, ..(*policy).clone() }),
        };
        permit.allowed = both;
        permit.view = view.clone();
        self.policy_clock.check(&permit.policy.residency).map_err(policy_too_old)
    }
}
