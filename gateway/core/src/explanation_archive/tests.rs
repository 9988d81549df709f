use super::*;
use scheduler_api::requests::RequestFilterV1;
use serde_json::json;

const HOUR: u64 = FILE_PERIOD_MS;
const RULES: ArchiveRules =
    ArchiveRules { bytes_max: 4800, hours: 24, slow: Duration::from_secs(1), sample_ratio: 0.1 };

fn ended() -> EndedRequest {
    EndedRequest {
        is_failed: false,
        is_rejected: false,
        is_failed_over: false,
        is_sampled: false,
        total: Duration::from_millis(10),
    }
}

fn line(id: &str, at_ms: u64) -> serde_json::Value {
    json!({
        "id": id, "at_ms": at_ms, "kept": "failed_over", "is_restricted": false, "tenant": "docs", "deployment": "minilm",
        "region": "gcp/europe-west4", "status": 200, "outcome": "ok", "total_ms": 7.5, "regions": [{"region": "other/one"}],
        "attempts": [{"region": "aws/us-east-1", "end": "unreachable"}, {"region": "gcp/europe-west4", "end": "ok"}],
    })
}

fn filter(wire: RequestFilterV1) -> RequestFilter {
    wire.try_into().unwrap()
}

fn search(content: &str, wire: RequestFilterV1) -> Vec<String> {
    let mut search = ArchiveSearch::default();
    search.read(content.as_bytes(), &filter(wire));
    search.end().0.requests.into_iter().filter_map(|request| request.id).collect()
}

#[test]
fn each_reason_keeps_a_request_and_the_first_one_counts() {
    let reason = |ended: EndedRequest, draw| RULES.reason(&ended, draw);
    assert_eq!(reason(ended(), 0.5), None);
    assert_eq!(reason(ended(), 0.09), Some(KeptReason::Sampled));
    assert_eq!(reason(EndedRequest { is_sampled: true, ..ended() }, 0.5), Some(KeptReason::Sampled));
    let rejected = EndedRequest { is_rejected: true, ..ended() };
    assert_eq!(reason(rejected, 0.5), Some(KeptReason::Rejected));
    let slow = EndedRequest { total: Duration::from_secs(1), ..rejected };
    assert_eq!(reason(slow, 0.5), Some(KeptReason::Slow));
    let failed_over = EndedRequest { is_failed_over: true, ..slow };
    assert_eq!(reason(failed_over, 0.5), Some(KeptReason::FailedOver));
    let failed = EndedRequest { is_failed: true, ..failed_over };
    assert_eq!(reason(failed, 0.5), Some(KeptReason::Failed));
}

fn docs(bytes: u64) -> TenantBytes {
    TenantBytes::from([(Some("docs".parse().unwrap()), bytes)])
}

#[test]
fn a_tenant_has_half_of_an_hour_and_a_new_one_each_hour() {
    let (mut quota, tenant) = (HourlyQuota::default(), "docs".parse::<TenantId>().unwrap());
    let admits = |quota: &mut HourlyQuota, tenant, reason, now| {
        quota.admits(&RULES, (tenant, reason), &TenantBytes::new(), now)
    };
    // 200 bytes an hour for all.
    quota.count(docs(49));
    assert!(admits(&mut quota, Some(&tenant), KeptReason::Sampled, 0));
    quota.count(docs(1));
    assert!(!admits(&mut quota, Some(&tenant), KeptReason::Sampled, 0));
    assert!(!admits(&mut quota, Some(&tenant), KeptReason::Rejected, 0));
    assert!(admits(&mut quota, Some(&tenant), KeptReason::Failed, 0));
    quota.count(docs(50));
    assert!(!admits(&mut quota, Some(&tenant), KeptReason::Failed, HOUR - 1));
    assert!(admits(&mut quota, None, KeptReason::Failed, HOUR - 1), "others have theirs");
    assert!(admits(&mut quota, Some(&tenant), KeptReason::Failed, HOUR));
}

#[test]
fn lines_that_are_not_written_yet_count_for_their_batch_only() {
    let (mut quota, tenant) = (HourlyQuota::default(), "docs".parse::<TenantId>().unwrap());
    let mut admits = |batch| quota.admits(&RULES, (Some(&tenant), KeptReason::Failed), &batch, 0);
    assert!(admits(docs(99)));
    assert!(!admits(docs(100)));
    assert!(admits(TenantBytes::new()), "the batch was not written");
}

#[test]
fn a_file_has_one_hour_and_a_limited_size() {
    let file = ArchiveFile { began_ms: HOUR / 2, process: 1, format: 1 };
    assert!(!RULES.needs_next_file(&file, 10, HOUR - 1));
    assert!(RULES.needs_next_file(&file, 10, HOUR));
    assert!(RULES.needs_next_file(&file, FILE_BYTES_MAX, HOUR - 1));
    let name = file.name();
    assert_eq!(name, "explanations-0000001800000-0000000000000001.jsonl");
    assert_eq!(ArchiveFile::parse(&name), Some(file));
    for other in ["explanations-1-1.jsonl", "explanations-.jsonl", "receipts-1.log", "explanations"] {
        assert_eq!(ArchiveFile::parse(other), None, "{other}");
    }
}

