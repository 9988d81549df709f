//! Replicas that download their model at the start.

use std::net::TcpListener;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use hyper::Method;
use replica::cache::ModelCache;
use replica::{Config, ServeError};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::s3_server::{Access, BUCKET, Fault, S3Server};
use super::{WEIGHTS, served, sums};

/// Server with the small model.
struct Origin {
    server: S3Server,
    _bucket: TempDir,
    root: TempDir,
}

impl Origin {
    fn new() -> Origin {
        let (bucket, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let origin = Origin { server: S3Server::start(bucket.path(), Access::Public), _bucket: bucket, root };
        origin.put(|_| {});
        origin
    }

    /// Stores the model after a change of its `config.json`.
    fn put(&self, change: impl Fn(&mut Value)) {
        self.put_files(|path, content| {
            if path == "config.json" {
                let mut config = serde_json::from_slice(content).unwrap();
                change(&mut config);
                *content = config.to_string().into_bytes();
            }
        });
    }

    /// Stores the model after a change of its files.
    fn put_files(&self, mut change: impl FnMut(&str, &mut Vec<u8>)) {
        let folder = tempfile::tempdir().unwrap();
        served::write_model(folder.path());
        let files = ["config.json", "tokenizer.json", WEIGHTS].map(|path| {
            let mut content = std::fs::read(folder.path().join(path)).unwrap();
            change(path, &mut content);
            (path, content)
        });
        files.iter().for_each(|(path, content)| self.server.put(&format!("small/{path}"), content));
        self.server.put("small/SHA256SUMS", sums(&files).as_bytes());
    }

    fn start(&self) -> StartingReplica {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let text = format!(
            "listen = \"127.0.0.1:{port}\"\nnames = [\"small\"]\nmodel = \"{}/{BUCKET}/small/\"\ncache = {:?}\n",
            self.server.url(),
            self.root.path().to_str().unwrap()
        );
        StartingReplica::start(port, text.parse().unwrap())
    }
}

/// Replica that may not be ready.
struct StartingReplica {
    port: u16,
    ready: mpsc::Receiver<()>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl StartingReplica {
    fn start(port: u16, config: Config) -> StartingReplica {
        let (is_ready, ready) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread =
            thread::spawn(move || served::serve(config, stopped, move |_| is_ready.send(()).unwrap()));
        StartingReplica { port, ready, stop: Some(stop), thread: Some(thread) }
    }

    /// Returns status, a header and the body of a response; none while the replica does not listen.
    fn get(&self, path: &str) -> Option<served::Response> {
        use std::io::Write as _;
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let head = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        Some(served::Response::read(stream))
    }

    /// Waits for a status with this property.
    fn status_with(&self, is_reached: impl Fn(&Value) -> bool) -> Value {
        loop {
            if let Some(status) = self.get("/status").map(|response| response.json()).filter(&is_reached) {
                return status;
            }
            thread::yield_now();
        }
    }

    fn stop(mut self) -> Result<(), ServeError> {
        self.stop.take().unwrap().send(()).ok();
        self.thread.take().unwrap().join().unwrap()
    }
}

fn reason(status: &Value) -> Option<&str> {
    status["failure"]["reason"].as_str()
}

#[test]
fn a_replica_without_its_model_downloads_it_and_reports_the_progress() {
    let origin = Origin::new();
    origin.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(10_000); 16]);
    let replica = origin.start();
    let status = replica.status_with(|status| status["download"]["done_bytes"].as_u64() > Some(9_999));
    assert_eq!(
        (status["state"].as_str(), status["download"]["phase"].as_str()),
        (Some("starting"), Some("downloading"))
    );
    assert!(status["download"]["total_bytes"].as_u64() > Some(10_000), "{status}");
    let health = replica.get("/health").unwrap();
    assert_eq!(health.status, 503);
    assert!(health.text().contains("downloading http://127.0.0.1"), "{}", health.text());
    origin.server.release();
    replica.ready.recv().unwrap();
    let status = replica.status_with(|_| true);
    assert_eq!(status["state"].as_str(), Some("ready"));
    assert!(status.get("download").is_none() && status.get("failure").is_none(), "{status}");
    assert_eq!(replica.get("/health").unwrap().status, 200);
    replica.stop().unwrap();
}

#[test]
fn a_replica_that_is_denied_its_model_is_ready_once_the_policy_is_corrected() {
    let origin = Origin::new();
    origin.server.fail(Method::GET, "SHA256SUMS", &[Fault::Status(403, ""); 64]);
    let replica = origin.start();
    let status = replica.status_with(|status| reason(status).is_some());
    assert_eq!((reason(&status), status["state"].as_str()), (Some("model_forbidden"), Some("starting")));
    let health = replica.get("/health").unwrap();
    assert_eq!((health.status, health.header("x-meridian-error")), (503, Some("not_ready")));
    assert!(health.text().contains("denies access to http://127.0.0.1"), "{}", health.text());
    let metrics = String::from_utf8(replica.get("/metrics").unwrap().body).unwrap();
    assert!(
        metrics.contains("meridian_replica_start_failures_total{reason=\"model_forbidden\"} "),
        "{metrics}"
    );
    origin.server.recover();
    replica.ready.recv().unwrap();
    let status = replica.status_with(|_| true);
    assert_eq!((reason(&status), status["state"].as_str()), (None, Some("ready")));
    replica.stop().unwrap();
}

