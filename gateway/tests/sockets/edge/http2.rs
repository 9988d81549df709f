//! Scripted region over HTTP/2: each stream is passed to the script as a connection of its own, and faults of the
//! script affect the stream. Faults of a process (frozen, killed, closing idle connections) affect the connection.

use super::region::{ListenerState, Region};
use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Request, Response};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// First bytes of an HTTP/2 client.
pub(crate) const PREFACE: &[u8] = b"PRI";
/// Maximum unread bytes written by a script.
const PIPE_BYTES: usize = 64 << 10;

/// Serves a connection until its end.
pub(crate) async fn serve(region: &Arc<Region>, stream: BufReader<TcpStream>) -> Option<()> {
    let mut connection = h2::server::handshake(stream).await.ok()?;
    let (mut streams, mut requests) = (JoinSet::new(), 0);
    loop {
        tokio::select! {
            accepted = connection.accept() => {
                let (request, respond) = accepted?.ok()?;
                if request.uri().path() != scheduler_api::paths::EXCHANGE {
                    // The connection of the reports is one of those that were closed, as soon as another request
                    // arrives on it.
                    if region.listener() != ListenerState::Open {
                        return None;
                    }
                    requests += 1;
                }
                streams.spawn(serve_stream(region.clone(), request, respond));
            }
            _ = region.wait_until_not_open(), if requests > 0 => return None,
            () = region.wait_until_silent() => std::future::pending().await,
            Some(_) = streams.join_next() => {}
        }
    }
}

async fn serve_stream(region: Arc<Region>, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    let script = async { region.serve_connection(BufReader::new(far)).await };
    let carried = forward(request, &mut respond, near);
    if tokio::join!(carried, script).0.is_none() {
        respond.send_reset(Reason::INTERNAL_ERROR);
    }
}

/// Passes a request to the script and its response to the gateway; no response if the script aborts or the gateway
/// cancels.
async fn forward(
    request: Request<RecvStream>,
    respond: &mut SendResponse<Bytes>,
    mut script: DuplexStream,
) -> Option<()> {
    let (head, mut received) = request.into_parts();
    let mut body = Vec::new();
    while let Some(chunk) = received.data().await {
        let chunk = chunk.ok()?;
        received.flow_control().release_capacity(chunk.len()).ok()?;
        body.extend_from_slice(&chunk);
    }
    let (method, path, length) = (head.method, head.uri.path(), body.len());
    let head = format!("{method} {path} HTTP/1.1\r\ncontent-length: {length}\r\n\r\n");
    script.write_all(head.as_bytes()).await.ok()?;
    script.write_all(&body).await.ok()?;

    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        tokio::select! {
            byte = script.read_u8() => text.push(byte.ok()?),
            _ = std::future::poll_fn(|context| respond.poll_reset(context)) => return None,
        }
    }
    let text = String::from_utf8(text).ok()?;
    let mut lines = text.split("\r\n");
    let status: u16 = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let fields = lines.filter_map(|line| line.split_once(": "));
    let response = fields
        .fold(Response::builder().status(status), |response, (name, value)| response.header(name, value));
    let response = response.body(()).ok()?;
    let mut left: usize = response.headers()["content-length"].to_str().ok()?.parse().ok()?;
    let mut stream = respond.send_response(response, left == 0).ok()?;
    while left > 0 {
        let mut chunk = vec![0; left.min(PIPE_BYTES)];
        let read = script.read(&mut chunk).await.ok().filter(|read| *read > 0);
        let Some(read) = read else {
            stream.send_reset(Reason::INTERNAL_ERROR);
            return Some(());
        };
        chunk.truncate(read);
        left -= read;
        stream.send_data(chunk.into(), left == 0).ok()?;
    }
    Some(())
}
