//! Checkpoint of a job: the state from which an interrupted run continues, and the options that must be the same.
//!
//! The data before a checkpoint is on the disk before the checkpoint is. So on a restart the files are truncated to the
//! lengths in the checkpoint, the rows before it are read again and compared by their digest, and the next row is the first
//! one without a result.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the file format.
const VERSION: u32 = 1;

/// Options of a job that decide its result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSettings {
    /// Options with their values, by name. All must be the same.
    pub exact: BTreeMap<String, String>,
    /// Whether rows that cannot be used are skipped. May be changed while no row was skipped.
    pub skips_invalid: bool,
    /// Whether texts that are too long are truncated. May be switched on while no row was skipped: no row before was too
    /// long then.
    pub truncates: bool,
}

impl JobSettings {
    /// Returns how these settings of a run differ from those of the checkpoint in a way that would change the rows before
    /// it; empty if the run can continue.
    pub fn differences(&self, before: &JobSettings, skipped: u64) -> Vec<String> {
        let mut found = Vec::new();
        let names: std::collections::BTreeSet<&String> =
            before.exact.keys().chain(self.exact.keys()).collect();
        for name in names {
            let value = |settings: &JobSettings| {
                settings.exact.get(name).map_or("absent".to_owned(), |value| format!("{value:?}"))
            };
            let (old, new) = (value(before), value(self));
            if old != new {
                found.push(format!("{name} was {old} and is {new}"));
            }
        }
        if skipped > 0 && before.skips_invalid && !self.skips_invalid {
            found.push(format!("--skip-invalid was given and is not, and {skipped} rows were skipped"));
        }
        match (before.truncates, self.truncates) {
            (true, false) => found.push("--truncate was given and is not".to_owned()),
            (false, true) if skipped > 0 => {
                found.push(format!("--truncate was not given and is, and {skipped} rows were skipped"));
            }
            _ => {}
        }
        found
    }
}

/// State of a job after a number of rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    version: u32,
    /// Options of the run.
    pub settings: JobSettings,
    /// Rows of the input that are done, skipped ones included.
    pub rows: u64,
    /// Rows that were skipped.
    pub skipped: u64,
    /// Digest of the rows that are done.
    pub digest: String,
    /// Length of a vector, once it is known.
    pub dimension: Option<usize>,
    /// Length of the partial output in bytes.
    pub partial_bytes: u64,
    /// Length of the file of skipped rows in bytes.
    pub errors_bytes: u64,
    /// Whether all rows of the input are done.
    pub is_complete: bool,
}

impl Checkpoint {
    /// Returns the state before the first row.
    pub(crate) fn new(settings: JobSettings, digest: String, partial_bytes: u64) -> Checkpoint {
        Checkpoint {
            version: VERSION,
            settings,
            rows: 0,
            skipped: 0,
            digest,
            dimension: None,
            partial_bytes,
            errors_bytes: 0,
            is_complete: false,
        }
    }

    /// Returns the rows of the output.
    pub(crate) fn rows_written(&self) -> u64 {
        self.rows - self.skipped
    }

    /// Returns the content of the file.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        let mut json =
            serde_json::to_vec_pretty(self).expect("maps with text keys, numbers and text are JSON");
        json.push(b'\n');
        json
    }

    /// Parses the content of a file; returns the problem if it is not a checkpoint of this version.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Checkpoint, String> {
        let checkpoint: Checkpoint = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let Checkpoint { version, rows, skipped, .. } = checkpoint;
        if version != VERSION {
            return Err(format!("its version is {version}, and this program reads version {VERSION}"));
        }
        if skipped > rows {
            return Err(format!("it has {skipped} skipped rows and only {rows} rows"));
        }
        Ok(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(model: &str, skips_invalid: bool, truncates: bool) -> JobSettings {
        let exact = BTreeMap::from([("--model".to_owned(), model.to_owned())]);
        JobSettings { exact, skips_invalid, truncates }
    }

    #[test]
    fn a_checkpoint_is_read_back_and_a_damaged_one_is_not() {
        let mut checkpoint = Checkpoint::new(settings("a", true, false), "00".to_owned(), 128);
        (checkpoint.rows, checkpoint.skipped, checkpoint.dimension) = (10, 2, Some(3));
        let json = checkpoint.to_json();
        assert_eq!(Checkpoint::parse(&json), Ok(checkpoint.clone()));
        for length in 0..json.len() - 2 {
            assert!(Checkpoint::parse(&json[..length]).is_err(), "{length} bytes");
        }
        let newer = String::from_utf8(json).expect("JSON").replace("\"version\": 1", "\"version\": 2");
        assert!(Checkpoint::parse(newer.as_bytes()).is_err_and(|problem| problem.contains("version is 2")));
        checkpoint.skipped = 11;
        assert!(Checkpoint::parse(&checkpoint.to_json()).is_err());
    }

    #[test]
    fn a_changed_option_is_named_with_both_values() {
        let differences = settings("b", false, false).differences(&settings("a", false, false), 0);
        assert_eq!(differences, ["--model was \"a\" and is \"b\""]);
        let mut more = settings("a", false, false);
        more.exact.insert("--field".to_owned(), "text".to_owned());
        assert_eq!(more.differences(&settings("a", false, false), 0), ["--field was absent and is \"text\""]);
    }

    #[test]
    fn options_for_invalid_rows_may_change_while_no_row_was_skipped() {
        let count = |new: (bool, bool), old: (bool, bool), skipped: u64| {
            settings("a", new.0, new.1).differences(&settings("a", old.0, old.1), skipped).len()
        };
        assert_eq!(count((true, false), (false, false), 0), 0, "--skip-invalid was added");
        assert_eq!(count((false, false), (true, false), 0), 0, "--skip-invalid was removed in time");
        assert_eq!(count((false, false), (true, false), 1), 1, "--skip-invalid was removed too late");
        assert_eq!(count((false, true), (false, false), 0), 0, "--truncate was added");
        assert_eq!(count((true, true), (true, false), 1), 1, "--truncate was added too late");
        assert_eq!(count((false, false), (false, true), 0), 1, "--truncate was removed");
    }
}
