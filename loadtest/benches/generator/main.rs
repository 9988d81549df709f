//! What a request costs the generator, beside wrk and oha.
//!
//! One server with a core for itself answers every request with the same bytes; whoever asks has the other core. Rounds
//! interleave (A B C A B C …), so that what disturbs the machine disturbs all of them. In a round each asks over 64
//! connections as fast as it can for some seconds; counted are its requests and the processor time that it used. A figure is
//! the median over the rounds, a ratio the median of the rounds' own ratios. Ours checks every number of every answer; wrk
//! and oha look at the status.
//!
//! Then ours goes by a timetable, at 40 000 requests a second: that is what it is for, and its lag says whether it keeps up.

mod peers;
mod server;

use loadtest::{Options, RawOptions};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const CONNECTIONS: usize = 64;
/// The rate that one core must keep.
const RATE: u32 = 40_000;
/// Who asks, and who answers.
const OUR_CORE: usize = 0;
const SERVER_CORE: usize = 1;

/// What a generator did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) requests: u64,
    pub(crate) seconds: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let option = |name: &str, unless_said: u32| {
        let at = words.iter().position(|word| *word == name);
        at.and_then(|at| words.get(at + 1)?.parse().ok()).unwrap_or(unless_said)
    };
    match *words {
        ["serve", dimensions] => server::serve(dimensions.parse().expect("a number")),
        ["ours", url, seconds] => ours(url, seconds, None),
        ["paced", url, seconds] => ours(url, seconds, Some(RATE)),
        _ => compare(option("--seconds", 4), option("--rounds", 3)),
    }
}

/// Our generator, alone in this process.
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
        "{CONNECTIONS} connections, {seconds} s, {rounds} rounds; requests a second by one core, and its microseconds a request"
    );
    println!(
        "| answer | generator | requests/s | µs CPU/request | CPU, ours of it |\n|---|---|---:|---:|---:|"
    );
    for dimensions in [8, 384] {
        let server = Server::start(dimensions);
        let peers = peers::here(CONNECTIONS, seconds, &server.url);
        let mut figures: Vec<(&str, Vec<[f64; 2]>)> = vec![("meridian", Vec::new())];
        figures.extend(peers.iter().map(|peer| (peer.name, Vec::new())));
        for _ in 0..rounds {
            let words = ["ours", &server.url, &seconds.to_string()];
            figures[0].1.push(measured(&mut itself(&words), |said| {
                let report = json(said);
                assert_eq!(report["total"]["failed"], 0, "{}", report["total"]["failures"]);
                from_report(&report)
            }));
            for (place, peer) in peers.iter().enumerate() {
                figures[place + 1].1.push(measured(&mut peer.command(), |said| peer.read(said)));
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

/// Ours at a rate, and how late it was.
fn paced(server: &Server, seconds: u32) {
    let mut report = Value::Null;
    let [rate, cpu] = measured(&mut itself(&["paced", &server.url, &seconds.to_string()]), |said| {
        report = json(said);
        from_report(&report)
    });
    let (lag, spans) = (&report["lag_ms"], &report["total"]["latency_ms"]);
    println!(
        "At a constant {RATE} a second: {rate:.0}/s, {cpu:.1} µs CPU a request, {} failed, lag p50 {} ms p99 {} ms, latency p50 {} ms p99 {} ms",
        report["total"]["failed"], lag["p50"], lag["p99"], spans["p50"], spans["p99"]
    );
}

fn from_report(report: &Value) -> Seen {
    let number = |value: &Value| value.as_f64().expect("a number");
    Seen {
        requests: number(&report["total"]["requests"]) as u64,
        seconds: number(&report["elapsed_ms"]) / 1e3,
    }
}

pub(crate) fn json(said: &str) -> Value {
    serde_json::from_str(said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// This program in another part, on our core.
fn itself(words: &[&str]) -> Command {
    on_core(OUR_CORE, &std::env::current_exe().expect("this program").to_string_lossy(), words)
}

pub(crate) fn on_core(core: usize, program: &str, words: &[&str]) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string(), program]).args(words);
    command
}

/// Requests a second, and microseconds of processor time for each.
fn measured(command: &mut Command, read: impl FnOnce(&str) -> Seen) -> [f64; 2] {
    let before = children_seconds();
    let output = command.stderr(Stdio::inherit()).output().expect("the generator starts");
    let used = children_seconds() - before;
    assert!(output.status.success(), "{command:?}: {}", output.status);
    let Seen { requests, seconds } = read(&String::from_utf8_lossy(&output.stdout));
    [requests as f64 / seconds, used * 1e6 / requests as f64]
}

/// Processor time of children that have ended: two of the fields after the name, in hundredths of a second.
fn children_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux tells");
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

/// The server in a process of its own, which ends with this.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(dimensions: usize) -> Server {
        let itself = std::env::current_exe().expect("this program");
        let words = ["serve", &dimensions.to_string()];
        let mut command = on_core(SERVER_CORE, &itself.to_string_lossy(), &words);
        let mut process = command.stdout(Stdio::piped()).spawn().expect("the server starts");
        let mut url = String::new();
        let said = process.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut url).expect("it says where it is");
        Server { process, url: url.trim().to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}
