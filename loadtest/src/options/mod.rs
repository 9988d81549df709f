//! Options of a run: as given ([`RawOptions`]) and validated ([`Options`]).
//!
//! Validation checks everything before it reports, so that a command line can be corrected in one go. Each problem
//! names the option, the value and a valid value. A validated option cannot fail later in the run.

mod parts;
mod tasks;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderValue, Uri};
use regions::GeoPoint;

use crate::arrival::ArrivalProcess;
use crate::client::HttpProtocol;
use crate::endpoint::authorization;
use crate::limits::{IN_FLIGHT_MAX, ProcessShare, TIMEOUT_MAX, span_at_most};
use crate::slo::Objective;
use crate::task::Task;
use crate::trust::{TlsRoots, load_roots};
use crate::workload::WorkloadType;
use crate::workload::expected::TOLERANCE;
use parts::{Problems, base};
use tasks::tasks;

/// Default duration of a run.
pub const DEFAULT_DURATION: Duration = Duration::from_secs(10);

/// Options as given on the command line. For defaults see [`RawOptions::default`].
#[derive(Clone)]
pub struct RawOptions {
    /// Base URL of the API: `http://host:port`, with or without `/v1`, as for an OpenAI client.
    pub url: String,
    /// File with trusted root certificates; `None` for the system's.
    pub cacert: Option<PathBuf>,
    /// API key; `None` sends no `authorization` header.
    pub key: Option<String>,
    /// Name of the deployment.
    pub model: String,
    /// Workload: `queries`, `passages`, `mixed`, `bulk`, `rerank` or `classify`.
    pub workload: String,
    /// Concurrent tasks such as `queries at 20`; if given, the options of a single task are ignored.
    pub tasks: Vec<String>,
    /// Requests per second: `100`, or stages like `100 for 10s, 300 for 10s, 100 to 0 for 20s`.
    pub rate: String,
    /// `constant` or `poisson`.
    pub arrival: String,
    /// Number of closed-loop callers, instead of a rate.
    pub callers: Option<usize>,
    /// File of recorded requests, instead of a rate.
    pub trace: Option<PathBuf>,
    /// Duration such as `30s`, unless `rate` states it; default [`DEFAULT_DURATION`].
    pub duration: Option<String>,
    /// File of texts; without one, texts of the workload's length are generated.
    pub texts: Option<PathBuf>,
    /// File of texts with their expected vectors.
    pub expect: Option<PathBuf>,
    /// Largest accepted difference of a number from the expected one.
    pub tolerance: f32,
    /// Texts per request; the default depends on the workload.
    pub inputs: Option<usize>,
    /// Documents per rerank request; the default depends on the workload.
    pub documents: Option<usize>,
    /// Timeout of a request from its intended start, such as `10s`.
    pub timeout: String,
    /// Latency objective, such as `p99=50ms`.
    pub slo: Option<String>,
    /// Seed of arrivals and generated texts.
    pub seed: u64,
    /// Simulated location of the clients, `lat,lon`.
    pub geo: Option<String>,
    /// Whether to use HTTP/2: over TLS negotiated by ALPN, without TLS by prior knowledge.
    pub http2: bool,
}

impl Default for RawOptions {
    fn default() -> RawOptions {
        RawOptions {
            url: "http://127.0.0.1:8080".to_owned(),
            cacert: None,
            key: None,
            model: "minilm".to_owned(),
            workload: WorkloadType::Queries.to_string(),
            tasks: Vec::new(),
            rate: "10".to_owned(),
            arrival: ArrivalProcess::Constant.to_string(),
            callers: None,
            trace: None,
            duration: None,
            texts: None,
            expect: None,
            tolerance: TOLERANCE,
            inputs: None,
            documents: None,
            timeout: "10s".to_owned(),
            slo: None,
            seed: 1,
            geo: None,
            http2: false,
        }
    }
}

/// Validated options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Base URL of the API, without `/v1`.
    pub base: Uri,
    /// TLS configuration, for https.
    pub trust: Option<TlsRoots>,
    /// Value of `authorization`, marked sensitive so that it is never printed.
    pub authorization: Option<HeaderValue>,
    /// Name of the deployment.
    pub model: String,
    /// Concurrent tasks; at least one.
    pub tasks: Vec<Task>,
    /// Timeout of a request from its intended start.
    pub timeout: Duration,
    /// Latency objective.
    pub slo: Option<Objective>,
    /// Seed of arrivals and generated texts.
    pub seed: u64,
    /// Simulated location of the clients.
    pub geo: Option<GeoPoint>,
    /// HTTP version of the requests.
    pub protocol: HttpProtocol,
    /// Maximum requests in flight: [`IN_FLIGHT_MAX`], unless the caller lowers it. A run lowers it if the process may not
    /// open as many files.
    pub in_flight_max: usize,
    /// Part of the process that the run may use: [`ProcessShare::WHOLE`], unless the caller sets another one.
    pub process_share: ProcessShare,
}

