//! `configs/deploy`: the Helm chart, the systemd units, the Terraform example, the packages and the root file system of the CPU image,
//! checked with the tools of `requirements.txt` and the program under test. No cluster, no cloud and no container engine is needed.
//!
//! Python with venv and, the first time, its package index are needed, and root for the image. A missing tool is skipped with a message,
//! and is a failure in CI.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Program under test.
const MERIDIAN: &str = env!("CARGO_BIN_EXE_meridian");

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/deploy");

/// Prints that a test is skipped, or fails in CI.
pub(crate) fn skip(reason: &str) {
    assert!(std::env::var_os("MERIDIAN_CI").is_none(), "{reason}; unset MERIDIAN_CI to skip this test");
    // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
    std::io::stderr().write_all(format!("skipped: {reason}\n").as_bytes()).unwrap();
}

/// Returns whether a command succeeds.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|ran| ran.status.success())
}

/// Returns a Python with the packages of `requirements.txt`, below the target directory; `None` if it cannot be had.
fn python() -> Option<PathBuf> {
    static MADE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _made = MADE.lock().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("deploy-python");
    let (python, installed) = (folder.join("bin/python"), folder.join("installed.txt"));
    let file = Path::new(FOLDER).join("requirements.txt");
    let expected = std::fs::read(&file).unwrap();
    if std::fs::read(&installed).ok().as_ref() == Some(&expected) {
        return Some(python);
    }
    if !succeeds(Command::new("python3").args(["-m", "venv"]).arg(&folder)) {
        skip("no python3 with venv on this machine: not checked");
        return None;
    }
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--requirement",
    ]);
    let ran = pip.arg(&file).output().unwrap();
    let output = String::from_utf8_lossy(&ran.stderr);
    if !ran.status.success() {
        skip(&format!("{} cannot be installed, so this is not checked: {output}", file.display()));
        return None;
    }
    std::fs::write(&installed, expected).unwrap();
    Some(python)
}

/// Runs a script of this folder with the program and a folder of its own.
fn run(script: &str) {
    run_within(&[], script);
}

/// Runs a script as the argument of another command.
fn run_within(command: &[&str], script: &str) {
    let Some(python) = python() else { return };
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut run = Command::new(command.first().map_or(python.as_os_str(), OsStr::new));
    run.args(command.get(1..).unwrap_or_default());
    if !command.is_empty() {
        run.arg(&python);
    }
    run.arg(Path::new(FOLDER).join(script)).arg(MERIDIAN).arg(scratch.path().join("files"));
    // The programs of the profiles `dev` and `quick` are larger than the shipped one.
    if cfg!(debug_assertions) || MERIDIAN.contains("/quick/") {
        run.env("MERIDIAN_UNOPTIMISED", "1");
    }
    let ran = run.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).output().unwrap();
    let output = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{script}: {output}");
    print!("{output}");
}

#[test]
fn the_chart_renders_valid_objects_and_configurations() {
    run("chart.py");
}

#[cfg(target_os = "linux")]
#[test]
fn the_units_are_valid_and_hardened() {
    if !succeeds(Command::new("systemd-analyze").arg("--version")) {
        return skip("no systemd-analyze on this machine: the units are not checked");
    }
    run("units.py");
}

#[test]
fn the_terraform_example_parses_and_configures_the_roles() {
    run("terraform.py");
}

#[cfg(target_os = "linux")]
#[test]
fn the_packages_install_the_program() {
    run("package.py");
}

#[cfg(target_os = "linux")]
#[test]
fn the_root_file_system_of_the_image_serves_as_an_unprivileged_user() {
    let namespace = ["unshare", "--net"];
    if !succeeds(Command::new(namespace[0]).args([namespace[1], "ip", "link", "set", "lo", "up"])) {
        return skip(
            "the image is not tested: this needs root on Linux, for chroot and a network namespace, and ip",
        );
    }
    run_within(&namespace, "image.py");
}

#[test]
fn a_role_reports_to_the_service_manager_that_it_is_ready_and_that_it_stops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let config = "listen = \"127.0.0.1:0\"\ndata = \"data\"\n[store]\nkind = \"embedded\"\n";
    std::fs::write(folder.path().join("hub.toml"), config).unwrap();
    let mut hub = Command::new(MERIDIAN)
        .args(["hub", "--config"])
        .arg(folder.path().join("hub.toml"))
        .env("NOTIFY_SOCKET", &path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let received = || {
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert_eq!(received(), "READY=1\n");
    kill_process(Pid::from_raw(hub.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    assert_eq!(received(), "STOPPING=1\n");
    assert!(hub.wait().unwrap().success());
}
