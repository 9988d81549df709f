//! URL of a webhook.

use jobs_core::webhook::{URL_BYTES_MAX, WebhookPolicy, is_public};
use regions::HostPort;
use resolver::Resolver;
use std::net::IpAddr;
use std::time::Duration;
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
    /// The host of the webhook is a name whose addresses all belong to private networks.
    #[error(
        "the webhook URL has the name {name} with the address {address}, which is not permitted; ask the operator to permit its network"
    )]
    Name {
        /// Name.
        name: String,
        /// One of its addresses.
        address: IpAddr,
    },
    /// The result would be readable on its way through the public internet.
    #[error(
        "the webhook URL has the scheme `http` and the public address {0}; write https, or ask the operator to permit its network"
    )]
    Plaintext(IpAddr),
}

impl WebhookUrlError {
    /// Returns whether the URL is valid, and a policy of the operator forbids its target.
    pub fn is_forbidden_target(&self) -> bool {
        match self {
            WebhookUrlError::Address(_) | WebhookUrlError::Name { .. } | WebhookUrlError::Plaintext(_) => {
                true
            }
            WebhookUrlError::Invalid(_)
            | WebhookUrlError::TooLong(_)
            | WebhookUrlError::Scheme { .. }
            | WebhookUrlError::Part(_) => false,
        }
    }
}

/// Target of a webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookTarget {
    /// URL, as it is stored.
    pub url: Url,
    /// Host and port.
    pub endpoint: HostPort,
}

impl WebhookTarget {
    /// Whether results are sent without TLS.
    pub fn is_plaintext(&self) -> bool {
        self.url.scheme() == "http"
    }

    /// Checks the addresses of the name, if it can be resolved within a time. Each attempt checks them again.
    ///
    /// # Errors
    ///
    /// When none of them is permitted.
    pub async fn check_name(
        &self,
        policy: &WebhookPolicy,
        resolver: &Resolver,
        limit: Duration,
    ) -> Result<(), WebhookUrlError> {
        let Some(Host::Domain(name)) = self.url.host() else { return Ok(()) };
        // A name without an address may get one until the job is finished, and DNS may fail for a moment: the attempts decide.
        let Ok(Ok(addresses)) = tokio::time::timeout(limit, resolver.addresses(self.endpoint.host())).await
        else {
            return Ok(());
        };
        match addresses.first() {
            Some(address) if !addresses.iter().any(|any| policy.permits(*any, self.is_plaintext())) => {
                Err(WebhookUrlError::Name { name: name.to_owned(), address: *address })
            }
            _ => Ok(()),
        }
    }
}

/// Checks a URL as far as is possible without name resolution. The addresses of a name are checked at each attempt.
pub fn check(url: &str, policy: &WebhookPolicy) -> Result<WebhookTarget, WebhookUrlError> {
    if url.len() > URL_BYTES_MAX {
        return Err(WebhookUrlError::TooLong(url.len()));
    }
    let url = Url::parse(url).map_err(|error| WebhookUrlError::Invalid(error.to_string()))?;
    // The normal form is stored, and other characters than ASCII are longer in it.
    if url.as_str().len() > URL_BYTES_MAX {
        return Err(WebhookUrlError::TooLong(url.as_str().len()));
    }
    match url.scheme() {
        "https" => {}
        "http" if policy.permits_plaintext() => {}
        other => {
            let expected = if policy.permits_plaintext() { "https or http" } else { "https" };
            return Err(WebhookUrlError::Scheme { found: other.to_owned(), expected });
        }
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(WebhookUrlError::Part("user or password"));
    }
    if url.fragment().is_some() {
        return Err(WebhookUrlError::Part("fragment"));
    }
    let is_plaintext = url.scheme() == "http";
    match address(&url) {
        Some(address) if policy.permits(address, is_plaintext) => {}
        Some(address) if is_public(address) => return Err(WebhookUrlError::Plaintext(address)),
        Some(address) => return Err(WebhookUrlError::Address(address)),
        None => {}
    }
    let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or(443));
    let endpoint = format!("{host}:{port}").parse();
    let endpoint = endpoint.map_err(|error| WebhookUrlError::Invalid(format!("{error}")))?;
    Ok(WebhookTarget { url, endpoint })
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
    fn the_normal_form_of_a_url_is_accepted_again() {
        for url in ["https://EXAMPLE.com:443/ä?b=ö c", "https://bücher.example", "https://8.8.8.8:8443/%zz"]
        {
            let target = check(url, &WebhookPolicy::default()).unwrap();
            assert_eq!(check(target.url.as_str(), &WebhookPolicy::default()), Ok(target), "{url}");
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
        let escaped = format!("https://example.com/{}", "é".repeat(500));
        assert!(escaped.len() < URL_BYTES_MAX, "its normal form is too long");
        assert_eq!(
            problem(&escaped),
            format!("the webhook URL has {} bytes; the limit is {URL_BYTES_MAX}", 20 + 500 * 6)
        );
        let policy = WebhookPolicy { private_targets: vec!["127.0.0.0/8".parse().unwrap()] };
        assert!(check("http://127.0.0.1:8080/hook", &policy).is_ok());
        let public = check("http://8.8.8.8/hook", &policy).unwrap_err();
        assert!(public.is_forbidden_target(), "{public}");
        assert_eq!(
            public.to_string(),
            "the webhook URL has the scheme `http` and the public address 8.8.8.8; write https, or ask the operator to permit its network"
        );
    }
}
