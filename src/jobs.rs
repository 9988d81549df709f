//! `meridian get jobs`: the durable jobs of a tenant, through a gateway, with the tenant's API key.
//!
//! A hub does not know jobs: the queues of the regions have them, and a gateway reads those that the tenant's residency policy allows.

use crate::cli::{GetJobsOptions, GetListOptions, StatusOption};
use loadtest::client::jobs::{ClientJob, ClientJobFilter, ClientJobPage};
use loadtest::client::{Client, ClientSettings, EndpointSettings, Preference};
use serde::Serialize;
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

/// Jobs that a page of the API has at most.
const PAGE_MAX: usize = 100;
/// Timeout of one page, or of one job.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Jobs of a list, and what is missing in it.
#[derive(Debug, Default, Serialize)]
struct ListedJobs {
    jobs: Vec<ClientJob>,
    /// Whether there are older jobs than the limit allows.
    has_more: bool,
    /// Regions whose queue could not be read for one of the pages.
    unavailable_regions: BTreeSet<String>,
}

/// Failure of the command.
#[derive(Debug)]
pub(crate) enum GetJobsError {
    /// An option is invalid.
    Usage(String),
    /// The gateway rejects the request, or cannot be reached.
    Failed(String),
}

/// Returns the text of the command: a list of jobs, or one job.
pub(crate) async fn text(
    options: &GetJobsOptions,
    list_options: &GetListOptions,
    id: Option<&str>,
    json: bool,
) -> Result<String, GetJobsError> {
    let client = client(options).map_err(GetJobsError::Usage)?;
    let preference = Preference { total_timeout: Some(TIMEOUT), ..Preference::default() };
    let Some(id) = id else {
        let filter = filter(list_options, SystemTime::now()).map_err(GetJobsError::Usage)?;
        let listed = list(&client, filter, list_options.limit as usize, &preference).await;
        let listed = listed.map_err(|error| GetJobsError::Failed(error.to_string()))?;
        return Ok(if json { pretty(&listed) } else { table(&listed) });
    };
    let job = client.job(id, &preference).await;
    let job = job.map_err(|error| GetJobsError::Failed(error.to_string()))?;
    Ok(if json { pretty(&job) } else { details(&job) })
}

fn client(options: &GetJobsOptions) -> Result<Client, String> {
    let GetJobsOptions { gateway, key, cacert, .. } = options;
    let read = |path: &std::path::PathBuf| {
        std::fs::read(path).map_err(|error| format!("--cacert {}: {error}", path.display()))
    };
    let roots_pem = cacert.as_ref().map(read).transpose()?;
    let endpoints = gateway.iter().map(|url| EndpointSettings::new(url, Some(key))).collect();
    let client = Client::new(&ClientSettings { endpoints, roots_pem, ..ClientSettings::default() });
    client.map_err(|error| format!("--gateway: {error}"))
}

fn filter(options: &GetListOptions, now: SystemTime) -> Result<ClientJobFilter, String> {
    let GetListOptions { status, deployment, since, limit: _ } = options;
    let status = match status {
        None => None,
        Some(StatusOption::Job(status)) => Some((*status).into()),
        Some(StatusOption::Http(status)) => {
            return Err(format!(
                "--status {status} is that of requests; write queued, running, succeeded, failed, cancelled or expired"
            ));
        }
    };
    let since = since.as_deref().map(|text| parse_time("--since", text, now)).transpose()?;
    Ok(ClientJobFilter {
        status,
        model: deployment.clone(),
        created_after: since.map(|since| since.as_secs()),
        ..ClientJobFilter::default()
    })
}

