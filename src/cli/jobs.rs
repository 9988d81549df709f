//! Command-line options of `meridian get jobs`.

use clap::{Args, ValueEnum};
use loadtest::client::jobs::ClientJobStatus;
use std::path::PathBuf;

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
    /// Only jobs with this status
    #[arg(long, value_enum)]
    pub status: Option<JobStatusOption>,
    /// Only jobs of this deployment
    #[arg(long, value_name = "NAME")]
    pub deployment: Option<String>,
    /// Only jobs that were submitted since then: a duration before now (90m, 2d), or a time (2026-11-26T08:00:00Z)
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Maximum number of jobs, the newest first
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
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
