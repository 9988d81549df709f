//! What can be typed after `meridian load`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct LoadOptions {
    #[command(subcommand)]
    pub command: Option<LoadCommand>,
    /// Where the API is: http://HOST:PORT or https://HOST, with or without /v1
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// The authorities to believe that an https server is the one, as PEM; without it, those of this machine
    #[arg(long, value_name = "FILE")]
    pub cacert: Option<PathBuf>,
    /// The API key
    #[arg(long, env = "MERIDIAN_KEY", hide_env_values = true, default_value = "local")]
    pub key: String,
    /// The deployment
    #[arg(long, default_value = "minilm")]
    pub model: String,
    /// What requests carry: lookups, passages, mixed, bulk or rerank
    #[arg(long, default_value = "lookups")]
    pub workload: String,
    /// One of several things at once, like "lookups at 20", "bulk of 128 with 4 callers"; may be given several times
    #[arg(long = "task", value_name = "TASK", conflicts_with_all = ["workload", "rate", "callers", "trace", "inputs", "documents"])]
    pub tasks: Vec<String>,
    /// Requests per second, as 100, or how they change: "100 for 10s, 300 for 10s, 100 to 0 for 20s"
    #[arg(long, default_value = "10", conflicts_with_all = ["callers", "trace"])]
    pub rate: String,
    /// How the gaps between requests are distributed: constant or poisson
    #[arg(long, default_value = "constant")]
    pub arrival: String,
    /// Instead of a rate: so many callers, each of whom asks again when it is answered (a closed loop, which hides stalls)
    #[arg(long, value_name = "N")]
    pub callers: Option<usize>,
    /// Instead of a rate: when requests came and how large they were, as CSV or JSON lines of at_s, tokens, inputs
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// How long requests are started, as 30s or 5m, where the rate does not say it; without either, 10s
    #[arg(long)]
    pub duration: Option<String>,
    /// A file of texts: one a line, or JSON lines with a "text"; without it, generated ones
    #[arg(long, value_name = "FILE")]
    pub texts: Option<PathBuf>,
    /// A file of texts with the vectors that they must come back as: JSON lines with a "text" and an "embedding"
    #[arg(long, value_name = "FILE")]
    pub expect: Option<PathBuf>,
    /// How far a number may be from the expected one
    #[arg(long, value_name = "X", default_value_t = loadtest::workload::expected::TOLERANCE)]
    pub tolerance: f32,
    /// How many texts each request carries; without it, 1, and 128 of bulk
    #[arg(long, value_name = "N")]
    pub inputs: Option<usize>,
    /// How many documents each request to rerank carries; without it, 20
    #[arg(long, value_name = "K")]
    pub documents: Option<usize>,
    /// How long a request may take from the moment at which it should have started
    #[arg(long, default_value = "10s")]
    pub timeout: String,
    /// What callers were promised, as p99=50ms; exit code 3 where it does not hold
    #[arg(long, value_name = "OBJECTIVE")]
    pub slo: Option<String>,
    /// Find the highest rate that keeps --slo: tries one rate after the other, each for --duration
    #[arg(long, conflicts_with_all = ["html", "hgrm", "hdr_log"])]
    pub find_capacity: bool,
    /// Decides arrivals and generated texts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where the callers pretend to be, as lat,lon
    #[arg(long, value_name = "LAT,LON")]
    pub geo: Option<String>,
    /// For machines: JSON on stdout instead of the table
    #[arg(long)]
    pub json: bool,
    /// Write a page with plots, which needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the distribution by percentile, as HdrHistogram's plotters read it
    #[arg(long, value_name = "FILE")]
    pub hgrm: Option<PathBuf>,
    /// Write a histogram for each second, as HdrHistogram's log readers read it
    #[arg(long, value_name = "FILE")]
    pub hdr_log: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LoadCommand {
    /// Put two reports of --json side by side, and tell differences from chance
    Compare(CompareOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CompareOptions {
    /// The report of the first run
    #[arg(value_name = "A.json")]
    pub a: PathBuf,
    /// The report of the second run
    #[arg(value_name = "B.json")]
    pub b: PathBuf,
    /// Decides the draws of which intervals are made
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// For machines: JSON on stdout instead of tables
    #[arg(long)]
    pub json: bool,
}
