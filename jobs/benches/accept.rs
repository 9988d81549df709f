//! Durable submissions per second of a queue on this disk: `cargo bench -p jobs --bench accept`.
//!
//! Prints the time of an fsync alone, of a file and its folder, for comparison. One thread runs the clients and the queue;
//! the log and the object store have threads of their own. `CALLERS` (64) clients send their next job after a response.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by a panic")]

#[path = "../tests/fixture/mod.rs"]
mod fixture;

use bytes::Bytes;
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Bytes of a payload: a request with one text of some 50 words.
const PAYLOAD_BYTES: usize = 300;
const SECONDS: u64 = 5;

fn fsync_time(folder: &Path) -> Duration {
    let begun = Instant::now();
    for number in 0..200 {
        let path = folder.join(format!("fsync {number}"));
        std::fs::write(&path, vec![0; PAYLOAD_BYTES]).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        std::fs::File::open(folder).unwrap().sync_all().unwrap();
    }
    begun.elapsed() / 200
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

async fn measure(folder: &Path, callers: usize, keys: &[[u8; 32]]) {
    let host = fixture::open(folder, fixture::config(3, Duration::from_secs(1)), keys).await;
    let spec = fixture::spec("a");
    let (begun, cpu, count) = (Instant::now(), cpu_time(), Rc::new(Cell::new(0u64)));
    let clients = tokio::task::LocalSet::new();
    for _ in 0..callers {
        let (host, spec, count) = (host.clone(), spec.clone(), count.clone());
        clients.spawn_local(async move {
            while begun.elapsed() < Duration::from_secs(SECONDS) {
                host.submit(spec.clone(), Bytes::from_static(&[7; PAYLOAD_BYTES])).await.unwrap();
                count.set(count.get() + 1);
            }
        });
    }
    clients.await;
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    println!(
        "{callers:>7}  {:<9}  {:>8.0}  {:>14.2}  {:>16.2}",
        if keys.is_empty() { "no" } else { "AES-256" },
        count.get() as f64 / seconds,
        callers as f64 / (count.get() as f64 / seconds) * 1000.0,
        cpu / seconds,
    );
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // Not in memory: /tmp may be.
    let parent = std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| ".".into());
    let dir = tempfile::tempdir_in(parent).unwrap();
    println!("fsync of a new file and its folder: {:.2} ms", fsync_time(dir.path()).as_secs_f64() * 1000.0);
    println!("callers  encrypted    jobs/s  ms per response  cores of CPU time");
    for (number, (callers, keys)) in [(1, 0), (64, 0), (64, 1), (512, 0)].into_iter().enumerate() {
        let folder = dir.path().join(number.to_string());
        std::fs::create_dir(&folder).unwrap();
        measure(&folder, callers, &[[1; 32]][..keys]).await;
    }
}
