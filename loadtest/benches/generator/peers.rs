//! wrk and oha, where they are: how each is told to ask, and what it says of how it went.

use crate::{Seen, json, on_core};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// As long as a lookup of ours.
const BODY: &str = r#"{"model":"minilm","encoding_format":"float","input":["garden weather ticket update signal bridge museum coffee window letter"]}"#;

/// Another generator.
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    program: String,
    words: Vec<String>,
    read: fn(&str) -> Seen,
}

impl Peer {
    pub(crate) fn command(&self) -> Command {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        on_core(crate::OUR_CORE, &self.program, &words)
    }

    pub(crate) fn read(&self, said: &str) -> Seen {
        (self.read)(said)
    }
}

/// Those that are on this machine.
pub(crate) fn here(connections: usize, seconds: u32, url: &str) -> Vec<Peer> {
    let url = format!("{url}/embeddings");
    let script = std::env::temp_dir().join(format!("wrk-{}.lua", std::process::id()));
    let lua = format!(
        "wrk.method = \"POST\"\nwrk.body = [==[{BODY}]==]\nwrk.headers[\"content-type\"] = \"application/json\"\n"
    );
    std::fs::write(&script, lua).expect("a file for wrk");
    let script = script.to_string_lossy();
    let (connections, lasts) = (connections.to_string(), format!("{seconds}s"));
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let wrk = Peer {
        name: "wrk",
        program: "wrk".to_owned(),
        words: words(&["-t1", "-c", &connections, "-d", &lasts, "-s", &script, &url]),
        read: wrk_says,
    };
    let oha = Peer {
        name: "oha",
        program: oha(),
        words: words(&[
            "--no-tui",
            // It has one core.
            "--worker-threads",
            "1",
            "--output-format",
            "json",
            "-c",
            &connections,
            "-z",
            &lasts,
            "-m",
            "POST",
            "-T",
            "application/json",
            "-d",
            BODY,
            &url,
        ]),
        read: oha_says,
    };
    [wrk, oha].into_iter().filter(|peer| is_here(&peer.program)).collect()
}

/// The one that `run` has built, or else that of the machine.
fn oha() -> String {
    let made = std::env::var_os("GENERATOR_PEERS").map(|made| PathBuf::from(made).join("bin/oha"));
    let made = made.filter(|made| made.exists());
    made.map_or_else(|| "oha".to_owned(), |made| made.display().to_string())
}

fn is_here(program: &str) -> bool {
    // wrk ends with a failure when it is asked for its version.
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// `  123456 requests in 4.01s, 50.00MB read`
fn wrk_says(said: &str) -> Seen {
    let line = said.lines().find(|line| line.contains(" requests in ")).unwrap_or_else(|| panic!("{said}"));
    assert!(!said.contains("Non-2xx"), "{said}");
    let (requests, rest) = line.trim().split_once(" requests in ").expect("it was found by that");
    let span = rest.split(',').next().and_then(|span| span.strip_suffix('s')).expect("seconds");
    Seen { requests: requests.parse().expect("a count"), seconds: span.parse().expect("seconds") }
}

fn oha_says(said: &str) -> Seen {
    let said = json(said);
    let requests = said["statusCodeDistribution"]["200"].as_u64().unwrap_or_else(|| panic!("{said}"));
    Seen { requests, seconds: said["summary"]["total"].as_f64().expect("seconds") }
}
