//! Client of the built-in certificate authority: connection, joining, and requests with a certificate.
//!
//! A process that joins has no trusted authority yet. It accepts a hub by the fingerprint of the authority in its token: the
//! authority's certificate is part of the chain that the hub presents, and must have signed the hub's certificate. Only
//! then the secret is sent.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use identity::verify::ExpectedPeer;
use identity::{ConnectionFailureCause, OwnName, ProcessIdentity, TlsClient, name_in_pem};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use regions::HostPort;
use regions::id::RegionId;
use regions::spiffe::{Role, SpiffeId};
use resolver::{ConnectError, Resolver};
use rustls::Error;
use rustls::pki_types::ServerName;
use scheduler_api::pki::{IssuedV1, JoinV1, RenewV1};
use scheduler_api::{VERSION, paths};
use scheduler_core::pki::polls;
use scheduler_core::pki::token::JoinToken;
use scheduler_core::pki::trust::TrustState;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::connect::CONNECT_TIMEOUT;
use crate::hub::{HubFailure, failure, message};
use crate::identity_folder::{IdentityFolder, Membership};
use crate::operator_token::{OperatorToken, TrustedAuthorities, connector};

/// Time limit of a request that does not wait for a change. An external signer takes up to ten seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of addresses of a name that are tried: all that the resolver uses.
const ADDRESSES_MAX: usize = 16;
/// Maximum bytes of a response. The largest has 8,192 revoked certificates.
const RESPONSE_BYTES_MAX: usize = 4 << 20;

/// Failed request to the authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// No hub of the list accepts a connection to its built-in authority. Check the addresses and the hubs.
    #[error("no hub is reachable: {0}")]
    Unreachable(String),
    /// The hubs of the list are not of this fleet, or reject the certificate of this process. `docs/identities.md` has the
    /// fix for each cause.
    #[error("no hub is connected: {0}")]
    Untrusted(String),
    /// A hub rejected the request to its built-in authority with this status and message.
    #[error("the hub at {address} returned {status}: {message}")]
    Rejected {
        /// Address of the hub.
        address: String,
        /// Status.
        status: StatusCode,
        /// Message of the error object.
        message: String,
    },
    /// The request to the built-in authority failed: the hub closed the connection, did not respond in time, or sent an
    /// invalid response.
    #[error("the hub at {address} {problem}")]
    Failed {
        /// Address of the hub.
        address: String,
        /// The problem.
        problem: String,
    },
    /// The join token is for another role or region than that of the process. It is used up, and the identity folder has
    /// no certificate of it. Create a token with the command in the text.
    #[error("{0}")]
    OtherToken(String),
    /// A file of the identity folder cannot be read or written; the text names it.
    #[error("the identity folder {0}")]
    Folder(String),
}

impl AuthorityError {
    /// Returns the status of a rejection.
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            AuthorityError::Rejected { status, .. } => Some(*status),
            AuthorityError::Unreachable(_)
            | AuthorityError::Untrusted(_)
            | AuthorityError::Failed { .. }
            | AuthorityError::OtherToken(_)
            | AuthorityError::Folder(_) => None,
        }
    }

    /// Returns whether the cause does not pass by itself: a hub has rejected the request or the certificate.
    pub fn is_rejection(&self) -> bool {
        let rejected = self.status().is_some_and(|status| status.is_client_error());
        rejected || matches!(self, AuthorityError::Untrusted(_))
    }
}

/// New key with a request for a certificate. The names in the certificate are the hub's decision, so it has none.
pub struct KeyRequest {
    /// Private key, in PEM.
    pub key: String,
    /// Request for a certificate, in PEM.
    pub csr: String,
}

impl KeyRequest {
    /// Generates a key (ECDSA P-256).
    ///
    /// # Errors
    ///
    /// When the system has no randomness.
    pub fn generate() -> Result<KeyRequest, String> {
        let failed = |error: rcgen::Error| format!("cannot generate a key: {error}");
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let csr = params.serialize_request(&key).and_then(|csr| csr.pem()).map_err(failed)?;
        Ok(KeyRequest { key: key.serialize_pem(), csr })
    }
}

