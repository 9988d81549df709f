//! Chunks, as a scanner of requests and a decoder of responses.

use http1::{BodyPart, CHUNK_LINE_BYTES_MAX, ChunkDecoder, FramingError, TRAILER_BYTES_MAX};
use proptest::prelude::*;

/// Checks a body at once, and byte for byte.
#[track_caller]
fn check(body: &str, expected: Option<&str>) {
    let whole = ChunkDecoder::default().scan(body.as_bytes());
    let mut scan = ChunkDecoder::default();
    let in_bytes = body.as_bytes().iter().try_for_each(|byte| scan.scan(&[*byte]));
    assert_eq!(whole, in_bytes, "{body:?}");
    match expected {
        None => assert_eq!((whole, scan.is_done()), (Ok(()), true), "{body:?}"),
        Some(word) => {
            let FramingError(problem) = whole.expect_err(body);
            assert!(problem.contains(word), "{body:?}: {problem}");
        }
    }
}

#[test]
fn chunks_are_scanned_to_their_end_and_later_bytes_are_ignored() {
    check("0\r\n\r\n", None);
    check("5\r\nabcde\r\n1e;a=b\r\n\r\n\0\nxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n0\r\n\r\n", None);
    check("5;a=\"b c\";d \r\nabcde\r\n000\r\nx-trailer: y\r\nx-more:\r\n\r\n", None);
    check("5 \r\nabcde\r\n0\r\n\r\n\nGET \0", None);
    check(&format!("0\r\n{}: x\r\n\r\n", "y".repeat(100)), None);
}

#[test]
fn an_ambiguous_body_is_rejected() {
    let rejected = |body: &str, word: &str| check(body, Some(word));
    rejected("5;x\nabcde\r\n0\r\n\r\n", "LF without CR");
    rejected("5;\nabcde\r\n0\r\n\r\n", "LF without CR");
    rejected("5 \nabcde\r\n0\r\n\r\n", "LF without CR");
    rejected("5;\"a\nb\"\r\nabcde\r\n0\r\n\r\n", "LF without CR");
    rejected("5;a\0\r\nabcde\r\n0\r\n\r\n", "control");
    rejected("5;a\rb\r\n", "not followed by LF");
    rejected("5\nabcde\r\n", "not a number");
    rejected("\r\n", "no size");
    rejected("-5\r\n", "no size");
    rejected("0x5\r\n", "not a number");
    rejected("11111111111111111\r\n", "16 digits");
    rejected("5\r\nabcdef\r\n", "does not end");
    rejected("5\r\nabcde\n0", "does not end");
    rejected("5\r\nabcde\r0", "does not end");
    rejected("0\r\nx: y\n\r\n", "control");
    rejected("0\r\nx: y\rz", "not followed by LF");
    rejected("0\r\n\r\r", "not followed by LF");
    rejected("0\r\nx y: z\r\n", "not a field");
    rejected("0\r\n: z\r\n", "not allowed in trailers");
    rejected("0\r\n x: z\r\n", "not a field");
    rejected("0\r\nnothing\r\n", "not a field");
    for name in ["Content-Length", "TRANSFER-ENCODING", "host", "authorization", "te"] {
        rejected(&format!("0\r\n{name}: x\r\n\r\n"), "not allowed in trailers");
    }
}

#[test]
fn lines_are_accepted_at_their_limits_and_rejected_past_them() {
    let line = |extra: usize| format!("0;{}\r\n\r\n", "x".repeat(CHUNK_LINE_BYTES_MAX - 2 + extra));
    check(&line(0), None);
    check(&line(1), Some("the size line of a chunk is too long"));
    let trailers =
        |extra: usize| format!("0\r\na:b\r\nx:{}\r\n\r\n", "x".repeat(TRAILER_BYTES_MAX - 5 + extra));
    check(&trailers(0), None);
    check(&trailers(1), Some("the trailers are too long"));
    let many = "1\r\nx\r\n".repeat(CHUNK_LINE_BYTES_MAX) + "0\r\n\r\n";
    check(&many, None);
}

/// Decodes a body that arrives in pieces of this size; returns its content, whether it ended, and the remaining bytes.
fn decode(text: &[u8], piece: usize) -> Result<(Vec<u8>, bool, Vec<u8>), FramingError> {
    let (mut chunks, mut rest, mut content) = (ChunkDecoder::default(), Vec::new(), Vec::new());
    for piece in text.chunks(piece) {
        rest.extend_from_slice(piece);
        loop {
            let BodyPart { skipped, data } = chunks.next(&rest)?;
            content.extend_from_slice(&rest[skipped..skipped + data]);
            rest.drain(..skipped + data);
            if skipped + data == 0 {
                break;
            }
        }
    }
    Ok((content, chunks.is_done(), rest))
}

#[test]
fn chunks_are_joined() {
    let check = |text: &str, expected: Result<(&str, bool), &'static str>| {
        for piece in [1, 2, 3, 7, 1000] {
            let actual = decode(text.as_bytes(), piece);
            let actual = actual
                .map(|(content, done, _)| (String::from_utf8(content).unwrap(), done))
                .map_err(|FramingError(reason)| reason);
            let expected = expected.map(|(content, done)| (content.to_owned(), done));
            assert_eq!(actual, expected, "{text:?} in pieces of {piece}");
        }
    };
    check("3\r\nabc\r\n0\r\n\r\n", Ok(("abc", true)));
    check("3;x=y\r\nabc\r\nA \r\n0123456789\r\n0\r\nt: u\r\n\r\n", Ok(("abc0123456789", true)));
    check("3\r\nab", Ok(("ab", false)));
    check("0\r\n", Ok(("", false)));
    check("3\r\nabcd\r\n", Err("the data of a chunk does not end in CRLF"));
    check("3\nabc\r\n", Err("the size of a chunk is not a number"));
    check("fffffffffffffffff\r\n", Err("the size of a chunk has more than 16 digits"));
}

proptest! {
    #[test]
    fn a_body_is_read_exactly_for_every_segmentation(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
        piece in 1usize..50,
        beyond in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut text = Vec::new();
        for chunk in &chunks {
            text.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
            text.extend(chunk);
            text.extend(b"\r\n");
        }
        text.extend(b"0\r\n\r\n");
        text.extend(&beyond);
        prop_assert_eq!(decode(&text, piece), Ok((chunks.concat(), true, beyond)));
    }

    #[test]
    fn no_bytes_make_it_panic_and_splitting_makes_no_difference(
        bytes in prop::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'3'), Just(b';'), any::<u8>()], 0..80),
        cut in 0_usize..80,
    ) {
        let cut = cut.min(bytes.len());
        let whole = ChunkDecoder::default().scan(&bytes);
        let mut scan = ChunkDecoder::default();
        let pieces = scan.scan(&bytes[..cut]).and_then(|()| scan.scan(&bytes[cut..]));
        prop_assert_eq!(whole, pieces);
    }
}
