mod disk;

use super::reading::{newest, search};
use super::writing::line;
use super::*;
use crate::metrics::EndpointLabel;
use crate::receipts::now_ms;
use gateway_core::trail::{AttemptCause, Trail};
use scheduler_api::requests::{FoundRequestsV1, RequestFilter, RequestFilterV1};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

const TIMEOUT: Duration = Duration::from_secs(20);

fn config(dir: &Path) -> ExplanationsConfig {
    let rules =
        ArchiveRules { bytes_max: 32 << 20, hours: 1, slow: Duration::from_secs(1), sample_ratio: 0.0 };
    ExplanationsConfig { dir: dir.to_owned(), rules }
}

fn start(config: &ExplanationsConfig) -> ExplanationArchive {
    ExplanationArchive::start(config, &Arc::new(Catalogue::builtin()), false).unwrap()
}

/// Request that was rejected by a fault of its client.
fn rejected(id: &str) -> Arc<FinishedRequest> {
    let mut request = Arc::into_inner(failed_over(id)).unwrap();
    request.trail = Trail::default();
    request.outcome = RequestOutcome::Complete { status: 400, code: None };
    Arc::new(request)
}

/// Request that was sent to two regions.
fn failed_over(id: &str) -> Arc<FinishedRequest> {
    let (catalogue, now) = (Catalogue::builtin(), Instant::now());
    let region = |id: &str| catalogue.index_of(&id.parse().unwrap()).unwrap();
    let mut trail = Trail::default();
    trail.began(region("aws/us-east-1"), None, AttemptCause::First, 0, now);
    trail.began(region("gcp/europe-west4"), None, AttemptCause::Retry, 0, now);
    trail.close(now);
    Arc::new(FinishedRequest {
        id: id.to_owned(),
        arrived: now,
        at_ms: now_ms(),
        tls_ended_here: false,
        endpoint: EndpointLabel::OTHER,
        outcome: RequestOutcome::Complete { status: 200, code: None },
        tenant: Some("docs".parse().unwrap()),
        trail,
        routed_at: None,
        served_by: None,
        tokens: None,
        total: Duration::from_millis(5),
        resolved: None,
        receipt: None,
        trace: None,
    })
}

async fn found(archive: &ExplanationArchive, wire: RequestFilterV1) -> FoundRequestsV1 {
    archive.search(ReadCaller::Operations, wire.try_into().unwrap()).await.unwrap().0
}

fn ids(found: &FoundRequestsV1) -> Vec<&str> {
    let mut ids: Vec<_> = found.requests.iter().filter_map(|request| request.id.as_deref()).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn a_failed_over_request_is_found_by_its_regions_and_explained_by_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(&dir.path().join("below"));
    let archive = start(&config);
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    let next = start(&config);
    let by_region =
        RequestFilterV1 { region: Some("aws/us-east-1".to_owned()), ..RequestFilterV1::default() };
    assert_eq!(ids(&found(&next, by_region).await), ["one"]);
    let explanation = next.find(ReadCaller::Operations, "one".to_owned()).await.unwrap().unwrap();
    assert_eq!(explanation["kept"], "failed_over");
    assert_eq!(explanation["attempts"].as_array().map(Vec::len), Some(2));
    assert_eq!(next.find(ReadCaller::Hub, "two".to_owned()).await.unwrap(), None);
    assert_eq!(archive.scrape().counts.written.get(), 1);
    next.finish(TIMEOUT).await;
}

#[tokio::test]
async fn a_file_that_ends_within_a_line_is_readable_and_the_next_process_begins_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let archive = start(&config);
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    // As a process leaves it that is killed during a write.
    let file = dir.path().join(list(dir.path()).unwrap()[0].file.name());
    let line = fs::read(&file).unwrap();
    OpenOptions::new().append(true).open(&file).unwrap().write_all(&line[..line.len() / 2]).unwrap();
    let next = start(&config);
    next.record(&failed_over("two"));
    next.finish(TIMEOUT).await;
    assert_eq!(ids(&found(&next, RequestFilterV1::default()).await), ["one", "two"]);
    assert_eq!(list(dir.path()).unwrap().len(), 2);
}