/// Open connection to a hub.
#[derive(Debug)]
pub struct AuthorityConnection {
    address: String,
    sender: SendRequest<Full<Bytes>>,
    /// Value of `authorization`, for an operator without a certificate.
    authorization: Option<HeaderValue>,
    /// Task of the connection, which ends with this value.
    _task: JoinSet<()>,
}

impl AuthorityConnection {
    /// Connects with the certificate of a folder to the first reachable hub of these addresses.
    ///
    /// # Errors
    ///
    /// When no hub accepts the connection, or the folder cannot be used.
    pub async fn with_identity(
        folder: &IdentityFolder,
        addresses: &[String],
        resolver: &Resolver,
    ) -> Result<AuthorityConnection, AuthorityError> {
        let (files, own) = (folder.files(), OwnName { roles: &Role::ALL, region: None });
        let loaded = tokio::task::spawn_blocking(move || ProcessIdentity::load(files, &own, None)).await;
        let folder_error =
            |problem: String| AuthorityError::Folder(format!("{}: {problem}", folder.path().display()));
        let identity = loaded
            .map_err(|error| folder_error(error.to_string()))?
            .map_err(|problems| folder_error(problems.join("; ")))?;
        let tls = TlsClient::new(Arc::new(identity), &[]).map_err(|error| folder_error(error.to_string()))?;
        first_reachable(addresses, &HubHandshake::Member(tls), resolver).await
    }

    /// Connects to the first reachable hub of a token, whose certificate is signed by its authority.
    ///
    /// # Errors
    ///
    /// When no hub accepts the connection, or none has such a certificate.
    pub async fn with_token(
        token: &JoinToken,
        resolver: &Resolver,
    ) -> Result<AuthorityConnection, AuthorityError> {
        let unusable = |error: Error| AuthorityError::Unreachable(error.to_string());
        let trusted = TrustedAuthorities::Fingerprints(token.fingerprints().to_vec());
        let connector = connector(trusted, &[]).map_err(unusable)?;
        first_reachable(token.addresses(), &HubHandshake::Joining(connector), resolver).await
    }

    /// Connects with the token of an operator to the first reachable hub of these addresses.
    ///
    /// # Errors
    ///
    /// When no hub accepts the connection.
    pub async fn with_operator_token(
        token: &OperatorToken,
        addresses: &[String],
        resolver: &Resolver,
    ) -> Result<AuthorityConnection, AuthorityError> {
        let handshake = HubHandshake::Joining(token.connector.clone());
        let connection = first_reachable(addresses, &handshake, resolver).await?;
        Ok(AuthorityConnection { authorization: Some(token.header.clone()), ..connection })
    }

