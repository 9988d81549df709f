//! How many replicas a deployment should have in one region.
//!
//! Autoscalers of the field count what is in flight, which grows when replicas are slow to start as much as when there is
//! more to do. So while the first replica starts they order ten, and send them back when it has come. This one knows three
//! things that a count in flight does not: how fast work *arrives*, how fast one replica *does* it, and what is *already
//! ordered* and when it will be there. From these it projects the backlog to the moment at which a replica that is ordered
//! now would be ready:
//!
//! ```text
//! rate    = max(arrivals over 3 s, 0.8 · arrivals over 60 s)                       tokens per second
//! backlog = waiting + rate · start - what those that are ready or ordered do by then
//! wanted  = rate / (utilization · speed)                                           while the backlog stays small
//!         = rate / speed + backlog / (20 s · speed)                                else, if that is more
//! ```
//!
//! Up goes at once, bounded by [`up_max`]; down goes by what was needed at most in the last [`Scaling::scale_down_delay`]
//! (three starts, if that is longer), a quarter at a time, and not while somebody knows better ([`Brake`]). To zero goes what
//! nobody has asked for in [`Scaling::zero_after`].
//!
//! [`step`] turns that number into who comes, who goes and who stays; [`starts`] remembers how long replicas take to start and
//! [`restarts`] when one that died may be started again. The loop that looks and acts is `scheduler::scaling`.
//!
//! Pure: one [`Scaler::tick`] for each look, with what was seen. The knobs have the names that people know from Knative and
//! from hosted services; `simulated` runs this one beside such policies over the same arrivals.

pub mod restarts;
pub mod starts;
pub mod step;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use regions::Scaling;
use regions::ewma::Ewma;

/// How often to look.
pub const TICK: Duration = Duration::from_secs(2);

/// Half-lives of the averages of what arrives: averages over some 3 s and, by [`Scaling::autoscaling_window`], 60 s.
const FAST: Duration = Duration::from_secs(2);
/// The long average counts so much against the short one: a lull of seconds is not yet less traffic.
const SLOW_PERCENT: u32 = 80;
/// A backlog of so much arriving work is none: a batch or two.
const SMALL: Duration = Duration::from_millis(200);
/// In this time a backlog is worked off. Shorter orders more replicas for shorter.
const DRAIN: Duration = Duration::from_secs(20);
/// Fuller than this a replica is not left when others are let go.
const DOWN_UTILIZATION_PERCENT: u32 = 60;
/// Of those there are, so many go at a time.
const DOWN_PERCENT: u32 = 25;
/// Starts of a replica that must have passed before one is let go.
const STARTS_KEPT: u32 = 3;
/// What was needed is remembered in as many steps; longer delays are remembered more coarsely.
const REMEMBERED_MAX: usize = 512;

/// How many a look may order where there are `count`: two times as many and four more. From nothing that is enough for most,
/// and three looks later it is enough for anybody.
pub fn up_max(count: u32) -> u32 {
    count.saturating_mul(3).saturating_add(4)
}

/// Why none is let go, whatever traffic says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Brake {
    /// The hub is silent: nobody knows what it would want kept.
    HubSilent,
    /// Other regions' overflow comes here.
    TakesOverflow,
    /// A new version is being rolled out.
    RollsOut,
    /// A replica has died of late.
    Crashed,
}

impl Why {
    /// Every one there is.
    pub const ALL: [Why; 13] = [
        Why::Rate,
        Why::Backlog,
        Why::Concurrency,
        Why::Wake,
        Why::Floor,
        Why::Max,
        Why::Paced,
        Why::Kept,
        Why::Brake(Brake::HubSilent),
        Why::Brake(Brake::TakesOverflow),
        Why::Brake(Brake::RollsOut),
        Why::Brake(Brake::Crashed),
        Why::Zero,
    ];

    /// Its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Why::Rate => "rate",
            Why::Backlog => "backlog",
            Why::Concurrency => "concurrency",
            Why::Wake => "wake",
            Why::Floor => "floor",
            Why::Max => "max",
            Why::Paced => "paced",
            Why::Kept => "kept",
            Why::Brake(Brake::HubSilent) => "hub_silent",
            Why::Brake(Brake::TakesOverflow) => "takes_overflow",
            Why::Brake(Brake::RollsOut) => "rolls_out",
            Why::Brake(Brake::Crashed) => "crashed",
            Why::Zero => "zero",
        }
    }
}

