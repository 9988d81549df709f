//! Parser of drill files. Reports all problems of a file at once, each with its line and the accepted syntax.
//!
//! The environment and the loads are parsed first, because actions and expectations refer to them. An invalid one is left
//! out or replaced by its default and the rest is still checked; the result is discarded with the file.

mod load;
mod world;

use std::ops::RangeInclusive;
use std::time::Duration;

use regions::document::{self, Problems, Table};
use regions::{Catalogue, Deployment, Problem, RegionId, duration};
use toml::Spanned;
use toml::de::DeValue;

use super::expectation::{Bound, Expectation, Span, What, Written};
use super::{Action, Drill, Step};

/// Loads the deployments of the named file, or the default of `meridian up` for `None`; errors are messages.
pub type Deployments<'a> = dyn Fn(Option<&str>) -> Result<Vec<Deployment>, Vec<String>> + 'a;

/// Context that a drill file is checked against.
pub struct Surroundings<'a> {
    /// All known regions.
    pub catalogue: &'a Catalogue,
    /// Loader of deployment files.
    pub deployments: &'a Deployments<'a>,
    /// Whether the drill runs against an existing deployment.
    pub against: bool,
}

/// Longest drill, which an operator watches or waits for.
const LASTS_MAX: Duration = Duration::from_secs(3600);
/// Default warm-up.
const WARM_UP: Duration = Duration::from_secs(2);
const TOP_KEYS: &[&str] = &["about", "lasts", "warm_up", "before", "expect", "world", "load", "step"];
const STEP_KEYS: &[&str] = &["at", "do", "expect"];

/// Parses and validates a drill.
///
/// # Errors
///
/// All problems, in the order of the file.
pub fn read(text: &str, around: &Surroundings<'_>) -> Result<Drill, Vec<Problem>> {
    let (tree, mut problems) = document::parse(text)?;
    let top = Table { what: "the drill".to_owned(), entries: tree.get_ref(), span: 0..0 };
    top.refuse_other_keys(TOP_KEYS, &mut problems);
    let about = top.need_text("about", "\"a sentence that says what it shows\"", &mut problems);
    let about = about.map(|(about, _)| about.to_owned()).unwrap_or_default();
    let lasts = top.need("lasts", "\"30s\"", &mut problems);
    let lasts = lasts.and_then(|value| {
        let lasts = top.time("lasts", value, &mut problems)?;
        let fits = (Duration::from_secs(1)..=LASTS_MAX).contains(&lasts);
        if !fits {
            problems.note(value.span(), "`lasts`: write a time from \"1s\" to \"1h\"");
        }
        fits.then_some(lasts)
    });
    let warm_up = top.entries.get("warm_up").and_then(|value| top.time("warm_up", value, &mut problems));
    let (world, deployments) = world::world(&top, around, &mut problems);
    let loads = load::loads(&top, &world, &deployments, &mut problems);
    let mut drill = Drill {
        about,
        lasts: lasts.unwrap_or(LASTS_MAX),
        warm_up: warm_up.unwrap_or(WARM_UP),
        world,
        loads,
        steps: Vec::new(),
        expectations: Vec::new(),
    };
    let mut reading = Reading { drill: &mut drill, around, problems: &mut problems };
    let steps = reading.steps(&top);
    reading.expectations(&top, &steps);
    problems.or(|| drill)
}

impl Drill {
    /// Returns the span from the end of the warm-up to the first step.
    pub(super) fn before(&self) -> Span {
        let first = self.steps.first().map_or(self.lasts, |step| step.at);
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
    each.filter_map(|(place, item)| Table::of(format!("{key} {}", place + 1), item, problems)).collect()
}

struct Reading<'r, 't> {
    drill: &'r mut Drill,
    around: &'r Surroundings<'r>,
    problems: &'r mut Problems<'t>,
}

/// Step whose expectations are parsed once all steps are known.
struct Under<'d> {
    table: Table<'d>,
    at: Duration,
    region: Option<RegionId>,
}

