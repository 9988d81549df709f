//! Tasks of a run: those given by `--task`, or a single one from the other options.

use std::path::PathBuf;
use std::sync::Arc;

use super::parts::Problems;
use super::{DEFAULT_DURATION, RawOptions};
use crate::arrival::ArrivalProcess;
use crate::limits::{DURATION_MAX, span_at_most};
use crate::profile::RateProfile;
use crate::task::{self, Pacing, ParsedTask, TASKS_MAX, Task, TaskDefaults};
use crate::workload::expected::ExpectedVectors;
use crate::workload::texts::TextSet;
use crate::workload::trace::Trace;
use crate::workload::words::TextLengths;
use crate::workload::{TaskWorkload, WorkloadType};

/// Returns the tasks given by `--task`, or a single one from the other options.
pub(super) fn tasks(raw: &RawOptions) -> Result<Vec<Task>, Vec<String>> {
    let mut problems = Problems(Vec::new());
    let arrival = raw.arrival.parse();
    let arrival = problems.note(arrival.map_err(|problem: String| format!("--arrival: {problem}")));
    let duration = raw.duration.as_deref().map(|given| span_at_most("--duration", given, DURATION_MAX));
    // For a single rate, the parser of the profile reports problems of the duration.
    let reported_by_profile = raw.tasks.is_empty() && raw.callers.is_none() && raw.trace.is_none();
    let duration = match duration.transpose() {
        Ok(duration) => duration,
        Err(_) if reported_by_profile => None,
        Err(problem) => problems.note(Err(problem)),
    };
    let duration = duration.unwrap_or(DEFAULT_DURATION);
    let defaults = TaskDefaults { arrival: arrival.unwrap_or(ArrivalProcess::Constant), duration };
    if raw.tasks.len() > TASKS_MAX {
        problems.0.push(format!("--task: given {} times; the limit is {TASKS_MAX}", raw.tasks.len()));
        return Err(problems.0);
    }
    let mut tasks: Vec<Task> = Vec::new();
    if raw.tasks.is_empty() {
        tasks.extend(problems.all(only_task(raw, defaults)));
    }
    for text in &raw.tasks {
        let task = ParsedTask::read(text, defaults).and_then(|parsed| {
            let ParsedTask { kind, inputs, texts, pacing } = parsed;
            let same = tasks.iter().filter(|task| task.workload.kind == kind).count();
            let name = if same == 0 { kind.to_string() } else { format!("{kind} {}", same + 1) };
            let options = WorkloadOptions {
                raw,
                kind,
                inputs,
                texts: texts.or_else(|| raw.texts.clone()),
                trace: None,
            };
            Ok(Task { name, workload: options.workload("--task")?, pacing })
        });
        tasks.extend(problems.all(task));
    }
    if problems.0.is_empty() { Ok(tasks) } else { Err(problems.0) }
}

fn only_task(raw: &RawOptions, defaults: TaskDefaults) -> Result<Task, Vec<String>> {
    let mut problems = Problems(Vec::new());
    let kind = problems
        .note(raw.workload.parse::<WorkloadType>().map_err(|problem| format!("--workload: {problem}")));
    let trace = raw.trace.as_deref().map(|path| Trace::read(path, raw.seed));
    let trace = problems.all(trace.transpose()).flatten();
    let pacing = match (&trace, raw.callers) {
        (None, _) if raw.trace.is_some() => None,
        (Some(_), Some(_)) => problems
            .note(Err("--callers: --trace already defines when requests start; remove one".to_owned())),
        (Some(trace), None) => Some(Pacing::Replay { duration: trace.duration(), requests: trace.count() }),
        (None, Some(count)) => problems
            .note(task::callers(Some(count), defaults.duration).map_err(|problem| format!("--{problem}"))),
        (None, None) => {
            let profile = RateProfile::parse(&raw.rate, raw.duration.as_deref(), DEFAULT_DURATION);
            problems.all(profile).map(|profile| Pacing::Open { profile, arrival: defaults.arrival })
        }
    };
    let kind_or_any = kind.unwrap_or(WorkloadType::Queries);
    if raw.documents.is_some() && kind.is_some_and(|kind| kind != WorkloadType::Rerank) {
        problems.0.push("--documents: only `--workload rerank` has documents; use --inputs".to_owned());
    }
    if trace.is_some() && kind == Some(WorkloadType::Rerank) {
        problems.0.push("--trace: contains embedding requests; remove --workload rerank".to_owned());
    }
    let inputs = if kind == Some(WorkloadType::Rerank) { raw.documents.or(raw.inputs) } else { raw.inputs };
    let option = if kind == Some(WorkloadType::Rerank) { "--documents" } else { "--inputs" };
    let options = WorkloadOptions { raw, kind: kind_or_any, inputs, texts: raw.texts.clone(), trace };
    let workload = problems.all(options.workload(option));
    match (kind, pacing, workload, &*problems.0) {
        (Some(kind), Some(pacing), Some(workload), []) => {
            Ok(Task { name: kind.to_string(), workload, pacing })
        }
        _ => Err(problems.0),
    }
}

/// Options of a task's workload.
struct WorkloadOptions<'a> {
    raw: &'a RawOptions,
    kind: WorkloadType,
    inputs: Option<usize>,
    texts: Option<PathBuf>,
    trace: Option<Trace>,
}

impl WorkloadOptions<'_> {
    fn workload(self, option: &str) -> Result<TaskWorkload, Vec<String>> {
        let WorkloadOptions { raw, kind, inputs, texts, trace } = self;
        let mut problems = Problems(Vec::new());
        let inputs = inputs.unwrap_or(kind.inputs());
        if !(1..=kind.inputs_max()).contains(&inputs) {
            let max = kind.inputs_max();
            problems.0.push(format!("{option} {inputs}: write a number of texts from 1 to {max}"));
        }
        let (texts, expected) = match (&texts, &raw.expect) {
            (Some(_), Some(_)) => {
                problems.0.push("--expect: contains the texts; remove --texts".to_owned());
                (None, None)
            }
            (Some(path), None) => (problems.all(TextSet::read(path)), None),
            (None, Some(_)) if matches!(kind, WorkloadType::Rerank | WorkloadType::Classify) => {
                problems.0.push(format!("--expect: contains vectors, and `{kind}` returns none; remove one"));
                (None, None)
            }
            (None, Some(_)) if trace.is_some() => {
                problems.0.push("--expect: contains the texts; remove --trace".to_owned());
                (None, None)
            }
            (None, Some(path)) => problems.all(ExpectedVectors::read(path, raw.tolerance)).unzip(),
            (None, None) => (Some(TextSet::generated(raw.seed, kind.lengths())), None),
        };
        // Not the seed of the documents; otherwise the query would equal the first of them.
        let queries = || TextSet::generated(raw.seed.wrapping_add(1), TextLengths::Query);
        let queries = (kind == WorkloadType::Rerank).then(queries);
        match (texts, &*problems.0) {
            (Some(texts), []) => {
                Ok(TaskWorkload { kind, inputs, texts, queries, expected: expected.map(Arc::new), trace })
            }
            _ => Err(problems.0),
        }
    }
}
