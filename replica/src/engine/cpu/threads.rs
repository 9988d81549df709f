//! The engine's threads: parts of one result are computed by whoever is free.
//!
//! [`Threads::for_each`] is a parallel loop. The caller works too; the others are woken, take the next part as long as
//! there is one, and go. Parts are handed out one by one (in groups when there are very many), because cores are shared
//! with other processes: a thread that is not running takes nothing, and the rest do its share. For the same reason
//! the caller waits only for those who have taken something, never for a thread to wake up and find nothing to do.
//!
//! A batch is some dozen such loops in a row. Between two of them threads spin for [`SPINS`], which is microseconds; then
//! they sleep. An idle engine costs nothing.

use std::any::Any;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::matrix::Parts;

/// Looks at the state before sleeping: about 3 µs at 140 cycles a pause, or 1 µs on processors whose pause is short.
/// Loops of one batch follow each other faster than that, and waking a sleeping thread takes longer.
const SPINS: usize = 64;

/// Groups of parts per thread, when parts are many: enough to even out, few enough to be cheap.
const GROUPS: usize = 8;

/// Some threads and a place to leave work for them.
pub(super) struct Threads {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Something was left to do, or it is over.
    work: Condvar,
    /// The last helper has left the loop.
    left: Condvar,
    /// [`State::loops`], to look at without the lock.
    loops: AtomicUsize,
    /// [`State::inside`], to look at without the lock.
    inside: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// What to run, while helpers may still enter.
    job: Option<Job>,
    /// Loops begun so far.
    loops: usize,
    /// Helpers that are running the job.
    inside: usize,
    asleep: usize,
    closing: bool,
    panic: Option<Box<dyn Any + Send>>,
}

/// What every thread runs, with its number: a borrow from the stack of [`Threads::run`], whose lifetime is forgotten.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(usize) + Sync));

// SAFETY: what is behind the pointer is `Sync`, and `Threads::run` keeps it alive until all helpers have left it.
unsafe impl Send for Job {}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    /// So many threads, the caller included.
    pub(super) fn new(threads: NonZeroUsize) -> std::io::Result<Threads> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            work: Condvar::new(),
            left: Condvar::new(),
            loops: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
        });
        let mut started = Threads { shared: Arc::clone(&shared), helpers: Vec::new() };
        for number in 1..threads.get() {
            let shared = Arc::clone(&shared);
            let helper = thread::Builder::new()
                .name(format!("engine-{number}"))
                .spawn(move || help(&shared, number))?;
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
        let total = parts.len();
        let group = (total / (GROUPS * self.count())).max(1);
        let next = AtomicUsize::new(0);
        self.run(total.div_ceil(group), &|thread| {
            // SAFETY: there is a room for each thread's number, and each thread runs this once at a time.
            let room = unsafe { rooms.of(thread) };
            let mut prepared = false;
            loop {
                let first = next.fetch_add(group, Ordering::Relaxed);
                if first < total && !prepared {
                    prepare(room);
                    prepared = true;
                }
                for index in first..(first + group).min(total) {
                    // SAFETY: the counter gives each index out once, and it is below the number of parts.
                    work(room, unsafe { parts.part(index) });
                }
                if first + group >= total {
                    return;
                }
            }
        });
    }

    /// Runs the job here, and on as many helpers as are free and of use.
    fn run(&mut self, of_use: usize, job: &(dyn Fn(usize) + Sync)) {
        if of_use <= 1 || self.helpers.is_empty() {
            return job(0);
        }
        self.leave(of_use - 1, job);
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        let of_helper = self.take_back();
        if let Some(panic) = own.err().or(of_helper) {
            resume_unwind(panic);
        }
    }

    fn leave(&self, helpers: usize, job: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes. Helpers enter the job while it stands in the state and are counted as they
        // do; `take_back` removes it and returns when the count is zero, and `run` always comes to it.
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(
                job,
            )
        };
        let mut state = self.shared.state();
        state.job = Some(Job(job));
        state.loops += 1;
        self.shared.loops.store(state.loops, Ordering::Release);
        let woken = state.asleep.min(helpers);
        drop(state);
        for _ in 0..woken {
            self.shared.work.notify_one();
        }
    }

    /// Lets no more helpers in and waits for those inside. Comes to what one of them panicked with.
    fn take_back(&self) -> Option<Box<dyn Any + Send>> {
        self.shared.state().job = None;
        for _ in 0..SPINS {
            if self.shared.inside.load(Ordering::Acquire) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.shared.state();
        while state.inside > 0 {
            state = self.shared.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.panic.take()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.work.notify_all();
        for helper in self.helpers.drain(..) {
            helper.join().expect("a helper catches the panics of its work");
        }
    }
}

/// The life of a helper.
fn help(shared: &Shared, number: usize) {
    let mut seen = 0;
    while let Some((job, loops)) = next_job(shared, seen) {
        seen = loops;
        // SAFETY: this thread was counted into the job under the lock, and the job lives until it is counted out.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)(number) }));
        let mut state = shared.state();
        if let Err(panic) = done {
            state.panic = Some(panic);
        }
        state.inside -= 1;
        shared.inside.store(state.inside, Ordering::Release);
        if state.inside == 0 {
            shared.left.notify_one();
        }
    }
}

/// Waits for a loop that this helper has not seen and enters it; `None` when it is over.
fn next_job(shared: &Shared, mut seen: usize) -> Option<(Job, usize)> {
    loop {
        for _ in 0..SPINS {
            if shared.loops.load(Ordering::Acquire) != seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = shared.state();
        while !state.closing && state.loops == seen {
            state.asleep += 1;
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
        if state.closing {
            return None;
        }
        if let Some(job) = state.job {
            state.inside += 1;
            shared.inside.store(state.inside, Ordering::Release);
            return Some((job, state.loops));
        }
        // Too late for that one; the next one is near.
        seen = state.loops;
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
