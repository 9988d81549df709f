//! Form of an upload: `multipart/form-data` with the fields `purpose` and `file`.
//!
//! The parser of forms reads as much of the body as has arrived, and keeps it until it finds a boundary or the end of the head
//! of a part. Its memory is not that of [`FileBuffer`], so [`FormChunks`] limits it: a body without a boundary would otherwise be
//! in memory as a whole, and searched again with each of its chunks.

use crate::body_memory::{BodyError, BufferedBody};
use crate::request_body::{BodyReader, FileBuffer, continue_if_expected};
use crate::respond::{ForwardError, Rejection};
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt};
use gateway_core::memory::BodyOwner;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use multer::Multipart;
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use supervision::Mutex;

/// Longest field of an upload other than the file, bytes.
const FIELD_BYTES_MAX: usize = 256;
/// Bytes of an upload beside the file: boundaries, heads of parts, and the other fields.
const FORM_BYTES_MAX: usize = 64 << 10;
/// Pauses after which the parser needs more of the body than [`FORM_BYTES_MAX`]. It reads before each of its steps, of which it
/// takes a few before it returns content: the boundary, the head, the first content.
const PAUSES_MAX: u32 = 16;

/// File of an upload with its name.
pub(super) struct UploadedForm {
    pub(super) name: String,
    pub(super) file: BufferedBody,
}

/// Receives the form of an upload. Only the file is kept.
pub(super) async fn receive(
    session: &mut ServerSession,
    body_reader: &BodyReader,
    owner: BodyOwner,
) -> Result<UploadedForm, ForwardError> {
    let result = receive_form(session, body_reader, owner).await;
    if let Err(error) = &result {
        body_reader.count_rejection(error);
    }
    Ok(result?)
}

async fn receive_form(
    session: &mut ServerSession,
    body_reader: &BodyReader,
    owner: BodyOwner,
) -> Result<UploadedForm, BodyError> {
    let header = |name| session.get_header(name).and_then(|value| value.to_str().ok());
    if header(CONTENT_ENCODING).is_some_and(|coding| !coding.eq_ignore_ascii_case("identity")) {
        let message = "An upload has no content coding; send it without `content-encoding`.";
        return Err(malformed(Rejection::new(ErrorCode::UnsupportedEncoding, message)));
    }
    let boundary = header(CONTENT_TYPE).and_then(|value| multer::parse_boundary(value).ok());
    let boundary = boundary.ok_or_else(|| {
        let message = "An upload is `multipart/form-data` with the fields `purpose` and `file`.";
        malformed(Rejection::new(ErrorCode::InvalidHeader, message).of("content-type"))
    })?;
    let bytes_max = body_reader.file_bytes_max;
    let declared = header(CONTENT_LENGTH).and_then(|value| value.parse::<usize>().ok());
    if declared.is_some_and(|declared| declared > bytes_max.saturating_add(FORM_BYTES_MAX)) {
        return Err(crate::body_memory::file_too_large(bytes_max));
    }
    continue_if_expected(session).await?;
    // The stream of a form has an error type of its own, so the error of the body is kept beside it.
    let failure = Arc::new(Mutex::<Option<BodyError>>::default());
    let kept = failure.clone();
    let chunks = body_reader.chunks(session, bytes_max, FORM_BYTES_MAX);
    let chunks = chunks.map(move |chunk| {
        chunk.map_err(|error| {
            *kept.lock() = Some(error);
            io::Error::other("the body")
        })
    });
    let consumed = Arc::new(AtomicU64::new(0));
    let chunks = FormChunks { chunks: Box::pin(chunks), read: 0, consumed: consumed.clone(), pauses: (0, 0) };
    let failed = |error: &multer::Error| {
        let of_body = failure.lock().take();
        of_body.unwrap_or_else(|| {
            // The parser has no text for an error of the body.
            let problem = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            let message = format!("The body is not valid multipart/form-data: {problem}.");
            malformed(Rejection::new(ErrorCode::InvalidValue, message))
        })
    };
    let mut form = Multipart::new(chunks, boundary);
    let (mut purpose, mut file) = (None, None);
    let mut total = 0;
    while let Some(mut field) = form.next_field().await.map_err(|error| failed(&error))? {
        match field.name() {
            Some("file") => {
                if file.is_some() {
                    return Err(malformed(invalid_file("the form has more than one file")));
                }
                let name = field.file_name().unwrap_or("batch.jsonl").to_owned();
                let reservation = body_reader.reservation(owner);
                let mut buffer = FileBuffer::new(reservation, bytes_max, declared);
                while let Some(chunk) = field.chunk().await.map_err(|error| failed(&error))? {
                    consumed.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    buffer.push(&chunk)?;
                }
                file = Some((name, buffer.finish()));
            }
            name => {
                let is_purpose = name == Some("purpose");
                let mut text = Vec::new();
                while let Some(chunk) = field.chunk().await.map_err(|error| failed(&error))? {
                    consumed.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    total += chunk.len();
                    if total > FORM_BYTES_MAX {
                        let message =
                            format!("the fields beside the file have more than {FORM_BYTES_MAX} bytes");
                        return Err(malformed(invalid_file(&message)));
                    }
                    if text.len() + chunk.len() <= FIELD_BYTES_MAX {
                        text.extend_from_slice(&chunk);
                    }
                }
                if is_purpose {
                    purpose = Some(String::from_utf8_lossy(&text).into_owned());
                }
            }
        }
    }
    if purpose.as_deref() != Some("batch") {
        let message = "The field 'purpose' is not 'batch', the only purpose of files here.";
        return Err(malformed(Rejection::new(ErrorCode::InvalidValue, message).of("purpose")));
    }
    let (name, file) = file.ok_or_else(|| {
        let message = "The form has no field 'file'.";
        malformed(Rejection::new(ErrorCode::MissingField, message).of("file"))
    })?;
    Ok(UploadedForm { name, file })
}

