//! `meridian apply` and `meridian get`: change and show the desired state of the fleet.
//!
//! The hub parses the files, compares and writes; this module reads them from disk, shows the difference and asks for
//! confirmation. A dry run precedes the change: the second request names the revision to which the shown difference
//! refers, and the hub rejects it if the state has changed since.

mod format;
mod replicas;
mod usage;
mod wait;

use crate::cli::{ApplyOptions, CallerOptions, GetOptions, ResourceKind};
use crate::jobs::{self, GetJobsError};
use crate::requests::{self, GetRequestsError};
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, fail};
use identity::{IdentityFiles, OwnName, ProcessIdentity, Transport};
use regions::TenantRules;
use regions::id::{IdError, TenantId};
use regions::spiffe::Role;
use reqwest::StatusCode;
use scheduler_api::apply::{
    AppliedDeploymentsV1, AppliedV1, ApplyFileV1, ApplyV1, ChangeKind, ChangeV1, DeploymentReplicasV1,
    DeploymentStatusV1, Kind, ProblemV1, ProblemsV1, RolloutV1,
};
use scheduler_api::paths;
use scheduler_api::plan::{AllSharesV1, PlanV1};
use scheduler_api::route::RouteTableV1;
use scheduler_api::tenant::TenantsV1;
use scheduler_api::usage::UsageReportV1;
use scheduler_api::{VERSION, WireError, deployment};
use scheduler_client::hub::{HubCallError, HubFailure};
use scheduler_client::operator::OperatorClient;
use scheduler_client::operator_token::OperatorToken;
use scheduler_core::hubs::Hubs;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Timeout of a call of a command that changes one record: the hub responds after it has written to its store.
pub(crate) const RECORD_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a call; a hub retries its store for some seconds.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Variable with the directory of the identity, if the command line has none.
const IDENTITY_VARIABLE: &str = "MERIDIAN_IDENTITY";
/// Variable with a token, if the command line has no file with one.
const TOKEN_VARIABLE: &str = "MERIDIAN_TOKEN";

/// Failure of a command.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// The command line or a file that it names is invalid.
    Usage(Vec<String>),
    /// The hub rejects the files.
    InvalidFiles(ProblemsV1),
    /// Any other failure.
    Failed(String),
    /// Some of several servers have failed; `text` is the result of the others, if there are any.
    Partial { text: Option<String>, problems: Vec<String> },
}

impl std::fmt::Display for CommandError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CommandError::Usage(problems) => f.write_str(&problems.join("; ")),
            CommandError::InvalidFiles(_) => f.write_str("the hub rejects the files"),
            CommandError::Failed(problem) => f.write_str(problem),
            CommandError::Partial { text: _, problems } => f.write_str(&problems.join("; ")),
        }
    }
}

impl From<GetRequestsError> for CommandError {
    fn from(error: GetRequestsError) -> CommandError {
        match error {
            GetRequestsError::Usage(problem) => CommandError::Usage(vec![problem]),
            GetRequestsError::Failed { text, problems } => CommandError::Partial { text, problems },
        }
    }
}

/// A problem of the command line.
impl From<String> for CommandError {
    fn from(problem: String) -> CommandError {
        CommandError::Usage(vec![problem])
    }
}

impl From<GetJobsError> for CommandError {
    fn from(error: GetJobsError) -> CommandError {
        match error {
            GetJobsError::Usage(problem) => CommandError::Usage(vec![problem]),
            GetJobsError::Failed(problem) => CommandError::Failed(problem),
        }
    }
}

impl From<HubCallError> for CommandError {
    fn from(error: HubCallError) -> CommandError {
        if let HubFailure::Rejected { status: StatusCode::UNPROCESSABLE_ENTITY, body, .. } = &error.failure
            && let Ok(problems) = serde_json::from_slice(body)
        {
            return CommandError::InvalidFiles(problems);
        }
        CommandError::Failed(error.to_string())
    }
}

