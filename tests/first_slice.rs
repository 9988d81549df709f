//! End-to-end tests of Meridian from a client's perspective: real processes, real weights, real kills.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod applied;
mod clients;
mod cold_start;
mod console;
mod deploy;
mod drilled;
mod gateways;
mod haproxy;
mod jobs;
mod local_fleet;
mod log_settings;
mod model_download;
mod on_etcd;
mod on_gpu;
mod plan;
mod python_client;
#[cfg(target_os = "linux")]
mod quickstart;
mod small_disk;
mod stalled_download;
mod traces;

use local_fleet::https::HttpsClient;
use local_fleet::{LocalFleet, command_lines, meridian};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";
const JAPAN: &str = "oci/ap-tokyo-1";

const FRANKFURT: (&str, &str) = ("x-meridian-client-geo", "50.11,8.68");
const ASHBURN: (&str, &str) = ("x-meridian-client-geo", "39.04,-77.49");
const OSAKA: (&str, &str) = ("x-meridian-client-geo", "34.69,135.50");

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("replica/tests/golden").join(name)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    dot(a, b) / (dot(a, a).sqrt() * dot(b, b).sqrt())
}

#[tokio::test]
async fn a_healthy_fleet_responds_from_the_nearest_region_with_the_models_vectors() {
    let fleet = LocalFleet::start(&[]);

    let texts: Vec<String> =
        serde_json::from_slice(&std::fs::read(fixture("minilm_texts.json")).unwrap()).unwrap();
    let reference: Vec<f32> = std::fs::read(fixture("minilm_vectors.f32"))
        .unwrap()
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert_eq!(reference.len(), 64 * 384);
    let response = fleet.embed("minilm", texts.clone(), &[]).await;
    assert_eq!(response.status, 200, "{}", response.body);
    for (row, (ours, theirs)) in response.vectors().iter().zip(reference.chunks_exact(384)).enumerate() {
        let cosine = cosine(ours, theirs);
        assert!(cosine >= 0.99999, "text {row} has cosine {cosine}: {:?}", texts[row]);
    }
    assert_eq!(response.body["model"], "minilm");
    let tokens = response.body["usage"]["total_tokens"].as_u64().unwrap();
    assert!(tokens > 64);
    assert_eq!(
        response.header("x-meridian-tokens"),
        tokens.to_string(),
        "by which the edge settles its limits"
    );

    for (place, region) in [(FRANKFURT, EUROPE), (ASHBURN, AMERICA), (OSAKA, JAPAN)] {
        fleet.wait_for_health(region, "healthy").await;
        let response = fleet.embed("minilm", "near", &[place, ("x-request-id", "my-own-id")]).await;
        assert_eq!(response.header("x-meridian-region"), region, "{place:?}: {}", response.body);
        assert_eq!(response.header("x-meridian-attempts"), "1");
        assert_eq!(response.header("x-request-id"), "my-own-id");
        for part in ["gateway;dur=", "network;dur=", "queue;dur=", "tokenize;dur=", "engine;dur="] {
            assert!(response.header("server-timing").contains(part), "{}", response.header("server-timing"));
        }
    }

    let models = fleet.get("/v1/models").await;
    let names: Vec<_> =
        models.body["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["minilm", "minilm-eu"]);
}

/// Returns the number of sockets of a process that listen, in `/proc/net/tcp` or `/proc/net/tcp6`.
fn listening(process: u32, table: &str) -> usize {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let table = std::fs::read_to_string(format!("/proc/net/{table}")).unwrap();
    let inodes = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        // State 0A: the socket listens.
        (fields.get(3) == Some(&"0A")).then(|| format!("socket:[{}]", fields[9]))
    });
    inodes.filter(|inode| sockets.contains(inode)).count()
}

