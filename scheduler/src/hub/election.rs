//! Leader election: a hub is follower and leader in turn.
//!
//! ```text
//!             ┌────────── election won ─────────────┐
//!             │                                     ▼
//!   follow: publishes the table in `routes`      lead: writes the table, and publishes it
//!             ▲                                     │
//!             └── lease expired, or a guard failed ─┘
//! ```
//!
//! A follower serves all requests too: it accepts registrations, and publishes the table and the plan that the leader
//! has written. So it does not matter which hub a gateway or a spoke uses.
//!
//! A deposed leader may not know that it is deposed, because it was suspended or partitioned: its writes are guarded by
//! the key of its term and fail. Then it follows again. It does *not* step down when the store is unreachable: then no
//! other leader is known, and if there is one, the guard prevents writes.

use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::{Catalogue, Deployment};
use scheduler_api::keys;
use scheduler_store::{Event, Lease, Store, StoreError, Term, Watch};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::controller::{Controller, GracePeriods, STORE_RETRY_DELAY};
use super::publisher::Publisher;
use super::term_start::{readable, start};
use super::{HubError, records, stopped};
use crate::config::LEASE_TTL;
use crate::events::{BecameFollower, LeadershipAcquired, LeadershipLost};

/// Interval of keep-alives: two may be lost.
const KEEP_ALIVE_PERIOD: Duration = Duration::from_millis(1500);
/// Interval at which leases are expired in a store that does not do that by itself: a lease ends within a twentieth of
/// its time.
const EXPIRE_PERIOD: Duration = Duration::from_millis(250);
/// Time limit of resigning. If the store is unavailable, the term's lease expires.
const RESIGN_LIMIT: Duration = Duration::from_secs(1);

/// Hub that takes part in the election on its store, as follower or leader.
pub(super) struct ElectionCandidate<S> {
    pub(super) store: S,
    pub(super) publisher: Publisher,
    /// Value of the leader key, for operators.
    pub(super) name: String,
    pub(super) deployments: Vec<Deployment>,
    /// Epoch for a store that has none.
    pub(super) epoch_if_new: u64,
    pub(super) grace_periods: GracePeriods,
    pub(super) catalogue: Arc<Catalogue>,
    /// Lease of the candidacy or of the term.
    pub(super) lease: Mutex<Option<Lease>>,
}

impl<S: Store> ElectionCandidate<S> {
    /// Follows and leads until `stopping`, then resigns.
    pub(super) async fn run(self, stopping: watch::Receiver<bool>) -> Result<(), HubError> {
        let outcome = tokio::select! {
            outcome = self.run_terms() => outcome,
            () = self.expire_leases() => Ok(()),
            () = stopped(stopping) => Ok(()),
        };
        let lease = self.lease.lock().take();
        if let Some(lease) = lease {
            // The next leader need not wait until the lease expires.
            timeout(RESIGN_LIMIT, self.store.lease_revoke(lease)).await.ok();
        }
        outcome
    }

    async fn run_terms(&self) -> Result<(), HubError> {
        loop {
            let term = self.follow().await?;
            LeadershipAcquired { name: &self.name, created: term.created }.emit();
            let metrics = &self.publisher.metrics;
            metrics.leader.set(1);
            metrics.terms.add(1);
            self.lead(&term).await?;
            for of_the_leader in [
                &metrics.leader,
                &metrics.spokes,
                &metrics.several_job_queues,
                &metrics.mass_expiry,
                &metrics.uncovered_classes,
                &metrics.infeasible_placements,
            ] {
                of_the_leader.set(0);
            }
            BecameFollower { created: term.created }.emit();
            // If the term has not ended, other hubs need not wait for its end.
            timeout(RESIGN_LIMIT, self.store.lease_revoke(term.lease)).await.ok();
        }
    }

    /// Publishes what the leader writes, until this hub is elected.
    async fn follow(&self) -> Result<Term, HubError> {
        loop {
            let term = tokio::select! {
                term = self.campaign() => term,
                never = self.follow_prefix(keys::ROUTES) => Err(never),
                never = self.follow_prefix(keys::PLAN) => Err(never),
            };
            match term {
                Ok(term) => return Ok(term),
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                // The lease expired before the election was won.
                Err(StoreError::NoSuchLease(_)) => {}
                Err(error) => {
                    self.publisher.report_store(Some(&error));
                    sleep(STORE_RETRY_DELAY).await;
                }
            }
        }
    }

