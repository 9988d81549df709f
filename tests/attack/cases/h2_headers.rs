//! HTTP/2 headers: HPACK (RFC 7541), pseudo-headers, fields and trailers (RFC 9113, 8).

use super::shown;
use crate::case::{BODY, Case, Outcome, STREAM_ERROR};
use crate::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, field, fields, frame, length, request,
};

const CONNECTION: [Outcome; 1] = [Outcome::ConnectionError];
const SERVED: [Outcome; 1] = [Outcome::Status(&[200])];
const EITHER: [Outcome; 3] =
    [Outcome::Status(&[200, 400, 401, 404, 405, 415, 421]), Outcome::Reset, Outcome::ConnectionError];
const LARGE: [Outcome; 3] = [Outcome::Status(&[400, 431]), Outcome::Reset, Outcome::ConnectionError];

pub(super) fn cases() -> Vec<Case> {
    compression().into_iter().chain(pseudo()).chain(regular()).chain(bodies()).collect()
}

fn with_body(block: Vec<u8>) -> Vec<Vec<u8>> {
    vec![frame(HEADERS, END_HEADERS, 1, block), frame(DATA, END_STREAM, 1, BODY)]
}

/// Splits a header block into as many frames as needed.
fn split(block: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces = block.chunks(16_000).peekable();
    let mut frames = vec![frame(HEADERS, 0, 1, pieces.next().unwrap())];
    while let Some(piece) = pieces.next() {
        let flags = if pieces.peek().is_none() { END_HEADERS } else { 0 };
        frames.push(frame(CONTINUATION, flags, 1, piece));
    }
    frames.push(frame(DATA, END_STREAM, 1, BODY));
    frames
}

fn compression() -> Vec<Case> {
    let block = |name: &str, block: &[u8], outcomes: &[Outcome]| {
        Case::h2(format!("hpack {name}"), with_body(block.to_vec()), outcomes)
    };
    let behind = |bytes: &[u8]| [&request(&[])[..], bytes].concat();
    let mut bomb = vec![0x40];
    bomb.extend(field("x-bomb", "y".repeat(3_900)).into_iter().skip(1));
    bomb.extend(std::iter::repeat_n(0xbe, 12_000));
    vec![
        block("index 0", &[0x80], &CONNECTION),
        block("index 62 of an empty table", &[0xbe], &CONNECTION),
        block("index 70,000", &[0xff, 0xf1, 0xa1, 0x04], &CONNECTION),
        block("an index without an end", &[0xff; 40], &CONNECTION),
        block("an index that is cut", &[0xff], &CONNECTION),
        block("an index of zeros without an end", &[&[0xff][..], &[0x80; 30]].concat(), &CONNECTION),
        block("a name without a length", &[0x00], &CONNECTION),
        block("a name that is cut", &[0x00, 10, b'x'], &CONNECTION),
        block("a value that is cut", &[0x00, 1, b'x', 10, b'y'], &CONNECTION),
        block("a length of 2^32", &[0x00, 0x7f, 0x81, 0xff, 0xff, 0xff, 0x0f], &CONNECTION),
        block("a literal of index 99", &[0x0f, 84, 1, b'x'], &CONNECTION),
        block("Huffman with a long padding", &[0x00, 0x82, 0xff, 0xff, 0], &CONNECTION),
        block("Huffman with the end of string", &[0x00, 0x84, 0xff, 0xff, 0xff, 0xff, 0], &CONNECTION),
        block("Huffman with a padding of zeros", &[0x00, 0x81, 0x00, 0], &CONNECTION),
        block("a table of 2 MB", &[0x3f, 0xe1, 0xff, 0x7f], &CONNECTION),
        block("a table of 2^40", &[0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0x1f], &CONNECTION),
        block("a table of 0 and back", &[&[0x20, 0x3f, 0xe1, 0x1f][..], &request(&[])].concat(), &SERVED),
        block("a table that changes behind a field", &behind(&[0x20]), &CONNECTION),
        block("a valid static name", &behind(&[0x0f, 43, 1, b'x']), &EITHER),
        Case::h2("hpack bomb of references", split(&behind(&bomb)), &LARGE),
        Case::h2("hpack 70 KB of fields", split(&behind(&field("x-a", "b".repeat(70_000)))), &LARGE),
        Case::h2("hpack 1 MB of fields", split(&behind(&field("x-a", "b".repeat(1 << 20)))), &LARGE),
        Case::h2("hpack 20,000 fields", split(&behind(&field("x", "y").repeat(20_000))), &LARGE),
        Case::h2("hpack a name of 20 KB", split(&behind(&field("x".repeat(20_000), "y"))), &EITHER),
        Case::h2("hpack 20 KB of cookies", split(&behind(&field("cookie", "a=b").repeat(1_500))), &EITHER),
        Case::h2(
            "hpack a length that is not the value's",
            with_body(behind(&[&[0][..], &length(1), b"x", &length(500), b"y"].concat())),
            &CONNECTION,
        ),
    ]
}

