//! Queue of jobs of a region: its API as gateways use it, its worker, and what survives a restart.

use gateway::ingress::{self, IngressConfig, IngressSignals, JobsConfig};
use regions::catalogue::Catalogue;
use scheduler_core::jobs::JobsSection;
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) const REGION: &str = "aws/us-east-1";
pub(crate) const EUROPE: &str = "aws/eu-central-1";

/// Tokens of each response of the replicas of these tests.
pub(crate) const TOKENS: u64 = 4;

/// Replica that returns the bodies of its requests, or a status.
#[derive(Default)]
pub(crate) struct Replica {
    /// Status of responses; 0 for a connection that is closed without one.
    pub(crate) status: AtomicU16,
    requests: AtomicU64,
    /// Requests without the bulk priority.
    interactive: AtomicU64,
}

impl Replica {
    pub(crate) async fn start() -> (Arc<Replica>, SocketAddr) {
        Replica::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    async fn start_at(address: SocketAddr) -> (Arc<Replica>, SocketAddr) {
        let socket = TcpListener::bind(address).await.unwrap();
        let address = socket.local_addr().unwrap();
        let replica = Arc::new(Replica { status: AtomicU16::new(200), ..Replica::default() });
        let shared = replica.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let replica = shared.clone();
                tokio::spawn(async move { replica.serve(BufReader::new(stream)).await });
            }
        });
        (replica, address)
    }

    async fn serve(&self, mut stream: BufReader<TcpStream>) -> Option<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.ok()?);
            }
            let head = String::from_utf8(head).ok()?.to_lowercase();
            let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
            let mut body = vec![0; length.and_then(|length| length.parse().ok()).unwrap_or(0)];
            stream.read_exact(&mut body).await.ok()?;
            let (status, body) = if head.starts_with("get /status") {
                let status = json!({"version": 1, "names": ["m", "m-eu"], "model": "m", "state": "ready", "pending_tokens": 0,
                       "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 1000.0});
                (200, status.to_string())
            } else {
                self.requests.fetch_add(1, Ordering::SeqCst);
                self.interactive
                    .fetch_add(u64::from(!head.contains("x-meridian-priority: bulk")), Ordering::SeqCst);
                (self.status.load(Ordering::SeqCst), String::from_utf8(body).ok()?)
            };
            if status == 0 {
                return None;
            }
            let answer = format!(
                "HTTP/1.1 {status} S\r\nx-meridian-tokens: {TOKENS}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).await.ok()?;
        }
    }
}

/// Region with a queue in a folder.
pub(crate) struct Region {
    pub(crate) url: String,
    client: reqwest::Client,
    pub(crate) spoke: Arc<Mutex<Spoke>>,
    stop: tokio::sync::oneshot::Sender<()>,
    served: JoinHandle<()>,
}

pub(crate) fn jobs_config(dir: &Path, more: &str) -> JobsConfig {
    let text = format!("dir = \"{}\"\n{more}", dir.display());
    let files = configuration::Files { base: dir, environment: None };
    let read = configuration::ConfigFile::read(&text, |document| {
        let section: JobsSection = document.section()?;
        JobsConfig::read(section, document, &files)
    });
    read.unwrap()
}

impl Region {
    pub(crate) async fn start(jobs: Option<JobsConfig>, replicas: Vec<SocketAddr>) -> Region {
        Region::start_in(REGION, jobs, replicas).await
    }

    pub(crate) async fn start_in(id: &str, jobs: Option<JobsConfig>, replicas: Vec<SocketAddr>) -> Region {
        Region::start_with(id, jobs, replicas, &resolver::DnsSection::default()).await
    }

