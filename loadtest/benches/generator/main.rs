//! CPU cost of a request in the load generator, compared with wrk and oha.
//!
//! A server on its own core sends the same response to every request; the generator runs on the other core. Rounds are
//! interleaved (A B C A B C …), so that disturbances of the machine affect all generators. In a round, each sends
//! requests over 64 connections in a closed loop for some seconds; its requests and its CPU time are measured. Values
//! are medians over the rounds, ratios are medians of the ratios of each round. Our generator validates every number
//! of every response; wrk and oha check only the status.
//!
//! Finally our generator runs at a constant 40 000 requests per second; its lag shows whether it keeps the schedule.

mod peers;
mod server;

use loadtest::{Options, RawOptions};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const CONNECTIONS: usize = 64;
/// Rate that one core must sustain.
const RATE: u32 = 40_000;
/// Cores of the generator and of the server.
const OUR_CORE: usize = 0;
const SERVER_CORE: usize = 1;

/// Result of a generator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    pub(crate) requests: u64,
    pub(crate) seconds: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let option = |name: &str, default: u32| {
        let at = words.iter().position(|word| *word == name);
        at.and_then(|at| words.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    match *words {
        ["serve", dimensions] => server::serve(dimensions.parse().expect("a number")),
        ["ours", url, seconds] => ours(url, seconds, None),
        ["paced", url, seconds] => ours(url, seconds, Some(RATE)),
        _ => compare(option("--seconds", 4), option("--rounds", 3)),
    }
}

/// Runs our generator in this process.
fn ours(url: &str, seconds: &str, rate: Option<u32>) {
    let raw = RawOptions {
        url: url.to_owned(),
        callers: rate.is_none().then_some(CONNECTIONS),
        rate: rate.unwrap_or(1).to_string(),
        duration: Some(format!("{seconds}s")),
        ..RawOptions::default()
    };
    let options = Options::check(raw).expect("good options");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let run = loadtest::run(options, |_| {}, std::future::pending());
    println!("{}", runtime.block_on(run).expect("the server listens").to_json());
}

fn compare(seconds: u32, rounds: u32) {
    println!(
        "{CONNECTIONS} connections, {seconds} s, {rounds} rounds; requests/s of one core, and its CPU time per request"
    );
    println!(
        "| response | generator | requests/s | µs CPU/request | our CPU / its CPU |\n|---|---|---:|---:|---:|"
    );
    for dimensions in [8, 384] {
        let server = Server::start(dimensions);
        let peers = peers::installed(CONNECTIONS, seconds, &server.url);
        let mut figures: Vec<(&str, Vec<[f64; 2]>)> = vec![("meridian", Vec::new())];
        figures.extend(peers.iter().map(|peer| (peer.name, Vec::new())));
        for _ in 0..rounds {
            let words = ["ours", &server.url, &seconds.to_string()];
            figures[0].1.push(measured(&mut own_command(&words), |output| {
                let report = json(output);
                assert_eq!(report["total"]["failed"], 0, "{}", report["total"]["failures"]);
                from_report(&report)
            }));
            for (index, peer) in peers.iter().enumerate() {
                figures[index + 1].1.push(measured(&mut peer.command(), |output| peer.read(output)));
            }
        }
        let ours = figures[0].1.clone();
        for (name, rounds) in &figures {
            let of = |column: usize| median(rounds.iter().map(|round| round[column]));
            let ratio = median(ours.iter().zip(rounds).map(|(ours, peer)| ours[1] / peer[1]));
            println!("| {dimensions} numbers | {name} | {:.0} | {:.1} | {ratio:.2} |", of(0), of(1));
        }
        paced(&server, seconds);
    }
}

/// Runs our generator at a constant rate and prints its lag.
fn paced(server: &Server, seconds: u32) {
    let mut report = Value::Null;
    let [rate, cpu] = measured(&mut own_command(&["paced", &server.url, &seconds.to_string()]), |output| {
        report = json(output);
        from_report(&report)
    });
    let (lag, spans) = (&report["lag_ms"], &report["total"]["latency_ms"]);
    println!(
        "At a constant {RATE}/s: {rate:.0}/s, {cpu:.1} µs CPU per request, {} failed, lag p50 {} ms p99 {} ms, latency p50 {} ms p99 {} ms",
        report["total"]["failed"], lag["p50"], lag["p99"], spans["p50"], spans["p99"]
    );
}

fn from_report(report: &Value) -> Measurement {
    let number = |value: &Value| value.as_f64().expect("a number");
    Measurement {
        requests: number(&report["total"]["requests"]) as u64,
        seconds: number(&report["elapsed_ms"]) / 1e3,
    }
}

pub(crate) fn json(output: &str) -> Value {
    serde_json::from_str(output).unwrap_or_else(|error| panic!("{error}: {output}"))
}

/// Returns a command that runs this program with other arguments, on the generator's core.
fn own_command(words: &[&str]) -> Command {
    on_core(OUR_CORE, &std::env::current_exe().expect("this program").to_string_lossy(), words)
}

pub(crate) fn on_core(core: usize, program: &str, words: &[&str]) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string(), program]).args(words);
    command
}

/// Returns requests per second, and microseconds of CPU time per request.
fn measured(command: &mut Command, read: impl FnOnce(&str) -> Measurement) -> [f64; 2] {
    let before = children_seconds();
    let output = command.stderr(Stdio::inherit()).output().expect("the generator starts");
    let used = children_seconds() - before;
    assert!(output.status.success(), "{command:?}: {}", output.status);
    let Measurement { requests, seconds } = read(&String::from_utf8_lossy(&output.stdout));
    [requests as f64 / seconds, used * 1e6 / requests as f64]
}

/// Returns the CPU time of terminated children: two fields of /proc/self/stat, in hundredths of a second.
fn children_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs is mounted");
    let (_, after) = stat.rsplit_once(')').expect("a name in brackets");
    let fields: Vec<f64> =
        after.split_whitespace().skip(13).take(2).filter_map(|field| field.parse().ok()).collect();
    fields.iter().sum::<f64>() / 100.0
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Server in a child process, killed on drop.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(dimensions: usize) -> Server {
        let own_command = std::env::current_exe().expect("this program");
        let words = ["serve", &dimensions.to_string()];
        let mut command = on_core(SERVER_CORE, &own_command.to_string_lossy(), &words);
        let mut process = command.stdout(Stdio::piped()).spawn().expect("the server starts");
        let mut url = String::new();
        let output = process.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut url).expect("it prints its URL");
        Server { process, url: url.trim().to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have terminated already.
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}
