//! The file that `meridian tune` writes and a replica reads: settings, what they are for, and the curve behind them.
//!
//! Settings hold for one model on one kind of machine, so the file names both and lies in the model cache under both:
//! `tuned/<digest of the model>/<digest of the hardware>.toml`. What is read back is checked like anything that people may
//! edit; a file that does not fit is a reason to go on without it, and the reason is told.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use replica_core::Precision;
use replica_core::batch::BatchSettings;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::curve::Point;
use super::plan::Choice;
use super::quality::Quality;
use crate::config::WINDOW_MAX_MS;

/// The version of the file.
const VERSION: u32 = 1;

/// What a machine must have in common with the one that was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// As the processor names itself.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The instructions that the engine computes with.
    pub instruction_set: String,
}

impl Hardware {
    /// This machine, with the engine's best instructions.
    pub fn here(instruction_set: &str) -> Hardware {
        let cores = available_parallelism().unwrap_or(NonZeroUsize::MIN).get();
        Hardware { processor: processor(), cores, instruction_set: instruction_set.to_owned() }
    }

    fn name(&self) -> String {
        let Hardware { processor, cores, instruction_set } = self;
        let digest = Sha256::digest(format!("{processor}\n{cores}\n{instruction_set}\n"));
        digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl std::fmt::Display for Hardware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Hardware { processor, cores, instruction_set } = self;
        write!(f, "{processor}, {cores} cores, {instruction_set}")
    }
}

/// Linux says it in /proc; elsewhere the architecture has to do.
fn processor() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| cpuinfo.lines().find(|line| line.starts_with(key))?.split_once(':');
    // Virtual machines of different processors have the same name; family, model and stepping tell them apart.
    let parts =
        ["model name", "cpu family", "model\t", "stepping"].map(|key| value(key).map(|(_, it)| it.trim()));
    match parts {
        [Some(name), Some(family), Some(model), Some(stepping)] => {
            format!("{name} (family {family}, model {model}, stepping {stepping})")
        }
        _ => std::env::consts::ARCH.to_owned(),
    }
}

/// What was found for one model on one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The model, as one would write it.
    pub source: String,
    /// The digest of its files.
    pub digest: String,
    /// The machine.
    pub hardware: Hardware,
    /// For each precision, the recommended one first; at least one.
    pub choices: Vec<Choice>,
}

/// A file that does not hold here, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct Unfit {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// Where the file of this model and machine lies in the model cache at `root`.
pub fn place(root: &Path, digest: &str, hardware: &Hardware) -> PathBuf {
    folder(root, digest).join(hardware.name()).with_extension("toml")
}

fn folder(root: &Path, digest: &str) -> PathBuf {
    root.join("tuned").join(digest)
}

/// The file for this model and machine: the one that was named, or else that of the cache. None where there is none.
pub fn find(
    root: &Path,
    named: Option<&Path>,
    digest: &str,
    hardware: &Hardware,
) -> Result<Option<(PathBuf, Tuned)>, Unfit> {
    let path = named.map_or_else(|| place(root, digest, hardware), Path::to_owned);
    let unfit = |reason: String| Unfit { path: path.clone(), reason };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {
            return elsewhere(root, digest, hardware).map_or(Ok(None), Err);
        }
        Err(error) => return Err(unfit(format!("it cannot be read: {error}"))),
    };
    let tuned = parse(&text).map_err(unfit)?;
    if tuned.digest != digest {
        return Err(unfit(format!(
            "it is for a model with digest {}, and this one has {digest}",
            tuned.digest
        )));
    }
    if tuned.hardware != *hardware {
        return Err(unfit(format!("it was measured on {}, and this is {hardware}", tuned.hardware)));
    }
    Ok(Some((path, tuned)))
}

/// This model was tuned, but on other machines: the cache was copied, or the machine has changed.
fn elsewhere(root: &Path, digest: &str, hardware: &Hardware) -> Option<Unfit> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder(root, digest)).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let path = files.into_iter().next()?;
    let tuned = parse(&fs::read_to_string(&path).ok()?).ok()?;
    Some(Unfit { path, reason: format!("it was measured on {}, and this is {hardware}", tuned.hardware) })
}