    pub(crate) async fn start_with(
        id: &str,
        jobs: Option<JobsConfig>,
        replicas: Vec<SocketAddr>,
        dns: &resolver::DnsSection,
    ) -> Region {
        let addresses = replicas.into_iter().map(Into::into).collect();
        let spoke = Spoke::new(id.parse().unwrap(), 1, addresses).with_instance("a".parse().unwrap());
        let spoke = Arc::new(Mutex::new(spoke));
        let config = IngressConfig {
            tracing: None,
            metrics: None,
            jobs,
            proxy_protocol_from: Vec::new(),
            resolver: resolver::Resolver::new(dns),
            listen: "127.0.0.1:0".parse().unwrap(),
            region: id.parse().unwrap(),
            signals: IngressSignals::default(),
            catalogue: Arc::new(Catalogue::builtin()),
            receipts: None,
            transport: identity::Transport::Loopback,
            operations: None,
        };
        let shared = spoke.clone();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, address) = tokio::sync::oneshot::channel();
        let served = tokio::spawn(async move {
            let ready = |address| {
                ready.send(address).ok();
            };
            ingress::run(config, spoke, async { drop(stopped.await) }, ready).await.unwrap();
        });
        let url = format!("http://{}", address.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Region { url, client, spoke: shared, stop, served }
    }

    pub(crate) async fn stop(self) {
        drop(self.stop);
        self.served.await.unwrap();
    }

