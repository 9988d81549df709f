//! Files and batches: a gateway, a region with a queue, and a replica that computes a vector from each text.

use super::jobs::{EUROPE, REGION, Region, gateway, gateway_in, jobs_config};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Replica of embeddings: the vector of a text is its length and its sum of bytes.
pub(crate) struct EmbeddingReplica {
    /// Requests that may be computed.
    permits: Semaphore,
    /// Requests, and inputs that were computed.
    requests: AtomicUsize,
    inputs: AtomicUsize,
    /// Whether every second request is rejected for lack of capacity.
    is_crowded: AtomicBool,
}

impl EmbeddingReplica {
    pub(crate) async fn start(permits: usize) -> (Arc<EmbeddingReplica>, SocketAddr) {
        let (requests, inputs) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (permits, is_crowded) = (Semaphore::new(permits), AtomicBool::new(false));
        let replica = Arc::new(EmbeddingReplica { permits, requests, inputs, is_crowded });
        let status = json!({"version": 1, "names": ["m", "m-eu"], "model": "m", "state": "ready", "pending_tokens": 0,
            "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 1000.0});
        let router = axum::Router::new()
            .route("/status", axum::routing::get(move || async move { Json(status) }))
            .route("/v1/embeddings", axum::routing::post(embed))
            .with_state(replica.clone());
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(axum::serve(socket, router).into_future());
        (replica, address)
    }
}

fn vector(text: &str) -> Value {
    json!([text.len(), text.bytes().map(u64::from).sum::<u64>()])
}

async fn embed(State(replica): State<Arc<EmbeddingReplica>>, body: String) -> Response {
    replica.permits.acquire().await.unwrap().forget();
    let number = replica.requests.fetch_add(1, Ordering::SeqCst);
    if number % 2 == 1 && replica.is_crowded.load(Ordering::SeqCst) {
        let error =
            json!({"error": {"message": "The queue is full.", "type": "server_error", "code": "overloaded"}});
        let headers = [("x-meridian-error", "overloaded"), ("x-meridian-retry-after-ms", "1")];
        return (StatusCode::TOO_MANY_REQUESTS, headers, Json(error)).into_response();
    }
    let body: Value = serde_json::from_str(&body).unwrap();
    let inputs = match &body["input"] {
        Value::Array(inputs) => inputs.clone(),
        one => vec![one.clone()],
    };
    let texts: Vec<&str> = inputs.iter().map(|input| input.as_str().unwrap()).collect();
    if texts.iter().any(|text| text.contains("too long")) {
        let error = json!({"error": {"message": "The input has 9000 tokens.", "type": "invalid_request_error",
            "code": "input_too_long", "param": "input"}});
        return (StatusCode::BAD_REQUEST, [("x-meridian-error", "input_too_long")], Json(error))
            .into_response();
    }
    replica.inputs.fetch_add(texts.len(), Ordering::SeqCst);
    let row = |(index, text): (usize, &&str)| json!({"object": "embedding", "index": index, "embedding": vector(text)});
    let data: Vec<_> = texts.iter().enumerate().map(row).collect();
    let usage = json!({"prompt_tokens": texts.len(), "total_tokens": texts.len()});
    let response = Json(json!({"object": "list", "data": data, "model": body["model"], "usage": usage}));
    ([("x-meridian-tokens", texts.len().to_string())], response).into_response()
}

/// Client of a gateway.
pub(crate) struct Client {
    pub(crate) url: String,
    http: reqwest::Client,
}

/// Returns the request for a batch of embeddings.
pub(crate) fn batch_of(file: &Value, window: &str) -> Value {
    json!({"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": window})
}

impl Client {
    pub(crate) fn new(url: String) -> Client {
        let http = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        Client { url, http: http.build().unwrap() }
    }

    pub(crate) async fn send(&self, method: &str, path: &str, key: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.text(method, path, key, body).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    pub(crate) async fn text(&self, method: &str, path: &str, key: &str, body: &Value) -> (u16, String) {
        let request =
            self.http.request(method.parse().unwrap(), format!("{}{path}", self.url)).bearer_auth(key);
        let request = if body.is_null() { request } else { request.body(body.to_string()) };
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    /// Sends a `POST` with headers.
    pub(crate) async fn send_with(&self, path: &str, body: &Value, headers: &[(&str, &str)]) -> (u16, Value) {
        let mut request = self.http.post(format!("{}{path}", self.url)).bearer_auth("KEY");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.body(body.to_string()).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Returns the status, the header `location` and the body of a response.
    pub(crate) async fn located(&self, path: &str) -> (u16, String, String) {
        let response = self.http.get(format!("{}{path}", self.url)).bearer_auth("KEY").send().await.unwrap();
        let location = response.headers().get("location").map(|value| value.to_str().unwrap().to_owned());
        (response.status().as_u16(), location.unwrap_or_default(), response.text().await.unwrap())
    }

    /// Reads a list in the regions that a residency policy allows.
    pub(crate) async fn list_in(&self, path: &str, residency: &str) -> Value {
        let request = self.http.get(format!("{}{path}", self.url)).bearer_auth("KEY");
        let response = request.header("x-meridian-residency", residency).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.json().await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let (status, body) = self.send("GET", path, "KEY", &Value::Null).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    pub(crate) async fn upload_as(&self, key: &str, content: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let form = format!(
            "--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: \
             form-data; name=\"file\"; filename=\"größe.jsonl\"\r\ncontent-type: application/jsonl\r\n\r\n{content}\r\n--x--\r\n"
        );
        self.upload_form(key, form, headers).await
    }

    async fn upload_form(&self, key: &str, form: String, headers: &[(&str, &str)]) -> (u16, Value) {
        let mut request = self.http.post(format!("{}/v1/files", self.url)).bearer_auth(key);
        request = request.header("content-type", "multipart/form-data; boundary=x");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.body(form).send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// Uploads a file, when the region has reported that it has a queue.
    pub(crate) async fn upload(&self, content: &str) -> Value {
        let begun = Instant::now();
        loop {
            let (status, file) = self.upload_as("KEY", content, &[]).await;
            if status == 200 {
                return file;
            }
            assert!(status == 503 && begun.elapsed() < PATIENCE, "{status}: {file}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn create(&self, file: &Value, window: &str) -> Value {
        let mut body = batch_of(file, window);
        body["metadata"] = json!({"name": "night"});
        let (status, batch) = self.send("POST", "/v1/batches", "KEY", &body).await;
        assert_eq!(status, 200, "{batch}");
        batch
    }

    /// Waits until a batch has one of these statuses.
    pub(crate) async fn wait(&self, batch: &Value, statuses: &[&str]) -> Value {
        let begun = Instant::now();
        loop {
            let batch = self.get(&format!("/v1/batches/{}", batch["id"].as_str().unwrap())).await;
            if statuses.contains(&batch["status"].as_str().unwrap()) {
                return batch;
            }
            assert!(begun.elapsed() < PATIENCE, "the batch does not end: {batch}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn lines(&self, file: &Value) -> Vec<Value> {
        let path = format!("/v1/files/{}", file.as_str().unwrap());
        let (status, text) = self.text("GET", &format!("{path}/content"), "KEY", &Value::Null).await;
        assert_eq!(status, 200, "{text}");
        assert_eq!(self.get(&path).await["bytes"], json!(text.len()));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub(crate) fn line(id: &str, body: &Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": body}).to_string()
}

fn embedding(number: usize) -> String {
    line(&format!("r{number}"), &json!({"model": "m", "input": format!("text {number}")}))
}

pub(crate) fn file_of(numbers: std::ops::Range<usize>) -> String {
    numbers.map(|number| embedding(number) + "\n").collect()
}

/// Checks that lines are the responses to these texts, in order.
fn check(lines: &[Value], numbers: impl Iterator<Item = usize>) {
    let numbers: Vec<_> = numbers.collect();
    assert_eq!(lines.len(), numbers.len());
    for (line, number) in lines.iter().zip(numbers) {
        assert_eq!(line["custom_id"], json!(format!("r{number}")));
        let response = &line["response"];
        assert_eq!((&response["status_code"], &line["error"]), (&json!(200), &Value::Null), "{line}");
        assert_eq!(response["body"]["data"][0]["embedding"], vector(&format!("text {number}")), "{line}");
    }
}

#[tokio::test]
async fn lines_that_were_computed_are_kept_when_others_wait_for_capacity() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    // Lines with different parameters are requests of their own.
    let lines = (0..64).map(|number| {
        let body = json!({"model": "m", "input": format!("text {number}"), "user": format!("{number}")});
        line(&format!("r{number}"), &body) + "\n"
    });
    let file = client.upload(&lines.collect::<String>()).await;
    replica.is_crowded.store(true, Ordering::SeqCst);
    let batch = client.create(&file, "24h").await;
    let batch = client.wait(&batch, &["completed"]).await;
    assert_eq!(batch["request_counts"], json!({"total": 64, "completed": 64, "failed": 0}));
    check(&client.lines(&batch["output_file_id"]).await, 0..64);
    let requests = replica.requests.load(Ordering::SeqCst);
    assert!(requests > 64, "{requests} requests: some were rejected");
    assert_eq!(replica.inputs.load(Ordering::SeqCst), 64, "each line is computed once");
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn bodies_and_names_that_would_be_stored_are_limited() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let body = json!({"model": "m".repeat(1 << 20), "input": "x"});
    let file = client.upload(&line("a", &body)).await;
    let request = batch_of(&file, "24h");
    let (status, batch) = client.send("POST", "/v1/batches", "KEY", &request).await;
    assert_eq!((status, &batch["status"]), (200, &json!("failed")), "{batch}");
    assert!(batch.to_string().len() < 2000, "the model is not repeated");
    let mut long = request.clone();
    long["unknown"] = json!(vec![0; 40_000]);
    let (status, error) = client.send("POST", "/v1/batches", "KEY", &long).await;
    assert_eq!((status, &error["error"]["code"]), (413, &json!("body_too_large")), "{error}");
    long = request.clone();
    long["completion_window"] = json!(format!("{}24h", "0".repeat(1000)));
    let (status, error) = client.send("POST", "/v1/batches", "KEY", &long).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("completion_window")), "{error}");
    // A batch is in the region of its file, so its own residency can only allow or forbid it.
    let sent =
        client.http.post(format!("{}/v1/batches", client.url)).bearer_auth("KEY").body(request.to_string());
    let sent = sent.header("x-meridian-residency", "eu").send().await.unwrap();
    assert_eq!(sent.status(), 403);

    // A body without a boundary is rejected before it is in memory.
    let connection = tokio::net::TcpStream::connect(client.url.trim_start_matches("http://")).await.unwrap();
    let (mut reader, mut writer) = connection.into_split();
    let head = "POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer KEY\r\ntransfer-encoding: chunked\r\n\
                content-type: multipart/form-data; boundary=x\r\n\r\n";
    writer.write_all(head.as_bytes()).await.unwrap();
    let endless = async {
        let chunk = format!("2710\r\n{}\r\n", "x".repeat(10_000));
        while writer.write_all(chunk.as_bytes()).await.is_ok() {}
        std::future::pending::<()>().await
    };
    let mut response = [0; 12];
    tokio::select! {
        read = reader.read_exact(&mut response) => drop(read.unwrap()),
        () = endless => {}
        () = tokio::time::sleep(PATIENCE) => panic!("the endless form is still read"),
    }
    assert_eq!(&response, b"HTTP/1.1 400");
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_file_is_computed_in_order_and_only_its_bad_lines_fail() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let body = |input: &str| json!({"model": "m", "input": input});
    let bad = [
        (10, "{\"custom_id\": ".to_owned(), "invalid_json"),
        (20, line("get", &body("x")).replace("POST", "GET"), "invalid_method"),
        (30, line("url", &body("x")).replace("/v1/embeddings", "/v1/chat/completions"), "invalid_url"),
        (40, line("rerank", &body("x")).replace("/v1/embeddings", "/v1/rerank"), "invalid_url"),
        (50, line("model", &json!({"model": "unknown", "input": "x"})), "model_not_found"),
        (60, line("empty", &body("")), "empty_input"),
        (70, line("r1", &body("again")), "duplicate_custom_id"),
        (400, line("long", &body("this is too long")), "input_too_long"),
    ];
    let mut lines: Vec<String> = (0..600).map(embedding).collect();
    for (at, line, _) in &bad {
        lines[*at] = line.clone();
    }
    let content = lines.join("\n");
    let file = client.upload(&content).await;
    assert_eq!((&file["purpose"], &file["filename"]), (&json!("batch"), &json!("größe.jsonl")));
    assert_eq!(file["bytes"], json!(content.len()));
    assert!(file["id"].as_str().unwrap().ends_with(".aws.us-east-1"), "{file}");
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    assert_eq!(client.get(&path).await, file);
    let (_, stored) = client.text("GET", &format!("{path}/content"), "KEY", &Value::Null).await;
    assert_eq!(stored, content, "the content is that of the upload");

    let batch = client.create(&file, "24h").await;
    assert_eq!(batch["request_counts"]["total"], 600);
    assert_eq!((&batch["metadata"]["name"], &batch["object"]), (&json!("night"), &json!("batch")));
    let batch = client.wait(&batch, &["completed"]).await;
    assert_eq!(batch["request_counts"], json!({"total": 600, "completed": 592, "failed": 8}), "{batch}");
    let output = client.lines(&batch["output_file_id"]).await;
    check(&output, (0..600).filter(|number| bad.iter().all(|(at, ..)| at != number)));
    let errors = client.lines(&batch["error_file_id"]).await;
    assert_eq!(errors.len(), bad.len());
    for (error, (at, _, code)) in errors.iter().zip(&bad) {
        let found =
            if error["error"].is_null() { &error["response"]["body"]["error"] } else { &error["error"] };
        assert_eq!(found["code"], *code, "{error}");
        if *at == 10 {
            assert_eq!((&error["custom_id"], &error["error"]["line"]), (&Value::Null, &json!(11)));
        }
    }
    assert_eq!(errors[7]["response"]["status_code"], 400);
    let requests = replica.requests.load(Ordering::SeqCst);
    assert!(
        requests < 300,
        "{requests} requests: lines are sent together, but for those of one rejected request"
    );
    assert_eq!(replica.inputs.load(Ordering::SeqCst), 592, "each line is computed once");

    // Lists, and the jobs of a tenant without those of its batches.
    let files = client.get("/v1/files").await;
    let purposes: Vec<_> =
        files["data"].as_array().unwrap().iter().map(|file| file["purpose"].clone()).collect();
    assert_eq!(purposes, [json!("batch_output"), json!("batch_output"), json!("batch")]);
    let second =
        client.get(&format!("/v1/files?limit=2&after={}", files["first_id"].as_str().unwrap())).await;
    assert_eq!((&second["data"][1], &second["has_more"]), (&files["data"][2], &json!(false)));
    assert_eq!(client.get("/v1/files?purpose=batch").await["data"], json!([file]));
    let batches = client.get("/v1/batches?limit=1").await;
    assert_eq!((&batches["data"][0], &batches["has_more"]), (&batch, &json!(false)));
    assert_eq!(client.get("/v1/async").await["data"], json!([]));
    // Another tenant sees nothing.
    let (status, problem) = client.send("GET", "/v1/batches", "EUROPEAN", &Value::Null).await;
    assert_eq!((status, &problem["data"]), (200, &json!([])));

    // Deletions.
    for id in [&batch["output_file_id"], &file["id"]] {
        let path = format!("/v1/files/{}", id.as_str().unwrap());
        let (status, deleted) = client.send("DELETE", &path, "KEY", &Value::Null).await;
        assert_eq!((status, &deleted["deleted"]), (200, &json!(true)), "{deleted}");
        let (status, problem) = client.send("GET", &format!("{path}/content"), "KEY", &Value::Null).await;
        assert_eq!((status, &problem["error"]["code"]), (404, &json!("file_not_found")), "{problem}");
    }
    assert_eq!(client.lines(&batch["error_file_id"]).await.len(), 8, "the other file is kept");
    let cancel = format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap());
    let (status, problem) = client.send("POST", &cancel, "KEY", &Value::Null).await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("batch_finished")), "{problem}");
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_batch_continues_after_a_restart_with_each_line_once() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let config = jobs_config(dirs[0].path(), "");
    let (replica, at) = EmbeddingReplica::start(2).await;
    let region = Region::start(Some(config.clone()), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let file = client.upload(&file_of(0..2000)).await;
    let batch = client.create(&file, "24h").await;
    let begun = Instant::now();
    // Two chunks are computed, and the third is in flight.
    while client.wait(&batch, &["in_progress"]).await["request_counts"]["completed"] != 512 {
        assert!(begun.elapsed() < PATIENCE, "{} requests", replica.requests.load(Ordering::SeqCst));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(stop);
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = region.restart(&config, vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[2].path(), &[(REGION, &region)], &stop).await);
    // Until the gateway has a report of the region.
    client.upload("{}").await;
    let batch = client.wait(&batch, &["completed"]).await;
    assert_eq!(batch["request_counts"], json!({"total": 2000, "completed": 2000, "failed": 0}));
    check(&client.lines(&batch["output_file_id"]).await, 0..2000);
    assert_eq!(batch["error_file_id"], Value::Null);
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn lines_that_are_not_computed_are_in_the_error_file() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = EmbeddingReplica::start(1).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let file = client.upload(&file_of(0..600)).await;
    // One of three chunks is computed.
    let batch = client.create(&file, "24h").await;
    let begun = Instant::now();
    while client.wait(&batch, &["in_progress"]).await["request_counts"]["completed"] != 256 {
        assert!(begun.elapsed() < PATIENCE, "no chunk is computed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    let (status, problem) = client.send("DELETE", &path, "KEY", &Value::Null).await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("file_in_use")), "{problem}");
    let cancel = format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap());
    let (status, cancelled) = client.send("POST", &cancel, "KEY", &Value::Null).await;
    assert_eq!(status, 200, "{cancelled}");
    assert!(["cancelling", "cancelled"].contains(&cancelled["status"].as_str().unwrap()), "{cancelled}");
    let batch = client.wait(&batch, &["cancelled"]).await;
    assert_eq!(batch["request_counts"], json!({"total": 600, "completed": 256, "failed": 344}));
    check(&client.lines(&batch["output_file_id"]).await, 0..256);
    let errors = client.lines(&batch["error_file_id"]).await;
    let codes: BTreeSet<_> = errors.iter().map(|error| error["error"]["code"].to_string()).collect();
    assert_eq!((errors.len(), codes), (344, ["\"batch_cancelled\"".to_owned()].into()));
    assert_eq!(errors[0]["custom_id"], "r256");

    // The completion window passes while the replica computes nothing.
    let batch = client.create(&file, "1s").await;
    let batch = client.wait(&batch, &["expired"]).await;
    assert_eq!(batch["request_counts"], json!({"total": 600, "completed": 0, "failed": 600}));
    assert_eq!(batch["output_file_id"], Value::Null);
    let errors = client.lines(&batch["error_file_id"]).await;
    assert_eq!((errors.len(), &errors[599]["error"]["code"]), (600, &json!("batch_expired")));

    // A file without a line that can be computed.
    let file = client.upload("{}\nno JSON").await;
    let batch = client.create(&file, "24h").await;
    assert_eq!(batch["status"], "failed", "{batch}");
    let lines: Vec<_> =
        batch["errors"]["data"].as_array().unwrap().iter().map(|error| &error["line"]).collect();
    assert_eq!(lines, [&json!(1), &json!(2)]);
    drop(stop);
    region.stop().await;
}

#[tokio::test]
async fn a_file_is_stored_where_all_its_models_and_its_tenant_allow_it() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let europe = Region::start_in(EUROPE, Some(jobs_config(dirs[1].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[2].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await);
    let locked = line("locked", &json!({"model": "m-eu", "input": "x"}));
    let region = |file: &Value| file["id"].as_str().unwrap().split_once('.').unwrap().1.to_owned();
    let begun = Instant::now();
    // Until both regions have reported.
    while client.upload_as("KEY", &locked, &[]).await.0 != 200
        || region(&client.upload(&file_of(0..1)).await) != "aws.us-east-1"
    {
        assert!(begun.elapsed() < PATIENCE, "no region has a queue");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let file = client.upload(&format!("{}{locked}", file_of(0..1))).await;
    assert_eq!(region(&file), "aws.eu-central-1", "one line of a locked model");
    let batch = client.create(&file, "24h").await;
    assert_eq!(region(&batch), "aws.eu-central-1");
    let batch = client.wait(&batch, &["completed"]).await;
    // The output of a locked model is returned only through a gateway in its region.
    let dir = tempfile::tempdir().unwrap();
    let reader = Client::new(gateway_in(EUROPE, "", dir.path(), &[(EUROPE, &europe)], &stop).await);
    while reader.located("/v1/batches/batch_1.aws.eu-central-1").await.0 != 404 {
        assert!(begun.elapsed() < PATIENCE, "the region does not report to the second gateway");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let output = reader.lines(&batch["output_file_id"]).await;
    assert_eq!((&output[0]["custom_id"], &output[1]["custom_id"]), (&json!("r0"), &json!("locked")));
    let (status, of_tenant) = client.upload_as("EUROPEAN", &file_of(0..1), &[]).await;
    assert_eq!((status, region(&of_tenant)), (200, "aws.eu-central-1".to_owned()));
    let header = [("x-meridian-residency", "us")];
    let (status, problem) = client.upload_as("KEY", &locked, &header).await;
    assert_eq!((status, &problem["error"]["code"]), (403, &json!("region_not_permitted")), "{problem}");
    // A file in America, for a tenant that may read from Europe only.
    let (status, american) = client.upload_as("KEY", &file_of(0..1), &[("x-meridian-residency", "us")]).await;
    assert_eq!((status, region(&american)), (200, "aws.us-east-1".to_owned()));
    for (path, code, expected) in [
        (format!("/v1/files/{}/content", american["id"].as_str().unwrap()), "region_not_permitted", 403),
        (format!("/v1/files/{}", file["id"].as_str().unwrap()), "file_not_found", 404),
        ("/v1/files/file-1".to_owned(), "file_not_found", 404),
        ("/v1/batches/batch_1.aws.eu-central-1".to_owned(), "batch_not_found", 404),
    ] {
        let (status, problem) = client.send("GET", &path, "EUROPEAN", &Value::Null).await;
        assert_eq!((status, &problem["error"]["code"]), (expected, &json!(code)), "{path}: {problem}");
    }
    let files = client.get("/v1/files?limit=1").await;
    assert_eq!((&files["data"][0], &files["has_more"]), (&american, &json!(true)), "of both regions");
    let regions =
        |list: &Value| -> BTreeSet<String> { list["data"].as_array().unwrap().iter().map(region).collect() };
    for (residency, expected) in [("us", "aws.us-east-1"), ("eu", "aws.eu-central-1")] {
        let files = client.list_in("/v1/files", residency).await;
        assert_eq!(
            regions(&files),
            [expected.to_owned()].into(),
            "the policy of the request applies to lists"
        );
        let batches = client.list_in("/v1/batches", residency).await;
        assert_eq!(batches["data"].as_array().unwrap().len(), usize::from(residency == "eu"), "{batches}");
    }
    drop(stop);
    america.stop().await;
    europe.stop().await;
}

#[tokio::test]
async fn limits_and_mistakes_are_reported_with_the_field() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let limits = "file_bytes_max = 4000\nfile_bytes_per_tenant = 5000";
    let region = Region::start(Some(jobs_config(dirs[0].path(), limits)), Vec::new()).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let content = file_of(0..30);
    assert!((2500..4000).contains(&content.len()), "{}", content.len());
    let file = client.upload(&content).await;
    let (status, problem) = client.upload_as("KEY", &content, &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (429, &json!("too_many_files")), "{problem}");
    let (status, _) = client.upload_as("EUROPEAN", &file_of(0..1), &[]).await;
    assert_eq!(status, 503, "no region with a queue");
    let (status, problem) = client.upload_as("KEY", &file_of(0..60), &[]).await;
    assert_eq!((status, &problem["error"]["code"]), (413, &json!("body_too_large")), "{problem}");
    let form = |purpose: &str| {
        format!("--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\n{purpose}\r\n--x--\r\n")
    };
    for (form, code, param) in [
        (form("fine-tune"), "invalid_value", json!("purpose")),
        (form("batch"), "missing_field", json!("file")),
        ("--x\r\n".to_owned(), "invalid_value", Value::Null),
    ] {
        let (status, problem) = client.upload_form("KEY", form, &[]).await;
        assert_eq!((status, &problem["error"]["code"]), (400, &json!(code)), "{problem}");
        assert_eq!(problem["error"]["param"], param, "{problem}");
    }
    let (status, problem) = client.upload_as("KEY", "\n", &[]).await;
    assert_eq!((status, &problem["error"]["param"]), (400, &json!("file")), "{problem}");
    let valid = batch_of(&file, "24h");
    for (field, value) in [
        ("input_file_id", Value::Null),
        ("endpoint", Value::Null),
        ("endpoint", json!("/v1/completions")),
        ("completion_window", json!("a day")),
        ("completion_window", json!("999d")),
        ("metadata", json!([])),
    ] {
        let mut body = valid.clone();
        body[field] = value;
        let (status, problem) = client.send("POST", "/v1/batches", "KEY", &body).await;
        assert_eq!((status, &problem["error"]["param"]), (400, &json!(field)), "{problem}");
    }
    for (method, path) in
        [("GET", "/v1/files?limit=0"), ("GET", "/v1/batches?limit=101"), ("GET", "/v1/batches?after=x")]
    {
        let (status, problem) = client.send(method, path, "KEY", &Value::Null).await;
        assert_eq!((status, &problem["error"]["code"]), (400, &json!("invalid_value")), "{path}: {problem}");
    }
    let (status, _) = client.send("PUT", "/v1/files", "KEY", &Value::Null).await;
    assert_eq!(status, 405);
    drop(stop);
    region.stop().await;
}

/// A region in a process of its own, which [`a_region_that_is_killed_computes_each_line_once`] starts and kills. Without the
/// variables of that test it ends at once.
#[tokio::test]
async fn region_in_a_process() {
    let [Ok(dir), Ok(replica)] = ["MERIDIAN_TEST_DIR", "MERIDIAN_TEST_REPLICA"].map(std::env::var) else {
        return;
    };
    let config = jobs_config(std::path::Path::new(&dir), "attempts = 100");
    let region = Region::start(Some(config), vec![replica.parse().unwrap()]).await;
    println!("region at {}", region.url);
    std::future::pending::<()>().await;
}

/// Starts [`region_in_a_process`]; returns the process and the URL of the region.
async fn start_process(dir: &std::path::Path, replica: SocketAddr) -> (tokio::process::Child, String) {
    let mut process = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "batches::region_in_a_process", "--nocapture"])
        .env("MERIDIAN_TEST_DIR", dir)
        .env("MERIDIAN_TEST_REPLICA", replica.to_string())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let url = loop {
        let line = lines.next_line().await.unwrap().unwrap();
        if let Some((_, url)) = line.split_once("region at ") {
            break url.to_owned();
        }
    };
    // The pipe stays open for the rest of the output.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (process, url)
}

#[tokio::test]
async fn a_region_that_is_killed_computes_each_line_once() {
    const LINES: usize = 4000;
    const KILLS: u32 = 4;
    let dir = tempfile::tempdir().unwrap();
    let (replica, at) = EmbeddingReplica::start(0).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = async |method: &str, url: &str, path: &str, body: String| {
        let request = http.request(method.parse().unwrap(), format!("{url}{path}")).body(body);
        let request = request.header("x-meridian-tenant", "a").header("x-meridian-file-models", "m");
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.text().await.unwrap()
    };
    let parsed = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let (mut process, mut url) = start_process(dir.path(), at).await;
    let file = parsed(send("POST", &url, "/v1/files", file_of(0..LINES)).await);
    let body = batch_of(&file, "24h");
    let batch = parsed(send("POST", &url, "/v1/batches", body.to_string()).await);
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    let mut counted = 0;
    for kill in 0..KILLS {
        // Some chunks, and then any moment: the replica responds while the process is killed. After two attempts each line is
        // a request, so a chunk needs more of them.
        let begun = Instant::now();
        let mut polls = 0;
        while parsed(send("GET", &url, &path, String::new()).await)["request_counts"]["completed"] == counted
        {
            assert!(begun.elapsed() < PATIENCE, "no progress after {kill} kills");
            replica.permits.add_permits(if polls < 20 { 1 } else { 50 });
            polls += 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(Duration::from_millis(u64::from(7 * kill))).await;
        process.kill().await.unwrap();
        (process, url) = start_process(dir.path(), at).await;
        let now = parsed(send("GET", &url, &path, String::new()).await);
        let completed = now["request_counts"]["completed"].as_u64().unwrap();
        assert!(completed > counted, "progress is kept: {now}");
        counted = completed;
    }
    replica.permits.add_permits(LINES * 2);
    let begun = Instant::now();
    let batch = loop {
        let batch = parsed(send("GET", &url, &path, String::new()).await);
        if batch["status"] == "completed" {
            break batch;
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "{batch}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(batch["request_counts"], json!({"total": LINES, "completed": LINES, "failed": 0}));
    let content = format!("/v1/files/{}/content", batch["output_file_id"].as_str().unwrap());
    let output = send("GET", &url, &content, String::new()).await;
    let output: Vec<Value> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    check(&output, 0..LINES);
    process.kill().await.unwrap();
}

/// Runs where `MERIDIAN_OPENAI_PYTHON` names a Python with the package `openai`. `tests/clients` runs the same script with fewer
/// lines on a local fleet with a model.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stock_client_runs_a_backfill_of_fifty_thousand_lines() {
    let Ok(python) = std::env::var("MERIDIAN_OPENAI_PYTHON") else {
        return println!("skipped: set MERIDIAN_OPENAI_PYTHON");
    };
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(jobs_config(dirs[0].path(), "")), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    client.upload("{}").await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/openai_batch.py");
    let run = tokio::process::Command::new(python)
        .args([script, &client.url, "KEY", "m", "50000"])
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .await
        .unwrap();
    let output = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    println!("{output}{} requests to the replica", replica.requests.load(Ordering::SeqCst));
    assert!(run.status.success(), "{output}");
    drop(stop);
    region.stop().await;
}
