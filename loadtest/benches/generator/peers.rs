//! wrk and oha, if installed: command lines and output parsers.

use crate::{Measurement, json, on_core};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Body of the same length as our generated query.
const BODY: &str = r#"{"model":"minilm","encoding_format":"float","input":["garden weather ticket update signal bridge museum coffee window letter"]}"#;

/// Other load generator.
pub(crate) struct PeerGenerator {
    pub(crate) name: &'static str,
    program: String,
    words: Vec<String>,
    read: fn(&str) -> Measurement,
}

impl PeerGenerator {
    pub(crate) fn command(&self) -> Command {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        on_core(crate::OUR_CORE, &self.program, &words)
    }

    pub(crate) fn read(&self, output: &str) -> Measurement {
        (self.read)(output)
    }
}

/// Returns the installed generators.
pub(crate) fn installed(connections: usize, seconds: u32, url: &str) -> Vec<PeerGenerator> {
    let url = format!("{url}/embeddings");
    let script = std::env::temp_dir().join(format!("wrk-{}.lua", std::process::id()));
    let lua = format!(
        "wrk.method = \"POST\"\nwrk.body = [==[{BODY}]==]\nwrk.headers[\"content-type\"] = \"application/json\"\n"
    );
    std::fs::write(&script, lua).expect("a file for wrk");
    let script = script.to_string_lossy();
    let (connections, duration) = (connections.to_string(), format!("{seconds}s"));
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let wrk = PeerGenerator {
        name: "wrk",
        program: "wrk".to_owned(),
        words: words(&["-t1", "-c", &connections, "-d", &duration, "-s", &script, &url]),
        read: parse_wrk,
    };
    let oha = PeerGenerator {
        name: "oha",
        program: oha(),
        words: words(&[
            "--no-tui",
            // One core is available.
            "--worker-threads",
            "1",
            "--output-format",
            "json",
            "-c",
            &connections,
            "-z",
            &duration,
            "-m",
            "POST",
            "-T",
            "application/json",
            "-d",
            BODY,
            &url,
        ]),
        read: parse_oha,
    };
    [wrk, oha].into_iter().filter(|peer| is_installed(&peer.program)).collect()
}

/// Returns the oha built by `run`, or the one in PATH.
fn oha() -> String {
    let made = std::env::var_os("GENERATOR_PEERS").map(|made| PathBuf::from(made).join("bin/oha"));
    let made = made.filter(|made| made.exists());
    made.map_or_else(|| "oha".to_owned(), |made| made.display().to_string())
}

fn is_installed(program: &str) -> bool {
    // wrk --version exits with a failure.
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Parses a line such as `  123456 requests in 4.01s, 50.00MB read`.
fn parse_wrk(output: &str) -> Measurement {
    let line =
        output.lines().find(|line| line.contains(" requests in ")).unwrap_or_else(|| panic!("{output}"));
    assert!(!output.contains("Non-2xx"), "{output}");
    let (requests, rest) = line.trim().split_once(" requests in ").expect("the line was found by it");
    let span = rest.split(',').next().and_then(|span| span.strip_suffix('s')).expect("seconds");
    Measurement { requests: requests.parse().expect("a count"), seconds: span.parse().expect("seconds") }
}

fn parse_oha(output: &str) -> Measurement {
    let output = json(output);
    let requests = output["statusCodeDistribution"]["200"].as_u64().unwrap_or_else(|| panic!("{output}"));
    Measurement { requests, seconds: output["summary"]["total"].as_f64().expect("seconds") }
}
