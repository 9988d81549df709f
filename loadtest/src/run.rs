//! Execution of a run: checks that the target is reachable, runs the generator on its own thread, and reports progress.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};

use crate::engine::stream::Tls;
use crate::engine::{Engine, Shared, Target};
use crate::options::Options;
use crate::record::{Record, Snapshot};
use crate::report::Report;

/// Interval of progress reports: short enough for a smooth progress bar, long enough to have no measurable cost.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Error that prevents or aborts a run.
#[derive(Debug, thiserror::Error)]
pub enum CannotStart {
    /// The target does not accept connections.
    #[error("nothing answers at {target}: {source}; is it up, and is the port right?")]
    Unreachable {
        /// URL of the target.
        target: String,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// The target's certificate is not trusted.
    #[error("{target} does not prove who it is: {source}; --cacert names the authority to believe")]
    NotTrusted {
        /// URL of the target.
        target: String,
        /// Error of the handshake.
        source: io::Error,
    },
    /// The thread or its epoll instance could not be created.
    #[error("no thread for the generator: {0}")]
    NoThread(io::Error),
}

/// Runs the load described by `options`. `progress` is called five times a second and once at the end. When `shutdown`
/// completes, no further request is started, and requests in flight are awaited, at most for their timeout.
pub async fn run(
    options: Options,
    mut progress: impl FnMut(&Snapshot),
    shutdown: impl Future<Output = ()>,
) -> Result<Report, CannotStart> {
    let target = {
        let (options, failed) =
            (options.clone(), |error: tokio::task::JoinError| CannotStart::NoThread(error.into()));
        tokio::task::spawn_blocking(move || reach(&options)).await.map_err(failed)??
    };
    let record = Record::of(options.tasks.iter().map(|task| task.pacing.ends()));
    let shared = Arc::new(Shared::new(&options, record));
    let (start, duration) = (Instant::now(), options.lasts());
    let snapshot = || {
        let in_flight = shared.in_flight.load(Ordering::Relaxed);
        Snapshot::of(&shared.record(), in_flight as u64, start.elapsed(), duration)
    };

    let engine = Engine::new(&options, target, Arc::clone(&shared), start).map_err(CannotStart::NoThread)?;
    let (ended, mut end) = oneshot::channel();
    let thread = std::thread::Builder::new().name("generator".to_owned());
    let thread = thread.spawn(move || {
        let all = engine.run();
        // The receiver may have been dropped.
        let _gone = ended.send(());
        all
    });
    let stop = StopsWhenDropped(&shared);
    let thread = thread.map_err(CannotStart::NoThread)?;

    let mut stopped = false;
    let mut shutdown = std::pin::pin!(shutdown);
    let mut ticks = interval(PROGRESS_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = &mut end => break,
            _ = ticks.tick() => progress(&snapshot()),
            () = &mut shutdown, if !stopped => {
                stopped = true;
                shared.stop.store(true, Ordering::Relaxed);
            }
        }
    }
    let elapsed = start.elapsed();
    // The thread has signalled its end, so `join` does not block.
    let to_the_end = thread.join().expect("the generator does not panic").map_err(CannotStart::NoThread)?;
    progress(&snapshot());
    drop(stop);

    let record = std::mem::take(&mut *shared.record());
    Ok(Report { options, elapsed, stopped_early: !to_the_end, record, marks: Vec::new() })
}

/// Stops the generator when the run's future is dropped.
struct StopsWhenDropped<'a>(&'a Shared);

impl Drop for StopsWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Opens and closes one connection, so that a wrong port is detected before the run. Also selects one of the addresses of
/// the host name.
fn reach(options: &Options) -> Result<Target, CannotStart> {
    let base = &options.base;
    let host = base.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let port = base.port_u16().unwrap_or(if options.trust.is_some() { 443 } else { 80 });
    let unreachable = |source| CannotStart::Unreachable { target: base.to_string(), source };
    let addresses = (host.as_str(), port).to_socket_addrs().map_err(unreachable)?;
    let (address, socket) = connect(addresses, options.timeout).map_err(unreachable)?;
    let Some(trust) = &options.trust else { return Ok(Target { address, tls: None }) };
    let not_trusted = |source| CannotStart::NotTrusted { target: base.to_string(), source };
    let name = ServerName::try_from(host).map_err(|error| not_trusted(io::Error::other(error)))?;
    let tls = Tls { config: Arc::clone(&trust.0), name };
    shake_hands(socket, &tls, options.timeout).map_err(not_trusted)?;
    Ok(Target { address, tls: Some(tls) })
}

/// Connects to the first address that accepts a connection.
fn connect(
    addresses: impl Iterator<Item = SocketAddr>,
    within: Duration,
) -> io::Result<(SocketAddr, TcpStream)> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, within) {
            Ok(socket) => return Ok((address, socket)),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn shake_hands(mut socket: TcpStream, tls: &Tls, within: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(within))?;
    socket.set_write_timeout(Some(within))?;
    let session = rustls::ClientConnection::new(Arc::clone(&tls.config), tls.name.clone());
    let mut session = session.map_err(io::Error::other)?;
    while session.is_handshaking() {
        session.complete_io(&mut socket)?;
    }
    Ok(())
}
