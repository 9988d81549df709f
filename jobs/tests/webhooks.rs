//! Delivery of results to webhooks: a target that fails for a time, and names with addresses that are not permitted.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../../resolver/tests/dns_server/mod.rs"]
#[expect(dead_code, reason = "the tests of the resolver use all of it")]
mod dns_server;
mod fixture;

use base64::Engine;
use bytes::Bytes;
use dns_server::{DnsServer, addresses};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use jobs::queue_host::{ComputationEnd, QueueError, QueueHost, TakenJob};
use jobs::webhook::sender::{WebhookHost, WebhookMessage, WebhookSender};
use jobs::webhook::signature::WebhookSecret;
use jobs_core::decide::{DeliveryEnd, JobWorker};
use jobs_core::job::{DurableJobId, JobDelivery, JobSpec, JobStatus};
use jobs_core::queue::Cancellation;
use jobs_core::record::DeliveryOutcome;
use jobs_core::webhook::{MESSAGE_RESULT_BYTES_MAX, WebhookPolicy};
use resolver::{DnsSection, Resolver};
use ring::hmac;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring as provider};

const SECRET: [u8; 32] = [7; 32];
/// Time of retries that no test exhausts.
const LONG: Duration = Duration::from_secs(3600);
const WORKER: JobWorker = JobWorker { number: 1, lease: Duration::from_secs(30) };

/// A message that the target has received, after its signature was verified.
#[derive(Clone)]
struct Message {
    id: String,
    body: serde_json::Value,
}

/// State of a target. The test selects its status; 0 closes the connection without a response.
#[derive(Default)]
struct TargetState {
    status: AtomicU16,
    /// Number of requests, whatever their responses.
    requests: AtomicU64,
    messages: Mutex<Vec<Message>>,
}

/// Target of webhooks.
struct Target {
    address: SocketAddr,
    state: Arc<TargetState>,
}

impl Target {
    async fn start(address: &str) -> Target {
        let listener = TcpListener::bind(address).await.unwrap();
        let (address, state) = (listener.local_addr().unwrap(), Arc::<TargetState>::default());
        let target = Target { address, state: state.clone() };
        target.respond_with(200);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = state.clone();
                let service = hyper::service::service_fn(move |request| respond(request, state.clone()));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        target
    }

    fn respond_with(&self, status: u16) {
        self.state.status.store(status, Ordering::SeqCst);
    }

    /// Waits until it has received this number of requests.
    async fn requested(&self, count: u64) {
        while self.requests() < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn requests(&self) -> u64 {
        self.state.requests.load(Ordering::SeqCst)
    }

    fn url(&self, host: &str) -> String {
        format!("http://{host}:{}/hook?a=b", self.address.port())
    }

    fn messages(&self) -> Vec<Message> {
        self.state.messages.lock().unwrap().clone()
    }
}

async fn respond(
    request: Request<Incoming>,
    state: Arc<TargetState>,
) -> Result<Response<Empty<Bytes>>, std::io::Error> {
    let header = |name: &str| request.headers()[name].to_str().unwrap().to_owned();
    let (id, timestamp, signature) =
        (header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"));
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let signed = [format!("{id}.{timestamp}.").as_bytes(), &body].concat();
    let given = signature.strip_prefix("v1,").unwrap();
    let given = base64::engine::general_purpose::STANDARD.decode(given).unwrap();
    hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &SECRET), &signed, &given).unwrap();
    state.requests.fetch_add(1, Ordering::SeqCst);
    match state.status.load(Ordering::SeqCst) {
        0 => Err(std::io::Error::other("closed")),
        status => {
            if status == 200 {
                let body = serde_json::from_slice(&body).unwrap();
                state.messages.lock().unwrap().push(Message { id, body });
            }
            let response = Response::builder().status(status).header("location", "http://127.0.0.1:1/");
            Ok(response.body(Empty::new()).unwrap())
        }
    }
}

fn spec(webhook: String) -> JobSpec {
    JobSpec { webhook: Some(webhook), ..fixture::spec("a") }
}

/// Process that sends results, with the secrets of its one tenant.
struct Host {
    secrets: Mutex<Vec<WebhookSecret>>,
}

