//! Version skew: an earlier version beside the one under test, in every pair of roles and in both directions, under load.
//!
//! `MERIDIAN_PREVIOUS` names the program of the earlier version; `make skew` builds it. For each class of processes there are two
//! fleets. In the first one, the processes of the class are of the earlier version and all others of the one under test, and then
//! they are replaced, as at an upgrade; in the second one it is the reverse, as when an operator goes back. The load begins before
//! the replacement and continues after it, and no request may fail.
//!
//! [`fleet`] has the processes, [`programs`] which of them runs which version, [`operator`] the commands, [`load`] the clients.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod fleet;
mod load;
mod operator;
mod programs;

use fleet::Fleet;
use load::{Load, LoadResult};
use operator::{KINDS, Operator};
use programs::{ProcessClass, Programs};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variable with the program of the earlier version.
const PREVIOUS_VARIABLE: &str = "MERIDIAN_PREVIOUS";

/// Direction of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// The processes of the class are replaced by later ones; all others are of the later version.
    Upgrade,
    /// The processes of the class are replaced by earlier ones; all others are of the earlier version.
    Rollback,
}

/// Programs of both versions.
struct Versions {
    earlier: PathBuf,
    later: PathBuf,
}

/// Run of a fleet: a row of the table.
struct SkewRun {
    class: ProcessClass,
    direction: Direction,
    load: LoadResult,
    /// Exception that the documentation permits.
    exception: Option<&'static str>,
}

impl SkewRun {
    async fn run(versions: &Versions, class: ProcessClass, direction: Direction) -> SkewRun {
        println!("{}: {direction:?}", class.as_str());
        let Versions { earlier, later } = versions;
        let (before, after) = match direction {
            Direction::Upgrade => (earlier, later),
            Direction::Rollback => (later, earlier),
        };
        let programs = Programs { class, of_class: before.clone(), of_others: after.clone() };
        let mut fleet = Fleet::start(programs).await;
        let load = Load::start(&fleet);
        load.wait_for_progress(&fleet).await;
        let exception = fleet.replace(after).await;
        load.wait_for_progress(&fleet).await;
        let load = load.finish().await;
        if load.failed > 0 {
            println!("{}", fleet.logs());
        }
        SkewRun { class, direction, load, exception }
    }

    fn row(&self) -> String {
        let SkewRun { class, direction, load, exception } = self;
        let LoadResult { embeddings, jobs, repeated, commands, failed, p99_ms, failures: _ } = load;
        let (of_class, of_others) = match direction {
            Direction::Upgrade => ("earlier, then later", "later"),
            Direction::Rollback => ("later, then earlier", "earlier"),
        };
        let exception = exception.unwrap_or_default();
        format!(
            "| {} | {of_class} | {of_others} | {embeddings} | {jobs} | {repeated} | {commands} | {failed} | {p99_ms:.0} | {exception} |",
            class.as_str()
        )
    }
}

/// Returns the version of a program, with its commit.
fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").output();
    let output = output.unwrap_or_else(|error| panic!("{} cannot be run: {error}", program.display()));
    assert!(output.status.success(), "{} --version fails", program.display());
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Returns both programs; `None` without an earlier one.
fn versions() -> Option<Versions> {
    let earlier = PathBuf::from(std::env::var_os(PREVIOUS_VARIABLE)?);
    // Processes are started in folders of their own.
    let earlier = earlier.canonicalize().unwrap_or_else(|error| {
        panic!(
            "{PREVIOUS_VARIABLE} is {}, which cannot be found ({error}); name the program of the earlier version, which \
             `make skew` builds",
            earlier.display()
        )
    });
    Some(Versions { earlier, later: PathBuf::from(env!("CARGO_BIN_EXE_meridian")) })
}

#[tokio::test]
async fn no_request_fails_in_any_pair_of_roles_of_two_versions() {
    let Some(versions) = versions() else {
        // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
        let text = format!(
            "skipped: this test needs the program of an earlier version: run `make skew`, or set {PREVIOUS_VARIABLE}\n"
        );
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return;
    };
    println!("earlier: {}; later: {}", version(&versions.earlier), version(&versions.later));
    let anywhere = Operator::new(&versions.later, Path::new("."), "https://127.0.0.1:1");
    assert_eq!(anywhere.kinds().await.unwrap(), KINDS, "the kinds in the help of `meridian get`");
    let mut runs = Vec::new();
    for class in ProcessClass::ALL {
        for direction in [Direction::Upgrade, Direction::Rollback] {
            runs.push(SkewRun::run(&versions, class, direction).await);
        }
    }
    println!(
        "| class | its version | that of the others | embeddings | jobs | repeated | commands | failed | p99 ms | exception |"
    );
    println!("|---|---|---|---:|---:|---:|---:|---:|---:|---|");
    runs.iter().for_each(|run| println!("{}", run.row()));
    for SkewRun { class, direction, load, exception } in &runs {
        let of = format!("{} ({direction:?})", class.as_str());
        assert_eq!(load.failed, 0, "{of}: {:#?}", load.failures);
        assert!(load.embeddings > 0 && load.jobs > 0 && load.commands > 0, "{of}: no load");
        let is_permitted = exception.is_none() || *direction == Direction::Rollback;
        assert!(is_permitted, "{of}: {exception:?} at an upgrade");
    }
}
