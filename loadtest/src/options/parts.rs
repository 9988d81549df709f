//! Parsers of single option values.

use http::Uri;

use crate::endpoint::parse_url;

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
    let (uri, path) = parse_url("--url", url)?;
    let mut parts = uri.into_parts();
    parts.path_and_query = if path.is_empty() { "/" } else { &path }.parse().ok();
    Uri::from_parts(parts).map_err(|error| format!("--url {url:?}: {error}"))
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
