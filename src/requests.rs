//! `meridian get requests`: searches the explanations that gateways keep on disk, at their operations ports.

use crate::cli::{GetListOptions, GetRequestsOptions, StatusOption};
use crate::jobs::since_seconds;
use crate::operations_port;
use scheduler_api::paths;
use scheduler_api::requests::{FOUND_MAX, FoundRequestV1, FoundRequestsV1, RequestFilterV1};
use serde::Serialize;
use serde_json::Value;
use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Timeout of the search of one gateway: it reads its disk, and may wait for another search.
const TIMEOUT: Duration = Duration::from_secs(30);
const COLUMNS: [&str; 9] =
    ["arrived", "id", "kept", "status", "outcome", "ms", "tenant", "deployment", "attempts"];

/// Failure of the command.
#[derive(Debug)]
pub(crate) enum GetRequestsError {
    /// An option is invalid.
    Usage(String),
    /// A gateway rejects the search, or cannot be reached.
    Failed(String),
}

/// Requests of a list, the newest first.
#[derive(Debug, Default, Serialize)]
struct ListedRequests {
    requests: Vec<FoundRequestV1>,
    /// Whether there are older ones that match.
    has_more: bool,
}

/// Returns the text of the command.
pub(crate) async fn text(
    options: &GetRequestsOptions,
    list: &GetListOptions,
    id: Option<&str>,
    json: bool,
) -> Result<String, GetRequestsError> {
    if let Some(id) = id {
        let problem = format!("one request is shown by `meridian explain {id} --gateway URL`");
        return Err(GetRequestsError::Usage(problem));
    }
    let filter = filter(options, list, SystemTime::now()).map_err(GetRequestsError::Usage)?;
    let urls = options.operations.iter().map(|gateway| url(gateway, &filter));
    let urls = urls.collect::<Result<Vec<_>, _>>().map_err(GetRequestsError::Usage)?;
    let mut listed = ListedRequests::default();
    for url in urls {
        listed.add(search(url).await.map_err(GetRequestsError::Failed)?);
    }
    listed.cut(list.limit as usize);
    Ok(if json {
        serde_json::to_string_pretty(&listed).expect("texts and numbers serialise to JSON")
    } else {
        table(&listed)
    })
}

fn filter(
    options: &GetRequestsOptions,
    list: &GetListOptions,
    now: SystemTime,
) -> Result<RequestFilterV1, String> {
    let GetRequestsOptions { operations: _, tenant, region, outcome, kept } = options;
    let GetListOptions { status, deployment, since, limit } = list;
    let status = match status {
        None => None,
        Some(StatusOption::Http(status)) => Some(status.to_string()),
        Some(StatusOption::Job(_)) => {
            let problem = "--status of requests is an HTTP status such as 503, a class such as 5xx, or none; --kept failed shows \
                           those that failed";
            return Err(problem.to_owned());
        }
    };
    if *limit as usize > FOUND_MAX {
        return Err(format!(
            "--limit {limit} is more than the {FOUND_MAX} requests of one search; use --since for fewer"
        ));
    }
    let since = since.as_deref().map(|text| since_seconds(text, now)).transpose()?;
    Ok(RequestFilterV1 {
        tenant: tenant.as_ref().map(ToString::to_string),
        deployment: deployment.clone(),
        region: region.as_ref().map(ToString::to_string),
        status,
        outcome: outcome.clone(),
        kept: kept.map(|kept| kept.to_string()),
        since_ms: since.map(|seconds| seconds.saturating_mul(1000)),
        until_ms: None,
        limit: Some(*limit as usize),
    })
}

fn url(gateway: &str, filter: &RequestFilterV1) -> Result<reqwest::Url, String> {
    let mut url = operations_port::url("--operations", gateway, [paths::REQUESTS.trim_start_matches('/')])?;
    let Ok(Value::Object(fields)) = serde_json::to_value(filter) else { return Ok(url) };
    let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    url.query_pairs_mut().extend_pairs(fields.into_iter().map(|(name, value)| (name, text(value))));
    Ok(url)
}

async fn search(url: reqwest::Url) -> Result<FoundRequestsV1, String> {
    let body = operations_port::get(url.clone(), TIMEOUT).await?;
    serde_json::from_value(body).map_err(|error| format!("invalid response from {url}: {error}"))
}

impl ListedRequests {
    fn add(&mut self, found: FoundRequestsV1) {
        self.has_more |= found.has_more;
        self.requests.extend(found.requests);
    }

    /// Keeps the newest of all gateways.
    fn cut(&mut self, limit: usize) {
        self.requests.sort_by_key(|request| Reverse(request.at_ms));
        self.has_more |= self.requests.len() > limit;
        self.requests.truncate(limit);
    }
}