    /// Stops the region, and starts it again with the same queue and these replicas.
    pub(crate) async fn restart(self, jobs: &JobsConfig, replicas: Vec<SocketAddr>) -> Region {
        self.stop().await;
        let begun = Instant::now();
        // The file of the queue is free soon after the last handle is dropped.
        loop {
            match tokio::spawn(Region::start(Some(jobs.clone()), replicas.clone())).await {
                Ok(region) => return region,
                Err(_) => {
                    assert!(begun.elapsed() < Duration::from_secs(60), "the queue cannot be opened again")
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (u16, Value) {
        let url = format!("{}{path}", self.url);
        let mut request = self.client.request(method.parse().unwrap(), url).body(body.to_owned());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Returns what the region reports to a gateway about a queue.
    async fn reports_a_queue(&self) -> Value {
        let question = json!({"version": 1, "gateway": "test", "sequence": 1}).to_string();
        let (_, report) = self.send("POST", scheduler_api::paths::EXCHANGE, &[], &question).await;
        report["jobs"].clone()
    }

    pub(crate) async fn submit(&self, tenant: &str, body: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let own = [("x-meridian-tenant", tenant), ("x-meridian-deployment", "m")];
        self.send("POST", "/v1/async/embeddings", &[&own, headers].concat(), body).await
    }

    pub(crate) async fn job(&self, tenant: &str, id: &Value) -> (u16, Value) {
        let path = format!("/v1/async/{}", id.as_str().unwrap());
        self.send("GET", &path, &[("x-meridian-tenant", tenant)], "").await
    }

    /// Waits until a job is finished.
    pub(crate) async fn finished(&self, tenant: &str, id: &Value) -> Value {
        let begun = Instant::now();
        loop {
            let (status, job) = self.job(tenant, id).await;
            assert_eq!(status, 200, "{job}");
            if !["queued", "running"].contains(&job["status"].as_str().unwrap()) {
                return job;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the job does not end: {job}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Starts a hub that publishes these regions, and a gateway with the tenants `everywhere` and `european`.
pub(crate) async fn gateway(dir: &Path, regions: &[(&str, &Region)], stop: &watch::Sender<()>) -> String {
    gateway_in(REGION, "", dir, regions, stop).await
}

/// The same for a gateway in a region, with more configuration.
pub(crate) async fn gateway_in(
    region: &str,
    more: &str,
    dir: &Path,
    regions: &[(&str, &Region)],
    stop: &watch::Sender<()>,
) -> String {
    gateway_task(region, more, dir, regions, stop).await.0
}

/// The same, with the task, whose abort is the sudden end of the gateway.
pub(crate) async fn gateway_task(
    region: &str,
    more: &str,
    dir: &Path,
    regions: &[(&str, &Region)],
    stop: &watch::Sender<()>,
) -> (String, JoinHandle<()>) {
    let regions: Vec<_> =
        regions.iter().map(|(id, region)| (*id, region.url.trim_start_matches("http://"))).collect();
    gateway_at(region, more, dir, &regions, stop).await
}

/// The same, with the addresses of the regions.
pub(crate) async fn gateway_at(
    region: &str,
    more: &str,
    dir: &Path,
    regions: &[(&str, &str)],
    stop: &watch::Sender<()>,
) -> (String, JoinHandle<()>) {
    let regions = regions.iter().map(|(id, endpoint)| {
        json!({"id": id, "instances": [{"name": "a", "endpoint": endpoint}], "deployments": ["m", "m-eu"]})
    });
    let deployment = |name: &str, residency: Value| {
        json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
               "residency": residency, "regions": []})
    };
    let table = json!({"version": 1, "epoch": 1, "generation": 1, "regions": regions.collect::<Vec<_>>(),
        "deployments": [deployment("m", Value::Null), deployment("m-eu", json!("eu"))]});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    let router = axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes));
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let hub = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    let tenants = "[[tenant]]\nname = 'everywhere'\nkey_env = 'KEY'\n\
                   [[tenant]]\nname = 'european'\nkey_env = 'EUROPEAN'\nresidency = { allow = ['eu'] }\n";
    std::fs::write(dir.join("tenants.toml"), tenants).unwrap();
    let text = format!(
        "listen = '127.0.0.1:0'\noperations = '{}'\nregion = '{region}'\nhub = 'http://{hub}'\n\
         snapshot = 'routes'\ntenants = 'tenants.toml'\n{more}",
        crate::address::free_address()
    );
    let environment = ["KEY", "EUROPEAN"].map(|key| (key.to_owned(), key.to_owned())).into();
    let config = gateway::config::EdgeConfig::parse(&text, dir, &environment).unwrap();
    let (ready, bound) = tokio::sync::oneshot::channel();
    let mut stop = stop.subscribe();
    let stopped = async move { while stop.changed().await.is_ok() {} };
    let task = tokio::spawn(async move {
        gateway::edge::run(config, stopped, |address| ready.send(address).unwrap()).await.unwrap();
    });
    (format!("http://{}", bound.await.unwrap()), task)
}

pub(crate) fn text(number: usize) -> String {
    json!({"model": "m", "input": format!("text {number}")}).to_string()
}

#[tokio::test]
async fn jobs_are_computed_as_bulk_requests_and_their_results_can_be_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, at) = Replica::start().await;
    let region = Region::start(Some(jobs_config(dir.path(), "")), vec![at]).await;
    let mut ids = Vec::new();
    for number in 0..50 {
        let (status, job) = region.submit("a", &text(number), &[]).await;
        assert_eq!(status, 202, "{job}");
        assert_eq!(
            (&job["object"], &job["operation"], &job["model"]),
            (&json!("job"), &json!("embeddings"), &json!("m"))
        );
        ids.push(job["id"].clone());
    }
    for (number, id) in ids.iter().enumerate() {
        let job = region.finished("a", id).await;
        assert_eq!(job["status"], "succeeded", "{job}");
        assert_eq!(
            job["result"].to_string(),
            text(number),
            "the result of a job is the response of the replica"
        );
    }
    assert_eq!(replica.requests.load(Ordering::SeqCst), 50);
    assert_eq!(replica.interactive.load(Ordering::SeqCst), 0, "jobs are bulk requests");
    let (status, problem) = region.job("b", &ids[0]).await;
    assert_eq!(
        (status, &problem["error"]["code"]),
        (404, &json!("job_not_found")),
        "the job of another tenant"
    );
    let (_, list) =
        region.send("GET", "/v1/async?limit=20&status=succeeded", &[("x-meridian-tenant", "a")], "").await;
    assert_eq!((list["data"].as_array().unwrap().len(), &list["has_more"]), (20, &json!(true)));
    assert_eq!(list["data"][0]["id"], ids[49], "the newest first");
    let after = format!("/v1/async?limit=100&after={}", list["data"][19]["id"].as_str().unwrap());
    let (_, rest) = region.send("GET", &after, &[("x-meridian-tenant", "a")], "").await;
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (30, &json!(false)));
    let (_, none) = region.send("GET", "/v1/async", &[("x-meridian-tenant", "b")], "").await;
    assert_eq!(none["data"], json!([]));
    let cancel = format!("/v1/async/{}", ids[0].as_str().unwrap());
    let (status, problem) = region.send("DELETE", &cancel, &[("x-meridian-tenant", "a")], "").await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("job_finished")));
    let (_, page) = region.send("GET", "/metrics", &[], "").await;
    let page = page.as_str().unwrap();
    for line in [
        "meridian_jobs_accepted_total 50",
        "meridian_jobs_finished 50",
        "meridian_jobs_attempts_total{outcome=\"succeeded\"} 50",
    ] {
        assert!(page.contains(line), "{line} in {page}");
    }
    region.stop().await;
}

