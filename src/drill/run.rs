//! Execution of a drill: load, steps and observation on one clock, which starts with the load.

use super::observer::{ObservationLog, Observer};
use crate::up::fleet_control::FleetControl;
use anyhow::{Context, Result, bail};
use loadtest::drill::observations::DrillObservations;
use loadtest::drill::{Action, Drill, Event};
use loadtest::limits::ProcessShare;
use loadtest::record::Record;
use loadtest::{Mark, Options, RawOptions, Report};
use regions::{Catalogue, RegionId};
use scheduler_client::operator::OperatorClient;
use std::num::NonZeroUsize;
use std::time::Instant;
use tokio::task::JoinSet;

/// Results of a drill, for its evaluation.
pub(crate) struct DrillRun {
    pub(crate) report: Report,
    pub(crate) observations: DrillObservations,
    pub(crate) events: Vec<Event>,
}

/// Executor of the drill's actions.
pub(crate) enum ActionExecutor {
    /// Local fleet of this process.
    LocalFleet(FleetControl),
    /// Operator of an existing deployment.
    Operator(Option<Box<OperatorClient>>),
}

/// Returns the load generator options for each load of the drill, in order. `url_near` returns the URL for callers near a
/// region; `has_links` says whether this process also relays their requests over the links of a local fleet.
pub(crate) fn loads(
    drill: &Drill,
    url_near: &dyn Fn(&RegionId) -> String,
    key: &str,
    catalogue: &Catalogue,
    has_links: bool,
) -> Result<Vec<Options>, Vec<String>> {
    let (mut loads, mut problems) = (Vec::new(), Vec::new());
    let concurrent_runs = NonZeroUsize::new(drill.loads.len()).unwrap_or(NonZeroUsize::MIN);
    for (index, load) in drill.loads.iter().enumerate() {
        let geo =
            catalogue.get(&load.near).map(|region| format!("{},{}", region.point.lat(), region.point.lon()));
        let raw = RawOptions {
            url: url_near(&load.near),
            key: Some(key.to_owned()),
            model: load.model.to_string(),
            rate: drill.profile(load),
            arrival: load.arrival.clone(),
            inputs: Some(load.inputs),
            timeout: format!("{}ms", load.timeout.as_millis()),
            seed: index as u64 + 1,
            geo,
            ..RawOptions::default()
        };
        match Options::check(raw) {
            Ok(mut options) => {
                options.tasks.iter_mut().for_each(|task| task.name.clone_from(&load.name));
                options.process_share = ProcessShare { concurrent_runs, has_links };
                loads.push(options);
            }
            Err(found) => problems.extend(found.into_iter().map(|it| format!("load {}: {it}", load.name))),
        }
    }
    if problems.is_empty() { Ok(loads) } else { Err(problems) }
}

/// Runs the drill until its load ends. Calls `on_event` for each action and observation at once.
pub(crate) async fn run(
    drill: &Drill,
    loads: Vec<Options>,
    executor: ActionExecutor,
    observer: Observer,
    on_event: impl Fn(&Event) + 'static,
) -> Result<DrillRun> {
    let start = Instant::now();
    let log = ObservationLog::begin(start, on_event);
    let mut load_tasks = JoinSet::new();
    for (index, options) in loads.into_iter().enumerate() {
        load_tasks
            .spawn(async move { (index, loadtest::run(options, |_| {}, std::future::pending()).await) });
    }
    let load = async {
        let mut reports: Vec<Option<Report>> = drill.loads.iter().map(|_| None).collect();
        while let Some(report) = load_tasks.join_next().await {
            let (index, report) = report.context("a load task does not panic")?;
            reports[index] = Some(report?);
        }
        Ok(reports.into_iter().flatten().collect::<Vec<_>>())
    };
    let steps = execute_steps(drill, &executor, start, &log);
    let reports = tokio::select! {
        done = async { tokio::try_join!(load, steps) } => done?.0,
        () = observer.run(&log) => bail!("the observer ended"),
    };
    let (observations, events) = log.end();
    let report = joined(reports, &events).context("a drill has a load")?;
    Ok(DrillRun { report, observations, events })
}

/// Joins the reports of concurrent loads, with the actions and observations as marks.
fn joined(reports: Vec<Report>, events: &[Event]) -> Option<Report> {
    let mut options = reports.first()?.options.clone();
    options.tasks = reports.iter().flat_map(|report| report.options.tasks.iter().cloned()).collect();
    let mut marks: Vec<_> = events.iter().map(mark).collect();
    marks.sort_by_key(|mark| mark.at);
    let elapsed = reports.iter().map(|report| report.elapsed).max()?;
    let stopped_early = reports.iter().any(|report| report.stopped_early);
    let record = Record::join(reports.into_iter().map(|report| report.record));
    Some(Report { options, elapsed, stopped_early, record, marks })
}

fn mark(event: &Event) -> Mark {
    Mark { at: event.at, is_action: event.is_action, label: event.text.clone() }
}

async fn execute_steps(
    drill: &Drill,
    executor: &ActionExecutor,
    start: Instant,
    log: &ObservationLog,
) -> Result<()> {
    for step in &drill.steps {
        tokio::time::sleep_until((start + step.at).into()).await;
        for (text, action) in &step.actions {
            eprintln!("{:>7.2} s  {text}", start.elapsed().as_secs_f64());
            log.record_action(text);
            executor
                .execute(action)
                .await
                .map_err(|problem| anyhow::anyhow!("action `{text}` failed: {problem}"))?;
        }
    }
    Ok(())
}

impl ActionExecutor {
    async fn execute(&self, action: &Action) -> Result<(), String> {
        match (self, action) {
            (ActionExecutor::LocalFleet(control), action) => control.execute(action).await,
            (ActionExecutor::Operator(Some(operator)), Action::Drain(region) | Action::Undrain(region)) => {
                let is_draining = matches!(action, Action::Drain(_));
                operator.set_draining(region, is_draining).await.map_err(|error| error.to_string())
            }
            (ActionExecutor::Operator(_), Action::Surge { .. }) => Ok(()),
            (ActionExecutor::Operator(None), Action::Drain(_) | Action::Undrain(_)) => {
                Err("this action needs a hub: add --hub".to_owned())
            }
            (
                ActionExecutor::Operator(_),
                Action::Process(..) | Action::Link(..) | Action::SlowReplicas(..),
            ) => Err("this action is possible only in a local fleet".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loads_of_a_drill_divide_the_files_of_the_process() {
        let text = "description = 'a test'\nduration = '20s'\nexpect = ['failed == 0']\n[fleet]\nregions = ['aws/us-east-1']\n\
                    [[load]]\nname = 'one'\nnear = 'aws/us-east-1'\nrate = 50\n\
                    [[load]]\nname = 'two'\nnear = 'aws/us-east-1'\nrate = 50\n\
                    [[step]]\nat = '10s'\ndo = 'kill region aws/us-east-1'\n";
        let catalogue = Catalogue::builtin();
        let drill = configuration::ConfigFile::read(text, |document| {
            super::super::read_document(document, std::path::Path::new("."), &catalogue, false)
        });
        let drill = drill.unwrap_or_else(|problems| panic!("{problems:?}"));
        for has_links in [true, false] {
            let loads =
                loads(&drill, &|_| "http://127.0.0.1:1".to_owned(), "a", &catalogue, has_links).unwrap();
            let shares: Vec<_> = loads.iter().map(|options| options.process_share).collect();
            let half = ProcessShare { concurrent_runs: NonZeroUsize::new(2).unwrap(), has_links };
            assert_eq!(shares, [half, half]);
        }
    }
}