#[tokio::test]
async fn a_file_of_a_later_version_is_left_alone_and_a_search_that_needs_it_names_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let later = ArchiveFile { began_ms: now_ms() - 60_000, process: 1, format: 2 };
    let path = dir.path().join(later.name());
    fs::write(&path, "another format").unwrap();
    let archive = start(&config);
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    let explained = archive.find(ReadCaller::Operations, "one".to_owned()).await.unwrap();
    assert_eq!(explained.unwrap()["kept"], "failed_over", "files of this version are read");
    let searched = found(&archive, RequestFilterV1::default()).await;
    assert_eq!(ids(&searched), ["one"]);
    let missing = archive.find(ReadCaller::Operations, "two".to_owned()).await;
    for problem in [searched.problem.unwrap(), missing.unwrap_err().to_string()] {
        for part in ["has format 2", "reads format 1", env!("CARGO_PKG_VERSION")] {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }
    // Requests that have ended an hour after the file was begun are in others.
    let since_ms = Some(later.began_ms + 2 * 3_600_000);
    let filter = RequestFilterV1 { since_ms, ..RequestFilterV1::default() };
    assert_eq!(ids(&found(&archive, filter).await), [""; 0]);
    assert_eq!(fs::read(&path).unwrap(), b"another format");
}

#[tokio::test]
async fn a_disk_that_takes_nothing_is_counted_and_requests_do_not_wait() {
    let dir = tempfile::tempdir().unwrap();
    // A file where the directory should be.
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    let archive = start(&config(&path));
    (0..10).for_each(|number| archive.record(&failed_over(&number.to_string())));
    archive.finish(TIMEOUT).await;
    assert_eq!(archive.shared.counts.lost.of(ExplanationLoss::Disk).get(), 10);
    assert!(archive.scrape().failing);
}

#[tokio::test]
async fn a_full_queue_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut archive = start(&config(dir.path()));
    archive.finish(TIMEOUT).await;
    // Nothing empties this queue.
    let (queue, _requests) = mpsc::sync_channel(1);
    archive.queue = queue;
    (0..3).for_each(|number| archive.record(&failed_over(&number.to_string())));
    assert_eq!(archive.shared.counts.lost.of(ExplanationLoss::QueueFull).get(), 2);
}

#[tokio::test]
async fn the_oldest_files_are_deleted_at_the_budget_and_a_tenant_does_not_exceed_its_quota() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    let old = ArchiveFile { began_ms: now_ms() - 60_000, process: 1, format: 1 };
    fs::write(dir.path().join(old.name()), vec![b'x'; 65_536]).unwrap();
    let request = failed_over("one");
    let length = line(&request, KeptReason::FailedOver, &Catalogue::builtin()).len() as u64 + 1;
    // Two lines fit into the quota of the tenant: half of the share of the only hour.
    config.rules.bytes_max = 2 * 2 * length - 2;
    let archive = start(&config);
    (0..5).for_each(|_| archive.record(&request));
    archive.finish(TIMEOUT).await;
    let counts = &archive.shared.counts;
    assert_eq!((counts.written.get(), counts.lost.of(ExplanationLoss::Quota).get()), (2, 3));
    let files = list(dir.path()).unwrap();
    assert!(files.len() == 1 && files[0].file != old, "{files:?}");
    assert_eq!(archive.scrape().bytes, files[0].bytes);
}

#[tokio::test]
async fn a_request_without_a_reason_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    let mut request = Arc::into_inner(failed_over("one")).unwrap();
    request.trail = Trail::default();
    archive.record(&Arc::new(request));
    archive.finish(TIMEOUT).await;
    assert_eq!(archive.scrape().counts.written.get(), 0);
}

#[tokio::test]
async fn rejected_requests_leave_half_of_the_queue_to_failed_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut archive = start(&config(dir.path()));
    archive.finish(TIMEOUT).await;
    // Nothing empties this queue.
    let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
    archive.queue = queue;
    let lost = || archive.shared.counts.lost.of(ExplanationLoss::QueueFull).get();
    let rejected = rejected("rejected");
    (0..QUEUE_AT_WILL_MAX + 3).for_each(|_| archive.record(&rejected));
    assert_eq!(lost(), 3);
    let failed_over = failed_over("failed-over");
    (0..QUEUE_MAX - QUEUE_AT_WILL_MAX).for_each(|_| archive.record(&failed_over));
    assert_eq!(lost(), 3);
    archive.record(&failed_over);
    assert_eq!(lost(), 4, "the queue is full");
    // The writer frees their slots.
    let catalogue = Arc::new(Catalogue::builtin());
    let mut writer = ArchiveWriter::new(&archive.config, &catalogue, 1, archive.shared.clone());
    while !writer.write_batch(&requests) {}
    assert_eq!(archive.shared.queued_at_will.load(Relaxed), 0);
    archive.record(&rejected);
    assert_eq!(lost(), 4);
}

