//! Reader of the section `[console]` of `hub.toml`.

use std::net::SocketAddr;

use configuration::{ConfigFile, section};
use identity::Transport;
use url::{Host, Url};

section! {
    /// Console: a page for browsers with the state of the fleet. Off without this table.
    pub(super) partial struct ConsoleSection {
        /// Listener for browsers: plaintext on loopback, where a link of `meridian console` signs in; on another address TLS with
        /// the identity of the hub, where browsers need a certificate of a viewer or operator.
        listen: SocketAddr, like "\"127.0.0.1:7080\"";
        /// URL that browsers open, if a proxy is in front of the listener, or if it listens at all addresses; that of the listener if
        /// absent.
        url: Option<String>;
        /// URL of the control API of the local fleet in which this hub runs, on this machine, for drills; `meridian up` sets it.
        drills: Option<String>;
    }
}

/// Configuration of the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsoleConfig {
    /// Address of its listener.
    pub listen: SocketAddr,
    /// URL that browsers open.
    pub url: Option<String>,
    /// URL of the control API of a local fleet.
    pub drills: Option<Url>,
}

/// Reads the section.
pub(super) fn read(
    document: &ConfigFile<'_>,
    section: Option<ConsoleSection>,
    transport: Option<&Transport>,
) -> Option<Option<ConsoleConfig>> {
    let Some(ConsoleSection { listen, url, drills }) = section else { return Some(None) };
    let (listen, url, drills) = (listen?, url?, drills?);
    // An invalid identity is reported by itself.
    let has_identity = transport.is_none_or(|transport| transport.identity().is_some());
    if !listen.ip().is_loopback() && !has_identity {
        let problem = format!(
            "\"{listen}\" can be reached from other machines, and there is no identity for TLS; write a loopback address, or add \
             [identity] with dir"
        );
        document.problem("console.listen", problem);
        return None;
    }
    if let Some(problem) = missing_url(listen, url.as_deref()) {
        document.problem("console.url", problem);
        return None;
    }
    if let Some(text) = &url
        && !is_base_url(text)
    {
        let problem =
            format!("\"{text}\" is not a URL without a path; write https://HOST or http://HOST:PORT");
        document.problem("console.url", problem);
        return None;
    }
    let control = drills.as_deref().map(control_url);
    if let (Some(None), Some(text)) = (&control, &drills) {
        let problem = format!("\"{text}\" is not a URL on this machine; write http://127.0.0.1:PORT");
        document.problem("console.drills", problem);
        return None;
    }
    Some(Some(ConsoleConfig { listen, url, drills: control.flatten() }))
}

/// Returns the problem of a listener whose address browsers cannot open.
fn missing_url(listen: SocketAddr, url: Option<&str>) -> Option<String> {
    (url.is_none() && listen.ip().is_unspecified()).then(|| {
        let port = listen.port();
        format!(
            "is required, because browsers cannot open console.listen (\"{listen}\"); write https://HOST:{port}"
        )
    })
}

/// Parses the URL of a control API, which is on loopback because it has no authentication.
fn control_url(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok().filter(|url| url.scheme() == "http" && is_base_url(text))?;
    let is_loopback = match url.host()? {
        Host::Ipv4(ip) => ip.is_loopback(),
        Host::Ipv6(ip) => ip.is_loopback(),
        Host::Domain(_) => false,
    };
    is_loopback.then_some(url)
}

fn is_base_url(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(section: &str, transport: &Transport) -> Result<ConsoleConfig, Vec<String>> {
        section! {
            /// File with the section.
            partial struct File {
                /// Section.
                console: Option<ConsoleSection>;
            }
        }
        let read = ConfigFile::read(&format!("[console]\n{section}"), |document| {
            let file: File = document.section()?;
            read(document, file.console?, Some(transport))?
        });
        read.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_console_without_tls_is_on_loopback() {
        let listen = |address: &str| parse(&format!("listen = \"{address}\""), &Transport::Plaintext);
        assert!(listen("127.0.0.1:7080").is_ok() && listen("[::1]:7080").is_ok());
        for open in ["0.0.0.0:7080", "10.0.0.5:7080"] {
            assert!(listen(open).unwrap_err()[0].contains("add [identity]"), "{open}");
        }
    }

    #[test]
    fn a_console_that_listens_at_all_addresses_needs_its_url() {
        let problem = |listen: &str, url| missing_url(listen.parse().unwrap(), url);
        for all in ["0.0.0.0:7443", "[::]:7443"] {
            assert!(problem(all, None).is_some_and(|problem| problem.contains("https://HOST:7443")), "{all}");
            assert_eq!(problem(all, Some("https://console.example.com")), None);
        }
        assert_eq!(problem("10.0.0.5:7443", None), None);
    }

    #[test]
    fn the_control_api_of_drills_is_on_this_machine() {
        let drills = |url: &str| {
            let section = format!("listen = \"127.0.0.1:1\"\ndrills = \"{url}\"");
            parse(&section, &Transport::Loopback).map(|config| config.drills.map(String::from))
        };
        assert_eq!(drills("http://127.0.0.1:7081"), Ok(Some("http://127.0.0.1:7081/".to_owned())));
        assert!(drills("http://[::1]:7081").is_ok());
        let others = ["https://127.0.0.1:1", "http://10.0.0.5:1", "http://fleet:1", "http://127.0.0.1:1/a"];
        for wrong in others {
            assert!(drills(wrong).unwrap_err()[0].contains("console.drills"), "{wrong}");
        }
    }

    #[test]
    fn the_url_has_no_path() {
        let url = |url: &str| {
            parse(&format!("listen = \"127.0.0.1:1\"\nurl = \"{url}\""), &Transport::Loopback).is_ok()
        };
        assert!(url("https://console.example.com") && url("http://localhost:7080/"));
        for wrong in
            ["console.example.com", "ftp://a", "https://a/b", "https://a?b", "https://u:p@a", "https://a#b"]
        {
            assert!(!url(wrong), "{wrong}");
        }
    }
}
