//! Build of the running binary, for `meridian_build_info` of every role, and its start.

use crate::value::Info;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// Build of the binary. The root package knows it: were it compiled into this crate, each commit would rebuild all crates.
static BUILD: OnceLock<Build> = OnceLock::new();
/// Start of the process, by the clock of the system and by the one that is never corrected.
static STARTED: OnceLock<(SystemTime, Instant)> = OnceLock::new();

/// Returns the time since which the counters of this process count: that of [`Build::set`], or else of the first call.
pub fn started() -> SystemTime {
    start().0
}

/// Returns the time since [`started`], whatever the clock was set to since then.
pub fn elapsed() -> Duration {
    start().1.elapsed()
}

fn start() -> (SystemTime, Instant) {
    *STARTED.get_or_init(|| (SystemTime::now(), Instant::now()))
}

/// Build of a binary.
#[derive(Clone, Copy, Debug)]
pub struct Build {
    /// Version of the package.
    pub version: &'static str,
    /// Commit of the sources, or `unknown`.
    pub commit: &'static str,
    /// Version of the compiler.
    pub rust: &'static str,
}

impl Build {
    /// Sets the build of this process. Called once, by the CLI; a later call has no effect.
    pub fn set(self) {
        start();
        // The first one stays.
        let _ = BUILD.set(self);
    }
}

crate::metric_set! {
    /// Build of the process.
    #[derive(Debug)]
    pub struct BuildMetrics {
        /// Version, commit and compiler of the binary; always 1.
        info: Option<Info<3>> = "meridian_build_info" ["version", "commit", "rust"],
    }
}

impl BuildMetrics {
    /// Returns the build of this process, if it was set.
    pub fn read() -> BuildMetrics {
        let facts =
            |build: &Build| Info([build.version, build.commit, build.rust].map(str::to_owned).to_vec());
        BuildMetrics { info: BUILD.get().map(facts) }
    }
}
