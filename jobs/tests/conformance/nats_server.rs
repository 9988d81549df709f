//! A NATS server with JetStream, as a process.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Server on a free port of this machine, with its files in a temporary folder. Ends when it is dropped.
pub(super) struct NatsServer {
    dir: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

impl NatsServer {
    pub(super) fn start() -> NatsServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut server = NatsServer { dir: tempfile::tempdir().unwrap(), port, process: None };
        server.start_again();
        server
    }

    /// Starts the process, and waits until it accepts connections.
    pub(super) fn start_again(&mut self) {
        // Debian installs it in a folder that is not in the PATH of every user.
        let path = format!("{}:/usr/sbin:/usr/local/sbin", std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("nats-server");
        command.env("PATH", path);
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--jetstream", "--store_dir"]);
        command.arg(self.dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
        self.process = Some(command.spawn().expect("nats-server is in the PATH: run .ci/prerequisites test"));
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "nats-server does not accept connections");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the process. Its files remain.
    pub(super) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Returns the folder with its files.
    pub(super) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    pub(super) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}
