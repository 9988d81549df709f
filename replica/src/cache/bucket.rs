//! Models in buckets: `s3://`, `gs://` and `az://`.
//!
//! The client is asynchronous, and the download blocks; so the client has a small runtime of its own.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use buckets::http::ResponseMode;
use buckets::url::BucketUrl;
use buckets::{BucketSettingsError, BucketVariables};
use futures_util::StreamExt as _;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, RetryConfig};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::error::PullError;
use super::origin::{DownloadPolicy, FetchError, ModelOrigin, RangeSink, RemoteFile};

/// Threads of the runtime: TLS of several GB/s.
const THREADS: usize = 2;
/// Maximum length of the text of an error that a server sends; the rest repeats the request.
const REASON_CHARS_MAX: usize = 200;
/// Codes with which S3 reports rejected credentials with another status than 401 and 403.
const REJECTED_CREDENTIALS: [&str; 3] = ["ExpiredToken", "InvalidToken", "InvalidAccessKeyId"];
/// Codes of a missing bucket: S3 and Google, Azure.
const MISSING_BUCKET: [&str; 2] = ["NoSuchBucket", "ContainerNotFound"];

/// Bucket, and the prefix of a model in it.
pub(super) struct BucketOrigin {
    url: BucketUrl,
    host: String,
    /// Fix of a denied request.
    access: String,
    /// Deadline of a small file.
    list_deadline: Duration,
    store: Arc<dyn ObjectStore>,
    /// Present until it is dropped.
    runtime: Option<Runtime>,
}

impl BucketOrigin {
    /// Opens the bucket. Sends no request.
    pub(super) fn open(
        url: &BucketUrl,
        variables: &BucketVariables,
        policy: &DownloadPolicy,
    ) -> Result<BucketOrigin, PullError> {
        // The download repeats requests itself.
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let mode = ResponseMode::Streamed { first_byte: policy.stall, stall: policy.stall };
        let invalid = |problem: String| PullError::BucketSettings {
            what: url.to_string(),
            problem,
            credentials: url.provider.credentials(),
        };
        let opened = buckets::open(url, variables, retry, mode);
        let store = opened.map_err(|BucketSettingsError(problem)| invalid(problem))?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
        let runtime = runtime.map_err(|error| invalid(format!("no thread can be started: {error}")))?;
        let host = buckets::host(url, variables);
        let credentials = url.provider.credentials();
        let mut access = format!(
            "check the policy of the bucket, and the credentials: {credentials} (a missing object is reported in the \
             same way to a client that may not list the bucket)"
        );
        if let Some(unused) = buckets::unused_credentials(url, variables) {
            access = format!("{unused}; {access}");
        }
        let (url, list_deadline) = (url.clone(), policy.list_deadline());
        Ok(BucketOrigin { url, host, access, list_deadline, store, runtime: Some(runtime) })
    }

    /// Completes a request, on a thread of its own: that of the caller may belong to another runtime, which must not block.
    fn run<T: Send>(&self, request: impl Future<Output = T> + Send) -> T {
        let runtime = self.runtime.as_ref().expect("it is taken when the origin is dropped");
        let completed = thread::scope(|scope| scope.spawn(|| runtime.block_on(request)).join());
        completed.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn object(&self, path: &str) -> Result<ObjectPath, FetchError> {
        ObjectPath::parse(self.url.object(path)).map_err(|error| {
            let (host, what, reason) = (self.host(), self.describe(path), error.to_string());
            FetchError::Permanent(PullError::Unreadable { host, what, reason, advice: "correct the prefix" })
        })
    }

    /// Classifies the error of a request for a file.
    fn failure(&self, path: &str, error: &object_store::Error) -> FetchError {
        let (host, what, text) = (self.host(), self.describe(path), error.to_string());
        let forbidden = |status| PullError::Forbidden {
            host: host.clone(),
            what: what.clone(),
            status,
            fix: self.access.clone(),
        };
        let error = match error {
            object_store::Error::NotFound { .. } => {
                let is_bucket = MISSING_BUCKET.iter().any(|code| text.contains(code));
                let what = if is_bucket { format!("bucket {}", self.url.bucket) } else { what };
                PullError::NotFound { host, what }
            }
            object_store::Error::PermissionDenied { .. } => forbidden(403),
            object_store::Error::Unauthenticated { .. } => forbidden(401),
            _ if REJECTED_CREDENTIALS.iter().any(|code| text.contains(code)) => forbidden(400),
            object_store::Error::Precondition { .. } => self.replaced(path, "it has another version"),
            object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
                let advice = "check that it is an object store of this kind";
                PullError::Unreadable { host, what, reason: shortened(&text), advice }
            }
            _ => return FetchError::Transient(shortened(&text)),
        };
        FetchError::Permanent(error)
    }
}

