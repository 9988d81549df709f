//! `meridian tune`: finds threads, batch size, batching delay and precision for a model on a machine, and stores them
//! where replicas find them.
//!
//! In reading order:
//!
//! 1. [`plan`]: decides what to measure next and which settings to choose. Pure; tested with formulas as machines.
//! 2. [`curve`]: statistics of the measurements of a setting; [`quality`]: accuracy of a precision.
//! 3. `measure`: engine and clock; `texts`: texts for measuring accuracy; `cpu_time`: CPU time of other processes.
//! 4. [`file`](mod@file): format of the stored settings, and when they apply; [`effective`]: the settings with which a
//!    replica runs.
//! 5. [`report`]: table and JSON; [`plot`]: throughput against latency.

mod cpu_time;
pub mod curve;
pub mod effective;
mod error;
pub mod file;
mod measure;
pub mod plan;
pub mod plot;
pub mod quality;
pub mod report;
pub(crate) mod texts;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use replica_api::input::Readable;
use replica_core::Precision;
use replica_core::batch::BatchSettings;

pub use self::cpu_time::{OTHERS_MAX, UnknownShare};
pub use self::error::TuneError;

use self::cpu_time::OthersMeter;
use self::curve::{Point, Setting};
use self::file::{Hardware, TunedModel};
use self::measure::Bench;
use self::plan::{Gain, SearchPlan, SearchTask, TunedChoice};
use self::quality::Quality;
use crate::cache::{CachedModel, ModelCache};
use crate::engine::Engine;
use crate::engine::cpu::{Isa, PackedCache};
use crate::model::ModelDir;
use crate::tokenize::{TextInput, Tokenized};

/// Minimum time: enough for the threads, a few budgets and the comparison, once each.
pub const SECONDS_MIN: u64 = 5;
/// Maximum time; more does not improve the result.
pub const SECONDS_MAX: u64 = 3600;
/// Default: under two minutes including the time outside the measurements.
pub const SECONDS: u64 = 100;
/// Number of texts for comparing precisions.
const QUALITY_TEXTS: usize = 512;
/// Share of the time after which the comparison of a precision ends with the texts compared so far.
const QUALITY_TIME: f64 = 0.1;
/// Precision to which the others are compared.
const REFERENCE: Precision = Precision::F32;

/// Input of a tuning run.
#[derive(Clone, Debug)]
pub struct TuneRequest {
    /// Model in the cache.
    pub model: CachedModel,
    /// Precisions to try; at least one.
    pub precisions: Vec<Precision>,
    /// See [`SearchTask::target_p99`].
    pub target_p99: Option<Duration>,
    /// Time limit.
    pub time: Duration,
    /// Path of the output file, if not in the cache.
    pub out: Option<PathBuf>,
    /// Path of the plot, if not beside the output file.
    pub plot: Option<PathBuf>,
    /// Share of the CPU time that other processes may use, above which nothing is kept; see [`OTHERS_MAX`].
    pub others_max: f64,
    /// Keep the settings also above that share. The file then names it.
    pub keep_if_busy: bool,
}

/// Progress of a tuning run.
#[derive(Clone, Debug, PartialEq)]
pub enum TuneEvent {
    /// A precision was compared with f32.
    Quality(Precision, Quality),
    /// A setting was measured.
    Measured {
        /// All measurements of the setting so far.
        point: Point,
        /// Time since the start.
        elapsed: Duration,
    },
    /// The settings before and after tuning are being measured in alternation.
    Comparing {
        /// Time since the start.
        elapsed: Duration,
    },
}

/// Result of a tuning run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Settings that were written.
    pub tuned: TunedModel,
    /// Every measured setting.
    pub points: Vec<Point>,
    /// Accuracy of each precision compared with f32; those that are not accurate enough were not measured further.
    pub qualities: Vec<(Precision, Quality)>,
    /// Throughput before and after for each precision; without those for which there was no time.
    pub gains: Vec<Gain>,
    /// Path of the settings; `None` if they were not kept because the machine was busy.
    pub file: Option<PathBuf>,
    /// Path of the plot; `None` if the machine was busy and the request names no path.
    pub plot: Option<PathBuf>,
    /// Time it took.
    pub took: Duration,
    /// Share of the CPU time of this process's cores that other processes used during the measurements. Where it is unknown,
    /// the settings are kept.
    pub others_share: Result<f64, UnknownShare>,
}

