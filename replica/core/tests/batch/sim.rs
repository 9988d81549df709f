//! Simulation of a replica: callers, the planner, and an engine whose batches cost `a + b · tokens`.
//!
//! Events are ordered by time and then by number, randomness comes from a seed, and no clock is read: a run is
//! reproducible. The actions of the shell (call the planner when the engine is free or a request arrives, wake up when
//! a batching delay ends) are performed here in the same order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use replica_api::priority::{PerPriority, Priority};
use replica_core::batch::{Batch, BatchPlanner, BatchRequestId, BatchSettings, NextAction, QueueFull};
use replica_core::cost::BatchCost;

use crate::{Text, origin};

/// Pseudorandom numbers from a seed (SplitMix64).
pub(crate) struct SeededRandom(pub(crate) u64);

impl SeededRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to 1.
    pub(crate) fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + (self.part() * (high - low + 1) as f64) as u64
    }
}

/// Arrival process of requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arrivals {
    /// Closed loop: `callers` that each send the next request `return_time` seconds (± a fifth) after the response.
    Closed { callers: usize, return_time: f64 },
    /// Open loop: requests per second, independent of responses.
    Open { per_second: f64 },
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) arrivals: Arrivals,
    pub(crate) priority: Priority,
    pub(crate) inputs: u64,
    /// Tokens of an input, minimum and maximum.
    pub(crate) tokens: (u64, u64),
    /// Seconds to the deadline, minimum and maximum.
    pub(crate) life: Option<(f64, f64)>,
}

impl Source {
    pub(crate) fn interactive(arrivals: Arrivals) -> Source {
        Source { arrivals, priority: Priority::Interactive, inputs: 1, tokens: (8, 16), life: None }
    }

    pub(crate) fn backfill(callers: usize) -> Source {
        let arrivals = Arrivals::Closed { callers, return_time: 0.005 };
        Source { arrivals, priority: Priority::Bulk, inputs: 64, tokens: (20, 128), life: None }
    }
}

/// Planner that is broken on purpose, so that a test can show that it detects the defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Defect {
    No,
    /// All requests have the same priority.
    OnePriority,
    /// Deadlines are not passed to the planner.
    NoDeadlines,
    /// Every batch waits for a timer first.
    Timer(Duration),
}

/// Result of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimulatedResult {
    pub(crate) source: usize,
    pub(crate) arrived_at: f64,
    /// Time of the response; `None` if it expired.
    pub(crate) done: Option<f64>,
}

/// Batch that was computed, or a step of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ComputedBatch {
    pub(crate) priority: Priority,
    pub(crate) started_at: f64,
    pub(crate) duration: f64,
    pub(crate) tokens: u64,
}

/// Results of a run.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) outcomes: Vec<SimulatedResult>,
    pub(crate) computed: Vec<ComputedBatch>,
    pub(crate) rejected: Vec<(f64, QueueFull)>,
    /// Seconds in which the engine was idle with queued requests.
    pub(crate) idle_while_waiting: f64,
    pub(crate) max_requested: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives {
        source: usize,
    },
    EngineDone,
    /// A step of a bulk batch on an engine with preemption, or of the batch that preempts it.
    StepEnds,
    WindowEnds,
}

pub(crate) struct Simulation {
    planner: BatchPlanner<Text>,
    engine: BatchCost,
    /// Steps of a bulk batch, between which interactive batches run.
    steps: u32,
    sources: Vec<Source>,
    defect: Defect,
    random: SeededRandom,
    origin: Instant,
    now: f64,
    /// Nanoseconds, because floats are not ordered.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    numbers: u64,
    open: BTreeMap<BatchRequestId, (usize, f64)>,
    running: Option<Batch<Text>>,
    /// Remaining steps of the running batch, and the seconds of each.
    remaining_steps: (u32, f64),
    /// Batch that preempts the running one.
    preempting: Option<Batch<Text>>,
    /// Time at which the engine could have started the delayed batch.
    could_start_at: Option<f64>,
    report: Report,
}

impl Simulation {
    pub(crate) fn new(settings: BatchSettings, engine: BatchCost, max_queue_tokens: u64) -> Simulation {
        Simulation {
            planner: BatchPlanner::new(settings, max_queue_tokens),
            engine,
            steps: 1,
            sources: Vec::new(),
            defect: Defect::No,
            random: SeededRandom(1),
            origin: origin(),
            now: 0.0,
            events: BinaryHeap::new(),
            numbers: 0,
            open: BTreeMap::new(),
            running: None,
            remaining_steps: (0, 0.0),
            preempting: None,
            could_start_at: None,
            report: Report::default(),
        }
    }

    pub(crate) fn defect(mut self, defect: Defect) -> Simulation {
        self.defect = defect;
        self
    }

    /// Splits bulk batches into this number of steps, between which interactive batches run.
    pub(crate) fn in_steps(mut self, steps: u32) -> Simulation {
        self.steps = steps;
        self
    }

    pub(crate) fn seed(mut self, seed: u64) -> Simulation {
        self.random = SeededRandom(seed);
        self
    }

    pub(crate) fn with(mut self, source: Source) -> Simulation {
        self.sources.push(source);
        let number = self.sources.len() - 1;
        match source.arrivals {
            Arrivals::Closed { callers, .. } => {
                for _ in 0..callers {
                    let first = self.random.part() * 0.01;
                    self.at(first, Event::Arrives { source: number });
                }
            }
            Arrivals::Open { per_second } => {
                let first = self.gap(per_second);
                self.at(first, Event::Arrives { source: number });
            }
        }
        self
    }

