//! Metrics endpoint of an ingress: on its operations port, or else on the port for gateways.
//!
//! Labels are bounded whatever clients and replicas send. Deployments that replicas name have [rows](ListedDeployments) up to a limit.
//! The label of a replica is its number in the region, and those of [`ScalingScrape`] are the deployments that the hub assigns: the
//! configuration limits both.

use super::CONNECTIONS_MAX;
use super::deployment_rows::ListedDeployments;
use super::operations::IngressOperations;
use super::replicas::REPLICA_IN_FLIGHT_MAX;
use crate::listener::AfterResponse;
use crate::metrics::{HoldMetrics, InGateway, IngressMetrics, JobScrape, ListenerScrape, OTHER_DEPLOYMENTS};
use crate::receipts::{ReceiptMetrics, ReceiptScrape};
use crate::respond;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE};
use identity::{CertificateMetrics, ConnectionFailureCause};
use metrics::page::RoleMetrics;
use metrics::{BuildMetrics, ByName, Format, Label, MetricsSnapshot, OneOf, Sparse, Total, metric_set};
use pingora::protocols::http::ServerSession;
use replica_api::start_failure::StartFailure;
use resolver::ResolverMetrics;
use scheduler_core::scale::ScalingReason;
use scheduler_core::spoke::MismatchCounts;
use scheduler_core::spoke::hold::{HELD_BYTES_MAX, HELD_MAX};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::panics::PanicMetrics;
use telemetry::{
    ExportError, LogMetrics, MetricExports, MetricsConfig, MetricsExport, Process, TraceMetrics, Tracer,
};

/// Role in the names of shared metrics.
const ROLE: &str = "ingress";

impl Label<InGateway> for ScalingReason {
    fn values() -> Vec<&'static str> {
        ScalingReason::ALL.iter().map(|reason| reason.name()).collect()
    }

    fn index(self) -> usize {
        ScalingReason::ALL.iter().take_while(|reason| **reason != self).count()
    }
}

metric_set! {
    /// All metrics of an ingress.
    pub(super) struct IngressScrape<'a> {
        /// Counters.
        counted: &'a IngressMetrics = set,
        /// Ready replicas of a deployment.
        replicas_ready: ByName<u32> = "meridian_ingress_replicas_ready" ["deployment"],
        /// Tokens queued or being computed.
        pending_tokens: ByName<u64> = "meridian_ingress_pending_tokens" ["deployment"],
        /// Measured throughput of its replicas.
        tokens_per_second: ByName<f64> = "meridian_ingress_tokens_per_second" ["deployment"],
        /// Granted tokens of other regions' overflow that gateways may still send.
        granted_tokens: ByName<u64> = "meridian_ingress_granted_tokens" ["deployment"],
        /// Replicas whose model differs from that of their deployment.
        mismatched: ByName<u64> = "meridian_ingress_replicas_mismatched" ["deployment"],
        /// Replicas that began to report such a model.
        mismatches: ByName<Total> = "meridian_ingress_replica_mismatches_total" ["deployment"],
        /// 1 for a deployment that has failed in this region: no replica of it can start, for this reason.
        failed: ByName<Sparse<OneOf<StartFailure, InGateway>, false>> =
            "meridian_deployment_failed" ["deployment", "reason"],
        /// 1 while this spoke scales its region.
        is_scaler: bool = "meridian_scaling_is_scaler",
        /// Decisions of the autoscaler, if there is one.
        scaling: Option<ScalingScrape> = set,
        /// Held requests.
        hold: &'a HoldMetrics = set,
        /// Requests held for a replica to become ready.
        held_requests: usize = "meridian_ingress_held_requests",
        /// Limit of held requests.
        held_requests_max: usize = "meridian_ingress_held_requests_max",
        /// Bytes of the bodies of held requests.
        held_bytes: u64 = "meridian_ingress_held_bytes",
        /// Limit of these bytes.
        held_bytes_max: u64 = "meridian_ingress_held_bytes_max",
        /// Route tables of a hub that were rejected: unreadable, not newer, or changes that do not result in the table of the
        /// hub.
        tables_refused: Total = "meridian_ingress_tables_refused_total",
        /// Time since a hub last confirmed the current route table, or since the start.
        policy_age: Option<Duration> = "meridian_ingress_policy_age_seconds",
        /// The age past which requests of locked deployments are rejected.
        policy_max_age: Option<Duration> = "meridian_ingress_policy_max_age_seconds",
        /// Queue of durable jobs, if there is one.
        jobs: Option<JobScrape<'a>> = set,
        /// Connections of gateways.
        listener: ListenerScrape<'a> = set,
        /// Connections to replicas that failed before a request was sent, by cause.
        replica_connection_failures: &'a metrics::Family<ConnectionFailureCause> =
            "meridian_ingress_replica_connection_failures_total" ["cause"],
        /// Resolution of the names of replicas and hubs.
        names: ResolverMetrics<'a> = set,
        /// Retries that the budget allows now.
        retries_left: u32 = "meridian_ingress_retry_budget",
        /// Requests in flight at a replica, by its number.
        replica_in_flight: ByName<u32> = "meridian_ingress_replica_in_flight" ["replica"],
        /// Limit of requests in flight at a replica.
        replica_in_flight_max: u32 = "meridian_ingress_replica_in_flight_max",
        /// 1 while the ingress drains.
        draining: bool = "meridian_ingress_draining",
        /// Certificate of the spoke.
        certificate: CertificateMetrics = set,
        /// Panics.
        panics: PanicMetrics = set,
        /// Build.
        build: BuildMetrics = set,
        /// Receipts.
        receipts: Option<ReceiptScrape<'a>> = set,
        /// Traces.
        traces: Option<TraceMetrics<'a>> = set,
        /// Export of the log.
        logs: Option<LogMetrics<'a>> = set,
        /// Export of the metrics.
        metric_exports: Option<MetricExports<'a>> = set,
    }
}

