//! Requests of browsers that the console accepts.
//!
//! A page of another site can make a browser send requests to the console, and can give its own name the address of the
//! console (DNS rebinding). So the `host` header must name the console, and a request that changes something must come from
//! the console's own page: it has an `origin` of the console and a header that no form can set. Browsers also say where a
//! request comes from (`sec-fetch-site`), and data is sent to the console's own pages only.

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
        let scheme = if is_tls { "https" } else { "http" };
        let mut hosts = names(scheme, &listen.to_string());
        if listen.ip().is_loopback() {
            hosts.extend(names(scheme, &format!("localhost:{}", listen.port())));
        }
        let url =
            url.map_or_else(|| format!("{scheme}://{listen}"), |url| url.trim_end_matches('/').to_owned());
        if let Some((scheme, host)) = url.split_once("://") {
            hosts.extend(names(&scheme.to_ascii_lowercase(), host));
        }
        ConsoleOrigin { hosts, url }
    }

    /// Returns the base URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns whether browsers use TLS, so that a cookie can be restricted to it.
    pub fn is_secure(&self) -> bool {
        self.url.split_once("://").is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("https"))
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

/// Returns the values of `host` for a URL: browsers leave out the default port of the scheme.
fn names(scheme: &str, host: &str) -> Vec<String> {
    let default = if scheme == "https" { ":443" } else { ":80" };
    let has_port =
        host.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let other = match host.strip_suffix(default) {
        Some(name) => Some(name.to_owned()),
        None => (!has_port).then(|| format!("{host}{default}")),
    };
    [Some(host.to_owned()), other].into_iter().flatten().collect()
}

/// Returns whether a request for data may get it, by its `sec-fetch-site`: not one that a page of another site makes the
/// browser send. Clients that are not browsers do not have the header, and a person who enters the address has `none`.
pub fn accepts_site(site: Option<&str>) -> bool {
    matches!(site, None | Some("same-origin" | "none"))
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
    fn the_default_port_of_a_scheme_is_optional() {
        let at = |listen: &str, is_tls, url| ConsoleOrigin::new(listen.parse().unwrap(), is_tls, url);
        for (origin, accepted, other) in [
            (at("10.0.0.5:443", true, None), ["10.0.0.5", "10.0.0.5:443"], "10.0.0.5:80"),
            (at("127.0.0.1:80", false, None), ["localhost", "127.0.0.1:80"], "localhost:443"),
            (at("[fd00::1]:443", true, None), ["[fd00::1]", "[fd00::1]:443"], "[fd00::1]:80"),
            (
                at("127.0.0.1:1", false, Some("https://a.example:443")),
                ["a.example", "a.example:443"],
                "a.example:80",
            ),
            (
                at("127.0.0.1:1", false, Some("HTTPS://a.example")),
                ["a.example", "A.example:443"],
                "a.example:80",
            ),
            (
                at("127.0.0.1:1", false, Some("http://a.example")),
                ["a.example", "a.example:80"],
                "a.example:443",
            ),
            (at("127.0.0.1:1", false, Some("https://[::5]")), ["[::5]", "[::5]:443"], "[::5]:80"),
        ] {
            assert!(accepted.iter().all(|host| origin.accepts_host(Some(host))), "{origin:?}");
            assert!(!origin.accepts_host(Some(other)), "{origin:?}");
            assert!(origin.accepts_change(Some(&format!("https://{}", accepted[0])), true), "{origin:?}");
        }
        assert!(at("127.0.0.1:1", false, Some("HTTPS://a.example")).is_secure());
    }

    #[test]
    fn pages_of_other_sites_get_no_data() {
        assert!(accepts_site(None) && accepts_site(Some("same-origin")) && accepts_site(Some("none")));
        assert!(
            !accepts_site(Some("cross-site")) && !accepts_site(Some("same-site")) && !accepts_site(Some(""))
        );
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
