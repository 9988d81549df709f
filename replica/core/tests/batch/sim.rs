//! A replica in simulated time: callers, the planner, and an engine whose batches cost `a + b · tokens`.
//!
//! Events are ordered by their time and then by their number, chance comes from a seed, and nothing looks at a clock: a
//! run is the same whenever it is run. What a shell would do (ask the planner when the engine is free or something came,
//! wake up when a window ends) is done here in the same order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use replica_core::batch::{Batch, BatchPlanner, BatchRequestId, BatchSettings, NextAction, QueueFull};
use replica_core::cost::BatchCost;
use replica_core::priority::{PerPriority, Priority};

use crate::{Text, origin};

/// Chance from a seed (SplitMix64).
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    pub(crate) fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + (self.part() * (high - low + 1) as f64) as u64
    }
}

/// How requests of one kind come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coming {
    /// So many callers, each again so many seconds (give or take a fifth) after its answer.
    Closed { callers: usize, return_time: f64 },
    /// So many a second, whatever becomes of them.
    Open { per_second: f64 },
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) coming: Coming,
    pub(crate) priority: Priority,
    pub(crate) inputs: u64,
    /// Tokens of an input, from and to.
    pub(crate) tokens: (u64, u64),
    /// Seconds to the deadline, from and to.
    pub(crate) life: Option<(f64, f64)>,
}

impl Source {
    pub(crate) fn lookups(coming: Coming) -> Source {
        Source { coming, priority: Priority::Interactive, inputs: 1, tokens: (8, 16), life: None }
    }

    pub(crate) fn backfill(callers: usize) -> Source {
        let coming = Coming::Closed { callers, return_time: 0.005 };
        Source { coming, priority: Priority::Bulk, inputs: 64, tokens: (20, 128), life: None }
    }
}

/// A planner that is broken on purpose, so that a test can show that it would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    No,
    /// There is one priority.
    OnePriority,
    /// Nobody's deadline is told.
    NoDeadlines,
    /// Every batch waits for a timer first.
    Timer(Duration),
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) source: usize,
    pub(crate) came: f64,
    /// When it was answered; none if it expired.
    pub(crate) done: Option<f64>,
}

/// A batch that ran, or a step of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran {
    pub(crate) priority: Priority,
    pub(crate) began: f64,
    pub(crate) took: f64,
    pub(crate) tokens: u64,
}

/// What was seen.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) ran: Vec<Ran>,
    pub(crate) refused: Vec<(f64, QueueFull)>,
    /// Seconds in which the engine was idle and something waited.
    pub(crate) idle_while_waiting: f64,
    pub(crate) max_requested: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Comes {
        source: usize,
    },
    EngineDone,
    /// Of a batch of bulk on an engine that lets others in, or of what was let in.
    StepEnds,
    WindowEnds,
}

pub(crate) struct Sim {
    planner: BatchPlanner<Text>,
    engine: BatchCost,
    /// Steps of a batch of bulk, between which lookups are let in.
    steps: u32,
    sources: Vec<Source>,
    broken: Broken,
    chance: Chance,
    origin: Instant,
    now: f64,
    /// Nanoseconds, so that they can be ordered.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    numbers: u64,
    open: BTreeMap<BatchRequestId, (usize, f64)>,
    running: Option<Batch<Text>>,
    /// Of its steps, those to come and the seconds of each.
    to_come: (u32, f64),
    /// What was let in.
    beside: Option<Batch<Text>>,
    /// When the engine could have begun, of a batch that waits.
    could_begin: Option<f64>,
    report: Report,
}

impl Sim {
    pub(crate) fn new(settings: BatchSettings, engine: BatchCost, max_queue_tokens: u64) -> Sim {
        Sim {
            planner: BatchPlanner::new(settings, max_queue_tokens),
            engine,
            steps: 1,
            sources: Vec::new(),
            broken: Broken::No,
            chance: Chance(1),
            origin: origin(),
            now: 0.0,
            events: BinaryHeap::new(),
            numbers: 0,
            open: BTreeMap::new(),
            running: None,
            to_come: (0, 0.0),
            beside: None,
            could_begin: None,
            report: Report::default(),
        }
    }

