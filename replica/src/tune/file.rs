//! File that `meridian tune` writes and a replica reads: settings, model and hardware to which they apply, and the
//! measured curve.
//!
//! Settings apply to one model on one kind of machine, so the file names both and is stored in the model cache under
//! both: `tuned/<digest of the model>/<digest of the hardware>.toml`. The file is validated on reading, because people
//! may edit it; a replica ignores a file that does not apply and logs the reason.

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
use super::plan::TunedChoice;
use super::quality::Quality;
use crate::config::WINDOW_MAX_MS;

/// Version of the file format.
const VERSION: u32 = 1;

/// Hardware that must be the same as that of the measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name of the processor.
    pub processor: String,
    /// Cores available to this process.
    pub cores: usize,
    /// Instruction set of the engine.
    pub instruction_set: String,
}

impl Hardware {
    /// Returns the hardware of this machine, with the engine's best instruction set.
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

/// Returns the name of the processor from /proc on Linux, else the architecture.
fn processor() -> String {
    // Virtual machines on different processors report the same name; family, model and stepping distinguish them.
    match cpuinfo(["model name", "cpu family", "model\t", "stepping"]) {
        [Some(name), Some(family), Some(model), Some(stepping)] => {
            format!("{name} (family {family}, model {model}, stepping {stepping})")
        }
        _ => std::env::consts::ARCH.to_owned(),
    }
}

/// Returns the model name of the processor from /proc on Linux, else the architecture.
pub fn processor_model() -> String {
    let [name] = cpuinfo(["model name"]);
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Returns the values of the first processor in /proc/cpuinfo.
fn cpuinfo<const N: usize>(keys: [&str; N]) -> [Option<String>; N] {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |key: &str| cpuinfo.lines().find(|line| line.starts_with(key))?.split_once(':');
    keys.map(|key| value(key).map(|(_, value)| value.trim().to_owned()))
}

/// Tuned settings of a model on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedModel {
    /// Source of the model.
    pub source: String,
    /// Digest of its files.
    pub digest: String,
    /// Hardware.
    pub hardware: Hardware,
    /// Settings for each precision, the recommended one first; at least one.
    pub choices: Vec<TunedChoice>,
    /// Share of the CPU time that other processes used during the measurements, if it was too large; such settings are kept
    /// only on request.
    pub busy_share: Option<f64>,
}

/// Tuned settings that do not apply, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct TunedSettingsMismatch {
    /// Path of the file.
    pub path: PathBuf,
    /// Reason.
    pub reason: String,
}

/// Returns the path of the file for this model and hardware in the model cache at `root`.
pub fn default_path(root: &Path, digest: &str, hardware: &Hardware) -> PathBuf {
    folder(root, digest).join(hardware.name()).with_extension("toml")
}

fn folder(root: &Path, digest: &str) -> PathBuf {
    root.join("tuned").join(digest)
}

/// Finds the file for this model and hardware: the configured one, or else the one in the cache; `None` if there is
/// none.
pub fn find(
    root: &Path,
    named: Option<&Path>,
    digest: &str,
    hardware: &Hardware,
) -> Result<Option<(PathBuf, TunedModel)>, TunedSettingsMismatch> {
    let path = named.map_or_else(|| default_path(root, digest, hardware), Path::to_owned);
    let mismatch = |reason: String| TunedSettingsMismatch { path: path.clone(), reason };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {
            return tuned_on_other_hardware(root, digest, hardware).map_or(Ok(None), Err);
        }
        Err(error) => return Err(mismatch(format!("it cannot be read: {error}"))),
    };
    let tuned = parse(&text).map_err(mismatch)?;
    if tuned.digest != digest {
        return Err(mismatch(format!(
            "it is for the model with digest {}, but the digest of this model is {digest}; run `meridian tune` for it",
            tuned.digest
        )));
    }
    if tuned.hardware != *hardware {
        return Err(mismatch(format!(
            "it was measured on {}, but this machine is {hardware}",
            tuned.hardware
        )));
    }
    Ok(Some((path, tuned)))
}

