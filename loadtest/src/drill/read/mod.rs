//! Parser of drill files. Reports all problems of a file at once, each with its line and the accepted syntax.
//!
//! The fleet and the loads are parsed first, because actions and expectations refer to them. An invalid one is left
//! out or replaced by its default and the rest is still checked; the result is discarded with the file.

mod context;
mod fleet;
mod load;

use std::time::Duration;

use configuration::{ConfigFile, OneOrMany, Problem, section};
use regions::{RegionId, duration};

pub use self::context::{DeploymentLoader, ReadContext};
use self::fleet::FleetSection;
use self::load::{LOADS_MAX, LoadEntry};
use super::expectation::{Expectation, ExpectationKind, LatencyBound, ParsedExpectation, Span};
use super::{Action, Drill, DrillStep};

/// Longest drill, which an operator watches or waits for.
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// Default warm-up.
const WARM_UP: Duration = Duration::from_secs(2);

section! {
    /// Drill: a fleet under load, with actions and expectations.
    partial struct DrillFile {
        /// Sentence that states the purpose.
        description: String, like "\"one sentence that states the purpose\"";
        /// Duration of the run.
        duration: Duration, in Duration::from_secs(1)..=DURATION_MAX, like "\"30s\"";
        /// Time before the first measurement.
        warm_up: Duration = WARM_UP;
        /// Expectations from the end of the warm-up to the first step.
        before: Vec<String> = Vec::new();
        /// Expectations for the whole run.
        expect: Vec<String> = Vec::new();
        /// Fleet under test.
        fleet: FleetSection, like "{ regions = [\"aws/us-east-1\", \"gcp/europe-west4\"] }";
        /// Loads, one table each.
        load: Vec<LoadEntry>, in 1..=LOADS_MAX;
        /// Steps, one table each, in order of time.
        step: Vec<StepEntry> = Vec::new();
    }
}

section! {
    /// Actions at a time of the run, and expectations from then until the next step.
    partial struct StepEntry {
        /// Time since the start of the run.
        at: Duration, like "\"10s\"";
        /// Actions; required unless the step has expectations.
        actions ("do"): Option<OneOrMany<String>>;
        /// Expectations.
        expect: Vec<String> = Vec::new();
    }
}

/// Parses and validates a drill.
///
/// # Errors
///
/// All problems, in the order of the file.
pub fn read(text: &str, context: &ReadContext<'_>) -> Result<Drill, Vec<Problem>> {
    ConfigFile::read(text, |document| read_document(document, context))
}

/// Returns the reference of the keys of a drill file.
pub fn reference() -> String {
    configuration::reference::<DrillFile>("Drill files")
}

/// Reads and validates a drill.
pub fn read_document(document: &ConfigFile<'_>, context: &ReadContext<'_>) -> Option<Drill> {
    let file: DrillFile = document.section()?;
    let (fleet, deployments) = fleet::fleet(document, file.fleet, context);
    let loads = load::loads(document, file.load.unwrap_or_default(), &fleet, &deployments);
    let mut drill = Drill {
        description: file.description.unwrap_or_default(),
        duration: file.duration.unwrap_or(DURATION_MAX),
        warm_up: file.warm_up.unwrap_or(WARM_UP),
        fleet,
        loads,
        steps: Vec::new(),
        expectations: Vec::new(),
    };
    let mut reader = DrillReader { drill: &mut drill, context, document };
    let steps = reader.steps(file.step.unwrap_or_default());
    let [before, expect] = [file.before, file.expect].map(Option::unwrap_or_default);
    reader.expectations(&before, &expect, &steps);
    Some(drill)
}

impl Drill {
    /// Returns the span from the end of the warm-up to the first step.
    pub(super) fn before(&self) -> Span {
        let first = self.steps.first().map_or(self.duration, |step| step.at);
        Span { anchor: Duration::ZERO, from: self.warm_up.min(first), to: first }
    }
}

struct DrillReader<'r> {
    drill: &'r mut Drill,
    context: &'r ReadContext<'r>,
    document: &'r ConfigFile<'r>,
}

/// Step whose expectations are parsed once all steps are known.
struct StepContext {
    expect: Vec<String>,
    at: Duration,
    region: Option<RegionId>,
}