#[tokio::test]
async fn a_fleet_over_ipv6_serves_requests_and_listens_at_no_ipv4_address() {
    let mut fleet = LocalFleet::start(&["--regions", "2", "--ipv6"]);
    for url in [&fleet.url, &fleet.hub] {
        assert!(url.contains("//[::1]:"), "{url}");
    }
    fleet.wait_for_health(AMERICA, "healthy").await;
    let response = fleet.embed("minilm", "near", &[ASHBURN]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, AMERICA), "{}", response.body);
    let endpoint = fleet.route(AMERICA).await["instances"][0]["endpoint"].clone();
    assert!(endpoint.as_str().unwrap().starts_with("[::1]:"), "{endpoint}");

    let processes = fleet.processes().await.into_iter();
    let mut processes: Vec<_> = processes.filter_map(|(name, id)| Some((name, id?))).collect();
    processes.push(("up".to_owned(), fleet.process().id()));
    assert!(processes.len() >= 5, "a hub, a gateway, two spokes, `up`: {processes:?}");
    for (name, id) in processes {
        assert_eq!(listening(id, "tcp"), 0, "{name} listens at an IPv4 address");
        assert!(listening(id, "tcp6") > 0, "{name} listens");
    }
}

#[tokio::test]
async fn the_apis_of_all_ecosystems_are_served_by_the_nearest_allowed_region() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let documents = ["A recipe for bread.", "The ship sank in a storm.", "Sailors fear rough seas."];
    let rerank_body =
        |texts: &str| json!({"model": "minilm-eu", "query": "dangers at sea", texts: documents}).to_string();
    let order = |results: &Value| -> Vec<u64> {
        results.as_array().unwrap().iter().map(|result| result["index"].as_u64().unwrap()).collect()
    };
    let cohere = fleet.post_to("/v2/rerank", rerank_body("documents"), &[ASHBURN]).await;
    assert_eq!((cohere.status, cohere.header("x-meridian-region")), (200, EUROPE), "{}", cohere.body);
    let ranks = order(&cohere.body["results"]);
    assert_eq!((ranks.len(), ranks[2]), (3, 0), "bread ranks last: {}", cohere.body);

    let tei = fleet.post_to("/deployments/minilm-eu/rerank", rerank_body("texts"), &[ASHBURN]).await;
    assert_eq!((tei.status, tei.header("x-meridian-region")), (200, EUROPE), "{}", tei.body);
    assert_eq!(order(&tei.body), ranks, "the ranking does not depend on the API");

    let tei = fleet.post_to("/deployments/minilm/embed", r#"{"inputs": ["near", "far"]}"#, &[ASHBURN]).await;
    assert_eq!((tei.status, tei.header("x-meridian-region")), (200, AMERICA), "{}", tei.body);
    let openai = fleet.embed("minilm", "near", &[]).await.vectors();
    let row: Vec<f32> = serde_json::from_value(tei.body[0].clone()).unwrap();
    assert!(cosine(&row, &openai[0]) > 0.999_999, "one model, one vector");

    let info = fleet.get("/deployments/minilm-eu/info").await;
    assert_eq!((info.status, info.header("x-meridian-region")), (200, EUROPE), "{}", info.body);
    let wrong = fleet.post_to("/deployments/minilm/predict", r#"{"inputs": "x"}"#, &[]).await;
    assert_eq!((wrong.status, wrong.header("x-meridian-error")), (424, "wrong_task"), "{}", wrong.body);
    assert_eq!(wrong.body["error_type"], "Backend");
}

#[tokio::test]
async fn bad_input_is_a_4xx_that_names_the_field_the_limit_and_the_fix() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let check =
        async |body: &str, headers: &[(&str, &str)], status: u16, code: &str, param: Value, word: &str| {
            let response = fleet.post(body.to_owned(), headers).await;
            let shown: String = body.chars().take(80).collect();
            assert_eq!((response.status, response.code()), (status, code), "{shown}: {}", response.body);
            assert_eq!(response.body["error"]["param"], param, "{shown}: {}", response.body);
            assert_eq!(response.header("x-meridian-error"), code);
            assert!(!response.header("x-request-id").is_empty());
            let message = response.body["error"]["message"].as_str().unwrap();
            assert!(message.contains(word), "'{word}' in '{message}'");
        };
    let none = Value::Null;
    check(r#"{"model":"nope","input":"x"}"#, &[], 404, "model_not_found", json!("model"), "minilm-eu").await;
    check("hello", &[], 400, "invalid_json", none.clone(), "byte 0").await;
    check(r#"{"model":"minilm","input":"x""#, &[], 400, "invalid_json", none, "byte").await;
    check(r#"{"input":"x"}"#, &[], 400, "missing_field", json!("model"), "model").await;
    check(r#"{"model":"minilm"}"#, &[], 400, "missing_field", json!("input"), "input").await;
    check(r#"{"model":"minilm","input":""}"#, &[], 400, "empty_input", json!("input"), "empty").await;
    check(r#"{"model":"minilm","input":[]}"#, &[], 400, "empty_input", json!("input"), "input").await;
    check(r#"{"model":"minilm","input":["x",""]}"#, &[], 400, "empty_input", json!("input"), "1").await;
    check(r#"{"model":"minilm","input":{"a":1}}"#, &[], 400, "invalid_value", json!("input"), "input").await;
    let long = json!({"model": "minilm", "input": "word ".repeat(600)}).to_string();
    check(&long, &[], 400, "input_too_long", json!("input"), "256").await;
    let many = json!({"model": "minilm", "input": vec!["x"; 100_001]}).to_string();
    check(&many, &[], 400, "too_many_inputs", json!("input"), "100000").await;
    let large = format!(r#"{{"model":"minilm","input":"{}"}}"#, "x".repeat(33 << 20));
    check(&large, &[], 413, "body_too_large", Value::Null, "33554432").await;
    let body = r#"{"model":"minilm","input":"x"}"#;
    check(body, &[("authorization", "Bearer wrong")], 401, "invalid_api_key", json!("authorization"), "key")
        .await;
    check(body, &[("authorization", "wrong")], 401, "invalid_api_key", json!("authorization"), "Bearer")
        .await;
    let timeout = "x-meridian-timeout-ms";
    check(body, &[(timeout, "0")], 400, "invalid_header", json!(timeout), "600000").await;
    let residency = "x-meridian-residency";
    check(body, &[(residency, "atlantis")], 400, "invalid_header", json!(residency), "atlantis").await;
    let locked = r#"{"model":"minilm-eu","input":"x"}"#;
    check(locked, &[(residency, "us")], 403, "region_not_permitted", json!(residency), "us").await;
    assert_eq!(fleet.post(body, &[(residency, "us")]).await.status, 200, "a header within the policy");
    assert_eq!(fleet.get("/v1/nothing").await.status, 404);
    assert_eq!(fleet.get("/v1/embeddings").await.status, 405);
}

#[tokio::test]
async fn a_deployment_locked_to_the_eu_is_served_there_or_not_at_all() {
    let fleet = LocalFleet::start(&[]);
    let response = fleet.embed("minilm-eu", "stays in Europe", &[OSAKA]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, EUROPE), "{}", response.body);

    fleet.signal("-KILL", &["spoke", EUROPE]);
    fleet.signal("-KILL", &["replica", EUROPE]);
    for _ in 0..20 {
        let response = fleet.embed("minilm-eu", "stays in Europe", &[OSAKA]).await;
        assert_eq!(
            (response.status, response.code()),
            (503, "no_capacity_in_allowed_regions"),
            "{}",
            response.body
        );
        assert!(response.took < Duration::from_secs(1), "{:?}", response.took);
        assert!(!response.header("retry-after").is_empty());
        let message = response.body["error"]["message"].as_str().unwrap();
        assert!(message.contains(EUROPE) && message.contains("eu"), "{message}");
    }
    assert_eq!(fleet.requests_at(AMERICA).await, 0);
    assert_eq!(fleet.requests_at(JAPAN).await, 0);

    let anywhere = fleet.embed("minilm", "may go anywhere", &[FRANKFURT]).await;
    assert_eq!((anywhere.status, anywhere.header("x-meridian-region")), (200, AMERICA), "the next nearest");
}

/// Ten times the limit of a replica. Each row must be bit for bit the one that a replica computes for that input in a
/// separate request.
#[tokio::test]
async fn twenty_thousand_inputs_get_one_correct_response_although_a_region_is_killed_meanwhile() {
    let fleet = LocalFleet::start(&[]);
    for region in [AMERICA, EUROPE, JAPAN] {
        fleet.wait_for_health(region, "healthy").await;
    }
    let texts: Vec<String> = (0..20_000).map(|number| number.to_string()).collect();
    let body = |texts: &[String]| {
        json!({"model": "minilm", "input": texts, "encoding_format": "base64"}).to_string()
    };
    let rows = |response: &local_fleet::ClientResponse, first: usize| -> Vec<String> {
        assert_eq!(response.status, 200, "{}", response.body);
        let row = |(at, row): (usize, &Value)| {
            assert_eq!(row["index"], first + at);
            row["embedding"].as_str().unwrap().to_owned()
        };
        response.body["data"].as_array().unwrap().iter().enumerate().map(row).collect()
    };
    let (patient, only_us) = (("x-meridian-timeout-ms", "300000"), ("x-meridian-residency", "us"));
    let patiently = [patient];

    let killed = async {
        fleet.wait_until("Europe is at work", async || fleet.requests_at(EUROPE).await > 1).await;
        fleet.signal("-KILL", &["spoke", EUROPE]);
        fleet.signal("-KILL", &["replica", EUROPE]);
    };
    let (all, ()) = tokio::join!(fleet.post(body(&texts), &patiently), killed);
    let scattered = rows(&all, 0);
    assert_eq!(scattered.len(), texts.len());
    assert!(all.header("x-meridian-region").contains(JAPAN), "{}", all.header("x-meridian-region"));
    let attempts: usize = all.header("x-meridian-attempts").parse().unwrap();
    assert!(attempts > texts.len() / 512, "{attempts} attempts");

    let (mut tokens, mut took) = (0, Duration::ZERO);
    for (number, part) in texts.chunks(2_000).enumerate() {
        let one = fleet.post(body(part), &[patient, only_us]).await;
        assert_eq!((one.header("x-meridian-region"), one.header("x-meridian-attempts")), (AMERICA, "1"));
        assert!(rows(&one, 0) == scattered[number * 2_000..][..part.len()], "rows from {}", number * 2_000);
        tokens += one.body["usage"]["total_tokens"].as_u64().unwrap();
        took += one.took;
    }
    assert_eq!(all.body["usage"]["total_tokens"], tokens, "usage is that of all pieces");
    println!(
        "20,000 inputs, {tokens} tokens: {:?} scattered with one region killed, {took:?} at one replica",
        all.took
    );
}

/// Runs `meridian load` for `seconds` while `during` runs; returns its report.
async fn load<F: Future<Output = ()>>(fleet: &LocalFleet, seconds: u32, during: F) -> Value {
    load_in_stages(fleet, &[seconds], during).await
}

/// Like `load`, in stages with these durations, which the report separates.
async fn load_in_stages<F: Future<Output = ()>>(fleet: &LocalFleet, seconds: &[u32], during: F) -> Value {
    let load =
        tokio::process::Command::from(meridian_load(fleet, seconds)).stdout(Stdio::piped()).spawn().unwrap();
    let (output, ()) = tokio::join!(load.wait_with_output(), during);
    let output = output.unwrap();
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Requests per second, well below the capacity of three replicas on two shared cores: a higher rate would test an
/// overloaded fleet.
const RATE: u32 = 40;

fn meridian_load(fleet: &LocalFleet, seconds: &[u32]) -> Command {
    let mut command = meridian();
    let stages: Vec<_> = seconds.iter().map(|seconds| format!("{RATE} for {seconds}s")).collect();
    command.args(["load", "--json", "--url", &fleet.url, "--rate", &stages.join(", ")]);
    command
}

#[tokio::test]
async fn a_killed_region_and_a_cut_link_under_load_fail_no_request() {
    let fleet = LocalFleet::start(&[]);
    let report = load(&fleet, 12, async {
        fleet
            .wait_until("the nearest region is under load", async || fleet.requests_at(AMERICA).await > 80)
            .await;
        fleet.signal("-KILL", &["spoke", AMERICA]);
        fleet.signal("-KILL", &["replica", AMERICA]);
        fleet.wait_until("the next region took over", async || fleet.requests_at(EUROPE).await > 80).await;
        fleet.control_action(&format!("cut?region={EUROPE}")).await;
        fleet.wait_until("the last region took over", async || fleet.requests_at(JAPAN).await > 40).await;
    })
    .await;
    assert_eq!(report["total"]["failed"], 0, "{report:#}");
    for region in [AMERICA, EUROPE, JAPAN] {
        assert!(report["regions"][region]["ok"].as_u64().is_some_and(|ok| ok > 20), "{region}: {report:#}");
    }

    fleet.control_action(&format!("heal?region={EUROPE}")).await;
    fleet.wait_for_health(EUROPE, "healthy").await;
    assert_eq!(fleet.embed("minilm", "back", &[]).await.header("x-meridian-region"), EUROPE);
}

/// Returns the version and the commit that `meridian --version` prints.
fn printed_version() -> (String, String) {
    let output = meridian().arg("--version").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let words = text.strip_prefix("meridian ").and_then(|rest| rest.strip_suffix(")\n")?.split_once(" ("));
    let (version, commit) = words.unwrap_or_else(|| panic!("{text:?}"));
    (version.to_owned(), commit.to_owned())
}

#[test]
fn meridian_prints_its_version_and_its_commit() {
    let (version, commit) = printed_version();
    assert_eq!(version, env!("CARGO_PKG_VERSION"));
    // A build without optimisation, and one of sources without their repository, do not know it.
    let is_short_commit = commit.len() == 12 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(is_short_commit || commit == "unknown", "{commit}");
}

#[tokio::test]
async fn prometheus_finds_each_process_with_its_role_and_its_place() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let groups: Value = serde_json::from_slice(&std::fs::read(fleet.file("targets.json")).unwrap()).unwrap();
    let mut targets = Vec::new();
    for group in groups.as_array().unwrap() {
        let url = format!("http://{}/metrics", group["targets"][0].as_str().unwrap());
        let metrics = reqwest::get(url).await.unwrap().text().await.unwrap();
        let labels = &group["labels"];
        let role = labels["job"].as_str().unwrap().trim_start_matches("meridian-");
        let prefix = if role == "spoke" { "ingress" } else { role };
        assert!(metrics.contains(&format!("# TYPE meridian_{prefix}_")), "{role}: {metrics}");
        let build = metrics.lines().find(|line| line.starts_with("meridian_build_info{")).unwrap_or_default();
        let version = format!("meridian_build_info{{version=\"{}\",commit=\"", env!("CARGO_PKG_VERSION"));
        let commit = build.strip_prefix(&version).and_then(|rest| rest.split('"').next());
        let commit = commit.unwrap_or_else(|| panic!("{role}: {build:?}"));
        assert_eq!(commit.get(..12).unwrap_or(commit), printed_version().1, "{role}: {build}");
        assert!(build.ends_with("\"} 1") && build.contains(",rust=\""), "{role}: {build}");
        let (place, other) = if role == "gateway" { ("origin", "region") } else { ("region", "origin") };
        assert_eq!(labels[other], Value::Null, "{labels}");
        targets.push(format!("{role} {} {}", labels[place].as_str().unwrap(), labels["deployment"]));
    }
    targets.sort();
    let expected = [
        "gateway aws/us-east-1 null",
        "hub aws/us-east-1 null",
        "replica aws/us-east-1 \"minilm\"",
        "replica gcp/europe-west4 \"minilm\"",
        "spoke aws/us-east-1 null",
        "spoke gcp/europe-west4 null",
    ];
    assert_eq!(targets, expected);
}

#[tokio::test]
async fn requests_to_a_paused_region_fail_over() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let report = load(&fleet, 8, async {
        fleet
            .wait_until("the nearest region is under load", async || fleet.requests_at(AMERICA).await > 40)
            .await;
        fleet.signal("-STOP", &["spoke", AMERICA]);
        fleet.wait_until("the next region took over", async || fleet.requests_at(EUROPE).await > 40).await;
        fleet.signal("-CONT", &["spoke", AMERICA]);
    })
    .await;
    assert_eq!(report["total"]["failed"], 0, "{report:#}");
}

#[tokio::test]
async fn a_gateway_restarts_from_its_snapshot_and_serves_without_a_hub() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    fleet.signal("-KILL", &["hub"]);
    fleet
        .wait_until("up reports the end of the hub", async || {
            fleet.processes().await.contains(&("hub".to_owned(), None))
        })
        .await;
    fleet.control_action("kill?process=gateway").await;
    fleet.control_action("start?process=gateway").await;
    let response = fleet.embed("minilm", "still here", &[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, AMERICA), "{}", response.body);
    let response = fleet.embed("minilm-eu", "still allowed", &[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, EUROPE), "{}", response.body);
}

#[tokio::test]
async fn over_tls_and_http_2_lost_regions_and_a_lost_hub_fail_no_request() {
    let fleet = LocalFleet::start(&["--tls"]);
    let client = HttpsClient::connect(&fleet).await;
    let outcome = client
        .load(40, async {
            fleet
                .wait_until("the nearest region is under load", async || {
                    fleet.requests_at(AMERICA).await > 40
                })
                .await;
            fleet.signal("-KILL", &["hub"]);
            fleet.signal("-KILL", &["spoke", AMERICA]);
            fleet.signal("-KILL", &["replica", AMERICA]);
            fleet
                .wait_until("the next region took over", async || fleet.requests_at(EUROPE).await > 80)
                .await;
            fleet.control_action(&format!("cut?region={EUROPE}")).await;
            fleet.wait_until("the last region took over", async || fleet.requests_at(JAPAN).await > 40).await;
        })
        .await;
    assert_eq!(outcome.failed, [""; 0], "{:?}", outcome.served);
    for region in [AMERICA, EUROPE, JAPAN] {
        assert!(outcome.served.get(region).is_some_and(|served| *served > 20), "{:?}", outcome.served);
    }

    // Without hub and nearest region, a restarted gateway serves from its snapshot, with the same certificate.
    fleet.control_action(&format!("heal?region={EUROPE}")).await;
    fleet.control_action("kill?process=gateway").await;
    fleet.control_action("start?process=gateway").await;
    fleet.wait_for_health(EUROPE, "healthy").await;
    let client = HttpsClient::connect(&fleet).await;
    for model in ["minilm", "minilm-eu"] {
        let (status, headers, body) = client.embed(model).await.unwrap();
        assert_eq!(
            (status, headers["x-meridian-region"].to_str().unwrap()),
            (200, EUROPE),
            "{model}: {body}"
        );
    }
}

#[tokio::test]
async fn a_spoke_accepts_only_connections_with_a_gateways_certificate() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    assert_eq!(fleet.embed("minilm", "over TLS", &[]).await.status, 200);
    let request = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
    let response = fleet.send_to_spoke(AMERICA, "listen", request).await;
    assert_eq!(response, "", "no plaintext response");
    let metrics =
        fleet.send_to_spoke(AMERICA, "operations", b"GET /metrics HTTP/1.0\r\nhost: x\r\n\r\n").await;
    let counted = "meridian_ingress_connections_refused_total{cause=\"not_tls\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
}

#[tokio::test]
async fn no_process_survives_up_whether_it_is_interrupted_or_killed() {
    for signal in ["-INT", "-KILL"] {
        let mut fleet = LocalFleet::start(&["--regions", "2"]);
        let ids: Vec<u32> = fleet.processes().await.into_iter().filter_map(|(_, id)| id).collect();
        assert_eq!(ids.len(), 6, "hub, gateway, two spokes, two replicas");
        let id = fleet.process().id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        let status = fleet.process().wait().unwrap();
        assert_eq!(status.success(), signal == "-INT", "{signal}: {status}");
        fleet
            .wait_until("every process is gone", async || {
                let alive = command_lines();
                // A zombie has no arguments.
                !alive.iter().any(|(id, line)| {
                    ids.contains(id) && line.iter().any(|argument| argument.contains("--config"))
                })
            })
            .await;
    }
}

#[test]
fn invalid_options_of_up_are_reported_at_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let check = |arguments: &[&str], code: i32, words: &[&str]| {
        let output = meridian().arg("up").args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{words:?} in {stderr}");
    };
    check(&["--port", &port], 1, &[&port, "in use", "--port"]);
    check(&["--regions", "aws/us-east-1,aws/us-east-1,aws/us-esat-1"], 2, &["us-east-1", "us-esat-1"]);
    check(&["--deployments", "/nowhere.toml", "--regions", "99"], 2, &["/nowhere.toml", "99"]);
}
