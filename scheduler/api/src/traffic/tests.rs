use super::*;
use crate::requests::{FoundRequestV1, KeptReason};
use serde_json::json;

fn traffic() -> GatewayTraffic {
    let region = |id: &str| id.parse::<RegionId>().unwrap();
    let mut latencies = LatencyHistogram::default();
    latencies.record(Duration::from_millis(20));
    let load = ObservedLoad {
        ready: 1,
        pending_tokens: 7,
        tokens_per_second: 900,
        held_for: Some(Duration::from_secs(2)),
    };
    let observed = ObservedRegion {
        health: Health::Suspect,
        report_age: Some(Duration::from_millis(300)),
        rtt: Duration::from_micros(91_250),
        in_flight: 3,
        loads: BTreeMap::from([("minilm".parse().unwrap(), load)]),
    };
    let served = ServedTraffic { requests: 1, failed: 0, tokens: 12, latencies };
    let tenant = TenantTraffic { requests: 2, failed: 1, limited: 0, inputs: 2, tokens: 12 };
    GatewayTraffic {
        gateway: GatewayBoot { region: region("aws/us-east-1"), boot_id: 7 },
        generation: Some(Generation { epoch: 1, number: 4 }),
        interval: Duration::from_secs(1),
        in_flight: 5,
        regions: BTreeMap::from([(region("gcp/europe-west4"), observed)]),
        served: BTreeMap::from([
            (("minilm".parse().unwrap(), Some(region("gcp/europe-west4"))), served),
            (
                ("minilm".parse().unwrap(), None),
                ServedTraffic { requests: 1, failed: 1, ..ServedTraffic::default() },
            ),
        ]),
        failures: BTreeMap::from([(("minilm".parse().unwrap(), "overloaded".to_owned()), 1)]),
        tenants: BTreeMap::from([("acme".parse().unwrap(), tenant)]),
        moves: vec![Move {
            from: region("aws/us-east-1"),
            to: region("gcp/europe-west4"),
            cause: MoveCause::Evacuation,
            requests: 1,
            example: "req-1".to_owned(),
        }],
        explained: BTreeMap::from([
            ("a".to_owned(), Ok(Some(json!({"status": 200})))),
            ("b".to_owned(), Ok(None)),
            ("c".to_owned(), Err("the disk failed".to_owned())),
        ]),
        searched: BTreeMap::from([(7, found(1))]),
    }
}

/// Rows of a search that are as large as they can be.
fn found(rows: usize) -> FoundRequestsV1 {
    let region = "aws/ap-southeast-1".to_owned();
    let request = FoundRequestV1 {
        id: Some("x".repeat(REQUEST_ID_BYTES_MAX)),
        at_ms: 1_800_000_000_000,
        kept: KeptReason::FailedOver.to_string(),
        tenant: Some("t".repeat(63)),
        deployment: Some("d".repeat(63)),
        region: Some(region.clone()),
        status: Some(200),
        outcome: "x".repeat(LABEL_BYTES_MAX),
        total_ms: 12_345.678,
        attempts: vec![region; FOUND_ATTEMPTS_MAX],
    };
    let problem = Some("x".repeat(PROBLEM_BYTES_MAX));
    FoundRequestsV1 { requests: vec![request; rows], has_more: true, is_enabled: true, problem }
}

#[test]
fn traffic_survives_a_round_trip() {
    let text = serde_json::to_string(&TrafficReportV1::from(&traffic())).unwrap();
    let wire: TrafficReportV1 = serde_json::from_str(&text).unwrap();
    assert_eq!(GatewayTraffic::try_from(wire), Ok(traffic()));
}

