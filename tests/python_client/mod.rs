//! The Python package, installed with pip, against a scripted server and against a local fleet.
//!
//! It needs Python with venv, a package index and a compiler, and is built below the target directory: some minutes the first
//! time, seconds after that. Without Python the test prints that it was skipped; with Python, every problem
//! is a failure.

use std::path::Path;
use std::process::Command;

use crate::local_fleet::LocalFleet;

/// Number of texts that are embedded with our client and with the stock client; docs/client.md has the command for more.
const TEXTS: &str = "1000";

#[tokio::test]
async fn the_python_package_returns_the_vectors_of_the_stock_client() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("loadtest/python");
    let venv = scratch.join("python-client");
    let python = venv.join("bin/python");
    if !python.exists() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("no python3 with venv on this machine: the Python package is not tested");
            return;
        }
    }
    let run = |arguments: &[&str]| {
        let mut run = Command::new(&python);
        // Loopback is not reachable through a proxy; and cargo, which runs this test, has locked its own target directory.
        run.args(arguments)
            .env("NO_PROXY", "127.0.0.1")
            .env("CARGO_TARGET_DIR", scratch.join("python-target"));
        let ran = run.output().expect("python runs");
        let output = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{arguments:?}: {output}");
        output.into_owned()
    };
    let at = |path: &str| package.join(path).to_string_lossy().into_owned();
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    if !Command::new(&python).args(["-c", "import openai"]).output().is_ok_and(|ran| ran.status.success()) {
        run(&[&pip[..], &["openai"]].concat());
    }
    run(&[&pip[..], &["--force-reinstall", "--no-deps", &at("")]].concat());
    run(&[&pip[..], &["numpy"]].concat());
    let output = run(&["-m", "unittest", "discover", "--start-directory", &at("tests")]);
    assert!(output.contains("OK"), "{output}");
    let fleet = LocalFleet::start(&[]);
    let output = run(&[&at("tests/same_as_openai.py"), &fleet.url, TEXTS]);
    assert!(output.contains("the same vectors in order"), "{output}");
    print!("{output}");
    let output = run(&[&at("tests/jobs_of_a_fleet.py"), &fleet.url, "local", "100"]);
    assert!(output.contains("the vectors of the ordinary requests"), "{output}");
    print!("{output}");
}
