//! `meridian drill`: executes the actions of a drill file and reports whether the expectations were met.
//!
//! The semantics of drills and their evaluation are in `loadtest::drill`. This module starts a local fleet for the drill, in
//! this process and in a temporary directory, generates load, and executes the steps ([`run`]) while an observer polls the
//! fleet ([`observer`]), all on one clock. Against an existing deployment, only operators' actions are possible.

pub(crate) mod observer;
pub(crate) mod run;

use crate::cli::{DrillOptions, StoreKind, UpOptions};
use crate::load::page_context;
use crate::roles::base;
use crate::up::Interrupts;
use crate::up::fleet::LocalFleet;
use crate::up::fleet_control::REQUEST_TIMEOUT;
use crate::up::plan::{DEPLOYMENTS, FleetPlan, ScriptedReplicas};
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, apply, fail, log, models};
use anyhow::{Context, Result, bail};
use configuration::ConfigFile;
use loadtest::drill::{self, Drill, DrillEngine, DrillResult, DrillStore, ReadContext};
use observer::Observer;
use regions::{Catalogue, Deployment, RegionId, parse_deployments};
use run::{ActionExecutor, DrillRun};
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;
use telemetry::log_filter::FilterLevel;

/// API key of the fleet of a drill.
const KEY: &str = "local";

/// Runs the command. Exit code 3 if an expectation was not met.
pub(crate) fn main(options: &DrillOptions) -> ExitCode {
    let catalogue = Catalogue::builtin();
    let drill = match read(options, &catalogue) {
        Ok(drill) => drill,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    if options.check {
        let (steps, expectations) = (drill.steps.len(), drill.expectations.len());
        println!("{}: {steps} steps, {expectations} expectations", options.file.display());
        return ExitCode::SUCCESS;
    }
    let _log = match log::log_to_stderr(FilterLevel::Error) {
        Ok(log) => log,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    // The root future runs on this thread, which lives as long as the process: see `FleetProcess::start`.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    let began = SystemTime::now();
    let ran = match &options.against {
        Some(url) => runtime.block_on(against(options, &drill, url)),
        None => prepared(options, &drill)
            .and_then(|(up, plan)| runtime.block_on(in_local_fleet(options, &drill, &catalogue, &up, &plan))),
    };
    let ran = match ran {
        Ok(ran) => ran,
        Err(error) => return fail(EXIT_FAILED, &[format!("{error:#}")]),
    };
    let results = drill::evaluate(&drill, &ran.report.record, &ran.observations, &catalogue);
    let name = options.file.file_stem().unwrap_or_default().to_string_lossy();
    let result = DrillResult {
        name: &name,
        drill: &drill,
        record: &ran.report.record,
        events: &ran.events,
        results: &results,
    };
    if let Some(file) = &options.html
        && let Err(error) = std::fs::write(file, result.to_html(&ran.report, &page_context(began)))
    {
        return fail(EXIT_FAILED, &[format!("--html {} cannot be written: {error}", file.display())]);
    }
    if options.json {
        println!("{}", result.to_json());
    } else {
        println!(
            "{}\n{}\n\n{}\n\n{}",
            drill.description,
            result.demand(),
            result.timeline(),
            result.results()
        );
    }
    if result.held() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_CHECK_FAILED) }
}

/// Reads and validates the file; returns all problems on failure.
fn read(options: &DrillOptions, catalogue: &Catalogue) -> Result<Drill, Vec<String>> {
    let file = &options.file;
    let text = std::fs::read_to_string(file)
        .map_err(|error| vec![format!("{} cannot be read: {error}", file.display())])?;
    let drill = ConfigFile::read(&text, |document| {
        read_document(document, base(file), catalogue, options.against.is_some())
    });
    drill.map_err(|problems| configuration::named(file, problems))
}

/// Reads and validates a drill. The load generator's own limits are checked before a fleet is started.
pub(crate) fn read_document(
    document: &ConfigFile<'_>,
    base: &Path,
    catalogue: &Catalogue,
    against: bool,
) -> Option<Drill> {
    let deployments = |name: Option<&str>| -> Result<Vec<Deployment>, Vec<String>> {
        let text = match name {
            None => DEPLOYMENTS.to_owned(),
            Some(name) => std::fs::read_to_string(base.join(name))
                .map_err(|error| vec![format!("{} cannot be read: {error}", base.join(name).display())])?,
        };
        parse_deployments(&text, catalogue)
            .map_err(|problems| problems.iter().map(ToString::to_string).collect())
    };
    let drill =
        drill::read_document(document, &ReadContext { catalogue, deployments: &deployments, against })?;
    if document.is_valid()
        && let Err(problems) =
            run::loads(&drill, &|_| "http://127.0.0.1:1".to_owned(), KEY, catalogue, !against)
    {
        problems.iter().for_each(|problem| document.problem("load", problem));
    }
    Some(drill)
}