    async fn campaign(&self) -> Result<Term, StoreError> {
        let lease = self.candidacy().await?;
        let name = self.name.clone().into_bytes();
        tokio::select! {
            term = self.store.campaign(keys::LEADER, name, lease) => term,
            lost = self.keep_alive(lease) => Err(lost),
        }
    }

    /// Returns the lease of this candidate: the present one if it is still valid, else a new one. If this hub won the
    /// election with its present lease but the response was lost, the same lease finds that term.
    async fn candidacy(&self) -> Result<Lease, StoreError> {
        let had = *self.lease.lock();
        if let Some(lease) = had {
            match self.store.lease_keep_alive(lease, Instant::now()).await {
                Ok(_) => return Ok(lease),
                Err(StoreError::NoSuchLease(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let lease = self.store.lease_grant(LEASE_TTL, Instant::now()).await?;
        *self.lease.lock() = Some(lease);
        Ok(lease)
    }

    /// Publishes tables and plan parts under `prefix` until the store is closed.
    async fn follow_prefix(&self, prefix: &str) -> StoreError {
        loop {
            let range = match self.store.range(prefix).await {
                Ok(range) => range,
                Err(StoreError::Closed) => return StoreError::Closed,
                Err(error) => {
                    self.publisher.report_store(Some(&error));
                    sleep(STORE_RETRY_DELAY).await;
                    continue;
                }
            };
            self.publisher.report_store(None);
            range.entries.iter().for_each(|entry| self.publish_entry(entry));
            let mut changes = self.store.watch(prefix, range.revision + 1);
            // After a gap, the prefix is listed again.
            while let Ok(changes) = changes.next().await {
                for change in &changes {
                    match change {
                        Event::Put(entry) => self.publish_entry(entry),
                        Event::Delete { key, .. } => self.publisher.remove_shares(&keys::shares_of(key)),
                    }
                }
            }
        }
    }

    fn publish_entry(&self, entry: &scheduler_store::KeyValue) {
        if entry.key == keys::ROUTES
            && let Some(table) = readable(records::table(entry))
        {
            self.publisher.publish(table);
        }
        if entry.key.starts_with(keys::PLAN) {
            self.publisher.publish_plan(readable(records::part(entry)));
        }
    }

    /// Leads until the term is over.
    async fn lead(&self, term: &Term) -> Result<(), HubError> {
        let led = async {
            loop {
                let published = self.publisher.generation();
                match start(&self.store, term, &self.deployments, self.epoch_if_new, published).await {
                    Ok(Some(start)) => {
                        let controller = Controller::new(
                            start,
                            term.clone(),
                            self.grace_periods,
                            self.catalogue.clone(),
                            self.store.clone(),
                            &self.publisher,
                        );
                        return controller.run().await;
                    }
                    Ok(None) => return Ok(LeadershipLost::WriteRejected),
                    Err(HubError::Store(error)) if error != StoreError::Closed => {
                        self.publisher.report_store(Some(&error));
                        sleep(STORE_RETRY_DELAY).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let deposed = tokio::select! {
            outcome = led => outcome?,
            lost = self.keep_alive(term.lease) => match lost {
                StoreError::Closed => return Err(StoreError::Closed.into()),
                _ => LeadershipLost::LeaseExpired,
            },
        };
        deposed.emit();
        Ok(())
    }

    /// Keeps a lease alive; returns the reason when it has ended.
    async fn keep_alive(&self, lease: Lease) -> StoreError {
        let mut keep_alives = interval(KEEP_ALIVE_PERIOD);
        keep_alives.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            keep_alives.tick().await;
            match self.store.lease_keep_alive(lease, Instant::now()).await {
                Ok(_) => {}
                Err(error @ (StoreError::NoSuchLease(_) | StoreError::Closed)) => return error,
                // It is unknown whether the lease is still valid.
                Err(error) => self.publisher.report_store(Some(&error)),
            }
        }
    }

    /// Expires leases until cancelled, for stores that do not do that by themselves.
    async fn expire_leases(&self) {
        let mut timer = interval(EXPIRE_PERIOD);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            if let Err(error) = self.store.expire(Instant::now()).await {
                self.publisher.report_store(Some(&error));
            }
        }
    }
}

#[cfg(test)]
mod tests;
