//! Configuration of the queue of jobs, and its opening.

use super::webhooks::WebhookConfig;
use backoff::Backoff;
use configuration::{ConfigFile, Files};
use jobs::log::{EmbeddedJobLog, JobLog, JobLogError, JobLogOpenError, NatsJobLog, NatsLogConfig};
use jobs::objects::{JobObjects, KEY_LEN};
use jobs::queue_host::{QueueConfig, QueueHost, QueueTasks};
use jobs_core::decide::{AttemptPolicy, DeliveryPolicy, QueueLimits};
use regions::RegionId;
use scheduler_core::jobs::JobsSection;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// File of the log, and folder of inputs and results, in the directory of a queue.
const LOG: &str = "log";
const OBJECTS: &str = "objects";
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
    /// Keys of inputs and results.
    keys: Vec<[u8; KEY_LEN]>,
    queue: QueueConfig,
    pub(super) webhooks: WebhookConfig,
    pub(super) file_limits: FileLimits,
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
        let JobsConfig { dir, nats, nats_replicas, keys, queue, webhooks, file_limits } = self;
        f.debug_struct("JobsConfig")
            .field("dir", dir)
            .field("nats", nats)
            .field("nats_replicas", nats_replicas)
            .field("keys", &keys.len())
            .field("queue", queue)
            .field("webhooks", webhooks)
            .field("file_limits", file_limits)
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
    /// The log in a file cannot be opened.
    #[error("{0}; only one process can use jobs.dir")]
    LogFile(#[from] JobLogOpenError),
    /// The log cannot be read, or the NATS servers cannot be reached.
    #[error("cannot read the log of [jobs]: {0}")]
    Log(#[from] JobLogError),
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
            key_file,
            key_env,
            retention,
            age_max,
            attempts,
            jobs_per_tenant,
            bytes_per_tenant,
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
        let webhooks = (webhook_secrets_file, webhook_ca, webhook_private_targets);
        let webhooks = WebhookConfig::read(webhooks, document, files)?;
        let delivery =
            DeliveryPolicy { backoff: WEBHOOK_BACKOFF, retry_for: webhook_retry_for.min(retention) };
        let policy = AttemptPolicy { attempts, backoff: BACKOFF };
        let limits =
            QueueLimits { tenant_jobs: jobs_per_tenant, tenant_bytes: bytes_per_tenant, age: age_max };
        let queue = QueueConfig { limits, computation: policy, delivery, retention };
        let file_limits = FileLimits { bytes: file_bytes_max, tenant_bytes: file_bytes_per_tenant };
        let dir = files.path(dir);
        valid.then_some(JobsConfig { dir, nats, nats_replicas, keys, queue, webhooks, file_limits })
    }

    /// Opens the queue of a region.
    ///
    /// # Errors
    ///
    /// When its directory or its log cannot be opened.
    pub(super) async fn open(&self, region: &RegionId) -> Result<(QueueHost, QueueTasks), JobsError> {
        let objects = self.dir.join(OBJECTS);
        let failed = |source| JobsError::Directory { dir: self.dir.clone(), source };
        let objects = JobObjects::in_folder(&objects).map_err(failed)?.encrypted(&self.keys);
        let log: Arc<dyn JobLog> = match self.nats.as_slice() {
            [] => Arc::new(EmbeddedJobLog::open(&self.dir.join(LOG)).await?),
            servers => {
                let queue = region.as_str().replace(['/', '.'], "-");
                let config = NatsLogConfig { servers: servers.to_vec(), queue, replicas: self.nats_replicas };
                Arc::new(NatsJobLog::connect(&config).await?)
            }
        };
        Ok(QueueHost::open(log, objects, self.queue).await?)
    }
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
        let environment = [("KEYS".to_owned(), format!("{}\n{}\n", "0f".repeat(32), "F0".repeat(32)))]
            .into_iter()
            .collect();
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
}
