//! Tasks of a run: those given by `--task`, or a single one from the other options.

use std::path::PathBuf;
use std::sync::Arc;

use super::parts::{Problems, span_at_most};
use super::{DURATION_MAX, DURATION_UNLESS_SAID, RawOptions};
use crate::arrival::ArrivalProcess;
use crate::profile::Profile;
use crate::task::{self, Pacing, Shared, TASKS_MAX, Task, Written};
use crate::workload::expected::Vectors;
use crate::workload::texts::Texts;
use crate::workload::trace::Trace;
use crate::workload::words::Lengths;
use crate::workload::{Kind, Workload};

/// Returns the tasks given by `--task`, or a single one from the other options.
pub(super) fn tasks(raw: &RawOptions) -> Result<Vec<Task>, Vec<String>> {
    let mut problems = Problems(Vec::new());
    let arrival = raw.arrival.parse();
    let arrival = problems
        .note(arrival.map_err(|()| format!("--arrival {:?}: write `constant` or `poisson`", raw.arrival)));
    let lasts = raw.duration.as_deref().map(|given| span_at_most("--duration", given, DURATION_MAX));
    // For a single rate, the parser of the profile reports problems of the duration.
    let told_later = raw.tasks.is_empty() && raw.callers.is_none() && raw.trace.is_none();
    let lasts = match lasts.transpose() {
        Ok(lasts) => lasts,
        Err(_) if told_later => None,
        Err(problem) => problems.note(Err(problem)),
    };
    let lasts = lasts.unwrap_or(DURATION_UNLESS_SAID);
    let shared = Shared { arrival: arrival.unwrap_or(ArrivalProcess::Constant), lasts };
    if raw.tasks.len() > TASKS_MAX {
        problems.0.push(format!("--task: is there {} times; write at most {TASKS_MAX}", raw.tasks.len()));
        return Err(problems.0);
    }
    let mut tasks: Vec<Task> = Vec::new();
    if raw.tasks.is_empty() {
        tasks.extend(problems.all(only_task(raw, shared)));
    }
    for text in &raw.tasks {
        let task = Written::read(text, shared).and_then(|written| {
            let Written { kind, inputs, texts, pacing } = written;
            let same = tasks.iter().filter(|task| task.workload.kind == kind).count();
            let name = if same == 0 { kind.to_string() } else { format!("{kind} {}", same + 1) };
            let carried =
                Carried { raw, kind, inputs, texts: texts.or_else(|| raw.texts.clone()), trace: None };
            Ok(Task { name, workload: carried.workload("--task")?, pacing })
        });
        tasks.extend(problems.all(task));
    }
    if problems.0.is_empty() { Ok(tasks) } else { Err(problems.0) }
}

fn only_task(raw: &RawOptions, shared: Shared) -> Result<Task, Vec<String>> {
    let mut problems = Problems(Vec::new());
    let kind =
        problems.note(raw.workload.parse::<Kind>().map_err(|problem| format!("--workload: {problem}")));
    let trace = raw.trace.as_deref().map(|path| Trace::read(path, raw.seed));
    let trace = problems.all(trace.transpose()).flatten();
    let pacing = match (&trace, raw.callers) {
        (None, _) if raw.trace.is_some() => None,
        (Some(_), Some(_)) => {
            problems.note(Err("--callers: --trace says already when requests start".to_owned()))
        }
        (Some(trace), None) => Some(Pacing::Replayed { lasts: trace.lasts(), requests: trace.count() }),
        (None, Some(count)) => {
            problems.note(task::callers(Some(count), shared.lasts).map_err(|problem| format!("--{problem}")))
        }
        (None, None) => {
            let profile = Profile::parse(&raw.rate, raw.duration.as_deref(), DURATION_UNLESS_SAID);
            problems.all(profile).map(|profile| Pacing::Open { profile, arrival: shared.arrival })
        }
    };
    let kind_or_any = kind.unwrap_or(Kind::Lookups);
    if raw.documents.is_some() && kind.is_some_and(|kind| kind != Kind::Rerank) {
        problems.0.push("--documents: only `--workload rerank` has documents; write --inputs".to_owned());
    }
    if trace.is_some() && kind == Some(Kind::Rerank) {
        problems.0.push("--trace: holds requests to embed; leave out --workload rerank".to_owned());
    }
    let inputs = if kind == Some(Kind::Rerank) { raw.documents.or(raw.inputs) } else { raw.inputs };
    let option = if kind == Some(Kind::Rerank) { "--documents" } else { "--inputs" };
    let carried = Carried { raw, kind: kind_or_any, inputs, texts: raw.texts.clone(), trace };
    let workload = problems.all(carried.workload(option));
    match (kind, pacing, workload, &*problems.0) {
        (Some(kind), Some(pacing), Some(workload), []) => {
            Ok(Task { name: kind.to_string(), workload, pacing })
        }
        _ => Err(problems.0),
    }
}

/// Options of a task's workload.
struct Carried<'a> {
    raw: &'a RawOptions,
    kind: Kind,
    inputs: Option<usize>,
    texts: Option<PathBuf>,
    trace: Option<Trace>,
}

impl Carried<'_> {
    fn workload(self, option: &str) -> Result<Workload, Vec<String>> {
        let Carried { raw, kind, inputs, texts, trace } = self;
        let mut problems = Problems(Vec::new());
        let inputs = inputs.unwrap_or(kind.inputs());
        if !(1..=kind.inputs_max()).contains(&inputs) {
            let max = kind.inputs_max();
            problems.0.push(format!("{option} {inputs}: write a number of texts from 1 to {max}"));
        }
        let (texts, expected) = match (&texts, &raw.expect) {
            (Some(_), Some(_)) => {
                problems.0.push("--expect: holds the texts itself; leave out --texts".to_owned());
                (None, None)
            }
            (Some(path), None) => (problems.all(Texts::read(path)), None),
            (None, Some(_)) if kind == Kind::Rerank || trace.is_some() => {
                problems.0.push(
                    "--expect: holds vectors of given texts; neither rerank nor --trace has those".to_owned(),
                );
                (None, None)
            }
            (None, Some(path)) => problems.all(Vectors::read(path, raw.tolerance)).unzip(),
            (None, None) => (Some(Texts::generated(raw.seed, kind.lengths())), None),
        };
        // Not the seed of the documents; otherwise the query would equal the first of them.
        let queries = || Texts::generated(raw.seed.wrapping_add(1), Lengths::Lookup);
        let queries = (kind == Kind::Rerank).then(queries);
        match (texts, &*problems.0) {
            (Some(texts), []) => {
                Ok(Workload { kind, inputs, texts, queries, expected: expected.map(Arc::new), trace })
            }
            _ => Err(problems.0),
        }
    }
}