    pub(crate) fn broken(mut self, broken: Broken) -> Sim {
        self.broken = broken;
        self
    }

    /// Lets lookups in between so many steps of a batch of bulk.
    pub(crate) fn in_steps(mut self, steps: u32) -> Sim {
        self.steps = steps;
        self
    }

    pub(crate) fn seed(mut self, seed: u64) -> Sim {
        self.chance = Chance(seed);
        self
    }

    pub(crate) fn with(mut self, source: Source) -> Sim {
        self.sources.push(source);
        let number = self.sources.len() - 1;
        match source.coming {
            Coming::Closed { callers, .. } => {
                for _ in 0..callers {
                    let first = self.chance.part() * 0.01;
                    self.at(first, Event::Comes { source: number });
                }
            }
            Coming::Open { per_second } => {
                let first = self.gap(per_second);
                self.at(first, Event::Comes { source: number });
            }
        }
        self
    }

    /// Runs for so many seconds.
    pub(crate) fn run(mut self, seconds: f64) -> Report {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now = at as f64 / 1e9;
            if self.now > seconds {
                break;
            }
            match event {
                Event::Comes { source } => self.comes(source),
                Event::EngineDone => self.engine_done(),
                Event::StepEnds => self.step_ends(),
                Event::WindowEnds => {}
            }
            self.plan();
        }
        self.report
    }

    fn instant(&self) -> Instant {
        self.origin + Duration::from_secs_f64(self.now)
    }

    fn at(&mut self, time: f64, event: Event) {
        self.numbers += 1;
        self.events.push(Reverse(((time * 1e9).round() as u64, self.numbers, event)));
    }

    /// To the next of a Poisson process.
    fn gap(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.chance.part()).ln() / per_second
    }

    fn comes(&mut self, number: usize) {
        let Source { coming, priority, inputs, tokens, life } = self.sources[number];
        if let Coming::Open { per_second } = coming {
            let next = self.now + self.gap(per_second);
            self.at(next, Event::Comes { source: number });
        }
        let inputs = (0..inputs)
            .map(|_| {
                self.numbers += 1;
                Text::new(self.numbers, self.chance.between(tokens.0, tokens.1))
            })
            .collect();
        let life = life.map(|(from, to)| from + (to - from) * self.chance.part());
        let deadline = life
            .filter(|_| self.broken != Broken::NoDeadlines)
            .map(|life| self.instant() + Duration::from_secs_f64(life));
        let priority = if self.broken == Broken::OnePriority { Priority::Bulk } else { priority };
        match self.planner.push(priority, inputs, deadline, self.instant()) {
            Ok(admitted) => {
                self.open.insert(admitted.request, (number, self.now));
            }
            Err(full) => {
                self.report.refused.push((self.now, full));
                let wait = full.wait.unwrap_or(Duration::from_millis(100)).as_secs_f64();
                if let Coming::Closed { .. } = coming {
                    self.at(self.now + wait, Event::Comes { source: number });
                }
            }
        }
        let PerPriority { interactive, bulk } = self.planner.loads();
        self.report.max_requested =
            self.report.max_requested.max(interactive.requested.tokens + bulk.requested.tokens);
    }

    fn engine_done(&mut self) {
        let batch = self.running.take().expect("a batch that ran");
        self.finished(&batch);
    }

    fn step_ends(&mut self) {
        match self.beside.take() {
            Some(beside) => self.finished(&beside),
            None => self.to_come.0 -= 1,
        }
        if self.to_come.0 == 0 {
            return self.engine_done();
        }
        let plan = self.planner.next_between_steps(self.instant());
        for (request, _) in plan.expired {
            self.ends(request, None);
        }
        match plan.next {
            NextAction::Compute(batch) => {
                let tokens = batch.size().tokens;
                let took = self.engine.time(tokens).as_secs_f64();
                self.begins(batch.priority, tokens, took, Event::StepEnds);
                self.beside = Some(batch);
            }
            NextAction::Wait(_) | NextAction::Idle => self.step_begins(),
        }
    }

    fn step_begins(&mut self) {
        let (to_come, took) = self.to_come;
        let tokens = self.running.as_ref().expect("a batch with steps").size().tokens;
        let until = |done: u32| tokens * u64::from(done) / u64::from(self.steps);
        let done = self.steps - to_come;
        self.begins(Priority::Bulk, until(done + 1) - until(done), took, Event::StepEnds);
    }

    /// The engine is busy with this from now on.
    fn begins(&mut self, priority: Priority, tokens: u64, took: f64, ends: Event) {
        self.report.ran.push(Ran { priority, began: self.now, took, tokens });
        self.at(self.now + took, ends);
    }

    fn finished(&mut self, batch: &Batch<Text>) {
        let busy = self.engine.time(batch.size().tokens);
        let done = self.planner.finished(batch, busy, self.instant());
        for request in done.complete {
            self.ends(request, Some(self.now));
        }
    }

    fn ends(&mut self, request: BatchRequestId, done: Option<f64>) {
        let (source, came) = self.open.remove(&request).expect("a request ends once");
        self.report.outcomes.push(Outcome { source, came, done });
        if let Coming::Closed { return_time, .. } = self.sources[source].coming {
            let back = self.now + return_time * (0.8 + 0.4 * self.chance.part());
            self.at(back, Event::Comes { source });
        }
    }

    fn plan(&mut self) {
        if self.running.is_some() {
            return;
        }
        if let Broken::Timer(wait) = self.broken
            && !self.planner.is_empty()
        {
            let could = *self.could_begin.get_or_insert(self.now);
            let until = could + wait.as_secs_f64();
            if self.now < until {
                return self.at(until + 2e-9, Event::WindowEnds);
            }
        }
        let plan = self.planner.next(self.instant());
        for (request, _) in plan.expired {
            self.ends(request, None);
        }
        match plan.next {
            NextAction::Idle => self.could_begin = None,
            NextAction::Wait(until) => {
                self.could_begin.get_or_insert(self.now);
                let until = until.duration_since(self.origin).as_secs_f64();
                // Rounded up, or it would be asked a nanosecond before its time.
                self.at(until + 2e-9, Event::WindowEnds);
            }
            NextAction::Compute(batch) => {
                let could = self.could_begin.take().unwrap_or(self.now);
                self.report.idle_while_waiting += self.now - could;
                let (priority, tokens) = (batch.priority, batch.size().tokens);
                let took = self.engine.time(tokens).as_secs_f64();
                self.running = Some(batch);
                if priority == Priority::Bulk && self.steps > 1 {
                    self.to_come = (self.steps, took / f64::from(self.steps));
                    self.step_begins();
                } else {
                    self.begins(priority, tokens, took, Event::EngineDone);
                }
            }
        }
    }
}

