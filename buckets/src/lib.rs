//! Clients of buckets: S3-compatible stores, Google Cloud Storage and Azure Blob Storage.
//!
//! The protocols, signatures and instance credentials are those of the crate `object_store`; the connections are [`http`],
//! because its own client, reqwest, needs a second provider of cryptography (deny.toml). Its features `aws-base`,
//! `gcp-base` and `azure-base` are the three protocols without that client.
//!
//! - [`url`]: `s3://`, `gs://` and `az://` URLs.
//! - [`credentials`]: the shared credentials file of AWS, which `object_store` does not read.
//! - [`open`]: a client with the credentials of the environment; [`s3`]: one with settings of a configuration file.
//!
//! The number of retries is an argument: the caller knows how long a request may take.

pub mod credentials;
pub mod http;
pub mod url;
mod variables;

pub use variables::{BucketSettingsError, BucketVariables};

use std::sync::Arc;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, S3ConditionalPut};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ObjectStore, RetryConfig, StaticCredentialProvider};
use tokio_rustls::rustls::RootCertStore;

use crate::credentials::{BucketCredentials, CredentialsFile};
use crate::http::{BucketConnector, ResponseMode};
use crate::url::{BucketProvider, BucketUrl};

/// Variables with the URL of an S3-compatible server, the first of which has precedence.
const S3_ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

/// Opens a bucket with the credentials of the environment. Sends no request.
///
/// Names of objects begin with the prefix of the URL; the store does not add it.
///
/// # Errors
///
/// When a variable or a file of credentials is invalid.
pub fn open(
    url: &BucketUrl,
    variables: &BucketVariables,
    retry: RetryConfig,
    mode: ResponseMode,
) -> Result<Arc<dyn ObjectStore>, BucketSettingsError> {
    let failed = |error: object_store::Error| BucketSettingsError(error.to_string());
    let connector = BucketConnector::new(None, mode).map_err(BucketSettingsError)?;
    match url.provider {
        BucketProvider::S3 => {
            let builder = s3_of(variables)?.with_bucket_name(&url.bucket);
            let store = builder.with_retry(retry).with_http_connector(connector).build().map_err(failed)?;
            Ok(Arc::new(store))
        }
        BucketProvider::Gcs => {
            let mut builder = GoogleCloudStorageBuilder::new();
            if let Some(file) = variables.get("SERVICE_ACCOUNT") {
                builder = builder.with_service_account_path(file);
            }
            for (key, value) in variables.keys("GOOGLE_") {
                if let Ok(key) = key.parse() {
                    builder = builder.with_config(key, value);
                }
            }
            let builder = builder.with_bucket_name(&url.bucket);
            let store = builder.with_retry(retry).with_http_connector(connector).build().map_err(failed)?;
            Ok(Arc::new(store))
        }
        BucketProvider::Azure => {
            let mut builder = MicrosoftAzureBuilder::new();
            for (key, value) in variables.keys("AZURE_") {
                if let Ok(key) = key.parse() {
                    builder = builder.with_config(key, value);
                }
            }
            if let Some(endpoint) = variables.get("IDENTITY_ENDPOINT") {
                builder = builder.with_msi_endpoint(endpoint);
            }
            let builder = builder.with_container_name(&url.bucket);
            let store = builder.with_retry(retry).with_http_connector(connector).build().map_err(failed)?;
            Ok(Arc::new(store))
        }
    }
}

/// Returns the host that serves a bucket, for messages.
pub fn host(url: &BucketUrl, variables: &BucketVariables) -> String {
    let endpoint: &[&str] = match url.provider {
        BucketProvider::S3 => &S3_ENDPOINTS,
        BucketProvider::Gcs => &["GOOGLE_BASE_URL"],
        BucketProvider::Azure => &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"],
    };
    let configured = endpoint.iter().find_map(|name| variables.get(name));
    let configured = configured.and_then(|url| url.parse::<hyper::Uri>().ok());
    match configured.as_ref().and_then(hyper::Uri::authority) {
        Some(authority) => authority.as_str().rsplit('@').next().unwrap_or_default().to_owned(),
        None => url.provider.service().to_owned(),
    }
}

