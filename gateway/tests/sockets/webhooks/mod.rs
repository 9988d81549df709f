//! Webhooks of jobs through a gateway and a spoke: which are accepted, what a target receives, and when it is sent again.

mod target;

use crate::dns_server::{DnsServer, addresses};
use crate::jobs::{REGION, Region, Replica, gateway, jobs_config, text};
use jobs::webhook::signature::{WebhookSecret, sign};
use resolver::DnsSection;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use target::{Received, Reply, Target};
use tokio::sync::watch;

const ONE: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
/// Longest time of a test's retries: the first five pauses are 31 s together at most.
const TIMEOUT: Duration = Duration::from_secs(60);
const ANY_PORT: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
/// Variable of `.ci/run`: no test may be skipped.
const CI_VARIABLE: &str = "MERIDIAN_CI";

/// Writes the secrets of tenants, and returns the configuration of a queue that sends messages to loopback.
fn configuration(dir: &Path, secrets: &str) -> gateway::ingress::JobsConfig {
    let file = dir.join("secrets");
    std::fs::write(&file, secrets).unwrap();
    let more =
        format!("webhook_secrets_file = \"{}\"\nwebhook_private_targets = [\"127.0.0.1\"]\n", file.display());
    jobs_config(dir, &more)
}

fn with_webhook(number: usize, url: &str) -> String {
    json!({"model": "m", "input": format!("text {number}"), "webhook": {"url": url}}).to_string()
}

fn signature(secrets: &[&str], message: &Received) -> String {
    let secrets: Vec<WebhookSecret> = secrets.iter().map(|secret| secret.parse().unwrap()).collect();
    let time = message.headers["webhook-timestamp"].parse().unwrap();
    sign(&secrets, message.id(), time, message.body.as_bytes())
}