    async fn new<IO>(address: &str, stream: IO) -> std::io::Result<AuthorityConnection>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Its failure is that of the request.
            supervision::task::contained("authority connection", connection).await.map(Result::ok);
        });
        Ok(AuthorityConnection { address: address.to_owned(), sender, authorization: None, _task: task })
    }

    /// Returns the address of the hub.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request without a body.
    ///
    /// # Errors
    ///
    /// When there is no valid response with a status of success.
    pub async fn get<M: DeserializeOwned>(&mut self, path: &str) -> Result<M, AuthorityError> {
        self.send(Method::GET, path, Bytes::new(), REQUEST_TIMEOUT).await
    }

    /// Polls for a newer trusted state; the hub holds the request for up to `wait`.
    ///
    /// # Errors
    ///
    /// When there is no valid response.
    pub async fn poll_trust(
        &mut self,
        after: Option<u64>,
        wait: Duration,
    ) -> Result<Option<TrustState>, AuthorityError> {
        let path = paths::trust(after, wait);
        let wire: Option<scheduler_api::pki::TrustV1> =
            self.send(Method::GET, &path, Bytes::new(), wait + polls::GRACE).await?;
        let read = wire.map(TrustState::try_from).transpose();
        read.map_err(|error| self.failed(format!("sent an invalid response: {error}")))
    }

    /// Sends a request with a JSON body.
    ///
    /// # Errors
    ///
    /// When there is no valid response with a status of success.
    pub async fn post<M: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<M, AuthorityError> {
        let body = serde_json::to_vec(body).expect("a message serialises to JSON");
        self.send(Method::POST, path, body.into(), REQUEST_TIMEOUT).await
    }

    fn failed(&self, problem: impl std::fmt::Display) -> AuthorityError {
        AuthorityError::Failed { address: self.address.clone(), problem: problem.to_string() }
    }

    async fn send<M: DeserializeOwned>(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<M, AuthorityError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "hub.identity.invalid")
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(body)).map_err(|error| self.failed(error))?;
        let received = timeout(limit, async {
            self.sender.ready().await.map_err(|error| failure(&error))?;
            let response = self.sender.send_request(request).await.map_err(|error| failure(&error))?;
            let status = response.status();
            let body: Incoming = response.into_body();
            let body = Limited::new(body, RESPONSE_BYTES_MAX).collect().await;
            Ok((status, body.map_err(|error| failure(error.as_ref()))?.to_bytes()))
        });
        let received =
            received.await.map_err(|_| self.failed(format!("did not respond within {limit:?}")))?;
        let (status, body) = received.map_err(|failure| match failure {
            // A hub that rejects a certificate does so with its first response (TLS 1.3).
            HubFailure::Untrusted { reason, cause: _ } => {
                AuthorityError::Untrusted(format!("{}: {reason}", self.address))
            }
            HubFailure::Unreachable(problem) => self.failed(format!("ended the connection: {problem}")),
            other => self.failed(other),
        })?;
        if !status.is_success() {
            let address = self.address.clone();
            return Err(AuthorityError::Rejected { address, status, message: message(&body) });
        }
        let text = if body.is_empty() { &b"null"[..] } else { &body };
        serde_json::from_slice(text)
            .map_err(|error| self.failed(format!("sent an invalid response: {error}")))
    }
}

/// Handshake with a hub.
enum HubHandshake {
    /// With a certificate of the fleet.
    Member(TlsClient),
    /// Without a certificate: with the fingerprint of the authority in a join token, or with the token of an operator.
    Joining(TlsConnector),
}

impl HubHandshake {
    async fn connect(&self, address: &str, tcp: TcpStream) -> std::io::Result<AuthorityConnection> {
        match self {
            HubHandshake::Member(tls) => {
                let connected = tls.connect(ExpectedPeer { role: Role::Hub, region: None }, tcp).await?;
                AuthorityConnection::new(address, connected.stream).await
            }
            HubHandshake::Joining(connector) => {
                let name = ServerName::try_from("hub.identity.invalid").expect("a host name");
                AuthorityConnection::new(address, connector.connect(name, tcp).await?).await
            }
        }
    }
}

/// Connects to the first hub at which the handshake succeeds. Of a name with several addresses, each is tried.
async fn first_reachable(
    addresses: &[String],
    handshake: &HubHandshake,
    resolver: &Resolver,
) -> Result<AuthorityConnection, AuthorityError> {
    let mut problems = Vec::new();
    let mut untrusted = 0;
    for address in addresses {
        match reachable(address, handshake, resolver).await {
            Ok(connection) => return Ok(connection),
            Err(Unconnected { problem, is_untrusted }) => {
                problems.push(format!("{address}: {problem}"));
                untrusted += usize::from(is_untrusted);
            }
        }
    }
    let problems_text = problems.join("; ");
    // One hub that only does not respond may accept this process later.
    if untrusted > 0 && untrusted == problems.len() {
        Err(AuthorityError::Untrusted(problems_text))
    } else {
        Err(AuthorityError::Unreachable(problems_text))
    }
}

