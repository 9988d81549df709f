//! Who is left alone for a while, and how they come back.
//!
//! ```text
//!           2 misses or 3 failures in a row,                 its time is over              it answers
//!           or half of 20 in a second
//!  Closed ──────────────────────────────────▶ Ejected ──────────────────────▶ on trial ─────────────▶ Returning
//!     ▲                                          ▲ ◀── it does not answer ────────┘                       │
//!     │                                          └────────── again ───────────────────────────────────────┤
//!     └──────────────────────────── its share has grown back to the whole ────────────────────────────────┘
//! ```
//!
//! The statistical detectors of the field compare at least five hosts and so never fire on the two to four that there
//! are here; these rules need one. And breakers of the field open on a healthy fleet when load makes everybody slow at
//! once; so nobody is ejected unless *somebody else is above suspicion*, which under a surge nobody is, never more than a
//! third of them, and never the last. Being ejected means to be asked after everybody else: it is a preference among those
//! whom the residency policy permits, so that a request with nowhere else to go still has somewhere.
//!
//! Time, and the chance that keeps several gateways from returning in step, are arguments.

use crate::outlier::{Evidence, Seen};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// First bytes missed in a row: one may be the network's, two are not.
pub const MISSES_MAX: u32 = 2;
/// Failures in a row.
pub const FAILURES_MAX: u32 = 3;
/// How long failures are counted together.
const WINDOW: Duration = Duration::from_secs(1);
/// Fewer than this in one window say nothing about a share.
pub const WINDOW_ASKED_MIN: u32 = 20;
/// The first ejection; each further one lasts twice as long.
const EJECTED_FIRST: Duration = Duration::from_millis(500);
/// The longest.
const EJECTED_MAX: Duration = Duration::from_secs(30);
/// By how much chance shortens or prolongs an ejection.
const JITTER_PERMILLE: u64 = 200;
/// How long somebody who is back takes to be given a whole share again.
const RETURN_LASTS: Duration = Duration::from_secs(4);
/// The share with which they begin.
const RETURN_FROM_PERMILLE: u64 = 100;
/// How long somebody has to be well before their next ejection is a first one again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);
/// Ejections in a row after which somebody who answers slowly on trial is believed to be as slow as that from now on: half a
/// minute, in which a machine that is short of breath has been helped, or has not.
const SLOW_TRIALS_MAX: u32 = 5;
/// A trial whose end nobody told is over after this.
const TRIAL_MAX: Duration = Duration::from_secs(30);

/// A number of thousandths from 0 to 1000. Also how chance is given: every value equally likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permille(u16);

impl Permille {
    /// The whole.
    pub const ALL: Permille = Permille(1000);

    /// So many thousandths, and no more than all of them.
    pub fn new(thousandths: u16) -> Permille {
        Permille(thousandths.min(1000))
    }

    /// How many thousandths.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// How somebody stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Like everybody.
    Closed,
    /// Left alone until then.
    Ejected {
        /// When one request may try.
        until: Instant,
    },
    /// Its time is over: one request may try.
    MayBeTried,
    /// One request is trying.
    OnTrial,
    /// It takes this share of what it would take.
    Returning {
        /// Of its requests.
        share: Permille,
    },
}

