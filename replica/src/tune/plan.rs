//! Search for the best settings: what to measure next, and which settings to choose. Pure: a machine is a function in
//! the tests.
//!
//! A *setting* is a precision, a number of threads and a token budget; a *run* measures one of them for a moment. The
//! parameters are searched one after another, because they hardly depend on each other: threads, at a medium budget;
//! then, for each precision, the budgets in ascending order until they bring no more gain; and then, as long as time
//! remains, the same settings again in rotation. A shared machine is slow for seconds at a time, so that a setting is
//! rated by the median of runs that are far apart. The last part of the time compares the settings before and after
//! tuning, in alternation: for each precision on its own, because a ratio of two precisions would show what the precision
//! gains, and not what tuning does.
//!
//! The chosen budget is not the fastest but the smallest that is nearly as fast: throughput is flat beyond some budget,
//! and a request that arrives during a batch waits for its end.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use replica_core::Precision;
use replica_core::batch::BatchSettings;

use super::curve::{MeasurementRun, Point, Setting, fixed_cost};

/// Smallest budget to try: a few queries.
const MIN_TOKENS: u64 = 64;
/// Largest budget to try: the default of common servers (`max_batch_tokens` of TEI).
const MAX_TOKENS: u64 = 16_384;
/// Threads are compared at the first of these budgets that does not take too long: enough work for all threads.
const THREADS_AT: [u64; 3] = [1024, 256, MIN_TOKENS];
/// Maximum duration of such a batch, as a share of the total time.
const LONG_BATCH_SHARE: f64 = 0.02;
/// Runs for each number of threads before budgets are tried; odd, so that one disturbed run does not decide.
const RUNS_PER_THREAD_COUNT: usize = 3;
/// Maximum runs of a setting.
const MAX_RUNS: usize = 25;
/// Maximum duration of a batch; longer ones make the next request wait too long.
const MAX_BATCH_TIME: Duration = Duration::from_secs(2);
/// Minimum gain for which a larger budget counts as faster.
const GAIN: f64 = 1.01;
/// Share of the best throughput that a batch keeps while only bulk requests wait.
pub(super) const NEARLY_ALL: f64 = 0.97;
/// The same while interactive requests wait: a bulk job keeps nine tenths of its speed.
const NEARLY_ALL_WITH_INTERACTIVE: f64 = 0.90;
/// Share of the time for the comparison of before and after.
const COMPARISON: f64 = 0.15;
/// Extra time allowed for the first round of the comparison.
const OVERRUN: Duration = Duration::from_secs(1);
/// Maximum rounds of the comparison.
const MAX_ROUNDS: usize = 15;
/// The fixed cost is fitted to budgets up to the chosen one, where the line is straight, or up to this one if it is
/// smaller.
const FIXED_COST_MAX_TOKENS: u64 = 1024;
/// Maximum batching delay; a larger fixed cost is noise.
const MAX_WINDOW: Duration = Duration::from_millis(20);

/// Input of a search.
#[derive(Clone, Debug)]
pub struct SearchTask {
    /// Precisions; at least one. Threads are compared with the first.
    pub precisions: Vec<Precision>,
    /// Maximum threads: the number of cores.
    pub max_threads: NonZeroUsize,
    /// Settings of an untuned replica; those of another precision differ in the precision alone.
    pub before: Setting,
    /// Time limit.
    pub time: Duration,
    /// Target for the 99th percentile of the latency of a lone request during a bulk job: waiting plus computing.
    pub target_p99: Option<Duration>,
}

/// Chosen settings of one precision.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedChoice {
    /// Number format.
    pub precision: Precision,
    /// Engine threads.
    pub threads: NonZeroUsize,
    /// Batch settings.
    pub batch: BatchSettings,
    /// Tokens per second in batches of that size.
    pub tokens_per_second: f64,
    /// Whether the target is met; absent if there is none.
    pub target_met: Option<bool>,
}

