//! `meridian console`: prints a link that signs a browser in to the console of a hub.

use crate::apply::{RECORD_TIMEOUT, client, run};
use crate::cli::ConsoleOptions;
use std::process::ExitCode;

/// Runs the command. Fails if the hub is unreachable or has no console.
pub(crate) fn main(options: &ConsoleOptions) -> ExitCode {
    let ConsoleOptions { hub, caller, json } = options;
    run(*json, async {
        let login = client(hub, caller, RECORD_TIMEOUT)?.create_console_login().await?;
        Ok(if *json {
            serde_json::to_string_pretty(&login).expect("texts and numbers serialise to JSON")
        } else {
            format!("{}\n\nIt signs one browser in, within {} minutes.", login.url, login.expires_s / 60)
        })
    })
}
