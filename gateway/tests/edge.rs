//! An edge between a scripted hub and scripted regions: what a client gets, from whom, after how many attempts.
//!
//! The regions speak raw HTTP, so that they can break off wherever a case wants them to.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

use gateway::config::EdgeConfig;
use regions::residency::ResidencyPolicy;
use scheduler_core::wire::report::{ExchangeRequestV1, ReportV1};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// What a region does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    Answers,
    AnswersLarge,
    SaysElsewhere,
    SaysOverloaded,
    HangsUp,
    BreaksOffInTheHead,
    BreaksOffInASmallBody,
    BreaksOffInALargeBody,
    /// As the two above, with a reset instead of an end.
    ResetsInTheHead,
    ResetsInASmallBody,
    /// Answers the first request on a connection, and hangs up on the second: a connection that was kept too long.
    HangsUpOnTheSecond,
    /// Answers after so long.
    Takes(Duration),
    /// Waits for whatever else comes on the connection.
    Waits,
    /// Neither answers nor reports any more.
    FallsSilent,
}

use Script::*;

const AMERICA: &str = "aws/us-east-1";
const EUROPE: &str = "gcp/europe-west4";
const JAPAN: &str = "oci/ap-tokyo-1";
/// More than is read whole before it is passed on.
const LARGE: usize = 3 << 20;

/// One who may do everything, and one who may do little.
const TENANTS: &str = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n[[tenant]]\nname = 'narrow'\nkey_file = 'narrow'\n\
                       deployments = ['anywhere']\nresidency = { allow = ['eu'] }\n\
                       limits = { requests_per_second = 10, tokens_per_minute = 1000 }\n";

struct Region {
    id: &'static str,
    script: watch::Sender<Script>,
    requests: AtomicU64,
    silent: watch::Sender<bool>,
    given_up: watch::Sender<bool>,
    door: watch::Sender<Door>,
}

/// What becomes of new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Open,
    /// They are refused.
    Gone,
    /// They are not taken; once the queue is full, not even their SYN is answered.
    Stuck,
}

/// Connections that wait to be taken: few, so that a queue can be filled.
const BACKLOG: u32 = 64;

impl Region {
    async fn start(id: &'static str, script: Script) -> (Arc<Region>, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let socket = socket.listen(BACKLOG).unwrap();
        let address = socket.local_addr().unwrap();
        let (script, silent) = (watch::Sender::new(script), watch::Sender::new(false));
        let (given_up, door) = (watch::Sender::new(false), watch::Sender::new(Door::Open));
        let region = Arc::new(Region { id, script, requests: AtomicU64::new(0), silent, given_up, door });
        let shared = region.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    () = shared.door_is(Door::Gone) => return,
                    () = shared.door_is(Door::Stuck) => std::future::pending::<()>().await,
                    accepted = socket.accept() => {
                        let (region, (stream, _)) = (shared.clone(), accepted.unwrap());
                        tokio::spawn(async move { region.serve(BufReader::new(stream)).await });
                    }
                }
            }
        });
        (region, address)
    }

    async fn door_is(&self, wanted: Door) {
        self.door.subscribe().wait_for(|door| *door == wanted).await.unwrap();
    }

    async fn serve(&self, mut stream: BufReader<TcpStream>) -> Option<()> {
        let mut on_this_connection = 0;
        loop {
            let (path, body) = read_request(&mut stream).await?;
            if self.silent.borrow().to_owned() {
                std::future::pending::<()>().await;
            }
            if path == "/spoke/v1/exchange" {
                let question: ExchangeRequestV1 = serde_json::from_slice(&body).ok()?;
                write(&mut stream, "200 OK", "", &self.report(question.sequence)).await?;
                continue;
            }
            self.requests.fetch_add(1, Ordering::SeqCst);
            on_this_connection += 1;
            let script = *self.script.borrow();
            let error = |code: &str| format!("x-meridian-error: {code}\r\n");
            match script {
                Answers => serve(&mut stream, &path).await?,
                HangsUpOnTheSecond if on_this_connection > 1 => return None,
                HangsUpOnTheSecond => serve(&mut stream, &path).await?,
                Takes(time) => {
                    tokio::select! {
                        () = tokio::time::sleep(time) => serve(&mut stream, &path).await?,
                        // Whoever asked has left, and the work ends.
                        _ = stream.fill_buf() => {
                            self.given_up.send_replace(true);
                            return None;
                        }
                    }
                }
                ResetsInTheHead => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await.ok()?;
                    return reset(stream);
                }
                ResetsInASmallBody => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut").await.ok()?;
                    return reset(stream);
                }
                AnswersLarge => write(&mut stream, "200 OK", "", &vec![b' '; LARGE]).await?,
                SaysElsewhere => write(&mut stream, "503 No", &error("not_ready"), b"{}").await?,
                SaysOverloaded => write(&mut stream, "429 No", &error("overloaded"), b"{}").await?,
                HangsUp => return None,
                BreaksOffInTheHead => return stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await.ok(),
                BreaksOffInASmallBody => {
                    return stream
                        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"cut")
                        .await
                        .ok();
                }
                BreaksOffInALargeBody => {
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
                    stream.write_all(head.as_bytes()).await.ok()?;
                    return stream.write_all(&vec![b' '; LARGE / 2]).await.ok();
                }
                Waits => {
                    let _ = stream.read_u8().await;
                    self.given_up.send_replace(true);
                    return None;
                }
                FallsSilent => {
                    self.silent.send_replace(true);
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    fn report(&self, sequence: u64) -> Vec<u8> {
        let load =
            |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 0, "tokens_per_second": 0.0});
        let report = json!({
            "version": 1, "region": self.id, "boot_id": 1, "sequence": sequence, "draining": false,
            "deployments": [load("anywhere"), load("locked")],
        });
        let wire: ReportV1 = serde_json::from_value(report).expect("a report as a spoke sends it");
        serde_json::to_vec(&wire).unwrap()
    }

    fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_lowercase();
    let path = head.split(' ').nth(1)?.to_owned();
    let length = head.split("content-length: ").nth(1)?.split("\r\n").next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((path, body))
}

