//! Resolution of names by a DNS server of the test, and connections to several addresses, over loopback.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

mod dns_server;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use dns_server::{DnsServer, Zone, addresses};
use regions::HostPort;
use resolver::{ConnectError, DnsSection, Resolver};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(20);

fn resolver(server: &DnsServer) -> Resolver {
    Resolver::new(&DnsSection { servers: vec![server.address] })
}

fn endpoint(name: &str, port: u16) -> HostPort {
    format!("{name}:{port}").parse().unwrap()
}

/// Returns the peer to which a connection leads.
async fn peer(resolver: &Resolver, endpoint: &HostPort) -> Result<IpAddr, ConnectError> {
    let stream = resolver.connect(endpoint, TIMEOUT, |_| true).await?;
    Ok(stream.peer_addr()?.ip())
}

async fn listener(address: &str) -> (TcpListener, u16) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Returns a listener that never accepts: its queue is full, and further connections hang.
async fn silent(address: &str, port: u16) -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    let address: SocketAddr = format!("{address}:{port}").parse().unwrap();
    socket.bind(address).unwrap();
    let listener = socket.listen(0).unwrap();
    let mut queued = Vec::new();
    let connect = || TcpStream::connect(address);
    while let Ok(connected) = tokio::time::timeout(Duration::from_millis(100), connect()).await {
        queued.push(connected.unwrap());
    }
    (listener, queued)
}

async fn wait_until(description: &str, mut reached: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !reached().await {
        assert!(started.elapsed() < TIMEOUT, "{description}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_name_is_resolved_once_within_its_ttl_and_again_after_it() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.2").await);
    let (resolver, spoke) = (resolver(&dns), endpoint("spoke.example", port));
    dns.set("spoke.example", addresses(&["127.0.0.2"], 2));
    for _ in 0..10 {
        assert_eq!(peer(&resolver, &spoke).await.unwrap(), IpAddr::from([127, 0, 0, 2]));
    }
    assert_eq!(dns.queries(), 2, "one for each family");
    let resolved = Instant::now();
    wait_until("the answer is refreshed without connections", async || dns.queries() == 4).await;
    assert!(resolved.elapsed() >= Duration::from_secs(1), "{:?}", resolved.elapsed());
}

#[tokio::test]
async fn connections_follow_a_change_of_the_addresses() {
    let (dns, (first, port)) = (DnsServer::start().await, listener("127.0.0.2").await);
    let _second = TcpListener::bind(("127.0.0.3", port)).await.unwrap();
    let (resolver, spoke) = (resolver(&dns), endpoint("spoke.example", port));
    dns.set("spoke.example", addresses(&["127.0.0.2"], 1));
    assert_eq!(peer(&resolver, &spoke).await.unwrap(), IpAddr::from([127, 0, 0, 2]));
    assert!(resolver.is_current(&spoke, [127, 0, 0, 2].into()));
    dns.set("spoke.example", addresses(&["127.0.0.3"], 1));
    wait_until("the new address is used", async || !resolver.is_current(&spoke, [127, 0, 0, 2].into())).await;
    drop(first);
    assert_eq!(peer(&resolver, &spoke).await.unwrap(), IpAddr::from([127, 0, 0, 3]));
}

#[tokio::test]
async fn the_last_answer_is_used_while_the_server_fails_and_not_after_it_denies_the_name() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.2").await);
    let (resolver, spoke) = (resolver(&dns), endpoint("spoke.example", port));
    dns.set("spoke.example", addresses(&["127.0.0.2"], 1));
    assert!(peer(&resolver, &spoke).await.is_ok());
    for failure in [Zone::Code(2), Zone::Silence] {
        let before = dns.queries();
        dns.set("spoke.example", failure.clone());
        wait_until("the server has received several queries", async || dns.queries() >= before + 4).await;
        let started = Instant::now();
        assert!(peer(&resolver, &spoke).await.is_ok(), "{failure:?}");
        assert!(started.elapsed() < Duration::from_millis(500), "{failure:?}: {:?}", started.elapsed());
    }
    for denial in [Zone::Code(3), Zone::Code(0)] {
        dns.set("spoke.example", denial.clone());
        wait_until("the name has no address", async || !resolver.is_current(&spoke, [127, 0, 0, 2].into()))
            .await;
        let error = peer(&resolver, &spoke).await.unwrap_err();
        assert!(error.to_string().contains("spoke.example has no address"), "{error}");
        dns.set("spoke.example", addresses(&["127.0.0.2"], 1));
        wait_until("the name is back", async || peer(&resolver, &spoke).await.is_ok()).await;
    }
}

