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
use jobs::queue_host::{ComputationEnd, QueueHost};
use jobs::webhook::sender::WebhookSender;
use jobs::webhook::signature::WebhookSecret;
use jobs_core::decide::JobWorker;
use jobs_core::job::{DurableJobId, JobDelivery, JobSpec, JobStatus};
use jobs_core::queue::Cancellation;
use jobs_core::webhook::WebhookPolicy;
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

/// Queue whose results are sent, with `permitted` as the permitted networks.
async fn queue(folder: &std::path::Path, dns: &DnsServer, permitted: &str, attempts: u32) -> QueueHost {
    let queue = fixture::open(folder, fixture::config(attempts, Duration::from_millis(20)), &[]).await;
    let policy = WebhookPolicy { private_targets: vec![permitted.parse().unwrap()], permits_http: true };
    let tls = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()));
    let tls = tls.with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let resolver = Resolver::new(&DnsSection { servers: vec![dns.address] });
    let secret = base64::engine::general_purpose::STANDARD.encode(SECRET);
    let secret: WebhookSecret = format!("whsec_{secret}").parse().unwrap();
    let secrets = Box::new(move |_: &str| vec![secret.clone()]);
    let sender = Arc::new(WebhookSender::new(policy, resolver, Arc::new(tls), secrets));
    tokio::spawn(sender.run(queue.clone(), 1));
    queue
}

/// Submits a job and computes it.
async fn computed(queue: &QueueHost, webhook: String) -> DurableJobId {
    let id = queue.submit(spec(webhook), Bytes::from("text")).await.unwrap();
    let taken = queue.take("minilm", 1, WORKER).await.unwrap();
    let ends =
        taken.iter().map(|job| (job.id, job.token, ComputationEnd::Computed(Bytes::from(r#"{"data":[1]}"#))));
    queue.end(ends.collect()).await.unwrap();
    id
}

async fn delivery(queue: &QueueHost, id: DurableJobId) -> JobDelivery {
    loop {
        match queue.job("a", id).unwrap().job.status {
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
    let queue = queue(dir.path(), &dns, "127.0.0.1", 1000).await;
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
        assert_eq!(message.body["type"], "job.succeeded");
        assert_eq!(message.body["data"]["id"], message.id);
        assert_eq!(message.body["data"]["result"], serde_json::json!({"data": [1]}));
    }
    assert!(ids.iter().all(|id| count.get(&id.to_string()) == Some(&1)), "{count:?}");
    assert_eq!(count.len(), ids.len());
}

#[tokio::test]
async fn a_target_that_is_gone_or_fails_too_often_is_abandoned_and_a_cancelled_job_is_not_sent() {
    let (dir, dns) = (tempfile::tempdir().unwrap(), DnsServer::start().await);
    let target = Target::start("127.0.0.1:0").await;
    let queue = queue(dir.path(), &dns, "127.0.0.1", 3).await;
    let abandoned = async |id| match delivery(&queue, id).await {
        JobDelivery::Abandoned { reason } => reason,
        other => panic!("{other:?}"),
    };
    target.respond_with(410);
    let gone = computed(&queue, target.url("127.0.0.1")).await;
    assert_eq!(abandoned(gone).await, "the target responded 410 Gone");
    target.respond_with(307);
    let redirected = computed(&queue, target.url("127.0.0.1")).await;
    let reason = abandoned(redirected).await;
    assert_eq!(
        reason,
        "all 3 attempts failed; the last one: the target responded 307; redirects are not followed"
    );
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
    let queue = queue(dir.path(), &dns, "127.0.0.1", 2).await;
    let reason = async |url| match delivery(&queue, computed(&queue, url).await).await {
        JobDelivery::Abandoned { reason } => reason,
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
