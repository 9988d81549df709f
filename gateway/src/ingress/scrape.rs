//! Metrics endpoint of an ingress: on its operations port, or else on the port for gateways.

use super::CONNECTIONS_MAX;
use super::Ingress;
use super::replicas::REPLICA_IN_FLIGHT_MAX;
use crate::listener::AfterResponse;
use crate::metrics::{CONTENT_TYPE, Kind, ListenerMetricNames, MetricsText, render_panics};
use crate::respond;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE as TYPE};
use pingora::protocols::http::ServerSession;
use scheduler_api::report::DeploymentLoad;
use scheduler_core::spoke::ScalingStatus;
use scheduler_core::spoke::hold::{HELD_BYTES_MAX, HELD_MAX};
use std::time::Instant;

/// Accessor of a number of a deployment's load.
type Part = fn(&DeploymentLoad) -> f64;

/// Metric of the scaler's decision: name, kind, help, value.
type ScalingMetric = (&'static str, Kind, &'static str, fn(&ScalingStatus) -> u64);

impl Ingress {
    pub(super) async fn scrape(&self, session: &mut ServerSession) -> AfterResponse {
        let body = Bytes::from(self.text());
        let mut head = respond::head(200, &[(TYPE.as_str(), CONTENT_TYPE)]);
        respond::put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        respond::whole(session, head, body).await
    }

    fn text(&self) -> String {
        let mut text = MetricsText::default();
        self.metrics.render(&mut text);
        render_panics(&mut text, "meridian_ingress");
        // Sequence 0: this report is not a response to a gateway.
        let (report, granted, held) = {
            let spoke = self.spoke.lock();
            let report = spoke.report(0, Instant::now());
            let granted = report.deployments.keys().map(|name| (name.clone(), spoke.granted(name)));
            let granted: Vec<_> = granted.collect();
            (report, granted, spoke.held_totals())
        };
        let parts: [(&str, &str, Part); 3] = [
            ("meridian_ingress_replicas_ready", "Ready replicas of a deployment.", |load| {
                f64::from(load.ready)
            }),
            ("meridian_ingress_pending_tokens", "Tokens queued or being computed.", |load| {
                load.pending_tokens as f64
            }),
            ("meridian_ingress_tokens_per_second", "Measured throughput of its replicas.", |load| {
                load.tokens_per_second
            }),
        ];
        for (name, help, part) in parts {
            text.head(name, Kind::Gauge, help);
            for (deployment, load) in &report.deployments {
                text.sample(name, &[("deployment", deployment.as_str())], part(load));
            }
        }
        let name = "meridian_ingress_granted_tokens";
        text.head(
            name,
            Kind::Gauge,
            "Granted tokens of other regions' overflow that gateways may still send.",
        );
        for (deployment, tokens) in granted {
            text.sample(name, &[("deployment", deployment.as_str())], tokens);
        }
        self.mismatches(&mut text);
        self.scaling(&mut text);
        self.hold.metrics.render(&mut text);
        let (requests, bytes) = held;
        for (name, help, value) in [
            (
                "meridian_ingress_held_requests",
                "Requests held for a replica to become ready.",
                requests as u64,
            ),
            ("meridian_ingress_held_requests_max", "Limit of held requests.", HELD_MAX as u64),
            ("meridian_ingress_held_bytes", "Bytes of the bodies of held requests.", bytes),
            ("meridian_ingress_held_bytes_max", "Limit of these bytes.", HELD_BYTES_MAX),
        ] {
            text.single(name, Kind::Gauge, help, value);
        }
        let name = "meridian_ingress_tables_refused_total";
        let help = "Route tables of a hub that were rejected: unreadable, or not newer.";
        text.single(name, Kind::Counter, help, self.spoke.lock().tables_rejected());
        if let Some((age, max)) = self.spoke.lock().policy_age(Instant::now()) {
            let name = "meridian_ingress_policy_age_seconds";
            let help = "Time since a hub last confirmed the current route table, or since the start.";
            text.single(name, Kind::Gauge, help, age.as_secs_f64());
            let name = "meridian_ingress_policy_max_age_seconds";
            let help = "The age past which requests of locked deployments are rejected.";
            text.single(name, Kind::Gauge, help, max.as_secs());
        }
        let open = CONNECTIONS_MAX - self.connections.available_permits();
        let (taken, _, bodies) = self.body_reader.used();
        for (name, help, value) in [
            ("meridian_ingress_connections", "Open connections of gateways.", open),
            ("meridian_ingress_connections_max", "Limit of open connections.", CONNECTIONS_MAX),
            ("meridian_ingress_bodies_bytes", "Memory reserved for request bodies.", taken),
            ("meridian_ingress_bodies_bytes_max", "Limit of this memory.", bodies.total),
        ] {
            text.single(name, Kind::Gauge, help, value);
        }
        ListenerMetricNames::INGRESS.render(&mut text, &self.listener, &self.body_reader.rejections);
        let (retries_left, states) = self.replicas.limits();
        let name = "meridian_ingress_retry_budget";
        text.single(name, Kind::Gauge, "Retries that the budget allows now.", retries_left);
        let name = "meridian_ingress_replica_in_flight";
        text.head(name, Kind::Gauge, "Requests in flight at a replica, by its number.");
        for state in &states {
            text.sample(name, &[("replica", &state.target.to_string())], state.in_flight);
        }
        let name = "meridian_ingress_replica_in_flight_max";
        text.single(name, Kind::Gauge, "Limit of requests in flight at a replica.", REPLICA_IN_FLIGHT_MAX);
        let draining = u8::from(report.draining);
        text.single("meridian_ingress_draining", Kind::Gauge, "1 while the ingress drains.", draining);
        if let Some(recorder) = &self.recorder {
            recorder.metrics().render(&mut text);
        }
        text.finish()
    }

