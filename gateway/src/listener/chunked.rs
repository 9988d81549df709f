//! Stream wrapper that passes the bytes of a chunked body to [`http1::ChunkDecoder`] as they are read, and fails
//! the read when the chunks are invalid.

use super::filtered::{Filtered, ReadFilter};
use http1::{ChunkDecoder, FramingError};
use pingora::protocols::Stream;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};

/// Filter of a connection while the body of one request is read from it.
#[derive(Debug)]
struct ChunkFilter {
    chunks: ChunkDecoder,
    /// Error of the body; all further reads fail.
    problem: Option<FramingError>,
}

/// Error for a request body with invalid chunks. The client gets 400, and its connection is closed.
#[derive(Debug, thiserror::Error)]
#[error("the chunked body is malformed: {0}")]
pub(crate) struct InvalidChunks(&'static str);

/// Wraps a connection. `chunks` has consumed the bytes after the head already, and `problem` is the error it found there.
pub(super) fn wrap(inner: Stream, chunks: ChunkDecoder, problem: Option<FramingError>) -> Stream {
    Box::new(Filtered { inner, filter: ChunkFilter { chunks, problem } })
}

/// Returns the underlying connection when the request has ended.
pub(super) fn unwrap(stream: Stream) -> Stream {
    if (*stream).as_any().is::<Filtered<ChunkFilter>>() {
        let filtered = stream.into_any().downcast::<Filtered<ChunkFilter>>();
        return filtered.expect("the type was checked").inner;
    }
    stream
}

/// Returns the reason why the chunks of a body are invalid, if that is why reading it failed.
pub(crate) fn chunk_error(error: &pingora::Error) -> Option<&'static str> {
    let error = error.root_cause().downcast_ref::<io::Error>()?;
    error.get_ref()?.downcast_ref::<InvalidChunks>().map(|InvalidChunks(problem)| *problem)
}

impl ReadFilter for ChunkFilter {
    fn poll_read(
        &mut self,
        inner: &mut Stream,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.problem.is_none() {
            let before = buffer.filled().len();
            std::task::ready!(Pin::new(inner).poll_read(context, buffer))?;
            self.problem = self.chunks.scan(&buffer.filled()[before..]).err();
        }
        Poll::Ready(match self.problem {
            None => Ok(()),
            Some(FramingError(problem)) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, InvalidChunks(problem)))
            }
        })
    }
}
