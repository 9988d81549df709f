//! Meridian's front door: one binary, one subcommand for each thing that a person does.

mod apply;
mod check;
mod cli;
mod drain;
mod drill;
mod explain;
mod load;
mod log;
mod models;
mod roles;
mod tune;
mod up;
mod verify;

use clap::Parser;
use std::process::ExitCode;

/// A request at the edge is some dozens of small allocations, made and freed on one thread; the allocator of the C library
/// takes a tenth of what the whole request costs for them (docs/benchmarks.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::Cli::parse().command {
        cli::Command::Up(options) => up::main(options),
        cli::Command::Gateway(options) => roles::gateway(&options),
        cli::Command::Hub(options) => roles::hub(&options),
        cli::Command::Spoke(options) => roles::spoke(&options),
        cli::Command::Replica(options) => roles::replica(&options),
        cli::Command::Check(options) => check::main(&options),
        cli::Command::Model(command) => models::main(command),
        cli::Command::Apply(options) => apply::apply(&options),
        cli::Command::Get(options) => apply::get(&options),
        cli::Command::Explain(options) => explain::main(&options),
        cli::Command::Drain(options) => drain::main(&options),
        cli::Command::VerifyResidency(options) => verify::main(options),
        cli::Command::Load(options) => load::main(*options),
        cli::Command::Drill(options) => drill::main(&options),
        cli::Command::Tune(options) => tune::main(options),
        cli::Command::WithParent(other) => roles::with_parent(&other),
        cli::Command::ScriptedReplica(options) => roles::scripted_replica(options),
    }
}

/// It failed.
const FAILED: u8 = 1;
/// It was used wrongly.
const WRONG_USAGE: u8 = 2;
/// A check or an expectation did not hold.
const DID_NOT_HOLD: u8 = 3;

/// Says why on stderr, one problem a line, and fails with `code`.
fn fail(code: u8, problems: &[String]) -> ExitCode {
    for problem in problems {
        eprintln!("meridian: {problem}");
    }
    ExitCode::from(code)
}
