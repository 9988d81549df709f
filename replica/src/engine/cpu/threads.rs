//! The engine's threads: parts of one result are computed by whoever is free.
//!
//! [`Threads::for_each`] is a parallel loop. The caller works too; the others are woken, take the next part as long as
//! there is one, and go. Parts are handed out one by one (in groups when there are very many), because cores are shared
//! with other processes: a thread that is not running takes nothing, and the rest do its share. For the same reason
//! the caller waits only for those who have taken something, never for a thread to wake up and find nothing to do.
//!
//! Each thread begins with parts of its own, the same ones in every loop of so many parts, and takes others' when it is
//! through with them. So it finds the weights, or the rows, that it had the last time in its own caches, of which the last
//! one may be too small for all: a core read its half of 42 MB at 65 GB/s, and all of it at 35.
//!
//! A batch is some dozen such loops in a row, of a few to a few hundred microseconds each, so what threads need to meet
//! is part of what a short text takes. A loop is opened, entered, left and closed by atomic operations on one word, the
//! [gate](Gate); between two loops, and at the end of one, threads spin for [`SPINS`] and only then sleep. An idle engine
//! costs nothing.

use std::any::Any;
use std::cell::UnsafeCell;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use supervision::{Condvar, Mutex, MutexGuard, task};

use super::matrix::Parts;

/// Looks at the gate before sleeping: about 100 µs at 140 cycles a pause, or 20 µs on processors whose pause is short.
/// Loops of one batch follow each other faster than that, and waking a sleeping thread takes longer than most of them:
/// with 3 µs a short text took 2.1 ms where it now takes 1.5 (MiniLM in f32, two threads, Sapphire Rapids, November 2026).
const SPINS: usize = 2048;

/// Groups of parts per thread, when parts are many: enough to even out, few enough to be cheap.
const GROUPS: usize = 8;

/// Some threads and a place to leave work for them.
pub(super) struct Threads {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// One for each thread.
    shares: Vec<Share>,
}

/// Which of its own parts a thread has next. Each has a cache line for itself.
#[derive(Default)]
#[repr(align(64))]
struct Share(AtomicUsize);

struct Shared {
    /// A [`Gate`].
    gate: AtomicU64,
    /// What the loop runs. The caller writes it while the gate is closed and nobody is inside, and only who is inside
    /// reads it.
    job: UnsafeCell<Option<Job>>,
    /// Helpers that sleep, or are about to.
    asleep: AtomicUsize,
    /// Whether the caller sleeps until the last helper has left, or is about to.
    waits: AtomicBool,
    closing: AtomicBool,
    /// Held by whoever goes to sleep, from saying so until it sleeps, and by whoever wakes somebody.
    bed: Mutex<()>,
    /// A loop was opened, or it is over.
    work: Condvar,
    /// The last helper has left the loop.
    left: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: everything but the job is made to be shared. Who may touch the job, and when, is said at the job and kept by the
// gate: `Threads::open` and `Threads::close`, and `enter`.
unsafe impl Sync for Shared {}

/// The state of the loop at hand, in one word: its number, whether helpers may enter, how many are inside.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Gate(u64);

impl Gate {
    const INSIDE: u64 = (1 << 16) - 1;
    const OPEN: u64 = 1 << 16;

    /// Of loops begun so far.
    fn number(self) -> u64 {
        self.0 >> 17
    }

    fn is_open(self) -> bool {
        self.0 & Gate::OPEN != 0
    }

    fn inside(self) -> u64 {
        self.0 & Gate::INSIDE
    }

    /// The next loop, open and empty.
    fn next(self) -> Gate {
        Gate((self.number() + 1) << 17 | Gate::OPEN)
    }
}

/// What every thread runs, with its number: a borrow from the stack of [`Threads::run`], whose lifetime is forgotten.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: what is behind the pointer is `Sync`, and `Threads::run` keeps it alive until all helpers have left it.
unsafe impl Send for Job {}

impl Shared {
    fn gate(&self) -> Gate {
        // Sequentially consistent, like everything that is written before somebody decides to sleep and looked at before
        // somebody is woken: of the two who cross each other, one sees the other.
        Gate(self.gate.load(Ordering::SeqCst))
    }

    fn bed(&self) -> MutexGuard<'_, ()> {
        self.bed.lock()
    }

    /// Waits for a loop that this helper has not seen, and enters it; `None` when it is over.
    fn enter(&self, seen: &mut u64) -> Option<Job> {
        loop {
            let mut gate = self.await_loop(*seen)?;
            *seen = gate.number();
            while gate.is_open() && gate.number() == *seen {
                let entered =
                    self.gate.compare_exchange(gate.0, gate.0 + 1, Ordering::SeqCst, Ordering::SeqCst);
                match entered {
                    // SAFETY: this thread is inside, so the caller does not write.
                    Ok(_) => return unsafe { *self.job.get() },
                    Err(now) => gate = Gate(now),
                }
            }
            // Too late for that one; the next one is near.
        }
    }

