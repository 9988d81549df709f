//! Body framing (RFC 9112, 6): the basis of request smuggling.

use super::shown;
use crate::case::{BODY, Case, Expected, KEY, Step, head, line};

const REFUSED: &[u16] = &[400];

pub(super) fn cases() -> Vec<Case> {
    lengths().into_iter().chain(codings()).chain(length_and_chunks()).chain(smuggled_requests()).collect()
}

/// A POST with these fields and the usual body, after which the connection ends.
fn case(name: &str, fields: &str, body: &str, responses: &[&'static [u16]]) -> Case {
    let bytes = [head(&format!("{fields}connection: close\r\n")), body.as_bytes().to_vec()].concat();
    Case::h1(format!("framing {name}"), bytes, responses)
}

fn lengths() -> Vec<Case> {
    let values = [
        "-1",
        "+35",
        "-35",
        "3 5",
        "35,35",
        "35, 35",
        "35, 36",
        "35;",
        "35a",
        "a35",
        "0x23",
        "3.5e1",
        "35.0",
        "",
        " ",
        "\"35\"",
        "35\t35",
        "\u{b2}\u{b3}",
        "99999999999999999999",
        "18446744073709551615",
        "18446744073709551616",
        "18446744073709551651",
        "9223372036854775807",
        "9223372036854775808",
        "340282366920938463463374607431768211491",
        "NaN",
        "35 \u{0}",
        "-0",
        "\u{ff13}5",
        "thirty-five",
    ];
    let refused: &'static [u16] = &[400, 413];
    let of_value = |value: &&str| {
        case(
            &format!("content-length {}", shown(value)),
            &format!("content-length: {value}\r\n"),
            BODY,
            &[refused],
        )
    };
    let mut cases: Vec<Case> = values.iter().map(of_value).collect();
    for (fields, responses) in [
        ("content-length: 35\r\ncontent-length: 35\r\n", REFUSED),
        ("content-length: 35\r\ncontent-length: 0\r\n", REFUSED),
        ("content-length: 0\r\nContent-Length: 35\r\n", REFUSED),
        ("content-length : 35\r\n", REFUSED),
        ("content-length\t: 35\r\n", REFUSED),
        ("content-length:\r\n 35\r\n", REFUSED),
        (" content-length: 35\r\n", REFUSED),
        ("content-length: 35\r\n content-length: 0\r\n", REFUSED),
        ("content-length: 35 \t\r\n", &[200]),
        ("content-length: 035\r\n", &[200, 400]),
        ("content-length: 33554433\r\n", &[413]),
        ("content-length: 4294967296\r\n", &[413]),
        ("content-length: 4294967331\r\n", &[413]),
    ] {
        cases.push(case(&format!("fields {}", shown(fields)), fields, BODY, &[responses]));
    }
    cases
}

fn codings() -> Vec<Case> {
    let body = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    let refused: &'static [u16] = &[400, 501];
    let values = [
        "chunked, chunked",
        "chunked, identity",
        "chunked, gzip",
        "gzip, chunked",
        "identity",
        "gzip",
        "xchunked",
        "chunkedx",
        "chunked;q=1",
        "chunked x",
        "\"chunked\"",
        "chun ked",
        "chunked,",
        ",chunked",
        "",
        " ",
        "\u{b}chunked",
        "chunked\u{b}",
        "\u{0}chunked",
        "chunked\u{0}",
        "cow",
        "identity, chunked",
        "x, chunked",
        "\u{17f}chunked",
        "chun\u{212a}ed",
    ];
    let mut cases: Vec<Case> = values
        .iter()
        .map(|value| {
            let lenient: &'static [u16] =
                if matches!(*value, "chunked," | ",chunked") { &[200, 400, 501] } else { refused };
            let fields = format!("transfer-encoding: {value}\r\n");
            case(&format!("transfer-encoding {}", shown(value)), &fields, &body, &[lenient])
        })
        .collect();
    for (fields, responses) in [
        ("transfer-encoding: chunked\r\n", &[200][..]),
        ("Transfer-Encoding: CHUNKED\r\n", &[200]),
        ("transfer-encoding:chunked\r\n", &[200]),
        ("transfer-encoding: chunked \t\r\n", &[200]),
        ("transfer-encoding : chunked\r\n", REFUSED),
        ("transfer-encoding\t: chunked\r\n", REFUSED),
        ("transfer-encoding:\r\n chunked\r\n", &[400, 501]),
        (" transfer-encoding: chunked\r\n", REFUSED),
        ("x: y\r\n transfer-encoding: chunked\r\n", REFUSED),
        ("x: y\ntransfer-encoding: chunked\r\n", REFUSED),
        ("x: y\rtransfer-encoding: chunked\r\n", REFUSED),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", &[400, 501]),
        ("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", &[400, 501]),
        ("transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n", &[400, 501]),
    ] {
        cases.push(case(&format!("fields {}", shown(fields)), fields, &body, &[responses]));
    }
    let old = format!(
        "POST /v1/embeddings HTTP/1.0\r\nauthorization: Bearer {KEY}\r\ntransfer-encoding: chunked\r\n\r\n{body}"
    );
    cases.push(Case::h1("framing chunks in HTTP/1.0", old, &[REFUSED]));
    cases
}

fn length_and_chunks() -> Vec<Case> {
    let body = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    [
        "content-length: 35\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 35\r\n",
        "content-length: 0\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 0\r\n",
        "transfer-encoding: identity\r\ncontent-length: 35\r\n",
        "content-length: 4\r\ntransfer-encoding: chunked\r\ncontent-length: 35\r\n",
        "content-length: 35\r\nTransfer-Encoding : chunked\r\n",
        "content-length: 35\r\ntransfer-encoding: xchunked\r\n",
        "content-length: 35\r\ntransfer-encoding:\u{b}chunked\r\n",
        "content-length: 35\r\ntransfer-encoding\r\n",
        "content-length: 35\r\ntransfer-encoding: \r\n",
    ]
    .iter()
    .map(|fields| case(&format!("both {}", shown(fields)), fields, &body, &[&[400, 501]]))
    .collect()
}

/// A second request hidden in the first: it must be served as a request of this client, or not at all.
fn smuggled_requests() -> Vec<Case> {
    let hidden = "GET /v1/models HTTP/1.1\r\nhost: x\r\nx: ";
    let last = line("GET /v1/models HTTP/1.1");
    let pair = |fields: &str, body: &str| [head(fields), body.as_bytes().to_vec(), last.clone()].concat();
    let chunked = "transfer-encoding: chunked\r\n";
    vec![
        Case::h1(
            "smuggled behind a body that is shorter than its JSON",
            pair("content-length: 5\r\n", BODY),
            // The rest of the body is not a request line.
            &[REFUSED, REFUSED],
        ),
        Case::h1(
            "smuggled in the body",
            pair(&format!("content-length: {}\r\n", hidden.len()), hidden),
            &[REFUSED, &[200]],
        ),
        Case::h1("smuggled behind the last chunk", pair(chunked, &format!("0\r\n\r\n{hidden}")), &[REFUSED, &[400, 401]]),
        Case::h1(
            "smuggled by a length with chunks",
            pair("content-length: 6\r\ntransfer-encoding: chunked\r\n", &format!("0\r\n\r\n{hidden}")),
            &[REFUSED],
        ),
        Case::new(
            "smuggled in a trailer",
            vec![Step::Send(pair(chunked, &format!("0\r\ncontent-length: 50\r\n{hidden}\r\n\r\n")))],
            Expected::UpTo(vec![REFUSED, &[200]]),
        ),
        Case::new(
            "smuggled behind a GET that has a body",
            vec![
                Step::Send(
                    format!(
                        "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {}\r\n\r\n{hidden}",
                        hidden.len()
                    )
                    .into_bytes(),
                ),
                Step::Send(last.clone()),
            ],
            Expected::UpTo(vec![&[200, 400], &[200]]),
        ),
        Case::new(
            "smuggled after a rejection before the body",
            vec![
                Step::Send(
                    format!(
                        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{hidden}",
                        hidden.len()
                    )
                    .into_bytes(),
                ),
                Step::Send(last),
            ],
            Expected::UpTo(vec![&[401], &[200]]),
        ),
    ]
}
