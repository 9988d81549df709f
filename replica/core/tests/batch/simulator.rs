//! The properties of the batch manager that show only over time, in a simulated replica.
//!
//! Each is checked of the planner and then of one that is broken on purpose, of which it must not hold: a check that
//! cannot fail says nothing. Seeds and parameters are in the messages.

use std::time::Duration;

use replica_core::batch::BatchSettings;
use replica_core::cost::BatchCost;
use replica_core::priority::Priority;

use crate::settings;
use crate::sim::{Broken, Coming, Outcome, Report, Sim, Source};

/// MiniLM on two cores, nearly: some 10 000 tokens a second, and 2 ms before the first.
const CPU: BatchCost = BatchCost { fixed: 2e-3, per_token: 1e-4 };
/// Where the fixed cost is everything.
const ACCELERATOR: BatchCost = BatchCost { fixed: 5e-3, per_token: 1e-6 };
const SEEDS: std::ops::Range<u64> = 1..4;
const ENDLESS: u64 = 1 << 40;
/// Of a batch through six layers, each of which is interrupted twice.
const STEPS: u32 = 12;

fn machine() -> BatchSettings {
    BatchSettings { batch_tokens: 2048, interactive_batch_tokens: 512, ..settings() }
}

fn sim(engine: BatchCost, seed: u64) -> Sim {
    Sim::new(machine(), engine, ENDLESS).seed(seed)
}

fn lookups(per_second: f64) -> Source {
    Source::lookups(Coming::Open { per_second })
}

fn peers(callers: usize, return_time: f64) -> Source {
    Source::lookups(Coming::Closed { callers, return_time })
}

/// By how many tokens bulk had less than its part in any two seconds in a row, and its part of all.
fn share(report: &Report, percent: u8, seconds: u32) -> (f64, f64) {
    let of = |priority: Priority, from: u32, to: u32| report.tokens(priority, from.into(), to.into()) as f64;
    let both = |from: u32, to: u32| of(Priority::Bulk, from, to) + of(Priority::Interactive, from, to);
    let missing =
        |from: u32| both(from, from + 2) * f64::from(percent) / 100.0 - of(Priority::Bulk, from, from + 2);
    let worst = (1..seconds - 2).map(missing).fold(0.0, f64::max);
    (worst, of(Priority::Bulk, 1, seconds) / both(1, seconds))
}

#[test]
fn bulk_has_its_share_however_many_lookups_come() {
    for seed in SEEDS {
        // Hundreds of callers who never stop want several times what there is.
        let run = |percent: u8, steps: u32| {
            let settings = BatchSettings { bulk_share_percent: percent, ..machine() };
            let sim = Sim::new(settings, CPU, ENDLESS).seed(seed).in_steps(steps);
            sim.with(peers(500, 0.01)).with(Source::backfill(4)).run(12.0)
        };
        // What is interrupted is charged to bulk when it begins, and computed later: half a batch more may be missing.
        for (percent, steps, most) in
            [10, 25, 50].into_iter().flat_map(|n| [(n, 1, 512.0), (n, STEPS, 768.0)])
        {
            let (missing, share) = share(&run(percent, steps), percent, 12);
            assert!(
                missing <= most,
                "seed {seed}, {percent} %, {steps} steps: {missing} tokens less, and a batch has 512"
            );
            assert!(
                share <= f64::from(percent) * 1.1 / 100.0,
                "seed {seed}, {steps} steps: {share:.3}, and lookups wait for it"
            );
        }
        let (missing, _) = share(&run(1, 1), 10, 12);
        assert!(missing > 768.0, "seed {seed}: with hardly any share it starves, and this would notice");
    }
}

#[test]
fn a_lookup_beside_a_backfill_waits_for_one_short_batch_and_the_backfill_keeps_its_pace() {
    for seed in SEEDS {
        let idle = sim(CPU, seed).with(lookups(20.0)).run(60.0);
        let alone = sim(CPU, seed).with(Source::backfill(4)).run(60.0);
        let both = |broken| {
            let sim = sim(CPU, seed).broken(broken);
            sim.with(lookups(20.0)).with(Source::backfill(4)).run(60.0)
        };
        let bound = |report: &Report| {
            let bulk = report.ran.iter().filter(|ran| ran.priority == Priority::Bulk && ran.began > 1.0);
            let batch = bulk.map(|ran| ran.took * 1e3).fold(0.0, f64::max);
            (report.p99(0), 2.0 * idle.p99(0) + batch)
        };
        let report = both(Broken::No);
        let (p99, most) = bound(&report);
        assert!(p99 <= most, "seed {seed}: {p99:.1} ms and {most:.1} are allowed");
        let longest = report.ran.iter().filter(|ran| ran.began > 1.0).map(|ran| ran.tokens).max();
        assert!(longest <= Some(512), "seed {seed}: and one batch is short: {longest:?} tokens");
        let pace =
            report.tokens(Priority::Bulk, 1.0, 60.0) as f64 / alone.tokens(Priority::Bulk, 1.0, 60.0) as f64;
        assert!(pace >= 0.9, "seed {seed}: {pace:.3} of its pace");

        let (p99, most) = bound(&both(Broken::OnePriority));
        assert!(p99 > most, "seed {seed}: in one priority a lookup waits for more: {p99:.1} and {most:.1}");
    }
}

