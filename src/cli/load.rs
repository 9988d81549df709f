//! Command-line options of `meridian load`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct LoadOptions {
    #[command(subcommand)]
    pub command: Option<LoadCommand>,
    /// Base URL of the API: http://HOST:PORT or https://HOST, with or without /v1
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// CA certificates for https, as PEM; by default those of this machine
    #[arg(long, value_name = "FILE")]
    pub cacert: Option<PathBuf>,
    /// API key
    #[arg(long, env = "MERIDIAN_KEY", hide_env_values = true, default_value = "local")]
    pub key: String,
    /// Deployment
    #[arg(long, default_value = "minilm")]
    pub model: String,
    /// Workload: queries, passages, mixed, bulk, rerank or classify
    #[arg(long, default_value = "queries")]
    pub workload: String,
    /// One of several concurrent loads, such as "queries at 20" or "bulk of 128 with 4 callers"; may be repeated
    #[arg(long = "task", value_name = "TASK", conflicts_with_all = ["workload", "rate", "callers", "trace", "inputs", "documents"])]
    pub tasks: Vec<String>,
    /// Requests per second, as 100, or a profile: "100 for 10s, 300 for 10s, 100 to 0 for 20s"
    #[arg(long, default_value = "10", conflicts_with_all = ["callers", "trace"])]
    pub rate: String,
    /// Distribution of the gaps between requests: constant or poisson
    #[arg(long, default_value = "constant")]
    pub arrival: String,
    /// Closed loop instead of a rate: N callers, each of which sends its next request after a response (hides stalls)
    #[arg(long, value_name = "N")]
    pub callers: Option<usize>,
    /// Arrival times and sizes instead of a rate, as CSV or JSON lines of at_s, tokens, inputs
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Duration in which requests are started, as 30s or 5m, if the rate has none; 10s by default
    #[arg(long)]
    pub duration: Option<String>,
    /// File of texts: one per line, or JSON lines with a "text"; by default generated
    #[arg(long, value_name = "FILE")]
    pub texts: Option<PathBuf>,
    /// File of texts with their expected vectors: JSON lines with a "text" and an "embedding"
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// Tolerance of a value relative to the expected vector
    #[arg(long, value_name = "X", default_value_t = loadtest::workload::expected::TOLERANCE)]
    pub tolerance: f32,
    /// Inputs per request; by default 1, and 128 for bulk
    #[arg(long, value_name = "N")]
    pub inputs: Option<usize>,
    /// Documents per rerank request; 20 by default
    #[arg(long, value_name = "K")]
    pub documents: Option<usize>,
    /// Timeout of a request, from the time at which it was scheduled
    #[arg(long, default_value = "10s")]
    pub timeout: String,
    /// Latency objective, as p99=50ms; exit code 3 if it is missed
    #[arg(long, value_name = "OBJECTIVE")]
    pub slo: Option<String>,
    /// Find the highest rate that meets --slo: tries several rates, each for --duration
    #[arg(long, conflicts_with_all = ["html", "hgrm", "hdr_log"])]
    pub find_capacity: bool,
    /// Seed of the arrivals and the generated texts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Location to send in x-meridian-client-geo, as lat,lon
    #[arg(long, value_name = "LAT,LON")]
    pub geo: Option<String>,
    /// Use HTTP/2: negotiated with https, by prior knowledge with http
    #[arg(long)]
    pub http2: bool,
    /// Print JSON to stdout instead of the table
    #[arg(long)]
    pub json: bool,
    /// Write a self-contained HTML report with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the percentile distribution for HdrHistogram's plotters
    #[arg(long, value_name = "FILE")]
    pub hgrm: Option<PathBuf>,
    /// Write a histogram per second for HdrHistogram's log readers
    #[arg(long, value_name = "FILE")]
    pub hdr_log: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LoadCommand {
    /// Compare two --json reports, and test differences for statistical significance
    Compare(CompareOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CompareOptions {
    /// Report of the first run
    #[arg(value_name = "A.json")]
    pub a: PathBuf,
    /// Report of the second run
    #[arg(value_name = "B.json")]
    pub b: PathBuf,
    /// Seed of the bootstrap draws for the confidence intervals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print JSON to stdout instead of tables
    #[arg(long)]
    pub json: bool,
}
