//! Traces that are off and on in turns, for `gateway/benches/proxy/alternate.py`; only with the feature `alternate-traces`.
//!
//! Two processes with the same configuration differ in CPU time by more than traces cost, and the load of a virtual machine's host
//! changes within seconds. So the cost is measured within a process, in slots of some milliseconds, off and on in random order.

use rand::Rng;
use std::fs::{self, File};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Variable with the file that the figures of the slots are written to.
const FILE_VARIABLE: &str = "MERIDIAN_ALTERNATE_TRACES";
/// Variable with the duration of a slot in milliseconds.
const SLOT_VARIABLE: &str = "MERIDIAN_ALTERNATE_TRACES_SLOT_MS";
/// Time after a change that is not measured, in which the requests in flight end.
const CHANGE: Duration = Duration::from_millis(8);

static IS_ON: AtomicBool = AtomicBool::new(true);
static REQUESTS: AtomicU64 = AtomicU64::new(0);

/// Counts a request, and returns whether traces are on.
pub(crate) fn is_on() -> bool {
    REQUESTS.fetch_add(1, Ordering::Relaxed);
    IS_ON.load(Ordering::Relaxed)
}

/// Starts a thread that changes the state until the process ends, if the environment names a file. It writes a line for each pair of
/// slots: nanoseconds of CPU time and requests while off, and the same while on.
pub(crate) fn start() {
    let Ok(path) = std::env::var(FILE_VARIABLE) else { return };
    let slot_ms = std::env::var(SLOT_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    std::thread::spawn(move || {
        if let Err(error) = alternate(&path, Duration::from_millis(slot_ms)) {
            eprintln!("{FILE_VARIABLE}={path}: {error}; traces are no longer switched");
        }
    });
}

fn alternate(path: &str, slot: Duration) -> io::Result<()> {
    let mut file = File::create(path)?;
    loop {
        let first: bool = rand::rng().random();
        let mut figures = [(0, 0); 2];
        for is_on in [first, !first] {
            IS_ON.store(is_on, Ordering::Relaxed);
            std::thread::sleep(CHANGE);
            let before = (cpu_ns()?, REQUESTS.load(Ordering::Relaxed));
            std::thread::sleep(slot);
            let after = (cpu_ns()?, REQUESTS.load(Ordering::Relaxed));
            figures[usize::from(is_on)] = (after.0 - before.0, after.1 - before.1);
        }
        let [(off_ns, off), (on_ns, on)] = figures;
        file.write_all(format!("{off_ns} {off} {on_ns} {on}\n").as_bytes())?;
    }
}

/// Returns the CPU time of all threads of the process in nanoseconds.
fn cpu_ns() -> io::Result<u64> {
    let mut total = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        total += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(total)
}