/// Runs `meridian apply`. Exit code 0 if the state was applied, and with `--wait` if the deployments are ready; 3 if the files
/// are invalid.
pub(crate) fn apply(options: &ApplyOptions) -> ExitCode {
    let ApplyOptions { files, hold, promote, hub, caller, dry_run, yes, wait, wait_timeout, json } = options;
    if let Some(name) = promote {
        return promote_model(name, hub, caller, *json);
    }
    run(*json, async {
        let (mut deployments, mut tenants, mut problems) = (None, None, Vec::new());
        for path in files {
            match read(path) {
                Ok((Kind::Tenant, file)) => tenants.get_or_insert_with(Vec::new).push(file),
                // Files have no other kind.
                Ok((Kind::Deployment | Kind::Other, file)) => {
                    deployments.get_or_insert_with(Vec::new).push(file);
                }
                Err(problem) => problems.push(problem),
            }
        }
        let wait_timeout = duration("--wait-timeout", wait_timeout);
        let wait_timeout = wait_timeout.map_err(|problem| problems.push(problem)).unwrap_or_default();
        let client = client(hub, caller, TIMEOUT).map_err(|problem| problems.push(problem)).ok();
        let is_interactive = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !(*dry_run || *yes || is_interactive) {
            problems.push(
                "no terminal to confirm on: use --yes to apply, or --dry-run to see the changes".to_owned(),
            );
        }
        let Some(hub) = client.filter(|_| problems.is_empty()) else {
            return Err(CommandError::Usage(problems));
        };
        let waits = *wait && deployments.is_some();
        let first =
            ApplyV1 { version: VERSION, dry_run: true, base: None, hold: *hold, deployments, tenants };
        let preview = hub.apply(&first).await?;
        if !json {
            print(&format::difference(&preview));
        }
        let is_empty = preview.changes.is_empty() && preview.notes.is_empty();
        if *dry_run || is_empty {
            let text = if *json { pretty(&preview) } else { String::new() };
            return if waits { ready(&hub, &preview, wait_timeout, text).await } else { Ok(text) };
        }
        if !(*yes || confirm()) {
            return Err(CommandError::Failed("not applied".to_owned()));
        }
        let result = hub.apply(&ApplyV1 { dry_run: false, base: Some(preview.base), ..first }).await?;
        let text = if *json { pretty(&result) } else { "applied".to_owned() };
        if waits { ready(&hub, &result, wait_timeout, text).await } else { Ok(text) }
    })
}

/// Waits until the changed deployments are ready, or all of them without a change. Returns `text`, which is the result of the
/// change also if one of them fails.
async fn ready(
    hub: &OperatorClient,
    applied: &AppliedV1,
    timeout: Duration,
    text: String,
) -> Result<String, CommandError> {
    let is_waited_for =
        |change: &&ChangeV1| change.kind == Kind::Deployment && change.change != ChangeKind::Removed;
    let changed = applied.changes.iter().filter(is_waited_for);
    let changed: BTreeSet<_> = changed.map(|change| change.name.clone()).collect();
    let names = (!changed.is_empty()).then_some(&changed);
    let has_removed = applied.changes.iter().any(|change| change.kind == Kind::Deployment);
    if names.is_none() && has_removed {
        // Of the deployments, only removals.
        return Ok(text);
    }
    // Progress is for a person, and stdout for the result.
    let show = |line: &str| eprintln!("waiting: {line}");
    match wait::follow(hub, names, timeout, show).await {
        Ok(()) => Ok(text),
        Err(CommandError::Failed(problem)) => {
            Err(CommandError::Partial { text: Some(text), problems: vec![problem] })
        }
        Err(CommandError::Partial { problems, .. }) => {
            Err(CommandError::Partial { text: Some(text), problems })
        }
        Err(error) => Err(error),
    }
}

/// Parses a duration of the command line.
fn duration(option: &str, text: &str) -> Result<Duration, String> {
    let parsed = configuration::duration::parse(text).filter(|duration| !duration.is_zero());
    parsed.ok_or_else(|| format!("{option} {text}: write a number above 0 with a unit, such as 90s or 10m"))
}

/// Runs `meridian apply --promote`. Exit code 0 if the hub has accepted it.
fn promote_model(name: &str, hub: &str, caller: &CallerOptions, json: bool) -> ExitCode {
    run(json, async {
        let hub = client(hub, caller, TIMEOUT)?;
        let deployment = name.parse().map_err(|error: IdError| error.to_string())?;
        let promoted = hub.promote(&deployment).await?;
        Ok(if json {
            pretty(&promoted)
        } else {
            let revision = promoted.revision;
            format!("{name}: traffic switches to model revision {revision} when it is ready in every region")
        })
    })
}

