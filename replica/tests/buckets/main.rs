//! Models in buckets and on web servers: a model is downloaded once, in parts and with resumption, and each failure is one
//! sentence with a reason.
//!
//! The server has the S3 protocol with signatures and injects faults. [`start`] has the tests of a replica that downloads
//! its model.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod s3_server;
#[path = "../served/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod served;
mod start;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use backoff::Backoff;
use buckets::BucketVariables;
use hyper::Method;
use replica::cache::{
    CachedModel, DownloadPolicy, ModelCache, ModelOrigins, ModelSource, Phase, PullError, PullObserver,
    PullResult, ResolveError,
};
use replica_api::start_failure::StartFailure;
use s3_server::{Access, BUCKET, Fault, KEY_ID, S3Server, SECRET};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const PART: u64 = 64 << 10;
const CONNECTIONS: usize = 4;

/// Incompressible bytes, the same in every run.
fn weights() -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..1_000_000).map(|_| next()).collect()
}

fn model_files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"model\": {}}".to_vec()),
        (WEIGHTS, weights()),
        ("1_Pooling/config.json", b"{\"pooling_mode_mean_tokens\": true}".to_vec()),
        ("vocab.txt", Vec::new()),
    ]
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the list of files as sha256sum writes it.
fn sums(files: &[(&str, Vec<u8>)]) -> String {
    let line = |(path, content): &(&str, Vec<u8>)| format!("{}  ./{path}\n", sha256(content));
    let unused = format!("{}  README.md\n", sha256(b"not a part of the model"));
    files.iter().map(line).chain([unused]).collect()
}

fn policy() -> DownloadPolicy {
    let backoff = Backoff { first: Duration::from_millis(1), max: Duration::from_millis(5) };
    // Longer than any pause of a busy machine in the tests that do not wait for it.
    let stall = Duration::from_secs(60);
    DownloadPolicy { connections: CONNECTIONS, part_bytes: PART, attempts: 3, backoff, stall }
}

fn variables(port: u16, secret: &str) -> BucketVariables {
    let endpoint = format!("http://127.0.0.1:{port}");
    let list = [
        ("AWS_ACCESS_KEY_ID", KEY_ID),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_ENDPOINT_URL", &endpoint),
        ("AWS_REGION", "us-east-1"),
    ];
    list.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn origins(buckets: BucketVariables, netrc: Option<PathBuf>) -> ModelOrigins {
    let nowhere: url::Url = "http://127.0.0.1:1".parse().unwrap();
    let (pypi_index, hf_endpoint) = (nowhere.clone(), nowhere);
    ModelOrigins { pypi_index, hf_endpoint, hf_token: None, buckets, netrc }
}

fn cache_at(root: &Path, port: u16) -> ModelCache {
    ModelCache::with_origins(root, origins(variables(port, SECRET), None)).with_policy(policy())
}

/// Bucket with a model at the prefix `eu/minilm`, and an empty cache.
struct Setup {
    root: TempDir,
    server: S3Server,
    _bucket: TempDir,
}

impl Setup {
    fn new(access: Access) -> Setup {
        let (root, bucket) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let server = S3Server::start(bucket.path(), access);
        let setup = Setup { root, server, _bucket: bucket };
        setup.put_all(&model_files());
        setup
    }

    fn put_all(&self, files: &[(&str, Vec<u8>)]) {
        files.iter().for_each(|(path, content)| self.put(path, content));
        self.put("SHA256SUMS", sums(files).as_bytes());
    }

    fn put(&self, path: &str, content: &[u8]) {
        self.server.put(&format!("eu/minilm/{path}"), content);
    }

    fn cache(&self) -> ModelCache {
        cache_at(self.root.path(), self.server.port)
    }

    fn pull(&self) -> Result<PullResult, PullError> {
        self.cache().pull(&minilm(), &mut ())
    }

    /// Checks that a pull fails for this reason, with these parts of the message, and leaves no model.
    #[track_caller]
    fn check_failure(&self, reason: StartFailure, parts: &[&str]) {
        self.check_failure_with(&self.cache(), reason, parts);
    }

    #[track_caller]
    fn check_failure_with(&self, cache: &ModelCache, reason: StartFailure, parts: &[&str]) {
        let error = cache.pull(&minilm(), &mut ()).expect_err("a failure");
        assert_eq!(error.reason(), reason, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{part:?} in {error}");
        }
        assert!(matches!(cache.resolve(&minilm()), Err(ResolveError::NotCached { .. })));
        assert_eq!(cache.list().unwrap(), []);
    }

    /// Returns the ranges with which the weights were requested.
    fn ranges(&self) -> Vec<Option<String>> {
        let requests = self.server.requests(&Method::GET, WEIGHTS);
        requests.into_iter().map(|request| request.range).collect()
    }

    /// Returns the files of the pull in progress with this extension.
    fn in_progress(&self, extension: &str) -> Vec<PathBuf> {
        let folder = self.root.path().join("pulls/s3--models--eu%2Fminilm");
        let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|known| known == extension)).collect()
    }

    /// Returns the bytes on disk of the pull in progress.
    fn done_bytes(&self) -> u64 {
        let numbers = self.in_progress("ranges").into_iter().flat_map(|path| fs::read(path).unwrap());
        let numbers: Vec<u8> = numbers.collect();
        numbers.chunks(8).map(|number| u64::from_le_bytes(number.try_into().unwrap())).sum()
    }
}