/// Throughput of one precision before and after tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct Gain {
    /// Settings of an untuned replica with this precision.
    pub before: Setting,
    /// Chosen settings.
    pub after: Setting,
    /// Tokens per second before, measured in alternation with those after.
    pub tokens_per_second_before: f64,
    /// Tokens per second after.
    pub tokens_per_second_after: f64,
}

/// State of a search.
pub struct SearchPlan {
    task: SearchTask,
    runs: BTreeMap<Setting, Vec<MeasurementRun>>,
    /// Settings before and after for each precision, once the search is complete.
    comparison: Option<Vec<(Setting, Setting)>>,
    compared: BTreeMap<Setting, Vec<MeasurementRun>>,
}

impl SearchPlan {
    /// Starts a search.
    pub fn new(task: SearchTask) -> SearchPlan {
        assert!(!task.precisions.is_empty(), "something must be tried");
        SearchPlan { task, runs: BTreeMap::new(), comparison: None, compared: BTreeMap::new() }
    }

    /// Returns the next setting to measure after `elapsed`; `None` at the end.
    pub fn next(&mut self, elapsed: Duration) -> Option<Setting> {
        let left = self.task.time.saturating_sub(elapsed);
        let search_time = self.task.time.mul_f64(1.0 - COMPARISON);
        if self.comparison.is_none() {
            let found = self.next_of_search(search_time.saturating_sub(elapsed));
            if found.is_some() {
                return found;
            }
            let after = |choice: TunedChoice| Setting {
                precision: choice.precision,
                threads: choice.threads,
                batch_tokens: choice.batch.batch_tokens,
            };
            let pair = |choice: TunedChoice| (self.before(choice.precision), after(choice));
            self.comparison = Some(self.choices().into_iter().map(pair).collect());
        }
        let rounds = |setting: &Setting| self.compared.get(setting).map_or(0, Vec::len);
        // Where nothing was changed, there is no difference to measure.
        let changed = self.comparison.iter().flatten().filter(|(before, after)| before != after);
        let next = changed.flat_map(|(before, after)| [*before, *after]).min_by_key(rounds)?;
        let left = if rounds(&next) == 0 { left + OVERRUN } else { left };
        // Enough rounds, or no time for another one.
        let over = rounds(&next) >= MAX_ROUNDS || self.expected(next) > left;
        (!over).then_some(next)
    }

    /// Returns the settings of an untuned replica with this precision.
    fn before(&self, precision: Precision) -> Setting {
        Setting { precision, ..self.task.before }
    }

    /// Records a run.
    pub fn record(&mut self, setting: Setting, run: MeasurementRun) {
        let of = if self.comparison.is_some() { &mut self.compared } else { &mut self.runs };
        of.entry(setting).or_default().push(run);
    }

    /// Returns whether the search is complete and the comparison is running.
    pub fn is_comparing(&self) -> bool {
        self.comparison.is_some()
    }

    /// Returns the gain of each precision that was measured before and after, the recommended one first.
    pub fn gains(&self) -> Vec<Gain> {
        let speed = |of: &BTreeMap<Setting, Vec<MeasurementRun>>, setting: Setting| {
            Some(Point::of(setting, of.get(&setting)?)?.tokens_per_second)
        };
        let gain = |(before, after): &(Setting, Setting)| {
            let of = if before == after { &self.runs } else { &self.compared };
            Some(Gain {
                before: *before,
                after: *after,
                tokens_per_second_before: speed(of, *before)?,
                tokens_per_second_after: speed(of, *after)?,
            })
        };
        self.comparison.iter().flatten().filter_map(gain).collect()
    }

    /// Returns the statistics of all measured settings, in order.
    pub fn points(&self) -> Vec<Point> {
        self.runs.iter().filter_map(|(setting, runs)| Point::of(*setting, runs)).collect()
    }