#[tokio::test]
async fn a_name_that_was_never_resolved_fails_with_its_cause_and_others_are_not_affected() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.2").await);
    let resolver = resolver(&dns);
    dns.set("good.example", addresses(&["127.0.0.2"], 60));
    dns.set("silent.example", Zone::Silence);
    dns.set("broken.example", Zone::Code(2));
    dns.set("empty.example", Zone::Code(0));
    // An address that would lead to this host.
    dns.set("rebound.example", addresses(&["0.0.0.0"], 60));
    let check = async |name: &str, expected: &str| {
        let error = peer(&resolver, &endpoint(name, port)).await.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
    };
    tokio::join!(
        check("silent.example", "no DNS server answers"),
        check("broken.example", "no DNS server answers"),
        check("empty.example", "has no address"),
        check("none.example", "has no address"),
        check("rebound.example", "has no address"),
        async { assert!(peer(&resolver, &endpoint("good.example", port)).await.is_ok()) },
    );
    let limit = Duration::from_millis(200);
    dns.set("slow.example", Zone::Silence);
    let started = Instant::now();
    let slow = resolver.connect(&endpoint("slow.example", port), limit, |_| true).await;
    assert!(matches!(slow, Err(ConnectError::TimedOut)) && started.elapsed() < 5 * limit);
}

#[tokio::test]
async fn an_unreachable_first_address_delays_one_connection_by_a_quarter_of_a_second() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.3").await);
    let _silent = silent("127.0.0.2", port).await;
    let (resolver, spoke) = (resolver(&dns), endpoint("spoke.example", port));
    dns.set("spoke.example", addresses(&["127.0.0.2", "127.0.0.3"], 60));
    let mut took = Vec::new();
    for _ in 0..20 {
        let started = Instant::now();
        assert_eq!(peer(&resolver, &spoke).await.unwrap(), IpAddr::from([127, 0, 0, 3]));
        took.push(started.elapsed());
    }
    let slow = took.iter().filter(|took| **took >= Duration::from_millis(200)).count();
    assert!(slow <= 1, "{took:?}");
    assert!(took.iter().max().unwrap() < &Duration::from_secs(2), "{took:?}");
}

#[tokio::test]
async fn a_broken_ipv6_address_does_not_delay_connections_over_ipv4() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.1").await);
    let (resolver, spoke) = (resolver(&dns), endpoint("spoke.example", port));
    // Nothing listens on the port of `::1`, and there is no route to the documentation prefix.
    dns.set("spoke.example", addresses(&["::1", "2001:db8::1", "127.0.0.1"], 60));
    for _ in 0..5 {
        let started = Instant::now();
        assert_eq!(peer(&resolver, &spoke).await.unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn both_families_are_used_and_localhost_needs_no_server() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("::1").await);
    let resolver = resolver(&dns);
    dns.set("six.example", addresses(&["::1"], 60));
    let six: IpAddr = "::1".parse().unwrap();
    for name in ["six.example", "localhost", "a.localhost", "[::1]"] {
        assert_eq!(peer(&resolver, &endpoint(name, port)).await.unwrap(), six, "{name}");
    }
    assert_eq!(dns.queries(), 2);
}

#[tokio::test]
async fn addresses_that_are_not_permitted_are_not_connected_to() {
    let (dns, (_listener, port)) = (DnsServer::start().await, listener("127.0.0.1").await);
    let resolver = resolver(&dns);
    dns.set("mixed.example", addresses(&["192.0.2.1", "127.0.0.1"], 60));
    dns.set("remote.example", addresses(&["192.0.2.1"], 60));
    let loopback =
        async |name: &str| resolver.connect(&endpoint(name, port), TIMEOUT, |ip| ip.is_loopback()).await;
    assert!(loopback("mixed.example").await.is_ok());
    assert!(matches!(loopback("remote.example").await, Err(ConnectError::NotPermitted)));
    assert!(matches!(loopback("192.0.2.1").await, Err(ConnectError::NotPermitted)));
}

#[tokio::test]
async fn connections_come_from_the_source_address_if_there_is_one() {
    let resolver = Resolver::new(&DnsSection { servers: Vec::new() });
    let (listener, port) = listener("127.0.0.1").await;
    let endpoint: HostPort = format!("127.0.0.1:{port}").parse().unwrap();
    let source = IpAddr::from([127, 0, 0, 3]);
    for (address, expected) in [(Some(source), source), (None, IpAddr::from([127, 0, 0, 1]))] {
        let resolver = resolver.with_source_address(address);
        let (connected, accepted) =
            tokio::join!(resolver.connect(&endpoint, TIMEOUT, |_| true), listener.accept());
        let (_, from) = accepted.unwrap();
        assert!(connected.is_ok() && from.ip() == expected, "{from} instead of {expected}");
    }
}
