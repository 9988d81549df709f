//! Durable jobs of a local fleet: the result is that of the ordinary request, and none is lost with a process.

use crate::local_fleet::{ClientResponse, LocalFleet, meridian};
use crate::{AMERICA, ASHBURN, EUROPE, FRANKFURT};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Timeout of all jobs of a test.
const TIMEOUT: Duration = Duration::from_secs(240);
const PATH: &str = "/v1/async/embeddings";

fn body(model: &str, text: &str) -> String {
    json!({"model": model, "input": [text], "encoding_format": "base64"}).to_string()
}

fn id(response: &ClientResponse) -> String {
    response.body["id"]
        .as_str()
        .unwrap_or_else(|| panic!("{}: {}", response.status, response.body))
        .to_owned()
}

/// Waits until a job is finished; errors of a region that is down are tried again.
async fn finished(fleet: &LocalFleet, id: &str) -> Value {
    let begun = Instant::now();
    loop {
        let job = fleet.get(&format!("/v1/async/{id}")).await;
        let waits =
            job.status == 503 || ["queued", "running"].contains(&job.body["status"].as_str().unwrap_or(""));
        if !waits {
            assert_eq!(job.status, 200, "{}", job.body);
            return job.body;
        }
        assert!(begun.elapsed() < TIMEOUT, "the job {id} does not end: {}", job.body);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_job_has_the_result_of_the_ordinary_request_and_is_computed_in_an_allowed_region() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    for region in [AMERICA, EUROPE] {
        fleet.wait_for_health(region, "healthy").await;
    }
    let now = fleet.post(body("minilm", "text"), &[FRANKFURT]).await;
    let submitted = fleet.post_to(PATH, body("minilm", "text"), &[FRANKFURT]).await;
    assert_eq!(
        (submitted.status, submitted.header("x-meridian-region")),
        (202, EUROPE),
        "{}",
        submitted.body
    );
    assert_eq!(submitted.header("location"), format!("/v1/async/{}", id(&submitted)));
    let job = finished(&fleet, &id(&submitted)).await;
    assert_eq!((&job["status"], &job["result"]), (&json!("succeeded"), &now.body));

    // A locked deployment.
    let locked = fleet.post_to(PATH, body("minilm-eu", "stays in Europe"), &[ASHBURN]).await;
    assert_eq!((locked.status, locked.header("x-meridian-region")), (202, EUROPE), "{}", locked.body);
    assert!(!locked.header("x-meridian-residency-receipt").is_empty(), "a receipt of the submission");
    // Its result is returned only through a gateway in Europe. This fleet has one gateway, whose certificate is of America.
    let begun = Instant::now();
    let withheld = loop {
        let job = fleet.get(&format!("/v1/async/{}", id(&locked))).await;
        if job.status == 403 {
            break job;
        }
        assert!(job.status == 200 && begun.elapsed() < TIMEOUT, "{}: {}", job.status, job.body);
        assert_eq!(job.body.get("result"), None, "{}", job.body);
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(withheld.code(), "region_not_permitted", "{}", withheld.body);

    let get = |arguments: &[&str]| {
        let mut command = meridian();
        command.args(["get", "jobs", "--gateway", &fleet.url, "--key", "local"]).args(arguments);
        let ran = command.output().expect("the binary starts");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (ran.status.code(), text(&ran.stdout), text(&ran.stderr))
    };
    let (code, output, error) = get(&["--deployment", "minilm-eu", "--status", "succeeded", "--since", "1h"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(output.contains(&id(&locked)) && !output.contains(&id(&submitted)), "{output}");
    let (code, output, _) = get(&[&id(&submitted), "--json"]);
    let shown: Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!((code, &shown["status"], &shown["model"]), (Some(0), &json!("succeeded"), &json!("minilm")));
    let (code, _, error) = get(&["job_1.aws.us-east-1"]);
    assert!(code == Some(1) && error.contains("there is no job"), "{error}");
    assert_eq!(get(&["--since", "yesterday"]).0, Some(2));

    // The preference of RFC 7240.
    let preferred = fleet.post(body("minilm", "text"), &[ASHBURN, ("prefer", "respond-async")]).await;
    assert_eq!(preferred.status, 202, "{}", preferred.body);
    assert_eq!(preferred.header("preference-applied"), "respond-async");
    assert_eq!(preferred.header("x-meridian-region"), AMERICA);
    assert_eq!(finished(&fleet, &id(&preferred)).await["result"], now.body);

    // Jobs of both regions, the newest first.
    let list = fleet.get("/v1/async").await;
    let ids: Vec<_> = list.body["data"].as_array().unwrap().iter().map(|job| job["id"].clone()).collect();
    assert_eq!(ids, [id(&preferred), id(&locked), id(&submitted)], "{}", list.body);
    let page = fleet.get(&format!("/v1/async?limit=1&after={}", id(&preferred))).await;
    assert_eq!((&page.body["data"][0]["id"], &page.body["has_more"]), (&json!(id(&locked)), &json!(true)));

    for (query, expected) in [
        ("model=minilm-eu", vec![id(&locked)]),
        ("model=minilm&status=succeeded", vec![id(&preferred), id(&submitted)]),
        ("created_before=1", vec![]),
        ("created_before=99999999999&model=minilm", vec![id(&preferred), id(&submitted)]),
    ] {
        let list = fleet.get(&format!("/v1/async?{query}")).await;
        let jobs = list.body["data"].as_array().unwrap_or_else(|| panic!("{query}: {}", list.body));
        let found: Vec<_> = jobs.iter().filter_map(|job| job["id"].as_str()).collect();
        assert_eq!(found, expected, "{query}");
    }

    let unknown = fleet.post_to(PATH, body("other", "text"), &[]).await;
    assert_eq!((unknown.status, unknown.code()), (404, "model_not_found"), "{}", unknown.body);
    let invalid = fleet.post_to(PATH, json!({"model": "minilm"}).to_string(), &[]).await;
    assert_eq!((invalid.status, invalid.code()), (400, "missing_field"), "{}", invalid.body);
    for path in ["/v1/async/job_1", "/v1/async/job_1.aws.us-east-1", "/v1/async/a%0d%0ab.aws.us-east-1"] {
        let none = fleet.get(path).await;
        assert_eq!((none.status, none.code()), (404, "job_not_found"), "{path}: {}", none.body);
    }
    let done = fleet.delete(&format!("/v1/async/{}", id(&submitted))).await;
    assert_eq!((done.status, done.code()), (409, "job_finished"), "{}", done.body);
    // Paging and filters are those of the region.
    let query = fleet.get("/v1/async?limit=0").await;
    assert_eq!((query.status, query.code()), (400, "invalid_value"), "{}", query.body);
}

#[tokio::test]
async fn no_job_is_lost_and_none_is_delivered_twice_although_spoke_and_replica_are_killed() {
    const JOBS: usize = 200;
    let fleet = LocalFleet::start(&["--regions", "1"]);
    fleet.wait_for_health(AMERICA, "healthy").await;
    let processes = fleet.processes().await;
    let named = |role: &str| {
        let found = processes.iter().find(|(name, _)| name.starts_with(role));
        found.expect("a process of each role").0.replace(' ', "%20")
    };
    let (spoke, replica) = (named("spoke"), named("replica"));
    let text = |number: usize| format!("text {number}");
    let mut ids = Vec::new();
    let (mut repeated, mut cancelled) = (0, Vec::new());
    for number in 0..JOBS {
        if number % 50 == 25 {
            let process = if number % 100 == 25 { &spoke } else { &replica };
            fleet.control_action(&format!("kill?process={process}")).await;
            fleet.control_action(&format!("start?process={process}")).await;
        }
        let key = format!("job-{number}");
        let begun = Instant::now();
        // A client that gets no confirmation repeats the request with the same key.
        let response = loop {
            let response =
                fleet.post_to(PATH, body("minilm", &text(number)), &[("idempotency-key", &key)]).await;
            if response.status == 202 {
                break response;
            }
            assert!(response.status >= 500, "{}: {}", response.status, response.body);
            assert!(begun.elapsed() < TIMEOUT, "no submission succeeds: {}", response.body);
            repeated += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let id = id(&response);
        if number % 20 == 7 {
            let response = fleet.delete(&format!("/v1/async/{id}")).await;
            if response.status == 200 {
                cancelled.push(id.clone());
            }
        }
        let again = fleet.post_to(PATH, body("minilm", &text(number)), &[("idempotency-key", &key)]).await;
        assert!(again.status >= 500 || again.body["id"] == id, "one job for a key: {}", again.body);
        ids.push(id);
    }
    let mut different = ids.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), JOBS);
    let mut succeeded = 0;
    for (number, id) in ids.iter().enumerate() {
        let job = finished(&fleet, id).await;
        if cancelled.contains(id) {
            assert_eq!(job["status"], "cancelled", "{job}");
            assert_eq!(job.get("result"), None);
            continue;
        }
        let now = fleet.post(body("minilm", &text(number)), &[]).await;
        assert_eq!((&job["status"], &job["result"]), (&json!("succeeded"), &now.body), "job {number}");
        succeeded += 1;
    }
    println!(
        "{JOBS} jobs: {succeeded} succeeded, {} cancelled, {repeated} submissions repeated",
        cancelled.len()
    );
    assert_eq!(succeeded + cancelled.len(), JOBS);
}
