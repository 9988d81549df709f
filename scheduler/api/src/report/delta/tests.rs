//! Tests of reports as changes.

use super::super::READY_IN_MS_MAX;
use super::*;
use crate::any;
use proptest::prelude::*;
use replica_api::start_failure::StartFailure;

fn name(number: usize) -> DeploymentName {
    format!("d-{number}").parse().unwrap()
}

fn load(pending_tokens: u64) -> DeploymentLoad {
    DeploymentLoad { ready: 1, pending_tokens, tokens_per_second: 0.3, ..DeploymentLoad::default() }
}

fn report(sequence: u64, loads: &[(usize, DeploymentLoad)]) -> Report {
    Report {
        region: "aws/us-east-1".parse().unwrap(),
        instance: "a".parse().unwrap(),
        boot_id: 5,
        sequence,
        deployments: loads.iter().map(|(number, load)| (name(*number), *load)).collect(),
        draining: false,
        has_jobs: false,
    }
}

impl ReportEncoder {
    /// Encodes a report of these loads and grants.
    #[expect(
        clippy::disallowed_methods,
        reason = "an Instant has no constant constructor, and no test depends on its value"
    )]
    fn encode_now(&mut self, report: Report, gateway: &Gateway, known: Option<KnownState>) -> ReportV1 {
        let Report { region, instance, boot_id, sequence, mut deployments, draining, has_jobs } = report;
        let grants = deployments.iter().map(|(name, load)| (name.clone(), load.granted_tokens)).collect();
        deployments.values_mut().for_each(|load| load.granted_tokens = 0);
        let now = self.loaded_at.unwrap_or_else(Instant::now) + LOADS_AGE_MAX;
        assert!(self.needs_loads(now));
        self.update(deployments, now);
        let report = SpokeReport { region, instance, boot_id, sequence, draining, has_jobs, grants };
        self.encode(report, gateway, known)
    }
}

fn gateway(number: usize) -> Gateway {
    Gateway { location: "aws/us-east-1".to_owned(), boot_id: number as u64 }
}

/// Sends a message through JSON.
fn sent(wire: &ReportV1) -> ReportV1 {
    serde_json::from_str(&serde_json::to_string(wire).unwrap()).unwrap()
}

fn names(wire: &ReportV1) -> Vec<&str> {
    wire.deployments.iter().map(|deployment| deployment.name.as_str()).collect()
}

#[test]
fn a_report_has_only_what_has_changed_since_the_state_of_the_gateway() {
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    let first = encoder.encode_now(report(1, &[(1, load(0)), (2, load(0))]), &gateway(0), decoder.known());
    assert_eq!(names(&first), ["d-1", "d-2"]);
    decoder.decode(sent(&first)).unwrap();

    let same = encoder.encode_now(report(2, &[(1, load(0)), (2, load(0))]), &gateway(0), decoder.known());
    assert_eq!((names(&same), same.state.clone().unwrap().base), (vec![], Some(1)));
    assert_eq!(decoder.decode(sent(&same)).unwrap().report.deployments.len(), 2);

    let granted = DeploymentLoad { granted_tokens: 9, ..load(0) };
    let changed = encoder.encode_now(report(3, &[(1, granted), (3, load(7))]), &gateway(0), decoder.known());
    assert_eq!(names(&changed), ["d-1", "d-3"]);
    assert_eq!(changed.state.as_ref().unwrap().removed, ["d-2"]);
    let DecodedReport { report: decoded, changed, .. } = decoder.decode(sent(&changed)).unwrap();
    assert_eq!(*changed, Some([name(1), name(2), name(3)].into()));
    assert_eq!(decoded.deployments.keys().cloned().collect::<Vec<_>>(), [name(1), name(3)]);
    assert_eq!(decoded.deployments[&name(1)].granted_tokens, 9);

    let after = encoder.encode_now(report(4, &[(1, load(0)), (3, load(7))]), &gateway(0), decoder.known());
    assert_eq!(names(&after), ["d-1"]);
    let DecodedReport { report: decoded, changed, .. } = decoder.decode(sent(&after)).unwrap();
    assert_eq!(*changed, Some([name(1)].into()));
    assert_eq!(decoded.deployments[&name(1)].granted_tokens, 0, "the grant has ended");
}

