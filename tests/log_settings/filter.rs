//! The filter of the log of a gateway, changed while it runs.

use super::super::meridian;
use std::fs::{File, read_to_string};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Message at the level `debug` for an ambiguous request.
const DETAIL: &str = "request head rejected";

/// Gateway without a hub, which is killed at the end of the test.
struct Gateway {
    process: Child,
    listen: u16,
    operations: u16,
    log: PathBuf,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

impl Gateway {
    fn start(dir: &Path) -> Gateway {
        let free_port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let [listen, operations, hub] = [(); 3].map(|()| free_port());
        let (config, log) = (dir.join("gateway.toml"), dir.join("log"));
        let text = format!(
            "listen = \"127.0.0.1:{listen}\"\noperations = \"127.0.0.1:{operations}\"\nregion = \"gcp/europe-west4\"\n\
             hub = \"http://127.0.0.1:{hub}\"\ntenants = \"tenants.toml\"\nsnapshot = \"routes\"\n"
        );
        std::fs::write(&config, text).unwrap();
        std::fs::write(dir.join("key"), "k").unwrap();
        std::fs::write(dir.join("tenants.toml"), "[[tenant]]\nname = \"docs\"\nkey_file = \"key\"\n")
            .unwrap();
        let mut command = meridian();
        command
            .args(["gateway", "--config"])
            .arg(&config)
            .env("MERIDIAN_LOG", "warn,gateway=info,telemetry=info");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let gateway = Gateway { process: command.spawn().unwrap(), listen, operations, log };
        gateway.wait_until("the ports are open", || {
            [listen, operations].iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok())
        });
        gateway
    }

    fn wait_until(&self, description: &str, condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}: {:?}", read_to_string(&self.log));
            sleep(Duration::from_millis(20));
        }
    }

    /// Runs `meridian log` for this gateway.
    fn log_command(&self, arguments: &[&str]) -> Output {
        let url = format!("http://127.0.0.1:{}", self.operations);
        meridian().args(["log", &url]).args(arguments).output().unwrap()
    }

    /// Sends an ambiguous request, and waits for the response.
    fn send_ambiguous_request(&self) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.listen)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let head =
            "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
    }

    fn logged(&self, message: &str) -> usize {
        read_to_string(&self.log).unwrap().matches(message).count()
    }
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn details_of_a_module_are_logged_after_a_change_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(dir.path());
    let at_start = "warn,gateway=info,telemetry=info";
    let shown = stdout(&gateway.log_command(&[]));
    assert_eq!(shown, format!("filter    {at_start}\nat start  {at_start}\n"));
    gateway.send_ambiguous_request();

    let changed = stdout(&gateway.log_command(&["telemetry=info,gateway::listener=debug"]));
    assert!(
        changed.starts_with("filter    warn,gateway::listener=debug,telemetry=info\nat start  "),
        "{changed}"
    );
    assert!(changed.contains("\nrestored  in "), "{changed}");
    gateway.send_ambiguous_request();
    gateway.wait_until("the detail is logged", || gateway.logged(DETAIL) > 0);
    assert_eq!(gateway.logged(DETAIL), 1, "the request before the change has no line");
    assert_eq!(gateway.logged("log filter changed"), 1);

    let invalid = gateway.log_command(&["warning"]);
    let problem = String::from_utf8_lossy(&invalid.stderr).into_owned();
    assert_eq!(invalid.status.code(), Some(1));
    assert!(problem.contains("`filter`: \"warning\" is not a level; did you mean warn?"), "{problem}");
    stdout(&gateway.log_command(&["telemetry=info,gateway::listener=debug", "--for", "1s"]));
    gateway.wait_until("the filter is restored", || gateway.logged("log filter restored") == 1);
    assert_eq!(stdout(&gateway.log_command(&[])), shown);
}
