//! Attacks on the front, by clients that follow no RFC, and what their neighbours feel of them.
//!
//! A gateway, a spoke and a replica run as processes of their own on one core. Some hundred cases, each a script of bytes
//! and of what must come back for them, are sent over raw sockets: HTTP/1 and frames of HTTP/2. Nothing in between could
//! repair them. Three things must hold:
//!
//! 1. Each case ends as it should: with a status of its set, a closed connection or a stream error, within a bound, and
//!    never with a 5xx where the client is at fault.
//! 2. Good clients beside the attackers, which are pinned to the other core, lose no request, and their 99th percentile is
//!    bounded by what it is while the attackers send ordinary requests at the same rate ([`P99_RATIO_MAX`]).
//! 3. At the end the processes live and serve.
//!
//! In reading order: `world` — the processes; `case` — scripts and expectations; `run` — sending one and judging what came;
//! `answers` and `frames` — what comes back, read; `cases` — the cases, a file for each family; `neighbours` — good clients;
//! `half_open` — ten thousand connections without a request.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod answers;
mod case;
mod cases;
mod frames;
mod half_open;
mod neighbours;
mod run;
mod world;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use world::World;

/// Cases that are sent at once in the first test.
const AT_ONCE: usize = 16;

/// Cases that there are at least.
const CASES_MIN: usize = 400;

/// Families that are sent once more, one case after another.
const QUIET: [&str; 3] = ["head ", "get of info", "window 0"];

/// How much higher the 99th percentile of good clients may be beside attackers than beside ordinary requests, while gateway,
/// spoke and replica share one core. The goal is 2. Measured: 2.0 to 3.0 (16 ms against 6.7 ms; two cores of a virtual Zen 5,
/// 2026-11-23). What is above the goal are some stalls of 30 to 60 ms, in which bodies of 4 MB touch fresh memory in all three
/// processes. This bound is for regressions.
const P99_RATIO_MAX: f64 = 4.0;

/// A measurement is repeated when its ratio is higher than that: what else the machine does in a turn of a few seconds moves a
/// 99th percentile.
const MEASUREMENTS_MAX: usize = 3;

/// One test at a time: the second measures.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn every_attack_ends_as_it_should() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let world = World::start();
    let cases = cases::all();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    let scripts: BTreeSet<u64> = cases
        .iter()
        .map(|case| BuildHasherDefault::<DefaultHasher>::default().hash_one(&case.steps))
        .collect();
    assert_eq!(names.len(), cases.len(), "each case has a name of its own");
    assert!(scripts.len() >= CASES_MIN, "{} different scripts", scripts.len());

    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(what) = run::judge(world.address, case) {
                        wrong.lock().unwrap().push(format!("{}: {what}", case.name));
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().unwrap();
    // Some do harm only while nobody else keeps the gateway's books open.
    for case in cases.iter().filter(|case| QUIET.iter().any(|family| case.name.starts_with(family))) {
        if let Err(what) = run::judge(world.address, case) {
            wrong.push(format!("{}, alone: {what}", case.name));
        }
    }
    wrong.sort();
    eprintln!("{} cases, {} wrong", cases.len(), wrong.len());
    world.assert_serves();
    assert!(wrong.is_empty(), "{} of {} cases end wrongly:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn good_clients_do_not_feel_the_attackers() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let world = World::start();
    let cases = cases::all();
    let holds = (0..MEASUREMENTS_MAX).any(|_| {
        let report = neighbours::compare(world.address, &cases);
        eprintln!("{report}");
        world.assert_serves();
        assert_eq!(report.failed(), Vec::<String>::new(), "requests of good clients that failed");
        report.ratio() <= P99_RATIO_MAX
    });
    assert!(holds, "the 99th percentile was more than {P99_RATIO_MAX} times as high in each measurement");
}

#[test]
fn ten_thousand_half_sent_heads_cost_good_clients_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    half_open::raise_file_limit();
    let world = World::start();
    let slowest = half_open::flood(&world).unwrap();
    eprintln!("the slowest of the new connections was served after {slowest:?}");
    world.assert_serves();
}
