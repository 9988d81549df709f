//! An ingress applies the newest table that it has received, also to requests of a gateway with an older one.

use gateway::ingress::{self, IngressConfig, IngressSignals};
use regions::{Catalogue, RouteTable, Widening, parse_deployments};
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use supervision::Mutex;
use tokio::net::TcpListener;

pub(super) const REGION: &str = "aws/us-east-1";

/// Starts a replica that counts its requests.
pub(super) async fn replica(requests: Arc<AtomicU64>) -> std::net::SocketAddr {
    let status = json!({"version": 1, "names": ["m"], "model": "m", "state": "ready", "pending_tokens": 0,
                        "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 1000.0});
    let router = axum::Router::new()
        .route("/status", axum::routing::get(async move || axum::Json(status)))
        .fallback(async move || {
            requests.fetch_add(1, Ordering::SeqCst);
            axum::Json(json!({"served": true}))
        });
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

/// Returns a table in which `m` has this residency, and optionally an announced change of it.
fn table(residency: &str, to: Option<&str>) -> RouteTable {
    let text = "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = { kind = \"cpu\", precision = \"f32\" }";
    let mut deployment = parse_deployments(text, &Catalogue::builtin()).unwrap().remove(0);
    deployment.residency = residency.parse().unwrap();
    let mut table = RouteTable::empty();
    if let Some(to) = to {
        let announced = Widening { to: to.parse().unwrap(), since: table.generation };
        table.widening.insert(deployment.name.clone(), announced);
    }
    table.deployments.insert(deployment.name.clone(), deployment);
    table
}

#[tokio::test]
async fn a_narrowed_policy_rejects_requests_at_the_ingress_before_the_body_is_read() {
    let requests = Arc::new(AtomicU64::new(0));
    let replicas = vec![replica(requests.clone()).await.into()];
    let spoke = Arc::new(Mutex::new(Spoke::new(REGION.parse().unwrap(), 1, replicas)));
    let catalogue = Arc::new(Catalogue::builtin());
    let config = IngressConfig {
        tracing: None,
        metrics: None,
        jobs: None,
        proxy_protocol_from: Vec::new(),
        resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
        listen: "127.0.0.1:0".parse().unwrap(),
        region: REGION.parse().unwrap(),
        signals: IngressSignals::default(),
        catalogue: catalogue.clone(),
        receipts: None,
        transport: identity::Transport::Loopback,
        operations: None,
    };
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let (ready, address) = tokio::sync::oneshot::channel();
    let running =
        tokio::spawn(ingress::run(config, spoke.clone(), async { drop(stopped.await) }, |address| {
            ready.send(address).expect("the test waits for the address")
        }));
    let url = format!("http://{}/v1/embeddings", address.await.unwrap());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = async || {
        // A gateway without a residency policy: it sends no header.
        let request =
            client.post(&url).header("x-meridian-deployment", "m").body(r#"{"model":"m","input":"a"}"#);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json::<Value>().await.unwrap())
    };
    while send().await.0 != 200 {}
    let set_policy = |residency, to| spoke.lock().apply_route_table(&table(residency, to), &catalogue);

    set_policy("eu", None);
    let before = requests.load(Ordering::SeqCst);
    let (status, body) = send().await;
    assert_eq!((status, &body["error"]["code"]), (403, &json!("not_resident_here")), "{body}");
    assert_eq!(requests.load(Ordering::SeqCst), before, "no replica was used");
    set_policy("eu", Some("eu,us"));
    assert_eq!(send().await.0, 200, "it may be forwarded once every spoke applies the policy");
    set_policy("jp", Some("eu"));
    assert_eq!(send().await.0, 403);
    set_policy("anywhere", None);
    assert_eq!(send().await.0, 200);
    drop(stop);
    running.await.unwrap().unwrap();
}
