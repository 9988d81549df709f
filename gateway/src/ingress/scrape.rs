//! `/metrics` of an ingress: on its operations port, or else on the one that edges come to.

use super::CONNECTIONS_MAX;
use super::Ingress;
use super::replicas::REPLICA_IN_FLIGHT_MAX;
use crate::listener::AfterAnswer;
use crate::metrics::{CONTENT_TYPE, Kind, Names, Text, render_panics};
use crate::respond;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE as TYPE};
use pingora::protocols::http::ServerSession;
use scheduler_core::spoke::hold::{HELD_BYTES_MAX, HELD_MAX};
use scheduler_core::spoke::{DeploymentLoad, ScalingStatus};
use std::time::Instant;

/// One of the numbers of a deployment's load.
type Part = fn(&DeploymentLoad) -> f64;

/// A metric of what was decided: its name, kind, what it says, and its value.
type Scaled = (&'static str, Kind, &'static str, fn(&ScalingStatus) -> u64);

impl Ingress {
    pub(super) async fn scrape(&self, session: &mut ServerSession) -> AfterAnswer {
        let body = Bytes::from(self.text());
        let mut head = respond::head(200, &[(TYPE.as_str(), CONTENT_TYPE)]);
        respond::put(&mut head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        respond::whole(session, head, body).await
    }

    fn text(&self) -> String {
        let mut text = Text::default();
        self.metrics.render(&mut text);
        render_panics(&mut text, "meridian_ingress");
        // Sequence 0: a report that no edge asked for.
        let (report, granted, held) = {
            let spoke = self.spoke.lock();
            let report = spoke.report(0, Instant::now());
            let granted = report.deployments.keys().map(|name| (name.clone(), spoke.granted(name)));
            let granted: Vec<_> = granted.collect();
            (report, granted, spoke.held_totals())
        };
        let parts: [(&str, &str, Part); 3] = [
            ("meridian_ingress_replicas_ready", "Replicas that take work for a deployment.", |load| {
                f64::from(load.ready)
            }),
            ("meridian_ingress_pending_tokens", "Tokens that wait or are being computed.", |load| {
                load.pending_tokens as f64
            }),
            ("meridian_ingress_tokens_per_second", "What its replicas compute, as measured.", |load| {
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
        text.head(name, Kind::Gauge, "Tokens of others' overflow that edges may still send.");
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
                "Requests that wait for a replica to be ready.",
                requests as u64,
            ),
            ("meridian_ingress_held_requests_max", "How many may.", HELD_MAX as u64),
            ("meridian_ingress_held_bytes", "Bytes of their bodies.", bytes),
            ("meridian_ingress_held_bytes_max", "How many may be.", HELD_BYTES_MAX),
        ] {
            text.single(name, Kind::Gauge, help, value);
        }
        let name = "meridian_ingress_tables_refused_total";
        let help = "Route tables of a hub that were not taken: they could not be read, or were no newer.";
        text.single(name, Kind::Counter, help, self.spoke.lock().tables_rejected());
        if let Some((age, max)) = self.spoke.lock().policy_age(Instant::now()) {
            let name = "meridian_ingress_policy_age_seconds";
            let help = "Time since a hub last confirmed the route table in hand, or since the start.";
            text.single(name, Kind::Gauge, help, age.as_secs_f64());
            let name = "meridian_ingress_policy_max_age_seconds";
            let help = "The age past which requests of locked deployments are rejected.";
            text.single(name, Kind::Gauge, help, max.as_secs());
        }
        let open = CONNECTIONS_MAX - self.connections.available_permits();
        let (taken, _, bodies) = self.intake.used();
        for (name, help, value) in [
            ("meridian_ingress_connections", "Connections of edges that are open.", open),
            ("meridian_ingress_connections_max", "How many may be.", CONNECTIONS_MAX),
            ("meridian_ingress_bodies_bytes", "Memory that the request bodies under way have taken.", taken),
            ("meridian_ingress_bodies_bytes_max", "How much they may take.", bodies.total),
        ] {
            text.single(name, Kind::Gauge, help, value);
        }
        Names::INGRESS.render(&mut text, &self.listener, &self.intake.not_taken);
        let (retries_left, states) = self.replicas.limits();
        let name = "meridian_ingress_retry_budget";
        text.single(
            name,
            Kind::Gauge,
            "Retries at another replica that could be paid for now.",
            retries_left,
        );
        let name = "meridian_ingress_replica_in_flight";
        text.head(name, Kind::Gauge, "Requests that wait for a replica, by its number in the configuration.");
        for state in &states {
            text.sample(name, &[("replica", &state.target.to_string())], state.in_flight);
        }
        let name = "meridian_ingress_replica_in_flight_max";
        text.single(name, Kind::Gauge, "How many may for each.", REPLICA_IN_FLIGHT_MAX);
        let draining = u8::from(report.draining);
        text.single("meridian_ingress_draining", Kind::Gauge, "1 once it was told to stop.", draining);
        if let Some(recorder) = &self.recorder {
            recorder.gauge().render(&mut text);
        }
        text.finish()
    }

    /// Replicas that do not run what their deployment is served with.
    fn mismatches(&self, text: &mut Text) {
        let mismatches = self.spoke.lock().mismatches();
        let name = "meridian_ingress_replicas_mismatched";
        text.head(
            name,
            Kind::Gauge,
            "Replicas whose model is not the one that the deployment is served with.",
        );
        for (deployment, (now, _)) in &mismatches {
            text.sample(name, &[("deployment", deployment.as_str())], now);
        }
        let name = "meridian_ingress_replica_mismatches_total";
        text.head(name, Kind::Counter, "Times that a replica began to report such a model.");
        for (deployment, (_, seen)) in &mismatches {
            text.sample(name, &[("deployment", deployment.as_str())], seen);
        }
    }

    /// What the region's scaler has decided, where there is one.
    fn scaling(&self, text: &mut Text) {
        let decided = self.spoke.lock().scaling_status().clone();
        if decided.is_empty() {
            return;
        }
        let parts: [Scaled; 5] = [
            (
                "wanted",
                Kind::Gauge,
                "Replicas that a deployment should have, ready and ordered together.",
                |it| u64::from(it.decision.replicas),
            ),
            ("ordered", Kind::Gauge, "Replicas that are on their way.", |it| u64::from(it.provisioning)),
            ("leaving", Kind::Gauge, "Replicas that finish what they have and go.", |it| {
                u64::from(it.draining)
            }),
            (
                "died_total",
                Kind::Counter,
                "Replicas that ended without being told to, since the spoke started.",
                |it| it.crashes,
            ),
            (
                "start_ms",
                Kind::Gauge,
                "What nine of ten starts of a replica take at most, in milliseconds.",
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
        text.head(name, Kind::Gauge, "1 for what decided how many are wanted.");
        for (deployment, decided) in &decided {
            let labels = [("deployment", deployment.as_str()), ("why", decided.decision.reason.name())];
            text.sample(name, &labels, 1);
        }
    }
}
