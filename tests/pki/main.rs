//! `meridian pki`, `--join`, `meridian backup` and `meridian restore` with real processes: a hub, and a spoke that joins.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

mod connections;
mod endpoints;
mod half_open;
mod recovery;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Maximum time of a wait for a condition.
const TIMEOUT: Duration = Duration::from_secs(60);
const MERIDIAN: &str = env!("CARGO_BIN_EXE_meridian");

/// Folder of a fleet with a hub.
struct Fleet {
    dir: PathBuf,
    hub: String,
    authority: String,
}

/// Process of a role, killed at the end of the test.
struct Role(Child);

impl Drop for Role {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

impl Fleet {
    fn new(dir: &Path) -> Fleet {
        let fleet = Fleet { dir: dir.to_owned(), hub: free_address(), authority: free_address() };
        let Fleet { dir: _, hub, authority } = &fleet;
        fleet.json(&[
            "pki",
            "init",
            "--dir",
            "pki",
            "--trust-domain",
            "m.example",
            "--region",
            "aws/us-east-1",
            "--authority",
            authority,
            "--json",
        ]);
        let text = format!(
            "listen = \"{hub}\"\ndata = \"data\"\n[identity]\ndir = \"pki/hub\"\n[authority]\nlisten = \"{authority}\"\n\
             dir = \"pki/authority\"\n"
        );
        std::fs::write(dir.join("hub.toml"), text).unwrap();
        fleet
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(MERIDIAN);
        command.args(arguments).current_dir(&self.dir).env("MERIDIAN_IDENTITY", "pki/operator");
        command.output().unwrap()
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let problem = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{arguments:?}: {problem}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(arguments)).unwrap()
    }

    fn problem(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Starts a role and waits until it is ready.
    fn start(&self, arguments: &[&str]) -> Role {
        let mut command = Command::new(MERIDIAN);
        command.args(arguments).current_dir(&self.dir).env("TEST_KEY", "local");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut role = Role(command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(role.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut errors = role.0.stderr.take().unwrap();
        if !line.starts_with("ready") {
            let mut log = String::new();
            errors.read_to_string(&mut log).unwrap();
            panic!("{arguments:?}: {log}");
        }
        // The log is read, so that the process never waits for it.
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        role
    }

    fn wait_until(&self, description: &str, mut holds: impl FnMut() -> bool) -> Duration {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
            std::thread::sleep(Duration::from_millis(20));
        }
        begun.elapsed()
    }

    /// Waits until the authority responds.
    fn ready(&self) {
        self.wait_until("the authority responds", || self.run(&["pki", "list"]).status.success());
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.dir.join(file)).unwrap_or_default()
    }

    fn spoke_config(&self) {
        let (hub, listen) = (&self.hub, free_address());
        let text = format!(
            "region = \"aws/eu-central-1\"\nlisten = \"{listen}\"\nadvertise = \"{listen}\"\nhub = \"https://{hub}\"\n\
             [identity]\ndir = \"spoke\"\n[[replica]]\nendpoint = \"127.0.0.1:9\"\n"
        );
        std::fs::write(self.dir.join("spoke.toml"), text).unwrap();
    }
}

#[test]
fn a_spoke_joins_with_a_token_follows_a_rotation_and_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    fleet.spoke_config();
    let again = ["pki", "init", "--dir", "pki", "--trust-domain", "m", "--region", "aws/us-east-1"];
    assert!(fleet.problem(&again).contains("exists"), "an authority is never overwritten");
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let token = ["pki", "token", "--role", "spoke", "--region", "aws/eu-central-1", "--ttl", "10m"];
    let token = fleet.text(&token).trim().to_owned();
    let mut typo = token.clone();
    typo.pop();
    let join = |token: &str| fleet.problem(&["spoke", "--config", "spoke.toml", "--join", token]);
    assert!(join(&typo).contains("typo"));
    assert!(!fleet.dir.join("spoke/key.pem").exists());
    let spoke = fleet.start(&["spoke", "--config", "spoke.toml", "--join", &token]);
    let first = fleet.read("spoke/certificate.pem");
    // A folder that has a certificate is kept; the used token is ignored.
    drop(spoke);
    let _spoke = fleet.start(&["spoke", "--config", "spoke.toml", "--join", &token]);
    assert_eq!(fleet.read("spoke/certificate.pem"), first);

    // The rotation waits for the spoke and the hub, which acknowledge and renew by themselves.
    let phase = |value: &Value| value["phase"].as_str().unwrap().to_owned();
    let rotate = || fleet.run(&["pki", "rotate", "--yes", "--json"]);
    let mut steps = Vec::new();
    for _ in 0..3 {
        let took = fleet.wait_until("the next step of the rotation", || {
            let output = rotate();
            if output.status.success() {
                steps.push(phase(&serde_json::from_slice(&output.stdout).unwrap()));
            }
            output.status.success()
        });
        println!("step {steps:?} after {took:?}");
    }
    assert_eq!(steps, ["next_trusted", "next_signs", "single"]);
    // The last step waits until the authority has signed the renewal, just before the spoke receives and writes it.
    fleet.wait_until("the spoke has a renewed certificate", || {
        !["", first.as_str()].contains(&fleet.read("spoke/certificate.pem").as_str())
    });
    let trusted = || fleet.read("spoke/authorities.pem").matches("BEGIN CERTIFICATE").count();
    fleet.wait_until("the spoke trusts the new authority only", || trusted() == 1);

    let viewer = ["pki", "issue", "--role", "viewer", "--name", "bob", "--out", "bob"];
    assert!(fleet.text(&viewer).contains("viewer/bob"));
    let denied = fleet.problem(&["pki", "revoke", "admin", "--identity", "bob"]);
    assert!(denied.contains("operator"), "{denied}");
    let listed = fleet.text(&["pki", "list", "--identity", "bob"]);
    assert!(listed.contains("spoke/aws/eu-central-1") && listed.contains("viewer/bob"), "{listed}");
    let itself = fleet.problem(&["pki", "revoke", "admin"]);
    assert!(itself.contains("--own"), "{itself}");
    let revoked = fleet.json(&["pki", "revoke", "bob", "--json"]);
    let serial = revoked["revoked"][0]["serial"].as_str().unwrap();
    let took = fleet
        .wait_until("the spoke has the revocation", || fleet.read("spoke/revoked.json").contains(serial));
    println!("revocation on the disk of the spoke {took:?} after the command");
    assert!(took < Duration::from_secs(2), "{took:?}");
    fleet.problem(&["pki", "list", "--identity", "bob"]);
    let revoked = fleet.json(&["pki", "revoke", "spoke/aws/eu-central-1", "--json"]);
    assert!(!revoked["revoked"].as_array().unwrap().is_empty());
}
