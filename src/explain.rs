//! `meridian explain`: asks a gateway why a request went where it went, and writes it for a person.

use crate::cli::ExplainOptions;
use crate::{FAILED, WRONG_USAGE, fail};
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// How long a gateway may take to say it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command. It fails when the gateway cannot be asked, or does not know the request.
pub(crate) fn main(options: &ExplainOptions) -> ExitCode {
    let ExplainOptions { id, gateway, json } = options;
    let url = match explain_url(gateway, id) {
        Ok(url) => url,
        Err(problem) => return fail(WRONG_USAGE, &[problem]),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    let explanation = match runtime.block_on(ask(url)) {
        Ok(explanation) => explanation,
        Err(problem) => return fail(FAILED, &[problem]),
    };
    let text = if *json { format!("{explanation:#}") } else { told(&explanation) };
    // Whoever reads it may have closed their end.
    writeln!(std::io::stdout(), "{text}").ok();
    ExitCode::SUCCESS
}

fn explain_url(gateway: &str, id: &str) -> Result<reqwest::Url, String> {
    let wanted =
        || format!("--gateway {gateway} is no URL; write http://HOST:PORT of a gateway's operations port");
    let mut url = reqwest::Url::parse(gateway).map_err(|_| wanted())?;
    url.path_segments_mut().map_err(|()| wanted())?.pop_if_empty().push("explain").push(id);
    Ok(url)
}

async fn ask(url: reqwest::Url) -> Result<Value, String> {
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
    let client = client.map_err(|error| error.to_string())?;
    let answer =
        client.get(url.clone()).send().await.map_err(|error| format!("{url} cannot be asked: {error}"))?;
    let status = answer.status();
    let body: Value =
        answer.json().await.map_err(|error| format!("{url} says what cannot be read: {error}"))?;
    if status.is_success() {
        return Ok(body);
    }
    Err(body["error"].as_str().map_or_else(|| format!("{url} says {status}"), str::to_owned))
}

/// The explanation for a person.
fn told(explanation: &Value) -> String {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let of = |key: &str| text(&explanation[key]);
    let list = |key: &str| explanation[key].as_array().cloned().unwrap_or_default();
    let mut lines = vec![
        format!("request     {}", of("id")),
        format!("outcome     {} ({}) after {} ms", of("outcome"), of("status"), of("total_ms")),
        format!("asked       {} of {} by {}", of("endpoint"), of("deployment"), of("tenant")),
        format!(
            "work        {} inputs, {} tokens (estimated {})",
            of("inputs"),
            of("tokens"),
            of("tokens_estimated")
        ),
        format!("policy         {} (route table {})", of("residency"), of("generation")),
    ];
    if let Some(times) = explanation["times"].as_object() {
        let times: Vec<_> = times.iter().map(|(stage, ms)| format!("{stage} {}", text(ms))).collect();
        lines.push(format!("times       {}", times.join(", ")));
    }
    let regions = list("regions");
    lines.push(if regions.is_empty() {
        "regions     no choice was made".to_owned()
    } else {
        "regions".to_owned()
    });
    for region in regions {
        let (name, rank) = (text(&region["region"]), text(&region["rank"]));
        lines.push(match region["refused"].as_str() {
            Some(why) => format!("  {rank:>2}  {name:<24} {why}"),
            None => format!(
                "  {rank:>2}  {name:<24} {}{}, {} ms away{}",
                text(&region["health"]),
                if region["draining"] == true { ", drained" } else { "" },
                text(&region["rtt_ms"]),
                planned(&region)
            ),
        });
    }
    lines.push("attempts".to_owned());
    for attempt in list("attempts") {
        let part = |key: &str| text(&attempt[key]);
        lines.push(format!(
            "  {:>2}  {:<24} {}: {} ({}), from {} ms for {} ms",
            part("attempt"),
            part("region"),
            part("cause"),
            part("end"),
            part("status"),
            part("began_ms"),
            part("took_ms")
        ));
    }
    lines.join("\n")
}

/// What the plan gives a region, and why.
fn planned(region: &Value) -> String {
    match (region["weight_permille"].as_u64(), region["planned"].as_str()) {
        (Some(permille), Some(why)) => {
            format!(", planned {}.{} % ({why})", permille / 10, permille % 10)
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_identifier_is_one_part_of_the_url_whatever_is_in_it() {
        let check = |gateway: &str, id: &str, expected: Option<&str>| {
            assert_eq!(explain_url(gateway, id).ok().map(|url| url.to_string()).as_deref(), expected);
        };
        check("http://127.0.0.1:8081", "req-1", Some("http://127.0.0.1:8081/explain/req-1"));
        check("http://127.0.0.1:8081/", "a/b?c#d", Some("http://127.0.0.1:8081/explain/a%2Fb%3Fc%23d"));
        check("127.0.0.1:8081", "a", None);
        check("mailto:a", "a", None);
    }

    #[test]
    fn a_person_reads_the_choice_and_what_became_of_it() {
        let text = told(&json!({
            "id": "req-1", "outcome": "ok", "status": 200, "total_ms": 93.5, "residency": "eu", "generation": "1.7",
            "regions": [{"region": "gcp/europe-west4", "rank": 1, "health": "healthy", "rtt_ms": 92.0},
                        {"region": "aws/eu-west-1", "rank": 2, "health": "healthy", "rtt_ms": 99.0, "draining": true,
                         "weight_permille": 125, "planned": "leaving"},
                        {"region": "aws/us-east-1", "refused": "forbidden by residency"}],
            "attempts": [{"attempt": 1, "region": "gcp/europe-west4", "cause": "first", "end": "ok", "status": 200,
                          "began_ms": 0.1, "took_ms": 93.0}],
        }));
        for line in [
            "outcome     ok (200) after 93.5 ms",
            "policy         eu (route table 1.7)",
            "   1  gcp/europe-west4         healthy, 92.0 ms away",
            "   2  aws/eu-west-1            healthy, drained, 99.0 ms away, planned 12.5 % (leaving)",
            "   -  aws/us-east-1            forbidden by residency",
            "   1  gcp/europe-west4         first: ok (200), from 0.1 ms for 93.0 ms",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
