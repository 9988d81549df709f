//! Configuration of the queue of jobs, and its opening.

use super::webhooks::WebhookConfig;
use backoff::Backoff;
use configuration::{ConfigFile, Files};
use identity::authorities::read_roots;
use jobs::bucket::{BucketConfig, BucketCredentials, BucketError};
use jobs::cpu::CpuWork;
use jobs::dir_lock::{DirLock, DirLockError, DirUse};
use jobs::log::{EmbeddedJobLog, JobLog, JobLogError, JobLogOpenError, NatsJobLog, NatsLogConfig};
use jobs::objects::{JobObjects, KEY_LEN};
use jobs::queue_host::{QueueConfig, QueueHost, QueueTasks};
use jobs_core::decide::{AttemptPolicy, DeliveryPolicy, QueueLimits};
use regions::RegionId;
use scheduler_client::hub::HubClientError;
use scheduler_core::hubs::Hubs;
use scheduler_core::jobs::JobsSection;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// File of the log, folder of inputs and results, and begin of the names of the files of usage, in the directory of a queue.
const LOG: &str = "log";
const OBJECTS: &str = "objects";
const USAGE: &str = "jobs";
/// Bounds of the pause after a failed attempt.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// The same after a webhook message. A target that is down for a day gets a message twice an hour on average, and gets it
/// within an hour when it is up again.
const WEBHOOK_BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(3600) };

/// Configuration of the queue of jobs of a region.
#[derive(Clone)]
pub struct JobsConfig {
    dir: PathBuf,
    /// Servers of the log; a file in `dir` if there are none.
    nats: Vec<String>,
    nats_replicas: usize,
    /// Bucket of inputs and results; a folder in `dir` if there is none.
    bucket: Option<BucketConfig>,
    /// Keys of inputs and results.
    keys: Vec<[u8; KEY_LEN]>,
    queue: QueueConfig,
    pub(super) webhooks: WebhookConfig,
    pub(super) file_limits: FileLimits,
    /// Hubs that store the usage of tenants; it stays on disk without one.
    pub(super) hubs: Option<Hubs>,
}

/// Limits of the files of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileLimits {
    /// Bytes of a file.
    pub(super) bytes: usize,
    /// Bytes of the files of a tenant.
    pub(super) tenant_bytes: u64,
}

// Not derived: the keys are secret.
impl std::fmt::Debug for JobsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let JobsConfig { dir, nats, nats_replicas, bucket, keys, queue, webhooks, file_limits, hubs } = self;
        f.debug_struct("JobsConfig")
            .field("dir", dir)
            .field("nats", nats)
            .field("nats_replicas", nats_replicas)
            .field("bucket", bucket)
            .field("keys", &keys.len())
            .field("queue", queue)
            .field("webhooks", webhooks)
            .field("file_limits", file_limits)
            .field("hubs", hubs)
            .finish()
    }
}

