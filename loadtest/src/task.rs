//! One of the things that a run does at once: requests of one shape, at their own pace.
//!
//! What people want to know of an endpoint is seldom how it takes one kind of request alone. `lookups at 20` beside `bulk
//! with 4 callers` is the dual profile: do lookups stay quick while a backfill runs? Each task has its own timetable or
//! callers, and rows of its own in the report.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::arrival::ArrivalProcess;
use crate::options::{DURATION_MAX, IN_FLIGHT_MAX, span_at_most};
use crate::profile::Profile;
use crate::workload::{Kind, Workload};

/// Tasks of one run: each has rows of its own in the report, and histograms in memory.
pub const TASKS_MAX: usize = 16;

/// When the requests of a task start.
#[derive(Clone, Debug, PartialEq)]
pub enum Pacing {
    /// By a timetable, whatever earlier answers do: the open loop.
    Open {
        /// Requests per second, from the start to the end.
        profile: Profile,
        /// How the gaps between requests are distributed.
        arrival: ArrivalProcess,
    },
    /// Callers who ask again when they are answered: the closed loop. What they would have asked during a stall they do not
    /// ask, and so its latencies flatter a server that stalls.
    Closed {
        /// How many.
        callers: usize,
        /// For how long.
        lasts: Duration,
    },
    /// When they were recorded to have started.
    Replayed {
        /// To the last of them.
        lasts: Duration,
        /// How many.
        requests: usize,
    },
}

impl Pacing {
    /// How long requests are started.
    pub fn lasts(&self) -> Duration {
        match self {
            Pacing::Open { profile, .. } => profile.lasts(),
            Pacing::Closed { lasts, .. } | Pacing::Replayed { lasts, .. } => *lasts,
        }
    }

    /// When its stages end; one that has none is one.
    pub fn ends(&self) -> Vec<Duration> {
        match self {
            Pacing::Open { profile, .. } => profile.ends(),
            Pacing::Closed { lasts, .. } | Pacing::Replayed { lasts, .. } => vec![*lasts],
        }
    }
}

impl fmt::Display for Pacing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pacing::Open { profile, arrival } => write!(f, "requests per second {profile} ({arrival})"),
            Pacing::Closed { callers, lasts } => {
                let noun = if *callers == 1 { "caller" } else { "callers" };
                write!(f, "{callers} {noun} in a closed loop for {lasts:?}")
            }
            Pacing::Replayed { lasts, requests } => write!(f, "{requests} recorded requests over {lasts:?}"),
        }
    }
}

/// One task of a run.
#[derive(Clone, Debug)]
pub struct Task {
    /// Its name in the report, different from those of the others.
    pub name: String,
    /// What its requests carry.
    pub workload: Workload,
    /// When they start.
    pub pacing: Pacing,
}

/// A task as it was typed: `lookups at 20`, `bulk of 256 with 4 callers`, `rerank of 50 at 1 to 10 for 1m`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Written {
    pub(crate) kind: Kind,
    pub(crate) inputs: Option<usize>,
    pub(crate) texts: Option<PathBuf>,
    pub(crate) pacing: Pacing,
}

/// What tasks share unless one says otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    pub(crate) arrival: ArrivalProcess,
    pub(crate) lasts: Duration,
}

impl Written {
    /// Reads one, or says all that is wrong with it.
    pub(crate) fn read(text: &str, shared: Shared) -> Result<Written, Vec<String>> {
        let wrong = |what: String| format!("--task {text:?}: {what}");
        let words: Vec<&str> = text.split_whitespace().collect();
        let split = words.iter().position(|word| *word == "at" || *word == "with").unwrap_or(words.len());
        let (what, when) = words.split_at(split);
        let mut problems = Vec::new();
        let mut kind = None;
        let (mut inputs, mut texts) = (None, None);
        let mut rest = what;
        while let Some((word, after)) = rest.split_first() {
            rest = match (*word, after) {
                ("of", [count, after @ ..]) => {
                    match count.parse() {
                        Ok(count) => inputs = Some(count),
                        Err(_) => problems.push(wrong(format!("{count:?} is no number of inputs"))),
                    }
                    after
                }
                ("from", [file, after @ ..]) => {
                    texts = Some(PathBuf::from(file));
                    after
                }
                (name, after) if kind.is_none() => {
                    kind = Some(name.parse::<Kind>().map_err(|problem| problems.push(wrong(problem))).ok());
                    after
                }
                (word, _) => {
                    problems.push(wrong(format!("{word:?} is not understood; {EXAMPLES}")));
                    &[]
                }
            };
        }
        let pacing = pacing(when, shared).map_err(|what| problems.extend(what.into_iter().map(wrong))).ok();
        match (kind.flatten(), pacing) {
            (Some(kind), Some(pacing)) if problems.is_empty() => Ok(Written { kind, inputs, texts, pacing }),
            (None, _) if problems.is_empty() => Err(vec![wrong(format!("names no workload; {EXAMPLES}"))]),
            _ => Err(problems),
        }
    }
}

