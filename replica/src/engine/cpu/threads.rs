//! Thread pool of the CPU engine, with work stealing over the parts of one result.
//!
//! [`ThreadPool::for_each`] is a parallel loop. The calling thread works too; the other threads (helpers) are woken,
//! take the next part while there is one, and leave. Parts are assigned one by one (in groups when there are very
//! many), because cores are shared with other processes: a thread that is not scheduled takes no part, and the others
//! do its work. For the same reason the caller waits only for threads that have taken a part, never for a thread to
//! wake up and find none.
//!
//! Each thread begins with its own parts, the same ones in every loop with the same number of parts, and takes parts of
//! others when it has finished them. So it finds its weights, or rows, in its own caches; the last-level cache may be
//! too small for all of them: a core read its half of 42 MB at 65 GB/s, and all of it at 35.
//!
//! A batch is some dozen such loops in a row, of a few to a few hundred microseconds each, so the cost of
//! synchronization is part of the latency of a short text. A loop is opened, entered, left and closed by atomic
//! operations on one word, the [gate](Gate). Between two loops, and at the end of one, threads spin for [`SPINS`]
//! iterations before they sleep. An idle engine uses no CPU time.

use std::any::Any;
use std::cell::UnsafeCell;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use supervision::{Condvar, Mutex, MutexGuard, task};

use super::matrix::Parts;

/// Spin iterations on the gate before sleeping: about 100 µs at 140 cycles a pause, or 20 µs on processors whose pause
/// is short. The loops of a batch follow each other faster than that, and waking a sleeping thread takes longer than
/// most of them: with 3 µs a short text took 2.1 ms where it now takes 1.5 (MiniLM in f32, two threads, Sapphire
/// Rapids, November 2026).
const SPINS: usize = 2048;

/// Groups of parts per thread, when there are many parts: enough to balance the load, few enough to be cheap.
const GROUPS: usize = 8;

/// Thread pool with one shared loop.
pub(super) struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// One counter for each thread.
    counters: Vec<PartCounter>,
}

/// Index of a thread's next own part. Each counter has its own cache line.
#[derive(Default)]
#[repr(align(64))]
struct PartCounter(AtomicUsize);

struct Shared {
    /// A [`Gate`].
    gate: AtomicU64,
    /// Body of the current loop. The caller writes it while the gate is closed and no helper is inside; only helpers
    /// inside read it.
    job: UnsafeCell<Option<LoopBody>>,
    /// Number of helpers that sleep, or are about to.
    asleep: AtomicUsize,
    /// Whether the caller sleeps until the last helper has left, or is about to.
    waits: AtomicBool,
    closing: AtomicBool,
    /// Held by a thread from announcing its sleep until it sleeps, and by a thread that wakes others.
    sleep_lock: Mutex<()>,
    /// Signalled when a loop was opened, or the pool is being dropped.
    work: Condvar,
    /// Signalled when the last helper has left the loop.
    left: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: all fields except the job are `Sync`. The rules of access to the job are documented at the field and enforced
// by the gate: `ThreadPool::open` and `ThreadPool::close`, and `enter`.
unsafe impl Sync for Shared {}

/// State of the current loop in one word: its number, whether helpers may enter, and the number of helpers inside.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Gate(u64);

impl Gate {
    const INSIDE: u64 = (1 << 16) - 1;
    const OPEN: u64 = 1 << 16;

    /// Returns the number of loops started so far.
    fn number(self) -> u64 {
        self.0 >> 17
    }

    fn is_open(self) -> bool {
        self.0 & Gate::OPEN != 0
    }

    fn inside(self) -> u64 {
        self.0 & Gate::INSIDE
    }

