//! Task that keeps the identity folder of a process current: it renews the certificate at half of its life, and follows
//! the trusted authorities and the revoked certificates.
//!
//! The trusted state is a long poll at every hub ([`scheduler_core::pki::polls`]), which is every address of every name,
//! so a revocation arrives at once while any hub is reachable; the process applies it from its folder, also after a restart without a hub. Without a hub the
//! task tries again with backoff, and there is half of a certificate's life until it expires.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant};

use backoff::Backoff;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use identity::expiry;
use regions::{Host, HostPort};
use resolver::Resolver;
use scheduler_core::pki::issue;
use scheduler_core::pki::polls::{self, PollChange, PollFailure, PollStep, TrustPolls};
use scheduler_core::pki::trust::TrustState;
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use crate::authority::{AuthorityConnection, AuthorityError, issue_for_replicas, renew};
use crate::identity_folder::{IdentityFolder, Membership};
use crate::unix_time;

/// Interval at which the wall clock is read: it may have been set, or the machine suspended.
const CLOCK_PERIOD: Duration = Duration::from_secs(60);
/// Maximum time of the lookup of a name, which usually ends at once in the resolver's cache; the polls of others begin after
/// the first one.
const LOOKUP_MAX: Duration = Duration::from_secs(1);
/// Delay after a failed renewal. Independent of the equal ones of restarts of replicas, which wait for a machine and not for a
/// hub.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Delay after a rejected renewal, which has a cause that does not pass by itself.
const REJECTED_BACKOFF: Backoff = Backoff { first: Duration::from_secs(10), max: Duration::from_secs(600) };

/// Keeps the folder of a spoke's replicas current until the returned future is dropped: obtains its first certificate with
/// that of the spoke, and then renews it. Ends at once if another tool fills the folder of the spoke.
///
/// # Errors
///
/// When a folder cannot be read.
pub async fn follow_replicas(
    spoke: IdentityFolder,
    replicas: IdentityFolder,
    resolver: Resolver,
) -> std::io::Result<()> {
    replicas.recover()?;
    let mut failures = 0;
    loop {
        let Some(membership) = spoke.membership()? else { return Ok(()) };
        let period = replicas.membership()?.map(|membership| membership.period());
        if period.is_some_and(|period| replicas.has_certificate() && unix_time() < period.not_after) {
            return follow(replicas, resolver).await;
        }
        let issued = async {
            let addresses = &membership.addresses;
            let mut connection = AuthorityConnection::with_identity(&spoke, addresses, &resolver).await?;
            issue_for_replicas(&replicas, &mut connection, addresses).await
        };
        if let Err(error) = issued.await {
            failures += 1;
            // No replica can be started meanwhile. Check the hubs.
            tracing::warn!(%error, "failed to obtain a certificate for replicas; trying again");
            expiry::count_renewal_failure();
            tokio::time::sleep(BACKOFF.equal_jitter(failures, rand::random())).await;
        }
    }
}

/// Keeps a folder current until the returned future is dropped; ends at once for a folder that another tool fills.
///
/// # Errors
///
/// When the folder cannot be read.
pub async fn follow(folder: IdentityFolder, resolver: Resolver) -> std::io::Result<()> {
    let Some(membership) = folder.membership()? else { return Ok(()) };
    let state = FolderState {
        membership: watch::Sender::new(membership),
        trust: watch::Sender::new(folder.trust()?),
        folder,
        resolver,
    };
    // A renewal that waits for a hub does not delay a revocation.
    tokio::select! {
        () = renew_when_due(&state) => {}
        () = follow_trust(&state) => {}
    }
    Ok(())
}

/// Folder with its content, which both parts of the task use and change.
struct FolderState {
    folder: IdentityFolder,
    resolver: Resolver,
    membership: watch::Sender<Membership>,
    trust: watch::Sender<Option<TrustState>>,
}

impl FolderState {
    fn expires_in(&self) -> Duration {
        self.membership.borrow().period().not_after.saturating_sub(unix_time())
    }

    /// Returns when the certificate is renewed, since 1970: at once if it is one of an authority that no longer signs.
    fn renewal(&self, chance: f64) -> Duration {
        let membership = self.membership.borrow();
        let signer = self.trust.borrow().as_ref().map(|trust| trust.signer().fingerprint.to_string());
        let is_of_old_authority = signer.is_some_and(|signer| signer != membership.authority);
        issue::renewal(membership.period(), is_of_old_authority, chance, unix_time())
    }
}

