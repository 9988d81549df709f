//! `meridian drill`: presses the buttons of a file and shows whether what was expected held.
//!
//! What a drill means, and whether it held, is decided in `loadtest::drill`. Here a world is started for it, in this process
//! and on a folder that is thrown away; load is put on it; the steps are done ([`run`]) while somebody looks on ([`look`]),
//! all on one clock. Against a deployment that was there before, only what its operators could do is done.

mod look;
mod run;

use crate::cli::{DrillOptions, StoreKind, UpOptions};
use crate::up::Interrupts;
use crate::up::plan::{Plan, Scripted};
use crate::up::world::World;
use crate::{DID_NOT_HOLD, FAILED, WRONG_USAGE, apply, fail, models, roles};
use anyhow::{Context, Result, bail};
use loadtest::drill::{self, Drill, Engine, Outcome, Store, Surroundings};
use regions::{Catalogue, Deployment, parse_deployments};
use run::{Hands, Ran};
use std::path::Path;
use std::process::ExitCode;

/// The key of a world that is made for a drill.
const KEY: &str = "local";
/// What is deployed where a drill names nothing.
const DEPLOYMENTS: &str = include_str!("../../configs/deployments.toml");

/// Runs the command: exit code 3 when something that was expected did not hold.
pub(crate) fn main(options: &DrillOptions) -> ExitCode {
    let catalogue = Catalogue::builtin();
    let drill = match read(options, &catalogue) {
        Ok(drill) => drill,
        Err(problems) => return fail(WRONG_USAGE, &problems),
    };
    if options.check {
        let (steps, expectations) = (drill.steps.len(), drill.expectations.len());
        println!("{}: {steps} steps, {expectations} expectations", options.file.display());
        return ExitCode::SUCCESS;
    }
    let _log = roles::log_to_stderr("error");
    // The root future runs on this thread, which lives as long as the process: see `Process::start`.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    let ran = match &options.against {
        Some(url) => runtime.block_on(against(options, &drill, url)),
        None => prepared(options, &drill)
            .and_then(|(up, plan)| runtime.block_on(in_a_world(options, &drill, &catalogue, &up, &plan))),
    };
    let ran = match ran {
        Ok(ran) => ran,
        Err(error) => return fail(FAILED, &[format!("{error:#}")]),
    };
    let verdicts = drill::judge(&drill, &ran.report.record, &ran.seen, &catalogue);
    let outcome =
        Outcome { drill: &drill, record: &ran.report.record, events: &ran.events, verdicts: &verdicts };
    if let Some(file) = &options.html
        && let Err(error) = std::fs::write(file, ran.report.to_html())
    {
        return fail(FAILED, &[format!("--html {} cannot be written: {error}", file.display())]);
    }
    if options.json {
        println!("{}", outcome.to_json());
    } else {
        println!("{}\n{}\n\n{}\n\n{}", drill.about, outcome.asked(), outcome.timeline(), outcome.verdicts());
    }
    if outcome.held() { ExitCode::SUCCESS } else { ExitCode::from(DID_NOT_HOLD) }
}

/// Reads the file; all problems at once.
fn read(options: &DrillOptions, catalogue: &Catalogue) -> Result<Drill, Vec<String>> {
    let file = &options.file;
    let text = std::fs::read_to_string(file)
        .map_err(|error| vec![format!("{} cannot be read: {error}", file.display())])?;
    let base = file.parent().unwrap_or(Path::new("."));
    let deployments = |name: Option<&str>| -> Result<Vec<Deployment>, Vec<String>> {
        let text = match name {
            None => DEPLOYMENTS.to_owned(),
            Some(name) => std::fs::read_to_string(base.join(name))
                .map_err(|error| vec![format!("{} cannot be read: {error}", base.join(name).display())])?,
        };
        parse_deployments(&text, catalogue)
            .map_err(|problems| problems.iter().map(ToString::to_string).collect())
    };
    let around = Surroundings { catalogue, deployments: &deployments, against: options.against.is_some() };
    let named = |problem: &regions::Problem| format!("{}: {problem}", file.display());
    let drill = drill::read(&text, &around);
    let drill = drill.map_err(|problems| problems.iter().map(named).collect::<Vec<_>>())?;
    // The load tool has limits of its own, which are better found before a world is started.
    run::loads(&drill, "http://127.0.0.1:1", KEY, catalogue).map_err(|problems| {
        problems.iter().map(|it| format!("{}: {it}", file.display())).collect::<Vec<_>>()
    })?;
    Ok(drill)
}

