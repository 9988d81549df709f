//! The framing of HTTP/1.1 answers (RFC 9112 §6): where a head ends, how long its body is, and what of it is here.
//!
//! Bytes in, bytes out; who reads them from where is the caller's affair. It believes no answer that two readers could
//! cut differently: two lengths, a length beside chunks, a coding that is not ours. Such an answer has come from nobody
//! that speaks HTTP as we do, and its connection is of no further use.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::response::Parts;
use http::{HeaderName, HeaderValue, StatusCode};
use std::mem::MaybeUninit;

/// Headers of an answer; Pingora and nginx take about as many.
const HEADERS_MAX: usize = 128;
/// Bytes of a head.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// The line before a chunk: a length of sixteen digits, and extensions that nobody sends.
const CHUNK_LINE_BYTES_MAX: usize = 256;
/// What may follow the last chunk.
const TRAILER_BYTES_MAX: usize = 8 << 10;

/// An answer that cannot be believed, and what of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer cannot be read: {0}")]
pub(crate) struct Unreadable(pub(super) &'static str);

/// The head of an answer.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) head: Parts,
    pub(super) body: Body,
    /// The connection can be used again once the body has ended.
    pub(super) keep: bool,
}

/// What is still to come of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// So many bytes.
    Length(u64),
    /// Chunks.
    Chunked(Chunk),
    /// Whatever comes before the connection closes.
    UntilClosed,
}

/// What comes next of a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// A line with a length.
    Line,
    /// So many bytes.
    Data(u64),
    /// The end of the line behind them.
    DataEnd,
    /// Trailers, of which so many bytes have come.
    Trailers(usize),
    /// Nothing.
    Done,
}

/// Takes a head off the front of `buffer`; `None` if there is no whole one yet. The values of the headers share its
/// memory.
pub(super) fn head(buffer: &mut BytesMut) -> Result<Option<Head>, Unreadable> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut answer,
        buffer,
        &mut headers,
    );
    let length = match parsed {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if buffer.len() > HEAD_BYTES_MAX => {
            return Err(Unreadable("its head is too long"));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Unreadable("its head is not HTTP/1.1")),
    };
    let (status, minor) = (answer.code.unwrap_or(0), answer.version.unwrap_or(0));
    let start = buffer.as_ptr() as usize;
    let place = |part: &[u8]| {
        let begin = part.as_ptr() as usize - start;
        begin..begin + part.len()
    };
    let fields = answer.headers.iter().map(|field| (place(field.name.as_bytes()), place(field.value)));
    let fields: Vec<_> = fields.collect();
    let text = buffer.split_to(length).freeze();
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = StatusCode::from_u16(status).map_err(|_| Unreadable("its status is not one"))?;
    head.headers.reserve(fields.len());
    let (mut length, mut chunked, mut told) = (None, false, None);
    for (name, value) in fields {
        let name =
            HeaderName::from_bytes(&text[name]).map_err(|_| Unreadable("a header's name is not one"))?;
        let value = text.slice(value);
        if name == CONTENT_LENGTH {
            let this = number(&value).ok_or(Unreadable("its length is no number"))?;
            if length.replace(this).is_some_and(|other| other != this) {
                return Err(Unreadable("it has two lengths"));
            }
        } else if name == TRANSFER_ENCODING {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Unreadable("its coding is not 'chunked'"));
            }
            chunked = true;
            continue;
        } else if name == CONNECTION {
            told = says(&value, b"close").then_some(false).or(told);
            told = told.or(says(&value, b"keep-alive").then_some(true));
            continue;
        }
        let value =
            HeaderValue::from_maybe_shared(value).map_err(|_| Unreadable("a header's value is not one"))?;
        head.headers.append(name, value);
    }
    let body = match (length, chunked) {
        (Some(_), true) => return Err(Unreadable("it has a length and chunks")),
        _ if status < 200 || status == 204 || status == 304 => Body::Length(0),
        (Some(length), false) => Body::Length(length),
        (None, true) => Body::Chunked(Chunk::Line),
        (None, false) => Body::UntilClosed,
    };
    let keep = body != Body::UntilClosed && told.unwrap_or(minor == 1);
    Ok(Some(Head { head, body, keep }))
}

impl Body {
    /// Takes what is there of the body off the front of `buffer`; `None` when more has to come first, or nothing is left.
    pub(super) fn take(&mut self, buffer: &mut BytesMut) -> Result<Option<Bytes>, Unreadable> {
        loop {
            match self {
                Body::Length(0) | Body::Chunked(Chunk::Done) => return Ok(None),
                _ if buffer.is_empty() => return Ok(None),
                Body::Length(left) | Body::Chunked(Chunk::Data(left)) => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                    *left -= here as u64;
                    if *self == Body::Chunked(Chunk::Data(0)) {
                        *self = Body::Chunked(Chunk::DataEnd);
                    }
                    return Ok(Some(buffer.split_to(here).freeze()));
                }
                Body::UntilClosed => return Ok(Some(buffer.split().freeze())),
                Body::Chunked(chunk) => match chunk.step(buffer)? {
                    Some(next) => *chunk = next,
                    None => return Ok(None),
                },
            }
        }
    }

    /// Nothing more of the body comes.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Body::Length(0) | Body::Chunked(Chunk::Done))
    }
}

