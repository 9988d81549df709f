//! Following and leading, by turns.
//!
//! ```text
//!             ┌────────── the term is won ──────────┐
//!             │                                     ▼
//!   follow: gives out what stands in `routes`    lead: writes it, and gives it out
//!             ▲                                     │
//!             └── the lease is gone, a guard failed ┘
//! ```
//!
//! A hub that does not lead serves everybody all the same: it takes registrations, and gives out the table and the plan
//! that the leader has written. So it does not matter whom a gateway or a spoke asks.
//!
//! A leader that has been deposed need not know it, having slept or being cut off: its writes are guarded by the key of its
//! term and fail. When it learns of that it follows again. It does *not* step down for a store that it cannot reach:
//! then nobody is known to lead, and if somebody does, the guard sees to the rest.

use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use regions::{Catalogue, Deployment};
use scheduler_core::wire::keys;
use scheduler_store::{Event, Lease, Store, StoreError, Term, Watch};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::board::Board;
use super::keeper::{Keeper, Patience};
use super::start::{readable, start};
use super::{HubError, records, told};
use crate::events::{Deposed, Leading, StoppedLeading};

/// How long a term stands without a sign of life, and so how long nobody leads when a leader dies. The same as a spoke's
/// registration, and for the same reasons.
const TERM_TTL: Duration = Duration::from_secs(5);
/// How often a leader gives one: two may be lost.
const SIGN_OF_LIFE: Duration = Duration::from_millis(1500);
/// How often leases are looked through, in a store that does not do that by itself: often enough that one ends within a
/// twentieth of its time.
const LOOK_PERIOD: Duration = Duration::from_millis(250);
/// After a call that failed.
const RETRY: Duration = Duration::from_secs(1);
/// How long resigning may take. If the store is away, the term runs out by itself.
const RESIGN_LIMIT: Duration = Duration::from_secs(1);

/// A hub on its store, leading or not.
pub(super) struct Candidate<S> {
    pub(super) store: S,
    pub(super) board: Board,
    /// What others find when they look who leads.
    pub(super) name: String,
    pub(super) deployments: Vec<Deployment>,
    /// The epoch of a store that has none.
    pub(super) epoch_if_new: u64,
    pub(super) patience: Patience,
    pub(super) catalogue: Arc<Catalogue>,
    /// The lease of the candidacy or of the term.
    pub(super) lease: Mutex<Option<Lease>>,
}

impl<S: Store> Candidate<S> {
    /// Follows and leads until `stopping` says so, then resigns.
    pub(super) async fn stand(self, stopping: watch::Receiver<bool>) -> Result<(), HubError> {
        let outcome = tokio::select! {
            outcome = self.by_turns() => outcome,
            () = self.end_leases() => Ok(()),
            () = told(stopping) => Ok(()),
        };
        let lease = self.lease.lock().take();
        if let Some(lease) = lease {
            // Whoever comes next need not wait for the lease to run out.
            timeout(RESIGN_LIMIT, self.store.lease_revoke(lease)).await.ok();
        }
        outcome
    }

    async fn by_turns(&self) -> Result<(), HubError> {
        loop {
            let term = self.follow().await?;
            Leading { name: &self.name, created: term.created }.emit();
            self.lead(&term).await?;
            StoppedLeading { created: term.created }.emit();
            // If it stands after all, others must not wait for it.
            timeout(RESIGN_LIMIT, self.store.lease_revoke(term.lease)).await.ok();
        }
    }

    /// Gives out what others publish, until the term is this hub's.
    async fn follow(&self) -> Result<Term, HubError> {
        loop {
            let term = tokio::select! {
                term = self.campaign() => term,
                never = self.read_along(keys::ROUTES) => Err(never),
                never = self.read_along(keys::PLAN) => Err(never),
            };
            match term {
                Ok(term) => return Ok(term),
                Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
                // It ran out before the term came.
                Err(StoreError::NoSuchLease(_)) => {}
                Err(error) => {
                    self.board.note(Some(&error));
                    sleep(RETRY).await;
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

    /// The lease of this candidate: the one that it has, if that stands. A term that began under it without a word reaching
    /// here is found by it.
    async fn candidacy(&self) -> Result<Lease, StoreError> {
        let had = *self.lease.lock();
        if let Some(lease) = had {
            match self.store.lease_keep_alive(lease, Instant::now()).await {
                Ok(_) => return Ok(lease),
                Err(StoreError::NoSuchLease(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let lease = self.store.lease_grant(TERM_TTL, Instant::now()).await?;
        *self.lease.lock() = Some(lease);
        Ok(lease)
    }

    /// Gives out every table or part of a plan that stands under `prefix`, for ever; or says that the store is closed.
    async fn read_along(&self, prefix: &str) -> StoreError {
        loop {
            let range = match self.store.range(prefix).await {
                Ok(range) => range,
                Err(StoreError::Closed) => return StoreError::Closed,
                Err(error) => {
                    self.board.note(Some(&error));
                    sleep(RETRY).await;
                    continue;
                }
            };
            self.board.note(None);
            range.entries.iter().for_each(|entry| self.give_out(entry));
            let mut changes = self.store.watch(prefix, range.revision + 1);
            // After a gap everything is read anew.
            while let Ok(changes) = changes.next().await {
                for change in &changes {
                    match change {
                        Event::Put(entry) => self.give_out(entry),
                        Event::Delete { .. } => {}
                    }
                }
            }
        }
    }

    fn give_out(&self, entry: &scheduler_store::KeyValue) {
        if entry.key == keys::ROUTES
            && let Some(table) = readable(records::table(entry))
        {
            self.board.publish(table);
        }
        if entry.key.starts_with(keys::PLAN) {
            self.board.publish_plan(readable(records::part(entry)));
        }
    }

    /// Leads, until the term is over.
    async fn lead(&self, term: &Term) -> Result<(), HubError> {
        let led = async {
            loop {
                let known = self.board.generation();
                match start(&self.store, term, &self.deployments, self.epoch_if_new, known).await {
                    Ok(Some(start)) => {
                        let keeper = Keeper::new(
                            start,
                            term.clone(),
                            self.patience,
                            self.catalogue.clone(),
                            self.store.clone(),
                            &self.board,
                        );
                        return keeper.keep().await;
                    }
                    Ok(None) => return Ok(Deposed::Refused),
                    Err(HubError::Store(error)) if error != StoreError::Closed => {
                        self.board.note(Some(&error));
                        sleep(RETRY).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let deposed = tokio::select! {
            outcome = led => outcome?,
            lost = self.keep_alive(term.lease) => match lost {
                StoreError::Closed => return Err(StoreError::Closed.into()),
                _ => Deposed::LeaseGone,
            },
        };
        deposed.emit();
        Ok(())
    }

    /// Keeps a lease alive for as long as it stands, and says why it does not any longer.
    async fn keep_alive(&self, lease: Lease) -> StoreError {
        let mut signs = interval(SIGN_OF_LIFE);
        signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            signs.tick().await;
            match self.store.lease_keep_alive(lease, Instant::now()).await {
                Ok(_) => {}
                Err(error @ (StoreError::NoSuchLease(_) | StoreError::Closed)) => return error,
                // Whether it stands is not known.
                Err(error) => self.board.note(Some(&error)),
            }
        }
    }

    /// Ends leases whose time is over, for ever, where a store does not do that by itself.
    async fn end_leases(&self) {
        let mut look = interval(LOOK_PERIOD);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            if let Err(error) = self.store.expire(Instant::now()).await {
                self.board.note(Some(&error));
            }
        }
    }
}

#[cfg(test)]
mod tests;