/// The world that a drill wants, in the words of `up`; its models are fetched.
fn prepared(options: &DrillOptions, drill: &Drill) -> Result<(UpOptions, Plan)> {
    let regions: Vec<_> = drill.world.regions.iter().map(ToString::to_string).collect();
    let base = options.file.parent().unwrap_or(Path::new("."));
    let up = UpOptions {
        regions: regions.join(","),
        port: 0,
        key: KEY.to_owned(),
        tls: false,
        store: match drill.world.store {
            Store::Embedded => StoreKind::Embedded,
            Store::Etcd => StoreKind::Etcd,
        },
        hubs: drill.world.hubs,
        deployments: drill.world.deployments.as_ref().map(|file| base.join(file)),
        catalogue: None,
        dir: options.dir.clone(),
    };
    let mut plan = match Plan::check(&up) {
        Ok(plan) => plan,
        Err(problems) => bail!("{}", problems.join("\n")),
    };
    if let Engine::Scripted { inputs_per_second, replicas } = &drill.world.engine {
        plan.scripted = Some(Scripted { inputs_per_second: *inputs_per_second, replicas: replicas.clone() });
    }
    for model in plan.models() {
        models::ensure(model).map_err(anyhow::Error::msg)?;
    }
    Ok((up, plan))
}

async fn in_a_world(
    options: &DrillOptions,
    drill: &Drill,
    catalogue: &Catalogue,
    up: &UpOptions,
    plan: &Plan,
) -> Result<Ran> {
    let mut interrupts = Interrupts::listen().context("no signals")?;
    let thrown_away = temporary()?;
    let dir = up.dir.clone().unwrap_or_else(|| thrown_away.0.clone());
    let up = UpOptions { dir: Some(dir), ..up.clone() };
    let mut world = World::prepare(&up, plan, |_| {})?;
    eprintln!("starting {} regions for {}", drill.world.regions.len(), options.file.display());
    let buttons = tokio::select! {
        raised = world.raise(plan) => raised?,
        () = interrupts.next() => bail!("interrupted before the world was ready"),
    };
    let loads =
        run::loads(drill, &world.url(), KEY, catalogue).map_err(|found| anyhow::anyhow!(found.join("\n")))?;
    let readers = look::Readers::of(world.operations(), &world.hubs(), world.operator_token()?);
    let hands = Hands::Ours(buttons);
    // Whoever is let go of here is ended by the kernel, also if it was stopped.
    tokio::select! {
        ran = run::run(drill, loads, hands, readers) => ran,
        () = world.watch(&mut interrupts) => bail!("interrupted"),
    }
}

async fn against(options: &DrillOptions, drill: &Drill, url: &str) -> Result<Ran> {
    let drains = drill
        .steps
        .iter()
        .flat_map(|step| &step.actions)
        .any(|(_, action)| matches!(action, drill::Action::Drain(_) | drill::Action::Undrain(_)));
    let operator = match (&options.hub, drains) {
        (_, false) => None,
        (None, true) => bail!("this drill drains, and a hub does that: give one with --hub http://HOST:PORT"),
        (Some(hub), true) => {
            let token = apply::token(options.token_file.as_deref()).map_err(anyhow::Error::msg)?;
            Some((hub.clone(), token))
        }
    };
    let catalogue = Catalogue::builtin();
    let loads = run::loads(drill, url, &options.key, &catalogue)
        .map_err(|found| anyhow::anyhow!(found.join("\n")))?;
    run::run(drill, loads, Hands::Operator(operator), look::Readers::default()).await
}

/// A folder that is gone with this.
struct Temporary(std::path::PathBuf);

fn temporary() -> Result<Temporary> {
    let dir = std::env::temp_dir().join(format!("meridian-drill-{:016x}", rand::random::<u64>()));
    std::fs::create_dir_all(&dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    Ok(Temporary(dir))
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Some process may still write to it as it ends; what is left is in the folder for such things.
        std::fs::remove_dir_all(&self.0).ok();
    }
}