    /// Writes the metrics of replicas whose model differs from that of their deployment.
    fn mismatches(&self, text: &mut MetricsText) {
        let mismatches = self.spoke.lock().mismatches();
        let name = "meridian_ingress_replicas_mismatched";
        text.head(name, Kind::Gauge, "Replicas whose model differs from that of their deployment.");
        for (deployment, (now, _)) in &mismatches {
            text.sample(name, &[("deployment", deployment.as_str())], now);
        }
        let name = "meridian_ingress_replica_mismatches_total";
        text.head(name, Kind::Counter, "Replicas that began to report such a model.");
        for (deployment, (_, total)) in &mismatches {
            text.sample(name, &[("deployment", deployment.as_str())], total);
        }
    }

    /// Writes the decision of the region's scaler, if there is one.
    fn scaling(&self, text: &mut MetricsText) {
        let decided = self.spoke.lock().scaling_status().clone();
        if decided.is_empty() {
            return;
        }
        let parts: [ScalingMetric; 5] = [
            ("desired", Kind::Gauge, "Desired replicas of a deployment, ready and provisioning.", |it| {
                u64::from(it.decision.replicas)
            }),
            ("provisioning", Kind::Gauge, "Replicas that are being started.", |it| {
                u64::from(it.provisioning)
            }),
            ("draining", Kind::Gauge, "Replicas that are draining.", |it| u64::from(it.draining)),
            (
                "crashed_total",
                Kind::Counter,
                "Replicas that exited without being stopped, since the spoke started.",
                |it| it.crashes,
            ),
            (
                "start_ms",
                Kind::Gauge,
                "90th percentile of the start time of a replica, in milliseconds.",
                |it| it.start_ms,
            ),
        ];
        for (name, kind, help, part) in parts {
            let name = format!("meridian_scaling_replicas_{name}");
            text.head(&name, kind, help);
            for (deployment, decided) in &decided {
                text.sample(&name, &[("deployment", deployment.as_str())], part(decided));
            }
        }
        let name = "meridian_scaling_decided_by";
        text.head(name, Kind::Gauge, "1 for the rule that decided the desired number of replicas.");
        for (deployment, decided) in &decided {
            let labels = [("deployment", deployment.as_str()), ("reason", decided.decision.reason.name())];
            text.sample(name, &labels, 1);
        }
    }
}
