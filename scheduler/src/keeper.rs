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
    let mut watched = Watched { seen: read(&keeper.file).await, since: Instant::now() };
    loop {
        sleep(keeper.period()).await;
        if watched.for_so_long(read(&keeper.file).await, Instant::now()) >= keeper.alone {
            return;
        }
    }
}

/// What was seen of the file.
struct Watched {
    seen: Option<Vec<u8>>,
    /// Since when nothing else was seen.
    since: Instant,
}

impl Watched {
    /// For how long the file has stayed as it is, where this is in it now. One that is gone, or cannot be read, does not
    /// change.
    fn for_so_long(&mut self, seen: Option<Vec<u8>>, now: Instant) -> Duration {
        if seen.is_some() && seen != self.seen {
            *self = Watched { seen, since: now };
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
    fn what_is_written_is_read_and_nonsense_is_refused() {
        let keeper = Keeper { file: "/var/lib/a:b".into(), alone: Duration::from_secs(60) };
        assert_eq!(Keeper::parse(&keeper.value()), Ok(keeper));
        for text in ["", "60000", "60000:", "0:/a", "-1:/a", ":/a", "x:/a"] {
            assert!(Keeper::parse(text).unwrap_err().contains(VARIABLE), "{text}");
        }
    }

    #[test]
    fn who_is_looked_after_goes_on_and_who_is_not_ends() {
        let begun = Instant::now();
        let mut watched = Watched { seen: None, since: begun };
        let mut check = |at: u64, seen: Option<&[u8]>, expected: u64| {
            let long = watched.for_so_long(seen.map(<[u8]>::to_vec), begun + Duration::from_secs(at));
            assert_eq!(long, Duration::from_secs(expected), "{at}");
        };
        check(15, None, 15);
        check(30, Some(b"1"), 0);
        check(45, Some(b"1"), 15);
        check(60, Some(b"2"), 0);
        // Gone, or torn: nobody says anything.
        check(75, None, 15);
        check(90, Some(b"2"), 30);
        check(120, Some(b"2"), 60);
    }

    #[tokio::test]
    async fn what_is_touched_changes_and_what_is_not_there_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("alive");
        assert_eq!(read(&file).await, None);
        touch(&file).await.unwrap();
        let first = read(&file).await.unwrap();
        touch(&file).await.unwrap();
        assert_ne!(read(&file).await.unwrap(), first);
    }
}
