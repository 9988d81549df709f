//! Peers that stop in the middle of a handshake or of a request head, or that send no request after a handshake, at every
//! listener between processes, and at operations ports.

use super::endpoints::{Credentials, Region};
use super::{Fleet, free_address};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Peers at each listener: half of them send nothing, half of them the first bytes of a ClientHello or of a request.
const PEERS: usize = 60;
/// First bytes of a ClientHello of 512 bytes.
const PART_OF_A_HELLO: [u8; 12] = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 7];
/// Maximum time of a request of another peer meanwhile.
const REQUEST_MAX: Duration = Duration::from_secs(1);
/// Additional time of a loaded machine to close a connection.
const SLACK: Duration = Duration::from_secs(5);

/// Listener with its limits, and where its rejected connections are counted.
struct Listener {
    name: &'static str,
    address: String,
    /// Maximum time of a handshake; of a request head at a plaintext listener.
    opening_max: Duration,
    /// Valid caller of `path`, which has the metrics if `metrics` has no address. None at a plaintext listener.
    folder: Option<&'static str>,
    path: &'static str,
    metrics: Option<String>,
}

impl Listener {
    fn first_bytes(&self) -> &'static [u8] {
        if self.folder.is_some() { &PART_OF_A_HELLO } else { b"GET /met" }
    }

    /// Sends a GET with the certificate of the caller; returns the response.
    fn get(&self, fleet: &Fleet, path: &str) -> String {
        let tcp = TcpStream::connect(&self.address).unwrap();
        tcp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let credentials = self.folder.map(|folder| Credentials::of_folder(&fleet.dir.join(folder)));
        match credentials.unwrap_or(Credentials::Plaintext).tls(tcp) {
            Ok(stream) => get(stream, path),
            Err(plaintext) => get(plaintext, path),
        }
    }

    fn timed_out(&self, fleet: &Fleet) -> u64 {
        let metrics = match &self.metrics {
            Some(operations) => get(TcpStream::connect(operations).unwrap(), "/metrics"),
            None => self.get(fleet, "/metrics"),
        };
        let is_counter =
            |line: &&str| line.contains("connections_refused_total{") && line.contains("\"timed_out\"");
        let count = metrics.lines().find(is_counter).and_then(|line| line.rsplit(' ').next()?.parse().ok());
        count.unwrap_or_default()
    }
}

fn get(mut stream: impl Read + Write, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).ok();
    String::from_utf8_lossy(&response).into_owned()
}

/// Waits until the other end closes a connection.
fn until_closed(mut stream: impl Read) {
    let mut bytes = [0; 64];
    loop {
        match stream.read(&mut bytes) {
            Ok(1..) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("it is open"),
            Ok(0) | Err(_) => return,
        }
    }
}

#[test]
fn half_open_connections_are_closed_and_counted_at_each_listener_and_delay_no_other_peer() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let of_hub = free_address();
    let config = fleet.read("hub.toml");
    std::fs::write(fleet.dir.join("hub.toml"), format!("operations = \"{of_hub}\"\n{config}")).unwrap();
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let region = Region::start(&fleet);
    let listener = |name, address: &str, seconds, folder, path, metrics| Listener {
        name,
        address: address.to_owned(),
        opening_max: Duration::from_secs(seconds),
        folder,
        path,
        metrics,
    };
    let listeners = [
        listener("spoke", &region.spoke, 10, Some("gateway"), "/status", None),
        listener("replica", &region.replica, 5, Some("spoke"), "/status", None),
        listener("hub", &fleet.hub, 5, Some("gateway"), "/v1/routes", Some(of_hub.clone())),
        listener("authority", &fleet.authority, 5, Some("gateway"), "/v1/pki/trust", Some(of_hub.clone())),
        listener("operations port of the gateway", &region.operations, 10, None, "/livez", None),
        listener("operations port of the replica", &region.replica_operations, 10, None, "/status", None),
        listener("operations port of the hub", &of_hub, 10, None, "/livez", None),
    ];
    let before: Vec<_> = listeners.iter().map(|listener| listener.timed_out(&fleet)).collect();
    let begun = Instant::now();
    let mut half_open = Vec::new();
    for listener in &listeners {
        for number in 0..PEERS {
            let mut tcp = TcpStream::connect(&listener.address).unwrap();
            tcp.set_read_timeout(Some(listener.opening_max + SLACK)).unwrap();
            if number % 2 == 0 {
                tcp.write_all(listener.first_bytes()).unwrap();
            }
            half_open.push(tcp);
        }
    }
    // Without a certificate, at the only listener that accepts that; the handshake ends with the first read.
    let anonymous = TcpStream::connect(&fleet.authority).unwrap();
    anonymous.set_read_timeout(Some(Duration::from_secs(10) + SLACK)).unwrap();
    let Ok(anonymous) = Credentials::Anonymous.tls(anonymous) else { panic!() };
    for listener in &listeners {
        let begun = Instant::now();
        let response = listener.get(&fleet, listener.path);
        let took = begun.elapsed();
        println!("{}: a request of another peer took {took:?}", listener.name);
        assert!(
            response.starts_with("HTTP/1.1 ") && took < REQUEST_MAX,
            "{}: {took:?} {response}",
            listener.name
        );
    }
    half_open.into_iter().for_each(until_closed);
    until_closed(anonymous);
    println!("all are closed after {:?}", begun.elapsed());
    let counts = listeners.iter().zip(before).map(|(it, before)| it.timed_out(&fleet) - before);
    let counts: Vec<_> = counts.collect();
    // A process counts those of all of its listeners.
    let peers = PEERS as u64;
    let (of_replica, of_hub) = (2 * peers, 3 * peers + 1);
    assert_eq!(counts, [peers, of_replica, of_hub, of_hub, peers, of_replica, of_hub]);
}
