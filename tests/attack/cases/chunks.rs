//! The chunked coding (RFC 9112, 7.1).

use super::shown;
use crate::case::{BODY, Case, Expected, Step, head};

pub(super) fn cases() -> Vec<Case> {
    let (start, end) = BODY.split_at(5);
    let rest = format!("\r\n{:x}\r\n{end}\r\n0\r\n\r\n", end.len());
    let mut cases = Vec::new();
    for (size, responses) in [
        ("5", &[200][..]),
        ("05", &[200]),
        ("0000000000000005", &[200, 400]),
        ("00000000000000000005", &[200, 400]),
        ("5;", &[200, 400]),
        ("5;a", &[200]),
        ("5;a=b", &[200]),
        ("5;a=\"b;c\"", &[200, 400]),
        ("5 ;a=b", &[200, 400]),
        ("5 ", &[200, 400]),
        ("5\t", &[200, 400]),
        (" 5", &[400]),
        ("\t5", &[400]),
        ("G", &[400]),
        ("-5", &[400]),
        ("+5", &[400]),
        ("0x5", &[400]),
        ("5h", &[400]),
        ("5 5", &[400]),
        ("5,5", &[400]),
        ("5.0", &[400]),
        ("", &[400]),
        (";a", &[400]),
        ("\u{0}5", &[400]),
        ("5\u{0}", &[400]),
        ("\u{ff15}", &[400]),
        ("FFFFFFFF", &[400, 408, 413]),
        ("100000000", &[400, 408, 413]),
        ("7FFFFFFFFFFFFFFF", &[400, 408, 413]),
        ("8000000000000000", &[400, 408, 413]),
        ("FFFFFFFFFFFFFFFF", &[400, 408, 413]),
        ("10000000000000005", &[400, 408, 413]),
        ("FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFB", &[400, 408, 413]),
        ("5;a\nb", &[400]),
        ("5;\n", &[400]),
        ("5;a=\"\n\"", &[400]),
        ("5;a\rb", &[400]),
        ("5;\u{0}", &[400]),
        ("5\n", &[400]),
        ("5\r", &[400]),
        ("5\n\n", &[400]),
    ] {
        let chunks = format!("{size}\r\n{start}{rest}");
        cases.push(case(&format!("size {}", shown(size)), &chunks, responses));
    }
    let chunk = format!("{:x}\r\n{BODY}\r\n", BODY.len());
    // Trailers are not used, so invalid ones may be ignored.
    let ones: String = BODY.chars().map(|c| format!("1\r\n{c}\r\n")).collect();
    for (chunks, responses) in [
        (format!("5\r\n{start}{end}\r\n0\r\n\r\n"), &[400][..]),
        (format!("4\r\n{start}{rest}"), &[400]),
        (format!("6\r\n{start}{rest}"), &[400]),
        (format!("5\r\n{start}\n{:x}\r\n{end}\r\n0\r\n\r\n", end.len()), &[400]),
        (format!("5\n{start}\r\n0\r\n\r\n"), &[400]),
        (format!("{chunk}0\r\nx-t: y\r\n\r\n"), &[200]),
        (format!("{chunk}0\r\nx-t: y\r\nx-u: z\r\n\r\n"), &[200]),
        (format!("{chunk}000\r\n\r\n"), &[200]),
        (format!("{chunk}0;a=b\r\n\r\n"), &[200]),
        (format!("{chunk}0\r\nauthorization: Bearer wrong\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\ncontent-length: 5\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\ntransfer-encoding: chunked\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nhost: y\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nx t: y\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nx-t\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nx-t: \u{0}\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nx-t: a\r\n b\r\n\r\n"), &[200, 400]),
        (format!("{chunk}0\r\nx-t: {}\r\n\r\n", "y".repeat(100_000)), &[400, 431]),
        (format!("{chunk}0\r\n{}\r\n", "x-t: y\r\n".repeat(20_000)), &[400, 431]),
        (format!("{chunk}0;{}\r\n\r\n", "x".repeat(100_000)), &[400]),
        (format!("5;{}\r\n{start}{rest}", "x".repeat(100_000)), &[400]),
        (format!("{ones}0\r\n\r\n"), &[200]),
        (format!("{}{ones}0\r\n\r\n", "1;x=y\r\n \r\n".repeat(20_000)), &[200, 400]),
        (format!("{}\r\n", "0".repeat(100_000)), &[400]),
        ("\r\n".repeat(1_000), &[400]),
        ("nonsense".to_owned() + &" ".repeat(1_000), &[400]),
    ] {
        cases.push(case(&format!("coding {}", shown(&chunks)), &chunks, responses));
    }
    // The client half-closes before the last chunk.
    for part in
        ["", "5", "5\r", "5\r\n", "5\r\nab", "5\r\nabcde", "5\r\nabcde\r\n", "0", "0\r\n", "0\r\nx-t: y\r\n"]
    {
        let bytes = [head("transfer-encoding: chunked\r\n"), part.as_bytes().to_vec()].concat();
        let steps = vec![Step::Send(bytes), Step::HalfClose];
        cases.push(Case::new(format!("chunks end in {}", shown(part)), steps, Expected::Closed));
    }
    cases
}

fn case(name: &str, chunks: &str, responses: &'static [u16]) -> Case {
    let head = head("transfer-encoding: chunked\r\nconnection: close\r\n");
    Case::h1(format!("chunks {name}"), [head, chunks.as_bytes().to_vec()].concat(), &[responses])
}
