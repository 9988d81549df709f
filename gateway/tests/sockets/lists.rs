//! Lists of jobs of many regions, of which some do not respond.

use super::batch_requests::unfinished_upload;
use super::jobs::{REGION, Region, gateway_at, jobs_config, text};
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_LENGTH;
use axum::response::Response;
use axum::routing::{get, post};
use futures_util::stream;
use regions::catalogue::Catalogue;
use replica_api::limits::MAX_BODY_BYTES;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::IntoFuture;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Regions that do not respond: together their timeouts would be longer than the test.
const HANGING: usize = 12;
/// Length of the page that a hanging region begins with its head.
const PAGE_BYTES: usize = 4 << 20;

/// Starts a region that reports a queue, and responds to a list with a head, or not at all.
async fn hanging_region(id: String, with_head: bool) -> String {
    let report = move |sequence: u64| {
        let report = json!({"version": 1, "region": id, "instance": "a", "boot_id": 1, "sequence": sequence,
                            "draining": false, "deployments": [], "jobs": true});
        async move { report.to_string() }
    };
    let exchange = move |body: Body| async move { crate::reports::respond(body, report) };
    let list = move || async move {
        if !with_head {
            std::future::pending::<()>().await;
        }
        let body = Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
        Response::builder().header(CONTENT_LENGTH, PAGE_BYTES).body(body).unwrap()
    };
    let router = axum::Router::new()
        .route(scheduler_api::paths::EXCHANGE, post(exchange))
        .route(replica_api::jobs::JOBS, get(list));
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

/// A gateway of one region with jobs and of others that hang.
struct Fixture {
    url: String,
    region: Region,
    hanging: BTreeSet<String>,
    client: reqwest::Client,
    stop: watch::Sender<()>,
}

impl Fixture {
    async fn start(dirs: [&Path; 2], hanging: usize, with_head: bool) -> Fixture {
        let region = Region::start(Some(jobs_config(dirs[0], "")), Vec::new()).await;
        let catalogue = Catalogue::builtin();
        let others = catalogue.iter().map(|(_, region)| region.id.to_string()).filter(|id| id != REGION);
        let mut regions = Vec::new();
        for id in others.take(hanging) {
            let address = hanging_region(id.clone(), with_head).await;
            regions.push((id, address));
        }
        regions.push((REGION.to_owned(), region.url.trim_start_matches("http://").to_owned()));
        let at: Vec<_> = regions.iter().map(|(id, address)| (id.as_str(), address.as_str())).collect();
        let stop = watch::Sender::new(());
        let memory = format!("[bodies]\nbytes_per_tenant_max = {MAX_BODY_BYTES}\n");
        let (url, _) = gateway_at(REGION, &memory, dirs[1], &at, &stop).await;
        let hanging = regions.into_iter().map(|(id, _)| id).filter(|id| id != REGION).collect();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Fixture { url, region, hanging, client, stop }
    }

    async fn list(&self) -> (u16, Value) {
        let sent = self.client.get(format!("{}/v1/async", self.url)).bearer_auth("KEY").send().await.unwrap();
        (sent.status().as_u16(), sent.json().await.unwrap())
    }
}

#[tokio::test]
async fn regions_that_do_not_respond_delay_a_list_together_and_are_named() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let fixture = Fixture::start([dirs[0].path(), dirs[1].path()], HANGING, false).await;
    let (status, job) = fixture.region.submit("everywhere", &text(1), &[]).await;
    assert_eq!(status, 202, "{job}");
    let begun = Instant::now();
    loop {
        let requested = Instant::now();
        let (status, list) = fixture.list().await;
        let took = requested.elapsed();
        let missing = list["unavailable_regions"].as_array().cloned().unwrap_or_default();
        let found = list["data"].as_array().is_some_and(|jobs| !jobs.is_empty());
        // The gateway may have no route table yet, and learns from the reports which regions have a queue: the reports
        // of the hanging regions may arrive before the report of the region that responds.
        if status == 200 && missing.len() == HANGING && found {
            let missing: BTreeSet<_> = missing.iter().map(|id| id.as_str().unwrap().to_owned()).collect();
            assert_eq!(missing, fixture.hanging);
            assert_eq!(list["data"][0]["id"], job["id"], "{list}");
            assert!(took < Duration::from_secs(20), "{took:?}");
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{status} {list}");
    }
    drop(fixture.stop);
    fixture.region.stop().await;
}

#[tokio::test]
async fn the_memory_of_a_page_is_reserved_before_the_page_is_received() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let fixture = Fixture::start([dirs[0].path(), dirs[1].path()], 1, true).await;
    let begun = Instant::now();
    while fixture.list().await.1["unavailable_regions"] == Value::Null {
        assert!(begun.elapsed() < Duration::from_secs(60), "the other region does not report its queue");
    }
    // An upload that is under way leaves less memory than the page needs.
    let upload = unfinished_upload(&fixture.url, MAX_BODY_BYTES - PAGE_BYTES / 2).await;
    let begun = Instant::now();
    loop {
        let (status, problem) = fixture.list().await;
        if status != 200 {
            assert_eq!(problem["error"]["code"], "overloaded", "{problem}");
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(9), "the page is not within the limit of memory");
    }
    drop((upload, fixture.stop));
    fixture.region.stop().await;
}