#[test]
fn where_an_engine_lets_lookups_in_they_wait_for_one_of_its_steps() {
    for seed in SEEDS {
        let idle = sim(CPU, seed).with(lookups(20.0)).run(60.0);
        let alone = sim(CPU, seed).with(Source::backfill(4)).run(60.0);
        let both =
            |steps| sim(CPU, seed).in_steps(steps).with(lookups(20.0)).with(Source::backfill(4)).run(60.0);
        let report = both(STEPS);
        let batch = CPU.time(512).as_secs_f64() * 1e3;
        let most = 2.0 * idle.p99(0) + batch / f64::from(STEPS);
        let p99 = report.p99(0);
        assert!(p99 <= most, "seed {seed}: {p99:.1} ms and {most:.1} are allowed");
        let pace =
            report.tokens(Priority::Bulk, 1.0, 60.0) as f64 / alone.tokens(Priority::Bulk, 1.0, 60.0) as f64;
        assert!(pace >= 0.9, "seed {seed}: {pace:.3} of its pace");

        let p99 = both(1).p99(0);
        assert!(p99 > 2.0 * most, "seed {seed}: in one piece a batch is waited for: {p99:.1} and {most:.1}");
    }
}

#[test]
fn a_backfill_without_lookups_has_full_batches() {
    let report = sim(CPU, 1).with(Source::backfill(4)).run(10.0);
    let full = report.ran.iter().filter(|ran| ran.tokens > 2048 - 128).count();
    assert!(full * 10 >= report.ran.len() * 9, "{full} of {} batches are full", report.ran.len());
}

#[test]
fn deadlines_that_can_be_met_are_met() {
    for seed in SEEDS {
        // Some are in a hurry. Most are not, and there are always enough of them to fill most of a second.
        let run = |broken| {
            let hurried = Source { life: Some((0.11, 0.15)), ..lookups(20.0) };
            let patient = Source { tokens: (100, 128), life: Some((4.0, 8.0)), ..peers(60, 0.05) };
            let report = sim(CPU, seed).broken(broken).with(hurried).with(patient).run(60.0);
            let late = |source: usize, life: f64| {
                let late = |outcome: &&Outcome| {
                    outcome.source == source && outcome.done.is_none_or(|done| done - outcome.came > life)
                };
                report.outcomes.iter().filter(late).count()
            };
            (late(0, 0.15), late(1, 8.0), report.outcomes.len(), report.expired(0))
        };
        let (hurried, patient, all, _) = run(Broken::No);
        assert!(all > 4000, "seed {seed}: {all} requests");
        // A batch that is running cannot be interrupted, so a deadline just above its length may be missed.
        assert!(
            hurried * 50 <= all && patient == 0,
            "seed {seed}: {hurried} and {patient} of {all} are late"
        );
        let (blind, ..) = run(Broken::NoDeadlines);
        assert!(
            blind > 3 * hurried,
            "seed {seed}: {blind} are late if nobody tells, {hurried} if everybody does"
        );
    }
}

#[test]
fn nobody_is_overtaken_for_ever() {
    // Those in a hurry want more than there is, for ever; one request in between says nothing of a deadline.
    let hurried = Source { inputs: 4, life: Some((0.2, 0.3)), ..lookups(400.0) };
    let quiet = Source { coming: Coming::Closed { callers: 1, return_time: 0.1 }, ..lookups(1.0) };
    let report = sim(CPU, 3).with(hurried).with(quiet).run(60.0);
    let waits = report.latencies(1);
    assert!(report.expired(0) > 1000, "there is too much to do");
    let worst = waits.last().copied().unwrap_or(f64::INFINITY);
    assert!(waits.len() > 20 && worst < 1500.0, "{} answers, the worst after {worst:.0} ms", waits.len());
}

