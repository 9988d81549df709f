//! State of the drills of a local fleet: the list, and the one that runs or has run last. Readers get it as JSON.

use loadtest::drill::expectation::Span;
use loadtest::drill::{Drill, Event, ExpectationResult};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::Notify;

/// Drill that the board lists.
pub(crate) struct ListedDrill {
    /// Name of its file without the extension.
    pub(super) name: String,
    pub(super) drill: Drill,
    /// Why it cannot be started in this fleet.
    pub(super) unmet: Option<String>,
}

/// Maximum number of events that are kept of a run; a drill of some minutes has hundreds. Later ones are counted.
const EVENTS_MAX: usize = 2000;

/// Drills of the fleet.
pub(crate) struct DrillBoard {
    drills: Vec<ListedDrill>,
    run: Mutex<Option<DrillProgress>>,
    started: Notify,
    stop: Notify,
}

/// Drill that runs or has run.
struct DrillProgress {
    drill: usize,
    state: RunState,
    /// Start of the load.
    began: Option<Instant>,
    /// Duration of the load, when it has ended.
    took: Option<Duration>,
    is_stopping: bool,
    events: Vec<Event>,
    events_omitted: usize,
    results: Option<Vec<ExpectationResult>>,
    problems: Vec<String>,
}

/// State of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    Starting,
    Running,
    /// The load has ended, and the fleet is made as it was.
    Restoring,
    /// All expectations held.
    Held,
    /// An expectation did not hold.
    NotHeld,
    Stopped,
    /// The drill could not be executed.
    Failed,
}

/// End of a run.
pub(super) enum Verdict {
    /// The expectations were evaluated.
    Evaluated(Vec<ExpectationResult>),
    Stopped,
    /// It could not be executed.
    Failed(String),
}

/// Why a drill is not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DrillStartError {
    /// There is no drill with this name.
    Unknown,
    /// This fleet is not the one that the drill needs.
    Unmet(String),
    /// Another one runs.
    Running,
}

impl RunState {
    fn is_active(self) -> bool {
        matches!(self, RunState::Starting | RunState::Running | RunState::Restoring)
    }

    fn as_str(self) -> &'static str {
        match self {
            RunState::Starting => "starting",
            RunState::Running => "running",
            RunState::Restoring => "restoring",
            RunState::Held => "held",
            RunState::NotHeld => "not_held",
            RunState::Stopped => "stopped",
            RunState::Failed => "failed",
        }
    }
}

impl DrillBoard {
    pub(crate) fn new(drills: Vec<ListedDrill>) -> DrillBoard {
        DrillBoard { drills, run: Mutex::independent(None), started: Notify::new(), stop: Notify::new() }
    }

    pub(super) fn drills(&self) -> &[ListedDrill] {
        &self.drills
    }

    /// Starts a drill, unless one runs.
    pub(crate) fn start(&self, name: &str) -> Result<(), DrillStartError> {
        let found = self.drills.iter().enumerate().find(|(_, listed)| listed.name == name);
        let (drill, listed) = found.ok_or(DrillStartError::Unknown)?;
        if let Some(unmet) = &listed.unmet {
            return Err(DrillStartError::Unmet(unmet.clone()));
        }
        let mut run = self.run.lock();
        if run.as_ref().is_some_and(|run| run.state.is_active()) {
            return Err(DrillStartError::Running);
        }
        *run = Some(DrillProgress {
            drill,
            state: RunState::Starting,
            began: None,
            took: None,
            is_stopping: false,
            events: Vec::new(),
            events_omitted: 0,
            results: None,
            problems: Vec::new(),
        });
        self.started.notify_one();
        Ok(())
    }

    /// Stops the drill that runs. Returns whether there is one.
    pub(crate) fn stop(&self) -> bool {
        let mut run = self.run.lock();
        let Some(run) = run.as_mut() else { return false };
        let is_running = matches!(run.state, RunState::Starting | RunState::Running);
        if is_running {
            run.is_stopping = true;
            self.stop.notify_waiters();
        }
        is_running
    }