/// Runs `meridian get`.
pub(crate) fn get(options: &GetOptions) -> ExitCode {
    let GetOptions { resource, name, hub, caller, jobs, list, requests, usage, json } = options;
    run(*json, async {
        if *resource == ResourceKind::Jobs {
            return Ok(jobs::text(jobs, list, name.as_deref(), *json).await?);
        }
        if *resource == ResourceKind::Requests {
            return Ok(requests::text(requests, list, name.as_deref(), *json).await?);
        }
        let hub = client(hub, caller, TIMEOUT)?;
        Ok(match resource {
            ResourceKind::Deployments => {
                let desired = with_name(hub.get(paths::DEPLOYMENTS).await?, name.as_deref())?;
                if *json {
                    pretty(&desired)
                } else {
                    let has_failed =
                        desired.statuses.iter().any(|status| wait::failures(status).next().is_some());
                    let replicas = match has_failed {
                        true => hub.get::<RolloutV1>(paths::ROLLOUT).await?.deployments,
                        false => Vec::new(),
                    };
                    as_file(desired, &replicas)?
                }
            }
            ResourceKind::Tenants => {
                let mut tenants: TenantsV1 = hub.get(paths::TENANTS).await?;
                tenants.tenants.retain(|tenant| name.as_ref().is_none_or(|name| *name == tenant.name));
                require_any(&tenants.tenants, "tenant", name.as_deref())?;
                if *json { pretty(&tenants) } else { as_tenants_file(tenants)? }
            }
            ResourceKind::Plan => {
                let mut plan: PlanV1 = hub.get(paths::PLAN).await?;
                for weights in &mut plan.weights {
                    weights.rows.retain(|row| name.as_ref().is_none_or(|name| *name == row.deployment));
                }
                for floors in &mut plan.floors {
                    floors.floors.retain(|floor| name.as_ref().is_none_or(|name| *name == floor.name));
                }
                plan.placements.retain(|known| name.as_ref().is_none_or(|name| *name == known.deployment));
                if *json { pretty(&plan) } else { format::plan(&plan) }
            }
            ResourceKind::Shares => {
                let mut shares: AllSharesV1 = hub.get(paths::TENANT_SHARES).await?;
                for gateway in &mut shares.gateways {
                    gateway.tenants.retain(|share| name.as_ref().is_none_or(|name| *name == share.tenant));
                }
                if *json { pretty(&shares) } else { format::shares(&shares) }
            }
            ResourceKind::Regions => {
                let RouteTableV1 { mut regions, .. } = hub.get(paths::ROUTES).await?;
                regions.retain(|region| name.as_ref().is_none_or(|name| *name == region.id));
                require_any(&regions, "region", name.as_deref())?;
                if *json {
                    pretty(&regions)
                } else {
                    let rollout: RolloutV1 = hub.get(paths::ROLLOUT).await?;
                    format::regions(&regions, &rollout.deployments)
                }
            }
            ResourceKind::Usage => {
                let tenant = name.as_deref().map(str::parse::<TenantId>).transpose();
                let tenant = tenant.map_err(|error| error.to_string())?;
                let mut report: UsageReportV1 = hub.get(&usage::path(usage, tenant.as_ref())).await?;
                // A hub of an earlier version sends all tenants.
                report.rows.retain(|daily| name.as_ref().is_none_or(|name| *name == daily.row.tenant));
                match (*json, usage.csv) {
                    (true, _) => pretty(&report),
                    (false, true) => usage::csv(&report),
                    (false, false) => usage::table(&report),
                }
            }
            // Of a gateway, above.
            ResourceKind::Jobs | ResourceKind::Requests => String::new(),
            ResourceKind::Rollout => {
                let mut rollout: RolloutV1 = hub.get(paths::ROLLOUT).await?;
                rollout.pending.retain(|waiting| name.as_ref().is_none_or(|name| *name == waiting.name));
                rollout.deployments.retain(|known| name.as_ref().is_none_or(|name| *name == known.name));
                if *json {
                    pretty(&rollout)
                } else {
                    let mut applied: AppliedDeploymentsV1 = hub.get(paths::DEPLOYMENTS).await?;
                    applied.statuses.retain(|status| name.as_ref().is_none_or(|name| *name == status.name));
                    format::rollout(&rollout, &applied.statuses)
                }
            }
        })
    })
}

/// Reads a file and determines its kind.
fn read(path: &Path) -> Result<(Kind, ApplyFileV1), String> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name} cannot be read: {error}"))?;
    // The hub reports invalid TOML, with the line.
    let Ok(keys) = text.parse::<toml::Table>() else {
        return Ok((Kind::Deployment, ApplyFileV1 { name, text }));
    };
    let kind = match (keys.contains_key("deployment"), keys.contains_key("tenant")) {
        (true, true) => {
            return Err(format!("{name} has deployments and tenants; write them into separate files"));
        }
        (false, false) if keys.is_empty() => {
            return Err(format!(
                "{name} is empty; write [[deployment]] or [[tenant]] tables, or `deployment = []` or `tenant = []` to remove \
                 all entries of that kind"
            ));
        }
        (false, true) => Kind::Tenant,
        // The hub reports unknown keys.
        (true, false) | (false, false) => Kind::Deployment,
    };
    Ok((kind, ApplyFileV1 { name, text }))
}

