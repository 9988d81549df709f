//! The batch planner over arbitrary histories: requests come, go away, expire and are computed in any order, and after
//! every step the invariants of `replica_core::batch` hold.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use replica_core::batch::{Backlog, BatchPlanner, Item, Plan, RequestId};

const BATCH: u64 = 100;
const QUEUE: u64 = 1000;

/// Where a test's time begins; it goes on only as the test says.
#[expect(clippy::disallowed_methods, reason = "an instant cannot be made in any other way")]
fn origin() -> Instant {
    Instant::now()
}

/// What happens next.
#[derive(Clone, Debug)]
enum Step {
    /// A request of inputs of these sizes comes, with so many milliseconds to live.
    Push(Vec<u64>, Option<u64>),
    /// The caller of one of the waiting requests goes away.
    Cancel(prop::sample::Index),
    /// So many milliseconds pass, then the engine asks for work.
    Next(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let sizes = prop::collection::vec(1u64..150, 1..12);
    prop_oneof![
        3 => (sizes, prop::option::of(0u64..40)).prop_map(|(sizes, life)| Step::Push(sizes, life)),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        3 => (0u64..10).prop_map(Step::Next),
    ]
}

/// What became of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Planned,
    Expired,
    Cancelled,
}

/// A request that was taken in.
struct Pushed {
    number: usize,
    deadline: Option<Instant>,
    sizes: Vec<u64>,
    /// Of its inputs, so far.
    fates: Vec<Option<Fate>>,
}

/// The planner, and beside it what a reader of its invariants expects of it.
struct World {
    planner: BatchPlanner<(usize, usize)>,
    now: Instant,
    pushed: usize,
    requests: BTreeMap<RequestId, Pushed>,
    /// The requests of all planned inputs, in order.
    served: Vec<RequestId>,
    running: Backlog,
}

impl World {
    fn new() -> World {
        World {
            planner: BatchPlanner::new(BATCH, QUEUE),
            now: origin(),
            pushed: 0,
            requests: BTreeMap::new(),
            served: Vec::new(),
            running: Backlog::default(),
        }
    }

    fn waiting(&self) -> Vec<RequestId> {
        let waits = |fates: &[Option<Fate>]| fates.iter().any(Option::is_none);
        self.requests.iter().filter(|(_, pushed)| waits(&pushed.fates)).map(|(id, _)| *id).collect()
    }

