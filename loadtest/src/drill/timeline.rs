//! Output of a drill: a timeline as text, and JSON.

use std::time::Duration;

use serde::Serialize;

use crate::record::{Record, Served};

use super::{Drill, Engine, Verdict};

/// Event of a drill: an executed action or an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Since the start of the load.
    pub at: Duration,
    /// Whether this is an action of the drill, as opposed to an observation.
    pub done: bool,
    /// Description.
    pub text: String,
}

/// Result of a drill.
#[derive(Clone, Copy)]
pub struct Outcome<'a> {
    /// The drill.
    pub drill: &'a Drill,
    /// Statistics of the requests.
    pub record: &'a Record,
    /// Actions and observations.
    pub events: &'a [Event],
    /// Results of the expectations.
    pub verdicts: &'a [Verdict],
}

#[derive(Serialize)]
struct OutcomeV1<'a> {
    version: u32,
    about: &'a str,
    asked: String,
    lasts_ms: u128,
    held: bool,
    expectations: Vec<VerdictV1<'a>>,
    events: Vec<EventV1<'a>>,
    seconds: Vec<SecondV1>,
}

#[derive(Serialize)]
struct VerdictV1<'a> {
    expectation: &'a str,
    from_ms: u128,
    to_ms: u128,
    held: bool,
    seen: &'a str,
}

#[derive(Serialize)]
struct EventV1<'a> {
    at_ms: u128,
    #[serde(rename = "do")]
    done: bool,
    what: &'a str,
}

#[derive(Serialize)]
struct SecondV1 {
    second: u64,
    ok: u64,
    failed: u64,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    regions: std::collections::BTreeMap<String, u64>,
}

impl Outcome<'_> {
    /// Returns whether all expectations held.
    pub fn held(&self) -> bool {
        self.verdicts.iter().all(|verdict| verdict.held)
    }

    /// Formats request statistics for each second, with actions and observations in between.
    pub fn timeline(&self) -> String {
        let mut lines = vec![format!(
            "{:>7} {:>7} {:>7} {:>9} {:>9}  answered by",
            "second", "ok", "failed", "p50 ms", "p99 ms"
        )];
        let mut events: Vec<&Event> = self.events.iter().collect();
        events.sort_by_key(|event| event.at);
        let mut events = events.into_iter().peekable();
        for second in self.seconds() {
            let SecondV1 { second, ok, failed, p50_ms, p99_ms, regions } = second;
            let ms = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
            let regions: Vec<_> = regions.iter().map(|(region, count)| format!("{region} {count}")).collect();
            lines.push(format!(
                "{second:>7} {ok:>7} {failed:>7} {:>9} {:>9}  {}",
                ms(p50_ms),
                ms(p99_ms),
                regions.join(", ")
            ));
            while let Some(event) = events.next_if(|event| event.at < Duration::from_secs(second + 1)) {
                lines.push(told(event));
            }
        }
        lines.extend(events.map(told));
        lines.join("\n")
    }

    /// Formats the request rate before the first step, its share of the capacity, and the rate of ok responses.
    pub fn asked(&self) -> String {
        let Drill { lasts, warm_up, world, loads, steps, .. } = self.drill;
        let requests: f64 = loads.iter().map(|load| load.rate).sum();
        let inputs: f64 = loads.iter().map(|load| load.rate * load.inputs as f64).sum();
        let share = match (world.capacity, &world.engine) {
            (None, _) => String::new(),
            (Some(capacity), Engine::Cpu) => {
                format!(
                    ": {:.0} % of the {capacity:.0} that this world is said to answer",
                    100.0 * requests / capacity
                )
            }
            (Some(capacity), Engine::Scripted { inputs_per_second, replicas }) => format!(
                ": {:.0} % of {capacity:.0} inputs a second, which is what {} scripted replicas compute, {inputs_per_second} each",
                100.0 * inputs / capacity,
                replicas.iter().sum::<u32>(),
            ),
        };
        // Statistics are kept per whole second.
        let from = warm_up.as_secs() + u64::from(warm_up.subsec_nanos() > 0);
        let to = steps.first().map_or(*lasts, |step| step.at).as_secs();
        let answered = self.record.between(Duration::from_secs(from), Duration::from_secs(to)).ok;
        let answered = match to.checked_sub(from) {
            Some(seconds @ 1..) => format!(
                "; {:.1} a second were answered from {from} to {to} s",
                answered as f64 / seconds as f64
            ),
            Some(0) | None => String::new(),
        };
        format!("asked for {requests:.1} requests a second{share}{answered}")
    }

    /// Formats the result of each expectation.
    pub fn verdicts(&self) -> String {
        let width =
            self.verdicts.iter().map(|verdict| verdict.expectation.chars().count()).max().unwrap_or(0);
        let line = |verdict: &Verdict| {
            let Verdict { expectation, span, held, seen } = verdict;
            let held = if *held { "holds" } else { "FAILS" };
            format!("{held}  {expectation:<width$}  {:>9}  {seen}", span.to_string())
        };
        let held = self.verdicts.iter().filter(|verdict| verdict.held).count();
        let mut lines: Vec<_> = self.verdicts.iter().map(line).collect();
        let causes = self.record.total();
        lines.extend(causes.failures().map(|(cause, tally)| format!("failed: {} × {cause}", tally.count)));
        lines.push(format!("{held} of {} expectations hold", self.verdicts.len()));
        lines.join("\n")
    }

    /// Formats the result as JSON.
    pub fn to_json(&self) -> String {
        let expectations = self.verdicts.iter().map(|each| {
            let (from_ms, to_ms) = (each.span.from.as_millis(), each.span.to.as_millis());
            VerdictV1 { expectation: &each.expectation, from_ms, to_ms, held: each.held, seen: &each.seen }
        });
        let events = self.events.iter().map(|Event { at, done, text }| EventV1 {
            at_ms: at.as_millis(),
            done: *done,
            what: text,
        });
        let outcome = OutcomeV1 {
            version: 1,
            about: &self.drill.about,
            asked: self.asked(),
            lasts_ms: self.drill.lasts.as_millis(),
            held: self.held(),
            expectations: expectations.collect(),
            events: events.collect(),
            seconds: self.seconds(),
        };
        serde_json::to_string_pretty(&outcome).expect("numbers and texts are JSON")
    }

    fn seconds(&self) -> Vec<SecondV1> {
        let ms = |span: Option<Duration>| span.map(|span| span.as_secs_f64() * 1e3);
        let last = self.drill.lasts.as_secs() + u64::from(self.drill.lasts.subsec_nanos() > 0);
        let second = |second: u64| {
            let window = self.record.between(Duration::from_secs(second), Duration::from_secs(second + 1));
            let (p50_ms, p99_ms) = (ms(window.quantile(0.5)), ms(window.quantile(0.99)));
            let answered =
                window.by_region.iter().filter(|(served, by)| by.ok > 0 && **served != Served::Unnamed);
            let regions = answered.map(|(served, by)| (served.to_string(), by.ok)).collect();
            SecondV1 { second, ok: window.ok, failed: window.failed, p50_ms, p99_ms, regions }
        };
        (0..last).map(second).collect()
    }
}

fn told(event: &Event) -> String {
    let Event { at, done, text } = event;
    let mark = if *done { ">>" } else { "  " };
    format!("{:>7.2} s {mark} {text}", at.as_secs_f64())
}
