//! `meridian explain`: fetches the routing decision of a request from a gateway and formats it.

use crate::cli::ExplainOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail, operations_port};
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;

/// Runs the command. Fails if the gateway is unreachable or does not know the request.
pub(crate) fn main(options: &ExplainOptions) -> ExitCode {
    let ExplainOptions { id, gateway, json } = options;
    let url = match operations_port::url("--gateway", gateway, ["explain", id.as_str()]) {
        Ok(url) => url,
        Err(problem) => return fail(EXIT_USAGE, &[problem]),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    let explanation = match runtime.block_on(operations_port::get(url)) {
        Ok(explanation) => explanation,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    let text = if *json { format!("{explanation:#}") } else { format_text(&explanation) };
    // The reader may have closed the pipe.
    writeln!(std::io::stdout(), "{text}").ok();
    ExitCode::SUCCESS
}

/// Formats the explanation as text.
fn format_text(explanation: &Value) -> String {
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
        format!("endpoint    {}, deployment {}, tenant {}", of("endpoint"), of("deployment"), of("tenant")),
        format!(
            "cost        {} inputs, {} tokens (estimated {})",
            of("inputs"),
            of("tokens"),
            of("tokens_estimated")
        ),
        format!("residency   {} (route table {})", of("residency"), of("generation")),
    ];
    if let Some(times) = explanation["times"].as_object() {
        let times: Vec<_> = times.iter().map(|(stage, ms)| format!("{stage} {}", text(ms))).collect();
        lines.push(format!("times       {}", times.join(", ")));
    }
    let regions = list("regions");
    lines.push(if regions.is_empty() {
        "regions     no region was selected".to_owned()
    } else {
        "regions".to_owned()
    });
    for region in regions {
        let (name, rank) = (text(&region["region"]), text(&region["rank"]));
        lines.push(match region["rejected"].as_str() {
            Some(reason) => format!("  {rank:>2}  {name:<24} {reason}"),
            None => format!(
                "  {rank:>2}  {name:<24} {}{}, {} ms away, response in {} ms{}{}",
                text(&region["health"]),
                if region["draining"] == true { ", draining" } else { "" },
                text(&region["rtt_ms"]),
                text(&region["response_in_ms"]),
                planned(&region),
                preferences(&region)
            ),
        });
    }
    for (key, name) in [("origin", "origin"), ("admission_pool", "pool")] {
        if explanation[key].is_string() {
            lines.push(format!("{name:<11} {}", of(key)));
        }
    }
    if explanation["order"].is_object() {
        lines.push(format!("order       {}", ordered(&explanation["order"])));
    }
    if let Some(rejection) = explanation["rejection"].as_object() {
        lines.push(format!(
            "rejection   by the pool of the primary: {}, queue {} ms, retry after {} ms",
            text(&rejection["reason"]),
            text(&rejection["wait_ms"]),
            text(&rejection["retry_after_ms"])
        ));
    }
    if let Some(spillover) = explanation["spillover"].as_object() {
        lines.push(format!(
            "spillover   {} tokens to {}, {} on average with unlimited credit",
            text(&spillover["tokens"]),
            spillover["to"].as_str().unwrap_or("no region"),
            text(&spillover["demand_tokens"])
        ));
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

/// Formats the place of the primary in the order of the deployment, and why the earlier regions did not take the request.
fn ordered(order: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let list = |key: &str| order[key].as_array().cloned().unwrap_or_default();
    let count = list("regions").len();
    let place = match order["place"].as_u64() {
        Some(place) => format!("{place} of {count}"),
        None => format!("none of {count}"),
    };
    let passed_over = list("passed_over");
    let each = passed_over
        .iter()
        .map(|region| format!("{} is passed over ({})", text(&region["region"]), text(&region["reason"])));
    let because: Vec<_> = each.collect();
    if because.is_empty() { place } else { format!("{place}, because {}", because.join(", ")) }
}

/// Formats the criteria by which a region ranks before others that are as healthy.
fn preferences(region: &Value) -> String {
    let marks = [
        ("assigned", ", assigned to this part"),
        ("fastest", ", fastest of the near"),
        ("drawn", ", drawn by the plan"),
        ("holds", ", in a cold start"),
    ];
    let set = |(key, text): (&str, &'static str)| if region[key] == true { text } else { "" };
    marks.map(set).concat()
}

/// Formats the region's share in the traffic plan, with its reason.
fn planned(region: &Value) -> String {
    match (region["weight_permille"].as_u64(), region["planned"].as_str()) {
        (Some(permille), Some(reason)) => {
            format!(", planned {}.{} % ({reason})", permille / 10, permille % 10)
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_text_shows_the_routing_decision_and_the_attempts() {
        let text = format_text(&json!({
            "id": "req-1", "outcome": "ok", "status": 200, "total_ms": 93.5, "residency": "eu", "generation": "1.7",
            "regions": [{"region": "gcp/europe-west4", "rank": 1, "health": "healthy", "rtt_ms": 92.0,
                         "response_in_ms": 95.5},
                        {"region": "aws/eu-west-1", "rank": 2, "health": "healthy", "rtt_ms": 99.0, "draining": true,
                         "response_in_ms": 99.0,
                         "weight_permille": 125, "planned": "leaving"},
                        {"region": "aws/us-east-1", "rejected": "forbidden by residency"}],
            "origin": "gcp/europe-west4", "admission_pool": "aws/eu-west-1",
            "order": {"regions": ["aws/us-east-1", "gcp/europe-west4"], "place": 2,
                      "passed_over": [{"region": "aws/us-east-1", "reason": "forbidden by residency"}]},
            "rejection": {"reason": "no_capacity", "wait_ms": 900.0, "retry_after_ms": 200.0},
            "spillover": {"tokens": 20, "to": "aws/eu-west-1", "demand_tokens": 700},
            "attempts": [{"attempt": 1, "region": "gcp/europe-west4", "cause": "first", "end": "ok", "status": 200,
                          "began_ms": 0.1, "took_ms": 93.0}],
        }));
        for line in [
            "outcome     ok (200) after 93.5 ms",
            "residency   eu (route table 1.7)",
            "   1  gcp/europe-west4         healthy, 92.0 ms away, response in 95.5 ms",
            "   2  aws/eu-west-1            healthy, draining, 99.0 ms away, response in 99.0 ms, planned 12.5 % (leaving)",
            "origin      gcp/europe-west4",
            "pool        aws/eu-west-1",
            "order       2 of 2, because aws/us-east-1 is passed over (forbidden by residency)",
            "rejection   by the pool of the primary: no_capacity, queue 900.0 ms, retry after 200.0 ms",
            "spillover   20 tokens to aws/eu-west-1, 700 on average with unlimited credit",
            "   -  aws/us-east-1            forbidden by residency",
            "   1  gcp/europe-west4         first: ok (200), from 0.1 ms for 93.0 ms",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
