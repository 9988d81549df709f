//! Readiness probe of a replica, before it gets requests, and the failure that it reports while it is not ready.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::HOST;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use identity::verify::ExpectedPeer;
use identity::{TlsClient, Transport};
use regions::spiffe::Role;
use replica_api::paths;
use replica_api::start_failure::StartFailureReport;
use replica_api::status::{DownloadV1, StatusV1};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// Interval of probes; short, because a request may be held for the replica.
const PERIOD: Duration = Duration::from_millis(5);
/// Timeout of a probe: a process that loads a model uses every core.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of requests for the status of a replica that is not ready.
const STATUS_PERIOD: Duration = Duration::from_millis(250);
/// Maximum size of a status, as for the probes of a ready replica.
const STATUS_BYTES_MAX: usize = 64 << 10;

/// Prober of the replicas of a region.
#[derive(Clone, Debug)]
pub struct ReadinessProber {
    tls: Option<Arc<TlsClient>>,
    expected: ExpectedPeer,
}

/// Report of a replica that does not accept requests yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartReport {
    /// Remaining time of the download of its model, if it downloads one.
    pub download_left: Option<Duration>,
    /// Whether it waits for another process on its machine that pulls its model.
    pub waits_for_pull: bool,
    /// Failure of its last attempt to start, which it tries again.
    pub failure: Option<StartFailureReport>,
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

    /// Waits until the replica at `endpoint` responds to `/health` with success. Until then, passes what it reports to
    /// `starting`, several times a second.
    pub async fn until_ready(&self, endpoint: SocketAddr, mut starting: impl FnMut(StartReport)) {
        let (mut connection, mut status_at) = (None, Instant::now());
        loop {
            let probe = self.probe(endpoint, connection.take());
            match timeout(TIMEOUT, probe).await {
                Ok(Ok((true, _))) => return,
                Ok(Ok((false, open))) => connection = Some(open),
                Ok(Err(_)) | Err(_) => {}
            }
            if status_at <= Instant::now()
                && let Some(open) = connection.take()
            {
                status_at = Instant::now() + STATUS_PERIOD;
                if let Ok(Ok((report, open))) = timeout(TIMEOUT, read_status(open)).await {
                    connection = Some(open);
                    starting(report);
                }
            }
            sleep(PERIOD).await;
        }
    }

    /// Returns what the replica at `endpoint` reports about its start: nothing if it does not respond.
    pub async fn start_report(&self, endpoint: SocketAddr) -> StartReport {
        let request = async { read_status(self.connect(endpoint).await?).await };
        let read = timeout(TIMEOUT, request).await.ok().and_then(Result::ok);
        read.map_or_else(StartReport::default, |(report, _)| report)
    }

    /// Sends one probe, on an open connection if there is one; returns whether the replica is ready.
    async fn probe(
        &self,
        endpoint: SocketAddr,
        open: Option<ProbeConnection>,
    ) -> std::io::Result<(bool, ProbeConnection)> {
        let mut connection = match open {
            Some(connection) => connection,
            None => self.connect(endpoint).await?,
        };
        let response = connection.get(paths::HEALTH).await?;
        Ok((response.status().is_success(), connection))
    }

    async fn connect(&self, endpoint: SocketAddr) -> std::io::Result<ProbeConnection> {
        let tcp = TcpStream::connect(endpoint).await?;
        match &self.tls {
            None => ProbeConnection::over(tcp).await,
            Some(tls) => ProbeConnection::over(tls.connect(self.expected, tcp).await?.stream).await,
        }
    }
}

/// Reads what a replica reports about its start. A status that cannot be read reports nothing.
async fn read_status(mut connection: ProbeConnection) -> std::io::Result<(StartReport, ProbeConnection)> {
    let body = Limited::new(connection.get(paths::STATUS).await?.into_body(), STATUS_BYTES_MAX);
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let report = serde_json::from_slice::<StatusV1>(&body).map_or_else(
        |_| StartReport::default(),
        |StatusV1 { download, failure, .. }| StartReport {
            waits_for_pull: download.as_ref().is_some_and(DownloadV1::waits_for_pull),
            download_left: download.and_then(|download| download.left_ms).map(Duration::from_millis),
            failure,
        },
    );
    Ok((report, connection))
}

impl ProbeConnection {
    async fn get(&mut self, path: &str) -> std::io::Result<Response<Incoming>> {
        let request = Request::get(path).header(HOST, "replica.identity.invalid").body(Empty::new());
        let request = request.map_err(std::io::Error::other)?;
        self.sender.ready().await.map_err(std::io::Error::other)?;
        self.sender.send_request(request).await.map_err(std::io::Error::other)
    }

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
