//! One process from its start, or from when it was found, to its end.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::process::Child;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::record::Identity;
use crate::actuator::{ReadyAt, ReplicaId};
use crate::scaling::events::{ReplicaKilled, ReplicaNeverReady};

/// How often somebody who starts is asked whether it is ready: a request may be held for it.
const ASK_PERIOD: Duration = Duration::from_millis(5);
/// How often it is looked whether one that was found still lives.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// How long one answer may take: who loads a model computes on every core.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// Who is not ready after this will not be: the largest models are read in a few minutes.
pub(super) const START_MAX: Duration = Duration::from_secs(600);
/// How long a replica that is told to end may take: half again as long as it gives its requests.
const STOP_MAX: Duration = Duration::from_secs(15);

/// A process.
pub(super) struct Life {
    /// Means this process and no other, also after it has ended.
    process: OwnedFd,
    end: End,
}

/// How its end is seen.
enum End {
    /// We are its parent.
    Told(Child),
    /// Its parent is gone, and nobody tells: it is looked.
    Seen(Identity),
}

/// How a replica ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) id: ReplicaId,
    /// It was told to.
    pub(super) told: bool,
    /// What the system says.
    pub(super) how: String,
}

/// What is known of a start.
#[derive(Clone, Copy)]
pub(super) enum Start {
    /// It began then.
    Since(Instant),
    /// It is over, and took so long, if that was seen.
    Took(Option<Duration>),
}

/// What a life needs to know.
pub(super) struct Told {
    pub(super) id: ReplicaId,
    pub(super) endpoint: SocketAddr,
    /// When it was started, if that was here, or else how long it took.
    pub(super) start: Start,
    pub(super) client: reqwest::Client,
    /// Told, or dropped, when it shall end.
    pub(super) stop: oneshot::Receiver<()>,
    /// Where it is said that it takes work.
    pub(super) readied: mpsc::Sender<(ReplicaId, ReadyAt)>,
}

impl Life {
    /// One that was just started.
    pub(super) fn started(child: Child, identity: Identity) -> io::Result<Life> {
        let process = pidfd_open(identity.pid, PidfdFlags::empty())?;
        Ok(Life { process, end: End::Told(child) })
    }

    /// One that was there already.
    pub(super) fn found(process: OwnedFd, identity: Identity) -> Life {
        Life { process, end: End::Seen(identity) }
    }

    /// Waits until it has ended; how, as far as the system says.
    async fn ended(&mut self) -> String {
        match &mut self.end {
            End::Told(child) => {
                child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string())
            }
            End::Seen(identity) => {
                while identity.lives() {
                    sleep(LOOK_PERIOD).await;
                }
                "it has ended".to_owned()
            }
        }
    }

    /// Asks it to end, and ends it if that takes too long.
    async fn end(&mut self, id: &ReplicaId) -> String {
        // Whoever has ended already takes no signal, and is seen to have ended.
        pidfd_send_signal(&self.process, Signal::TERM).ok();
        if let Ok(how) = timeout(STOP_MAX, self.ended()).await {
            return how;
        }
        ReplicaKilled { id, after: STOP_MAX }.emit();
        self.kill().await
    }

    async fn kill(&mut self) -> String {
        pidfd_send_signal(&self.process, Signal::KILL).ok();
        self.ended().await
    }

    /// From now to its end.
    pub(super) async fn live(mut self, told: Told) -> Ended {
        let Told { id, endpoint, start, client, mut stop, readied } = told;
        let url = format!("http://{endpoint}/health");
        let ended = |id, how| Ended { id, told: false, how };
        tokio::select! {
            how = self.ended() => return ended(id, how),
            _ = &mut stop => {}
            () = sleep(START_MAX) => {
                ReplicaNeverReady { id: &id, after: START_MAX }.emit();
                let how = self.kill().await;
                return ended(id, how);
            }
            () = until_ready(&client, &url) => {
                let took = match start {
                    Start::Since(began) => Some(began.elapsed()),
                    Start::Took(took) => took,
                };
                // Nobody who listened any longer would let us live.
                readied.send((id.clone(), ReadyAt { endpoint, took })).await.ok();
                tokio::select! {
                    how = self.ended() => return ended(id, how),
                    _ = stop => {}
                }
            }
        }
        let how = self.end(&id).await;
        Ended { id, told: true, how }
    }
}

/// Asks until the answer is yes.
async fn until_ready(client: &reqwest::Client, url: &str) {
    loop {
        if let Ok(answer) = client.get(url).timeout(ASK_TIMEOUT).send().await
            && answer.status().is_success()
        {
            return;
        }
        sleep(ASK_PERIOD).await;
    }
}
