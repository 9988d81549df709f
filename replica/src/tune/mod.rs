//! `meridian tune`: finds, for one model on one machine, how many threads, how many tokens in a batch, how long a window,
//! and which precision at what quality; and keeps it where a replica finds it.
//!
//! In reading order:
//!
//! 1. [`plan`] — what to measure next and what to choose: pure, tested on machines that are formulas.
//! 2. [`curve`] — what turns of one setting come to; [`quality`] — whether a precision is good enough.
//! 3. `measure` — the engine and the clock; `texts` — what quality is measured on.
//! 4. [`file`](mod@file) — what is written, and when it holds; [`adopt`] — what a replica makes of it.
//! 5. [`report`] — a table and JSON; [`plot`] — throughput against latency.

pub mod adopt;
pub mod curve;
pub mod file;
mod measure;
pub mod plan;
pub mod plot;
pub mod quality;
pub mod report;
pub(crate) mod texts;

use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use replica_core::Precision;
use replica_core::batch::BatchSettings;
use replica_core::input::Readable;
use tokio::runtime;

use self::curve::Point;
use self::file::{Hardware, Tuned};
use self::measure::Bench;
use self::plan::{Choice, Plan, Setting, Task};
use self::quality::Quality;
use crate::cache::{CachedModel, ModelCache};
use crate::engine::Engine;
use crate::engine::cpu::{Isa, PackedCache};
use crate::model::ModelDir;
use crate::tokenize::{EncodeOptions, TextInput, TextTokenizer, TokenizeError, Tokenized, TokenizerPool};

/// The least that says anything: the threads, a few budgets and the comparison, once each.
pub const SECONDS_LEAST: u64 = 5;
/// Beyond an hour nothing is learnt.
pub const SECONDS_MOST: u64 = 3600;
/// Under two minutes with what is beside the measuring.
pub const SECONDS: u64 = 100;
/// Texts by which precisions are compared.
const QUALITY_TEXTS: usize = 512;
/// The part of the time after which the texts compared so far have to do, for each precision.
const QUALITY_TIME: f64 = 0.1;
/// What precisions are compared with.
const REFERENCE: Precision = Precision::F32;

/// What is to be tuned, and how.
#[derive(Clone, Debug)]
pub struct Order {
    /// A model of the cache.
    pub model: CachedModel,
    /// The precisions to try; at least one.
    pub precisions: Vec<Precision>,
    /// See [`Task::target_p99`].
    pub target_p99: Option<Duration>,
    /// The time for everything.
    pub time: Duration,
    /// Where the file goes, if not into the cache.
    pub out: Option<PathBuf>,
}

/// Where tuning stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// A precision was compared with f32.
    Quality(Precision, Quality),
    /// A setting was measured.
    Measured {
        /// All of it so far.
        point: Point,
        /// Since the beginning.
        elapsed: Duration,
    },
    /// Before and after are being measured in alternation.
    Comparing {
        /// Since the beginning.
        elapsed: Duration,
    },
}

/// What tuning came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What was written.
    pub tuned: Tuned,
    /// Every setting that was measured.
    pub points: Vec<Point>,
    /// Each precision beside f32; also those that are not good enough, which were not measured further.
    pub qualities: Vec<(Precision, Quality)>,
    /// What a replica does untuned.
    pub before: Setting,
    /// Tokens per second before and after, measured in alternation; absent if there was no time.
    pub comparison: Option<(f64, f64)>,
    /// Where the settings are.
    pub file: PathBuf,
    /// Where the plot is.
    pub plot: PathBuf,
    /// How long it took.
    pub took: Duration,
    /// Others that wanted to run when it began, for each core: figures hold for an idle machine. Absent where the system
    /// does not say.
    pub others: Option<f64>,
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// The model cannot be loaded or computed.
    #[error("the model cannot be computed: {0}")]
    Engine(String),
    /// The texts for the quality did not become tokens.
    #[error("the texts that precisions are compared by cannot be tokenised: {0}")]
    Tokenizer(String),
    /// None of the texts is short enough for the model.
    #[error(
        "no text is short enough for this model, so the quality of a precision cannot be measured; tune f32 alone"
    )]
    NoTexts,
    /// No precision is good enough.
    #[error(
        "{precision} comes to a mean cosine of {:.4} and a least one of {:.4} beside f32, which is not good enough; \
         add f32 to the precisions",
        quality.mean_cosine, quality.min_cosine
    )]
    NotGoodEnough {
        /// The best of those that were asked for.
        precision: Precision,
        /// What it comes to.
        quality: Quality,
    },
    /// There was not even time for one setting of each kind.
    #[error("nothing could be measured in that time; give more seconds")]
    NoTime,
    /// The file cannot be written.
    #[error("cannot write {path}: {reason}; give another place with --out", path = path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
}

impl TuneError {
    fn engine(problem: impl std::fmt::Display) -> TuneError {
        TuneError::Engine(problem.to_string())
    }
}

