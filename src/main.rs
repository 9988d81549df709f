//! Command-line interface: one binary with a subcommand for each role and each operation.

mod apply;
mod backup;
mod check;
mod cli;
mod console;
mod drain;
mod drill;
mod embed;
mod explain;
mod generate;
mod health;
mod jobs;
mod key;
mod load;
mod log;
mod log_filter;
mod models;
mod operations_port;
mod pki;
mod requests;
mod roles;
mod tune;
mod up;
mod verify;

use std::process::ExitCode;

/// A request at the edge makes some dozens of small allocations, freed on the same thread; with the allocator of the C
/// library they take a tenth of the cost of the whole request (docs/benchmarks.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Option `purge_delay` of mimalloc 3 (`mi_option_e` in mimalloc.h): milliseconds after which freed memory goes back to the
/// system. `libmimalloc-sys` has no name for it.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Time for which freed memory stays with the process. On a virtual machine the first touch of a page costs up to 50 µs, 50 ms for
/// a body of 4 MB, and delays every request that shares the core. With mimalloc's default of 1 s the 99th percentile beside
/// attackers was 1.7 and 2.3 times that beside ordinary requests, with 10 s 1.6 and 1.8 (tests/attack; two cores of a virtual
/// Zen 5, 2026-11-23). `MIMALLOC_PURGE_DELAY` in the environment takes precedence.
const PURGE_DELAY_MS: std::ffi::c_long = 10_000;

#[expect(unsafe_code, reason = "mimalloc's options are C functions")]
fn keep_freed_memory() {
    // SAFETY: the option exists (checked by a test), the value is an integer that it takes, and no other thread exists yet.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS) };
}

fn main() -> ExitCode {
    keep_freed_memory();
    match cli::Cli::read().command {
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
        cli::CliCommand::Console(options) => console::main(&options),
        cli::CliCommand::Key(command) => key::main(&command),
        cli::CliCommand::Pki(command) => pki::main(&command),
        cli::CliCommand::Backup(options) => backup::backup(&options),
        cli::CliCommand::Restore(options) => backup::restore(&options),
        cli::CliCommand::Drain(options) => drain::main(&options),
        cli::CliCommand::VerifyResidency(options) => verify::main(options),
        cli::CliCommand::Load(options) => load::main(*options),
        cli::CliCommand::Embed(options) => embed::main(&options),
        cli::CliCommand::Drill(options) => drill::main(&options),
        cli::CliCommand::Tune(options) => tune::main(options),
        cli::CliCommand::Health(options) => health::main(&options),
        cli::CliCommand::Log(options) => log_filter::main(&options),
        cli::CliCommand::Generate(options) => generate::main(&options),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "mimalloc's options are C functions")]
    fn the_option_is_the_one_of_the_purge_delay() {
        // SAFETY: reads an integer; the tests of this binary do not set options elsewhere.
        let read = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        assert_eq!(read(), 1000, "the default of mimalloc 3");
        keep_freed_memory();
        assert_eq!(read(), PURGE_DELAY_MS);
    }
}
