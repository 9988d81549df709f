//! HTTP/2 floods get ENHANCE_YOUR_CALM, malformed requests or connections are rejected, and no other client is
//! affected; in plaintext and over TLS.

use super::fixture::{Fixture, Mode, TIMEOUT, certify, send_and_read};
use super::tls;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const ENHANCE_YOUR_CALM: u32 = 11;

/// HPACK: GET, http, /, and the authority "x" (RFC 7541, A and 6.2.2).
const HEAD: [u8; 6] = [0x82, 0x86, 0x84, 0x41, 0x01, b'x'];

/// Frames that a flooder sends at its n-th step.
type Frames = fn(u32) -> Vec<u8>;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Transport of a connection.
trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// Encodes a literal field (RFC 7541, 6.2.2) with a short name and value.
fn field(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// Sends frames until the peer closes; returns the frames that it sent, by kind with their payload.
async fn flood(stream: impl Transport + 'static, frames: Frames) -> Vec<(u8, Vec<u8>)> {
    let (mut read, mut write) = split(stream);
    let mut reading = tokio::spawn(async move {
        let mut all = Vec::new();
        read.read_to_end(&mut all).await.ok();
        all
    });
    write.write_all(&[PREFACE, &frame(4, 0, 0, &[])].concat()).await.unwrap();
    let sending = async {
        for round in 0_u32.. {
            let batch: Vec<u8> = (0..100).flat_map(|number| frames(round * 100 + number)).collect();
            if round > 1000 || write.write_all(&batch).await.is_err() || write.flush().await.is_err() {
                return;
            }
        }
    };
    let ended = async {
        tokio::select! {
            all = &mut reading => all.unwrap(),
            () = sending => reading.await.unwrap(),
        }
    };
    parse_frames(&tokio::time::timeout(TIMEOUT, ended).await.expect("the connection ends"))
}

/// Parses frames.
fn parse_frames(all: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let (mut rest, mut frames) = (all, Vec::new());
    while let [high, mid, low, kind, _, _, _, _, _, payload @ ..] = rest {
        let length = u32::from_be_bytes([0, *high, *mid, *low]) as usize;
        let Some(payload) = payload.get(..length) else { break };
        frames.push((*kind, payload.to_vec()));
        rest = &rest[9 + length..];
    }
    frames
}

/// Returns the reason of the last GOAWAY.
fn goaway(frames: &[(u8, Vec<u8>)]) -> Option<u32> {
    let last = frames.iter().rfind(|(kind, _)| *kind == 7);
    last.map(|(_, payload)| u32::from_be_bytes(payload[4..8].try_into().unwrap()))
}

/// Floods, and whether a request of each reaches a region.
const FLOODS: [(&str, Frames); 7] = [
    ("PING", |_| frame(6, 0, 0, &[0; 8])),
    ("SETTINGS", |_| frame(4, 0, 0, &[])),
    ("PRIORITY", |_| frame(2, 0, 1, &[0, 0, 0, 0, 1])),
    ("rapid reset", |number| {
        let stream = 2 * number + 1;
        [frame(1, 5, stream, &HEAD), frame(3, 0, stream, &[0, 0, 0, 8])].concat()
    }),
    // CVE-2024-27316: a head that never ends.
    ("CONTINUATION", |number| match number {
        0 => frame(1, 0, 1, &HEAD),
        _ => frame(9, 0, 1, &field("x", "y")),
    }),
    // CVE-2019-9518.
    ("empty DATA", |number| match number {
        0 => frame(1, 4, 1, &[0x83, 0x86, 0x84, 0x41, 0x01, b'x']),
        _ => frame(0, 0, 1, &[]),
    }),
    ("unknown frames", |_| frame(99, 0, 0, b"x")),
];

#[tokio::test]
async fn frames_without_effect_are_accepted_up_to_a_limit() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut bystander = edge.connect().await;
    for (name, frames) in FLOODS {
        let seen = flood(edge.connect().await, frames).await;
        others_are_served(&mut bystander, name, &seen).await;
    }
    assert_eq!(fixture.region.requests(), FLOODS.len() as u64, "those of the bystander");
    let metrics = edge.operate("/metrics").await.1;
    // The others are ended by the limits of the protocol library, which apply first.
    for frame in ["ping", "settings", "priority"] {
        assert!(metrics.contains(&format!("floods_total{{frame=\"{frame}\"}} 1\n")), "{frame}: {metrics}");
    }
}

#[tokio::test]
async fn frames_without_effect_are_accepted_up_to_a_limit_over_tls() {
    let fixture = Fixture::new().await;
    let certificate = certify(fixture.dir.path());
    let edge = fixture.edge(tls::TLS).await;
    let mut bystander = tls::connect(&edge, &certificate, &[]).await.unwrap();
    for (name, frames) in FLOODS {
        let stream = tls::connect(&edge, &certificate, &[b"h2"]).await.unwrap();
        let seen = flood(stream, frames).await;
        others_are_served(&mut bystander, name, &seen).await;
    }
    assert_eq!(fixture.region.requests(), FLOODS.len() as u64, "those of the bystander");
}

