//! gzip in both directions: compressed requests, and compressed responses for clients that accept them.

use super::fixture::{BODY, Edge, Fixture, Mode, post};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::io::{Read, Write};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn packed(bytes: &[u8]) -> Vec<u8> {
    packed_by(Compression::best(), bytes)
}

pub(crate) fn packed_by(level: Compression, bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), level);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns the head, and the body as it was sent.
async fn exchange(edge: &Edge, fields: &str, body: &[u8]) -> (String, Vec<u8>) {
    let head = post(&format!("connection: close\r\n{fields}"), "");
    let head = head.replace("content-length: 0", &format!("content-length: {}", body.len()));
    let mut stream = edge.connect().await;
    stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).await.unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    (String::from_utf8_lossy(&all[..end]).to_ascii_lowercase(), all.split_off(end))
}

/// Returns a request of `bytes` that compresses about as well as text.
fn varied(bytes: usize) -> String {
    let mut seed = 1_u32;
    let letters = (0..bytes - BODY.len() + 1).map(|_| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + (seed >> 28) as u8)
    });
    BODY.replace("\"x\"", &format!("\"{}\"", letters.collect::<String>()))
}

#[tokio::test]
async fn a_compressed_request_is_decompressed_within_the_limits_of_any_other() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let check = async |coding: &str, body: &[u8], status: &str, word: &str| {
        let (head, body) = exchange(&edge, &format!("content-encoding: {coding}\r\n"), body).await;
        let body = String::from_utf8_lossy(&body).into_owned();
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{coding}: {head}{body}");
        assert!(body.contains(word), "{coding}: {body}");
    };
    check("gzip", &packed(BODY.as_bytes()), "200", "\"bytes\":35").await;
    check("identity", BODY.as_bytes(), "200", "\"bytes\":35").await;
    let (start, end) = BODY.split_at(9);
    let two = [packed(start.as_bytes()), packed(end.as_bytes())].concat();
    check("x-gzip", &two, "200", "\"bytes\":35").await;
    let of = |bytes: usize| BODY.replace("\"x\"", &format!("\"{}\"", "x".repeat(bytes - BODY.len() + 1)));
    check("gzip", &packed_by(Compression::fast(), varied(32 << 20).as_bytes()), "200", "33554432").await;
    assert_eq!(fixture.region.requests(), 4);
    check("gzip", &packed_by(Compression::fast(), varied((32 << 20) + 1).as_bytes()), "413", "33554432")
        .await;

    // The first MiB may expand without a limit, and beyond it two hundred times the bytes that were sent.
    check("gzip", &packed(of(1 << 20).as_bytes()), "200", "1048576").await;
    let bomb = packed(of(32 << 20).as_bytes());
    assert!(bomb.len() < 40_000, "{} bytes", bomb.len());
    check("gzip", &bomb, "413", "200 times").await;
    // Members cost us more than their sender.
    let members = packed(b"").repeat(63);
    check("gzip", &[members.as_slice(), &packed(BODY.as_bytes())].concat(), "200", "\"bytes\":35").await;
    check("gzip", &[members.repeat(2).as_slice(), &packed(BODY.as_bytes())].concat(), "400", "members").await;
    let served = fixture.region.requests();
    let whole = packed(BODY.as_bytes());
    check("gzip", &whole[..whole.len() - 5], "400", "invalid_header").await;
    check("gzip", BODY.as_bytes(), "400", "invalid_header").await;
    check("gzip", &packed(b"{\"model\": 7}"), "400", "invalid_value").await;
    check("br", BODY.as_bytes(), "415", "unsupported_encoding").await;
    check("gzip, gzip", &packed(&whole), "415", "unsupported_encoding").await;
    check("gzip\r\ncontent-encoding: gzip", &packed(&whole), "415", "unsupported_encoding").await;
    assert_eq!(fixture.region.requests(), served, "no region receives them");
}

#[tokio::test]
async fn a_response_is_compressed_for_clients_that_accept_gzip_if_configured() {
    let fixture = Fixture::new().await;
    let (plain, edge) = (fixture.edge("").await, fixture.edge("gzip_min_bytes = 5000\n").await);
    fixture.region.mode.send_replace(Mode::Responds(5000));
    let takes = "accept-encoding: br, gzip;q=0.5\r\n";
    let (head, body) = exchange(&edge, takes, BODY.as_bytes()).await;
    assert!(head.contains("content-encoding: gzip\r\n") && head.contains("vary: accept-encoding"), "{head}");
    assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
    let mut unpacked = Vec::new();
    GzDecoder::new(&body[..]).read_to_end(&mut unpacked).unwrap();
    assert_eq!((unpacked.len(), &unpacked[..10]), (5000, &b"{\"data\":\"x"[..]));

    let unpacked = async |edge: &Edge, fields: &str, bytes: usize, reason: &str| {
        let (head, body) = exchange(edge, fields, BODY.as_bytes()).await;
        assert!(!head.contains("content-encoding") && body.len() == bytes, "{reason}: {head}");
    };
    unpacked(&plain, takes, 5000, "it is off").await;
    unpacked(&edge, "", 5000, "gzip is not accepted").await;
    unpacked(&edge, "accept-encoding: gzip;q=0\r\n", 5000, "it is refused").await;
    fixture.region.mode.send_replace(Mode::Responds(4999));
    unpacked(&edge, takes, 4999, "it is too small").await;
    fixture.region.mode.send_replace(Mode::Responds(2 << 20));
    unpacked(&edge, takes, 2 << 20, "it is forwarded unchanged").await;
}