#[test]
fn a_file_of_a_later_version_is_listed_and_rejected_with_both_versions() {
    let name = "explanations-0000001800000-0000000000000001.v2.jsonl";
    let file = ArchiveFile::parse(name).expect("it is listed, so that it is deleted when it is old");
    assert_eq!((file.name().as_str(), file.format), (name, 2));
    let problem = file.problem().expect("this version does not read it");
    for part in [name, "format 2", "format 1", env!("CARGO_PKG_VERSION")] {
        assert!(problem.contains(part), "{part} in {problem}");
    }
    assert_eq!(ArchiveFile { format: ARCHIVE_FORMAT, ..file }.problem(), None);
    for other in [".v1", ".v02", ".v", ".vx"] {
        assert_eq!(ArchiveFile::parse(&name.replace(".v2", other)), None, "{other}");
    }
}

#[test]
fn old_files_and_the_oldest_ones_beyond_the_budget_are_deleted_and_never_the_current_one() {
    let file = |hour: u64, bytes| FileOnDisk {
        file: ArchiveFile { began_ms: hour * HOUR, process: 0, format: 1 },
        bytes,
    };
    let surplus = |files: &[FileOnDisk], current: usize, now| {
        let surplus = RULES.surplus(files, files.get(current).map(|it| &it.file), now);
        surplus.into_iter().map(|file| file.began_ms / HOUR).collect::<Vec<_>>()
    };
    let small = [file(0, 10), file(1, 10), file(2, 10)];
    assert_eq!(surplus(&small, 2, 25 * HOUR - 1), [0; 0]);
    assert_eq!(surplus(&small, 2, 25 * HOUR), [0]);
    let large = [file(0, 2000), file(1, 2000), file(2, 2000)];
    assert_eq!(surplus(&large, 2, 3 * HOUR), [0]);
    assert_eq!(surplus(&[file(0, 9000)], 0, 100 * HOUR), [0; 0]);
}

#[test]
fn files_of_the_future_are_deleted_before_old_ones_beyond_the_budget() {
    let file = |hour: u64, bytes| FileOnDisk {
        file: ArchiveFile { began_ms: hour * HOUR, process: 0, format: 1 },
        bytes,
    };
    let files = [file(0, 2000), file(1, 2000), file(9, 2000)];
    let surplus = |now| {
        let surplus = RULES.surplus(&files, None, now);
        surplus.into_iter().map(|file| file.began_ms / HOUR).collect::<Vec<_>>()
    };
    assert_eq!(surplus(2 * HOUR), [9], "the others are within the budget then");
    assert_eq!(surplus(8 * HOUR), [0], "the clock may have been corrected");
    let current = ArchiveFile { began_ms: 9 * HOUR, process: 0, format: 1 };
    assert!(!RULES.surplus(&files, Some(&current), 2 * HOUR).contains(&current));
}

#[test]
fn every_condition_filters() {
    let content = format!("{}\n{}\n", line("one", 1000), line("two", 2000));
    let text = |text: &str| Some(text.to_owned());
    let found = |wire: RequestFilterV1| search(&content, wire);
    let all = RequestFilterV1::default;
    assert_eq!(found(all()), ["two", "one"]);
    let matching = [
        RequestFilterV1 { tenant: text("docs"), ..all() },
        RequestFilterV1 { deployment: text("minilm"), ..all() },
        RequestFilterV1 { region: text("gcp/europe-west4"), ..all() },
        RequestFilterV1 { region: text("aws/us-east-1"), ..all() },
        RequestFilterV1 { status: text("2xx"), ..all() },
        RequestFilterV1 { outcome: text("ok"), ..all() },
        RequestFilterV1 { kept: text("failed_over"), ..all() },
    ];
    for wire in matching {
        assert_eq!(found(wire.clone()).len(), 2, "{wire:?}");
    }
    let others = [
        RequestFilterV1 { tenant: text("doc"), ..all() },
        RequestFilterV1 { deployment: text("minilm-eu"), ..all() },
        // A candidate that it was not sent to.
        RequestFilterV1 { region: text("other/one"), ..all() },
        RequestFilterV1 { status: text("503"), ..all() },
        RequestFilterV1 { outcome: text("overloaded"), ..all() },
        RequestFilterV1 { kept: text("slow"), ..all() },
    ];
    for wire in others {
        assert_eq!(found(wire.clone()), [""; 0], "{wire:?}");
    }
    assert_eq!(found(RequestFilterV1 { since_ms: Some(2000), ..all() }), ["two"]);
    assert_eq!(found(RequestFilterV1 { until_ms: Some(2000), ..all() }), ["one"]);
}