async fn others_are_served(bystander: &mut impl Transport, name: &str, seen: &[(u8, Vec<u8>)]) {
    // A reset overtakes the bytes written before it, if the flooder had not read them yet.
    let reason = goaway(seen);
    assert!(reason.is_none_or(|reason| reason == ENHANCE_YOUR_CALM), "{name}: {reason:?}");
    let request = tokio::time::timeout(Duration::from_secs(2), send_and_read(bystander)).await;
    assert_eq!(request.expect("others are served").status, 200, "after {name}");
}

/// RFC 9113, 8.1.1 to 8.3.1: a malformed request is rejected, or its stream or connection is; no region receives it.
#[tokio::test]
async fn a_malformed_request_reaches_no_region() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let mut bystander = edge.connect().await;
    // POST, http, /v1/embeddings, and the authorization.
    let head = |fields: &[Vec<u8>]| {
        let path = [&[0x04, 14], &b"/v1/embeddings"[..]].concat();
        let always = [vec![0x83, 0x86], path, field("authorization", "Bearer k")].concat();
        [vec![always], fields.to_vec()].concat().concat()
    };
    let authority = || [&[0x41, 0x01], &b"x"[..]].concat();
    let cases = [
        ("two hosts", head(&[authority(), field("host", "y")])),
        ("no host", head(&[])),
        ("two lengths", head(&[authority(), field("content-length", "2"), field("content-length", "3")])),
        ("an invalid length", head(&[authority(), field("content-length", "+2")])),
        ("more than its length", head(&[authority(), field("content-length", "1")])),
        ("less than its length", head(&[authority(), field("content-length", "3")])),
        ("transfer-encoding", head(&[authority(), field("transfer-encoding", "chunked")])),
        ("connection", head(&[authority(), field("connection", "close")])),
        ("capitals in a name", head(&[authority(), field("X-A", "b")])),
        ("a line break in a value", head(&[authority(), field("x-a", "b\r\nx: y")])),
        ("a carriage return in a value", head(&[authority(), field("x-a", "b\rc")])),
        ("an invalid name", head(&[authority(), field("x a", "b")])),
        ("a pseudo field behind a field", head(&[field("x-a", "b"), authority()])),
        ("an unknown pseudo field", head(&[authority(), field(":x", "y")])),
        ("two paths", head(&[authority(), [&[0x04, 1], &b"/"[..]].concat()])),
        ("no table has this", head(&[authority(), vec![0xff, 0xff, 0xff, 0xff, 0x0f]])),
    ];
    for (name, head) in cases {
        let mut stream = edge.connect().await;
        let frames = [PREFACE, &frame(4, 0, 0, &[]), &frame(1, 4, 1, &head), &frame(0, 1, 1, b"{}")].concat();
        stream.write_all(&frames).await.unwrap();
        let (mut all, begun) = (Vec::new(), Instant::now());
        // Rejected (HEADERS), reset (RST_STREAM) or connection closed (GOAWAY).
        while !parse_frames(&all).iter().any(|(kind, _)| matches!(kind, 1 | 3 | 7)) {
            assert!(begun.elapsed() < TIMEOUT, "{name}: {:?}", parse_frames(&all));
            let read = tokio::time::timeout(TIMEOUT, stream.read_buf(&mut all)).await;
            if read.unwrap_or_else(|_| panic!("{name}: no response")).unwrap() == 0 {
                break;
            }
        }
        // A response of 200 begins with the byte for it (RFC 7541, A).
        let answered = parse_frames(&all).into_iter().find(|(kind, _)| *kind == 1);
        assert!(answered.is_none_or(|(_, head)| head[0] != 0x88), "{name} is served");
        assert_eq!(send_and_read(&mut bystander).await.status, 200, "after {name}");
    }
    assert_eq!(fixture.region.requests(), 16, "those of the bystander");
}

/// A window that is never opened: the buffered response is released.
#[tokio::test]
async fn a_client_that_opens_no_window_times_out() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("[timeouts]\nwrite = '300ms'\n").await;
    fixture.region.mode.send_replace(Mode::Responds(4 << 20));
    let mut stream = edge.connect().await;
    // SETTINGS_INITIAL_WINDOW_SIZE is 0 (RFC 9113, 6.5.2).
    let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    stream.write_all(&[PREFACE, &settings].concat()).await.unwrap();
    let path = [&[0x04, 14], &b"/v1/embeddings"[..]].concat();
    let always = [vec![0x83, 0x86, 0x41, 0x01, b'x'], path, field("authorization", "Bearer k")].concat();
    for number in 0..10 {
        let request = [
            frame(1, 4, 2 * number + 1, &always),
            frame(0, 1, 2 * number + 1, super::fixture::BODY.as_bytes()),
        ];
        stream.write_all(&request.concat()).await.unwrap();
    }
    fixture.region.wait_for_requests(10).await;
    let begun = Instant::now();
    while !edge.operate("/metrics").await.1.contains("meridian_gateway_requests_in_flight 0\n") {
        assert!(begun.elapsed() < TIMEOUT, "the requests do not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(stream);
    fixture.region.mode.send_replace(Mode::CountsBytes);
    assert_eq!(send_and_read(&mut edge.connect().await).await.status, 200);
}