/// Renews the certificate whenever it is due, for ever.
async fn renew_when_due(state: &FolderState) {
    let mut trust = state.trust.subscribe();
    // Where in its window each certificate is renewed.
    let mut chance: f64 = rand::random();
    let (mut failures, mut rejections) = (0, 0);
    loop {
        trust.mark_unchanged();
        let due = state.renewal(chance).saturating_sub(unix_time());
        if !due.is_zero() {
            // Another authority may sign in the next trusted state. The sender is in `state`.
            tokio::select! {
                _ = trust.changed() => {}
                () = tokio::time::sleep(due.min(CLOCK_PERIOD)) => {}
            }
            continue;
        }
        match renew_now(state).await {
            Ok(()) => {
                (failures, rejections) = (0, 0);
                chance = rand::random();
            }
            Err(error) => {
                failures += 1;
                expiry::count_renewal_failure();
                let backoff = if error.is_rejection() {
                    rejections += 1;
                    REJECTED_BACKOFF.equal_jitter(rejections, rand::random())
                } else {
                    BACKOFF.equal_jitter(failures, rand::random())
                };
                if failures == 1 {
                    let expires_in_s = state.expires_in().as_secs();
                    // Connections continue with the present certificate. Check the hubs; after `expires_in_s` a new join
                    // token is needed.
                    tracing::warn!(%error, expires_in_s, "failed to renew the certificate; trying again");
                }
                tokio::time::sleep(backoff).await;
            }
        }
    }
}

async fn renew_now(state: &FolderState) -> Result<(), AuthorityError> {
    let FolderState { folder, resolver, membership, trust } = state;
    let addresses = membership.borrow().addresses.clone();
    let mut connection = AuthorityConnection::with_identity(folder, &addresses, resolver).await?;
    let renewed = renew(folder, &mut connection, &addresses).await?;
    let known = folder.trust().map_err(|error| AuthorityError::Folder(error.to_string()))?;
    // The process has a new certificate of the built-in authority, which expires at `expires_s` (Unix time).
    tracing::info!(serial = renewed.serial, expires_s = renewed.not_after_s, "certificate renewed");
    trust.send_replace(known);
    membership.send_replace(renewed);
    Ok(())
}

/// Polls the hubs for the trusted state, for ever.
async fn follow_trust(state: &FolderState) {
    let mut membership = state.membership.subscribe();
    loop {
        let addresses = membership.borrow_and_update().addresses.clone();
        let mut hubs = PolledHubs::new(state, addresses).await;
        loop {
            let offered = tokio::select! {
                offered = hubs.next() => offered,
                // The next connections use the new certificate. The sender is in `state`.
                _ = membership.changed() => break,
            };
            if let Err(error) = accept(state, offered) {
                // Revocations are not applied. Check the disk.
                tracing::error!(%error, "failed to write the trusted state");
                tokio::time::sleep(polls::BACKOFF.max).await;
            }
        }
    }
}

/// Writes an offered state to the folder if it is newer than the present one.
fn accept(state: &FolderState, offered: TrustState) -> std::io::Result<()> {
    let accepted = offered.accept(state.trust.borrow().as_ref(), unix_time());
    let Some(accepted) = accepted else { return Ok(()) };
    state.folder.write_trust(&accepted)?;
    // The built-in authority has published other authorities or revocations, and the process uses them.
    tracing::info!(
        generation = accepted.generation,
        authorities = accepted.authorities.len(),
        revoked = accepted.revoked.len(),
        "trusted state updated"
    );
    state.trust.send_replace(Some(accepted));
    Ok(())
}

/// Poll in progress. It ends with the address of the hub, and its connection for the next poll.
type PendingPoll<'a> = Pin<Box<dyn Future<Output = (String, PollOutcome)> + Send + 'a>>;
type PollOutcome = Result<(AuthorityConnection, Option<TrustState>), AuthorityError>;
/// Lookup in progress of all configured addresses. It ends with those of each.
type PendingLookup<'a> = Pin<Box<dyn Future<Output = BTreeMap<String, BTreeSet<String>>> + Send + 'a>>;

/// Polls of all hubs with one certificate.
struct PolledHubs<'a> {
    state: &'a FolderState,
    /// Addresses as configured: names, and IP addresses.
    configured: Vec<String>,
    polls: TrustPolls,
    connections: BTreeMap<String, AuthorityConnection>,
    pending: FuturesUnordered<PendingPoll<'a>>,
    /// Next lookup of the names. It is not waited for: DNS may be slow, and the polls continue.
    lookup: PendingLookup<'a>,
}

