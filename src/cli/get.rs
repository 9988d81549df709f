//! Command-line options of `meridian get`.
//!
//! The options of jobs, requests and usage are declared for the whole command, because the resource is an argument and not a
//! subcommand: it may follow the options. So clap accepts them for each resource, and [`foreign_options`] rejects those
//! that the resource would ignore.

use super::{CallerOptions, GetJobsOptions, GetListOptions, GetRequestsOptions};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, ValueEnum};
use scheduler_api::usage::UsageDay;

#[derive(Debug, Args)]
pub(crate) struct GetOptions {
    /// Kind of resource
    #[arg(value_enum)]
    pub resource: ResourceKind,
    /// Show only the resource with this name; of jobs the id; requests have `meridian explain ID`
    pub name: Option<String>,
    /// Hub, or any of several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Authentication at the hub
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Endpoint of jobs
    #[command(flatten)]
    pub jobs: GetJobsOptions,
    /// Filters of jobs and requests
    #[command(flatten)]
    pub list: GetListOptions,
    /// Endpoint and filters of requests
    #[command(flatten)]
    pub requests: GetRequestsOptions,
    /// Days and format of usage
    #[command(flatten)]
    pub usage: GetUsageOptions,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Usage")]
pub(crate) struct GetUsageOptions {
    /// First day in UTC, YYYY-MM-DD; without it 30 days before the last
    #[arg(long, value_name = "DAY")]
    pub from: Option<UsageDay>,
    /// Last day in UTC; without it today
    #[arg(long, value_name = "DAY")]
    pub to: Option<UsageDay>,
    /// Print CSV to stdout
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
}

/// Kind of resource that `meridian get` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResourceKind {
    /// Applied deployments, as a deployments file
    Deployments,
    /// Applied tenants, as a tenants file; keys are hashes
    Tenants,
    /// Spokes of the regions with their addresses, and the ready deployments
    Regions,
    /// Traffic shares of the regions, with reasons, optionally of one deployment
    Plan,
    /// Shares of the gateways in the rate limits of tenants, optionally of one tenant
    Shares,
    /// Replicas and model revisions of each deployment, and pending changes with what they wait for
    Rollout,
    /// Durable jobs of the tenant of an API key, from a gateway
    Jobs,
    /// Requests that failed, failed over, were slow, rejected or sampled, from the disk of a gateway
    Requests,
    /// Requests, inputs and tokens by tenant, deployment, region and day, optionally of one tenant
    Usage,
}

/// Option that only `meridian get` of some resources has, with its owner for messages.
fn owned_options() -> Vec<(clap::Arg, OptionOwner)> {
    fn of<A: Args>(owner: OptionOwner) -> impl Iterator<Item = (clap::Arg, OptionOwner)> {
        let command = A::augment_args(Command::new("get"));
        command.get_arguments().cloned().map(move |option| (option, owner)).collect::<Vec<_>>().into_iter()
    }
    let hub = GetOptions::augment_args(Command::new("get"));
    let hub = hub.get_arguments().find(|option| option.get_id() == "hub").cloned();
    let of_hubs =
        hub.map(|option| (option, OptionOwner::Hub)).into_iter().chain(of::<CallerOptions>(OptionOwner::Hub));
    of::<GetJobsOptions>(OptionOwner::Jobs)
        .chain(of::<GetListOptions>(OptionOwner::Lists))
        .chain(of::<GetRequestsOptions>(OptionOwner::Requests))
        .chain(of::<GetUsageOptions>(OptionOwner::Usage))
        .chain(of_hubs)
        .collect()
}

/// Resources to which an option belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OptionOwner {
    Jobs,
    Requests,
    /// Jobs and requests.
    Lists,
    Usage,
    /// All resources but jobs and requests, which come from a gateway.
    Hub,
}

