//! Tests of the search with formulas as machines, and noise from a seed.

use super::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const ALL: [Precision; 1] = [Precision::F32];

/// Machine: duration of a batch of a setting.
type Machine = fn(Setting) -> Duration;

fn micros(micros: f64) -> Duration {
    Duration::from_secs_f64(micros / 1e6)
}

/// A millisecond per batch, and 20 µs per token divided by the threads; beyond 4096 tokens caches overflow.
fn plain(setting: Setting) -> Duration {
    let tokens = setting.batch_tokens as f64;
    let beyond = (tokens - 4096.0).max(0.0);
    micros(1000.0 + (20.0 * tokens + 10.0 * beyond) / setting.threads.get() as f64)
}

/// Threads beyond four are hyperthreads, which cost more than they gain.
fn four_cores(setting: Setting) -> Duration {
    let threads = setting.threads.get().min(4) as f64 - 0.1 * setting.threads.get().saturating_sub(4) as f64;
    micros(1000.0 + 20.0 * setting.batch_tokens as f64 / threads)
}

fn count(threads: usize) -> NonZeroUsize {
    NonZeroUsize::new(threads).expect("a count")
}

fn task(threads: usize) -> SearchTask {
    let before = Setting { precision: Precision::F32, threads: count(threads), batch_tokens: 512 };
    SearchTask {
        precisions: ALL.to_vec(),
        max_threads: count(threads),
        before,
        time: Duration::from_secs(100),
        target_p99: None,
    }
}

/// Runs a search to its end; returns it with the elapsed time.
fn search(task: SearchTask, machine: Machine, disturbance: f64) -> (SearchPlan, Duration) {
    let mut random = SmallRng::seed_from_u64(11);
    let mut plan = SearchPlan::new(task);
    let mut elapsed = Duration::ZERO;
    while let Some(setting) = plan.next(elapsed) {
        // Other processes slow down the machine for whole runs.
        let slower = if random.random_bool(disturbance) { random.random_range(1.0..3.0) } else { 1.0 };
        let each = machine(setting).mul_f64(slower);
        let batches = (0.3 / each.as_secs_f64()).ceil().max(1.0) as usize;
        let run = MeasurementRun { tokens: setting.batch_tokens, batches: vec![each; batches] };
        elapsed += run.took();
        plan.record(setting, run);
    }
    (plan, elapsed)
}

fn best(plan: &SearchPlan) -> TunedChoice {
    plan.choices().into_iter().next().expect("a choice")
}

#[test]
fn the_smallest_budget_that_is_nearly_as_fast_is_chosen() {
    let (plan, _) = search(task(2), plain, 0.0);
    let TunedChoice { threads, batch, tokens_per_second, .. } = best(&plan);
    assert_eq!(threads, count(2));
    // With n tokens the fixed millisecond costs 100 / (n + 100) of the time: 2.4 % at 4096, which is the fastest, 4.7 %
    // at 2048, 8.9 % at 1024, 16.3 % at 512.
    assert_eq!(batch.batch_tokens, 2048);
    assert_eq!(batch.interactive_batch_tokens, 1024);
    assert!((tokens_per_second - 2048.0 / 0.02148).abs() < 1.0, "{tokens_per_second}");
    assert!(batch.window_max.abs_diff(Duration::from_millis(1)) < Duration::from_micros(10), "{batch:?}");
}

#[test]
fn a_shared_machine_is_rated_by_its_undisturbed_runs() {
    let quiet = best(&search(task(2), plain, 0.0).0);
    let shared = best(&search(task(2), plain, 0.3).0);
    let near = [quiet.batch.batch_tokens / 2, quiet.batch.batch_tokens, quiet.batch.batch_tokens * 2];
    assert!(near.contains(&shared.batch.batch_tokens), "{shared:?}");
    assert!(shared.tokens_per_second > 0.9 * quiet.tokens_per_second, "{shared:?}");
}

#[test]
fn threads_without_gain_are_not_used() {
    assert_eq!(best(&search(task(16), four_cores, 0.0).0).threads, count(4));
    assert_eq!(best(&search(task(1), plain, 0.0).0).threads, count(1));
    assert_eq!(
        best(&search(task(6), plain, 0.0).0).threads,
        count(6),
        "all cores, though not a power of two"
    );
}

