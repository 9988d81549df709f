//! Meridian's side of the peers benchmark: the native engine behind the protocol of `driver.py`, and its load
//! generator.
//!
//! `peers embed SOURCE PRECISION THREADS` handles commands on stdin like every peer, and one more: `peak` measures the
//! peak performance of the processor. `peers resolve SOURCE` prints the path of the model. `peers load …` puts load on
//! a server (`load`). All are started by the driver; `replica/benches/peers/run` is the command for people.
//!
//! The measured time is that of a replica between its sockets: the tokenizer pool, batches without padding of at most
//! the default token budget, and the engine.

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
use replica_api::input::Readable;
use replica_api::limits::BATCH_TOKENS;
use replica_core::Precision;
use serde_json::{Value, json};
use tokio::runtime::{self, Runtime};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["embed", source, precision, threads] => {
            LocalPeer::load(source, precision, threads).and_then(serve_commands)
        }
        ["resolve", source] => model(source).map(|(_, model)| println!("{}", model.path.display())),
        ["load", given @ ..] => load::main(given),
        // `cargo bench` starts every benchmark; this one needs its driver.
        _ => {
            println!("this program is started by a driver; run replica/benches/peers/run");
            Ok(())
        }
    };
    if let Err(problem) = outcome {
        eprintln!("{problem}");
        exit(1)
    }
}

/// Components of a replica without its server.
struct LocalPeer {
    engine: CpuEngine,
    tokenizer: TokenizerPool,
    runtime: Runtime,
    threads: NonZeroUsize,
    normalize: bool,
    buffer: BatchBuffer,
    rows: Vec<f32>,
}

impl LocalPeer {
    fn load(source: &str, precision: &str, threads: &str) -> Result<LocalPeer, String> {
        let threads: NonZeroUsize = threads.parse().map_err(to_message)?;
        let precision: Precision = precision.parse().map_err(to_message)?;
        let (cache, cached) = model(source)?;
        let model = ModelDir::open(&cached.path).map_err(to_message)?;
        let packed = PackedCache::below(cache.root(), &cached.digest);
        let options = CpuOptions { threads, precision, packed: Some(packed), isa: None };
        let engine = CpuEngine::load(&model, options).map_err(to_message)?;
        let described = engine.describe();
        let readable = Readable { max_input_tokens: described.max_tokens, vocabulary: described.vocabulary };
        let tokenizer = TextTokenizer::load(&model, readable, described.token_types).map_err(to_message)?;
        Ok(LocalPeer {
            engine,
            tokenizer: TokenizerPool::start(tokenizer, threads.get()).map_err(to_message)?,
            runtime: runtime::Builder::new_current_thread().build().map_err(to_message)?,
            threads,
            normalize: model.sentence.normalize,
            buffer: BatchBuffer::default(),
            rows: Vec::new(),
        })
    }

    /// Returns the vectors of the texts, concatenated.
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
            let mut available = BATCH_TOKENS;
            let mut taken = 0;
            while let Some(next) = waiting.get(taken)
                && (taken == 0 || next.ids.len() as u64 <= available)
            {
                available = available.saturating_sub(next.ids.len() as u64);
                self.buffer.push(&next.ids, next.types.as_deref());
                taken += 1;
            }
            let (rows, rest) = out.split_at_mut(taken * width);
            self.engine.compute(&self.buffer.batch(), Output::Pooled, rows).map_err(to_message)?;
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

/// Handles commands, one per line, until the end of stdin.
fn serve_commands(mut peer: LocalPeer) -> Result<(), String> {
    let mut batches: Vec<Vec<String>> = Vec::new();
    let described = peer.engine.describe();
    let (width, isa) = (described.width, described.instruction_set.clone());
    print_json(json!({ "ready": format!("meridian, {isa}") }))?;
    for line in stdin().lock().lines() {
        let command: Value = serde_json::from_str(&line.map_err(to_message)?).map_err(to_message)?;
        match command["do"].as_str().unwrap_or_default() {
            "embed" => {
                let vectors: Vec<&[f32]> = peer.embed(&strings(&command["texts"])?)?.chunks(width).collect();
                print_json(json!({ "vectors": vectors }))?;
            }
            "load" => {
                let given = command["batches"].as_array().ok_or("`batches` is not a list")?;
                batches = given.iter().map(strings).collect::<Result<_, _>>()?;
                print_json(json!({}))?;
            }
            "time" => {
                let mut seconds = Vec::new();
                for batch in &batches {
                    let begin = Instant::now();
                    black_box(peer.embed(batch)?);
                    seconds.push(begin.elapsed().as_secs_f64());
                }
                print_json(json!({ "seconds": seconds }))?;
            }
            "peak" => {
                let (isa, threads) = (Isa::best(), peer.threads);
                print_json(json!({ "f32": peak_flops(isa, threads), "int8": peak_byte_ops(isa, threads) }))?;
            }
            other => return Err(format!("unknown command {other:?}")),
        }
    }
    Ok(())
}

fn print_json(value: Value) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{value}").and_then(|()| out.flush()).map_err(to_message)
}

fn strings(value: &Value) -> Result<Vec<String>, String> {
    serde_json::from_value(value.clone()).map_err(to_message)
}

fn model(source: &str) -> Result<(ModelCache, CachedModel), String> {
    let source: ModelSource = source.parse().map_err(to_message)?;
    let root =
        default_root().ok_or("the location of the model cache is not configured; set MERIDIAN_CACHE")?;
    let cache = ModelCache::new(root);
    let model = cache.resolve(&source).map_err(to_message)?;
    Ok((cache, model))
}

fn to_message(problem: impl Display) -> String {
    problem.to_string()
}