const EXAMPLES: &str =
    "write one like `lookups at 20`, `passages at 5 to 50 for 30s` or `bulk of 128 with 4 callers`";

fn pacing(when: &[&str], shared: Shared) -> Result<Pacing, Vec<String>> {
    match when {
        ["at", rate @ ..] => {
            let profile = Profile::parse(&rate.join(" "), None, shared.lasts)?;
            Ok(Pacing::Open { profile, arrival: shared.arrival })
        }
        ["with", count, "callers" | "caller", lasts @ ..] => {
            let lasts = match lasts {
                [] => shared.lasts,
                ["for", lasts] => {
                    span_at_most("for", lasts, DURATION_MAX).map_err(|problem| vec![problem])?
                }
                _ => return Err(vec![EXAMPLES.to_owned()]),
            };
            callers(count.parse().ok(), lasts).map_err(|problem| vec![problem])
        }
        _ => Err(vec![format!("says neither `at` what rate nor `with` how many callers; {EXAMPLES}")]),
    }
}

/// So many callers, if that many can be in flight.
pub(crate) fn callers(count: Option<usize>, lasts: Duration) -> Result<Pacing, String> {
    match count {
        Some(callers) if (1..=IN_FLIGHT_MAX).contains(&callers) => Ok(Pacing::Closed { callers, lasts }),
        Some(_) | None => Err(format!("callers: write a number from 1 to {IN_FLIGHT_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: Shared = Shared { arrival: ArrivalProcess::Constant, lasts: Duration::from_secs(10) };

    #[test]
    fn a_task_is_a_workload_and_its_pace() {
        let check = |text: &str, kind: Kind, inputs: Option<usize>, pacing: &str| {
            let got = Written::read(text, SHARED).unwrap();
            assert_eq!(
                (got.kind, got.inputs, got.pacing.to_string().as_str()),
                (kind, inputs, pacing),
                "{text}"
            );
        };
        check("lookups at 20", Kind::Lookups, None, "requests per second 20 for 10s (constant)");
        check(
            "mixed at 1 to 5 for 2s, 5 for 1s",
            Kind::Mixed,
            None,
            "requests per second 1 to 5 for 2s, 5 for 1s (constant)",
        );
        check("bulk of 256 with 4 callers", Kind::Bulk, Some(256), "4 callers in a closed loop for 10s");
        check(
            "rerank of 50 with 1 caller for 2m",
            Kind::Rerank,
            Some(50),
            "1 caller in a closed loop for 120s",
        );
        let from = Written::read("passages from a.jsonl at 3", SHARED).unwrap();
        assert_eq!(from.texts, Some(PathBuf::from("a.jsonl")));
    }

    #[test]
    fn what_is_no_task_is_refused_with_what_to_write() {
        let check = |text: &str, expected: &[&str]| {
            let problems = Written::read(text, SHARED).unwrap_err();
            assert_eq!(problems.len(), expected.len(), "{text}: {problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.starts_with("--task") && problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &["says neither"]);
        check("at 20", &["names no workload"]);
        check("typos at 20", &["lookups, passages, mixed, bulk, rerank"]);
        check("lookups", &["says neither"]);
        check("lookups at -1", &["requests per second from 0"]);
        check("lookups of many at x", &["no number of inputs", "requests per second from 0"]);
        check("lookups quickly at 2", &["\"quickly\" is not understood"]);
        check("bulk with 0 callers", &["from 1 to 900"]);
        check("bulk with 901 callers", &["from 1 to 900"]);
        check("bulk with 2 callers for ever", &["\"ever\""]);
    }
}
