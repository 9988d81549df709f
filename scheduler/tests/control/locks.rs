//! Tests with a panic under each lock that a hub takes while it serves requests.

use crate::world::{AMERICA, Hub, config};
use scheduler_api::paths;
use serde_json::json;
use std::time::Duration;
use supervision::failpoint::trial::{Subject, each_lock};

#[test]
fn a_panic_under_any_lock_fails_one_request_or_the_process() {
    const NAME: &str = "locks::a_panic_under_any_lock_fails_one_request_or_the_process";
    each_lock(NAME, 3, |case| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let data = tempfile::tempdir().unwrap();
        runtime.block_on(async {
            let hub = Hub::start(config(data.path())).await;
            case.run(&hub).await;
        });
    });
}

impl Subject for Hub {
    const PROBES: &'static [&'static str] = &[paths::LIVEZ, paths::READYZ];
    /// The request that panics, and another one that waits for the store at the same time.
    const FAILED_MAX: usize = 2;

    async fn drive(&self) -> usize {
        let spoke = json!({"version": 1, "region": AMERICA, "instance": "a", "endpoint": "10.0.0.1:8081", "boot_id": 1,
                           "deployments": ["minilm"]});
        let class =
            json!({"deployment": "minilm", "residency": null, "origin": AMERICA, "tokens_per_second": 1});
        let demand = json!({"version": 1, "gateway": AMERICA, "boot_id": 1, "classes": [class]});
        let cases = [
            ("POST", paths::SPOKES, spoke.to_string()),
            ("GET", paths::ROUTES, String::new()),
            ("GET", paths::DEPLOYMENTS, String::new()),
            ("GET", paths::TENANTS, String::new()),
            ("GET", paths::ROLLOUT, String::new()),
            ("GET", paths::PLAN, String::new()),
            ("POST", paths::DEMAND, demand.to_string()),
            ("PUT", "/v1/drains/aws/us-east-1", String::new()),
            ("DELETE", "/v1/drains/aws/us-east-1", String::new()),
        ];
        let mut failed = 0;
        for (method, path, body) in cases {
            let request = self.client.request(method.parse().unwrap(), format!("{}{path}", self.url));
            let status = request.body(body).send().await.map(|response| response.status().as_u16());
            // Some requests are rejected, since their object does not exist yet; that counts as a response too.
            failed += usize::from(!status.is_ok_and(|status| (200..500).contains(&status)));
        }
        // Background work: elections, leases and plans.
        tokio::time::sleep(Duration::from_millis(300)).await;
        failed
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        match self.client.get(format!("{}{path}", self.url)).send().await {
            Ok(response) => (response.status().as_u16(), response.text().await.unwrap_or_default()),
            Err(error) => (0, error.to_string()),
        }
    }

    /// A failed hub exits once no client waits for a response.
    fn refuses_probes(&self, _lock: &str) -> bool {
        true
    }
}
