//! The hub: events in, commands out.
//!
//! What stands in the store arrives as events, and what is to be published leaves as a command. A table is *persisted*
//! before it is *published*: a hub that dies between the two has shown nobody a generation that its successor would
//! give out a second time. While one table is being persisted, changes gather, and the next table holds them all.
//!
//! The shell's loop is: wait for an event or for [`Hub::next_wakeup`], hand it in, then do what [`Hub::poll`] says until
//! it says nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::invariants;
use crate::publish::{following, publish};
use crate::registry::{Registry, Standing};
use crate::rollout::{Reader, Rollout};
use regions::{Deployment, DeploymentName, Generation, RegionId, RouteTable};

/// How long the hub waits before it asks a store again that did not take a table.
pub const PERSIST_RETRY: Duration = Duration::from_secs(1);

/// What the hub is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Everything that stands in the store, after the watch on it broke off.
    Listed {
        /// Every spoke.
        spokes: Vec<Standing>,
        /// Every deployment; nothing, if what the store holds cannot be read, and then those that are known stay.
        deployments: Option<BTreeMap<DeploymentName, Deployment>>,
        /// Who runs which table.
        readers: BTreeMap<Reader, Generation>,
    },
    /// A spoke registered, or said anew what is ready.
    SpokeStands(Standing),
    /// A spoke's lease ended, or the spoke ended it.
    SpokeGone {
        /// The region whose spoke it was.
        region: RegionId,
        /// Which of its starts.
        boot_id: u64,
    },
    /// These are all the deployments that there shall be.
    Wanted(BTreeMap<DeploymentName, Deployment>),
    /// A reader runs the table of this generation.
    Acknowledged(Reader, Generation),
    /// A reader was not heard of for too long.
    ReaderGone(Reader),
    /// The store holds this table: that of the last [`Command::Persist`], or of one before it of which the store said
    /// that it might not hold it.
    Persisted(RouteTable),
    /// It has not, and is to be asked again.
    NotPersisted,
}

/// What the hub wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Write this table to the store and say whether that succeeded.
    Persist(RouteTable),
    /// Give this table to whoever asks for one.
    Publish(RouteTable),
}

/// The epoch that has to begin before anything is published on this store, if one has to.
///
/// `known` is the table that a hub has seen before, `epoch` and `table` are what the store says now. A store that knows
/// less than it knew has been set back to an older copy of itself: what is counted up from there would be given out a
/// second time, or never be taken by whoever has the higher one. Whoever restores a store raises its epoch; where that
/// was forgotten, a hub that lives can tell.
pub fn epoch_to_begin(known: Option<Generation>, epoch: u64, table: Option<Generation>) -> Option<u64> {
    let known = known?;
    let went_back = epoch <= known.epoch && table.is_none_or(|table| table < known);
    went_back.then_some(known.epoch + 1)
}

/// What the hub finds in its store when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Of the store.
    pub epoch: u64,
    /// The table that was published last, if one ever was.
    pub table: Option<RouteTable>,
    /// Every spoke that is registered.
    pub spokes: Vec<Standing>,
    /// Every deployment; nothing, if what the store holds cannot be read: then those of the table are.
    pub deployments: Option<BTreeMap<DeploymentName, Deployment>>,
    /// Who runs which table.
    pub readers: BTreeMap<Reader, Generation>,
}

/// The hub.
#[derive(Debug)]
pub struct Hub {
    epoch: u64,
    /// What an operator wants; the table says it as far as everybody has heard of it.
    deployments: BTreeMap<DeploymentName, Deployment>,
    rollout: Rollout,
    registry: Registry,
    /// The table in the store.
    persisted: RouteTable,
    writing: Writing,
    /// [`Hub::persisted`] has not been given out yet.
    to_publish: bool,
}

/// Where the next table stands on its way into the store.
#[derive(Debug)]
enum Writing {
    Nothing,
    UnderWay,
    /// The store did not take one.
    Again {
        at: Instant,
    },
}

impl Hub {
    /// A hub that starts with what it finds. Regions of the last table have `lapsed_keep` to come forward.
    pub fn new(found: Found, lapsed_keep: Duration, rollout: Rollout, now: Instant) -> Hub {
        let Found { epoch, table, spokes, deployments, readers } = found;
        let to_publish = table.is_some();
        let persisted = table.unwrap_or_else(RouteTable::empty);
        let registry = Registry::new(&persisted.regions, lapsed_keep, now);
        let deployed = persisted.deployments.clone();
        let writing = Writing::Nothing;
        let mut hub = Hub { epoch, deployments: deployed, rollout, registry, persisted, writing, to_publish };
        hub.handle(Event::Listed { spokes, deployments, readers }, now);
        hub
    }

    /// Takes note of what happened.
    ///
    /// # Panics
    ///
    /// When told that the store holds a table which does not supersede the one before it.
    pub fn handle(&mut self, event: Event, now: Instant) {
        match event {
            Event::Listed { spokes, deployments, readers } => {
                self.registry.replace(spokes, now);
                self.rollout.replace(readers);
                if let Some(deployments) = deployments {
                    self.deployments = deployments;
                }
            }
            Event::SpokeStands(standing) => self.registry.put(standing, now),
            Event::SpokeGone { region, boot_id } => self.registry.remove(&region, boot_id, now),
            Event::Wanted(deployments) => self.deployments = deployments,
            Event::Acknowledged(reader, generation) => self.rollout.acknowledged(reader, generation),
            Event::ReaderGone(reader) => self.rollout.gone(&reader),
            Event::Persisted(table) => {
                invariants::monotone(self.persisted.generation, table.generation)
                    .expect("the store is written by this hub alone, and this hub counts upwards");
                self.rollout.persisted(&self.persisted, &table);
                self.persisted = table;
                self.to_publish = true;
                self.writing = Writing::Nothing;
            }
            Event::NotPersisted => self.writing = Writing::Again { at: now + PERSIST_RETRY },
        }
    }

    /// What is to be done next, if anything.
    pub fn poll(&mut self) -> Option<Command> {
        if std::mem::take(&mut self.to_publish) {
            return Some(Command::Publish(self.persisted.clone()));
        }
        match self.writing {
            Writing::UnderWay | Writing::Again { .. } => None,
            Writing::Nothing => {
                let next = following(&self.persisted, self.epoch);
                let doubt = self.registry.holds();
                let staged = self.rollout.stage(&self.deployments, &self.persisted, next, doubt);
                let next = publish(&self.persisted, self.epoch, self.registry.routes(), staged)?;
                self.writing = Writing::UnderWay;
                Some(Command::Persist(next))
            }
        }
    }

    /// Whether so many leases ended in one moment that their regions are held, the store being suspected.
    pub fn suspects_the_store(&self) -> bool {
        self.registry.holds()
    }

    /// When [`Hub::handle_timeout`] wants to be called, at the latest.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let again = match self.writing {
            Writing::Again { at } => Some(at),
            Writing::Nothing | Writing::UnderWay => None,
        };
        let settles = self.rollout.next_wakeup(&self.persisted);
        self.registry.next_expiry().into_iter().chain(again).chain(settles).min()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.registry.expire(now);
        self.rollout.tick(now);
        if let Writing::Again { at } = self.writing
            && at <= now
        {
            self.writing = Writing::Nothing;
        }
    }
}

#[cfg(test)]
mod tests;
