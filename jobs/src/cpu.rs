//! Work of the processor on content of clients: encryption, merging and hashing of up to 256 MiB.
//!
//! On a thread that serves connections it would delay every connection of that thread, for a tenth of a second at the largest
//! size. So it runs on the threads of tokio for blocking work, for at most half of the cores at the same time: the other half is
//! left for connections.

use std::sync::Arc;
use std::thread::available_parallelism;
use tokio::sync::Semaphore;

/// Content that is worked on by the calling thread, bytes: encryption and hashing take some 0.1 ms, a change of the thread a
/// tenth of that.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// Limit on the work of a queue that runs at the same time. Clones share it: the queue, its objects and its log have one.
#[derive(Debug, Clone)]
pub struct CpuWork {
    permits: Arc<Semaphore>,
}

impl CpuWork {
    /// Permits work on half of the cores, at least on one.
    #[expect(
        clippy::new_without_default,
        reason = "each one is a limit of its own, so it is created by name"
    )]
    pub fn new() -> CpuWork {
        CpuWork::with_threads(available_parallelism().map_or(1, usize::from).div_ceil(2))
    }

    fn with_threads(threads: usize) -> CpuWork {
        CpuWork { permits: Arc::new(Semaphore::new(threads)) }
    }

    /// Runs work on this many bytes. Work that has begun is completed even if its caller stops waiting. A panic of the work is
    /// resumed in the caller.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        if bytes <= INLINE_BYTES_MAX {
            return work();
        }
        let permit = self.permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        let done = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(permit);
            result
        });
        match done.await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime ends, and its requests with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn large_work_leaves_the_thread_of_its_caller_and_is_limited() {
        let cpu = CpuWork::with_threads(1);
        let here = std::thread::current().id();
        let runs_on = || std::thread::current().id();
        assert_eq!(cpu.run(INLINE_BYTES_MAX, runs_on).await, here);
        assert_ne!(cpu.run(INLINE_BYTES_MAX + 1, runs_on).await, here);
        let (release, blocked) = mpsc::channel::<()>();
        let first = cpu.run(usize::MAX, move || blocked.recv_timeout(PATIENCE).is_ok());
        let second = cpu.run(usize::MAX, || ());
        tokio::pin!(first, second);
        tokio::select! {
            biased;
            _ = &mut first => panic!("it was not released"),
            () = &mut second => panic!("the first work still runs"),
            () = tokio::task::yield_now() => {}
        }
        assert_eq!(cpu.run(1, runs_on).await, here, "small work does not wait");
        release.send(()).unwrap();
        assert!(first.await);
        second.await;
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_that_of_its_caller() {
        let cpu = Arc::new(CpuWork::with_threads(1));
        let panics = tokio::spawn({
            let cpu = cpu.clone();
            async move { cpu.run(usize::MAX, || panic!("a defect of the work")).await }
        });
        assert!(panics.await.is_err_and(|error| error.is_panic()));
        assert!(cpu.run(usize::MAX, || true).await, "the permit is released");
    }
}
