//! Accepts connections, and lets go of them in order.
//!
//! Pingora's `Server` owns the process: its own runtimes, its own signal handling, a fixed wait before it exits. Ours is
//! one role among others in a process that the front door owns, so the accept loop is here (bound before it is
//! announced, joined before it returns) and Pingora begins where a connection does: parsing, keep-alive, bodies.

use crate::respond;
use async_trait::async_trait;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream, ServerApp};
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use pingora::protocols::l4::listener::Listener as Socket;
use pingora::server::ShutdownWatch;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Connections open at once. At about 20 KiB each that is 200 MiB; the next one waits in the kernel's queue.
pub(crate) const CONNECTIONS_MAX: usize = 10_000;
/// How long an idle connection is kept for its client's next request.
const KEEPALIVE_SECS: u64 = 60;
/// How long accepting pauses when the machine has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What stands behind a listener: it answers one request after another.
pub(crate) trait Door: Send + Sync + 'static {
    /// Answers the request whose head `session` has read.
    fn answer(&self, session: &mut ServerSession) -> impl Future<Output = AfterAnswer> + Send;
}

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterAnswer {
    /// It can carry the next request.
    Reuse,
    /// The answer broke off, or the client is gone.
    Close,
}

/// A bound socket that is not served yet.
pub(crate) struct Listener {
    socket: Socket,
    address: SocketAddr,
    room: Arc<Semaphore>,
}

impl Listener {
    /// Binds `address`; port 0 takes any that is free.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Listener> {
        let socket = TcpListener::bind(address).await?;
        let address = socket.local_addr()?;
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Ok(Listener { socket: socket.into(), address, room })
    }

    /// Where it is bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A permit for each connection that could be opened now, of [`CONNECTIONS_MAX`].
    pub(crate) fn room(&self) -> Arc<Semaphore> {
        self.room.clone()
    }

    /// Serves until `shutdown`; then takes no new connection, lets requests in flight finish for up to `drain`, and
    /// returns with every connection closed.
    pub(crate) async fn serve<D: Door>(
        self,
        door: Arc<D>,
        shutdown: impl Future<Output = ()>,
        drain: Duration,
    ) {
        let app = Arc::new(App { door });
        let (closing, watch) = watch::channel(false);
        let room = self.room.clone();
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                accepted = accept(&self.socket, &room) => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Ok((stream, place)) => {
                    let (app, watch) = (app.clone(), watch.clone());
                    connections.spawn(async move {
                        let _place = place;
                        let mut stream = Some(stream);
                        while let Some(open) = stream {
                            stream = app.process_new(open, &watch).await;
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        closing.send_replace(true);
        let finished = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(drain, finished).await.is_err() {
            tracing::warn!(?drain, "requests still in flight after the drain are cut off");
            connections.shutdown().await;
        }
    }
}

/// Pingora's own accept, because it notes who the peer is: nobody else tells a session.
async fn accept(socket: &Socket, room: &Arc<Semaphore>) -> io::Result<(Stream, OwnedSemaphorePermit)> {
    let place = room.clone().acquire_owned().await.expect("the semaphore is never closed");
    let mut stream = socket.accept().await?;
    stream.set_nodelay().map_err(io::Error::other)?;
    Ok((Box::new(stream), place))
}

/// A [`Door`] as Pingora's application.
struct App<D> {
    door: Arc<D>,
}

#[async_trait]
impl<D: Door> HttpServerApp for App<D> {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        let mut closing = shutdown.clone();
        let head = tokio::select! {
            biased;
            head = session.read_request() => head,
            _ = closing.wait_for(|closing| *closing) => return None,
        };
        match head {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                tracing::debug!(%error, "a request head that cannot be read");
                respond::unreadable(&mut session).await;
                return None;
            }
        }
        session.set_keepalive((!*shutdown.borrow()).then_some(KEEPALIVE_SECS));
        if self.door.answer(&mut session).await == AfterAnswer::Close {
            session.shutdown().await;
            return None;
        }
        let settings = HttpPersistentSettings::for_session(&session);
        let reusable = session.finish().await.ok()??;
        Some(ReusedHttpStream::from_reusable_stream(reusable, settings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::Notify;

    /// A door that answers when it is told to.
    struct Slow {
        asked: Notify,
        go_on: Notify,
    }

    impl Door for Slow {
        async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
            self.asked.notify_one();
            self.go_on.notified().await;
            respond::ok(session, b"{}".to_vec(), &[]).await
        }
    }

    async fn connect(address: SocketAddr) -> TcpStream {
        TcpStream::connect(address).await.unwrap()
    }

    #[tokio::test]
    async fn told_to_stop_it_finishes_what_was_asked_and_lets_the_idle_go() {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.address();
        let door = Arc::new(Slow { asked: Notify::new(), go_on: Notify::new() });
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let shutdown = async { drop(stopped.await) };
        let serving = tokio::spawn(listener.serve(door.clone(), shutdown, Duration::from_secs(10)));

        let mut idle = connect(address).await;
        let mut busy = connect(address).await;
        busy.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        door.asked.notified().await;
        stop.send(()).unwrap();
        assert_eq!(idle.read(&mut [0; 1]).await.unwrap(), 0, "an idle connection is closed at once");
        assert!(!serving.is_finished(), "a request is still being answered");
        door.go_on.notify_one();
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("{}"), "{answer}");
        serving.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    }

    #[tokio::test]
    async fn a_head_that_is_not_http_is_answered_and_closed() {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let mut stream = connect(listener.address()).await;
        let door = Arc::new(Slow { asked: Notify::new(), go_on: Notify::new() });
        let serving = tokio::spawn(listener.serve(door, std::future::pending(), Duration::ZERO));
        stream.write_all(b"this is not HTTP\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("invalid_header"), "{answer}");
        serving.abort();
    }
}
