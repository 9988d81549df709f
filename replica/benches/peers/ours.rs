//! Our side of the peers bench: the native engine behind the protocol of `driver.py`, and its load generator.
//!
//! `peers embed SOURCE PRECISION THREADS` answers orders on stdin as every peer does, and one more: `peak` measures what
//! the processor can do at all. `peers resolve SOURCE` says where the model lies. `peers load …` puts load on a server
//! (`load`). All are started by the driver; `replica/benches/peers/run` is the command for people.
//!
//! What is timed is what a replica does with a request between its sockets: the tokenizer pool, batches without padding
//! of at most the default token budget, and the engine.

mod load;

use std::fmt::Display;
use std::hint::black_box;
use std::io::{BufRead, Write, stdin, stdout};
use std::num::NonZeroUsize;
use std::process::exit;
use std::time::Instant;

use replica::cache::{CachedModel, ModelCache, ModelSource, default_root};
use replica::engine::cpu::{CpuEngine, CpuOptions, Isa, PackedCache, peak_byte_ops, peak_flops};
use replica::engine::{BatchBuffer, Engine, Output};
use replica::model::ModelDir;
use replica::tokenize::{EncodeOptions, TextInput, TextTokenizer, TokenizerPool};
use replica_core::Precision;
use replica_core::input::Readable;
use replica_core::limits::BATCH_TOKENS;
use serde_json::{Value, json};
use tokio::runtime::{self, Runtime};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["embed", source, precision, threads] => Ours::load(source, precision, threads).and_then(answer),
        ["resolve", source] => model(source).map(|(_, model)| println!("{}", model.path.display())),
        ["load", given @ ..] => load::main(given),
        // `cargo bench` starts every benchmark; this one is of no use without its driver.
        _ => {
            println!("this is one side of a bench; replica/benches/peers/run is the command");
            Ok(())
        }
    };
    if let Err(problem) = outcome {
        eprintln!("{problem}");
        exit(1)
    }
}

/// What serves, without the server.
struct Ours {
    engine: CpuEngine,
    tokenizer: TokenizerPool,
    runtime: Runtime,
    threads: NonZeroUsize,
    normalize: bool,
    buffer: BatchBuffer,
    rows: Vec<f32>,
}

impl Ours {
    fn load(source: &str, precision: &str, threads: &str) -> Result<Ours, String> {
        let threads: NonZeroUsize = threads.parse().map_err(told)?;
        let precision: Precision = precision.parse().map_err(told)?;
        let (cache, cached) = model(source)?;
        let model = ModelDir::open(&cached.path).map_err(told)?;
        let packed = PackedCache::below(cache.root(), &cached.digest);
        let options = CpuOptions { threads, precision, packed: Some(packed), isa: None };
        let engine = CpuEngine::load(&model, options).map_err(told)?;
        let described = engine.describe();
        let readable = Readable { max_input_tokens: described.max_tokens, vocabulary: described.vocabulary };
        let tokenizer = TextTokenizer::load(&model, readable, described.token_types).map_err(told)?;
        Ok(Ours {
            engine,
            tokenizer: TokenizerPool::start(tokenizer, threads.get()).map_err(told)?,
            runtime: runtime::Builder::new_current_thread().build().map_err(told)?,
            threads,
            normalize: model.sentence.normalize,
            buffer: BatchBuffer::default(),
            rows: Vec::new(),
        })
    }

    /// The vectors of the texts, one after another.
    fn embed(&mut self, texts: &[String]) -> Result<&[f32], String> {
        let texts = texts.iter().cloned().map(TextInput::One).collect();
        let tokens = self.runtime.block_on(self.tokenizer.encode(texts, EncodeOptions::WHOLE));
        let tokens = tokens.map_err(|error| format!("{error:?}"))?;
        let width = self.engine.describe().width;
        self.rows.clear();
        self.rows.resize(tokens.len() * width, 0.0);
        let mut out = self.rows.as_mut_slice();
        let mut waiting = tokens.as_slice();
        while !waiting.is_empty() {
            self.buffer.clear();
            let mut room = BATCH_TOKENS;
            let mut taken = 0;
            while let Some(next) = waiting.get(taken)
                && (taken == 0 || next.ids.len() as u64 <= room)
            {
                room = room.saturating_sub(next.ids.len() as u64);
                self.buffer.push(&next.ids, next.types.as_deref());
                taken += 1;
            }
            let (rows, rest) = out.split_at_mut(taken * width);
            self.engine.compute(&self.buffer.batch(), Output::Pooled, rows).map_err(told)?;
            (out, waiting) = (rest, &waiting[taken..]);
        }
        if self.normalize {
            for row in self.rows.chunks_mut(width) {
                let length = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
                row.iter_mut().for_each(|x| *x /= length);
            }
        }
        Ok(&self.rows)
    }
}

/// Answers orders, one a line, until there are no more.
fn answer(mut ours: Ours) -> Result<(), String> {
    let mut batches: Vec<Vec<String>> = Vec::new();
    let described = ours.engine.describe();
    let (width, isa) = (described.width, described.instruction_set.clone());
    say(json!({ "ready": format!("meridian, {isa}") }))?;
    for line in stdin().lock().lines() {
        let order: Value = serde_json::from_str(&line.map_err(told)?).map_err(told)?;
        match order["do"].as_str().unwrap_or_default() {
            "embed" => {
                let vectors: Vec<&[f32]> = ours.embed(&strings(&order["texts"])?)?.chunks(width).collect();
                say(json!({ "vectors": vectors }))?;
            }
            "load" => {
                let given = order["batches"].as_array().ok_or("`batches` is a list")?;
                batches = given.iter().map(strings).collect::<Result<_, _>>()?;
                say(json!({}))?;
            }
            "time" => {
                let mut seconds = Vec::new();
                for batch in &batches {
                    let begin = Instant::now();
                    black_box(ours.embed(batch)?);
                    seconds.push(begin.elapsed().as_secs_f64());
                }
                say(json!({ "seconds": seconds }))?;
            }
            "peak" => {
                let (isa, threads) = (Isa::best(), ours.threads);
                say(json!({ "f32": peak_flops(isa, threads), "int8": peak_byte_ops(isa, threads) }))?;
            }
            other => return Err(format!("no order is called {other:?}")),
        }
    }
    Ok(())
}

fn say(answer: Value) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{answer}").and_then(|()| out.flush()).map_err(told)
}

fn strings(value: &Value) -> Result<Vec<String>, String> {
    serde_json::from_value(value.clone()).map_err(told)
}

fn model(source: &str) -> Result<(ModelCache, CachedModel), String> {
    let source: ModelSource = source.parse().map_err(told)?;
    let root = default_root().ok_or("there is no place for a model cache; set MERIDIAN_CACHE")?;
    let cache = ModelCache::new(root);
    let model = cache.resolve(&source).map_err(told)?;
    Ok((cache, model))
}

fn told(problem: impl Display) -> String {
    problem.to_string()
}
