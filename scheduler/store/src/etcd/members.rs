//! The members of an etcd, and which of them is asked.
//!
//! One is asked until it fails, then the next. etcd-client could be given all of them at once, and then its balancer
//! would try a dead one again and again, so that one call in five to ten fails for as long as it is dead; and a member
//! that hangs would be asked in its turn. A client that has failed is thrown away with its connection.

use std::time::Duration;
use supervision::Mutex;

use etcd_client::{Client, ConnectOptions, Error};
use rand::Rng;

/// The first pause between two tries, and the longest. Each is drawn from the upper half of its span, so that hubs that
/// lost the same member do not come back in step.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The members.
pub(super) struct Members {
    endpoints: Vec<String>,
    options: ConnectOptions,
    state: Mutex<State>,
}

struct State {
    current: usize,
    clients: Vec<Option<Client>>,
}

impl Members {
    pub(super) fn new(endpoints: Vec<String>, options: ConnectOptions) -> Members {
        let clients = endpoints.iter().map(|_| None).collect();
        Members { endpoints, options, state: Mutex::new(State { current: 0, clients }) }
    }

    /// Which is asked now.
    pub(super) fn current(&self) -> usize {
        self.state().current
    }

    pub(super) fn endpoint(&self, member: usize) -> &str {
        &self.endpoints[member]
    }

    /// A client of this member.
    pub(super) async fn client(&self, member: usize) -> Result<Client, Error> {
        if let Some(client) = &self.state().clients[member] {
            return Ok(client.clone());
        }
        let client = Client::connect([&self.endpoints[member]], Some(self.options.clone())).await?;
        self.state().clients[member] = Some(client.clone());
        Ok(client)
    }

    /// This member has failed: the next is asked, unless somebody has seen to that already.
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

/// How long to wait after so many tries that have failed.
pub(super) fn pause(tries: u32) -> Duration {
    let span = (PAUSE_MIN * 2u32.saturating_pow(tries.min(8))).min(PAUSE_MAX);
    span.mul_f64(rand::rng().random_range(0.5..=1.0))
}
