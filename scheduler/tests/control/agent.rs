//! Tests of a region's agent with a hub.

use super::world::{AMERICA, EUROPE, Hub, config, port, ready, wait_until};
use scheduler::agent::{self, AgentError};
use scheduler::config::SpokeConfig;
use scheduler::scaling::Autoscaler;
use scheduler_core::spoke::{ReplicaStatus, Spoke};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Agent of the region in Europe.
struct RunningAgent {
    spoke: Arc<Mutex<Spoke>>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), AgentError>>,
}

impl RunningAgent {
    fn start(hub: &str) -> RunningAgent {
        RunningAgent::of(&[hub])
    }

    fn of(hubs: &[&str]) -> RunningAgent {
        let text = format!(
            "region = \"{EUROPE}\"\nlisten = \"127.0.0.1:0\"\nadvertise = \"10.0.0.1:7100\"\nhub = {hubs:?}\n\
             [[replica]]\nendpoint = \"10.0.0.1:7200\"\n[identity]\ninsecure = true\n"
        );
        let config = SpokeConfig::parse(&text, Path::new("."), None).unwrap();
        let spoke = Arc::new(Mutex::new(config.spoke(7)));
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or_default() };
        let resolver = resolver::Resolver::new(&resolver::DnsSection::default());
        RunningAgent {
            spoke: spoke.clone(),
            stop,
            task: tokio::spawn(agent::run(config, spoke, resolver, Arc::default(), shutdown)),
        }
    }

    /// Sets the ready deployments in the replica's status.
    fn serves(&self, names: &[&str]) {
        let names: BTreeSet<_> = names.iter().map(|name| name.parse().unwrap()).collect();
        let observed = ReplicaStatus {
            model: None,
            failure: None,
            names,
            ready: true,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: Some(0),
            tokens_per_second: 1.0,
        };
        self.spoke.lock().observe_replica(0, observed, Instant::now());
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_region_is_registered_from_start_to_stop_with_its_ready_deployments() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.lapsed_keep = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let agent = RunningAgent::start(&hub.url);
    hub.wait_for_routes("Europe is there", |table| port(table, EUROPE) == Some(7100)).await;
    agent.serves(&["minilm"]);
    hub.wait_for_routes("minilm is ready", |table| ready(table, EUROPE).len() == 1).await;
    agent.serves(&["minilm", "minilm-eu", "other"]);
    hub.wait_for_routes("all that is deployed is ready", |table| ready(table, EUROPE).len() == 2).await;
    agent.stop().await;
    hub.wait_for_routes("Europe has left", |table| table.regions.is_empty()).await;
    hub.stop().await;
}

#[tokio::test]
async fn an_agent_keeps_a_short_lease_alive() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    // The hub expires leases four times a second, so a lease of one second without keep-alives would be gone within
    // 1.25 s.
    config.lease_ttl = Duration::from_secs(1);
    config.lapsed_keep = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let agent = RunningAgent::start(&hub.url);
    hub.wait_for_routes("Europe is there", |table| port(table, EUROPE).is_some()).await;
    let silent = hub.register(AMERICA, 7300, 1, &[]).await;
    hub.wait_for_routes("America is there", |table| port(table, AMERICA).is_some()).await;
    // On a machine that stalls for longer than a lease, the agent registers again.
    hub.wait_for_routes("the silent region is gone, and the agent's region is not", |table| {
        port(table, AMERICA).is_none() && port(table, EUROPE).is_some()
    })
    .await;
    assert_eq!(hub.keep_alive(&silent, &[]).await.0, 404);
    agent.stop().await;
    hub.stop().await;
}

