//! Good clients, while others on another core send attacks or, in turn, ordinary requests at the same rate.
//!
//! The two take turns, and each turn of attacks is compared with the ordinary turn before it: what else the machine does
//! is then in both. The measure is the median of the turns' ratios.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::case::{BODY, Case, post};
use crate::run;
use crate::world::{OUR_CORE, THEIR_CORE};

/// The key of the good clients' tenant.
pub(crate) const KEY: &str = "good-key";

/// Ordinary and attacking, so many times.
const TURNS: usize = 3;
const TURN: Duration = Duration::from_secs(6);
/// Of good clients, each with a connection that it keeps.
const CLIENTS: usize = 4;
/// Between two requests of one.
const CLIENT_PERIOD: Duration = Duration::from_millis(20);
/// Cases, or ordinary requests, that the attackers begin in a second. Some cases take seconds.
const ATTACKS_PER_SECOND: u32 = 70;
const ATTACKERS: usize = 64;
/// From one case to the next, so that those of a family do not come together. It is a prime.
const STRIDE: usize = 389;

/// What the good clients saw.
#[derive(Default)]
pub(crate) struct Report {
    turns: Vec<Turn>,
}

/// A turn of ordinary requests, and one of attacks after it.
struct Turn {
    ordinary: Seen,
    attacked: Seen,
}

#[derive(Default)]
struct Seen {
    took: Vec<Duration>,
    failed: Vec<String>,
    /// Cases or ordinary requests that others sent meanwhile.
    others: usize,
}

/// Measures.
pub(crate) fn compare(address: SocketAddr, cases: &[Case]) -> Report {
    let ordinary = [Case::h1("ordinary", post("", BODY), &[&[200]])];
    let next = AtomicUsize::new(0);
    let turn = |_| Turn {
        ordinary: turn(address, &ordinary, &AtomicUsize::new(0)),
        attacked: turn(address, cases, &next),
    };
    // Not counted: connections are opened, and buffers touched for the first time.
    self::turn(address, &ordinary, &AtomicUsize::new(0));
    Report { turns: (0..TURNS).map(turn).collect() }
}

/// One turn, in which others send these, beginning with the next.
fn turn(address: SocketAddr, cases: &[Case], next: &AtomicUsize) -> Seen {
    let (seen, over, begun) = (Mutex::new(Seen::default()), AtomicBool::new(false), Instant::now());
    let sent = AtomicUsize::new(0);
    let (seen_by, over_by, sent_by) = (&seen, &over, &sent);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                pin(OUR_CORE);
                let begins = begun + CLIENT_PERIOD * client as u32 / CLIENTS as u32;
                let found = good_client(address, begins, over_by);
                let mut seen = seen_by.lock().unwrap();
                seen.took.extend(found.took);
                seen.failed.extend(found.failed);
            });
        }
        for _ in 0..ATTACKERS {
            scope.spawn(move || {
                pin(THEIR_CORE);
                loop {
                    // Each begins at its own moment, whoever of the attackers is free then.
                    let number = sent_by.fetch_add(1, Ordering::Relaxed);
                    let begins = begun + Duration::from_secs(1) * number as u32 / ATTACKS_PER_SECOND;
                    if begins >= begun + TURN {
                        return;
                    }
                    std::thread::sleep(begins.saturating_duration_since(Instant::now()));
                    let case = &cases[next.fetch_add(1, Ordering::Relaxed) * STRIDE % cases.len()];
                    // What becomes of it is the other test's matter.
                    let _ = run::judge(address, case);
                }
            });
        }
        std::thread::sleep(TURN);
        over.store(true, Ordering::Relaxed);
    });
    let mut seen = seen.into_inner().unwrap();
    seen.others = sent.into_inner().saturating_sub(ATTACKERS);
    seen.took.sort();
    seen
}

/// Sends a request each period until it is over. A request that has to wait for the one before counts from its own moment.
fn good_client(address: SocketAddr, begins: Instant, over: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    let mut connection = None;
    let mut due = begins;
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let answered = ask(address, &mut connection);
        match answered {
            Ok(()) => seen.took.push(due.elapsed()),
            Err(problem) => {
                connection = None;
                seen.failed.push(problem);
            }
        }
        due += CLIENT_PERIOD;
    }
    seen
}

/// One request over the connection, which is opened if need be.
fn ask(address: SocketAddr, connection: &mut Option<TcpStream>) -> Result<(), String> {
    let told = |error: std::io::Error| error.to_string();
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(address).map_err(told)?;
            stream.set_nodelay(true).map_err(told)?;
            stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(told)?;
            connection.insert(stream)
        }
    };
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    stream.write_all(request.as_bytes()).map_err(told)?;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let n = match stream.read(&mut piece) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(told)?,
        };
        if n == 0 {
            return Err("the connection was closed".to_owned());
        }
        answer.extend_from_slice(&piece[..n]);
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let length = head.split("\r\n").find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(usize::MAX) {
            let status = head.split(' ').nth(1).unwrap_or_default().to_owned();
            return if status == "200" { Ok(()) } else { Err(format!("status {status}: {body}")) };
        }
    }
}

/// Puts the calling thread on this core.
fn pin(core: usize) {
    let own = std::fs::read_link("/proc/thread-self").unwrap();
    let own = own.file_name().unwrap().to_str().unwrap().to_owned();
    let pinned =
        Command::new("taskset").args(["-cp", &core.to_string(), &own]).stdout(Stdio::null()).status();
    assert!(pinned.unwrap().success(), "this machine has no core {core}");
}

impl Seen {
    fn quantile(&self, part: f64) -> Duration {
        let last = self.took.len().saturating_sub(1);
        self.took.get((last as f64 * part) as usize).copied().unwrap_or(Duration::MAX)
    }
}

impl Report {
    /// Requests that failed, in turns of both kinds.
    pub(crate) fn failed(&self) -> Vec<String> {
        self.turns
            .iter()
            .flat_map(|turn| [&turn.ordinary, &turn.attacked])
            .flat_map(|seen| seen.failed.clone())
            .collect()
    }

    /// The median of the turns' ratios of 99th percentiles, attacked to ordinary.
    pub(crate) fn ratio(&self) -> f64 {
        let ratio = |turn: &Turn| {
            turn.attacked.quantile(0.99).as_secs_f64() / turn.ordinary.quantile(0.99).as_secs_f64()
        };
        let mut ratios: Vec<f64> = self.turns.iter().map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied().unwrap_or(f64::INFINITY)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Turn { ordinary, attacked } in &self.turns {
            for (name, seen) in [("ordinary", ordinary), ("attacked", attacked)] {
                let millis = |part| seen.quantile(part).as_secs_f64() * 1e3;
                writeln!(
                    f,
                    "{name}: {} requests beside {} others, {} failed, p50 {:.1} ms, p99 {:.1} ms, slowest {:.1} ms",
                    seen.took.len(),
                    seen.others,
                    seen.failed.len(),
                    millis(0.5),
                    millis(0.99),
                    millis(1.0)
                )?;
            }
        }
        write!(f, "99th percentile under attack: {:.2} times that beside ordinary requests", self.ratio())
    }
}
