//! Connections between processes: a man in the middle, and the revocation of the certificate of an open connection.

use super::endpoints::{Credentials, Region, Signer};
use super::{Fleet, Role as Process, free_address};
use rcgen::KeyPair;
use rustls::crypto::ring;
use rustls::{ServerConfig, ServerConnection};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

const HOUR: Duration = Duration::from_secs(3600);

/// Sends a GET and returns the whole response; empty without one.
fn get(mut stream: impl Read + Write, path: &str) -> String {
    let mut response = Vec::new();
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    if stream.write_all(request.as_bytes()).is_ok() {
        stream.read_to_end(&mut response).ok();
    }
    String::from_utf8_lossy(&response).into_owned()
}

/// Treatment of new connections by a man in the middle.
#[derive(Clone, Copy)]
enum Treatment {
    /// Forwarded to the hub.
    Forward,
    /// Closed at once, as in an outage.
    Close,
    /// Their TLS is terminated with the certificate of another authority.
    Terminate,
}

/// Process between a gateway and its hub.
struct ManInTheMiddle {
    address: String,
    treatment: Arc<Mutex<Treatment>>,
    /// Handshakes that the client has ended.
    rejected: Arc<AtomicU64>,
    /// Requests that were received in plaintext: none may be.
    received: Arc<AtomicU64>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl ManInTheMiddle {
    fn start(hub: String) -> ManInTheMiddle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let middle = ManInTheMiddle {
            address: listener.local_addr().unwrap().to_string(),
            treatment: Arc::new(Mutex::new(Treatment::Forward)),
            rejected: Arc::default(),
            received: Arc::default(),
            open: Arc::default(),
        };
        let other = Signer::new(KeyPair::generate().unwrap());
        let now = SystemTime::now();
        let uri = "spiffe://m.example/hub/aws/us-east-1/in/us-va";
        let Credentials::Certificate(chain, key) = other.sign(uri, (now - HOUR, now + HOUR)) else {
            panic!()
        };
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        let config = Arc::new(config);
        let (treatment, open) = (middle.treatment.clone(), middle.open.clone());
        let (rejected, received) = (middle.rejected.clone(), middle.received.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let treatment = *treatment.lock().unwrap();
                if let Treatment::Close = treatment {
                    continue;
                }
                if let Treatment::Terminate = treatment {
                    let mut tls = ServerConnection::new(config.clone()).unwrap();
                    let (rejected, received) = (rejected.clone(), received.clone());
                    std::thread::spawn(move || {
                        let ended = tls.complete_io(&mut client);
                        // In TLS 1.3 the client may reject the certificate after the handshake of the server.
                        let mut byte = [0];
                        match ended.and_then(|_| rustls::Stream::new(&mut tls, &mut client).read(&mut byte)) {
                            Ok(1) => received.fetch_add(1, Ordering::SeqCst),
                            _ => rejected.fetch_add(1, Ordering::SeqCst),
                        }
                    });
                    continue;
                }
                let hub = TcpStream::connect(&hub).unwrap();
                let both = [client.try_clone().unwrap(), hub.try_clone().unwrap()];
                open.lock().unwrap().extend(both);
                for (mut from, mut to) in
                    [(client.try_clone().unwrap(), hub.try_clone().unwrap()), (hub, client)]
                {
                    std::thread::spawn(move || {
                        std::io::copy(&mut from, &mut to).ok();
                        to.shutdown(Shutdown::Both).ok();
                    });
                }
            }
        });
        middle
    }

    /// Changes the treatment of new connections, and closes the forwarded ones.
    fn treat(&self, treatment: Treatment) {
        *self.treatment.lock().unwrap() = treatment;
        for connection in self.open.lock().unwrap().drain(..) {
            connection.shutdown(Shutdown::Both).ok();
        }
    }
}

