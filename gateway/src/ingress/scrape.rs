//! `/metrics` of an ingress: on its operations port, or else on the one that edges come to.

use super::{Ingress, lock};
use crate::listener::AfterAnswer;
use crate::metrics::{CONTENT_TYPE, Kind, Text};
use crate::respond;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE as TYPE};
use pingora::protocols::http::ServerSession;
use scheduler_core::spoke::Load;
use std::time::Instant;

/// One of the numbers of a deployment's load.
type Part = fn(&Load) -> f64;

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
        // Sequence 0: a report that no edge asked for.
        let (report, granted) = {
            let spoke = lock(&self.spoke);
            let report = spoke.report(0, Instant::now());
            let granted = report.deployments.keys().map(|name| (name.clone(), spoke.granted(name)));
            let granted: Vec<_> = granted.collect();
            (report, granted)
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
        let draining = u8::from(report.draining);
        text.single("meridian_ingress_draining", Kind::Gauge, "1 once it was told to stop.", draining);
        if let Some(recorder) = &self.recorder {
            recorder.gauge().render(&mut text);
        }
        text.finish()
    }
}
