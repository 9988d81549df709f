//! `meridian drain`: starts or ends the drain of a region at a hub.
//!
//! The command records the desired state and does not wait for its effect: the hub publishes it in the route table, and the
//! traffic plan moves the region's share away at a tenth per second. Requests with no other allowed region stay there.

use crate::apply::token;
use crate::cli::DrainOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
use regions::id::RegionId;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Timeout of the call. The hub responds after it has written to its store.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Failure of the command.
#[derive(Debug)]
enum DrainError {
    /// Invalid command line.
    Usage(String),
    /// The hub is unreachable or rejects the request.
    Failed(String),
}

/// Runs the command. Fails if the hub is unreachable or rejects the request.
pub(crate) fn main(options: &DrainOptions) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    match runtime.block_on(send(options)) {
        Ok(()) => {}
        Err(DrainError::Usage(problem)) => return fail(EXIT_USAGE, &[problem]),
        Err(DrainError::Failed(problem)) => return fail(EXIT_FAILED, &[problem]),
    }
    let DrainOptions { region, undo, hub: _, token_file: _, json } = options;
    let text = match (*json, *undo) {
        (true, undo) => format!("{:#}", json!({"region": region, "draining": !undo})),
        (false, false) => {
            format!(
                "{region} is draining: its traffic moves to other allowed regions, a tenth more each second"
            )
        }
        (false, true) => {
            format!("{region} is no longer draining: its traffic returns, a tenth more each second")
        }
    };
    // The reader may have closed the pipe.
    writeln!(std::io::stdout(), "{text}").ok();
    ExitCode::SUCCESS
}

async fn send(options: &DrainOptions) -> Result<(), DrainError> {
    let DrainOptions { region, undo, hub, token_file, json: _ } = options;
    let url = drain_url(hub, region).map_err(DrainError::Usage)?;
    let token = token(token_file.as_deref()).map_err(DrainError::Usage)?;
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
    let client = client.map_err(|error| DrainError::Failed(error.to_string()))?;
    let request = if *undo { client.delete(url.clone()) } else { client.put(url.clone()) };
    let response = request.bearer_auth(token).send().await;
    let response =
        response.map_err(|error| DrainError::Failed(format!("request to {url} failed: {error}")))?;
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let body: Value = response.json().await.unwrap_or(Value::Null);
    let message =
        body["error"]["message"].as_str().map_or_else(|| format!("{url} returned {status}"), str::to_owned);
    Err(if status == StatusCode::BAD_REQUEST {
        DrainError::Usage(message)
    } else {
        DrainError::Failed(message)
    })
}

fn drain_url(hub: &str, region: &str) -> Result<reqwest::Url, String> {
    let invalid = || format!("--hub {hub} is not a URL; write http://HOST:PORT of a hub");
    let id: RegionId = region.parse().map_err(|error: regions::id::IdError| error.to_string())?;
    let mut url = reqwest::Url::parse(hub).map_err(|_| invalid())?;
    url.path_segments_mut().map_err(|()| invalid())?.pop_if_empty().extend([
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
    fn the_url_of_a_drain_is_built_or_the_problem_is_reported() {
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
