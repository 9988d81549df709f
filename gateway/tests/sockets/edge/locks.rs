//! Panics under each lock that a gateway takes while serving.

use super::fixture::{AMERICA, EUROPE, Fixture, JAPAN};
use super::region::Script::Responds;
use serde_json::json;
use std::time::Duration;
use supervision::failpoint::trial::{Subject, each_lock};

#[test]
fn a_panic_under_any_lock_fails_one_request_or_the_process() {
    const NAME: &str = "edge::locks::a_panic_under_any_lock_fails_one_request_or_the_process";
    each_lock(NAME, 8, |case| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fixture = Fixture::with([(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)]).await;
            case.run(&fixture).await;
        });
    });
}

impl Subject for Fixture {
    const PROBES: &'static [&'static str] = &["/livez", "/readyz"];
    /// The request that panics, and another that shares a batch with it.
    const FAILED_MAX: usize = 2;

    async fn drive(&self) -> usize {
        let body = |model: &str| json!({"model": model, "input": "x"}).to_string();
        let cases = [
            ("POST", "/v1/embeddings", "k", body("anywhere"), 200),
            ("POST", "/v1/embeddings", "k", body("locked"), 200),
            ("POST", "/v1/embeddings", "n", body("locked"), 404),
            ("GET", "/v1/models", "k", String::new(), 200),
            ("GET", "/deployments/anywhere/info", "k", String::new(), 200),
            ("POST", "/v1/embeddings", "unknown", body("anywhere"), 401),
        ];
        let mut failed = 0;
        // A connection of its own, since one that is kept is admitted only once.
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        for (method, path, key, body, expected) in cases {
            let url = self.url.replace("/v1/embeddings", path);
            let request = client.request(method.parse().unwrap(), url).bearer_auth(key).body(body);
            let status = request.send().await.map(|response| response.status().as_u16());
            failed += usize::from(status.ok() != Some(expected));
        }
        for path in ["/metrics", "/routes", "/explain/unknown"] {
            self.probe(path).await;
        }
        // Besides requests there are reports, five times a second, and health checks.
        tokio::time::sleep(Duration::from_millis(300)).await;
        failed
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        match self.client.get(format!("{}{path}", self.operations)).send().await {
            Ok(response) => (response.status().as_u16(), response.text().await.unwrap_or_default()),
            Err(error) => (0, error.to_string()),
        }
    }

    fn refuses_probes(&self, lock: &str) -> bool {
        lock.ends_with("listener::admission::State")
    }
}
