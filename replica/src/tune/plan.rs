//! What to measure next, and what to make of what was measured. No clock, no engine: a machine is a function here.
//!
//! A *setting* is a precision, a number of threads and a token budget; a *turn* runs one of them for a moment. Three
//! things are found one after another, because they hardly depend on each other: threads, at a middling budget; then,
//! for each precision, the budgets upwards from the smallest until more of them brings nothing; and then, as long as
//! there is time, the same settings again and again in turn. A machine that others use is slow for seconds at a time, and
//! a setting is judged by the median of turns that lie far apart. The last part of the time goes to the comparison that
//! people want to see: what there was before and what was found, in alternation.
//!
//! What is chosen is not the fastest but the smallest budget that is nearly as fast: throughput is flat beyond some
//! budget, and whoever comes while a batch runs waits for its end.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use replica_core::Precision;
use replica_core::batch::BatchSettings;

use super::curve::{Point, Turn, fixed_cost};

/// The smallest budget that is tried: a few queries.
const TOKENS_LEAST: u64 = 64;
/// The largest: what the usual servers have as their default (`max_batch_tokens` of TEI).
const TOKENS_MOST: u64 = 16_384;
/// Threads are compared at the first of these budgets that does not take long: enough work for all of them.
const THREADS_AT: [u64; 3] = [1024, 256, TOKENS_LEAST];
/// That is, a batch takes at most this part of the time.
const LONG: f64 = 0.02;
/// Turns for each number of threads before budgets are looked at; odd, so that one disturbed turn does not decide.
const THREAD_TURNS: usize = 3;
/// Turns after which a setting is known well enough.
const TURNS_MOST: usize = 25;
/// A batch that takes longer makes whoever is behind it wait too long for any use.
const BATCH_TIME_MOST: Duration = Duration::from_secs(2);
/// A larger budget counts as faster when it brings this much.
const GAIN: f64 = 1.01;
/// How much of the best throughput a batch keeps that only bulk is in, to be short.
const NEARLY_ALL: f64 = 0.97;
/// And while there are lookups: a backfill keeps nine tenths of its speed beside them.
const WITH_LOOKUPS: f64 = 0.90;
/// The part of the time that is kept for the comparison of before and after.
const COMPARISON: f64 = 0.15;
/// One round is wanted even if it takes so much more time than there is.
const OVERRUN: Duration = Duration::from_secs(1);
/// Rounds of the comparison after which nothing is learnt any more.
const ROUNDS_MOST: usize = 15;
/// The fixed cost is looked for below the chosen budget, where caches do not bend the line, but among some budgets at least.
const FIXED_COST_UPTO: u64 = 1024;
/// A window beyond this is not worth writing down: the fixed cost was not measured but guessed from noise.
const WINDOW_MOST: Duration = Duration::from_millis(20);

/// What can be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setting {
    /// The number format.
    pub precision: Precision,
    /// Threads of the engine.
    pub threads: NonZeroUsize,
    /// Tokens of a batch.
    pub batch_tokens: u64,
}

/// What there is to try, and what is wanted.
#[derive(Clone, Debug)]
pub struct Task {
    /// At least one; the first is the one with which threads are compared.
    pub precisions: Vec<Precision>,
    /// Cores.
    pub threads_most: NonZeroUsize,
    /// What a replica does untuned.
    pub before: Setting,
    /// The time for everything.
    pub time: Duration,
    /// How long a lone request may wait beside a backfill, and be computed, in the slowest of a hundred cases.
    pub target_p99: Option<Duration>,
}

/// What was found for one precision.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The number format.
    pub precision: Precision,
    /// Threads of the engine.
    pub threads: NonZeroUsize,
    /// How batches are made.
    pub batch: BatchSettings,
    /// Tokens per second in batches of that many.
    pub tokens_per_second: f64,
    /// Whether the target is met; absent if there is none.
    pub target_met: Option<bool>,
}

/// What was measured so far.
pub struct Plan {
    task: Task,
    turns: BTreeMap<Setting, Vec<Turn>>,
    /// Rounds of before and after, once the search is over.
    comparison: Option<(Setting, Setting)>,
    compared: BTreeMap<Setting, Vec<Turn>>,
}

impl Plan {
    /// Nothing is measured yet.
    pub fn new(task: Task) -> Plan {
        assert!(!task.precisions.is_empty(), "something must be tried");
        Plan { task, turns: BTreeMap::new(), comparison: None, compared: BTreeMap::new() }
    }