#[test]
fn the_limit_keeps_the_newest_and_says_that_there_are_more() {
    let content = format!("{}\n{}\n", line("one", 1000), line("two", 2000));
    let read = |limit| {
        let mut search = ArchiveSearch::default();
        let filter = filter(RequestFilterV1 { limit: Some(limit), ..RequestFilterV1::default() });
        search.read(content.as_bytes(), &filter);
        let needs = search.needs(1500, &filter);
        let found = search.end().0;
        (needs, found.requests.len(), found.has_more)
    };
    assert_eq!(read(1), (false, 1, true));
    assert_eq!(read(2), (true, 2, false));
}

/// Otherwise a search for older requests, which continues at the last row, would miss some.
#[test]
fn the_newest_requests_are_those_that_arrived_last_and_not_those_that_ended_last() {
    // In the order of their ends, in two files; the first one took long.
    let newest = format!("{}\n{}\n", line("four", 4000), line("one", 1000));
    let older = format!("{}\n{}\n", line("two", 2000), line("three", 3000));
    let filter = filter(RequestFilterV1 { limit: Some(2), ..RequestFilterV1::default() });
    let mut search = ArchiveSearch::default();
    search.read(newest.as_bytes(), &filter);
    assert!(search.needs(3500, &filter));
    search.read(older.as_bytes(), &filter);
    assert!(!search.needs(2500, &filter) && search.needs(3001, &filter));
    let found = search.end().0;
    let ids: Vec<_> = found.requests.iter().filter_map(|request| request.id.as_deref()).collect();
    assert_eq!((ids, found.has_more), (vec!["four", "three"], true));
}

#[test]
fn a_search_that_was_not_completed_says_why() {
    let mut search = ArchiveSearch::default();
    search.set_problem("one");
    search.set_problem("two");
    let found = search.end().0;
    assert_eq!((found.problem.as_deref(), found.has_more), (Some("one"), true));
    assert_eq!(time_text(1_764_144_005_999), "2025-11-26T08:00:05Z");
}

#[test]
fn the_requests_of_a_file_have_ended_before_the_next_one_of_the_process_begins() {
    let file =
        |began_ms, process| FileOnDisk { file: ArchiveFile { began_ms, process, format: 1 }, bytes: 1 };
    let files = vec![file(100, 1), file(200, 2), file(300, 1)];
    let ends: Vec<_> = newest_first(files).into_iter().map(|(it, end)| (it.file.began_ms, end)).collect();
    assert_eq!(ends, [(300, 300 + HOUR), (200, 200 + HOUR), (100, 300)]);
}

#[test]
fn a_line_with_a_reason_of_a_newer_version_is_found() {
    let mut newer = line("newer", 1000);
    newer["kept"] = "throttled".into();
    assert_eq!(search(&newer.to_string(), RequestFilterV1::default()), ["newer"]);
    let kept = Some("failed_over".to_owned());
    assert_eq!(search(&newer.to_string(), RequestFilterV1 { kept, ..RequestFilterV1::default() }), [""; 0]);
    assert!(find(newer.to_string().as_bytes(), "newer").is_some());
}

#[test]
fn a_torn_line_is_skipped() {
    let torn = line("torn", 3000).to_string();
    let content = format!("{}\n{}", line("one", 1000), torn.split_at(torn.len() - 5).0);
    assert_eq!(search(&content, RequestFilterV1::default()), ["one"]);
    assert_eq!(find(content.as_bytes(), "torn"), None);
    assert!(find(content.as_bytes(), "one").is_some());
}

#[test]
fn the_newest_line_with_an_identifier_is_found_whatever_the_identifier_has() {
    let odd = r#"a"b\c"#;
    let mut other = line("other", 9);
    // A field of another object with the same text.
    other["regions"] = json!([{"id": "one"}]);
    let content = format!("{}\n{}\n{}\n{other}\n", line("one", 1), line("one", 2), line(odd, 3));
    let at = |id: &str| {
        let found = find(content.as_bytes(), id)?;
        serde_json::from_slice::<serde_json::Value>(found).unwrap()["at_ms"].as_u64()
    };
    assert_eq!((at("one"), at(odd), at("two")), (Some(2), Some(3), None));
}

#[test]
fn files_outside_the_time_of_the_filter_are_not_read() {
    let file = ArchiveFile { began_ms: 10 * HOUR, process: 0, format: 1 };
    let may = |since_ms, until_ms| {
        let wire = RequestFilterV1 { since_ms, until_ms, ..RequestFilterV1::default() };
        file.may_have(&filter(wire), 1000)
    };
    assert!(may(None, None) && may(Some(11 * HOUR), None) && may(None, Some(10 * HOUR)));
    assert!(!may(Some(11 * HOUR + 1), None) && !may(None, Some(10 * HOUR - 1000)));
}
