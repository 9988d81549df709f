//! Files on a web server: `https://` folders, and the files of the hub.

use std::io::Read;
use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};
use url::Url;

use super::error::PullError;
use super::fetch;
use super::netrc;
use super::origin::{DownloadPolicy, FetchError, ModelOrigin, RangeSink, RemoteFile};
use super::origins::ModelOrigins;

/// Folder of a web server.
pub(super) struct WebOrigin {
    agent: Agent,
    /// URL of the folder, with `/` at its end.
    folder: Url,
    /// Repository, for a hub.
    repository: Option<String>,
    /// Value of the `authorization` header.
    authorization: Option<String>,
    /// Where the credentials are configured, for messages.
    credentials: &'static str,
}

impl WebOrigin {
    /// Returns the folder at `url`, with the credentials of `~/.netrc`.
    pub(super) fn new(url: &Url, origins: &ModelOrigins, policy: &DownloadPolicy) -> WebOrigin {
        let text = origins.netrc.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        let host = url.host_str().unwrap_or_default();
        let basic = text
            .and_then(|text| netrc::credentials(&text, host))
            .map(|(user, password)| format!("Basic {}", BASE64.encode(format!("{user}:{password}"))));
        WebOrigin {
            agent: agent(policy),
            folder: url.clone(),
            repository: None,
            authorization: basic,
            credentials: "the user and password of the host in ~/.netrc, or in the file that NETRC names",
        }
    }

    /// Returns a repository of the hub, whose files have URLs of their own.
    pub(super) fn hub(
        endpoint: &Url,
        repository: String,
        token: Option<&str>,
        policy: &DownloadPolicy,
    ) -> WebOrigin {
        WebOrigin {
            agent: agent(policy),
            folder: endpoint.clone(),
            repository: Some(repository),
            authorization: token.map(|token| format!("Bearer {token}")),
            credentials: "the name of the model, and the token in HF_TOKEN if the model needs one",
        }
    }

    fn url(&self, path: &str) -> String {
        let mut url = self.folder.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path.split('/'));
        }
        url.to_string()
    }

    fn send(
        &self,
        method: ureq::http::Method,
        url: &str,
        headers: &[(header::HeaderName, String)],
    ) -> Result<Response<Body>, FetchError> {
        let mut request = ureq::http::Request::builder().method(method).uri(url);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(()).map_err(|error| FetchError::Transient(error.to_string()))?;
        self.agent.run(request).map_err(|error| FetchError::Transient(fetch::reason(error)))
    }

    /// Returns the error of a response without content.
    fn failure(&self, url: &str, status: StatusCode) -> FetchError {
        let (host, what) = (self.host(), url.to_owned());
        match status.as_u16() {
            404 | 410 => PullError::NotFound { host, what }.into(),
            status @ (401 | 403) => {
                let fix = format!("check {}", self.credentials);
                PullError::Forbidden { host, what, status, fix }.into()
            }
            408 | 425 | 429 | 500..=599 => FetchError::Transient(format!("status {}", status.as_u16())),
            412 => self.unreadable(url, "it was replaced during the download; pull again"),
            416 => self.unreadable(url, "it is shorter than the server has said before; pull again"),
            status => PullError::Refused { host, status, what, advice: "check the URL" }.into(),
        }
    }

    fn unreadable(&self, url: &str, reason: &str) -> FetchError {
        let (host, what, reason) = (self.host(), url.to_owned(), reason.to_owned());
        PullError::Unreadable { host, what, reason }.into()
    }
}

impl ModelOrigin for WebOrigin {
    fn host(&self) -> String {
        self.folder.host_str().unwrap_or("this machine").to_owned()
    }

    fn describe(&self, path: &str) -> String {
        match &self.repository {
            Some(repository) => format!("{repository}/{path}"),
            None => self.url(path),
        }
    }

