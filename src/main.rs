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
