//! Attacks on the gateway's listener by clients that violate RFCs, and their effect on other clients.
//!
//! A gateway, a spoke and a replica run as separate processes on one core. Some hundred cases, each a script of bytes
//! with the expected responses, are sent over raw sockets, as HTTP/1 and HTTP/2 frames, so that no library
//! corrects them. Requirements:
//!
//! 1. Each case ends as expected: with a status of its set, a closed connection or a stream error, within a bound, and
//!    never with a 5xx where the client is at fault.
//! 2. Good clients during the attacks, which run on the other core, lose no request, and their 99th percentile is
//!    bounded relative to that while the attackers send ordinary requests at the same rate ([`P99_RATIO_MAX`]).
//! 3. At the end the processes are alive and serve requests.
//!
//! In reading order: `processes` — the processes; `case` — scripts and expectations; `run` — sends a case and checks the outcome;
//! `responses` and `frames` — readers of responses; `cases` — the cases, a file per family; `neighbours` — good clients;
//! `half_open` — ten thousand connections without a complete request; `idle` — a thousand connections that are kept.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod case;
mod cases;
mod frames;
mod half_open;
mod idle;
mod neighbours;
mod processes;
mod responses;
mod run;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use processes::Processes;

/// Concurrent cases in the first test.
const AT_ONCE: usize = 16;

/// Minimum number of cases.
const CASES_MIN: usize = 400;

/// Families that are sent again, one case after another.
const WITHOUT_LOAD: [&str; 3] = ["head ", "get of info", "window 0"];

/// Maximum ratio of good clients' 99th percentiles during attacks and during ordinary requests, while gateway,
/// spoke and replica share one core. Measured: 1.13, 1.52 and 1.73 (two cores of a virtual AMD EPYC, quiet, 2026-11-28). The rest comes
/// from stalls of 20 to 45 ms, in which the three processes read bodies of 1 to 4 MB. Two lessons of earlier measurements: the
/// replica computes inputs in rounds, as a real one does; when it computed whole requests in the order of their arrival, good requests
/// waited behind a valid request of 100,000 inputs (1.86 to 2.19). And bursts of hundreds of valid requests are not attacks
/// (1.9 to 3.2 with them).
const P99_RATIO_MAX: f64 = 2.0;

/// Maximum number of measurements. One is repeated if its ratio exceeds the bound, because other load on the machine during
/// a few seconds changes a 99th percentile.
const MEASUREMENTS_MAX: usize = 3;

/// Serializes the tests, because the second one measures.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn every_attack_ends_as_expected() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let processes = Processes::start();
    let cases = cases::all();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    let scripts: BTreeSet<u64> = cases
        .iter()
        .map(|case| BuildHasherDefault::<DefaultHasher>::default().hash_one(&case.steps))
        .collect();
    assert_eq!(names.len(), cases.len(), "the names of the cases are unique");
    assert!(scripts.len() >= CASES_MIN, "{} different scripts", scripts.len());

    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(description) = run::run_and_check(processes.address, case) {
                        wrong.lock().unwrap().push(format!("{}: {description}", case.name));
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().unwrap();
    // Some attacks are effective only without other requests in flight.
    for case in cases.iter().filter(|case| WITHOUT_LOAD.iter().any(|family| case.name.starts_with(family))) {
        if let Err(description) = run::run_and_check(processes.address, case) {
            wrong.push(format!("{}, without other requests: {description}", case.name));
        }
    }
    wrong.sort();
    eprintln!("{} cases, {} wrong", cases.len(), wrong.len());
    processes.assert_serves();
    assert!(
        wrong.is_empty(),
        "{} of {} cases have an unexpected outcome:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn attacks_do_not_delay_good_clients() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let processes = Processes::start();
    let cases = cases::all();
    let holds = (0..MEASUREMENTS_MAX).any(|_| {
        let report = neighbours::compare(processes.address, &cases);
        eprintln!("{report}");
        processes.assert_serves();
        assert_eq!(report.failed(), Vec::<String>::new(), "requests of good clients that failed");
        report.ratio() <= P99_RATIO_MAX
    });
    assert!(holds, "the 99th percentile was more than {P99_RATIO_MAX} times as high in each measurement");
}

#[test]
fn ten_thousand_incomplete_heads_do_not_affect_good_clients() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    half_open::raise_file_limit();
    let processes = Processes::start();
    let slowest = half_open::run_half_open(&processes).unwrap();
    eprintln!("the slowest of the new connections was served after {slowest:?}");
    processes.assert_serves();
}

#[test]
fn an_idle_connection_holds_no_memory_of_its_request() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    half_open::raise_file_limit();
    let processes = Processes::start();
    let bytes = idle::bytes_per_connection(&processes).unwrap();
    eprintln!("an idle connection needs {bytes} bytes");
    assert!(bytes <= idle::BYTES_MAX, "an idle connection needs {bytes} bytes, at most {}", idle::BYTES_MAX);
    processes.assert_serves();
}
