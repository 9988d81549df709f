//! Request lines and methods (RFC 9112, 3; RFC 9110, 9).

use super::shown;
use crate::case::{BODY, Case, Expected, KEY, Step, line, post};

pub(super) fn cases() -> Vec<Case> {
    malformed().chain(methods()).chain(heads()).chain(other_protocols()).collect()
}

fn malformed() -> impl Iterator<Item = Case> {
    let lines: &[&[u8]] = &[
        b"GET",
        b"GET /v1/models",
        b"GET /v1/models HTTP/1.1 x",
        b"GET  /v1/models HTTP/1.1",
        b"GET /v1/models  HTTP/1.1",
        b" GET /v1/models HTTP/1.1",
        b"GET\t/v1/models\tHTTP/1.1",
        b"GET\x0b/v1/models HTTP/1.1",
        b"GET\x0c/v1/models HTTP/1.1",
        b"GET\xa0/v1/models HTTP/1.1",
        b"G\0T /v1/models HTTP/1.1",
        b"G(T /v1/models HTTP/1.1",
        b"G:T /v1/models HTTP/1.1",
        b"G@T /v1/models HTTP/1.1",
        b"G\"T /v1/models HTTP/1.1",
        b"G\x7fT /v1/models HTTP/1.1",
        b"G\xc3\xa9T /v1/models HTTP/1.1",
        b"/v1/models HTTP/1.1",
        b"GET HTTP/1.1",
        b"HTTP/1.1 200 OK",
        b"GET /v1/models HTTP/9.9",
        b"GET /v1/models HTTP/3.0",
        b"GET /v1/models HTTP/2.0",
        b"GET /v1/models HTTP/0.9",
        b"GET /v1/models http/1.1",
        b"GET /v1/models HTTP/1.1.1",
        b"GET /v1/models HTTP/11",
        b"GET /v1/models HTTP/1.",
        b"GET /v1/models HTTP/.1",
        b"GET /v1/models HTTP/ 1.1",
        b"GET /v1/models HTTP /1.1",
        b"GET /v1/models HTTQ/1.1",
        b"GET /v1/models HTTP/1.1\0",
        b"GET /v1/models HTTP/1.1\t",
        b"GET /v1/models HTTP/1.1 ",
        b"GET /v1/models HTTP/-1.1",
        b"GET /v1/models HTTP/1.10",
        b"GET /v1/mod els HTTP/1.1",
        b"GET /v1/\x7f HTTP/1.1",
        b"GET /v1/\x01 HTTP/1.1",
        b"GET /v1/\0 HTTP/1.1",
        b"GET /v1/\xc3\xa9 HTTP/1.1",
        b"GET /v1/\xff HTTP/1.1",
        b"GET /v1/models\rX HTTP/1.1",
        b"GET /v1/models\nX: y HTTP/1.1",
        b"\0\0\0\0",
        b"\r",
        b"\x80\x80",
        b":",
        b": :",
    ];
    let with_line = |line: &&[u8]| {
        let rest = format!("\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n");
        Case::h1(format!("line {}", shown(line)), [*line, rest.as_bytes()].concat(), &[&[400, 505]])
    };
    let long = [
        ("a method of 10 KB", "X".repeat(10_000) + " / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
        ("a line of 1 MB without an end", "x".repeat(1 << 20)),
        ("a version of 10 KB", format!("GET / HTTP/1.{}\r\nhost: x\r\n\r\n", "1".repeat(10_000))),
        ("three blank lines first", "\r\n\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".to_owned()),
        ("a thousand blank lines", "\r\n".repeat(1000)),
        ("bare line feeds", "GET /v1/models HTTP/1.1\nhost: x\n\n".to_owned()),
        ("bare carriage returns", "GET /v1/models HTTP/1.1\rhost: x\r\r".to_owned() + &" ".repeat(70_000)),
    ];
    let long =
        long.map(|(name, bytes)| Case::h1(format!("line {name}"), bytes, &[&[400, 404, 405, 414, 431, 501]]));
    lines.iter().map(with_line).chain(long).collect::<Vec<_>>().into_iter()
}

fn methods() -> impl Iterator<Item = Case> {
    let methods = [
        "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "MKCOL", "LOCK", "FOO",
        "post", "Post", "P", "M-SEARCH", "PRI", "SOURCE", "BREW",
    ];
    let new = |method: &&str| {
        let responses: &[u16] = &[400, 405, 501];
        Case::h1(format!("method {method}"), line(&format!("{method} /v1/embeddings HTTP/1.1")), &[responses])
    };
    let asterisk = Case::h1("method OPTIONS *", line("OPTIONS * HTTP/1.1"), &[&[200, 204, 404, 405]]);
    methods.iter().map(new).chain([asterisk]).collect::<Vec<_>>().into_iter()
}

/// Responses to HEAD are those to GET without bodies.
fn heads() -> impl Iterator<Item = Case> {
    [
        ("/v1/models", &[200][..], ""),
        ("/deployments/anywhere/info", &[200], ""),
        ("/deployments/anywhere/info", &[200, 504], "x-meridian-timeout-ms: 50\r\n"),
        ("/deployments/anywhere/info", &[200, 504], "x-meridian-timeout-ms: 2500\r\n"),
        ("/deployments/anywhere/info", &[200, 504], "x-meridian-timeout-ms: 2500\r\n"),
        ("/deployments/nowhere/info", &[404], ""),
        ("/v1/embeddings", &[405], ""),
        ("/nothing", &[404], ""),
        ("/v1/models", &[200, 400], "content-length: 0\r\n"),
    ]
    .into_iter()
    .enumerate()
    .map(|(number, (path, statuses, fields))| {
        let head = format!(
            "HEAD {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n{fields}\r\n"
        );
        let expected = Expected::Heads(vec![statuses]);
        Case::new(format!("head {number} {path}"), vec![Step::Send(head.into_bytes())], expected)
    })
    .chain([
        // Each of these crashed a gateway once.
        Case::new(
            "head many in a row",
            vec![
                Step::Repeat(
                    format!(
                        "HEAD /deployments/anywhere/info HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
                    )
                    .into_bytes(),
                    20,
                ),
                Step::Send(line("HEAD /deployments/anywhere/info HTTP/1.1")),
            ],
            Expected::Heads(vec![&[200]; 21]),
        ),
        Case::new(
            "get of info, by a client that disconnects",
            vec![Step::Send(line("GET /deployments/anywhere/info HTTP/1.1")), Step::Abort],
            Expected::Nothing,
        ),
        Case::h1("get of info", line("GET /deployments/anywhere/info HTTP/1.1"), &[&[200]]),
    ])
}

fn other_protocols() -> impl Iterator<Item = Case> {
    let hello: &[u8] = b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03";
    [
        ("TLS", hello),
        ("SOCKS 5", b"\x05\x01\0"),
        ("SMTP", b"EHLO example.org\r\n"),
        ("SSH", b"SSH-2.0-OpenSSH_9.6\r\n"),
        ("Redis", b"*1\r\n$4\r\nPING\r\n"),
        ("PROXY 1", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("PROXY 2", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"),
        ("RTSP", b"OPTIONS rtsp://x/y RTSP/1.0\r\nCSeq: 1\r\n\r\n"),
        ("a shell", b"id; cat /etc/passwd\n"),
    ]
    .into_iter()
    .map(|(name, bytes)| {
        let steps = vec![Step::Send(bytes.to_vec()), Step::HalfClose];
        Case::new(format!("protocol {name}"), steps, Expected::Closed)
    })
    .chain([Case::h1("valid protocol HTTP/1.1", post("", BODY), &[&[200]])])
}
