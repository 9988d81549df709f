//! `compute`: computes one sequence with an engine, from the command line.
//!
//! For the first check on a GPU machine: whether the libraries are found and load, whether the engine loads, and
//! whether the row equals that of the reference. It has no tokenizer; pass token ids.
//!
//! ```sh
//! compute decoder FOLDER TENSOR VOCABULARY TOKEN...
//! compute encoder FILE FIRST_POSITION TOKEN...
//! ```

use std::process::ExitCode;

use trtllm::{
    Decoder, DecoderConfig, Encoder, EncoderConfig, EngineRows, OutputTensor, PackedBatch, Pending,
    Positions, versions,
};

const USAGE: &str =
    "usage: compute decoder FOLDER TENSOR VOCABULARY TOKEN... | compute encoder FILE FIRST_POSITION TOKEN...";

fn main() -> ExitCode {
    let versions = versions();
    println!("TensorRT-LLM {} over TensorRT {}", versions.tensorrt_llm, versions.tensorrt);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match compute(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(rows) => {
            for row in rows.iter() {
                println!("{row:?}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn compute(arguments: &[&str]) -> Result<EngineRows, String> {
    match arguments {
        ["decoder", folder, tensor, vocabulary, tokens @ ..] => {
            let tokens = numbers(tokens)?;
            let decoder = Decoder::open(&DecoderConfig {
                directory: folder.into(),
                output: OutputTensor::Pooled((*tensor).to_owned()),
                max_batch_size: 1,
                max_batch_tokens: tokens.len() as u32,
                max_tokens: tokens.len() as u32,
                vocabulary: number(vocabulary)?,
                cache_fraction: 0.5,
            });
            let decoder = decoder.map_err(|error| error.to_string())?;
            let rows = decoder.submit(&tokens).and_then(Pending::wait);
            decoder.shutdown().map_err(|error| error.to_string())?;
            rows.map_err(|error| error.to_string())
        }
        ["encoder", file, first, tokens @ ..] => {
            let positions = match number(first)? {
                0 => Positions::FromZero,
                first => Positions::AfterPadding(first - 1),
            };
            let mut batch = PackedBatch::default();
            batch.push(&numbers(tokens)?, None, positions).map_err(|error| error.to_string())?;
            let encoder = Encoder::open(&EncoderConfig { engine: file.into() });
            let encoder = encoder.map_err(|error| error.to_string())?;
            let mut pending = encoder.submit(batch).map_err(|error| error.to_string())?;
            pending
                .pop()
                .map_or_else(|| Ok(EngineRows::default()), Pending::wait)
                .map_err(|error| error.to_string())
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn numbers(texts: &[&str]) -> Result<Vec<u32>, String> {
    texts.iter().map(|text| number(text)).collect()
}

fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("{text} is not a number\n{USAGE}"))
}