/// Parses a time of an option: a duration before now, or a time. Returns the time since 1970.
pub(crate) fn parse_time(option: &str, text: &str, now: SystemTime) -> Result<Duration, String> {
    let ago = humantime::parse_duration(text).ok().and_then(|ago| now.checked_sub(ago));
    let time = ago.or_else(|| humantime::parse_rfc3339_weak(text).ok());
    let time = time.ok_or_else(|| {
        format!("{option} {text} is not a time; write a duration such as 90m, or a time such as 2026-11-26T08:00:00Z")
    })?;
    Ok(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

/// Reads pages up to this number of jobs.
async fn list(
    client: &Client,
    mut filter: ClientJobFilter,
    limit: usize,
    preference: &Preference,
) -> Result<ListedJobs, loadtest::client::ClientError> {
    let mut listed = ListedJobs { has_more: true, ..ListedJobs::default() };
    while listed.has_more && listed.jobs.len() < limit {
        filter.limit = Some((limit - listed.jobs.len()).min(PAGE_MAX));
        listed.add(client.jobs(&filter, preference).await?);
        filter.after = listed.jobs.last().map(|job| job.id.clone());
    }
    Ok(listed)
}

impl ListedJobs {
    /// Adds the next page. An empty one is the last, since the next begins after the last job of this one. The list is
    /// without jobs of each region that was unavailable for any of its pages.
    fn add(&mut self, page: ClientJobPage) {
        let ClientJobPage { jobs, has_more, unavailable_regions } = page;
        self.has_more = has_more && !jobs.is_empty();
        self.jobs.extend(jobs);
        self.unavailable_regions.extend(unavailable_regions);
    }
}

/// Formats a list, one job per line.
fn table(listed: &ListedJobs) -> String {
    let ListedJobs { jobs, has_more, unavailable_regions } = listed;
    let widest = jobs.iter().map(|job| job.id.len()).max().unwrap_or(0).max(2);
    let row = |id: &str,
               status: &str,
               model: &str,
               operation: &str,
               inputs: &str,
               attempts: &str,
               created: &str| {
        format!("{id:<widest$} {status:<10} {model:<20} {operation:<10} {inputs:>6} {attempts:>8}  {created}")
    };
    let mut lines = vec![row("id", "status", "model", "operation", "inputs", "attempts", "created")];
    lines.extend(jobs.iter().map(|job| {
        let ClientJob { id, status, model, operation, inputs, attempts, created_at, .. } = job;
        let created = time(*created_at);
        row(id, status.as_str(), model, operation, &inputs.to_string(), &attempts.to_string(), &created)
    }));
    if jobs.is_empty() {
        lines = vec!["no jobs".to_owned()];
    }
    if *has_more {
        lines.push("there are more jobs; raise --limit, or use --since, --status or --deployment".to_owned());
    }
    if !unavailable_regions.is_empty() {
        lines.push(format!(
            "without jobs of {}: the region could not be reached",
            unavailable_regions.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        ));
    }
    lines.join("\n")
}

/// Formats one job, a field per line.
fn details(job: &ClientJob) -> String {
    let ClientJob {
        id,
        status,
        operation,
        model,
        priority,
        inputs,
        attempts,
        created_at,
        expires_at,
        finished_at,
        position,
        estimated_start_seconds,
        error,
    } = job;
    let mut lines = vec![
        format!("{:<12}{id}", "id"),
        format!("{:<12}{}", "status", status.as_str()),
        format!("{:<12}{operation} of {model}, {inputs} inputs, {priority}", "request"),
        format!("{:<12}{attempts}", "attempts"),
        format!("{:<12}{}", "created", time(*created_at)),
    ];
    for (name, at) in [("expires", expires_at), ("finished", finished_at)] {
        lines.extend(at.map(|at| format!("{name:<12}{}", time(at))));
    }
    lines.extend(position.map(|position| format!("{:<12}{position} jobs before it", "position")));
    lines.extend(estimated_start_seconds.map(|seconds| format!("{:<12}in {seconds:.1} s", "starts")));
    lines.extend(error.as_ref().map(|error| format!("{:<12}{}", "error", error.message)));
    lines.join("\n")
}

fn time(seconds: u64) -> String {
    // The largest time that the format has; a corrupt response is shown, and does not end the command.
    let seconds = seconds.min(253_402_300_799);
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("numbers, strings and lists serialise to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job() -> ClientJob {
        serde_json::from_value(json!({
            "id": "job_1.aws.us-east-1", "status": "failed", "operation": "embeddings", "model": "minilm", "priority": "bulk",
            "inputs": 2, "attempts": 5, "created_at": 1764108826, "expires_at": 1764713626, "finished_at": 1764108900,
            "error": {"message": "the input is too long"},
        }))
        .expect("a job")
    }

    #[test]
    fn since_is_a_duration_or_a_time() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(10_000);
        let parse = |text: &str| parse_time("--since", text, now);
        assert_eq!(parse("90m"), Ok(Duration::from_secs(4600)));
        assert_eq!(parse("1970-01-01T01:00:00.007Z"), Ok(Duration::from_millis(3_600_007)));
        assert_eq!(parse("9000 years"), Ok(Duration::ZERO), "all jobs are later");
        for wrong in ["", "yesterday"] {
            let problem = parse(wrong).unwrap_err();
            assert!(
                problem.starts_with(&format!("--since {wrong} is")) && problem.contains("write a duration")
            );
        }
    }

    #[test]
    fn a_list_has_a_line_for_each_job_and_says_what_is_missing() {
        let unavailable_regions = BTreeSet::from(["gcp/europe-west4".to_owned()]);
        let text = table(&ListedJobs { jobs: vec![job()], has_more: true, unavailable_regions });
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["id", "status", "model", "operation", "inputs", "attempts", "created"]);
        let row = ["job_1.aws.us-east-1", "failed", "minilm", "embeddings", "2", "5", "2025-11-25T22:13:46Z"];
        assert_eq!(lines[1], row);
        assert!(
            text.contains("raise --limit") && text.contains("without jobs of gcp/europe-west4"),
            "{text}"
        );
        assert_eq!(table(&ListedJobs::default()), "no jobs");
    }

    #[test]
    fn a_region_that_was_unavailable_for_one_page_is_named_for_the_whole_list() {
        let page = |jobs: usize, unavailable: &[&str]| ClientJobPage {
            jobs: vec![job(); jobs],
            has_more: true,
            unavailable_regions: unavailable.iter().map(|region| (*region).to_owned()).collect(),
        };
        let mut listed = ListedJobs::default();
        listed.add(page(2, &["b/b", "a/a"]));
        assert!(listed.has_more);
        listed.add(page(1, &["b/b"]));
        listed.add(page(0, &[]));
        assert_eq!((listed.jobs.len(), listed.has_more), (3, false), "an empty page is the last one");
        assert_eq!(listed.unavailable_regions, BTreeSet::from(["a/a".to_owned(), "b/b".to_owned()]));
        assert!(table(&listed).contains("without jobs of a/a, b/b: "), "{}", table(&listed));
    }

    #[test]
    fn a_job_is_shown_with_its_reason() {
        let text = details(&job());
        for line in [
            "status      failed",
            "request     embeddings of minilm, 2 inputs, bulk",
            "finished    2025-11-25T22:15:00Z",
            "error       the input is too long",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} in\n{text}");
        }
    }
}
