//! Facts about the build for `meridian_build_info` and `meridian --version`: the compiler, and the commit.

use std::process::Command;

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    // `rustc 1.95.0 (f8297e351 2026-04-14)`
    let rust = output(&rustc, &["--version"]).and_then(|text| Some(text.split(' ').nth(1)?.to_owned()));
    println!("cargo::rustc-env=MERIDIAN_RUST={}", rust.unwrap_or_else(|| "unknown".to_owned()));
    let commit = commit();
    // `0.1.0 (8d352fa8c9f1)`, or `0.1.0 (unknown)`
    let short = commit.as_deref().and_then(|commit| commit.get(..12)).unwrap_or("unknown");
    println!("cargo::rustc-env=MERIDIAN_VERSION={} ({short})", env!("CARGO_PKG_VERSION"));
    println!("cargo::rustc-env=MERIDIAN_COMMIT={}", commit.unwrap_or_else(|| "unknown".to_owned()));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=MERIDIAN_BUILD_COMMIT");
}

/// Returns the commit: that of the variable, for sources without a repository, or that of the repository. A debug build has
/// none, so that a commit does not cause it to be linked again.
fn commit() -> Option<String> {
    if let Ok(commit) = std::env::var("MERIDIAN_BUILD_COMMIT") {
        return Some(commit);
    }
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return None;
    }
    // The log has a line for each commit and each checkout.
    let log = output("git", &["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={log}");
    output("git", &["rev-parse", "HEAD"])
}

/// Returns the output of a program, without its newline; `None` if it fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
