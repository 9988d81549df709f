//! Keys of `[jobs]` of a spoke. `gateway::ingress` validates them further.

use regions::IpNetwork;
use std::path::PathBuf;
use std::time::Duration;

/// Shortest and longest retention.
const RETENTION: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(90 * 24 * 3600);
/// A week, so that the result of a job of Friday can be fetched on Thursday.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
/// A weekend, so that a target that fails on Friday evening gets its messages when someone has repaired it on Monday.
const WEBHOOK_RETRIES: Duration = Duration::from_secs(3 * 24 * 3600);
/// Networks of `webhook_private_targets`.
pub const PRIVATE_TARGETS_MAX: usize = 64;

configuration::section! {
    /// Queue of durable jobs of the region.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct JobsSection {
        /// Directory of the queue: its log, unless `nats` is set, the inputs and results, unless `objects` is set, and the usage of
        /// tenants that is not reported yet. One process uses it, or those of a region with the same `nats`; a lock in it rejects
        /// others.
        pub dir: PathBuf, like "\"jobs\"";
        /// Servers of NATS with JetStream that store the log instead of a file in `dir`. The spokes of a region then have one
        /// queue, and `dir` must be a folder that they share, or `objects` be set.
        pub nats: Vec<String> = Vec::new(), in 0..=16, like "[\"nats://10.0.0.5:4222\"]";
        /// Number of NATS servers that store the log.
        pub nats_replicas: usize = 1, in 1..=5;
        /// Bucket of an S3-compatible store for the inputs and results instead of `dir`, in a region that their residency allows. The
        /// store must support conditional writes (`if-none-match: *`).
        pub objects: Option<String>, like "\"s3://bucket/prefix\"";
        /// URL of the store of `objects`; by default that of AWS in `objects_region`.
        pub objects_endpoint: Option<String>, like "\"https://10.0.0.5:9000\"";
        /// Region of the bucket, for its URL and signatures.
        pub objects_region: String = "us-east-1".to_owned();
        /// PEM certificates of the authorities of the store; by default those of the system.
        pub objects_ca_file: Option<PathBuf>;
        /// File with the access key of the bucket, in the format of `~/.aws/credentials` (profile `default`). By default the
        /// variables `AWS_*` of the environment, a web identity, or the role of the instance.
        pub objects_credentials_file: Option<PathBuf>;
        /// File with the keys of inputs and results, 64 hexadecimal digits on each line: the first encrypts, all decrypt.
        /// Without keys they are stored as they are.
        pub key_file: Option<PathBuf>;
        /// Environment variable with these keys, instead of the file.
        pub key_env: Option<String>;
        /// Time after which a finished job is deleted, with its input and its result.
        pub retention: Duration = WEEK, in RETENTION;
        /// Longest time until the deadline of a job; the deadline of a job without one.
        pub age_max: Duration = WEEK, in RETENTION;
        /// Attempts to compute a job; after the last failed one it is set aside as failed.
        pub attempts: u32 = 5, in 1..=100;
        /// Unfinished jobs of a tenant.
        pub jobs_per_tenant: u64 = 1_000_000, in 1..=100_000_000;
        /// Bytes of the inputs of the unfinished jobs of a tenant.
        pub bytes_per_tenant: u64 = 10 << 30, in 1..=1 << 50;
        /// Estimated tokens of the unfinished batches of a tenant. The tokens of batches are not charged to the rate limits of
        /// tenants.
        pub batch_tokens_per_tenant: u64 = 1_000_000_000, in 1..=1 << 50;
        /// File with the webhook secrets of tenants, `TENANT whsec_…` on each line. It is read again when it changes. Without it
        /// this region accepts no webhooks.
        pub webhook_secrets_file: Option<PathBuf>;
        /// Networks to which webhook messages may be sent beside the public internet, and without TLS.
        pub webhook_private_targets: Vec<IpNetwork> = Vec::new(), in 0..=PRIVATE_TARGETS_MAX, like "[\"10.0.0.0/8\"]";
        /// Certificate authorities of webhook targets, PEM; those of the system if absent.
        pub webhook_ca: Option<PathBuf>;
        /// Time for which a failed webhook message is sent again; `retention` limits it as well.
        pub webhook_retry_for: Duration = WEBHOOK_RETRIES, in RETENTION;
        /// Largest file of a batch, bytes. It is in memory while it is stored.
        pub file_bytes_max: usize = 100 << 20, in 1..=256 << 20;
        /// Bytes of the stored files of a tenant, with those that its batches have written.
        pub file_bytes_per_tenant: u64 = 10 << 30, in 1..=1 << 50;
    }
}