fn minilm() -> ModelSource {
    format!("s3://{BUCKET}/eu/minilm").parse().unwrap()
}

#[track_caller]
fn check_complete(model: &CachedModel) {
    for (path, content) in model_files() {
        assert!(fs::read(model.path.join(path)).unwrap() == content, "{path}");
    }
}

#[test]
fn a_model_in_a_bucket_is_downloaded_once_in_parts_and_then_resolved_offline() {
    let setup = Setup::new(Access::Signed);
    let pulled = setup.pull().unwrap();
    check_complete(&pulled.model);
    assert_eq!((pulled.downloaded, pulled.model.source.as_str()), (true, "s3://models/eu/minilm"));
    let size = weights().len() as u64;
    assert_eq!(setup.ranges().len() as u64, size.div_ceil(PART), "one request for each part");
    assert_eq!(setup.server.requested_bytes(WEIGHTS, size), size, "each byte once");
    assert!(setup.server.requests(&Method::GET, "README.md").is_empty(), "not a part of the model");
    assert_eq!(setup.in_progress("part").len() + setup.in_progress("ranges").len(), 0);

    let offline = cache_at(setup.root.path(), 1);
    assert_eq!(offline.resolve(&minilm()).unwrap(), pulled.model);
    assert_eq!(offline.list().unwrap(), std::slice::from_ref(&pulled.model));
    assert!(!setup.pull().unwrap().downloaded, "it is in the cache");
    assert_eq!(setup.server.requested_bytes(WEIGHTS, size), size);
}

