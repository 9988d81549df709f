//! Ten thousand connections from one address that never send a complete request head.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpSocket;

use crate::neighbours::send_request;
use crate::processes::Processes;

/// Connections of the attacker.
const HALF_OPEN: usize = 10_000;
/// Connections that good clients opened before and keep open.
const IDLE: usize = 200;
/// Minimum number of connections that good clients open, one after another, from the beginning of the attack.
const NEW: usize = 200;
/// Maximum time to open a connection and serve its first request.
const NEW_MAX: Duration = Duration::from_secs(1);
/// Address of the good clients; the attacker's is 127.0.0.1.
const GOOD: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const HEAD: &[u8] = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthoriz";

/// Sends the heads while good clients send requests. Returns the time of the slowest new connection with its request.
///
/// # Errors
///
/// The first failure of a good client.
pub(crate) fn run_half_open(processes: &Processes) -> Result<Duration, String> {
    let mut idle = Vec::new();
    for _ in 0..IDLE {
        let mut connection = Some(connect(processes.address));
        send_request(processes.address, &mut connection)?;
        idle.push(connection);
    }
    let over = AtomicBool::new(false);
    let (slowest, attackers) = std::thread::scope(|scope| {
        let attackers = scope.spawn(|| {
            let attackers: Vec<TcpStream> =
                (0..HALF_OPEN).filter_map(|_| half_open(processes.address)).collect();
            over.store(true, Ordering::Relaxed);
            attackers
        });
        let mut slowest = Duration::ZERO;
        let mut number = 0;
        // While the connections are opened, and while they are open.
        while !over.load(Ordering::Relaxed) || number < NEW {
            let begun = Instant::now();
            send_request(processes.address, &mut Some(connect(processes.address)))
                .map_err(|problem| format!("new connection {number}: {problem}"))?;
            slowest = slowest.max(begun.elapsed());
            number += 1;
        }
        Ok::<_, String>((slowest, attackers.join().unwrap()))
    })?;
    for (number, connection) in idle.iter_mut().enumerate() {
        send_request(processes.address, connection)
            .map_err(|problem| format!("idle connection {number}: {problem}"))?;
    }
    drop(attackers);
    if slowest > NEW_MAX { Err(format!("a new connection took {slowest:?}")) } else { Ok(slowest) }
}

/// Opens a connection; one that the gateway refuses is closed by it, which is ignored.
fn half_open(address: SocketAddr) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.write_all(HEAD).ok()?;
    Some(stream)
}

fn connect(address: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((GOOD, 0).into()).unwrap();
        socket.connect(address).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// Lets this process, and the gateway that it starts, open as many files as the system allows.
pub(crate) fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let needed = (HALF_OPEN + IDLE + NEW + 200) as u64;
    assert!(maximum.is_none_or(|maximum| maximum >= needed), "this test needs {needed} files (ulimit -Hn)");
}
