//! Outlier detection: a circuit breaker per target (region or replica).
//!
//! ```text
//!           2 timeouts or 3 failures in a row,       ejection time over           probe succeeds
//!           or 50 % of ≥ 20 requests in 1 s
//!  Closed ─────────────────────────────────▶ Ejected ─────────────────▶ HalfOpen ───────────────▶ Recovering
//!     ▲                                        ▲ ◀──── probe fails ───────┘                           │
//!     │                                        └───────────────── fails again ────────────────────────┤
//!     └──────────────────── traffic share has ramped up to 100 % ─────────────────────────────────────┘
//! ```
//!
//! Statistical outlier detectors (Envoy's success-rate ejection) need at least five hosts and never trigger on the two
//! to four targets of a typical deployment; these rules need one. To avoid ejecting a healthy fleet under a surge, when
//! all targets slow down together, a target is ejected only if at least one other target is healthy; at most a third of
//! the targets are ejected at a time, and never the last one. An ejected target is ranked last, not removed: residency
//! decides what is allowed, ejection only the order, so a request without alternatives is still sent.
//!
//! Time is an argument, and so is the random draw that keeps several gateways from readmitting a target in step.

use crate::outlier::{AttemptOutcome, OutlierEvidence};
use backoff::Backoff;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Consecutive first-byte timeouts before ejection. A single one may be packet loss.
pub const CONSECUTIVE_TIMEOUTS_MAX: u32 = 2;
/// Consecutive connection failures before ejection.
pub const CONSECUTIVE_FAILURES_MAX: u32 = 3;
/// Length of the window of the error-rate rule.
const ERROR_RATE_WINDOW: Duration = Duration::from_secs(1);
/// Minimum requests per window for the error-rate rule to apply.
pub const ERROR_RATE_MIN_REQUESTS: u32 = 20;
/// Durations of consecutive ejections. Independent of those of the client (`loadtest`), which ejects endpoints and not
/// regions.
const EJECTION_TIMES: Backoff = Backoff { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// Largest random change of an ejection's duration, in either direction.
const EJECTION_JITTER_PERMILLE: u64 = 200;
/// Time over which a recovering target's traffic share grows to 100 % (slow start).
const RAMP_UP: Duration = Duration::from_secs(4);
/// Traffic share at the start of the ramp.
const RAMP_UP_FROM_PERMILLE: u64 = 100;
/// Healthy time after which the ejection count is reset.
const EJECTION_COUNT_RESET: Duration = Duration::from_secs(60);
/// Consecutive ejections after which a probe with a slow response succeeds: the target is as slow as that from now on.
/// They last half a minute in total, in which an overloaded machine either recovers or does not.
const SLOW_PROBES_MAX: u32 = 5;
/// Time after which a probe without a reported outcome counts as over.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// A number of thousandths from 0 to 1000. Also the type of a random draw, in which every value is equally likely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permille(u16);

impl Permille {
    /// 1000 thousandths.
    pub const ALL: Permille = Permille(1000);

    /// Returns `thousandths`, limited to 1000.
    pub fn new(thousandths: u16) -> Permille {
        Permille(thousandths.min(1000))
    }

    /// Returns the number of thousandths.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// State of a target's circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Traffic flows as usual.
    Closed,
    /// Ranked last until `until`.
    Ejected {
        /// End of the ejection.
        until: Instant,
    },
    /// The ejection is over: one request is sent as a probe, and its outcome decides.
    HalfOpen {
        /// State of that request.
        probe: Probe,
    },
    /// Receives a growing share of its traffic.
    Recovering {
        /// Share of its usual requests.
        traffic_share: Permille,
    },
}

/// State of the probe of a half-open circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// No probe is in flight: the next request is the probe.
    Idle,
    /// The probe is in flight.
    InFlight,
}

