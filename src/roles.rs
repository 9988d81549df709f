//! The four roles, each as one process: configuration, signals, ready line, exit.
//!
//! The role libraries never print, never install a signal handler and never exit; this module does. A role writes `ready
//! ROLE [REGION] on ADDRESS` to stdout when it serves, and nothing else; its log goes to stderr.

use crate::cli::{
    ExecOptions, GatewayOptions, ReplicaOptions, RoleOptions, ScriptedReplicaOptions, SpokeOptions,
};
use crate::log::{self, LogSettings};
use crate::pki::{Joined, join};
use crate::up::scripted;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
use configuration::{ConfigFile, Environment, Files};
use gateway::config::EdgeConfig;
use gateway::ingress::{IngressConfig, IngressSignals, JobsConfig};
use gateway::receipts::ReceiptsConfig;
use identity::Transport;
use metrics::Build;
use regions::EngineKind;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use scheduler::config::{HubConfig, ReadSpoke, SpokeConfig};
use scheduler::heartbeat::{self, HeartbeatFile};
use scheduler::scaling::{Autoscaler, ScalingSignals};
use sd_notify::NotifyState;
use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use supervision::task::{essential, supervise_until_done};
use supervision::{Mutex, panics, process};
use telemetry::log_filter::FilterLevel;
use telemetry::logs::LogControl;
use telemetry::{LogsConfig, Process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Variable with the process id of the parent. The role ends when that process ends.
pub(crate) use heartbeat::PARENT_VARIABLE;

/// Maximum drain time of a failed process. Shorter than that of a normal stop, because its requests may depend on
/// inconsistent state.
const FAILED_DRAIN: Duration = Duration::from_secs(20);

/// Timeout for threads that still block when a role has ended, such as a read of a model's download, which waits up to 30
/// seconds for a byte. What such a thread has on disk is continued or cleaned up by the next process.
const BLOCKED_THREADS: Duration = Duration::from_secs(2);

/// Runs a gateway.
pub(crate) fn gateway(options: &GatewayOptions) -> ExitCode {
    let joined = match join(&options.config, &options.join, &[Role::Gateway], None) {
        Ok(joined) => joined,
        Err(problems) => return fail(EXIT_FAILED, &problems),
    };
    let config = match read_config(&options.config, EdgeConfig::read) {
        Ok(config) => EdgeConfig { take_over: options.take_over, ..config },
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let (dns, logs, region) = (config.dns.clone(), config.logs.clone(), config.region.clone());
    let process = Process { role: "gateway", region: Some(region.as_str()) };
    run((process, logs.as_ref()), joined, &dns, async |stop, resolver| {
        let config = EdgeConfig { resolver: Some(resolver), ..config };
        gateway::edge::run(config, stopped(stop), |address| ready("gateway", None, address)).await
    })
}

/// Runs a hub.
pub(crate) fn hub(options: &RoleOptions) -> ExitCode {
    let joined = match join(&options.config, &options.join, &[Role::Hub], None) {
        Ok(joined) => joined,
        Err(problems) => return fail(EXIT_FAILED, &problems),
    };
    let config = match read_config(&options.config, HubConfig::read) {
        Ok(config) => config,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    // A hub with the authority renews its own certificate.
    let joined = if config.authority.is_some() { Joined::elsewhere() } else { joined };
    let (dns, logs) = (joined.dns().clone(), config.logs.clone());
    let process = Process { role: "hub", region: None };
    run((process, logs.as_ref()), joined, &dns, async |stop, _| {
        scheduler::hub::run(config, stopped(stop), |address| ready("hub", None, address)).await
    })
}

/// Runs a spoke: the region's ingress, agent and scaler, which share one `Spoke`.
pub(crate) fn spoke(options: &SpokeOptions) -> ExitCode {
    let joined = match join(&options.config, &options.join, &[Role::Spoke], options.region.as_deref()) {
        Ok(joined) => joined,
        Err(problems) => return fail(EXIT_FAILED, &problems),
    };
    let region = options.region.as_deref();
    let (mut config, parts) =
        match read_config(&options.config, |document, files| read_spoke(document, files, region)) {
            Ok(config) => config,
            Err(problems) => return fail(EXIT_USAGE, &problems),
        };
    config.engines = config.runs_own_program().then(own_engines);
    let replicas = config.scaling.as_ref().and_then(|scaling| scaling.replica_identity(&config.transport));
    let (dns, logs, own_region) = (config.dns.clone(), config.logs.clone(), config.region.clone());
    let process = Process { role: "spoke", region: Some(own_region.as_str()) };
    run((process, logs.as_ref()), joined.with_replicas(replicas), &dns, async |stop, resolver| {
        spoke_parts(config, parts, stop, resolver).await
    })
}

/// Returns the engines of replicas that are processes of this program.
fn own_engines() -> BTreeSet<EngineKind> {
    let gpu = replica::engine::tensorrt::IS_BUILT_IN.then_some(EngineKind::TensorrtLlm);
    gpu.into_iter().chain([EngineKind::Cpu]).collect()
}

/// Configuration of a spoke, with that of its ingress.
type SpokeParts = (SpokeConfig, IngressParts);

/// Parts of the configuration of a spoke that its ingress validates.
pub(crate) struct IngressParts {
    receipts: Option<ReceiptsConfig>,
    jobs: Option<JobsConfig>,
}

/// Reads the configuration of a spoke, also the parts that the ingress validates.
pub(crate) fn read_spoke(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    region: Option<&str>,
) -> Option<SpokeParts> {
    let ReadSpoke { config, receipts, jobs } = SpokeConfig::read(document, files, region)?;
    let receipts = receipts.and_then(|section| ReceiptsConfig::read(section, document, files));
    let jobs = jobs.and_then(|section| JobsConfig::read(section, document, files));
    Some((config?, IngressParts { receipts, jobs }))
}

async fn spoke_parts(
    config: SpokeConfig,
    IngressParts { receipts, jobs }: IngressParts,
    stop: watch::Receiver<bool>,
    resolver: Resolver,
) -> Result<(), anyhow::Error> {
    let spoke = Arc::new(Mutex::new(config.spoke(rand::random())));
    let scaling = Autoscaler::prepare(&config, &resolver)?;
    let signals = ScalingSignals::default();
    let ingress = IngressConfig {
        listen: config.listen,
        region: config.region.clone(),
        catalogue: config.catalogue.clone(),
        receipts,
        tracing: config.tracing.clone(),
        metrics: config.metrics.clone(),
        jobs: jobs.map(|jobs| jobs.reported_to(config.hub.clone())),
        transport: config.transport.clone(),
        operations: config.operations,
        resolver: resolver.clone(),
        proxy_protocol_from: config.proxy_protocol_from.clone(),
        signals: IngressSignals {
            wake: signals.wake.clone(),
            changed: signals.changed.clone(),
            shared: signals.shared.clone(),
        },
    };
    let region = config.region.to_string();
    // The agent and scaling stop last: the hub is to know that the spoke drains, and replicas are needed until the last
    // response.
    let (ingress_done, ingress_stopped) = watch::channel(false);
    let agent = tokio::spawn(supervise_until_done("agent", {
        let (spoke, stop, wake) = (spoke.clone(), ingress_stopped.clone(), signals.wake.clone());
        move || {
            let run = scheduler::agent::run(
                config.clone(),
                spoke.clone(),
                resolver.clone(),
                wake.clone(),
                stopped(stop.clone()),
            );
            async move {
                if let Err(error) = run.await {
                    process::fail(&format!("agent: {error}"));
                }
            }
        }
    }));
    let scaling = scaling.map(|it| {
        tokio::spawn(essential("scaling", it.run(spoke.clone(), signals, stopped(ingress_stopped))))
    });
    let served = gateway::ingress::run(ingress, spoke, stopped(stop), |address| {
        ready("spoke", Some(&region), address)
    })
    .await;
    ingress_done.send_replace(true);
    if let Some(scaling) = scaling {
        scaling.await?;
    }
    served?;
    agent.await?;
    Ok(())
}

/// Runs a replica.
pub(crate) fn replica(options: &ReplicaOptions) -> ExitCode {
    let joined = match join(&options.config, &options.join, &[Role::Replica], None) {
        Ok(joined) => joined,
        Err(problems) => return fail(EXIT_FAILED, &problems),
    };
    let config = match read_config(&options.config, replica::Config::read) {
        Ok(config) => config,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let keeper =
        match std::env::var(heartbeat::VARIABLE).ok().map(|value| HeartbeatFile::parse(&value)).transpose() {
            Ok(keeper) => keeper,
            Err(problem) => return fail(EXIT_USAGE, &[problem]),
        };
    // A replica that a spoke has started uses the folder that the spoke keeps current.
    let joined = if keeper.is_some() { Joined::elsewhere() } else { joined };
    let (region, dns, logs) = (options.region.clone(), joined.dns().clone(), config.logs.clone());
    let config = replica::Config { region: region.clone(), ..config };
    let process = Process { role: "replica", region: region.as_deref() };
    run((process, logs.as_ref()), joined, &dns, async |stop, _| {
        let shutdown = stopped_or_abandoned(stop, keeper);
        replica::server::run(config, shutdown, |address| ready("replica", region.as_deref(), address)).await
    })
}

/// Runs a replica with simulated computation.
pub(crate) fn scripted_replica(options: ScriptedReplicaOptions) -> ExitCode {
    let read = || -> Result<_, Vec<String>> {
        let Some(config) = &options.config else { return Ok((Joined::elsewhere(), Transport::Loopback)) };
        let joined = join(config, &options.join, &[Role::Replica], None)?;
        Ok((joined, read_config(config, scripted::read)?))
    };
    let (joined, transport) = match read() {
        Ok(read) => read,
        Err(problems) => return fail(EXIT_FAILED, &problems),
    };
    let dns = joined.dns().clone();
    // Its log is on stderr only.
    let process = Process { role: "replica", region: None };
    run((process, None), joined, &dns, async |stop, _| {
        scripted::run(options, transport, stopped(stop), |address| ready("replica", None, address)).await
    })
}

/// Completes on a stop signal, or when no spoke supervises this replica any more.
async fn stopped_or_abandoned(stop: watch::Receiver<bool>, keeper: Option<HeartbeatFile>) {
    let Some(keeper) = keeper else { return stopped(stop).await };
    tokio::select! {
        () = stopped(stop) => {}
        () = heartbeat::until_expired(&keeper) => {
            // The spoke that started the replica has ended, and no other one has adopted it. No action if this was
            // intended; otherwise check the spoke.
            tracing::warn!(file = %keeper.file.display(), "replica is no longer supervised, stopping");
        }
    }
}

/// Executes another program in this process. It ends with our parent like a role, because the parent-death signal survives
/// `exec`.
pub(crate) fn with_parent(other: &ExecOptions) -> ExitCode {
    if let Err(problem) = end_with_parent() {
        return fail(EXIT_FAILED, &[problem]);
    }
    // `exec` returns only on failure.
    let error = std::process::Command::new(&other.program).args(&other.arguments).exec();
    fail(EXIT_FAILED, &[format!("{} cannot be started: {error}", other.program)])
}

/// Runs a role on a new runtime until it ends, and keeps its identity folder current; the first SIGTERM or SIGINT signals
/// it to stop. Both use one resolver, whose metrics the role exports. Its log goes to stderr, and to a collector if that is
/// configured; an invalid variable of the log prevents the start.
fn run<E: std::fmt::Display>(
    (own, logs): (Process<'_>, Option<&LogsConfig>),
    joined: Joined,
    dns: &DnsSection,
    role: impl AsyncFnOnce(watch::Receiver<bool>, Resolver) -> Result<(), E>,
) -> ExitCode {
    let settings = match LogSettings::of_process(FilterLevel::Info) {
        Ok(settings) => settings,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let exported = match logs.map(|logs| telemetry::logs::start(logs, own)).transpose() {
        Ok(exported) => exported,
        Err(error) => return fail(EXIT_FAILED, &[error.to_string()]),
    };
    let (layer, export) = exported.unzip();
    let _log = log::start(settings, layer);
    // Dropped first, so that a failure of the last export is on stderr.
    let _export = export;
    if let Err(problem) = end_with_parent() {
        return fail(EXIT_FAILED, &[problem]);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    panics::log_panics();
    Build {
        version: env!("CARGO_PKG_VERSION"),
        commit: env!("MERIDIAN_COMMIT"),
        rust: env!("MERIDIAN_RUST"),
    }
    .set();
    let outcome = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
        let (stop, watch) = watch::channel(false);
        tokio::spawn(async move {
            tokio::select! {
                // The process has received a stop signal and drains.
                _ = terminate.recv() => tracing::info!(signal = "SIGTERM", "stopping"),
                // The process has received a stop signal and drains.
                _ = interrupt.recv() => tracing::info!(signal = "SIGINT", "stopping"),
                _ = process::failed() => {}
            }
            stop.send_replace(true);
            notify(NotifyState::Stopping);
            // The bound also applies if the process fails during a normal drain.
            tokio::select! {
                () = stop.closed() => {}
                _ = process::failed() => {
                    if let Err(error) = process::exit_within(FAILED_DRAIN) {
                        // The process had failed and the system has no thread for its drain, so it exits at once. Its
                        // supervisor restarts it.
                        tracing::error!(%error, "failed to start the thread that bounds the drain, exiting");
                        std::process::exit(process::EXIT_STATUS.into());
                    }
                }
            }
        });
        let resolver = Resolver::new(dns);
        let following = tokio::spawn(supervise_until_done("membership", {
            let resolver = resolver.clone();
            move || joined.clone().follow(resolver.clone())
        }));
        let log_filter = LogControl::of_process().map(|control| {
            tokio::spawn(supervise_until_done("log filter", move || control.restore_when_due()))
        });
        let outcome = role(watch, resolver).await.map_err(|error| error.to_string());
        following.abort();
        if let Some(task) = log_filter {
            task.abort();
        }
        outcome
    });
    if let Some(reason) = process::failure() {
        let mut problems = vec![format!("failed: {reason}")];
        problems.extend(outcome.err());
        // Dropping the runtime would wait for threads that never return.
        runtime.shutdown_background();
        return fail(process::EXIT_STATUS, &problems);
    }
    // Dropping the runtime would wait for threads that block, without a limit.
    runtime.shutdown_timeout(BLOCKED_THREADS);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(EXIT_FAILED, &[problem]),
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender is dropped only when the process ends.
    stop.wait_for(|stop| *stop).await.ok();
}

fn ready(role: &str, region: Option<&str>, address: SocketAddr) {
    let region = region.map(|region| format!(" {region}")).unwrap_or_default();
    // The reader may have closed the pipe.
    writeln!(std::io::stdout(), "ready {role}{region} on {address}").ok();
    notify(NotifyState::Ready);
}

/// Reports a state to the service manager that started this process (sd_notify(3)), if its unit has `Type=notify`.
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        // The process serves, but its service manager waits for it, and ends it when the start has timed out. Check that the
        // process may write to the socket in NOTIFY_SOCKET.
        tracing::warn!(%error, "failed to notify the service manager");
    }
}

/// If a parent is named, asks the kernel to kill this process when the parent ends.
fn end_with_parent() -> Result<(), String> {
    let Ok(parent) = std::env::var(PARENT_VARIABLE) else {
        return Ok(());
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| format!("cannot set the parent-death signal: {error}"))?;
    // The parent may have ended before the call above.
    let actual = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if actual.as_deref() == Some(parent.as_str()) {
        Ok(())
    } else {
        Err(format!(
            "the parent process in {PARENT_VARIABLE} ({parent}) has ended; unset the variable to run without one"
        ))
    }
}

/// Reads a configuration file; on failure, returns all problems with file and line.
pub(crate) fn read_config<T>(
    file: &Path,
    read: impl FnOnce(&ConfigFile<'_>, &Files<'_>) -> Option<T>,
) -> Result<T, Vec<String>> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| vec![format!("{}: cannot be read: {error}", file.display())])?;
    let environment = Environment::of_process();
    let files = Files { base: base(file), environment: Some(&environment) };
    let parsed = ConfigFile::read(&text, |document| read(document, &files));
    parsed.map_err(|found| configuration::named(file, found))
}

/// Returns the directory to which relative paths in a configuration file refer.
pub(crate) fn base(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("."))
}