/// Creates a client of the hub at this URL, with the identity or the token of an operator or viewer.
pub(crate) fn client(hub: &str, caller: &CallerOptions, timeout: Duration) -> Result<OperatorClient, String> {
    let hubs = Hubs::at([hub]);
    let hubs = hubs.ok_or_else(|| format!("--hub {hub} is not a URL of a hub; write https://HOST:PORT"))?;
    if let Some(token) = operator_token(caller)? {
        return OperatorClient::with_token(&hubs, &token, timeout).map_err(|error| error.to_string());
    }
    let identity = caller.identity.as_deref();
    if identity.is_none() && hubs.first_with_tls().is_some() {
        return Err(format!(
            "--hub {hub} uses TLS; give --identity DIR, or set {IDENTITY_VARIABLE}; or give --token-file FILE, or set \
             {TOKEN_VARIABLE}"
        ));
    }
    OperatorClient::new(&hubs, &transport(identity)?, timeout).map_err(|error| error.to_string())
}

/// Returns the token of a command line, if it has one. The authorities are those of the command line, or of the identity
/// folder, whose certificate is not used then.
pub(crate) fn operator_token(caller: &CallerOptions) -> Result<Option<OperatorToken>, String> {
    let CallerOptions { identity, token_file, token, authorities } = caller;
    let token = match (token_file, token) {
        (Some(file), _) => std::fs::read_to_string(file)
            .map_err(|error| format!("--token-file {}: {error}", file.display()))?,
        (None, Some(token)) => token.clone(),
        (None, None) => return Ok(None),
    };
    let of_identity = identity.as_deref().map(|dir| IdentityFiles::in_directory(dir).authorities);
    let authorities = authorities.clone().or(of_identity).ok_or(
        "a token is sent only to a hub of the fleet; give --authorities FILE with the certificates of its authorities",
    )?;
    OperatorToken::new(&token, &authorities).map(Some).map_err(|problem| format!("token: {problem}"))
}

/// Loads the identity of an operator or viewer. Without one, only a hub on this machine can be called.
pub(crate) fn transport(identity: Option<&Path>) -> Result<Transport, String> {
    let Some(dir) = identity else { return Ok(Transport::Loopback) };
    let name = OwnName { roles: &[Role::Operator, Role::Viewer], region: None };
    let loaded = ProcessIdentity::load(IdentityFiles::in_directory(dir), &name, None);
    let loaded = loaded.map_err(|problems| format!("--identity: {}", problems.join("; ")))?;
    Ok(Transport::Tls(Arc::new(loaded)))
}

