//! Chains that rotate, close, are torn, and encounter a failing disk; the audit reads each afterwards.

mod commits;

use super::entries::POLICIES_MAX;
use super::*;
use crate::events::{FinishedRequest, ResolvedRequest};
use crate::metrics::{EndpointLabel, RequestOutcome};
use crate::receipts::{audit, files_in};
use gateway_core::receipt::PseudonymKey;
use gateway_core::receipt::audit::{AuditOptions, Kind, Report};
use gateway_core::tenant::Cost;
use gateway_core::trail::{AttemptCause, AttemptEnd, PolicyVersion, Trail};
use regions::catalogue::Catalogue;
use regions::residency::ResidencyPolicy;
use regions::route::Generation;
use std::sync::atomic::AtomicU64;

/// Number of the next attempt.
static KEYS: AtomicU64 = AtomicU64::new(1);

struct Fixture {
    dir: tempfile::TempDir,
    catalogue: Catalogue,
    shared: Arc<Shared>,
    config: ReceiptsConfig,
}

impl Fixture {
    fn new(file_bytes: u64) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let key = PseudonymKey::new(b"0123456789abcdef").unwrap();
        let config = ReceiptsConfig { dir: dir.path().join("r"), key, required: false, queue: 4, file_bytes };
        Fixture { dir, catalogue: Catalogue::builtin(), shared: Arc::default(), config }
    }

    fn open(&self) -> Writer {
        let location = "aws/us-east-1".parse().unwrap();
        let regions = self.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
        Writer::open(&self.config, Role::Edge, &location, regions, 7, self.shared.clone()).unwrap()
    }

    /// Returns a request of `attempts` attempts under this policy.
    fn finished(&self, request: &str, attempts: u32, residency: &str) -> WriterMessage {
        let residency: ResidencyPolicy = residency.parse().unwrap();
        let allowed = residency.permitted(&self.catalogue);
        let region = allowed.iter().next().unwrap();
        let arrived = Instant::now();
        let mut trail = Trail::default();
        for _ in 0..attempts {
            let attempt =
                trail.began(region, None, AttemptCause::First, KEYS.fetch_add(1, Ordering::Relaxed), arrived);
            trail.ended(attempt, AttemptEnd::Responded { status: 200 }, arrived + Duration::from_millis(1));
        }
        WriterMessage::Finished(Arc::new(FinishedRequest {
            id: request.to_owned(),
            arrived,
            at_ms: 5,
            tls_ended_here: true,
            endpoint: EndpointLabel::OTHER,
            outcome: RequestOutcome::Shutdown,
            tenant: Some("docs".parse().unwrap()),
            trail,
            routed_at: None,
            served_by: None,
            tokens: None,
            total: Duration::from_millis(1),
            resolved: Some(ResolvedRequest {
                deployment: "minilm".parse().unwrap(),
                cost: Cost { inputs: 1, tokens: 1 },
                policy: Arc::new(PolicyVersion {
                    generation: Generation { epoch: 1, number: 2 },
                    residency: Residency::of(&residency),
                    allowed,
                }),
            }),
            receipt: None,
            trace: None,
        }))
    }

    fn files(&self) -> Vec<PathBuf> {
        files_in(std::slice::from_ref(&self.config.dir)).unwrap()
    }

    fn report(&self) -> Report {
        audit(&self.files(), &self.catalogue, AuditOptions::default(), || {}).unwrap()
    }

    #[track_caller]
    fn check(&self, attempts: u64, expected: &[(Kind, u64)]) {
        let report = self.report();
        let kinds: Vec<_> = report.counts.iter().map(|(kind, n)| (*kind, *n)).collect();
        assert_eq!((report.attempts, kinds), (attempts, expected.to_vec()), "{report:#?}");
    }
}