    /// The gate of a loop that is not the one with this number; `None` when it is over.
    fn await_loop(&self, seen: u64) -> Option<Gate> {
        for _ in 0..SPINS {
            let gate = self.gate();
            if gate.number() != seen {
                return Some(gate);
            }
            std::hint::spin_loop();
        }
        let mut bed = self.bed();
        self.asleep.fetch_add(1, Ordering::SeqCst);
        while !self.closing.load(Ordering::SeqCst) && self.gate().number() == seen {
            bed = self.work.wait(bed);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        (!self.closing.load(Ordering::SeqCst)).then(|| self.gate())
    }

    /// This helper is through with the loop.
    fn leave(&self) {
        let before = Gate(self.gate.fetch_sub(1, Ordering::SeqCst));
        if before.inside() == 1 && self.waits.load(Ordering::SeqCst) {
            let _bed = self.bed();
            self.left.notify_one();
        }
    }
}

impl Threads {
    /// So many threads, the caller included.
    pub(super) fn new(threads: NonZeroUsize) -> std::io::Result<Threads> {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            asleep: AtomicUsize::new(0),
            waits: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            bed: Mutex::new(()),
            work: Condvar::new(),
            left: Condvar::new(),
            panic: Mutex::independent(None),
        });
        let shares = (0..threads.get()).map(|_| Share::default()).collect();
        let mut started = Threads { shared: Arc::clone(&shared), helpers: Vec::new(), shares };
        for number in 1..threads.get() {
            let shared = Arc::clone(&shared);
            // It catches what its work panics with; one that ended otherwise would be waited for by every later batch.
            let helper = task::thread(&format!("engine-{number}"), move || help(&shared, number))?;
            started.helpers.push(helper);
        }
        Ok(started)
    }

    /// How many, the caller included.
    pub(super) fn count(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Works on every part once; `rooms` are the threads' own places to work, one for each.
    pub(super) fn for_each<P: Parts, R: Send>(
        &mut self,
        rooms: &mut [R],
        parts: P,
        work: impl Fn(&mut R, P::Part) + Sync,
    ) {
        self.for_each_prepared(rooms, parts, |_| (), work);
    }

    /// The same, after each thread that takes a part has prepared its room.
    pub(super) fn for_each_prepared<P: Parts, R: Send>(
        &mut self,
        rooms: &mut [R],
        parts: P,
        prepare: impl Fn(&mut R) + Sync,
        work: impl Fn(&mut R, P::Part) + Sync,
    ) {
        assert!(rooms.len() >= self.count(), "a room for each thread");
        let rooms = Rooms(rooms.as_mut_ptr());
        let (total, threads) = (parts.len(), self.count());
        let group = (total / (GROUPS * threads)).max(1);
        let begin_of = |thread: usize| thread * total / threads;
        for (thread, share) in self.shares.iter().enumerate() {
            // Helpers see it, as they see the job, when they enter.
            share.0.store(begin_of(thread), Ordering::Relaxed);
        }
        self.run(total.div_ceil(group), &|thread| {
            // SAFETY: there is a room for each thread's number, and each thread runs this once at a time.
            let room = unsafe { rooms.of(thread) };
            let mut prepared = false;
            // One's own parts, and then those of the others that are left.
            for owner in (thread..threads).chain(0..thread) {
                let end = begin_of(owner + 1);
                loop {
                    let first = self.shares[owner].0.fetch_add(group, Ordering::Relaxed);
                    if first >= end {
                        break;
                    }
                    if !prepared {
                        prepare(room);
                        prepared = true;
                    }
                    for index in first..(first + group).min(end) {
                        // SAFETY: an owner's counter gives each index of its parts out once, and begins with the first one
                        // when nobody is inside; owners' parts do not overlap and end where all do.
                        work(room, unsafe { parts.part(index) });
                    }
                }
            }
        });
    }

    /// Runs the job here, and on as many helpers as are free and of use.
    /// Called by who has `&mut self`, so that one loop is open at a time.
    fn run(&self, of_use: usize, job: &(dyn Fn(usize) + Sync)) {
        if of_use <= 1 || self.helpers.is_empty() {
            return job(0);
        }
        self.open(of_use - 1, job);
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        self.close();
        let of_helper = self.shared.panic.lock().take();
        if let Some(panic) = own.err().or(of_helper) {
            resume_unwind(panic);
        }
    }

    /// Lets helpers in.
    fn open(&self, helpers: usize, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        let gate = shared.gate();
        assert!(!gate.is_open() && gate.inside() == 0, "one loop at a time");
        // SAFETY: only the lifetime changes. Helpers read the job while they are inside; `close` lets no more of them in
        // and returns when none is inside, and `run` always comes to it.
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                job,
            )
        };
        // SAFETY: the gate is closed and nobody is inside, so nobody reads; and who comes here has `&mut self` (see `run`).
        unsafe { *shared.job.get() = Some(Job(job)) };
        shared.gate.store(gate.next().0, Ordering::SeqCst);
        let asleep = shared.asleep.load(Ordering::SeqCst).min(helpers);
        if asleep > 0 {
            let _bed = shared.bed();
            for _ in 0..asleep {
                shared.work.notify_one();
            }
        }
    }

    /// Lets no more helpers in and waits for those inside.
    fn close(&self) {
        let shared = &*self.shared;
        shared.gate.fetch_and(!Gate::OPEN, Ordering::SeqCst);
        for _ in 0..SPINS {
            if shared.gate().inside() == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut bed = shared.bed();
        shared.waits.store(true, Ordering::SeqCst);
        while shared.gate().inside() > 0 {
            bed = shared.left.wait(bed);
        }
        shared.waits.store(false, Ordering::SeqCst);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        {
            let _bed = self.shared.bed();
            self.shared.work.notify_all();
        }
        for helper in self.helpers.drain(..) {
            helper.join().expect("a helper catches the panics of its work");
        }
    }
}