const VALID_FIELDS: [(&str, &str); 5] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1/embeddings"),
    (":authority", "x"),
    ("authorization", "Bearer attack-key"),
];

fn pseudo() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |name: String, all: &[(&str, &str)], outcomes: &[Outcome]| {
        cases.push(Case::h2(format!("pseudo {name}"), with_body(fields(all)), outcomes));
    };
    for (index, (name, value)) in VALID_FIELDS[..4].iter().enumerate() {
        let mut without = VALID_FIELDS.to_vec();
        without.remove(index);
        // The authority may be in `host`, and may be absent.
        let outcomes = if *name == ":authority" { &EITHER[..] } else { &STREAM_ERROR };
        case(format!("without {name}"), &without, outcomes);
        let mut twice = VALID_FIELDS.to_vec();
        twice.insert(index, (name, value));
        case(format!("{name} twice"), &twice, &STREAM_ERROR);
        let mut late = without.clone();
        late.push((name, value));
        case(format!("{name} behind a field"), &late, &STREAM_ERROR);
        let mut empty = VALID_FIELDS.to_vec();
        empty[index].1 = "";
        case(format!("{name} empty"), &empty, &EITHER[..]);
    }
    for (name, value) in [
        (":status", "200"),
        (":foo", "x"),
        (":protocol", "websocket"),
        (":", "x"),
        (":path ", "/"),
        (":Method", "GET"),
    ] {
        case(format!("{name} = {value}"), &[&[(name, value)][..], &VALID_FIELDS].concat(), &STREAM_ERROR);
    }
    for (at, values) in [
        (
            0,
            &[
                "GET", "CONNECT", "post", "P OST", "PO\nST", "PO\0ST", "", "HEAD", "OPTIONS", "TRACE",
                "\u{e9}",
            ][..],
        ),
        (1, &["https", "ftp", "HTTP", "x y", "\r\n"]),
        (
            2,
            &[
                "*",
                "v1/embeddings",
                "http://x/v1/embeddings",
                "//v1/embeddings",
                "/v1/embeddings#x",
                "/v1/emb eddings",
                "/v1/embeddings\r\nx: y",
                "/\0",
                "/\u{e9}",
                "?",
                "/../v1/embeddings",
            ],
        ),
        (3, &["y", "x:99999", "user@x", "x/y", "x y", "x\r\nx: y", "\u{e9}", "[::1", "x,y"]),
    ] {
        for value in values {
            let mut all = VALID_FIELDS.to_vec();
            all[at].1 = value;
            case(format!("{} = {}", VALID_FIELDS[at].0, shown(value)), &all, &EITHER);
        }
    }
    cases
}

