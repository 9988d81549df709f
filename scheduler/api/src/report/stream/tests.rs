//! Tests of the messages of an exchange stream.

use super::super::delta::{ReportDecoder, ReportEncoder};
use super::super::{DeploymentLoad, Gateway, SpokeReport};
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

fn gateway() -> Gateway {
    Gateway { location: "aws/us-east-1".to_owned(), boot_id: u64::MAX }
}

fn request(sequence: u64, known: Option<KnownState>, overflow: u64) -> ExchangeRequest {
    let requested = (0..overflow).map(|number| (format!("d-{number}").parse().unwrap(), overflow));
    ExchangeRequest { gateway: gateway(), sequence, known, requested: requested.collect() }
}

fn known(number: u64) -> KnownState {
    KnownState { boot_id: u64::MAX, number, grants: Some(1) }
}

fn report(sequence: u64) -> ReportV1 {
    let report = json!({
        "version": 1, "region": "aws/eu-central-1", "instance": "a", "boot_id": u64::MAX, "sequence": sequence,
        "draining": false,
        "state": {"number": 4, "base": 4, "checksum": u64::MAX, "grants": 3, "grants_base": 3, "grants_checksum": 9},
    });
    serde_json::from_value(report).unwrap()
}

#[test]
fn an_idle_message_has_its_number_only_and_every_fiftieth_is_complete() {
    let (mut requests, mut reports) = (ExchangeRequestWriter::default(), ReportWriter::default());
    let (mut of_gateway, mut of_spoke) = (ExchangeRequestReader::default(), ReportReader::default());
    let mut complete = Vec::new();
    for sequence in 1..=2 * u64::from(COMPLETE_INTERVAL) {
        let (to_spoke, back) = (
            requests.message(request(sequence, Some(known(4)), 0)),
            reports.message(&report(sequence), Some(known(4))),
        );
        assert_eq!(of_gateway.read(&to_spoke).unwrap(), request(sequence, Some(known(4)), 0));
        assert_eq!(of_spoke.read(&back).unwrap(), report(sequence));
        let idle = format!("{{\"sequence\":{sequence}}}\n").into_bytes();
        assert_eq!(to_spoke == idle, back == idle);
        if to_spoke != idle {
            complete.push(sequence);
        }
    }
    let interval = u64::from(COMPLETE_INTERVAL);
    assert_eq!(complete, [1, interval, 2 * interval]);
}

#[test]
fn a_request_without_a_known_state_is_answered_with_a_complete_message() {
    let (mut writer, mut reader) = (ReportWriter::default(), ReportReader::default());
    writer.message(&report(1), None);
    let relative = writer.message(&report(2), Some(known(4)));
    assert!(reader.read(&relative).unwrap_err().to_string().contains("first message"), "the first was lost");
    let again = writer.message(&report(3), None);
    assert_eq!(reader.read(&again).unwrap(), report(3));
}

#[test]
fn a_removed_state_and_an_ended_overflow_are_not_those_of_the_message_before() {
    let (mut writer, mut reader) = (ExchangeRequestWriter::default(), ExchangeRequestReader::default());
    for (sequence, known, overflow) in
        [(1, Some(known(4)), 2), (2, None, 0), (3, None, 0), (4, Some(known(5)), 1)]
    {
        let message = writer.message(request(sequence, known, overflow));
        assert_eq!(reader.read(&message).unwrap(), request(sequence, known, overflow));
    }
    let (mut writer, mut reader) = (ReportWriter::default(), ReportReader::default());
    let without = |sequence| ReportV1 { state: None, draining: true, jobs: true, ..report(sequence) };
    for report in [report(1), without(2), without(3), report(4)] {
        assert_eq!(reader.read(&writer.message(&report, Some(known(4)))).unwrap(), report);
    }
}

