//! The four roles, each as one process: configuration, signals, the ready line, the end.
//!
//! The shells never print, never install a signal handler and never exit; that is done here, once. A role says `ready
//! ROLE [REGION] on ADDRESS` on stdout when it can be used, and nothing else there; its log goes to stderr.

use crate::cli::{GatewayOptions, OtherProgram, RegionalRoleOptions, RoleOptions, ScriptedOptions};
use crate::log::{self, Writing};
use crate::{FAILED, WRONG_USAGE, fail};
use gateway::config::EdgeConfig;
use gateway::hop::Credentials;
use gateway::ingress::{IngressConfig, IngressSignals};
use gateway::receipts::{RawReceipts, ReceiptsConfig};
use scheduler::config::{HubConfig, SpokeConfig, TlsFiles};
use scheduler::keeper::{self, Keeper};
use scheduler::scaling::{self, Scaling};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use supervision::task::{essential, supervise_until_done};
use supervision::{Mutex, panics, process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

/// Holds the process identifier of a parent without which a role shall not live on.
pub(crate) use keeper::PARENT_VARIABLE;

/// Says in which form the log is written: `json`, or text for whoever does not say.
const LOG_FORMAT_VARIABLE: &str = "MERIDIAN_LOG_FORMAT";

/// How long a process that has failed may take to drain: its requests may stand on state that is not whole, so it is not
/// given what a stop in good order is.
const FAILED_DRAIN: Duration = Duration::from_secs(20);

/// Runs a gateway.
pub(crate) fn gateway(options: &GatewayOptions) -> ExitCode {
    let environment: BTreeMap<_, _> = std::env::vars().collect();
    let base = base(&options.config);
    let config = match read(&options.config).and_then(|text| EdgeConfig::parse(&text, base, &environment)) {
        Ok(config) => EdgeConfig { take_over: options.take_over, ..config },
        Err(problems) => return wrong(&options.config, problems),
    };
    run(async |stop| {
        gateway::edge::run(config, stopped(stop), |address| ready("gateway", None, address)).await
    })
}

/// Runs a hub.
pub(crate) fn hub(options: &RoleOptions) -> ExitCode {
    let config = match read(&options.config).and_then(|text| HubConfig::parse(&text, base(&options.config))) {
        Ok(config) => config,
        Err(problems) => return wrong(&options.config, problems),
    };
    run(async |stop| scheduler::hub::run(config, stopped(stop), |address| ready("hub", None, address)).await)
}

/// Runs a spoke: the region's ingress, its agent and what scales it, over one `Spoke`.
pub(crate) fn spoke(options: &RegionalRoleOptions) -> ExitCode {
    let region = options.region.as_deref();
    let config = match read(&options.config)
        .and_then(|text| SpokeConfig::parse(&text, base(&options.config), region))
    {
        Ok(config) => config,
        Err(problems) => return wrong(&options.config, problems),
    };
    let (receipts, tls) = match (spoke_receipts(&config, base(&options.config)), spoke_tls(&config)) {
        (Ok(receipts), Ok(tls)) => (receipts, tls),
        (receipts, tls) => {
            let problems = [receipts.err(), tls.err()];
            return wrong(&options.config, problems.into_iter().flatten().flatten().collect());
        }
    };
    run(async |stop| spoke_parts(config, receipts, tls, stop).await)
}

fn spoke_tls(config: &SpokeConfig) -> Result<Option<Arc<Credentials>>, Vec<String>> {
    let Some(TlsFiles { certificate, key, client_ca: ca }) = config.tls.clone() else { return Ok(None) };
    let files = gateway::hop::CredentialFiles { certificate, key, ca };
    Credentials::of_region(files, &config.region, &config.catalogue).map(|read| Some(Arc::new(read)))
}

fn spoke_receipts(config: &SpokeConfig, base: &Path) -> Result<Option<ReceiptsConfig>, Vec<String>> {
    let Some(receipts) = config.receipts.clone() else { return Ok(None) };
    let scheduler::config::Receipts { dir, key_file, key_env, required } = receipts;
    let environment = std::env::vars().collect();
    ReceiptsConfig::read(RawReceipts { dir, key_file, key_env, required }, base, &environment).map(Some)
}

async fn spoke_parts(
    config: SpokeConfig,
    receipts: Option<ReceiptsConfig>,
    tls: Option<Arc<Credentials>>,
    stop: watch::Receiver<bool>,
) -> Result<(), anyhow::Error> {
    let spoke = Arc::new(Mutex::new(config.spoke(rand::random())));
    let scaling = Scaling::prepare(&config)?;
    let signals = scaling::Signals::default();
    let ingress = IngressConfig {
        listen: config.listen,
        region: config.region.clone(),
        catalogue: config.catalogue.clone(),
        receipts,
        tls,
        operations: config.operations,
        signals: IngressSignals { wake: signals.wake.clone(), changed: signals.changed.clone() },
    };
    let region = config.region.to_string();
    let agent = tokio::spawn(supervise_until_done("agent", {
        let (spoke, stop) = (spoke.clone(), stop.clone());
        move || {
            let run = scheduler::agent::run(config.clone(), spoke.clone(), stopped(stop.clone()));
            async move {
                if let Err(error) = run.await {
                    process::fail(&format!("agent: {error}"));
                }
            }
        }
    }));
    // Replicas are needed until the last request is answered.
    let (door_closed, closed) = watch::channel(false);
    let scaling =
        scaling.map(|it| tokio::spawn(essential("scaling", it.run(spoke.clone(), signals, stopped(closed)))));
    let served = gateway::ingress::run(ingress, spoke, stopped(stop), |address| {
        ready("spoke", Some(&region), address)
    })
    .await;
    door_closed.send_replace(true);
    if let Some(scaling) = scaling {
        scaling.await?;
    }
    served?;
    agent.await?;
    Ok(())
}

/// Runs a replica.
pub(crate) fn replica(options: &RegionalRoleOptions) -> ExitCode {
    let parsed = |text: String| text.parse::<replica::Config>().map_err(|error| error.problems);
    let config = match read(&options.config).and_then(parsed) {
        Ok(config) => config,
        Err(problems) => return wrong(&options.config, problems),
    };
    let keeper = match std::env::var(keeper::VARIABLE).ok().map(|value| Keeper::parse(&value)).transpose() {
        Ok(keeper) => keeper,
        Err(problem) => return fail(WRONG_USAGE, &[problem]),
    };
    let region = options.region.clone();
    run(async |stop| {
        let shutdown = stopped_or_alone(stop, keeper);
        replica::server::run(config, shutdown, |address| ready("replica", region.as_deref(), address)).await
    })
}

/// Runs a replica that takes its time and computes nothing.
pub(crate) fn scripted_replica(options: ScriptedOptions) -> ExitCode {
    run(async |stop| {
        crate::up::scripted::run(options, stopped(stop), |address| ready("replica", None, address)).await
    })
}

/// A replica that somebody looks after ends as well when nobody does any longer.
async fn stopped_or_alone(stop: watch::Receiver<bool>, keeper: Option<Keeper>) {
    let Some(keeper) = keeper else { return stopped(stop).await };
    tokio::select! {
        () = stopped(stop) => {}
        () = keeper::until_alone(&keeper) => {
            tracing::warn!(file = %keeper.file.display(), "nobody looks after this replica any longer; it ends");
        }
    }
}

/// Becomes another program, which then ends with our parent as a role would: what was asked of the kernel stays.
pub(crate) fn with_parent(other: &OtherProgram) -> ExitCode {
    if let Err(problem) = live_and_die_with_parent() {
        return fail(FAILED, &[problem]);
    }
    // It returns only if that did not work.
    let error = std::process::Command::new(&other.program).args(&other.arguments).exec();
    fail(FAILED, &[format!("{} cannot be started: {error}", other.program)])
}

/// Runs a role to its end on a runtime of its own; the first SIGTERM or SIGINT tells it to stop.
fn run<E: std::fmt::Display>(role: impl AsyncFnOnce(watch::Receiver<bool>) -> Result<(), E>) -> ExitCode {
    let _log = log_to_stderr("info");
    if let Err(problem) = live_and_die_with_parent() {
        return fail(FAILED, &[problem]);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    panics::log_panics();
    let outcome = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
        let (stop, watch) = watch::channel(false);
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => tracing::info!("told to stop"),
                _ = interrupt.recv() => tracing::info!("told to stop"),
                _ = process::failed() => {}
            }
            stop.send_replace(true);
            // A process that fails while it drains keeps to the same bound.
            tokio::select! {
                () = stop.closed() => {}
                _ = process::failed() => {
                    if let Err(error) = process::exit_within(FAILED_DRAIN) {
                        tracing::error!(%error, "no thread for the bound of the drain, exiting");
                        std::process::exit(process::EXIT_STATUS.into());
                    }
                }
            }
        });
        role(watch).await.map_err(|error| error.to_string())
    });
    if let Some(reason) = process::failure() {
        let mut problems = vec![format!("failed: {reason}")];
        problems.extend(outcome.err());
        // Threads that never return would keep a runtime that is dropped.
        runtime.shutdown_background();
        return fail(process::EXIT_STATUS, &problems);
    }
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(FAILED, &[problem]),
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender is gone only when the process ends anyway.
    stop.wait_for(|stop| *stop).await.ok();
}

