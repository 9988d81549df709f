//! Causes of a process failure. A failure is irrevocable, so each case runs in a separate process: the test starts itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::Duration;
use supervision::health::HealthCheck;
use supervision::{Mutex, RwLock, process, task};

/// Environment variable with the case of a child.
const CASE: &str = "SUPERVISION_TEST_CASE";

/// Name of a case, and a function that fails the process and returns the expected reason.
type Case = (&'static str, fn() -> &'static str);

const CASES: &[Case] = &[
    ("mutex", || {
        let state = Mutex::new((1, 1));
        let held = catch_unwind(AssertUnwindSafe(|| {
            let mut held = state.lock();
            held.0 = 2;
            panic!("before the other half");
        }));
        assert!(held.is_err());
        assert_eq!(*state.lock(), (2, 1), "the lock stays usable while the process drains");
        "a panic occurred while (i32, i32) was locked"
    }),
    ("rwlock", || {
        let state = RwLock::new(1);
        let held = catch_unwind(AssertUnwindSafe(|| {
            let _held = state.write();
            panic!("as a writer");
        }));
        assert!(held.is_err());
        assert_eq!(*state.read(), 1);
        "a panic occurred while i32 was locked"
    }),
    ("thread", || {
        task::thread("worker", || panic!("at work")).expect("a thread").join().expect("contained");
        "thread worker panicked: at work"
    }),
    ("essential task", || {
        paused(async {
            assert_eq!(task::essential("resolver", async { 5 }).await, Some(5));
            assert_eq!(process::failure(), None);
            let panics = async {
                if true {
                    panic!("at the socket")
                }
            };
            assert_eq!(task::essential("listener", panics).await, None);
        });
        "task listener panicked: at the socket"
    }),
    ("task without recovery", || {
        paused(async {
            let task = task::supervise("follower", || async { panic!("again") });
            assert!(tokio::time::timeout(Duration::from_secs(600), task).await.is_err());
        });
        assert_eq!(supervision::panics::restarts()["follower"], u64::from(task::RESTARTS_MAX));
        "task follower does not recover: again"
    }),
];

fn paused(run: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime")
        .block_on(run);
}

#[test]
fn uncontained_panics_fail_the_process_and_its_health_checks() {
    if let Ok(name) = std::env::var(CASE) {
        let (_, run) = CASES.iter().find(|(case, _)| *case == name).expect("a case");
        assert_eq!(process::failure(), None);
        let reason = run();
        assert_eq!(process::failure().as_deref(), Some(reason));
        process::fail("something else");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            assert_eq!(&*process::failed().await, reason, "the first reason is kept");
            let health = HealthCheck::default().probe(|| Ok(())).await;
            assert_eq!(health, Err(format!("failed: {reason}")));
        });
        // The process exits even though its main thread does not.
        process::exit_within(Duration::from_millis(10)).expect("a thread");
        loop {
            std::thread::park();
        }
    }
    let name = "uncontained_panics_fail_the_process_and_its_health_checks";
    for (case, _) in CASES {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", name, "--nocapture"])
            .env(CASE, case)
            .output()
            .expect("it starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(process::EXIT_STATUS.into()), "{case}: {stderr}");
    }
}