/// The rows are at their limits, with the longest names; the ring of a gateway has 4,096 requests, so the histograms of all rows
/// have at most as many buckets.
#[test]
fn a_report_with_all_rows_fits_into_a_request() {
    let name = |kind: &str, number: usize| format!("{kind}{number:0>62}");
    let regions =
        || (0..MAX_REGIONS).map(|number| format!("cloud/{number:0>40}").parse::<RegionId>().unwrap());
    let mut latencies = LatencyHistogram::default();
    [1, 10, 100, 1000].into_iter().for_each(|ms| latencies.record(Duration::from_millis(ms)));
    let many = 9_999_999_999;
    let served = ServedTraffic { requests: many, failed: many, tokens: many, latencies };
    let tenant = TenantTraffic { requests: many, failed: many, limited: many, inputs: many, tokens: many };
    let load = ObservedLoad {
        ready: 1000,
        pending_tokens: many,
        tokens_per_second: many,
        held_for: Some(Duration::from_secs(999)),
    };
    let observed = |region: usize| ObservedRegion {
        health: Health::Suspect,
        report_age: Some(Duration::from_secs(999)),
        rtt: Duration::from_secs(9),
        in_flight: 100_000,
        loads: (0..TRAFFIC_ROWS_MAX / MAX_REGIONS)
            .map(|number| (name("d", region * 8 + number).parse().unwrap(), load))
            .collect(),
    };
    let rows = || 0..TRAFFIC_ROWS_MAX;
    let region = regions().next_back().unwrap();
    let moved = Move {
        from: region.clone(),
        to: region.clone(),
        cause: MoveCause::FirstByteTimeout,
        requests: many,
        example: "x".repeat(REQUEST_ID_BYTES_MAX),
    };
    let report = GatewayTraffic {
        regions: regions().enumerate().map(|(number, id)| (id, observed(number))).collect(),
        served: rows()
            .map(|row| ((name("d", row).parse().unwrap(), Some(region.clone())), served.clone()))
            .collect(),
        failures: rows()
            .map(|row| ((name("d", row).parse().unwrap(), "x".repeat(LABEL_BYTES_MAX)), many))
            .collect(),
        tenants: rows().map(|row| (name("t", row).parse().unwrap(), tenant)).collect(),
        moves: rows().map(|_| moved.clone()).collect(),
        explained: BTreeMap::from([("a".to_owned(), Ok(Some("x".repeat(EXPLANATION_BYTES_MAX).into())))]),
        searched: (0..SEARCHES_MAX as u64).map(|search| (search, found(FOUND_DEFAULT))).collect(),
        ..traffic()
    };
    let bytes = serde_json::to_vec(&TrafficReportV1::from(&report)).unwrap().len();
    assert!((TRAFFIC_BYTES_MAX / 2..TRAFFIC_BYTES_MAX).contains(&bytes), "{bytes} bytes");
}

#[test]
fn a_report_that_is_invalid_is_rejected_with_its_field() {
    let check = |change: &dyn Fn(&mut TrafficReportV1), field: &str| {
        let mut wire = TrafficReportV1::from(&traffic());
        change(&mut wire);
        assert_eq!(GatewayTraffic::try_from(wire).unwrap_err().field, field);
    };
    check(&|wire| wire.gateway = "us-east-1".to_owned(), "gateway");
    check(&|wire| wire.generation = Some("1".to_owned()), "generation");
    check(&|wire| wire.regions.push(wire.regions[0].clone()), "regions[1].region");
    check(&|wire| wire.served[1].latencies = vec![[99, 1]], "served[1].latencies");
    check(&|wire| wire.moves[0].example = "x".repeat(REQUEST_ID_BYTES_MAX + 1), "moves[0].example");
    check(&|wire| wire.failures[0].outcome = "x".repeat(LABEL_BYTES_MAX + 1), "failures[0].outcome");
    let problem = || Some("x".repeat(PROBLEM_BYTES_MAX + 1));
    check(&|wire| wire.explained[0].problem = problem(), "explained[0].problem");
    check(&|wire| wire.searched[0].found.problem = problem(), "searched[0].problem");
    let kept = "x".repeat(LABEL_BYTES_MAX + 1);
    check(&|wire| wire.searched[0].found.requests[0].kept = kept.clone(), "searched[0].kept");
}