#[test]
fn the_number_of_changed_loads_is_known_before_they_are_encoded() {
    let mut encoder = ReportEncoder::default();
    encoder.encode_now(report(1, &[(1, load(1)), (2, load(1)), (3, load(1))]), &gateway(1), None);
    let known = |boot_id, number| Some(KnownState { boot_id, number, grants: None });
    encoder.encode_now(report(2, &[(1, load(2)), (2, load(1))]), &gateway(1), known(5, 1));
    for (known, expected) in
        [(known(5, 2), 0), (known(5, 1), 2), (None, 2), (known(5, 3), 2), (known(6, 2), 2)]
    {
        assert_eq!(encoder.changed_loads(known, 5), expected, "{known:?}");
    }
    let complete = encoder.encode_now(report(3, &[(1, load(2)), (2, load(1))]), &gateway(2), None);
    assert_eq!(complete.deployments.len(), encoder.changed_loads(None, 5));
}

#[test]
fn a_speed_that_json_does_not_carry_exactly_is_reported_as_one_that_it_does() {
    for (speed, expected) in [
        (SPEED_MAX, SPEED_MAX),
        (SPEED_MAX + SPEED_UNIT, SPEED_MAX),
        // Its text has 17 digits.
        ((1_u64 << 51) as f64 - 0.75, SPEED_MAX),
        (f64::MAX, SPEED_MAX),
        (f64::INFINITY, SPEED_MAX),
        (f64::MIN_POSITIVE, SPEED_UNIT),
        (f64::NAN, 0.0),
        (-1.0, 0.0),
    ] {
        let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
        let fast = DeploymentLoad { tokens_per_second: speed, ..load(1) };
        let wire = sent(&encoder.encode_now(report(1, &[(1, fast)]), &gateway(1), None));
        let decoded = decoder.decode(wire).unwrap_or_else(|error| panic!("{speed}: {error}"));
        assert_eq!(decoded.report.deployments[&name(1)].tokens_per_second, expected, "{speed}");
    }
}

#[test]
fn a_grant_is_sent_when_it_changes_and_renewed_otherwise() {
    let granted = |tokens| [(1, DeploymentLoad { granted_tokens: tokens, ..load(0) }), (2, load(0))];
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    let mut exchange = |encoder: &mut ReportEncoder, to: usize, known, tokens| {
        let wire = encoder.encode_now(report(1, &granted(tokens)), &gateway(to), known);
        let listed = names(&wire).len();
        let decoded = &decoder.decode(sent(&wire)).unwrap().report;
        (listed, decoded.deployments[&name(1)].granted_tokens, decoder.known())
    };
    let (listed, tokens, known) = exchange(&mut encoder, 0, None, 9);
    assert_eq!((listed, tokens), (2, 9));
    let (listed, tokens, known) = exchange(&mut encoder, 0, known, 9);
    assert_eq!((listed, tokens), (0, 9), "renewed");
    let (listed, tokens, known) = exchange(&mut encoder, 0, known, 5);
    assert_eq!((listed, tokens), (1, 5));
    let without = known.map(|known| KnownState { grants: None, ..known });
    let (listed, tokens, known) = exchange(&mut encoder, 0, without, 5);
    assert_eq!((listed, tokens), (1, 5), "a gateway that does not number its grants");
    let (listed, tokens, known) = exchange(&mut encoder, 1, known, 5);
    assert_eq!((listed, tokens), (1, 5), "the number is one of another gateway");
    for other in 2..=GATEWAYS_MAX {
        encoder.encode_now(report(1, &granted(1)), &gateway(other), None);
    }
    assert_eq!(encoder.granted.len(), 1, "one more than the maximum");
    let (listed, tokens, _) = exchange(&mut encoder, 1, known, 5);
    assert_eq!((listed, tokens), (1, 5), "all grants once more");
}