#[tokio::test]
async fn jobs_survive_a_restart_and_repeated_submissions_are_one_job() {
    let dir = tempfile::tempdir().unwrap();
    let config = jobs_config(dir.path(), "");
    // Without a replica the jobs wait.
    let region = Region::start(Some(config.clone()), Vec::new()).await;
    let (_, first) = region.submit("a", &text(1), &[("idempotency-key", "k")]).await;
    let (status, again) = region.submit("a", &text(1), &[("idempotency-key", "k")]).await;
    assert_eq!((status, &again["id"]), (202, &first["id"]));
    let (status, problem) = region.submit("a", &text(2), &[("idempotency-key", "k")]).await;
    assert_eq!((status, &problem["error"]["code"]), (422, &json!("idempotency_conflict")), "{problem}");
    let stricter = [("idempotency-key", "k"), ("x-meridian-residency", "us")];
    let (status, problem) = region.submit("a", &text(1), &stricter).await;
    assert_eq!((status, &problem["error"]["code"]), (422, &json!("idempotency_conflict")), "{problem}");
    let (_, second) = region.submit("a", &text(2), &[]).await;
    let path = format!("/v1/async/{}", second["id"].as_str().unwrap());
    let (status, cancelled) = region.send("DELETE", &path, &[("x-meridian-tenant", "a")], "").await;
    assert_eq!((status, &cancelled["status"]), (200, &json!("cancelled")), "{cancelled}");
    let (_, at) = Replica::start().await;
    let region = region.restart(&config, vec![at]).await;
    let job = region.finished("a", &first["id"]).await;
    assert_eq!((&job["status"], job["result"].to_string()), (&json!("succeeded"), text(1)));
    let (_, cancelled) = region.job("a", &second["id"]).await;
    assert_eq!(cancelled["status"], "cancelled");
    assert_eq!(cancelled.get("result"), None);
    region.stop().await;
}

