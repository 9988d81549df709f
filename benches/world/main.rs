//! Benchmarks of a complete fleet under overload, grey failures and cold starts: `cargo bench -p meridian --bench fleet`.
//!
//! `-- surge`, `-- measure` and `-- cold` select one of the three ([`surge`], [`measure`], [`cold`]); `-- credits`, `-- home`,
//! `-- no-hub`, `-- replica` and `-- region` select a single run. Each run of the first two has a separate fleet ([`fleet`])
//! of real processes with scripted replicas ([`replica`]), so that the results depend on routing and not on the speed of
//! this machine. The third one has real engines.

#![expect(clippy::unwrap_used, reason = "a panic ends the benchmark at the right line")]

mod cold;
mod fleet;
mod grey;
mod replica;
mod surge;

fn main() {
    fleet::become_replica();
    // Cargo passes `--bench` to every benchmark.
    let given: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let selected =
        |names: &[&str]| given.is_empty() || given.iter().any(|word| names.contains(&word.as_str()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // All runs are on this thread, which lives as long as the process: children end with the thread that started them.
    let runs: Vec<_> =
        surge::SurgeRun::ALL.into_iter().filter(|run| selected(&["surge", run.name()])).collect();
    if !runs.is_empty() {
        surge::run(&runtime, &runs);
    }
    for (name, slow) in [("replica", 1), ("region", grey::REPLICAS)] {
        if selected(&["grey", name]) {
            grey::run(&runtime, slow);
        }
    }
    if selected(&["cold"]) {
        cold::run(&runtime);
    }
}
