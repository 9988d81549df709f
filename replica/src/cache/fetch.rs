//! Downloads of index pages and wheels, with resumption and verification. The files of other origins, which are larger and
//! have a known size, are downloaded in parts ([`super::download`]).
//!
//! A download grows in a *partial*, a file named after its URL and the SHA-256 listed by the index. So a partial can
//! only be continued with more of the same file, whichever process began it. When the connection is lost, the next
//! attempt requests the rest (`Range`), as long as attempts make progress; when the process dies, the next pull does
//! the same. All bytes are hashed, including those of a resumed partial, and a partial with a wrong digest is deleted.
//!
//! The trusted certificate roots are the platform's, so that a company's own authority and `SSL_CERT_FILE` work.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use ureq::http::{Method, Response, StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};
use url::Url;

use super::error::PullError;
use super::manifest::{copy_hashing, hex};
use super::redirect::{WebRequest, WebRequestError, WebResponse, responding_host};

/// Ample for a host that exists; for others, the time until the error message.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// From the request to the response head.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time without a single byte.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Deadline of a whole index page or list of files: the timeout of reads does not limit a server that sends a byte now and
/// then.
const PAGE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of an index page: the longest on PyPI have some ten thousand files of 500 bytes.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Maximum size of a file whose size is not known beforehand: the largest files on the hub have 50 GB.
const MAX_FILE_BYTES: u64 = 256 << 30;
/// Consecutive attempts without progress before the download fails.
const MAX_ATTEMPTS_WITHOUT_PROGRESS: u32 = 3;

/// Returns the TLS configuration: ring, and the platform's roots.
pub(super) fn tls() -> TlsConfig {
    TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build()
}

/// Resource on another host.
#[derive(Clone, Copy)]
pub(super) struct Remote<'a> {
    /// URL.
    pub(super) url: &'a Url,
    /// Description, for error messages.
    pub(super) what: &'a str,
    /// Expected SHA-256, if known.
    pub(super) sha256: Option<&'a str>,
    /// Access token.
    pub(super) token: Option<&'a str>,
    /// Environment variable that selects another host.
    pub(super) setting: &'static str,
    /// Advice for a host that does not respond as one of its kind.
    pub(super) advice: &'static str,
}

impl Remote<'_> {
    pub(super) fn host(&self) -> String {
        self.url.host_str().unwrap_or("this machine").to_owned()
    }

    pub(super) fn unreachable(&self, reason: String) -> PullError {
        PullError::Unreachable { host: self.host(), reason, setting: self.setting }
    }

    /// Returns the error of a response of this host without content.
    pub(super) fn error_for_status(&self, status: StatusCode, host: &str) -> PullError {
        let (host, what, status) = (host.to_owned(), self.what.to_owned(), status.as_u16());
        match status {
            404 | 410 => PullError::NotFound { host, what },
            401 | 403 => PullError::Refused {
                host,
                status,
                what,
                advice: "check the name, and the token if it needs one",
            },
            _ => PullError::Refused { host, status, what, advice: "try again later" },
        }
    }

    pub(super) fn unreadable(&self, reason: impl ToString) -> PullError {
        let (host, what, reason) = (self.host(), self.what.to_owned(), reason.to_string());
        PullError::Unreadable { host, what, reason, advice: self.advice }
    }

    /// Sends a GET request with these headers.
    fn get(
        self,
        agent: &ureq::Agent,
        headers: &[(header::HeaderName, String)],
        deadline: Option<Duration>,
    ) -> Result<WebResponse, AttemptError> {
        let authorization = self.token.map(|token| format!("Bearer {token}"));
        let request = WebRequest {
            method: &Method::GET,
            url: self.url,
            headers,
            authorization: authorization.as_deref(),
            deadline,
        };
        request.send(agent).map_err(|error| match error {
            WebRequestError::InsecureRedirect { host, target } => {
                PullError::InsecureRedirect { host, what: self.what.to_owned(), target }.into()
            }
            WebRequestError::Failed(error) => AttemptError::Transient(reason(error)),
            WebRequestError::Redirects(reason) => AttemptError::Permanent(self.unreadable(reason)),
        })
    }
}

/// Page of a package index.
pub(super) struct IndexPage {
    /// URL after redirects, for relative links.
    pub(super) url: Url,
    /// Whether its content type is JSON.
    pub(super) is_json: bool,
    /// Text of the page.
    pub(super) text: String,
}

/// HTTP client for downloads.
pub(super) struct Fetcher {
    agent: ureq::Agent,
}