    fn queued(&self) -> Backlog {
        let mut queued = Backlog::default();
        for Pushed { sizes, fates, .. } in self.requests.values() {
            for (size, _) in sizes.iter().zip(fates).filter(|(_, fate)| fate.is_none()) {
                queued.tokens += size;
                queued.inputs += 1;
            }
        }
        queued
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Push(sizes, life) => self.push(sizes, life),
            Step::Cancel(which) => {
                let waiting = self.waiting();
                if !waiting.is_empty() {
                    let request = waiting[which.index(waiting.len())];
                    for item in self.planner.cancel(request) {
                        self.ends(item, Fate::Cancelled);
                    }
                    assert!(!self.waiting().contains(&request), "a cancelled request still waits");
                }
            }
            Step::Next(millis) => {
                self.now += Duration::from_millis(millis);
                self.next();
            }
        }
        let queued = self.queued();
        let both =
            |a: Backlog, b: Backlog| Backlog { tokens: a.tokens + b.tokens, inputs: a.inputs + b.inputs };
        assert_eq!(
            self.planner.backlog(),
            both(queued, self.running),
            "the backlog is what waits and what runs"
        );
        assert_eq!(self.planner.is_empty(), queued.inputs == 0);
    }

    fn push(&mut self, sizes: Vec<u64>, life: Option<u64>) {
        let (before, tokens) = (self.queued(), sizes.iter().sum::<u64>());
        let deadline = life.map(|millis| self.now + Duration::from_millis(millis));
        let items = sizes.iter().enumerate().map(|(index, size)| (*size, (self.pushed, index))).collect();
        let taken = self.planner.push(items, deadline);
        let fits = before.tokens + tokens <= QUEUE || before.inputs == 0;
        assert_eq!(taken.is_ok(), fits, "a request is taken exactly if it fits or is alone");
        if let Ok(request) = taken {
            let pushed = Pushed { number: self.pushed, deadline, fates: vec![None; sizes.len()], sizes };
            assert!(self.requests.insert(request, pushed).is_none(), "an id twice");
        }
        self.pushed += 1;
    }

    fn next(&mut self) {
        let Plan { batch, expired } = self.planner.next(self.now);
        for (request, items) in expired {
            let deadline = self.requests[&request].deadline.expect("only what has a deadline expires");
            assert!(deadline <= self.now, "expired too early");
            for item in items {
                self.ends(item, Fate::Expired);
            }
        }
        let ran = Backlog { tokens: batch.iter().map(|item| item.tokens).sum(), inputs: batch.len() as u64 };
        assert!(ran.tokens <= BATCH || batch.len() == 1, "{} tokens of {BATCH}", ran.tokens);
        assert!(!batch.is_empty() || self.queued().inputs == 0, "work waits and none is planned");
        for item in batch {
            let deadline = self.requests[&item.request].deadline;
            assert!(deadline.is_none_or(|deadline| deadline > self.now), "computed for nobody");
            self.served.push(item.request);
            self.ends(item, Fate::Planned);
        }
        self.planner.finished(ran, Duration::from_millis(ran.tokens));
    }

    /// One fate: nothing comes out twice, nothing comes out that did not go in, and in the order in which it did.
    fn ends(&mut self, item: Item<(usize, usize)>, fate: Fate) {
        let pushed = self.requests.get_mut(&item.request).expect("an item of a request");
        let Pushed { number, sizes, fates, .. } = pushed;
        assert_eq!((item.payload, item.tokens), ((*number, item.index), sizes[item.index]), "another's item");
        assert_eq!(fates[item.index], None, "a second fate");
        assert!(
            fates[..item.index].iter().all(Option::is_some),
            "overtaken by a later input of the same request"
        );
        fates[item.index] = Some(fate);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_input_has_one_fate_and_no_batch_is_over_budget(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.apply(step));
        while !world.planner.is_empty() {
            world.next();
        }
        for pushed in world.requests.values() {
            prop_assert!(pushed.fates.iter().all(Option::is_some), "an input without a fate");
        }
    }

    #[test]
    fn while_a_request_waits_for_its_turn_nobody_else_has_two(
        sizes in prop::collection::vec(prop::collection::vec(1u64..150, 1..30), 1..8),
    ) {
        let mut world = World { planner: BatchPlanner::new(BATCH, u64::MAX), ..World::new() };
        for (number, sizes) in sizes.into_iter().enumerate() {
            let items = sizes.iter().enumerate().map(|(index, size)| (*size, (number, index))).collect();
            let request = world.planner.push(items, None).expect("no limit");
            let pushed = Pushed { number, deadline: None, fates: vec![None; sizes.len()], sizes };
            world.requests.insert(request, pushed);
        }
        while !world.planner.is_empty() {
            world.next();
        }
        for request in world.requests.keys() {
            // From the beginning to its first turn, and from each turn to the next.
            for others in world.served.split(|turn| turn == request).rev().skip(1) {
                let most = world.requests.keys().map(|id| others.iter().filter(|turn| *turn == id).count()).max();
                prop_assert!(most <= Some(1), "{request:?} waits while another has {most:?} turns");
            }
        }
    }
}

#[test]
fn a_lone_short_request_does_not_wait_for_a_backfill() {
    let mut planner = BatchPlanner::new(BATCH, u64::MAX);
    let now = origin();
    planner.push(vec![(10, "backfill"); 2048], None).expect("room");
    assert_eq!(planner.next(now).batch.len(), 10);
    planner.push(vec![(10, "lookup")], None).expect("room");
    let batch = planner.next(now).batch;
    assert_eq!(batch.len(), 10, "the backfill has what nobody else wants");
    assert!(batch[..2].iter().any(|item| item.payload == "lookup"), "in the first round of the next batch");
}

#[test]
fn a_full_queue_says_after_which_time_there_is_room() {
    let mut planner = BatchPlanner::new(BATCH, QUEUE);
    let now = origin();
    planner.push(vec![(50, ()); 20], None).expect("exactly full");
    let full = planner.push(vec![(100, ())], None).expect_err("one past it");
    assert_eq!(
        (full.pending_tokens, full.max_queue_tokens, full.wait),
        (QUEUE, QUEUE, None),
        "no speed is known yet"
    );
    let batch = planner.next(now).batch;
    let ran = Backlog { tokens: batch.iter().map(|item| item.tokens).sum(), inputs: batch.len() as u64 };
    planner.finished(ran, Duration::from_millis(200)); // 500 tokens/s
    let full = planner.push(vec![(350, ())], None).expect_err("900 wait, 350 more do not fit");
    assert_eq!(full.wait, Some(Duration::from_millis(500)), "250 tokens too many");
    planner.push(vec![(100, ())], None).expect("at the limit");
}

#[test]
fn a_request_larger_than_the_queue_is_taken_when_it_is_alone() {
    let mut planner = BatchPlanner::new(BATCH, QUEUE);
    planner.push(vec![(60, ()); 100], None).expect("alone");
    planner.push(vec![(1, ())], None).expect_err("not alone");
}