fn ready(role: &str, region: Option<&str>, address: SocketAddr) {
    let region = region.map(|region| format!(" {region}")).unwrap_or_default();
    // Whoever started us may have closed its end; then nobody wants to know.
    writeln!(std::io::stdout(), "ready {role}{region} on {address}").ok();
}

/// When a parent is named, this process ends with it, however the parent ends: the kernel sees to it.
fn live_and_die_with_parent() -> Result<(), String> {
    let Ok(parent) = std::env::var(PARENT_VARIABLE) else {
        return Ok(());
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| format!("the kernel will not end this process with its parent: {error}"))?;
    // The parent may have ended before the line above.
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if actual.as_deref() == Some(parent.as_str()) {
        Ok(())
    } else {
        Err(format!(
            "the parent that {PARENT_VARIABLE} names ({parent}) is gone; unset it to run without one"
        ))
    }
}

/// Logs to stderr at `level`, or at what `MERIDIAN_LOG` says (the syntax of `tracing_subscriber::EnvFilter`), until what
/// is returned is dropped. `MERIDIAN_LOG_FORMAT=json` writes a JSON object a line, for machines.
pub(crate) fn log_to_stderr(level: &str) -> Option<Writing> {
    let filter = EnvFilter::try_from_env("MERIDIAN_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    let json = std::env::var_os(LOG_FORMAT_VARIABLE).is_some_and(|format| format == "json");
    // On a machine without room for one more thread each line is written where it is said.
    match (log::write_to(std::io::stderr()), json) {
        (Ok((lines, writing)), true) => {
            log.with_writer(lines).json().flatten_event(true).init();
            Some(writing)
        }
        (Ok((lines, writing)), false) => {
            log.event_format(log::Text::default()).with_writer(lines).init();
            Some(writing)
        }
        (Err(_), true) => {
            log.with_writer(std::io::stderr).json().flatten_event(true).init();
            None
        }
        (Err(_), false) => {
            log.event_format(log::Text::default()).with_writer(std::io::stderr).init();
            None
        }
    }
}

fn read(file: &Path) -> Result<String, Vec<String>> {
    std::fs::read_to_string(file).map_err(|error| vec![format!("cannot be read: {error}")])
}

/// Where relative paths in a configuration file start.
fn base(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("."))
}

fn wrong(file: &Path, problems: Vec<String>) -> ExitCode {
    let named: Vec<_> = problems.iter().map(|problem| format!("{}: {problem}", file.display())).collect();
    fail(WRONG_USAGE, &named)
}