metric_set! {
    /// Decisions of the region's autoscaler, and the state of its replicas.
    struct ScalingScrape {
        /// Desired replicas of a deployment, ready and provisioning.
        desired: ByName<u32> = "meridian_scaling_replicas_desired" ["deployment"],
        /// Replicas that are being started.
        provisioning: ByName<u32> = "meridian_scaling_replicas_provisioning" ["deployment"],
        /// Replicas that are draining.
        draining: ByName<u32> = "meridian_scaling_replicas_draining" ["deployment"],
        /// Replicas that exited without being stopped, since the spoke started.
        crashed: ByName<Total> = "meridian_scaling_replicas_crashed_total" ["deployment"],
        /// 90th percentile of the start time of a replica, in milliseconds.
        start_ms: ByName<u64> = "meridian_scaling_replicas_start_ms" ["deployment"],
        /// 1 for the rule that decided the desired number of replicas.
        decided_by: ByName<Sparse<OneOf<ScalingReason, InGateway>, false>> =
            "meridian_scaling_decided_by" ["deployment", "reason"],
    }
}

/// Returns the metrics of an ingress.
pub fn metrics() -> RoleMetrics {
    RoleMetrics::of::<IngressScrape<'_>>(ROLE)
}

impl IngressOperations {
    /// Starts the export of the metrics, if it is configured.
    pub(super) fn start_metrics_export(
        self: &Arc<Self>,
        config: Option<&MetricsConfig>,
    ) -> Result<Option<MetricsExport>, ExportError> {
        let Some(config) = config else { return Ok(None) };
        let process = Process { role: "spoke", region: Some(self.region.as_str()) };
        let operations = self.clone();
        telemetry::metrics::start(config, process, move || operations.snapshot()).map(Some)
    }

    pub(super) async fn scrape(&self, session: &mut ServerSession) -> AfterResponse {
        let accept = session.get_header(ACCEPT).and_then(|value| value.to_str().ok());
        let format = Format::negotiate(accept);
        let body = Bytes::from(self.snapshot().text(format));
        let mut head = respond::head(200, &[(CONTENT_TYPE.as_str(), format.content_type())]);
        respond::put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        respond::whole(session, head, body).await
    }