    /// Waits for the next drill. Returns its number.
    pub(super) async fn next(&self) -> usize {
        loop {
            self.started.notified().await;
            let run = self.run.lock();
            if let Some(run) = run.as_ref().filter(|run| run.state == RunState::Starting) {
                return run.drill;
            }
        }
    }

    /// Waits until the drill is to stop.
    pub(super) async fn stopped(&self) {
        loop {
            let notified = self.stop.notified();
            if self.run.lock().as_ref().is_some_and(|run| run.is_stopping) {
                return;
            }
            notified.await;
        }
    }

    fn update(&self, change: impl FnOnce(&mut DrillProgress)) {
        if let Some(run) = self.run.lock().as_mut() {
            change(run);
        }
    }

    /// Notes that the load begins.
    pub(super) fn began(&self) {
        self.update(|run| (run.state, run.began) = (RunState::Running, Some(Instant::now())));
    }

    /// Notes an event.
    pub(super) fn note(&self, event: &Event) {
        self.update(|run| {
            if run.events.len() < EVENTS_MAX {
                run.events.push(event.clone());
            } else {
                run.events_omitted += 1;
            }
        });
    }

    /// Notes that the load has ended.
    pub(super) fn restoring(&self) {
        self.update(|run| {
            run.took = run.began.map(|began| began.elapsed());
            run.state = RunState::Restoring;
        });
    }

    /// Notes the end, with what could not be restored.
    pub(super) fn ended(&self, verdict: Verdict, problems: Vec<String>) {
        self.update(|run| {
            run.problems = problems;
            match verdict {
                Verdict::Evaluated(results) => {
                    let held = results.iter().all(|result| result.held);
                    run.state = if held { RunState::Held } else { RunState::NotHeld };
                    run.results = Some(results);
                }
                Verdict::Stopped => run.state = RunState::Stopped,
                Verdict::Failed(problem) => {
                    run.state = RunState::Failed;
                    run.problems.insert(0, problem);
                }
            }
        });
    }

    /// Returns the list and the run as JSON.
    pub(crate) fn to_json(&self) -> Value {
        let listed = self.drills.iter().map(|ListedDrill { name, drill, unmet }| {
            let Drill { description, duration, .. } = drill;
            json!({
                "name": name, "description": description, "duration_ms": millis(*duration), "unmet": unmet,
            })
        });
        let listed: Vec<_> = listed.collect();
        let run = self.run.lock();
        let run = run.as_ref().and_then(|run| Some(run_json(run, self.drills.get(run.drill)?)));
        json!({"drills": listed, "run": run})
    }
}

fn run_json(run: &DrillProgress, listed: &ListedDrill) -> Value {
    let ListedDrill { name, drill, unmet: _ } = listed;
    let elapsed = run.took.or_else(|| run.began.map(|began| began.elapsed()));
    let elapsed = elapsed.unwrap_or_default().min(drill.duration);
    let mut events: Vec<&Event> = run.events.iter().collect();
    events.sort_by_key(|event| event.at);
    let events = events
        .into_iter()
        .map(|event| json!({"at_ms": millis(event.at), "is_action": event.is_action, "text": event.text}));
    let steps = drill.steps.iter().flat_map(|step| {
        step.actions.iter().map(|(text, _)| json!({"at_ms": millis(step.at), "text": text}))
    });
    json!({
        "name": name, "description": drill.description,
        "state": run.state.as_str(), "is_active": run.state.is_active(),
        "duration_ms": millis(drill.duration), "elapsed_ms": millis(elapsed),
        "steps": steps.collect::<Vec<_>>(), "expectations": expectations_json(run, drill, elapsed),
        "events": events.collect::<Vec<_>>(), "events_omitted": run.events_omitted, "problems": run.problems,
    })
}

/// Returns the results, or while there are none, which expectations are being observed.
fn expectations_json(run: &DrillProgress, drill: &Drill, elapsed: Duration) -> Vec<Value> {
    if let Some(results) = &run.results {
        let result = |result: &ExpectationResult| {
            let state = if result.held { "held" } else { "not_held" };
            span_json(&result.expectation, result.span, state, Some(&result.observed))
        };
        return results.iter().map(result).collect();
    }
    let state = |span: Span| match run.state.is_active() {
        false => "not_evaluated",
        true if elapsed < span.from => "pending",
        true if elapsed < span.to => "observed",
        true => "ended",
    };
    let expectations = drill.expectations.iter();
    expectations
        .map(|expected| span_json(&expected.text, expected.span, state(expected.span), None))
        .collect()
}

