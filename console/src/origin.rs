//! Requests of browsers that the console accepts.
//!
//! A page of another site can make a browser send requests to the console, and can give its own name the address of the
//! console (DNS rebinding). So the `host` header must name the console, and a request that changes something must come from
//! the console's own page: it has an `origin` of the console and a header that no form can set.

/// Header of requests that change something. A page of another origin cannot set it without the permission of the console,
/// which gives none.
pub const REQUEST_HEADER: &str = "x-meridian-console";

/// Names under which browsers reach the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsoleOrigin {
    /// Accepted values of `host`.
    hosts: Vec<String>,
    /// Base URL of links.
    url: String,
}

impl ConsoleOrigin {
    /// Creates the origin of a listener at `listen` (`IP:PORT`). `url` is the configured base URL.
    pub fn new(listen: std::net::SocketAddr, is_tls: bool, url: Option<&str>) -> ConsoleOrigin {
        let mut hosts = vec![listen.to_string()];
        if listen.ip().is_loopback() {
            hosts.push(format!("localhost:{}", listen.port()));
        }
        let scheme = if is_tls { "https" } else { "http" };
        let url =
            url.map_or_else(|| format!("{scheme}://{listen}"), |url| url.trim_end_matches('/').to_owned());
        if let Some((_, host)) = url.split_once("://") {
            hosts.push(host.to_ascii_lowercase());
        }
        ConsoleOrigin { hosts, url }
    }

    /// Returns the base URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns whether browsers use TLS, so that a cookie can be restricted to it.
    pub fn is_secure(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// Returns whether a request with this `host` is for the console.
    pub fn accepts_host(&self, host: Option<&str>) -> bool {
        host.is_some_and(|host| self.hosts.iter().any(|known| known.eq_ignore_ascii_case(host)))
    }

    /// Returns whether a request that changes something comes from the page of the console.
    pub fn accepts_change(&self, origin: Option<&str>, has_header: bool) -> bool {
        let host = origin
            .and_then(|origin| origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://")));
        has_header && self.accepts_host(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local() -> ConsoleOrigin {
        ConsoleOrigin::new("127.0.0.1:7080".parse().unwrap(), false, None)
    }

    #[test]
    fn the_names_of_the_listener_and_of_the_url_are_accepted_and_others_are_not() {
        let origin = local();
        for host in ["127.0.0.1:7080", "localhost:7080", "LOCALHOST:7080"] {
            assert!(origin.accepts_host(Some(host)), "{host}");
        }
        for host in ["evil.example:7080", "127.0.0.1", "127.0.0.1:7081", "localhost:7080.evil.example", ""] {
            assert!(!origin.accepts_host(Some(host)), "{host}");
        }
        assert!(!origin.accepts_host(None));
        let named =
            ConsoleOrigin::new("10.0.0.5:7080".parse().unwrap(), true, Some("https://console.example.com/"));
        assert!(named.accepts_host(Some("console.example.com")) && named.accepts_host(Some("10.0.0.5:7080")));
        assert!(!named.accepts_host(Some("localhost:7080")), "only a loopback listener is localhost");
        assert_eq!((named.url(), named.is_secure()), ("https://console.example.com", true));
    }

    #[test]
    fn a_change_needs_the_own_origin_and_the_header() {
        let origin = local();
        assert!(origin.accepts_change(Some("http://127.0.0.1:7080"), true));
        assert!(origin.accepts_change(Some("http://localhost:7080"), true));
        assert!(!origin.accepts_change(Some("http://127.0.0.1:7080"), false));
        for other in ["http://evil.example", "http://127.0.0.1:8000", "null", "127.0.0.1:7080"] {
            assert!(!origin.accepts_change(Some(other), true), "{other}");
        }
        assert!(!origin.accepts_change(None, true));
    }
}