impl DrillReader<'_> {
    fn steps(&mut self, entries: Vec<StepEntry>) -> Vec<StepContext> {
        let mut contexts = Vec::new();
        let mut before: Option<Duration> = None;
        for (index, StepEntry { at, actions, expect }) in entries.into_iter().enumerate() {
            let path = format!("step[{index}]");
            if let Some(at) = at {
                if at >= self.drill.duration {
                    let duration = duration::write(self.drill.duration);
                    let message =
                        format!("is not before the end of the drill at {duration}; write an earlier time");
                    self.document.problem(&format!("{path}.at"), message);
                }
                if before.is_some_and(|before| before > at) {
                    let message = "is before the previous step; write steps in order of time";
                    self.document.problem(&format!("{path}.at"), message);
                }
                before = Some(at);
            }
            let actions = self.actions(&path, actions);
            let region = actions.iter().find_map(|(_, action)| action.region().cloned());
            let at = at.unwrap_or(self.drill.duration);
            self.drill.steps.push(DrillStep { at, actions });
            contexts.push(StepContext { expect: expect.unwrap_or_default(), at, region });
        }
        contexts
    }

    fn actions(&mut self, path: &str, given: Option<Option<OneOrMany<String>>>) -> Vec<(String, Action)> {
        // A step without an action only evaluates expectations.
        if matches!(given, Some(None)) && !self.document.has(&format!("{path}.expect")) {
            let example = "do = \"kill region gcp/europe-west4\"";
            self.document.problem(&format!("{path}.do"), format!("is missing; write {example}"));
        }
        let Some(Some(OneOrMany(texts))) = given else { return Vec::new() };
        let names: Vec<_> = self.drill.loads.iter().map(|load| load.name.as_str()).collect();
        let mut actions = Vec::new();
        for (index, text) in texts.into_iter().enumerate() {
            let path = format!("{path}.do[{index}]");
            match Action::read(&text, &self.drill.fleet, &names) {
                Ok(action) => {
                    if self.context.against && !action.is_possible_on_existing_deployment() {
                        let message = format!(
                            "`{text}` is not possible on an existing deployment; only surge, drain and undrain are"
                        );
                        self.document.problem(&path, message);
                    }
                    // Kept in any case, so that expectations of the step are parsed with it.
                    actions.push((text, action));
                }
                Err(problem) => self.document.problem(&path, problem),
            }
        }
        actions
    }

    fn expectations(&mut self, before: &[String], expect: &[String], steps: &[StepContext]) {
        let duration = self.drill.duration;
        let whole_run = Span { anchor: Duration::ZERO, from: Duration::ZERO, to: duration };
        self.listed("before", before, self.drill.before(), None, false);
        self.listed("expect", expect, whole_run, None, false);
        for (index, StepContext { expect, at, region }) in steps.iter().enumerate() {
            let until = steps.iter().map(|step| step.at).find(|next| next > at).unwrap_or(duration);
            let span = Span { anchor: *at, from: *at, to: until };
            self.listed(&format!("step[{index}].expect"), expect, span, region.as_ref(), true);
        }
    }

    fn listed(&mut self, path: &str, texts: &[String], span: Span, region: Option<&RegionId>, step: bool) {
        for (index, text) in texts.iter().enumerate() {
            match self.expectation(text, span, region, step) {
                Ok(expectation) => self.drill.expectations.push(expectation),
                Err(problem) => self.document.problem(&format!("{path}[{index}]"), problem),
            }
        }
    }

    fn expectation(
        &self,
        text: &str,
        span: Span,
        region: Option<&RegionId>,
        step: bool,
    ) -> Result<Expectation, String> {
        let drill = &*self.drill;
        let names: Vec<_> = drill.loads.iter().map(|load| load.name.as_str()).collect();
        let ParsedExpectation { kind, load, within } =
            ParsedExpectation::read(text, &drill.fleet, &names, region, self.context.catalogue)?;
        if within.is_some() && !step {
            return Err(format!("`{text}`: `within` refers to a step: move it under one"));
        }
        let span = Span { from: span.from + within.unwrap_or_default(), ..span };
        let expectation = Expectation { text: text.to_owned(), kind, load, span };
        self.measurable(&expectation, step)?;
        Ok(expectation)
    }

    /// Rejects expectations that cannot be measured in any run.
    fn measurable(&self, expectation: &Expectation, step: bool) -> Result<(), String> {
        let Expectation { text, kind, load, span } = expectation;
        let (from, to) = span.seconds();
        // Without loads there is nothing to measure; that problem is already reported.
        if self.drill.loads.is_empty() {
            return Ok(());
        }
        if from >= to {
            let (after, end) = (span.from.as_secs_f64(), span.to.as_secs_f64());
            return Err(format!(
                "`{text}` cannot be measured: no whole second is left between {after} s and {end} s, the next step or the end"
            ));
        }
        match kind {
            ExpectationKind::Latency { quantile, bound, .. } => {
                let mut spans = vec![(from, to)];
                if let LatencyBound::TimesBefore(_) = bound {
                    spans.push(self.drill.before().seconds());
                }
                for (from, to) in spans {
                    let requests = self.drill.requests(load.as_deref(), from, to);
                    if requests < quantile.requests_min as f64 {
                        return Err(format!(
                            "`{text}` cannot be measured: {requests:.0} requests from {} s to {} s, and {} needs {}; raise the rate or extend the span",
                            from.as_secs(),
                            to.as_secs(),
                            quantile.name,
                            quantile.requests_min
                        ));
                    }
                }
                Ok(())
            }
            ExpectationKind::FailuresOnly(_) if step || load.is_none() && self.drill.loads.len() > 1 => {
                Err(format!(
                    "`{text}` cannot be measured there: causes are recorded per load over the whole run; move it to the top level with `for NAME`"
                ))
            }
            ExpectationKind::GenerationRises if !step => {
                Err(format!("`{text}` cannot be measured there: it refers to a step; move it under one"))
            }
            ExpectationKind::GenerationNeverFalls
            | ExpectationKind::GenerationRises
            | ExpectationKind::HubsAgree
                if self.context.against =>
            {
                Err(format!(
                    "`{text}` cannot be measured: route tables of an existing deployment are not observed"
                ))
            }
            ExpectationKind::FailedAtMost(_)
            | ExpectationKind::FailuresOnly(_)
            | ExpectationKind::ServedInOnly(_)
            | ExpectationKind::ServedBy(_)
            | ExpectationKind::Evacuated(_)
            | ExpectationKind::GenerationNeverFalls
            | ExpectationKind::GenerationRises
            | ExpectationKind::HubsAgree => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
