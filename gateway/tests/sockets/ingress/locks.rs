//! Panics under each lock that an ingress takes while serving.

use super::{Fixture, RESPONSE_TIME, Takes};
use serde_json::json;
use std::time::Duration;
use supervision::failpoint::trial::{Subject, each_lock};

#[test]
fn a_panic_under_any_lock_fails_one_request_or_the_process() {
    const NAME: &str = "ingress::locks::a_panic_under_any_lock_fails_one_request_or_the_process";
    each_lock(NAME, 5, |case| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fixture = Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await;
            case.run(&fixture).await;
        });
    });
}

impl Subject for Fixture {
    const PROBES: &'static [&'static str] = &["/livez", "/readyz"];
    /// The request that panics, and another that waits for the same replica.
    const FAILED_MAX: usize = 2;

    async fn drive(&self) -> usize {
        let exchange = json!({"version": 1, "gateway": "test", "sequence": 1}).to_string();
        let embed = r#"{"model":"m","input":"a"}"#.to_owned();
        let cases = [
            ("POST", "/v1/embeddings", "us", embed.clone(), 200),
            ("POST", "/v1/embeddings", "eu", embed, 403),
            ("POST", scheduler_api::paths::EXCHANGE, "us", exchange, 200),
        ];
        let mut failed = 0;
        // A connection of its own, since one that is kept is admitted only once.
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        for (method, path, residency, body, expected) in cases {
            let request = client.request(method.parse().unwrap(), format!("{}{path}", self.url));
            let request = request.header("x-meridian-deployment", "m");
            let response = request.header("x-meridian-residency", residency).body(body).send().await;
            failed += usize::from(response.ok().map(|response| response.status().as_u16()) != Some(expected));
        }
        for path in ["/status", "/metrics"] {
            self.probe(path).await;
        }
        // Besides requests the replicas are probed, several times a second.
        tokio::time::sleep(Duration::from_millis(300)).await;
        failed
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        match self.client.get(format!("{}{path}", self.url)).send().await {
            Ok(response) => (response.status().as_u16(), response.text().await.unwrap_or_default()),
            Err(error) => (0, error.to_string()),
        }
    }

    fn refuses_probes(&self, lock: &str) -> bool {
        lock.ends_with("listener::admission::State")
    }
}