#[test]
fn a_chain_continues_over_files_and_restarts_and_passes_the_audit() {
    let fixture = Fixture::new(4_000);
    for _ in 0..3 {
        let mut writer = fixture.open();
        for number in 0..20 {
            let policy = ["eu", "de & eu"][number % 2];
            writer.write(&mut vec![fixture.finished(&format!("r{number}"), 2, policy)]);
        }
        writer.close();
    }
    assert!(fixture.files().len() > 6, "{:?}", fixture.files());
    fixture.check(120, &[]);
    let report = fixture.report();
    assert_eq!(report.chains.len(), 1);
    assert!(report.chains[0].closed, "{report:#?}");
    let text: String = fixture.files().iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    assert!(!text.contains("docs"), "the tenant is not named");
    assert!(text.contains("\"tls\":\"aws/us-east-1\"") && text.contains("\"generation\":\"1.2\""), "{text}");
}

#[test]
fn a_torn_last_line_is_truncated_and_reported() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 1, "eu")]);
    drop(writer);
    let file = fixture.files().pop().unwrap();
    let whole = fs::read(&file).unwrap();
    // Any part of the last line may have reached the disk.
    let last_line = whole[..whole.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
    fs::write(&file, &whole[..last_line + 70]).unwrap();
    fixture.open().close();
    assert_eq!(fs::read(&file).unwrap(), &whole[..last_line]);
    fixture.check(0, &[(Kind::UncleanEnd, 1)]);
    let message = &fixture.report().findings[0].message;
    assert!(message.contains("70 bytes of an incomplete line"), "{message}");
}

#[test]
fn a_file_without_a_complete_line_is_created_again() {
    let fixture = Fixture::new(1 << 20);
    fixture.open().close();
    let first = fixture.files().pop().unwrap();
    let next = first.to_str().unwrap().replace("00000001.log", "00000002.log");
    fs::write(&next, "0123 {\"ki").unwrap();
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 1, "eu")]);
    writer.close();
    assert_eq!(fixture.files(), [first, PathBuf::from(next)]);
    fixture.check(1, &[]);
}

#[test]
fn a_chain_that_was_tampered_with_is_left_unchanged() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 1, "eu")]);
    writer.close();
    let file = fixture.files().pop().unwrap();
    let tampered = fs::read_to_string(&file).unwrap().replace("\"took_us\":1000", "\"took_us\":1001");
    fs::write(&file, &tampered).unwrap();
    fixture.open().close();
    assert_eq!(fs::read_to_string(&file).unwrap(), tampered);
    let report = fixture.report();
    assert_eq!(report.chains.len(), 2, "{report:#?}");
    fixture.check(1, &[(Kind::BrokenChain, 1)]);
}

#[test]
fn two_processes_in_one_folder_have_a_chain_each() {
    let fixture = Fixture::new(1 << 20);
    let (mut old, mut new) = (fixture.open(), fixture.open());
    assert_ne!(old.chain(), new.chain());
    new.write(&mut vec![fixture.finished("new", 1, "eu")]);
    old.write(&mut vec![fixture.finished("old", 1, "eu")]);
    let last = old.chain().to_owned();
    old.close();
    // If both began in the same millisecond, their random suffixes decide which sorts last.
    let newest = new.chain().max(&last).to_owned();
    new.close();
    fixture.check(2, &[]);
    assert_eq!(fixture.open().chain(), newest, "the newest is continued");
}

#[test]
fn failed_writes_become_a_gap_at_the_next_successful_write() {
    let fixture = Fixture::new(1);
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 1, "eu")]);
    // No file can be created in a missing directory.
    let away = fixture.dir.path().join("away");
    fs::rename(&fixture.config.dir, &away).unwrap();
    for request in ["b", "c"] {
        writer.write(&mut vec![fixture.finished(request, 3, "eu")]);
        assert!(fixture.shared.failing());
    }
    assert_eq!(
        (fixture.shared.counts.written.get(), fixture.shared.counts.lost.of(GapReason::Disk).get()),
        (1, 6)
    );
    fs::rename(&away, &fixture.config.dir).unwrap();
    writer.write(&mut vec![fixture.finished("d", 1, "eu")]);
    assert!(!fixture.shared.failing());
    writer.close();
    fixture.check(2, &[(Kind::Gap, 1)]);
    assert_eq!(fixture.report().missing, 6, "written and missing receipts add up");
}

