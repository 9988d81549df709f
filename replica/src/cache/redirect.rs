//! Requests to web servers, with their redirects.
//!
//! The client would follow a redirect from a server on this machine to any host without TLS, such as the metadata service of
//! a cloud. So redirects are followed here: to URLs with TLS, and without it only from a URL without it, to its own host or
//! within this machine. Only scheme, host and port of the first URL get the credentials, or its host after an upgrade to TLS,
//! and they get none after a redirect to another host and back.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use ureq::http::{Method, Request, Response, header};
use ureq::{Agent, Body};
use url::Url;

use super::source::is_this_machine;

/// Maximum number of redirects of a request.
const REDIRECTS_MAX: usize = 10;
/// Maximum number of bytes that are read of the body of a redirect. The connection of a longer one is closed.
const REDIRECT_BODY_BYTES_MAX: u64 = 64 << 10;

/// Request for a URL.
#[derive(Clone, Copy)]
pub(super) struct WebRequest<'a> {
    pub(super) method: &'a Method,
    pub(super) url: &'a Url,
    pub(super) headers: &'a [(header::HeaderName, String)],
    /// Value of the `authorization` header, for scheme, host and port of the URL.
    pub(super) authorization: Option<&'a str>,
    /// Deadline of the whole response.
    pub(super) deadline: Option<Duration>,
}

/// Response, and the URL that it belongs to after the redirects.
pub(super) struct WebResponse {
    pub(super) response: Response<Body>,
    pub(super) url: Url,
}