/// What stands in the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileV1 {
    version: u32,
    model: String,
    digest: String,
    hardware: Hardware,
    settings: Vec<SettingsV1>,
    #[serde(default)]
    quality: Vec<QualityV1>,
    #[serde(default)]
    curve: Vec<PointV1>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsV1 {
    precision: String,
    threads: usize,
    batch_tokens: u64,
    interactive_batch_tokens: u64,
    bulk_share_percent: u8,
    window_max_ms: f64,
    tokens_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_met: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QualityV1 {
    precision: String,
    texts: usize,
    mean_cosine: f64,
    min_cosine: f64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PointV1 {
    precision: String,
    threads: usize,
    batch_tokens: u64,
    tokens_per_second: f64,
    batch_p50_ms: f64,
    batch_p99_ms: f64,
    turns: usize,
}

/// The file's text.
pub fn text(tuned: &Tuned, qualities: &[(Precision, Quality)], points: &[Point]) -> String {
    let Tuned { source, digest, hardware, choices } = tuned;
    let file = FileV1 {
        version: VERSION,
        model: source.clone(),
        digest: digest.clone(),
        hardware: hardware.clone(),
        settings: choices.iter().map(SettingsV1::from).collect(),
        quality: qualities.iter().map(|(precision, quality)| QualityV1::new(*precision, quality)).collect(),
        curve: points.iter().map(PointV1::from).collect(),
    };
    let body = toml::to_string(&file).expect("numbers and names are TOML");
    format!(
        "# Written by `meridian tune`. A replica of this model on such a machine takes the settings of its own precision,\n\
         # but for what its own configuration says. Delete the file to go back to the defaults.\n\n{body}"
    )
}

/// Writes the file as a whole: a replica may be reading it.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = path.with_added_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}

fn parse(text: &str) -> Result<Tuned, String> {
    let file: FileV1 = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
    let FileV1 { version, model, digest, hardware, settings, quality: _, curve: _ } = file;
    if version != VERSION {
        return Err(format!(
            "it has version {version}, and this program reads {VERSION}; run `meridian tune` again"
        ));
    }
    let choices: Vec<Choice> = settings.into_iter().map(SettingsV1::check).collect::<Result<_, _>>()?;
    if choices.is_empty() {
        return Err("it has no settings; run `meridian tune` again".to_owned());
    }
    Ok(Tuned { source: model, digest, hardware, choices })
}

impl SettingsV1 {
    fn check(self) -> Result<Choice, String> {
        let SettingsV1 {
            precision,
            threads,
            batch_tokens,
            interactive_batch_tokens,
            bulk_share_percent,
            window_max_ms,
            tokens_per_second,
            target_met,
        } = self;
        let precision = precision.parse().map_err(|error| format!("`precision`: {error}"))?;
        let threads = NonZeroUsize::new(threads).ok_or("`threads` = 0; at least one computes")?;
        for (key, tokens) in
            [("batch_tokens", batch_tokens), ("interactive_batch_tokens", interactive_batch_tokens)]
        {
            if tokens == 0 || tokens > u64::from(u32::MAX) {
                return Err(format!("`{key}` = {tokens}; a whole number from 1 to {} is wanted", u32::MAX));
            }
        }
        if !(1..=99).contains(&bulk_share_percent) {
            return Err(format!("`bulk_share_percent` = {bulk_share_percent}; 1 to 99 is wanted"));
        }
        if !(0.0..=WINDOW_MAX_MS).contains(&window_max_ms) {
            return Err(format!("`window_max_ms` = {window_max_ms}; 0 to {WINDOW_MAX_MS} is wanted"));
        }
        let window_max = Duration::from_secs_f64(window_max_ms / 1e3);
        let batch = BatchSettings { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max };
        Ok(Choice { precision, threads, batch, tokens_per_second, target_met })
    }
}

impl From<&Choice> for SettingsV1 {
    fn from(choice: &Choice) -> SettingsV1 {
        let Choice { precision, threads, batch, tokens_per_second, target_met } = choice;
        let BatchSettings { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max } = batch;
        SettingsV1 {
            precision: precision.to_string(),
            threads: threads.get(),
            batch_tokens: *batch_tokens,
            interactive_batch_tokens: *interactive_batch_tokens,
            bulk_share_percent: *bulk_share_percent,
            window_max_ms: millis(*window_max),
            tokens_per_second: tokens_per_second.round(),
            target_met: *target_met,
        }
    }
}

impl QualityV1 {
    fn new(precision: Precision, quality: &Quality) -> QualityV1 {
        let Quality { texts, mean_cosine, min_cosine } = *quality;
        QualityV1 { precision: precision.to_string(), texts, mean_cosine, min_cosine }
    }
}

impl From<&Point> for PointV1 {
    fn from(point: &Point) -> PointV1 {
        let Point { setting, tokens_per_second, batch_p50, batch_p99, turns } = point;
        PointV1 {
            precision: setting.precision.to_string(),
            threads: setting.threads.get(),
            batch_tokens: setting.batch_tokens,
            tokens_per_second: tokens_per_second.round(),
            batch_p50_ms: millis(*batch_p50),
            batch_p99_ms: millis(*batch_p99),
            turns: *turns,
        }
    }
}

/// In milliseconds, to the microsecond.
fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned() -> Tuned {
        let choice = Choice {
            precision: Precision::F32,
            threads: NonZeroUsize::MIN,
            batch: BatchSettings {
                batch_tokens: 2048,
                interactive_batch_tokens: 512,
                bulk_share_percent: 25,
                window_max: Duration::from_micros(430),
            },
            tokens_per_second: 4096.0,
            target_met: Some(true),
        };
        let hardware =
            Hardware { processor: "an abacus".to_owned(), cores: 3, instruction_set: "beads".to_owned() };
        Tuned { source: "pypi://a".to_owned(), digest: "d1".to_owned(), hardware, choices: vec![choice] }
    }

    fn placed(root: &Path, tuned: &Tuned, text: &str) -> PathBuf {
        let path = place(root, &tuned.digest, &tuned.hardware);
        write(&path, text).expect("a file");
        path
    }

    #[test]
    fn what_was_written_is_found_again_for_the_same_model_and_machine() {
        let root = tempfile::tempdir().expect("a folder");
        let tuned = tuned();
        let find = || find(root.path(), None, &tuned.digest, &tuned.hardware);
        assert_eq!(find(), Ok(None));
        let path = placed(root.path(), &tuned, &text(&tuned, &[], &[]));
        assert_eq!(find(), Ok(Some((path, tuned.clone()))));
    }

    #[test]
    fn a_file_of_another_model_or_machine_is_not_taken_and_says_why() {
        let root = tempfile::tempdir().expect("a folder");
        let tuned = tuned();
        let path = placed(root.path(), &tuned, &text(&tuned, &[], &[]));
        let check = |named: Option<&Path>, digest: &str, cores: usize, part: &str| {
            let hardware = Hardware { cores, ..tuned.hardware.clone() };
            let unfit = find(root.path(), named, digest, &hardware).expect_err("unfit");
            assert!(unfit.path == path && unfit.reason.contains(part), "{unfit}");
        };
        check(Some(&path), "d2", 3, "for a model with digest d1, and this one has d2");
        check(Some(&path), "d1", 4, "measured on an abacus, 3 cores, beads, and this is an abacus, 4 cores");
        check(None, "d1", 4, "measured on an abacus, 3 cores");
        assert_eq!(find(root.path(), None, "d2", &tuned.hardware), Ok(None), "nobody tuned that one");
        let missing = root.path().join("missing.toml");
        let unfit =
            find(root.path(), Some(&missing), "d1", &tuned.hardware).expect_err("named and not there");
        assert!(unfit.reason.contains("cannot be read"), "{unfit}");
    }

    #[test]
    fn a_file_that_was_edited_badly_is_not_taken_and_says_why() {
        let root = tempfile::tempdir().expect("a folder");
        let tuned = tuned();
        let good = text(&tuned, &[], &[]);
        for (from, to, part) in [
            ("version = 1", "version = 2", "version 2"),
            ("threads = 1", "threads = 0", "`threads` = 0"),
            ("batch_tokens = 2048", "batch_tokens = 0", "`batch_tokens` = 0"),
            ("interactive_batch_tokens = 512", "interactive_batch_tokens = 5000000000", "5000000000"),
            ("bulk_share_percent = 25", "bulk_share_percent = 100", "`bulk_share_percent` = 100"),
            ("window_max_ms = 0.43", "window_max_ms = 1000.1", "`window_max_ms` = 1000.1"),
            ("window_max_ms = 0.43", "window_max_ms = nan", "window_max_ms"),
            ("precision = \"f32\"", "precision = \"f31\"", "f31"),
            ("target_met", "traget_met", "traget_met"),
        ] {
            assert!(good.contains(from), "{from} in {good}");
            placed(root.path(), &tuned, &good.replacen(from, to, 1));
            let unfit = find(root.path(), None, &tuned.digest, &tuned.hardware).expect_err(to);
            assert!(unfit.reason.contains(part), "{part:?} in {unfit}");
        }
    }
}
