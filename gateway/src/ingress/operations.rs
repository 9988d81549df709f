//! What operators ask of a region's door: whether it lives, whether it is ready, how its replicas are, what it has counted.
//!
//! Where edges come over TLS only gateways are let in, and whoever looks after a region is none; so operators have a port of
//! their own, on which no request passes. Without one they ask where edges do.

use super::Ingress;
use crate::listener::{AfterAnswer, Door};
use crate::respond::{self, Refusal};
use pingora::protocols::http::ServerSession;
use regions::id::DeploymentName;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use scheduler_core::spoke::DeploymentLoad;
use scheduler_core::spoke::hold::HeldTotals;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// The door that operators come to.
pub(super) struct Operators(pub(super) Arc<Ingress>);

impl Door for Operators {
    async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
        let head = session.req_header();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        match self.0.operators(session, method.as_str(), &path).await {
            Some(after) => after,
            None => {
                let none =
                    Refusal::new(ErrorCode::NotFound, "The operations port of an ingress has no such path.");
                respond::refuse(session, &none, &[]).await
            }
        }
    }
}

impl Ingress {
    /// Answers what operators ask; `None` for everything else.
    pub(super) async fn operators(
        &self,
        session: &mut ServerSession,
        method: &str,
        path: &str,
    ) -> Option<AfterAnswer> {
        let said = match (method, path) {
            ("GET", "/livez" | "/readyz") => {
                let ready = path == "/readyz";
                if let Err(problem) = self.check(ready).await {
                    let none = Refusal::new(ErrorCode::NotReady, problem);
                    let region = [(headers::REGION, self.region.as_str())];
                    return Some(respond::refuse(session, &none, &region).await);
                }
                let status = if ready { "ready" } else { "alive" };
                json!({"status": status}).to_string().into_bytes()
            }
            ("GET", "/status") => {
                let (replicas, deployments) = (self.replicas.status(), self.deployments());
                let status = json!({
                    "region": self.region.as_str(), "replicas": replicas, "deployments": deployments,
                });
                status.to_string().into_bytes()
            }
            ("GET", "/metrics") => return Some(self.scrape(session).await),
            _ => return None,
        };
        Some(respond::ok(session, said, &[]).await)
    }

    /// Takes what requests take, on a thread of its own and within a time; and finds whether a request would find a replica,
    /// if it is asked whether the region is `ready`.
    async fn check(&self, ready: bool) -> Result<(), String> {
        let (spoke, replicas, hold) = (self.spoke.clone(), self.replicas.clone(), self.hold.clone());
        let check = move || {
            replicas.limits();
            drop(hold.waiting());
            // One that would be started is as good: requests for it are held.
            let serves = !spoke.lock().deployments_servable(Instant::now()).is_empty();
            if ready && !serves { Err("No replica of this region is ready yet.".to_owned()) } else { Ok(()) }
        };
        self.health.probe(check).await
    }

    /// How each deployment stands here, and who waits for it.
    fn deployments(&self) -> Vec<Value> {
        let spoke = self.spoke.lock();
        let shown = |(name, load): (&DeploymentName, &DeploymentLoad)| {
            let HeldTotals { requests, tokens } = spoke.held(name);
            json!({
                "name": name.as_str(),
                "ready": load.ready,
                "ready_in_ms": load.ready_in.map(|left| left.as_millis() as u64),
                "held": requests,
                "held_tokens": tokens,
            })
        };
        // Sequence 0: a report that no edge asked for.
        spoke.report(0, Instant::now()).deployments.iter().map(shown).collect()
    }
}
