//! URLs of buckets: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` and `az://CONTAINER/PREFIX`.

use std::fmt;
use std::str::FromStr;

/// Maximum length of a prefix: it becomes the name of a folder.
pub const PREFIX_BYTES_MAX: usize = 200;

/// Service that stores the objects of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BucketProvider {
    /// Amazon S3, or a server with its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage; a bucket is a container of the account in the environment.
    Azure,
}

impl BucketProvider {
    /// All providers.
    pub const ALL: [BucketProvider; 3] = [BucketProvider::S3, BucketProvider::Gcs, BucketProvider::Azure];

    /// Returns the scheme of its URLs.
    pub fn scheme(self) -> &'static str {
        match self {
            BucketProvider::S3 => "s3",
            BucketProvider::Gcs => "gs",
            BucketProvider::Azure => "az",
        }
    }

    /// Returns the name of the service.
    pub fn service(self) -> &'static str {
        match self {
            BucketProvider::S3 => "Amazon S3",
            BucketProvider::Gcs => "Google Cloud Storage",
            BucketProvider::Azure => "Azure Blob Storage",
        }
    }

    /// Returns the variables that give access to a bucket, for messages.
    pub fn credentials(self) -> &'static str {
        match self {
            BucketProvider::S3 => {
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the file ~/.aws/credentials, a role of the instance or \
                 pod, or AWS_SKIP_SIGNATURE=true for a public bucket"
            }
            BucketProvider::Gcs => {
                "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, a service account of the \
                 instance or pod, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
            }
            BucketProvider::Azure => {
                "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID with its secret, a managed \
                 identity, or AZURE_SKIP_SIGNATURE=true for a public container"
            }
        }
    }
}

/// Bucket, and the prefix of the names of its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketUrl {
    /// Service.
    pub provider: BucketProvider,
    /// Name of the bucket or container.
    pub bucket: String,
    /// Prefix without `/` at its ends; empty for none.
    pub prefix: String,
}

/// Error for a text that is not the URL of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BucketUrlError(pub &'static str);

impl FromStr for BucketUrl {
    type Err = BucketUrlError;

    fn from_str(text: &str) -> Result<BucketUrl, BucketUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(BucketUrlError("the scheme is missing"))?;
        let provider = BucketProvider::ALL.into_iter().find(|provider| provider.scheme() == scheme);
        let provider = provider.ok_or(BucketUrlError("the scheme is unknown"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        // The common rules of the three services; names of buckets at Google may also have `_`.
        let is_bucket = |byte: u8| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'_')
        };
        if !(3..=63).contains(&bucket.len()) || !bucket.bytes().all(is_bucket) || bucket.starts_with('.') {
            return Err(BucketUrlError("the name of the bucket is invalid"));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        // Characters that no part of a path escapes.
        let is_prefix = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        let is_part =
            |part: &str| !part.is_empty() && part.bytes().all(is_prefix) && !matches!(part, "." | "..");
        if !prefix.is_empty() && !prefix.split('/').all(is_part) {
            return Err(BucketUrlError("the prefix is invalid"));
        }
        if prefix.len() > PREFIX_BYTES_MAX {
            return Err(BucketUrlError("the prefix has more than 200 characters"));
        }
        Ok(BucketUrl { provider, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl BucketUrl {
    /// Returns the name of the object at this path below the prefix.
    pub fn object(&self, path: &str) -> String {
        if self.prefix.is_empty() { path.to_owned() } else { format!("{}/{path}", self.prefix) }
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BucketUrl { provider, bucket, prefix } = self;
        write!(f, "{}://{bucket}", provider.scheme())?;
        if prefix.is_empty() { Ok(()) } else { write!(f, "/{prefix}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_service_a_bucket_and_a_prefix() {
        for (text, written, object) in [
            ("s3://jobs", "s3://jobs", "a/b"),
            ("s3://jobs/", "s3://jobs", "a/b"),
            ("gs://my.jobs_1/models/eu/", "gs://my.jobs_1/models/eu", "models/eu/a/b"),
            ("az://models/minilm", "az://models/minilm", "minilm/a/b"),
        ] {
            let url: BucketUrl = text.parse().unwrap();
            assert_eq!((url.to_string().as_str(), url.object("a/b").as_str()), (written, object));
            assert_eq!(url.to_string().parse(), Ok(url));
        }
        let longest = format!("s3://jobs/{}", "a".repeat(PREFIX_BYTES_MAX));
        assert!(longest.parse::<BucketUrl>().is_ok());
        assert!(format!("{longest}a").parse::<BucketUrl>().is_err());
        for wrong in [
            "",
            "jobs",
            "s3://",
            "s3://ab",
            "s3://Jobs",
            "s3://jobs/a//b",
            "s3://jobs/a b",
            "s3://jobs/..",
            "s3://..a/b",
            "https://a",
        ] {
            assert!(wrong.parse::<BucketUrl>().is_err(), "{wrong}");
        }
    }
}