#[test]
fn an_idle_server_never_waits() {
    for (engine, seed) in
        [CPU, ACCELERATOR].into_iter().flat_map(|engine| SEEDS.map(move |seed| (engine, seed)))
    {
        let run = |broken| sim(engine, seed).broken(broken).with(lookups(20.0)).run(60.0);
        let idle = run(Broken::No).idle_while_waiting;
        assert_eq!(idle, 0.0, "seed {seed}, {engine:?}: {idle} s");
        let timer = run(Broken::Timer(Duration::from_millis(2)));
        assert!(timer.idle_while_waiting > 1.0, "seed {seed}: a timer costs every request");
        assert!(timer.mean(0) > run(Broken::No).mean(0) + 1.5, "seed {seed}: and is felt");
    }
    // One caller in a loop has no peers to wait for.
    let report = sim(CPU, 1).with(peers(1, 0.0005)).run(20.0);
    assert_eq!(report.idle_while_waiting, 0.0);
}

fn without_window() -> BatchSettings {
    BatchSettings { window_max: Duration::ZERO, ..machine() }
}

/// Mean latencies of a source, with the window and without.
fn with_and_without(engine: BatchCost, source: Source, seed: u64) -> (f64, f64) {
    let run = |settings| Sim::new(settings, engine, ENDLESS).seed(seed).with(source).run(8.0).mean(0);
    (run(machine()), run(without_window()))
}

#[test]
fn waiting_for_peers_pays_where_they_are_back_within_the_fixed_cost() {
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
fn the_window_never_costs_where_it_does_not_pay() {
    let mut worst: f64 = 0.0;
    let engines =
        [CPU, ACCELERATOR, BatchCost { fixed: 0.5e-3, per_token: 1e-4 }, BatchCost { fixed: 0.0, ..CPU }];
    for engine in engines {
        let capacity = 1.0 / engine.time(12).as_secs_f64();
        let streams = [0.05, 0.3, 0.6, 0.9, 1.5].map(|load| lookups(load * capacity));
        let loops = [(2, 0.0001), (3, 0.003), (8, 0.002), (8, 0.02), (32, 0.001), (64, 0.01)];
        let loops = loops.map(|(callers, return_time)| peers(callers, return_time));
        for source in streams.into_iter().chain(loops) {
            let (with, without) = with_and_without(engine, source, 1);
            worst = worst.max(with / without);
            println!("{:6.3} {with:8.3} {without:8.3} {engine:?} {:?}", with / without, source.coming);
        }
    }
    assert!(worst <= 1.03, "a mean latency that is {worst:.3} times the one without");
}

#[test]
fn queues_are_bounded_and_the_time_to_come_back_is_the_time_until_there_is_room() {
    let limit = 20_000;
    let sim = Sim::new(machine(), CPU, limit).seed(7);
    let flood = Source { inputs: 20, ..peers(200, 0.01) };
    let report = sim.with(flood).with(Source::backfill(8)).run(30.0);
    assert!(report.max_requested <= limit + 64 * 128, "{} tokens waited", report.max_requested);
    let refused = report.refused.iter().filter(|(at, _)| *at > 1.0);
    let waits: Vec<f64> = refused.filter_map(|(_, full)| Some(full.wait?.as_secs_f64())).collect();
    assert!(waits.len() > 100, "{} were refused", waits.len());
    // All of a full queue is done in two seconds; nobody is sent away for longer, and nobody for no time at all.
    let (least, most) = waits.iter().fold((f64::MAX, 0.0f64), |(a, b), wait| (a.min(*wait), b.max(*wait)));
    assert!(least > 0.0 && most < 3.0, "from {least} s to {most} s");
}

#[test]
fn lookups_are_not_shed_for_the_sake_of_bulk() {
    let limit = 20_000;
    // Bulk in small requests, so that it fills its part of the queue to the last token.
    let bulk = Source { inputs: 2, ..Source::backfill(400) };
    let run = |broken| {
        let sim = Sim::new(machine(), CPU, limit).seed(7).broken(broken);
        let report = sim.with(lookups(100.0)).with(bulk).run(20.0);
        let shed = report.refused.iter().filter(|(_, full)| full.priority == Priority::Interactive).count();
        (shed, report.refused.len(), report.latencies(0).len())
    };
    let (shed, refused, answered) = run(Broken::No);
    assert!(refused > 1000, "bulk wants three times what fits: {refused}");
    assert_eq!(shed, 0, "and no lookup is shed");
    let (.., answered_in_one_priority) = run(Broken::OnePriority);
    assert!(
        answered_in_one_priority * 10 < answered * 9,
        "in one priority they are: {answered_in_one_priority} of {answered}"
    );
}
