//! Properties of the batch planner that show only over time, in a simulated replica.
//!
//! Each property is checked for the planner and then for one that is broken on purpose, for which it must not hold: a
//! check that cannot fail is worthless. Seeds and parameters are in the messages.

use std::time::Duration;

use replica_api::priority::Priority;
use replica_core::batch::BatchSettings;
use replica_core::cost::BatchCost;

use crate::settings;
use crate::sim::{Arrivals, Defect, Report, SimulatedResult, Simulation, Source};

/// Approximately MiniLM on two cores: some 10 000 tokens a second, and 2 ms before the first.
const CPU: BatchCost = BatchCost { fixed: 2e-3, per_token: 1e-4 };
/// An engine with fixed cost only.
const ACCELERATOR: BatchCost = BatchCost { fixed: 5e-3, per_token: 1e-6 };
const SEEDS: std::ops::Range<u64> = 1..4;
const ENDLESS: u64 = 1 << 40;
/// Steps of a batch: six layers, each of which can be preempted twice.
const STEPS: u32 = 12;

fn machine() -> BatchSettings {
    BatchSettings { batch_tokens: 2048, interactive_batch_tokens: 512, ..settings() }
}

fn sim(engine: BatchCost, seed: u64) -> Simulation {
    Simulation::new(machine(), engine, ENDLESS).seed(seed)
}

fn interactive(per_second: f64) -> Source {
    Source::interactive(Arrivals::Open { per_second })
}

fn peers(callers: usize, return_time: f64) -> Source {
    Source::interactive(Arrivals::Closed { callers, return_time })
}

/// Returns the largest deficit of bulk in any two seconds, in tokens below its share, and its share over the whole run.
fn share(report: &Report, percent: u8, seconds: u32) -> (f64, f64) {
    let of = |priority: Priority, from: u32, to: u32| report.tokens(priority, from.into(), to.into()) as f64;
    let both = |from: u32, to: u32| of(Priority::Bulk, from, to) + of(Priority::Interactive, from, to);
    let missing =
        |from: u32| both(from, from + 2) * f64::from(percent) / 100.0 - of(Priority::Bulk, from, from + 2);
    let worst = (1..seconds - 2).map(missing).fold(0.0, f64::max);
    (worst, of(Priority::Bulk, 1, seconds) / both(1, seconds))
}

#[test]
fn bulk_gets_its_share_at_any_interactive_load() {
    for seed in SEEDS {
        // Hundreds of callers that never stop demand several times the capacity.
        let run = |percent: u8, steps: u32| {
            let settings = BatchSettings { bulk_share_percent: percent, ..machine() };
            let sim = Simulation::new(settings, CPU, ENDLESS).seed(seed).in_steps(steps);
            sim.with(peers(500, 0.01)).with(Source::backfill(4)).run(12.0)
        };
        // A preempted batch is charged to bulk when it starts, and computed later: half a batch more may be missing.
        for (percent, steps, most) in
            [10, 25, 50].into_iter().flat_map(|n| [(n, 1, 512.0), (n, STEPS, 768.0)])
        {
            let (missing, share) = share(&run(percent, steps), percent, 12);
            assert!(
                missing <= most,
                "seed {seed}, {percent} %, {steps} steps: {missing} tokens missing, and a batch has 512"
            );
            assert!(
                share <= f64::from(percent) * 1.1 / 100.0,
                "seed {seed}, {steps} steps: {share:.3}, more than the share of bulk"
            );
        }
        let (missing, _) = share(&run(1, 1), 10, 12);
        assert!(
            missing > 768.0,
            "seed {seed}: with hardly any share it starves, which this check must detect"
        );
    }
}

#[test]
fn an_interactive_request_waits_for_one_short_bulk_batch_and_the_backfill_keeps_its_throughput() {
    for seed in SEEDS {
        let idle = sim(CPU, seed).with(interactive(20.0)).run(60.0);
        let alone = sim(CPU, seed).with(Source::backfill(4)).run(60.0);
        let both = |defect| {
            let sim = sim(CPU, seed).defect(defect);
            sim.with(interactive(20.0)).with(Source::backfill(4)).run(60.0)
        };
        let bound = |report: &Report| {
            let bulk = report
                .computed
                .iter()
                .filter(|computed| computed.priority == Priority::Bulk && computed.started_at > 1.0);
            let batch = bulk.map(|computed| computed.duration * 1e3).fold(0.0, f64::max);
            (report.p99(0), 2.0 * idle.p99(0) + batch)
        };
        let report = both(Defect::No);
        let (p99, most) = bound(&report);
        assert!(p99 <= most, "seed {seed}: {p99:.1} ms, allowed are {most:.1}");
        let longest = report
            .computed
            .iter()
            .filter(|computed| computed.started_at > 1.0)
            .map(|computed| computed.tokens)
            .max();
        assert!(longest <= Some(512), "seed {seed}: the longest batch has {longest:?} tokens");
        let pace =
            report.tokens(Priority::Bulk, 1.0, 60.0) as f64 / alone.tokens(Priority::Bulk, 1.0, 60.0) as f64;
        assert!(pace >= 0.9, "seed {seed}: {pace:.3} of its throughput");

        let (p99, most) = bound(&both(Defect::OnePriority));
        assert!(p99 > most, "seed {seed}: with one priority the latency is higher: {p99:.1} and {most:.1}");
    }
}

