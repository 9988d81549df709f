//! Faults of the nearest of three regions: tests check the response of a client, and a bench measures its time.

use super::front::{Client, Front, Hop, Seen};
use super::region::{BACKLOG, Door, Script, Script::*};
use super::scene::{AMERICA, EUROPE, JAPAN, Scene, TLS};
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
    SaysElsewhere,
    IsSlow,
    /// With the request in flight.
    IsKilled,
    /// Its sockets stay open and accept bytes.
    IsFrozen,
}

/// Response time of a slow region, which was that of [`Scripts::well`] before.
const SLOW: Duration = Duration::from_millis(400);
/// Longer than any expected step takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time by which a SYN is answered if it is answered at all.
const SYN_ANSWERED: Duration = Duration::from_millis(300);

impl Fault {
    pub(crate) const ALL: [Fault; 8] = [
        Fault::RefusesConnections,
        Fault::DropsEverySyn,
        Fault::ResetsInTheHead,
        Fault::ResetsInTheBody,
        Fault::SaysElsewhere,
        Fault::IsSlow,
        Fault::IsKilled,
        Fault::IsFrozen,
    ];
}

/// Scene that has served a number of requests, and its client. No fault yet: each region takes `takes`.
pub(crate) struct Served {
    pub(crate) scene: Scene,
    client: Client,
    /// Connections that keep the accept queue full.
    queue: Vec<TcpStream>,
}

impl Served {
    pub(crate) async fn well(
        front: Front,
        hop: Hop,
        model: &str,
        takes: Duration,
        requests: usize,
    ) -> Served {
        let scripts = [AMERICA, EUROPE, JAPAN].map(|id| (id, Takes(takes)));
        let tls = match front {
            Front::Http1 => "",
            Front::Http2OverTls => TLS,
        };
        let scene = Scene::start(&format!("{}{tls}", hop.config()), scripts).await;
        let client = Client::of(&scene, front).await;
        for _ in 0..requests {
            let seen = client.ask(model, &[]).await;
            assert_eq!(seen.status, 200, "{seen:?}");
        }
        Served { scene, client, queue: Vec::new() }
    }

    /// Sends the first request that meets the fault of `region`.
    pub(crate) async fn meets(
        &mut self,
        fault: Fault,
        region: &str,
        model: &str,
        headers: &[(&str, &str)],
    ) -> Seen {
        let address = self.scene.addresses[region];
        let region = self.scene.regions[region].clone();
        let does = |script: Script| {
            region.script.send_replace(script);
        };
        match fault {
            Fault::RefusesConnections => region.shuts(Door::Gone).await,
            Fault::DropsEverySyn => {
                region.shuts(Door::Stuck).await;
                self.queue = filled(address).await;
            }
            Fault::ResetsInTheHead => does(Script::ResetsInTheHead),
            Fault::ResetsInTheBody => does(ResetsInASmallBody),
            Fault::SaysElsewhere => does(Script::SaysElsewhere),
            Fault::IsSlow => does(Takes(SLOW)),
            Fault::IsKilled => does(Waits),
            Fault::IsFrozen => does(FallsSilent),
        }
        // The gateway has noticed all closed connections by now: the response comes from the same event loop.
        self.scene.client.get(format!("{}/livez", self.scene.operations)).send().await.unwrap();
        let answered = async {
            let under_way = region.requests() + 1;
            let asked = self.client.ask(model, headers);
            if fault != Fault::IsKilled {
                return asked.await;
            }
            let killed = async {
                region.until_requests(under_way).await;
                region.shuts(Door::Dead).await;
            };
            tokio::join!(asked, killed).0
        };
        tokio::time::timeout(PATIENCE, answered).await.unwrap_or_else(|_| panic!("{fault:?}: no answer"))
    }
}

/// Fills the accept queue of a listener that does not accept.
async fn filled(address: SocketAddr) -> Vec<TcpStream> {
    let mut queue = Vec::new();
    while let Ok(connected) = tokio::time::timeout(SYN_ANSWERED, TcpStream::connect(address)).await {
        queue.push(connected.unwrap());
        assert!(queue.len() < 10 * BACKLOG as usize, "the queue is never full");
    }
    queue
}
