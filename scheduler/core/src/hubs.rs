//! Which of several hubs is asked.
//!
//! Hubs that stand on one store give out the same table, and any of them takes registrations, so whoever needs a hub may
//! ask any. One is asked until it fails (it refuses, it is silent, what it says is of no use), then the next, and so on
//! round; the one that answered stays the one that is asked, also when an earlier one of the list is back. Changing back
//! would gain nothing, and somebody who is up and down would be asked again and again.
//!
//! All parts of a process share one [`Hubs`], so that what one of them has found out saves the others the wait. Two that
//! fail at the same one move on once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, de};

/// Hubs of one list: five, and as many again while others are taken away.
pub const HUBS_MAX: usize = 10;

/// What stands under `hub` in a file: one URL, or a list of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubsGiven(Vec<String>);

impl<'de> Deserialize<'de> for HubsGiven {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<HubsGiven, D::Error> {
        struct OneOrMore;
        impl<'de> Visitor<'de> for OneOrMore {
            type Value = HubsGiven;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the URL of a hub, or a list of such")
            }

            fn visit_str<E: de::Error>(self, one: &str) -> Result<HubsGiven, E> {
                Ok(HubsGiven(vec![one.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<HubsGiven, A::Error> {
                let mut given = Vec::new();
                while let Some(one) = list.next_element()? {
                    given.push(one);
                }
                Ok(HubsGiven(given))
            }
        }
        from.deserialize_any(OneOrMore)
    }
}

/// The hubs that may be asked; clones share what is known of them. It shows as the one that is asked now.
#[derive(Clone, Debug)]
pub struct Hubs {
    /// Base URLs, without a slash at their ends.
    urls: Arc<[String]>,
    asked: Arc<AtomicUsize>,
}

impl Hubs {
    /// The hubs of a file.
    ///
    /// # Errors
    ///
    /// Every problem at once, each naming the key, the value and what to write instead.
    pub fn read(HubsGiven(given): HubsGiven) -> Result<Hubs, Vec<String>> {
        let mut problems = Vec::new();
        if given.is_empty() {
            problems.push("hub = [] names no hub; write \"http://HOST:PORT\", or a list of such".to_owned());
        }
        if given.len() > HUBS_MAX {
            problems.push(format!("hub names {} hubs; write at most {HUBS_MAX}", given.len()));
        }
        let mut urls: Vec<String> = Vec::new();
        for text in given.iter().take(HUBS_MAX) {
            let url = text.trim_end_matches('/');
            if !is_url(url) {
                problems.push(format!("hub = \"{text}\" is no URL of a hub; write \"http://HOST:PORT\""));
            } else if urls.iter().any(|known| known == url) {
                problems.push(format!("hub = \"{text}\" stands there twice; write it once"));
            } else {
                urls.push(url.to_owned());
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Hubs { urls: urls.into(), asked: Arc::default() })
    }

    /// The one to ask now.
    pub fn now(&self) -> &str {
        &self.urls[self.asked.load(Ordering::Relaxed)]
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.urls.len()
    }

    /// The hub at `url` has failed: the next is asked, unless somebody has moved on from it already.
    pub fn failed(&self, url: &str) {
        let Some(at) = self.urls.iter().position(|known| known == url) else { return };
        let next = (at + 1) % self.urls.len();
        // Whoever comes second finds another one asked, and leaves it at that.
        self.asked.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed).ok();
    }
}

impl fmt::Display for Hubs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.now())
    }
}

/// `http://` and what can be a host and a port.
fn is_url(text: &str) -> bool {
    let Some(authority) = text.strip_prefix("http://") else { return false };
    let (host, port) = match authority.rsplit_once(':') {
        // The colons of an IPv6 address stand within its brackets.
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
    use serde_json::json;

    fn read(given: serde_json::Value) -> Result<Hubs, Vec<String>> {
        Hubs::read(serde_json::from_value(given).unwrap())
    }

    #[test]
    fn one_url_or_a_list_of_them_may_be_written() {
        assert_eq!(read(json!("http://127.0.0.1:7000")).unwrap().now(), "http://127.0.0.1:7000");
        let hubs = read(json!(["http://a:1/", "http://[::1]:7000", "http://hub.internal"])).unwrap();
        assert_eq!((hubs.count(), hubs.to_string().as_str()), (3, "http://a:1"));
        let wrong = serde_json::from_value::<HubsGiven>(json!(7)).unwrap_err().to_string();
        assert!(wrong.contains("the URL of a hub, or a list of such"), "{wrong}");
    }

    #[test]
    fn every_url_that_is_none_is_named_at_once() {
        let wrong = [
            "",
            "hub:7000",
            "https://hub",
            "http://",
            "http://hub:0",
            "http://hub:x",
            "http://k@hub",
            "http://hub/v1",
            "http://[::g]",
            "http://a b",
        ];
        for text in wrong {
            let problems = read(json!(text)).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(&format!("\"{text}\"")), "{problems:?}");
        }
        let problems = read(json!(["http://a", "b", "http://a/", "c"])).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(read(json!([])).unwrap_err()[0].contains("no hub"));
        let many = |count: usize| json!((0..count).map(|n| format!("http://hub-{n}")).collect::<Vec<_>>());
        assert_eq!(read(many(HUBS_MAX)).unwrap().count(), HUBS_MAX);
        assert!(read(many(HUBS_MAX + 1)).unwrap_err()[0].contains("at most 10"));
    }

    #[test]
    fn one_is_asked_until_it_fails_and_then_the_next_round_and_round() {
        let hubs = read(json!(["http://a", "http://b", "http://c"])).unwrap();
        let (one, other) = (hubs.clone(), hubs.clone());
        one.failed("http://a");
        other.failed("http://a");
        assert_eq!(hubs.now(), "http://b", "two that fail at the same one move on once");
        hubs.failed("http://nobody");
        assert_eq!((one.now(), other.now()), ("http://b", "http://b"), "it stays while it answers");
        hubs.failed("http://b");
        hubs.failed("http://c");
        assert_eq!(hubs.now(), "http://a");
        let only = read(json!("http://a")).unwrap();
        only.failed("http://a");
        assert_eq!(only.now(), "http://a");
    }
}
