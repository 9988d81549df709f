//! A replica that stops while its download waits for a server that sends no byte.

use super::meridian;
use rustix::process::{Pid, Signal, kill_process};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Replica, which is killed if the test fails.
struct Replica(Child);

impl Drop for Replica {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Accepts the connection of a replica.
fn accept(origin: &TcpListener, replica: &mut Replica) -> TcpStream {
    origin.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    loop {
        if let Ok((connection, _)) = origin.accept() {
            return connection;
        }
        assert_eq!(replica.0.try_wait().unwrap(), None, "the replica has exited");
        assert!(begun.elapsed() < TIMEOUT, "the replica has not connected");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_replica_stops_while_its_download_waits_for_a_byte() {
    let origin = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = origin.local_addr().unwrap().port();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("replica.toml");
    let text = format!(
        "listen = \"127.0.0.1:0\"\nnames = [\"d\"]\nmodel = \"http://127.0.0.1:{port}/m/\"\ncache = \"cache\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let replica = meridian()
        .args(["replica", "--config"])
        .arg(&config)
        .args(["--region", "aws/us-east-1"])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut replica = Replica(replica);
    // The request for the list; a read of the response times out after 30 s.
    let _connection = accept(&origin, &mut replica);
    let began = Instant::now();
    kill_process(Pid::from_child(&replica.0), Signal::TERM).unwrap();
    assert!(replica.0.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}
