//! `meridian get requests`: searches the explanations that gateways keep on disk, at their operations ports.
//!
//! All gateways are searched at once. If some fail, the requests of the others are shown, and the command fails.

use crate::cli::{GetListOptions, GetRequestsOptions, StatusOption};
use crate::jobs::parse_time;
use crate::operations_port;
use futures_util::future::join_all;
use scheduler_api::paths;
use scheduler_api::requests::{FOUND_MAX, FoundRequestV1, FoundRequestsV1, RequestFilterV1};
use serde::Serialize;
use serde_json::Value;
use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const COLUMNS: [&str; 9] =
    ["arrived", "id", "kept", "status", "outcome", "ms", "tenant", "deployment", "attempts"];

/// Failure of the command.
#[derive(Debug)]
pub(crate) enum GetRequestsError {
    /// An option is invalid.
    Usage(String),
    /// Gateways reject the search, or cannot be reached.
    Failed {
        /// Requests of the other gateways; `None` if all have failed.
        text: Option<String>,
        /// Problem of each that has failed.
        problems: Vec<String>,
    },
}

/// Requests of a list, the newest first.
#[derive(Debug, Default, Serialize)]
struct ListedRequests {
    requests: Vec<FoundRequestV1>,
    /// Whether older ones may match too.
    has_more: bool,
    /// Why requests of some gateways are missing.
    problems: Vec<String>,
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
    let searched = join_all(urls.into_iter().map(search)).await;
    let count = searched.len();
    let (mut listed, mut failures) = (ListedRequests::default(), Vec::new());
    for (gateway, searched) in options.operations.iter().zip(searched) {
        match searched {
            Ok(found) => listed.add(gateway, found),
            Err(problem) => failures.push(problem),
        }
    }
    if failures.len() == count {
        return Err(GetRequestsError::Failed { text: None, problems: failures });
    }
    listed.problems.extend(failures.iter().cloned());
    listed.truncate(list.limit as usize);
    let text = if json {
        serde_json::to_string_pretty(&listed).expect("texts and numbers serialise to JSON")
    } else {
        table(&listed)
    };
    if failures.is_empty() {
        return Ok(text);
    }
    Err(GetRequestsError::Failed { text: Some(text), problems: failures })
}

