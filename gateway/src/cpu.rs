//! Threads for work on large bodies: unpacking, parsing, cutting.
//!
//! Work of milliseconds would delay every connection of the thread that does it. Here it is done on threads of its own, for one
//! request of a tenant at a time: a tenant that sends nothing but such bodies waits for itself. There are threads for half of the
//! cores, and they have a lower priority (`NICE`) than those that serve connections, which may share a core with them.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread::available_parallelism;
use supervision::{Mutex, task};
use tokio::sync::{Semaphore, oneshot};

/// Tenants that are remembered though nothing of theirs is under way.
const IDLE_TENANTS_MAX: usize = 1024;

/// How much lower the priority of the threads is, as in `nice(1)`: with 19, the lowest, a thread that serves connections on the
/// same core gets 98 % of it when both have work. With 10 it gets 90 %, and the 99th percentile of small requests beside large
/// bodies was half as high again.
#[cfg(target_os = "linux")]
const NICE: i32 = 19;

type Job = Box<dyn FnOnce() + Send>;

/// The threads, and whose turn it is.
pub(crate) struct CpuPool {
    jobs: mpsc::Sender<Job>,
    free: Arc<Semaphore>,
    tenants: Mutex<BTreeMap<usize, Arc<Semaphore>>>,
}

impl CpuPool {
    /// Threads for half of the cores, and one at least.
    pub(crate) fn new() -> io::Result<CpuPool> {
        CpuPool::with_threads(available_parallelism().map_or(1, usize::from).div_ceil(2))
    }

    fn with_threads(threads: usize) -> io::Result<CpuPool> {
        let (jobs, waiting) = mpsc::channel::<Job>();
        let waiting = Arc::new(Mutex::independent(waiting));
        for _ in 0..threads {
            let waiting = waiting.clone();
            task::thread("body work", move || {
                lower_priority();
                loop {
                    let job = waiting.lock().recv();
                    match job {
                        Ok(job) => job(),
                        // The pool is gone.
                        Err(mpsc::RecvError) => return,
                    }
                }
            })?;
        }
        Ok(CpuPool { jobs, free: Arc::new(Semaphore::new(threads)), tenants: Mutex::default() })
    }

    /// Does `work` for a tenant when it is its turn. Work that has begun is finished though nobody waits for it any longer. A
    /// panic of `work` is one of the caller.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        tenant: Option<usize>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let turn = match tenant {
            Some(place) => Some(self.turns(place).acquire_owned().await.expect("it is never closed")),
            None => None,
        };
        let thread = self.free.clone().acquire_owned().await.expect("it is never closed");
        let (done, outcome) = oneshot::channel();
        let job = Box::new(move || {
            let result = catch_unwind(AssertUnwindSafe(work));
            drop((thread, turn));
            // The client may have gone.
            done.send(result).ok();
        });
        if self.jobs.send(job).is_ok()
            && let Ok(result) = outcome.await
        {
            return result.unwrap_or_else(|panic| resume_unwind(panic));
        }
        // Only a process that fails has no such threads any more, and its requests end with it.
        std::future::pending().await
    }

    fn turns(&self, tenant: usize) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock();
        if tenants.len() > IDLE_TENANTS_MAX {
            tenants.retain(|_, turns| Arc::strong_count(turns) > 1 || turns.available_permits() == 0);
        }
        tenants.entry(tenant).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

/// Lowers the priority of the calling thread. On Linux a thread has one of its own.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpriority_process, setpriority_process};
        let thread = Some(rustix::thread::gettid());
        let lowered = getpriority_process(thread).and_then(|now| setpriority_process(thread, now.max(NICE)));
        if let Err(error) = lowered {
            tracing::warn!(%error, "priority of a thread for large bodies could not be lowered");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// On two threads: a second request of the same tenant waits, one of another tenant does not.
    #[tokio::test]
    async fn a_tenant_has_one_request_at_a_time_and_leaves_the_others_their_threads() {
        let pool = CpuPool::with_threads(2).unwrap();
        let (go_on, held) = mpsc::channel::<()>();
        let first = pool.run(Some(0), move || held.recv_timeout(PATIENCE).is_ok());
        let second = pool.run(Some(0), || true);
        tokio::pin!(first, second);
        let others = async {
            for tenant in 1..10 {
                assert!(pool.run(Some(tenant), || true).await);
            }
        };
        tokio::select! {
            biased;
            _ = &mut first => panic!("it was not told to go on"),
            _ = &mut second => panic!("its turn is still taken"),
            done = tokio::time::timeout(PATIENCE, others) => done.expect("other tenants have a thread"),
        }
        go_on.send(()).unwrap();
        assert!(first.await && second.await);
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_one_of_its_request_and_the_thread_goes_on() {
        let pool = Arc::new(CpuPool::with_threads(1).unwrap());
        let panics = tokio::spawn({
            let pool = pool.clone();
            async move { pool.run(Some(0), || panic!("a defect of the work")).await }
        });
        assert!(panics.await.is_err_and(|error| error.is_panic()));
        assert!(pool.run(Some(0), || true).await);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_threads_have_a_lower_priority() {
        let nice = || rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap();
        let pool = CpuPool::with_threads(1).unwrap();
        assert_eq!(pool.run(None, nice).await, NICE.max(nice()));
    }

    #[tokio::test]
    async fn tenants_that_are_idle_are_forgotten() {
        let pool = CpuPool::with_threads(1).unwrap();
        for tenant in 0..=2 * IDLE_TENANTS_MAX {
            pool.run(Some(tenant), || ()).await;
        }
        assert!(pool.tenants.lock().len() <= IDLE_TENANTS_MAX + 1);
    }
}
