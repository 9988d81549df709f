//! The console in headless Chromium: a region is killed, and the map shows it within two seconds; and the page alone, at a hub
//! that fails in every way.
//!
//! `browser.mjs` and `page.mjs` drive the browser with playwright-core and check every page with axe-core, which npm installs the
//! first time (`package-lock.json` pins both). Without Chromium, node, npm or a registry the tests are skipped with a message.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::local_fleet::{LocalFleet, meridian};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/console");
const ASSETS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/console/assets");
const LOCK_FILE: &str = "package-lock.json";
const FILES: [&str; 5] = ["package.json", LOCK_FILE, "browser.mjs", "page.mjs", "keyboard.mjs"];
/// Drills that the test starts: a short one, and one that its fleet cannot run.
const DRILLS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/console/drills");
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Variable that `.ci/run` sets: no test may be skipped because of a program that `.ci/prerequisites` installs.
const CI_VARIABLE: &str = "MERIDIAN_CI";
/// Variable with a folder to which the screenshots of the pages are written.
const IMAGES_VARIABLE: &str = "MERIDIAN_WRITE_IMAGES";

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|ran| ran.status.success())
}

/// Skips a test because of `needs`, or fails where no test may be skipped.
fn skip(needs: &str) {
    assert!(
        std::env::var_os(CI_VARIABLE).is_none(),
        "{needs}; install them, or unset {CI_VARIABLE} to skip it"
    );
    // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
    std::io::stderr().write_all(format!("skipped: {needs}\n").as_bytes()).unwrap();
}

/// Browser, and the folder with the scripts and their packages, which are kept below the target directory; `None` if the machine
/// does not have what the tests need. They are installed once for both tests.
static INSTALLED: LazyLock<Option<(&str, PathBuf)>> = LazyLock::new(|| {
    let browser = BROWSERS.into_iter().find(|program| runs(program));
    let Some(browser) = browser.filter(|_| runs("node") && runs("npm")) else {
        skip("this test needs Chromium, node and npm (Debian: apt-get install chromium nodejs npm)");
        return None;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("console-browser");
    std::fs::create_dir_all(&folder).unwrap();
    let wanted = std::fs::read(Path::new(FOLDER).join(LOCK_FILE)).unwrap();
    let is_current = std::fs::read(folder.join("installed")).is_ok_and(|found| found == wanted);
    for file in FILES {
        std::fs::copy(Path::new(FOLDER).join(file), folder.join(file)).unwrap();
    }
    if !is_current {
        let ran = Command::new("npm")
            .args(["ci", "--no-audit", "--no-fund"])
            .current_dir(&folder)
            .output()
            .unwrap();
        if !ran.status.success() {
            let problem = String::from_utf8_lossy(&ran.stderr);
            skip(&format!(
                "this test needs the packages of tests/console/{LOCK_FILE} from a registry: {problem}"
            ));
            return None;
        }
        std::fs::write(folder.join("installed"), wanted).unwrap();
    }
    Some((browser, folder))
});

#[test]
fn the_lock_file_names_no_registry() {
    let text = std::fs::read_to_string(Path::new(FOLDER).join(LOCK_FILE)).unwrap();
    assert!(text.contains("\"integrity\": \"sha512-"), "{text}");
    assert!(!text.contains("://") && !text.contains("\"resolved\""), "{text}");
}

#[test]
fn the_page_says_what_is_wrong_with_the_hub_and_stays_usable() {
    let Some((browser, folder)) = INSTALLED.as_ref() else { return };
    let mut node = Command::new("node");
    let ran =
        node.arg(folder.join("page.mjs")).env("BROWSER", browser).env("ASSETS", ASSETS).output().unwrap();
    let output = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{output}");
}

#[tokio::test]
async fn the_console_shows_a_killed_region_within_two_seconds_and_explains_a_request_that_failed_over() {
    let Some((browser, folder)) = INSTALLED.as_ref() else { return };
    let fleet = LocalFleet::start(&["--drills", DRILLS]);
    let images = std::env::var_os(IMAGES_VARIABLE).map(PathBuf::from);
    let images = images.unwrap_or_else(|| folder.join("images"));
    std::fs::create_dir_all(&images).unwrap();
    let ran = tokio::process::Command::new("node")
        .arg(folder.join("browser.mjs"))
        .env("BROWSER", browser)
        .env("CONSOLE", &fleet.console)
        .env("CONTROL", &fleet.control)
        .env("GATEWAY", &fleet.url)
        .env("OPERATIONS", &fleet.operations)
        .env("HUB", &fleet.hub)
        .env("IMAGES", images)
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .await
        .unwrap();
    let output = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{output}");
    println!("{output}");
    finds_requests_on_the_command_line(&fleet);
}

/// The requests that failed over are found at the gateway, with both regions, and those of another tenant are none.
fn finds_requests_on_the_command_line(fleet: &LocalFleet) {
    let find = |arguments: &[&str]| -> serde_json::Value {
        let mut command = meridian();
        command.args(["get", "requests", "--json", "--operations", &fleet.operations]).args(arguments);
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        serde_json::from_slice(&ran.stdout).unwrap()
    };
    let failed_over =
        ["--kept", "failed_over", "--region", "gcp/europe-west4", "--status", "2xx", "--since", "1h"];
    let found = find(&failed_over);
    let requests = found["requests"].as_array().unwrap();
    assert!(!requests.is_empty(), "{found}");
    for request in requests {
        assert!(request["attempts"].as_array().is_some_and(|attempts| attempts.len() > 1), "{request}");
    }
    assert_eq!(
        find(&[&failed_over[..], &["--tenant", "without-requests"]].concat())["requests"],
        serde_json::json!([])
    );
}
