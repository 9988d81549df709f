//! Bytes from a URL into a file: resumed where they broke off, checked before anybody sees them.
//!
//! A download grows in a *partial*, a file named after its URL and the SHA-256 that the index promises. So a partial
//! can only ever be continued with more of the same file, whoever began it. When the connection breaks, the next
//! attempt asks for the rest (`Range`), for as long as attempts bring bytes; when the process dies, the next pull does
//! the same. Every byte goes through the hash, also those that lay there already, and a partial that does not come out
//! as promised is deleted.
//!
//! Roots of trust are the platform's, so that a company's own authority and `SSL_CERT_FILE` are honoured.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use ureq::ResponseExt;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};
use url::Url;

use super::error::PullError;
use super::manifest::{copy_hashing, hex};

/// To a host that exists this is ample; to one that does not, it is how long a person waits for the sentence.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// From the request to the head of the answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Without a single byte.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest index page that is read: the longest on PyPI have some ten thousand files of 500 bytes.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// The largest file that is downloaded where its size is not known beforehand: the largest files on the hub have 50 GB.
const MAX_FILE_BYTES: u64 = 256 << 30;
/// Attempts in a row that bring no byte, before it is given up.
const FRUITLESS_ATTEMPTS: u32 = 3;

/// How TLS is spoken: ring, and the platform's roots.
pub(super) fn tls() -> TlsConfig {
    TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build()
}

/// Something on another machine.
#[derive(Clone, Copy)]
pub(super) struct Remote<'a> {
    /// Where it is.
    pub(super) url: &'a Url,
    /// What it is, for a sentence about it.
    pub(super) what: &'a str,
    /// What it must hash to, if that is known.
    pub(super) sha256: Option<&'a str>,
    /// Its size, if that is known.
    pub(super) bytes: Option<u64>,
    /// Whom to be there.
    pub(super) token: Option<&'a str>,
    /// The environment variable that leads elsewhere.
    pub(super) setting: &'static str,
}

impl Remote<'_> {
    pub(super) fn host(&self) -> String {
        self.url.host_str().unwrap_or("this machine").to_owned()
    }

    pub(super) fn unreachable(&self, reason: String) -> PullError {
        PullError::Unreachable { host: self.host(), reason, setting: self.setting }
    }

    /// What an answer without content means.
    pub(super) fn refused(&self, status: StatusCode) -> PullError {
        let (host, what, status) = (self.host(), self.what.to_owned(), status.as_u16());
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
        PullError::Unreadable { host: self.host(), what: self.what.to_owned(), reason: reason.to_string() }
    }
}

/// A page of an index.
pub(super) struct Page {
    /// Where it came from in the end, for its relative links.
    pub(super) url: Url,
    /// Whether it says that it is JSON.
    pub(super) is_json: bool,
    /// Its text.
    pub(super) text: String,
}

/// A file that arrived whole and as promised.
pub(super) struct Downloaded {
    /// Where it lies.
    pub(super) path: PathBuf,
    /// Its size.
    pub(super) bytes: u64,
    /// Its SHA-256.
    pub(super) sha256: String,
}

