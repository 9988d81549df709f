//! `meridian up`: a complete fleet on this machine.
//!
//! ```text
//!  client ─▶ gateway ─▶ link (delay, cut) ─▶ spoke ─▶ replica      one process each, except the links, which run here
//!               ▲                              │
//!               └───────── hub ◀───────────────┘
//! ```
//!
//! There is a gateway near each region, for the callers there; the link to a spoke has a delay for each of them ([`link`]).
//!
//! Every process is started as `meridian gateway|hub|spoke|replica`, with a configuration file that an operator can read
//! and restart by hand. They use mutual TLS with each other; each joins the fleet with a token of the hub's certificate
//! authority ([`authority`]). This process plans, starts, watches, and stops them; when it ends, the kernel ends the others.

mod authority;
mod certificates;
mod control_api;
mod drills;
mod etcd;
mod etcd_certificates;
mod files;
pub(crate) mod fleet;
pub(crate) mod fleet_control;
mod fleet_state;
mod link;
pub(crate) mod plan;
mod ports;
mod prepare;
mod process;
mod readiness;
pub(crate) mod scripted;
mod summary;
mod targets;

use crate::cli::UpOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail, log, models};
use anyhow::{Context, Result};
use drills::DrillContext;
use drills::board::DrillBoard;
use fleet::LocalFleet;
use plan::FleetPlan;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use telemetry::log_filter::FilterLevel;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Runs the command.
pub(crate) fn main(options: UpOptions) -> ExitCode {
    let plan = match FleetPlan::check(&options) {
        Ok(plan) => plan,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let board = match drills::read(&options, &plan) {
        Ok(listed) => Arc::new(DrillBoard::new(listed)),
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let _log = match log::log_to_stderr(FilterLevel::Warn) {
        Ok(log) => log,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    for model in plan.models() {
        if let Err(problem) = models::ensure(model) {
            return fail(EXIT_FAILED, &[problem]);
        }
    }
    // The root future runs on this thread, which lives as long as the process: see `FleetProcess::start`.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    match runtime.block_on(run(&options, &plan, board)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(EXIT_FAILED, &[format!("{error:#}")]),
    }
}

/// Stream of Ctrl-C and SIGTERM signals.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    pub(crate) fn listen() -> io::Result<Interrupts> {
        Ok(Interrupts {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

async fn run(options: &UpOptions, plan: &FleetPlan, board: Arc<DrillBoard>) -> Result<()> {
    let mut interrupts = Interrupts::listen().context("cannot install signal handlers")?;
    let mut fleet = LocalFleet::prepare(options, plan, |line| println!("{line}"))?;
    fleet.drills = Some(board.clone());
    let control = tokio::select! {
        started = fleet.start_all(plan) => started?,
        () = interrupts.next() => {
            println!("\nstopping before the fleet is ready");
            return Ok(());
        }
    };
    fleet.announce(plan, options).await?;
    let context = DrillContext::new(&fleet, plan, &options.key, control);
    // A drill executes its actions through the fleet that is watched meanwhile.
    tokio::select! {
        () = fleet.watch(&mut interrupts) => {}
        () = drills::serve(board, context) => {}
    }
    println!("\ndraining; press Ctrl-C again to stop immediately");
    tokio::select! {
        () = fleet.stop() => println!("stopped"),
        () = interrupts.next() => println!("aborted"),
    }
    Ok(())
}