impl BreakerState {
    /// Returns whether a request with random draw `draw` is sent to this target at normal rank.
    pub fn admits(self, draw: Permille) -> bool {
        match self {
            BreakerState::Closed | BreakerState::HalfOpen { probe: Probe::Idle } => true,
            BreakerState::Ejected { .. } | BreakerState::HalfOpen { probe: Probe::InFlight } => false,
            BreakerState::Recovering { traffic_share } => draw < traffic_share,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { since: Option<Instant> },
    Ejected { until: Instant },
    Probing { since: Instant },
    Recovering { since: Instant },
}

#[derive(Clone, Debug)]
struct Circuit {
    state: State,
    timeouts: u32,
    failures: u32,
    /// Ejections without [`EJECTION_COUNT_RESET`] of healthy time between them.
    ejections: u32,
    window: Option<ErrorWindow>,
}

#[derive(Clone, Debug)]
struct ErrorWindow {
    began: Instant,
    requests: u32,
    errors: u32,
}

/// Circuit breakers of all targets.
#[derive(Clone, Debug)]
pub struct Circuits<K> {
    circuits: BTreeMap<K, Circuit>,
    /// Targets whose circuit is not closed: none, most of the time, so that a routing decision looks up none.
    not_closed: BTreeSet<K>,
}

impl<K> Default for Circuits<K> {
    fn default() -> Circuits<K> {
        Circuits { circuits: BTreeMap::new(), not_closed: BTreeSet::new() }
    }
}

impl<K: Copy + Ord> Circuits<K> {
    /// Replaces the set of targets; the state of those that stay is kept.
    pub fn set_targets(&mut self, targets: impl IntoIterator<Item = K>) {
        let mut circuits = BTreeMap::new();
        for key in targets {
            circuits.insert(key, self.circuits.remove(&key).unwrap_or_else(Circuit::new));
        }
        self.circuits = circuits;
        self.not_closed.retain(|key| self.circuits.contains_key(key));
    }

    /// Changes the circuit of `key`, if it is one of the targets.
    fn change<T>(&mut self, key: K, change: impl FnOnce(&mut Circuit) -> T) -> Option<T> {
        let circuit = self.circuits.get_mut(&key)?;
        let result = change(circuit);
        match circuit.state {
            State::Closed { .. } => self.not_closed.remove(&key),
            State::Ejected { .. } | State::Probing { .. } | State::Recovering { .. } => {
                self.not_closed.insert(key)
            }
        };
        Some(result)
    }

    /// Returns the targets.
    pub fn targets(&self) -> impl Iterator<Item = K> {
        self.circuits.keys().copied()
    }

    /// Returns the state of `key`; `Closed` if it is not one of the targets.
    pub fn state(&self, key: K, now: Instant) -> BreakerState {
        if !self.not_closed.contains(&key) {
            return BreakerState::Closed;
        }
        self.circuits.get(&key).map_or(BreakerState::Closed, |circuit| circuit.state(now))
    }

    /// Records that a request is sent to `key`. Returns whether it is the probe; if so, the caller must report how it
    /// ended.
    pub fn began(&mut self, key: K, now: Instant) -> bool {
        let is_probe = self.state(key, now) == BreakerState::HalfOpen { probe: Probe::Idle };
        if is_probe {
            self.change(key, |circuit| circuit.state = State::Probing { since: now });
        }
        is_probe
    }

    /// Records that the probe of `key` ended without evidence: another request may be the probe.
    pub fn probe_cancelled(&mut self, key: K, now: Instant) {
        self.change(key, |circuit| {
            if let State::Probing { .. } = circuit.state {
                circuit.state = State::Ejected { until: now };
            }
        });
    }

    /// Records that a request to `key` lost a race against a hedge. That is no failure, but a probe that loses has
    /// failed.
    pub fn hedge_won(&mut self, key: K, draw: Permille, now: Instant) {
        self.change(key, |circuit| {
            if let State::Probing { .. } = circuit.state {
                circuit.eject(draw, now);
            }
        });
    }

    /// Returns whether a response slower than usual fails the probe of `key`. It does while a probe is in flight, until
    /// the target has been ejected more than [`SLOW_PROBES_MAX`] times in a row.
    pub fn probe_must_be_fast(&self, key: K, now: Instant) -> bool {
        let is_probing =
            |circuit: &&Circuit| circuit.state(now) == BreakerState::HalfOpen { probe: Probe::InFlight };
        self.circuits.get(&key).filter(is_probing).is_some_and(|circuit| circuit.ejections <= SLOW_PROBES_MAX)
    }

    /// Records evidence about `key`; `draw` jitters the ejection time. Returns whether it ejects `key`.
    pub fn record(&mut self, key: K, evidence: OutlierEvidence, draw: Permille, now: Instant) -> bool {
        let is_protected = !self.may_eject(key, now);
        let ejects = self.change(key, |circuit| circuit.record(evidence.outcome(), is_protected, draw, now));
        ejects.unwrap_or(false)
    }

    /// Returns whether `key` may be ejected: another target is healthy, and fewer than a third are ejected already.
    fn may_eject(&self, key: K, now: Instant) -> bool {
        let others = self.circuits.iter().filter(|(other, _)| **other != key);
        let limit = (self.circuits.len() / 3).max(1);
        let is_other_sound = self.circuits.keys().any(|other| *other != key && self.is_sound(*other, now));
        is_other_sound && others.filter(|(_, circuit)| circuit.is_ejected(now)).count() < limit
    }

    /// Returns whether `key` is not ejected and its last outcome was no failure.
    pub fn is_sound(&self, key: K, now: Instant) -> bool {
        let is_sound =
            |circuit: &Circuit| !circuit.is_ejected(now) && circuit.timeouts == 0 && circuit.failures == 0;
        self.circuits.get(&key).is_some_and(is_sound)
    }
}

impl Circuit {
    fn new() -> Circuit {
        Circuit { state: State::Closed { since: None }, timeouts: 0, failures: 0, ejections: 0, window: None }
    }

    fn is_ejected(&self, now: Instant) -> bool {
        match self.state(now) {
            BreakerState::Ejected { .. } | BreakerState::HalfOpen { .. } => true,
            BreakerState::Closed | BreakerState::Recovering { .. } => false,
        }
    }

    fn state(&self, now: Instant) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Ejected { until } if now < until => BreakerState::Ejected { until },
            State::Ejected { .. } => BreakerState::HalfOpen { probe: Probe::Idle },
            State::Probing { since } if now.saturating_duration_since(since) < PROBE_TIMEOUT => {
                BreakerState::HalfOpen { probe: Probe::InFlight }
            }
            State::Probing { .. } => BreakerState::HalfOpen { probe: Probe::Idle },
            State::Recovering { since } => {
                let elapsed_ms = now.saturating_duration_since(since).as_millis() as u64;
                let gained = (1000 - RAMP_UP_FROM_PERMILLE) * elapsed_ms / RAMP_UP.as_millis() as u64;
                match u16::try_from(RAMP_UP_FROM_PERMILLE + gained) {
                    Ok(share) if share < 1000 => {
                        BreakerState::Recovering { traffic_share: Permille::new(share) }
                    }
                    Ok(_) | Err(_) => BreakerState::Closed,
                }
            }
        }
    }

