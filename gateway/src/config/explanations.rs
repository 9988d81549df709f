//! Reader of the section `[explanations]` of `gateway.toml`.

use crate::edge::ExplanationsConfig;
use configuration::{Files, section};
use gateway_core::explanation_archive::{ArchiveRules, FILE_BYTES_MAX};
use std::path::PathBuf;
use std::time::Duration;

/// Maximum bytes by default: 24 hours of some four requests a second, at 1.5 kB each.
const BYTES_MAX: u64 = 512 << 20;
/// Minimum of `bytes_max`: two files.
const BYTES_MAX_MIN: u64 = 2 * FILE_BYTES_MAX;
/// Duration from which a request is slow by default, as for traces.
const SLOW: Duration = Duration::from_secs(1);

section! {
    /// Explanations of failed, failed-over, slow, rejected and some other requests, on disk, so that they are found for hours.
    pub(super) struct ExplanationsSection {
        /// Directory of their files, one for each gateway. It has the names of tenants, and neither inputs nor keys.
        dir: PathBuf, like "\"explanations\"";
        /// Maximum bytes of all files; the oldest are deleted. A tenant may use half of an hour's share.
        bytes_max: u64 = BYTES_MAX, in BYTES_MAX_MIN..;
        /// Hours for which they are kept at least, within `bytes_max`. A file of an hour is deleted as a whole, so some are kept for an
        /// hour and ten minutes longer.
        hours: u32 = 24, in 1..=720;
        /// Duration from which a request is slow.
        slow: Duration = SLOW, in Duration::from_millis(1)..;
        /// Share of the other requests that is kept, in addition to those whose trace is sampled.
        sample_ratio: f64 = 0.001, in 0.0..=1.0;
    }
}

impl ExplanationsSection {
    /// Returns the configuration.
    pub(super) fn read(self, files: &Files<'_>) -> ExplanationsConfig {
        let ExplanationsSection { dir, bytes_max, hours, slow, sample_ratio } = self;
        let rules = ArchiveRules { bytes_max, hours, slow, sample_ratio };
        ExplanationsConfig { dir: files.path(dir), rules }
    }
}
