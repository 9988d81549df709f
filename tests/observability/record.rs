//! Records the metrics of the shipped drills for the test of the alerts: runs each drill and scrapes every process once a second.
//!
//! `target/PROFILE/examples/record_drills [FILE…]`; all drills, and the calm one, take about twelve minutes. A drill whose expectations
//! do not hold is not recorded. docs/drills.md#alerts describes what the recordings show.

#![expect(clippy::unwrap_used, reason = "a panic names the line of a failed run")]

#[path = "recording.rs"]
#[expect(dead_code, reason = "the test reads recordings")]
mod recording;

use recording::{Recording, Series};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};
use tokio::task::JoinSet;

/// Period of scrapes.
const PERIOD: Duration = Duration::from_secs(1);
/// Timeout of a scrape, after which the process counts as down.
const TIMEOUT: Duration = Duration::from_millis(900);
/// Runs of a drill until its expectations hold.
const ATTEMPTS: usize = 3;

/// Value, and whether it is a counter, by series.
type Samples = BTreeMap<String, (f64, bool)>;

/// Process of the fleet.
#[derive(Clone)]
struct Target {
    url: String,
    /// Labels as Prometheus would add them, `a="b",c="d"`.
    labels: String,
}

/// Samples of all processes at one time.
struct Scrape {
    at: Instant,
    samples: Samples,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut drills: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    if drills.is_empty() {
        let files = std::fs::read_dir(root.join("configs/drills")).unwrap();
        drills.extend(files.map(|entry| entry.unwrap().path()));
        drills.push(root.join("tests/observability/calm.toml"));
        drills.sort();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut has_failed = false;
    for drill in drills {
        let name = drill.file_stem().unwrap().to_string_lossy().into_owned();
        let recorded = (1..=ATTEMPTS).find_map(|attempt| {
            println!("{name}: run {attempt}");
            runtime.block_on(record(&drill))
        });
        let Some(recording) = recorded else {
            println!("{name}: not recorded, because its expectations did not hold in {ATTEMPTS} runs");
            has_failed = true;
            continue;
        };
        let file = recording::file(&name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        recording.write(&file);
        let bytes = std::fs::metadata(&file).unwrap().len();
        println!("{name}: {} scrapes of {} series, {bytes} bytes", recording.scrapes, recording.series.len());
    }
    if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs a drill; `None` if an expectation did not hold.
async fn record(drill: &Path) -> Option<Recording> {
    let program = std::env::current_exe().unwrap();
    let meridian = program.ancestors().nth(2).unwrap().join("meridian");
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("fleet");
    let mut child = Command::new(&meridian)
        .arg("drill")
        .args([drill, Path::new("--dir"), &dir])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", meridian.display()));
    let (sender, lines) = mpsc::channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let lines = stderr.lines().map_while(Result::ok);
        lines.for_each(|line| sender.send((Instant::now(), line)).unwrap());
    });
    let stdout = child.stdout.take().unwrap();
    let output = std::thread::spawn(move || std::io::read_to_string(stdout).unwrap());

    let metrics = recording::metrics_of_rules();
    // Times of certificates are recorded relative to now, because a replay begins at the time 0.
    let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build().unwrap();
    let (mut ticks, mut scrapes, mut targets) = (tokio::time::interval(PERIOD), Vec::new(), Vec::new());
    let status = loop {
        ticks.tick().await;
        if targets.is_empty() {
            targets = read_targets(&dir.join("targets.json"));
        }
        scrapes.push(scrape(&client, &targets, &metrics, epoch).await);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
    };
    let printed = output.join().unwrap();
    reader.join().unwrap();
    let errors: Vec<_> = lines.try_iter().collect();
    if !status.success() {
        let lines = printed.lines().filter(|line| line.starts_with("FAILS"));
        println!("{status}\n{}", lines.collect::<Vec<_>>().join("\n"));
        errors.iter().for_each(|(_, line)| println!("{line}"));
        return None;
    }
    let steps: Vec<_> = errors.iter().filter_map(|(at, line)| Some((*at, step(line)?))).collect();
    let (first, (second, _)) = steps.first().expect("a recorded drill has a step with an action");
    let begin = *first - Duration::from_secs_f64(*second);
    let steps = steps.iter().map(|(_, step)| step.clone()).collect();
    Some(joined(metrics, steps, &scrapes, begin, duration(drill)))
}

/// Returns second and action of a line that the drill prints when it executes one.
fn step(line: &str) -> Option<(f64, String)> {
    let (at, action) = line.trim_start().split_once(" s  ")?;
    Some((at.parse().ok()?, action.to_owned()))
}

/// Returns the duration of the load of a drill.
fn duration(drill: &Path) -> Duration {
    let file: toml::Table = std::fs::read_to_string(drill).unwrap().parse().unwrap();
    let seconds = file["duration"].as_str().and_then(|text| text.strip_suffix('s')).unwrap();
    Duration::from_secs(seconds.parse().unwrap())
}

/// Reads the targets of the fleet; none before it has written them.
fn read_targets(file: &Path) -> Vec<Target> {
    let Ok(text) = std::fs::read_to_string(file) else { return Vec::new() };
    let Ok(Value::Array(groups)) = serde_json::from_str(&text) else { return Vec::new() };
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let target = |group: &Value| {
        let labels = group["labels"].as_object().unwrap();
        let job = labels["job"].as_str().unwrap().to_owned();
        let number = numbers.entry(job.clone()).or_default();
        *number += 1;
        // Ports differ between runs.
        let instance = format!("{}-{number}", job.trim_start_matches("meridian-"));
        let labels = labels.iter().map(|(label, value)| format!("{label}={value}"));
        let labels: Vec<_> = labels.chain([format!("instance=\"{instance}\"")]).collect();
        let address = group["targets"][0].as_str().unwrap();
        Target { url: format!("http://{address}/metrics"), labels: labels.join(",") }
    };
    groups.iter().map(target).collect()
}

async fn scrape(
    client: &reqwest::Client,
    targets: &[Target],
    metrics: &BTreeSet<String>,
    epoch: f64,
) -> Scrape {
    let at = Instant::now();
    let mut requests = JoinSet::new();
    for target in targets {
        let (request, target) = (client.get(&target.url), target.clone());
        requests.spawn(async move {
            let read = async { request.send().await?.error_for_status()?.text().await };
            (target, read.await.ok())
        });
    }
    let mut samples = Samples::new();
    while let Some(response) = requests.join_next().await {
        let (target, text) = response.unwrap();
        samples.insert(format!("up{{{}}}", target.labels), (f64::from(u8::from(text.is_some())), false));
        add(&mut samples, &target, &text.unwrap_or_default(), metrics, epoch);
    }
    Scrape { at, samples }
}

/// Adds the samples of a process that the rules read.
fn add(samples: &mut Samples, target: &Target, text: &str, metrics: &BTreeSet<String>, epoch: f64) {
    let mut is_counter = false;
    for line in text.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            is_counter = !family.ends_with(" gauge");
            continue;
        }
        let Some((series, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let (name, own) = series.split_once('{').unwrap_or((series, "}"));
        if !metrics.contains(name) {
            continue;
        }
        let own = own.trim_end_matches('}');
        let separator = if own.is_empty() { "" } else { "," };
        let mut value: f64 = value.parse().unwrap();
        if name.ends_with("_not_after_seconds") || name.ends_with("_not_before_seconds") {
            value = (value - epoch).round();
        }
        samples.insert(format!("{name}{{{}{separator}{own}}}", target.labels), (value, is_counter));
    }
}

/// Joins the scrapes from the start of the load to its end: each second has the last scrape that began before its middle, so that
/// the one before a step does not have the state after it.
fn joined(
    metrics: BTreeSet<String>,
    steps: Vec<(f64, String)>,
    scrapes: &[Scrape],
    begin: Instant,
    duration: Duration,
) -> Recording {
    let of_second = |second: u64| {
        let middle = begin + Duration::from_secs(second) + Duration::from_millis(500);
        let count = scrapes.partition_point(|scrape| scrape.at < middle);
        &scrapes[count.max(1) - 1].samples
    };
    let seconds: Vec<_> = (0..duration.as_secs()).map(of_second).collect();
    let names = seconds.iter().flat_map(|samples| samples.iter());
    let names: BTreeMap<_, _> = names.map(|(name, (_, is_counter))| (name, *is_counter)).collect();
    let series = names.into_iter().map(|(name, is_counter)| {
        let values = seconds.iter().map(|samples| samples.get(name).map(|(value, _)| *value));
        (name.clone(), Series { is_counter, values: values.collect() })
    });
    let series = series.collect();
    Recording { metrics, scrapes: seconds.len(), steps, series }
}
