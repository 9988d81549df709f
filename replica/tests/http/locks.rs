//! Panics in the holder of each lock that a replica takes while it serves.

use crate::served::TestReplica;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use supervision::failpoint::trial::{Subject, each_lock};

/// Time after which a missing response is a failure.
const TIMEOUT: Duration = Duration::from_secs(5);

#[test]
fn a_panic_under_any_lock_fails_one_request_or_the_process() {
    const NAME: &str = "locks::a_panic_under_any_lock_fails_one_request_or_the_process";
    each_lock(NAME, 5, |case| {
        let replica = TestReplica::start("");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(case.run(&replica));
    });
}

impl Subject for TestReplica {
    const PROBES: &'static [&'static str] = &["/health"];
    /// The request that panics, and another one in the same batch.
    const FAILED_MAX: usize = 2;

    async fn drive(&self) -> usize {
        let embed = json!({"model": "small", "input": ["w5 w6", "w7"]}).to_string();
        let rerank = json!({"query": "w5", "texts": ["w6", "w7 w8"]}).to_string();
        let cases = [
            ("POST", "/v1/embeddings", embed, 200),
            ("POST", "/v1/embeddings", "{".to_owned(), 400),
            ("POST", "/rerank", rerank, 200),
            ("POST", "/tokenize", json!({"inputs": "w5"}).to_string(), 200),
            ("GET", "/status", String::new(), 200),
            ("GET", "/metrics", String::new(), 200),
        ];
        let post_ok = |(method, path, body, status): (&str, &str, String, u16)| {
            request(self, method, path, &body).is_none_or(|(found, _)| found != status)
        };
        cases.into_iter().map(post_ok).map(usize::from).sum()
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        request(self, "GET", path, "").unwrap_or_default()
    }
}

/// Returns status and body, if there is a response.
fn request(replica: &TestReplica, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(replica.address).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).ok()?;
    let mut response = Vec::new();
    // The connection may be reset or silent; the bytes received so far count.
    let _ = stream.read_to_end(&mut response);
    let response = String::from_utf8_lossy(&response).into_owned();
    let status = response.split(' ').nth(1)?.parse().ok()?;
    Some((status, response))
}
