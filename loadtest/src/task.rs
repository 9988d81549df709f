//! Task of a run: requests of one workload at their own pace. The tasks of a run execute concurrently.
//!
//! Endpoints seldom serve one kind of request alone. `queries at 20` with `bulk with 4 callers` is the dual profile:
//! it measures whether interactive queries stay fast during a backfill. Each task has its own schedule or callers, and
//! its own rows in the report.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::arrival::ArrivalProcess;
use crate::limits::{DURATION_MAX, IN_FLIGHT_MAX, span_at_most};
use crate::profile::RateProfile;
use crate::workload::{TaskWorkload, WorkloadType};

/// Maximum number of tasks; each has rows in the report and histograms in memory.
pub const TASKS_MAX: usize = 16;

/// Rule for the starts of a task's requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Pacing {
    /// Open loop: by a schedule, independent of responses.
    Open {
        /// Requests per second over the run.
        profile: RateProfile,
        /// Distribution of the gaps between requests.
        arrival: ArrivalProcess,
    },
    /// Closed loop: each caller sends its next request after the response to the previous one. During a stall it sends
    /// none, so its latencies are too favourable for a server that stalls.
    Closed {
        /// Number of callers.
        callers: usize,
        /// Time during which requests are started.
        duration: Duration,
    },
    /// Replay of recorded starts.
    Replay {
        /// Time of the last start.
        duration: Duration,
        /// Number of requests.
        requests: usize,
    },
}

impl Pacing {
    /// Returns the time during which requests are started.
    pub fn duration(&self) -> Duration {
        match self {
            Pacing::Open { profile, .. } => profile.duration(),
            Pacing::Closed { duration, .. } | Pacing::Replay { duration, .. } => *duration,
        }
    }

    /// Returns the end times of the stages; one stage if there is no rate profile.
    pub fn ends(&self) -> Vec<Duration> {
        match self {
            Pacing::Open { profile, .. } => profile.ends(),
            Pacing::Closed { duration, .. } | Pacing::Replay { duration, .. } => vec![*duration],
        }
    }
}

impl fmt::Display for Pacing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pacing::Open { profile, arrival } => write!(f, "requests per second {profile} ({arrival})"),
            Pacing::Closed { callers, duration } => {
                let noun = if *callers == 1 { "caller" } else { "callers" };
                write!(f, "{callers} {noun} in a closed loop for {duration:?}")
            }
            Pacing::Replay { duration, requests } => {
                write!(f, "{requests} recorded requests over {duration:?}")
            }
        }
    }
}

/// Task of a run.
#[derive(Clone, Debug)]
pub struct Task {
    /// Unique name in the report.
    pub name: String,
    /// Content of the requests.
    pub workload: TaskWorkload,
    /// Rule for their starts.
    pub pacing: Pacing,
}

/// Task as parsed: `queries at 20`, `bulk of 256 with 4 callers`, `rerank of 50 at 1 to 10 for 1m`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParsedTask {
    pub(crate) kind: WorkloadType,
    pub(crate) inputs: Option<usize>,
    pub(crate) texts: Option<PathBuf>,
    pub(crate) pacing: Pacing,
}

/// Defaults of all tasks of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskDefaults {
    pub(crate) arrival: ArrivalProcess,
    pub(crate) duration: Duration,
}

impl ParsedTask {
    /// Parses a task, or returns all problems.
    pub(crate) fn read(text: &str, defaults: TaskDefaults) -> Result<ParsedTask, Vec<String>> {
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
                        Err(_) => problems.push(wrong(format!("{count:?} is not a number of inputs"))),
                    }
                    after
                }
                ("from", [file, after @ ..]) => {
                    texts = Some(PathBuf::from(file));
                    after
                }
                (name, after) if kind.is_none() => {
                    kind = Some(
                        name.parse::<WorkloadType>().map_err(|problem| problems.push(wrong(problem))).ok(),
                    );
                    after
                }
                (word, _) => {
                    problems.push(wrong(format!("{word:?} is unknown; {EXAMPLES}")));
                    &[]
                }
            };
        }
        let pacing = pacing(when, defaults).map_err(|what| problems.extend(what.into_iter().map(wrong))).ok();
        match (kind.flatten(), pacing) {
            (Some(kind), Some(pacing)) if problems.is_empty() => {
                Ok(ParsedTask { kind, inputs, texts, pacing })
            }
            (None, _) if problems.is_empty() => Err(vec![wrong(format!("names no workload; {EXAMPLES}"))]),
            _ => Err(problems),
        }
    }
}