impl Region {
    /// Waits until the delivery of a job has a status, and returns the job.
    async fn delivery(&self, tenant: &str, id: &Value, status: &str) -> Value {
        let begun = Instant::now();
        loop {
            let (_, job) = self.job(tenant, id).await;
            if job["webhook"]["status"] == status {
                return job;
            }
            assert!(begun.elapsed() < TIMEOUT, "the delivery is not {status}: {job}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the secrets of a tenant are in use.
    async fn uses(&self, target: &Target, tenant: &str, secrets: &[&str]) {
        let begun = Instant::now();
        for number in 0.. {
            let path = format!("/uses/{number}");
            let (status, job) = self.submit(tenant, &with_webhook(number, &target.url(&path)), &[]).await;
            assert_eq!(status, 202, "{job}");
            let message = target.wait(&path, 1).await.remove(0);
            if message.signatures().join(" ") == signature(secrets, &message) {
                return;
            }
            assert!(begun.elapsed() < TIMEOUT, "the secrets are not in use");
        }
    }
}

/// Verifies messages with the reference verifier of Standard Webhooks. Without Python this is skipped, except in CI.
fn verify(messages: &[(Received, Vec<&str>)]) {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sockets/webhooks");
    let venv = scratch.join("standardwebhooks");
    let python = venv.join("bin/python");
    if !python.exists() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        if !made.is_ok_and(|status| status.success()) {
            let problem =
                "no python3 with venv on this machine: signatures are not verified with the reference";
            assert!(std::env::var_os(CI_VARIABLE).is_none(), "{problem}; install it, or unset {CI_VARIABLE}");
            println!("{problem}");
            return;
        }
    }
    let run = |arguments: &[&str]| {
        let ran = Command::new(&python).args(arguments).output().unwrap();
        let output = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{arguments:?}: {output}");
        output.into_owned()
    };
    let at = |file: &str| folder.join(file).to_string_lossy().into_owned();
    let installed = Command::new(&python).args(["-c", "import standardwebhooks"]).output().unwrap();
    if !installed.status.success() {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
        run(&[&pip[..], &[&at("requirements.txt")]].concat());
    }
    let recorded = messages.iter().map(
        |(message, secrets)| json!({"headers": message.headers, "body": message.body, "secrets": secrets}),
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), Value::Array(recorded.collect()).to_string()).unwrap();
    let output = run(&[&at("verify.py"), &file.path().to_string_lossy()]);
    assert_eq!(output.trim(), format!("{} messages are verified", messages.len()));
}

#[tokio::test]
async fn every_result_is_delivered_once_although_targets_fail_and_refuse_connections() {
    const JOBS: usize = 40;
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = Replica::start().await;
    let secrets = format!("everywhere {ONE} {OTHER}\neuropean {OTHER}\n");
    let region = Region::start(Some(configuration(dirs[0].path(), &secrets)), vec![at]).await;
    let stop = watch::Sender::new(());
    let url = gateway(dirs[1].path(), &[(REGION, &region)], &stop).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = async |path: &str, headers: &[(&str, &str)], body: String| {
        let mut request = client.post(format!("{url}{path}")).bearer_auth("KEY").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let path = "/v1/async/embeddings";
    let begun = Instant::now();
    // Until the region has reported.
    while post(path, &[], text(0)).await.0 != 202 {
        assert!(begun.elapsed() < TIMEOUT, "no region has a queue");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let target = Target::start(ANY_PORT.into()).await;
    let absent: SocketAddr = crate::address::free_address();
    let mut jobs = Vec::new();
    for number in 0..JOBS {
        let hook = format!("/hook/{number}?key=1");
        let failing = [Reply::Status(500), Reply::Closed, Reply::Status(302), Reply::Status(200)];
        let (url, replies) = match number % 4 {
            0 => (target.url(&hook), &failing[3..]),
            1 => (target.url(&hook), &failing[..]),
            2 => (target.url(&hook), &failing[1..]),
            _ => (format!("http://{absent}{hook}"), &[][..]),
        };
        target.replies(&hook, replies);
        // The header, the field, and both; also as a preference.
        let header = [("x-meridian-webhook-url", url.as_str()), ("prefer", "respond-async")];
        let (status, job) = match number % 3 {
            0 => post(path, &header[..1], text(number)).await,
            1 => post("/v1/embeddings", &header, text(number)).await,
            _ => post(path, &header[..1], with_webhook(number, &url)).await,
        };
        assert_eq!(status, 202, "{job}");
        assert_eq!(
            job["webhook"],
            json!({"url": url, "status": "pending", "attempts": 0, "last_error": null, "next_attempt_at": null})
        );
        jobs.push((hook, job["id"].clone()));
    }
    // The target that refused connections works again when others have had their messages.
    target.wait("/hook/0?key=1", 1).await;
    let refused = region.delivery("everywhere", &jobs[3].1, "pending").await;
    let late = Target::start(absent).await;
    let mut first_pauses = Vec::new();
    let mut recorded = Vec::new();
    for (number, (hook, id)) in jobs.iter().enumerate() {
        let job = region.delivery("everywhere", id, "delivered").await;
        let target = if number % 4 == 3 { &late } else { &target };
        let messages = target.at(hook);
        let expected = [1, 4, 3, 1][number % 4];
        assert_eq!(messages.len(), expected, "{hook}: {messages:?}");
        if number % 4 != 3 {
            assert_eq!(job["webhook"]["attempts"], expected, "{job}");
        }
        for message in &messages {
            assert_eq!(message.id(), id.as_str().unwrap(), "the identifier of the job, in every attempt");
            assert_eq!(message.headers["content-type"], "application/json");
            let event = message.event();
            let mut shown = job.clone();
            shown.as_object_mut().unwrap().remove("webhook");
            assert_eq!((&event["type"], &event["data"]), (&json!("job.succeeded"), &shown));
            assert!(event["timestamp"].as_str().unwrap().ends_with('Z'), "{event}");
            assert_eq!(message.signatures().len(), 2);
            recorded.push((message.clone(), vec![ONE, OTHER]));
        }
        if let [first, second, ..] = &messages[..] {
            assert_ne!(first.reply, Reply::Status(200), "nothing follows a success");
            first_pauses.push(second.at.duration_since(first.at).as_millis());
        }
        assert_eq!(job["result"]["input"], format!("text {number}"), "{job}");
    }
    println!("a refused connection: {}", refused["webhook"]);
    // Full jitter: the first pauses are spread over a second.
    let (least, most) = (first_pauses.iter().min().unwrap(), first_pauses.iter().max().unwrap());
    assert!(most - least > 200 && *most < 5000, "{first_pauses:?}");
    verify(&recorded);
    let (_, page) = region.send("GET", "/metrics", &[], "").await;
    let page = page.as_str().unwrap();
    for line in [
        format!("meridian_jobs_webhook_attempts_total{{outcome=\"delivered\"}} {JOBS}"),
        "meridian_jobs_undelivered 0".to_owned(),
        "meridian_jobs_oldest_undelivered_seconds 0".to_owned(),
    ] {
        assert!(page.contains(&line), "{line} in {page}");
    }

    // An ordinary request has no webhook, and header and body must agree.
    for (path, headers, body, code) in [
        ("/v1/embeddings", &[][..], with_webhook(1, "https://example.com"), "invalid_value"),
        ("/v1/embeddings", &[("x-meridian-webhook-url", "u")], text(1), "invalid_header"),
        ("/embed", &[], json!({"inputs": "a", "webhook": {}}).to_string(), "invalid_value"),
        (path, &[("x-meridian-webhook-url", "u")], with_webhook(1, "https://example.com"), "invalid_header"),
    ] {
        let (status, problem) = post(path, headers, body.clone()).await;
        let found = problem["error"]["code"].as_str().or(problem["error_type"].as_str());
        let expected = if path == "/embed" { "Tokenizer" } else { code };
        assert_eq!(found, Some(expected), "{path} {body}: {status} {problem}");
    }
    let null = json!({"model": "m", "input": "a", "webhook": null}).to_string();
    assert_eq!(post("/v1/embeddings", &[], null).await.0, 200, "null is an absent field");

    // Sent again on request, through the gateway, with the same identifier.
    let (hook, id) = &jobs[0];
    let again = format!("/v1/async/{}/webhook", id.as_str().unwrap());
    let (status, job) = post(&again, &[], "{}".to_owned()).await;
    assert_eq!((status, &job["id"]), (202, id), "{job}");
    assert_eq!(target.wait(hook, 2).await[1].id(), id.as_str().unwrap());
    region.delivery("everywhere", id, "delivered").await;
    let (status, problem) = post("/v1/async/job_1.aws.us-east-1/webhook", &[], String::new()).await;
    assert_eq!((status, &problem["error"]["code"]), (404, &json!("job_not_found")), "{problem}");
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_webhook_that_cannot_be_sent_is_rejected_when_it_is_submitted() {
    let dir = tempfile::tempdir().unwrap();
    let dns = DnsServer::start().await;
    dns.set("internal.test", addresses(&["10.0.0.1", "169.254.169.254"], 60));
    dns.set("loopback.test", addresses(&["127.0.0.2", "::1"], 60));
    let section = DnsSection { servers: vec![dns.address] };
    let config = configuration(dir.path(), &format!("a {ONE}\n"));
    let region = Region::start_with(REGION, Some(config), Vec::new(), &section).await;
    let long = format!("https://example.com/{}", "x".repeat(2048));
    for (url, status, code, reason) in [
        ("https://127.0.0.2/", 403, "webhook_not_permitted", "127.0.0.2, which is not public"),
        ("https://169.254.169.254/latest/meta-data", 403, "webhook_not_permitted", "is not public"),
        ("https://[::1]/", 403, "webhook_not_permitted", "is not public"),
        ("https://[::ffff:10.0.0.1]/", 403, "webhook_not_permitted", "is not public"),
        ("https://2130706434/", 403, "webhook_not_permitted", "127.0.0.2, which is not public"),
        ("https://0x7f000002/", 403, "webhook_not_permitted", "127.0.0.2, which is not public"),
        ("https://0177.0.0.2/", 403, "webhook_not_permitted", "127.0.0.2, which is not public"),
        ("https://internal.test/", 403, "webhook_not_permitted", "internal.test with the address"),
        ("https://loopback.test/", 403, "webhook_not_permitted", "loopback.test with the address"),
        ("http://8.8.8.8/", 403, "webhook_not_permitted", "the public address 8.8.8.8; write https"),
        ("ftp://example.com/", 400, "invalid_value", "the scheme `ftp`"),
        ("https://user:secret@example.com/", 400, "invalid_value", "a user or password"),
        ("https://example.com/#x", 400, "invalid_value", "a fragment"),
        ("example.com", 400, "invalid_value", "is not a URL"),
        ("", 400, "invalid_value", "is not a URL"),
        (&long, 400, "invalid_value", "the limit is 2048"),
    ] {
        let (found, problem) = region.submit("a", &with_webhook(1, url), &[]).await;
        assert_eq!((found, &problem["error"]["code"]), (status, &json!(code)), "{url}: {problem}");
        assert!(problem["error"]["message"].as_str().unwrap().contains(reason), "{url}: {problem}");
        assert_eq!(problem["error"]["param"], "webhook", "{url}");
    }
    let hook = "http://127.0.0.1:1/";
    let (status, problem) = region.submit("b", &with_webhook(1, hook), &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (403, &json!("no_webhook_secret")), "{problem}");
    assert!(problem["error"]["message"].as_str().unwrap().contains("'b' has no webhook secret"), "{problem}");
    let (status, job) = region.submit("a", &with_webhook(1, hook), &[("idempotency-key", "k")]).await;
    assert_eq!(status, 202, "{job}");
    let (status, again) = region.submit("a", &with_webhook(1, hook), &[("idempotency-key", "k")]).await;
    assert_eq!((status, &again["id"]), (202, &job["id"]));
    for other in [text(1), with_webhook(1, "http://127.0.0.1:2/")] {
        let (status, problem) = region.submit("a", &other, &[("idempotency-key", "k")]).await;
        assert_eq!((status, &problem["error"]["code"]), (422, &json!("idempotency_conflict")), "{problem}");
    }
    // Nothing to send: not finished, cancelled, without a webhook.
    let (_, plain) = region.submit("a", &text(1), &[]).await;
    let resend = async |job: &Value| {
        let path = format!("/v1/async/{}/webhook", job["id"].as_str().unwrap());
        let (status, problem) = region.send("POST", &path, &[("x-meridian-tenant", "a")], "").await;
        assert_eq!((status, &problem["error"]["code"]), (409, &json!("nothing_to_send")), "{problem}");
        problem["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(resend(&plain).await.contains("it has no webhook"));
    assert!(resend(&job).await.contains("it is not finished"));
    let path = format!("/v1/async/{}", job["id"].as_str().unwrap());
    let (status, cancelled) = region.send("DELETE", &path, &[("x-meridian-tenant", "a")], "").await;
    assert_eq!((status, &cancelled["webhook"]["status"]), (200, &json!("stopped")), "{cancelled}");
    assert!(resend(&job).await.contains("it was cancelled"));
    region.stop().await;

    // A region without secrets accepts none.
    let dir = tempfile::tempdir().unwrap();
    let region = Region::start(Some(jobs_config(dir.path(), "")), Vec::new()).await;
    let (status, problem) = region.submit("a", &with_webhook(1, "https://8.8.8.8/"), &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (403, &json!("no_webhook_secret")), "{problem}");
    assert!(problem["error"]["message"].as_str().unwrap().contains("webhook_secrets_file"), "{problem}");
    region.stop().await;
}

#[tokio::test]
async fn a_name_with_another_address_at_the_attempt_gets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dns = DnsServer::start().await;
    let section = DnsSection { servers: vec![dns.address] };
    let permitted = Target::start(ANY_PORT.into()).await;
    let port = permitted.address.port();
    let internal = Target::start(([127, 0, 0, 2], port).into()).await;
    dns.set("changing.test", addresses(&["127.0.0.1"], 1));
    let (_, at) = Replica::start().await;
    let config = configuration(dir.path(), &format!("a {ONE}\n"));
    let region = Region::start_with(REGION, Some(config), vec![at], &section).await;
    let url = format!("http://changing.test:{port}/hook");
    permitted.replies("/hook", &[Reply::Status(500); 50]);
    let (status, job) = region.submit("a", &with_webhook(1, &url), &[]).await;
    assert_eq!(status, 202, "{job}");
    permitted.wait("/hook", 1).await;
    dns.set("changing.test", addresses(&["127.0.0.2"], 1));
    let begun = Instant::now();
    loop {
        let (_, job) = region.job("a", &job["id"]).await;
        if job["webhook"]["last_error"] == "none of the addresses is permitted" {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{job}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(internal.received().is_empty());
    region.stop().await;
}

#[tokio::test]
async fn secrets_are_replaced_without_a_restart_and_an_invalid_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_, at) = Replica::start().await;
    let region = Region::start(Some(configuration(dir.path(), &format!("a {ONE}\n"))), vec![at]).await;
    let target = Target::start(ANY_PORT.into()).await;
    let write = |text: &str| std::fs::write(dir.path().join("secrets"), text).unwrap();
    region.uses(&target, "a", &[ONE]).await;
    write(&format!("a {OTHER} {ONE}\n"));
    region.uses(&target, "a", &[OTHER, ONE]).await;
    write("a secret\n");
    let begun = Instant::now();
    loop {
        let (_, page) = region.send("GET", "/metrics", &[], "").await;
        if page.as_str().unwrap().contains("meridian_jobs_webhook_secrets_rejected_total 1") {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{page}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    region.uses(&target, "a", &[OTHER, ONE]).await;
    write(&format!("a {OTHER}\n"));
    region.uses(&target, "a", &[OTHER]).await;
    region.stop().await;
}

#[tokio::test]
async fn a_target_can_delay_and_end_its_messages_and_gets_the_path_of_a_large_result() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, at) = Replica::start().await;
    let region = Region::start(Some(configuration(dir.path(), &format!("a {ONE}\n"))), vec![at]).await;
    let target = Target::start(ANY_PORT.into()).await;
    target.replies("/later", &[Reply::RetryAfter(4)]);
    target.replies("/gone", &[Reply::Status(410)]);
    let submit = async |path: &str, input: String| {
        let body = json!({"model": "m", "input": input, "webhook": {"url": target.url(path)}}).to_string();
        let (status, job) = region.submit("a", &body, &[]).await;
        assert_eq!(status, 202, "{job}");
        job["id"].clone()
    };
    let later = submit("/later", "a".to_owned()).await;
    let gone = submit("/gone", "b".to_owned()).await;
    let large = submit("/large", "x".repeat(1_000_000)).await;
    let job = region.delivery("a", &gone, "stopped").await;
    assert_eq!(job["webhook"]["last_error"], "the target responded 410 Gone");
    assert_eq!((&job["status"], job["result"].is_object()), (&json!("succeeded"), true), "{job}");

    let message = target.wait("/large", 1).await.remove(0);
    let data = &message.event()["data"];
    assert_eq!(data["result_url"], format!("/v1/async/{}", large.as_str().unwrap()));
    assert!(message.body.len() < 2000 && data.get("result").is_none(), "{data}");
    let (_, job) = region.job("a", &large).await;
    assert_eq!(data["result_bytes"], job["result"].to_string().len(), "{data}");

    region.delivery("a", &later, "delivered").await;
    let messages = target.at("/later");
    let pause = messages[1].at.duration_since(messages[0].at);
    assert!((Duration::from_millis(3900)..Duration::from_secs(15)).contains(&pause), "{pause:?}");
    assert_eq!(messages[0].body, messages[1].body);

    // A failed job has a message as well. One whose result is being sent cannot be cancelled; a waiting one can.
    replica.status.store(400, std::sync::atomic::Ordering::SeqCst);
    target.replies("/slow", &[Reply::None]);
    let slow = submit("/slow", "c".to_owned()).await;
    let message = target.wait("/slow", 1).await.remove(0);
    let event = message.event();
    assert_eq!((&event["type"], &event["data"]["status"]), (&json!("job.failed"), &json!("failed")));
    assert!(
        event["data"]["error"]["message"].is_string() && event["data"].get("result").is_none(),
        "{event}"
    );
    let cancel = async |id: &Value| {
        let path = format!("/v1/async/{}", id.as_str().unwrap());
        region.send("DELETE", &path, &[("x-meridian-tenant", "a")], "").await
    };
    let (status, problem) = cancel(&slow).await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("job_finished")), "{problem}");
    target.replies("/waits", &[Reply::RetryAfter(3)]);
    let waits = submit("/waits", "d".to_owned()).await;
    target.wait("/waits", 1).await;
    let begun = Instant::now();
    while cancel(&waits).await.0 != 200 {
        assert!(begun.elapsed() < Duration::from_secs(2), "the end of the attempt is not stored");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Past its next attempt.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(target.at("/waits").len(), 1, "a cancelled job is not delivered");
    region.stop().await;
}

#[tokio::test]
async fn a_message_is_repeated_with_its_identifier_if_the_spoke_ends_before_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path(), &format!("a {ONE}\n"));
    let (_, at) = Replica::start().await;
    let region = Region::start(Some(config.clone()), vec![at]).await;
    let target = Target::start(ANY_PORT.into()).await;
    // The target has the message, and the spoke ends before the response.
    target.replies("/hook", &[Reply::None]);
    let (_, job) = region.submit("a", &with_webhook(1, &target.url("/hook")), &[]).await;
    target.wait("/hook", 1).await;
    region.stop().await;
    let begun = Instant::now();
    let region = loop {
        match tokio::spawn(Region::start(Some(config.clone()), vec![at])).await {
            Ok(region) => break region,
            Err(_) => assert!(begun.elapsed() < Duration::from_secs(20), "the queue cannot be opened again"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let messages = target.wait("/hook", 2).await;
    let ids: BTreeMap<&str, usize> = messages.iter().map(|message| (message.id(), 1)).collect();
    assert_eq!(ids.into_keys().collect::<Vec<_>>(), [job["id"].as_str().unwrap()]);
    let job = region.delivery("a", &job["id"], "delivered").await;
    assert_eq!(job["webhook"]["attempts"], 2, "{job}");
    region.stop().await;
}

#[tokio::test]
async fn a_slow_target_of_one_tenant_does_not_delay_another_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let (_, at) = Replica::start().await;
    let config = configuration(dir.path(), &format!("hostile {ONE}\na {ONE}\n"));
    let region = Region::start(Some(config), vec![at]).await;
    let (slow, target) = (Target::start(ANY_PORT.into()).await, Target::start(ANY_PORT.into()).await);
    for number in 0..100 {
        let hook = format!("/slow/{number}");
        slow.replies(&hook, &[Reply::None; 3]);
        let (status, job) = region.submit("hostile", &with_webhook(number, &slow.url(&hook)), &[]).await;
        assert_eq!(status, 202, "{job}");
    }
    let begun = Instant::now();
    while slow.received().len() < 16 {
        assert!(begun.elapsed() < TIMEOUT, "{}", slow.received().len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let begun = Instant::now();
    for number in 0..20 {
        let hook = format!("/hook/{number}");
        let (_, job) = region.submit("a", &with_webhook(number, &target.url(&hook)), &[]).await;
        target.wait(&hook, 1).await;
        region.delivery("a", &job["id"], "delivered").await;
    }
    // One attempt at the slow target takes 15 s.
    assert!(begun.elapsed() < Duration::from_secs(12), "{:?}", begun.elapsed());
    assert!(slow.received().len() <= 32, "{}", slow.received().len());
    region.stop().await;
}

#[tokio::test]
async fn a_target_over_tls_needs_a_certificate_of_its_name_from_a_trusted_authority() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["hook.test".to_owned()]).unwrap();
    std::fs::write(dir.path().join("ca.pem"), made.cert.pem()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let server = server.unwrap().with_no_client_auth();
    let server = server.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(server));
    let target = Target::start_with(ANY_PORT.into(), Some(acceptor)).await;
    let dns = DnsServer::start().await;
    dns.set("hook.test", addresses(&["127.0.0.1"], 60));
    dns.set("other.test", addresses(&["127.0.0.1"], 60));
    let section = DnsSection { servers: vec![dns.address] };
    let (_, at) = Replica::start().await;
    std::fs::write(dir.path().join("secrets"), format!("a {ONE}\n")).unwrap();
    let more = "webhook_secrets_file = \"secrets\"\nwebhook_private_targets = [\"127.0.0.1\"]\nwebhook_ca = \"ca.pem\"\n";
    let config = jobs_config(dir.path(), more);
    let region = Region::start_with(REGION, Some(config), vec![at], &section).await;
    let submit = async |host: &str| {
        let url = format!("https://{host}:{}/hook", target.address.port());
        let (status, job) = region.submit("a", &with_webhook(1, &url), &[]).await;
        assert_eq!(status, 202, "{job}");
        job["id"].clone()
    };
    let id = submit("hook.test").await;
    region.delivery("a", &id, "delivered").await;
    assert_eq!(target.wait("/hook", 1).await[0].id(), id.as_str().unwrap());
    let other = submit("other.test").await;
    let begun = Instant::now();
    loop {
        let (_, job) = region.job("a", &other).await;
        if job["webhook"]["last_error"].as_str().is_some_and(|error| error.starts_with("TLS: ")) {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(target.received().len(), 1, "nothing is sent to a target without a valid certificate");
    region.stop().await;
}
