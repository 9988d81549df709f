//! Cost of each role in a simulated fleet: `cargo bench -p scheduler-core --bench fleet [-- SECONDS [DEPLOYMENTS]]`.
//!
//! 64 regions with three spokes each, 32 gateways, and up to 1,000 deployments in every region. The hub, one spoke and
//! one gateway run, with the messages of all others, in simulated time. These are the real cores, encoders and
//! decoders, without sockets, files and tasks. Three situations: all deployments sleep; a tenth of them has a ready
//! replica; and, beside that, one deployment of a hundred changes in every region each second.
//!
//! For each role the benchmark prints the bytes that it sends and receives, its CPU time, and the memory that is free
//! after it is dropped. CPU time is that of the process (user and system), so other processes hardly matter. Bytes are
//! those on a network: bodies, heads of HTTP, TLS records, TCP and IP headers and acknowledgements ([`wire`]).
//! docs/benchmark-method.md describes the output.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "an unexpected value ends the bench there")]

mod gateway;
mod hub;
mod spoke;
mod wire;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use regions::{Catalogue, DeploymentName, RegionId};
use rustix::time::{ClockId, clock_gettime};
use wire::Traffic;

pub(crate) const REGIONS: usize = 64;
pub(crate) const SPOKES: usize = 3;
pub(crate) const GATEWAYS: usize = 32;

/// System allocator that counts the allocated bytes.
struct CountingAllocator;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator is unsafe to implement; this one forwards every call")]
// SAFETY: every call is forwarded to the system allocator with the same arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `at` was returned by `alloc` above, and so by the system allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// State of the deployments in every region.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum DeploymentState {
    /// All deployments sleep.
    Asleep,
    /// A tenth of them has a ready replica.
    Ready,
    /// So has a tenth, and a hundredth changes each second: it becomes ready, or is removed.
    Changing,
}

/// Size and state of a simulated fleet.
#[derive(Clone, Copy)]
pub(crate) struct BenchParameters {
    pub(crate) deployments: usize,
    pub(crate) state: DeploymentState,
    pub(crate) seconds: usize,
}

impl BenchParameters {
    /// Returns the number of deployments with a ready replica.
    pub(crate) fn ready(self) -> usize {
        if self.state == DeploymentState::Asleep { 0 } else { self.deployments.div_ceil(10) }
    }

    /// Returns the deployments that change in a second, by number.
    pub(crate) fn changing(self, second: usize) -> impl Iterator<Item = usize> {
        let count = if self.state == DeploymentState::Changing { self.deployments.div_ceil(100) } else { 0 };
        (0..count).map(move |number| (second * count + number) % self.deployments)
    }

    pub(crate) fn names(self) -> Vec<DeploymentName> {
        (0..self.deployments)
            .map(|number| format!("team-{}-embed-{number}", number % 37).parse().unwrap())
            .collect()
    }
}

/// Role while it is measured: traffic and CPU time.
#[derive(Default)]
pub(crate) struct CpuMeter {
    pub(crate) traffic: Traffic,
    cpu: Duration,
}

impl CpuMeter {
    /// Measures work of the role.
    pub(crate) fn run<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let before = cpu_time();
        let result = work();
        self.cpu += cpu_time().saturating_sub(before);
        result
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// Returns the regions of the fleet.
pub(crate) fn regions(catalogue: &Catalogue) -> Vec<RegionId> {
    let all: Vec<_> = catalogue.iter().map(|(_, region)| region.id.clone()).collect();
    let routed: Vec<_> = all.iter().step_by(all.len() / REGIONS).take(REGIONS).cloned().collect();
    assert_eq!(routed.len(), REGIONS);
    routed
}

/// Drops a role and prints its line.
fn report<T>(name: &str, parameters: BenchParameters, pairs: usize, (role, meter): (T, CpuMeter)) {
    let before = ALLOCATED.load(Ordering::Relaxed);
    drop(role);
    let memory = before - ALLOCATED.load(Ordering::Relaxed);
    let seconds = parameters.seconds as f64;
    let Traffic { sent, received } = meter.traffic;
    let rate = |bytes: u64| bytes as f64 / seconds / 1e3;
    let state = match parameters.state {
        DeploymentState::Asleep => "asleep",
        DeploymentState::Ready => "10 % ready",
        DeploymentState::Changing => "1 %/s change",
    };
    println!(
        "{:<14}{:>6}  {name:<9}{:>12.1}{:>12.1}{:>12.2}{:>12.1}{:>12.1}",
        state,
        parameters.deployments,
        rate(sent),
        rate(received),
        rate(sent + received) / pairs as f64,
        meter.cpu.as_secs_f64() / seconds * 1e3,
        memory as f64 / 1e6,
    );
}

fn main() {
    // Cargo passes `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let seconds = arguments.next().map_or(60, |text| text.parse().unwrap());
    let only: Option<usize> = arguments.next().map(|text| text.parse().unwrap());
    println!("{REGIONS} regions x {SPOKES} spokes x {GATEWAYS} gateways, {seconds} simulated seconds");
    println!(
        "{:<14}{:>6}  {:<9}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "deployments", "", "role", "kB/s out", "kB/s in", "kB/s/peer", "CPU ms/s", "MB"
    );
    let begun = Instant::now();
    for state in [DeploymentState::Asleep, DeploymentState::Ready, DeploymentState::Changing] {
        for deployments in [1, 100, 1_000].into_iter().filter(|count| only.is_none_or(|only| only == *count))
        {
            let parameters = BenchParameters { deployments, state, seconds };
            report("hub", parameters, GATEWAYS + REGIONS * SPOKES, hub::run(parameters, begun));
            report("spoke", parameters, GATEWAYS, spoke::run(parameters, begun));
            report("gateway", parameters, REGIONS * SPOKES, gateway::run(parameters, begun));
        }
    }
}