impl OptionOwner {
    fn owns(self, resource: ResourceKind) -> bool {
        match self {
            OptionOwner::Jobs => resource == ResourceKind::Jobs,
            OptionOwner::Usage => resource == ResourceKind::Usage,
            OptionOwner::Requests => resource == ResourceKind::Requests,
            OptionOwner::Lists => matches!(resource, ResourceKind::Jobs | ResourceKind::Requests),
            OptionOwner::Hub => !matches!(resource, ResourceKind::Jobs | ResourceKind::Requests),
        }
    }

    fn name(self) -> &'static str {
        match self {
            OptionOwner::Jobs => "`meridian get jobs`",
            OptionOwner::Usage => "`meridian get usage`",
            OptionOwner::Requests => "`meridian get requests`",
            OptionOwner::Lists => "`meridian get jobs` and `meridian get requests`",
            OptionOwner::Hub => {
                "the resources of a hub; jobs and requests come from a gateway (--gateway, --operations)"
            }
        }
    }
}

/// Names the options of a command line that `resource` would ignore, and where they belong; `None` if there are none.
/// Variables of the environment are set for several commands, so they do not count.
pub(super) fn foreign_options(resource: ResourceKind, given: &ArgMatches) -> Option<String> {
    let problem = |(option, owner): (clap::Arg, OptionOwner)| {
        let is_given = given.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
        let name = option.get_long().filter(|_| is_given && !owner.owns(resource))?;
        Some(format!("--{name} belongs to {}", owner.name()))
    };
    let problems: Vec<_> = owned_options().into_iter().filter_map(problem).collect();
    let resource = resource.to_possible_value()?;
    (!problems.is_empty()).then(|| format!("`meridian get {}`: {}", resource.get_name(), problems.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::super::Cli;

    #[test]
    fn options_of_other_resources_are_usage_errors() {
        let check = |line: &str, parts: &[&str]| {
            let read = Cli::try_read(format!("meridian get {line}").split(' '));
            let Err(error) = read else { panic!("{line} is accepted") };
            assert_eq!(error.exit_code(), 2, "{line}");
            for part in parts {
                assert!(error.to_string().contains(part), "{part} in {error}");
            }
        };
        let usage = "belongs to `meridian get usage`";
        check("deployments --csv --from 2026-11-01", &["--csv belongs to", "--from belongs to", usage]);
        check("--to 2026-11-01 plan minilm", &["`meridian get plan`: --to", usage]);
        check("jobs --csv", &[usage]);
        let lists = "belongs to `meridian get jobs` and `meridian get requests`";
        check("usage --status failed", &["--status", lists]);
        check("regions --limit 100", &["--limit", lists]);
        check("jobs --tenant a", &["--tenant belongs to `meridian get requests`"]);
        check("jobs --until 1h", &["--until belongs to `meridian get requests`"]);
        check("requests --key local", &["--key belongs to `meridian get jobs`"]);
        check("requests --hub http://a", &["--hub belongs to the resources of a hub"]);
        check("tenants --key local --gateway http://a", &["--key belongs to", "--gateway belongs to"]);
        check("jobs --hub http://a", &["--hub belongs to the resources of a hub"]);
        check("jobs --identity a", &["--identity belongs to the resources of a hub"]);
    }

    #[test]
    fn each_resource_has_its_own_options() {
        for line in [
            "deployments --hub http://a --identity b --json",
            "usage --from 2026-11-01 --to 2026-11-02 --csv",
            "--csv usage acme --token-file a --authorities b",
            "jobs --status failed --deployment a --since 2d --limit 5 --gateway http://a --key local --cacert b --json",
            "rollout",
            "requests --operations http://a --tenant docs --region aws/us-east-1 --status 5xx --outcome overloaded --kept failed_over --since 2h --until 1h --limit 5",
        ] {
            let read = Cli::try_read(format!("meridian get {line}").split(' '));
            assert!(read.is_ok(), "{line}: {read:?}");
        }
    }

    #[test]
    fn an_unknown_outcome_of_requests_is_rejected_with_the_known_ones() {
        let read = Cli::try_read("meridian get requests --outcome bogus".split(' '));
        let error = read.unwrap_err().to_string();
        for part in ["--outcome", "bogus", "client_disconnected", "overloaded"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
