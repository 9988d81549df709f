use super::*;
use jobs_core::job::UnixMillis;
use redb::StorageBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// File whose disk is full while the switch is on.
#[derive(Debug)]
struct FullDisk(redb::backends::FileBackend, Arc<AtomicBool>);

impl FullDisk {
    fn check(&self) -> io::Result<()> {
        if self.1.load(Ordering::SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl StorageBackend for FullDisk {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.0.write(offset, data)
    }
}

fn record(number: u64) -> JobRecord {
    JobRecord::CancelRequested { id: DurableJobId::new(UnixMillis(number), 0), at: UnixMillis(number) }
}

#[tokio::test]
async fn a_full_disk_keeps_what_is_stored_and_the_log_continues_with_space() {
    let dir = tempfile::tempdir().unwrap();
    let (path, full) = (dir.path().join("log"), Arc::new(AtomicBool::new(false)));
    let opener = {
        let full = full.clone();
        move |path: &Path| {
            let options = std::fs::File::options().read(true).write(true).create(true).clone();
            let file = redb::backends::FileBackend::new(options.open(path)?)?;
            Ok(Database::builder().create_with_backend(FullDisk(file, full.clone()))?)
        }
    };
    let log = EmbeddedJobLog::start(path, Box::new(opener)).await.unwrap();
    assert_eq!(log.append(EncodedEntry::of(&[record(1), record(2)])).await, Ok(1));
    assert_eq!(log.append(EncodedEntry::of(&[record(3)])).await, Ok(2));
    full.store(true, Ordering::SeqCst);
    assert_eq!(log.append(EncodedEntry::of(&[record(4)])).await, Err(JobLogError::Full));
    assert_eq!(log.append(EncodedEntry::of(&[record(4)])).await, Err(JobLogError::Full));
    assert_eq!(*log.last().borrow(), 2);
    let snapshot = QueueSnapshot { applied: 2, jobs: Vec::new(), batches: Vec::new() };
    assert_eq!(log.save(snapshot).await, Err(JobLogError::Full), "the log is not replaced");
    full.store(false, Ordering::SeqCst);
    let first = log.append(EncodedEntry::of(&[record(5)])).await.unwrap();
    let stored = log.read(0, 10).await.unwrap();
    assert_eq!(stored[..2], [(1, vec![record(1), record(2)]), (2, vec![record(3)])]);
    assert_eq!(stored.last(), Some(&(first, vec![record(5)])));
    let sequences: Vec<_> = stored.iter().map(|(sequence, _)| *sequence).collect();
    assert_eq!(sequences, (1..=first).collect::<Vec<_>>(), "no gaps");
}

#[tokio::test]
async fn another_format_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    {
        let database = Database::create(&path).unwrap();
        let txn = database.begin_write().unwrap();
        txn.open_table(META).unwrap().insert("format", 9).unwrap();
        txn.commit().unwrap();
    }
    let error = EmbeddedJobLog::open(&path).await.unwrap_err().to_string();
    assert!(error.ends_with("the file has format 9; this version reads format 1"), "{error}");
    std::fs::write(&path, "something else").unwrap();
    assert!(EmbeddedJobLog::open(&path).await.is_err());
}
