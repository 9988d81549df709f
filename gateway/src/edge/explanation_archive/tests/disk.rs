//! Directory of the explanations that others change: files of another kind, and deleted files.

use super::*;
use crate::edge::explanation_archive::lock::DirectoryLock;
use crate::edge::explanation_archive::reading::{READ_BYTES_MAX, content};
use rustix::fs::{CWD, Mode, mkfifoat};
use std::os::unix::fs::symlink;

/// File of this process number, which is begun now.
fn file(process: u64) -> ArchiveFile {
    ArchiveFile { began_ms: now_ms(), process, format: 1 }
}

fn fifo(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

#[tokio::test]
async fn directories_fifos_and_links_with_the_name_of_a_file_do_not_disturb_lookups_and_searches() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    let path = |process| dir.path().join(file(process).name());
    fs::create_dir(path(1)).unwrap();
    fifo(&path(2));
    symlink("/dev/zero", path(3)).unwrap();
    let names: Vec<_> = list(dir.path()).unwrap().into_iter().map(|it| it.file.process).collect();
    assert!(names.len() == 1 && !(1..=3).contains(&names[0]), "{names:?}");
    let found = found(&archive, RequestFilterV1::default()).await;
    assert_eq!((ids(&found), found.problem.as_deref()), (vec!["one"], None));
    assert_eq!(archive.find(ReadCaller::Operations, "two".to_owned()).await.unwrap(), None);
}

#[test]
fn a_file_that_was_replaced_since_it_was_listed_is_an_error_and_nothing_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let listed = FileOnDisk { file: file(1), bytes: 100 };
    let path = dir.path().join(listed.file.name());
    assert_eq!(content(dir.path(), &listed).unwrap(), None, "it was deleted");
    fs::create_dir(&path).unwrap();
    let problem = content(dir.path(), &listed).unwrap_err().to_string();
    assert!(problem.contains("is not a regular file; move it"), "{problem}");
    fs::remove_dir(&path).unwrap();
    fifo(&path);
    let problem = content(dir.path(), &listed).unwrap_err().to_string();
    assert!(problem.contains(&listed.file.name()), "{problem}");
    fs::remove_file(&path).unwrap();
    symlink("/dev/zero", &path).unwrap();
    content(dir.path(), &listed).unwrap_err();
}

#[test]
fn a_file_is_read_up_to_the_limit_of_its_size() {
    let dir = tempfile::tempdir().unwrap();
    // What was appended since it was listed is read as well.
    let listed = FileOnDisk { file: file(1), bytes: 1 };
    let opened = fs::File::create(dir.path().join(listed.file.name())).unwrap();
    opened.set_len(READ_BYTES_MAX).unwrap();
    let read = content(dir.path(), &listed).unwrap().unwrap();
    assert_eq!(read.len() as u64, READ_BYTES_MAX);
    opened.set_len(READ_BYTES_MAX + 1).unwrap();
    let problem = content(dir.path(), &listed).unwrap_err().to_string();
    let (bytes, limit) = ((READ_BYTES_MAX + 1).to_string(), READ_BYTES_MAX.to_string());
    assert!(problem.contains(&bytes) && problem.contains(&limit) && problem.contains("move it"), "{problem}");
}

