//! Files on a web server: `https://` folders, and the files of the hub.

use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ureq::Agent;
use ureq::http::{Method, StatusCode, header};
use url::Url;

use super::error::PullError;
use super::netrc;
use super::origin::{DownloadPolicy, FetchError, ModelOrigin, RangeSink, RemoteFile};
use super::origins::ModelOrigins;
use super::redirect::{WebRequest, WebRequestError, WebResponse, responding_host};
use super::{fetch, hf};

/// Advice for a web server that does not respond as one for files.
const SERVER_ADVICE: &str =
    "use a web server that sends `content-length` and answers `range`, or correct the proxy before it";

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
    /// Deadline of a small file.
    list_deadline: Duration,
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
            agent: agent(policy, url),
            list_deadline: policy.list_deadline(),
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
            agent: agent(policy, endpoint),
            list_deadline: policy.list_deadline(),
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
        method: &Method,
        url: &str,
        headers: &[(header::HeaderName, String)],
        deadline: Option<Duration>,
    ) -> Result<WebResponse, FetchError> {
        let url = Url::parse(url).map_err(|error| FetchError::Transient(error.to_string()))?;
        let authorization = self.authorization.as_deref();
        let request = WebRequest { method, url: &url, headers, authorization, deadline };
        request.send(&self.agent).map_err(|error| match error {
            WebRequestError::InsecureRedirect { host, target } => {
                PullError::InsecureRedirect { host, what: url.to_string(), target }.into()
            }
            WebRequestError::Failed(error) => FetchError::Transient(fetch::reason(error)),
            WebRequestError::Redirects(reason) => self.unreadable(url.as_str(), &url, reason),
        })
    }

    /// Returns the host of a response after the redirects.
    fn responding(&self, responding: &Url) -> String {
        responding_host(&self.folder, responding)
    }

    /// Returns the error of a response without content.
    fn failure(&self, url: &str, responding: &Url, status: StatusCode) -> FetchError {
        let (host, what) = (self.responding(responding), url.to_owned());
        match status.as_u16() {
            404 | 410 => PullError::NotFound { host, what }.into(),
            status @ (401 | 403) => {
                let fix = format!("check {}", self.credentials);
                PullError::Forbidden { host, what, status, fix }.into()
            }
            408 | 425 | 429 | 500..=599 => FetchError::Transient(self.transient(responding, status)),
            412 => self.replaced(url, responding, "it has another version"),
            416 => self.replaced(url, responding, "it is shorter than before"),
            status => PullError::Refused { host, status, what, advice: "check the URL" }.into(),
        }
    }

    /// Returns the cause of a failure for a moment. The message has the requested host.
    fn transient(&self, responding: &Url, status: StatusCode) -> String {
        match responding.host_str().filter(|_| responding.host() != self.folder.host()) {
            Some(host) => format!("status {} of {host}", status.as_u16()),
            None => format!("status {}", status.as_u16()),
        }
    }

    fn replaced(&self, url: &str, responding: &Url, reason: &str) -> FetchError {
        let (host, what, reason) = (self.responding(responding), url.to_owned(), reason.to_owned());
        PullError::Replaced { host, what, reason }.into()
    }

    fn unreadable(&self, url: &str, responding: &Url, reason: &str) -> FetchError {
        let (host, what, reason) = (self.responding(responding), url.to_owned(), reason.to_owned());
        let advice = if self.repository.is_some() { hf::HUB_ADVICE } else { SERVER_ADVICE };
        PullError::Unreadable { host, what, reason, advice }.into()
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
        let sent = self.send(&Method::GET, &url, &[], Some(self.list_deadline))?;
        let WebResponse { mut response, url: responding } = sent;
        if response.status() != StatusCode::OK {
            return Err(self.failure(&url, &responding, response.status()));
        }
        let mut bytes = Vec::new();
        let length = response.body().content_length();
        let read = response.body_mut().as_reader().take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(|error| FetchError::Transient(error.to_string()))?;
        let size = bytes.len() as u64;
        if size > bytes_max {
            let (host, bytes) = (self.responding(&responding), length.unwrap_or(size));
            return Err(PullError::TooLarge { host, what: url, bytes, limit: bytes_max }.into());
        }
        match length {
            Some(length) if size < length => Err(FetchError::Transient(truncated(size, length))),
            Some(_) | None => Ok(bytes),
        }
    }

    fn stat(&self, path: &str, sha256: Option<&str>) -> Result<RemoteFile, FetchError> {
        let url = self.url(path);
        let WebResponse { response, url: responding } = self.send(&Method::HEAD, &url, &[], None)?;
        if response.status() != StatusCode::OK {
            return Err(self.failure(&url, &responding, response.status()));
        }
        let text = |name| response.headers().get(name)?.to_str().ok();
        let bytes = text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok());
        let Some(bytes) = bytes else {
            return Err(self.unreadable(&url, &responding, "the response to HEAD has no content-length"));
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
        let is_whole = range == (0..file.bytes);
        if !is_whole {
            let last = if range.end == file.bytes { String::new() } else { (range.end - 1).to_string() };
            headers.push((header::RANGE, format!("bytes={}-{last}", range.start)));
        }
        if let Some(etag) = &file.etag {
            headers.push((header::IF_MATCH, etag.clone()));
        }
        let sent = self.send(&Method::GET, &file.location, &headers, None)?;
        let WebResponse { mut response, url: responding } = sent;
        let size = match response.status() {
            StatusCode::PARTIAL_CONTENT => match fetch::content_range(&response) {
                Some((start, size)) if start == range.start => Some(size),
                Some(_) | None => {
                    return Err(self.unreadable(
                        &file.location,
                        &responding,
                        "the response has another range",
                    ));
                }
            },
            // The bytes before the range would be read for each part.
            StatusCode::OK if !is_whole => return Err(FetchError::RangeIgnored),
            StatusCode::OK => response.body().content_length(),
            status => return Err(self.failure(&file.location, &responding, status)),
        };
        if let Some(size) = size.filter(|size| *size != file.bytes) {
            let reason = format!("it has {size} bytes, expected {}", file.bytes);
            return Err(self.replaced(&file.location, &responding, &reason));
        }
        let mut body = response.body_mut().as_reader().take(range.end - range.start);
        let mut buffer = vec![0; 1 << 18];
        loop {
            match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => sink(&buffer[..read])?,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(FetchError::Transient(error.to_string())),
            }
        }
    }
}

