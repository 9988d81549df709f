//! What a whole world does under load that is too much, or with a part that is slow: `cargo bench -p meridian --bench world`.
//!
//! `-- surge`, `-- grey` and `-- cold` take one of the three alone ([`surge`], [`grey`], [`cold`]); `-- credits`, `-- home`,
//! `-- no-hub`, `-- replica` and `-- region` a single run. Each run of the first two has a world of its own ([`scene`]) of real
//! processes, but for the engines, which take their time and compute nothing ([`replica`]): what is measured is what becomes of
//! requests and not how fast this machine is. In the third the engines are real.

#![expect(clippy::unwrap_used, reason = "a bench of what it made itself")]

mod cold;
mod grey;
mod replica;
mod scene;
mod surge;

fn main() {
    scene::become_replica();
    // Cargo says `--bench` to every bench.
    let given: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wanted = |names: &[&str]| given.is_empty() || given.iter().any(|word| names.contains(&word.as_str()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // All on this thread, which lives as long as the process: what is started ends with the thread that started it.
    let runs: Vec<_> = surge::Run::ALL.into_iter().filter(|run| wanted(&["surge", run.name()])).collect();
    if !runs.is_empty() {
        surge::run(&runtime, &runs);
    }
    for (name, slow) in [("replica", 1), ("region", grey::REPLICAS)] {
        if wanted(&["grey", name]) {
            grey::run(&runtime, slow);
        }
    }
    if wanted(&["cold"]) {
        cold::run(&runtime);
    }
}
