//! URL of a webhook.

use jobs_core::webhook::{URL_BYTES_MAX, WebhookPolicy};
use std::net::IpAddr;
use url::{Host, Url};

/// Reason why a URL cannot be the target of a webhook.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WebhookUrlError {
    /// The text cannot be parsed as a URL.
    #[error("the webhook is not a URL: {0}")]
    Invalid(String),
    /// The URL is longer than the limit.
    #[error("the webhook URL has {0} bytes; the limit is {URL_BYTES_MAX}")]
    TooLong(usize),
    /// Results are not sent over this scheme.
    #[error("the webhook URL has the scheme `{found}`; write one with {expected}")]
    Scheme {
        /// Scheme.
        found: String,
        /// Permitted schemes.
        expected: &'static str,
    },
    /// The URL contains a user name, a password or a fragment.
    #[error("the webhook URL contains a {0}; remove it")]
    Part(&'static str),
    /// The host of the webhook is an address of a private network, to which results are not sent unless the operator
    /// permits it.
    #[error(
        "the webhook URL has the address {0}, which is not public; ask the operator to permit its network"
    )]
    Address(IpAddr),
}

/// Checks a URL as far as is possible without name resolution. The addresses of a name are checked at each attempt.
pub fn check(url: &str, policy: &WebhookPolicy) -> Result<Url, WebhookUrlError> {
    if url.len() > URL_BYTES_MAX {
        return Err(WebhookUrlError::TooLong(url.len()));
    }
    let url = Url::parse(url).map_err(|error| WebhookUrlError::Invalid(error.to_string()))?;
    match url.scheme() {
        "https" => {}
        "http" if policy.permits_http => {}
        other => {
            let expected = if policy.permits_http { "https or http" } else { "https" };
            return Err(WebhookUrlError::Scheme { found: other.to_owned(), expected });
        }
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(WebhookUrlError::Part("user or password"));
    }
    if url.fragment().is_some() {
        return Err(WebhookUrlError::Part("fragment"));
    }
    match address(&url) {
        Some(address) if !policy.permits(address) => Err(WebhookUrlError::Address(address)),
        _ => Ok(url),
    }
}

/// Returns the address of a URL whose host is one; `Url` has normalized its spelling (`0x7f.1`, `2130706433`).
fn address(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(url: &str) -> String {
        check(url, &WebhookPolicy::default()).unwrap_err().to_string()
    }

    #[test]
    fn public_targets_are_accepted() {
        for url in [
            "https://example.com",
            "https://example.com:8443/a?b=c",
            "https://8.8.8.8/x",
            "https://[2606:4700::1111]/",
        ] {
            assert!(check(url, &WebhookPolicy::default()).is_ok(), "{url}");
        }
    }

    #[test]
    fn every_spelling_of_a_private_address_is_rejected() {
        for host in [
            "127.0.0.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "127.1",
            "0x7f.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(problem(&format!("https://{host}/")).contains("is not public"), "{host}");
        }
        assert_eq!(
            problem("https://169.254.169.254/latest/meta-data"),
            "the webhook URL has the address 169.254.169.254, which is not public; ask the operator to permit its network"
        );
    }

    #[test]
    fn other_urls_are_rejected_with_the_reason() {
        assert!(problem("example.com").starts_with("the webhook is not a URL"));
        assert!(problem("https://").starts_with("the webhook is not a URL"));
        assert_eq!(
            problem("http://example.com"),
            "the webhook URL has the scheme `http`; write one with https"
        );
        assert_eq!(
            problem("file:///etc/passwd"),
            "the webhook URL has the scheme `file`; write one with https"
        );
        assert_eq!(
            problem("https://user:secret@example.com"),
            "the webhook URL contains a user or password; remove it"
        );
        assert_eq!(problem("https://example.com/#x"), "the webhook URL contains a fragment; remove it");
        let long = format!("https://example.com/{}", "x".repeat(URL_BYTES_MAX));
        assert_eq!(
            problem(&long),
            format!("the webhook URL has {} bytes; the limit is {URL_BYTES_MAX}", long.len())
        );
        let policy =
            WebhookPolicy { private_targets: vec!["127.0.0.0/8".parse().unwrap()], permits_http: true };
        assert!(check("http://127.0.0.1:8080/hook", &policy).is_ok());
        assert!(
            check("http://127.0.0.1:8080/hook", &WebhookPolicy { permits_http: true, ..Default::default() })
                .is_err()
        );
    }
}