#[test]
fn an_invalid_message_is_rejected_with_its_field() {
    let check = |messages: &[Value], expected: &str| {
        let mut reader = ExchangeRequestReader::default();
        let read = messages.iter().map(|message| reader.read(message.to_string().as_bytes())).last();
        let error = read.unwrap().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let first = json!({"version": 1, "gateway": "50.1,8.7", "boot_id": 1, "sequence": 1});
    check(&[json!({"version": 1, "sequence": 1})], "gateway");
    check(&[json!({"gateway": "a", "sequence": 1})], "version");
    check(&[first.clone(), json!({"version": 1, "sequence": 2})], "gateway");
    check(&[json!({"version": 2, "gateway": "a", "sequence": 1})], "version 2 is not supported");
    check(&[first.clone(), json!({"sequence": 2, "gateway": "elsewhere"})], "gateway");
    check(&[first.clone(), json!({"sequence": 2, "boot_id": 2})], "gateway");
    check(
        &[first.clone(), json!({"sequence": 2, "requested": [{"name": "a b", "tokens": 1}]})],
        "requested[0].name",
    );
    check(&[first.clone(), json!({"gateway": "50.1,8.7"})], "sequence");
    for field in ["version", "region", "instance", "boot_id", "draining"] {
        let mut message = serde_json::to_value(report(1)).unwrap();
        message.as_object_mut().unwrap().remove(field);
        let error = ReportReader::default().read(message.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn a_message_may_be_as_long_as_the_limit_and_no_longer() {
    let mut buffer = MessageBuffer::new(8);
    buffer.push(b"12345678\n1");
    assert_eq!(buffer.take().unwrap().unwrap(), b"12345678");
    assert!(buffer.take().unwrap().is_none());
    buffer.push(b"2345678");
    assert!(buffer.take().unwrap().is_none());
    buffer.push(b"9");
    assert!(matches!(buffer.take(), Err(MessageError::TooLong(8))), "although its end is unknown");
    let mut buffer = MessageBuffer::new(8);
    buffer.push(b"123456789\n");
    assert!(matches!(buffer.take(), Err(MessageError::TooLong(8))));
}

proptest! {
    #[test]
    fn messages_are_the_same_however_they_are_divided(
        messages in proptest::collection::vec("[a-z]{1,40}", 1..6), pieces in proptest::collection::vec(1usize..9, 1..8),
    ) {
        let text = messages.join("\n").into_bytes();
        let (mut buffer, mut read, mut rest) = (MessageBuffer::new(40), Vec::new(), text.as_slice());
        for piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            buffer.push(now);
            while let Some(message) = buffer.take().unwrap() {
                read.push(String::from_utf8(message).unwrap());
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        read.extend(buffer.take_rest().map(|message| String::from_utf8(message).unwrap()));
        prop_assert_eq!(read, messages);
    }
}

/// Passes a message through the buffer of a stream as it arrives from a connection.
fn received(message: &[u8], bytes_max: usize) -> Vec<u8> {
    let mut buffer = MessageBuffer::new(bytes_max);
    for piece in message.chunks(16 << 10) {
        assert!(buffer.take().unwrap().is_none());
        buffer.push(piece);
    }
    let message = buffer.take().unwrap().unwrap();
    assert_eq!(buffer.buffered(), 0, "the memory of a large message is not kept");
    message
}

/// Names of maximum length of as many deployments as are allowed.
fn longest_names(first: usize) -> impl Iterator<Item = regions::DeploymentName> {
    (first..first + MAX_DEPLOYMENTS).map(|number| format!("{number:x>MAX_NAME_LEN$}").parse().unwrap())
}

#[test]
fn the_largest_request_is_read_and_its_memory_is_known() {
    // A control character is the one with the longest escape.
    let location = "\u{1}".repeat(GATEWAY_BYTES_MAX);
    let request = ExchangeRequest {
        gateway: Gateway { location, boot_id: u64::MAX },
        sequence: u64::MAX,
        known: Some(KnownState { boot_id: u64::MAX, number: u64::MAX, grants: Some(u64::MAX) }),
        requested: longest_names(0).map(|name| (name, u64::MAX)).collect(),
    };
    let message = ExchangeRequestWriter::default().message(request.clone());
    let least = REQUEST_BYTES_MAX - HEADER_BYTES_MAX;
    assert!((least..=REQUEST_BYTES_MAX).contains(&message.len()), "{} bytes", message.len());
    let mut reader = ExchangeRequestReader::default();
    assert_eq!(reader.read(&received(&message, REQUEST_BYTES_MAX)).unwrap(), request);
    assert!((MAX_DEPLOYMENTS * MAX_NAME_LEN..2 * REQUEST_BYTES_MAX).contains(&reader.kept_bytes()));
    let next = ExchangeRequest { sequence: 1, requested: BTreeMap::new(), ..request };
    let next = ExchangeRequestWriter::default().message(next);
    reader.read(&received(&next, REQUEST_BYTES_MAX)).unwrap();
    assert_eq!(reader.kept_bytes(), 0);
}

/// All deployments have been replaced by as many others, each with a load and a grant.
#[test]
#[expect(clippy::disallowed_methods, reason = "an Instant has no constant constructor")]
fn the_largest_report_is_read_and_decoded() {
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    let (mut writer, mut reader) = (ReportWriter::default(), ReportReader::default());
    let begun = Instant::now();
    let load = DeploymentLoad {
        ready: u32::MAX,
        ready_in: Some(std::time::Duration::from_secs(24 * 3600)),
        pending_tokens: u64::MAX,
        interactive_tokens: Some(u64::MAX),
        tokens_per_second: super::super::delta::SPEED_MAX,
        granted_tokens: 0,
        failed: None,
    };
    for round in 0..2 {
        let names: BTreeSet<_> = longest_names(round * MAX_DEPLOYMENTS).collect();
        let loads = names.iter().map(|name| (name.clone(), load));
        encoder.update(loads.collect(), begun + super::super::delta::LOADS_AGE_MAX * round as u32);
        let report = SpokeReport {
            region: "aws/eu-central-1".parse().unwrap(),
            instance: "a".parse().unwrap(),
            boot_id: u64::MAX,
            sequence: u64::MAX,
            draining: false,
            has_jobs: true,
            grants: names.iter().map(|name| (name.clone(), u64::MAX)).collect(),
        };
        let known = decoder.known();
        let message = writer.message(&encoder.encode(report, &gateway(), known), known);
        assert!(message.len() <= REPORT_BYTES_MAX, "{} bytes", message.len());
        let decoded = decoder.decode(reader.read(&received(&message, REPORT_BYTES_MAX)).unwrap()).unwrap();
        assert!(decoded.report.deployments.keys().eq(&names), "round {round}");
        if round == 1 {
            let removed = MAX_DEPLOYMENTS * REMOVED_BYTES_MAX;
            assert!(message.len() > REPORT_BYTES_MAX * 9 / 10, "{} bytes", message.len());
            assert!((removed..2 * removed).contains(&writer.kept_bytes()), "{}", writer.kept_bytes());
        }
    }
}

#[test]
fn many_messages_in_one_piece_are_taken_one_by_one() {
    let mut buffer = MessageBuffer::new(100);
    buffer.push(&b"{\"sequence\":1}\n".repeat(1_000));
    for _ in 0..1_000 {
        assert_eq!(buffer.take().unwrap().unwrap(), b"{\"sequence\":1}");
    }
    assert!(buffer.take().unwrap().is_none() && buffer.buffered() == 0);
}

/// A spoke with a hundred ready deployments and grants, of which nothing changes.
#[test]
#[expect(clippy::disallowed_methods, reason = "an Instant has no constant constructor")]
fn an_idle_exchange_has_less_than_fifty_bytes_whatever_is_deployed() {
    let (mut encoder, mut decoder) = (ReportEncoder::default(), ReportDecoder::default());
    let (mut requests, mut reports) = (ExchangeRequestWriter::default(), ReportWriter::default());
    let (mut of_gateway, mut of_spoke) = (ExchangeRequestReader::default(), ReportReader::default());
    let load = DeploymentLoad { ready: 1, tokens_per_second: 7_500.0, ..DeploymentLoad::default() };
    let names: Vec<regions::DeploymentName> =
        (0..100).map(|number| format!("team-embed-{number}").parse().unwrap()).collect();
    let (mut bytes, exchanges) = (0, 1_000);
    for sequence in 1..=exchanges {
        let message = requests.message(request(1_000_000 + sequence, decoder.known(), 0));
        let request = of_gateway.read(&message).unwrap();
        let loads = names.iter().map(|name| (name.clone(), load));
        encoder.update(loads.collect(), Instant::now());
        let grants: BTreeMap<_, _> = names.iter().map(|name| (name.clone(), 4_000)).collect();
        let report = SpokeReport {
            region: "aws/eu-central-1".parse().unwrap(),
            instance: "a".parse().unwrap(),
            boot_id: u64::MAX,
            sequence: request.sequence,
            draining: false,
            has_jobs: false,
            grants,
        };
        let back = reports.message(&encoder.encode(report, &request.gateway, request.known), request.known);
        decoder.decode(of_spoke.read(&back).unwrap()).unwrap();
        if sequence > 10 {
            bytes += message.len() + back.len();
        }
    }
    let mean = bytes as u64 / (exchanges - 10);
    assert!(mean < 50, "{mean} bytes");
}