#[test]
fn values_that_only_a_later_gateway_knows_are_no_reason_to_reject_its_report() {
    let mut report = serde_json::to_value(TrafficReportV1::from(&traffic())).unwrap();
    report["moves"][0]["cause"] = json!("rebalancing");
    report["moves"][0]["bytes"] = json!(7);
    report["regions"][0]["health"] = json!("recovering");
    let wire: TrafficReportV1 = serde_json::from_value(report).unwrap();
    let mut expected = traffic();
    expected.moves[0].cause = MoveCause::Other;
    for observed in expected.regions.values_mut() {
        observed.health = Health::Unknown;
    }
    assert_eq!(GatewayTraffic::try_from(wire), Ok(expected));
}

#[test]
fn every_cause_is_read_as_it_was_written() {
    for cause in MoveCause::ALL {
        let mut sent = traffic();
        sent.moves[0].cause = cause;
        let text = serde_json::to_string(&TrafficReportV1::from(&sent)).unwrap();
        let read = GatewayTraffic::try_from(serde_json::from_str::<TrafficReportV1>(&text).unwrap());
        assert_eq!(read, Ok(sent), "{cause:?}");
    }
}

#[test]
fn limits_of_rows_are_enforced() {
    let accepts = |fill: &dyn Fn(&mut TrafficReportV1)| {
        let mut wire = TrafficReportV1::from(&traffic());
        fill(&mut wire);
        GatewayTraffic::try_from(wire).is_ok()
    };
    for (rows, is_accepted) in [(TRAFFIC_ROWS_MAX, true), (TRAFFIC_ROWS_MAX + 1, false)] {
        assert_eq!(accepts(&|wire| wire.moves = vec![wire.moves[0].clone(); rows]), is_accepted);
        assert_eq!(accepts(&|wire| wire.served = vec![wire.served[0].clone(); rows]), is_accepted);
        assert_eq!(accepts(&|wire| wire.failures = vec![wire.failures[0].clone(); rows]), is_accepted);
    }
    let explained = |count: usize| {
        let one = |number: usize| ExplainedV1 { id: number.to_string(), explanation: None, problem: None };
        accepts(&|wire| wire.explained = (0..count).map(one).collect())
    };
    assert!(explained(EXPLANATIONS_MAX) && !explained(EXPLANATIONS_MAX + 1));
    let searched = |searches: usize, rows: usize| {
        let one = |search: usize| SearchedV1 { search: search as u64, found: found(rows) };
        accepts(&|wire| wire.searched = (0..searches).map(one).collect())
    };
    assert!(searched(SEARCHES_MAX, FOUND_DEFAULT));
    assert!(!searched(SEARCHES_MAX + 1, 1) && !searched(1, FOUND_DEFAULT + 1));
}

#[test]
fn a_condition_of_a_newer_version_is_a_problem_of_its_search_only() {
    let wire = json!({"version": 1, "next_ms": 1000, "search": [
        {"search": 1, "filter": {"tenant": "docs", "size": "large"}},
        {"search": 2, "filter": {"status": "5xx", "kept": "failed"}, "priority": 7},
    ]});
    let response: TrafficResponseV1 = serde_json::from_value(wire).unwrap();
    let [newer, known] = <[SearchV1; 2]>::try_from(response.search).unwrap();
    let problem = newer.into_filter().unwrap_err().to_string();
    assert!(problem.contains("size"), "{problem}");
    assert_eq!(known.into_filter().unwrap().kept, Some(KeptReason::Failed));
    let reason = SearchV1 { search: 3, filter: json!({"kept": "throttled"}) };
    assert_eq!(reason.into_filter().unwrap_err().field, "kept");
}

#[test]
fn a_filter_survives_a_round_trip() {
    let wire = RequestFilterV1 { until_ms: Some(7), limit: Some(3), ..RequestFilterV1::default() };
    let filter = SearchV1::new(1, &wire).into_filter().unwrap();
    assert_eq!(filter, wire.try_into().unwrap());
}
