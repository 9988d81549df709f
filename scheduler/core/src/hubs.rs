//! List of hub URLs with failover.
//!
//! Hubs with the same store publish the same table, and each of them accepts registrations, so a client may use any of
//! them. A client uses one hub until it fails (connection refused, timeout, invalid response), then the next in the
//! list, round robin. The last working hub stays the current one, also when an earlier one of the list recovers:
//! switching back has no benefit, and a flapping hub would be tried again and again.
//!
//! All parts of a process share one [`Hubs`], so that a failure that one of them detects saves the others the timeout.
//! Two parts that fail at the same hub advance the list once. Each part counts its own failures ([`Failover`]): it calls
//! the next hub at once, and waits only after every hub has failed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use backoff::Backoff;
use configuration::{ConfigField, ConfigValue, NoLimit, OneOrMany, Rule};

const HTTP: &str = "http://";
const HTTPS: &str = "https://";

/// Maximum length of the list: five hubs, and five replacements while they are rolled.
pub const HUBS_MAX: usize = 10;

/// Hub URLs with a current one; clones share the position. `Display` shows the current URL.
#[derive(Clone, Debug)]
pub struct Hubs {
    /// Base URLs, without a trailing slash.
    urls: Arc<[String]>,
    current: Arc<AtomicUsize>,
}

impl Hubs {
    /// Returns the list of one hub.
    pub fn one(url: String) -> Hubs {
        Hubs { urls: [url].into(), current: Arc::default() }
    }

    /// Returns the hubs at these URLs; `None` if there is none, or one is not a hub URL.
    pub fn at<S: AsRef<str>>(urls: impl IntoIterator<Item = S>) -> Option<Hubs> {
        let urls = urls.into_iter().map(|url| url.as_ref().trim_end_matches('/').to_owned());
        let urls: Arc<[String]> = urls.collect();
        let is_valid = !urls.is_empty() && urls.iter().all(|url| is_url(url));
        is_valid.then(|| Hubs { urls, current: Arc::default() })
    }

    /// Returns the URL of the current hub.
    pub fn current(&self) -> &str {
        &self.urls[self.current.load(Ordering::Relaxed)]
    }

    /// Returns a list of its own for each hub, for what every hub receives.
    pub fn each(&self) -> impl Iterator<Item = Hubs> {
        self.urls.iter().cloned().map(Hubs::one)
    }

    /// Returns the number of hubs.
    pub fn count(&self) -> usize {
        self.urls.len()
    }

    /// Returns the first hub that uses TLS.
    pub fn first_with_tls(&self) -> Option<&str> {
        self.urls.iter().map(String::as_str).find(|url| url.starts_with(HTTPS))
    }

    /// Returns the first hub that uses plaintext.
    pub fn first_in_plaintext(&self) -> Option<&str> {
        self.urls.iter().map(String::as_str).find(|url| !url.starts_with(HTTPS))
    }

    /// Returns the first hub that uses plaintext and is not on this machine.
    pub fn first_in_plaintext_elsewhere(&self) -> Option<&str> {
        let is_elsewhere = |url: &&str| match url.strip_prefix(HTTP) {
            Some(authority) => !is_loopback(authority),
            None => false,
        };
        self.urls.iter().map(String::as_str).find(is_elsewhere)
    }

    /// Reports a failure of the hub at `url` and advances to the next hub, unless another caller already did.
    pub fn failed(&self, url: &str) {
        let Some(at) = self.urls.iter().position(|known| known == url) else { return };
        let next = (at + 1) % self.urls.len();
        // If another caller advanced first, the exchange fails and the position stays.
        self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed).ok();
    }
}

impl ConfigValue for Hubs {
    type Limit = NoLimit;
    type Item = Hubs;

    fn type_name() -> String {
        "URL, or a list of URLs".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<Hubs>) -> Option<Hubs> {
        let rule = Rule {
            limit: (1..=HUBS_MAX).into(),
            fix: "URLs such as \"http://HOST:PORT\"",
            ..Rule::default()
        };
        let OneOrMany(texts) = OneOrMany::<String>::read(field, &rule)?;
        let mut urls: Vec<String> = Vec::new();
        let mut is_valid = true;
        for (index, text) in texts.iter().enumerate() {
            let url = text.trim_end_matches('/');
            let problem = match url {
                url if !is_url(url) => {
                    "is not a hub URL; write \"https://HOST:PORT\", or http:// on this machine"
                }
                url if urls.iter().any(|known| known == url) => "is listed twice; remove one",
                url => {
                    urls.push(url.to_owned());
                    continue;
                }
            };
            is_valid = false;
            field.document.problem(&format!("{}[{index}]", field.path), format!("\"{text}\" {problem}"));
        }
        is_valid.then(|| Hubs { urls: urls.into(), current: Arc::default() })
    }
}

impl fmt::Display for Hubs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.current())
    }
}

/// Consecutive failures of one caller of the hubs.
#[derive(Clone, Copy, Debug)]
pub struct Failover {
    hubs: u32,
    /// Delays between rounds of calls to all hubs.
    backoff: Backoff,
    failures: u32,
}

impl Failover {
    /// Creates the state of a caller of these hubs, without failures.
    pub fn new(hubs: &Hubs, backoff: Backoff) -> Failover {
        let hubs = u32::try_from(hubs.count()).expect("the number of hubs is limited");
        Failover { hubs, backoff, failures: 0 }
    }

