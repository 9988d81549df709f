//! Command-line options of `meridian get jobs`, and those that it shares with `meridian get requests`.

use clap::{Args, ValueEnum};
use loadtest::client::jobs::ClientJobStatus;
use scheduler_api::requests::StatusFilter;
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Debug, Args)]
#[command(next_help_heading = "Jobs")]
pub(crate) struct GetJobsOptions {
    /// Gateway of the jobs; may be repeated, for others that replace it
    #[arg(long, value_name = "URL", env = "MERIDIAN_GATEWAY", default_value = "http://127.0.0.1:8080")]
    pub gateway: Vec<String>,
    /// API key of the tenant whose jobs are shown
    #[arg(long, env = "MERIDIAN_KEY", hide_env_values = true, default_value = "local")]
    pub key: String,
    /// CA certificates for https, as PEM, in addition to those of this machine
    #[arg(long, value_name = "FILE")]
    pub cacert: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Jobs and requests")]
pub(crate) struct GetListOptions {
    /// Only those with this status: of jobs queued, running, succeeded, failed, cancelled or expired; of requests the HTTP
    /// status, such as 503 or 5xx, or none
    #[arg(long, value_name = "STATUS")]
    pub status: Option<StatusOption>,
    /// Only those of this deployment
    #[arg(long, value_name = "NAME")]
    pub deployment: Option<String>,
    /// Only those since then: a duration before now (90m, 2d), or a time (2026-11-26T08:00:00Z)
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Maximum number, the newest first
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// Status of a job or of a request, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusOption {
    /// Of jobs.
    Job(JobStatusOption),
    /// Of requests.
    Http(StatusFilter),
}

impl FromStr for StatusOption {
    type Err = String;

    fn from_str(text: &str) -> Result<StatusOption, String> {
        if let Ok(status) = <JobStatusOption as ValueEnum>::from_str(text, false) {
            return Ok(StatusOption::Job(status));
        }
        let problem = "is no status; write queued, running, succeeded, failed, cancelled or expired of jobs, or one such as 503, 5xx or \
                       none of requests";
        text.parse().map(StatusOption::Http).map_err(|_| problem.to_owned())
    }
}

/// Status of a job, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum JobStatusOption {
    /// It waits
    Queued,
    /// A replica computes it
    Running,
    /// It has a result
    Succeeded,
    /// The model rejected it, or all attempts failed
    Failed,
    /// It was cancelled
    Cancelled,
    /// Its deadline or its maximum time in the queue has passed
    Expired,
}

impl From<JobStatusOption> for ClientJobStatus {
    fn from(status: JobStatusOption) -> ClientJobStatus {
        match status {
            JobStatusOption::Queued => ClientJobStatus::Queued,
            JobStatusOption::Running => ClientJobStatus::Running,
            JobStatusOption::Succeeded => ClientJobStatus::Succeeded,
            JobStatusOption::Failed => ClientJobStatus::Failed,
            JobStatusOption::Cancelled => ClientJobStatus::Cancelled,
            JobStatusOption::Expired => ClientJobStatus::Expired,
        }
    }
}
