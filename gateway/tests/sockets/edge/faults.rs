//! What can become of a region, each as one fault that befalls the nearest of three: so that a test can say what a client
//! gets, and a bench how long it waits for it.

use super::front::{Client, Front, Hop, Seen};
use super::region::{BACKLOG, Door, Script, Script::*};
use super::scene::{AMERICA, EUROPE, JAPAN, Scene, TLS};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// What befalls the nearest region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    RefusesConnections,
    DropsEverySyn,
    ResetsInTheHead,
    ResetsInTheBody,
    SaysElsewhere,
    IsSlow,
    /// With the request under way.
    IsKilled,
    /// Its sockets stay open and take bytes.
    IsFrozen,
}

/// How long a slow region takes, which took [`Scripts::well`] before.
const SLOW: Duration = Duration::from_millis(400);
/// Nothing that is waited for takes so long.
const PATIENCE: Duration = Duration::from_secs(20);
/// A SYN that is answered at all is answered by now.
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

/// A scene that has served so many requests, and its client. Behind it nothing is wrong yet: each region takes `takes`.
pub(crate) struct Served {
    pub(crate) scene: Scene,
    client: Client,
    /// What keeps a queue full.
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

    /// The first request that meets the fault of `region`.
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
        // Whatever has been closed is known to the edge by now: it answers from the same loop.
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

/// Connections that nobody takes, until there is no room for another.
async fn filled(address: SocketAddr) -> Vec<TcpStream> {
    let mut queue = Vec::new();
    while let Ok(connected) = tokio::time::timeout(SYN_ANSWERED, TcpStream::connect(address)).await {
        queue.push(connected.unwrap());
        assert!(queue.len() < 10 * BACKLOG as usize, "the queue is never full");
    }
    queue
}