impl<'a> PolledHubs<'a> {
    async fn new(state: &'a FolderState, configured: Vec<String>) -> PolledHubs<'a> {
        let mut polls = TrustPolls::default();
        polls.set_lookups(looked_up(&state.resolver, &configured).await, Instant::now());
        let lookup = next_lookup(&state.resolver, configured.clone());
        let (connections, pending) = (BTreeMap::new(), FuturesUnordered::new());
        PolledHubs { state, configured, polls, connections, pending, lookup }
    }

    /// Returns the next state that a hub offers.
    async fn next(&mut self) -> TrustState {
        loop {
            let until = match self.polls.step(Instant::now()) {
                PollStep::Start(hub) => {
                    let poll = poll(self.state, hub.clone(), self.connections.remove(&hub));
                    self.pending.push(Box::pin(async move { (hub, poll.await) }));
                    continue;
                }
                PollStep::Wait(until) => until,
            };
            let ended = tokio::select! {
                Some(ended) = self.pending.next() => ended,
                lookups = &mut self.lookup => {
                    self.polls.set_lookups(lookups, Instant::now());
                    self.connections.retain(|address, _| self.polls.has(address));
                    self.lookup = next_lookup(&self.state.resolver, self.configured.clone());
                    continue;
                }
                () = timer(until) => continue,
            };
            let (hub, outcome) = ended;
            if let Some(offered) = self.ended(hub, outcome) {
                return offered;
            }
        }
    }

    /// Records the end of a poll, and returns the state that the hub offers.
    fn ended(&mut self, hub: String, outcome: PollOutcome) -> Option<TrustState> {
        let failure = |error: &AuthorityError| {
            if error.is_rejection() { PollFailure::Rejected } else { PollFailure::Unreachable }
        };
        let result = outcome.as_ref().map(|_| ()).map_err(failure);
        let change = self.polls.ended(&hub, result, Instant::now(), rand::random());
        match (change, &outcome) {
            (PollChange::HubFailed, Err(error)) => {
                // One hub does not respond to the poll for revocations; the other hubs are polled at the same time.
                tracing::info!(%error, "poll of the authority failed at one hub; others are polled");
            }
            (PollChange::AllFailed, Err(error)) => {
                let expires_in_s = self.state.expires_in().as_secs();
                // Connections continue with the present certificate, and revocations arrive late. Check the hubs;
                // after `expires_in_s` a new join token is needed.
                tracing::warn!(%error, expires_in_s, "authority unreachable; trying again");
            }
            (PollChange::Restored, _) => {
                // The built-in authority responds again, so certificates are renewed and revocations arrive.
                tracing::info!("authority reachable again");
            }
            _ => {}
        }
        let (connection, offered) = outcome.ok()?;
        self.connections.insert(hub, connection);
        offered
    }
}

/// Looks the names up again after a while.
fn next_lookup(resolver: &Resolver, configured: Vec<String>) -> PendingLookup<'_> {
    Box::pin(async move {
        tokio::time::sleep(polls::RESOLVE_PERIOD).await;
        looked_up(resolver, &configured).await
    })
}

/// Returns the addresses to which each configured one resolves; none if the lookup failed.
async fn looked_up(resolver: &Resolver, configured: &[String]) -> BTreeMap<String, BTreeSet<String>> {
    let each = configured.iter().map(async |address| (address.clone(), resolved(resolver, address).await));
    join_all(each).await.into_iter().collect()
}

async fn resolved(resolver: &Resolver, address: &str) -> BTreeSet<String> {
    let itself = || BTreeSet::from([address.to_owned()]);
    let Ok(endpoint) = address.parse::<HostPort>() else { return itself() };
    match endpoint.host() {
        Host::Ip(_) => return itself(),
        // Its two addresses are of one process.
        Host::Name(name) if name.is_localhost() => return itself(),
        Host::Name(_) => {}
    }
    match timeout(LOOKUP_MAX, resolver.addresses(endpoint.host())).await {
        Ok(Ok(found)) => {
            found.into_iter().map(|ip| SocketAddr::new(ip, endpoint.port()).to_string()).collect()
        }
        _ => BTreeSet::new(),
    }
}

/// Polls one hub once, over an open connection if there is one.
async fn poll(state: &FolderState, address: String, open: Option<AuthorityConnection>) -> PollOutcome {
    let mut connection = match open {
        Some(open) => open,
        None => {
            let address = std::slice::from_ref(&address);
            AuthorityConnection::with_identity(&state.folder, address, &state.resolver).await?
        }
    };
    let known = state.trust.borrow().as_ref().map(|trust| trust.generation);
    let offered = connection.poll_trust(known, polls::WAIT).await?;
    Ok((connection, offered))
}

/// Completes at `until`; never without one.
async fn timer(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until.into()).await,
        None => std::future::pending().await,
    }
}
