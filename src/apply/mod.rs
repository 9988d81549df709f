//! `meridian apply` and `meridian get`: what there shall be, changed and read back.
//!
//! The hub reads the files, compares and writes; here they are taken from disk, the difference is shown, and a person is
//! asked. What is applied is what was shown: the second message names the revision that the first was the difference to, and
//! the hub refuses it if another stands there by then.

mod ask;
mod replicas;
mod shown;

use crate::cli::{ApplyOptions, GetOptions, Got};
use crate::{DID_NOT_HOLD, FAILED, WRONG_USAGE, fail};
use ask::{Hub, NotDone};
use regions::TenantRules;
use scheduler_core::wire::apply::{AppliedDeploymentsV1, ApplyFileV1, ApplyV1, Kind, ProblemV1};
use scheduler_core::wire::tenant::TenantsV1;
use scheduler_core::wire::{VERSION, WireError, deployment};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

/// Holds the operator's token, where no file does.
const TOKEN_VARIABLE: &str = "MERIDIAN_OPERATOR_TOKEN";

/// Runs `meridian apply`: 0 if it is so now, 3 if the files are wrong.
pub(crate) fn apply(options: &ApplyOptions) -> ExitCode {
    let ApplyOptions { files, hold, promote, hub, token_file, dry_run, yes, json } = options;
    if let Some(name) = promote {
        return promoted(name, hub, token_file.as_deref(), *json);
    }
    let (mut deployments, mut tenants, mut problems) = (None, None, Vec::new());
    for path in files {
        match read(path) {
            Ok((Kind::Deployment, file)) => deployments.get_or_insert_with(Vec::new).push(file),
            Ok((Kind::Tenant, file)) => tenants.get_or_insert_with(Vec::new).push(file),
            Err(problem) => problems.push(problem),
        }
    }
    let token = token(token_file.as_deref()).map_err(|problem| problems.push(problem)).ok();
    let asked = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if !(*dry_run || *yes || asked) {
        problems.push("nobody can be asked here: say --yes to apply, or --dry-run to see".to_owned());
    }
    let Some(token) = token.filter(|_| problems.is_empty()) else {
        return fail(WRONG_USAGE, &problems);
    };
    let hub = match Hub::at(hub, Some(token)) {
        Ok(hub) => hub,
        Err(problem) => return fail(WRONG_USAGE, &[problem]),
    };
    let first = ApplyV1 { version: VERSION, dry_run: true, base: None, hold: *hold, deployments, tenants };
    run(async {
        let seen = hub.apply(&first).await?;
        if !json {
            say(&shown::difference(&seen));
        }
        let nothing = seen.changes.is_empty() && seen.notes.is_empty();
        let done = if *dry_run || nothing {
            seen
        } else if !(*yes || agreed()) {
            return Err(NotDone::Failed("nothing was changed".to_owned()));
        } else {
            let done = hub.apply(&ApplyV1 { dry_run: false, base: Some(seen.base), ..first }).await?;
            if !json {
                say("applied");
            }
            done
        };
        if *json {
            say(&pretty(&done));
        }
        Ok(ExitCode::SUCCESS)
    })
    .unwrap_or_else(|not_done| told(not_done, *json))
}

/// Runs `meridian apply --promote`: 0 if the hub has taken it.
fn promoted(name: &str, hub: &str, token_file: Option<&Path>, json: bool) -> ExitCode {
    let hub = token(token_file).and_then(|token| Hub::at(hub, Some(token)));
    let hub = match hub {
        Ok(hub) => hub,
        Err(problem) => return fail(WRONG_USAGE, &[problem]),
    };
    run(async {
        let promoted = hub.promote(name).await?;
        if json {
            say(&pretty(&promoted));
        } else {
            say(&format!(
                "{name}: traffic switches to model revision {} when it is ready in every region",
                promoted.revision
            ));
        }
        Ok(ExitCode::SUCCESS)
    })
    .unwrap_or_else(|not_done| told(not_done, json))
}

/// Runs `meridian get`.
pub(crate) fn get(options: &GetOptions) -> ExitCode {
    let GetOptions { what, name, hub, token_file, json } = options;
    let hub = match read_token(token_file.as_deref()).and_then(|token| Hub::at(hub, token)) {
        Ok(hub) => hub,
        Err(problem) => return fail(WRONG_USAGE, &[problem]),
    };
    run(async {
        let text = match what {
            Got::Deployments => {
                let wanted = only(hub.deployments().await?, name.as_deref())?;
                if *json { pretty(&wanted) } else { as_file(wanted)? }
            }
            Got::Tenants => {
                let mut tenants = hub.tenants().await?;
                tenants.tenants.retain(|tenant| name.as_ref().is_none_or(|name| *name == tenant.name));
                some(&tenants.tenants, "tenant", name.as_deref())?;
                if *json { pretty(&tenants) } else { as_tenants_file(tenants)? }
            }
            Got::Plan => {
                let mut plan = hub.plan().await?;
                for weights in &mut plan.weights {
                    weights.rows.retain(|row| name.as_ref().is_none_or(|name| *name == row.deployment));
                }
                for floors in &mut plan.floors {
                    floors.floors.retain(|floor| name.as_ref().is_none_or(|name| *name == floor.name));
                }
                if *json { pretty(&plan) } else { shown::plan(&plan) }
            }
            Got::Regions => {
                let mut regions = hub.routes().await?.regions;
                regions.retain(|region| name.as_ref().is_none_or(|name| *name == region.id));
                some(&regions, "region", name.as_deref())?;
                if *json {
                    pretty(&regions)
                } else {
                    shown::regions(&regions, &hub.rollout().await?.deployments)
                }
            }
            Got::Rollout => {
                let mut rollout = hub.rollout().await?;
                rollout.pending.retain(|waiting| name.as_ref().is_none_or(|name| *name == waiting.name));
                rollout.deployments.retain(|known| name.as_ref().is_none_or(|name| *name == known.name));
                if *json { pretty(&rollout) } else { shown::rollout(&rollout) }
            }
        };
        say(&text);
        Ok(ExitCode::SUCCESS)
    })
    .unwrap_or_else(|not_done| told(not_done, *json))
}