/// The life of a helper.
fn help(shared: &Shared, number: usize) {
    let mut seen = 0;
    while let Some(job) = shared.enter(&mut seen) {
        // SAFETY: this thread is inside, and the job lives until it has left.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)(number) }));
        if let Err(panic) = done {
            *shared.panic.lock() = Some(panic);
        }
        shared.leave();
    }
}

/// The threads' rooms, of which each takes its own.
struct Rooms<R>(*mut R);

// SAFETY: threads take different rooms, and a room may be sent.
unsafe impl<R: Send> Sync for Rooms<R> {}

impl<R> Rooms<R> {
    /// # Safety
    /// There is a room of this number, and nobody else has it.
    #[expect(clippy::mut_from_ref, reason = "each caller gets another room")]
    unsafe fn of(&self, number: usize) -> &mut R {
        // SAFETY: as the caller promises.
        unsafe { &mut *self.0.add(number) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::{Cut, Matrix};
    use super::*;
    use std::thread;

    fn threads(count: usize) -> Threads {
        Threads::new(NonZeroUsize::new(count).unwrap()).unwrap()
    }

    #[test]
    fn every_part_is_worked_on_once_however_many_threads_there_are() {
        for count in [1, 2, 5] {
            let mut threads = threads(count);
            let mut rooms = vec![0_usize; count];
            let mut matrix = Matrix::default();
            for rows in [0, 1, 2, 7, 1000] {
                matrix.resize(rows, 3);
                matrix.data_mut().fill(0.0);
                rooms.fill(0);
                let tiles = matrix.tiles(Cut::even(rows, rows, 1), Cut::even(3, 3, 1));
                threads.for_each(&mut rooms, tiles, |room, mut window| {
                    *room += window.rows().len();
                    for row in 0..window.rows().len() {
                        window.row_mut(row)[0] += 1.0;
                    }
                });
                assert!(matrix.data().iter().all(|times| *times == 1.0), "{rows} rows, {count} threads");
                assert_eq!(rooms.iter().sum::<usize>(), 3 * rows, "{rows} rows, {count} threads");
            }
        }
    }

    #[test]
    fn helpers_take_parts_too() {
        let mut threads = threads(2);
        let mut matrix = Matrix::default();
        matrix.resize(2, 1);
        // Each part waits for the other one to begin, so one thread alone would never come to an end.
        let barrier = std::sync::Barrier::new(2);
        for _ in 0..100 {
            let tiles = matrix.tiles(Cut::even(2, 2, 1), Cut::whole(1));
            threads.for_each(&mut [(), ()], tiles, |(), _| {
                barrier.wait();
            });
        }
    }

    /// Loops that follow each other at once, and loops before which the helpers have gone to sleep: none is lost.
    #[test]
    fn helpers_are_there_for_every_loop_awake_or_asleep() {
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
            let tiles = matrix.tiles(Cut::even(3, 3, 1), Cut::whole(1));
            threads.for_each(&mut [(), (), ()], tiles, |(), _| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_go_on() {
        let mut threads = threads(3);
        let mut matrix = Matrix::default();
        matrix.resize(50, 1);
        for bad in 0..50 {
            let tiles = matrix.tiles(Cut::even(50, 50, 1), Cut::whole(1));
            let caught = catch_unwind(AssertUnwindSafe(|| {
                threads.for_each(&mut [(), (), ()], tiles, |(), window| {
                    assert!(window.rows().start != bad, "the bad one");
                });
            }));
            assert!(caught.is_err(), "{bad}");
        }
        let tiles = matrix.tiles(Cut::even(50, 50, 1), Cut::whole(1));
        threads.for_each(&mut [(), (), ()], tiles, |(), mut window| window.row_mut(0).fill(2.0));
        assert!(matrix.data().iter().all(|value| *value == 2.0));
    }
}