#[test]
fn a_model_that_is_in_the_cache_after_a_failed_attempt_is_not_requested_again() {
    let origin = Origin::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let source = format!("{}/{BUCKET}/small/", origin.server.url()).parse().unwrap();
    let origins = super::origins(buckets::BucketVariables::default(), None);
    ModelCache::with_origins(elsewhere.path(), origins).pull(&source, &mut ()).unwrap();
    origin.server.fail(Method::GET, "SHA256SUMS", &[Fault::Status(403, ""); 64]);
    let replica = origin.start();
    let status = replica.status_with(|status| reason(status).is_some());
    assert_eq!(reason(&status), Some("model_forbidden"));
    // Another process with credentials has pulled the model.
    std::fs::rename(elsewhere.path().join("models"), origin.root.path().join("models")).unwrap();
    replica.ready.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    replica.stop().unwrap();
}

#[test]
fn a_replica_of_an_unsupported_family_is_ready_once_the_model_is_replaced() {
    let origin = Origin::new();
    origin.put(|config| config["model_type"] = "t5".into());
    let replica = origin.start();
    let status = replica.status_with(|status| reason(status).is_some());
    assert_eq!(reason(&status), Some("unknown_family"));
    assert!(
        status["failure"]["message"].as_str().unwrap().contains("`model_type` is t5; supported are bert")
    );
    origin.put(|_| {});
    replica.ready.recv().unwrap();
    replica.stop().unwrap();
}

/// The digests of the files are right.
#[test]
fn a_replica_whose_downloaded_model_is_invalid_is_ready_once_the_model_is_replaced() {
    // Length of the header of the weights, which is larger than the file.
    let length = u64::MAX.to_le_bytes().to_vec();
    let invalid_files = [
        ("config.json", b"{".to_vec(), "config.json: EOF while parsing"),
        ("tokenizer.json", b"{".to_vec(), "tokenizer.json: EOF while parsing"),
        (WEIGHTS, length, "the file is truncated or invalid; save the model again"),
    ];
    for (invalid, content, text) in invalid_files {
        let origin = Origin::new();
        origin.put_files(|path, file| {
            if path == invalid {
                file.clone_from(&content);
            }
        });
        let replica = origin.start();
        let status = replica.status_with(|status| reason(status).is_some());
        assert_eq!((reason(&status), status["state"].as_str()), (Some("model_corrupt"), Some("starting")));
        let message = status["failure"]["message"].as_str().unwrap();
        assert!(message.contains("a file of its origin is invalid") && message.contains(text), "{message}");
        // The list of the files is requested once more, and the files are not.
        let lists = || origin.server.requests(&Method::GET, "SHA256SUMS").len();
        let (lists_before, weights) = (lists(), origin.server.requests(&Method::GET, WEIGHTS).len());
        while lists() < lists_before + 1 {
            thread::yield_now();
        }
        assert_eq!(origin.server.requests(&Method::GET, WEIGHTS).len(), weights, "{invalid}");
        assert_eq!(reason(&replica.status_with(|_| true)), Some("model_corrupt"));
        // A replica that finds the invalid model in the cache requests the origin as well.
        assert!(replica.stop().is_ok());
        let replica = origin.start();
        let is_verified = |status: &Value| {
            let message = status["failure"]["message"].as_str();
            message.is_some_and(|message| message.contains("a file of its origin is invalid"))
        };
        assert_eq!(reason(&replica.status_with(is_verified)), Some("model_corrupt"));
        assert_eq!(origin.server.requests(&Method::GET, WEIGHTS).len(), weights, "{invalid}");
        origin.put(|_| {});
        replica.ready.recv().unwrap();
        let status = replica.status_with(|_| true);
        assert_eq!((reason(&status), status["state"].as_str()), (None, Some("ready")));
        replica.stop().unwrap();
    }
}

#[test]
fn a_model_that_was_damaged_on_the_disk_of_a_replica_is_downloaded_again() {
    let origin = Origin::new();
    let replica = origin.start();
    replica.ready.recv().unwrap();
    replica.stop().unwrap();
    // Its size is right, and only the sizes are compared at a start.
    let cache = ModelCache::new(origin.root.path());
    let tokenizer = cache.list().unwrap()[0].path.join("tokenizer.json");
    let length = std::fs::metadata(&tokenizer).unwrap().len();
    std::fs::write(&tokenizer, " ".repeat(usize::try_from(length).unwrap())).unwrap();
    let replica = origin.start();
    replica.ready.recv().unwrap();
    replica.stop().unwrap();
}

#[test]
fn a_replica_that_stops_during_its_download_ends() {
    let origin = Origin::new();
    origin.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(10_000); 16]);
    let replica = origin.start();
    replica.status_with(|status| status["download"]["done_bytes"].as_u64() > Some(9_999));
    let begun = std::time::Instant::now();
    let server = &origin.server;
    thread::scope(|scope| {
        let stopped = scope.spawn(|| replica.stop());
        // The connection of the download is read until bytes arrive, or none arrive for its timeout.
        server.release();
        stopped.join().unwrap().unwrap();
    });
    assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
}
