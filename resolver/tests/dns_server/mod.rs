//! DNS server of a test: one zone whose content the test changes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use supervision::Mutex;
use tokio::net::UdpSocket;

const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;

/// Behaviour of the server for a name.
#[derive(Clone, Debug)]
pub(crate) enum Zone {
    /// These addresses, with a TTL in seconds.
    Addresses(Vec<IpAddr>, u32),
    /// An error code of DNS: 2 is SERVFAIL, 3 NXDOMAIN, 0 an answer without records.
    Code(u8),
    /// No response.
    Silence,
}

/// Returns the records of these addresses.
pub(crate) fn addresses(texts: &[&str], ttl: u32) -> Zone {
    Zone::Addresses(texts.iter().map(|text| text.parse().unwrap()).collect(), ttl)
}

/// Running server; it ends when this is dropped.
pub(crate) struct DnsServer {
    pub(crate) address: SocketAddr,
    names: Arc<Mutex<BTreeMap<String, Zone>>>,
    queries: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl DnsServer {
    /// Starts a server on a free port of loopback.
    pub(crate) async fn start() -> DnsServer {
        DnsServer::start_at(SocketAddr::from(([127, 0, 0, 1], 0))).await
    }

    /// Starts a server at this address.
    pub(crate) async fn start_at(address: SocketAddr) -> DnsServer {
        let socket = UdpSocket::bind(address).await.unwrap();
        let address = socket.local_addr().unwrap();
        let names: Arc<Mutex<BTreeMap<String, Zone>>> = Arc::new(Mutex::new(BTreeMap::new()));
        let queries = Arc::new(AtomicUsize::new(0));
        let (zones, counted) = (names.clone(), queries.clone());
        let task = tokio::spawn(async move {
            let mut query = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                counted.fetch_add(1, Ordering::Relaxed);
                let (name, kind, end) = question(&query[..length]);
                let zone = zones.lock().get(&name).cloned().unwrap_or(Zone::Code(3));
                if let Some(response) = respond(&query[..end], kind, &zone) {
                    socket.send_to(&response, from).await.unwrap();
                }
            }
        });
        DnsServer { address, names, queries, task }
    }

    /// Sets the behaviour for a name, from the next query on.
    pub(crate) fn set(&self, name: &str, zone: Zone) {
        self.names.lock().insert(name.to_owned(), zone);
    }

    /// Returns the number of queries so far.
    pub(crate) fn queries(&self) -> usize {
        self.queries.load(Ordering::Relaxed)
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns name and type of the question, and the position of its end.
fn question(query: &[u8]) -> (String, u16, usize) {
    let (mut labels, mut at) = (Vec::new(), 12);
    while query[at] != 0 {
        let length = usize::from(query[at]);
        labels.push(String::from_utf8(query[at + 1..=at + length].to_vec()).unwrap().to_ascii_lowercase());
        at += length + 1;
    }
    (labels.join("."), u16::from_be_bytes([query[at + 1], query[at + 2]]), at + 5)
}

/// Returns the response to a query that ends after its question.
fn respond(query: &[u8], kind: u16, zone: &Zone) -> Option<Vec<u8>> {
    let (code, records) = match zone {
        Zone::Silence => return None,
        Zone::Code(code) => (*code, Vec::new()),
        Zone::Addresses(addresses, ttl) => {
            let of_kind =
                |ip: &&IpAddr| matches!((ip, kind), (IpAddr::V4(_), TYPE_A) | (IpAddr::V6(_), TYPE_AAAA));
            (0, addresses.iter().filter(of_kind).map(|ip| (*ip, *ttl)).collect())
        }
    };
    let mut response = query.to_vec();
    // A response of a recursive server, with this code.
    (response[2], response[3]) = (0x81, 0x80 | code);
    response[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
    response[8..12].fill(0);
    for (ip, ttl) in records {
        response.extend([0xc0, 12]);
        response.extend(kind.to_be_bytes());
        response.extend(1_u16.to_be_bytes());
        response.extend(ttl.to_be_bytes());
        let octets = match ip {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        response.extend((octets.len() as u16).to_be_bytes());
        response.extend(octets);
    }
    Some(response)
}