impl Report {
    /// Latencies of what a source asked for, in milliseconds, sorted; without the first second, in which things are learnt.
    pub(crate) fn latencies(&self, source: usize) -> Vec<f64> {
        let of_source = self.outcomes.iter().filter(|outcome| outcome.source == source && outcome.came > 1.0);
        let mut latencies: Vec<f64> =
            of_source.filter_map(|outcome| Some((outcome.done? - outcome.came) * 1e3)).collect();
        latencies.sort_by(f64::total_cmp);
        latencies
    }

    pub(crate) fn mean(&self, source: usize) -> f64 {
        let latencies = self.latencies(source);
        latencies.iter().sum::<f64>() / latencies.len() as f64
    }

    pub(crate) fn p99(&self, source: usize) -> f64 {
        let latencies = self.latencies(source);
        latencies[latencies.len() * 99 / 100]
    }

    /// Tokens that began to be computed between these seconds.
    pub(crate) fn tokens(&self, priority: Priority, from: f64, to: f64) -> u64 {
        let of_priority =
            self.ran.iter().filter(|ran| ran.priority == priority && (from..to).contains(&ran.began));
        of_priority.map(|ran| ran.tokens).sum()
    }

    /// Requests of a source that were not answered in time.
    pub(crate) fn expired(&self, source: usize) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.source == source && outcome.done.is_none()).count()
    }
}