/// What is seen at one look.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Tokens that have arrived since the last look, held ones included and retries not.
    pub arrived: u64,
    /// Tokens that wait, held ones included.
    pub backlog: u64,
    /// Requests that are under way or wait.
    pub in_flight: u32,
    /// Replicas that take work.
    pub ready: u32,
    /// Replicas that are on their way, each with the time until it is ready.
    pub ordered: Vec<Duration>,
    /// What one replica computes, in tokens per second; 0 until it is known.
    pub speed: u64,
    /// What nine of ten starts take at most.
    pub start: Duration,
    /// Never fewer, for now: what the hub wants there for the loss of another region, or a timetable.
    pub floor: u32,
    /// Why none may be let go.
    pub brake: Option<Brake>,
}

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// What arrives.
    Rate,
    /// What waits, and what will until one more is ready.
    Backlog,
    /// What is under way at a time.
    Concurrency,
    /// Somebody waits, and there is none.
    Wake,
    /// [`Scaling::min`], or [`Seen::floor`].
    Floor,
    /// [`Scaling::max`].
    Max,
    /// More is wanted than may be ordered at once.
    Paced,
    /// It was needed a while ago.
    Kept,
    /// None may be let go.
    Brake(Brake),
    /// Nobody has asked for long.
    Zero,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// So many, ready and ordered together.
    pub replicas: u32,
    /// What decided.
    pub why: Why,
}

/// One deployment in one region.
#[derive(Clone, Debug)]
pub struct Scaler {
    /// What people set, but for the timetable: that is a [floor](Seen::floor), since it is the wall clock's.
    knobs: Scaling,
    last: Instant,
    fast: Ewma,
    slow: Ewma,
    /// What was needed, each later one less than those before it: the first is the most of all that is remembered.
    needed: VecDeque<(Instant, u32)>,
    /// When somebody last asked.
    asked: Instant,
}

impl Scaler {
    /// Nothing has arrived yet.
    pub fn new(knobs: Scaling, now: Instant) -> Scaler {
        Scaler {
            last: now,
            fast: Ewma::new(FAST, 0.0, now),
            slow: Ewma::new(half_life(&knobs), 0.0, now),
            needed: VecDeque::new(),
            asked: now,
            knobs,
        }
    }

    /// What people set is another from now on; what was seen stays.
    pub fn set_knobs(&mut self, knobs: Scaling) {
        if knobs.autoscaling_window != self.knobs.autoscaling_window {
            self.slow = Ewma::new(half_life(&knobs), self.slow.get(), self.last);
        }
        self.knobs = knobs;
    }

    /// One look.
    pub fn tick(&mut self, seen: &Seen, now: Instant) -> Wanted {
        self.arrived(seen, now);
        let count = seen.ready.saturating_add(seen.ordered.len() as u32);
        // Averages never quite come to nothing. What nobody has asked for since is not wanted for the sake of their tail.
        let (needs, why) = if self.is_quiet(now) { (0, Why::Zero) } else { self.needs(seen) };
        self.remember(seen, now);
        let floor = self.knobs.min.max(seen.floor).min(self.knobs.max);
        if needs > count {
            let paced = needs.min(up_max(count));
            let (replicas, why) = if paced < needs { (paced, Why::Paced) } else { (needs, why) };
            return self.bounded(replicas, why, floor);
        }
        if self.is_quiet(now) && seen.brake.is_none() {
            return self.bounded(0, Why::Zero, floor);
        }
        let kept = self.needed.front().map_or(0, |(_, needed)| *needed).max(needs).max(1);
        if kept >= count {
            let why = if needs == count { why } else { Why::Kept };
            return self.bounded(count, why, floor);
        }
        if let Some(brake) = seen.brake {
            return self.bounded(count, Why::Brake(brake), floor);
        }
        let at_once = (count * DOWN_PERCENT / 100).max(1);
        self.bounded(kept.max(count - at_once), Why::Rate, floor)
    }