/// Reason why there is no connection to an address.
struct Unconnected {
    problem: String,
    /// Whether one end rejects the certificate of the other.
    is_untrusted: bool,
}

/// Connects to a hub. TCP connects to the first address of a name that accepts (RFC 8305); an address at which then the
/// handshake fails, such as that of a frozen hub, is left out of the next attempt.
async fn reachable(
    address: &str,
    handshake: &HubHandshake,
    resolver: &Resolver,
) -> Result<AuthorityConnection, Unconnected> {
    let unreachable = |problem: String| Unconnected { problem, is_untrusted: false };
    let endpoint: HostPort = address.parse().map_err(|error| unreachable(format!("{error}")))?;
    let mut tried: Vec<IpAddr> = Vec::new();
    let mut last = None;
    for _ in 0..ADDRESSES_MAX {
        let connected = resolver.connect(&endpoint, CONNECT_TIMEOUT, |ip| !tried.contains(&ip)).await;
        let tcp = match connected {
            Ok(tcp) => tcp,
            Err(ConnectError::NotPermitted) if last.is_some() => break,
            Err(error) => return Err(last.unwrap_or_else(|| unreachable(error.to_string()))),
        };
        let peer = tcp.peer_addr().map_err(|error| unreachable(error.to_string()))?;
        last = match timeout(CONNECT_TIMEOUT, handshake.connect(address, tcp)).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => {
                let is_untrusted = ConnectionFailureCause::of_io(&error).is_some();
                Some(Unconnected { problem: error.to_string(), is_untrusted })
            }
            Err(_) => Some(unreachable(format!("no handshake within {CONNECT_TIMEOUT:?}"))),
        };
        tried.push(peer.ip());
    }
    Err(last.unwrap_or_else(|| unreachable("no address".to_owned())))
}

/// Joins with a token: generates a key, obtains a certificate, and writes the folder. The token does not contain its role:
/// the name in the certificate must be one of `own`.
///
/// # Errors
///
/// When no hub accepts the token, its certificate is for another role or region, or the folder cannot be written. The
/// folder has the same certificate as before.
pub async fn join(
    folder: &IdentityFolder,
    token: &JoinToken,
    own: &OwnName,
    resolver: &Resolver,
) -> Result<Membership, AuthorityError> {
    let folder_error = |problem: &dyn std::fmt::Display| {
        AuthorityError::Folder(format!("{}: {problem}", folder.path().display()))
    };
    // A folder that cannot be written is found before the token is used up.
    crate::identity_folder::create_private(folder.path()).map_err(|error| folder_error(&error))?;
    let KeyRequest { key, csr } = KeyRequest::generate().map_err(|error| folder_error(&error))?;
    let request = JoinV1 { version: VERSION, secret: token.secret().reveal(), csr };
    let mut issued: Result<IssuedV1, AuthorityError> =
        Err(AuthorityError::Unreachable("the token has no addresses".to_owned()));
    // The same request is safe to repeat: for the same key a hub sends the same certificate.
    for _ in 0..JOIN_ATTEMPTS {
        issued = match AuthorityConnection::with_token(token, resolver).await {
            Ok(mut connection) => connection.post(paths::JOIN, &request).await,
            Err(error) => Err(error),
        };
        let is_final = match &issued {
            Ok(_) => true,
            Err(error) => error.status().is_some_and(|status| !status.is_server_error()),
        };
        if is_final {
            break;
        }
        tokio::time::sleep(JOIN_PAUSE).await;
    }
    let issued = issued?;
    let name = name_in_pem(issued.certificate.as_bytes()).map_err(|wrong| {
        AuthorityError::OtherToken(format!("the certificate for the token cannot be used: {wrong}"))
    })?;
    if !own.matches(&name) {
        return Err(AuthorityError::OtherToken(other_token(&name, own)));
    }
    let membership = Membership::of(&issued, token.addresses().to_vec());
    accept(folder, &issued, &key, &membership).map_err(|error| folder_error(&error))?;
    Ok(membership)
}

