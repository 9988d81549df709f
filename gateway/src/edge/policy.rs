//! The policy of a request, checked again before each of its attempts.
//!
//! A request may be under way for minutes. Meanwhile its tenant may be removed, its key revoked, its deployment taken away
//! or the residency of either narrowed; then nothing more of it is sent, or only to where it still may go. What is wider in
//! a newer table is not wider for it: what it was admitted under is never exceeded.
//!
//! While no newer table has come this is one comparison of pointers. Hedges, retries and the parts of a split request all go
//! through it, because they all go through the forwarder.
//!
//! A gateway that no hub has answered for longer than `policy_max_age` does not know what has been narrowed meanwhile. It
//! rejects requests of locked deployments, and serves all others.

use super::policy_clock::PolicyClock;
use super::refusals::{no_longer_known, no_region, policy_too_old, residency_too_long, unknown_model};
use super::request::Request;
use super::table::Current;
use super::view::{Terms, View};
use crate::config::EdgeConfig;
use crate::respond::Rejection;
use gateway_core::residency::AllowedRegions;
use gateway_core::trail::PolicyVersion;
use std::sync::Arc;
use tokio::sync::watch;

/// Current permission of a request.
#[derive(Clone)]
pub(super) struct Permit {
    /// The newest route table.
    pub(super) view: Arc<View>,
    /// The regions that may see the request under it, and may under the one by which it was admitted.
    pub(super) allowed: AllowedRegions,
    pub(super) policy: Arc<PolicyVersion>,
}

impl Permit {
    /// Permission under which it was admitted.
    pub(super) fn of(request: &Request, view: &Arc<View>) -> Permit {
        Permit { view: view.clone(), allowed: request.allowed, policy: request.policy.clone() }
    }

    /// The policy, where it is not the one by which the request was admitted.
    pub(super) fn newer_than(&self, request: &Request) -> Option<Arc<PolicyVersion>> {
        (!Arc::ptr_eq(&self.policy, &request.policy)).then(|| self.policy.clone())
    }
}

/// Checks requests that are in flight against the newest route table.
pub(super) struct PolicyGuard {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) policy_clock: Arc<PolicyClock>,
}

impl PolicyGuard {
    /// Brings a permit up to date with the newest route table.
    ///
    /// # Errors
    ///
    /// When nothing of the request may be sent any more; why.
    pub(super) fn renew(&self, request: &Request, permit: &mut Permit) -> Result<(), Rejection> {
        self.policy_clock.check(&permit.policy.residency).map_err(policy_too_old)?;
        let view = match &*self.views.borrow() {
            Some(view) if !Arc::ptr_eq(view, &permit.view) => view.clone(),
            Some(_) | None => return Ok(()),
        };
        let tenant =
            view.keys.current_for(&request.tenant, request.key.as_ref()).ok_or_else(no_longer_known)?;
        let routed = view
            .deployment(request.deployment.as_str(), tenant)
            .ok_or_else(|| unknown_model(request.deployment.as_str(), &view, tenant))?;
        let Terms { policy, allowed } = routed
            .terms(tenant, &request.asked, &self.config.catalogue)
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
