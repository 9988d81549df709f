//! Options of `meridian log`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct LogOptions {
    /// Operations port of a process, such as http://127.0.0.1:8081
    #[arg(value_name = "URL")]
    pub url: String,
    /// New filter: levels and TARGET=LEVEL, separated by commas, such as info,gateway::edge=debug; by default the current one is
    /// shown
    #[arg(value_name = "FILTER")]
    pub filter: Option<String>,
    /// Time after which the filter at the start of the process is restored, at most 24h; 0s keeps the new one until the process ends
    #[arg(long = "for", value_name = "DURATION", default_value = "10m", requires = "filter")]
    pub lasts: String,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}