    /// Records an outcome; returns whether it ejects the target. A protected target is not ejected.
    fn record(&mut self, outcome: AttemptOutcome, is_protected: bool, draw: Permille, now: Instant) -> bool {
        let is_bad = self.count(outcome, now);
        match self.state {
            State::Closed { .. } | State::Recovering { .. } if is_bad && !is_protected => {}
            State::Probing { .. } => match outcome {
                AttemptOutcome::Success | AttemptOutcome::ServerError => {
                    self.state = State::Recovering { since: now };
                    return false;
                }
                AttemptOutcome::ConnectionFailure | AttemptOutcome::Timeout => {}
            },
            // A request that was sent before the ejection, or as a last resort, is no new evidence.
            State::Ejected { .. } | State::Closed { .. } | State::Recovering { .. } => return false,
        }
        self.eject(draw, now);
        true
    }

    /// Counts an outcome; returns whether it is sufficient for an ejection.
    fn count(&mut self, outcome: AttemptOutcome, now: Instant) -> bool {
        self.settle(now);
        let expired = |window: &ErrorWindow| now.saturating_duration_since(window.began) >= ERROR_RATE_WINDOW;
        if self.window.as_ref().is_none_or(expired) {
            self.window = Some(ErrorWindow { began: now, requests: 0, errors: 0 });
        }
        let window = self.window.as_mut().expect("it was just made");
        window.requests = window.requests.saturating_add(1);
        match outcome {
            AttemptOutcome::Success => (self.timeouts, self.failures) = (0, 0),
            AttemptOutcome::ServerError => window.errors += 1,
            AttemptOutcome::ConnectionFailure => {
                window.errors += 1;
                self.failures = self.failures.saturating_add(1);
            }
            AttemptOutcome::Timeout => {
                window.errors += 1;
                self.timeouts = self.timeouts.saturating_add(1);
            }
        }
        let error_rate_exceeded =
            window.requests >= ERROR_RATE_MIN_REQUESTS && 2 * window.errors >= window.requests;
        self.timeouts >= CONSECUTIVE_TIMEOUTS_MAX
            || self.failures >= CONSECUTIVE_FAILURES_MAX
            || (error_rate_exceeded && outcome != AttemptOutcome::Success)
    }

    /// Closes the breaker after the ramp, and resets the ejection count after [`EJECTION_COUNT_RESET`].
    fn settle(&mut self, now: Instant) {
        if matches!(self.state, State::Recovering { .. }) && self.state(now) == BreakerState::Closed {
            self.state = State::Closed { since: Some(now) };
        }
        if let State::Closed { since: Some(since) } = self.state
            && now.saturating_duration_since(since) >= EJECTION_COUNT_RESET
        {
            self.state = State::Closed { since: None };
            self.ejections = 0;
        }
    }

    fn eject(&mut self, draw: Permille, now: Instant) {
        let duration = EJECTION_TIMES.delay(self.ejections.saturating_add(1));
        let span_ms = duration.as_millis() as u64 * EJECTION_JITTER_PERMILLE / 1000;
        let jitter = Duration::from_millis(2 * span_ms * u64::from(draw.get()) / 1000);
        self.state = State::Ejected { until: now + duration - Duration::from_millis(span_ms) + jitter };
        self.ejections = self.ejections.saturating_add(1);
        (self.timeouts, self.failures, self.window) = (0, 0, None);
    }
}

#[cfg(test)]
mod tests;
