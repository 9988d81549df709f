//! `meridian drain`: tells a hub that a region is to be emptied, or that it is not any longer.
//!
//! It is an intent that is written down, not a deed that is waited for: the hub's table says so within a moment, and the
//! plan moves the region's share away in steps of a tenth a second. What may go nowhere else goes there on.

use crate::apply::token;
use crate::cli::DrainOptions;
use crate::{FAILED, WRONG_USAGE, fail};
use regions::id::RegionId;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// How long a hub may take. It answers when its store has it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why it was not done.
#[derive(Debug)]
enum NotDone {
    /// What was typed is wrong.
    Wrong(String),
    /// The hub cannot be asked, or cannot do it now.
    Failed(String),
}

/// Runs the command. It fails when the hub cannot be asked, or does not write it down.
pub(crate) fn main(options: &DrainOptions) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    match runtime.block_on(ask(options)) {
        Ok(()) => {}
        Err(NotDone::Wrong(problem)) => return fail(WRONG_USAGE, &[problem]),
        Err(NotDone::Failed(problem)) => return fail(FAILED, &[problem]),
    }
    let DrainOptions { region, undo, hub: _, token_file: _, json } = options;
    let told = match (*json, *undo) {
        (true, undo) => format!("{:#}", json!({"region": region, "draining": !undo})),
        (false, false) => {
            format!("{region} drains: what may go elsewhere goes elsewhere, a tenth more each second")
        }
        (false, true) => format!("{region} is used again: its share comes back, a tenth more each second"),
    };
    // Whoever reads it may have closed their end.
    writeln!(std::io::stdout(), "{told}").ok();
    ExitCode::SUCCESS
}

async fn ask(options: &DrainOptions) -> Result<(), NotDone> {
    let DrainOptions { region, undo, hub, token_file, json: _ } = options;
    let url = drain_url(hub, region).map_err(NotDone::Wrong)?;
    let token = token(token_file.as_deref()).map_err(NotDone::Wrong)?;
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
    let client = client.map_err(|error| NotDone::Failed(error.to_string()))?;
    let request = if *undo { client.delete(url.clone()) } else { client.put(url.clone()) };
    let answer = request.bearer_auth(token).send().await;
    let answer = answer.map_err(|error| NotDone::Failed(format!("{url} cannot be asked: {error}")))?;
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    let body: Value = answer.json().await.unwrap_or(Value::Null);
    let said =
        body["error"]["message"].as_str().map_or_else(|| format!("{url} says {status}"), str::to_owned);
    Err(if status == StatusCode::BAD_REQUEST { NotDone::Wrong(said) } else { NotDone::Failed(said) })
}

fn drain_url(hub: &str, region: &str) -> Result<reqwest::Url, String> {
    let wanted = || format!("--hub {hub} is no URL; write http://HOST:PORT of a hub");
    let id: RegionId = region.parse().map_err(|error: regions::id::IdError| error.to_string())?;
    let mut url = reqwest::Url::parse(hub).map_err(|_| wanted())?;
    url.path_segments_mut().map_err(|()| wanted())?.pop_if_empty().extend([
        "v1",
        "drains",
        id.cloud(),
        id.name(),
    ]);
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_and_a_hub_make_a_url_or_say_what_to_write() {
        let check = |hub: &str, region: &str, expected: Result<&str, &str>| match (
            drain_url(hub, region),
            expected,
        ) {
            (Ok(url), Ok(expected)) => assert_eq!(url.as_str(), expected),
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{part} in {problem}"),
            (found, expected) => panic!("{found:?} is not {expected:?}"),
        };
        let hub = "http://127.0.0.1:7000";
        check(hub, "aws/us-east-1", Ok("http://127.0.0.1:7000/v1/drains/aws/us-east-1"));
        check("http://h:1/", "oci/ap-tokyo-1", Ok("http://h:1/v1/drains/oci/ap-tokyo-1"));
        check(hub, "us-east-1", Err("such as gcp/europe-west4"));
        check("127.0.0.1:7000", "aws/us-east-1", Err("http://HOST:PORT"));
        check("mailto:a", "aws/us-east-1", Err("http://HOST:PORT"));
    }
}
