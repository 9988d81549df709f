//! Complete responses in one buffer.

use http1::{FramingError, HEAD_BYTES_MAX, ResponseAssembler, ResponseError};

const BODY_BYTES_MAX: usize = 1 << 20;

/// Status, body, and whether the connection can be reused; `None` if the response is incomplete.
pub(crate) type Assembled = Option<(u16, Vec<u8>, bool)>;

/// Assembles a response that arrives in pieces of these sizes, repeated; `closed` tells whether the connection ends after it.
pub(crate) fn assemble(bytes: &[u8], pieces: &[usize], closed: bool) -> Result<Assembled, ResponseError> {
    let mut assembler = ResponseAssembler::new(BODY_BYTES_MAX, false);
    let (mut buffer, mut at, mut complete) = (Vec::new(), 0, false);
    for piece in pieces.iter().cycle() {
        if complete || at == bytes.len() {
            break;
        }
        let end = (at + piece).min(bytes.len());
        buffer.extend_from_slice(&bytes[at..end]);
        at = end;
        complete = assembler.advance(&mut buffer, |head| head.status)?;
    }
    let ended = complete || closed && assembler.ends_with_connection();
    if !ended {
        return Ok(None);
    }
    let (status, body, reusable) = assembler.take(buffer.len()).expect("a complete response");
    Ok(Some((status, buffer[body].to_vec(), reusable)))
}

#[track_caller]
fn check(bytes: &str, closed: bool, expected: Result<Option<(u16, &str, bool)>, ResponseError>) {
    let expected = expected
        .map(|some| some.map(|(status, body, reusable)| (status, body.as_bytes().to_vec(), reusable)));
    for piece in [bytes.len().max(1), 1, 7] {
        assert_eq!(assemble(bytes.as_bytes(), &[piece], closed), expected, "{bytes:?} by {piece}");
    }
}

#[test]
fn a_response_is_complete_at_its_length_its_last_chunk_or_the_end_of_the_connection() {
    check("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", false, Ok(Some((200, "hello", true))));
    check("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false, Ok(Some((200, "", true))));
    check("HTTP/1.1 204 No Content\r\n\r\n", false, Ok(Some((204, "", true))));
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    check(
        &format!("{chunked}2\r\nhi\r\nA;x=y\r\n 0123456\r\n\r\n0\r\n\r\n"),
        false,
        Ok(Some((200, "hi 0123456\r\n", true))),
    );
    check(&format!("{chunked}5\r\nhello\r\n0\r\nx: y\r\n\r\n"), false, Ok(Some((200, "hello", true))));
    check("HTTP/1.1 200 OK\r\n\r\nhello", true, Ok(Some((200, "hello", false))));
    check("HTTP/1.1 200 OK\r\n\r\nhello", false, Ok(None));
    check(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 No\r\ncontent-length: 2\r\n\r\nno",
        false,
        Ok(Some((429, "no", true))),
    );
}

#[test]
fn a_truncated_response_is_incomplete() {
    check("", true, Ok(None));
    check("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello", true, Ok(None));
    check("HTTP/1.1 200 OK\r\ncontent-le", true, Ok(None));
    for rest in ["5\r\nhel", "2\r\nhi\r\n", "2\r\nh", "0\r\n"] {
        check(&format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{rest}"), true, Ok(None));
    }
}

#[test]
fn a_malformed_response_is_rejected() {
    let malformed = |reason| Err(ResponseError::Malformed(FramingError(reason)));
    check("HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi", true, malformed("its length is not a number"));
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    check(
        &format!("{chunked}2\r\nhi!\r\n0\r\n\r\n"),
        true,
        malformed("the data of a chunk does not end in CRLF"),
    );
    check(&format!("{chunked}x\r\n"), true, malformed("a chunk has no size"));
    check(&format!("{chunked}-1\r\n"), true, malformed("a chunk has no size"));
}

#[test]
fn a_connection_with_bytes_after_the_response_is_not_reused() {
    for response in [
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ] {
        let more = format!("{response}more");
        assert_eq!(assemble(response.as_bytes(), &[100], false), Ok(Some((200, b"ok".to_vec(), true))));
        assert_eq!(assemble(more.as_bytes(), &[100], false), Ok(Some((200, b"ok".to_vec(), false))));
    }
}

#[test]
fn the_size_of_a_body_is_limited_as_soon_as_it_is_known() {
    let length = |length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
    check(&length(BODY_BYTES_MAX), false, Ok(None));
    check(&length(BODY_BYTES_MAX + 1), false, Err(ResponseError::TooLarge));
    let chunk = |size: usize| format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{size:x}\r\n");
    check(&chunk(BODY_BYTES_MAX), false, Ok(None));
    check(&chunk(BODY_BYTES_MAX + 1), false, Err(ResponseError::TooLarge));
    let closed = |size: usize| format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(size));
    let whole =
        |text: &str| assemble(text.as_bytes(), &[text.len()], true).map(|response| response.is_some());
    assert_eq!(whole(&closed(BODY_BYTES_MAX)), Ok(true));
    assert_eq!(whole(&closed(BODY_BYTES_MAX + 1)), Err(ResponseError::TooLarge));
}

/// Chunks of one byte with long extensions: few bytes of a body, and many of framing.
#[test]
fn the_framing_of_chunks_is_limited() {
    let chunk = format!("1;{}\r\nx\r\n", "y".repeat(200));
    let chunks = (BODY_BYTES_MAX + HEAD_BYTES_MAX) / chunk.len();
    let response = |chunks: usize| {
        let text = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}", chunk.repeat(chunks));
        assemble(text.as_bytes(), &[4096], false)
    };
    assert_eq!(response(chunks), Ok(None));
    assert_eq!(response(chunks + 1), Err(ResponseError::TooLarge));
}