impl Fetcher {
    pub(super) fn new() -> Fetcher {
        let agent = ureq::Agent::config_builder()
            .tls_config(tls())
            .http_status_as_error(false)
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(RESPONSE_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .user_agent(concat!("meridian/", env!("CARGO_PKG_VERSION")))
            // A range of a compressed response is not a range of the file.
            .accept_encoding("identity")
            .build();
        Fetcher { agent: agent.into() }
    }

    /// Downloads a page.
    pub(super) fn page(&self, remote: Remote<'_>, accept: &str) -> Result<IndexPage, PullError> {
        let headers = [(header::ACCEPT, accept.to_owned())];
        let sent = remote.get(&self.agent, &headers, Some(PAGE_TIMEOUT));
        let WebResponse { mut response, url } = sent.map_err(|error| match error {
            AttemptError::Transient(reason) => remote.unreachable(reason),
            AttemptError::Permanent(error) => error,
        })?;
        if response.status() != StatusCode::OK {
            return Err(remote.error_for_status(response.status(), &responding_host(remote.url, &url)));
        }
        let content_type = text_header(&response, header::CONTENT_TYPE).unwrap_or_default();
        let is_json = content_type.split(';').next().is_some_and(|kind| kind.trim_end().ends_with("json"));
        let text = response.body_mut().with_config().limit(MAX_PAGE_BYTES).read_to_string();
        Ok(IndexPage { url, is_json, text: text.map_err(|error| remote.unreadable(error))? })
    }

    /// Downloads a file into `folder`, resuming its partial; returns its path.
    pub(super) fn download(
        &self,
        remote: Remote<'_>,
        folder: &Path,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<PathBuf, PullError> {
        let mut partial = Partial::open(folder, remote).map_err(|error| PullError::disk(folder, 0, error))?;
        let resumed = partial.done > 0;
        self.complete(&mut partial, remote, report)?;
        match partial.finish(remote) {
            // The resumed bytes may be the wrong ones; download the file from its start.
            Err(PullError::Checksum { .. }) if resumed => {
                let mut partial =
                    Partial::open(folder, remote).map_err(|error| PullError::disk(folder, 0, error))?;
                self.complete(&mut partial, remote, report)?;
                partial.finish(remote)
            }
            finished => finished,
        }
    }

    fn complete(
        &self,
        partial: &mut Partial,
        remote: Remote<'_>,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<(), PullError> {
        let mut attempts_without_progress = 0;
        loop {
            let before = partial.done;
            match self.attempt(partial, remote, report) {
                Ok(()) => return Ok(()),
                Err(AttemptError::Permanent(error)) => return Err(error),
                Err(AttemptError::Transient(reason)) => {
                    attempts_without_progress =
                        if partial.done > before { 0 } else { attempts_without_progress + 1 };
                    if partial.done == 0 {
                        return Err(remote.unreachable(reason));
                    }
                    if attempts_without_progress == MAX_ATTEMPTS_WITHOUT_PROGRESS {
                        let (host, done) = (remote.host(), partial.done);
                        return Err(PullError::ConnectionLost { host, done, reason });
                    }
                }
            }
        }
    }

    fn attempt(
        &self,
        partial: &mut Partial,
        remote: Remote<'_>,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<(), AttemptError> {
        let range = (partial.done > 0).then(|| (header::RANGE, format!("bytes={}-", partial.done)));
        let WebResponse { mut response, url } = remote.get(&self.agent, range.as_slice(), None)?;
        let total = match response.status() {
            StatusCode::PARTIAL_CONTENT => match content_range(&response) {
                Some((start, total)) if start == partial.done => Some(total),
                Some(_) | None => {
                    return Err(AttemptError::Permanent(remote.unreadable("the response has another range")));
                }
            },
            StatusCode::OK => {
                partial.restart()?;
                response.body().content_length()
            }
            // No more bytes exist: the partial is either complete, or of another file.
            StatusCode::RANGE_NOT_SATISFIABLE if partial.done > 0 => {
                return if remote.sha256.is_some_and(|expected| expected == hex(partial.hasher.clone())) {
                    Ok(())
                } else {
                    partial.restart()?;
                    Err(AttemptError::Transient(
                        "the file of the host is shorter than the partial download".to_owned(),
                    ))
                };
            }
            status => {
                let host = responding_host(remote.url, &url);
                return Err(AttemptError::Permanent(remote.error_for_status(status, &host)));
            }
        };
        let too_long = || {
            AttemptError::Permanent(
                remote.unreadable(format!("the response has more than {MAX_FILE_BYTES} bytes")),
            )
        };
        if total.is_some_and(|total| total > MAX_FILE_BYTES) {
            return Err(too_long());
        }
        match partial.take(
            response.body_mut().as_reader().take(MAX_FILE_BYTES.saturating_sub(partial.done) + 1),
            total,
            report,
        ) {
            Ok(()) if partial.done > MAX_FILE_BYTES => Err(too_long()),
            taken => taken,
        }
    }
}

/// Reason why an attempt ended before the file was complete.
enum AttemptError {
    /// Another attempt may complete the file.
    Transient(String),
    /// Further attempts would fail as well.
    Permanent(PullError),
}

impl From<PullError> for AttemptError {
    fn from(error: PullError) -> AttemptError {
        AttemptError::Permanent(error)
    }
}

/// Returns the path of the partial download of a file in `folder`.
pub(super) fn partial_path(folder: &Path, remote: Remote<'_>) -> PathBuf {
    let mut name = Sha256::new();
    name.update(format!("{}\n{}", remote.url, remote.sha256.unwrap_or_default()));
    folder.join(format!("{}.part", &hex(name)[..32]))
}

/// File that is being downloaded.
struct Partial {
    path: PathBuf,
    file: File,
    hasher: Sha256,
    done: u64,
}

impl Partial {
    fn open(folder: &Path, remote: Remote<'_>) -> io::Result<Partial> {
        let path = partial_path(folder, remote);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
        let mut hasher = Sha256::new();
        // Without a digest the rest cannot be verified against the existing bytes.
        let done = match remote.sha256 {
            Some(_) => copy_hashing(&mut file, &mut hasher, |_| Ok(()))?,
            None => file.set_len(0).map(|()| 0)?,
        };
        Ok(Partial { path, file, hasher, done })
    }

    fn restart(&mut self) -> Result<(), PullError> {
        if self.done > 0 {
            let truncated = self.file.set_len(0).and_then(|()| self.file.rewind());
            truncated.map_err(|error| PullError::disk(&self.path, 0, error))?;
            self.hasher = Sha256::new();
            self.done = 0;
        }
        Ok(())
    }

    /// Appends the bytes of `from`; `total` is the size of the whole file.
    fn take(
        &mut self,
        mut from: impl Read,
        total: Option<u64>,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<(), AttemptError> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            report(self.done, total);
            let n = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(AttemptError::Transient(error.to_string())),
            };
            self.write(&buffer[..n], total)?;
        }
        match total {
            Some(total) if self.done < total => {
                Err(AttemptError::Transient("the connection was closed".to_owned()))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn write(&mut self, bytes: &[u8], total: Option<u64>) -> Result<(), PullError> {
        if let Err(error) = self.file.write_all(bytes) {
            let needed = total.unwrap_or(self.done + bytes.len() as u64);
            let error = PullError::disk(&self.path, needed, error);
            if matches!(error, PullError::DiskFull { .. }) {
                // An incomplete file is deleted to free space.
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        self.hasher.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    /// Verifies the complete file; returns its path.
    fn finish(self, remote: Remote<'_>) -> Result<PathBuf, PullError> {
        let Partial { path, file, hasher, done } = self;
        let actual = hex(hasher);
        if let Some(expected) = remote.sha256
            && expected != actual
        {
            fs::remove_file(&path).map_err(|error| PullError::disk(&path, 0, error))?;
            let (host, what, expected) = (remote.host(), remote.what.to_owned(), expected.to_owned());
            return Err(PullError::Checksum { host, what, expected, actual });
        }
        file.sync_all().map_err(|error| PullError::disk(&path, done, error))?;
        Ok(path)
    }
}

/// Returns whether requests to this URL, and to those that its host redirects to, have TLS.
pub(super) fn is_tls(url: &Url) -> bool {
    url.scheme() == "https"
}

/// Returns the error message without the library's prefix.
pub(super) fn reason(error: ureq::Error) -> String {
    match error {
        // The URL may contain a signature.
        ureq::Error::RequireHttpsOnly(_) => "it redirects to a URL without TLS".to_owned(),
        ureq::Error::Io(error) => error.to_string(),
        error => error.to_string(),
    }
}

fn text_header<B>(response: &Response<B>, name: header::HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns start and total of `bytes start-end/total`.
pub(super) fn content_range<B>(response: &Response<B>) -> Option<(u64, u64)> {
    let (range, total) =
        text_header(response, header::CONTENT_RANGE)?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fills_up_during_a_download_is_reported_with_the_needed_bytes() {
        let full = OpenOptions::new().write(true).open("/dev/full");
        let file = full.expect("a disk that is always full");
        let folder = tempfile::tempdir().expect("a folder");
        // The partial is deleted to free space, so its path must not be the device.
        let path = folder.path().join("x.part");
        fs::write(&path, "").expect("a partial");
        let mut partial = Partial { path: path.clone(), file, hasher: Sha256::new(), done: 1_000 };
        let error = partial.write(&[0; 100], Some(83_000)).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 83_000, .. }), "{error}");
        assert!(!path.exists(), "the partial is deleted");
    }
}