impl Reading<'_, '_> {
    fn steps<'d>(&mut self, top: &Table<'d>) -> Vec<Under<'d>> {
        let mut found = Vec::new();
        let mut before: Option<Duration> = None;
        for table in tables(top, "step", self.problems) {
            table.refuse_other_keys(STEP_KEYS, self.problems);
            let at = table.need("at", "\"10s\"", self.problems);
            let at = at.and_then(|value| Some((table.time("at", value, self.problems)?, value.span())));
            if let Some((at, span)) = &at {
                if *at >= self.drill.lasts {
                    let lasts = duration::write(self.drill.lasts);
                    let message =
                        format!("{}: `at` is not before the end: the drill lasts {lasts}", table.what);
                    self.problems.note(span.clone(), message);
                }
                if before.is_some_and(|before| before > *at) {
                    let message = format!(
                        "{}: `at` is before that of the step above: write steps in order",
                        table.what
                    );
                    self.problems.note(span.clone(), message);
                }
                before = Some(*at);
            }
            let actions = self.actions(&table);
            let region = actions.iter().find_map(|(_, action)| action.region().cloned());
            let at = at.map_or(self.drill.lasts, |(at, _)| at);
            self.drill.steps.push(Step { at, actions });
            found.push(Under { table, at, region });
        }
        found
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
            match Action::read(text, &self.drill.world, &names) {
                Ok(action) => {
                    if self.around.against && !action.suits_any_deployment() {
                        let message = format!(
                            "{}: `{text}` cannot be done to a deployment that was there before; only surge, drain and undrain can",
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

    fn expectations(&mut self, top: &Table<'_>, steps: &[Under<'_>]) {
        let lasts = self.drill.lasts;
        let whole = Span { anchor: Duration::ZERO, from: Duration::ZERO, to: lasts };
        let before = self.drill.before();
        self.listed(top, "before", before, None, false);
        self.listed(top, "expect", whole, None, false);
        for Under { table, at, region } in steps {
            let until = steps.iter().map(|step| step.at).find(|next| next > at).unwrap_or(lasts);
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
        let Written { what, load, within } =
            Written::read(text, &drill.world, &names, region, self.around.catalogue)?;
        if within.is_some() && !step {
            return Err(format!("`{text}`: `within` counts from a step: write it under one"));
        }
        let span = Span { from: span.from + within.unwrap_or_default(), ..span };
        let expectation = Expectation { text: text.to_owned(), what, load, span };
        self.measurable(&expectation, step)?;
        Ok(expectation)
    }

    /// Rejects expectations that cannot be measured in any run.
    fn measurable(&self, expectation: &Expectation, step: bool) -> Result<(), String> {
        let Expectation { text, what, load, span } = expectation;
        let (from, to) = span.seconds();
        // Without loads there is nothing to measure; that problem is already reported.
        if self.drill.loads.is_empty() {
            return Ok(());
        }
        if from >= to {
            let (after, end) = (span.from.as_secs_f64(), span.to.as_secs_f64());
            return Err(format!(
                "`{text}` cannot be measured: from {after} s no whole second is left until {end} s, where the next step or the end is"
            ));
        }
        match what {
            What::Latency { quantile, bound, .. } => {
                let mut spans = vec![(from, to)];
                if let Bound::TimesBefore(_) = bound {
                    spans.push(self.drill.before().seconds());
                }
                for (from, to) in spans {
                    let requests = self.drill.requests(load.as_deref(), from, to);
                    if requests < quantile.requests_min as f64 {
                        return Err(format!(
                            "`{text}` cannot be measured: {requests:.0} requests from {} s to {} s, and {} needs {}; raise the rate, or give it longer",
                            from.as_secs(),
                            to.as_secs(),
                            quantile.name,
                            quantile.requests_min
                        ));
                    }
                }
                Ok(())
            }
            What::FailuresOnly(_) if step || load.is_none() && self.drill.loads.len() > 1 => Err(format!(
                "`{text}` cannot be measured there: causes are kept of each load over the whole run; write it at the top with `for NAME`"
            )),
            What::GenerationRises if !step => {
                Err(format!("`{text}` cannot be measured there: it counts from a step; write it under one"))
            }
            What::GenerationNeverFalls | What::GenerationRises | What::HubsAgree if self.around.against => {
                Err(format!(
                    "`{text}` cannot be measured: nobody looks at the tables of a deployment that was there before"
                ))
            }
            What::FailedAtMost(_)
            | What::FailuresOnly(_)
            | What::ServedInOnly(_)
            | What::ServedBy(_)
            | What::Evacuated(_)
            | What::GenerationNeverFalls
            | What::GenerationRises
            | What::HubsAgree => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