#[test]
fn the_grants_of_silent_gateways_are_forgotten() {
    let mut encoder = ReportEncoder::default();
    encoder.encode_now(report(1, &[(1, load(0))]), &gateway(0), None);
    for _ in 0..SILENT_REPORTS_MAX {
        encoder.encode_now(report(1, &[(1, load(0))]), &gateway(1), None);
    }
    encoder.encode_now(report(1, &[(1, load(0))]), &gateway(2), None);
    assert_eq!(encoder.granted.keys().map(|gateway| gateway.boot_id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn a_lost_change_of_a_grant_is_detected_and_repaired() {
    let granted = |tokens| [(1, DeploymentLoad { granted_tokens: tokens, ..load(0) })];
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    decoder.decode(encoder.encode_now(report(1, &granted(3)), &gateway(0), None)).unwrap();
    let same = encoder.encode_now(report(2, &granted(3)), &gateway(0), decoder.known());
    assert_eq!(same.state.as_ref().unwrap().grants, Some(1), "the number stays while no grant changes");
    decoder.decode(same).unwrap();
    let mut changed = encoder.encode_now(report(3, &granted(0)), &gateway(0), decoder.known());
    changed.deployments.clear();
    let lost = decoder.decode(changed).map(|decoded| decoded.report.clone());
    assert_eq!(lost, Err(ReportError::GrantsChecksum { number: 1 }));
    let complete = encoder.encode_now(report(4, &granted(0)), &gateway(0), decoder.known());
    let decoded = decoder.decode(complete).unwrap();
    assert_eq!(decoded.report.deployments[&name(1)].granted_tokens, 0);
}

#[test]
fn changed_grants_of_unknown_or_earlier_numbers_are_not_applied() {
    let granted = |tokens| [(1, DeploymentLoad { granted_tokens: tokens, ..load(0) })];
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    decoder.decode(encoder.encode_now(report(1, &granted(3)), &gateway(0), None)).unwrap();
    let known = decoder.known();
    let earlier = encoder.encode_now(report(2, &granted(4)), &gateway(0), known);
    decoder.decode(encoder.encode_now(report(3, &granted(5)), &gateway(0), known)).unwrap();
    let late = decoder.decode(earlier).map(|decoded| decoded.report.clone());
    assert_eq!(late, Err(ReportError::Outdated { number: 2, newer: 3 }));
    let mut forged = encoder.encode_now(report(4, &granted(5)), &gateway(0), decoder.known());
    forged.state.as_mut().unwrap().grants_base = Some(7);
    assert_eq!(
        decoder.decode(forged).map(|decoded| decoded.report.clone()),
        Err(ReportError::UnknownBase { base: 7 })
    );
    assert_eq!(decoder.known(), None, "the next response has everything");
}

#[test]
fn a_gateway_gets_all_loads_from_a_restarted_spoke_and_after_forgotten_removals() {
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    decoder.decode(encoder.encode_now(report(1, &[(1, load(0))]), &gateway(0), None)).unwrap();
    let mut restarted = ReportEncoder::default();
    let mut other = report(2, &[(1, load(0))]);
    other.boot_id = 6;
    let all = restarted.encode_now(other, &gateway(0), decoder.known());
    assert_eq!((names(&all), all.state.as_ref().unwrap().base), (vec!["d-1"], None));
    decoder.decode(all).unwrap();

    decoder.decode(encoder.encode_now(report(3, &[(1, load(0))]), &gateway(0), None)).unwrap();
    let known = decoder.known();
    for round in 0..3 {
        let many: Vec<_> =
            (0..MAX_DEPLOYMENTS / 2).map(|at| (round * MAX_DEPLOYMENTS + at, load(0))).collect();
        encoder.encode_now(report(4, &many), &gateway(0), None);
    }
    encoder.encode_now(report(5, &[]), &gateway(0), None);
    assert!(encoder.removed <= MAX_DEPLOYMENTS);
    assert_eq!(encoder.loads.len(), encoder.changes.values().map(BTreeSet::len).sum::<usize>());
    let all = encoder.encode_now(report(6, &[(1, load(0))]), &gateway(0), known);
    assert_eq!(all.state.as_ref().unwrap().base, None);
}

#[test]
fn a_wrong_report_is_rejected_and_the_next_request_requires_all_loads() {
    let encoded = |change: &dyn Fn(&mut ReportV1)| {
        let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
        decoder.decode(encoder.encode_now(report(1, &[(1, load(0))]), &gateway(0), None)).unwrap();
        let mut wire = encoder.encode_now(report(2, &[(1, load(3))]), &gateway(0), decoder.known());
        change(&mut wire);
        let result = decoder.decode(wire).map(|decoded| decoded.report.clone());
        (result, decoder.known())
    };
    let state = |wire: &mut ReportV1, change: &dyn Fn(&mut ReportStateV1)| {
        change(wire.state.as_mut().unwrap());
    };
    assert!(encoded(&|_| ()).0.is_ok());
    let wrong = encoded(&|wire| state(wire, &|state| state.checksum ^= 1));
    assert_eq!(wrong, (Err(ReportError::Checksum { number: 2 }), None));
    let forged = encoded(&|wire| wire.deployments.clear());
    assert_eq!(forged, (Err(ReportError::Checksum { number: 2 }), None));
    let without_grants = encoded(&|wire| state(wire, &|state| *state.grants_checksum.as_mut().unwrap() ^= 1));
    assert_eq!(without_grants, (Err(ReportError::GrantsChecksum { number: 2 }), None));
    let granted = encoded(&|wire| wire.deployments[0].granted_tokens = 9);
    assert_eq!(granted, (Err(ReportError::GrantsChecksum { number: 2 }), None), "a grant that was not given");
    let unknown = encoded(&|wire| state(wire, &|state| state.base = Some(7)));
    assert_eq!(unknown, (Err(ReportError::UnknownBase { base: 7 }), None));
    let foreign = encoded(&|wire| wire.boot_id = 6);
    assert_eq!(foreign, (Err(ReportError::UnknownBase { base: 1 }), None));
    let (invalid, known) = encoded(&|wire| state(wire, &|state| state.removed = vec!["a b".to_owned()]));
    assert_eq!(known, None);
    assert!(invalid.unwrap_err().to_string().starts_with("`state.removed[0]`"));
    let (outdated, known) = encoded(&|wire| state(wire, &|state| state.number = 0));
    assert_eq!(outdated, Err(ReportError::Outdated { number: 0, newer: 1 }));
    assert_eq!(
        known,
        Some(KnownState { boot_id: 5, number: 1, grants: Some(1) }),
        "the gateway keeps its state"
    );
    let too_many = encoded(&|wire| {
        let one = wire.deployments[0].clone();
        let named = |number| super::super::DeploymentReportV1 { name: format!("x-{number}"), ..one.clone() };
        wire.deployments = (0..MAX_DEPLOYMENTS).map(named).collect();
    });
    assert!(too_many.0.unwrap_err().to_string().starts_with("`deployments`"));
}

prop_compose! {
    fn any_load()(
        ready: u32, ready_in in proptest::option::of(0..=READY_IN_MS_MAX + 1), pending_tokens in 0u64..3,
        interactive_tokens in proptest::option::of(0u64..2), speed in 0.0..1e9f64, granted_tokens in 0u64..2,
        failed in proptest::option::of(proptest::sample::select(StartFailure::ALL.as_slice())),
    ) -> DeploymentLoad {
        let (ready_in, tokens_per_second) = (ready_in.map(Duration::from_millis), speed);
        DeploymentLoad {
            ready, ready_in, pending_tokens, interactive_tokens, tokens_per_second, granted_tokens, failed,
        }
    }
}

proptest! {
    /// Several gateways with several requests in flight, of which some are lost or late: each decoded report has
    /// the loads that the spoke had.
    #[test]
    fn any_history_is_decoded_as_it_was(
        states in proptest::collection::vec(
            proptest::collection::btree_map(any::name(), any_load(), 0..5), 1..6),
        exchanges in proptest::collection::vec((0usize..6, 0usize..2, any::<bool>(), 0usize..3), 1..40),
    ) {
        let mut encoder = ReportEncoder::default();
        let mut decoders = [ReportDecoder::default(), ReportDecoder::default()];
        let mut in_flight: [Vec<(ReportV1, Report)>; 2] = Default::default();
        let mut last: [BTreeMap<DeploymentName, DeploymentLoad>; 2] = Default::default();
        for (sequence, (state, gateway, is_lost, delay)) in exchanges.into_iter().enumerate() {
            let mut expected = report(sequence as u64, &[]);
            expected.deployments = states[state % states.len()].clone();
            let known = decoders[gateway].known();
            let wire = sent(&encoder.encode_now(expected.clone(), &self::gateway(gateway), known));
            expected.deployments.values_mut().for_each(round);
            if !is_lost {
                in_flight[gateway].push((wire, expected));
            }
            while in_flight[gateway].len() > delay {
                let (wire, expected) = in_flight[gateway].remove(0);
                let DecodedReport { report, changed, .. } = decoders[gateway].decode(wire).unwrap();
                prop_assert_eq!(report, &expected);
                if let Some(changed) = changed {
                    let (before, after) = (&last[gateway], &expected.deployments);
                    let mut names = before.keys().chain(after.keys());
                    prop_assert!(names.all(|name| changed.contains(name) || before[name] == after[name]));
                }
                last[gateway] = expected.deployments;
            }
        }
    }
}
