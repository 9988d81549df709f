//! `meridian drain`: starts or ends the drain of a region at a hub.
//!
//! The command records the desired state and does not wait for its effect: the hub publishes it in the route table, and the
//! traffic plan moves the region's share away at a tenth per second. Requests with no other allowed region stay there.

use crate::apply::{CommandError, RECORD_TIMEOUT, client, run};
use crate::cli::DrainOptions;
use regions::id::{IdError, RegionId};
use reqwest::StatusCode;
use scheduler_client::operator::OperatorClient;
use serde_json::json;
use std::process::ExitCode;

/// Runs the command. Fails if the hub is unreachable or rejects the request.
pub(crate) fn main(options: &DrainOptions) -> ExitCode {
    let DrainOptions { region, undo, hub: _, caller: _, json } = options;
    run(*json, async {
        let (hub, id) = call(options)?;
        hub.set_draining(&id, !undo).await.map_err(|error| match error.failure.status() {
            Some(StatusCode::BAD_REQUEST) => CommandError::Usage(vec![error.to_string()]),
            Some(_) | None => error.into(),
        })?;
        Ok(match (*json, *undo) {
            (true, undo) => format!("{:#}", json!({"region": region, "draining": !undo})),
            (false, false) => {
                format!(
                    "{region} is draining: its traffic moves to other allowed regions, a tenth more each second"
                )
            }
            (false, true) => {
                format!("{region} is no longer draining: its traffic returns, a tenth more each second")
            }
        })
    })
}

/// Returns the hub and the region of the command line.
fn call(options: &DrainOptions) -> Result<(OperatorClient, RegionId), String> {
    let DrainOptions { region, hub, caller, undo: _, json: _ } = options;
    let region = region.parse().map_err(|error: IdError| error.to_string())?;
    Ok((client(hub, caller, RECORD_TIMEOUT)?, region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::CallerOptions;

    #[tokio::test]
    async fn a_command_line_is_parsed_or_the_problem_is_reported() {
        let check = |hub: &str, region: &str, expected: Result<(), &str>| {
            let options = DrainOptions {
                region: region.to_owned(),
                undo: false,
                hub: hub.to_owned(),
                caller: CallerOptions::default(),
                json: false,
            };
            match (call(&options), expected) {
                (Ok((_, found)), Ok(())) => assert_eq!(found.as_str(), region),
                (Err(problem), Err(part)) => assert!(problem.contains(part), "{part} in {problem}"),
                (found, expected) => panic!("{found:?} is not {expected:?}"),
            }
        };
        let hub = "http://127.0.0.1:7000";
        check(hub, "aws/us-east-1", Ok(()));
        check("http://localhost:1/", "oci/ap-tokyo-1", Ok(()));
        check("http://h:1/", "oci/ap-tokyo-1", Err("identity"));
        check("https://h:1/", "oci/ap-tokyo-1", Err("--identity"));
        check(hub, "us-east-1", Err("such as gcp/europe-west4"));
        check("127.0.0.1:7000", "aws/us-east-1", Err("https://HOST:PORT"));
        check("mailto:a", "aws/us-east-1", Err("https://HOST:PORT"));
    }
}