/// Error that prevents a queue of jobs from being opened.
#[derive(Debug, thiserror::Error)]
pub enum JobsError {
    /// The directory cannot be created or read.
    #[error("cannot open the directory {} of [jobs]: {source}; make it writable, or set another jobs.dir", dir.display())]
    Directory {
        /// Directory.
        dir: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Another process uses the directory.
    #[error(transparent)]
    DirLock(#[from] DirLockError),
    /// The settings of the bucket are invalid.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The log in a file cannot be opened.
    #[error("{0}; only one process can use jobs.dir")]
    LogFile(#[from] JobLogOpenError),
    /// The log cannot be read, or the NATS servers cannot be reached.
    #[error("cannot read the log of [jobs]: {0}")]
    Log(#[from] JobLogError),
    /// A URL in `hub` or the identity cannot be used for requests to hubs. The spoke does not start.
    #[error("cannot create the HTTP client for the hub: {0}")]
    Client(#[from] HubClientError),
    /// TLS to the targets of webhooks cannot be set up.
    #[error("TLS to webhooks cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
}

impl JobsConfig {
    /// Validates the `[jobs]` section, and reads the keys from their file or environment variable.
    pub fn read(section: JobsSection, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<JobsConfig> {
        let JobsSection {
            dir,
            nats,
            nats_replicas,
            objects,
            objects_endpoint,
            objects_region,
            objects_ca_file,
            objects_credentials_file,
            key_file,
            key_env,
            retention,
            age_max,
            attempts,
            jobs_per_tenant,
            bytes_per_tenant,
            batch_tokens_per_tenant,
            webhook_secrets_file,
            webhook_private_targets,
            webhook_ca,
            webhook_retry_for,
            file_bytes_max,
            file_bytes_per_tenant,
        } = section;
        let mut valid = true;
        for server in nats.iter().filter(|server| !is_nats_url(server)) {
            document.problem("jobs.nats", format!("\"{server}\" is not a server; write nats://HOST:PORT"));
            valid = false;
        }
        if !nats.is_empty() && nats_replicas > nats.len() {
            let problem = format!(
                "{nats_replicas} is more than the {} servers of jobs.nats; list all servers",
                nats.len()
            );
            document.problem("jobs.nats_replicas", problem);
            valid = false;
        }
        let keys = match (&key_file, &key_env) {
            (None, None) => Vec::new(),
            _ => files.secret(document, "jobs.key", key_file.as_deref(), key_env.as_deref(), parse_keys)?,
        };
        let bucket = BucketSection {
            objects,
            objects_endpoint,
            objects_region,
            objects_ca_file,
            objects_credentials_file,
        };
        let bucket =
            bucket.read(document, files, !keys.is_empty()).map_err(|Reported| valid = false).ok().flatten();
        let webhooks = (webhook_secrets_file, webhook_ca, webhook_private_targets);
        let webhooks = WebhookConfig::read(webhooks, document, files)?;
        let delivery =
            DeliveryPolicy { backoff: WEBHOOK_BACKOFF, retry_for: webhook_retry_for.min(retention) };
        let policy = AttemptPolicy { attempts, backoff: BACKOFF };
        let limits = QueueLimits {
            tenant_jobs: jobs_per_tenant,
            tenant_bytes: bytes_per_tenant,
            tenant_batch_tokens: batch_tokens_per_tenant,
            age: age_max,
        };
        let queue = QueueConfig { limits, computation: policy, delivery, retention };
        let file_limits = FileLimits { bytes: file_bytes_max, tenant_bytes: file_bytes_per_tenant };
        let dir = files.path(dir);
        valid.then_some(JobsConfig {
            dir,
            nats,
            nats_replicas,
            bucket,
            keys,
            queue,
            webhooks,
            file_limits,
            hubs: None,
        })
    }

    /// Reports the usage of tenants by its jobs to these hubs.
    pub fn reported_to(self, hubs: Hubs) -> JobsConfig {
        JobsConfig { hubs: Some(hubs), ..self }
    }

    /// Returns the path of the files of usage, to which they add a number and a day.
    pub(super) fn usage_files(&self) -> PathBuf {
        self.dir.join(USAGE)
    }

    /// Opens the queue of a region.
    ///
    /// # Errors
    ///
    /// When its directory or its log cannot be opened.
    pub(super) async fn open(&self, region: &RegionId) -> Result<OpenedQueue, JobsError> {
        let dir_use = if self.nats.is_empty() { DirUse::Exclusive } else { DirUse::Shared };
        let lock = DirLock::acquire(&self.dir, dir_use)?;
        let failed = |source| JobsError::Directory { dir: self.dir.clone(), source };
        let cpu = CpuWork::new();
        let objects = match &self.bucket {
            None => JobObjects::in_folder(&self.dir.join(OBJECTS), &cpu).map_err(failed)?,
            Some(bucket) => JobObjects::in_bucket(bucket, &cpu)?,
        };
        let objects = objects.encrypted(&self.keys);
        let objects = if self.nats.is_empty() { objects.with_log_in(&self.dir) } else { objects };
        let log: Arc<dyn JobLog> = match self.nats.as_slice() {
            [] => Arc::new(EmbeddedJobLog::open(&self.dir.join(LOG)).await?),
            servers => {
                let queue = region.as_str().replace(['/', '.'], "-");
                let config = NatsLogConfig { servers: servers.to_vec(), queue, replicas: self.nats_replicas };
                Arc::new(NatsJobLog::connect(&config, &cpu).await?)
            }
        };
        let (host, tasks) = QueueHost::open(log, objects, self.queue).await?;
        Ok(OpenedQueue { host, tasks, lock })
    }
}

/// An open queue.
pub(super) struct OpenedQueue {
    pub(super) host: QueueHost,
    pub(super) tasks: QueueTasks,
    /// Held as long as the queue is used.
    pub(super) lock: DirLock,
}

/// Keys of the bucket.
struct BucketSection {
    objects: Option<String>,
    objects_endpoint: Option<String>,
    objects_region: String,
    objects_ca_file: Option<PathBuf>,
    objects_credentials_file: Option<PathBuf>,
}

/// A problem that was reported to the document.
struct Reported;

impl BucketSection {
    /// Validates the keys; none if there is no bucket. `is_encrypted` says whether inputs and results are encrypted with keys.
    fn read(
        self,
        document: &ConfigFile<'_>,
        files: &Files<'_>,
        is_encrypted: bool,
    ) -> Result<Option<BucketConfig>, Reported> {
        let BucketSection {
            objects,
            objects_endpoint,
            objects_region,
            objects_ca_file,
            objects_credentials_file,
        } = self;
        let Some(url) = objects else {
            for (key, is_set) in [
                ("jobs.objects_endpoint", objects_endpoint.is_some()),
                ("jobs.objects_ca_file", objects_ca_file.is_some()),
                ("jobs.objects_credentials_file", objects_credentials_file.is_some()),
            ] {
                if is_set {
                    document.problem(
                        key,
                        "has no effect without jobs.objects; set it, or remove this key".to_owned(),
                    );
                    return Err(Reported);
                }
            }
            return Ok(None);
        };
        let Some((bucket, prefix)) = BucketConfig::parse_url(&url) else {
            document.problem(
                "jobs.objects",
                format!("\"{url}\" is not a bucket; write s3://BUCKET or s3://BUCKET/PREFIX"),
            );
            return Err(Reported);
        };
        if let Some(endpoint) = &objects_endpoint {
            let problem = match endpoint_host(endpoint) {
                None => Some("is not a server; write https://HOST or https://HOST:PORT"),
                // On the way to another machine they could be read.
                Some((host, false)) if !is_encrypted && !is_loopback(&host) => {
                    Some("sends inputs and results unencrypted; write https, or set jobs.key_file")
                }
                Some(_) => None,
            };
            if let Some(problem) = problem {
                document.problem("jobs.objects_endpoint", format!("\"{endpoint}\" {problem}"));
                return Err(Reported);
            }
        }
        let credentials = match &objects_credentials_file {
            None => None,
            Some(path) => {
                let parse = |text: &str| BucketCredentials::parse(text);
                Some(
                    files
                        .secret(document, "jobs.objects_credentials", Some(path), None, parse)
                        .ok_or(Reported)?,
                )
            }
        };
        let authorities = match &objects_ca_file {
            Some(path) => {
                let report = |problem| document.problem("jobs.objects_ca_file", problem);
                Some(read_roots(&files.path(path)).map_err(report).map_err(|()| Reported)?)
            }
            None => None,
        };
        Ok(Some(BucketConfig {
            bucket,
            prefix,
            endpoint: objects_endpoint,
            region: objects_region,
            credentials,
            authorities,
        }))
    }
}

/// Returns the host of a URL, and whether it has TLS.
fn endpoint_host(url: &str) -> Option<(String, bool)> {
    let uri: http::Uri = url.parse().ok()?;
    let is_tls = match uri.scheme_str()? {
        "https" => true,
        "http" => false,
        _ => return None,
    };
    let has_path = uri.path() != "/" || url.ends_with('/') || uri.query().is_some();
    (!has_path && !url.contains('@')).then(|| (uri.host().unwrap_or_default().to_owned(), is_tls))
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn is_nats_url(text: &str) -> bool {
    let address = text.strip_prefix("nats://").or_else(|| text.strip_prefix("tls://"));
    address.is_some_and(|address| address.parse::<regions::HostPort>().is_ok())
}

/// Parses one key on each line.
fn parse_keys(text: &str) -> Result<Vec<[u8; KEY_LEN]>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let keys = lines.enumerate().map(|(index, line)| {
        let digits = line.as_bytes();
        let invalid = || {
            format!(
                "key {} is not {} hexadecimal digits, as of `openssl rand -hex {KEY_LEN}`",
                index + 1,
                2 * KEY_LEN
            )
        };
        if digits.len() != 2 * KEY_LEN || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(invalid());
        }
        let mut key = [0; KEY_LEN];
        for (byte, pair) in key.iter_mut().zip(line.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| invalid())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| invalid())?;
        }
        Ok(key)
    });
    let keys = keys.collect::<Result<Vec<_>, _>>()?;
    if keys.is_empty() {
        return Err("has no key".to_owned());
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn read(text: &str) -> Result<JobsConfig, Vec<String>> {
        let environment =
            [("KEYS", format!("{}\n{}\n", "0f".repeat(32), "F0".repeat(32)))].into_iter().collect();
        let files = Files { base: Path::new("/etc/meridian"), environment: Some(&environment) };
        let read = ConfigFile::read(text, |document| {
            let section: JobsSection = document.section()?;
            JobsConfig::read(section, document, &files)
        });
        read.map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_directory_suffices() {
        let config = read("dir = \"jobs\"").expect("valid");
        assert_eq!(config.dir, Path::new("/etc/meridian/jobs"));
        assert_eq!((config.keys.len(), config.nats.len(), config.queue.computation.attempts), (0, 0, 5));
    }

    #[test]
    fn keys_are_read_and_not_shown() {
        let config = read("dir = \"jobs\"\nkey_env = \"KEYS\"").expect("valid");
        assert_eq!(config.keys, [[0x0f; KEY_LEN], [0xf0; KEY_LEN]]);
        assert!(!format!("{config:?}").contains("15"), "{config:?}");
        for text in ["", "0f", &"0g".repeat(32), &"é".repeat(32)] {
            assert!(parse_keys(text).is_err(), "{text}");
        }
    }

    #[test]
    fn problems_name_the_key_and_the_fix() {
        let problems = read("dir = \"jobs\"\nnats = [\"10.0.0.1\"]\nnats_replicas = 3").unwrap_err();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("write nats://HOST:PORT"), "{problems:?}");
        assert!(problems[1].contains("list all servers"), "{problems:?}");
    }

    #[test]
    fn a_bucket_is_read_with_its_credentials_and_an_unencrypted_way_to_it_is_rejected() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("credentials");
        std::fs::write(&file, "[default]\naws_access_key_id = A\naws_secret_access_key = hidden\n")
            .expect("written");
        let bucket = format!(
            "dir = \"jobs\"\nobjects = \"s3://jobs/eu\"\nobjects_endpoint = \"https://10.0.0.5:9000\"\nobjects_credentials_file = {file:?}"
        );
        let config = read(&bucket).expect("valid");
        let bucket = config.bucket.as_ref().expect("a bucket");
        assert_eq!((bucket.bucket.as_str(), bucket.prefix.as_str()), ("jobs", "eu"));
        assert_eq!(bucket.credentials.as_ref().expect("credentials").secret_key, "hidden");
        assert!(!format!("{config:?}").contains("hidden"));
        for (text, part) in [
            ("objects = \"bucket\"", "write s3://BUCKET"),
            ("objects_endpoint = \"https://a\"", "has no effect without jobs.objects"),
            ("objects = \"s3://jobs\"\nobjects_endpoint = \"10.0.0.5\"", "write https://HOST"),
            (
                "objects = \"s3://jobs\"\nobjects_endpoint = \"http://10.0.0.5\"",
                "sends inputs and results unencrypted",
            ),
        ] {
            let problems = read(&format!("dir = \"jobs\"\n{text}")).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(part), "{text}: {problems:?}");
        }
        let empty = dir.path().join("ca");
        std::fs::write(&empty, "").expect("written");
        let problems = read(&format!("dir = \"jobs\"\nobjects = \"s3://jobs\"\nobjects_ca_file = {empty:?}"));
        assert!(problems.is_err_and(|problems| problems[0].contains("has no certificate")));
        for allowed in [
            "objects_endpoint = \"http://127.0.0.1:9000\"",
            "objects_endpoint = \"http://10.0.0.5\"\nkey_env = \"KEYS\"",
        ] {
            assert!(
                read(&format!("dir = \"jobs\"\nobjects = \"s3://jobs\"\n{allowed}")).is_ok(),
                "{allowed}"
            );
        }
    }
}