fn regular() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |name: &[u8], value: &[u8], outcomes: &[Outcome]| {
        let block = [request(&[]), field(name, value)].concat();
        cases.push(Case::h2(
            format!("h2 field {}: {}", shown(name), shown(value)),
            with_body(block),
            outcomes,
        ));
    };
    for name in ["X-A", "x A", "x:a", "x\ra", "x\na", "x\0a", "", "x\u{e9}", " x", "x "] {
        case(name.as_bytes(), b"y", &STREAM_ERROR);
    }
    // Names that are not tokens; RFC 9113 (8.2.1) permits them.
    for name in ["x\"a", "x(a", "x/a"] {
        case(name.as_bytes(), b"y", &EITHER);
    }
    for value in [&b"a\rb"[..], b"a\nb", b"a\0b", b"\r\nx: y", b"\x01", b"\x7f"] {
        case(b"x-a", value, &STREAM_ERROR);
    }
    for value in [&b" a"[..], b"a ", b"\ta", b"\x80\xff", b""] {
        case(b"x-a", value, &EITHER);
    }
    for (name, value) in [
        ("connection", "close"),
        ("connection", "x-meridian-residency"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("te", "gzip"),
        ("te", "trailers, gzip"),
    ] {
        case(name.as_bytes(), value.as_bytes(), &STREAM_ERROR);
    }
    for (name, value, outcomes) in [
        ("te", "trailers", &SERVED[..]),
        ("host", "x", &EITHER),
        ("host", "y", &EITHER),
        ("expect", "100-continue", &SERVED),
        ("content-length", "35", &SERVED),
        ("content-length", "34", &STREAM_ERROR),
        ("content-length", "36", &STREAM_ERROR),
        ("content-length", "0", &STREAM_ERROR),
        ("content-length", "-1", &EITHER),
        ("content-length", "x", &EITHER),
        ("content-length", "99999999999999999999", &LARGE_OR_ERROR),
        ("content-length", "33554433", &LARGE_OR_ERROR),
        ("x-meridian-residency", "euu", &[Outcome::Status(&[400])]),
        ("x-meridian-residency", "eu", &[Outcome::Status(&[403, 503])]),
        ("x-meridian-timeout-ms", "0", &[Outcome::Status(&[400])]),
        ("authorization", "Bearer wrong", &[Outcome::Status(&[400, 401])]),
        ("content-encoding", "br", &[Outcome::Status(&[415])]),
        ("content-encoding", "gzip", &[Outcome::Status(&[400])]),
    ] {
        case(name.as_bytes(), value.as_bytes(), outcomes);
    }
    cases
}

const LARGE_OR_ERROR: [Outcome; 3] = [Outcome::Status(&[400, 413]), Outcome::Reset, Outcome::ConnectionError];

fn bodies() -> Vec<Case> {
    let open_stream = || frame(HEADERS, END_HEADERS, 1, request(&[]));
    let data = || frame(DATA, 0, 1, BODY);
    let trailers = |flags: u8, all: &[(&str, &str)]| frame(HEADERS, END_HEADERS | flags, 1, fields(all));
    let case = |name: &str, frames: Vec<Vec<u8>>, outcomes: &[Outcome]| {
        Case::h2(format!("h2 {name}"), frames, outcomes)
    };
    vec![
        case("trailers", vec![open_stream(), data(), trailers(END_STREAM, &[("x-t", "y")])], &SERVED),
        case(
            "trailers without an end",
            vec![open_stream(), data(), trailers(0, &[("x-t", "y")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers with :path",
            vec![open_stream(), data(), trailers(END_STREAM, &[(":path", "/x")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers with :method",
            vec![open_stream(), data(), trailers(END_STREAM, &[(":method", "GET"), ("x-t", "y")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers with :status",
            vec![open_stream(), data(), trailers(END_STREAM, &[(":status", "200")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers with a whole head",
            vec![open_stream(), data(), frame(HEADERS, END_HEADERS | END_STREAM, 1, request(&[]))],
            &STREAM_ERROR,
        ),
        case(
            "trailers with connection",
            vec![open_stream(), data(), trailers(END_STREAM, &[("connection", "close")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers in capitals",
            vec![open_stream(), data(), trailers(END_STREAM, &[("X-T", "y")])],
            &STREAM_ERROR,
        ),
        case(
            "trailers with authorization",
            vec![open_stream(), data(), trailers(END_STREAM, &[("authorization", "Bearer good-key")])],
            &EITHER,
        ),
        case(
            "trailers and no body",
            vec![open_stream(), trailers(END_STREAM, &[("x-t", "y")])],
            &[Outcome::Status(&[400]), Outcome::Reset],
        ),
        case(
            "no body",
            vec![frame(HEADERS, END_HEADERS | END_STREAM, 1, request(&[]))],
            &[Outcome::Status(&[400])],
        ),
        case(
            "a body in bytes",
            std::iter::once(open_stream())
                .chain(BODY.bytes().map(|byte| frame(DATA, 0, 1, [byte])))
                .chain([frame(DATA, END_STREAM, 1, [])])
                .collect(),
            &SERVED,
        ),
        case(
            "invalid JSON",
            vec![open_stream(), frame(DATA, END_STREAM, 1, "{")],
            &[Outcome::Status(&[400])],
        ),
        case(
            "a body that stops",
            vec![open_stream(), frame(DATA, 0, 1, "{")],
            &[Outcome::Status(&[408]), Outcome::Reset],
        ),
    ]
}