const EXAMPLES: &str =
    "write one such as `queries at 20`, `passages at 5 to 50 for 30s` or `bulk of 128 with 4 callers`";

fn pacing(when: &[&str], defaults: TaskDefaults) -> Result<Pacing, Vec<String>> {
    match when {
        ["at", rate @ ..] => {
            let profile = RateProfile::parse(&rate.join(" "), None, defaults.duration)?;
            Ok(Pacing::Open { profile, arrival: defaults.arrival })
        }
        ["with", count, "callers" | "caller", duration @ ..] => {
            let duration = match duration {
                [] => defaults.duration,
                ["for", duration] => {
                    span_at_most("for", duration, DURATION_MAX).map_err(|problem| vec![problem])?
                }
                _ => return Err(vec![EXAMPLES.to_owned()]),
            };
            callers(count.parse().ok(), duration).map_err(|problem| vec![problem])
        }
        _ => Err(vec![format!("has neither `at` RATE nor `with` N callers; {EXAMPLES}")]),
    }
}

/// Validates the number of callers against the limit of requests in flight.
pub(crate) fn callers(count: Option<usize>, duration: Duration) -> Result<Pacing, String> {
    match count {
        Some(callers) if (1..=IN_FLIGHT_MAX).contains(&callers) => Ok(Pacing::Closed { callers, duration }),
        Some(_) | None => Err(format!("callers: write a number from 1 to {IN_FLIGHT_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: TaskDefaults =
        TaskDefaults { arrival: ArrivalProcess::Constant, duration: Duration::from_secs(10) };

    #[test]
    fn a_task_is_a_workload_and_its_pace() {
        let check = |text: &str, kind: WorkloadType, inputs: Option<usize>, pacing: &str| {
            let got = ParsedTask::read(text, DEFAULTS).unwrap();
            assert_eq!(
                (got.kind, got.inputs, got.pacing.to_string().as_str()),
                (kind, inputs, pacing),
                "{text}"
            );
        };
        check("queries at 20", WorkloadType::Queries, None, "requests per second 20 for 10s (constant)");
        check(
            "mixed at 1 to 5 for 2s, 5 for 1s",
            WorkloadType::Mixed,
            None,
            "requests per second 1 to 5 for 2s, 5 for 1s (constant)",
        );
        check(
            "bulk of 256 with 4 callers",
            WorkloadType::Bulk,
            Some(256),
            "4 callers in a closed loop for 10s",
        );
        check(
            "rerank of 50 with 1 caller for 2m",
            WorkloadType::Rerank,
            Some(50),
            "1 caller in a closed loop for 120s",
        );
        let from = ParsedTask::read("passages from a.jsonl at 3", DEFAULTS).unwrap();
        assert_eq!(from.texts, Some(PathBuf::from("a.jsonl")));
    }

    #[test]
    fn invalid_tasks_are_rejected_with_the_valid_syntax() {
        let check = |text: &str, expected: &[&str]| {
            let problems = ParsedTask::read(text, DEFAULTS).unwrap_err();
            assert_eq!(problems.len(), expected.len(), "{text}: {problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.starts_with("--task") && problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &["has neither"]);
        check("at 20", &["names no workload"]);
        check("typos at 20", &["queries, passages, mixed, bulk, rerank, classify"]);
        check("queries", &["has neither"]);
        check("queries at -1", &["requests per second from 0"]);
        check("queries of many at x", &["not a number of inputs", "requests per second from 0"]);
        check("queries quickly at 2", &["\"quickly\" is unknown"]);
        check("bulk with 0 callers", &["from 1 to 20000"]);
        check("bulk with 20001 callers", &["from 1 to 20000"]);
        check("bulk with 2 callers for ever", &["\"ever\""]);
    }
}
