//! Payloads and results of jobs in a bucket of an S3-compatible store.
//!
//! The processes of a region share the bucket. An object is created only if it does not exist (`if-none-match: *`), so two
//! processes that choose the same number do not overwrite each other; a store without this condition cannot be used. The
//! client is that of the crate `buckets`.

pub use buckets::credentials::BucketCredentials;

use buckets::S3Settings;
use buckets::http::ResponseMode;
use buckets::url::{BucketProvider, BucketUrl};
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::RootCertStore;

/// Retries of a request: a submission waits for them, and its client repeats it afterwards.
const RETRIES_MAX: usize = 3;
/// Time in which a request is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest pause before a retry.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Responses: an object of the largest size, or a page of a list, over a slow link.
const RESPONSES: ResponseMode =
    ResponseMode::Buffered { timeout: Duration::from_secs(60), bytes_max: 512 << 20 };

/// Bucket of a queue.
#[derive(Clone)]
pub struct BucketConfig {
    /// Name.
    pub bucket: String,
    /// Prefix of the names of all objects; empty for none.
    pub prefix: String,
    /// URL of the server; that of AWS in the region if there is none.
    pub endpoint: Option<String>,
    /// Region of the signatures.
    pub region: String,
    /// Credentials; those of the environment (variables, web identity, instance role) if there are none.
    pub credentials: Option<BucketCredentials>,
    /// Authorities of the server's certificate; those of the system if there are none.
    pub authorities: Option<RootCertStore>,
}

// Not derived: the credentials are secret.
impl fmt::Debug for BucketConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BucketConfig { bucket, prefix, endpoint, region, credentials: _, authorities: _ } = self;
        f.debug_struct("BucketConfig")
            .field("bucket", bucket)
            .field("prefix", prefix)
            .field("endpoint", endpoint)
            .field("region", region)
            .finish_non_exhaustive()
    }
}

/// Error of the settings of a bucket.
#[derive(Debug, thiserror::Error)]
#[error("the bucket of jobs cannot be used: {0}")]
pub struct BucketError(String);

impl BucketConfig {
    /// Parses `s3://BUCKET` or `s3://BUCKET/PREFIX`; returns the name and the prefix.
    pub fn parse_url(url: &str) -> Option<(String, String)> {
        let BucketUrl { provider, bucket, prefix } = url.parse().ok()?;
        (provider == BucketProvider::S3).then_some((bucket, prefix))
    }

    /// Opens the store. Sends no request.
    pub(crate) fn open(&self) -> Result<Arc<dyn ObjectStore>, BucketError> {
        let BucketConfig { bucket, prefix, endpoint, region, credentials, authorities } = self.clone();
        let mut retry =
            RetryConfig { max_retries: RETRIES_MAX, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        retry.backoff = BackoffConfig { max_backoff: RETRY_PAUSE_MAX, ..BackoffConfig::default() };
        let settings = S3Settings { bucket, endpoint, region, credentials, authorities };
        let store =
            buckets::s3(&settings, retry, RESPONSES).map_err(|error| BucketError(error.to_string()))?;
        Ok(if prefix.is_empty() {
            Arc::new(store)
        } else {
            Arc::new(PrefixStore::new(store, prefix.as_str()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_bucket_and_a_prefix() {
        let parsed = |url: &str| BucketConfig::parse_url(url);
        let expected = |bucket: &str, prefix: &str| Some((bucket.to_owned(), prefix.to_owned()));
        assert_eq!(parsed("s3://jobs"), expected("jobs", ""));
        assert_eq!(parsed("s3://jobs/"), expected("jobs", ""));
        assert_eq!(parsed("s3://my.jobs-1/meridian/eu/"), expected("my.jobs-1", "meridian/eu"));
        for wrong in [
            "",
            "jobs",
            "s3://",
            "s3://ab",
            "s3://Jobs",
            "s3://jobs/a//b",
            "s3://jobs/a b",
            "s3://jobs/..",
            "gs://jobs",
            "https://a",
        ] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn credentials_are_not_shown() {
        let credentials =
            BucketCredentials { key_id: "A".to_owned(), secret_key: "hidden".to_owned(), token: None };
        let config = BucketConfig {
            bucket: "jobs".to_owned(),
            prefix: String::new(),
            endpoint: None,
            region: "us-east-1".to_owned(),
            credentials: Some(credentials),
            authorities: None,
        };
        assert!(!format!("{config:?}").contains("hidden"));
    }
}
