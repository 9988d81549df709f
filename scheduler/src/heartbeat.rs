//! Heartbeat from a spoke to its replicas, which may outlive the spoke for a limited time.
//!
//! A spoke that is killed leaves its replicas running, so that a spoke that restarts a second later finds them warm. If
//! no spoke starts again, no process is left to stop them. So the process that starts a replica touches a file for it
//! ([`touch`]) and passes the file in its environment ([`VARIABLE`]); a replica that has not seen the file change for
//! the timeout shuts down gracefully ([`until_expired`]).
//!
//! The check is that the file *changes*, measured with the replica's own clock, and not how old it is: a wall clock
//! that is adjusted proves nothing about the spoke.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

/// Milliseconds without a change after which the replica ends, and the file:
/// `60000:/var/lib/meridian/replica-7300.alive`.
pub const VARIABLE: &str = "MERIDIAN_HEARTBEAT";
/// Process id of the parent with which a process ends. A replica that may outlive its spoke must not inherit it.
pub const PARENT_VARIABLE: &str = "MERIDIAN_PARENT_PID";

/// Checks and touches per timeout.
const CHECKS_PER_TIMEOUT: u32 = 4;

/// Value of the environment variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatFile {
    /// The file.
    pub file: PathBuf,
    /// Time without a change after which the replica ends.
    pub timeout: Duration,
}

impl HeartbeatFile {
    /// Parses the value of the variable.
    ///
    /// # Errors
    ///
    /// A message that names the variable and the expected format.
    pub fn parse(value: &str) -> Result<HeartbeatFile, String> {
        let parts = value.split_once(':').and_then(|(millis, file)| Some((millis.parse().ok()?, file)));
        match parts {
            Some((millis, file)) if millis > 0 && !file.is_empty() => {
                Ok(HeartbeatFile { file: PathBuf::from(file), timeout: Duration::from_millis(millis) })
            }
            _ => Err(format!("{VARIABLE} is \"{value}\"; write MILLISECONDS:FILE, or unset it")),
        }
    }

    /// Returns the value for the variable.
    pub fn value(&self) -> String {
        format!("{}:{}", self.timeout.as_millis(), self.file.display())
    }

    /// Returns the interval at which the file is touched and checked.
    pub fn period(&self) -> Duration {
        self.timeout / CHECKS_PER_TIMEOUT
    }
}

/// Touches the file: its replica keeps running.
pub(crate) async fn touch(file: &Path) -> io::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The content changes as well, for file systems with coarse times.
    tokio::fs::write(file, format!("{}\n", now.as_nanos())).await
}

/// Returns when the file has not changed for the timeout.
pub async fn until_expired(heartbeat: &HeartbeatFile) {
    let mut watch = FileWatch { content: read(&heartbeat.file).await, since: Instant::now() };
    loop {
        sleep(heartbeat.period()).await;
        if watch.unchanged_for(read(&heartbeat.file).await, Instant::now()) >= heartbeat.timeout {
            return;
        }
    }
}

/// Observations of the file.
struct FileWatch {
    content: Option<Vec<u8>>,
    /// Time of the last observed change.
    since: Instant,
}

impl FileWatch {
    /// Returns for how long the file is unchanged, given its present content. A file that is missing or unreadable
    /// counts as unchanged.
    fn unchanged_for(&mut self, content: Option<Vec<u8>>, now: Instant) -> Duration {
        if content.is_some() && content != self.content {
            *self = FileWatch { content, since: now };
        }
        now.saturating_duration_since(self.since)
    }
}

async fn read(file: &Path) -> Option<Vec<u8>> {
    tokio::fs::read(file).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_are_parsed_and_invalid_ones_are_rejected() {
        let heartbeat = HeartbeatFile { file: "/var/lib/a:b".into(), timeout: Duration::from_secs(60) };
        assert_eq!(HeartbeatFile::parse(&heartbeat.value()), Ok(heartbeat));
        for text in ["", "60000", "60000:", "0:/a", "-1:/a", ":/a", "x:/a"] {
            assert!(HeartbeatFile::parse(text).unwrap_err().contains(VARIABLE), "{text}");
        }
    }

    #[test]
    fn a_touched_file_resets_the_timeout_and_an_untouched_one_does_not() {
        let begun = Instant::now();
        let mut watch = FileWatch { content: None, since: begun };
        let mut check = |at: u64, content: Option<&[u8]>, expected: u64| {
            let long = watch.unchanged_for(content.map(<[u8]>::to_vec), begun + Duration::from_secs(at));
            assert_eq!(long, Duration::from_secs(expected), "{at}");
        };
        check(15, None, 15);
        check(30, Some(b"1"), 0);
        check(45, Some(b"1"), 15);
        check(60, Some(b"2"), 0);
        // Missing or incomplete: unchanged.
        check(75, None, 15);
        check(90, Some(b"2"), 30);
        check(120, Some(b"2"), 60);
    }

    #[tokio::test]
    async fn a_touched_file_changes_and_a_missing_file_has_no_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("alive");
        assert_eq!(read(&file).await, None);
        touch(&file).await.unwrap();
        let first = read(&file).await.unwrap();
        touch(&file).await.unwrap();
        assert_ne!(read(&file).await.unwrap(), first);
    }
}
