//! TCP connection to an endpoint, which may have several addresses.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use regions::{Host, HostPort};
use resolver_core::race::{ConnectRace, RaceStep};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep_until, timeout};

use crate::{ResolutionError, Resolver, SourceAddress};

/// Error of a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The name has no known address.
    #[error("{0}")]
    Name(#[from] ResolutionError),
    /// The process must not connect to any address of the name: without an identity only to loopback, for a webhook
    /// only to public addresses.
    #[error("none of the addresses is permitted")]
    NotPermitted,
    /// No address accepts a connection; the error of the last attempt.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The connection was not opened within its timeout.
    #[error("timed out")]
    TimedOut,
}

impl Resolver {
    /// Connects to the first address that accepts, of those that are `permitted`. `limit` includes the resolution of a
    /// name that was not used before.
    ///
    /// # Errors
    ///
    /// When no address of the endpoint accepts a connection within the limit.
    pub async fn connect(
        &self,
        endpoint: &HostPort,
        limit: Duration,
        permitted: impl Fn(IpAddr) -> bool,
    ) -> Result<TcpStream, ConnectError> {
        let connected = async {
            let mut addresses = self.addresses(endpoint.host()).await?;
            addresses.retain(|address| permitted(*address));
            match addresses.as_slice() {
                [] => Err(ConnectError::NotPermitted),
                [only] => Ok(self.1.connect(SocketAddr::new(*only, endpoint.port())).await?),
                several => self.race(endpoint, several).await,
            }
        };
        let stream = timeout(limit, connected).await.unwrap_or(Err(ConnectError::TimedOut))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Connects to the first of several addresses that accepts; the other attempts are dropped.
    async fn race(&self, endpoint: &HostPort, addresses: &[IpAddr]) -> Result<TcpStream, ConnectError> {
        let sockets = addresses.iter().map(|address| SocketAddr::new(*address, endpoint.port()));
        let mut race = ConnectRace::new(sockets);
        let mut attempts = FuturesUnordered::new();
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        loop {
            let until = match race.step(Instant::now()) {
                RaceStep::Failed => return Err(last.into()),
                RaceStep::Start(address) => {
                    attempts.push(async move { (address, self.1.connect(address).await) });
                    continue;
                }
                RaceStep::Wait(until) => until,
            };
            let ended = tokio::select! {
                ended = attempts.next() => ended,
                () = timer(until) => continue,
            };
            match ended {
                Some((address, Ok(stream))) => {
                    let slower = race.slower_than(address).collect::<Vec<_>>();
                    slower.into_iter().for_each(|slow| self.demote(endpoint, slow.ip()));
                    self.promote(endpoint, address.ip());
                    return Ok(stream);
                }
                Some((address, Err(error))) => {
                    // One address of a name did not accept a connection. The next address is tried.
                    tracing::debug!(%endpoint, %address, %error, "connection attempt failed");
                    self.demote(endpoint, address.ip());
                    race.failed(address);
                    last = error;
                }
                None => return Err(last.into()),
            }
        }
    }

    fn demote(&self, endpoint: &HostPort, address: IpAddr) {
        if let Host::Name(name) = endpoint.host() {
            self.0.counts.demoted.add(1);
            self.0.cache.lock().demote(name, address, Instant::now());
        }
    }

    fn promote(&self, endpoint: &HostPort, address: IpAddr) {
        if let Host::Name(name) = endpoint.host() {
            self.0.cache.lock().promote(name, address);
        }
    }
}

impl SourceAddress {
    /// Connects from this address.
    async fn connect(self, address: SocketAddr) -> io::Result<TcpStream> {
        let SourceAddress(Some(source)) = self else { return TcpStream::connect(address).await };
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(source, 0))?;
        socket.connect(address).await
    }
}

/// Completes at `until`; never without one.
async fn timer(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until.into()).await,
        None => std::future::pending().await,
    }
}