fn confirm() -> bool {
    eprint!("Apply this? [y/N] ");
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// Runs a command, prints its text, and returns its exit code.
pub(crate) fn run(json: bool, command: impl Future<Output = Result<String, CommandError>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime
        .map_err(|error| CommandError::Failed(format!("cannot start the async runtime: {error}")))
        .and_then(|runtime| runtime.block_on(command));
    match result {
        Ok(text) => {
            if !text.is_empty() {
                print(&text);
            }
            ExitCode::SUCCESS
        }
        Err(CommandError::Partial { text, problems }) => {
            if let Some(text) = text {
                print(&text);
            }
            fail(EXIT_FAILED, &problems)
        }
        Err(CommandError::Usage(problems)) => fail(EXIT_USAGE, &problems),
        Err(CommandError::Failed(problem)) => fail(EXIT_FAILED, &[problem]),
        Err(CommandError::InvalidFiles(problems)) => {
            if json {
                print(&pretty(&problems));
            }
            let line =
                |ProblemV1 { file, line, message }: &ProblemV1| format!("{file}: line {line}: {message}");
            fail(EXIT_CHECK_FAILED, &problems.problems.iter().map(line).collect::<Vec<_>>())
        }
    }
}

fn with_name(
    mut desired: AppliedDeploymentsV1,
    name: Option<&str>,
) -> Result<AppliedDeploymentsV1, CommandError> {
    desired.deployments.retain(|deployment| name.is_none_or(|name| name == deployment.name));
    desired.statuses.retain(|status| name.is_none_or(|name| name == status.name));
    require_any(&desired.deployments, "deployment", name)?;
    Ok(desired)
}

/// Fails if a name was given and nothing has it.
fn require_any<T>(found: &[T], what: &str, name: Option<&str>) -> Result<(), CommandError> {
    match name {
        Some(name) if found.is_empty() => {
            Err(CommandError::Failed(format!("the hub has no {what} `{name}`")))
        }
        Some(_) | None => Ok(()),
    }
}

/// Formats the applied deployments as a file. Failed and pending deployments are named in comments, with regions and reasons;
/// `replicas` has the models that failed ones still serve.
fn as_file(desired: AppliedDeploymentsV1, replicas: &[DeploymentReplicasV1]) -> Result<String, CommandError> {
    let unreadable =
        |error: &dyn std::fmt::Display| CommandError::Failed(format!("invalid response of the hub: {error}"));
    let deployments =
        deployment::read_deployments(desired.deployments).map_err(|error| unreadable(&error))?;
    let file = regions::write_deployments(deployments.values()).map_err(|error| unreadable(&error))?;
    // As comments, so that the output stays a file that can be applied.
    let comment = |status: &DeploymentStatusV1| {
        let failed = wait::failures_and_served(status, replicas).map(|line| format!("# Failed: {line}\n"));
        failed.chain(wait::pending(status).map(|line| format!("# Pending: {line}\n"))).collect::<String>()
    };
    Ok(desired.statuses.iter().map(comment).collect::<String>() + &file)
}

fn as_tenants_file(tenants: TenantsV1) -> Result<String, CommandError> {
    let unreadable =
        |error: &dyn std::fmt::Display| CommandError::Failed(format!("invalid response of the hub: {error}"));
    let tenants: BTreeMap<_, TenantRules> =
        tenants.try_into().map_err(|error: WireError| unreadable(&error))?;
    regions::write_tenants(tenants.values()).map_err(|error| unreadable(&error))
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("numbers, strings and lists serialise to JSON")
}

/// Prints to stdout, ignoring a closed pipe.
fn print(text: &str) {
    writeln!(std::io::stdout(), "{}", text.trim_end()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_is_rejected_and_removes_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let check = |text: &str, part: Option<&str>| {
            let path = dir.path().join("deployments.toml");
            std::fs::write(&path, text).expect("written");
            let problem = read(&path).err();
            assert_eq!(problem.is_some(), part.is_some(), "{text}: {problem:?}");
            assert!(problem.unwrap_or_default().contains(part.unwrap_or_default()), "{text}");
        };
        check("", Some("is empty"));
        check("# later\n", Some("deployment = []"));
        check("deployment = []", None);
        check("tenant = []", None);
        check("deployment = []\ntenant = []", Some("into separate files"));
        check("[[deployment", None);
        assert!(read(&dir.path().join("gone")).is_err_and(|problem| problem.contains("cannot be read")));
    }

    #[test]
    fn the_file_names_failed_and_pending_deployments_in_comments() {
        let deployment = |name: &str| {
            let engine = serde_json::json!({"kind": "cpu", "precision": "f32"});
            serde_json::json!({"name": name, "task": "embed", "model": "pypi://m", "engine": engine, "residency": null,
                               "regions": []})
        };
        let region = |status: &str| serde_json::json!({"region": "aws/us-east-1", "status": status});
        let statuses = serde_json::json!([
            {"name": "a", "status": "Ready", "regions": [region("Ready")]},
            {"name": "b", "status": "Pending", "regions": [region("Pending")]},
            {"name": "c", "status": "Pending", "infeasible": "max_cost: 3 of\n2", "regions": []},
            {"name": "d", "status": "Failed", "regions": [region("Failed")]},
        ]);
        let deployments: Vec<_> = ["a", "b", "c", "d"].map(deployment).into();
        let desired = serde_json::json!({"version": 1, "revision": 7, "deployments": deployments, "statuses": statuses});
        let desired: AppliedDeploymentsV1 = serde_json::from_value(desired).expect("a response");
        let file = as_file(desired, &[]).expect("a file");
        let comments: Vec<_> = file.lines().take_while(|line| line.starts_with("# ")).collect();
        let expected = [
            "# Pending: b: not ready in aws/us-east-1",
            "# Pending: c: no set of regions meets its placement: max_cost: 3 of 2",
            "# Failed: d has failed in aws/us-east-1",
        ];
        assert_eq!(comments.get(..3), Some(&expected[..]), "{file}");
        assert!(file.parse::<toml::Table>().is_ok(), "{file}");
    }
}
