//! Properties of a connection that its responses depend on: whether it may be reused, and the kind of its peer.

use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use tokio::sync::watch;

/// Whether the connection is reused after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterResponse {
    /// The connection can carry the next request.
    Reuse,
    /// The response was truncated, or the client disconnected.
    Close,
}

/// Stage of draining.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DrainStage {
    Serving,
    /// Responses announce that the connection should not be reused.
    LameDuck,
    /// Idle connections are closed.
    Closing,
}

/// Kind of the peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerKind {
    /// A client.
    Client,
    /// A gateway, which carries the requests of many clients, with the region of its certificate.
    Gateway(Option<RegionIndex>),
    /// Another spoke of the region.
    Spoke,
    /// A gateway or a spoke, over plaintext.
    Unauthenticated,
}

/// Request extension that tells whether the connection may be reused, evaluated when the response is written, not when
/// the request arrives.
#[derive(Clone)]
pub(super) struct ConnectionNotice {
    pub(super) stage: watch::Receiver<DrainStage>,
    pub(super) peer: PeerKind,
}

/// Returns the kind of the peer of a request's connection.
pub(crate) fn peer(session: &ServerSession) -> Option<PeerKind> {
    session.req_header().extensions.get::<ConnectionNotice>().map(|notice| notice.peer)
}

/// Returns whether a client that has closed its side of the connection may still wait for the response (RFC 9112, 9.6).
/// A gateway never does: its requests end with their connection.
pub(crate) fn may_half_close(session: &ServerSession) -> bool {
    !session.is_http2() && peer(session) == Some(PeerKind::Client)
}

/// Completes when idle connections are closed, so that a request without an end must end.
pub(crate) fn closing(session: &ServerSession) -> impl Future<Output = ()> + Send + use<> {
    let stage = session.req_header().extensions.get::<ConnectionNotice>().map(|notice| notice.stage.clone());
    async move {
        match stage {
            // The sender outlives every connection.
            Some(mut stage) => drop(stage.wait_for(|stage| *stage == DrainStage::Closing).await),
            None => std::future::pending().await,
        }
    }
}

/// Disables keep-alive during draining. Must be called before the head of a response is written, because HTTP/1
/// announces it there.
pub(crate) fn apply_drain_notice(session: &mut ServerSession) {
    let draining = session
        .req_header()
        .extensions
        .get::<ConnectionNotice>()
        .is_some_and(|notice| *notice.stage.borrow() != DrainStage::Serving);
    if draining {
        session.set_keepalive(None);
    }
}
