//! Recording of the metrics of a drill: the series that the rules read, with one value for each second.
//!
//! The file is text, compressed with gzip. A line has a word that says what it is: `metrics` (the names that were recorded), `scrapes`
//! (their number), `step` (its second, and its action), `counter` or `gauge` (a series, and its values). `12*30` is a value that is
//! the same thirty times, and `~` a scrape without this series.

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Sign of a scrape without a series.
const ABSENT: &str = "~";

/// Returns the file of the recording of a drill.
pub(crate) fn file(drill: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/observability/recordings/{drill}.gz"))
}

/// Returns the names of the metrics that the shipped rules read from processes.
pub(crate) fn metrics_of_rules() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/observability/rules");
    let mut metrics = BTreeSet::from(["up".to_owned()]);
    for name in ["recording.yml", "alerts.yml"] {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        // Annotations name metrics that the expressions do not read, which does no harm.
        let words = text.split(|sign: char| !(sign.is_ascii_alphanumeric() || sign == '_' || sign == ':'));
        let words = words.filter(|word| word.starts_with("meridian_") && !word.contains(':'));
        metrics.extend(words.map(str::to_owned));
    }
    metrics
}

/// Metrics of a drill, scraped once a second from the start of its load to its end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Recording {
    /// Names of the metrics that were looked for.
    pub(crate) metrics: BTreeSet<String>,
    /// Number of scrapes.
    pub(crate) scrapes: usize,
    /// Executed actions, with their seconds.
    pub(crate) steps: Vec<(f64, String)>,
    /// Values by series, `name{labels}`.
    pub(crate) series: BTreeMap<String, Series>,
}

/// Values of one series.
#[derive(Debug, PartialEq)]
pub(crate) struct Series {
    pub(crate) is_counter: bool,
    /// Value of each scrape; `None` if the process did not respond, or did not have the series.
    pub(crate) values: Vec<Option<f64>>,
}

impl Recording {
    pub(crate) fn write(&self, file: &Path) {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(self.to_text().as_bytes()).unwrap();
        std::fs::write(file, encoder.finish().unwrap()).unwrap();
    }

    pub(crate) fn read(file: &Path) -> Recording {
        let compressed = std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let mut text = String::new();
        GzDecoder::new(compressed.as_slice()).read_to_string(&mut text).unwrap();
        Recording::parse(&text)
    }

    fn to_text(&self) -> String {
        let metrics: Vec<_> = self.metrics.iter().map(String::as_str).collect();
        let mut text = format!("metrics {}\nscrapes {}\n", metrics.join(" "), self.scrapes);
        for (at, action) in &self.steps {
            writeln!(text, "step {at} {action}").unwrap();
        }
        for (name, Series { is_counter, values }) in &self.series {
            let kind = if *is_counter { "counter" } else { "gauge" };
            writeln!(text, "{kind} {name} {}", runs(values)).unwrap();
        }
        text
    }

    fn parse(text: &str) -> Recording {
        let mut recording = Recording::default();
        for line in text.lines() {
            let (kind, rest) = line.split_once(' ').unwrap();
            match kind {
                "metrics" => recording.metrics = rest.split(' ').map(str::to_owned).collect(),
                "scrapes" => recording.scrapes = rest.parse().unwrap(),
                "step" => {
                    let (at, action) = rest.split_once(' ').unwrap();
                    recording.steps.push((at.parse().unwrap(), action.to_owned()));
                }
                "counter" | "gauge" => {
                    // Values have no `}`, labels may have spaces.
                    let (name, values) = rest.rsplit_once("} ").unwrap();
                    let series = Series { is_counter: kind == "counter", values: parse_runs(values) };
                    assert_eq!(series.values.len(), recording.scrapes, "{name}");
                    recording.series.insert(format!("{name}}}"), series);
                }
                _ => panic!("unknown line: {line}"),
            }
        }
        recording
    }
}

fn runs(values: &[Option<f64>]) -> String {
    let mut words = Vec::new();
    for run in values.chunk_by(PartialEq::eq) {
        let value = run[0].map_or(ABSENT.to_owned(), |value| value.to_string());
        words.push(if run.len() == 1 { value } else { format!("{value}*{}", run.len()) });
    }
    words.join(" ")
}

fn parse_runs(text: &str) -> Vec<Option<f64>> {
    let mut values = Vec::new();
    for word in text.split(' ') {
        let (value, times) = word.split_once('*').unwrap_or((word, "1"));
        let value = (value != ABSENT).then(|| value.parse().unwrap());
        values.resize(values.len() + times.parse::<usize>().unwrap(), value);
    }
    values
}

#[test]
fn a_recording_is_read_as_it_was_written() {
    let series = |is_counter, values: &[Option<f64>]| Series { is_counter, values: values.to_vec() };
    let recording = Recording {
        metrics: ["up", "meridian_x"].map(str::to_owned).into(),
        scrapes: 4,
        steps: vec![(1.25, "kill region a".to_owned())],
        series: BTreeMap::from([
            ("up{job=\"b\"}".to_owned(), series(false, &[Some(1.0), Some(1.0), Some(0.0), Some(1.0)])),
            ("meridian_x{a=\"b c\"}".to_owned(), series(true, &[None, Some(0.5), None, None])),
        ]),
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.gz");
    recording.write(&file);
    assert_eq!(Recording::read(&file), recording);
    assert!(recording.to_text().ends_with("gauge up{job=\"b\"} 1*2 0 1\n"), "{}", recording.to_text());
}
