//! HTTP/2: requests share connections; further ones are opened as needed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use super::http1::Io;
use super::{HeaderLines, HttpAttemptError, HttpResponse, RESPONSE_BYTES_MAX};

/// Maximum concurrent requests per connection: below 100, the minimum that servers are recommended to allow.
pub(crate) const STREAMS_MAX: usize = 96;

/// Flow-control windows: one large response per stream, and a dozen per connection.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 48 << 20;

/// Maximum frame size; fewer and larger frames than the default of 16 KB.
const FRAME_BYTES: u32 = 256 << 10;

/// Interval of keep-alive pings on a connection in use, and their timeout.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// HTTP/2 connection.
#[derive(Clone)]
pub(super) struct Http2Connection {
    send: SendRequest<Full<Bytes>>,
    /// Reference count of the users: the pool and each request in flight.
    users: Arc<()>,
}

impl Http2Connection {
    pub(super) async fn open(io: Box<dyn Io>) -> Result<Http2Connection, HttpAttemptError> {
        let (send, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|error| HttpAttemptError::Unreachable(error_chain(&error)))?;
        // Ends when the last user drops its handle. Errors are reported to the requests.
        tokio::spawn(connection);
        Ok(Http2Connection { send, users: Arc::new(()) })
    }

    pub(super) fn has_capacity(&self) -> bool {
        Arc::strong_count(&self.users) <= STREAMS_MAX
    }

    pub(super) fn is_closed(&self) -> bool {
        self.send.is_closed()
    }

    /// Sends a request and reads the response into `buffer`.
    pub(super) async fn exchange(
        mut self,
        request: Request<Full<Bytes>>,
        mut buffer: Vec<u8>,
    ) -> Result<(u16, HttpResponse), HttpAttemptError> {
        let broken = |error: hyper::Error| HttpAttemptError::ConnectionClosed(error_chain(&error));
        self.send.ready().await.map_err(broken)?;
        let response = self.send.send_request(request).await.map_err(broken)?;
        let status = response.status().as_u16();
        let mut headers = HeaderLines::default();
        response.headers().iter().for_each(|(name, value)| headers.push(name.as_str(), value.as_bytes()));
        buffer.clear();
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(broken)?.into_data() {
                if buffer.len() + data.len() > RESPONSE_BYTES_MAX {
                    return Err(HttpAttemptError::TooLarge);
                }
                buffer.extend_from_slice(&data);
            }
        }
        let body = 0..buffer.len();
        Ok((status, HttpResponse { headers, buffer, body }))
    }
}

/// Formats an error with its sources.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut chain = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        chain = format!("{chain}: {cause}");
        source = cause.source();
    }
    chain
}
