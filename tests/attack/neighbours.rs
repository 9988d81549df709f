//! Latency of good clients while others on another core send, alternately, attacks or ordinary requests at the same rate.
//!
//! The two alternate, so that other load on the machine affects both. The measure is the ratio of their 99th percentiles over
//! all rounds; the attack rounds together send every case that violates a rule or a limit.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::case::{BODY, Case, post};
use crate::processes::{ATTACK_CORE, SERVER_CORE};
use crate::run;

/// The key of the good clients' tenant.
pub(crate) const KEY: &str = "good-key";

/// Rounds of ordinary requests and of attacks.
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_secs(6);
/// Good clients, each with a persistent connection.
const CLIENTS: usize = 4;
/// Period of the requests of a client.
const CLIENT_PERIOD: Duration = Duration::from_millis(20);
/// Cases, or ordinary requests, that the attackers start per second. Some cases take seconds.
const ATTACKS_PER_SECOND: u32 = 70;
const ATTACKERS: usize = 64;
/// Families with large bodies.
const LARGE: [&str; 2] = ["body ", "gzip "];
/// Cases of many valid requests at once. They are load, not an attack: any client may send them, and limits of tenants bound
/// them. At 0.3 ms per request, 300 of them keep the shared core busy for 100 ms, which delays 20 good requests; a 99th percentile of
/// 1,200 is that of the twelfth.
const VALID_BURSTS: [&str; 3] =
    ["flood of three hundred requests", "window 0 with a hundred requests", "fifty requests at once"];
/// Stride from one case to the next, a prime, so that cases of a family are spread.
const STRIDE: usize = 389;

/// Latencies and failures of the good clients.
#[derive(Default)]
pub(crate) struct Report {
    rounds: Vec<Round>,
}

/// A round of ordinary requests, followed by one of attacks.
struct Round {
    ordinary: RoundResult,
    attacked: RoundResult,
}

#[derive(Default)]
struct RoundResult {
    took: Vec<Duration>,
    failed: Vec<String>,
    /// Cases or ordinary requests that the others sent.
    others: usize,
}

/// Runs the measurement.
pub(crate) fn compare(address: SocketAddr, cases: &[Case]) -> Report {
    let (bursts, attacks): (Vec<Case>, Vec<Case>) =
        cases.iter().cloned().partition(|case| VALID_BURSTS.contains(&case.name.as_str()));
    assert_eq!(bursts.len(), VALID_BURSTS.len(), "each burst is a case");
    let ordinary = [Case::h1("ordinary", post("", BODY), &[&[200]])];
    let next = AtomicUsize::new(0);
    let round = |_| Round {
        ordinary: run_round(address, &ordinary, &AtomicUsize::new(0)),
        attacked: run_round(address, &attacks, &next),
    };
    // Warm-up, not counted: connections are opened, and memory is touched for the first time. On a virtual machine the host must
    // allocate it, at some 50 µs per page, of which the first body of 4 MB needs 2,000.
    let large: Vec<Case> = attacks
        .iter()
        .filter(|case| LARGE.iter().any(|family| case.name.starts_with(family)))
        .cloned()
        .collect();
    run_round(address, &ordinary, &AtomicUsize::new(0));
    run_round(address, &large, &AtomicUsize::new(0));
    Report { rounds: (0..ROUNDS).map(round).collect() }
}