    /// Returns the gate of the next loop, open and empty.
    fn next(self) -> Gate {
        Gate((self.number() + 1) << 17 | Gate::OPEN)
    }
}

/// Loop body that every thread runs with its number: a borrow from the stack of [`ThreadPool::run`] with an erased
/// lifetime.
#[derive(Clone, Copy)]
struct LoopBody(*const (dyn Fn(usize) + Sync));

// SAFETY: the target of the pointer is `Sync`, and `ThreadPool::run` keeps it alive until all helpers have left it.
unsafe impl Send for LoopBody {}

impl Shared {
    fn gate(&self) -> Gate {
        // Sequentially consistent, as are all stores before a thread decides to sleep and all loads before a thread
        // wakes others: of two threads that do both concurrently, at least one observes the other's store.
        Gate(self.gate.load(Ordering::SeqCst))
    }

    fn sleep_lock(&self) -> MutexGuard<'_, ()> {
        self.sleep_lock.lock()
    }

    /// Waits for a loop that this helper has not processed, and enters it; `None` when the pool is being dropped.
    fn enter(&self, last_loop: &mut u64) -> Option<LoopBody> {
        loop {
            let mut gate = self.await_loop(*last_loop)?;
            *last_loop = gate.number();
            while gate.is_open() && gate.number() == *last_loop {
                let entered =
                    self.gate.compare_exchange(gate.0, gate.0 + 1, Ordering::SeqCst, Ordering::SeqCst);
                match entered {
                    // SAFETY: this thread is inside, so the caller does not write.
                    Ok(_) => return unsafe { *self.job.get() },
                    Err(now) => gate = Gate(now),
                }
            }
            // The loop was closed before this thread entered; the next one follows soon.
        }
    }