impl WebhookHost for Host {
    fn message(&self, taken: &TakenJob) -> WebhookMessage {
        let id = taken.id.to_string();
        let result = String::from_utf8(taken.body.to_vec()).unwrap();
        let body =
            format!(r#"{{"id": "{id}", "result": {}}}"#, if result.is_empty() { "null" } else { &result });
        WebhookMessage { id, body: body.into() }
    }

    fn secrets(&self, _tenant: &str) -> Vec<WebhookSecret> {
        self.secrets.lock().unwrap().clone()
    }

    fn is_draining(&self) -> bool {
        false
    }

    fn ended(
        &self,
        _: &TakenJob,
        _: std::time::Instant,
        end: &DeliveryEnd,
        follows: &Result<DeliveryOutcome, QueueError>,
    ) {
        let is_delivered = *follows == Ok(DeliveryOutcome::Delivered);
        assert_eq!(*end == DeliveryEnd::Accepted, is_delivered, "{follows:?}");
    }
}

/// Queue whose results are sent, with `permitted` as the permitted networks.
async fn queue(
    folder: &std::path::Path,
    dns: &DnsServer,
    permitted: &str,
    retry_for: Duration,
) -> (QueueHost, Arc<Host>) {
    let mut config = fixture::config(1, Duration::from_millis(20));
    config.delivery.retry_for = retry_for;
    let queue = fixture::open(folder, config, &[]).await;
    let policy = WebhookPolicy { private_targets: vec![permitted.parse().unwrap()] };
    let tls = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()));
    let tls = tls.with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let resolver = Resolver::new(&DnsSection { servers: vec![dns.address] });
    let secret = base64::engine::general_purpose::STANDARD.encode(SECRET);
    let secret: WebhookSecret = format!("whsec_{secret}").parse().unwrap();
    let host = Arc::new(Host { secrets: Mutex::new(vec![secret]) });
    let sender = Arc::new(WebhookSender::new(policy, resolver, Arc::new(tls), host.clone()));
    tokio::spawn(sender.run(queue.clone(), 1));
    (queue, host)
}

/// Submits a job and computes it.
async fn computed(queue: &QueueHost, webhook: String) -> DurableJobId {
    computed_as(queue, webhook, Bytes::from(r#"{"data":[1]}"#)).await
}

async fn computed_as(queue: &QueueHost, webhook: String, result: Bytes) -> DurableJobId {
    let id = queue.submit(spec(webhook), Bytes::from("text")).await.unwrap();
    let taken = queue.take("minilm", 1, WORKER).await.unwrap();
    let ends = taken.iter().map(|job| (job.id, job.token, ComputationEnd::Computed(result.clone())));
    queue.end(ends.collect()).await.unwrap();
    id
}

async fn delivery(queue: &QueueHost, id: DurableJobId) -> JobDelivery {
    loop {
        match queue.job("a", id).unwrap().job.status.clone() {
            JobStatus::Finished {
                delivery: JobDelivery::Pending { .. } | JobDelivery::Sending { .. },
                ..
            } => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            JobStatus::Finished { delivery, .. } => return delivery,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn results_are_delivered_when_a_failing_target_works_again() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let target = Target::start("127.0.0.1:0").await;
    let (queue, _) = queue(dir.path(), &dns, "127.0.0.1", LONG).await;
    dns.set("hook.test", addresses(&["127.0.0.1"], 60));
    let mut ids = Vec::new();
    for (status, number) in [(500, 0..10), (0, 10..20), (302, 20..30), (200, 30..40)] {
        target.respond_with(status);
        let before = target.requests();
        for _ in number {
            ids.push(computed(&queue, target.url("hook.test")).await);
        }
        target.requested(before + 10).await;
    }
    for id in &ids {
        assert!(matches!(delivery(&queue, *id).await, JobDelivery::Delivered { .. }));
    }
    let messages = target.messages();
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for message in &messages {
        *count.entry(message.id.clone()).or_default() += 1;
        assert_eq!(message.body["id"], message.id);
        assert_eq!(message.body["result"], serde_json::json!({"data": [1]}));
    }
    assert!(ids.iter().all(|id| count.get(&id.to_string()) == Some(&1)), "{count:?}");
    assert_eq!(count.len(), ids.len());
}

#[tokio::test]
async fn a_target_that_is_gone_or_fails_too_long_gets_no_more_and_a_cancelled_job_is_not_sent() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let target = Target::start("127.0.0.1:0").await;
    let (queue, _) = queue(dir.path(), &dns, "127.0.0.1", Duration::from_millis(300)).await;
    target.respond_with(410);
    let gone = computed(&queue, target.url("127.0.0.1")).await;
    let reason = "the target responded 410 Gone".to_owned();
    assert_eq!(delivery(&queue, gone).await, JobDelivery::Stopped { reason, attempts: 1 });
    target.respond_with(307);
    let redirected = computed(&queue, target.url("127.0.0.1")).await;
    let JobDelivery::Abandoned { reason, attempts } = delivery(&queue, redirected).await else {
        panic!("it is abandoned")
    };
    let expected = format!(
        "all {attempts} attempts failed; the last one: the target responded 307; redirects are not followed"
    );
    assert!(reason == expected && attempts > 1, "{reason}");
    assert_eq!(queue.cancel("a", redirected).await, Ok(Cancellation::Confirmed));
    target.respond_with(200);
    // A later job is delivered: what was due before it would have been taken with it at the latest.
    let later = computed(&queue, target.url("127.0.0.1")).await;
    assert!(matches!(delivery(&queue, later).await, JobDelivery::Delivered { .. }));
    let received: Vec<_> = target.messages().into_iter().map(|message| message.id).collect();
    assert_eq!(received, [later.to_string()]);
}

#[tokio::test]
async fn names_with_other_addresses_are_rejected_also_when_they_change() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    // Both listen on the same port, so only the address decides.
    let permitted = Target::start("127.0.0.1:0").await;
    let internal = Target::start(&format!("127.0.0.2:{}", permitted.address.port())).await;
    let (queue, _) = queue(dir.path(), &dns, "127.0.0.1", Duration::from_millis(100)).await;
    let reason = async |url| match delivery(&queue, computed(&queue, url).await).await {
        JobDelivery::Abandoned { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    dns.set("internal.test", addresses(&["127.0.0.2", "169.254.169.254", "10.0.0.1"], 60));
    assert!(reason(internal.url("internal.test")).await.ends_with("none of the addresses is permitted"));
    assert!(reason(internal.url("127.0.0.2")).await.contains("127.0.0.2, which is not public"));

    // Of several addresses only the permitted one is used.
    dns.set("both.test", addresses(&["127.0.0.2", "127.0.0.1"], 60));
    let id = computed(&queue, permitted.url("both.test")).await;
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { .. }));

    // The second look-up returns another address (DNS rebinding).
    dns.set("changing.test", addresses(&["127.0.0.1"], 1));
    let id = computed(&queue, permitted.url("changing.test")).await;
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { .. }));
    dns.set("changing.test", addresses(&["127.0.0.2"], 1));
    // One query for each family of addresses.
    let queries = dns.queries();
    while dns.queries() < queries + 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(reason(permitted.url("changing.test")).await.ends_with("none of the addresses is permitted"));
    assert_eq!((permitted.messages().len(), internal.messages().len()), (2, 0));
}