/// Reason why a request has no response.
#[derive(Debug)]
pub(super) enum WebRequestError {
    /// A host redirects to a URL without TLS, which got no request.
    InsecureRedirect {
        /// Host that redirects.
        host: String,
        /// Its target, without the path, which may contain a signature.
        target: String,
    },
    /// Another error; another attempt may succeed.
    Failed(ureq::Error),
    /// The redirects are invalid.
    Redirects(&'static str),
}

impl WebRequest<'_> {
    /// Sends the request, and follows redirects. The agent follows none by itself.
    pub(super) fn send(self, agent: &Agent) -> Result<WebResponse, WebRequestError> {
        let began = Instant::now();
        let (mut url, mut authorization) = (self.url.clone(), self.authorization);
        for _ in 0..=REDIRECTS_MAX {
            let left = self.deadline.map(|deadline| deadline.saturating_sub(began.elapsed()));
            let mut request = Request::builder().method(self.method).uri(url.as_str());
            if let Some(authorization) = authorization {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            for (name, value) in self.headers {
                request = request.header(name, value);
            }
            let request = request.body(()).map_err(|error| WebRequestError::Failed(error.into()))?;
            let request = agent.configure_request(request).max_redirects(0).timeout_global(left).build();
            let response = agent.run(request).map_err(WebRequestError::Failed)?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(WebResponse { response, url });
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let target = location.and_then(|location| url.join(location).ok());
            let target = target.ok_or(WebRequestError::Redirects("a redirect has no valid location"))?;
            if !may_follow(self.url, &url, &target) {
                let host = responding_host(self.url, &url);
                return Err(WebRequestError::InsecureRedirect { host, target: origin_of(&target) });
            }
            // The next request uses the same connection, if the whole body was read. An error only closes it.
            let body = response.into_body().into_reader();
            let _ = io::copy(&mut body.take(REDIRECT_BODY_BYTES_MAX), &mut io::sink());
            authorization = authorization.filter(|_| gets_credentials(self.url, &target));
            url = target;
        }
        Err(WebRequestError::Redirects("there are more than 10 redirects"))
    }
}

/// Returns the host of a response, and that of the request if it redirected to another one.
pub(super) fn responding_host(requested: &Url, responding: &Url) -> String {
    let host = |url: &Url| url.host_str().unwrap_or("this machine").to_owned();
    match (host(requested), host(responding)) {
        (requested, responding) if requested == responding => requested,
        (requested, responding) => format!("{responding} (to which {requested} redirects)"),
    }
}

/// Returns scheme, host and port of a URL.
fn origin_of(url: &Url) -> String {
    match url.host_str() {
        Some(host) => match url.port() {
            Some(port) => format!("{}://{host}:{port}", url.scheme()),
            None => format!("{}://{host}", url.scheme()),
        },
        None => format!("a URL of the scheme `{}`", url.scheme()),
    }
}

/// Returns whether a redirect of `from` is followed; `requested` is the first URL.
fn may_follow(requested: &Url, from: &Url, target: &Url) -> bool {
    match target.scheme() {
        "https" => true,
        "http" => {
            let is_local = is_this_machine(requested) && is_this_machine(target);
            from.scheme() == "http" && (is_local || requested.host() == target.host())
        }
        _ => false,
    }
}

/// Returns whether the target of a redirect gets the credentials for `requested`: it has the same scheme, host and port, or is the
/// same host with TLS, both at the default port.
fn gets_credentials(requested: &Url, target: &Url) -> bool {
    let origin = |url: &Url| (url.scheme().to_owned(), url.port_or_known_default());
    let is_upgrade = origin(requested) == ("http".to_owned(), Some(80))
        && origin(target) == ("https".to_owned(), Some(443));
    requested.host() == target.host() && (origin(requested) == origin(target) || is_upgrade)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;

    /// Reads the head of a request; returns its path, and whether it has credentials.
    fn read_head(stream: &mut BufReader<TcpStream>) -> (String, bool) {
        let mut lines = stream.lines().map(Result::unwrap).take_while(|line| !line.is_empty());
        let first = lines.next().expect("another request on this connection");
        let path = first.split(' ').nth(1).unwrap().to_owned();
        (path, lines.filter(|line| line.to_ascii_lowercase().starts_with("authorization:")).count() > 0)
    }

    fn redirect_to(target: &str, body: &str) -> String {
        let length = body.len();
        format!("HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    fn get(url: &Url) -> WebResponse {
        let config = Agent::config_builder().timeout_global(Some(Duration::from_secs(60))).build();
        let request = WebRequest {
            method: &Method::GET,
            url,
            headers: &[],
            authorization: Some("Bearer secret"),
            deadline: Some(Duration::from_secs(60)),
        };
        request.send(&config.into()).map_err(|error| format!("{error:?}")).unwrap()
    }

    #[test]
    fn a_redirect_is_followed_on_the_same_connection_with_the_credentials() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}/a", listener.local_addr().unwrap())).unwrap();
        let server = thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            assert_eq!(read_head(&mut stream), ("/a".to_owned(), true));
            stream.get_mut().write_all(redirect_to("/b", "<a href='/b'>moved</a>").as_bytes()).unwrap();
            assert_eq!(read_head(&mut stream), ("/b".to_owned(), true));
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        });
        let WebResponse { response, url } = get(&url);
        assert_eq!((response.status().as_u16(), url.path()), (200, "/b"));
        server.join().unwrap();
    }

    #[test]
    fn credentials_are_dropped_for_good_by_a_redirect_to_another_port() {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [first, other] =
            [0, 1].map(|at: usize| format!("http://{}", listeners[at].local_addr().unwrap()));
        let url = Url::parse(&format!("{first}/a")).unwrap();
        let server = thread::spawn(move || {
            let [there, back] = [format!("{other}/b"), format!("{first}/c")];
            let responses = [
                redirect_to(&there, ""),
                redirect_to(&back, ""),
                "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned(),
            ];
            [0, 1, 0]
                .into_iter()
                .zip(responses)
                .map(|(at, response): (usize, String)| {
                    let mut stream = BufReader::new(listeners[at].accept().unwrap().0);
                    let head = read_head(&mut stream);
                    let closed = response.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
                    stream.get_mut().write_all(closed.as_bytes()).unwrap();
                    head
                })
                .collect::<Vec<_>>()
        });
        assert_eq!(get(&url).url.path(), "/c");
        let requests = server.join().unwrap();
        assert_eq!(requests, [("/a".to_owned(), true), ("/b".to_owned(), false), ("/c".to_owned(), false)]);
    }

    #[test]
    fn only_scheme_host_and_port_of_the_first_url_get_credentials_or_its_host_with_tls() {
        let url = |text: &str| Url::parse(text).unwrap();
        for (requested, target, expected) in [
            ("https://a.example/", "https://a.example:443/x", true),
            ("https://a.example/", "https://a.example:8443/x", false),
            ("https://a.example/", "https://b.example/x", false),
            ("http://a.example:81/", "http://a.example:81/x", true),
            ("http://a.example:81/", "http://a.example:82/x", false),
            ("http://a.example/", "https://a.example/x", true),
            ("http://a.example:81/", "https://a.example/x", false),
            ("http://a.example/", "https://a.example:8443/x", false),
            ("https://a.example/", "http://a.example/x", false),
        ] {
            assert_eq!(gets_credentials(&url(requested), &url(target)), expected, "{requested} to {target}");
        }
    }

    #[test]
    fn a_redirect_to_a_url_without_tls_stays_on_its_host_or_on_this_machine() {
        let url = |text: &str| Url::parse(text).unwrap();
        for (requested, from, target, expected) in [
            ("https://a.example/", "https://a.example/", "https://b.example/x", true),
            ("https://a.example/", "https://a.example/", "http://a.example/x", false),
            ("http://127.0.0.1/", "http://127.0.0.1/", "https://b.example/x", true),
            ("http://127.0.0.1/", "http://127.0.0.1/", "http://localhost:81/x", true),
            ("http://127.0.0.1/", "http://127.0.0.1/", "http://[::1]/x", true),
            ("http://127.0.0.1/", "http://127.0.0.1/", "http://169.254.169.254/x", false),
            ("http://127.0.0.1/", "http://127.0.0.1/", "http://b.example/x", false),
            ("http://127.0.0.1/", "http://127.0.0.1/", "file:///etc/x", false),
            ("http://127.0.0.1/", "https://b.example/x", "http://127.0.0.1/y", false),
            ("http://mirror.example/", "http://mirror.example/", "http://mirror.example/y", true),
            ("http://mirror.example/", "http://mirror.example/", "http://127.0.0.1/y", false),
        ] {
            let follows = may_follow(&url(requested), &url(from), &url(target));
            assert_eq!(follows, expected, "{requested}: {from} to {target}");
        }
    }

    #[test]
    fn the_target_in_a_message_has_no_path() {
        let target = |text: &str| origin_of(&Url::parse(text).unwrap());
        assert_eq!(target("http://b.example:81/x?signature=s"), "http://b.example:81");
        assert_eq!(target("http://b.example/x?signature=s"), "http://b.example");
        assert_eq!(target("file:///etc/x"), "a URL of the scheme `file`");
    }
}
