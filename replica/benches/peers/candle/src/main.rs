//! The candle peer: BERT of `candle-transformers` with the same model folder, speaking the protocol of
//! `../protocol.md`.
//!
//! `candle-peer MODEL_FOLDER`; threads by `RAYON_NUM_THREADS`. Batches are padded to their longest text, the only form
//! that candle's BERT accepts; pooling is the mean over the tokens without padding, then normalization to length one.

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use serde_json::{Value, json};
use tokenizers::{PaddingParams, Tokenizer, TruncationParams};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

struct Peer {
    tokenizer: Tokenizer,
    model: BertModel,
}

impl Peer {
    fn load(folder: &Path) -> Result<Peer> {
        let config: Config = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
        let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
        tokenizer.with_padding(Some(PaddingParams::default()));
        tokenizer.with_truncation(Some(TruncationParams { max_length: 256, ..TruncationParams::default() }))?;
        Ok(Peer { tokenizer, model: BertModel::load(weights, &config)? })
    }

    fn embed(&self, texts: &[String]) -> Result<Tensor> {
        let encoded = self.tokenizer.encode_batch(texts.to_vec(), true)?;
        let rows = |pick: &dyn Fn(&tokenizers::Encoding) -> Vec<u32>| -> Result<Tensor> {
            let rows: Vec<Vec<u32>> = encoded.iter().map(pick).collect();
            Ok(Tensor::new(rows, &Device::Cpu)?)
        };
        let ids = rows(&|encoding| encoding.get_ids().to_vec())?;
        let mask = rows(&|encoding| encoding.get_attention_mask().to_vec())?;
        let hidden = self.model.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
        let weight = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
        let mean = hidden.broadcast_mul(&weight)?.sum(1)?.broadcast_div(&weight.sum(1)?)?;
        Ok(mean.broadcast_div(&mean.sqr()?.sum_keepdim(1)?.sqrt()?)?)
    }
}

fn strings(value: &Value) -> Result<Vec<String>> {
    Ok(serde_json::from_value(value.clone())?)
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).ok_or("candle-peer MODEL_FOLDER")?;
    let peer = Peer::load(Path::new(&folder))?;
    let mut batches: Vec<Vec<String>> = Vec::new();
    let mut out = std::io::stdout().lock();
    let mut say = |value: Value| -> Result<()> {
        writeln!(out, "{value}")?;
        Ok(out.flush()?)
    };
    say(json!({"ready": "candle 0.11, gemm"}))?;
    for line in std::io::stdin().lock().lines() {
        let order: Value = serde_json::from_str(&line?)?;
        match order["do"].as_str().unwrap_or_default() {
            "embed" => {
                let vectors = peer.embed(&strings(&order["texts"])?)?.to_vec2::<f32>()?;
                say(json!({ "vectors": vectors }))?;
            }
            "load" => {
                let given = order["batches"].as_array().ok_or("batches is a list")?;
                batches = given.iter().map(strings).collect::<Result<_>>()?;
                say(json!({}))?;
            }
            "time" => {
                let mut seconds = Vec::new();
                for batch in &batches {
                    let begin = Instant::now();
                    std::hint::black_box(peer.embed(batch)?);
                    seconds.push(begin.elapsed().as_secs_f64());
                }
                say(json!({ "seconds": seconds }))?;
            }
            other => return Err(format!("no order is called {other:?}").into()),
        }
    }
    Ok(())
}
