//! Thread pool for CPU work on large bodies: decompression, parsing, splitting.
//!
//! Work of milliseconds would delay every connection of the reactor thread that does it, so it runs on separate
//! threads, for one request of a tenant at a time: a tenant that sends only such bodies queues behind itself. There are
//! threads for half of the cores, with a lower priority (`NICE`) than the threads that serve connections, which may
//! share a core with them.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread::available_parallelism;
use supervision::{Mutex, task};
use tokio::sync::{Semaphore, oneshot};

/// Tenants whose semaphore is kept although they have no work in flight.
const IDLE_TENANTS_MAX: usize = 1024;

/// Nice value of the threads, as in `nice(1)`. With 19, the lowest priority, a thread that serves connections on the
/// same core gets 98 % of it when both have work; with 10 it gets 90 %. The 99th percentile of small requests beside
/// attackers was 2.2 and 2.3 times that beside ordinary requests with 19, and 2.9 and 3.4 times with 10 (tests/attack; two
/// cores of a virtual Zen 5, 2026-11-23). On a host whose cores are saturated by other processes large bodies are slow.
#[cfg(target_os = "linux")]
const NICE: i32 = 19;

/// Limit on the bytes that the thread of a connection hashes or copies itself: some 0.1 ms.
const INLINE_BYTES_MAX: usize = 64 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// Threads, and one semaphore per tenant that limits it to one job at a time.
pub(crate) struct CpuPool {
    jobs: mpsc::Sender<Job>,
    free: Arc<Semaphore>,
    tenants: Mutex<BTreeMap<usize, Arc<Semaphore>>>,
}

impl CpuPool {
    /// Starts threads for half of the cores, at least one.
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
                        // The pool was dropped.
                        Err(mpsc::RecvError) => return,
                    }
                }
            })?;
        }
        Ok(CpuPool { jobs, free: Arc::new(Semaphore::new(threads)), tenants: Mutex::default() })
    }

    /// Runs `work` when its tenant has no other work running and a thread is free. Work that has started is completed
    /// even if its caller stops waiting. A panic of `work` is resumed in the caller.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        tenant: Option<usize>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let permit = match tenant {
            Some(tenant) => Some(
                self.tenant_semaphore(tenant).acquire_owned().await.expect("the semaphore is never closed"),
            ),
            None => None,
        };
        let thread = self.free.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (done, outcome) = oneshot::channel();
        let job = Box::new(move || {
            let result = catch_unwind(AssertUnwindSafe(work));
            drop((thread, permit));
            // The client may have disconnected.
            done.send(result).ok();
        });
        if self.jobs.send(job).is_ok()
            && let Ok(result) = outcome.await
        {
            return result.unwrap_or_else(|panic| resume_unwind(panic));
        }
        // The threads end only when the process fails, and its requests end with it.
        std::future::pending().await
    }

    /// Runs `work` of a tenant on this many bytes: on the calling thread if they are few.
    pub(crate) async fn run_on<T: Send + 'static>(
        &self,
        tenant: Option<usize>,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        if bytes <= INLINE_BYTES_MAX { work() } else { self.run(tenant, work).await }
    }

    fn tenant_semaphore(&self, tenant: usize) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock();
        if tenants.len() > IDLE_TENANTS_MAX {
            tenants.retain(|_, slots| Arc::strong_count(slots) > 1 || slots.available_permits() == 0);
        }
        tenants.entry(tenant).or_insert_with(|| Arc::new(Semaphore::new(1))).clone()
    }
}

/// Lowers the priority of the calling thread. On Linux the priority is per thread.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpriority_process, setpriority_process};
        let thread = Some(rustix::thread::gettid());
        let lowered = getpriority_process(thread).and_then(|now| setpriority_process(thread, now.max(NICE)));
        if let Err(error) = lowered {
            // Large bodies then compete with small requests for the processor. Allow `setpriority` in the sandbox of the process.
            tracing::warn!(%error, "failed to lower the priority of a thread that parses bodies");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// With two threads: a second request of the same tenant waits, one of another tenant does not.
    #[tokio::test]
    async fn a_tenant_runs_one_request_at_a_time_and_other_tenants_proceed() {
        let pool = CpuPool::with_threads(2).unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let first = pool.run(Some(0), move || blocked.recv_timeout(PATIENCE).is_ok());
        let second = pool.run(Some(0), || true);
        tokio::pin!(first, second);
        let others = async {
            for tenant in 1..10 {
                assert!(pool.run(Some(tenant), || true).await);
            }
        };
        tokio::select! {
            biased;
            _ = &mut first => panic!("it was not released"),
            _ = &mut second => panic!("the first request of its tenant still runs"),
            done = tokio::time::timeout(PATIENCE, others) => done.expect("other tenants have a thread"),
        }
        release.send(()).unwrap();
        assert!(first.await && second.await);
    }

    #[tokio::test]
    async fn a_panic_of_the_work_fails_its_request_and_the_thread_continues() {
        let pool = Arc::new(CpuPool::with_threads(1).unwrap());
        let panics = tokio::spawn({
            let pool = pool.clone();
            async move { pool.run(Some(0), || panic!("a defect of the work")).await }
        });
        assert!(panics.await.is_err_and(|error| error.is_panic()));
        assert!(pool.run(Some(0), || true).await);
    }

    #[tokio::test]
    async fn work_on_few_bytes_stays_on_its_thread() {
        let pool = CpuPool::with_threads(1).unwrap();
        let here = std::thread::current().id();
        assert_eq!(pool.run_on(None, INLINE_BYTES_MAX, || std::thread::current().id()).await, here);
        assert_ne!(pool.run_on(None, INLINE_BYTES_MAX + 1, || std::thread::current().id()).await, here);
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
