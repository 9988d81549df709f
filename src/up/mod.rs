//! `meridian up`: a whole world on this machine.
//!
//! ```text
//!  client ─▶ gateway ─▶ link (delay, cut) ─▶ spoke ─▶ replica      a process each, but for the links, which are here
//!               ▲                              │
//!               └───────── hub ◀───────────────┘
//! ```
//!
//! Every process is what `meridian gateway|hub|spoke|replica` would be elsewhere, with a configuration file that a
//! person can read and start again by hand; between gateway and regions they speak TLS and know each other by certificates
//! that are made for this world ([`identities`]). This one process plans, starts, watches, and stops them; when it is gone,
//! the kernel ends the rest.

pub(crate) mod buttons;
mod control;
mod etcd;
mod files;
mod identities;
mod link;
pub(crate) mod plan;
mod ports;
mod prepare;
mod process;
mod say;
pub(crate) mod scripted;
pub(crate) mod world;

use crate::cli::UpOptions;
use crate::{FAILED, WRONG_USAGE, fail, models, roles};
use anyhow::{Context, Result};
use plan::Plan;
use std::io;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};
use world::World;

/// Runs the command.
pub(crate) fn main(options: UpOptions) -> ExitCode {
    let plan = match Plan::check(&options) {
        Ok(plan) => plan,
        Err(problems) => return fail(WRONG_USAGE, &problems),
    };
    let _log = roles::log_to_stderr("warn");
    for model in plan.models() {
        if let Err(problem) = models::ensure(model) {
            return fail(FAILED, &[problem]);
        }
    }
    // The root future runs on this thread, which lives as long as the process: see `Process::start`.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    match runtime.block_on(run(&options, &plan)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &[format!("{error:#}")]),
    }
}

/// Ctrl-C and SIGTERM.
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

async fn run(options: &UpOptions, plan: &Plan) -> Result<()> {
    let mut interrupts = Interrupts::listen().context("no signals")?;
    let mut world = World::prepare(options, plan, |line| println!("{line}"))?;
    tokio::select! {
        raised = world.raise(plan) => drop(raised?),
        () = interrupts.next() => {
            println!("\nstopping before the world is ready");
            return Ok(());
        }
    }
    world.announce(plan, &options.key).await?;
    world.watch(&mut interrupts).await;
    println!("\ndraining; Ctrl-C again ends everything at once");
    tokio::select! {
        () = world.stop() => println!("stopped"),
        () = interrupts.next() => println!("ended"),
    }
    Ok(())
}
