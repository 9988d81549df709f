//! Header fields (RFC 9110, 5; RFC 9112, 5).

use super::shown;
use crate::case::{BODY, Case, KEY, post};

pub(super) fn cases() -> Vec<Case> {
    let separators = b"\"(),/;<=>?@[\\]{} \t".iter().copied();
    let controls = (0..=0x1f).filter(|byte| !matches!(byte, b'\t' | b'\r' | b'\n')).chain([0x7f]);
    let in_name = separators.chain(controls.clone()).chain([0x80, 0xff]).map(|byte| {
        let field = [b"x", &[byte][..], b"a: b\r\n"].concat();
        case(format!("name with {byte:#04x}"), &field, &[400])
    });
    let in_value = controls.map(|byte| {
        let field = [b"x-a: b", &[byte][..], b"c\r\n"].concat();
        case(format!("value with {byte:#04x}"), &field, &[400])
    });
    in_name.chain(in_value).chain(shapes()).chain(hosts()).chain(hop_by_hop()).collect()
}

/// A valid request except for this field.
fn case(name: String, field: &[u8], statuses: &'static [u16]) -> Case {
    let request = post("\x01", BODY);
    let place = request.iter().position(|byte| *byte == 1).unwrap();
    let bytes = [&request[..place], field, &request[place + 1..]].concat();
    Case::h1(format!("field {name}"), bytes, &[statuses])
}

fn shapes() -> Vec<Case> {
    let many = |count: usize| "x-a: b\r\n".repeat(count).into_bytes();
    let long = |bytes: usize| format!("x-a: {}\r\n", "b".repeat(bytes)).into_bytes();
    let shapes: Vec<(&str, Vec<u8>, &'static [u16])> = vec![
        ("without a colon", b"x-a\r\n".to_vec(), &[400]),
        ("without a name", b": b\r\n".to_vec(), &[400]),
        ("of a colon", b":\r\n".to_vec(), &[400]),
        ("space before the colon", b"x-a : b\r\n".to_vec(), &[400]),
        ("tab before the colon", b"x-a\t: b\r\n".to_vec(), &[400]),
        ("folded", b"x-a: b\r\n c\r\n".to_vec(), &[400]),
        ("folded with a tab", b"x-a: b\r\n\tc\r\n".to_vec(), &[400]),
        ("a bare CR", b"x-a: b\rc\r\n".to_vec(), &[400]),
        ("a bare LF", b"x-a: b\nx-c: d\r\n".to_vec(), &[400]),
        ("CR CR LF", b"x-a: b\r\r\n".to_vec(), &[400]),
        ("without a value", b"x-a:\r\n".to_vec(), &[200]),
        ("without a space", b"x-a:b\r\n".to_vec(), &[200]),
        ("spaces around", b"x-a: \t b \t\r\n".to_vec(), &[200]),
        ("obs-text", b"x-a: \x80\xff\r\n".to_vec(), &[200]),
        ("every token character", b"!#$%&'*+-.^_`|~0aZ: b\r\n".to_vec(), &[200]),
        ("a name of 10 KB", [&b"x"[..], &b"y".repeat(10_000), b": b\r\n"].concat(), &[200, 400, 431]),
        ("eighty of them", many(80), &[200]),
        ("a hundred of them", many(100), &[431]),
        ("ten thousand of them", many(10_000), &[431]),
        ("of 60 KB", long(60_000), &[200]),
        ("of 64 KB", long(64 << 10), &[431]),
        ("of 1 MB", long(1 << 20), &[431]),
        ("a cookie of 30 KB", format!("cookie: {}\r\n", "a=b; ".repeat(6_000)).into_bytes(), &[200]),
        ("an answer's", b"set-cookie: a=b\r\nserver: x\r\n".to_vec(), &[200]),
    ];
    shapes.into_iter().map(|(name, field, statuses)| case(name.to_owned(), &field, statuses)).collect()
}

fn hosts() -> Vec<Case> {
    let with_host = |field: &str| {
        format!("GET /v1/models HTTP/1.1\r\n{field}authorization: Bearer {KEY}\r\nconnection: close\r\n\r\n")
    };
    let refused: &'static [u16] = &[400];
    let cases: Vec<(&str, &'static [u16])> = vec![
        ("", refused),
        ("host: x\r\nhost: x\r\n", refused),
        ("host: x\r\nhost: y\r\n", refused),
        ("host: x\r\nHOST: y\r\n", refused),
        ("host: a b\r\n", &[200, 400]),
        ("host: a/b\r\n", &[200, 400]),
        ("host: a@b\r\n", &[200, 400]),
        ("host: a,b\r\n", &[200, 400]),
        ("host: x:port\r\n", &[200, 400]),
        ("host: x:99999\r\n", &[200, 400]),
        ("host: [::1\r\n", &[200, 400]),
        ("host:\r\n", &[200, 400]),
        ("host: \u{e9}\r\n", &[200, 400]),
        ("host: x\r\nx-forwarded-host: y\r\nforwarded: host=z\r\n", &[200]),
    ];
    let mut cases: Vec<Case> = cases
        .into_iter()
        .map(|(field, statuses)| Case::h1(format!("host {}", shown(field)), with_host(field), &[statuses]))
        .collect();
    let old = format!("GET /v1/models HTTP/1.0\r\nauthorization: Bearer {KEY}\r\n\r\n");
    cases.push(Case::h1("host none in HTTP/1.0", old, &[&[200]]));
    cases
}

/// Hop-by-hop fields must not change how the request is understood by the next hop.
fn hop_by_hop() -> Vec<Case> {
    let cases: Vec<(&str, &'static [u16])> = vec![
        ("connection: content-length\r\n", &[200, 400]),
        ("connection: authorization\r\n", &[200, 400, 401]),
        ("connection: host, x-meridian-residency\r\nx-meridian-residency: us\r\n", &[200, 400]),
        ("connection: transfer-encoding\r\n", &[200, 400]),
        ("connection: \x0c\r\n", &[400]),
        ("connection: ,,,\r\n", &[200, 400]),
        ("keep-alive: timeout=99999999999\r\n", &[200]),
        ("proxy-connection: keep-alive\r\n", &[200]),
        ("te: trailers, deflate;q=0.5\r\n", &[200]),
        ("trailer: content-length\r\n", &[200, 400]),
        ("upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n", &[200, 400]),
        ("upgrade: websocket\r\nsec-websocket-key: x\r\n", &[200, 400]),
        ("max-forwards: 0\r\n", &[200]),
        ("expect: 200-maybe\r\n", &[200, 417]),
        ("expect: 100-continue\r\nexpect: 100-continue\r\n", &[200, 400, 417]),
        ("range: bytes=0-1\r\n", &[200]),
        ("if-none-match: *\r\n", &[200]),
        ("accept: application/nothing\r\n", &[200, 406]),
        ("accept-encoding: gzip;q=99999, *;q=0, identity;q=0\r\n", &[200, 406]),
        ("content-type: text/plain\r\n", &[200, 415]),
        ("content-type: \u{80}\r\n", &[200, 400, 415]),
        ("x-forwarded-for: 1.2.3.4, 127.0.0.1\r\nx-real-ip: ::1\r\n", &[200]),
    ];
    cases
        .into_iter()
        .map(|(field, statuses)| case(format!("hop {}", shown(field)), field.as_bytes(), statuses))
        .collect()
}