#[test]
fn a_man_in_the_middle_of_a_gateway_and_its_hub_changes_nothing_and_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    fleet.spoke_config();
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let middle = ManInTheMiddle::start(fleet.hub.clone());
    let (listen, operations) = (free_address(), free_address());
    let token = |role: &str, region: &str| {
        fleet.text(&["pki", "token", "--role", role, "--region", region, "--ttl", "10m"]).trim().to_owned()
    };
    std::fs::write(fleet.dir.join("tenants.toml"), "[[tenant]]\nname = \"local\"\nkey_env = \"TEST_KEY\"\n")
        .unwrap();
    let config = format!(
        "listen = \"{listen}\"\noperations = \"{operations}\"\nregion = \"aws/us-east-1\"\nhub = \"https://{}\"\n\
         tenants = \"tenants.toml\"\nsnapshot = \"routes\"\n[identity]\ndir = \"gateway\"\n",
        middle.address
    );
    std::fs::write(fleet.dir.join("gateway.toml"), config).unwrap();
    let log = std::fs::File::create(fleet.dir.join("gateway.log")).unwrap();
    let mut command = Command::new(super::MERIDIAN);
    command.args(["gateway", "--config", "gateway.toml", "--join", &token("gateway", "aws/us-east-1")]);
    command.current_dir(&fleet.dir).env("TEST_KEY", "local").stdout(Stdio::null()).stderr(log);
    let _gateway = Process(command.spawn().unwrap());
    let operator_request =
        |path: &str| TcpStream::connect(&operations).map(|stream| get(stream, path)).unwrap_or_default();
    fleet.wait_until("the gateway has a route table", || {
        operator_request("/readyz").starts_with("HTTP/1.1 200")
    });
    let generation = || {
        let routes = operator_request("/routes");
        let (_, rest) = routes.split_once("\"generation\":\"").expect("a generation");
        rest.split_once('"').expect("its end").0.to_owned()
    };
    let before = generation();

    // The change of a failure from an outage to another certificate is logged too.
    middle.treat(Treatment::Close);
    let log = || fleet.read("gateway.log");
    fleet.wait_until("the outage is logged", || log().contains("hub unreachable"));
    middle.treat(Treatment::Terminate);
    // The table of the hub changes: a region registers.
    let _spoke =
        fleet.start(&["spoke", "--config", "spoke.toml", "--join", &token("spoke", "aws/eu-central-1")]);
    fleet.wait_until("the middle is rejected several times", || middle.rejected.load(Ordering::SeqCst) >= 3);
    fleet.wait_until("it is logged", || log().contains("untrusted"));
    assert_eq!(generation(), before);
    assert!(operator_request("/readyz").starts_with("HTTP/1.1 200"), "it continues with its table");
    assert_eq!(middle.received.load(Ordering::SeqCst), 0, "no request was sent");

    middle.treat(Treatment::Forward);
    fleet.wait_until("the gateway follows the hub again", || generation() != before);
}

#[test]
fn a_revocation_closes_open_connections_to_a_spoke_and_a_replica_within_two_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let region = Region::start(&fleet);
    for (folder, owner, address) in [
        ("gateway", "gateway/aws/eu-central-1", &region.spoke),
        ("spoke", "spoke/aws/eu-central-1", &region.replica),
    ] {
        let tcp = TcpStream::connect(address).unwrap();
        tcp.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut stream = Credentials::of_folder(&fleet.dir.join(folder)).tls(tcp).unwrap();
        stream.write_all(b"GET /status HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        fleet.json(&["pki", "revoke", owner, "--json"]);
        let begun = Instant::now();
        // The rest of the response, then the end of the connection.
        let end = stream.read_to_end(&mut Vec::new());
        let (took, kind) = (begun.elapsed(), end.map_err(|error| error.kind()));
        println!("{owner}: the connection ended {took:?} after the command: {kind:?}");
        assert!(took < Duration::from_secs(2), "{took:?} {kind:?}");
        let again = Credentials::of_folder(&fleet.dir.join(folder)).tls(TcpStream::connect(address).unwrap());
        assert_eq!(get(again.unwrap(), "/status"), "", "a new connection is rejected");
    }
}
