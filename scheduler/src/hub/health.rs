//! `/livez` and `/readyz` of a hub: they take the locks that its other paths take, on a thread of their own and within a time
//! ([`supervision::health`]), so that a hub that cannot answer does not report that it can.

use axum::extract::State;
use scheduler_store::Store;

use super::http::Desk;
use crate::respond::{Code, Refusal};

/// Whether the hub can answer anybody, now or later.
pub(super) async fn live<S: Store>(State(desk): State<Desk<S>>) -> Result<&'static str, Refusal> {
    locks(&desk).await.map(|()| "alive\n")
}

/// Whether the hub has a table to give out and can answer.
pub(super) async fn ready<S: Store>(State(desk): State<Desk<S>>) -> Result<&'static str, Refusal> {
    locks(&desk).await?;
    if desk.current.borrow().is_none() {
        return Err(Refusal::new(Code::NotReady, "No route table has been published yet."));
    }
    Ok("ready\n")
}

async fn locks<S: Store>(desk: &Desk<S>) -> Result<(), Refusal> {
    let (plans, demands, current) = (desk.plans.clone(), desk.demands.clone(), desk.current.clone());
    let check = move || {
        plans.places();
        demands.gateways();
        drop(current.borrow());
        Ok(())
    };
    desk.health.probe(check).await.map_err(|problem| Refusal::new(Code::NotReady, problem))
}