fn malformed(rejection: Rejection) -> BodyError {
    BodyError::Rejected(crate::metrics::BodyRejection::Malformed, rejection)
}

pub(super) fn invalid_file(problem: &str) -> Rejection {
    Rejection::new(ErrorCode::InvalidValue, format!("The file is rejected: {problem}.")).of("file")
}

/// Body of a form for its parser, which has at most [`FORM_BYTES_MAX`] bytes and one chunk that it has not returned as the
/// content of a field.
struct FormChunks<'a> {
    chunks: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send + 'a>>,
    /// Bytes that the parser has read.
    read: u64,
    /// Bytes that it has returned.
    consumed: Arc<AtomicU64>,
    /// Bytes that it had returned at the last pause, and the pauses since it had returned less.
    pauses: (u64, u32),
}

impl Stream for FormChunks<'_> {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let consumed = self.consumed.load(Ordering::Relaxed);
        if self.read.saturating_sub(consumed) >= FORM_BYTES_MAX as u64 {
            self.pauses = match self.pauses {
                (at, pauses) if at == consumed => (at, pauses + 1),
                _ => (consumed, 1),
            };
            if self.pauses.1 > PAUSES_MAX {
                let problem = format!("more than {FORM_BYTES_MAX} bytes are not the content of a field");
                return Poll::Ready(Some(Err(io::Error::other(problem))));
            }
            // The parser returns what it has, and continues.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let next = self.chunks.as_mut().poll_next(context);
        if let Poll::Ready(Some(Ok(chunk))) = &next {
            self.read += chunk.len() as u64;
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    const BOUNDARY: &str = "b";

    /// Returns the bytes of each field of a form, and the bytes that the parser has read.
    async fn parse(body: impl Iterator<Item = Bytes> + Send) -> (Result<Vec<usize>, multer::Error>, u64) {
        let read = Arc::new(AtomicU64::new(0));
        let count = read.clone();
        let chunks = stream::iter(body.map(move |chunk| {
            count.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            Ok(chunk)
        }));
        let consumed = Arc::new(AtomicU64::new(0));
        let chunks =
            FormChunks { chunks: Box::pin(chunks), read: 0, consumed: consumed.clone(), pauses: (0, 0) };
        let mut form = Multipart::new(chunks, BOUNDARY);
        let fields = async {
            let mut fields = Vec::new();
            while let Some(mut field) = form.next_field().await? {
                fields.push(0);
                while let Some(chunk) = field.chunk().await? {
                    consumed.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    *fields.last_mut().expect("pushed") += chunk.len();
                }
            }
            Ok::<_, multer::Error>(fields)
        };
        (fields.await, read.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn a_large_file_is_read_although_all_of_it_has_arrived() {
        let head =
            Bytes::from("--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n");
        for chunk in [1000, FORM_BYTES_MAX, 3 * FORM_BYTES_MAX] {
            let content = std::iter::repeat_n(Bytes::from(vec![b'\n'; chunk]), 100);
            let body = std::iter::once(head.clone()).chain(content).chain([Bytes::from("\r\n--b--\r\n")]);
            assert_eq!(parse(body).await.0.unwrap(), [100 * chunk]);
        }
    }

    #[tokio::test]
    async fn a_form_without_a_boundary_or_the_end_of_a_head_is_rejected_before_it_is_in_memory() {
        let chunk = Bytes::from(vec![b'x'; 10_000]);
        for beginning in ["", "--b\r\ncontent-disposition: form-data; name=\""] {
            let body =
                std::iter::once(Bytes::from(beginning)).chain(std::iter::repeat_n(chunk.clone(), 10_000));
            let (parsed, read) = parse(body.filter(|chunk| !chunk.is_empty())).await;
            assert!(matches!(&parsed, Err(multer::Error::StreamReadFailed(_))), "{parsed:?}");
            assert!(read < 2 * FORM_BYTES_MAX as u64, "{read}");
        }
    }
}