/// Returns the text of a body that ended early.
pub(super) fn truncated(bytes: u64, expected: u64) -> String {
    format!("the response ended after {bytes} of {expected} bytes")
}

/// Returns the client of a host. It follows no redirects ([`WebRequest::send`] does), and keeps the TLS of its URL.
fn agent(policy: &DownloadPolicy, url: &Url) -> Agent {
    let agent = Agent::config_builder()
        .tls_config(fetch::tls())
        .https_only(fetch::is_tls(url))
        .max_redirects(0)
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread::{self, JoinHandle};
    use std::time::Instant;

    use super::*;

    const SECRET: &str = "Basic secret";

    fn origin(folder: &str, policy: DownloadPolicy) -> WebOrigin {
        let folder: Url = folder.parse().unwrap();
        WebOrigin {
            agent: agent(&policy, &folder),
            list_deadline: policy.list_deadline(),
            folder,
            repository: None,
            authorization: Some(SECRET.to_owned()),
            credentials: "",
        }
    }

    fn listen() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    /// Reads the head of a request, and writes a response.
    fn respond(stream: &mut TcpStream, response: &str) -> String {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        stream.write_all(response.as_bytes()).unwrap();
        head.join("\n").to_ascii_lowercase()
    }

    /// Responds to one request; returns its head.
    fn serve_once(listener: TcpListener, response: String) -> JoinHandle<String> {
        thread::spawn(move || respond(&mut listener.accept().unwrap().0, &response))
    }

    const CONTENT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx";

    #[test]
    fn redirects_to_another_port_or_host_get_no_credentials() {
        for host in ["127.0.0.1", "localhost"] {
            let ((first, port), (second, target)) = (listen(), listen());
            let redirect = redirect(&format!("http://{host}:{target}/a"));
            let (first, second) = (serve_once(first, redirect), serve_once(second, CONTENT.to_owned()));
            let origin = origin(&format!("http://127.0.0.1:{port}/"), DownloadPolicy::default());
            assert_eq!(origin.read_small("a", 10).unwrap(), b"x");
            let sent = |request: JoinHandle<String>| request.join().unwrap().contains("basic secret");
            assert!(sent(first));
            assert!(!sent(second), "{host}");
        }
    }

    fn redirect(target: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    }

    #[test]
    fn a_request_is_not_redirected_to_another_host_without_tls() {
        // The address is one of documentation: a request for it would fail with another error.
        let (listener, port) = listen();
        let server = serve_once(listener, redirect("http://192.0.2.1/a?signature=s"));
        let origin = origin(&format!("http://127.0.0.1:{port}/"), DownloadPolicy::default());
        let read = origin.read_small("a", 10);
        let Err(FetchError::Permanent(error @ PullError::InsecureRedirect { .. })) = read else {
            panic!("{read:?}");
        };
        let (text, url) = (error.to_string(), format!("http://127.0.0.1:{port}/a"));
        assert!(
            text.starts_with(&format!("127.0.0.1 redirects {url} to http://192.0.2.1, without TLS; ")),
            "{text}"
        );
        assert!(server.join().unwrap().starts_with("get /a "));
    }

    #[test]
    fn a_url_without_tls_gets_no_request_of_a_folder_with_tls() {
        let (listener, port) = listen();
        listener.set_nonblocking(true).unwrap();
        let origin = origin("https://models.example/", DownloadPolicy::default());
        let redirected = format!("http://127.0.0.1:{port}/a?signature=s");
        let sent = origin.send(&Method::GET, &redirected, &[], None).map(|sent| sent.url);
        assert!(sent.is_err(), "{sent:?}");
        assert!(listener.accept().is_err(), "no connection");
    }

    #[test]
    fn a_redirect_that_does_not_end_is_an_error() {
        let (listener, port) = listen();
        let server = thread::spawn(move || {
            for _ in 0..11 {
                respond(&mut listener.accept().unwrap().0, &redirect("/a"));
            }
        });
        let read =
            origin(&format!("http://127.0.0.1:{port}/"), DownloadPolicy::default()).read_small("a", 10);
        let Err(FetchError::Permanent(error)) = read else { panic!("{read:?}") };
        assert!(error.to_string().contains("there are more than 10 redirects"), "{error}");
        server.join().unwrap();
    }

    #[test]
    fn an_error_names_the_host_that_responded_and_the_fix_for_a_web_server() {
        let ((first, port), (second, target)) = (listen(), listen());
        let first = serve_once(first, redirect(&format!("http://localhost:{target}/a")));
        let missing = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let second = serve_once(second, missing.to_owned());
        let read =
            origin(&format!("http://127.0.0.1:{port}/"), DownloadPolicy::default()).read_small("a", 10);
        let Err(FetchError::Permanent(error)) = read else { panic!("{read:?}") };
        let expected = "localhost (to which 127.0.0.1 redirects) has no http://127.0.0.1";
        assert!(error.to_string().starts_with(expected), "{error}");
        first.join().unwrap();
        second.join().unwrap();

        let (listener, port) = listen();
        let server = serve_once(listener, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_owned());
        let stat = origin(&format!("http://127.0.0.1:{port}/"), DownloadPolicy::default()).stat("a", None);
        let Err(FetchError::Permanent(error)) = stat else { panic!("{stat:?}") };
        let text = error.to_string();
        assert!(text.contains("no content-length); use a web server that sends `content-length`"), "{text}");
        server.join().unwrap();
    }

    #[test]
    fn a_list_that_arrives_too_slowly_has_a_deadline() {
        let (listener, port) = listen();
        // Each byte arrives within the timeout of a read.
        let server = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            respond(&mut stream, "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n");
            for _ in 0..1_000 {
                if stream.write_all(b"x").is_err() {
                    return true;
                }
                thread::sleep(Duration::from_millis(20));
            }
            false
        });
        let policy = DownloadPolicy { stall: Duration::from_millis(300), ..DownloadPolicy::default() };
        let began = Instant::now();
        let read = origin(&format!("http://127.0.0.1:{port}/"), policy).read_small("SHA256SUMS", 10_000);
        assert!(matches!(read, Err(FetchError::Transient(_))), "{read:?}");
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        assert!(server.join().unwrap(), "the client closes the connection");
    }

    #[test]
    fn a_server_that_ignores_a_range_is_detected_before_a_byte_is_read() {
        let (listener, port) = listen();
        let server = serve_once(listener, CONTENT.replace("-length: 1", "-length: 1000"));
        let file = RemoteFile {
            path: "a".to_owned(),
            location: format!("http://127.0.0.1:{port}/a"),
            bytes: 1_000,
            sha256: None,
            etag: None,
            has_ranges: true,
        };
        let origin = origin("http://127.0.0.1/", DownloadPolicy::default());
        let read = origin.read_range(&file, 500..600, &mut |_| unreachable!("nothing is read"));
        assert!(matches!(read, Err(FetchError::RangeIgnored)), "{read:?}");
        assert!(server.join().unwrap().contains("range: bytes=500-599"));
    }
}