impl Options {
    /// Validates all options and reports all problems at once.
    pub fn check(raw: RawOptions) -> Result<Options, Vec<String>> {
        let mut problems = Problems(Vec::new());
        let base = problems.note(base(&raw.url));
        let secure = base.as_ref().is_some_and(|base| base.scheme_str() == Some("https"));
        if raw.cacert.is_some() && base.is_some() && !secure {
            problems.0.push(format!("--cacert: {:?} is not https; remove --cacert or use https", raw.url));
        }
        let trust = problems.note(secure.then(|| load_roots(raw.cacert.as_deref(), raw.http2)).transpose());
        let authorization =
            problems.note(raw.key.as_deref().map(|key| authorization("--key", key)).transpose());
        let model = &raw.model;
        if model.trim().is_empty() {
            problems.0.push(format!("--model {model:?}: is empty; GET /v1/models lists the deployments"));
        }
        let tasks = problems.all(tasks(&raw));
        let timeout = problems.note(span_at_most("--timeout", &raw.timeout, TIMEOUT_MAX));
        let slo = raw.slo.as_deref().map(|slo| slo.parse().map_err(|problem| format!("--slo {problem}")));
        let slo = problems.note(slo.transpose());
        let geo = raw.geo.as_deref();
        let geo = geo.map(|geo| geo.parse().map_err(|error| format!("--geo {geo:?}: {error}")));
        let geo = problems.note(geo.transpose());
        match (base, trust, authorization, tasks, timeout, slo, geo, &*problems.0) {
            (
                Some(base),
                Some(trust),
                Some(authorization),
                Some(tasks),
                Some(timeout),
                Some(slo),
                Some(geo),
                [],
            ) => {
                let (model, seed) = (raw.model, raw.seed);
                let in_flight_max = IN_FLIGHT_MAX;
                let protocol = if raw.http2 { HttpProtocol::Http2 } else { HttpProtocol::Http1 };
                Ok(Options {
                    base,
                    trust,
                    authorization,
                    model,
                    tasks,
                    timeout,
                    slo,
                    seed,
                    geo,
                    protocol,
                    in_flight_max,
                    process_share: ProcessShare::WHOLE,
                })
            }
            _ => Err(problems.0),
        }
    }

    /// Returns the time during which requests are started: that of the longest task.
    pub fn duration(&self) -> Duration {
        self.tasks.iter().map(|task| task.pacing.duration()).max().unwrap_or_default()
    }
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
    use crate::task::TASKS_MAX;

    pub(crate) fn good() -> RawOptions {
        RawOptions {
            key: Some("local".to_owned()),
            rate: "100".to_owned(),
            duration: Some("30s".to_owned()),
            geo: Some("50.11,8.68".to_owned()),
            ..RawOptions::default()
        }
    }

    #[test]
    fn valid_options_are_accepted() {
        let options = Options::check(good()).unwrap();
        assert_eq!(options.tasks[0].pacing.to_string(), "requests per second 100 for 30s (constant)");
        assert_eq!(
            (options.tasks.len(), &*options.tasks[0].name, options.tasks[0].workload.inputs),
            (1, "queries", 1)
        );
        assert_eq!(options.timeout, Duration::from_secs(10));
        assert!(!format!("{options:?}").contains("local"), "the key is not printed");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let problems = Options::check(RawOptions {
            url: "127.0.0.1".to_owned(),
            key: Some("a\nb".to_owned()),
            model: " ".to_owned(),
            workload: "typos".to_owned(),
            rate: "-1".to_owned(),
            arrival: "bursty".to_owned(),
            duration: Some("0s".to_owned()),
            texts: Some("/no/such/file".into()),
            inputs: Some(0),
            timeout: "soon".to_owned(),
            slo: Some("fast".to_owned()),
            geo: Some("91,0".to_owned()),
            ..RawOptions::default()
        })
        .unwrap_err();
        let options = [
            "--url",
            "--key",
            "--model",
            "--workload",
            "--slo",
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

    #[test]
    fn tasks_have_unique_names_and_all_problems_are_reported() {
        let with = |tasks: &[&str]| {
            let tasks = tasks.iter().map(|task| (*task).to_owned()).collect();
            Options::check(RawOptions { tasks, duration: Some("3s".to_owned()), ..good() })
        };
        let options = with(&["queries at 20", "bulk of 64 with 2 callers", "queries at 5 for 4s"]).unwrap();
        let names: Vec<_> = options.tasks.iter().map(|task| (&*task.name, task.workload.inputs)).collect();
        assert_eq!(names, [("queries", 1), ("bulk", 64), ("queries 2", 1)]);
        assert_eq!(options.duration(), Duration::from_secs(4));
        let problems = with(&["typos at 20", "bulk of 2049 with 2 callers", "queries at -5"]).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:#?}");
        assert!(with(&["queries at 1"; TASKS_MAX]).is_ok());
        assert!(with(&["queries at 1"; TASKS_MAX + 1]).unwrap_err()[0].contains("the limit is 16"));
    }

    #[test]
    fn conflicting_options_are_rejected() {
        let check = |raw: RawOptions, expected: &str| {
            let problems = Options::check(raw).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected} in {problems:?}");
        };
        check(RawOptions { callers: Some(0), ..good() }, "--callers: write a number from 1 to 20000");
        check(RawOptions { callers: Some(20_001), ..good() }, "--callers: write a number from 1 to 20000");
        check(RawOptions { documents: Some(5), ..good() }, "--documents");
        check(RawOptions { cacert: Some("/no/such".into()), ..good() }, "--cacert");
        check(RawOptions { trace: Some("/no/such".into()), ..good() }, "--trace");
        check(RawOptions { expect: Some("/no/such".into()), ..good() }, "--expect");
        let rerank = RawOptions { workload: "rerank".to_owned(), ..good() };
        check(RawOptions { documents: Some(1001), ..rerank.clone() }, "--documents 1001");
        assert_eq!(
            Options::check(RawOptions { documents: Some(1000), ..rerank }).unwrap().tasks[0].workload.inputs,
            1000
        );
        let classify = RawOptions { workload: "classify".to_owned(), ..good() };
        check(RawOptions { expect: Some("/no/such".into()), ..classify }, "`classify` returns none");
        let closed = Options::check(RawOptions { callers: Some(20_000), ..good() }).unwrap();
        assert_eq!(closed.tasks[0].pacing.to_string(), "20000 callers in a closed loop for 30s");
    }
}