/// A file that is there, and what it is about.
fn read(path: &Path) -> Result<(Kind, ApplyFileV1), String> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name} cannot be read: {error}"))?;
    // What is no TOML is for the hub to tell, with its line.
    let Ok(keys) = text.parse::<toml::Table>() else {
        return Ok((Kind::Deployment, ApplyFileV1 { name, text }));
    };
    let kind = match (keys.contains_key("deployment"), keys.contains_key("tenant")) {
        (true, true) => {
            return Err(format!("{name} has deployments and tenants; write them into a file each"));
        }
        (false, false) if keys.is_empty() => {
            return Err(format!(
                "{name} says nothing; write [[deployment]] or [[tenant]] tables, or `deployment = []` or `tenant = []` to take \
                 all of them away"
            ));
        }
        (false, true) => Kind::Tenant,
        // Other keys are for the hub to complain of.
        (true, false) | (false, false) => Kind::Deployment,
    };
    Ok((kind, ApplyFileV1 { name, text }))
}

/// The operator's token, which is needed.
pub(crate) fn token(file: Option<&Path>) -> Result<String, String> {
    read_token(file)?.ok_or_else(|| {
        format!("an operator's token is needed: give --token-file FILE, or set {TOKEN_VARIABLE}")
    })
}

/// The token of the file or of the variable, if there is one. A hub on loopback may be readable without.
fn read_token(file: Option<&Path>) -> Result<Option<String>, String> {
    match file {
        Some(file) => {
            let text = std::fs::read_to_string(file);
            let text =
                text.map_err(|error| format!("--token-file {} cannot be read: {error}", file.display()))?;
            Ok(Some(text.trim().to_owned()))
        }
        None => Ok(std::env::var(TOKEN_VARIABLE).ok().map(|token| token.trim().to_owned())),
    }
}

fn agreed() -> bool {
    eprint!("Apply this? [y/N] ");
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

fn run(work: impl Future<Output = Result<ExitCode, NotDone>>) -> Result<ExitCode, NotDone> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| NotDone::Failed(format!("no runtime: {error}")))?.block_on(work)
}

fn told(not_done: NotDone, json: bool) -> ExitCode {
    match not_done {
        NotDone::Failed(problem) => fail(FAILED, &[problem]),
        NotDone::Wrong(problems) => {
            if json {
                say(&pretty(&problems));
            }
            let line =
                |ProblemV1 { file, line, message }: &ProblemV1| format!("{file}: line {line}: {message}");
            fail(DID_NOT_HOLD, &problems.problems.iter().map(line).collect::<Vec<_>>())
        }
    }
}

fn only(mut wanted: AppliedDeploymentsV1, name: Option<&str>) -> Result<AppliedDeploymentsV1, NotDone> {
    wanted.deployments.retain(|deployment| name.is_none_or(|name| name == deployment.name));
    some(&wanted.deployments, "deployment", name)?;
    Ok(wanted)
}

/// Who asks for one by its name wants to know if it is not there.
fn some<T>(found: &[T], what: &str, name: Option<&str>) -> Result<(), NotDone> {
    match name {
        Some(name) if found.is_empty() => Err(NotDone::Failed(format!("the hub knows no {what} `{name}`"))),
        Some(_) | None => Ok(()),
    }
}

/// What was applied, as the file that says so.
fn as_file(wanted: AppliedDeploymentsV1) -> Result<String, NotDone> {
    let unreadable = |error: &dyn std::fmt::Display| NotDone::Failed(format!("the hub's answer: {error}"));
    let deployments = deployment::read_deployments(wanted.deployments).map_err(|error| unreadable(&error))?;
    regions::write_deployments(deployments.values()).map_err(|error| unreadable(&error))
}

fn as_tenants_file(tenants: TenantsV1) -> Result<String, NotDone> {
    let unreadable = |error: &dyn std::fmt::Display| NotDone::Failed(format!("the hub's answer: {error}"));
    let tenants: BTreeMap<_, TenantRules> =
        tenants.try_into().map_err(|error: WireError| unreadable(&error))?;
    regions::write_tenants(tenants.values()).map_err(|error| unreadable(&error))
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("numbers, texts and lists serialise to JSON")
}

/// Whoever reads it may have closed their end.
fn say(text: &str) {
    writeln!(std::io::stdout(), "{}", text.trim_end()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_says_nothing_takes_nothing_away() {
        let dir = tempfile::tempdir().expect("a folder");
        let check = |text: &str, part: Option<&str>| {
            let path = dir.path().join("deployments.toml");
            std::fs::write(&path, text).expect("written");
            let problem = read(&path).err();
            assert_eq!(problem.is_some(), part.is_some(), "{text}: {problem:?}");
            assert!(problem.unwrap_or_default().contains(part.unwrap_or_default()), "{text}");
        };
        check("", Some("says nothing"));
        check("# later\n", Some("deployment = []"));
        check("deployment = []", None);
        check("tenant = []", None);
        check("deployment = []\ntenant = []", Some("into a file each"));
        check("[[deployment", None);
        assert!(read(&dir.path().join("gone")).is_err_and(|problem| problem.contains("cannot be read")));
    }
}
