//! Test driver that makes the holder of each lock of a server panic, one lock after another, and checks the consequences.
//!
//! A process failure is irrevocable, so each lock is tried in a separate process: the test starts itself again. The locks
//! are discovered by recording them while the server works, so a new lock is covered automatically.

use super::{arm, has_fired, record, recorded};
use crate::panics::{self, Scope};
use crate::process;
use std::collections::BTreeSet;
use std::future::Future;
use std::process::Command;
use std::time::{Duration, Instant};

/// Environment variable with the [`Case`] of a child process.
const CASE: &str = "MERIDIAN_TEST_LOCK";
const LIST: &str = "list";
/// Prefix of the name of a lock in the output of a child that lists them.
const RECORDED: &str = "lock recorded: ";
/// Prefix of the consequence of the panic in the output of a child.
const OUTCOME: &str = "outcome: ";
const TIMEOUT: Duration = Duration::from_secs(30);

/// Server under test.
pub trait Subject {
    /// Paths of its health checks.
    const PROBES: &'static [&'static str];
    /// Maximum number of requests that may fail for one panic: the one that panics, and those that share state with it.
    const FAILED_MAX: usize;

    /// Sends a request of each kind. Returns the number of unexpected responses.
    fn drive(&self) -> impl Future<Output = usize>;

    /// Queries a health check. Returns the status and the body, with status 0 if the connection was refused.
    fn probe(&self, path: &str) -> impl Future<Output = (u16, String)>;

    /// Returns whether this lock is needed to accept a connection of a probe, so that a panic under it refuses one.
    fn refuses_probes(&self, _lock: &str) -> bool {
        false
    }
}

/// Task of a child process.
#[derive(Debug)]
pub enum Case {
    /// Print the locks that the server takes.
    List,
    /// Make the next holder of this lock panic.
    Panic(String),
}

/// Tries each lock of the server that `child` starts. `test` is the path of the calling test, which is run again for each
/// lock, with its case.
///
/// # Panics
///
/// If a panic has worse consequences than permitted, or fewer than `locks_min` locks are found.
pub fn each_lock(test: &str, locks_min: usize, child: impl FnOnce(Case)) {
    if let Ok(case) = std::env::var(CASE) {
        child(if case == LIST { Case::List } else { Case::Panic(case) });
        // The rest of the server ends with the process.
        std::process::exit(0);
    }
    let run = |case: &str| {
        let output = Command::new(std::env::current_exe().expect("the test executable exists"))
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(CASE, case)
            .output()
            .expect("the test can be started again");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {stdout}\n{stderr}");
        stdout
    };
    let listed = run(LIST);
    let locks: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(RECORDED).nth(1)).collect();
    assert!(locks.len() >= locks_min, "only {} locks are taken: {locks:?}", locks.len());
    for lock in locks {
        let stdout = run(lock);
        let outcome = stdout.lines().find_map(|line| line.split(OUTCOME).nth(1));
        println!("{lock}: {}", outcome.unwrap_or_else(|| panic!("no outcome for {lock}: {stdout}")));
    }
}

impl Case {
    /// Runs the case and checks the consequences.
    ///
    /// # Panics
    ///
    /// If a panic has worse consequences than permitted.
    pub async fn run(self, subject: &impl Subject) {
        // The default hook also prints a backtrace, which takes a second on a busy machine, while the lock is held.
        std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
        // Locks that are taken only once, at the start, are not needed by later requests.
        subject.drive().await;
        match self {
            Case::List => {
                record();
                subject.drive().await;
                subject.drive().await;
                recorded().iter().for_each(|lock| println!("{RECORDED}{lock}"));
            }
            Case::Panic(lock) => println!("{OUTCOME}{}", outcome(&lock, subject).await),
        }
    }
}

async fn outcome<S: Subject>(lock: &str, subject: &S) -> String {
    arm(lock);
    let (begun, mut failed) = (Instant::now(), 0);
    while !has_fired() {
        assert!(begun.elapsed() < TIMEOUT, "the lock is no longer taken");
        failed += subject.drive().await;
    }
    // The failpoint fires before the holder unwinds; the consequence is decided when the panic is contained.
    while process::failure().is_none() && contained() == 0 {
        assert!(begun.elapsed() < TIMEOUT, "the panic was not contained");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if let Some(reason) = process::failure() {
        for probe in S::PROBES {
            let (status, body) = subject.probe(probe).await;
            let is_refused = status == 0 && subject.refuses_probes(lock);
            let is_reported = status == 503 && body.contains(&*reason);
            assert!(is_refused || is_reported, "{probe} responds {status} {body}");
        }
        return format!("the process fails: {reason}");
    }
    assert!(failed <= S::FAILED_MAX, "{failed} requests failed for one panic");
    for _ in 0..5 {
        assert_eq!(subject.drive().await, 0, "every later request is served");
    }
    for probe in S::PROBES {
        assert_eq!(subject.probe(probe).await.0, 200, "{probe}");
    }
    "one request".to_owned()
}

/// Returns the number of panics that requests or tasks have contained.
fn contained() -> u64 {
    panics::contained(Scope::Request) + panics::contained(Scope::Task)
}
