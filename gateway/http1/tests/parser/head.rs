//! Heads: framing, reuse of the connection, limits.

use http1::{
    BodyFraming, ChunkDecoder, FramingError, HEAD_BYTES_MAX, HEADERS_MAX, INTERIM_RESPONSES_MAX, head,
};

fn chunked() -> BodyFraming {
    BodyFraming::Chunked(ChunkDecoder::default())
}

fn parse(text: &str, is_head: bool) -> Result<Option<(BodyFraming, bool, usize)>, &'static str> {
    head(text.as_bytes(), is_head, |head| (head.framing, head.keep_alive, head.length))
        .map_err(|FramingError(reason)| reason)
}

/// Checks the framing and reuse of a complete head.
#[track_caller]
fn check(text: &str, expected: Result<(BodyFraming, bool), &'static str>) {
    let actual = parse(text, false).map(|head| head.expect("a complete head"));
    assert_eq!(actual, expected.map(|(framing, keep)| (framing, keep, text.len())), "{text}");
}

#[test]
fn the_head_determines_the_body_framing_and_ambiguous_heads_are_rejected() {
    let with = |headers: &str| format!("HTTP/1.1 200 OK\r\n{headers}\r\n");
    check(&with("content-length: 7\r\n"), Ok((BodyFraming::Length(7), true)));
    check(&with("content-length: 7\r\nContent-Length: 7\r\n"), Ok((BodyFraming::Length(7), true)));
    check(&with("content-length: 7\r\ncontent-length: 8\r\n"), Err("it has two lengths"));
    for length in ["+7", "-7", "7, 7", "", "99999999999999999999", "0x7", "7 7"] {
        check(&with(&format!("content-length: {length}\r\n")), Err("its length is not a number"));
    }
    check(&with("transfer-encoding: Chunked\r\n"), Ok((chunked(), true)));
    for coding in ["gzip", "gzip, chunked", "chunked, chunked", ""] {
        check(
            &with(&format!("transfer-encoding: {coding}\r\n")),
            Err("its transfer coding is not 'chunked'"),
        );
    }
    check(
        &with("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
        Err("its transfer coding is not 'chunked'"),
    );
    check(&with("content-length: 7\r\ntransfer-encoding: chunked\r\n"), Err("it has a length and chunks"));
    check(&with("a: b\r\n c\r\n"), Err("its head is not HTTP/1.1"));
    check(&with("content-length : 7\r\n"), Err("its head is not HTTP/1.1"));
    check(&with(""), Ok((BodyFraming::UntilClosed, false)));
    check("HTTP/2 200 OK\r\n\r\n", Err("its head is not HTTP/1.1"));
    check("SSH-2.0-OpenSSH_9.2\r\n", Err("its head is not HTTP/1.1"));
    check("HTTP/1.1 099 OK\r\n\r\n", Err("its status is invalid"));
}

#[test]
fn responses_without_a_body_end_with_their_head() {
    check("HTTP/1.1 204 No Content\r\n\r\n", Ok((BodyFraming::Length(0), true)));
    check("HTTP/1.1 304 Same\r\ncontent-length: 7\r\n\r\n", Ok((BodyFraming::Length(0), true)));
    let to_head = "HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n";
    assert_eq!(parse(to_head, true), Ok(Some((BodyFraming::Length(0), true, to_head.len()))));
}

#[test]
fn interim_responses_are_skipped_up_to_a_limit() {
    check(
        "HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 103 Hints\r\na: b\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
        Ok((BodyFraming::Length(2), true)),
    );
    assert_eq!(parse("HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 2", false), Ok(None));
    assert_eq!(parse("HTTP/1.1 101 Switch\r\n\r\n", false), Err("it switches protocols"));
    let interim =
        |count: usize| format!("{}HTTP/1.1 204 No\r\n\r\n", "HTTP/1.1 100 Go\r\n\r\n".repeat(count));
    check(&interim(INTERIM_RESPONSES_MAX), Ok((BodyFraming::Length(0), true)));
    check(&interim(INTERIM_RESPONSES_MAX + 1), Err("it has too many interim responses"));
}

#[test]
fn a_connection_is_kept_alive_as_version_and_header_say() {
    let check = |version: &str, headers: &str, keep| {
        let text = format!("HTTP/{version} 200 OK\r\ncontent-length: 1\r\n{headers}\r\n");
        check(&text, Ok((BodyFraming::Length(1), keep)));
    };
    check("1.1", "", true);
    check("1.1", "connection: Close\r\n", false);
    check("1.1", "connection: x, Close\r\n", false);
    check("1.1", "connection: keep-alive\r\nconnection: close\r\n", false);
    check("1.1", "connection: close\r\nconnection: keep-alive\r\n", false);
    check("1.0", "", false);
    check("1.0", "connection: keep-alive\r\n", true);
}

#[test]
fn chunks_of_http_1_0_end_the_connection() {
    let text = "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n";
    check(text, Ok((chunked(), false)));
}

#[test]
fn a_head_is_accepted_at_its_limits_and_rejected_past_them() {
    let headers = |count: usize| format!("HTTP/1.1 204 No\r\n{}\r\n", "a: b\r\n".repeat(count));
    check(&headers(HEADERS_MAX), Ok((BodyFraming::Length(0), true)));
    check(&headers(HEADERS_MAX + 1), Err("it has too many headers"));
    let endless = |bytes: usize| "HTTP/1.1 200 OK\r\na: ".to_owned() + &"b".repeat(bytes - 20);
    assert_eq!(parse(&endless(HEAD_BYTES_MAX), false), Ok(None));
    assert_eq!(parse(&endless(HEAD_BYTES_MAX + 1), false), Err("its head is too long"));
    let complete = |bytes: usize| format!("HTTP/1.1 204 No\r\na: {}\r\n\r\n", "b".repeat(bytes - 24));
    check(&complete(HEAD_BYTES_MAX), Ok((BodyFraming::Length(0), true)));
    check(&complete(HEAD_BYTES_MAX + 1), Err("its head is too long"));
}
