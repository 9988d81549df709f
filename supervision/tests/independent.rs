//! Contained panics: a holder of a lock, a request or a task panics, and the process continues.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use supervision::health::{CHECK_TIMEOUT, HealthCheck};
use supervision::panics::{self, Scope};
use supervision::{Condvar, Mutex, RwLock, process, request, task};

fn panics_in(run: impl FnOnce()) {
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
}

#[test]
fn an_independent_lock_stays_usable_after_a_panic_of_its_holder() {
    let (mutex, lock) = (Mutex::independent(1), RwLock::independent(1));
    let before = panics::contained(Scope::Lock);
    panics_in(|| {
        let mut held = mutex.lock();
        *held = 2;
        panic!("with the mutex");
    });
    panics_in(|| {
        let mut held = lock.write();
        *held = 2;
        panic!("with the lock");
    });
    panics_in(|| {
        let _held = lock.read();
        panic!("as a reader");
    });
    assert_eq!((*mutex.lock(), *lock.read()), (2, 2));
    assert_eq!(*lock.write(), 2);
    assert_eq!(panics::contained(Scope::Lock) - before, 2, "a panic of a reader does not count");
    assert_eq!(process::failure(), None);
}

#[test]
fn a_lock_taken_while_unwinding_does_not_fail_the_process() {
    struct Permit<'a>(&'a Mutex<u32>);
    impl Drop for Permit<'_> {
        fn drop(&mut self) {
            *self.0.lock() -= 1;
        }
    }
    let taken = Mutex::new(1);
    panics_in(|| {
        let _permit = Permit(&taken);
        panic!("a request with a permit");
    });
    assert_eq!((*taken.lock(), process::failure()), (0, None));
}

#[test]
fn a_panic_of_another_holder_does_not_end_a_wait() {
    let shared = Arc::new((Mutex::independent(false), Condvar::new()));
    let waiting = Arc::clone(&shared);
    let waits = std::thread::spawn(move || {
        let mut is_done = waiting.0.lock();
        while !*is_done {
            is_done = waiting.1.wait(is_done);
        }
        let (is_done, timed_out) = waiting.1.wait_timeout(is_done, Duration::from_millis(1));
        assert!(*is_done && timed_out);
    });
    panics_in(|| {
        let _held = shared.0.lock();
        panic!("while another thread waits");
    });
    *shared.0.lock() = true;
    shared.1.notify_all();
    waits.join().expect("it was woken");
}

#[tokio::test]
async fn a_panic_of_a_request_is_returned_as_a_value() {
    let before = panics::contained(Scope::Request);
    let panicked = request::contain(async {
        if true {
            panic!("of {}", 1)
        }
    })
    .await;
    assert_eq!(panicked.map_err(|panicked| panicked.0), Err("of 1".to_owned()));
    assert_eq!(request::contain(async { 5 }).await, Ok(5));
    assert_eq!(panics::contained(Scope::Request) - before, 1);
}

#[tokio::test(start_paused = true)]
async fn a_task_that_panics_or_ends_is_restarted() {
    let runs = AtomicU32::new(0);
    let task = task::supervise("a task of a test", || async {
        match runs.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("the first time"),
            1 => {}
            _ => std::future::pending().await,
        }
    });
    assert!(tokio::time::timeout(Duration::from_secs(30), task).await.is_err(), "it never ends");
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    assert_eq!(panics::restarts()["a task of a test"], 2);
    assert_eq!(process::failure(), None);
}

#[tokio::test(start_paused = true)]
async fn a_task_that_may_finish_is_restarted_only_after_a_panic() {
    let runs = AtomicU32::new(0);
    task::supervise_until_done("another task of a test", || async {
        assert_ne!(runs.fetch_add(1, Ordering::Relaxed), 0, "the first time");
    })
    .await;
    assert_eq!(runs.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_check_that_fails_panics_or_hangs_is_reported_as_failed() {
    let health = HealthCheck::default();
    assert_eq!(health.probe(|| Ok(())).await, Ok(()));
    assert_eq!(health.probe(|| Err("no route table".to_owned())).await, Err("no route table".to_owned()));
    let panicked = health.probe(|| panic!("over a lock")).await;
    assert_eq!(panicked, Err("a check panicked: over a lock".to_owned()));

    let lock = Arc::new(Mutex::independent(()));
    let held = lock.lock();
    let locks = || {
        let lock = Arc::clone(&lock);
        move || {
            drop(lock.lock());
            Ok(())
        }
    };
    let hangs = Err(format!("a check has not returned within {CHECK_TIMEOUT:?}"));
    assert_eq!(health.probe(locks()).await, hangs);
    assert_eq!(health.probe(locks()).await, hangs, "no second thread is started");
    drop(held);
    assert_eq!(health.probe(locks()).await, Ok(()));
}
