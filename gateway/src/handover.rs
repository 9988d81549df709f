//! Passes the listening sockets of a gateway to the next process, so that an upgrade refuses no connection.
//!
//! ```text
//!   next                          running
//!    │──────── connects ───────────▶│   over a Unix socket, same user only
//!    │◀─── the two sockets (SCM_RIGHTS)
//!    │  starts: certificate, routes, health …
//!    │──────── "ready" ────────────▶│
//!    │  accepts                     │  stops accepting, finishes its requests, exits
//! ```
//!
//! Both processes share one socket with one accept queue, so either of them accepts a queued connection. Two sockets on
//! one port (`SO_REUSEPORT`) have two queues, and the connections in the queue of the one that closes are reset.
//!
//! The next process takes the sockets over only if it was started to do so. One that was started by mistake, or to test
//! a configuration file, finds the running process ([`running`]) and exits; the running one continues.
//!
//! Until "ready" the running process is unaffected: a next process that fails to start changes nothing.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use supervision::task::blocking;
use tokio::net::UnixListener;

/// Timeout for each message of the other process. A start reads a few files and waits for no peer.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// First byte of the running process, sent with the sockets: the version of this protocol.
const SOCKETS: u8 = 1;
/// Byte that the next process sends when it can take over.
const READY: u8 = 2;

/// Listening sockets of a gateway: for clients and for operators.
pub(crate) struct Sockets {
    pub(crate) clients: TcpListener,
    pub(crate) operators: TcpListener,
}

impl Sockets {
    /// Duplicates both sockets.
    pub(crate) fn try_clone(&self) -> io::Result<Sockets> {
        Ok(Sockets { clients: self.clients.try_clone()?, operators: self.operators.try_clone()? })
    }
}

/// Sockets received from a running process, which continues to accept until [`Takeover::ready`].
pub(crate) struct Takeover {
    pub(crate) sockets: Sockets,
    running: UnixStream,
}

impl Takeover {
    /// Makes the running process drain and exit.
    pub(crate) fn ready(mut self) -> io::Result<()> {
        self.running.write_all(&[READY])
    }
}

/// Returns the process that accepts connections at `path`, if there is one: its identifier, where the kernel provides
/// it. Requests nothing from it.
pub(crate) fn running(path: &Path) -> io::Result<Option<Option<u32>>> {
    let Some(running) = connected(path)? else { return Ok(None) };
    let peer = rustix::net::sockopt::socket_peercred(&running).ok();
    Ok(Some(peer.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok())))
}

fn connected(path: &Path) -> io::Result<Option<UnixStream>> {
    match UnixStream::connect(path) {
        Ok(running) => Ok(Some(running)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Requests the sockets of the process that accepts connections at `path`; `None` if there is none.
pub(crate) fn take_over(path: &Path) -> io::Result<Option<Takeover>> {
    let Some(running) = connected(path)? else { return Ok(None) };
    running.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
    running.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    let (mut word, mut space) = ([0], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))]);
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        &running,
        &mut [IoSliceMut::new(&mut word)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            sockets.extend(descriptors);
        }
    }
    match (received.bytes, word, <[OwnedFd; 2]>::try_from(sockets)) {
        (1, [SOCKETS], Ok([clients, operators])) => {
            let sockets = Sockets { clients: clients.into(), operators: operators.into() };
            Ok(Some(Takeover { sockets, running }))
        }
        _ => Err(io::Error::other(
            "the process at the handover socket sent no sockets; it may be another version",
        )),
    }
}

/// Handover socket: the next process connects here.
pub(crate) struct HandoverListener {
    socket: UnixListener,
    sockets: Sockets,
    /// Temporary path, until [`HandoverListener::publish`].
    bound: PathBuf,
}

impl HandoverListener {
    /// Binds a temporary path next to `path`; [`HandoverListener::publish`] moves it to `path`. All errors occur here,
    /// while the previous process still accepts at `path`.
    pub(crate) fn bind_next(path: &Path, sockets: Sockets) -> io::Result<HandoverListener> {
        let mut bound = path.as_os_str().to_owned();
        bound.push(".next");
        let bound = PathBuf::from(bound);
        match std::fs::remove_file(&bound) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(HandoverListener { socket: UnixListener::bind(&bound)?, sockets, bound })
    }

    /// Moves the socket to `path`, replacing that of the previous process.
    pub(crate) fn publish(&self, path: &Path) -> io::Result<()> {
        std::fs::rename(&self.bound, path)
    }

    /// Completes when a next process is ready to take over.
    pub(crate) async fn wait(self) {
        let HandoverListener { socket, mut sockets, bound: _ } = self;
        loop {
            let next = match socket.accept().await {
                Ok((next, _)) => next,
                Err(error) => {
                    // The next process could not connect to take over; the gateway accepts again after a second. Check
                    // the limit of open files.
                    tracing::warn!(%error, "failed to accept a handover connection");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
            };
            // The holder of the sockets receives the traffic, so they are only for the same user.
            if next.peer_cred().map(|peer| peer.uid()).ok() != Some(rustix::process::geteuid().as_raw()) {
                // A process of another user requested the listening sockets and was rejected. Start the next process as
                // the user of this one.
                tracing::error!("handover request of another user rejected");
                continue;
            }
            let outcome;
            (sockets, outcome) = blocking(move || {
                let outcome = send_sockets(next.into_std(), &sockets);
                (sockets, outcome)
            })
            .await;
            match outcome {
                // The next process has the listening sockets. This one drains and exits.
                Ok(()) => return tracing::info!("handover completed"),
                Err(error) => {
                    // The log of the next process has the reason.
                    tracing::warn!(%error, "next process did not become ready; this one continues")
                }
            }
        }
    }
}

fn send_sockets(next: io::Result<UnixStream>, sockets: &Sockets) -> io::Result<()> {
    let mut next = next?;
    next.set_nonblocking(false)?;
    next.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
    next.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    let both = [sockets.clients.as_fd(), sockets.operators.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&both)), "there is space for two");
    rustix::net::sendmsg(&next, &[IoSlice::new(&[SOCKETS])], &mut ancillary, SendFlags::empty())?;
    let mut word = [0];
    next.read_exact(&mut word)?;
    if word == [READY] {
        Ok(())
    } else {
        Err(io::Error::other("the next process sent an unknown byte instead of ready"))
    }
}
