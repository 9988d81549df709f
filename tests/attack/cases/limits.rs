//! Headers that the gateway reads, at their limits and past them; content codings by name.

use super::shown;
use crate::case::{BODY, Case, post};

pub(super) fn cases() -> Vec<Case> {
    const REJECTED: &[u16] = &[400];
    let padded = |bytes: usize| format!("us,{}us", " ".repeat(bytes - 5));
    let listed = |bytes: usize| "us,".repeat(bytes / 3);
    let mut cases: Vec<(&str, String, &'static [u16])> = Vec::new();
    for (value, responses) in [
        ("us", &[200][..]),
        ("us,eu", &[200]),
        ("US", &[200, 400]),
        // No allowed region exists.
        ("eu", &[403, 503]),
        ("euu", REJECTED),
        ("", REJECTED),
        (",", REJECTED),
        ("us,,us", REJECTED),
        ("!us", &[400, 403]),
        ("-us", REJECTED),
        ("us eu", REJECTED),
        ("us;eu", REJECTED),
        ("*", REJECTED),
        ("us\u{e9}", REJECTED),
        ("aws/us-east-1", &[200]),
        ("aws/", REJECTED),
        ("/us-east-1", REJECTED),
        ("../../etc", REJECTED),
        ("{\"allow\":[\"us\"]}", REJECTED),
    ] {
        cases.push(("x-meridian-residency", value.to_owned(), responses));
    }
    for (value, responses) in [
        (padded(4096), &[200, 400][..]),
        (padded(4097), REJECTED),
        (listed(4085) + "us", &[200, 400]),
        (listed(4094) + "us", &[200, 400]),
        (listed(60_000) + "us", REJECTED),
        ("us,".repeat(1_000) + "zz", REJECTED),
        (format!("{}us", "eu,gb,ch,".repeat(450)), &[200, 400]),
    ] {
        cases.push(("x-meridian-residency", value, responses));
    }
    for (value, responses) in [
        ("600000", &[200][..]),
        ("1", &[200, 504]),
        ("0", REJECTED),
        ("-1", REJECTED),
        ("+5", &[200, 400, 504]),
        ("600001", REJECTED),
        ("1.5", REJECTED),
        ("1e3", REJECTED),
        ("0x10", REJECTED),
        ("5 5", REJECTED),
        ("", REJECTED),
        ("abc", REJECTED),
        ("NaN", REJECTED),
        ("18446744073709551615", REJECTED),
        ("18446744073709551616", REJECTED),
        ("99999999999999999999999999999999999999999", REJECTED),
        ("\u{0665}", REJECTED),
    ] {
        cases.push(("x-meridian-timeout-ms", value.to_owned(), responses));
    }
    for (value, responses) in [
        ("interactive", &[200][..]),
        ("bulk", &[200]),
        ("x", REJECTED),
        ("", REJECTED),
        ("interactive, bulk", REJECTED),
        ("Interactive", &[200, 400]),
        ("\u{e9}", REJECTED),
    ] {
        cases.push(("x-meridian-priority", value.to_owned(), responses));
    }
    // The client is not a trusted peer, so its location may be ignored.
    for value in ["91,0", "0,181", "NaN,NaN", "inf,0", "1e400,0", "", "0", "0,0,0", "a,b", "0;0", "\u{e9},0"]
    {
        cases.push(("x-meridian-client-geo", value.to_owned(), &[200, 400]));
    }
    cases.push(("x-meridian-client-geo", "-90,180".to_owned(), &[200]));
    for (value, responses) in
        [("x".repeat(129), &[200][..]), ("\u{e9}".to_owned(), &[200]), ("a b".to_owned(), &[200])]
    {
        cases.push(("x-request-id", value, responses));
    }
    for (value, responses) in [
        ("identity", &[200][..]),
        ("br", &[415]),
        ("deflate", &[415]),
        ("zstd", &[415]),
        ("gzip, gzip", &[415]),
        ("identity, gzip", &[400, 415]),
        ("gzip;q=1", &[400, 415]),
        ("", &[200, 415]),
        ("\u{e9}", &[400, 415]),
        // The body is not gzip.
        ("gzip", REJECTED),
        ("x-gzip", &[400, 415]),
    ] {
        cases.push(("content-encoding", value.to_owned(), responses));
    }
    let mut cases: Vec<Case> = cases
        .into_iter()
        .map(|(name, value, responses)| {
            let bytes = post(&format!("{name}: {value}\r\n"), BODY);
            Case::h1(format!("limit {name} {}", shown(&value)), bytes, &[responses])
        })
        .collect();
    for (name, one, other) in [
        ("x-meridian-residency", "us", "eu"),
        ("x-meridian-timeout-ms", "5000", "1"),
        ("x-meridian-priority", "bulk", "interactive"),
        ("content-encoding", "identity", "gzip"),
    ] {
        for (one, other) in [(one, other), (other, one), (one, one)] {
            let bytes = post(&format!("{name}: {one}\r\n{name}: {other}\r\n"), BODY);
            cases.push(Case::h1(format!("limit {name} twice, {one} and {other}"), bytes, &[&[400, 415]]));
        }
    }
    cases
}