    /// Runs for this number of seconds.
    pub(crate) fn run(mut self, seconds: f64) -> Report {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now = at as f64 / 1e9;
            if self.now > seconds {
                break;
            }
            match event {
                Event::Arrives { source } => self.arrives(source),
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

    /// Returns the time to the next event of a Poisson process.
    fn gap(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.random.part()).ln() / per_second
    }

    fn arrives(&mut self, number: usize) {
        let Source { arrivals, priority, inputs, tokens, life } = self.sources[number];
        if let Arrivals::Open { per_second } = arrivals {
            let next = self.now + self.gap(per_second);
            self.at(next, Event::Arrives { source: number });
        }
        let inputs = (0..inputs)
            .map(|_| {
                self.numbers += 1;
                Text::new(self.numbers, self.random.between(tokens.0, tokens.1))
            })
            .collect();
        let life = life.map(|(from, to)| from + (to - from) * self.random.part());
        let deadline = life
            .filter(|_| self.defect != Defect::NoDeadlines)
            .map(|life| self.instant() + Duration::from_secs_f64(life));
        let priority = if self.defect == Defect::OnePriority { Priority::Bulk } else { priority };
        match self.planner.push(priority, inputs, deadline, self.instant()) {
            Ok(admitted) => {
                self.open.insert(admitted.request, (number, self.now));
            }
            Err(full) => {
                self.report.rejected.push((self.now, full));
                let wait = full.wait.unwrap_or(Duration::from_millis(100)).as_secs_f64();
                if let Arrivals::Closed { .. } = arrivals {
                    self.at(self.now + wait, Event::Arrives { source: number });
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
        match self.preempting.take() {
            Some(preempting) => self.finished(&preempting),
            None => self.remaining_steps.0 -= 1,
        }
        if self.remaining_steps.0 == 0 {
            return self.engine_done();
        }
        let plan = self.planner.next_between_steps(self.instant());
        for (request, _) in plan.expired {
            self.ends(request, None);
        }
        match plan.next {
            NextAction::Compute(batch) => {
                let tokens = batch.size().tokens;
                let duration = self.engine.time(tokens).as_secs_f64();
                self.begins(batch.priority, tokens, duration, Event::StepEnds);
                self.preempting = Some(batch);
            }
            NextAction::Wait(_) | NextAction::Idle => self.step_begins(),
        }
    }

    fn step_begins(&mut self) {
        let (remaining_steps, duration) = self.remaining_steps;
        let tokens = self.running.as_ref().expect("a batch with steps").size().tokens;
        let until = |done: u32| tokens * u64::from(done) / u64::from(self.steps);
        let done = self.steps - remaining_steps;
        self.begins(Priority::Bulk, until(done + 1) - until(done), duration, Event::StepEnds);
    }

    /// Marks the engine as busy.
    fn begins(&mut self, priority: Priority, tokens: u64, duration: f64, ends: Event) {
        self.report.computed.push(ComputedBatch { priority, started_at: self.now, duration, tokens });
        self.at(self.now + duration, ends);
    }

    fn finished(&mut self, batch: &Batch<Text>) {
        let busy = self.engine.time(batch.size().tokens);
        let done = self.planner.finished(batch, busy, self.instant());
        for request in done.complete {
            self.ends(request, Some(self.now));
        }
    }

    fn ends(&mut self, request: BatchRequestId, done: Option<f64>) {
        let (source, arrived_at) = self.open.remove(&request).expect("a request ends once");
        self.report.outcomes.push(SimulatedResult { source, arrived_at, done });
        if let Arrivals::Closed { return_time, .. } = self.sources[source].arrivals {
            let back = self.now + return_time * (0.8 + 0.4 * self.random.part());
            self.at(back, Event::Arrives { source });
        }
    }

    fn plan(&mut self) {
        if self.running.is_some() {
            return;
        }
        if let Defect::Timer(wait) = self.defect
            && !self.planner.is_empty()
        {
            let could = *self.could_start_at.get_or_insert(self.now);
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
            NextAction::Idle => self.could_start_at = None,
            NextAction::Wait(until) => {
                self.could_start_at.get_or_insert(self.now);
                let until = until.duration_since(self.origin).as_secs_f64();
                // Rounded up, or the planner would be called a nanosecond early.
                self.at(until + 2e-9, Event::WindowEnds);
            }
            NextAction::Compute(batch) => {
                let could = self.could_start_at.take().unwrap_or(self.now);
                self.report.idle_while_waiting += self.now - could;
                let (priority, tokens) = (batch.priority, batch.size().tokens);
                let duration = self.engine.time(tokens).as_secs_f64();
                self.running = Some(batch);
                if priority == Priority::Bulk && self.steps > 1 {
                    self.remaining_steps = (self.steps, duration / f64::from(self.steps));
                    self.step_begins();
                } else {
                    self.begins(priority, tokens, duration, Event::EngineDone);
                }
            }
        }
    }
}

impl Report {
    /// Returns the latencies of a source in milliseconds, sorted, without the first second, in which the planner
    /// learns.
    pub(crate) fn latencies(&self, source: usize) -> Vec<f64> {
        let of_source =
            self.outcomes.iter().filter(|outcome| outcome.source == source && outcome.arrived_at > 1.0);
        let mut latencies: Vec<f64> =
            of_source.filter_map(|outcome| Some((outcome.done? - outcome.arrived_at) * 1e3)).collect();
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

    /// Returns the tokens of batches that started between these seconds.
    pub(crate) fn tokens(&self, priority: Priority, from: f64, to: f64) -> u64 {
        let of_priority = self
            .computed
            .iter()
            .filter(|computed| computed.priority == priority && (from..to).contains(&computed.started_at));
        of_priority.map(|computed| computed.tokens).sum()
    }

    /// Returns the number of requests of a source that expired.
    pub(crate) fn expired(&self, source: usize) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.source == source && outcome.done.is_none()).count()
    }
}