#[test]
fn a_model_in_google_cloud_storage_or_azure_is_downloaded() {
    // Without signatures, reading an object is the same request in the three protocols.
    let setup = Setup::new(Access::Public);
    let url = setup.server.url();
    let gs = [("GOOGLE_BASE_URL", url.as_str()), ("GOOGLE_SKIP_SIGNATURE", "true")];
    let az = [
        ("AZURE_STORAGE_ENDPOINT", url.as_str()),
        ("AZURE_ALLOW_HTTP", "true"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_SKIP_SIGNATURE", "true"),
    ];
    for (scheme, variables) in [("gs", gs.as_slice()), ("az", az.as_slice())] {
        let source: ModelSource = format!("{scheme}://{BUCKET}/eu/minilm").parse().unwrap();
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let origins = origins(variables.collect(), None);
        let cache = ModelCache::with_origins(setup.root.path(), origins).with_policy(policy());
        let pulled = cache.pull(&source, &mut ()).unwrap();
        check_complete(&pulled.model);
        assert_eq!((pulled.downloaded, pulled.model.source), (true, source.to_string()));
        assert_eq!(cache.resolve(&source).unwrap().digest, pulled.model.digest);
    }
}

#[test]
fn a_new_model_at_the_same_prefix_replaces_the_old_one() {
    let setup = Setup::new(Access::Signed);
    let old = setup.pull().unwrap().model;
    let mut files = model_files();
    files[0].1 = b"{\"new\": true}".to_vec();
    setup.put_all(&files);
    let new = setup.pull().unwrap();
    assert!(new.downloaded);
    assert_ne!(new.model.digest, old.digest);
    assert_eq!(setup.cache().resolve(&minilm()).unwrap(), new.model);
}

/// Reports when a pull waits for another one, and the progress that it sees.
struct WaitingReporter(mpsc::Sender<Option<u64>>);

impl PullObserver for WaitingReporter {
    fn phase(&mut self, phase: Phase) {
        if phase == Phase::Waiting {
            self.0.send(None).unwrap();
        }
    }
    fn bytes(&mut self, _: u64, total: Option<u64>) {
        // The receiver is dropped when the test ends.
        let _ = self.0.send(total);
    }
}

#[test]
fn of_two_concurrent_pulls_one_downloads_and_the_other_reports_its_progress() {
    let setup = Setup::new(Access::Signed);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(1_000); CONNECTIONS]);
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| setup.pull());
        setup.server.wait_for_held(CONNECTIONS);
        let (reports, report) = mpsc::channel();
        let second = scope.spawn(|| setup.cache().pull(&minilm(), &mut WaitingReporter(reports)));
        assert_eq!(report.recv().unwrap(), None, "the second waits");
        let total: usize = model_files().iter().map(|(_, content)| content.len()).sum();
        assert_eq!(report.recv().unwrap(), Some(total as u64), "and sees the progress of the first");
        setup.server.release();
        (first.join().unwrap().unwrap(), second.join().unwrap().unwrap())
    });
    assert_eq!((first.downloaded, second.downloaded), (true, false));
    check_complete(&second.model);
    let size = weights().len() as u64;
    assert_eq!(setup.server.requested_bytes(WEIGHTS, size), size, "each byte once");
}

#[test]
fn parts_are_downloaded_by_the_configured_number_of_connections() {
    let setup = Setup::new(Access::Signed);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(0); 16]);
    thread::scope(|scope| {
        let pull = scope.spawn(|| setup.pull());
        setup.server.wait_for_held(CONNECTIONS);
        setup.server.release();
        check_complete(&pull.join().unwrap().unwrap().model);
    });
    assert_eq!(setup.server.held_max(), CONNECTIONS);
}

#[test]
fn an_interrupted_part_continues_at_its_last_byte() {
    let setup = Setup::new(Access::Signed);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::CutAfter(10_000)]);
    check_complete(&setup.pull().unwrap().model);
    let size = weights().len() as u64;
    assert_eq!(setup.ranges().len() as u64, size.div_ceil(PART) + 1, "one request was repeated");
    let again = setup.server.requested_bytes(WEIGHTS, size) - size;
    assert!((1..PART).contains(&again), "only the missing range was requested again: {again} bytes");
}

/// Environment variable that makes the test binary the process to be killed.
const VICTIM: &str = "MERIDIAN_TEST_VICTIM";

#[test]
fn a_killed_pull_is_resumed_without_downloading_a_byte_twice() {
    if let Ok(role) = std::env::var(VICTIM) {
        let (root, port) = role.split_once('|').unwrap();
        let pulled = cache_at(Path::new(root), port.parse().unwrap()).pull(&minilm(), &mut ());
        unreachable!("the server holds the download and this process is killed: {pulled:?}");
    }
    let setup = Setup::new(Access::Signed);
    // Two parts arrive; the next ones are held in the middle.
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::Nothing; 2]);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(32 << 10); 16]);
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_killed_pull_is_resumed_without_downloading_a_byte_twice"])
        .env(VICTIM, format!("{}|{}", setup.root.path().display(), setup.server.port))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    setup.server.wait_for_held(CONNECTIONS);
    // The held connections have half a part each.
    while setup.done_bytes() < 2 * PART + CONNECTIONS as u64 * PART / 2 {
        assert_eq!(victim.try_wait().unwrap(), None, "it ended by itself");
        thread::yield_now();
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(matches!(setup.cache().resolve(&minilm()), Err(ResolveError::NotCached { .. })));

    let done = setup.done_bytes();
    setup.server.release();
    setup.server.recover();
    setup.server.forget_requests();
    check_complete(&setup.pull().unwrap().model);
    let all = model_files().into_iter().map(|(path, content)| (path, content.len() as u64));
    let requested: u64 =
        all.clone().map(|(path, size)| setup.server.requested_bytes(&format!("minilm/{path}"), size)).sum();
    let total: u64 = all.map(|(_, size)| size).sum();
    assert_eq!(requested, total - done, "{done} bytes were on disk");
}