#[test]
fn a_failed_write_uses_no_quota_and_nothing_is_rendered_until_the_next_attempt() {
    let dir = tempfile::tempdir().unwrap();
    // A file where the directory should be.
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    let (mut config, catalogue) = (config(&path), Arc::new(Catalogue::builtin()));
    let request = failed_over("one");
    let length = line(&request, KeptReason::FailedOver, &catalogue).len() as u64 + 1;
    // Two lines fit into the quota of the tenant: half of the share of the only hour.
    config.rules.bytes_max = 2 * 2 * length - 2;
    let shared: Arc<Shared> = Arc::default();
    let mut writer = ArchiveWriter::new(&config, &catalogue, 1, shared.clone());
    let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
    let write = |writer: &mut ArchiveWriter, count: usize| {
        for _ in 0..count {
            queue.send(KeptRequest { request: request.clone(), reason: KeptReason::FailedOver }).unwrap();
        }
        assert!(writer.write_batch(&requests));
        let lost = |reason| shared.counts.lost.of(reason).get();
        (shared.counts.written.get(), lost(ExplanationLoss::Disk), lost(ExplanationLoss::Quota))
    };
    assert_eq!(write(&mut writer, 2), (0, 2, 0));
    // With a rendered line, the quota would be checked.
    assert_eq!(write(&mut writer, 5), (0, 7, 0));
    fs::remove_file(&path).unwrap();
    writer.retry_at = None;
    assert_eq!(write(&mut writer, 3), (2, 7, 1));
}

/// Paused clock: it advances when all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_read_for_a_hub_does_not_delay_the_operations_port_and_a_later_one_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    let _reading = archive.permits.of(ReadCaller::Hub).acquire_owned().await.unwrap();
    assert_eq!(archive.find(ReadCaller::Operations, "one".to_owned()).await.unwrap(), None);
    let began = tokio::time::Instant::now();
    let busy = archive.find(ReadCaller::Hub, "one".to_owned()).await;
    assert!(matches!(busy, Err(ArchiveError::Busy)), "{busy:?}");
    assert!((reading::WAIT_MAX..2 * reading::WAIT_MAX).contains(&began.elapsed()));
    archive.finish(TIMEOUT).await;
}

#[tokio::test]
async fn a_read_that_reaches_its_limit_says_what_it_has_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    let old = ArchiveFile { began_ms: 1_764_144_000_000, process: 1, format: 1 };
    fs::write(dir.path().join(old.name()), "").unwrap();
    let filter: RequestFilter = RequestFilterV1::default().try_into().unwrap();
    let (now, later) = (Instant::now(), Instant::now() + TIMEOUT);
    let one_file = search(dir.path(), &filter, (1, later)).unwrap().0;
    assert_eq!((ids(&one_file), one_file.has_more), (vec!["one"], true));
    assert!(one_file.problem.unwrap().ends_with("search again until 2025-11-26T09:00:00Z"));
    let all = search(dir.path(), &filter, (u64::MAX, later)).unwrap().0;
    assert_eq!((ids(&all), all.has_more, all.problem.as_deref()), (vec!["one"], false, None));
    let none = search(dir.path(), &filter, (u64::MAX, now)).unwrap().0;
    assert!(none.requests.is_empty() && none.has_more && none.problem.is_some());
    let found = newest(dir.path(), "one", now);
    assert!(matches!(found, Err(ArchiveError::Incomplete { .. })), "{found:?}");
    assert!(newest(dir.path(), "one", later).unwrap().is_some());
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_a_problem_and_the_others_are_searched() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    // Larger than a file of a gateway.
    let broken = ArchiveFile { began_ms: now_ms() - 1, process: 1, format: 1 };
    let file = fs::File::create(dir.path().join(broken.name())).unwrap();
    file.set_len(reading::READ_BYTES_MAX + 1).unwrap();
    let found = found(&archive, RequestFilterV1::default()).await;
    assert_eq!((ids(&found), found.has_more), (vec!["one"], true));
    assert!(found.problem.unwrap().contains("cannot be read"));
    assert!(archive.find(ReadCaller::Hub, "one".to_owned()).await.unwrap().is_some());
    let unknown = archive.find(ReadCaller::Hub, "two".to_owned()).await;
    assert!(matches!(unknown, Err(ArchiveError::Disk(_))), "{unknown:?}");
}

#[tokio::test]
async fn files_are_readable_by_their_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let archive = start(&config(dir.path()));
    archive.record(&failed_over("one"));
    archive.finish(TIMEOUT).await;
    let file = dir.path().join(list(dir.path()).unwrap()[0].file.name());
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
}
