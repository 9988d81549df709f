use super::*;
use jobs_core::job::UnixMillis;
use redb::StorageBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

/// File of a process that ends after a number of operations: all later ones fail.
#[derive(Debug)]
struct EndingProcess(redb::backends::FileBackend, Arc<AtomicU64>);

impl EndingProcess {
    fn step(&self) -> io::Result<()> {
        let left = self.1.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| io::Error::other("the process has ended"))
    }
}

impl StorageBackend for EndingProcess {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.step()?;
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.step()?;
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let is_last = self.1.load(Ordering::SeqCst) == 1;
        self.step()?;
        if is_last {
            // It is torn.
            self.0.write(offset, &data[..data.len() / 2])?;
            return self.step();
        }
        self.0.write(offset, data)
    }
}

/// Opens a file for a process that ends after this many operations.
fn ending_after(operations: u64) -> Opener {
    let left = Arc::new(AtomicU64::new(operations));
    Box::new(move |path: &Path| {
        let options = std::fs::File::options().read(true).write(true).create(true).clone();
        let file = redb::backends::FileBackend::new(options.open(path)?)?;
        Ok(Database::builder().create_with_backend(EndingProcess(file, left.clone()))?)
    })
}

#[tokio::test]
async fn a_log_can_be_opened_after_its_process_has_ended_at_any_operation() {
    for operations in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut confirmed = Vec::new();
        if let Ok(log) = EmbeddedJobLog::start(path.clone(), ending_after(operations)).await {
            for number in 1..=3 {
                match log.append(EncodedEntry::of(&[record(number)])).await {
                    Ok(sequence) => confirmed.push((sequence, vec![record(number)])),
                    Err(_) => break,
                }
            }
        }
        let log = loop {
            match EmbeddedJobLog::open(&path).await {
                Ok(log) => break log,
                // The thread of the first one ends soon.
                Err(error) if error.to_string().contains("already open") => {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                Err(error) => panic!("after {operations} operations: {error}"),
            }
        };
        let stored = log.read(0, 10).await.unwrap();
        assert_eq!(stored[..confirmed.len()], confirmed, "after {operations} operations");
        if confirmed.len() == 3 {
            assert!(operations > 20, "{operations}");
            return;
        }
    }
}

#[tokio::test]
async fn a_damaged_file_is_an_error_and_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    {
        let log = EmbeddedJobLog::open(&path).await.unwrap();
        for number in 1..=50 {
            log.append(EncodedEntry::of(&[record(number)])).await.unwrap();
        }
    }
    let content = loop {
        // Its thread has ended when another one can open it.
        match EmbeddedJobLog::open(&path).await {
            Ok(_) => break std::fs::read(&path).unwrap(),
            Err(error) => assert!(error.to_string().contains("already open"), "{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    };
    let step = content.len() / 40;
    for (number, at) in (1..40).map(|part| (part, part * step)) {
        let mut flipped = content.clone();
        flipped[at..at + 64].iter_mut().for_each(|byte| *byte ^= 0xff);
        for (kind, damaged) in [("cut", &content[..at]), ("flipped", &flipped[..])] {
            let path = dir.path().join(format!("{kind}-{number}"));
            std::fs::write(&path, damaged).unwrap();
            let error = match EmbeddedJobLog::open(&path).await {
                Ok(log) => log.read(0, 100).await.err().map(|error| error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            let has_panicked = error.as_ref().is_some_and(|error| error.contains("thread has ended"));
            assert!(!has_panicked, "{kind} at {at}: {error:?}");
        }
    }
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