impl Drop for BucketOrigin {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime that waits for its tasks must not be dropped on a thread of another one.
            runtime.shutdown_background();
        }
    }
}

impl ModelOrigin for BucketOrigin {
    fn host(&self) -> String {
        self.host.clone()
    }

    fn describe(&self, path: &str) -> String {
        format!("{}://{}/{}", self.url.provider.scheme(), self.url.bucket, self.url.object(path))
    }

    fn read_small(&self, path: &str, bytes_max: u64) -> Result<Vec<u8>, FetchError> {
        let object = self.object(path)?;
        let read = async {
            let got = self.store.get_opts(&object, GetOptions::default()).await;
            let got = got.map_err(|error| self.failure(path, &error))?;
            if got.meta.size > bytes_max {
                return Err(self.too_large(path, got.meta.size, bytes_max).into());
            }
            let bytes = got.bytes().await.map_err(|error| self.failure(path, &error))?;
            Ok(bytes.to_vec())
        };
        self.run(async {
            let late = || FetchError::Transient(format!("not complete after {:?}", self.list_deadline));
            timeout(self.list_deadline, read).await.unwrap_or_else(|_| Err(late()))
        })
    }

    fn stat(&self, path: &str, sha256: Option<&str>) -> Result<RemoteFile, FetchError> {
        let object = self.object(path)?;
        let head = self.run(async { self.store.head(&object).await });
        let meta = head.map_err(|error| self.failure(path, &error))?;
        Ok(RemoteFile {
            path: path.to_owned(),
            location: object.to_string(),
            bytes: meta.size,
            sha256: sha256.map(str::to_owned),
            etag: meta.e_tag,
            has_ranges: true,
        })
    }

    fn read_range(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
        sink: &mut RangeSink<'_>,
    ) -> Result<(), FetchError> {
        let object = self.object(&file.path)?;
        let options = GetOptions {
            range: Some(GetRange::Bounded(range)),
            if_match: file.etag.clone(),
            ..GetOptions::default()
        };
        self.run(async {
            let got = self.store.get_opts(&object, options).await;
            let got = got.map_err(|error| self.failure(&file.path, &error))?;
            if got.meta.size != file.bytes {
                let reason = format!("it has {} bytes, expected {}", got.meta.size, file.bytes);
                return Err(self.replaced(&file.path, &reason).into());
            }
            let mut stream = got.into_stream();
            while let Some(bytes) = stream.next().await {
                sink(&bytes.map_err(|error| self.failure(&file.path, &error))?)?;
            }
            Ok(())
        })
    }
}

impl BucketOrigin {
    /// Returns the error of an object that has changed since its size was requested.
    fn replaced(&self, path: &str, reason: &str) -> PullError {
        PullError::Replaced { host: self.host(), what: self.describe(path), reason: reason.to_owned() }
    }

    fn too_large(&self, path: &str, bytes: u64, limit: u64) -> PullError {
        PullError::TooLarge { host: self.host(), what: self.describe(path), bytes, limit }
    }
}

/// Returns the begin of an error's text in one line.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(REASON_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
