//! HTTP/2: requests share connections; further ones are opened as needed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

use super::one::Io;
use super::{ANSWER_BYTES_MAX, Answer, Failure, Headers};

/// Maximum concurrent requests per connection: below 100, the minimum that servers are recommended to allow.
pub(super) const STREAMS_MAX: usize = 96;

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
pub(super) struct Session {
    send: SendRequest<Full<Bytes>>,
    /// Reference count of the users: the pool and each request in flight.
    users: Arc<()>,
}

impl Session {
    pub(super) async fn open(io: Box<dyn Io>) -> Result<Session, Failure> {
        let (send, connection) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|error| Failure::Unreachable(said(&error)))?;
        // Ends when the last user drops its handle. Errors are reported to the requests.
        tokio::spawn(connection);
        Ok(Session { send, users: Arc::new(()) })
    }

    pub(super) fn has_room(&self) -> bool {
        Arc::strong_count(&self.users) <= STREAMS_MAX
    }

    pub(super) fn is_over(&self) -> bool {
        self.send.is_closed()
    }

    /// Sends a request and reads the response into `buffer`.
    pub(super) async fn exchange(
        mut self,
        request: Request<Full<Bytes>>,
        mut buffer: Vec<u8>,
    ) -> Result<(u16, Answer), Failure> {
        let broken = |error: hyper::Error| Failure::BrokenOff(said(&error));
        self.send.ready().await.map_err(broken)?;
        let response = self.send.send_request(request).await.map_err(broken)?;
        let status = response.status().as_u16();
        let mut headers = Headers::default();
        response.headers().iter().for_each(|(name, value)| headers.push(name.as_str(), value.as_bytes()));
        buffer.clear();
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(broken)?.into_data() {
                if buffer.len() + data.len() > ANSWER_BYTES_MAX {
                    let most =
                        format!("a body of more than {ANSWER_BYTES_MAX} bytes; ask for fewer texts at once");
                    return Err(Failure::Malformed(most));
                }
                buffer.extend_from_slice(&data);
            }
        }
        let body = 0..buffer.len();
        Ok((status, Answer { headers, buffer, body }))
    }
}

/// Formats an error with its sources.
fn said(error: &dyn std::error::Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(behind) = source {
        said = format!("{said}: {behind}");
        source = behind.source();
    }
    said
}
