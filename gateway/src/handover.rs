//! One process of a gateway gives its listening sockets to the next, so that an upgrade refuses nobody.
//!
//! ```text
//!   next                          running
//!    │──────── connects ───────────▶│   over a socket in the file system, of one user
//!    │◀─── the two sockets (SCM_RIGHTS)
//!    │  starts: certificate, routes, health …
//!    │──────── "ready" ────────────▶│
//!    │  accepts                     │  accepts no more, finishes what it has, ends
//! ```
//!
//! It is the same socket with the same queue, so a connection that has come is taken by the one or the other. Two sockets
//! on one port (`SO_REUSEPORT`) have two queues, and what waits in the queue of the one that closes is reset.
//!
//! The next process asks only if it was started to take over. One that was started by mistake, or to try a file out, sees
//! that another one runs and ends, and the running one goes on ([`running`]).
//!
//! Until "ready" nothing has changed for the running process: a next one that cannot start has only been an attempt.

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
use tokio::net::UnixListener;

/// How long one side waits for the other's next word: a start reads a few files and waits for nobody.
const PATIENCE: Duration = Duration::from_secs(30);
/// What the running process says beside its sockets: the version of this protocol.
const SOCKETS: u8 = 1;
/// What the next process says when it can take over.
const READY: u8 = 2;

/// The sockets of a gateway: of clients, and of operators.
pub(crate) struct Sockets {
    pub(crate) clients: TcpListener,
    pub(crate) operators: TcpListener,
}

impl Sockets {
    /// The same sockets once more.
    pub(crate) fn again(&self) -> io::Result<Sockets> {
        Ok(Sockets { clients: self.clients.try_clone()?, operators: self.operators.try_clone()? })
    }
}

/// The sockets of a running process, and the promise to tell it.
pub(crate) struct Taken {
    pub(crate) sockets: Sockets,
    running: UnixStream,
}

impl Taken {
    /// Tells the running process to leave.
    pub(crate) fn ready(mut self) -> io::Result<()> {
        self.running.write_all(&[READY])
    }
}

/// The process that answers at `path`, if one does: its identifier, where the kernel tells it. Nothing is asked of it.
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

/// Asks whoever answers at `path` for its sockets; `None` if nobody does.
pub(crate) fn ask(path: &Path) -> io::Result<Option<Taken>> {
    let Some(running) = connected(path)? else { return Ok(None) };
    running.set_read_timeout(Some(PATIENCE))?;
    running.set_write_timeout(Some(PATIENCE))?;
    let (mut word, mut space) = ([0], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))]);
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let said = rustix::net::recvmsg(
        &running,
        &mut [IoSliceMut::new(&mut word)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut sockets: Vec<OwnedFd> = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            sockets.extend(given);
        }
    }
    match (said.bytes, word, <[OwnedFd; 2]>::try_from(sockets)) {
        (1, [SOCKETS], Ok([clients, operators])) => {
            let sockets = Sockets { clients: clients.into(), operators: operators.into() };
            Ok(Some(Taken { sockets, running }))
        }
        _ => Err(io::Error::other("whoever answers there gives no sockets; is it another version?")),
    }
}

/// Where the next process asks.
pub(crate) struct Giver {
    socket: UnixListener,
    sockets: Sockets,
    /// Where it is bound, until it stands where it is looked for.
    bound: PathBuf,
}

impl Giver {
    /// Keeps `sockets` to be given at `path`, once it is told to [`Giver::stand_at`] it. Everything that can go wrong goes
    /// wrong here, while the process that stands there is still the one that serves.
    pub(crate) fn beside(path: &Path, sockets: Sockets) -> io::Result<Giver> {
        let mut bound = path.as_os_str().to_owned();
        bound.push(".next");
        let bound = PathBuf::from(bound);
        match std::fs::remove_file(&bound) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Giver { socket: UnixListener::bind(&bound)?, sockets, bound })
    }

    /// Stands at `path`, in place of whoever did before.
    pub(crate) fn stand_at(&self, path: &Path) -> io::Result<()> {
        std::fs::rename(&self.bound, path)
    }

    /// Comes back when a next process is ready to take over.
    pub(crate) async fn given(self) {
        let Giver { socket, mut sockets, bound: _ } = self;
        loop {
            let next = match socket.accept().await {
                Ok((next, _)) => next,
                Err(error) => {
                    tracing::warn!(%error, "the next process could not be heard");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
            };
            // Whoever has the sockets has the traffic: they are for ourselves alone.
            if next.peer_cred().map(|peer| peer.uid()).ok() != Some(rustix::process::geteuid().as_raw()) {
                tracing::error!("another user asks for the sockets of this gateway, and is refused");
                continue;
            }
            let given = tokio::task::spawn_blocking(move || {
                let outcome = give(next.into_std(), &sockets);
                (sockets, outcome)
            });
            let outcome;
            (sockets, outcome) = given.await.expect("giving sockets does not panic");
            match outcome {
                Ok(()) => return tracing::info!("the next process has taken over"),
                Err(error) => {
                    tracing::warn!(%error, "the next process did not become ready; this one goes on")
                }
            }
        }
    }
}

fn give(next: io::Result<UnixStream>, sockets: &Sockets) -> io::Result<()> {
    let mut next = next?;
    next.set_nonblocking(false)?;
    next.set_read_timeout(Some(PATIENCE))?;
    next.set_write_timeout(Some(PATIENCE))?;
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
        Err(io::Error::other("it says something else than that it is ready"))
    }
}