#[test]
fn on_an_engine_with_preemption_interactive_requests_wait_for_one_step() {
    for seed in SEEDS {
        let idle = sim(CPU, seed).with(interactive(20.0)).run(60.0);
        let alone = sim(CPU, seed).with(Source::backfill(4)).run(60.0);
        let both = |steps| {
            sim(CPU, seed).in_steps(steps).with(interactive(20.0)).with(Source::backfill(4)).run(60.0)
        };
        let report = both(STEPS);
        let batch = CPU.time(512).as_secs_f64() * 1e3;
        let most = 2.0 * idle.p99(0) + batch / f64::from(STEPS);
        let p99 = report.p99(0);
        assert!(p99 <= most, "seed {seed}: {p99:.1} ms, allowed are {most:.1}");
        let pace =
            report.tokens(Priority::Bulk, 1.0, 60.0) as f64 / alone.tokens(Priority::Bulk, 1.0, 60.0) as f64;
        assert!(pace >= 0.9, "seed {seed}: {pace:.3} of its throughput");

        let p99 = both(1).p99(0);
        assert!(
            p99 > 2.0 * most,
            "seed {seed}: without preemption the whole batch is waited for: {p99:.1} and {most:.1}"
        );
    }
}

#[test]
fn a_backfill_without_interactive_requests_has_full_batches() {
    let report = sim(CPU, 1).with(Source::backfill(4)).run(10.0);
    let full = report.computed.iter().filter(|computed| computed.tokens > 2048 - 128).count();
    assert!(full * 10 >= report.computed.len() * 9, "{full} of {} batches are full", report.computed.len());
}

#[test]
fn deadlines_that_can_be_met_are_met() {
    for seed in SEEDS {
        // Some requests are urgent. Most are not, and there are always enough of them to fill most of a second.
        let run = |defect| {
            let hurried = Source { life: Some((0.11, 0.15)), ..interactive(20.0) };
            let patient = Source { tokens: (100, 128), life: Some((4.0, 8.0)), ..peers(60, 0.05) };
            let report = sim(CPU, seed).defect(defect).with(hurried).with(patient).run(60.0);
            let late = |source: usize, life: f64| {
                let late = |outcome: &&SimulatedResult| {
                    outcome.source == source
                        && outcome.done.is_none_or(|done| done - outcome.arrived_at > life)
                };
                report.outcomes.iter().filter(late).count()
            };
            (late(0, 0.15), late(1, 8.0), report.outcomes.len(), report.expired(0))
        };
        let (hurried, patient, all, _) = run(Defect::No);
        assert!(all > 4000, "seed {seed}: {all} requests");
        // Without preemption, a deadline just above the length of the running batch may be missed.
        assert!(
            hurried * 50 <= all && patient == 0,
            "seed {seed}: {hurried} and {patient} of {all} are late"
        );
        let (blind, ..) = run(Defect::NoDeadlines);
        assert!(
            blind > 3 * hurried,
            "seed {seed}: {blind} are late without deadlines in the planner, {hurried} with them"
        );
    }
}

#[test]
fn no_request_starves() {
    // The urgent requests demand more than the capacity, permanently; the other source has no deadlines.
    let hurried = Source { inputs: 4, life: Some((0.2, 0.3)), ..interactive(400.0) };
    let quiet = Source { arrivals: Arrivals::Closed { callers: 1, return_time: 0.1 }, ..interactive(1.0) };
    let report = sim(CPU, 3).with(hurried).with(quiet).run(60.0);
    let waits = report.latencies(1);
    assert!(report.expired(0) > 1000, "the engine is overloaded");
    let worst = waits.last().copied().unwrap_or(f64::INFINITY);
    assert!(waits.len() > 20 && worst < 1500.0, "{} responses, the slowest after {worst:.0} ms", waits.len());
}