#[test]
fn damaged_bytes_of_an_earlier_pull_are_downloaded_again() {
    let setup = Setup::new(Access::Signed);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::Status(403, ""); 16]);
    setup.check_failure(StartFailure::ModelForbidden, &[]);
    setup.server.recover();
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::CutAfter(10_000); 64]);
    setup.check_failure(StartFailure::ModelUnavailable, &[]);
    setup.server.recover();
    for part in setup.in_progress("part") {
        let file = fs::OpenOptions::new().write(true).open(part).unwrap();
        if file.metadata().unwrap().len() == weights().len() as u64 {
            file.write_all_at(&[!weights()[5]], 5).unwrap();
        }
    }
    check_complete(&setup.pull().unwrap().model);
}

#[test]
fn a_denied_request_names_the_object_and_the_credentials() {
    let setup = Setup::new(Access::Signed);
    let origins = origins(variables(setup.server.port, "another"), None);
    let cache = ModelCache::with_origins(setup.root.path(), origins).with_policy(policy());
    let parts = ["denies access to s3://models/eu/minilm/SHA256SUMS (status 403)", "AWS_ACCESS_KEY_ID"];
    setup.check_failure_with(&cache, StartFailure::ModelForbidden, &parts);
    assert_eq!(setup.server.requests(&Method::GET, "SHA256SUMS").len(), 1, "it is not repeated");

    setup.server.fail(Method::HEAD, WEIGHTS, &[Fault::Status(403, "")]);
    setup.check_failure(StartFailure::ModelForbidden, &["s3://models/eu/minilm/model.safetensors"]);
    setup.server.recover();
    let expired = "<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>";
    setup.server.fail(Method::GET, "SHA256SUMS", &[Fault::Status(400, expired)]);
    setup.check_failure(StartFailure::ModelForbidden, &["status 400"]);
    assert!(setup.pull().unwrap().downloaded, "the next pull succeeds");
}

#[test]
fn a_missing_bucket_list_or_object_is_named() {
    let setup = Setup::new(Access::Signed);
    let missing = "<Error><Code>NoSuchBucket</Code></Error>";
    setup.server.fail(Method::GET, "SHA256SUMS", &[Fault::Status(404, missing)]);
    setup.check_failure(StartFailure::ModelMissing, &["has no bucket models"]);
    setup.server.delete("eu/minilm/model.safetensors");
    setup.check_failure(StartFailure::ModelMissing, &["has no s3://models/eu/minilm/model.safetensors"]);
    setup.server.delete("eu/minilm/SHA256SUMS");
    setup
        .check_failure(StartFailure::ModelMissing, &["has no s3://models/eu/minilm/SHA256SUMS", "sha256sum"]);
}

#[test]
fn requests_to_an_unavailable_server_are_repeated_up_to_the_limit() {
    let setup = Setup::new(Access::Signed);
    let unavailable = Fault::Status(503, "<Error><Code>SlowDown</Code></Error>");
    for (method, object) in [(Method::GET, "SHA256SUMS"), (Method::HEAD, WEIGHTS), (Method::GET, WEIGHTS)] {
        setup.server.fail(method.clone(), object, &[unavailable; 64]);
        let delivered = format!("failed to deliver s3://models/eu/minilm/{object} in 3 attempts");
        setup.check_failure(StartFailure::ModelUnavailable, &[&delivered, "503"]);
        setup.server.recover();
    }
    setup.server.fail(Method::GET, "SHA256SUMS", &[unavailable; 2]);
    setup.server.fail(Method::HEAD, WEIGHTS, &[unavailable; 2]);
    setup.server.fail(Method::GET, WEIGHTS, &[unavailable; 2]);
    check_complete(&setup.pull().unwrap().model);
}

