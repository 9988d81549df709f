//! Makes the holder of each lock of a server panic, one lock after another, and judges what that costs.
//!
//! A failed process stays one, so each lock is tried in a process of its own: the test starts itself again. Which locks there
//! are is found out by watching the server at work, so a new one is tried without anybody adding it to a list.

use super::{arm, has_fired, seen, watch};
use crate::panics::{self, Scope};
use crate::process;
use std::collections::BTreeSet;
use std::future::Future;
use std::process::Command;
use std::time::{Duration, Instant};

/// Tells a child process its [`Case`].
const CASE: &str = "MERIDIAN_TEST_LOCK";
const LIST: &str = "list";
/// Stands before the name of a lock in the output of a child that lists them.
const SEEN: &str = "lock seen: ";
/// Stands before what a panic has cost in the output of a child.
const OUTCOME: &str = "outcome: ";
const PATIENCE: Duration = Duration::from_secs(30);

/// A server whose locks are tried.
pub trait Subject {
    /// Paths of its health checks.
    const PROBES: &'static [&'static str];
    /// Requests that may fail for one panic: the one that panics, and those that share something with it.
    const FAILED_MAX: usize;

    /// Sends a request of each kind. Returns how many did not get the response that they should.
    fn drive(&self) -> impl Future<Output = usize>;

    /// Asks a health check. Returns the status and the body, with status 0 where the connection was refused.
    fn probe(&self, path: &str) -> impl Future<Output = (u16, String)>;

    /// Whether the health checks take this lock to accept a connection, so that a panic under it refuses one.
    fn refuses_probes(&self, _lock: &str) -> bool {
        false
    }
}

/// Task of a child process.
#[derive(Debug)]
pub enum Case {
    /// Prints the locks that the server takes.
    List,
    /// Makes the next holder of this lock panic.
    Panic(String),
}

/// Tries each lock that the server of `child` takes. `test` is the path of the calling test, which is run again for each lock
/// and then gets its case.
///
/// # Panics
///
/// When a panic costs more than it should, or fewer than `locks_min` locks are taken.
pub fn each_lock(test: &str, locks_min: usize, child: impl FnOnce(Case)) {
    if let Ok(case) = std::env::var(CASE) {
        child(if case == LIST { Case::List } else { Case::Panic(case) });
        // What is left of the server ends with the process.
        std::process::exit(0);
    }
    let run = |case: &str| {
        let output = Command::new(std::env::current_exe().expect("a test has a file"))
            .args(["--exact", test, "--nocapture", "--test-threads", "1"])
            .env(CASE, case)
            .output()
            .expect("a test can be started again");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {stdout}\n{stderr}");
        stdout
    };
    let listed = run(LIST);
    let locks: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(SEEN).nth(1)).collect();
    assert!(locks.len() >= locks_min, "only {} locks are taken: {locks:?}", locks.len());
    for lock in locks {
        let stdout = run(lock);
        let outcome = stdout.lines().find_map(|line| line.split(OUTCOME).nth(1));
        println!("{lock}: {}", outcome.unwrap_or_else(|| panic!("no outcome for {lock}: {stdout}")));
    }
}

impl Case {
    /// Does what the case says, and judges.
    ///
    /// # Panics
    ///
    /// When a panic costs more than it should.
    pub async fn judge(self, subject: &impl Subject) {
        // The standard hook also prints a backtrace: for a second on a busy machine, while the lock is held.
        std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
        // What is taken only once, at the start, is not what requests need.
        subject.drive().await;
        match self {
            Case::List => {
                watch();
                subject.drive().await;
                subject.drive().await;
                seen().iter().for_each(|lock| println!("{SEEN}{lock}"));
            }
            Case::Panic(lock) => println!("{OUTCOME}{}", outcome(&lock, subject).await),
        }
    }
}

async fn outcome<S: Subject>(lock: &str, subject: &S) -> String {
    arm(lock);
    let (begun, mut failed) = (Instant::now(), 0);
    while !has_fired() {
        assert!(begun.elapsed() < PATIENCE, "the lock is not taken any more");
        failed += subject.drive().await;
    }
    // It fires before the holder unwinds; what the panic costs is decided by the time it is contained.
    while process::failure().is_none() && contained() == 0 {
        assert!(begun.elapsed() < PATIENCE, "the panic was not contained");
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

/// Panics that a request or a task has contained.
fn contained() -> u64 {
    panics::contained(Scope::Request) + panics::contained(Scope::Task)
}
