//! Execution of a run: checks that the target is reachable, runs the generator on its own thread, and reports progress.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::ServerName;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};

use crate::client::{HttpProtocol, is_alpn_rejection};
use crate::generator::transport::TlsTarget;
use crate::generator::{ConnectTarget, Generator, GeneratorError, Http2Generator, SharedState};
use crate::limits::{IN_FLIGHT_MAX, in_flight_limit, open_files_needed};
use crate::options::Options;
use crate::record::{Record, RunSnapshot};
use crate::report::Report;
use crate::task::Pacing;

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
    /// The server of `meridian load --http2` does not support HTTP/2.
    #[error("{target} does not support HTTP/2: it does not select `h2` in the TLS handshake; omit --http2")]
    NoHttp2 {
        /// URL of the target.
        target: String,
    },
    /// The server selected HTTP/2 at the start of the run, and declined it on a later connection.
    #[error(
        "{target} selected HTTP/2 at first and declined it on a later connection, so the run would have measured both \
         versions; check that every server at this address selects `h2` in the TLS handshake, or omit --http2"
    )]
    Http2Declined {
        /// URL of the target.
        target: String,
    },
    /// The process may not open as many connections as `meridian load` has callers.
    #[error(
        "{callers} callers need {needed} open files, and this process may open {open_files}; raise the limit with \
         `ulimit -n {needed}`, or use --http2, which shares connections"
    )]
    OpenFiles {
        /// Callers of all tasks.
        callers: usize,
        /// Open files that they need.
        needed: usize,
        /// Limit of open files.
        open_files: u64,
    },
    /// The system provides no further thread or epoll instance.
    #[error("cannot start the generator thread: {0}")]
    NoThread(io::Error),
}

/// Runs the load described by `options`. `progress` is called five times a second and once at the end. When `shutdown`
/// completes, no further request is started, and requests in flight are awaited, at most for their timeout.
pub async fn run(
    mut options: Options,
    mut progress: impl FnMut(&RunSnapshot),
    shutdown: impl Future<Output = ()>,
) -> Result<Report, RunError> {
    options.in_flight_max = in_flight_max(&options, raise_open_files())?;
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

    let generator = AnyGenerator::new(&options, target, &shared, start).map_err(RunError::NoThread)?;
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
    let to_the_end = thread.join().expect("the generator does not panic").map_err(|error| match error {
        GeneratorError::System(error) => RunError::NoThread(error),
        GeneratorError::Http2Declined => RunError::Http2Declined { target: options.base.to_string() },
    })?;
    progress(&snapshot());
    drop(stop);

    let record = std::mem::take(&mut *shared.record());
    Ok(Report { options, elapsed, stopped_early: !to_the_end, record, marks: Vec::new() })
}

/// Generator of a run.
enum AnyGenerator {
    Http1(Box<Generator>),
    Http2(Box<Http2Generator>),
}

impl AnyGenerator {
    fn new(
        options: &Options,
        target: ConnectTarget,
        shared: &Arc<SharedState>,
        start: Instant,
    ) -> io::Result<AnyGenerator> {
        let shared = Arc::clone(shared);
        match options.protocol {
            HttpProtocol::Http1 => {
                let generator = Generator::new(options, target, shared, start)?;
                Ok(AnyGenerator::Http1(Box::new(generator)))
            }
            HttpProtocol::Http2 => {
                let generator = Http2Generator::new(options, shared, start)?;
                Ok(AnyGenerator::Http2(Box::new(generator)))
            }
        }
    }

    fn run(self) -> Result<bool, GeneratorError> {
        match self {
            AnyGenerator::Http1(generator) => generator.run().map_err(GeneratorError::System),
            AnyGenerator::Http2(generator) => generator.run(),
        }
    }
}

/// Raises the soft limit of open files to the hard one, and returns it.
fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let open_files = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    open_files.unwrap_or(u64::MAX)
}

/// Returns the maximum of requests in flight in a process that may open this number of files.
fn in_flight_max(options: &Options, open_files: u64) -> Result<usize, RunError> {
    let limit = in_flight_limit(open_files, options.protocol, options.process_share);
    let callers = options.tasks.iter().map(|task| match task.pacing {
        Pacing::Closed { callers, .. } => callers,
        Pacing::Open { .. } | Pacing::Replay { .. } => 0,
    });
    let callers = callers.sum::<usize>().min(IN_FLIGHT_MAX);
    if callers > limit {
        return Err(RunError::OpenFiles { callers, needed: open_files_needed(callers), open_files });
    }
    Ok(options.in_flight_max.min(limit))
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
    let protocol = match handshake(socket, &tls, options.timeout) {
        Ok(protocol) => protocol,
        Err(error) if is_alpn_rejection(&error) => {
            return Err(RunError::NoHttp2 { target: base.to_string() });
        }
        Err(error) => return Err(not_trusted(error)),
    };
    if options.protocol == HttpProtocol::Http2 && protocol.as_deref() != Some(b"h2") {
        return Err(RunError::NoHttp2 { target: base.to_string() });
    }
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

/// Returns the protocol that the server selects.
fn handshake(mut socket: TcpStream, tls: &TlsTarget, within: Duration) -> io::Result<Option<Vec<u8>>> {
    socket.set_read_timeout(Some(within))?;
    socket.set_write_timeout(Some(within))?;
    let session = rustls::ClientConnection::new(Arc::clone(&tls.config), tls.name.clone());
    let mut session = session.map_err(io::Error::other)?;
    while session.is_handshaking() {
        session.complete_io(&mut socket)?;
    }
    Ok(session.alpn_protocol().map(<[u8]>::to_vec))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RawOptions;
    use crate::limits::ProcessShare;
    use std::num::NonZeroUsize;

    #[test]
    fn callers_need_open_files_and_schedules_have_a_lower_limit() {
        let options = |callers: Option<usize>, http2| {
            Options::check(RawOptions { callers, http2, ..RawOptions::default() }).unwrap()
        };
        let max = |callers, http2, open_files| in_flight_max(&options(callers, http2), open_files);
        assert_eq!(max(None, false, 1024).ok(), Some(960));
        assert_eq!(max(Some(960), false, 1024).ok(), Some(960));
        assert_eq!(max(Some(961), true, 1024).ok(), Some(20_000));
        let error = max(Some(961), false, 1024).unwrap_err().to_string();
        assert!(
            error.contains("961 callers need 1025 open files") && error.contains("ulimit -n 1025"),
            "{error}"
        );
        let mut lowered = options(None, false);
        lowered.in_flight_max = 5;
        assert_eq!(in_flight_max(&lowered, 1024).ok(), Some(5));
        let mut shared = options(None, false);
        let concurrent_runs = NonZeroUsize::new(2).unwrap();
        shared.process_share = ProcessShare { concurrent_runs, has_links: false };
        assert_eq!(in_flight_max(&shared, 1024).ok(), Some(480));
    }
}
