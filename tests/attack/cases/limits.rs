//! Headers that the gateway reads, at their limits and past them; content codings by name.

use super::shown;
use crate::case::{BODY, Case, post};

pub(super) fn cases() -> Vec<Case> {
    const NO: &[u16] = &[400];
    let padded = |bytes: usize| format!("us,{}us", " ".repeat(bytes - 5));
    let listed = |bytes: usize| "us,".repeat(bytes / 3);
    let mut cases: Vec<(&str, String, &'static [u16])> = Vec::new();
    for (value, responses) in [
        ("us", &[200][..]),
        ("us,eu", &[200]),
        ("US", &[200, 400]),
        // No allowed region exists.
        ("eu", &[403, 503]),
        ("euu", NO),
        ("", NO),
        (",", NO),
        ("us,,us", NO),
        ("!us", &[400, 403]),
        ("-us", NO),
        ("us eu", NO),
        ("us;eu", NO),
        ("*", NO),
        ("us\u{e9}", NO),
        ("aws/us-east-1", &[200]),
        ("aws/", NO),
        ("/us-east-1", NO),
        ("../../etc", NO),
        ("{\"allow\":[\"us\"]}", NO),
    ] {
        cases.push(("x-meridian-residency", value.to_owned(), responses));
    }
    for (value, responses) in [
        (padded(4096), &[200, 400][..]),
        (padded(4097), NO),
        (listed(4085) + "us", &[200, 400]),
        (listed(4094) + "us", &[200, 400]),
        (listed(60_000) + "us", NO),
        ("us,".repeat(1_000) + "zz", NO),
        (format!("{}us", "eu,gb,ch,".repeat(450)), &[200, 400]),
    ] {
        cases.push(("x-meridian-residency", value, responses));
    }
    for (value, responses) in [
        ("600000", &[200][..]),
        ("1", &[200, 504]),
        ("0", NO),
        ("-1", NO),
        ("+5", &[200, 400, 504]),
        ("600001", NO),
        ("1.5", NO),
        ("1e3", NO),
        ("0x10", NO),
        ("5 5", NO),
        ("", NO),
        ("abc", NO),
        ("NaN", NO),
        ("18446744073709551615", NO),
        ("18446744073709551616", NO),
        ("99999999999999999999999999999999999999999", NO),
        ("\u{0665}", NO),
    ] {
        cases.push(("x-meridian-timeout-ms", value.to_owned(), responses));
    }
    for (value, responses) in [
        ("interactive", &[200][..]),
        ("bulk", &[200]),
        ("x", NO),
        ("", NO),
        ("interactive, bulk", NO),
        ("Interactive", &[200, 400]),
        ("\u{e9}", NO),
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
        ("gzip", NO),
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
