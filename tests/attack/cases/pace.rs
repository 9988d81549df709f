//! Clients that are slow, disconnect, or send randomly changed bytes.

use std::time::Duration;

use crate::case::{BODY, Case, Expected, KEY, Step, head, line, post};

pub(super) fn cases() -> Vec<Case> {
    slow().into_iter().chain(aborted_cases()).chain(pipelined()).chain(random_cases()).collect()
}

const SOON: Duration = Duration::from_millis(50);

fn slow() -> Vec<Case> {
    let request = post("", BODY);
    let body_at = request.len() - BODY.len();
    let trickle = |bytes: &[u8], gap: u64| Step::Trickle(bytes.to_vec(), Duration::from_millis(gap));
    let send = |bytes: &[u8]| Step::Send(bytes.to_vec());
    let timeout = || Expected::Statuses(vec![&[408]]);
    let served = || Expected::Statuses(vec![&[200]]);
    let mut cases = vec![
        Case::new(
            "slow head, a byte in 5 ms",
            vec![trickle(&request[..body_at], 5), send(BODY.as_bytes())],
            served(),
        ),
        Case::new("slow head, a byte in 200 ms", vec![trickle(&request[..40], 200)], timeout()),
        Case::new(
            "slow body, a byte in 5 ms",
            vec![send(&request[..body_at]), trickle(BODY.as_bytes(), 5)],
            served(),
        ),
        Case::new(
            "slow body, a byte in 400 ms",
            vec![send(&request[..body_at]), trickle(BODY.as_bytes(), 400)],
            Expected::NoServerError,
        ),
        Case::new("request in pieces of one byte", vec![trickle(&request, 0)], served()),
        Case::new(
            "client that waits for 100 Continue and continues",
            vec![send(&post("expect: 100-continue\r\n", BODY))],
            served(),
        ),
        Case::new(
            "client that waits for 100 Continue and does not",
            vec![send(&head("expect: 100-continue\r\ncontent-length: 35\r\n"))],
            Expected::Closed,
        ),
        Case::new("a connection without a request", vec![Step::HalfClose], Expected::Closed),
    ];
    // Incomplete request heads.
    for part in [1, 4, 16, 30, 35, 60, 90] {
        let end = part.min(body_at - 1);
        cases.push(Case::new(
            format!("half a head of {part} bytes"),
            vec![send(&request[..end])],
            Expected::Closed,
        ));
    }
    for part in [0, 1, 17, 34] {
        let steps = vec![send(&request[..body_at + part])];
        cases.push(Case::new(format!("a body that stops after {part} bytes"), steps, timeout()));
    }
    for (name, chunks) in [
        ("a size", "23\r\n"),
        ("half a size", "2"),
        ("a chunk", "1\r\n{\r\n"),
        ("the last one", "2\r\n{}\r\n0\r\n"),
    ] {
        let steps =
            vec![send(&[head("transfer-encoding: chunked\r\n"), chunks.as_bytes().to_vec()].concat())];
        cases.push(Case::new(format!("chunks that stop behind {name}"), steps, Expected::Closed));
    }
    cases
}

fn aborted_cases() -> Vec<Case> {
    let request = post("", BODY);
    let mut cases = Vec::new();
    // A half-closed connection with a complete request must get its response.
    for (name, bytes) in [
        ("a POST", request.clone()),
        ("a POST that would stay", [head("content-length: 35\r\n"), BODY.as_bytes().to_vec()].concat()),
        ("a GET", line("GET /v1/models HTTP/1.1")),
    ] {
        let steps = vec![Step::Send(bytes), Step::HalfClose];
        cases.push(Case::new(format!("half-closed behind {name}"), steps, Expected::Statuses(vec![&[200]])));
    }
    for part in
        [0, 1, 10, 50, 100, request.len() - BODY.len() - 1, request.len() - BODY.len(), request.len() - 1]
    {
        let bytes = request[..part].to_vec();
        cases.push(Case::new(
            format!("half-closed after {part} bytes"),
            vec![Step::Send(bytes.clone()), Step::HalfClose],
            Expected::Closed,
        ));
        cases.push(Case::new(
            format!("disconnected after {part} bytes"),
            vec![Step::Send(bytes), Step::Abort],
            Expected::Nothing,
        ));
    }
    for wait in [0, 1, 3, 10] {
        let steps = vec![Step::Send(request.clone()), Step::Pause(Duration::from_millis(wait)), Step::Abort];
        cases.push(Case::new(format!("disconnected {wait} ms after a request"), steps, Expected::Nothing));
    }
    cases
}

fn pipelined() -> Vec<Case> {
    let request = [head("content-length: 35\r\n"), BODY.as_bytes().to_vec()].concat();
    let last = line("GET /v1/models HTTP/1.1");
    let fifty = vec![Step::Repeat(request.clone(), 50), Step::Send(last.clone())];
    vec![
        Case::new("fifty requests at once", fifty, Expected::Statuses(vec![&[200]; 51])),
        Case::new(
            "a request, and invalid bytes",
            vec![Step::Send(request.clone()), Step::Send(b"\0\0\0\0\r\n\r\n".to_vec())],
            Expected::Statuses(vec![&[200], &[400]]),
        ),
        Case::new(
            "a request, half of another, and a disconnect",
            vec![Step::Send([&request[..], &request[..40]].concat()), Step::Pause(SOON), Step::Abort],
            Expected::Nothing,
        ),
        Case::new(
            "a thousand requests, and a disconnect",
            vec![Step::Repeat(request, 1_000), Step::Abort],
            Expected::Nothing,
        ),
        Case::new(
            "ten thousand requests for a missing path",
            vec![
                Step::Repeat(
                    format!("GET /nothing HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n")
                        .into_bytes(),
                    200,
                ),
                Step::Send(last),
            ],
            Expected::NoServerError,
        ),
    ]
}

/// Requests with randomly changed bytes, from a fixed seed.
fn random_cases() -> Vec<Case> {
    let mut state = 0x6d65_7269_6469_616e_u64;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let request = post("transfer-encoding: \r\nx-meridian-timeout-ms: 500\r\n", BODY);
    let plain = post("x-meridian-timeout-ms: 500\r\n", BODY);
    let mut cases = Vec::new();
    for number in 0..60 {
        let mut bytes = if number % 2 == 0 { plain.clone() } else { request.clone() };
        for _ in 0..=next(4) {
            let at = next(bytes.len());
            match next(3) {
                0 => bytes[at] = next(256) as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, [b'\r', b'\n', b' ', b':', 0, b'0', 0xff][next(7)]),
            }
        }
        let steps = vec![Step::Send(bytes), Step::HalfClose];
        cases.push(Case::new(format!("chance {number}"), steps, Expected::NoServerError));
    }
    for number in 0..10 {
        let bytes: Vec<u8> = (0..500).map(|_| next(256) as u8).collect();
        let steps = vec![Step::Send(bytes), Step::HalfClose];
        cases.push(Case::new(format!("noise {number}"), steps, Expected::NoServerError));
    }
    cases
}