impl Chunk {
    /// Reads one line of what stands around the data; `None` if it is not all there yet.
    fn step(self, buffer: &mut BytesMut) -> Result<Option<Chunk>, Unreadable> {
        let limit = match self {
            Chunk::Line => CHUNK_LINE_BYTES_MAX,
            Chunk::Trailers(before) => TRAILER_BYTES_MAX - before,
            Chunk::DataEnd | Chunk::Data(_) | Chunk::Done => 0,
        };
        let Some(end) = memchr::memchr(b'\n', buffer) else {
            return if buffer.len() > limit + 1 {
                Err(Unreadable("a line between chunks is too long"))
            } else {
                Ok(None)
            };
        };
        let line =
            buffer[..end].strip_suffix(b"\r").ok_or(Unreadable("a line between chunks ends in a bare LF"))?;
        if line.len() > limit {
            return Err(Unreadable("a line between chunks is too long"));
        }
        let next = match self {
            Chunk::Line => {
                let digits =
                    line.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or_default();
                match hexadecimal(digits).ok_or(Unreadable("a chunk's length is no number"))? {
                    0 => Chunk::Trailers(0),
                    length => Chunk::Data(length),
                }
            }
            Chunk::DataEnd => Chunk::Line,
            Chunk::Trailers(_) if line.is_empty() => Chunk::Done,
            Chunk::Trailers(before) => Chunk::Trailers(before + line.len()),
            Chunk::Data(_) | Chunk::Done => unreachable!("only lines are stepped over"),
        };
        buffer.advance(end + 1);
        Ok(Some(next))
    }
}

fn number(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_hexdigit);
    u64::from_str_radix(std::str::from_utf8(text).ok().filter(|_| digits)?, 16).ok()
}