#[test]
fn an_idle_server_never_waits() {
    for (engine, seed) in
        [CPU, ACCELERATOR].into_iter().flat_map(|engine| SEEDS.map(move |seed| (engine, seed)))
    {
        let run = |defect| sim(engine, seed).defect(defect).with(interactive(20.0)).run(60.0);
        let idle = run(Defect::No).idle_while_waiting;
        assert_eq!(idle, 0.0, "seed {seed}, {engine:?}: {idle} s");
        let timer = run(Defect::Timer(Duration::from_millis(2)));
        assert!(timer.idle_while_waiting > 1.0, "seed {seed}: a timer costs every request");
        assert!(
            timer.mean(0) > run(Defect::No).mean(0) + 1.5,
            "seed {seed}: the timer increases the mean latency"
        );
    }
    // One caller in a closed loop has no peers.
    let report = sim(CPU, 1).with(peers(1, 0.0005)).run(20.0);
    assert_eq!(report.idle_while_waiting, 0.0);
}

fn without_window() -> BatchSettings {
    BatchSettings { window_max: Duration::ZERO, ..machine() }
}

/// Returns the mean latencies of a source, with and without the batching delay.
fn with_and_without(engine: BatchCost, source: Source, seed: u64) -> (f64, f64) {
    let run = |settings| Simulation::new(settings, engine, ENDLESS).seed(seed).with(source).run(8.0).mean(0);
    (run(machine()), run(without_window()))
}

#[test]
fn the_delay_pays_where_peers_return_within_the_fixed_cost() {
    let mut table = String::new();
    for (callers, least) in [(2, 1.15), (4, 1.08), (8, 1.03), (16, 1.01)] {
        for seed in SEEDS {
            let (with, without) = with_and_without(CPU, peers(callers, 0.0005), seed);
            let gain = without / with;
            table += &format!("{callers} callers: {with:.2} ms with, {without:.2} without\n");
            assert!(gain >= least, "seed {seed}: {gain:.3} instead of {least}\n{table}");
        }
    }
    println!("{table}");
}

#[test]
fn the_batching_delay_is_zero_where_it_does_not_pay() {
    let mut worst: f64 = 0.0;
    let engines =
        [CPU, ACCELERATOR, BatchCost { fixed: 0.5e-3, per_token: 1e-4 }, BatchCost { fixed: 0.0, ..CPU }];
    for engine in engines {
        let capacity = 1.0 / engine.time(12).as_secs_f64();
        let streams = [0.05, 0.3, 0.6, 0.9, 1.5].map(|load| interactive(load * capacity));
        let loops = [(2, 0.0001), (3, 0.003), (8, 0.002), (8, 0.02), (32, 0.001), (64, 0.01)];
        let loops = loops.map(|(callers, return_time)| peers(callers, return_time));
        for source in streams.into_iter().chain(loops) {
            let (with, without) = with_and_without(engine, source, 1);
            worst = worst.max(with / without);
            println!("{:6.3} {with:8.3} {without:8.3} {engine:?} {:?}", with / without, source.arrivals);
        }
    }
    assert!(worst <= 1.03, "a mean latency that is {worst:.3} times the one without");
}

#[test]
fn queues_are_bounded_and_retry_after_is_the_time_until_there_is_capacity() {
    let limit = 20_000;
    let sim = Simulation::new(machine(), CPU, limit).seed(7);
    let flood = Source { inputs: 20, ..peers(200, 0.01) };
    let report = sim.with(flood).with(Source::backfill(8)).run(30.0);
    assert!(report.max_requested <= limit + 64 * 128, "{} tokens were queued", report.max_requested);
    let rejected = report.rejected.iter().filter(|(at, _)| *at > 1.0);
    let waits: Vec<f64> = rejected.filter_map(|(_, full)| Some(full.wait?.as_secs_f64())).collect();
    assert!(waits.len() > 100, "{} were rejected", waits.len());
    // A full queue is processed in two seconds; retry-after is not longer, and never zero.
    let (least, most) = waits.iter().fold((f64::MAX, 0.0f64), |(a, b), wait| (a.min(*wait), b.max(*wait)));
    assert!(least > 0.0 && most < 3.0, "from {least} s to {most} s");
}

#[test]
fn interactive_requests_are_not_shed_in_favour_of_bulk() {
    let limit = 20_000;
    // Bulk in small requests, so that it fills its part of the queue to the last token.
    let bulk = Source { inputs: 2, ..Source::backfill(400) };
    let run = |defect| {
        let sim = Simulation::new(machine(), CPU, limit).seed(7).defect(defect);
        let report = sim.with(interactive(100.0)).with(bulk).run(20.0);
        let shed = report.rejected.iter().filter(|(_, full)| full.priority == Priority::Interactive).count();
        (shed, report.rejected.len(), report.latencies(0).len())
    };
    let (shed, rejected, answered) = run(Defect::No);
    assert!(rejected > 1000, "bulk demands three times the capacity: {rejected}");
    assert_eq!(shed, 0, "no interactive request is shed");
    let (.., answered_in_one_priority) = run(Defect::OnePriority);
    assert!(
        answered_in_one_priority * 10 < answered * 9,
        "with one priority they are shed: {answered_in_one_priority} of {answered} served"
    );
}