    /// Returns the chosen settings of each precision, the fastest first.
    pub fn choices(&self) -> Vec<TunedChoice> {
        let Some(threads) = self.threads() else { return Vec::new() };
        let mut choices: Vec<TunedChoice> = self
            .task
            .precisions
            .iter()
            .filter_map(|precision| {
                choose(*precision, threads, &self.curve(*precision, threads), self.task.target_p99)
            })
            .collect();
        // A met target takes precedence over speed.
        choices.sort_by(|a, b| {
            let missed = |choice: &TunedChoice| choice.target_met == Some(false);
            missed(a).cmp(&missed(b)).then(b.tokens_per_second.total_cmp(&a.tokens_per_second))
        });
        choices
    }

    fn next_of_search(&self, left: Duration) -> Option<Setting> {
        self.next_for_threads()
            .or_else(|| self.next_budget())
            .or_else(|| {
                let known = |setting: &Setting| self.runs.get(setting).map_or(0, Vec::len);
                let threads = self.threads()?;
                let again = self.runs.keys().filter(|setting| setting.threads == threads);
                again
                    .copied()
                    .filter(|setting| known(setting) < MAX_RUNS)
                    .min_by_key(|setting| (known(setting), *setting))
            })
            .filter(|setting| self.expected(*setting) <= left)
    }

    fn next_for_threads(&self) -> Option<Setting> {
        let known = |setting: &Setting| self.runs.get(setting).map_or(0, Vec::len);
        let Some(ladder) = self.thread_ladder() else { return Some(self.probe()) };
        let fewest = ladder.into_iter().min_by_key(|setting| (known(setting), *setting))?;
        (known(&fewest) < RUNS_PER_THREAD_COUNT).then_some(fewest)
    }

    /// Returns the first setting to measure, which shows the magnitude of the speed.
    fn probe(&self) -> Setting {
        let SearchTask { precisions, max_threads, .. } = &self.task;
        Setting { precision: precisions[0], threads: *max_threads, batch_tokens: MIN_TOKENS }
    }

    /// Returns 1, 2, 4 … and all cores, at a budget that depends on the probe.
    fn thread_ladder(&self) -> Option<Vec<Setting>> {
        let probe = Point::of(self.probe(), self.runs.get(&self.probe())?)?;
        let long = LONG_BATCH_SHARE * self.task.time.as_secs_f64();
        let short_enough = |tokens: &u64| *tokens as f64 <= long * probe.tokens_per_second;
        let batch_tokens = THREADS_AT.into_iter().find(short_enough).unwrap_or(MIN_TOKENS);
        let most = self.task.max_threads.get();
        let powers = (0..usize::BITS).map(|n| 1 << n).take_while(|threads| *threads < most);
        let setting = |threads| Setting {
            threads: NonZeroUsize::new(threads).expect("from one upwards"),
            batch_tokens,
            ..self.probe()
        };
        Some(powers.chain([most]).map(setting).collect())
    }

    /// Returns the smallest number of threads that is nearly as fast as the best.
    fn threads(&self) -> Option<NonZeroUsize> {
        let ladder = self.thread_ladder()?.into_iter();
        let points: Vec<Point> =
            ladder.filter_map(|setting| Point::of(setting, self.runs.get(&setting)?)).collect();
        let best = fastest(&points)?;
        points
            .iter()
            .find(|point| point.tokens_per_second >= NEARLY_ALL * best)
            .map(|point| point.setting.threads)
    }

    /// Returns the next untried budget of the first precision whose curve still rises.
    fn next_budget(&self) -> Option<Setting> {
        let threads = self.threads()?;
        for precision in &self.task.precisions {
            let before = Setting { threads, ..self.before(*precision) };
            let ladder =
                budgets().map(|batch_tokens| Setting { precision: *precision, threads, batch_tokens });
            let mut measured: Vec<Point> = Vec::new();
            for setting in ladder {
                match self.runs.get(&setting).and_then(|runs| Point::of(setting, runs)) {
                    Some(point) => measured.push(point),
                    None if self.is_over(&measured) => break,
                    None => return Some(setting),
                }
            }
            // The untuned setting is part of the curve as well.
            if !self.runs.contains_key(&before) {
                return Some(before);
            }
        }
        None
    }