    /// Waits for a loop with another number than `last_loop` and returns its gate; `None` when the pool is being dropped.
    fn await_loop(&self, last_loop: u64) -> Option<Gate> {
        for _ in 0..SPINS {
            let gate = self.gate();
            if gate.number() != last_loop {
                return Some(gate);
            }
            std::hint::spin_loop();
        }
        let mut sleep_lock = self.sleep_lock();
        self.asleep.fetch_add(1, Ordering::SeqCst);
        while !self.closing.load(Ordering::SeqCst) && self.gate().number() == last_loop {
            sleep_lock = self.work.wait(sleep_lock);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        (!self.closing.load(Ordering::SeqCst)).then(|| self.gate())
    }

    /// Leaves the loop.
    fn leave(&self) {
        let before = Gate(self.gate.fetch_sub(1, Ordering::SeqCst));
        if before.inside() == 1 && self.waits.load(Ordering::SeqCst) {
            let _guard = self.sleep_lock();
            self.left.notify_one();
        }
    }
}

impl ThreadPool {
    /// Starts a pool of `threads` threads, including the caller.
    pub(super) fn new(threads: NonZeroUsize) -> std::io::Result<ThreadPool> {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            asleep: AtomicUsize::new(0),
            waits: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            sleep_lock: Mutex::new(()),
            work: Condvar::new(),
            left: Condvar::new(),
            panic: Mutex::independent(None),
        });
        let counters = (0..threads.get()).map(|_| PartCounter::default()).collect();
        let mut started = ThreadPool { shared: Arc::clone(&shared), helpers: Vec::new(), counters };
        for number in 1..threads.get() {
            let shared = Arc::clone(&shared);
            // The helper catches panics of its work; if it ended otherwise, every later batch would wait for it
            // forever.
            let helper = task::thread(&format!("engine-{number}"), move || run_helper(&shared, number))?;
            started.helpers.push(helper);
        }
        Ok(started)
    }

    /// Returns the number of threads, including the caller.
    pub(super) fn count(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Processes every part once; `scratch` is the local memory of the threads, one element for each.
    pub(super) fn for_each<P: Parts, R: Send>(
        &mut self,
        scratch: &mut [R],
        parts: P,
        work: impl Fn(&mut R, P::Part) + Sync,
    ) {
        self.for_each_prepared(scratch, parts, |_| (), work);
    }

    /// Processes every part once; each thread that takes a part first prepares its local memory.
    pub(super) fn for_each_prepared<P: Parts, R: Send>(
        &mut self,
        scratch: &mut [R],
        parts: P,
        prepare: impl Fn(&mut R) + Sync,
        work: impl Fn(&mut R, P::Part) + Sync,
    ) {
        assert!(scratch.len() >= self.count(), "local memory for each thread");
        let scratch = PerThread(scratch.as_mut_ptr());
        let (total, threads) = (parts.len(), self.count());
        let group = (total / (GROUPS * threads)).max(1);
        let begin_of = |thread: usize| thread * total / threads;
        for (thread, counter) in self.counters.iter().enumerate() {
            // Helpers observe this store, like that of the job, when they enter.
            counter.0.store(begin_of(thread), Ordering::Relaxed);
        }
        self.run(total.div_ceil(group), &|thread| {
            // SAFETY: there is an element for each thread number, and each thread runs this once at a time.
            let local = unsafe { scratch.of(thread) };
            let mut prepared = false;
            // The thread's own parts first, then the remaining ones of the others.
            for owner in (thread..threads).chain(0..thread) {
                let end = begin_of(owner + 1);
                loop {
                    let first = self.counters[owner].0.fetch_add(group, Ordering::Relaxed);
                    if first >= end {
                        break;
                    }
                    if !prepared {
                        prepare(local);
                        prepared = true;
                    }
                    for index in first..(first + group).min(end) {
                        // SAFETY: the counter of an owner returns each index of its parts once, and is reset to the
                        // first one when no helper is inside; parts of different owners do not overlap and all indices
                        // are in range.
                        work(local, unsafe { parts.part(index) });
                    }
                }
            }
        });
    }

    /// Runs the job on this thread and on up to `useful_threads - 1` helpers. The caller has `&mut self`, so that one loop
    /// is open at a time.
    fn run(&self, useful_threads: usize, job: &(dyn Fn(usize) + Sync)) {
        if useful_threads <= 1 || self.helpers.is_empty() {
            return job(0);
        }
        self.open(useful_threads - 1, job);
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.close();
        let of_helper = self.shared.panic.lock().take();
        if let Some(panic) = own.err().or(of_helper) {
            resume_unwind(panic);
        }
    }

    /// Opens the gate for helpers.
    fn open(&self, helpers: usize, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        let gate = shared.gate();
        assert!(!gate.is_open() && gate.inside() == 0, "one loop at a time");
        // SAFETY: only the lifetime changes. Helpers read the job while they are inside; `close` prevents further ones
        // from entering and returns when none is inside, and `run` always calls it.
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                job,
            )
        };
        // SAFETY: the gate is closed and no helper is inside, so there are no readers; the caller has `&mut self` (see
        // `run`).
        unsafe { *shared.job.get() = Some(LoopBody(job)) };
        shared.gate.store(gate.next().0, Ordering::SeqCst);
        let asleep = shared.asleep.load(Ordering::SeqCst).min(helpers);
        if asleep > 0 {
            let _guard = shared.sleep_lock();
            for _ in 0..asleep {
                shared.work.notify_one();
            }
        }
    }

    /// Closes the gate and waits for the helpers inside.
    fn close(&self) {
        let shared = &*self.shared;
        shared.gate.fetch_and(!Gate::OPEN, Ordering::SeqCst);
        for _ in 0..SPINS {
            if shared.gate().inside() == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut sleep_lock = shared.sleep_lock();
        shared.waits.store(true, Ordering::SeqCst);
        while shared.gate().inside() > 0 {
            sleep_lock = shared.left.wait(sleep_lock);
        }
        shared.waits.store(false, Ordering::SeqCst);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep_lock();
            self.shared.work.notify_all();
        }
        for helper in self.helpers.drain(..) {
            helper.join().expect("a helper catches the panics of its work");
        }
    }
}

