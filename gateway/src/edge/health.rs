//! `/livez` and `/readyz` of an edge: they do what a request does before it is sent.
//!
//! A check takes every lock that a request takes and goes through a routing decision, on a thread of its own and within a time
//! ([`supervision::health`]). So an edge that cannot serve does not report that it can, whatever keeps it from serving.

use super::known::About;
use super::operator_state::Operations;
use super::router::Routable;
use super::view::{RoutedDeployment, View};
use super::watch::chances;
use gateway_core::latency::SizeClass;
use gateway_core::priority::Priority;

/// Deployments for which a check decides: enough to meet a defect, and too few to keep requests waiting for the lock.
const DECIDED_MAX: usize = 16;

impl Operations {
    /// Whether the edge can serve anybody, now or later: no lock that requests need is held for good.
    pub(super) async fn alive(&self) -> Result<(), String> {
        let operations = self.clone();
        self.health.probe(move || operations.locks()).await
    }

    /// Whether it can serve a request now.
    pub(super) async fn ready(&self) -> Result<(), String> {
        if *self.leaving.borrow() {
            return Err("leaving".to_owned());
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

    /// Takes what requests share, one after the other.
    fn locks(&self) -> Result<(), String> {
        self.tenants.applied();
        self.tenants.allowances.kept();
        self.router.demands.missed();
        self.pools.are_calm();
        self.watch.circuits();
        self.upstream.connections();
        self.explanations.find("");
        Ok(())
    }

    /// Decides where a request for each of some deployments of the table would go. That there may be no region for one is an answer
    /// that clients get; it is no defect of this gateway.
    fn decision(&self, view: &View) {
        let [chance, _, draw] = chances();
        let (priority, size) = (Priority::Interactive, SizeClass::of(0));
        for RoutedDeployment { deployment, allowed, registered, .. } in view.all().take(DECIDED_MAX) {
            let about = About { deployment: &deployment.name, priority, size, chance, uses_engine: true };
            let (allowed, registered) = (**allowed, *registered);
            self.router.preview(&Routable { view, about, allowed, registered, client: None }, draw);
        }
    }
}
