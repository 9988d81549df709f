//! Readiness probe of a replica on this machine, before it gets requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Empty;
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
use identity::verify::ExpectedPeer;
use identity::{TlsClient, Transport};
use regions::spiffe::Role;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Interval of probes; short, because a request may be held for the replica.
const PERIOD: Duration = Duration::from_millis(5);
/// Timeout of a probe: a process that loads a model uses every core.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Remaining time of the download of a model: `replica_api::headers::DOWNLOAD_LEFT_MS`.
const DOWNLOAD_LEFT_MS: &str = "x-meridian-download-left-ms";
/// Reason of a failed start: `replica_api::headers::START_FAILURE`.
const START_FAILURE: &str = "x-meridian-start-failure";

/// Prober of the replicas of a region.
#[derive(Clone, Debug)]
pub struct ReadinessProber {
    tls: Option<Arc<TlsClient>>,
    expected: ExpectedPeer,
}

/// Response of a replica.
enum Probed {
    /// It accepts requests.
    Ready,
    /// It does not accept requests yet.
    Starting(StartReport),
}

/// Report of a replica that does not accept requests yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartReport {
    /// Remaining time of the download of its model, if it downloads one.
    pub download_left: Option<Duration>,
    /// Whether its start has failed and is tried again.
    pub has_failed: bool,
}

/// Open connection to a replica.
struct ProbeConnection {
    sender: SendRequest<Empty<Bytes>>,
    /// Task of the connection, which ends with this value.
    _task: JoinSet<()>,
}

impl ReadinessProber {
    /// Creates a prober that expects replicas of the region of this process.
    ///
    /// # Errors
    ///
    /// When TLS cannot be set up.
    pub fn new(transport: &Transport) -> Result<ReadinessProber, rustls::Error> {
        let identity = transport.identity();
        let region = identity.and_then(|identity| identity.own_region());
        let tls = identity.map(|identity| TlsClient::new(identity.clone(), &[b"http/1.1"])).transpose()?;
        let expected = ExpectedPeer { role: Role::Replica, region };
        Ok(ReadinessProber { tls: tls.map(Arc::new), expected })
    }

    /// Waits until the replica at `endpoint` responds to `/health` with success; passes its other responses to `starting`.
    pub async fn until_ready(&self, endpoint: SocketAddr, mut starting: impl FnMut(StartReport)) {
        let mut connection = None;
        loop {
            let probe = self.probe(endpoint, connection.take());
            match timeout(TIMEOUT, probe).await {
                Ok(Ok((Probed::Ready, _))) => return,
                Ok(Ok((Probed::Starting(report), open))) => {
                    starting(report);
                    connection = Some(open);
                }
                Ok(Err(_)) | Err(_) => {}
            }
            sleep(PERIOD).await;
        }
    }

    /// Sends one probe, on an open connection if there is one.
    async fn probe(
        &self,
        endpoint: SocketAddr,
        open: Option<ProbeConnection>,
    ) -> std::io::Result<(Probed, ProbeConnection)> {
        let mut connection = match open {
            Some(connection) => connection,
            None => self.connect(endpoint).await?,
        };
        // `replica_api::paths::HEALTH`; the client of the control plane does not import the data plane's API.
        let request = Request::get("/health").header(HOST, "replica.identity.invalid").body(Empty::new());
        let request = request.map_err(std::io::Error::other)?;
        connection.sender.ready().await.map_err(std::io::Error::other)?;
        let response = connection.sender.send_request(request).await.map_err(std::io::Error::other)?;
        if response.status().is_success() {
            return Ok((Probed::Ready, connection));
        }
        let left = response.headers().get(DOWNLOAD_LEFT_MS).and_then(|left| left.to_str().ok());
        let download_left = left.and_then(|left| left.parse().ok()).map(Duration::from_millis);
        let has_failed = response.headers().contains_key(START_FAILURE);
        Ok((Probed::Starting(StartReport { download_left, has_failed }), connection))
    }

    async fn connect(&self, endpoint: SocketAddr) -> std::io::Result<ProbeConnection> {
        let tcp = TcpStream::connect(endpoint).await?;
        match &self.tls {
            None => ProbeConnection::over(tcp).await,
            Some(tls) => ProbeConnection::over(tls.connect(self.expected, tcp).await?.stream).await,
        }
    }
}

impl ProbeConnection {
    async fn over<S>(stream: S) -> std::io::Result<ProbeConnection>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Its failure is that of the probe.
            supervision::task::contained("readiness probe", connection).await.map(Result::ok);
        });
        Ok(ProbeConnection { sender, _task: task })
    }
}
