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

use crate::generator::transport::TlsTarget;
use crate::generator::{ConnectTarget, Generator, SharedState};
use crate::options::Options;
use crate::record::{Record, RunSnapshot};
use crate::report::Report;

/// Interval of progress reports: short enough for a smooth progress bar, long enough to have no measurable cost.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Error that prevents or aborts a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The target of `meridian load` does not accept connections.
    #[error("cannot connect to {target}: {source}; check that the server is running and the port is correct")]
    Unreachable {
        /// URL of the target.
        target: String,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// The certificate of the target is not signed by an authority that the command trusts.
    #[error("certificate of {target} is not trusted: {source}; pass its CA certificate with --cacert")]
    NotTrusted {
        /// URL of the target.
        target: String,
        /// Error of the handshake.
        source: io::Error,
    },
    /// The system provides no further thread or epoll instance.
    #[error("cannot start the generator thread: {0}")]
    NoThread(io::Error),
}

/// Runs the load described by `options`. `progress` is called five times a second and once at the end. When `shutdown`
/// completes, no further request is started, and requests in flight are awaited, at most for their timeout.
pub async fn run(
    options: Options,
    mut progress: impl FnMut(&RunSnapshot),
    shutdown: impl Future<Output = ()>,
) -> Result<Report, RunError> {
    let target = {
        let (options, failed) =
            (options.clone(), |error: tokio::task::JoinError| RunError::NoThread(error.into()));
        tokio::task::spawn_blocking(move || connect_target(&options)).await.map_err(failed)??
    };
    let record = Record::of(options.tasks.iter().map(|task| task.pacing.ends()));
    let shared = Arc::new(SharedState::new(&options, record));
    let (start, duration) = (Instant::now(), options.duration());
    let snapshot = || {
        let in_flight = shared.in_flight.load(Ordering::Relaxed);
        RunSnapshot::of(&shared.record(), in_flight as u64, start.elapsed(), duration)
    };

    let generator =
        Generator::new(&options, target, Arc::clone(&shared), start).map_err(RunError::NoThread)?;
    let (ended, mut end) = oneshot::channel();
    let thread = std::thread::Builder::new().name("generator".to_owned());
    let thread = thread.spawn(move || {
        let all = generator.run();
        // The receiver may have been dropped.
        let _receiver_dropped = ended.send(());
        all
    });
    let stop = StopOnDrop(&shared);
    let thread = thread.map_err(RunError::NoThread)?;

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
    let to_the_end = thread.join().expect("the generator does not panic").map_err(RunError::NoThread)?;
    progress(&snapshot());
    drop(stop);

    let record = std::mem::take(&mut *shared.record());
    Ok(Report { options, elapsed, stopped_early: !to_the_end, record, marks: Vec::new() })
}

/// Stops the generator when the run's future is dropped.
struct StopOnDrop<'a>(&'a SharedState);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Opens and closes one connection, so that a wrong port is detected before the run. Also selects one of the addresses
/// of the host name.
fn connect_target(options: &Options) -> Result<ConnectTarget, RunError> {
    let base = &options.base;
    let host = base.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let port = base.port_u16().unwrap_or(if options.trust.is_some() { 443 } else { 80 });
    let unreachable = |source| RunError::Unreachable { target: base.to_string(), source };
    let addresses = (host.as_str(), port).to_socket_addrs().map_err(unreachable)?;
    let (address, socket) = connect(addresses, options.timeout).map_err(unreachable)?;
    let Some(trust) = &options.trust else { return Ok(ConnectTarget { address, tls: None }) };
    let not_trusted = |source| RunError::NotTrusted { target: base.to_string(), source };
    let name = ServerName::try_from(host).map_err(|error| not_trusted(io::Error::other(error)))?;
    let tls = TlsTarget { config: Arc::clone(&trust.0), name };
    handshake(socket, &tls, options.timeout).map_err(not_trusted)?;
    Ok(ConnectTarget { address, tls: Some(tls) })
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

fn handshake(mut socket: TcpStream, tls: &TlsTarget, within: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(within))?;
    socket.set_write_timeout(Some(within))?;
    let session = rustls::ClientConnection::new(Arc::clone(&tls.config), tls.name.clone());
    let mut session = session.map_err(io::Error::other)?;
    while session.is_handshaking() {
        session.complete_io(&mut socket)?;
    }
    Ok(())
}