/// Whether a list of words has `word`.
fn says(list: &[u8], word: &[u8]) -> bool {
    list.split(|byte| *byte == b',').any(|each| each.trim_ascii().eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Option<Head>, Unreadable> {
        head(&mut BytesMut::from(text))
    }

    /// The body and whether the connection is kept, of an answer that came whole.
    fn check(text: &str, expected: Result<(Body, bool), &str>) {
        let seen = parse(text).map(|head| head.expect("a whole head")).map(|head| (head.body, head.keep));
        assert_eq!(
            seen,
            expected.map_err(|why| Unreadable(Box::leak(why.to_owned().into_boxed_str()))),
            "{text}"
        );
    }

    #[test]
    fn a_body_is_as_long_as_the_head_says_and_no_head_says_two_things() {
        let with = |headers: &str| format!("HTTP/1.1 200 OK\r\n{headers}\r\n");
        check(&with("content-length: 7\r\n"), Ok((Body::Length(7), true)));
        check(&with("content-length: 7\r\nContent-Length: 7\r\n"), Ok((Body::Length(7), true)));
        check(&with("content-length: 7\r\ncontent-length: 8\r\n"), Err("it has two lengths"));
        check(&with("content-length: +7\r\n"), Err("its length is no number"));
        check(&with("content-length: 7, 7\r\n"), Err("its length is no number"));
        check(&with("content-length:\r\n"), Err("its length is no number"));
        check(&with("content-length: 99999999999999999999\r\n"), Err("its length is no number"));
        check(&with("transfer-encoding: Chunked\r\n"), Ok((Body::Chunked(Chunk::Line), true)));
        check(&with("transfer-encoding: gzip, chunked\r\n"), Err("its coding is not 'chunked'"));
        check(
            &with("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
            Err("its coding is not 'chunked'"),
        );
        check(
            &with("content-length: 7\r\ntransfer-encoding: chunked\r\n"),
            Err("it has a length and chunks"),
        );
        check(&with(""), Ok((Body::UntilClosed, false)));
        check("HTTP/1.1 204 No Content\r\n\r\n", Ok((Body::Length(0), true)));
        check("HTTP/1.1 304 Same\r\ncontent-length: 7\r\n\r\n", Ok((Body::Length(0), true)));
        check("HTTP/1.1 100 Go on\r\n\r\n", Ok((Body::Length(0), true)));
        check("HTTP/2 200 OK\r\n\r\n", Err("its head is not HTTP/1.1"));
        check("HTTP/1.1 099 OK\r\n\r\n", Err("its status is not one"));
    }

    #[test]
    fn a_connection_is_kept_as_both_sides_understand_it() {
        let with = |version: &str, headers: &str| {
            format!("HTTP/{version} 200 OK\r\ncontent-length: 1\r\n{headers}\r\n")
        };
        let check = |version, headers, keep| check(&with(version, headers), Ok((Body::Length(1), keep)));
        check("1.1", "", true);
        check("1.1", "connection: close\r\n", false);
        check("1.1", "connection: x, Close\r\n", false);
        check("1.1", "connection: keep-alive\r\nconnection: close\r\n", false);
        check("1.0", "", false);
        check("1.0", "connection: keep-alive\r\n", true);
    }

    #[test]
    fn what_crosses_is_there_and_what_belongs_to_the_connection_is_not() {
        let text = "HTTP/1.1 200 OK\r\nconnection: x\r\ntransfer-encoding: chunked\r\nX-Meridian-Tokens: 60\r\na: \r\n\r\n";
        let head = parse(text).unwrap().unwrap().head;
        let names: Vec<_> =
            head.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(names, [("x-meridian-tokens", b"60".as_slice()), ("a", b"")]);
    }

    #[test]
    fn a_head_may_have_its_limits_and_not_one_more() {
        let headers = |count: usize| format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(count));
        assert!(parse(&headers(HEADERS_MAX)).unwrap().is_some());
        assert_eq!(parse(&headers(HEADERS_MAX + 1)).unwrap_err(), Unreadable("its head is not HTTP/1.1"));
        let endless = |bytes: usize| "HTTP/1.1 200 OK\r\na: ".to_owned() + &"b".repeat(bytes - 20);
        assert!(parse(&endless(HEAD_BYTES_MAX)).unwrap().is_none());
        assert_eq!(parse(&endless(HEAD_BYTES_MAX + 1)).unwrap_err(), Unreadable("its head is too long"));
    }

    /// Reads a body that comes in pieces of this size; what was in it, or why not, and what was left over.
    fn read(mut body: Body, text: &[u8], piece: usize) -> Result<(Vec<u8>, bool, Vec<u8>), Unreadable> {
        let (mut buffer, mut read) = (BytesMut::new(), Vec::new());
        for part in text.chunks(piece) {
            buffer.extend_from_slice(part);
            while let Some(bytes) = body.take(&mut buffer)? {
                read.extend_from_slice(&bytes);
            }
        }
        Ok((read, body.is_done(), buffer.to_vec()))
    }

    #[test]
    fn chunks_are_put_together_and_nonsense_between_them_is_refused() {
        let check = |text: &str, expected: Result<(&str, bool), &str>| {
            for piece in [1, 2, 3, 7, 1000] {
                let seen = read(Body::Chunked(Chunk::Line), text.as_bytes(), piece);
                let seen =
                    seen.map(|(read, done, _)| (String::from_utf8(read).unwrap(), done)).map_err(|why| why.0);
                let expected = expected.map(|(read, done)| (read.to_owned(), done));
                assert_eq!(seen, expected, "{text:?} in pieces of {piece}");
            }
        };
        check("3\r\nabc\r\n0\r\n\r\n", Ok(("abc", true)));
        check("3;x=y\r\nabc\r\nA \r\n0123456789\r\n0\r\nt: u\r\n\r\n", Ok(("abc0123456789", true)));
        check("3\r\nab", Ok(("ab", false)));
        check("0\r\n", Ok(("", false)));
        check("3\r\nabcd\r\n", Err("a line between chunks is too long"));
        check("3\nabc\r\n", Err("a line between chunks ends in a bare LF"));
        check("-3\r\n", Err("a chunk's length is no number"));
        check("\r\n", Err("a chunk's length is no number"));
        check("fffffffffffffffff\r\n", Err("a chunk's length is no number"));
        let line = |extra: usize| format!("0;{}\r\n\r\n", "x".repeat(CHUNK_LINE_BYTES_MAX - 2 + extra));
        check(&line(0), Ok(("", true)));
        check(&line(1), Err("a line between chunks is too long"));
        let trailer = |extra: usize| format!("0\r\n{}\r\n\r\n", "x".repeat(TRAILER_BYTES_MAX + extra));
        check(&trailer(0), Ok(("", true)));
        check(&trailer(1), Err("a line between chunks is too long"));
    }

    proptest! {
        #[test]
        fn however_it_is_cut_a_body_is_read_as_it_was_written_and_no_byte_beyond(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            piece in 1usize..50,
            beyond in prop::collection::vec(any::<u8>(), 0..9),
        ) {
            let body = chunks.concat();
            let mut text = Vec::new();
            for chunk in &chunks {
                text.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                text.extend(chunk);
                text.extend(b"\r\n");
            }
            text.extend(b"0\r\n\r\n");
            text.extend(&beyond);
            prop_assert_eq!(read(Body::Chunked(Chunk::Line), &text, piece), Ok((body.clone(), true, beyond.clone())));
            let plain = [body.clone(), beyond.clone()].concat();
            prop_assert_eq!(read(Body::Length(body.len() as u64), &plain, piece), Ok((body, true, beyond)));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1usize..50) {
            let mut buffer = BytesMut::from([b"HTTP/1.1 200 OK\r\n", bytes.as_slice()].concat().as_slice());
            head(&mut buffer).ok();
            read(Body::Chunked(Chunk::Line), &bytes, piece).ok();
        }
    }
}