#[test]
fn an_unreachable_server_is_reported() {
    let setup = Setup::new(Access::Signed);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let cache = cache_at(setup.root.path(), closed);
    let host = format!("127.0.0.1:{closed} failed to deliver");
    setup.check_failure_with(&cache, StartFailure::ModelUnavailable, &[&host]);
}

#[test]
fn a_server_that_stops_responding_times_out_and_the_bytes_are_kept() {
    let setup = Setup::new(Access::Signed);
    let policy = DownloadPolicy { stall: Duration::from_millis(200), ..policy() };
    let cache = setup.cache().with_policy(policy);
    setup.server.fail(Method::GET, "SHA256SUMS", &[Fault::Stall; 64]);
    setup.check_failure_with(&cache, StartFailure::ModelUnavailable, &["in 3 attempts"]);
    setup.server.recover();
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(20_000); 64]);
    setup.check_failure_with(&cache, StartFailure::ModelUnavailable, &["model.safetensors", "in 3 attempts"]);
    assert!(setup.done_bytes() >= 20_000, "the next pull resumes");
    setup.server.recover();
    check_complete(&setup.pull().unwrap().model);
}

#[test]
fn truncated_responses_are_repeated_up_to_the_limit_and_the_bytes_are_kept() {
    let setup = Setup::new(Access::Signed);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::CutAfter(1_000); 64]);
    setup.check_failure(StartFailure::ModelUnavailable, &["model.safetensors in 3 attempts", "are kept"]);
    assert!(setup.done_bytes() >= 3_000, "each attempt had some");
    setup.server.recover();
    check_complete(&setup.pull().unwrap().model);
}

#[test]
fn a_file_with_another_content_than_listed_is_rejected_and_deleted() {
    let setup = Setup::new(Access::Signed);
    let mut other = weights();
    other[7] ^= 1;
    setup.put(WEIGHTS, &other);
    let expected = sha256(&weights());
    let parts = ["the SHA-256 of s3://models/eu/minilm/model.safetensors", expected.as_str()];
    setup.check_failure(StartFailure::ModelCorrupt, &parts);
    setup.put(WEIGHTS, &weights());
    check_complete(&setup.pull().unwrap().model);
}

#[test]
fn an_invalid_list_is_reported_with_its_line() {
    let setup = Setup::new(Access::Signed);
    setup.put("SHA256SUMS", b"config.json\n");
    setup.check_failure(StartFailure::ModelCorrupt, &["SHA256SUMS", "line 1: write the SHA-256"]);
    setup.put("SHA256SUMS", sums(&model_files()[..2]).as_bytes());
    setup.check_failure(StartFailure::ModelMissing, &["is not a model: it has no model.safetensors"]);
}

#[test]
fn a_list_with_a_file_that_the_cache_cannot_store_is_rejected_before_a_download() {
    let setup = Setup::new(Access::Signed);
    let list = |path: &str| sums(&model_files()) + &format!("{}  {path}\n", sha256(b"x"));
    setup.put("SHA256SUMS", list(&format!("{}.json", "a".repeat(251))).as_bytes());
    let parts = ["SHA256SUMS of", "has 256 bytes; the limit is 255"];
    setup.check_failure(StartFailure::ModelCorrupt, &parts);
    let folder = list("2.json") + &format!("{}  2.json/a.json\n", sha256(b"x"));
    setup.put("SHA256SUMS", folder.as_bytes());
    let part = "\"2.json\" is a file, and also the folder of";
    setup.check_failure(StartFailure::ModelCorrupt, &[part]);
    assert!(setup.ranges().is_empty(), "nothing was downloaded");

    setup.put("SHA256SUMS", list("manifest.json").as_bytes());
    let model = setup.pull().unwrap().model;
    check_complete(&model);
    assert!(!setup.pull().unwrap().downloaded, "the manifest is that of the cache");
}