async fn serve(stream: &mut BufReader<TcpStream>, path: &str) -> Option<()> {
    let served = json!({"served": true, "path": path}).to_string();
    let headers = "server-timing: region;dur=1\r\nx-meridian-tokens: 100\r\n";
    write(stream, "200 OK", headers, served.as_bytes()).await
}

/// Ends a connection with a reset.
fn reset(stream: BufReader<TcpStream>) -> Option<()> {
    stream.into_inner().set_zero_linger().ok()
}

async fn write(stream: &mut BufReader<TcpStream>, status: &str, headers: &str, body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body).await.ok()
}

/// An edge with three regions behind it.
struct Scene {
    url: String,
    operations: String,
    regions: BTreeMap<&'static str, Arc<Region>>,
    addresses: BTreeMap<&'static str, SocketAddr>,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Scene {
    async fn with(scripts: [(&'static str, Script); 3]) -> Scene {
        Scene::trusting("127.0.0.1", scripts).await
    }

    async fn trusting(peer: &str, scripts: [(&'static str, Script); 3]) -> Scene {
        let (mut regions, mut addresses, mut rows) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (id, script) in scripts {
            let (region, address) = Region::start(id, script).await;
            regions.insert(id, region);
            addresses.insert(id, address);
            rows.push(
                json!({"id": id, "endpoint": address.to_string(), "deployments": ["anywhere", "locked"]}),
            );
        }
        let hub = hub(rows).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "k").unwrap();
        std::fs::write(dir.path().join("narrow"), "n").unwrap();
        std::fs::write(dir.path().join("tenants.toml"), TENANTS).unwrap();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{}'\nplace = '{AMERICA}'\nhub = 'http://{hub}'\nsnapshot = 'routes'\n\
             trusted_peers = ['{peer}']\ntenants = 'tenants.toml'",
            free_address().await
        );
        let config =
            EdgeConfig::parse(&text, dir.path(), &BTreeMap::new()).map_err(|problems| problems.join("\n"));
        let config = config.unwrap();
        let operations = format!("http://{}", config.operations);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, address) = tokio::sync::oneshot::channel();
        let shutdown = async { drop(stopped.await) };
        tokio::spawn(gateway::edge::run(config, shutdown, |address| {
            ready.send(address).expect("somebody waits")
        }));
        let url = format!("http://{}/v1/embeddings", address.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let scene = Scene { url, operations, regions, addresses, client, _dir: dir, _stop: stop };
        scene.until_all_healthy().await;
        scene
    }

    async fn until_all_healthy(&self) {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < Duration::from_secs(20), "the regions do not become healthy");
            let Ok(answer) = self.client.get(format!("{}/routes", self.operations)).send().await else {
                continue;
            };
            let routes: Value = answer.json().await.unwrap();
            let regions = routes["regions"].as_array().cloned().unwrap_or_default();
            if regions.len() == 3 && regions.iter().all(|region| region["health"] == "healthy") {
                return;
            }
        }
    }

