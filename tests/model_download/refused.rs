//! Deployments whose engine no registered region has.

use super::{deployment, initial, meridian};
use crate::JAPAN;
use scheduler_api::paths;
use serde_json::json;
use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of the start of a hub.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_PERIOD: Duration = Duration::from_millis(50);

/// Hub without a fleet.
struct SingleHub {
    process: Child,
    url: String,
}

impl SingleHub {
    fn start(folder: &Path) -> SingleHub {
        let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let file = folder.join("hub.toml");
        let config = format!("listen = \"{listen}\"\ndata = \"hub\"\ndeployments = \"initial.toml\"\n");
        std::fs::write(&file, config).unwrap();
        std::fs::write(folder.join("initial.toml"), initial()).unwrap();
        let mut command = meridian();
        let log = File::create(folder.join("hub.log")).unwrap();
        command.args(["hub", "--config"]).arg(file).stdout(Stdio::null()).stderr(log);
        SingleHub { process: command.spawn().unwrap(), url: format!("http://{listen}") }
    }

    /// Registers a region with these engines, once the hub has started.
    async fn register(&self, region: &str, engines: &[&str]) {
        let message = json!({"version": 1, "region": region, "instance": "a", "endpoint": "10.0.0.1:7100", "boot_id": 1,
                             "deployments": [], "scales": true, "engines": engines});
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let begun = Instant::now();
        loop {
            let request = client.post(format!("{}{}", self.url, paths::SPOKES)).body(message.to_string());
            if request.send().await.is_ok_and(|response| response.status().is_success()) {
                return;
            }
            assert!(begun.elapsed() < START_TIMEOUT, "the hub accepts no registration");
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// Runs an operator's command; returns exit code, stdout and stderr.
    fn operator(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let Output { status, stdout, stderr } =
            meridian().args(arguments).args(["--hub", &self.url]).output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (status.code(), text(&stdout), text(&stderr))
    }
}

impl Drop for SingleHub {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// The region is one that the test registers: the spokes of a fleet of tests have every engine, since the program under test contains
/// the test double for GPUs.
#[tokio::test]
async fn a_deployment_that_no_registered_region_can_run_is_refused_when_it_is_applied() {
    let folder = tempfile::tempdir().unwrap();
    let hub = SingleHub::start(folder.path());
    hub.register(JAPAN, &["tensorrt-llm"]).await;
    let before = hub.operator(&["get", "deployments"]);
    let file = folder.path().join("new.toml");
    let regions = format!("regions = [\"{JAPAN}\"]");
    std::fs::write(&file, initial() + &deployment("new", super::MINILM, &regions)).unwrap();
    let file = file.to_str().expect("a path in UTF-8");
    let (code, _, problems) = hub.operator(&["apply", file, "--yes", "--wait"]);
    assert_eq!(code, Some(3), "{problems}");
    let parts = [
        "new.toml: line ",
        "engine.kind of `new` is \"cpu\", which none of its registered regions can run",
        "oci/ap-tokyo-1 has tensorrt-llm",
        "use an engine that one of them has",
    ];
    for part in parts {
        assert!(problems.contains(part), "{part} in {problems}");
    }
    println!("refused: {}", problems.trim());
    assert_eq!(hub.operator(&["get", "deployments"]), before, "nothing is changed");
}