    /// Returns the values of all metrics.
    pub(super) fn snapshot(&self) -> MetricsSnapshot {
        let (bodies_bytes, _, bodies_max) = self.body_reader.used();
        let (retries_left, replicas) = self.replicas.limits();
        let mut spoke = self.spoke.lock();
        let is_scaler = spoke.is_scaler(Instant::now());
        let reported = spoke.loads(Instant::now());
        let loads = || reported.iter();
        let rows = ListedDeployments::of(reported.keys(), |name| spoke.is_configured(name));
        let MismatchCounts { by_deployment, others } = spoke.mismatches();
        let other_mismatches = (others != (0, 0)).then_some((OTHER_DEPLOYMENTS, others));
        let mismatches: Vec<_> = by_deployment
            .iter()
            .map(|(name, counts)| (name.as_str(), *counts))
            .chain(other_mismatches)
            .collect();
        let (held_requests, held_bytes) = spoke.held_totals();
        let policy_age = spoke.policy_age(Instant::now());
        let scrape = IngressScrape {
            counted: &self.metrics,
            replicas_ready: rows.sum(loads().map(|(name, load)| (name, load.ready)), u32::saturating_add),
            pending_tokens: rows
                .sum(loads().map(|(name, load)| (name, load.pending_tokens)), u64::saturating_add),
            tokens_per_second: rows
                .sum(loads().map(|(name, load)| (name, load.tokens_per_second)), |sum, more| sum + more),
            granted_tokens: rows
                .sum(loads().map(|(name, _)| (name, spoke.granted(name))), u64::saturating_add),
            mismatched: mismatches.iter().map(|(name, (now, _))| (name, *now)).collect(),
            mismatches: mismatches.iter().map(|(name, (_, total))| (name, Total(*total))).collect(),
            failed: rows.failed(loads().filter_map(|(name, load)| Some((name, load.failed?)))),
            is_scaler,
            scaling: (!spoke.scaling_status().is_empty()).then(|| {
                let each = || spoke.scaling_status().iter();
                ScalingScrape {
                    desired: each().map(|(name, it)| (name, it.decision.replicas)).collect(),
                    provisioning: each().map(|(name, it)| (name, it.provisioning)).collect(),
                    draining: each().map(|(name, it)| (name, it.draining)).collect(),
                    crashed: each().map(|(name, it)| (name, Total(it.crashes))).collect(),
                    start_ms: each().map(|(name, it)| (name, it.start_ms)).collect(),
                    decided_by: each()
                        .map(|(name, it)| (name, Sparse(OneOf::new(it.decision.reason))))
                        .collect(),
                }
            }),
            hold: &self.hold.metrics,
            held_requests,
            held_requests_max: HELD_MAX,
            held_bytes,
            held_bytes_max: HELD_BYTES_MAX,
            tables_refused: Total(spoke.tables_rejected()),
            policy_age: policy_age.map(|(age, _)| age),
            policy_max_age: policy_age.map(|(_, max)| max),
            jobs: self.jobs.as_ref().map(|jobs| jobs.scrape()),
            listener: ListenerScrape {
                listener: &self.listener.metrics,
                connections: CONNECTIONS_MAX - self.listener.connections.available_permits(),
                connections_max: CONNECTIONS_MAX,
                refused: &self.listener.refused.counts,
                bodies: &self.body_reader.rejections,
                bodies_bytes,
                bodies_bytes_max: bodies_max.total,
            },
            replica_connection_failures: &self.upstream.hop_failures().counts,
            names: self.upstream.names(),
            retries_left,
            replica_in_flight: replicas.iter().map(|state| (state.target, state.in_flight)).collect(),
            replica_in_flight_max: REPLICA_IN_FLIGHT_MAX,
            draining: spoke.is_draining(),
            certificate: CertificateMetrics::read(&self.transport),
            panics: PanicMetrics::read(),
            build: BuildMetrics::read(),
            receipts: self.receipts.as_ref().map(ReceiptMetrics::scrape),
            traces: self.tracer.as_ref().map(Tracer::metrics),
            logs: LogMetrics::read(),
            metric_exports: MetricExports::read(),
        };
        drop(spoke);
        MetricsSnapshot::of(ROLE, &scrape)
    }
}
