//! Cross-origin requests (CORS): which web pages may read the responses, and the headers that say so.
//!
//! Without configuration no page of another origin may: a browser that holds an API key is the exception. Origins are
//! compared as they are written (RFC 6454 §6.2: scheme, host and port, in lower case). Credentials are never allowed,
//! because the API has no cookies: a page sends its key in a header, which the preflight allows.

/// Which origins may read responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    origins: Origins,
    /// Time for which a browser may cache the response to a preflight, in seconds.
    max_age_s: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Origins {
    Any,
    These(Vec<String>),
}

/// Origins that may be listed; more is a case for `*`.
pub const ORIGINS_MAX: usize = 256;
/// The longest that a browser may keep the answer to a preflight, in seconds; browsers keep none for longer than a day.
pub const MAX_AGE_MAX_S: u64 = 86_400;
/// Default of that time.
pub const MAX_AGE_DEFAULT_S: u64 = 600;
/// Bytes of the list of headers that a preflight asks for.
const REQUESTED_HEADERS_BYTES_MAX: usize = 4096;

/// Headers of responses that a page may read beside those that every page may.
pub const EXPOSED: &str = "x-request-id, x-meridian-region, x-meridian-attempts, x-meridian-parts, \
     x-meridian-model-revision, x-meridian-error, x-meridian-tokens, x-meridian-priority, x-meridian-held-ms, x-meridian-cold-start-ms, x-meridian-residency-receipt, server-timing, \
     retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
     x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens";

/// Headers of a response.
pub type ResponseHeaders = Vec<(&'static str, String)>;

impl Cors {
    /// From the origins and the seconds of a configuration.
    ///
    /// # Errors
    ///
    /// Every problem, with its key, its value and what to write instead.
    pub fn read(origins: Vec<String>, max_age_s: Option<i64>) -> Result<Cors, Vec<String>> {
        let mut problems = Vec::new();
        if origins.is_empty() || origins.len() > ORIGINS_MAX {
            problems.push(format!(
                "cors.origins has {} entries; give 1 to {ORIGINS_MAX}, or leave [cors] out to allow none",
                origins.len()
            ));
        }
        let any = origins.iter().any(|origin| origin == "*");
        if any && origins.len() > 1 {
            problems.push("cors.origins has \"*\" beside others; give \"*\" alone, or the others".to_owned());
        }
        for origin in origins.iter().filter(|origin| *origin != "*" && !is_origin(origin)) {
            problems.push(format!(
                "cors.origins has \"{origin}\", which is no origin; write scheme, host and, if it is not the usual one, \
                 the port, in lower case and without a path, as \"https://app.example.com\""
            ));
        }
        let age = max_age_s.map_or(Some(MAX_AGE_DEFAULT_S), |given| u64::try_from(given).ok());
        let age = age.filter(|age| *age <= MAX_AGE_MAX_S);
        if age.is_none() {
            let given = max_age_s.unwrap_or_default();
            problems.push(format!("cors.max_age_s = {given}; give 0 to {MAX_AGE_MAX_S}"));
        }
        match age {
            Some(max_age_s) if problems.is_empty() => {
                Ok(Cors { origins: if any { Origins::Any } else { Origins::These(origins) }, max_age_s })
            }
            _ => Err(problems),
        }
    }

    /// Returns the headers for a response to a page of `origin`; without `access-control-allow-origin` if it may not read it.
    pub fn response(&self, origin: Option<&[u8]>) -> ResponseHeaders {
        // Whoever caches a response must know that it depends on the origin, also where this one is refused.
        let varies = || ("vary", "origin".to_owned());
        match (&self.origins, origin) {
            (Origins::Any, Some(_)) => vec![
                ("access-control-allow-origin", "*".to_owned()),
                ("access-control-expose-headers", EXPOSED.to_owned()),
            ],
            (Origins::Any, None) => Vec::new(),
            (Origins::These(origins), origin) => {
                let known = origin.and_then(|origin| origins.iter().find(|known| known.as_bytes() == origin));
                let Some(known) = known else { return vec![varies()] };
                vec![
                    varies(),
                    ("access-control-allow-origin", known.clone()),
                    ("access-control-expose-headers", EXPOSED.to_owned()),
                ]
            }
        }
    }

    /// The answer to a preflight for `methods` (the `Access-Control-Request-Headers` are `headers`); nothing if this page
    /// may not.
    pub fn preflight(&self, origin: &[u8], methods: &str, headers: Option<&[u8]>) -> Option<ResponseHeaders> {
        let mut answer = self.response(Some(origin));
        answer.iter().find(|(name, _)| *name == "access-control-allow-origin")?;
        answer.push(("access-control-allow-methods", methods.to_owned()));
        answer.push(("access-control-max-age", self.max_age_s.to_string()));
        // Clients send headers of their own (x-stainless-…, x-fern-…), which nobody reads here: each may be sent.
        if let Some(headers) = headers.filter(|headers| is_list_of_names(headers)) {
            answer.push(("access-control-allow-headers", String::from_utf8_lossy(headers).into_owned()));
        }
        Some(answer)
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
        Cors::read(origins, None).expect("origins")
    }

    fn allowed(headers: &ResponseHeaders) -> Option<&str> {
        let found = headers.iter().find(|(name, _)| *name == "access-control-allow-origin");
        found.map(|(_, value)| value.as_str())
    }

    #[test]
    fn only_a_listed_origin_may_read_and_each_response_says_that_it_depends_on_it() {
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
    fn a_star_is_every_origin_and_never_with_credentials() {
        let headers =
            cors(&["*"]).preflight(b"https://x.example", "POST", Some(b"authorization")).expect("any");
        assert_eq!(allowed(&headers), Some("*"));
        assert!(headers.iter().all(|(name, _)| *name != "access-control-allow-credentials"));
    }

    #[test]
    fn a_preflight_allows_the_headers_that_it_asks_for() {
        let cors = cors(&["https://a.example"]);
        let ask =
            |headers: &[u8]| cors.preflight(b"https://a.example", "POST", Some(headers)).expect("allowed");
        let told = |headers: &ResponseHeaders| {
            let found = headers.iter().find(|(name, _)| *name == "access-control-allow-headers");
            found.map(|(_, value)| value.clone())
        };
        assert_eq!(
            told(&ask(b"authorization, x-stainless-os")).as_deref(),
            Some("authorization, x-stainless-os")
        );
        assert_eq!(told(&ask(b"x\r\ny: z")), None);
        assert_eq!(told(&ask(&[b'a'; REQUESTED_HEADERS_BYTES_MAX + 1])), None);
        assert_eq!(told(&ask(&[b'a'; REQUESTED_HEADERS_BYTES_MAX])).map(|list| list.len()), Some(4096));
        assert!(cors.preflight(b"https://b.example", "POST", None).is_none());
    }

    #[test]
    fn a_configuration_is_checked_whole() {
        let read = |origins: &[&str], age| {
            let origins = origins.iter().map(|origin| (*origin).to_owned()).collect();
            Cors::read(origins, age).expect_err("a problem").join("\n")
        };
        assert!(read(&[], None).contains("1 to 256"));
        assert!(read(&["*", "https://a"], None).contains("alone"));
        let both = read(&["a.example", "https://a.example/x"], Some(86_401));
        for part in ["\"a.example\"", "\"https://a.example/x\"", "86401", "86400"] {
            assert!(both.contains(part), "{part} in {both}");
        }
        assert!(Cors::read(vec!["*".into()], Some(86_400)).is_ok());
    }
}
