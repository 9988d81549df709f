//! Parsers of single option values.

use http::{HeaderValue, Uri};

/// Problems in the order in which they were found.
pub(super) struct Problems(pub(super) Vec<String>);

impl Problems {
    pub(super) fn note<T>(&mut self, checked: Result<T, String>) -> Option<T> {
        checked.map_err(|problem| self.0.push(problem)).ok()
    }

    pub(super) fn all<T>(&mut self, checked: Result<T, Vec<String>>) -> Option<T> {
        checked.map_err(|problems| self.0.extend(problems)).ok()
    }
}

/// Parses the base URL of the API; removes `/v1`.
pub(super) fn base(url: &str) -> Result<Uri, String> {
    let wrong = |what: &str| Err(format!("--url {url:?}: {what}; write it like http://127.0.0.1:8080"));
    let Ok(uri) = url.parse::<Uri>() else {
        return wrong("is not a URL");
    };
    match uri.scheme_str() {
        Some("http" | "https") => {}
        Some(_) => return wrong("must have the scheme http or https"),
        None => return wrong("has no scheme"),
    }
    let Some(authority) = uri.authority().filter(|authority| !authority.host().is_empty()) else {
        return wrong("has no host");
    };
    if authority.as_str().contains('@') {
        return Err(
            "--url: contains a user or a password (not shown); pass the API key with --key".to_owned()
        );
    }
    if uri.query().is_some() {
        return wrong("contains a query");
    }
    let base = uri.path().trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base);
    let scheme = uri.scheme_str().unwrap_or("http");
    format!("{scheme}://{authority}{base}").parse().or_else(|_| wrong("is not a URL"))
}

pub(super) fn authorization(key: String) -> Result<HeaderValue, String> {
    if key.trim().is_empty() {
        return Err("--key: is empty; omit it to send no API key".to_owned());
    }
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| {
        "--key: contains characters that are invalid in a header (value not shown)".to_owned()
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generator::requests::target;
    use crate::workload::WorkloadType;

    #[test]
    fn urls_are_those_of_openai_clients() {
        let check = |url: &str, expected: Option<&str>| {
            let got = base(url).map(|base| target(&base, WorkloadType::Queries).to_string());
            assert_eq!(got.as_deref().ok(), expected, "{url}: {got:?}");
        };
        check("http://127.0.0.1:8080", Some("http://127.0.0.1:8080/v1/embeddings"));
        check("http://127.0.0.1:8080/v1/", Some("http://127.0.0.1:8080/v1/embeddings"));
        check("http://[::1]:1/under/v1", Some("http://[::1]:1/under/v1/embeddings"));
        check("https://a:1/v1", Some("https://a:1/v1/embeddings"));
        for wrong in ["", "127.0.0.1:8080", "/v1", "ftp://a", "http://", "http://a?b", "http://k@a", "a b"] {
            check(wrong, None);
        }
    }
}