#[cfg(target_os = "linux")]
#[test]
fn a_pull_opens_files_for_its_connections_only() {
    let setup = Setup::new(Access::Signed);
    let mut files = model_files();
    let shards: Vec<String> = (0..300).map(|shard| format!("model-{shard}.safetensors")).collect();
    files.extend(shards.iter().map(|shard| (shard.as_str(), vec![1; 100])));
    setup.put_all(&files);
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::HoldAfter(100); CONNECTIONS]);
    // Of this process: the server and other tests have some as well.
    let open = || {
        let partial = |entry: fs::DirEntry| fs::read_link(entry.path()).ok();
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| partial(entry.unwrap()));
        open.filter(|path| path.starts_with(setup.root.path())).count()
    };
    thread::scope(|scope| {
        let pull = scope.spawn(|| setup.pull());
        setup.server.wait_for_held(CONNECTIONS);
        let count = open();
        setup.server.release();
        check_complete(&pull.join().unwrap().unwrap().model);
        // Two for each connection, and the lock.
        assert!(count <= 2 * CONNECTIONS + 1, "{count} files");
    });
}

#[test]
fn a_model_that_does_not_fit_on_the_disk_is_not_downloaded() {
    let setup = Setup::new(Access::Signed);
    let policy = DownloadPolicy { part_bytes: 1 << 30, ..policy() };
    let cache = setup.cache().with_policy(policy);
    let too_large = (256 << 30) + 1;
    setup.server.fail(Method::HEAD, WEIGHTS, &[Fault::Length(too_large)]);
    setup.check_failure_with(
        &cache,
        StartFailure::ModelCorrupt,
        &["274877906945 bytes; the limit is 274877906944"],
    );

    // More than any disk has.
    let shards: Vec<String> = (0..300).map(|shard| format!("model-{shard}.safetensors")).collect();
    let mut list = sums(&model_files());
    for shard in &shards {
        setup.put(shard, b"");
        list += &format!("{}  {shard}\n", sha256(b"x"));
        setup.server.fail(Method::HEAD, &format!("/{shard}"), &[Fault::Length(256 << 30)]);
    }
    setup.put("SHA256SUMS", list.as_bytes());
    setup.check_failure_with(
        &cache,
        StartFailure::DiskFull,
        &["bytes are needed at", "are free", "MERIDIAN_CACHE"],
    );
    assert!(setup.ranges().is_empty(), "nothing was downloaded");
}

#[test]
fn a_model_on_a_web_server_is_downloaded_in_parts_with_the_credentials_of_netrc() {
    let setup = Setup::new(Access::Public);
    let netrc = setup.root.path().join("netrc");
    fs::write(&netrc, "machine 127.0.0.1 login user password secret\n").unwrap();
    let source: ModelSource = format!("{}/{BUCKET}/eu/minilm", setup.server.url()).parse().unwrap();
    let pull = |netrc: Option<PathBuf>| {
        let origins = origins(BucketVariables::default(), netrc);
        ModelCache::with_origins(setup.root.path(), origins).with_policy(policy()).pull(&source, &mut ())
    };
    setup.server.fail(Method::GET, "SHA256SUMS", &[Fault::Status(401, "")]);
    let error = pull(None).unwrap_err();
    assert_eq!(error.reason(), StartFailure::ModelForbidden);
    for part in ["/models/eu/minilm/SHA256SUMS (status 401)", "~/.netrc"] {
        assert!(error.to_string().contains(part), "{part:?} in {error}");
    }
    setup.server.fail(Method::GET, WEIGHTS, &[Fault::CutAfter(10_000), Fault::Status(503, "")]);
    let pulled = pull(None).unwrap();
    check_complete(&pulled.model);
    assert_eq!(pulled.model.source, source.to_string());
    assert!(setup.ranges().len() as u64 > weights().len() as u64 / PART);

    setup.put("config.json", b"{\"new\": true}");
    let mut files = model_files();
    files[0].1 = b"{\"new\": true}".to_vec();
    setup.put("SHA256SUMS", sums(&files).as_bytes());
    setup.server.forget_requests();
    // The server knows no password; the request was sent with it.
    drop(pull(Some(netrc)));
    let sent = setup.server.requests(&Method::GET, "SHA256SUMS")[0].authorization.clone();
    assert_eq!(sent.as_deref(), Some("Basic dXNlcjpzZWNyZXQ="));
}
