//! What a run is asked to do: as it was typed ([`RawOptions`]), and checked ([`Options`]).
//!
//! Checking looks at everything before it complains, so that a person mends a command line once. Each problem names
//! the option, the value and what to write instead. After it, nothing later in the run can find an option wrong.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderValue, Uri};
use regions::GeoPoint;

use crate::arrival::ArrivalProcess;
use crate::profile::Profile;
use crate::texts::Texts;

/// The longest run: the report keeps a row for every second and region of it.
pub const DURATION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a run takes if nobody says.
pub const DURATION_UNLESS_SAID: Duration = Duration::from_secs(10);

/// The longest time that one request may take.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);

/// The most inputs of one request: what OpenAI's API takes.
pub const INPUTS_MAX: usize = 2048;

/// How many requests are in flight at most; one beyond it is not sent and counts as failed. Each holds a connection, and
/// this leaves room below the 1024 open files that a process is usually allowed.
pub const IN_FLIGHT_MAX: usize = 900;

/// The options as they were typed.
#[derive(Clone)]
pub struct RawOptions {
    /// Where the API is: `http://host:port`, with or without `/v1`, as one gives it to an OpenAI client.
    pub url: String,
    /// The API key; none sends no `authorization`.
    pub key: Option<String>,
    /// The deployment.
    pub model: String,
    /// Requests per second: `100`, or stages like `100 for 10s, 300 for 10s, 100 to 0 for 20s`.
    pub rate: String,
    /// `constant` or `poisson`.
    pub arrival: String,
    /// How long, like `30s`, where `rate` does not say it; none is [`DURATION_UNLESS_SAID`].
    pub duration: Option<String>,
    /// A file of texts; none generates short ones.
    pub texts: Option<PathBuf>,
    /// How many texts each request carries.
    pub inputs: usize,
    /// How long a request may take from its intended start, like `10s`.
    pub timeout: String,
    /// Decides arrivals and generated texts.
    pub seed: u64,
    /// Where the callers pretend to be, `lat,lon`.
    pub geo: Option<String>,
}

/// The options of a run, checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where requests go: the whole URL of the embeddings path.
    pub target: Uri,
    /// The value of `authorization`, marked sensitive so that it is never printed.
    pub authorization: Option<HeaderValue>,
    /// The deployment.
    pub model: String,
    /// Requests per second, from the start to the end.
    pub profile: Profile,
    /// How the gaps between requests are distributed.
    pub arrival: ArrivalProcess,
    /// What they carry.
    pub texts: Texts,
    /// How many texts each request carries.
    pub inputs: usize,
    /// How long a request may take from its intended start.
    pub timeout: Duration,
    /// Decides arrivals and generated texts.
    pub seed: u64,
    /// Where the callers pretend to be.
    pub geo: Option<GeoPoint>,
    /// [`IN_FLIGHT_MAX`], unless a caller has a reason for less.
    pub in_flight_max: usize,
}

impl Options {
    /// Checks everything and reports every problem at once.
    pub fn check(raw: RawOptions) -> Result<Options, Vec<String>> {
        let RawOptions { url, key, model, rate, arrival, duration, texts, inputs, timeout, seed, geo } = raw;
        let mut problems = Problems(Vec::new());
        let target = problems.note(target(&url));
        let authorization = problems.note(key.map(authorization).transpose());
        if model.trim().is_empty() {
            problems.0.push(format!("--model {model:?}: names no deployment; GET /v1/models lists them"));
        }
        let profile = Profile::parse(&rate, duration.as_deref(), DURATION_UNLESS_SAID)
            .map_err(|wrong| problems.0.extend(wrong))
            .ok();
        let arrival = problems.note(
            arrival.parse().map_err(|()| format!("--arrival {arrival:?}: write `constant` or `poisson`")),
        );
        let timeout = problems.note(span_at_most("--timeout", &timeout, TIMEOUT_MAX));
        if !(1..=INPUTS_MAX).contains(&inputs) {
            problems.0.push(format!("--inputs {inputs}: write a number of texts from 1 to {INPUTS_MAX}"));
        }
        let geo = problems
            .note(geo.map(|geo| geo.parse().map_err(|error| format!("--geo {geo:?}: {error}"))).transpose());
        let texts = match texts {
            Some(path) => Texts::read(&path).map_err(|wrong| problems.0.extend(wrong)).ok(),
            None => Some(Texts::generated(seed)),
        };
        let (
            Some(target),
            Some(authorization),
            Some(profile),
            Some(arrival),
            Some(timeout),
            Some(geo),
            Some(texts),
            [],
        ) = (target, authorization, profile, arrival, timeout, geo, texts, &*problems.0)
        else {
            return Err(problems.0);
        };
        Ok(Options {
            target,
            authorization,
            model,
            profile,
            arrival,
            texts,
            inputs,
            timeout,
            seed,
            geo,
            in_flight_max: IN_FLIGHT_MAX,
        })
    }
}

struct Problems(Vec<String>);

impl Problems {
    fn note<T>(&mut self, checked: Result<T, String>) -> Option<T> {
        checked.map_err(|problem| self.0.push(problem)).ok()
    }
}

