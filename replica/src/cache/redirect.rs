//! Requests to web servers, with their redirects.
//!
//! The client would follow a redirect from a server on this machine to any host without TLS, such as the metadata service of
//! a cloud. So redirects are followed here: to URLs with TLS, and without it only from a URL without it, to its own host or
//! within this machine. Only the host of the first URL gets the credentials.

use std::time::{Duration, Instant};

use ureq::http::{Method, Request, Response, header};
use ureq::{Agent, Body};
use url::Url;

use super::source::is_this_machine;

/// Maximum number of redirects of a request.
const REDIRECTS_MAX: usize = 10;

/// Request for a URL.
#[derive(Clone, Copy)]
pub(super) struct WebRequest<'a> {
    pub(super) method: &'a Method,
    pub(super) url: &'a Url,
    pub(super) headers: &'a [(header::HeaderName, String)],
    /// Value of the `authorization` header, for the host of the URL.
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
        let mut url = self.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let left = self.deadline.map(|deadline| deadline.saturating_sub(began.elapsed()));
            let mut request = Request::builder().method(self.method).uri(url.as_str());
            if let Some(authorization) = self.authorization.filter(|_| url.host() == self.url.host()) {
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

#[cfg(test)]
mod tests {
    use super::*;

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
