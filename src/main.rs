//! Command-line interface: one binary with a subcommand for each role and each operation.

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

/// A request at the edge makes some dozens of small allocations, freed on the same thread; with the allocator of the C
/// library they take a tenth of the cost of the whole request (docs/benchmarks.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::Cli::parse().command {
        cli::CliCommand::Up(options) => up::main(options),
        cli::CliCommand::Gateway(options) => roles::gateway(&options),
        cli::CliCommand::Hub(options) => roles::hub(&options),
        cli::CliCommand::Spoke(options) => roles::spoke(&options),
        cli::CliCommand::Replica(options) => roles::replica(&options),
        cli::CliCommand::Check(options) => check::main(&options),
        cli::CliCommand::Model(command) => models::main(command),
        cli::CliCommand::Apply(options) => apply::apply(&options),
        cli::CliCommand::Get(options) => apply::get(&options),
        cli::CliCommand::Explain(options) => explain::main(&options),
        cli::CliCommand::Drain(options) => drain::main(&options),
        cli::CliCommand::VerifyResidency(options) => verify::main(options),
        cli::CliCommand::Load(options) => load::main(*options),
        cli::CliCommand::Drill(options) => drill::main(&options),
        cli::CliCommand::Tune(options) => tune::main(options),
        cli::CliCommand::WithParent(other) => roles::with_parent(&other),
        cli::CliCommand::ScriptedReplica(options) => roles::scripted_replica(options),
    }
}

/// Exit code: the command failed.
const EXIT_FAILED: u8 = 1;
/// Exit code: the command line or a configuration is invalid.
const EXIT_USAGE: u8 = 2;
/// Exit code: a check or an expectation failed.
const EXIT_CHECK_FAILED: u8 = 3;

/// Writes the problems to stderr, one per line, and returns `code`.
fn fail(code: u8, problems: &[String]) -> ExitCode {
    for problem in problems {
        eprintln!("meridian: {problem}");
    }
    ExitCode::from(code)
}
