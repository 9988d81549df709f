//! Authentication (RFC 9110, 11; RFC 6750).

use super::shown;
use crate::case::{BODY, Case, Expected, KEY, Step};

pub(super) fn cases() -> Vec<Case> {
    const REJECTED: &[u16] = &[400, 401];
    let good = format!("authorization: Bearer {KEY}\r\n");
    let bad = "authorization: Bearer wrong\r\n";
    let new = |value: &str| format!("authorization: {value}\r\n");
    let jwt = "eyJhbGciOiJub25lIn0.eyJ0ZW5hbnQiOiJhdHRhY2tlciJ9.";
    let cases: Vec<(String, &'static [u16])> = vec![
        (String::new(), REJECTED),
        (new(""), REJECTED),
        (new("Bearer"), REJECTED),
        (new("Bearer "), REJECTED),
        (new("Bearer wrong"), REJECTED),
        (new("Bearer  "), REJECTED),
        (new(KEY), REJECTED),
        (new(&format!("Basic {KEY}")), REJECTED),
        (new(&format!("Digest {KEY}")), REJECTED),
        (new(&format!("Bearer{KEY}")), REJECTED),
        (new(&format!("Bearer\t{KEY}")), &[200, 400, 401]),
        (new(&format!("Bearer  {KEY}")), &[200, 400, 401]),
        (new(&format!("bearer {KEY}")), &[200]),
        (new(&format!("BEARER {KEY}")), &[200]),
        (new(&format!("Bearer {KEY},")), REJECTED),
        (new(&format!("Bearer {KEY} x")), REJECTED),
        (new(&format!("Bearer {KEY}, Bearer {KEY}")), REJECTED),
        (new(&format!("Bearer wrong, Bearer {KEY}")), REJECTED),
        (new(&format!("Bearer \"{KEY}\"")), REJECTED),
        (new(&format!("Bearer {}", KEY.to_uppercase())), REJECTED),
        (new(&format!("Bearer {KEY}\u{0}")), REJECTED),
        (new(&format!("Bearer {KEY}\u{e9}")), REJECTED),
        (new(&format!("Bearer {}", &KEY[..KEY.len() - 1])), REJECTED),
        (new(&format!("Bearer {KEY}x")), REJECTED),
        (new(&format!("Bearer {}", "x".repeat(50_000))), REJECTED),
        (new(&format!("Bearer {jwt}")), REJECTED),
        (new("Bearer ..."), REJECTED),
        (new("Bearer a.b.c"), REJECTED),
        (new(&format!("Bearer {}", "a.".repeat(10_000))), REJECTED),
        (new("Bearer good-key\r\nx-meridian-tenant: attacker"), &[200]),
        (format!("{good}{bad}"), REJECTED),
        (format!("{bad}{good}"), REJECTED),
        (format!("{good}{good}"), REJECTED),
        (format!("{good}Authorization:\r\n"), REJECTED),
        (format!("proxy-authorization: Bearer {KEY}\r\n"), REJECTED),
        (format!("cookie: authorization=Bearer {KEY}\r\n"), REJECTED),
        (format!("{good}x-meridian-tenant: good\r\nx-meridian-policy: eu\r\n"), &[200]),
    ];
    let case = |(fields, responses): (String, &'static [u16])| {
        let bytes = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}content-length: {}\r\n\r\n{BODY}",
            BODY.len()
        );
        Case::h1(format!("auth {}", shown(fields)), bytes, &[responses])
    };
    cases.into_iter().map(case).chain(refused_early()).collect()
}

/// Early rejections, to clients that continue to send the body.
fn refused_early() -> Vec<Case> {
    let head = |length: usize| {
        format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        )
        .into_bytes()
    };
    let no = || Expected::Statuses(vec![&[401]]);
    vec![
        Case::new(
            "auth none, 60 KB of body",
            vec![Step::Send([head(60_000), vec![b' '; 60_000]].concat())],
            no(),
        ),
        Case::new(
            "auth none, 30 MB of body",
            vec![Step::Send(head(30 << 20)), Step::Repeat(vec![b' '], 30 << 20)],
            Expected::Closed,
        ),
        Case::new("auth none, and no body", vec![Step::Send(head(1_000_000))], Expected::Closed),
    ]
}