/// Returns a builder with the variables, and with the credentials file if no variable has credentials.
fn s3_of(variables: &BucketVariables) -> Result<AmazonS3Builder, BucketSettingsError> {
    let mut builder = AmazonS3Builder::new();
    for (key, value) in variables.keys("AWS_") {
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = S3_ENDPOINTS.iter().find_map(|name| variables.get(name)) {
        builder = with_endpoint(builder, endpoint);
    }
    match CredentialsFile::read(variables)? {
        CredentialsFile::Keys(credentials) => Ok(builder.with_credentials(credentials.provider())),
        CredentialsFile::NoDefaultProfile(_) | CredentialsFile::Unused => Ok(builder),
    }
}

/// Sets the server. `with_endpoint` of the builder sets only the key that has less precedence than that of
/// `AWS_ENDPOINT_URL_S3`.
fn with_endpoint(builder: AmazonS3Builder, endpoint: &str) -> AmazonS3Builder {
    let is_plaintext = endpoint.starts_with("http://");
    builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint).with_allow_http(is_plaintext)
}

/// Returns why the credentials file of AWS is not used although it exists, for the message of a denied request.
pub fn unused_credentials(url: &BucketUrl, variables: &BucketVariables) -> Option<String> {
    match (url.provider, CredentialsFile::read(variables)) {
        (BucketProvider::S3, Ok(CredentialsFile::NoDefaultProfile(path))) => Some(format!(
            "{} is not used, because it has no profile [default] and AWS_PROFILE is not set",
            path.display()
        )),
        _ => None,
    }
}

/// Settings of a bucket of an S3-compatible store, from a configuration file.
#[derive(Clone)]
pub struct S3Settings {
    /// Name of the bucket.
    pub bucket: String,
    /// URL of the server; that of AWS in the region if there is none.
    pub endpoint: Option<String>,
    /// Region of the signatures.
    pub region: String,
    /// Credentials; those of the environment (variables, web identity, instance role) if there are none.
    pub credentials: Option<BucketCredentials>,
    /// Authorities of the server's certificate; those of the system if there are none.
    pub authorities: Option<RootCertStore>,
}

/// Opens a bucket of an S3-compatible store with conditional writes (`if-none-match`). Sends no request.
///
/// # Errors
///
/// When the settings or the certificates of the system are invalid.
pub fn s3(
    settings: &S3Settings,
    retry: RetryConfig,
    mode: ResponseMode,
) -> Result<AmazonS3, BucketSettingsError> {
    let builder = s3_with(settings, &BucketVariables::of_process())?;
    let connector = BucketConnector::new(settings.authorities.clone(), mode).map_err(BucketSettingsError)?;
    let builder = builder.with_conditional_put(S3ConditionalPut::ETagMatch).with_retry(retry);
    let built = builder.with_http_connector(connector).build();
    built.map_err(|error| BucketSettingsError(error.to_string()))
}

/// Returns a builder with the settings, which have precedence over the variables.
fn s3_with(
    settings: &S3Settings,
    variables: &BucketVariables,
) -> Result<AmazonS3Builder, BucketSettingsError> {
    let S3Settings { bucket, endpoint, region, credentials, authorities: _ } = settings;
    let mut builder = match credentials {
        Some(credentials) => AmazonS3Builder::new().with_credentials(credentials.clone().provider()),
        None => s3_of(variables)?,
    };
    if let Some(endpoint) = endpoint {
        builder = with_endpoint(builder, endpoint);
    }
    Ok(builder.with_bucket_name(bucket).with_region(region))
}