    fn bounded(&self, replicas: u32, why: Why, floor: u32) -> Wanted {
        if replicas > self.knobs.max {
            return Wanted { replicas: self.knobs.max, why: Why::Max };
        }
        if replicas < floor {
            return Wanted { replicas: floor, why: Why::Floor };
        }
        Wanted { replicas, why }
    }

    fn arrived(&mut self, seen: &Seen, now: Instant) {
        let passed = now.saturating_duration_since(self.last);
        if passed.is_zero() {
            return;
        }
        let rate = seen.arrived as f64 / passed.as_secs_f64();
        self.fast.add(rate, now);
        self.slow.add(rate, now);
        self.last = now;
        if seen.arrived > 0 || seen.backlog > 0 || seen.in_flight > 0 {
            self.asked = now;
        }
    }

    /// What arrives, in tokens per second.
    fn rate(&self) -> f64 {
        self.fast.get().max(self.slow.get() * f64::from(SLOW_PERCENT) / 100.0)
    }

    /// How many would do for what is seen now, whatever there are.
    fn needs(&self, seen: &Seen) -> (u32, Why) {
        let wake = u32::from(seen.backlog > 0 || seen.in_flight > 0 || seen.arrived > 0);
        let mut needs = (wake, Why::Wake);
        let mut or = |replicas: u32, why: Why| {
            if replicas > needs.0 {
                needs = (replicas, why);
            }
        };
        if seen.speed > 0 {
            let (rate, speed) = (self.rate(), seen.speed as f64);
            or(whole(rate * 100.0 / (f64::from(self.knobs.target_utilization) * speed)), Why::Rate);
            let start = seen.start.as_secs_f64();
            let ready = f64::from(seen.ready) * start;
            let ordered: f64 = seen.ordered.iter().map(|left| (start - left.as_secs_f64()).max(0.0)).sum();
            let then = seen.backlog as f64 + rate * start - (ready + ordered) * speed;
            if then > SMALL.as_secs_f64() * rate {
                or(whole(rate / speed + then / (DRAIN.as_secs_f64() * speed)), Why::Backlog);
            }
        }
        if let Some(target) = self.knobs.concurrency_target {
            let full = f64::from(target) * f64::from(self.knobs.target_utilization) / 100.0;
            or(whole(f64::from(seen.in_flight) / full), Why::Concurrency);
        }
        needs
    }

    /// Remembers what would have been enough, so that it is kept for a while.
    fn remember(&mut self, seen: &Seen, now: Instant) {
        let mut enough = u32::from(now == self.asked);
        if seen.speed > 0 {
            let full = f64::from(DOWN_UTILIZATION_PERCENT) / 100.0 * seen.speed as f64;
            enough = enough.max(whole(self.fast.get().max(self.slow.get()) / full));
        }
        if let Some(target) = self.knobs.concurrency_target {
            let full = f64::from(target) * f64::from(DOWN_UTILIZATION_PERCENT) / 100.0;
            enough = enough.max(whole(f64::from(seen.in_flight) / full));
        }
        let delay = self.knobs.scale_down_delay.max(seen.start * STARTS_KEPT);
        while self.needed.back().is_some_and(|(_, needed)| *needed <= enough) {
            self.needed.pop_back();
        }
        // Where there are too many steps the last one stands for this as well: it is more, so nothing is let go early.
        if self.needed.len() < REMEMBERED_MAX {
            self.needed.push_back((now, enough));
        } else if let Some((at, _)) = self.needed.back_mut() {
            *at = now;
        }
        while self.needed.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > delay) {
            self.needed.pop_front();
        }
    }

    /// Whether nobody has asked for so long that there may be none.
    fn is_quiet(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.asked);
        self.knobs.zero_after.is_some_and(|after| since >= after)
    }
}

/// That of the long average.
fn half_life(knobs: &Scaling) -> Duration {
    knobs.autoscaling_window.mul_f64(std::f64::consts::LN_2).max(FAST)
}

/// As many as it takes.
fn whole(replicas: f64) -> u32 {
    // What is a hair above a whole number is that number: sums of fractions are not exact.
    (replicas - 1e-6).ceil().clamp(0.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