#[tokio::test]
async fn a_region_registers_again_with_a_new_hub() {
    let dir = tempfile::tempdir().unwrap();
    let first = Hub::start(config(dir.path())).await;
    let agent = RunningAgent::start(&first.url);
    agent.serves(&["minilm"]);
    first
        .wait_for_routes("minilm is ready", |table| {
            table.regions.len() == 1 && ready(table, EUROPE).len() == 1
        })
        .await;
    let mut elsewhere = config(&dir.path().join("other"));
    elsewhere.listen = first.url.trim_start_matches("http://").parse().unwrap();
    first.kill().await;

    let mut second = None;
    wait_until("the port is free", async || {
        second = Hub::try_start(elsewhere.clone()).await.ok();
        second.is_some()
    })
    .await;
    let second = second.unwrap();
    second.wait_for_routes("Europe is there again", |table| port(table, EUROPE) == Some(7100)).await;
    agent.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn an_agent_without_a_hub_retries_and_can_be_stopped() {
    let free_port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free_port.local_addr().unwrap();
    drop(free_port);
    let agent = RunningAgent::start(&format!("http://{address}"));
    agent.serves(&["minilm"]);
    let dir = tempfile::tempdir().unwrap();
    let mut late = config(dir.path());
    late.listen = address;
    let hub = Hub::start(late).await;
    hub.wait_for_routes("it has found the hub", |table| port(table, EUROPE).is_some()).await;
    hub.stop().await;
    agent.stop().await;
}

/// Starts a server that accepts connections and sends nothing, like a suspended process.
fn hangs() -> (TcpListener, String) {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

#[tokio::test]
async fn of_several_hubs_the_responding_one_is_used() {
    let (_silent, silent) = hangs();
    let unreachable = {
        let (_gone, url) = hangs();
        url
    };
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    // Two of three keep-alives may be lost; a call to a silent hub takes longer than that.
    config.lease_ttl = Duration::from_secs(1);
    config.lapsed_keep = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let agent = RunningAgent::of(&[&unreachable, &silent, &hub.url]);
    hub.wait_for_routes("Europe is there", |table| port(table, EUROPE) == Some(7100)).await;
    // If the agent rotated, or returned to the first hub, its lease would expire.
    let lease = hub.register(AMERICA, 7300, 1, &[]).await;
    let tables = Cell::new(0);
    hub.wait_for_routes("another region has registered and left while it stays", |table| {
        assert_eq!(port(table, EUROPE), Some(7100), "it stays with the responding hub");
        tables.set(tables.get() + 1);
        port(table, AMERICA).is_none() && tables.get() > 1
    })
    .await;
    assert_eq!(hub.keep_alive(&lease, &[]).await.0, 404);
    agent.stop().await;
    hub.wait_for_routes("it has left", |table| table.regions.is_empty()).await;
    hub.stop().await;
}

#[tokio::test]
async fn the_agent_moves_from_a_failed_hub_to_one_that_was_silent_before() {
    let (second, second_url) = hangs();
    let dir = tempfile::tempdir().unwrap();
    let first = Hub::start(config(dir.path())).await;
    let agent = RunningAgent::of(&[&first.url, &second_url]);
    first.wait_for_routes("Europe is there", |table| port(table, EUROPE).is_some()).await;
    first.kill().await;
    let mut other = config(&dir.path().join("other"));
    other.listen = second.local_addr().unwrap();
    drop(second);
    let mut hub = None;
    wait_until("the port is free", async || {
        hub = Hub::try_start(other.clone()).await.ok();
        hub.is_some()
    })
    .await;
    let hub = hub.unwrap();
    hub.wait_for_routes("Europe is registered with the other", |table| port(table, EUROPE).is_some()).await;
    agent.stop().await;
    hub.stop().await;
}

#[tokio::test]
async fn a_second_spoke_cannot_use_the_directory_of_a_running_one() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "region = \"{EUROPE}\"\nlisten = \"127.0.0.1:0\"\nadvertise = \"10.0.0.1:7100\"\nhub = \"http://127.0.0.1:1\"\n\
         [scaling]\nactuator = \"process\"\ndir = {:?}\nports = \"7300-7301\"\n[identity]\ninsecure = true\n",
        dir.path()
    );
    let config = SpokeConfig::parse(&text, Path::new("."), None).unwrap();
    let resolver = resolver::Resolver::new(&resolver::DnsSection::default());
    let first = Autoscaler::prepare(&config, &resolver).unwrap();
    let problem = Autoscaler::prepare(&config, &resolver).err().unwrap().to_string();
    assert!(
        problem.contains("scaling.dir") && problem.contains("another process uses this directory"),
        "{problem}"
    );
    drop(first);
    assert!(Autoscaler::prepare(&config, &resolver).is_ok());
}