/// Returns the problem of a token for `name` at a process that is to be `own`, with the command that creates the right one.
fn other_token(name: &SpiffeId, own: &OwnName) -> String {
    let within = name.region().map_or_else(String::new, |region| format!(" in {region}"));
    let roles = own.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(" or ");
    let region = own.region.as_ref().or(name.region()).map_or("REGION", RegionId::as_str);
    format!(
        "the token is for the role {}{within}, and is used up; create one with `meridian pki token --role {roles} --region \
         {region}`",
        name.role()
    )
}

/// Attempts to join while no hub is reachable, as when a whole fleet starts at once.
const JOIN_ATTEMPTS: u32 = 20;
/// Pause between these attempts.
const JOIN_PAUSE: Duration = Duration::from_millis(500);

/// Writes an issued certificate and the trusted state to a folder. It blocks for two writes to the disk.
fn accept(
    folder: &IdentityFolder,
    issued: &IssuedV1,
    key: &str,
    membership: &Membership,
) -> Result<(), String> {
    let offered = TrustState::try_from(issued.trust.clone()).map_err(|error| error.to_string())?;
    let current = folder.trust().ok().flatten();
    // Authorities first: the certificate may be one of a new authority.
    if let Some(trust) = offered.accept(current.as_ref(), crate::unix_time()) {
        folder.write_trust(&trust).map_err(|error| error.to_string())?;
    }
    folder.install(&issued.certificate, key, membership).map_err(|error| error.to_string())
}

/// Renews the certificate of a folder, over a connection with the present one.
///
/// # Errors
///
/// When the hub rejects the request, or the folder cannot be written. The present certificate stays.
pub async fn renew(
    folder: &IdentityFolder,
    connection: &mut AuthorityConnection,
    addresses: &[String],
) -> Result<Membership, AuthorityError> {
    request(folder, connection, paths::RENEW, addresses).await
}

/// Obtains a certificate for the replicas of a spoke's region and writes it to their folder, over a connection with the
/// certificate of the spoke.
///
/// # Errors
///
/// When the hub rejects the request, or the folder cannot be written.
pub async fn issue_for_replicas(
    replicas: &IdentityFolder,
    connection: &mut AuthorityConnection,
    addresses: &[String],
) -> Result<Membership, AuthorityError> {
    let folder_error =
        |problem: String| AuthorityError::Folder(format!("{}: {problem}", replicas.path().display()));
    crate::identity_folder::create_private(replicas.path())
        .map_err(|error| folder_error(error.to_string()))?;
    request(replicas, connection, paths::REPLICA, addresses).await
}

/// Requests a certificate for a new key and writes both to a folder.
async fn request(
    folder: &IdentityFolder,
    connection: &mut AuthorityConnection,
    path: &str,
    addresses: &[String],
) -> Result<Membership, AuthorityError> {
    let KeyRequest { key, csr } = KeyRequest::generate().map_err(AuthorityError::Folder)?;
    let issued: IssuedV1 = connection.post(path, &RenewV1 { version: VERSION, csr }).await?;
    let membership = Membership::of(&issued, addresses.to_vec());
    let written = accept(folder, &issued, &key, &membership);
    written.map_err(|error| AuthorityError::Folder(format!("{}: {error}", folder.path().display())))?;
    Ok(membership)
}

/// Writes a certificate that the process has issued to itself, as a hub does.
///
/// # Errors
///
/// When the folder cannot be written.
pub fn install_issued(
    folder: &IdentityFolder,
    issued: &IssuedV1,
    key: &str,
    addresses: Vec<String>,
) -> Result<Membership, String> {
    let membership = Membership::of(issued, addresses);
    accept(folder, issued, key, &membership)?;
    Ok(membership)
}