impl Standing {
    /// Whether a request goes there as if nothing had been; `chance` is the request's own.
    pub fn takes(self, chance: Permille) -> bool {
        match self {
            Standing::Closed | Standing::MayBeTried => true,
            Standing::Ejected { .. } | Standing::OnTrial => false,
            Standing::Returning { share } => chance < share,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { since: Option<Instant> },
    Ejected { until: Instant },
    OnTrial { since: Instant },
    Returning { since: Instant },
}

#[derive(Clone, Debug)]
struct Circuit {
    state: State,
    misses: u32,
    failures: u32,
    /// Ejections that followed each other without a minute of health between them.
    ejections: u32,
    window: Option<Window>,
}

#[derive(Clone, Debug)]
struct Window {
    began: Instant,
    asked: u32,
    bad: u32,
}

/// The standing of everybody who may be asked.
#[derive(Clone, Debug)]
pub struct Circuits<K> {
    circuits: BTreeMap<K, Circuit>,
}

impl<K> Default for Circuits<K> {
    fn default() -> Circuits<K> {
        Circuits { circuits: BTreeMap::new() }
    }
}

impl<K: Copy + Ord> Circuits<K> {
    /// Keeps exactly these from now on, and what is known of those who stay.
    pub fn watch(&mut self, wanted: impl IntoIterator<Item = K>) {
        let mut circuits = BTreeMap::new();
        for key in wanted {
            circuits.insert(key, self.circuits.remove(&key).unwrap_or_else(Circuit::new));
        }
        self.circuits = circuits;
    }

    /// Whoever is watched.
    pub fn watched(&self) -> impl Iterator<Item = K> {
        self.circuits.keys().copied()
    }

    /// How `key` stands; whoever is not watched stands like everybody.
    pub fn standing(&self, key: K, now: Instant) -> Standing {
        self.circuits.get(&key).map_or(Standing::Closed, |circuit| circuit.standing(now))
    }

    /// A request is sent to `key`. If it may be tried, this is the trial, and whoever sends it says how it ended.
    pub fn began(&mut self, key: K, now: Instant) -> bool {
        match self.circuits.get_mut(&key) {
            Some(circuit) if circuit.standing(now) == Standing::MayBeTried => {
                circuit.state = State::OnTrial { since: now };
                true
            }
            Some(_) | None => false,
        }
    }

    /// The trial of `key` ended without saying anything about it: another may try.
    pub fn given_up(&mut self, key: K, now: Instant) {
        if let Some(circuit) = self.circuits.get_mut(&key)
            && let State::OnTrial { .. } = circuit.state
        {
            circuit.state = State::Ejected { until: now };
        }
    }

    /// A request that was sent to `key` was overtaken by one that was sent later elsewhere. That is no failure; but a
    /// trial it is not.
    pub fn overtaken(&mut self, key: K, chance: Permille, now: Instant) {
        if let Some(circuit) = self.circuits.get_mut(&key)
            && let State::OnTrial { .. } = circuit.state
        {
            circuit.eject(chance, now);
        }
    }

    /// Whether an answer that took longer than usual is no answer for `key`: it is on trial, and has not shown yet often enough
    /// that this is how long it takes now.
    pub fn has_to_be_quick(&self, key: K, now: Instant) -> bool {
        let on_trial = |circuit: &&Circuit| circuit.standing(now) == Standing::OnTrial;
        self.circuits.get(&key).filter(on_trial).is_some_and(|circuit| circuit.ejections <= SLOW_TRIALS_MAX)
    }

    /// Counts what a request to `key` says about it. `chance` spreads the return. True when `key` is ejected for it.
    pub fn saw(&mut self, key: K, evidence: Evidence, chance: Permille, now: Instant) -> bool {
        let seen = evidence.seen();
        let spared = !self.may_eject(key, now);
        let Some(circuit) = self.circuits.get_mut(&key) else {
            return false;
        };
        let bad = circuit.count(seen, now);
        match circuit.state {
            State::Closed { .. } | State::Returning { .. } if bad && !spared => {}
            State::OnTrial { .. } => match seen {
                Seen::Answered | Seen::Faulted => {
                    circuit.state = State::Returning { since: now };
                    return false;
                }
                Seen::Failed | Seen::Missed => {}
            },
            // A request that was sent before the ejection, or as a last resort, says nothing new.
            State::Ejected { .. } | State::Closed { .. } | State::Returning { .. } => return false,
        }
        circuit.eject(chance, now);
        true
    }

    /// Whether `key` could be ejected: somebody else is above suspicion, and fewer than a third are ejected already.
    fn may_eject(&self, key: K, now: Instant) -> bool {
        let out = |circuit: &Circuit| match circuit.standing(now) {
            Standing::Ejected { .. } | Standing::MayBeTried | Standing::OnTrial => true,
            Standing::Closed | Standing::Returning { .. } => false,
        };
        let others = || self.circuits.iter().filter(|(other, _)| **other != key).map(|(_, circuit)| circuit);
        let well = others().any(|circuit| !out(circuit) && circuit.misses == 0 && circuit.failures == 0);
        let room = (self.circuits.len() / 3).max(1);
        well && others().filter(|circuit| out(circuit)).count() < room
    }
}

impl Circuit {
    fn new() -> Circuit {
        Circuit { state: State::Closed { since: None }, misses: 0, failures: 0, ejections: 0, window: None }
    }

    fn standing(&self, now: Instant) -> Standing {
        match self.state {
            State::Closed { .. } => Standing::Closed,
            State::Ejected { until } if now < until => Standing::Ejected { until },
            State::Ejected { .. } => Standing::MayBeTried,
            State::OnTrial { since } if now.saturating_duration_since(since) < TRIAL_MAX => Standing::OnTrial,
            State::OnTrial { .. } => Standing::MayBeTried,
            State::Returning { since } => {
                let back = now.saturating_duration_since(since).as_millis() as u64;
                let grown = (1000 - RETURN_FROM_PERMILLE) * back / RETURN_LASTS.as_millis() as u64;
                match u16::try_from(RETURN_FROM_PERMILLE + grown) {
                    Ok(share) if share < 1000 => Standing::Returning { share: Permille::new(share) },
                    Ok(_) | Err(_) => Standing::Closed,
                }
            }
        }
    }

    /// Counts; whether it is now enough.
    fn count(&mut self, seen: Seen, now: Instant) -> bool {
        self.settle(now);
        let expired = |window: &Window| now.saturating_duration_since(window.began) >= WINDOW;
        if self.window.as_ref().is_none_or(expired) {
            self.window = Some(Window { began: now, asked: 0, bad: 0 });
        }
        let window = self.window.as_mut().expect("it was just made");
        window.asked = window.asked.saturating_add(1);
        match seen {
            Seen::Answered => (self.misses, self.failures) = (0, 0),
            Seen::Faulted => window.bad += 1,
            Seen::Failed => {
                window.bad += 1;
                self.failures = self.failures.saturating_add(1);
            }
            Seen::Missed => {
                window.bad += 1;
                self.misses = self.misses.saturating_add(1);
            }
        }
        let many = window.asked >= WINDOW_ASKED_MIN && 2 * window.bad >= window.asked;
        self.misses >= MISSES_MAX || self.failures >= FAILURES_MAX || (many && seen != Seen::Answered)
    }

    /// Somebody who came back long enough ago is like everybody, and after a while nobody remembers.
    fn settle(&mut self, now: Instant) {
        if matches!(self.state, State::Returning { .. }) && self.standing(now) == Standing::Closed {
            self.state = State::Closed { since: Some(now) };
        }
        if let State::Closed { since: Some(since) } = self.state
            && now.saturating_duration_since(since) >= FORGOTTEN_AFTER
        {
            self.state = State::Closed { since: None };
            self.ejections = 0;
        }
    }

    fn eject(&mut self, chance: Permille, now: Instant) {
        let lasts = EJECTED_FIRST.saturating_mul(1 << self.ejections.min(16)).min(EJECTED_MAX);
        let span_ms = lasts.as_millis() as u64 * JITTER_PERMILLE / 1000;
        let jitter = Duration::from_millis(2 * span_ms * u64::from(chance.get()) / 1000);
        self.state = State::Ejected { until: now + lasts - Duration::from_millis(span_ms) + jitter };
        self.ejections = self.ejections.saturating_add(1);
        (self.misses, self.failures, self.window) = (0, 0, None);
    }
}

#[cfg(test)]
mod tests;
