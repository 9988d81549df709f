//! Requests about files and batches: repetitions with an idempotency key, pages of lists, and the limit of tokens.

use super::batches::{Client, EmbeddingReplica, batch_of, file_of};
use super::jobs::{REGION, Region, gateway, gateway_in, jobs_config};
use replica_api::limits::MAX_BODY_BYTES;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};

async fn create_with(client: &Client, body: &Value, key: &str) -> (u16, Value) {
    client.send_with("/v1/batches", body, &[("idempotency-key", key)]).await
}

fn code(problem: &Value) -> &str {
    problem["error"]["code"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn repeated_uploads_and_batches_with_a_key_are_one_also_after_a_restart() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let config = jobs_config(dirs[0].path(), "");
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(config.clone()), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    // Until the region has reported.
    client.upload("{}").await;
    let upload = async |client: &Client, content: &str, key: &str| {
        client.upload_as("KEY", content, &[("idempotency-key", key)]).await
    };
    let (status, file) = upload(&client, &file_of(0..3), "night").await;
    assert_eq!(status, 200, "{file}");
    assert_eq!(upload(&client, &file_of(0..3), "night").await, (200, file.clone()));
    let (status, problem) = upload(&client, &file_of(0..4), "night").await;
    assert_eq!((status, code(&problem)), (422, "idempotency_conflict"), "{problem}");
    assert!(
        problem["error"]["message"].as_str().unwrap().contains(file["id"].as_str().unwrap()),
        "{problem}"
    );
    let stricter = [("idempotency-key", "night"), ("x-meridian-residency", "us")];
    let (status, problem) = client.upload_as("KEY", &file_of(0..3), &stricter).await;
    assert_eq!(
        (status, code(&problem)),
        (422, "idempotency_conflict"),
        "the file has another policy: {problem}"
    );
    // The key is checked before the file.
    let (status, problem) = upload(&client, "", &"x".repeat(256)).await;
    assert_eq!((status, code(&problem)), (400, "invalid_header"), "{problem}");

    let body = |window: &str| batch_of(&file, window);
    // The key of the upload is another one than that of the batch.
    let (status, batch) = create_with(&client, &body("24h"), "night").await;
    assert_eq!(status, 200, "{batch}");
    let (status, again) = create_with(&client, &body("24h"), "night").await;
    assert_eq!((status, &again["id"]), (200, &batch["id"]));
    let (status, problem) = create_with(&client, &body("23h"), "night").await;
    assert_eq!((status, code(&problem)), (422, "idempotency_conflict"), "{problem}");
    let batch = client.wait(&batch, &["completed"]).await;
    assert_eq!(client.get("/v1/batches").await["data"].as_array().unwrap().len(), 1);

    drop(stop);
    let region = region.restart(&config, vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[2].path(), &[(REGION, &region)], &stop).await);
    client.upload("{}").await;
    assert_eq!(upload(&client, &file_of(0..3), "night").await, (200, file.clone()));
    // The batch is found after its input was deleted, and the key of the file is forgotten with it.
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    assert_eq!(client.send("DELETE", &path, "KEY", &Value::Null).await.0, 200);
    let (status, again) = create_with(&client, &body("24h"), "night").await;
    assert_eq!((status, &again), (200, &batch));
    let (status, other) = upload(&client, &file_of(0..4), "night").await;
    assert_eq!(status, 200, "{other}");
    assert_ne!(other["id"], file["id"]);
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_page_that_would_be_too_long_has_fewer_rows_and_long_pages_have_the_memory_of_bodies() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let memory = format!("[bodies]\nbytes_per_tenant_max = {MAX_BODY_BYTES}\n");
    let url = gateway_in(REGION, &memory, dirs[1].path(), &[(REGION, &region)], &stop).await;
    let client = Client::new(url.clone());
    let file = client.upload(&file_of(0..1)).await;
    // The longest metadata of a batch: six bytes for each character. A hundred of them are more than 4 MiB.
    let pairs = (0..16).map(|number| (format!("{number}"), json!("\u{1}".repeat(512))));
    let metadata = Value::Object(pairs.collect());
    assert!(100 * metadata.to_string().len() > 4 << 20);
    let mut body = batch_of(&file, "24h");
    body["metadata"] = metadata;
    let mut created = BTreeSet::new();
    for _ in 0..100 {
        let (status, batch) = client.send("POST", "/v1/batches", "KEY", &body).await;
        assert_eq!(status, 200, "{batch}");
        created.insert(batch["id"].as_str().unwrap().to_owned());
    }
    let (mut listed, mut pages, mut after) = (Vec::new(), 0, String::new());
    loop {
        let page = client.get(&format!("/v1/batches?limit=100{after}")).await;
        assert_eq!(page["unavailable_regions"], Value::Null, "the region is available");
        pages += 1;
        listed.extend(
            page["data"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()),
        );
        if page["has_more"] == false {
            break;
        }
        after = format!("&after={}", page["last_id"].as_str().unwrap());
    }
    assert_eq!((pages, listed.len()), (2, 100), "each once");
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), created);

    // An upload that is under way leaves less memory than the page and its rows need.
    let upload = unfinished_upload(&url, MAX_BODY_BYTES - (6 << 20)).await;
    let list = async || client.send("GET", "/v1/batches?limit=100", "KEY", &Value::Null).await;
    let begun = Instant::now();
    let problem = loop {
        let (status, body) = list().await;
        if status != 200 {
            break body;
        }
        assert!(begun.elapsed() < Duration::from_secs(9), "a page is not within the limit of memory");
    };
    assert!(problem["error"]["message"].as_str().unwrap().contains("bytes_per_tenant_max"), "{problem}");
    drop(upload);
    while list().await.0 != 200 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the memory of the upload is released");
    }
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn the_tokens_of_the_unfinished_batches_of_a_tenant_are_limited() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    // A line of `file_of` has seven tokens.
    let config = jobs_config(dirs[0].path(), "batch_tokens_per_tenant = 100");
    let (_, at) = EmbeddingReplica::start(0).await;
    let region = Region::start(Some(config), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let file = client.upload(&file_of(0..10)).await;
    let first = client.create(&file, "24h").await;
    let body = batch_of(&file, "24h");
    let (status, problem) = client.send("POST", "/v1/batches", "KEY", &body).await;
    assert_eq!((status, code(&problem)), (429, "too_many_jobs"), "{problem}");
    let message = problem["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("some 140 tokens with this one, and the limit is 100") && !message.contains("split"),
        "{message}"
    );
    let large = client.upload(&file_of(0..20)).await;
    let body = batch_of(&large, "24h");
    let (_, problem) = client.send("POST", "/v1/batches", "KEY", &body).await;
    assert!(problem["error"]["message"].as_str().unwrap().contains("split its file"), "{problem}");
    let cancel = format!("/v1/batches/{}/cancel", first["id"].as_str().unwrap());
    assert_eq!(client.send("POST", &cancel, "KEY", &Value::Null).await.0, 200);
    client.create(&file, "24h").await;
    drop(stop);
    region.stop().await;
}

/// Sends a file of this many bytes except its last one. The gateway holds it while the connection is open.
pub(crate) async fn unfinished_upload(url: &str, bytes: usize) -> TcpStream {
    let head = "--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    let mut connection = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    let request = format!(
        "POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer KEY\r\ncontent-type: multipart/form-data; boundary=x\r\n\
         content-length: {}\r\n\r\n{head}",
        head.len() + bytes
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    connection.write_all(&vec![b'\n'; bytes - 1]).await.unwrap();
    connection
}