#[test]
fn a_partial_write_is_truncated() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 1, "eu")]);
    // Like a full disk: half a line is written, and the write fails. /dev/full fails every write.
    let file = writer.file.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
    writer.write(&mut vec![fixture.finished("b", 1, "eu"), fixture.finished("c", 1, "de")]);
    assert!(fixture.shared.failing() && writer.dirty);
    writer.file = file;
    writer.file.as_mut().unwrap().write_all(b"half a li").unwrap();
    writer.write(&mut vec![fixture.finished("d", 1, "de")]);
    writer.close();
    fixture.check(2, &[(Kind::Gap, 1)]);
    assert_eq!(fixture.report().missing, 2);
}

#[test]
fn receipts_that_failed_to_sync_become_a_gap_and_a_new_file_is_created() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    writer.write(&mut vec![fixture.finished("a", 2, "eu")]);
    // A pipe cannot be synced.
    let (_reader, pipe) = io::pipe().unwrap();
    writer.file = Some(File::from(std::os::fd::OwnedFd::from(pipe)));
    writer.sync();
    assert!(fixture.shared.failing());
    writer.write(&mut vec![fixture.finished("b", 1, "eu")]);
    writer.close();
    fixture.check(3, &[(Kind::Gap, 1)]);
    assert_eq!((fixture.report().missing, fixture.files().len()), (2, 2));
}

#[tokio::test]
async fn a_full_queue_never_blocks_and_its_lost_receipts_become_a_gap() {
    let fixture = Fixture::new(1 << 20);
    let shared = fixture.shared.clone();
    let (queue, mut messages) = mpsc::channel(fixture.config.queue);
    let recorder = super::super::Recorder {
        queue,
        shared: shared.clone(),
        chain: "c".into(),
        required: true,
        process: 7,
        numbers: Arc::default(),
        writer: std::thread::current(),
    };
    let slot = recorder.reserve();
    assert!(slot.is_some());
    for number in 0..5 {
        recorder.record(fixture.finished(&number.to_string(), 2, "eu"), None);
    }
    assert!(recorder.reserve().is_none(), "all slots are taken");
    assert_eq!((recorder.queue.capacity(), shared.counts.lost.of(GapReason::QueueFull).get()), (0, 4));
    recorder.record(fixture.finished("reserved", 1, "eu"), slot);
    drop(recorder);
    let mut writer = fixture.open();
    let mut batch = Vec::new();
    messages.recv_many(&mut batch, 100).await;
    writer.write(&mut batch);
    writer.close();
    fixture.check(7, &[(Kind::Gap, 1)]);
    assert_eq!(fixture.report().missing, 4);
}

#[test]
fn a_policy_is_written_once_per_file_and_again_after_the_cache_was_cleared() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    for _ in 0..3 {
        writer.write(&mut vec![fixture.finished("a", 1, "eu"), fixture.finished("b", 1, "anywhere")]);
    }
    let policies = |fixture: &Fixture| {
        let text = fs::read_to_string(fixture.files().pop().unwrap()).unwrap();
        text.lines().filter(|line| line.contains("\"kind\":\"policy\"")).count()
    };
    assert_eq!(policies(&fixture), 2);
    writer.policies_known = POLICIES_MAX;
    writer.write(&mut vec![
        fixture.finished("c", 1, "eu"),
        fixture.finished("d", 1, "de"),
        fixture.finished("e", 1, "eu"),
    ]);
    assert_eq!(policies(&fixture), 4, "the cache was cleared at the second policy");
    writer.close();
    fixture.check(9, &[]);
}
