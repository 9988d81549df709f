//! A gateway, a spoke and a scripted replica, each a process on the first core.
//!
//! The hub is a thread of this process that serves one route table; it is not attacked.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::case::{BODY, Case, Expected, Outcome, Step, post};
use crate::{frames, run};

/// Core of the processes and the good clients.
pub(crate) const SERVER_CORE: usize = 0;
/// Core of the attackers.
pub(crate) const ATTACK_CORE: usize = 1;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The processes, and the address for clients.
pub(crate) struct Processes {
    pub(crate) address: SocketAddr,
    operations: SocketAddr,
    dir: PathBuf,
    /// By name.
    processes: Vec<(&'static str, Child)>,
}

impl Processes {
    /// Starts all processes and waits until a request is served.
    pub(crate) fn start() -> Processes {
        let dir =
            std::env::temp_dir().join(format!("meridian-attack-{}-{}", std::process::id(), free().port()));
        std::fs::create_dir_all(&dir).unwrap();
        let [address, operations, spoke, replica] = [(); 4].map(|()| free());
        let hub = hub(spoke);
        let write = |name: &str, text: String| std::fs::write(dir.join(name), text).unwrap();
        write(
            "gateway.toml",
            format!(
                "listen = '{address}'\noperations = '{operations}'\nregion = 'aws/us-east-1'\nhub = 'http://{hub}'\n\
                 snapshot = 'routes'\ntenants = 'tenants.toml'\n\
                 [timeouts]\nidle = '30s'\nhead = '2s'\nbody = '3s'\nwrite = '3s'\n"
            ),
        );
        write("attack-key", crate::case::KEY.to_owned());
        write("good-key", crate::neighbours::KEY.to_owned());
        write(
            "tenants.toml",
            "[[tenant]]\nname = 'attacker'\nkey_file = 'attack-key'\n[[tenant]]\nname = 'good'\nkey_file = 'good-key'\n".to_owned(),
        );
        write(
            "spoke.toml",
            format!(
                "region = 'aws/us-east-1'\ninstance = 'a'\nlisten = '{spoke}'\nadvertise = '{spoke}'\nhub = 'http://{hub}'\n\
                 [[replica]]\nendpoint = '{replica}'\n"
            ),
        );
        let mut processes = Processes { address, operations, dir, processes: Vec::new() };
        let listen = replica.to_string();
        processes.spawn(
            "replica",
            &[
                "scripted-replica",
                "--listen",
                &listen,
                "--operations",
                "127.0.0.1:0",
                "--inputs-per-second",
                "100000",
                "--name",
                "anywhere",
            ],
        );
        processes.spawn("spoke", &["spoke", "--config", "spoke.toml"]);
        processes.spawn("gateway", &["gateway", "--config", "gateway.toml"]);
        let begun = Instant::now();
        while let Err(problem) = served(address) {
            assert!(begun.elapsed() < TIMEOUT, "no request is served: {problem}\n{}", processes.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
        processes
    }

    fn spawn(&mut self, name: &'static str, arguments: &[&str]) {
        let log = std::fs::File::create(self.dir.join(format!("{name}.log"))).unwrap();
        let process = Command::new("taskset")
            .args(["-c", &SERVER_CORE.to_string(), env!("CARGO_BIN_EXE_meridian")])
            .args(arguments)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.processes.push((name, process.expect("taskset, of util-linux, starts the processes")));
    }

    /// Asserts that every process is alive, and that the gateway serves both HTTP versions and is ready.
    #[track_caller]
    pub(crate) fn assert_serves(&self) {
        for (name, process) in &self.processes {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap_or_default();
            let is_running = state
                .rsplit(')')
                .next()
                .is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']) && !rest.is_empty());
            assert!(is_running, "the {name} has ended\n{}", self.logs());
        }
        for _ in 0..20 {
            served(self.address).unwrap_or_else(|problem| {
                panic!("requests are no longer served: {problem}\n{}", self.logs())
            });
        }
        let ready = get(self.operations, "/readyz");
        assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
    }

    /// Returns the resident memory of the gateway in bytes.
    pub(crate) fn gateway_memory(&self) -> u64 {
        let (_, gateway) = self.processes.iter().find(|(name, _)| *name == "gateway").unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.id())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Returns the ends of the processes' logs.
    fn logs(&self) -> String {
        let end = |name: &str| {
            let text = std::fs::read_to_string(self.dir.join(format!("{name}.log"))).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!("== {name}\n{}\n", lines[lines.len().saturating_sub(15)..].join("\n"))
        };
        self.processes.iter().map(|(name, _)| end(name)).collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, process) in &mut self.processes {
            process.kill().ok();
            process.wait().ok();
        }
        std::fs::remove_dir_all(&self.dir).ok();
    }
}

/// Sends a request over each HTTP version.
fn served(address: SocketAddr) -> Result<(), String> {
    run::run_and_check(address, &Case::h1("served", post("", BODY), &[&[200]]))?;
    let steps = vec![Step::Handshake(Vec::new()), Step::Send(frames::complete_request(1))];
    run::run_and_check(address, &Case::new("served", steps, Expected::AnyOf(vec![Outcome::Status(&[200])])))
}

fn free() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
        .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// Serves the route table of one region; a reader that has it gets 204 after a while.
fn hub(region: SocketAddr) -> SocketAddr {
    let table = format!(
        r#"{{"version": 1, "epoch": 1, "generation": 1,
            "regions": [{{"id": "aws/us-east-1", "instances": [{{"name": "a", "endpoint": "{region}"}}], "deployments": ["anywhere"]}}],
            "deployments": [{{"name": "anywhere", "task": "embed", "model": "pypi://m",
                "engine": {{"kind": "cpu", "precision": "f32"}}, "residency": null, "regions": []}}]}}"#
    );
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let table = table.clone();
            std::thread::spawn(move || response(stream, &table));
        }
    });
    address
}

/// Responds to one request; a reader that disconnects is ignored.
fn response(mut stream: TcpStream, table: &str) -> Option<()> {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    while !request.windows(4).any(|four| four == b"\r\n\r\n") {
        match stream.read(&mut piece).ok()? {
            0 => return None,
            n => request.extend_from_slice(&piece[..n]),
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let line = text.lines().next()?;
    let (status, body) = match () {
        () if line.starts_with("GET /v1/routes") && line.contains("after=") => {
            std::thread::sleep(Duration::from_millis(500));
            ("204 No Content", "")
        }
        () if line.starts_with("GET /v1/routes") => ("200 OK", table),
        () => ("404 Not Found", ""),
    };
    let length =
        if status.starts_with("204") { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    let head =
        format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{length}connection: close\r\n\r\n");
    stream.write_all(format!("{head}{body}").as_bytes()).ok()
}