/// The URL of the embeddings path below `url`.
fn target(url: &str) -> Result<Uri, String> {
    let wrong = |what: &str| Err(format!("--url {url:?}: {what}; write it like http://127.0.0.1:8080"));
    let Ok(uri) = url.parse::<Uri>() else {
        return wrong("is not a URL");
    };
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return wrong("https is not spoken by this tool; give it an http address of the gateway");
        }
        Some(_) => return wrong("has a scheme other than http"),
        None => return wrong("has no scheme"),
    }
    let Some(authority) = uri.authority().filter(|authority| !authority.host().is_empty()) else {
        return wrong("has no host");
    };
    if authority.as_str().contains('@') {
        return Err("--url: carries a user or a password (not shown); give the API key by itself".to_owned());
    }
    if uri.query().is_some() {
        return wrong("carries a query");
    }
    let base = uri.path().trim_end_matches('/');
    let base = base.strip_suffix("/v1").unwrap_or(base);
    format!("http://{authority}{base}/v1/embeddings").parse().or_else(|_| wrong("is not a URL"))
}

fn authorization(key: String) -> Result<HeaderValue, String> {
    if key.trim().is_empty() {
        return Err("--key: is empty; leave it out to send none".to_owned());
    }
    let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| {
        "--key: has characters that a header cannot carry (its value is not shown)".to_owned()
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// A span of time above zero and at most `max`.
pub(crate) fn span_at_most(option: &str, text: &str, max: Duration) -> Result<Duration, String> {
    span(text).filter(|span| *span <= max).ok_or_else(|| {
        let max_h = max.as_secs() / 3600;
        format!("{option} {text:?}: write a span like 500ms, 30s or 2m, above 0 and at most {max_h}h")
    })
}

/// A span of time above zero: a number and `ms`, `s`, `m` or `h`.
pub(crate) fn span(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let number: f64 = number.trim().parse().ok()?;
    Duration::try_from_secs_f64(number * seconds).ok().filter(|span| !span.is_zero())
}

impl fmt::Debug for RawOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawOptions")
            .field("url", &self.url)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn good() -> RawOptions {
        RawOptions {
            url: "http://127.0.0.1:8080".to_owned(),
            key: Some("local".to_owned()),
            model: "minilm".to_owned(),
            rate: "100".to_owned(),
            arrival: "constant".to_owned(),
            duration: Some("30s".to_owned()),
            texts: None,
            inputs: 1,
            timeout: "10s".to_owned(),
            seed: 1,
            geo: Some("50.11,8.68".to_owned()),
        }
    }

    #[test]
    fn the_url_is_the_one_that_an_openai_client_takes() {
        let check = |url: &str, expected: Option<&str>| {
            let got = target(url).map(|uri| uri.to_string());
            assert_eq!(got.as_deref().ok(), expected, "{url}: {got:?}");
        };
        check("http://127.0.0.1:8080", Some("http://127.0.0.1:8080/v1/embeddings"));
        check("http://127.0.0.1:8080/v1/", Some("http://127.0.0.1:8080/v1/embeddings"));
        check("http://[::1]:1/under/v1", Some("http://[::1]:1/under/v1/embeddings"));
        for wrong in [
            "",
            "127.0.0.1:8080",
            "/v1",
            "ftp://a",
            "https://a",
            "http://",
            "http://a?b",
            "http://k@a",
            "a b",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_span_of_time_has_a_unit_and_an_end() {
        let check = |text: &str, expected_ms: Option<u64>| {
            let got = span_at_most("--duration", text, DURATION_MAX);
            assert_eq!(got.as_ref().ok(), expected_ms.map(Duration::from_millis).as_ref(), "{text}: {got:?}");
        };
        check("500ms", Some(500));
        check("1.5s", Some(1500));
        check("24h", Some(86_400_000));
        for wrong in ["", "30", "s", "0s", "-1s", "1d", "25h", "NaNs", "1e999s", "1 s s"] {
            check(wrong, None);
        }
    }

    #[test]
    fn good_options_hold_what_was_asked() {
        let options = Options::check(good()).unwrap();
        assert_eq!(options.profile.to_string(), "100 for 30s");
        assert_eq!(options.timeout, Duration::from_secs(10));
        assert!(!format!("{options:?}").contains("local"), "the key is not printed");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let problems = Options::check(RawOptions {
            url: "127.0.0.1".to_owned(),
            key: Some("a\nb".to_owned()),
            model: " ".to_owned(),
            rate: "0".to_owned(),
            arrival: "bursty".to_owned(),
            duration: Some("0s".to_owned()),
            texts: Some("/no/such/file".into()),
            inputs: 0,
            timeout: "soon".to_owned(),
            seed: 1,
            geo: Some("91,0".to_owned()),
        })
        .unwrap_err();
        let options = [
            "--url",
            "--key",
            "--model",
            "--rate",
            "--arrival",
            "--duration",
            "--timeout",
            "--inputs",
            "--geo",
            "--texts",
        ];
        assert_eq!(problems.len(), options.len(), "{problems:#?}");
        for option in options {
            assert!(problems.iter().any(|problem| problem.starts_with(option)), "{option} in {problems:#?}");
        }
        assert!(
            !problems.iter().any(|problem| problem.contains("a\\nb")),
            "the key is not printed: {problems:?}"
        );
    }
}
