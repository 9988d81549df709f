use super::*;
use crate::metrics::EndpointLabel;
use gateway_core::trail::{AttemptCause, Trail};
use scheduler_api::requests::{FoundRequestsV1, RequestFilterV1};

const TIMEOUT: Duration = Duration::from_secs(20);

fn config(dir: &Path) -> ExplanationsConfig {
    let rules =
        ArchiveRules { bytes_max: 32 << 20, hours: 1, slow: Duration::from_secs(1), sample_ratio: 0.0 };
    ExplanationsConfig { dir: dir.to_owned(), rules }
}

fn start(config: &ExplanationsConfig) -> ExplanationArchive {
    ExplanationArchive::start(config, &Arc::new(Catalogue::builtin())).unwrap()
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
    archive.search(wire.try_into().unwrap()).await.unwrap().0
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
    let explanation = next.find("one".to_owned()).await.unwrap().unwrap();
    assert_eq!(explanation["kept"], "failed_over");
    assert_eq!(explanation["attempts"].as_array().map(Vec::len), Some(2));
    assert_eq!(next.find("two".to_owned()).await.unwrap(), None);
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
    let old = ArchiveFile { began_ms: now_ms() - 60_000, process: 1 };
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
