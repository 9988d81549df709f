//! Load, steps and onlookers on one clock: the moment at which the load starts.

use super::look::{Notes, Readers};
use crate::up::buttons::{Buttons, told};
use anyhow::{Context, Result, bail};
use loadtest::drill::seen::Seen;
use loadtest::drill::{Action, Drill, Event};
use loadtest::record::Record;
use loadtest::{Mark, Options, RawOptions, Report};
use regions::{Catalogue, RegionId};
use reqwest::Method;
use std::time::Instant;
use tokio::task::JoinSet;

/// What a drill has shown, to be judged.
pub(super) struct Ran {
    pub(super) report: Report,
    pub(super) seen: Seen,
    pub(super) events: Vec<Event>,
}

/// Who does what a drill says.
pub(super) enum Hands {
    /// A world that we started.
    Ours(Buttons),
    /// An operator of one that was there before: a hub and the operator's token.
    Operator(Option<(String, String)>),
}

/// The load of each of the drill's callers, in their order.
pub(super) fn loads(
    drill: &Drill,
    url: &str,
    key: &str,
    catalogue: &Catalogue,
) -> Result<Vec<Options>, Vec<String>> {
    let (mut loads, mut problems) = (Vec::new(), Vec::new());
    for (place, load) in drill.loads.iter().enumerate() {
        let geo =
            catalogue.get(&load.near).map(|region| format!("{},{}", region.point.lat(), region.point.lon()));
        let raw = RawOptions {
            url: url.to_owned(),
            key: Some(key.to_owned()),
            model: load.model.to_string(),
            rate: drill.profile(load),
            arrival: load.arrival.clone(),
            inputs: Some(load.inputs),
            timeout: format!("{}ms", load.timeout.as_millis()),
            seed: place as u64 + 1,
            geo,
            ..RawOptions::default()
        };
        match Options::check(raw) {
            Ok(mut options) => {
                options.tasks.iter_mut().for_each(|task| task.name.clone_from(&load.name));
                loads.push(options);
            }
            Err(found) => problems.extend(found.into_iter().map(|it| format!("load {}: {it}", load.name))),
        }
    }
    if problems.is_empty() { Ok(loads) } else { Err(problems) }
}

/// Runs the drill to the end of its load.
pub(super) async fn run(drill: &Drill, loads: Vec<Options>, hands: Hands, readers: Readers) -> Result<Ran> {
    let start = Instant::now();
    let notes = Notes::begin(start);
    let mut asking = JoinSet::new();
    for (place, options) in loads.into_iter().enumerate() {
        asking.spawn(async move { (place, loadtest::run(options, |_| {}, std::future::pending()).await) });
    }
    let asked = async {
        let mut reports: Vec<Option<Report>> = drill.loads.iter().map(|_| None).collect();
        while let Some(report) = asking.join_next().await {
            let (place, report) = report.context("asking does not panic")?;
            reports[place] = Some(report?);
        }
        Ok(reports.into_iter().flatten().collect::<Vec<_>>())
    };
    let stepped = step_by_step(drill, &hands, start, &notes);
    let reports = tokio::select! {
        done = async { tokio::try_join!(asked, stepped) } => done?.0,
        () = readers.look(&notes) => bail!("nobody looks on any longer"),
    };
    let (seen, events) = notes.end();
    let report = joined(reports, &events).context("a drill has a load")?;
    Ok(Ran { report, seen, events })
}

/// One report of loads that went on beside each other, with what was done and seen meanwhile.
fn joined(reports: Vec<Report>, events: &[Event]) -> Option<Report> {
    let mut options = reports.first()?.options.clone();
    options.tasks = reports.iter().flat_map(|report| report.options.tasks.iter().cloned()).collect();
    let mut marks: Vec<_> =
        events.iter().map(|event| Mark { at: event.at, label: event.text.clone() }).collect();
    marks.sort_by_key(|mark| mark.at);
    let elapsed = reports.iter().map(|report| report.elapsed).max()?;
    let stopped_early = reports.iter().any(|report| report.stopped_early);
    let record = Record::join(reports.into_iter().map(|report| report.record));
    Some(Report { options, elapsed, stopped_early, record, marks })
}

async fn step_by_step(drill: &Drill, hands: &Hands, start: Instant, notes: &Notes) -> Result<()> {
    for step in &drill.steps {
        tokio::time::sleep_until((start + step.at).into()).await;
        for (text, action) in &step.actions {
            eprintln!("{:>7.2} s  {text}", start.elapsed().as_secs_f64());
            notes.did(text);
            hands
                .press(action)
                .await
                .map_err(|problem| anyhow::anyhow!("`{text}` could not be done: {problem}"))?;
        }
    }
    Ok(())
}

impl Hands {
    async fn press(&self, action: &Action) -> Result<(), String> {
        match (self, action) {
            (Hands::Ours(buttons), action) => buttons.press(action).await,
            (Hands::Operator(Some(operator)), Action::Drain(region)) => {
                drain(operator, Method::PUT, region).await
            }
            (Hands::Operator(Some(operator)), Action::Undrain(region)) => {
                drain(operator, Method::DELETE, region).await
            }
            (Hands::Operator(_), Action::Surge { .. }) => Ok(()),
            (Hands::Operator(None), Action::Drain(_) | Action::Undrain(_)) => {
                Err("that takes a hub: give one with --hub".to_owned())
            }
            (Hands::Operator(_), Action::Process(..) | Action::Link(..) | Action::SlowReplicas(..)) => {
                Err("that takes a world of one's own".to_owned())
            }
        }
    }
}

async fn drain((hub, token): &(String, String), method: Method, region: &RegionId) -> Result<(), String> {
    let url = format!("{}/v1/drains/{}/{}", hub.trim_end_matches('/'), region.cloud(), region.name());
    told(method, url, Some(token)).await
}
