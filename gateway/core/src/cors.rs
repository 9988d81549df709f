//! Cross-origin requests (CORS): web pages that may read the responses, and the corresponding headers.
//!
//! Without configuration no page of another origin may: a browser that holds an API key is the exception. Origins are
//! compared as they are written (RFC 6454 §6.2: scheme, host and port, in lower case). Credentials are never allowed,
//! because the API has no cookies: a page sends its key in a header, which the preflight allows.

use replica_api::api::RESPONSE_HEADERS;
use std::sync::LazyLock;

/// CORS policy: origins that may read responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    origins: AllowedOrigins,
    /// Time for which a browser may cache the response to a preflight, in seconds.
    max_age_s: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum AllowedOrigins {
    Any,
    These(Vec<String>),
}

/// Maximum origins of the list; more should be `*`.
pub const ORIGINS_MAX: usize = 256;
/// Maximum time for which a browser may cache the response to a preflight, in seconds; browsers cache none for longer
/// than a day.
pub const MAX_AGE_MAX_S: u64 = 86_400;
/// Default of that time.
pub const MAX_AGE_DEFAULT_S: u64 = 600;
/// Maximum bytes of the headers in a preflight.
const REQUESTED_HEADERS_BYTES_MAX: usize = 4096;

/// Response headers that a page may read in addition to the safelisted ones: those of the API, and the path of a job.
static EXPOSED: LazyLock<String> = LazyLock::new(|| {
    let names: Vec<&str> = RESPONSE_HEADERS.iter().map(|(name, _)| *name).chain(["location"]).collect();
    names.join(", ")
});

/// Headers of a response.
pub type ResponseHeaders = Vec<(&'static str, String)>;

impl Cors {
    /// Validates the configured origins.
    ///
    /// # Errors
    ///
    /// Every problem, with its key, its value and the fix.
    pub fn read(origins: Vec<String>, max_age_s: u64) -> Result<Cors, Vec<String>> {
        let mut problems = Vec::new();
        let any = origins.iter().any(|origin| origin == "*");
        if any && origins.len() > 1 {
            problems.push(
                "cors.origins has \"*\" and other origins; give either \"*\" alone, or the others".to_owned(),
            );
        }
        for (index, origin) in
            origins.iter().enumerate().filter(|(_, origin)| *origin != "*" && !is_origin(origin))
        {
            problems.push(format!(
                "cors.origins[{index}] = \"{origin}\" is not an origin; write scheme, host and, if it is not the \
                 default, the port, in lower case and without a path, as \"https://app.example.com\""
            ));
        }
        let origins = if any { AllowedOrigins::Any } else { AllowedOrigins::These(origins) };
        if problems.is_empty() { Ok(Cors { origins, max_age_s }) } else { Err(problems) }
    }

    /// Returns the headers for a response to a page of `origin`; without `access-control-allow-origin` if it may not
    /// read it.
    pub fn response(&self, origin: Option<&[u8]>) -> ResponseHeaders {
        // A cache must know that the response depends on the origin, even if this one is rejected.
        let varies = || ("vary", "origin".to_owned());
        match (&self.origins, origin) {
            (AllowedOrigins::Any, Some(_)) => vec![
                ("access-control-allow-origin", "*".to_owned()),
                ("access-control-expose-headers", EXPOSED.clone()),
            ],
            (AllowedOrigins::Any, None) => Vec::new(),
            (AllowedOrigins::These(origins), origin) => {
                let known = origin.and_then(|origin| origins.iter().find(|known| known.as_bytes() == origin));
                let Some(known) = known else { return vec![varies()] };
                vec![
                    varies(),
                    ("access-control-allow-origin", known.clone()),
                    ("access-control-expose-headers", EXPOSED.clone()),
                ]
            }
        }
    }

    /// Returns the response to a preflight for `methods` (the `Access-Control-Request-Headers` are `headers`); `None`
    /// if this page is not allowed.
    pub fn preflight(&self, origin: &[u8], methods: &str, headers: Option<&[u8]>) -> Option<ResponseHeaders> {
        let mut response = self.response(Some(origin));
        response.iter().find(|(name, _)| *name == "access-control-allow-origin")?;
        response.push(("access-control-allow-methods", methods.to_owned()));
        response.push(("access-control-max-age", self.max_age_s.to_string()));
        // Clients send headers of their own (x-stainless-…, x-fern-…), which the gateway does not read: each may be
        // sent.
        if let Some(headers) = headers.filter(|headers| is_list_of_names(headers)) {
            response.push(("access-control-allow-headers", String::from_utf8_lossy(headers).into_owned()));
        }
        Some(response)
    }
}

fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let host_fits = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b':' | b'[' | b']')
    };
    !scheme.is_empty()
        && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && !host.is_empty()
        && host.bytes().all(host_fits)
}