    async fn ask(&self, model: &str, headers: &[(&str, &str)]) -> reqwest::Result<reqwest::Response> {
        let body = json!({"model": model, "input": "x"}).to_string();
        let mut request = self.client.post(&self.url).bearer_auth("k").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await
    }

    /// Status and body of the answer to any method, path and body.
    async fn any(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let url = self.url.replace("/v1/embeddings", path);
        let request =
            self.client.request(method.parse().unwrap(), url).bearer_auth("k").body(body.to_owned());
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    fn requests(&self) -> [u64; 3] {
        [AMERICA, EUROPE, JAPAN].map(|id| self.regions[id].requests())
    }
}

/// A hub with one table; it holds every later question.
async fn hub(regions: Vec<Value>) -> SocketAddr {
    let deployment = |name: &str, residency: Value| {
        json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
               "residency": residency, "regions": []})
    };
    let deployments = [deployment("anywhere", Value::Null), deployment("locked", json!("eu"))];
    let table =
        json!({"version": 1, "epoch": 1, "generation": 1, "regions": regions, "deployments": deployments});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let router = axum::Router::new().route("/v1/routes", axum::routing::get(routes));
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

async fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// What America, the nearest, does; what the client gets of `model`; and how often each region was asked.
async fn check(america: Script, model: &str, status: u16, region: &str, attempts: &str, requests: [u64; 3]) {
    let scene = Scene::with([(AMERICA, america), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let answer = scene.ask(model, &[]).await.unwrap();
    let header = |name| answer.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let seen = (answer.status().as_u16(), header("x-meridian-region"), header("x-meridian-attempts"));
    assert_eq!(seen, (status, region.to_owned(), attempts.to_owned()), "{america:?}, {model}");
    assert_eq!(scene.requests(), requests, "{america:?}, {model}");
}

#[tokio::test]
async fn a_tenant_sees_its_deployments_its_regions_and_its_limits_and_no_others() {
    let scene = Scene::with([(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let ask = async |model: &str, input: &str, headers: &[(&str, &str)]| {
        let body = json!({"model": model, "input": input}).to_string();
        let mut request = scene.client.post(&scene.url).bearer_auth("n").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    };
    let header = |answer: &reqwest::Response, name: &str| {
        answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    };
    let models = scene.client.get(scene.url.replace("embeddings", "models")).bearer_auth("n").send().await;
    let models: Value = models.unwrap().json().await.unwrap();
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
    assert_eq!(ask("locked", "x", &[]).await.status(), 404);
    let elsewhere = ask("anywhere", "x", &[("x-meridian-residency", "us")]).await;
    assert_eq!(elsewhere.status(), 403, "a header does not widen what a tenant may");
    assert_eq!(scene.requests(), [0, 0, 0]);

    let first = ask("anywhere", &"word ".repeat(400), &[]).await;
    assert_eq!((first.status().as_u16(), header(&first, "x-meridian-region")), (200, EUROPE.to_owned()));
    assert_eq!(header(&first, "x-ratelimit-limit-tokens"), "1000");
    assert_eq!(
        header(&first, "x-ratelimit-remaining-tokens"),
        "500",
        "what it had by estimate: four bytes a token"
    );
    let refused = ask("anywhere", &"word ".repeat(800), &[]).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(header(&refused, "x-meridian-error"), "rate_limit_exceeded");
    let wait_ms: u64 = header(&refused, "retry-after-ms").parse().unwrap();
    // It was charged 500 and had 100, as the region said; a tenth of a minute earns them.
    assert!((1..=6_000).contains(&wait_ms), "{wait_ms}");
    let refused: Value = refused.json().await.unwrap();
    assert!(refused["error"]["message"].as_str().unwrap().contains("1000 tokens a minute"), "{refused}");
    assert_eq!(scene.requests(), [0, 1, 0]);
    // Whoever has no limits is not told of any.
    let free = scene.ask("anywhere", &[]).await.unwrap();
    assert_eq!(header(&free, "x-ratelimit-limit-tokens"), "");
}

#[tokio::test]
async fn nobody_computes_for_a_client_who_has_hung_up() {
    let scene = Scene::with([(AMERICA, Waits), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let region = &scene.regions[AMERICA];
    {
        let asked = scene.ask("anywhere", &[]);
        tokio::pin!(asked);
        while region.requests() == 0 {
            let waited = tokio::time::timeout(Duration::from_millis(10), &mut asked).await;
            assert!(waited.is_err(), "the region does not answer");
        }
        assert!(!*region.given_up.borrow(), "somebody still waits");
    }
    region.given_up.subscribe().wait_for(|given_up| *given_up).await.unwrap();
    assert_eq!(scene.requests(), [1, 0, 0], "and nobody else is asked instead");
}

#[tokio::test]
async fn every_path_of_a_replica_is_reached_by_the_name_of_a_deployment_in_the_body_or_in_the_path() {
    let scene = Scene::with([(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let check = async |method: &str, path: &str, body: &str, expected: Result<&str, (u16, &str)>| {
        let (status, answer) = scene.any(method, path, body).await;
        match expected {
            Ok(sent_to) => {
                assert_eq!((status, &answer["path"]), (200, &json!(sent_to)), "{method} {path} {body}")
            }
            Err((wanted, word)) => {
                let text = answer.to_string();
                assert!(status == wanted && text.contains(word), "{method} {path} {body}: {status} {text}");
            }
        }
    };
    let named = r#"{"model": "anywhere", "input": "x"}"#;
    let nameless = r#"{"inputs": "x"}"#;
    check("POST", "/v2/rerank", named, Ok("/v2/rerank")).await;
    check("POST", "/embed", named, Ok("/embed")).await;
    check("POST", "/deployments/anywhere/embed", nameless, Ok("/embed")).await;
    check("POST", "/deployments/anywhere", nameless, Ok("/")).await;
    check("GET", "/deployments/anywhere/info", "", Ok("/info")).await;
    check("POST", "/deployments/nowhere/embed", nameless, Err((404, "nowhere"))).await;
    // In the words of the path's ecosystem: TEI says 422 to what it cannot read.
    check("POST", "/embed", nameless, Err((422, "\"error_type\":\"Tokenizer\""))).await;
    check("POST", "/embed", nameless, Err((422, "/deployments/NAME/embed"))).await;
    check("GET", "/info", "", Err((400, "anywhere, locked"))).await;
    check("POST", "/v1/embeddings", nameless, Err((400, "'model' is missing"))).await;
    check("POST", "/", nameless, Err((404, "POST /v1/rerank"))).await;
    assert_eq!(scene.requests(), [5, 0, 0]);
    // The law is that of the deployment in the path.
    check("POST", "/deployments/locked/embed", named, Ok("/embed")).await;
    assert_eq!(scene.requests(), [5, 1, 0]);
}

#[tokio::test]
async fn each_way_to_fail_leads_to_the_next_region_or_to_the_client() {
    check(Answers, "anywhere", 200, AMERICA, "1", [1, 0, 0]).await;
    check(AnswersLarge, "anywhere", 200, AMERICA, "1", [1, 0, 0]).await;
    check(SaysElsewhere, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    check(SaysOverloaded, "anywhere", 429, AMERICA, "1", [1, 0, 0]).await;
    check(HangsUp, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    check(BreaksOffInTheHead, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    check(BreaksOffInASmallBody, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    check(ResetsInTheHead, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    check(ResetsInASmallBody, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
}

/// What a client of a scene gets: its status, from whom, after how many attempts.
async fn answered(scene: &Scene, headers: &[(&str, &str)]) -> (u16, String, String) {
    let answer = scene.ask("anywhere", headers).await.unwrap();
    let header = |name| answer.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    (answer.status().as_u16(), header("x-meridian-region"), header("x-meridian-attempts"))
}

fn from(region: &str, attempts: u32) -> (u16, String, String) {
    (200, region.to_owned(), attempts.to_string())
}

/// Every bound holds on a machine that is starved as well; what a quiet one takes is a hundredth of it.
async fn answered_within(scene: &Scene, bound: Duration) -> (u16, String, String) {
    let begun = Instant::now();
    let answered = answered(scene, &[]).await;
    assert!(begun.elapsed() < bound, "{answered:?} after {:?}", begun.elapsed());
    println!("{answered:?} after {:?}", begun.elapsed());
    answered
}

const WELL: [(&str, Script); 3] = [(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)];

#[tokio::test]
async fn a_region_that_refuses_connections_costs_an_attempt_and_no_time() {
    let scene = Scene::with(WELL).await;
    scene.regions[AMERICA].door.send_replace(Door::Gone);
    assert_eq!(answered_within(&scene, Duration::from_secs(1)).await, from(EUROPE, 2));
    assert_eq!(scene.requests(), [0, 1, 0]);
}

#[tokio::test]
async fn a_region_whose_syn_is_never_answered_costs_the_time_in_which_it_should_have_been() {
    let scene = Scene::with(WELL).await;
    scene.regions[AMERICA].door.send_replace(Door::Stuck);
    let address = scene.addresses[AMERICA];
    let mut queue = Vec::new();
    while let Ok(connected) =
        tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        queue.push(connected.unwrap());
        assert!(queue.len() < 10 * BACKLOG as usize, "the queue is never full");
    }
    let begun = Instant::now();
    assert_eq!(answered_within(&scene, Duration::from_secs(2)).await, from(EUROPE, 2));
    assert!(begun.elapsed() >= Duration::from_millis(100), "{:?}: it was waited for", begun.elapsed());
    assert_eq!(scene.requests(), [0, 1, 0]);
}

#[tokio::test]
async fn a_connection_that_was_kept_too_long_costs_a_request_nothing() {
    let scene = Scene::with([(AMERICA, HangsUpOnTheSecond), (EUROPE, Answers), (JAPAN, Answers)]).await;
    assert_eq!(answered(&scene, &[]).await, from(AMERICA, 1));
    assert_eq!(answered_within(&scene, Duration::from_secs(1)).await, from(AMERICA, 2));
    assert_eq!(scene.requests(), [3, 0, 0], "nobody else is asked for it");
}

/// So many answers that the times of a region mean something, and too few to have earned a hedge.
const ENOUGH: usize = 24;
/// Enough to have earned one.
const ENOUGH_TO_HEDGE: usize = 60;

#[tokio::test]
async fn a_region_that_reports_and_does_not_answer_is_left_after_the_time_in_which_it_answers() {
    let scene = Scene::with(WELL).await;
    for _ in 0..ENOUGH {
        assert_eq!(answered(&scene, &[]).await.0, 200);
    }
    let region = &scene.regions[AMERICA];
    region.script.send_replace(Waits);
    assert_eq!(answered_within(&scene, Duration::from_secs(2)).await, from(EUROPE, 2));
    region.given_up.subscribe().wait_for(|given_up| *given_up).await.unwrap();
    // The second miss in a row takes it out of the way, and nobody meets it any longer.
    assert_eq!(answered(&scene, &[]).await, from(EUROPE, 2));
    assert_eq!(answered_within(&scene, Duration::from_secs(2)).await, from(EUROPE, 1));
    let routes: Value =
        scene.client.get(format!("{}/routes", scene.operations)).send().await.unwrap().json().await.unwrap();
    let circuits = routes["regions"].as_array().unwrap().iter();
    let states: Vec<_> =
        circuits.map(|region| (region["region"].as_str(), region["circuit"]["state"].as_str())).collect();
    assert!(!states.contains(&(Some(AMERICA), Some("closed"))), "{states:?}");
    assert!(states.contains(&(Some(EUROPE), Some("closed"))), "{states:?}");
}

#[tokio::test]
async fn a_region_that_was_never_quicker_is_not_late() {
    let scene =
        Scene::with([(AMERICA, Takes(Duration::from_millis(400))), (EUROPE, Answers), (JAPAN, Answers)]);
    let scene = scene.await;
    for _ in 0..3 {
        assert_eq!(answered_within(&scene, Duration::from_secs(4)).await, from(AMERICA, 1));
    }
    assert_eq!(scene.requests(), [3, 0, 0]);
}

/// Invariant 1, Lawful: neither lateness nor a race sends a byte of a locked request to another region.
#[tokio::test]
async fn a_locked_request_waits_for_its_only_region_however_late_it_is() {
    let scene = Scene::with(WELL).await;
    for _ in 0..ENOUGH_TO_HEDGE {
        assert_eq!(scene.ask("locked", &[]).await.unwrap().status(), 200);
    }
    scene.regions[EUROPE].script.send_replace(Takes(Duration::from_millis(400)));
    let answer = scene.ask("locked", &[]).await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["x-meridian-attempts"]),
        (200, &"1".parse().unwrap())
    );
    assert_eq!(scene.requests(), [0, ENOUGH_TO_HEDGE as u64 + 1, 0]);
}

#[tokio::test]
async fn somebody_who_waits_is_raced_and_a_backfill_is_not() {
    let scene = Scene::with(WELL).await;
    for _ in 0..ENOUGH_TO_HEDGE {
        assert_eq!(answered(&scene, &[]).await, from(AMERICA, 1));
    }
    // Slower than nearly all, and not late.
    let region = &scene.regions[AMERICA];
    region.script.send_replace(Takes(Duration::from_millis(90)));
    assert_eq!(answered(&scene, &[("x-meridian-lane", "bulk")]).await, from(AMERICA, 1));
    assert!(!*region.given_up.borrow());
    assert_eq!(answered_within(&scene, Duration::from_secs(1)).await, from(EUROPE, 2));
    region.given_up.subscribe().wait_for(|given_up| *given_up).await.unwrap();
    assert_eq!(answered(&scene, &[]).await, from(AMERICA, 1), "one in fifty is raced, and it lost no trust");
}

#[tokio::test]
async fn a_region_that_falls_silent_is_left_by_whoever_waits_for_it() {
    let begun = Instant::now();
    check(FallsSilent, "anywhere", 200, EUROPE, "2", [1, 1, 0]).await;
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn an_answer_that_has_begun_is_never_begun_again() {
    let scene = Scene::with([(AMERICA, BreaksOffInALargeBody), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let answer = scene.ask("anywhere", &[]).await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
    assert!(answer.bytes().await.is_err(), "a cut answer looks cut");
    assert_eq!(scene.requests(), [1, 0, 0]);
}

/// Invariant 1, Lawful: no failure of the only allowed region sends a byte to another.
#[tokio::test]
async fn no_failure_widens_where_a_locked_request_may_go() {
    for europe in [SaysElsewhere, HangsUp, BreaksOffInTheHead, BreaksOffInASmallBody, FallsSilent] {
        let scene = Scene::with([(AMERICA, Answers), (EUROPE, europe), (JAPAN, Answers)]).await;
        let answer = scene.ask("locked", &[("x-meridian-timeout-ms", "4000")]).await.unwrap();
        assert_eq!(answer.status().as_u16(), 503, "{europe:?}");
        assert_eq!(scene.requests(), [0, 1, 0], "{europe:?}");
    }
}

#[tokio::test]
async fn a_header_narrows_and_two_of_them_are_refused() {
    let scene = Scene::with([(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let narrowed = scene.ask("anywhere", &[("x-meridian-residency", "jp")]).await.unwrap();
    assert_eq!(narrowed.headers()["x-meridian-region"], JAPAN);
    let nowhere = scene.ask("locked", &[("x-meridian-residency", "jp")]).await.unwrap();
    assert_eq!(nowhere.headers()["x-meridian-error"], "region_not_permitted");
    let twice = [("x-meridian-residency", "jp"), ("x-meridian-residency", "us")];
    assert_eq!(scene.ask("anywhere", &twice).await.unwrap().headers()["x-meridian-error"], "invalid_header");
    assert_eq!(scene.requests(), [0, 0, 1]);
}

#[tokio::test]
async fn a_clients_place_is_believed_from_a_trusted_peer_alone() {
    for (trusted, region) in [("127.0.0.1", JAPAN), ("192.0.2.1", AMERICA)] {
        let scene = Scene::trusting(trusted, [(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)]).await;
        let answer = scene.ask("anywhere", &[("x-meridian-client-geo", "34.69,135.50")]).await.unwrap();
        assert_eq!(answer.headers()["x-meridian-region"], region, "{trusted} is trusted");
    }
}

#[tokio::test]
async fn a_deadline_is_an_answer_too() {
    let scene = Scene::with([(AMERICA, FallsSilent), (EUROPE, Answers), (JAPAN, Answers)]).await;
    let begun = Instant::now();
    let answer = scene.ask("anywhere", &[("x-meridian-timeout-ms", "200")]).await.unwrap();
    assert_eq!(answer.headers()["x-meridian-error"], "deadline_exceeded");
    assert!(begun.elapsed() < Duration::from_millis(600), "{:?}", begun.elapsed());
}

/// The scripted hub's law is the one that the tests speak of.
#[test]
fn the_lock_of_the_scene_permits_europe_alone() {
    let catalogue = regions::catalogue::Catalogue::builtin();
    let permitted = "eu".parse::<ResidencyPolicy>().unwrap().permitted(&catalogue);
    let allowed = |id: &str| permitted.contains(catalogue.index_of(&id.parse().unwrap()).unwrap());
    assert_eq!([AMERICA, EUROPE, JAPAN].map(allowed), [false, true, false]);
}