    /// What to measure now that so much time has passed; `None` at the end.
    pub fn next(&mut self, elapsed: Duration) -> Option<Setting> {
        let left = self.task.time.saturating_sub(elapsed);
        let search_time = self.task.time.mul_f64(1.0 - COMPARISON);
        if self.comparison.is_none() {
            let found = self.next_of_search(search_time.saturating_sub(elapsed));
            if found.is_some() {
                return found;
            }
            let best = self.best()?;
            let after = Setting {
                precision: best.precision,
                threads: best.threads,
                batch_tokens: best.batch.batch_tokens,
            };
            self.comparison = Some((self.task.before, after));
        }
        let (before, after) = self.comparison?;
        let rounds = |setting: Setting| self.compared.get(&setting).map_or(0, Vec::len);
        let next = if rounds(after) < rounds(before) { after } else { before };
        let left = if rounds(next) == 0 { left + OVERRUN } else { left };
        // Nothing to compare, enough of it, or no time for one more.
        let over = before == after || rounds(next) >= ROUNDS_MOST || self.expected(next) > left;
        (!over).then_some(next)
    }

    /// A turn was measured.
    pub fn record(&mut self, setting: Setting, turn: Turn) {
        let of = if self.comparison.is_some() { &mut self.compared } else { &mut self.turns };
        of.entry(setting).or_default().push(turn);
    }

    /// The part of the time that the search has used, or the comparison goes on: for a bar.
    pub fn is_comparing(&self) -> bool {
        self.comparison.is_some()
    }

    /// Tokens per second before and after, from the rounds that they ran in alternation.
    pub fn comparison(&self) -> Option<(f64, f64)> {
        let (before, after) = self.comparison?;
        let measured = |setting| Some(Point::of(setting, self.compared.get(&setting)?)?.tokens_per_second);
        if before == after {
            let same = Point::of(before, self.turns.get(&before)?)?.tokens_per_second;
            return Some((same, same));
        }
        Some((measured(before)?, measured(after)?))
    }

    /// Every setting that was measured, in order.
    pub fn points(&self) -> Vec<Point> {
        self.turns.iter().filter_map(|(setting, turns)| Point::of(*setting, turns)).collect()
    }

    /// What was found for each precision, the fastest first.
    pub fn choices(&self) -> Vec<Choice> {
        let Some(threads) = self.threads() else { return Vec::new() };
        let mut choices: Vec<Choice> = self
            .task
            .precisions
            .iter()
            .filter_map(|precision| {
                choose(*precision, threads, &self.curve(*precision, threads), self.task.target_p99)
            })
            .collect();
        // A target that is met comes before speed.
        choices.sort_by(|a, b| {
            let missed = |choice: &Choice| choice.target_met == Some(false);
            missed(a).cmp(&missed(b)).then(b.tokens_per_second.total_cmp(&a.tokens_per_second))
        });
        choices
    }

    fn best(&self) -> Option<Choice> {
        self.choices().into_iter().next()
    }

    fn next_of_search(&self, left: Duration) -> Option<Setting> {
        self.next_for_threads()
            .or_else(|| self.next_budget())
            .or_else(|| {
                let known = |setting: &Setting| self.turns.get(setting).map_or(0, Vec::len);
                let threads = self.threads()?;
                let again = self.turns.keys().filter(|setting| setting.threads == threads);
                again
                    .copied()
                    .filter(|setting| known(setting) < TURNS_MOST)
                    .min_by_key(|setting| (known(setting), *setting))
            })
            .filter(|setting| self.expected(*setting) <= left)
    }

    fn next_for_threads(&self) -> Option<Setting> {
        let known = |setting: &Setting| self.turns.get(setting).map_or(0, Vec::len);
        let Some(ladder) = self.thread_ladder() else { return Some(self.probe()) };
        let fewest = ladder.into_iter().min_by_key(|setting| (known(setting), *setting))?;
        (known(&fewest) < THREAD_TURNS).then_some(fewest)
    }

    /// What is measured first of all: it says how fast this is at all.
    fn probe(&self) -> Setting {
        let Task { precisions, threads_most, .. } = &self.task;
        Setting { precision: precisions[0], threads: *threads_most, batch_tokens: TOKENS_LEAST }
    }

    /// 1, 2, 4 … and all cores, once the probe says with how much work.
    fn thread_ladder(&self) -> Option<Vec<Setting>> {
        let probe = Point::of(self.probe(), self.turns.get(&self.probe())?)?;
        let long = LONG * self.task.time.as_secs_f64();
        let short_enough = |tokens: &u64| *tokens as f64 <= long * probe.tokens_per_second;
        let batch_tokens = THREADS_AT.into_iter().find(short_enough).unwrap_or(TOKENS_LEAST);
        let most = self.task.threads_most.get();
        let powers = (0..usize::BITS).map(|n| 1 << n).take_while(|threads| *threads < most);
        let setting = |threads| Setting {
            threads: NonZeroUsize::new(threads).expect("from one upwards"),
            batch_tokens,
            ..self.probe()
        };
        Some(powers.chain([most]).map(setting).collect())
    }

