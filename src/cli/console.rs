//! Options of `meridian console`.

use super::CallerOptions;
use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct ConsoleOptions {
    /// Hub whose console is opened
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Authentication at the hub
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}
