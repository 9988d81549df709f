//! A replica that stops while its download waits for a server that sends no byte.

use super::meridian;
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

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
    let mut replica = meridian()
        .args(["replica", "--config"])
        .arg(&config)
        .args(["--region", "aws/us-east-1"])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // The request for the list; a read of the response times out after 30 s.
    let _connection = origin.accept().unwrap();
    let began = Instant::now();
    kill_process(Pid::from_child(&replica), Signal::TERM).unwrap();
    assert!(replica.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}