fn span_json(text: &str, span: Span, state: &str, observed: Option<&str>) -> Value {
    json!({
        "text": text, "from_ms": millis(span.from), "to_ms": millis(span.to), "state": state, "observed": observed,
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use configuration::ConfigFile;
    use std::path::Path;

    fn board() -> DrillBoard {
        let text = "description = 'a test'\nduration = '20s'\nexpect = ['failed == 0']\n[fleet]\nregions = ['aws/us-east-1']\n\
                    [[load]]\nname = 'one'\nnear = 'aws/us-east-1'\nrate = 50\n\
                    [[step]]\nat = '10s'\ndo = 'kill region aws/us-east-1'\n";
        let catalogue = regions::Catalogue::builtin();
        let drill = ConfigFile::read(text, |document| {
            crate::drill::read_document(document, Path::new("."), &catalogue, false)
        });
        let drill = drill.unwrap_or_else(|problems| panic!("{problems:?}"));
        let listed = |name: &str, unmet: Option<&str>| ListedDrill {
            name: name.to_owned(),
            drill: drill.clone(),
            unmet: unmet.map(str::to_owned),
        };
        DrillBoard::new(vec![listed("one", None), listed("two", Some("needs etcd"))])
    }

    fn state(board: &DrillBoard) -> String {
        board.to_json()["run"]["state"].as_str().unwrap_or_default().to_owned()
    }

    #[tokio::test]
    async fn one_drill_runs_at_a_time_and_only_one_that_the_fleet_can_run() {
        let board = board();
        assert_eq!(board.start("three"), Err(DrillStartError::Unknown));
        assert_eq!(board.start("two"), Err(DrillStartError::Unmet("needs etcd".to_owned())));
        assert!(!board.stop(), "none runs");
        assert_eq!(board.start("one"), Ok(()));
        assert_eq!(board.start("one"), Err(DrillStartError::Running));
        assert_eq!(board.next().await, 0);
        board.began();
        assert!(board.stop());
        board.stopped().await;
        board.restoring();
        assert!(!board.stop(), "it is ending");
        assert_eq!(board.start("one"), Err(DrillStartError::Running), "the fleet is not as before yet");
        board.ended(Verdict::Stopped, Vec::new());
        assert_eq!(state(&board), "stopped");
        assert_eq!(board.start("one"), Ok(()));
        let stopped = tokio::time::timeout(Duration::from_millis(10), board.stopped()).await;
        assert!(stopped.is_err(), "the end of the last run does not stop the next");
    }

    #[tokio::test]
    async fn a_run_has_its_events_and_the_state_of_each_expectation() {
        let board = board();
        board.start("one").unwrap();
        board.began();
        board.note(&Event { at: Duration::from_secs(10), is_action: true, text: "kill".to_owned() });
        let run = board.to_json()["run"].clone();
        assert_eq!(
            (&run["state"], &run["expectations"][0]["state"]),
            (&json!("running"), &json!("observed"))
        );
        assert_eq!(run["events"], json!([{"at_ms": 10_000, "is_action": true, "text": "kill"}]));
        let result = |held| ExpectationResult {
            expectation: "failed == 0".to_owned(),
            span: Span { anchor: Duration::ZERO, from: Duration::ZERO, to: Duration::from_secs(20) },
            held,
            observed: "3 of 9 failed".to_owned(),
        };
        board.restoring();
        board.ended(Verdict::Evaluated(vec![result(true), result(false)]), vec!["a problem".to_owned()]);
        let run = board.to_json()["run"].clone();
        assert_eq!((&run["state"], &run["problems"]), (&json!("not_held"), &json!(["a problem"])));
        assert_eq!(run["expectations"][1]["observed"], "3 of 9 failed");
        board.start("one").unwrap();
        board.ended(Verdict::Evaluated(vec![result(true)]), Vec::new());
        assert_eq!(state(&board), "held");
    }
}
