//! The members of an etcd, and the selection of the current one.
//!
//! One member is used until it fails, then the next. With all members, etcd-client's own balancer would retry a dead
//! one again and again, so that one call in five to ten fails while it is dead; and a member that hangs would get its
//! share of calls. A failed client is dropped with its connection.

use std::time::Duration;
use supervision::Mutex;

use backoff::Backoff;
use etcd_client::{Client, ConnectOptions, Error};

use super::tls::EtcdTls;

/// Delays between two attempts, with jitter, so that hubs that lost the same member do not retry at the same time.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(1) };

/// Members of an etcd.
pub(super) struct Members {
    endpoints: Vec<String>,
    options: ConnectOptions,
    tls: Option<MemberTls>,
    state: Mutex<State>,
}

/// Settings of connections with TLS, which etcd-client does not make.
pub(super) struct MemberTls {
    pub(super) tls: EtcdTls,
    pub(super) keep_alive: Duration,
}

struct State {
    current: usize,
    clients: Vec<Option<Client>>,
}

impl Members {
    pub(super) fn new(endpoints: Vec<String>, options: ConnectOptions, tls: Option<MemberTls>) -> Members {
        let clients = endpoints.iter().map(|_| None).collect();
        Members { endpoints, options, tls, state: Mutex::new(State { current: 0, clients }) }
    }

    /// Returns the index of the current member.
    pub(super) fn current(&self) -> usize {
        self.state().current
    }

    pub(super) fn endpoint(&self, member: usize) -> &str {
        &self.endpoints[member]
    }

    /// Returns a client of this member; connects if there is none.
    pub(super) async fn client(&self, member: usize) -> Result<Client, Error> {
        if let Some(client) = &self.state().clients[member] {
            return Ok(client.clone());
        }
        let (endpoint, options) = (&self.endpoints[member], Some(self.options.clone()));
        let client = match &self.tls {
            None => Client::connect([endpoint], options).await?,
            Some(MemberTls { tls, keep_alive }) => {
                Client::from_channel(tls.channel(endpoint, *keep_alive)?, options).await?
            }
        };
        self.state().clients[member] = Some(client.clone());
        Ok(client)
    }

    /// Records a failure of this member: the next one becomes current, unless another caller has done that already.
    pub(super) fn failed(&self, member: usize) {
        let mut state = self.state();
        state.clients[member] = None;
        if state.current == member {
            state.current = (member + 1) % self.endpoints.len();
        }
    }

    fn state(&self) -> supervision::MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Returns the delay after this number of failed attempts.
pub(super) fn pause(tries: u32) -> Duration {
    BACKOFF.equal_jitter(tries, rand::random())
}