#[tokio::test]
async fn a_result_is_sent_again_on_request_and_not_without_a_secret() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let target = Target::start("127.0.0.1:0").await;
    let (queue, host) = queue(dir.path(), &dns, "127.0.0.1", Duration::from_millis(100)).await;
    let id = computed(&queue, target.url("127.0.0.1")).await;
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { attempts: 1, .. }));
    assert_eq!(queue.redeliver("a", id).await, Ok(true));
    target.requested(2).await;
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { attempts: 1, .. }));
    let received: Vec<_> = target.messages().into_iter().map(|message| message.id).collect();
    assert_eq!(received, [id.to_string(), id.to_string()], "the same identifier");
    assert_eq!(queue.redeliver("b", id).await, Err(QueueError::Unknown), "the job of another tenant");

    let secrets = std::mem::take(&mut *host.secrets.lock().unwrap());
    assert_eq!(queue.redeliver("a", id).await, Ok(true));
    let JobDelivery::Abandoned { reason, .. } = delivery(&queue, id).await else { panic!("it is abandoned") };
    assert!(reason.ends_with("the tenant has no webhook secret; ask the operator to add one"), "{reason}");
    assert_eq!(target.requests(), 2, "no message without a signature");
    *host.secrets.lock().unwrap() = secrets;
    assert_eq!(queue.redeliver("a", id).await, Ok(true));
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { .. }));
}

#[tokio::test]
async fn a_result_that_is_too_large_for_a_message_is_not_read() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let target = Target::start("127.0.0.1:0").await;
    let (queue, _) = queue(dir.path(), &dns, "127.0.0.1", LONG).await;
    for (bytes, expected) in [(MESSAGE_RESULT_BYTES_MAX, true), (MESSAGE_RESULT_BYTES_MAX + 1, false)] {
        let result = format!("\"{}\"", "x".repeat(bytes as usize - 2));
        let id = computed_as(&queue, target.url("127.0.0.1"), Bytes::from(result)).await;
        assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { .. }));
        let message = target.messages().pop().unwrap();
        assert_eq!((message.id, message.body["result"].is_string()), (id.to_string(), expected), "{bytes}");
    }
}

#[tokio::test]
async fn a_target_that_does_not_respond_delays_no_other_tenant() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let slow = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = Target::start("127.0.0.1:0").await;
    let (queue, _) = queue(dir.path(), &dns, "127.0.0.1", LONG).await;
    let slow_url = format!("http://{}/", slow.local_addr().unwrap());
    for _ in 0..200 {
        let spec = JobSpec { webhook: Some(slow_url.clone()), ..fixture::spec("hostile") };
        queue.submit(spec, Bytes::from("text")).await.unwrap();
    }
    let id = queue.submit(spec(target.url("127.0.0.1")), Bytes::from("text")).await.unwrap();
    let taken = queue.take("minilm", 1000, WORKER).await.unwrap();
    let end = |job: &TakenJob| (job.id, job.token, ComputationEnd::Computed(Bytes::from("1")));
    // Its deliveries begin first.
    queue.end(taken.iter().filter(|job| job.id != id).map(end).collect()).await.unwrap();
    let mut connections = Vec::new();
    while connections.len() < 16 {
        connections.push(slow.accept().await.unwrap());
    }
    let begun = std::time::Instant::now();
    queue.end(taken.iter().filter(|job| job.id == id).map(end).collect()).await.unwrap();
    assert!(matches!(delivery(&queue, id).await, JobDelivery::Delivered { .. }));
    // The timeout of an attempt is 15 s.
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    drop(connections);
}
