//! Rust side of the client bench: `serve`, a server with precomputed responses, and `embed`, the client without Python.
//! `./run` starts both; docs/benchmarks.md explains the output.

mod server;

use std::io::BufRead as _;
use std::time::{Duration, Instant};

use loadtest::client::split::RequestLimits;
use loadtest::client::{Client, ClientSettings, EmbedOptions, EndpointSettings, HttpProtocol, Preference};
use serde_json::json;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve"] => server::serve(),
        ["embed", url, texts, batch, in_flight, protocol] => {
            let number = |text: &str| text.parse().expect("a number");
            embed(url, number(texts), number(batch), number(in_flight), *protocol == "2");
        }
        _ => println!(
            "started by loadtest/benches/client/run: serve, or embed URL TEXTS BATCH IN_FLIGHT HTTP_VERSION"
        ),
    }
}

/// For each number read from standard input, embeds that many texts and prints wall-clock and CPU time.
fn embed(url: &str, count: usize, batch: usize, in_flight_max: usize, two: bool) {
    let texts: Vec<String> = (0..count).map(text).collect();
    let settings = ClientSettings {
        endpoints: vec![EndpointSettings::new(url, Some("key"))],
        protocol: if two { HttpProtocol::Http2 } else { HttpProtocol::Http1 },
        roots_pem: None,
    };
    let client = Client::new(&settings).expect("good settings");
    let preference = Preference {
        request: RequestLimits { texts: batch, ..Preference::default().request },
        in_flight_max,
        ..Preference::default()
    };
    let options = EmbedOptions { model: "bench".to_owned(), ..EmbedOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let some = line.ok().and_then(|line| line.parse().ok()).unwrap_or(count);
        let (start, cpu) = (Instant::now(), cpu());
        let embedded = runtime.block_on(client.embed(&texts[..some], &options, &preference, &mut |_| {}));
        let embedded = embedded.expect("vectors");
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), (self::cpu() - cpu).as_secs_f64());
        assert_eq!(embedded.values.len(), some * server::DIMENSIONS);
        let first = &embedded.values[..2];
        println!("{}", json!({"seconds": seconds, "cpu": cpu, "first": first}));
    }
}

/// Returns a short query of about forty characters.
fn text(number: usize) -> String {
    format!("short text {number:06} about ships on a calm sea")
}

/// Returns the CPU time of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below a second"))
}