/// Returns the options and the plan of the drill's fleet, and fetches its models.
fn prepared(options: &DrillOptions, drill: &Drill) -> Result<(UpOptions, FleetPlan)> {
    let regions: Vec<_> = drill.fleet.regions.iter().map(ToString::to_string).collect();
    let base = options.file.parent().unwrap_or(Path::new("."));
    let up = UpOptions {
        regions: regions.join(","),
        port: 0,
        key: KEY.to_owned(),
        tls: false,
        ipv6: false,
        // Clients are near the regions of the fleet, and each reaches the gateway near it.
        gateways: None,
        store: match drill.fleet.store {
            DrillStore::Embedded => StoreKind::Embedded,
            DrillStore::Etcd => StoreKind::Etcd,
        },
        hubs: drill.fleet.hubs,
        spokes: drill.fleet.spokes,
        deployments: drill.fleet.deployments.as_ref().map(|file| base.join(file)),
        catalogue: None,
        drills: None,
        dir: options.dir.clone(),
    };
    let mut plan = match FleetPlan::check(&up) {
        Ok(plan) => plan,
        Err(problems) => bail!("{}", problems.join("\n")),
    };
    if let DrillEngine::Scripted { inputs_per_second, replicas } = &drill.fleet.engine {
        plan.scripted =
            Some(ScriptedReplicas { inputs_per_second: *inputs_per_second, replicas: replicas.clone() });
    }
    for model in plan.models() {
        models::ensure(model).map_err(anyhow::Error::msg)?;
    }
    Ok((up, plan))
}

async fn in_local_fleet(
    options: &DrillOptions,
    drill: &Drill,
    catalogue: &Catalogue,
    up: &UpOptions,
    plan: &FleetPlan,
) -> Result<DrillRun> {
    let mut interrupts = Interrupts::listen().context("cannot install signal handlers")?;
    let temporary = temporary()?;
    let dir = up.dir.clone().unwrap_or_else(|| temporary.0.clone());
    let up = UpOptions { dir: Some(dir), ..up.clone() };
    let mut fleet = LocalFleet::prepare(&up, plan, |_| {})?;
    eprintln!("starting {} regions for {}", drill.fleet.regions.len(), options.file.display());
    let control = tokio::select! {
        started = fleet.start_all(plan) => started?,
        () = interrupts.next() => bail!("interrupted before the fleet was ready"),
    };
    let urls = fleet.urls();
    let url_near = |region: &RegionId| urls[plan.nearest_gateway(region)].clone();
    let loads = run::loads(drill, &url_near, KEY, catalogue, true)
        .map_err(|found| anyhow::anyhow!(found.join("\n")))?;
    let observer = Observer::new(&fleet.operations(), &fleet.hubs(), fleet.operator())?;
    let executor = ActionExecutor::LocalFleet(control);
    // Processes that are dropped here are killed, including paused ones.
    tokio::select! {
        ran = run::run(drill, loads, executor, observer, |_| {}) => ran,
        () = fleet.watch(&mut interrupts) => bail!("interrupted"),
    }
}

async fn against(options: &DrillOptions, drill: &Drill, url: &str) -> Result<DrillRun> {
    let drains = drill
        .steps
        .iter()
        .flat_map(|step| &step.actions)
        .any(|(_, action)| matches!(action, drill::Action::Drain(_) | drill::Action::Undrain(_)));
    let operator = match (&options.hub, drains) {
        (_, false) => None,
        (None, true) => bail!(
            "this drill drains a region, which needs a hub: add --hub https://HOST:PORT and --identity DIR"
        ),
        (Some(hub), true) => {
            let client = apply::client(hub, &options.caller, REQUEST_TIMEOUT).map_err(anyhow::Error::msg)?;
            Some(Box::new(client))
        }
    };
    let catalogue = Catalogue::builtin();
    let loads = run::loads(drill, &|_| url.to_owned(), &options.key, &catalogue, false)
        .map_err(|found| anyhow::anyhow!(found.join("\n")))?;
    run::run(drill, loads, ActionExecutor::Operator(operator), Observer::default(), |_| {}).await
}

/// Temporary directory, deleted on drop.
struct Temporary(std::path::PathBuf);

fn temporary() -> Result<Temporary> {
    let dir = std::env::temp_dir().join(format!("meridian-drill-{:016x}", rand::random::<u64>()));
    std::fs::create_dir_all(&dir).with_context(|| format!("{} cannot be created", dir.display()))?;
    Ok(Temporary(dir))
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // A process that is ending may still write to it; then the rest stays in the system's temporary directory.
        std::fs::remove_dir_all(&self.0).ok();
    }
}
