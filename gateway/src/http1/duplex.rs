//! Request and response whose bodies are sent and received at the same time, in pieces, on a connection of their own.

use super::pool::PooledConnection;
use super::{Http1Connection, Http1Error, UpstreamHead, head};
use crate::hop::{Connector, TransportStream, UpstreamKey};
use crate::request_head::RequestHead;
use ::http1::{BodyFraming, BodyPart};
use bytes::{Buf, Bytes, BytesMut};
use http::header::TRANSFER_ENCODING;
use http::response::Parts;
use std::io::{self, Write};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

/// Bytes read at once: a message has some hundred, and a connection that waits for one keeps them.
const READ_BYTES: usize = 2 << 10;

/// Sender of the pieces of a request.
pub(crate) struct DuplexRequest {
    stream: WriteHalf<TransportStream>,
    /// Head that is sent with the first piece.
    head: Vec<u8>,
}

/// Receiver of the response.
pub(crate) struct DuplexResponse {
    stream: ReadHalf<TransportStream>,
    buffer: BytesMut,
    framing: BodyFraming,
    connector: Arc<Connector>,
    key: UpstreamKey,
    /// Address of the peer.
    pub(crate) remote: IpAddr,
    /// Whether the connection was open before.
    pub(crate) is_reused: bool,
}

impl Http1Connection<'_> {
    /// Begins a request with a body of unknown length. The connection ends with it.
    pub(crate) fn duplex(self, head: &RequestHead) -> (DuplexRequest, DuplexResponse) {
        let Http1Connection { client, connection, reused: is_reused } = self;
        let PooledConnection { stream, buffer, key, peer: _, remote } = connection;
        let (reader, writer) = tokio::io::split(stream);
        let mut head = head.clone();
        head.put(TRANSFER_ENCODING.as_str(), "chunked");
        let connector = client.connector.clone();
        let framing = BodyFraming::UntilClosed;
        let response = DuplexResponse { stream: reader, buffer, framing, connector, key, remote, is_reused };
        (DuplexRequest { stream: writer, head: head.to_http1() }, response)
    }
}

impl DuplexRequest {
    /// Sends a piece of the body as one chunk, in one write.
    pub(crate) async fn send(&mut self, piece: &[u8]) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.head);
        write!(bytes, "{:x}\r\n", piece.len())?;
        bytes.extend_from_slice(piece);
        bytes.extend_from_slice(b"\r\n");
        self.stream.write_all(&bytes).await?;
        // TLS buffers the bytes that the socket did not accept.
        self.stream.flush().await
    }
}

impl DuplexResponse {
    /// Waits for the head of the response.
    pub(crate) async fn head(&mut self) -> Result<Parts, Http1Error> {
        let head = self.read_head().await.inspect_err(|error| {
            if let Http1Error::Io(error) = error {
                self.connector.connection_failed(&self.key, error);
            }
        })?;
        let UpstreamHead { head, framing, keep_alive: _ } = head;
        self.framing = framing;
        self.connector.mark_healthy(&self.key);
        Ok(head)
    }

    async fn read_head(&mut self) -> Result<UpstreamHead, Http1Error> {
        loop {
            if !self.buffer.is_empty()
                && let Some(head) = head::take(&mut self.buffer)?
            {
                return Ok(head);
            }
            self.fill().await?;
        }
    }

    /// Returns the next piece of the body; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, Http1Error> {
        loop {
            let BodyPart { skipped, data } = self.framing.next(&self.buffer)?;
            self.buffer.advance(skipped);
            if data > 0 {
                return Ok(Some(self.buffer.split_to(data).freeze()));
            }
            if self.framing.is_done() {
                return Ok(None);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), Http1Error> {
        self.buffer.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            _ => Ok(()),
        }
    }
}
