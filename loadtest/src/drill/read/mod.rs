//! Parser of drill files. Reports all problems of a file at once, each with its line and the accepted syntax.
//!
//! The fleet and the loads are parsed first, because actions and expectations refer to them. An invalid one is left
//! out or replaced by its default and the rest is still checked; the result is discarded with the file.

mod fleet;
mod load;

use std::ops::RangeInclusive;
use std::time::Duration;

use regions::document::{self, Problems, Table};
use regions::{Catalogue, Deployment, Problem, RegionId, duration};
use toml::Spanned;
use toml::de::DeValue;

use super::expectation::{Expectation, ExpectationKind, LatencyBound, ParsedExpectation, Span};
use super::{Action, Drill, DrillStep};

/// Loads the deployments of the named file, or the default of `meridian up` for `None`; errors are messages.
pub type DeploymentLoader<'a> = dyn Fn(Option<&str>) -> Result<Vec<Deployment>, Vec<String>> + 'a;

/// Context that a drill file is checked against.
pub struct ReadContext<'a> {
    /// All known regions.
    pub catalogue: &'a Catalogue,
    /// Loader of deployment files.
    pub deployments: &'a DeploymentLoader<'a>,
    /// Whether the drill runs against an existing deployment.
    pub against: bool,
}

/// Longest drill, which an operator watches or waits for.
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// Default warm-up.
const WARM_UP: Duration = Duration::from_secs(2);
const TOP_KEYS: &[&str] =
    &["description", "duration", "warm_up", "before", "expect", "fleet", "load", "step"];
const STEP_KEYS: &[&str] = &["at", "do", "expect"];

/// Parses and validates a drill.
///
/// # Errors
///
/// All problems, in the order of the file.
pub fn read(text: &str, context: &ReadContext<'_>) -> Result<Drill, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let top = Table { what: "the drill".to_owned(), entries: tree.get_ref(), span: 0..0 };
    top.refuse_other_keys(TOP_KEYS, &mut problems);
    let description = top.need_text("description", "\"one sentence that states the purpose\"", &mut problems);
    let description = description.map(|(description, _)| description.to_owned()).unwrap_or_default();
    let duration = top.need("duration", "\"30s\"", &mut problems);
    let duration = duration.and_then(|value| {
        let duration = top.time("duration", value, &mut problems)?;
        let fits = (Duration::from_secs(1)..=DURATION_MAX).contains(&duration);
        if !fits {
            problems.note(value.span(), "`duration`: write a time from \"1s\" to \"1h\"");
        }
        fits.then_some(duration)
    });
    let warm_up = top.entries.get("warm_up").and_then(|value| top.time("warm_up", value, &mut problems));
    let (fleet, deployments) = fleet::fleet(&top, context, &mut problems);
    let loads = load::loads(&top, &fleet, &deployments, &mut problems);
    let mut drill = Drill {
        description,
        duration: duration.unwrap_or(DURATION_MAX),
        warm_up: warm_up.unwrap_or(WARM_UP),
        fleet,
        loads,
        steps: Vec::new(),
        expectations: Vec::new(),
    };
    let mut reader = DrillReader { drill: &mut drill, context, problems: &mut problems };
    let steps = reader.steps(&top);
    reader.expectations(&top, &steps);
    problems.or(|| drill)
}

impl Drill {
    /// Returns the span from the end of the warm-up to the first step.
    pub(super) fn before(&self) -> Span {
        let first = self.steps.first().map_or(self.duration, |step| step.at);
        Span { anchor: Duration::ZERO, from: self.warm_up.min(first), to: first }
    }
}

fn number_of(
    table: &Table<'_>,
    key: &str,
    value: &Spanned<DeValue<'_>>,
    range: RangeInclusive<u32>,
    problems: &mut Problems<'_>,
) -> Option<u32> {
    // Not `Table::number`: the lifetimes of table and value may belong to different trees.
    let written = match value.get_ref() {
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str().parse().ok(),
        _ => None,
    };
    let number = written.filter(|number| range.contains(number));
    if number.is_none() {
        let (least, most) = range.into_inner();
        problems.note(
            value.span(),
            format!("{}: `{key}`: write a whole number from {least} to {most}", table.what),
        );
    }
    number
}

