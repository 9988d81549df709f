//! Payloads and results of jobs in a bucket of an S3-compatible store.
//!
//! The processes of a region share the bucket. An object is created only if it does not exist (`if-none-match: *`), so two
//! processes that choose the same number do not overwrite each other; a store without this condition cannot be used. The
//! protocol is that of the crate `object_store`; the connections are [`http`].

mod http;

use object_store::aws::{AmazonS3Builder, AwsCredential, S3ConditionalPut};
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ObjectStore, RetryConfig, StaticCredentialProvider};
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

/// Access key of a bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketCredentials {
    /// Access key ID.
    pub key_id: String,
    /// Secret access key.
    pub secret_key: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
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
        let (bucket, prefix) = match url.strip_prefix("s3://")?.split_once('/') {
            Some((bucket, prefix)) => (bucket, prefix.trim_end_matches('/')),
            None => (url.strip_prefix("s3://")?, ""),
        };
        // The rules of S3 for names; characters of a prefix that no part of the path escapes.
        let is_bucket =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-".contains(&byte);
        let is_prefix = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        let is_part =
            |part: &str| !part.is_empty() && part.bytes().all(is_prefix) && !matches!(part, "." | "..");
        let is_valid = (3..=63).contains(&bucket.len())
            && bucket.bytes().all(is_bucket)
            && (prefix.is_empty() || prefix.split('/').all(is_part));
        is_valid.then(|| (bucket.to_owned(), prefix.to_owned()))
    }

    /// Opens the store. Sends no request.
    pub(crate) fn open(&self) -> Result<Arc<dyn ObjectStore>, BucketError> {
        let BucketConfig { bucket, prefix, endpoint, region, credentials, authorities } = self;
        let failed = |error: object_store::Error| BucketError(error.to_string());
        let mut retry =
            RetryConfig { max_retries: RETRIES_MAX, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        retry.backoff = BackoffConfig { max_backoff: RETRY_PAUSE_MAX, ..BackoffConfig::default() };
        let mut builder = match credentials {
            Some(_) => AmazonS3Builder::new(),
            None => AmazonS3Builder::from_env(),
        };
        if let Some(BucketCredentials { key_id, secret_key, token }) = credentials.clone() {
            let credential = AwsCredential { key_id, secret_key, token };
            builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(credential)));
        }
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint).with_allow_http(endpoint.starts_with("http://"));
        }
        let connector = http::BucketConnector::new(authorities.clone()).map_err(BucketError)?;
        let store = builder
            .with_bucket_name(bucket)
            .with_region(region)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_retry(retry)
            .with_http_connector(connector)
            .build()
            .map_err(failed)?;
        Ok(if prefix.is_empty() {
            Arc::new(store)
        } else {
            Arc::new(PrefixStore::new(store, prefix.as_str()))
        })
    }
}

impl BucketCredentials {
    /// Parses the shared credentials file of AWS: the keys of the profile `default`.
    pub fn parse(text: &str) -> Result<BucketCredentials, String> {
        let (mut key_id, mut secret_key, mut token) = (None, None, None);
        let mut is_default = true;
        for line in text.lines().map(str::trim) {
            if let Some(profile) = line.strip_prefix('[') {
                is_default = profile.trim_end_matches(']').trim() == "default";
                continue;
            }
            let Some((name, value)) =
                line.split_once('=').filter(|_| is_default && !line.starts_with(['#', ';']))
            else {
                continue;
            };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
        let missing =
            |name| format!("has no {name} in the profile [default]; write the format of ~/.aws/credentials");
        Ok(BucketCredentials {
            key_id: key_id.ok_or_else(|| missing("aws_access_key_id"))?,
            secret_key: secret_key.ok_or_else(|| missing("aws_secret_access_key"))?,
            token,
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
            "https://a",
        ] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn credentials_are_those_of_the_default_profile_and_are_not_shown() {
        let text = "# mine\n[other]\naws_access_key_id = X\n[default]\naws_access_key_id = A\naws_secret_access_key=b=c\n";
        let credentials = BucketCredentials::parse(text).unwrap();
        assert_eq!(
            (credentials.key_id.as_str(), credentials.secret_key.as_str(), &credentials.token),
            ("A", "b=c", &None)
        );
        let problem = BucketCredentials::parse("[default]\naws_access_key_id = A").err().unwrap();
        assert!(problem.contains("no aws_secret_access_key"), "{problem}");
        let config = BucketConfig {
            bucket: "jobs".to_owned(),
            prefix: String::new(),
            endpoint: None,
            region: "us-east-1".to_owned(),
            credentials: Some(BucketCredentials { secret_key: "hidden".to_owned(), ..credentials }),
            authorities: None,
        };
        assert!(!format!("{config:?}").contains("hidden"));
    }
}