/// Runs one round, in which others send these cases, beginning with the next.
fn run_round(address: SocketAddr, cases: &[Case], next: &AtomicUsize) -> RoundResult {
    let (result, over) = (Mutex::new(RoundResult::default()), AtomicBool::new(false));
    let sent = AtomicUsize::new(0);
    // All begin together, after each is pinned to its core.
    let (ready, begun) = (Barrier::new(CLIENTS + ATTACKERS + 1), OnceLock::new());
    let begin = || {
        ready.wait();
        *begun.get_or_init(Instant::now)
    };
    let (result_by, over_by, sent_by, begin) = (&result, &over, &sent, &begin);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                pin(SERVER_CORE);
                let begun = begin();
                let begins = begun + CLIENT_PERIOD * client as u32 / CLIENTS as u32;
                let found = good_client(address, begins, over_by);
                let mut result = result_by.lock().unwrap();
                result.took.extend(found.took);
                result.failed.extend(found.failed);
            });
        }
        for _ in 0..ATTACKERS {
            scope.spawn(move || {
                pin(ATTACK_CORE);
                let begun = begin();
                loop {
                    // Each case has its own start time, and any free attacker runs it.
                    let number = sent_by.fetch_add(1, Ordering::Relaxed);
                    let begins = begun + Duration::from_secs(1) * number as u32 / ATTACKS_PER_SECOND;
                    if begins >= begun + ROUND {
                        return;
                    }
                    std::thread::sleep(begins.saturating_duration_since(Instant::now()));
                    let case = &cases[next.fetch_add(1, Ordering::Relaxed) * STRIDE % cases.len()];
                    // The other test checks the outcome.
                    let _ = run::run_and_check(address, case);
                }
            });
        }
        begin();
        std::thread::sleep(ROUND);
        over.store(true, Ordering::Relaxed);
    });
    let mut result = result.into_inner().unwrap();
    result.others = sent.into_inner().saturating_sub(ATTACKERS);
    result.took.sort();
    result
}

/// Sends a request each period until `over`. Latency counts from the scheduled time, also if the previous request was late.
fn good_client(address: SocketAddr, begins: Instant, over: &AtomicBool) -> RoundResult {
    let mut result = RoundResult::default();
    let mut connection = None;
    let mut due = begins;
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let answered = send_request(address, &mut connection);
        match answered {
            Ok(()) => result.took.push(due.elapsed()),
            Err(problem) => {
                connection = None;
                result.failed.push(problem);
            }
        }
        due += CLIENT_PERIOD;
    }
    result
}

/// Sends a request over the connection, which is opened if necessary.
pub(crate) fn send_request(address: SocketAddr, connection: &mut Option<TcpStream>) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(address).map_err(text)?;
            stream.set_nodelay(true).map_err(text)?;
            stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(text)?;
            connection.insert(stream)
        }
    };
    let request = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut response = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let n = match stream.read(&mut piece) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(text)?,
        };
        if n == 0 {
            return Err("the connection was closed".to_owned());
        }
        response.extend_from_slice(&piece[..n]);
        let text = String::from_utf8_lossy(&response);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let length = head.split("\r\n").find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(usize::MAX) {
            let status = head.split(' ').nth(1).unwrap_or_default().to_owned();
            return if status == "200" { Ok(()) } else { Err(format!("status {status}: {body}")) };
        }
    }
}

/// Pins the calling thread to this core, if the system supports it.
fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(core);
        let pinned = rustix::thread::sched_setaffinity(None, &cores);
        pinned.unwrap_or_else(|error| panic!("core {core}: {error}"));
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

impl RoundResult {
    fn quantile(&self, part: f64) -> Duration {
        let last = self.took.len().saturating_sub(1);
        self.took.get((last as f64 * part) as usize).copied().unwrap_or(Duration::MAX)
    }
}

impl Report {
    /// Returns the failed requests of all rounds.
    pub(crate) fn failed(&self) -> Vec<String> {
        self.rounds
            .iter()
            .flat_map(|round| [&round.ordinary, &round.attacked])
            .flat_map(|result| result.failed.clone())
            .collect()
    }

    /// Returns the 99th percentile of all attack rounds, divided by that of all ordinary rounds.
    pub(crate) fn ratio(&self) -> f64 {
        let p99 = |side: fn(&Round) -> &RoundResult| {
            let mut took: Vec<Duration> =
                self.rounds.iter().flat_map(|round| side(round).took.clone()).collect();
            took.sort();
            RoundResult { took, ..RoundResult::default() }.quantile(0.99).as_secs_f64()
        };
        p99(|round| &round.attacked) / p99(|round| &round.ordinary)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Round { ordinary, attacked } in &self.rounds {
            for (name, result) in [("ordinary", ordinary), ("attacked", attacked)] {
                let millis = |part| result.quantile(part).as_secs_f64() * 1e3;
                writeln!(
                    f,
                    "{name}: {} requests with {} others, {} failed, p50 {:.1} ms, p99 {:.1} ms, slowest {:.1} ms",
                    result.took.len(),
                    result.others,
                    result.failed.len(),
                    millis(0.5),
                    millis(0.99),
                    millis(1.0)
                )?;
            }
        }
        write!(f, "99th percentile under attack: {:.2} times that with ordinary requests", self.ratio())
    }
}
