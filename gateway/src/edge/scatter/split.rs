//! Decides whether a request is split, and into which parts.

use super::super::forwarder::Forwarder;
use super::super::policy::PolicyGuard;
use super::super::refusals::too_many_inputs;
use super::super::request::Request;
use super::super::responder::Responder;
use super::super::router::Router;
use super::super::watch::Watch;
use super::room::Room;
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
    pub(in crate::edge) scattering: Arc<Room>,
    pub(in crate::edge) body_reader: Arc<BodyReader>,
    pub(in crate::edge) router: Arc<Router>,
    pub(in crate::edge) policy: Arc<PolicyGuard>,
    pub(in crate::edge) forwarder: Arc<Forwarder>,
    pub(in crate::edge) responder: Arc<Responder>,
    pub(in crate::edge) watch: Arc<Watch>,
    pub(in crate::edge) upstream: Arc<Upstream>,
    pub(in crate::edge) metrics: Arc<EdgeMetrics>,
}

/// Split of a request.
pub(in crate::edge) struct Cut<'a> {
    pub(super) cutting: Arc<SplittableBody>,
    pub(super) pieces: Vec<SubRequest>,
    pub(super) places: Vec<SplitTarget>,
    /// Its turn; one that must be cut can wait for it.
    pub(super) turn: Option<SemaphorePermit<'a>>,
}

impl Splitter {
    /// How the request is cut, if it is worth it. A small one is not even looked at.
    pub(in crate::edge) async fn cut(&self, request: &Request) -> Result<Option<Cut<'_>>, Rejection> {
        let Cost { inputs, tokens } = request.cost;
        if inputs < SPLIT_INPUTS_MIN && tokens < SPLIT_TOKENS_MIN {
            return Ok(None);
        }
        let tokens = tokens.saturating_add(inputs * SPECIAL_TOKENS);
        let places = self.places(request);
        let Some(scale) = dispatch::plan_split(inputs, tokens, &places) else { return Ok(None) };
        let SplitPlan { sub_request_tokens, targets: places } = scale;
        let turn = self.scattering.turn_now();
        if turn.is_none() && !dispatch::must_be_split(inputs, tokens) {
            self.metrics.split_admissions.count(SplitAdmission::Unsplit);
            return Ok(None);
        }
        let (path, body) = (request.path, request.body.bytes.clone());
        let cutting = self
            .body_reader
            .cpu
            .run(Some(request.tenant.index), move || SplittableBody::read(path, &body))
            .await;
        let Some(cutting) = cutting.map_err(too_many_inputs)? else { return Ok(None) };
        let pieces = cutting.sub_requests(sub_request_tokens);
        let worth_it = pieces.len() > 1;
        if worth_it {
            self.metrics.split_admissions.count(if turn.is_some() {
                SplitAdmission::Immediate
            } else {
                SplitAdmission::Queued
            });
        }
        Ok(worth_it.then(|| Cut { cutting: Arc::new(cutting), pieces, places, turn }))
    }

    /// The regions that could take the request, best first, and what they say of their room.
    fn places(&self, request: &Request) -> Vec<SplitTarget> {
        let route = &request.route;
        let known = self.watch.known();
        let place = |region: RegionIndex, rtt: Duration| {
            let load = known.load(region, &request.deployment);
            let tokens_per_second = load.tokens_per_second as u64;
            SplitTarget {
                region,
                rtt,
                replicas: load.ready.max(1),
                pending_tokens: load.pending_tokens,
                tokens_per_second,
            }
        };
        // Nothing is spread over a region that is being emptied, while there is another.
        let only_draining = route.targets().all(|candidate| candidate.score.draining);
        let order = route.targets().filter(|candidate| only_draining || !candidate.score.draining);
        // Pieces go where something is ready; where nothing is, to whoever would hold the whole.
        let holds = |region| known.held_for(region, &request.deployment).is_some();
        let warm = order.clone().filter(|candidate| !holds(candidate.region));
        let warm: Vec<_> = warm.map(|candidate| place(candidate.region, candidate.score.rtt)).collect();
        if !warm.is_empty() {
            return warm;
        }
        order.take(1).map(|candidate| place(candidate.region, candidate.score.rtt)).collect()
    }
}
