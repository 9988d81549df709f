//! Faults of the nearest of three regions: tests check the response of a client, and a bench measures its time.

use super::clients::{Client, ClientProtocol, ClientResponse, RegionProtocol};
use super::fixture::{AMERICA, EUROPE, Fixture, JAPAN, TLS};
use super::region::{BACKLOG, ListenerState, Script, Script::*};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// Fault of the nearest region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    RefusesConnections,
    DropsEverySyn,
    ResetsInTheHead,
    ResetsInTheBody,
    RejectsNotReady,
    IsSlow,
    /// With the request in flight.
    IsKilled,
    /// Its sockets stay open and accept bytes.
    IsFrozen,
}

/// Response time of a slow region, which was that of [`Scripts::healthy`] before.
const SLOW: Duration = Duration::from_millis(400);
/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time by which a SYN is answered if it is answered at all.
const SYN_TIMEOUT: Duration = Duration::from_millis(300);

impl Fault {
    pub(crate) const ALL: [Fault; 8] = [
        Fault::RefusesConnections,
        Fault::DropsEverySyn,
        Fault::ResetsInTheHead,
        Fault::ResetsInTheBody,
        Fault::RejectsNotReady,
        Fault::IsSlow,
        Fault::IsKilled,
        Fault::IsFrozen,
    ];
}

/// Fixture that has served a number of requests, and its client. No fault yet: each region takes `takes`.
pub(crate) struct FaultFixture {
    pub(crate) fixture: Fixture,
    client: Client,
    /// Connections that keep the accept queue full.
    queue: Vec<TcpStream>,
}

impl FaultFixture {
    pub(crate) async fn healthy(
        client_protocol: ClientProtocol,
        region_protocol: RegionProtocol,
        model: &str,
        takes: Duration,
        requests: usize,
    ) -> FaultFixture {
        let scripts = [AMERICA, EUROPE, JAPAN].map(|id| (id, Takes(takes)));
        let tls = match client_protocol {
            ClientProtocol::Http1 => "",
            ClientProtocol::Http2OverTls => TLS,
        };
        let fixture = Fixture::start(&format!("{}{tls}", region_protocol.config()), scripts).await;
        let client = Client::of(&fixture, client_protocol).await;
        for _ in 0..requests {
            let seen = client.send(model, &[]).await;
            assert_eq!(seen.status, 200, "{seen:?}");
        }
        FaultFixture { fixture, client, queue: Vec::new() }
    }

    /// Sends the first request that meets the fault of `region`.
    pub(crate) async fn send_first_request(
        &mut self,
        fault: Fault,
        region: &str,
        model: &str,
        headers: &[(&str, &str)],
    ) -> ClientResponse {
        let address = self.fixture.addresses[region];
        let region = self.fixture.regions[region].clone();
        let does = |script: Script| {
            region.script.send_replace(script);
        };
        match fault {
            Fault::RefusesConnections => region.close_listener(ListenerState::Closed).await,
            Fault::DropsEverySyn => {
                region.close_listener(ListenerState::NotAccepting).await;
                self.queue = fill_accept_queue(address).await;
            }
            Fault::ResetsInTheHead => does(Script::ResetsInTheHead),
            Fault::ResetsInTheBody => does(ResetsInASmallBody),
            Fault::RejectsNotReady => does(Script::RejectsNotReady),
            Fault::IsSlow => does(Takes(SLOW)),
            Fault::IsKilled => does(Waits),
            Fault::IsFrozen => does(StopsResponding),
        }
        // The gateway has noticed all closed connections by now: the response comes from the same event loop.
        self.fixture.client.get(format!("{}/livez", self.fixture.operations)).send().await.unwrap();
        let answered = async {
            let in_flight = region.requests() + 1;
            let request = self.client.send(model, headers);
            if fault != Fault::IsKilled {
                return request.await;
            }
            let killed = async {
                region.wait_for_requests(in_flight).await;
                region.close_listener(ListenerState::Killed).await;
            };
            tokio::join!(request, killed).0
        };
        tokio::time::timeout(TIMEOUT, answered).await.unwrap_or_else(|_| panic!("{fault:?}: no response"))
    }
}

/// Fills the accept queue of a listener that does not accept.
async fn fill_accept_queue(address: SocketAddr) -> Vec<TcpStream> {
    let mut queue = Vec::new();
    while let Ok(connected) = tokio::time::timeout(SYN_TIMEOUT, TcpStream::connect(address)).await {
        queue.push(connected.unwrap());
        assert!(queue.len() < 10 * BACKLOG as usize, "the queue is never full");
    }
    queue
}