    /// Records a failure. Returns the delay of the next call after every hub has failed; before, the next hub is called
    /// at once. `chance` (0 to 1) is the jitter of the delay.
    pub fn failed(&mut self, chance: f64) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1);
        self.failures.is_multiple_of(self.hubs).then(|| self.backoff.equal_jitter(self.rounds(), chance))
    }

    /// Records a success. Returns whether all hubs had failed before.
    pub fn succeeded(&mut self) -> bool {
        std::mem::take(&mut self.failures) >= self.hubs
    }

    /// Returns whether the last call failed.
    pub fn is_failing(&self) -> bool {
        self.failures > 0
    }

    /// Returns how many times all hubs have failed since the last success.
    pub fn rounds(&self) -> u32 {
        self.failures / self.hubs
    }
}

/// Splits a URL into its scheme and the rest.
fn scheme_and_authority(url: &str) -> Option<(&str, &str)> {
    [HTTP, HTTPS].into_iter().find_map(|scheme| Some((scheme, url.strip_prefix(scheme)?)))
}

/// Returns whether the host and port of a URL are on this machine.
pub fn is_loopback(authority: &str) -> bool {
    if let Ok(address) = authority.parse::<std::net::SocketAddr>() {
        return address.ip().is_loopback();
    }
    let host = match authority.rsplit_once(':') {
        Some((host, _)) if !host.ends_with(':') && !authority.ends_with(']') => host,
        _ => authority,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns whether `text` is `http://` followed by a valid host and port.
fn is_url(text: &str) -> bool {
    let Some((_, authority)) = scheme_and_authority(text) else { return false };
    let (host, port) = match authority.rsplit_once(':') {
        // The colons of an IPv6 address are inside its brackets.
        Some((host, port)) if !port.ends_with(']') => (host, port),
        Some(_) | None => (authority, "80"),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let within = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_fits = match within {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(plain),
    };
    host_fits && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use configuration::{ConfigFile, section};

    section! {
        /// File with the key.
        struct File {
            /// Hubs.
            hub: Hubs;
        }
    }

    fn read(hub: &str) -> Result<Hubs, Vec<String>> {
        let file = ConfigFile::read(&format!("hub = {hub}"), |document| document.section::<File>());
        file.map(|file| file.hub).map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn one_url_or_a_list_of_them_may_be_written() {
        assert_eq!(read("\"http://127.0.0.1:7000\"").unwrap().current(), "http://127.0.0.1:7000");
        let hubs = read(r#"["http://a:1/", "http://[::1]:7000", "http://hub.internal"]"#).unwrap();
        assert_eq!((hubs.count(), hubs.to_string().as_str()), (3, "http://a:1"));
        let wrong = read("7").unwrap_err();
        assert!(wrong[0].contains("hub: 7 is a number; write a string"), "{wrong:?}");
    }

    #[test]
    fn all_invalid_urls_are_reported_together() {
        let wrong = [
            "",
            "hub:7000",
            "ftp://hub",
            "http://",
            "http://hub:0",
            "http://hub:x",
            "http://k@hub",
            "http://hub/v1",
            "http://[::g]",
            "http://a b",
        ];
        for text in wrong {
            let problems = read(&format!("{text:?}")).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(&format!("\"{text}\"")), "{problems:?}");
        }
        let problems = read(r#"["http://a", "b", "http://a/", "c"]"#).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(read("[]").unwrap_err()[0].contains("has 0 entries; write 1 to 10"));
        let many =
            |count: usize| format!("{:?}", (0..count).map(|n| format!("http://hub-{n}")).collect::<Vec<_>>());
        assert_eq!(read(&many(HUBS_MAX)).unwrap().count(), HUBS_MAX);
        assert!(read(&many(HUBS_MAX + 1)).unwrap_err()[0].contains("has 11 entries; write 1 to 10"));
    }

    #[test]
    fn one_hub_is_used_until_it_fails_and_then_the_next_round_robin() {
        let hubs = read(r#"["http://a", "http://b", "http://c"]"#).unwrap();
        let (one, other) = (hubs.clone(), hubs.clone());
        one.failed("http://a");
        other.failed("http://a");
        assert_eq!(hubs.current(), "http://b", "two failures at the same hub advance the list once");
        hubs.failed("http://unlisted");
        assert_eq!((one.current(), other.current()), ("http://b", "http://b"), "it stays while it responds");
        hubs.failed("http://b");
        hubs.failed("http://c");
        assert_eq!(hubs.current(), "http://a");
        let only = read("\"http://a\"").unwrap();
        only.failed("http://a");
        assert_eq!(only.current(), "http://a");
    }

    #[test]
    fn a_caller_waits_only_after_every_hub_has_failed() {
        let hubs = Hubs::at(["http://a/", "http://b"]).unwrap();
        let backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_millis(150) };
        let mut failover = Failover::new(&hubs, backoff);
        for _ in 0..2 {
            assert!(!failover.is_failing() && !failover.succeeded());
            assert_eq!(failover.failed(1.0), None);
            assert!(failover.is_failing() && !failover.succeeded(), "one hub of two has failed");
            for (rounds, ms) in [(1, 100), (2, 150)] {
                assert_eq!(
                    [failover.failed(1.0), failover.failed(1.0)],
                    [None, Some(Duration::from_millis(ms))]
                );
                assert_eq!(failover.rounds(), rounds);
            }
            assert!(failover.succeeded(), "every hub had failed");
        }
    }
}
