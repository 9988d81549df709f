//! What a run is asked to do: as it was typed ([`RawOptions`]), and checked ([`Options`]).
//!
//! Checking looks at everything before it complains, so that a person mends a command line once. Each problem names
//! the option, the value and what to write instead. After it, nothing later in the run can find an option wrong.

mod parts;
mod tasks;

pub(crate) use parts::{span, span_at_most};

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderValue, Uri};
use regions::GeoPoint;

use crate::arrival::ArrivalProcess;
use crate::slo::Objective;
use crate::task::Task;
use crate::trust::{Trust, believed};
use crate::workload::Kind;
use crate::workload::expected::TOLERANCE;
use parts::{Problems, authorization, base};
use tasks::tasks;

/// The longest run: the report keeps a row for every second and region of it.
pub const DURATION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a run takes if nobody says.
pub const DURATION_UNLESS_SAID: Duration = Duration::from_secs(10);

/// The longest time that one request may take.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);

/// How many requests are in flight at most; one beyond it is not sent and counts as failed. Each holds a connection, and
/// this leaves room below the 1024 open files that a process is usually allowed.
pub const IN_FLIGHT_MAX: usize = 900;

/// The options as they were typed. Those that nobody gives are as in [`RawOptions::default`].
#[derive(Clone)]
pub struct RawOptions {
    /// Where the API is: `http://host:port`, with or without `/v1`, as one gives it to an OpenAI client.
    pub url: String,
    /// A file with the authorities to believe; none believes those of the machine.
    pub cacert: Option<PathBuf>,
    /// The API key; none sends no `authorization`.
    pub key: Option<String>,
    /// The deployment.
    pub model: String,
    /// What requests carry: `lookups`, `passages`, `mixed`, `bulk` or `rerank`.
    pub workload: String,
    /// Several of them at once, like `lookups at 20`; then the other options about one of them are not looked at.
    pub tasks: Vec<String>,
    /// Requests per second: `100`, or stages like `100 for 10s, 300 for 10s, 100 to 0 for 20s`.
    pub rate: String,
    /// `constant` or `poisson`.
    pub arrival: String,
    /// Callers in a closed loop, instead of a rate.
    pub callers: Option<usize>,
    /// A file of requests that were recorded, instead of a rate.
    pub trace: Option<PathBuf>,
    /// How long, like `30s`, where `rate` does not say it; none is [`DURATION_UNLESS_SAID`].
    pub duration: Option<String>,
    /// A file of texts; none generates some of the workload's length.
    pub texts: Option<PathBuf>,
    /// A file of texts with the vectors that they must come back as.
    pub expect: Option<PathBuf>,
    /// How far a number may be from the expected one.
    pub tolerance: f32,
    /// How many texts each request carries; none is as many as the workload has.
    pub inputs: Option<usize>,
    /// How many documents each request to rerank carries; none is as many as the workload has.
    pub documents: Option<usize>,
    /// How long a request may take from its intended start, like `10s`.
    pub timeout: String,
    /// What was promised, like `p99=50ms`.
    pub slo: Option<String>,
    /// Decides arrivals and generated texts.
    pub seed: u64,
    /// Where the callers pretend to be, `lat,lon`.
    pub geo: Option<String>,
}

impl Default for RawOptions {
    fn default() -> RawOptions {
        RawOptions {
            url: "http://127.0.0.1:8080".to_owned(),
            cacert: None,
            key: None,
            model: "minilm".to_owned(),
            workload: Kind::Lookups.to_string(),
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
        }
    }
}

/// The options of a run, checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the API is: the URL above `/v1`.
    pub base: Uri,
    /// Who proves that a server is the one, where it has to.
    pub trust: Option<Trust>,
    /// The value of `authorization`, marked sensitive so that it is never printed.
    pub authorization: Option<HeaderValue>,
    /// The deployment.
    pub model: String,
    /// What is done at once; at least one.
    pub tasks: Vec<Task>,
    /// How long a request may take from its intended start.
    pub timeout: Duration,
    /// What was promised.
    pub slo: Option<Objective>,
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
        let mut problems = Problems(Vec::new());
        let base = problems.note(base(&raw.url));
        let secure = base.as_ref().is_some_and(|base| base.scheme_str() == Some("https"));
        if raw.cacert.is_some() && base.is_some() && !secure {
            problems.0.push(format!("--cacert: {:?} is not https; leave one of the two out", raw.url));
        }
        let trust = problems.note(secure.then(|| believed(raw.cacert.as_deref())).transpose());
        let authorization = problems.note(raw.key.clone().map(authorization).transpose());
        let model = &raw.model;
        if model.trim().is_empty() {
            problems.0.push(format!("--model {model:?}: names no deployment; GET /v1/models lists them"));
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
                    in_flight_max,
                })
            }
            _ => Err(problems.0),
        }
    }

    /// How long requests are started: to the end of the task that takes longest.
    pub fn lasts(&self) -> Duration {
        self.tasks.iter().map(|task| task.pacing.lasts()).max().unwrap_or_default()
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
    fn good_options_hold_what_was_asked() {
        let options = Options::check(good()).unwrap();
        assert_eq!(options.tasks[0].pacing.to_string(), "requests per second 100 for 30s (constant)");
        assert_eq!(
            (options.tasks.len(), &*options.tasks[0].name, options.tasks[0].workload.inputs),
            (1, "lookups", 1)
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
    fn several_tasks_are_named_apart_and_all_their_problems_told() {
        let with = |tasks: &[&str]| {
            let tasks = tasks.iter().map(|task| (*task).to_owned()).collect();
            Options::check(RawOptions { tasks, duration: Some("3s".to_owned()), ..good() })
        };
        let options = with(&["lookups at 20", "bulk of 64 with 2 callers", "lookups at 5 for 4s"]).unwrap();
        let names: Vec<_> = options.tasks.iter().map(|task| (&*task.name, task.workload.inputs)).collect();
        assert_eq!(names, [("lookups", 1), ("bulk", 64), ("lookups 2", 1)]);
        assert_eq!(options.lasts(), Duration::from_secs(4));
        let problems = with(&["typos at 20", "bulk of 2049 with 2 callers", "lookups at -5"]).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:#?}");
        assert!(with(&["lookups at 1"; TASKS_MAX]).is_ok());
        assert!(with(&["lookups at 1"; TASKS_MAX + 1]).unwrap_err()[0].contains("at most 16"));
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        let check = |raw: RawOptions, expected: &str| {
            let problems = Options::check(raw).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected} in {problems:?}");
        };
        check(RawOptions { callers: Some(0), ..good() }, "--callers: write a number from 1 to 900");
        check(RawOptions { callers: Some(901), ..good() }, "--callers: write a number from 1 to 900");
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
        let closed = Options::check(RawOptions { callers: Some(900), ..good() }).unwrap();
        assert_eq!(closed.tasks[0].pacing.to_string(), "900 callers in a closed loop for 30s");
    }
}
