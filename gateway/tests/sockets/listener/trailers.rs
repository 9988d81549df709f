//! HTTP/2 trailers: fields are accepted, and a pseudo-header among them resets the stream and not the connection.

use super::fixture::{BODY, Fixture, TIMEOUT};
use super::http2::{Client, post};
use h2::Reason;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// POST, http, /, and the authority "x" (RFC 7541, A and 6.2.2).
const HEAD: [u8; 6] = [0x83, 0x86, 0x84, 0x41, 0x01, b'x'];
const RST_STREAM: u8 = 3;
const PROTOCOL_ERROR: [u8; 4] = [0, 0, 0, 1];

#[tokio::test]
async fn trailers_with_fields_are_accepted() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    for _ in 0..3 {
        let (response, mut body) = client.begin(post(), false).await.unwrap();
        body.send_data(BODY.into(), false).unwrap();
        let trailers = HeaderMap::from_iter([("x-checksum".parse().unwrap(), "1".parse().unwrap())]);
        body.send_trailers(trailers).unwrap();
        let response = timeout(TIMEOUT, response).await.expect("an answer").unwrap();
        assert_eq!(response.status(), 200);
    }
}

#[tokio::test]
async fn trailers_with_a_pseudo_header_reset_only_their_stream() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    // `:path: /`, from the static table, and as a literal that arrives byte by byte.
    let literal: &[u8] = b"\x00\x05:path\x01/";
    for (trailers, piece) in [(&[0x84][..], 1000), (literal, 1)] {
        let mut stream = edge.connect().await;
        let head = frame(1, 4, 1, &[HEAD.as_slice(), b"\x0f\x08\x08Bearer k"].concat());
        let start = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(4, 0, 0, &[]).as_slice(), &head].concat();
        let end =
            [frame(0, 0, 1, BODY.as_bytes()), frame(1, 5, 1, trailers), frame(6, 0, 0, b"are you?")].concat();
        stream.write_all(&start).await.unwrap();
        for piece in end.chunks(piece) {
            stream.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        let (mut reset, mut response) = (None, Vec::new());
        let pinged = async {
            loop {
                let mut header = [0; 9];
                stream.read_exact(&mut header).await.unwrap();
                let mut payload = vec![0; usize::from(header[1]) << 8 | usize::from(header[2])];
                stream.read_exact(&mut payload).await.unwrap();
                match header[3] {
                    RST_STREAM => reset = Some((header[8], payload)),
                    6 if header[4] == 1 => response = payload,
                    _ => {}
                }
                if reset.is_some() && !response.is_empty() {
                    return;
                }
            }
        };
        timeout(TIMEOUT, pinged).await.expect("the stream is reset and the connection stays open");
        assert_eq!(response, b"are you?");
        assert_eq!(reset, Some((1, PROTOCOL_ERROR.to_vec())), "{:?}", Reason::PROTOCOL_ERROR);
    }
    assert_eq!(fixture.region.requests(), 0);
}