/// Main loop of a helper.
fn run_helper(shared: &Shared, number: usize) {
    let mut last_loop = 0;
    while let Some(job) = shared.enter(&mut last_loop) {
        // SAFETY: this thread is inside, and the job lives until it has left.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)(number) }));
        if let Err(panic) = done {
            *shared.panic.lock() = Some(panic);
        }
        shared.leave();
    }
}

/// Local memory of the threads, indexed by thread number.
struct PerThread<R>(*mut R);

// SAFETY: threads take different elements, and an element is `Send`.
unsafe impl<R: Send> Sync for PerThread<R> {}

impl<R> PerThread<R> {
    /// # Safety
    /// `number` is in range, and no other thread uses this element.
    #[expect(clippy::mut_from_ref, reason = "each caller gets another element")]
    unsafe fn of(&self, number: usize) -> &mut R {
        // SAFETY: guaranteed by the caller.
        unsafe { &mut *self.0.add(number) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::{Matrix, Partition};
    use super::*;
    use std::thread;

    fn threads(count: usize) -> ThreadPool {
        ThreadPool::new(NonZeroUsize::new(count).unwrap()).unwrap()
    }

    #[test]
    fn every_part_is_processed_once_for_any_number_of_threads() {
        for count in [1, 2, 5] {
            let mut threads = threads(count);
            let mut scratch = vec![0_usize; count];
            let mut matrix = Matrix::default();
            for rows in [0, 1, 2, 7, 1000] {
                matrix.resize(rows, 3);
                matrix.data_mut().fill(0.0);
                scratch.fill(0);
                let tiles = matrix.tiles(Partition::even(rows, rows, 1), Partition::even(3, 3, 1));
                threads.for_each(&mut scratch, tiles, |local, mut window| {
                    *local += window.rows().len();
                    for row in 0..window.rows().len() {
                        window.row_mut(row)[0] += 1.0;
                    }
                });
                assert!(matrix.data().iter().all(|times| *times == 1.0), "{rows} rows, {count} threads");
                assert_eq!(scratch.iter().sum::<usize>(), 3 * rows, "{rows} rows, {count} threads");
            }
        }
    }

    #[test]
    fn helpers_take_parts() {
        let mut threads = threads(2);
        let mut matrix = Matrix::default();
        matrix.resize(2, 1);
        // Each part waits for the other one to begin, so a single thread would never finish.
        let barrier = std::sync::Barrier::new(2);
        for _ in 0..100 {
            let tiles = matrix.tiles(Partition::even(2, 2, 1), Partition::whole(1));
            threads.for_each(&mut [(), ()], tiles, |(), _| {
                barrier.wait();
            });
        }
    }

    /// Loops in quick succession, and loops before which the helpers have gone to sleep: none is missed.
    #[test]
    fn helpers_join_every_loop_awake_or_asleep() {
        let mut threads = threads(3);
        let mut matrix = Matrix::default();
        matrix.resize(3, 1);
        let barrier = std::sync::Barrier::new(3);
        for round in 0..2_000 {
            if round % 400 == 0 {
                while threads.shared.asleep.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
            }
            let tiles = matrix.tiles(Partition::even(3, 3, 1), Partition::whole(1));
            threads.for_each(&mut [(), (), ()], tiles, |(), _| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_continue() {
        let mut threads = threads(3);
        let mut matrix = Matrix::default();
        matrix.resize(50, 1);
        for bad in 0..50 {
            let tiles = matrix.tiles(Partition::even(50, 50, 1), Partition::whole(1));
            let caught = catch_unwind(AssertUnwindSafe(|| {
                threads.for_each(&mut [(), (), ()], tiles, |(), window| {
                    assert!(window.rows().start != bad, "the bad one");
                });
            }));
            assert!(caught.is_err(), "{bad}");
        }
        let tiles = matrix.tiles(Partition::even(50, 50, 1), Partition::whole(1));
        threads.for_each(&mut [(), (), ()], tiles, |(), mut window| window.row_mut(0).fill(2.0));
        assert!(matrix.data().iter().all(|value| *value == 2.0));
    }
}