impl BucketCredentials {
    fn provider(self) -> Arc<StaticCredentialProvider<AwsCredential>> {
        let BucketCredentials { key_id, secret_key, token } = self;
        Arc::new(StaticCredentialProvider::new(AwsCredential { key_id, secret_key, token }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(list: &[(&str, &str)]) -> BucketVariables {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn no_retry() -> RetryConfig {
        RetryConfig { max_retries: 0, ..RetryConfig::default() }
    }

    #[test]
    fn each_provider_opens_with_the_variables_of_its_own_tools() {
        let variables = variables(&[
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("GOOGLE_SKIP_SIGNATURE", "true"),
            ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
            ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
            ("PATH", "not ours"),
        ]);
        assert!(!format!("{variables:?}").contains("a2V5"), "values are secret");
        assert_eq!(variables.get("PATH"), None);
        for url in ["s3://models/a", "gs://models/a", "az://models/a"] {
            let url: BucketUrl = url.parse().unwrap();
            let opened = open(&url, &variables, no_retry(), ResponseMode::DOWNLOAD);
            assert!(opened.is_ok(), "{url}: {:?}", opened.err());
        }
        let host = |url: &str| host(&url.parse().unwrap(), &variables);
        assert_eq!(host("s3://models/a"), "127.0.0.1:9000");
        assert_eq!(host("gs://models/a"), "Google Cloud Storage");
    }

    #[test]
    fn a_configured_endpoint_has_precedence_over_the_variables() {
        let endpoint = |configured: Option<&str>, list: &[(&str, &str)]| {
            let settings = S3Settings {
                bucket: "models".to_owned(),
                endpoint: configured.map(str::to_owned),
                region: "eu".to_owned(),
                credentials: None,
                authorities: None,
            };
            let builder = s3_with(&settings, &variables(list)).unwrap();
            // The builder uses the first of the two.
            let key = |key| builder.get_config_value(&key);
            key(AmazonS3ConfigKey::S3Endpoint).or_else(|| key(AmazonS3ConfigKey::Endpoint))
        };
        let all = [
            ("AWS_ENDPOINT", "http://c"),
            ("AWS_ENDPOINT_URL", "http://b"),
            ("AWS_ENDPOINT_URL_S3", "http://a"),
            ("AWS_SKIP_SIGNATURE", "true"),
        ];
        assert_eq!(endpoint(Some("https://d"), &all).as_deref(), Some("https://d"));
        assert_eq!(endpoint(None, &all).as_deref(), Some("http://a"));
        assert_eq!(endpoint(None, &all[..2]).as_deref(), Some("http://b"));
        let empty = [("AWS_ENDPOINT_URL_S3", ""), ("AWS_ENDPOINT", "http://c")];
        assert_eq!(endpoint(None, &empty).as_deref(), Some("http://c"), "an empty variable is not set");
        assert_eq!(endpoint(None, &all[3..]), None);
    }

    #[test]
    fn a_credentials_file_without_a_default_profile_is_named() {
        let folder = std::env::temp_dir().join(format!("meridian-unused-{}", std::process::id()));
        std::fs::create_dir_all(folder.join(".aws")).unwrap();
        std::fs::write(folder.join(".aws/credentials"), "[other]\naws_access_key_id = X\n").unwrap();
        let variables = variables(&[("HOME", folder.to_str().unwrap())]);
        let unused = |url: &str| unused_credentials(&url.parse().unwrap(), &variables);
        let text = unused("s3://models/a").unwrap();
        assert!(text.contains(".aws/credentials is not used") && text.contains("[default]"), "{text}");
        assert_eq!(unused("gs://models/a"), None);
        assert!(
            open(&"s3://models/a".parse().unwrap(), &variables, no_retry(), ResponseMode::DOWNLOAD).is_ok()
        );
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_account_that_azure_needs_is_named() {
        let url: BucketUrl = "az://models/a".parse().unwrap();
        let error = open(&url, &variables(&[]), no_retry(), ResponseMode::DOWNLOAD).err().unwrap();
        assert!(error.to_string().to_ascii_lowercase().contains("account"), "{error}");
    }
}
