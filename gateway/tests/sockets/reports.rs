//! Scripted side of a spoke in the exchange of reports: a response for each message of a gateway.

use axum::body::{Body, Bytes};
use futures_util::{StreamExt, stream};
use scheduler_api::report::stream::{ExchangeRequestReader, MessageBuffer, REQUEST_BYTES_MAX};
use std::convert::Infallible;
use std::future::Future;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Returns the response to an exchange whose messages are in `body`: for each of them the complete report that `report`
/// returns for its sequence number, as JSON.
pub(crate) fn respond<F>(body: Body, report: impl FnMut(u64) -> F + Send + 'static) -> Body
where
    F: Future<Output = String> + Send + 'static,
{
    let messages = MessageBuffer::new(REQUEST_BYTES_MAX);
    let state = (body.into_data_stream(), messages, ExchangeRequestReader::default(), report);
    Body::from_stream(stream::unfold(state, async |(mut body, mut messages, mut reader, mut report)| {
        let message = loop {
            match messages.take().unwrap() {
                Some(message) => break message,
                None => messages.push(&body.next().await?.ok()?),
            }
        };
        let sequence = reader.read(&message).unwrap().sequence;
        let line = Bytes::from(report(sequence).await + "\n");
        Some((Ok::<_, Infallible>(line), (body, messages, reader, report)))
    }))
}

/// Serves an exchange whose head was read from a connection; each chunk of the gateway is one message.
pub(crate) async fn serve<F: Future<Output = Vec<u8>>>(
    stream: &mut (impl AsyncBufRead + AsyncWrite + Unpin),
    mut report: impl FnMut(u64) -> F,
) -> Option<()> {
    stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
    stream.flush().await.ok()?;
    let mut reader = ExchangeRequestReader::default();
    loop {
        let mut size = String::new();
        stream.read_line(&mut size).await.ok()?;
        let size = usize::from_str_radix(size.trim_end(), 16).ok()?;
        let mut chunk = vec![0; size + 2];
        stream.read_exact(&mut chunk).await.ok()?;
        let request = reader.read(&chunk[..size]).ok()?;
        let report = report(request.sequence).await;
        let head = format!("{:x}\r\n", report.len() + 1);
        stream.write_all(&[head.as_bytes(), report.as_slice(), b"\n\r\n"].concat()).await.ok()?;
        stream.flush().await.ok()?;
    }
}