/// Returns a mismatch if this model was tuned on other hardware: the cache was copied, or the machine has changed.
fn tuned_on_other_hardware(root: &Path, digest: &str, hardware: &Hardware) -> Option<TunedSettingsMismatch> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder(root, digest)).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let path = files.into_iter().next()?;
    let tuned = parse(&fs::read_to_string(&path).ok()?).ok()?;
    Some(TunedSettingsMismatch {
        path,
        reason: format!("it was measured on {}, but this machine is {hardware}", tuned.hardware),
    })
}

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TunedFileV1 {
    version: u32,
    model: String,
    digest: String,
    hardware: Hardware,
    /// Absent unless the machine was busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_share_of_other_processes: Option<f64>,
    settings: Vec<SettingsV1>,
    #[serde(default)]
    quality: Vec<QualityV1>,
    #[serde(default)]
    curve: Vec<PointV1>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SettingsV1 {
    precision: String,
    threads: usize,
    batch_tokens: u64,
    interactive_batch_tokens: u64,
    bulk_share_percent: u8,
    window_max_ms: f64,
    tokens_per_second: f64,
    target_met: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QualityV1 {
    precision: String,
    texts: usize,
    mean_cosine: f64,
    min_cosine: f64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PointV1 {
    precision: String,
    threads: usize,
    batch_tokens: u64,
    tokens_per_second: f64,
    /// Slowest and fastest run; absent in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens_per_second_range: Option<[f64; 2]>,
    batch_p50_ms: f64,
    batch_p99_ms: f64,
    /// Called `turns` in files of older versions.
    #[serde(alias = "turns")]
    runs: usize,
}

/// Returns the text of the file.
pub fn text(tuned: &TunedModel, qualities: &[(Precision, Quality)], points: &[Point]) -> String {
    let TunedModel { source, digest, hardware, choices, busy_share } = tuned;
    let file = TunedFileV1 {
        version: VERSION,
        model: source.clone(),
        digest: digest.clone(),
        hardware: hardware.clone(),
        cpu_share_of_other_processes: *busy_share,
        settings: choices.iter().map(SettingsV1::from).collect(),
        quality: qualities.iter().map(|(precision, quality)| QualityV1::new(*precision, quality)).collect(),
        curve: points.iter().map(PointV1::from).collect(),
    };
    let body = toml::to_string(&file).expect("numbers and names are TOML");
    let busy = busy_share.map_or_else(String::new, |share| {
        format!(
            "# The machine was busy: other processes used {:.0} % of the CPU time during the measurements (`--keep`). Repeat\n\
             # them on an idle machine.\n",
            100.0 * share
        )
    });
    format!(
        "# Written by `meridian tune`. A replica of this model on this hardware uses the settings of its precision,\n\
         # unless its configuration sets another value. Delete this file to return to the defaults.\n{busy}\n{body}"
    )
}

/// Returns a share as it is written: in whole percent.
pub(super) fn rounded_share(share: f64) -> f64 {
    (100.0 * share).round() / 100.0
}

/// Replaces the file atomically: a replica may be reading it.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = path.with_added_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}

fn parse(text: &str) -> Result<TunedModel, String> {
    let file: TunedFileV1 = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
    let TunedFileV1 {
        version,
        model,
        digest,
        hardware,
        cpu_share_of_other_processes: busy_share,
        settings,
        quality: _,
        curve: _,
    } = file;
    if version != VERSION {
        return Err(format!(
            "it has version {version}, but this program reads version {VERSION}; run `meridian tune` again"
        ));
    }
    let choices: Vec<TunedChoice> = settings.into_iter().map(SettingsV1::check).collect::<Result<_, _>>()?;
    if choices.is_empty() {
        return Err("it has no settings; run `meridian tune` again".to_owned());
    }
    Ok(TunedModel { source: model, digest, hardware, choices, busy_share })
}

impl SettingsV1 {
    fn check(self) -> Result<TunedChoice, String> {
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
        let threads = NonZeroUsize::new(threads).ok_or("`threads` = 0; give at least 1")?;
        for (key, tokens) in
            [("batch_tokens", batch_tokens), ("interactive_batch_tokens", interactive_batch_tokens)]
        {
            if tokens == 0 || tokens > u64::from(u32::MAX) {
                return Err(format!("`{key}` = {tokens}; give a whole number from 1 to {}", u32::MAX));
            }
        }
        if !(1..=99).contains(&bulk_share_percent) {
            return Err(format!(
                "`bulk_share_percent` = {bulk_share_percent}; give a whole number from 1 to 99"
            ));
        }
        if !(0.0..=WINDOW_MAX_MS).contains(&window_max_ms) {
            return Err(format!(
                "`window_max_ms` = {window_max_ms}; give a number from 0 to {WINDOW_MAX_MS}"
            ));
        }
        let window_max = Duration::from_secs_f64(window_max_ms / 1e3);
        let batch = BatchSettings { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max };
        Ok(TunedChoice { precision, threads, batch, tokens_per_second, target_met })
    }
}

impl From<&TunedChoice> for SettingsV1 {
    fn from(choice: &TunedChoice) -> SettingsV1 {
        let TunedChoice { precision, threads, batch, tokens_per_second, target_met } = choice;
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
    pub(super) fn new(precision: Precision, quality: &Quality) -> QualityV1 {
        let Quality { texts, mean_cosine, min_cosine } = *quality;
        QualityV1 { precision: precision.to_string(), texts, mean_cosine, min_cosine }
    }
}

impl From<&Point> for PointV1 {
    fn from(point: &Point) -> PointV1 {
        let Point { setting, tokens_per_second, tokens_per_second_range, batch_p50, batch_p99, runs } = point;
        let (slowest, fastest) = *tokens_per_second_range;
        PointV1 {
            precision: setting.precision.to_string(),
            threads: setting.threads.get(),
            batch_tokens: setting.batch_tokens,
            tokens_per_second: tokens_per_second.round(),
            tokens_per_second_range: Some([slowest.round(), fastest.round()]),
            batch_p50_ms: millis(*batch_p50),
            batch_p99_ms: millis(*batch_p99),
            runs: *runs,
        }
    }
}

/// Converts to milliseconds, with microsecond precision.
fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned() -> TunedModel {
        let choice = TunedChoice {
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
        TunedModel {
            source: "pypi://a".to_owned(),
            digest: "d1".to_owned(),
            hardware,
            choices: vec![choice],
            busy_share: None,
        }
    }

    fn write_default(root: &Path, tuned: &TunedModel, text: &str) -> PathBuf {
        let path = default_path(root, &tuned.digest, &tuned.hardware);
        write(&path, text).expect("a file");
        path
    }

    #[test]
    fn written_settings_are_found_for_the_same_model_and_hardware() {
        for (target_met, busy_share) in [(Some(true), None), (None, Some(rounded_share(0.344)))] {
            let (root, mut tuned) = (tempfile::tempdir().expect("a folder"), tuned());
            tuned.choices[0].target_met = target_met;
            tuned.busy_share = busy_share;
            let text = text(&tuned, &[], &[]);
            assert_eq!(
                text.contains("# The machine was busy: other processes used 34 %"),
                busy_share.is_some()
            );
            let find = || find(root.path(), None, &tuned.digest, &tuned.hardware);
            assert_eq!(find(), Ok(None));
            let path = write_default(root.path(), &tuned, &text);
            assert_eq!(find(), Ok(Some((path, tuned.clone()))));
        }
    }

    #[test]
    fn settings_of_another_model_or_machine_are_rejected_with_the_reason() {
        let root = tempfile::tempdir().expect("a folder");
        let tuned = tuned();
        let path = write_default(root.path(), &tuned, &text(&tuned, &[], &[]));
        let check = |named: Option<&Path>, digest: &str, cores: usize, part: &str| {
            let hardware = Hardware { cores, ..tuned.hardware.clone() };
            let mismatch = find(root.path(), named, digest, &hardware).expect_err("unfit");
            assert!(mismatch.path == path && mismatch.reason.contains(part), "{mismatch}");
        };
        check(Some(&path), "d2", 3, "for the model with digest d1, but the digest of this model is d2");
        check(
            Some(&path),
            "d1",
            4,
            "measured on an abacus, 3 cores, beads, but this machine is an abacus, 4 cores",
        );
        check(None, "d1", 4, "measured on an abacus, 3 cores");
        assert_eq!(find(root.path(), None, "d2", &tuned.hardware), Ok(None), "the model was never tuned");
        let missing = root.path().join("missing.toml");
        let mismatch = find(root.path(), Some(&missing), "d1", &tuned.hardware)
            .expect_err("the configured file is missing");
        assert!(mismatch.reason.contains("cannot be read"), "{mismatch}");
    }

    #[test]
    fn an_invalid_file_is_rejected_with_the_reason() {
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
            write_default(root.path(), &tuned, &good.replacen(from, to, 1));
            let mismatch = find(root.path(), None, &tuned.digest, &tuned.hardware).expect_err(to);
            assert!(mismatch.reason.contains(part), "{part:?} in {mismatch}");
        }
    }
}