    fn read_small(&self, path: &str, bytes_max: u64) -> Result<Vec<u8>, FetchError> {
        let url = self.url(path);
        let mut response = self.send(ureq::http::Method::GET, &url, &[])?;
        if response.status() != StatusCode::OK {
            return Err(self.failure(&url, response.status()));
        }
        let mut bytes = Vec::new();
        let length = response.body().content_length();
        let read = response.body_mut().as_reader().take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(|error| FetchError::Transient(error.to_string()))?;
        let size = bytes.len() as u64;
        if size > bytes_max {
            let (host, bytes) = (self.host(), length.unwrap_or(size));
            return Err(PullError::TooLarge { host, what: url, bytes, limit: bytes_max }.into());
        }
        match length {
            Some(length) if size < length => Err(FetchError::Transient(truncated(size, length))),
            Some(_) | None => Ok(bytes),
        }
    }

    fn stat(&self, path: &str, sha256: Option<&str>) -> Result<RemoteFile, FetchError> {
        let url = self.url(path);
        let response = self.send(ureq::http::Method::HEAD, &url, &[])?;
        if response.status() != StatusCode::OK {
            return Err(self.failure(&url, response.status()));
        }
        let text = |name| response.headers().get(name)?.to_str().ok();
        let bytes = text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
        let Some(bytes) = bytes else {
            return Err(self.unreadable(&url, "the response to HEAD has no content-length"));
        };
        // `If-Match` needs a strong tag.
        let etag = text(header::ETAG).filter(|etag| !etag.starts_with("W/")).map(str::to_owned);
        Ok(RemoteFile {
            path: path.to_owned(),
            bytes,
            sha256: sha256.map(str::to_owned),
            etag,
            has_ranges: text(header::ACCEPT_RANGES).is_some_and(|unit| unit.trim() == "bytes"),
            location: url,
        })
    }

    fn read_range(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
        sink: &mut RangeSink<'_>,
    ) -> Result<(), FetchError> {
        let mut headers = Vec::new();
        if range != (0..file.bytes) && file.has_ranges {
            let last = if range.end == file.bytes { String::new() } else { (range.end - 1).to_string() };
            headers.push((header::RANGE, format!("bytes={}-{last}", range.start)));
        }
        if let Some(etag) = &file.etag {
            headers.push((header::IF_MATCH, etag.clone()));
        }
        let mut response = self.send(ureq::http::Method::GET, &file.location, &headers)?;
        // A server may ignore the range, and send the whole file.
        let (mut skipped, size) = match response.status() {
            StatusCode::PARTIAL_CONTENT => match fetch::content_range(&response) {
                Some((start, size)) if start == range.start => (0, Some(size)),
                Some(_) | None => {
                    return Err(self.unreadable(&file.location, "the response has another range"));
                }
            },
            StatusCode::OK => (range.start, response.body().content_length()),
            status => return Err(self.failure(&file.location, status)),
        };
        if let Some(size) = size.filter(|size| *size != file.bytes) {
            let reason = format!("it has {size} bytes, expected {}; pull again", file.bytes);
            return Err(self.unreadable(&file.location, &reason));
        }
        let wanted = skipped + (range.end - range.start);
        let mut body = response.body_mut().as_reader().take(wanted);
        let mut buffer = vec![0; 1 << 18];
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(FetchError::Transient(error.to_string())),
            };
            let skip = skipped.min(read as u64);
            skipped -= skip;
            if skip < read as u64 {
                sink(&buffer[skip as usize..read])?;
            }
        }
    }
}

/// Returns the text of a body that ended early.
pub(super) fn truncated(bytes: u64, expected: u64) -> String {
    format!("the response ended after {bytes} of {expected} bytes")
}

fn agent(policy: &DownloadPolicy) -> Agent {
    let agent = Agent::config_builder()
        .tls_config(fetch::tls())
        .http_status_as_error(false)
        .timeout_resolve(Some(fetch::CONNECT_TIMEOUT))
        .timeout_connect(Some(fetch::CONNECT_TIMEOUT))
        .timeout_recv_response(Some(policy.stall))
        .timeout_per_read(Some(policy.stall))
        .max_idle_connections_per_host(policy.connections)
        .user_agent(concat!("meridian/", env!("CARGO_PKG_VERSION")))
        // A range of a compressed response is not a range of the file.
        .accept_encoding("identity")
        .build();
    agent.into()
}
