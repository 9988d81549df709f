//! Replicas that outlive their spoke, but not for ever.
//!
//! A spoke that is killed leaves its replicas running, so that the next one, a second later, finds them warm. If no next one
//! comes, nobody is left to stop them. So whoever starts a replica touches a file for it ([`touch`]) and names the file in its
//! environment ([`VARIABLE`]); a replica that has not seen it change for long enough ends by itself ([`until_alone`]), in
//! good order.
//!
//! What is looked at is that the file *changes*, against the replica's own clock, and not how old it is: a wall clock that is
//! set says nothing about who is alive.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

/// Names the file, and in milliseconds how long it may stay as it is: `60000:/var/lib/meridian/replica-7300.alive`.
pub const VARIABLE: &str = "MERIDIAN_KEEPER";
/// Names the parent with which a process shall end. A replica that may outlive its spoke must not inherit it.
pub const PARENT_VARIABLE: &str = "MERIDIAN_PARENT_PID";

/// In a spell of so many looks a file that is touched has changed.
const LOOKS: u32 = 4;

/// What stands in the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keeper {
    /// The file.
    pub file: PathBuf,
    /// How long it may stay as it is.
    pub alone: Duration,
}

impl Keeper {
    /// Reads the variable's value.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn parse(value: &str) -> Result<Keeper, String> {
        let parts = value.split_once(':').and_then(|(millis, file)| Some((millis.parse().ok()?, file)));
        match parts {
            Some((millis, file)) if millis > 0 && !file.is_empty() => {
                Ok(Keeper { file: PathBuf::from(file), alone: Duration::from_millis(millis) })
            }
            _ => Err(format!("{VARIABLE} is \"{value}\"; write MILLISECONDS:FILE, or unset it")),
        }
    }

    /// Its value for the variable.
    pub fn value(&self) -> String {
        format!("{}:{}", self.alone.as_millis(), self.file.display())
    }

    /// How often the file must be touched.
    pub fn period(&self) -> Duration {
        self.alone / LOOKS
    }
}

/// Says that somebody looks after whoever watches this file.
pub(crate) async fn touch(file: &Path) -> io::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The content changes as well, for file systems with coarse times.
    tokio::fs::write(file, format!("{}\n", now.as_nanos())).await
}

/// Comes back when nobody has looked after us for long enough.
pub async fn until_alone(keeper: &Keeper) {
    let mut last = (read(&keeper.file).await, Instant::now());
    loop {
        sleep(keeper.period()).await;
        let seen = read(&keeper.file).await;
        // A file that is gone, or cannot be read, does not change.
        if seen.is_some() && seen != last.0 {
            last = (seen, Instant::now());
        } else if last.1.elapsed() >= keeper.alone {
            return;
        }
    }
}

async fn read(file: &Path) -> Option<Vec<u8>> {
    tokio::fs::read(file).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nonsense_is_refused() {
        let keeper = Keeper { file: "/var/lib/a:b".into(), alone: Duration::from_secs(60) };
        assert_eq!(Keeper::parse(&keeper.value()), Ok(keeper));
        for text in ["", "60000", "60000:", "0:/a", "-1:/a", ":/a", "x:/a"] {
            assert!(Keeper::parse(text).unwrap_err().contains(VARIABLE), "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_looked_after_goes_on_and_who_is_not_ends() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = Keeper { file: dir.path().join("alive"), alone: Duration::from_secs(60) };
        let watched = keeper.clone();
        let alone = tokio::spawn(async move { until_alone(&watched).await });
        for _ in 0..40 {
            touch(&keeper.file).await.unwrap();
            sleep(keeper.period()).await;
            assert!(!alone.is_finished());
        }
        let last = Instant::now();
        alone.await.unwrap();
        let took = last.elapsed();
        assert!(took >= keeper.alone - 2 * keeper.period() && took <= 2 * keeper.alone, "{took:?}");
        // Nobody ever came.
        let nobody = Keeper { file: dir.path().join("none"), ..keeper };
        let begun = Instant::now();
        until_alone(&nobody).await;
        assert!(begun.elapsed() >= nobody.alone);
    }
}
