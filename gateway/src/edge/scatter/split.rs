//! Decides whether a request is split, and into which parts.

use super::super::forwarder::Forwarder;
use super::super::forwarder::PolicyGuard;
use super::super::refusals::too_many_inputs;
use super::super::region_monitor::RegionMonitor;
use super::super::request::Request;
use super::super::responder::Responder;
use super::super::router::Router;
use super::capacity::SplitCapacity;
use crate::config::EdgeConfig;
use crate::metrics::{EdgeMetrics, SplitAdmission};
use crate::request_body::BodyReader;
use crate::respond::Rejection;
use crate::upstream::Upstream;
use gateway_core::scatter::dispatch::{self, SPLIT_INPUTS_MIN, SPLIT_TOKENS_MIN, SplitPlan, SplitTarget};
use gateway_core::scatter::split::{SPECIAL_TOKENS, SplittableBody, SubRequest};
use gateway_core::tenant::Cost;
use regions::set::RegionIndex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::SemaphorePermit;

/// Splits requests with many inputs into parts, which several replicas compute.
pub(in crate::edge) struct Splitter {
    pub(in crate::edge) config: Arc<EdgeConfig>,
    pub(in crate::edge) split_capacity: Arc<SplitCapacity>,
    pub(in crate::edge) body_reader: Arc<BodyReader>,
    pub(in crate::edge) router: Arc<Router>,
    pub(in crate::edge) policy: Arc<PolicyGuard>,
    pub(in crate::edge) forwarder: Arc<Forwarder>,
    pub(in crate::edge) responder: Arc<Responder>,
    pub(in crate::edge) region_monitor: Arc<RegionMonitor>,
    pub(in crate::edge) upstream: Arc<Upstream>,
    pub(in crate::edge) metrics: Arc<EdgeMetrics>,
}

/// Decision to split a request: its parts and their targets.
pub(in crate::edge) struct RequestSplit<'a> {
    pub(super) splittable: Arc<SplittableBody>,
    pub(super) sub_requests: Vec<SubRequest>,
    pub(super) targets: Vec<SplitTarget>,
    /// Permit of a split request; `None` if a request that must be split has to wait for it.
    pub(super) permit: Option<SemaphorePermit<'a>>,
}

impl Splitter {
    /// Splits the request if that is useful. The body of a small one is not examined.
    pub(in crate::edge) async fn split(
        &self,
        request: &Request,
    ) -> Result<Option<RequestSplit<'_>>, Rejection> {
        let Cost { inputs, tokens } = request.cost;
        if inputs < SPLIT_INPUTS_MIN && tokens < SPLIT_TOKENS_MIN {
            return Ok(None);
        }
        let tokens = tokens.saturating_add(inputs * SPECIAL_TOKENS);
        let targets = self.targets(request);
        let Some(plan) = dispatch::plan_split(inputs, tokens, &targets) else { return Ok(None) };
        let SplitPlan { sub_request_tokens, targets } = plan;
        let permit = self.split_capacity.try_acquire_request();
        if permit.is_none() && !dispatch::must_be_split(inputs, tokens) {
            self.metrics.split_admissions.count(SplitAdmission::Unsplit);
            return Ok(None);
        }
        let (path, body) = (request.path, request.body.bytes.clone());
        let splittable = self
            .body_reader
            .cpu
            .run(Some(request.tenant.index), move || SplittableBody::read(path, &body))
            .await;
        let Some(splittable) = splittable.map_err(too_many_inputs)? else { return Ok(None) };
        let sub_requests = splittable.sub_requests(sub_request_tokens);
        let is_split = sub_requests.len() > 1;
        if is_split {
            self.metrics.split_admissions.count(if permit.is_some() {
                SplitAdmission::Immediate
            } else {
                SplitAdmission::Queued
            });
        }
        Ok(is_split.then(|| RequestSplit { splittable: Arc::new(splittable), sub_requests, targets, permit }))
    }

    /// Regions that could serve the request, best first, with their reported load.
    fn targets(&self, request: &Request) -> Vec<SplitTarget> {
        let route = &request.route;
        let region_states = self.region_monitor.states();
        let target = |region: RegionIndex, rtt: Duration| {
            let load = region_states.load(region, &request.deployment);
            let tokens_per_second = load.tokens_per_second as u64;
            SplitTarget {
                region,
                rtt,
                replicas: load.ready.max(1),
                pending_tokens: load.pending_tokens,
                tokens_per_second,
            }
        };
        // A draining region gets no parts while there is another.
        let only_draining = route.targets().all(|candidate| candidate.score.draining);
        let order = route.targets().filter(|candidate| only_draining || !candidate.score.draining);
        // With an order, all parts go to the region of the whole request: the others are standbys.
        let first = order.clone().next().map(|candidate| candidate.score.order);
        let order = order.filter(|candidate| Some(candidate.score.order) == first);
        // Parts are sent to regions with a ready replica; without any, to the region that would hold the whole request.
        let is_held = |region| region_states.held_for(region, &request.deployment).is_some();
        let warm = order.clone().filter(|candidate| !is_held(candidate.region));
        let warm: Vec<_> = warm.map(|candidate| target(candidate.region, candidate.score.rtt)).collect();
        if !warm.is_empty() {
            return warm;
        }
        order.take(1).map(|candidate| target(candidate.region, candidate.score.rtt)).collect()
    }
}