/// Formats the requests, one per line.
fn table(listed: &ListedRequests) -> String {
    let ListedRequests { requests, has_more } = listed;
    if requests.is_empty() {
        return "no requests; gateways keep those that failed, failed over, were slow, rejected or sampled"
            .to_owned();
    }
    let rows: Vec<[String; 9]> =
        std::iter::once(COLUMNS.map(str::to_owned)).chain(requests.iter().map(cells)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or_default();
    let widths: Vec<_> = (0..COLUMNS.len()).map(width).collect();
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<_> = rows.iter().map(line).collect();
    if *has_more {
        lines.push(
            "there are more requests; raise --limit, or use --since, --status, --tenant or --region"
                .to_owned(),
        );
    }
    lines.join("\n")
}

fn cells(request: &FoundRequestV1) -> [String; 9] {
    let FoundRequestV1 {
        id,
        at_ms,
        kept,
        tenant,
        deployment,
        region: _,
        status,
        outcome,
        total_ms,
        attempts,
    } = request;
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let arrived = UNIX_EPOCH.checked_add(Duration::from_millis(*at_ms)).map(humantime::format_rfc3339_millis);
    [
        arrived.map_or_else(|| "-".to_owned(), |time| time.to_string()),
        or_none(id),
        kept.to_string(),
        status.map_or_else(|| "-".to_owned(), |status| status.to_string()),
        outcome.clone(),
        format!("{total_ms:.0}"),
        or_none(tenant),
        or_none(deployment),
        if attempts.is_empty() { "-".to_owned() } else { attempts.join(" > ") },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::requests::{KeptReason, StatusFilter};

    fn options() -> (GetRequestsOptions, GetListOptions) {
        let requests = GetRequestsOptions {
            operations: vec!["http://127.0.0.1:1".to_owned()],
            tenant: Some("docs".parse().unwrap()),
            region: Some("gcp/europe-west4".parse().unwrap()),
            outcome: None,
            kept: Some(KeptReason::FailedOver),
        };
        let status = Some(StatusOption::Http(StatusFilter::Class(5)));
        (requests, GetListOptions { status, deployment: None, since: Some("1h".to_owned()), limit: 100 })
    }

    fn request(id: &str, at_ms: u64) -> FoundRequestV1 {
        FoundRequestV1 {
            id: Some(id.to_owned()),
            at_ms,
            kept: KeptReason::FailedOver,
            tenant: Some("docs".to_owned()),
            deployment: None,
            region: Some("gcp/europe-west4".to_owned()),
            status: Some(200),
            outcome: "ok".to_owned(),
            total_ms: 93.4,
            attempts: vec!["aws/us-east-1".to_owned(), "gcp/europe-west4".to_owned()],
        }
    }

    #[test]
    fn the_options_are_the_query_of_the_gateway() {
        let (requests, list) = options();
        let filter = filter(&requests, &list, UNIX_EPOCH + Duration::from_secs(7200)).unwrap();
        assert_eq!(
            url(&requests.operations[0], &filter).unwrap().as_str(),
            "http://127.0.0.1:1/requests?kept=failed_over&limit=100&region=gcp%2Feurope-west4&since_ms=3600000&status=5xx&tenant=docs"
        );
    }

    #[test]
    fn options_that_requests_cannot_have_are_problems() {
        let (requests, list) = options();
        let problem = |list: GetListOptions| filter(&requests, &list, UNIX_EPOCH).unwrap_err();
        let job = Some("failed".parse().unwrap());
        assert!(problem(GetListOptions { status: job, ..options().1 }).contains("--kept failed"));
        assert!(problem(GetListOptions { limit: 1001, ..options().1 }).contains("1000"));
        let wrong = Some("yesterday".to_owned());
        assert!(problem(GetListOptions { since: wrong, ..list }).contains("--since yesterday"));
        assert!(url("127.0.0.1:8081", &RequestFilterV1::default()).is_err());
    }

    #[test]
    fn the_newest_requests_of_all_gateways_are_listed_with_their_attempts() {
        let mut listed = ListedRequests::default();
        for at_ms in [1000, 3000, 2000] {
            let requests = vec![request(&format!("at-{at_ms}"), at_ms)];
            listed.add(FoundRequestsV1 { requests, has_more: false, is_enabled: true });
        }
        listed.cut(2);
        let text = table(&listed);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..3], ["arrived", "id", "kept"]);
        assert_eq!(lines[1][..6], ["1970-01-01T00:00:03.000Z", "at-3000", "failed_over", "200", "ok", "93"]);
        assert_eq!(lines[2][1], "at-2000");
        assert!(
            text.contains("aws/us-east-1 > gcp/europe-west4") && text.contains("raise --limit"),
            "{text}"
        );
        assert!(table(&ListedRequests::default()).starts_with("no requests"));
    }
}