/// The client.
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
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .user_agent(concat!("meridian/", env!("CARGO_PKG_VERSION")))
            // A range of a compressed answer is not a range of the file.
            .accept_encoding("identity")
            .build();
        Fetcher { agent: agent.into() }
    }

    /// Reads a page.
    pub(super) fn page(&self, remote: Remote<'_>, accept: &str) -> Result<Page, PullError> {
        let request = self.agent.get(remote.url.as_str()).header(header::ACCEPT, accept);
        let mut response = request.call().map_err(|error| remote.unreachable(reason(error)))?;
        if response.status() != StatusCode::OK {
            return Err(remote.refused(response.status()));
        }
        let url = Url::parse(&response.get_uri().to_string()).unwrap_or_else(|_| remote.url.clone());
        let content_type = text_header(&response, header::CONTENT_TYPE).unwrap_or_default();
        let is_json = content_type.split(';').next().is_some_and(|kind| kind.trim_end().ends_with("json"));
        let text = response.body_mut().with_config().limit(MAX_PAGE_BYTES).read_to_string();
        Ok(Page { url, is_json, text: text.map_err(|error| remote.unreadable(error))? })
    }

    /// Brings a file into `folder`, continuing what lies there of it.
    pub(super) fn download(
        &self,
        remote: Remote<'_>,
        folder: &Path,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<Downloaded, PullError> {
        let mut partial = Partial::open(folder, remote).map_err(|error| PullError::disk(folder, 0, error))?;
        let lay_there = partial.done > 0;
        self.complete(&mut partial, remote, report)?;
        match partial.finish(remote) {
            // What lay there already may be what is wrong; then a fresh one is right.
            Err(PullError::Checksum { .. }) if lay_there => {
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
        let mut fruitless = 0;
        while remote.bytes.is_none_or(|bytes| partial.done < bytes) {
            let before = partial.done;
            match self.attempt(partial, remote, report) {
                Ok(()) => break,
                Err(Broken::ForGood(error)) => return Err(error),
                Err(Broken::Connection(reason)) => {
                    fruitless = if partial.done > before { 0 } else { fruitless + 1 };
                    if partial.done == 0 {
                        return Err(remote.unreachable(reason));
                    }
                    if fruitless == FRUITLESS_ATTEMPTS {
                        let (host, done) = (remote.host(), partial.done);
                        return Err(PullError::BrokeOff { host, done, reason });
                    }
                }
            }
        }
        Ok(())
    }

    fn attempt(
        &self,
        partial: &mut Partial,
        remote: Remote<'_>,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<(), Broken> {
        let mut request = self.agent.get(remote.url.as_str());
        if partial.done > 0 {
            request = request.header(header::RANGE, format!("bytes={}-", partial.done));
        }
        if let Some(token) = remote.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(|error| Broken::Connection(error.to_string()))?;
        let total = match response.status() {
            StatusCode::PARTIAL_CONTENT => match content_range(&response) {
                Some((start, total)) if start == partial.done => Some(total),
                Some(_) | None => return Err(Broken::ForGood(remote.unreadable("it sent another range"))),
            },
            StatusCode::OK => {
                partial.restart()?;
                response.body().content_length()
            }
            // There is no more to send: either all of it lies here already, or what lies here is of something else.
            StatusCode::RANGE_NOT_SATISFIABLE if partial.done > 0 => {
                return if remote.sha256.is_some_and(|wanted| wanted == hex(partial.hasher.clone())) {
                    Ok(())
                } else {
                    partial.restart()?;
                    Err(Broken::Connection("it has less of the file than there is here".to_owned()))
                };
            }
            status => return Err(Broken::ForGood(remote.refused(status))),
        };
        let most = remote.bytes.unwrap_or(MAX_FILE_BYTES);
        let too_long = || Broken::ForGood(remote.unreadable(format!("it sends more than {most} bytes")));
        if total.is_some_and(|total| total > most) {
            return Err(too_long());
        }
        match partial.take(
            response.body_mut().as_reader().take(most.saturating_sub(partial.done) + 1),
            total,
            report,
        ) {
            Ok(()) if partial.done > most => Err(too_long()),
            taken => taken,
        }
    }
}

/// Why an attempt ended before the file did.
enum Broken {
    /// Another attempt may bring the rest.
    Connection(String),
    /// None will.
    ForGood(PullError),
}

impl From<PullError> for Broken {
    fn from(error: PullError) -> Broken {
        Broken::ForGood(error)
    }
}

/// A file that is still growing.
struct Partial {
    path: PathBuf,
    file: File,
    hasher: Sha256,
    done: u64,
}

impl Partial {
    fn open(folder: &Path, remote: Remote<'_>) -> io::Result<Partial> {
        let mut name = Sha256::new();
        name.update(format!("{}\n{}", remote.url, remote.sha256.unwrap_or_default()));
        let path = folder.join(format!("{}.part", &hex(name)[..32]));
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
        let mut hasher = Sha256::new();
        // Without a digest nobody could tell whether the rest would fit to what lies here.
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

    /// Takes in what `from` brings; `total` is the size of the whole file.
    fn take(
        &mut self,
        mut from: impl Read,
        total: Option<u64>,
        report: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<(), Broken> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            report(self.done, total);
            let n = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Broken::Connection(error.to_string())),
            };
            self.write(&buffer[..n], total)?;
        }
        match total {
            Some(total) if self.done < total => {
                Err(Broken::Connection("the connection was closed".to_owned()))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn write(&mut self, bytes: &[u8], total: Option<u64>) -> Result<(), PullError> {
        if let Err(error) = self.file.write_all(bytes) {
            let needed = total.unwrap_or(self.done + bytes.len() as u64);
            let error = PullError::disk(&self.path, needed, error);
            if matches!(error, PullError::DiskFull { .. }) {
                // Whoever ran out of room is not helped by a file that he cannot use.
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        self.hasher.update(bytes);
        self.done += bytes.len() as u64;
        Ok(())
    }

    /// Checks the whole.
    fn finish(self, remote: Remote<'_>) -> Result<Downloaded, PullError> {
        let Partial { path, file, hasher, done } = self;
        let given = hex(hasher);
        if let Some(wanted) = remote.sha256
            && wanted != given
        {
            fs::remove_file(&path).map_err(|error| PullError::disk(&path, 0, error))?;
            let (host, what, wanted) = (remote.host(), remote.what.to_owned(), wanted.to_owned());
            return Err(PullError::Checksum { host, what, wanted, given });
        }
        file.sync_all().map_err(|error| PullError::disk(&path, done, error))?;
        Ok(Downloaded { path, bytes: done, sha256: given })
    }
}

/// What the network said, without the library's own prefix.
pub(super) fn reason(error: ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => error.to_string(),
        error => error.to_string(),
    }
}

fn text_header<B>(response: &Response<B>, name: header::HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

/// Start and total of `bytes start-end/total`.
fn content_range<B>(response: &Response<B>) -> Option<(u64, u64)> {
    let (range, total) =
        text_header(response, header::CONTENT_RANGE)?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fills_up_under_a_download_is_told_with_what_it_needs() {
        let full = OpenOptions::new().write(true).open("/dev/full");
        let file = full.expect("a disk that is always full");
        let folder = tempfile::tempdir().expect("a folder");
        // What is removed to make room is the partial, so it must not be the device.
        let path = folder.path().join("x.part");
        fs::write(&path, "").expect("a partial");
        let mut partial = Partial { path: path.clone(), file, hasher: Sha256::new(), done: 1_000 };
        let error = partial.write(&[0; 100], Some(83_000)).expect_err("full");
        assert!(matches!(error, PullError::DiskFull { needed: 83_000, .. }), "{error}");
        assert!(!path.exists(), "the room that it took is given back");
    }
}