#[test]
fn a_deleted_or_moved_file_or_directory_is_created_again_with_the_next_batch() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("explanations");
    let (config, shared) = (config(&dir), Arc::<Shared>::default());
    let mut writer = ArchiveWriter::new(&config, &Arc::new(Catalogue::builtin()), 1, shared.clone());
    let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
    let write = |writer: &mut ArchiveWriter, id: &str| {
        queue.send(KeptRequest { request: failed_over(id), reason: KeptReason::FailedOver }).unwrap();
        assert!(writer.write_batch(&requests));
        newest(&dir, id, Instant::now() + TIMEOUT).unwrap().is_some()
    };
    let lost = || shared.counts.lost.of(ExplanationLoss::Disk).get();
    assert!(write(&mut writer, "one") && write(&mut writer, "two"));
    assert_eq!(list(&dir).unwrap().len(), 1, "both are in the same file");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    let mode_at_start = mode(&dir);
    fs::remove_file(dir.join(list(&dir).unwrap()[0].file.name())).unwrap();
    assert!(write(&mut writer, "after the file was deleted"));
    fs::remove_dir_all(&dir).unwrap();
    assert!(write(&mut writer, "after the directory was deleted"));
    assert_eq!(mode(&dir), mode_at_start);
    assert_eq!(mode(&dir.join(list(&dir).unwrap()[0].file.name())) & 0o777, 0o600);
    fs::rename(&dir, parent.path().join("elsewhere")).unwrap();
    assert!(write(&mut writer, "after the directory was moved"));
    assert_eq!((shared.counts.written.get(), lost()), (5, 0));
    // A file where the directory was.
    fs::remove_dir_all(&dir).unwrap();
    fs::write(&dir, "").unwrap();
    queue.send(KeptRequest { request: failed_over("lost"), reason: KeptReason::FailedOver }).unwrap();
    assert!(writer.write_batch(&requests));
    assert_eq!((shared.counts.written.get(), lost(), shared.is_failing.load(Relaxed)), (5, 1, true));
    fs::remove_file(&dir).unwrap();
    writer.retry_at = None;
    assert!(write(&mut writer, "the last"));
    assert!(!shared.is_failing.load(Relaxed));
}

#[tokio::test]
async fn a_second_gateway_with_the_same_directory_starts_only_if_it_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let (config, catalogue) = (config(dir.path()), Arc::new(Catalogue::builtin()));
    let first = start(&config);
    let second = ExplanationArchive::start(&config, &catalogue, false);
    assert!(matches!(second, Err(ArchiveStartError::InUse)));
    let next = ExplanationArchive::start(&config, &catalogue, true).unwrap();
    first.release_directory();
    // The first one finishes its requests.
    first.record(&failed_over("one"));
    next.record(&failed_over("two"));
    first.finish(TIMEOUT).await;
    // Now only the next one can hold the lock.
    let begun = Instant::now();
    while DirectoryLock::new(dir.path()).acquire().unwrap() {
        assert!(begun.elapsed() < TIMEOUT, "the next one does not get the lock");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(ExplanationArchive::start(&config, &catalogue, false).is_err());
    next.finish(TIMEOUT).await;
    assert_eq!(ids(&found(&next, RequestFilterV1::default()).await), ["one", "two"]);
    start(&config).finish(TIMEOUT).await;
}

#[tokio::test]
async fn a_gateway_that_drains_releases_the_directory_before_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    assert!(!DirectoryLock::new(dir.path()).acquire().unwrap());
    archive.release_directory();
    let begun = Instant::now();
    while !DirectoryLock::new(dir.path()).acquire().unwrap() {
        assert!(begun.elapsed() < TIMEOUT, "the lock is not released");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    assert_eq!(ids(&found(&archive, RequestFilterV1::default()).await), ["one"]);
}

#[test]
fn a_directory_that_was_deleted_is_locked_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("explanations");
    let catalogue = Arc::new(Catalogue::builtin());
    let mut writer = ArchiveWriter::new(&config(&dir), &catalogue, 1, Arc::default());
    let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
    let write = |writer: &mut ArchiveWriter| {
        queue.send(KeptRequest { request: failed_over("one"), reason: KeptReason::FailedOver }).unwrap();
        writer.write_batch(&requests)
    };
    assert!(writer.lock.acquire().unwrap());
    write(&mut writer);
    assert!(writer.lock.is_held());
    fs::remove_dir_all(&dir).unwrap();
    write(&mut writer);
    writer.lock.keep(Instant::now());
    assert!(writer.lock.is_held() && !DirectoryLock::new(&dir).acquire().unwrap());
}