#[tokio::test]
async fn an_invalid_job_is_rejected_when_it_is_submitted() {
    let dir = tempfile::tempdir().unwrap();
    let region = Region::start(Some(jobs_config(dir.path(), "jobs_per_tenant = 1")), Vec::new()).await;
    for (body, headers, status, code) in [
        ("{", &[][..], 400, "invalid_json"),
        (r#"{"model": "m"}"#, &[], 400, "missing_field"),
        (r#"{"model": "m", "input": ""}"#, &[], 400, "empty_input"),
        (&text(1), &[("x-meridian-deadline-ms", "soon")], 400, "invalid_header"),
        (&text(1), &[("x-meridian-deadline-ms", "0")], 400, "invalid_header"),
        (&text(1), &[("x-meridian-deadline-ms", "99999999999")], 400, "invalid_header"),
        (&text(1), &[("x-meridian-max-time-in-queue-ms", "99999999999")], 400, "invalid_header"),
        (&text(1), &[("x-meridian-residency", "eu")], 403, "not_resident_here"),
        (&text(1), &[("idempotency-key", "é")], 400, "invalid_header"),
    ] {
        let (found, problem) = region.submit("a", body, headers).await;
        assert_eq!(
            (found, &problem["error"]["code"]),
            (status, &json!(code)),
            "{body} {headers:?}: {problem}"
        );
    }
    assert_eq!(region.submit("", &text(1), &[]).await.0, 400, "a job without a tenant");
    assert_eq!(region.submit("a", &text(1), &[]).await.0, 202);
    let (status, problem) = region.submit("a", &text(2), &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (429, &json!("too_many_jobs")), "{problem}");
    assert_eq!(region.submit("b", &text(2), &[]).await.0, 202, "the limit is that of a tenant");
    for query in ["status=done", "limit=0", "limit=101", "created_after=x", "after=job_1", "page=1"] {
        let path = format!("/v1/async?{query}");
        let (status, problem) = region.send("GET", &path, &[("x-meridian-tenant", "a")], "").await;
        assert_eq!((status, &problem["error"]["code"]), (400, &json!("invalid_value")), "{query}: {problem}");
    }
    assert_eq!(region.reports_a_queue().await, json!(true));
    region.stop().await;
    let region = Region::start(None, Vec::new()).await;
    assert_eq!(region.reports_a_queue().await, Value::Null);
    let (status, problem) = region.submit("a", &text(1), &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (503, &json!("no_job_queue")), "{problem}");
    region.stop().await;
}

#[tokio::test]
async fn a_job_that_no_replica_can_compute_fails_after_its_attempts() {
    let dir = tempfile::tempdir().unwrap();
    let (replica, at) = Replica::start().await;
    let region = Region::start(Some(jobs_config(dir.path(), "attempts = 2")), vec![at]).await;
    replica.status.store(400, Ordering::SeqCst);
    let (_, job) = region.submit("a", &text(1), &[]).await;
    let job = region.finished("a", &job["id"]).await;
    assert_eq!(
        (&job["status"], &job["attempts"]),
        (&json!("failed"), &json!(1)),
        "a rejection is final: {job}"
    );
    replica.status.store(500, Ordering::SeqCst);
    let (_, job) = region.submit("a", &text(1), &[]).await;
    let job = region.finished("a", &job["id"]).await;
    assert_eq!((&job["status"], &job["attempts"]), (&json!("failed"), &json!(2)), "{job}");
    assert!(job["error"]["message"].as_str().unwrap().starts_with("all 2 attempts failed"), "{job}");
    region.stop().await;
}

#[tokio::test]
async fn a_job_expires_at_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let region = Region::start(Some(jobs_config(dir.path(), "")), Vec::new()).await;
    for header in ["x-meridian-deadline-ms", "x-meridian-max-time-in-queue-ms"] {
        let (_, job) = region.submit("a", &text(1), &[(header, "100")]).await;
        assert_eq!(region.finished("a", &job["id"]).await["status"], "expired", "{header}");
    }
    region.stop().await;
}

#[tokio::test]
async fn a_queue_that_another_process_uses_is_an_error_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = jobs_config(dir.path(), "");
    let region = Region::start(Some(config.clone()), Vec::new()).await;
    let other = tokio::spawn(Region::start(Some(config), Vec::new()));
    assert!(other.await.is_err(), "the second process does not become ready");
    region.stop().await;
}