fn is_list_of_names(list: &[u8]) -> bool {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b',' | b' ');
    list.len() <= REQUESTED_HEADERS_BYTES_MAX && list.iter().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(origins: &[&str]) -> Cors {
        let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
        Cors::read(origins, MAX_AGE_DEFAULT_S).expect("origins")
    }

    fn allowed(headers: &ResponseHeaders) -> Option<&str> {
        let found = headers.iter().find(|(name, _)| *name == "access-control-allow-origin");
        found.map(|(_, value)| value.as_str())
    }

    #[test]
    fn only_a_listed_origin_may_read_and_each_response_varies_by_origin() {
        let cors = cors(&["https://a.example", "http://localhost:3000"]);
        let to = |origin: &str| cors.response(Some(origin.as_bytes()));
        assert_eq!(allowed(&to("https://a.example")), Some("https://a.example"));
        assert_eq!(allowed(&to("http://localhost:3000")), Some("http://localhost:3000"));
        for other in [
            "https://a.example.evil",
            "http://a.example",
            "https://A.example",
            "null",
            "",
            "https://a.example/",
        ] {
            assert_eq!(to(other), [("vary", "origin".to_owned())], "{other}");
        }
        assert_eq!(cors.response(None), [("vary", "origin".to_owned())]);
    }

    #[test]
    fn a_star_allows_every_origin_without_credentials() {
        let headers =
            cors(&["*"]).preflight(b"https://x.example", "POST", Some(b"authorization")).expect("any");
        assert_eq!(allowed(&headers), Some("*"));
        assert!(headers.iter().all(|(name, _)| *name != "access-control-allow-credentials"));
    }

    #[test]
    fn a_preflight_allows_the_requested_headers() {
        let cors = cors(&["https://a.example"]);
        let preflight =
            |headers: &[u8]| cors.preflight(b"https://a.example", "POST", Some(headers)).expect("allowed");
        let allowed_headers = |headers: &ResponseHeaders| {
            let found = headers.iter().find(|(name, _)| *name == "access-control-allow-headers");
            found.map(|(_, value)| value.clone())
        };
        assert_eq!(
            allowed_headers(&preflight(b"authorization, x-stainless-os")).as_deref(),
            Some("authorization, x-stainless-os")
        );
        assert_eq!(allowed_headers(&preflight(b"x\r\ny: z")), None);
        assert_eq!(allowed_headers(&preflight(&[b'a'; REQUESTED_HEADERS_BYTES_MAX + 1])), None);
        assert_eq!(
            allowed_headers(&preflight(&[b'a'; REQUESTED_HEADERS_BYTES_MAX])).map(|list| list.len()),
            Some(4096)
        );
        assert!(cors.preflight(b"https://b.example", "POST", None).is_none());
    }

    #[test]
    fn all_problems_of_the_origins_are_reported() {
        let read = |origins: &[&str]| {
            let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
            Cors::read(origins, MAX_AGE_DEFAULT_S).expect_err("a problem").join("\n")
        };
        assert!(read(&["*", "https://a"]).contains("alone"));
        let both = read(&["a.example", "https://a.example/x"]);
        for part in ["\"a.example\"", "\"https://a.example/x\""] {
            assert!(both.contains(part), "{part} in {both}");
        }
        assert!(Cors::read(vec!["*".into()], MAX_AGE_MAX_S).is_ok());
    }
}
