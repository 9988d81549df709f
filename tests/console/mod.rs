//! The console in headless Chromium: a region is killed, and the map shows it within two seconds.
//!
//! `browser.mjs` drives the browser with playwright-core and checks every page with axe-core, which npm installs the first time
//! (`package.json` pins both). Without Chromium, node or npm the test is skipped with a message.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::local_fleet::LocalFleet;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/console");
const FILES: [&str; 2] = ["package.json", "browser.mjs"];
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Variable that `.ci/run` sets: no test may be skipped because of a program that `.ci/prerequisites` installs.
const CI_VARIABLE: &str = "MERIDIAN_CI";
/// Variable with a folder to which the screenshots of the pages are written.
const IMAGES_VARIABLE: &str = "MERIDIAN_WRITE_IMAGES";

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|ran| ran.status.success())
}

/// Returns the name of a browser if the machine has what the test needs.
fn browser() -> Option<&'static str> {
    let browser = BROWSERS.into_iter().find(|program| runs(program));
    if let (Some(browser), true, true) = (browser, runs("node"), runs("npm")) {
        return Some(browser);
    }
    let needs = "this test needs Chromium, node and npm (Debian: apt-get install chromium nodejs npm)";
    assert!(
        std::env::var_os(CI_VARIABLE).is_none(),
        "{needs}; install them, or unset {CI_VARIABLE} to skip it"
    );
    // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
    std::io::stderr().write_all(format!("skipped: {needs}\n").as_bytes()).unwrap();
    None
}

/// Returns the folder with the script and its packages, which are kept below the target directory.
fn installed() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("console-browser");
    std::fs::create_dir_all(&folder).unwrap();
    let wanted = std::fs::read(Path::new(FOLDER).join(FILES[0])).unwrap();
    let is_current = std::fs::read(folder.join("installed")).is_ok_and(|found| found == wanted);
    for file in FILES {
        std::fs::copy(Path::new(FOLDER).join(file), folder.join(file)).unwrap();
    }
    if !is_current {
        let npm = ["install", "--no-audit", "--no-fund", "--no-package-lock"];
        let ran = Command::new("npm").args(npm).current_dir(&folder).output().unwrap();
        assert!(ran.status.success(), "npm: {}", String::from_utf8_lossy(&ran.stderr));
        std::fs::write(folder.join("installed"), wanted).unwrap();
    }
    folder
}

#[tokio::test]
async fn the_console_shows_a_killed_region_within_two_seconds_and_explains_a_request_that_failed_over() {
    let Some(browser) = browser() else { return };
    let folder = installed();
    let fleet = LocalFleet::start(&[]);
    let images = std::env::var_os(IMAGES_VARIABLE).map(PathBuf::from);
    let images = images.unwrap_or_else(|| folder.join("images"));
    std::fs::create_dir_all(&images).unwrap();
    let ran = tokio::process::Command::new("node")
        .arg(folder.join("browser.mjs"))
        .env("BROWSER", browser)
        .env("CONSOLE", &fleet.console)
        .env("CONTROL", &fleet.control)
        .env("GATEWAY", &fleet.url)
        .env("HUB", &fleet.hub)
        .env("IMAGES", images)
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .await
        .unwrap();
    let output = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{output}");
    println!("{output}");
}