#[tokio::test]
async fn a_job_is_accepted_without_a_ready_replica_and_computed_when_there_is_one() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let replica = crate::address::free_address();
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![replica]).await;
    let stop = watch::Sender::new(());
    let url = gateway(dirs[1].path(), &[(REGION, &region)], &stop).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = async |path: &str, prefer: &str| {
        let request = client.post(format!("{url}{path}")).bearer_auth("KEY").header("prefer", prefer);
        let response = request.body(text(1)).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let begun = Instant::now();
    let job = loop {
        match send("/v1/async/embeddings", "").await {
            (202, job) => break job,
            // The gateway has no route table yet, or the region has not reported.
            (503, problem) => {
                let is_starting = problem["error"]["code"] == "jobs_unavailable"
                    || problem.to_string().contains("no route table yet");
                assert!(is_starting, "{problem}");
            }
            other => panic!("{other:?}"),
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the region does not report its queue");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let (status, preferred) = send("/v1/embeddings", "respond-async").await;
    assert_eq!(status, 202, "{preferred}");
    let (status, problem) = send("/v1/embeddings", "").await;
    assert_eq!(status, 503, "an ordinary request needs a replica: {problem}");
    // For a moment an attempt may be under way, which finds no replica.
    while region.job("everywhere", &job["id"]).await.1["status"] != "queued" {
        assert!(begun.elapsed() < Duration::from_secs(60), "the job does not wait for a replica");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _replica = Replica::start_at(replica).await;
    for job in [job, preferred] {
        let job = region.finished("everywhere", &job["id"]).await;
        assert_eq!(job["result"].to_string(), text(1), "{job}");
    }
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_gateway_sends_jobs_to_an_allowed_region_with_a_queue_and_finds_them_again() {
    let dirs = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = Replica::start().await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let (_, at) = Replica::start().await;
    let europe = Region::start_in(EUROPE, Some(jobs_config(dirs[1].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let url = gateway(dirs[2].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await;
    let european = gateway_in(EUROPE, "", dirs[3].path(), &[(EUROPE, &europe)], &stop).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let ask = async |method: &str, path: &str, key: &str, headers: &[(&str, &str)], body: String| {
        let mut request =
            client.request(method.parse().unwrap(), format!("{url}{path}")).bearer_auth(key).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let header =
            move |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        let text = response.text().await.unwrap();
        (status, serde_json::from_str::<Value>(&text).unwrap_or(Value::String(text)), header)
    };
    let get = async |path: String, key: &str| ask("GET", &path, key, &[], String::new()).await;
    let body = |model: &str, text: &str| json!({"model": model, "input": text}).to_string();
    let path = "/v1/async/embeddings";
    let begun = Instant::now();
    // Until both regions have reported.
    for model in ["m-eu", "m"] {
        while ask("POST", path, "KEY", &[], body(model, "first")).await.0 != 202 {
            assert!(begun.elapsed() < Duration::from_secs(60), "no region has a queue");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let (status, job, header) = ask("POST", path, "KEY", &[("idempotency-key", "k")], body("m", "a")).await;
    assert_eq!((status, header("x-meridian-region")), (202, REGION.to_owned()), "{job}");
    let id = job["id"].as_str().unwrap().to_owned();
    assert!(id.ends_with(".aws.us-east-1"), "{id}");
    assert_eq!(header("location"), format!("/v1/async/{id}"));
    let (_, again, _) = ask("POST", path, "KEY", &[("idempotency-key", "k")], body("m", "a")).await;
    assert_eq!(again["id"], job["id"]);
    let finished = async |id: &str| loop {
        let (status, job, _) = get(format!("/v1/async/{id}"), "KEY").await;
        assert_eq!(status, 200, "{job}");
        if job["status"] == "succeeded" {
            return job;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(finished(&id).await["result"].to_string(), body("m", "a"));

    // Of a locked deployment, and as a preference.
    let (status, job, header) = ask("POST", path, "KEY", &[], body("m-eu", "b")).await;
    assert_eq!((status, header("x-meridian-region")), (202, EUROPE.to_owned()), "{job}");
    let locked = job["id"].as_str().unwrap().to_owned();
    // Its result is returned only through a gateway in its region.
    loop {
        let sent =
            client.get(format!("{european}/v1/async/{locked}")).bearer_auth("KEY").send().await.unwrap();
        let job: Value = sent.json().await.unwrap();
        if job["status"] == "succeeded" {
            assert_eq!(job["result"].to_string(), body("m-eu", "b"));
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let prefer = ("prefer", "wait=5, respond-async");
    let (status, job, header) = ask("POST", "/v1/embeddings", "EUROPEAN", &[prefer], body("m", "c")).await;
    assert_eq!((status, header("preference-applied")), (202, "respond-async".to_owned()), "{job}");
    assert_eq!(header("x-meridian-region"), EUROPE, "the residency policy of the tenant");
    let (status, job, _) = ask("POST", "/v1/embeddings", "KEY", &[], body("m", "d")).await;
    assert_eq!((status, job.to_string()), (200, body("m", "d")), "without the preference");

    // The list has the jobs of both regions; a tenant sees its own, and only in regions that its policy allows.
    let (_, list, _) = get("/v1/async?limit=2".to_owned(), "KEY").await;
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|job| job["id"].clone()).collect();
    assert_eq!((ids, &list["has_more"]), (vec![json!(locked), json!(id)], &json!(true)));
    let (_, list, _) = get(format!("/v1/async?after={locked}"), "KEY").await;
    assert_eq!(list["data"][0]["id"], json!(id));
    let (_, list, _) = get("/v1/async".to_owned(), "EUROPEAN").await;
    assert_eq!(list["data"].as_array().unwrap().len(), 1, "{list}");
    for (path, key, status, code) in [
        (format!("/v1/async/{id}"), "EUROPEAN", 403, "region_not_permitted"),
        (format!("/v1/async/{locked}"), "EUROPEAN", 404, "job_not_found"),
        ("/v1/async/job_1".to_owned(), "KEY", 404, "job_not_found"),
        ("/v1/async/job_1.aws.us-east-1".to_owned(), "KEY", 404, "job_not_found"),
        ("/v1/async/job_1.aws.eu-west-9".to_owned(), "KEY", 404, "job_not_found"),
        ("/v1/async?limit=0".to_owned(), "KEY", 400, "invalid_value"),
        ("/v1/async".to_owned(), "other", 401, "invalid_api_key"),
    ] {
        let (found, problem, _) = get(path.clone(), key).await;
        assert_eq!((found, &problem["error"]["code"]), (status, &json!(code)), "{path}: {problem}");
    }
    let narrowed = [("x-meridian-residency", "aws/us-west-2")];
    let (status, problem, _) = ask("POST", path, "KEY", &narrowed, body("m", "e")).await;
    assert_eq!((status, &problem["error"]["code"]), (503, &json!("no_job_queue")), "{problem}");
    let (status, problem, _) = ask("DELETE", &format!("/v1/async/{id}"), "KEY", &[], String::new()).await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("job_finished")), "{problem}");

    // While the region of a job is down, its result is unavailable and the other regions are listed.
    america.stop().await;
    let (status, problem, header) = get(format!("/v1/async/{id}"), "KEY").await;
    assert_eq!((status, &problem["error"]["code"]), (503, &json!("jobs_unavailable")), "{problem}");
    assert!(!header("retry-after").is_empty());
    let (_, list, _) = get("/v1/async".to_owned(), "KEY").await;
    assert_eq!(list["unavailable_regions"], json!([REGION]), "{list}");
    assert!(list["data"].as_array().unwrap().iter().any(|job| job["id"] == json!(locked)));
    drop(stop);
    europe.stop().await;
}

#[tokio::test]
async fn a_repeated_submission_goes_to_the_region_of_the_first_one_although_another_is_preferred_now() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    // Nothing listens at the address of the replica in America at first.
    let replica = crate::address::free_address();
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![replica]).await;
    let (_, at) = Replica::start().await;
    let europe = Region::start_in(EUROPE, Some(jobs_config(dirs[1].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let url = gateway(dirs[2].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let submit = async |key: Option<&str>| {
        let mut request = client.post(format!("{url}/v1/async/embeddings")).bearer_auth("KEY");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let sent = request.body(json!({"model": "m", "input": "a"}).to_string()).send().await.unwrap();
        let region =
            sent.headers().get("x-meridian-region").map(|region| region.to_str().unwrap().to_owned());
        let job: Value = sent.json().await.unwrap();
        (region, job["id"].clone())
    };
    let begun = Instant::now();
    let without_key_to = async |region: &str| {
        while submit(None).await.0.as_deref() != Some(region) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no job goes to {region}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Europe has the only ready replica.
    without_key_to(EUROPE).await;
    let (region, first) = submit(Some("k")).await;
    assert_eq!(region.as_deref(), Some(EUROPE));
    // America is nearer.
    let _replica = Replica::start_at(replica).await;
    without_key_to(REGION).await;
    let (region, again) = submit(Some("k")).await;
    assert_eq!((region.as_deref(), again), (Some(EUROPE), first));
    // A key is that of the jobs of all endpoints, so another request with it is found to be another one.
    let rerank = json!({"model": "m", "query": "a", "documents": ["b"]}).to_string();
    let request =
        client.post(format!("{url}/v1/async/rerank")).bearer_auth("KEY").header("idempotency-key", "k");
    let response = request.body(rerank).send().await.unwrap();
    let (status, problem) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
    assert_eq!((status, &problem["error"]["code"]), (422, &json!("idempotency_conflict")), "{problem}");
    assert_eq!(submit(Some("another")).await.0.as_deref(), Some(REGION));
    drop(stop);
    america.stop().await;
    europe.stop().await;
}