    /// The fewest threads that are nearly as fast as any.
    fn threads(&self) -> Option<NonZeroUsize> {
        let ladder = self.thread_ladder()?.into_iter();
        let points: Vec<Point> =
            ladder.filter_map(|setting| Point::of(setting, self.turns.get(&setting)?)).collect();
        let best = fastest(&points)?;
        points
            .iter()
            .find(|point| point.tokens_per_second >= NEARLY_ALL * best)
            .map(|point| point.setting.threads)
    }

    /// The next budget that nobody has tried, of the first precision whose curve still climbs.
    fn next_budget(&self) -> Option<Setting> {
        let threads = self.threads()?;
        for precision in &self.task.precisions {
            let before = Setting { threads, precision: *precision, ..self.task.before };
            let ladder =
                budgets().map(|batch_tokens| Setting { precision: *precision, threads, batch_tokens });
            let mut climbed: Vec<Point> = Vec::new();
            for setting in ladder {
                match self.turns.get(&setting).and_then(|turns| Point::of(setting, turns)) {
                    Some(point) => climbed.push(point),
                    None if self.is_over(&climbed) => break,
                    None => return Some(setting),
                }
            }
            // The curve shows where one comes from too.
            if !self.turns.contains_key(&before) {
                return Some(before);
            }
        }
        None
    }

    /// Whether a still larger budget is of no use: batches are too long, or twice nothing was gained.
    fn is_over(&self, climbed: &[Point]) -> bool {
        let Some(last) = climbed.last() else { return false };
        let too_long = last.batch_p50 > BATCH_TIME_MOST
            || self.task.target_p99.is_some_and(|target| last.batch_p99 > target);
        let earlier = climbed.len().saturating_sub(2);
        let flat = match (fastest(&climbed[..earlier]), fastest(&climbed[earlier..])) {
            (Some(before), Some(now)) => climbed.len() > 4 && now < GAIN * before,
            _ => false,
        };
        too_long || flat
    }

    fn curve(&self, precision: Precision, threads: NonZeroUsize) -> Vec<Point> {
        let of_it = |point: &Point| point.setting.precision == precision && point.setting.threads == threads;
        self.points().into_iter().filter(of_it).collect()
    }

    /// How long the next turn of this will take: as long as the last one, or a batch at the speed of its like.
    fn expected(&self, setting: Setting) -> Duration {
        let last = |of: &BTreeMap<Setting, Vec<Turn>>| of.get(&setting)?.last().map(Turn::took);
        let by_its_like = || {
            let curve = self.curve(setting.precision, setting.threads);
            let speed = curve.last().map_or(f64::INFINITY, |point| point.tokens_per_second);
            Duration::try_from_secs_f64(setting.batch_tokens as f64 / speed).unwrap_or_default()
        };
        last(&self.compared).or_else(|| last(&self.turns)).unwrap_or_else(by_its_like)
    }
}

fn budgets() -> impl Iterator<Item = u64> {
    (0..).map(|n| TOKENS_LEAST << n).take_while(|tokens| *tokens <= TOKENS_MOST)
}

fn fastest(points: &[Point]) -> Option<f64> {
    points.iter().map(|point| point.tokens_per_second).max_by(f64::total_cmp)
}

/// Settings from a curve of one precision.
fn choose(
    precision: Precision,
    threads: NonZeroUsize,
    curve: &[Point],
    target: Option<Duration>,
) -> Option<Choice> {
    // Whoever comes just after a batch began waits for its end, and is computed in the next one.
    let meets = |point: &Point| target.is_none_or(|target| 2 * point.batch_p99 <= target);
    let mut permitted: Vec<Point> = curve.iter().filter(|point| meets(point)).cloned().collect();
    let target_met = target.map(|_| !permitted.is_empty());
    if permitted.is_empty() {
        // Nothing meets it; the smallest budget comes nearest.
        permitted.extend(curve.iter().min_by_key(|point| point.batch_p99).cloned());
    }
    let best = fastest(&permitted)?;
    let smallest = |share: f64| permitted.iter().find(|point| point.tokens_per_second >= share * best);
    let (batch, lookups) = (smallest(NEARLY_ALL)?, smallest(WITH_LOOKUPS)?);
    let default = BatchSettings::default();
    let largest = batch.setting.batch_tokens.max(FIXED_COST_UPTO);
    let within = |point: &&Point| point.setting.batch_tokens <= largest;
    let small: Vec<Point> = curve.iter().filter(within).cloned().collect();
    Some(Choice {
        precision,
        threads,
        batch: BatchSettings {
            batch_tokens: batch.setting.batch_tokens,
            interactive_batch_tokens: lookups.setting.batch_tokens,
            // How much of the machine a backfill gets beside lookups is a wish, and nothing that could be measured.
            bulk_share_percent: default.bulk_share_percent,
            // Waiting for company saves at most what a batch costs before its first token.
            window_max: fixed_cost(&small).map_or(default.window_max, |cost| cost.min(WINDOW_MOST)),
        },
        tokens_per_second: batch.tokens_per_second,
        target_met,
    })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