/// Tunes, and writes what was found.
pub fn run(
    cache: &ModelCache,
    order: Order,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, TuneError> {
    let begin = Instant::now();
    let others = others();
    let Order { model: cached, precisions, target_p99, time, out } = order;
    let model = ModelDir::open(&cached.path).map_err(TuneError::engine)?;
    let threads_most = available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let (lower_case, template) = (model.sentence.lower_case, model.template.clone());
    let config = model.tokenizer.clone();
    let mut bench = Bench::new(model, PackedCache::below(cache.root(), &cached.digest));

    let reading = |bench: &mut Bench| -> Result<Vec<Tokenized>, TuneError> {
        let described = bench.engine(REFERENCE, threads_most)?.describe();
        let readable = Readable { max_input_tokens: described.max_tokens, vocabulary: described.vocabulary };
        let (pairs, template) = (template.is_some(), template.clone());
        let tokenizer = TextTokenizer::load_from(
            &cached.path,
            &config,
            lower_case,
            template,
            readable,
            described.token_types,
        );
        tokens(tokenizer.map_err(|error| TuneError::Tokenizer(error.to_string()))?, pairs, threads_most)
    };
    let (mut qualities, mut good) = (Vec::new(), Vec::new());
    for precision in precisions {
        if precision == REFERENCE {
            good.push(precision);
            continue;
        }
        let texts = reading(&mut bench)?;
        let limit = time.mul_f64(QUALITY_TIME);
        let quality = bench.quality(precision, REFERENCE, threads_most, &texts, limit)?;
        progress(Progress::Quality(precision, quality));
        qualities.push((precision, quality));
        if quality.suffices() {
            good.push(precision);
        }
    }
    if good.is_empty() {
        let best = qualities.into_iter().max_by(|(_, a), (_, b)| a.mean_cosine.total_cmp(&b.mean_cosine));
        let (precision, quality) = best.ok_or(TuneError::NoTime)?;
        return Err(TuneError::NotGoodEnough { precision, quality });
    }

    let before = Setting {
        precision: if good.contains(&REFERENCE) { REFERENCE } else { good[0] },
        threads: threads_most,
        batch_tokens: BatchSettings::default().batch_tokens,
    };
    let mut plan = Plan::new(Task { precisions: good, threads_most, before, time, target_p99 });
    while let Some(setting) = plan.next(begin.elapsed()) {
        let turn = bench.turn(setting)?;
        plan.record(setting, turn);
        let elapsed = begin.elapsed();
        let measured = plan.points().into_iter().find(|point| point.setting == setting);
        match measured {
            Some(point) if !plan.is_comparing() => progress(Progress::Measured { point, elapsed }),
            _ => progress(Progress::Comparing { elapsed }),
        }
    }
    let choices = plan.choices();
    if choices.is_empty() {
        return Err(TuneError::NoTime);
    }
    let hardware = Hardware::here(Isa::best().name());
    let file = out.unwrap_or_else(|| file::place(cache.root(), &cached.digest, &hardware));
    let tuned = Tuned { source: cached.source, digest: cached.digest, hardware, choices };
    let report = Report {
        points: plan.points(),
        comparison: plan.comparison(),
        plot: file.with_extension("svg"),
        tuned,
        qualities,
        before,
        file,
        took: begin.elapsed(),
        others,
    };
    keep(&report)?;
    Ok(report)
}

/// The load of the last minute, for each core; Linux says it.
fn others() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let load: f64 = text.split(' ').next()?.parse().ok()?;
    Some(load / available_parallelism().unwrap_or(NonZeroUsize::MIN).get() as f64)
}

/// Writes the file and the plot beside it.
fn keep(report: &Report) -> Result<(), TuneError> {
    let Report { tuned, points, qualities, file, plot, .. } = report;
    let title = format!("{} on {}", tuned.source, tuned.hardware);
    let write = |path: &PathBuf, text: &str| {
        file::write(path, text).map_err(|reason| TuneError::Write { path: path.clone(), reason })
    };
    write(plot, &plot::svg(&title, points, &tuned.choices))?;
    write(file, &file::text(tuned, qualities, points))
}

/// What texts are judged by, where a model judges them.
const QUERY: &str = "who repaired the old lighthouse?";

/// The tokens of the texts for the quality, behind [`QUERY`] if only pairs are read; those that are too long for the
/// model are left out.
fn tokens(tokenizer: TextTokenizer, pairs: bool, threads: NonZeroUsize) -> Result<Vec<Tokenized>, TuneError> {
    let broken = |problem: String| TuneError::Tokenizer(problem);
    let pool = TokenizerPool::start(tokenizer, threads.get()).map_err(|error| broken(error.to_string()))?;
    let runtime =
        runtime::Builder::new_current_thread().build().map_err(|error| broken(error.to_string()))?;
    let mut tokens = Vec::new();
    for text in texts::sentences(QUALITY_TEXTS) {
        let text = if pairs { TextInput::Pair(QUERY.into(), text) } else { TextInput::One(text) };
        match runtime.block_on(pool.encode(vec![text], EncodeOptions::WHOLE)) {
            Ok(read) => tokens.extend(read),
            Err(TokenizeError::Unreadable { .. }) => {}
            Err(error) => return Err(broken(format!("{error:?}"))),
        }
    }
    Ok(tokens)
}

impl Report {
    /// What is recommended.
    pub fn choice(&self) -> &Choice {
        self.tuned.choices.first().expect("a report has a choice")
    }
}