fn filter(
    options: &GetRequestsOptions,
    list: &GetListOptions,
    now: SystemTime,
) -> Result<RequestFilterV1, String> {
    let GetRequestsOptions { operations: _, tenant, region, outcome, until, kept } = options;
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
            "--limit {limit} is more than the {FOUND_MAX} requests of one search; use --until for the next ones"
        ));
    }
    let time = |option: &str, text: &Option<String>| {
        let time = text.as_deref().map(|text| parse_time(option, text, now)).transpose()?;
        Ok::<_, String>(time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
    };
    let (since_ms, until_ms) = (time("--since", since)?, time("--until", until)?);
    if let (Some(since), Some(until)) = (since, until)
        && since_ms >= until_ms
    {
        return Err(format!(
            "--until {until} is not after --since {since}; use a later --until or an earlier --since"
        ));
    }
    Ok(RequestFilterV1 {
        tenant: tenant.as_ref().map(ToString::to_string),
        deployment: deployment.clone(),
        region: region.as_ref().map(ToString::to_string),
        status,
        outcome: outcome.clone(),
        kept: kept.map(|kept| kept.to_string()),
        since_ms,
        until_ms,
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
    let body = operations_port::get(url.clone()).await?;
    serde_json::from_value(body).map_err(|error| format!("invalid response from {url}: {error}"))
}

impl ListedRequests {
    fn add(&mut self, gateway: &str, found: FoundRequestsV1) {
        let FoundRequestsV1 { requests, has_more, is_enabled: _, problem } = found;
        self.has_more |= has_more;
        self.requests.extend(requests);
        self.problems.extend(problem.map(|problem| format!("{gateway}: {problem}")));
    }

    /// Keeps the newest of all gateways.
    fn truncate(&mut self, limit: usize) {
        self.requests.sort_by_key(|request| Reverse(request.at_ms));
        self.has_more |= self.requests.len() > limit;
        self.requests.truncate(limit);
    }
}

/// Formats the requests, one per line, and what is missing.
fn table(listed: &ListedRequests) -> String {
    let ListedRequests { requests, has_more, problems } = listed;
    let mut lines = if !requests.is_empty() {
        rows(requests)
    } else if *has_more || !problems.is_empty() {
        vec!["no requests were found, but not all were searched".to_owned()]
    } else {
        let kept =
            "no requests; gateways keep those that failed, failed over, were slow, rejected or sampled";
        vec![kept.to_owned()]
    };
    lines.extend(problems.iter().map(|problem| format!("incomplete: {problem}")));
    if *has_more && let Some(oldest) = requests.last() {
        // Requests that arrived in the same millisecond are shown again.
        let until = time_text(oldest.at_ms.saturating_add(1));
        lines.push(format!(
            "there are older requests; add --until {until}, raise --limit, or use --status, --tenant or --region"
        ));
    }
    lines.join("\n")
}

fn rows(requests: &[FoundRequestV1]) -> Vec<String> {
    let rows: Vec<[String; 9]> =
        std::iter::once(COLUMNS.map(str::to_owned)).chain(requests.iter().map(cells)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or_default();
    let widths: Vec<_> = (0..COLUMNS.len()).map(width).collect();
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn time_text(at_ms: u64) -> String {
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(at_ms)).map(humantime::format_rfc3339_millis);
    time.map_or_else(|| "-".to_owned(), |time| time.to_string())
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
    [
        time_text(*at_ms),
        or_none(id),
        kept.clone(),
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
    use axum::routing::get;
    use axum::{Json, Router};
    use scheduler_api::requests::{KeptReason, StatusFilter};
    use std::sync::Arc;
    use tokio::net::TcpListener;
    use tokio::sync::Barrier;

    fn options() -> (GetRequestsOptions, GetListOptions) {
        let requests = GetRequestsOptions {
            operations: vec!["http://127.0.0.1:1".to_owned()],
            tenant: Some("docs".parse().unwrap()),
            region: Some("gcp/europe-west4".parse().unwrap()),
            outcome: None,
            until: Some("30m".to_owned()),
            kept: Some(KeptReason::FailedOver),
        };
        let status = Some(StatusOption::Http(StatusFilter::Class(5)));
        (requests, GetListOptions { status, deployment: None, since: Some("1h".to_owned()), limit: 100 })
    }

    fn request(id: &str, at_ms: u64) -> FoundRequestV1 {
        FoundRequestV1 {
            id: Some(id.to_owned()),
            at_ms,
            kept: KeptReason::FailedOver.to_string(),
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
            "http://127.0.0.1:1/requests?kept=failed_over&limit=100&region=gcp%2Feurope-west4&since_ms=3600000&status=5xx&tenant=docs&until_ms=5400000"
        );
    }

    #[test]
    fn options_that_requests_cannot_have_are_problems() {
        let (requests, list) = options();
        let now = UNIX_EPOCH + Duration::from_secs(7200);
        let problem = |list: GetListOptions| filter(&requests, &list, now).unwrap_err();
        let job = Some("failed".parse().unwrap());
        assert!(problem(GetListOptions { status: job, ..options().1 }).contains("--kept failed"));
        assert!(problem(GetListOptions { limit: 1001, ..options().1 }).contains("1000"));
        let wrong = Some("yesterday".to_owned());
        assert!(
            problem(GetListOptions { since: wrong.clone(), ..options().1 }).contains("--since yesterday")
        );
        let since = Some("10m".to_owned());
        assert!(problem(GetListOptions { since, ..list }).contains("--until 30m is not after --since 10m"));
        let until = GetRequestsOptions { until: wrong, ..options().0 };
        assert!(filter(&until, &options().1, UNIX_EPOCH).unwrap_err().contains("--until yesterday"));
        assert!(url("127.0.0.1:8081", &RequestFilterV1::default()).is_err());
    }

    #[test]
    fn the_newest_requests_of_all_gateways_are_listed_with_their_attempts() {
        let mut listed = ListedRequests::default();
        for at_ms in [1000, 3000, 2000] {
            let requests = vec![request(&format!("at-{at_ms}"), at_ms)];
            let found = FoundRequestsV1 { requests, has_more: false, is_enabled: true, problem: None };
            listed.add("http://gateway", found);
        }
        listed.truncate(2);
        let text = table(&listed);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..3], ["arrived", "id", "kept"]);
        assert_eq!(lines[1][..6], ["1970-01-01T00:00:03.000Z", "at-3000", "failed_over", "200", "ok", "93"]);
        assert_eq!(lines[2][1], "at-2000");
        assert!(
            text.contains("aws/us-east-1 > gcp/europe-west4") && text.contains("raise --limit"),
            "{text}"
        );
        assert!(text.contains("add --until 1970-01-01T00:00:02.001Z"), "{text}");
        assert!(table(&ListedRequests::default()).starts_with("no requests;"));
    }

    #[test]
    fn an_incomplete_list_is_not_shown_as_no_requests() {
        let mut listed = ListedRequests::default();
        listed.add("http://gateway", FoundRequestsV1::failed("the disk failed"));
        let text = table(&listed);
        assert!(text.starts_with("no requests were found, but not all were searched"), "{text}");
        assert!(text.ends_with("incomplete: http://gateway: the disk failed"), "{text}");
        let has_more = ListedRequests { has_more: true, ..ListedRequests::default() };
        assert!(table(&has_more).contains("not all were searched"));
    }

    /// Starts a gateway whose response waits for the requests of the others.
    async fn gateway(others: &Arc<Barrier>, at_ms: u64) -> String {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", socket.local_addr().unwrap());
        let requests = vec![request(&format!("at-{at_ms}"), at_ms)];
        let found = FoundRequestsV1 { requests, has_more: false, is_enabled: true, problem: None };
        let others = others.clone();
        let respond = move || {
            let (others, found) = (others.clone(), found.clone());
            async move {
                others.wait().await;
                Json(found)
            }
        };
        let router = Router::new().route(paths::REQUESTS, get(respond));
        tokio::spawn(async move { axum::serve(socket, router).await });
        url
    }

    #[tokio::test]
    async fn gateways_are_searched_at_once_and_those_that_fail_do_not_hide_the_others() {
        let (mut requests, list) = options();
        let others = Arc::new(Barrier::new(2));
        let unreachable = "http://127.0.0.1:1".to_owned();
        requests.operations = vec![gateway(&others, 1).await, unreachable.clone(), gateway(&others, 2).await];
        let partial = text(&requests, &list, None, true).await;
        let Err(GetRequestsError::Failed { text: Some(found), problems }) = partial else {
            panic!("{partial:?}");
        };
        assert!(problems.len() == 1 && problems[0].contains(&unreachable), "{problems:?}");
        let found: Value = serde_json::from_str(&found).unwrap();
        let ids: Vec<_> = found["requests"].as_array().unwrap().iter().map(|row| &row["id"]).collect();
        assert_eq!(ids, ["at-2", "at-1"]);
        assert_eq!(found["problems"].as_array().map(Vec::len), Some(1));
        requests.operations = vec![unreachable];
        let failed = text(&requests, &list, None, true).await;
        assert!(matches!(failed, Err(GetRequestsError::Failed { text: None, .. })), "{failed:?}");
    }
}
