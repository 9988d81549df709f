//! Response heads as types of the `http` crate.

use ::http1::{BodyFraming, FramingError, ResponseHead};
use bytes::BytesMut;
use http::header::{CONNECTION, TRANSFER_ENCODING};
use http::response::Parts;
use http::{HeaderName, HeaderValue, StatusCode};

/// Head of a response, and the framing of its body.
#[derive(Debug)]
pub(super) struct UpstreamHead {
    pub(super) head: Parts,
    pub(super) framing: BodyFraming,
    /// Whether the connection can be reused after the body.
    pub(super) keep_alive: bool,
}

/// Removes the head of the final response from the front of `buffer`; `None` if it is incomplete. The header values share its
/// memory. Headers about this connection are omitted.
pub(super) fn take(buffer: &mut BytesMut) -> Result<Option<UpstreamHead>, FramingError> {
    let start = buffer.as_ptr() as usize;
    let range = |part: &[u8]| {
        let begin = part.as_ptr() as usize - start;
        begin..begin + part.len()
    };
    let parsed = ::http1::head(buffer, false, |head| {
        let ResponseHead { status, headers, length, framing, keep_alive } = *head;
        let fields = headers.iter().map(|field| (range(field.name.as_bytes()), range(field.value)));
        (status, fields.collect::<Vec<_>>(), length, framing, keep_alive)
    })?;
    let Some((status, fields, length, framing, keep_alive)) = parsed else { return Ok(None) };
    let text = buffer.split_to(length).freeze();
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = StatusCode::from_u16(status).map_err(|_| FramingError("its status is invalid"))?;
    head.headers.reserve(fields.len());
    for (name, value) in fields {
        let name =
            HeaderName::from_bytes(&text[name]).map_err(|_| FramingError("a header name is invalid"))?;
        if name == TRANSFER_ENCODING || name == CONNECTION {
            continue;
        }
        let value = HeaderValue::from_maybe_shared(text.slice(value))
            .map_err(|_| FramingError("a header value is invalid"))?;
        head.headers.append(name, value);
    }
    Ok(Some(UpstreamHead { head, framing, keep_alive }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_to_end_headers_are_kept_and_hop_by_hop_headers_removed() {
        let mut buffer = BytesMut::from(
            "HTTP/1.1 100 Go\r\na: interim\r\n\r\nHTTP/1.1 200 OK\r\nconnection: x\r\ntransfer-encoding: chunked\r\n\
             X-Meridian-Tokens: 60\r\na: \r\n\r\nbody",
        );
        let head = take(&mut buffer).unwrap().unwrap().head;
        let names: Vec<_> =
            head.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(names, [("x-meridian-tokens", b"60".as_slice()), ("a", b"")]);
        assert_eq!(buffer, "body");
    }
}