    /// Returns whether a larger budget is useless: batches are too long, or there was no gain twice.
    fn is_over(&self, measured: &[Point]) -> bool {
        let Some(last) = measured.last() else { return false };
        let too_long = last.batch_p50 > MAX_BATCH_TIME
            || self.task.target_p99.is_some_and(|target| last.batch_p99 > target);
        let earlier = measured.len().saturating_sub(2);
        let flat = match (fastest(&measured[..earlier]), fastest(&measured[earlier..])) {
            (Some(before), Some(now)) => measured.len() > 4 && now < GAIN * before,
            _ => false,
        };
        too_long || flat
    }

    fn curve(&self, precision: Precision, threads: NonZeroUsize) -> Vec<Point> {
        let of_it = |point: &Point| point.setting.precision == precision && point.setting.threads == threads;
        self.points().into_iter().filter(of_it).collect()
    }

    /// Returns the expected duration of the next run: that of the last one, or of a batch at the speed of similar
    /// settings.
    fn expected(&self, setting: Setting) -> Duration {
        let last =
            |of: &BTreeMap<Setting, Vec<MeasurementRun>>| of.get(&setting)?.last().map(MeasurementRun::took);
        let by_similar = || {
            let curve = self.curve(setting.precision, setting.threads);
            let speed = curve.last().map_or(f64::INFINITY, |point| point.tokens_per_second);
            Duration::try_from_secs_f64(setting.batch_tokens as f64 / speed).unwrap_or_default()
        };
        last(&self.compared).or_else(|| last(&self.runs)).unwrap_or_else(by_similar)
    }
}

fn budgets() -> impl Iterator<Item = u64> {
    (0..).map(|n| MIN_TOKENS << n).take_while(|tokens| *tokens <= MAX_TOKENS)
}

fn fastest(points: &[Point]) -> Option<f64> {
    points.iter().map(|point| point.tokens_per_second).max_by(f64::total_cmp)
}

/// Chooses settings from the curve of one precision.
fn choose(
    precision: Precision,
    threads: NonZeroUsize,
    curve: &[Point],
    target: Option<Duration>,
) -> Option<TunedChoice> {
    // A request that arrives just after a batch began waits for its end, and is computed in the next one.
    let meets_target = |point: &Point| target.is_none_or(|target| 2 * point.batch_p99 <= target);
    let mut permitted: Vec<Point> = curve.iter().filter(|point| meets_target(point)).cloned().collect();
    let target_met = target.map(|_| !permitted.is_empty());
    if permitted.is_empty() {
        // No setting meets the target; the smallest budget comes closest.
        permitted.extend(curve.iter().min_by_key(|point| point.batch_p99).cloned());
    }
    let best = fastest(&permitted)?;
    let smallest = |share: f64| permitted.iter().find(|point| point.tokens_per_second >= share * best);
    let (batch, interactive) = (smallest(NEARLY_ALL)?, smallest(NEARLY_ALL_WITH_INTERACTIVE)?);
    let default = BatchSettings::default();
    let largest = batch.setting.batch_tokens.max(FIXED_COST_MAX_TOKENS);
    let within = |point: &&Point| point.setting.batch_tokens <= largest;
    let small: Vec<Point> = curve.iter().filter(within).cloned().collect();
    Some(TunedChoice {
        precision,
        threads,
        batch: BatchSettings {
            batch_tokens: batch.setting.batch_tokens,
            interactive_batch_tokens: interactive.setting.batch_tokens,
            // The share of bulk requests beside interactive ones is a preference that cannot be measured.
            bulk_share_percent: default.bulk_share_percent,
            // Waiting for more inputs saves at most the fixed cost of a batch.
            window_max: fixed_cost(&small).map_or(default.window_max, |cost| cost.min(MAX_WINDOW)),
        },
        tokens_per_second: batch.tokens_per_second,
        target_met,
    })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