/// Tunes a model and writes the result, unless other processes used the machine meanwhile and the request does not keep it
/// nevertheless.
pub fn run(
    cache: &ModelCache,
    order: TuneRequest,
    progress: &mut dyn FnMut(TuneEvent),
) -> Result<Report, TuneError> {
    let begin = Instant::now();
    let meter = OthersMeter::start();
    let TuneRequest { model: cached, precisions, target_p99, time, out, plot, others_max, keep_if_busy } =
        order;
    let model = ModelDir::open(&cached.path).map_err(TuneError::engine)?;
    let max_threads = available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let mut bench = Bench::new(model, PackedCache::below(cache.root(), &cached.digest));

    let read_texts = |bench: &mut Bench| -> Result<Vec<Tokenized>, TuneError> {
        let described = bench.engine(REFERENCE, max_threads)?.describe();
        let readable = Readable { max_input_tokens: described.max_tokens, vocabulary: described.vocabulary };
        let (token_types, is_pair) = (described.token_types, bench.model.template.is_some());
        // Models that read pairs only get every text with the same query.
        let input = |text| if is_pair { TextInput::Pair(QUERY.into(), text) } else { TextInput::One(text) };
        let inputs = texts::sentences(QUALITY_TEXTS).into_iter().map(input);
        let read = texts::tokenized(&bench.model, readable, token_types, max_threads.get(), inputs);
        Ok(read.map_err(TuneError::Tokenizer)?.into_iter().flatten().collect())
    };
    let (mut qualities, mut good) = (Vec::new(), Vec::new());
    for precision in precisions {
        if precision == REFERENCE {
            good.push(precision);
            continue;
        }
        let texts = read_texts(&mut bench)?;
        let limit = time.mul_f64(QUALITY_TIME);
        let quality = bench.quality(precision, REFERENCE, max_threads, &texts, limit)?;
        progress(TuneEvent::Quality(precision, quality));
        qualities.push((precision, quality));
        if quality.is_sufficient() {
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
        threads: max_threads,
        batch_tokens: BatchSettings::default().batch_tokens,
    };
    let mut plan = SearchPlan::new(SearchTask { precisions: good, max_threads, before, time, target_p99 });
    while let Some(setting) = plan.next(begin.elapsed()) {
        let run = bench.run(setting)?;
        plan.record(setting, run);
        let elapsed = begin.elapsed();
        let measured = plan.points().into_iter().find(|point| point.setting == setting);
        match measured {
            Some(point) if !plan.is_comparing() => progress(TuneEvent::Measured { point, elapsed }),
            _ => progress(TuneEvent::Comparing { elapsed }),
        }
    }
    let choices = plan.choices();
    if choices.is_empty() {
        return Err(TuneError::NoTime);
    }
    let hardware = Hardware::here(Isa::best().name());
    let file = out.unwrap_or_else(|| file::default_path(cache.root(), &cached.digest, &hardware));
    let others_share = meter.and_then(|meter| meter.share());
    let busy_share = others_share.ok().filter(|share| *share > others_max).map(file::rounded_share);
    let tuned = TunedModel { source: cached.source, digest: cached.digest, hardware, choices, busy_share };
    let file = Some(file).filter(|_| keep_if_busy || busy_share.is_none());
    let report = Report {
        points: plan.points(),
        gains: plan.gains(),
        plot: plot.or_else(|| Some(file.as_ref()?.with_extension("svg"))),
        tuned,
        qualities,
        file,
        took: begin.elapsed(),
        others_share,
    };
    write_report(&report)?;
    Ok(report)
}

/// Writes the settings and the plot, as far as the report has paths for them.
fn write_report(report: &Report) -> Result<(), TuneError> {
    let Report { tuned, points, qualities, file, plot, .. } = report;
    let write = |path: &PathBuf, text: &str| {
        file::write(path, text).map_err(|reason| TuneError::Write { path: path.clone(), reason })
    };
    if let Some(plot) = plot {
        write(plot, &plot::svg(report))?;
    }
    match file {
        Some(file) => write(file, &file::text(tuned, qualities, points)),
        None => Ok(()),
    }
}

/// Query of the pairs, for models that read pairs.
const QUERY: &str = "who repaired the old lighthouse?";

impl Report {
    /// Returns the recommended settings.
    pub fn choice(&self) -> &TunedChoice {
        self.tuned.choices.first().expect("a report has a choice")
    }
}
