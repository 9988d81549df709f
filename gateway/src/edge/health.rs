//! `/livez` and `/readyz` of a gateway: they run the steps of a request before it is sent.
//!
//! A check takes every lock that a request takes and makes routing decisions, on its own thread and within a timeout
//! ([`supervision::health`]). So a gateway that cannot serve does not report that it can, for any cause.

use super::operator_state::Operations;
use super::region_monitor::random_draws;
use super::region_states::RoutingContext;
use super::router::Routable;
use super::view::{RoutedDeployment, View};
use gateway_core::latency::SizeClass;
use replica_api::priority::Priority;

/// Limit on the deployments that a check makes a decision for: enough to detect a defect, and too few to delay requests
/// at the lock.
const DECIDED_MAX: usize = 16;

impl Operations {
    /// Whether the process is live: no lock that requests need is stuck.
    pub(super) async fn alive(&self) -> Result<(), String> {
        let operations = self.clone();
        self.health.probe(move || operations.locks()).await
    }

    /// Whether the gateway can serve a request now.
    pub(super) async fn ready(&self) -> Result<(), String> {
        if *self.leaving.borrow() {
            return Err("draining".to_owned());
        }
        let operations = self.clone();
        let check = move || {
            operations.locks()?;
            let view = operations.views.borrow().clone();
            operations.decision(view.as_deref().ok_or("no route table yet")?);
            Ok(())
        };
        self.health.probe(check).await
    }

    /// Takes the locks that requests share, one after the other.
    fn locks(&self) -> Result<(), String> {
        self.tenants.applied_tenants();
        self.tenants.limiters.count();
        self.router.demand_recorder.untracked();
        self.pools.are_calm();
        self.region_monitor.circuit_states();
        self.upstream.connections();
        self.explanations.find("");
        Ok(())
    }

    /// Makes a routing decision for some deployments of the route table. A deployment without an available region is no
    /// defect of this gateway, so the decision itself is ignored.
    fn decision(&self, view: &View) {
        let [target_draw, _, draw] = random_draws();
        let (priority, size) = (Priority::Interactive, SizeClass::of(0));
        for RoutedDeployment { deployment, allowed, registered, .. } in view.all().take(DECIDED_MAX) {
            let routing = RoutingContext {
                deployment: &deployment.name,
                priority,
                size,
                target_draw,
                uses_engine: true,
                is_job: false,
            };
            let (allowed, registered) = (**allowed, *registered);
            self.router.preview(&Routable { view, routing, allowed, registered, client: None }, draw);
        }
    }
}