fn tables<'d>(top: &Table<'d>, key: &str, problems: &mut Problems<'_>) -> Vec<Table<'d>> {
    let Some(value) = top.entries.get(key) else { return Vec::new() };
    let Some(list) = value.get_ref().as_array() else {
        problems.note(value.span(), format!("`{key}`: write tables headed [[{key}]]"));
        return Vec::new();
    };
    let each = list.iter().enumerate();
    each.filter_map(|(index, item)| Table::of(format!("{key} {}", index + 1), item, problems)).collect()
}

struct DrillReader<'r, 't> {
    drill: &'r mut Drill,
    context: &'r ReadContext<'r>,
    problems: &'r mut Problems<'t>,
}

/// Step whose expectations are parsed once all steps are known.
struct StepContext<'d> {
    table: Table<'d>,
    at: Duration,
    region: Option<RegionId>,
}

impl DrillReader<'_, '_> {
    fn steps<'d>(&mut self, top: &Table<'d>) -> Vec<StepContext<'d>> {
        let mut contexts = Vec::new();
        let mut before: Option<Duration> = None;
        for table in tables(top, "step", self.problems) {
            table.refuse_other_keys(STEP_KEYS, self.problems);
            let at = table.need("at", "\"10s\"", self.problems);
            let at = at.and_then(|value| Some((table.time("at", value, self.problems)?, value.span())));
            if let Some((at, span)) = &at {
                if *at >= self.drill.duration {
                    let duration = duration::write(self.drill.duration);
                    let message =
                        format!("{}: `at` is not before the end of the drill at {duration}", table.what);
                    self.problems.note(span.clone(), message);
                }
                if before.is_some_and(|before| before > *at) {
                    let message = format!(
                        "{}: `at` is before the previous step: write steps in order of time",
                        table.what
                    );
                    self.problems.note(span.clone(), message);
                }
                before = Some(*at);
            }
            let actions = self.actions(&table);
            let region = actions.iter().find_map(|(_, action)| action.region().cloned());
            let at = at.map_or(self.drill.duration, |(at, _)| at);
            self.drill.steps.push(DrillStep { at, actions });
            contexts.push(StepContext { table, at, region });
        }
        contexts
    }

    fn actions(&mut self, table: &Table<'_>) -> Vec<(String, Action)> {
        let value = match (table.entries.get("do"), table.entries.get("expect")) {
            // A step without an action only evaluates expectations.
            (None, Some(_)) => return Vec::new(),
            _ => table.need("do", "\"kill region gcp/europe-west4\"", self.problems),
        };
        let Some(value) = value else { return Vec::new() };
        let texts = match value.get_ref().as_array() {
            Some(_) => table.texts("do", value, self.problems).unwrap_or_default(),
            None => table.text("do", value, self.problems).into_iter().collect(),
        };
        let names: Vec<_> = self.drill.loads.iter().map(|load| load.name.as_str()).collect();
        let mut actions = Vec::new();
        for (text, at) in texts {
            match Action::read(text, &self.drill.fleet, &names) {
                Ok(action) => {
                    if self.context.against && !action.is_possible_on_existing_deployment() {
                        let message = format!(
                            "{}: `{text}` is not possible on an existing deployment; only surge, drain and undrain are",
                            table.what
                        );
                        self.problems.note(at, message);
                    }
                    // Kept in any case, so that expectations of the step are parsed with it.
                    actions.push((text.to_owned(), action));
                }
                Err(problem) => self.problems.note(at, format!("{}: {problem}", table.what)),
            }
        }
        actions
    }

    fn expectations(&mut self, top: &Table<'_>, steps: &[StepContext<'_>]) {
        let duration = self.drill.duration;
        let whole_run = Span { anchor: Duration::ZERO, from: Duration::ZERO, to: duration };
        let before = self.drill.before();
        self.listed(top, "before", before, None, false);
        self.listed(top, "expect", whole_run, None, false);
        for StepContext { table, at, region } in steps {
            let until = steps.iter().map(|step| step.at).find(|next| next > at).unwrap_or(duration);
            let span = Span { anchor: *at, from: *at, to: until };
            self.listed(table, "expect", span, region.as_ref(), true);
        }
    }

    fn listed(&mut self, table: &Table<'_>, key: &str, span: Span, region: Option<&RegionId>, step: bool) {
        let Some(value) = table.entries.get(key) else { return };
        for (text, at) in table.texts(key, value, self.problems).unwrap_or_default() {
            match self.expectation(text, span, region, step) {
                Ok(expectation) => self.drill.expectations.push(expectation),
                Err(problem) => self.problems.note(at, format!("{}: {problem}", table.what)),
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