#[test]
fn the_time_is_used_and_exceeded_by_at_most_one_run() {
    for seconds in [5, 20, 100] {
        let time = Duration::from_secs(seconds);
        let (plan, took) = search(SearchTask { time, ..task(2) }, plain, 0.2);
        assert!(took <= time + Duration::from_secs(2), "{took:?} of {time:?}");
        assert!(!plan.choices().is_empty(), "{seconds} s are enough for a choice");
    }
    // With no time there is no search, and at most one round of the comparison.
    let (_, took) = search(SearchTask { time: Duration::ZERO, ..task(2) }, plain, 0.0);
    assert!(took <= Duration::from_secs(2), "{took:?}");
}

/// int8 takes half the time, except for the fixed cost.
fn two_precisions(setting: Setting) -> Duration {
    if setting.precision == Precision::Int8 {
        micros(1000.0 + 10.0 * setting.batch_tokens as f64 / setting.threads.get() as f64)
    } else {
        plain(setting)
    }
}

#[test]
fn every_precision_is_measured_and_the_faster_one_is_recommended() {
    let precisions = vec![Precision::F32, Precision::Int8];
    let (plan, _) = search(SearchTask { precisions, ..task(2) }, two_precisions, 0.0);
    let choices = plan.choices();
    let found: Vec<(Precision, u64)> =
        choices.iter().map(|choice| (choice.precision, choice.batch.batch_tokens)).collect();
    // In int8 the fixed millisecond weighs twice: 200 / (n + 200) of the time, 1.2 % at 16384 and 4.7 % at 4096.
    assert_eq!(found, [(Precision::Int8, 8192), (Precision::F32, 2048)]);
}

#[test]
fn before_and_after_are_measured_in_alternation() {
    let (plan, _) = search(task(2), plain, 0.0);
    let (before, after) = only_gain(&plan);
    assert!((before - 512.0 / 0.00612).abs() < 1.0, "{before}");
    assert!(after > 1.1 * before, "{before} {after}");
    let rounds: Vec<usize> = plan.compared.values().map(Vec::len).collect();
    assert!(rounds.len() == 2 && rounds[0].abs_diff(rounds[1]) <= 1, "{rounds:?}");
}

#[test]
fn a_target_limits_the_batch_and_a_missed_target_is_reported() {
    let with = |millis| {
        let target_p99 = Some(Duration::from_millis(millis));
        best(&search(SearchTask { target_p99, ..task(2) }, plain, 0.0).0)
    };
    // Two batches of 1024 tokens take 22.5 ms, two of 512 take 12.2 ms.
    let met = with(15);
    assert_eq!((met.batch.batch_tokens, met.target_met), (512, Some(true)));
    let missed = with(1);
    assert_eq!((missed.batch.batch_tokens, missed.target_met), (64, Some(false)));
    assert_eq!(best(&search(task(2), plain, 0.0).0).target_met, None);
}

#[test]
fn budgets_are_not_tried_after_the_curve_is_flat() {
    let flat: Machine = |setting| micros(20.0 * setting.batch_tokens as f64);
    let (plan, _) = search(task(1), flat, 0.0);
    let largest = plan.points().iter().map(|point| point.setting.batch_tokens).max();
    assert!(largest < Some(4096), "{largest:?}");
    let slow: Machine = |setting| micros(20_000.0 * setting.batch_tokens as f64);
    let (plan, _) = search(task(1), slow, 0.0);
    let longest = plan.points().iter().map(|point| point.batch_p50).max();
    assert!(longest < Some(Duration::from_secs(11)), "longer than the untuned batch: {longest:?}");
}

/// Returns the tokens per second before and after of a search with one precision.
fn only_gain(plan: &SearchPlan) -> (f64, f64) {
    let [gain] = &plan.gains()[..] else { panic!("{:?}", plan.gains()) };
    (gain.tokens_per_second_before, gain.tokens_per_second_after)
}

#[test]
fn a_gain_never_compares_two_precisions() {
    let precisions = vec![Precision::F32, Precision::Int8];
    let (plan, _) = search(SearchTask { precisions, ..task(2) }, two_precisions, 0.0);
    let gains = plan.gains();
    assert_eq!(
        gains.iter().map(|gain| gain.after.precision).collect::<Vec<_>>(),
        [Precision::Int8, Precision::F32]
    );
    for Gain { before, after, tokens_per_second_before, tokens_per_second_after } in gains {
        assert_eq!(before, Setting { precision: after.precision, ..task(2).before });
        let speed = |setting: Setting| setting.batch_tokens as f64 / two_precisions(setting).as_secs_f64();
        assert!((tokens_per_second_before - speed(before)).abs() < 1.0, "{before:?}");
        assert!((tokens_per_second_after - speed(after)).abs() < 1.0, "{after:?}");
    }
}
