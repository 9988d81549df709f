//! A region without contact to a hub for too long rejects locked requests, and serves the rest.

use super::edge::TIMEOUT;
use super::ingress::{REGION, replica};
use gateway::ingress::{self, IngressConfig, IngressSignals};
use regions::Catalogue;
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

#[tokio::test]
async fn a_region_with_a_stale_policy_rejects_locked_requests_until_a_hub_responds() {
    let replica = replica(Arc::default()).await;
    let mut spoke = Spoke::new(REGION.parse().unwrap(), 1, vec![replica.into()]);
    let max = Duration::from_secs(60);
    let long_ago = Instant::now().checked_sub(Duration::from_secs(61));
    spoke.limit_policy_age(max, long_ago.expect("this machine has run for a minute"));
    let spoke = Arc::new(Mutex::new(spoke));
    let config = IngressConfig {
        tracing: None,
        metrics: None,
        jobs: None,
        proxy_protocol_from: Vec::new(),
        resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
        listen: "127.0.0.1:0".parse().unwrap(),
        region: REGION.parse().unwrap(),
        signals: IngressSignals::default(),
        catalogue: Arc::new(Catalogue::builtin()),
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
    let send = async |residency: Option<&str>| {
        let request =
            client.post(&url).header("x-meridian-deployment", "m").body(r#"{"model":"m","input":"a"}"#);
        let request =
            residency.iter().fold(request, |request, to| request.header("x-meridian-residency", *to));
        let response = request.send().await.unwrap();
        let code = response.headers().get("x-meridian-error").map(|code| code.to_str().unwrap().to_owned());
        (response.status().as_u16(), code)
    };
    let begun = Instant::now();
    while send(None).await.0 != 200 {
        assert!(begun.elapsed() < TIMEOUT, "an unrestricted request is served");
    }
    assert_eq!(send(Some("us")).await, (503, Some("policy_too_old".to_owned())));
    spoke.lock().confirm_policy(Instant::now());
    assert_eq!(send(Some("us")).await, (200, None));
    drop(stop);
    running.await.unwrap().unwrap();
}
