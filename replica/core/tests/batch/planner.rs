//! Property tests of the batch planner over arbitrary histories: requests arrive, are cancelled, expire and are
//! computed in any order, and after every step the invariants of `replica_core::batch` hold.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use replica_api::priority::Priority;
use replica_core::batch::{
    Backlog, Batch, BatchPlan, BatchPlanner, BatchRequestId, BatchSettings, FinishedBatch, NextAction,
};
use replica_core::window::StartReason;

use crate::{Text, origin, settings};

const QUEUE: u64 = 1000;
const BULK_QUEUE: u64 = 750;

/// Step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// A request arrives: its inputs by content (equal ones are equal), and its milliseconds to the deadline.
    Push(Priority, u8, Vec<u64>, Option<u64>),
    /// One of the requests is cancelled.
    Cancel(prop::sample::Index),
    /// This number of milliseconds passes, then the engine asks for work; at most one further batch is running.
    Next(u64),
    /// The engine asks between two steps of a bulk batch, if one is running.
    BetweenSteps,
    /// The engine finishes its oldest batch.
    Finish,
}

fn priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(Priority::Interactive), Just(Priority::Bulk)]
}

fn step() -> impl Strategy<Value = Step> {
    // Text number n has n tokens, so of a hundred and fifty texts many are equal.
    let texts = prop::collection::vec(1u64..150, 1..12);
    prop_oneof![
        3 => (priority(), 0u8..2, texts, prop::option::of(0u64..40))
            .prop_map(|(priority, class, texts, life)| Step::Push(priority, class, texts, life)),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        3 => (0u64..10).prop_map(Step::Next),
        2 => Just(Step::BetweenSteps),
        3 => Just(Step::Finish),
    ]
}

/// Outcome of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputOutcome {
    Computed,
    Expired,
    Cancelled,
}

/// Admitted request.
struct AdmittedInputs {
    class: u8,
    deadline: Option<Instant>,
    texts: Vec<u64>,
    /// Outcomes of its inputs so far.
    outcomes: Vec<Option<InputOutcome>>,
}

/// Planner with the model of its expected state.
struct PlannerModel {
    planner: BatchPlanner<Text>,
    now: Instant,
    requests: BTreeMap<BatchRequestId, AdmittedInputs>,
    running: Vec<Batch<Text>>,
}

impl PlannerModel {
    fn new() -> PlannerModel {
        PlannerModel {
            planner: BatchPlanner::new(settings(), QUEUE),
            now: origin(),
            requests: BTreeMap::new(),
            running: Vec::new(),
        }
    }

    /// Returns the texts without an outcome, by class, each once.
    fn open(&self) -> BTreeMap<(u8, u64), usize> {
        let mut open = BTreeMap::new();
        for AdmittedInputs { class, texts, outcomes, .. } in self.requests.values() {
            for (text, _) in texts.iter().zip(outcomes).filter(|(_, outcome)| outcome.is_none()) {
                *open.entry((*class, *text)).or_default() += 1;
            }
        }
        open
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Push(priority, class, texts, life) => self.push(priority, class, texts, life),
            Step::Cancel(which) => {
                let waits =
                    |admitted_inputs: &&AdmittedInputs| admitted_inputs.outcomes.iter().any(Option::is_none);
                let waiting: Vec<BatchRequestId> = self
                    .requests
                    .iter()
                    .filter(|(_, admitted_inputs)| waits(admitted_inputs))
                    .map(|(id, _)| *id)
                    .collect();
                if !waiting.is_empty() {
                    let request = waiting[which.index(waiting.len())];
                    self.planner.cancel(request);
                    self.end(request, InputOutcome::Cancelled);
                }
            }
            Step::Next(millis) => {
                self.now += Duration::from_millis(millis);
                if self.running.len() < 2 {
                    self.next();
                }
            }
            Step::BetweenSteps => {
                if self.running.last().is_some_and(|batch| batch.priority == Priority::Bulk) {
                    self.between();
                }
            }
            Step::Finish => self.finish(),
        }
        self.check();
    }

    fn check(&self) {
        let running: Vec<(u8, u64)> = self
            .running
            .iter()
            .flat_map(|batch| &batch.items)
            .map(|item| (item.input.class, item.input.text))
            .collect();
        let mut expected = Backlog::default();
        running.iter().chain(self.open().keys().filter(|text| !running.contains(text))).for_each(
            |(_, tokens)| {
                expected.tokens += tokens;
                expected.inputs += 1;
            },
        );
        assert_eq!(
            self.planner.backlog(),
            expected,
            "the backlog is the queued and the running work, equal texts once"
        );
        let loads = self.planner.loads();
        let queued = loads.interactive.queued.inputs + loads.bulk.queued.inputs;
        assert_eq!(self.planner.is_empty(), queued == 0);
        assert_eq!(queued, expected.inputs - running.len() as u64);
        if self.planner.is_empty() {
            assert_eq!(
                (loads.interactive, loads.bulk),
                Default::default(),
                "finished requests leave no load"
            );
        }
    }

    fn push(&mut self, priority: Priority, class: u8, texts: Vec<u64>, life: Option<u64>) {
        let loads = self.planner.loads();
        let requested = loads.interactive.requested.tokens + loads.bulk.requested.tokens;
        let tokens: u64 = texts.iter().sum();
        let deadline = life.map(|millis| self.now + Duration::from_millis(millis));
        let inputs = texts.iter().map(|text| Text::new(*text, *text).of_class(class)).collect();
        match self.planner.push(priority, inputs, deadline, self.now) {
            Ok(admitted) => {
                let outcomes = vec![None; texts.len()];
                let admitted_inputs = AdmittedInputs { class, deadline, texts, outcomes };
                assert!(self.requests.insert(admitted.request, admitted_inputs).is_none(), "an id twice");
            }
            Err(full) => {
                assert_eq!(full.priority, priority);
                let limit = if priority == Priority::Bulk { BULK_QUEUE } else { QUEUE };
                assert_eq!(full.max_queue_tokens, limit);
                assert!(
                    loads.of(priority).requests > 0 || priority == Priority::Bulk,
                    "rejected although its priority is empty"
                );
                assert!(
                    requested + tokens > limit || priority == Priority::Bulk,
                    "rejected although there is capacity"
                );
            }
        }
    }

    fn next(&mut self) {
        let BatchPlan { next, expired } = self.planner.next(self.now);
        self.expire(expired);
        match next {
            NextAction::Idle => assert!(self.planner.is_empty(), "idle with queued work"),
            NextAction::Wait(until) => {
                assert!(
                    until > self.now && until <= self.now + settings().window_max,
                    "the delay is bounded"
                );
            }
            NextAction::Compute(batch) => self.begin(batch),
        }
    }

    fn between(&mut self) {
        let BatchPlan { next, expired } = self.planner.next_between_steps(self.now);
        self.expire(expired);
        match next {
            NextAction::Idle => {}
            NextAction::Wait(_) => panic!("no delay while a batch is running"),
            NextAction::Compute(batch) => {
                assert_eq!(batch.priority, Priority::Interactive, "bulk does not preempt bulk");
                self.begin(batch);
            }
        }
    }

    fn expire(&mut self, expired: Vec<(BatchRequestId, u64)>) {
        for (request, _) in expired {
            let deadline = self.requests[&request].deadline.expect("only requests with a deadline expire");
            assert!(deadline <= self.now, "expired too early");
            self.end(request, InputOutcome::Expired);
        }
    }

    fn begin(&mut self, batch: Batch<Text>) {
        assert!(batch.size().tokens <= settings().batch_tokens || batch.items.len() == 1, "over budget");
        let class = batch.items[0].input.class;
        assert!(batch.items.iter().all(|item| item.input.class == class), "one class in a batch");
        for item in &batch.items {
            let needed = self.requests.values().any(|admitted_inputs| {
                let alive = admitted_inputs.deadline.is_none_or(|deadline| deadline > self.now);
                let mut inputs = admitted_inputs.texts.iter().zip(&admitted_inputs.outcomes);
                alive
                    && admitted_inputs.class == class
                    && inputs.any(|(text, outcome)| *text == item.input.text && outcome.is_none())
            });
            assert!(needed, "computed without an owner");
        }
        self.running.push(batch);
    }

    fn finish(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let batch = self.running.remove(0);
        let busy = Duration::from_millis(1 + batch.size().tokens);
        let FinishedBatch { owners, complete } = self.planner.finished(&batch, busy, self.now);
        assert_eq!(owners.len(), batch.items.len());
        for (item, owners) in batch.items.iter().zip(owners) {
            for owner in owners {
                let admitted_inputs = self.requests.get_mut(&owner.request).expect("a request");
                assert_eq!(admitted_inputs.texts[owner.index], item.input.text, "the row of another input");
                assert_eq!(admitted_inputs.class, item.input.class);
                assert_eq!(
                    admitted_inputs.outcomes[owner.index].replace(InputOutcome::Computed),
                    None,
                    "a second outcome"
                );
            }
        }
        for request in complete {
            let outcomes = &self.requests[&request].outcomes;
            assert!(
                outcomes.iter().all(|outcome| *outcome == Some(InputOutcome::Computed)),
                "{outcomes:?} is not complete"
            );
        }
    }

    fn end(&mut self, request: BatchRequestId, outcome: InputOutcome) {
        for input in &mut self.requests.get_mut(&request).expect("a request").outcomes {
            *input = input.or(Some(outcome));
        }
    }

    fn drain(&mut self) {
        while !self.planner.is_empty() || !self.running.is_empty() {
            self.now += settings().window_max;
            self.next();
            self.finish();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_input_has_one_outcome_and_no_batch_is_over_budget(steps in prop::collection::vec(step(), 1..80)) {
        let mut model = PlannerModel::new();
        steps.into_iter().for_each(|step| model.apply(step));
        model.drain();
        model.check();
        for admitted_inputs in model.requests.values() {
            prop_assert!(admitted_inputs.outcomes.iter().all(Option::is_some), "an input without an outcome");
        }
    }

    #[test]
    fn queued_tokens_are_bounded_except_for_one_request_per_priority(steps in prop::collection::vec(step(), 1..80)) {
        let mut model = PlannerModel::new();
        let largest = 12 * 150;
        for step in steps {
            model.apply(step);
            let loads = model.planner.loads();
            let requested = loads.interactive.requested.tokens + loads.bulk.requested.tokens;
            prop_assert!(requested <= QUEUE + 2 * largest, "{requested} tokens are queued");
        }
    }

    #[test]
    fn no_interactive_request_is_shed_while_bulk_is_admitted(steps in prop::collection::vec(step(), 1..80)) {
        let mut model = PlannerModel::new();
        for step in steps {
            model.apply(step);
            // Different from all queued texts, because equal ones would share their work.
            let mut is_admitted = |priority: Priority, tokens: u64| {
                let admitted_inputs = model.planner.push(priority, vec![Text::new(1_000_000, tokens)], None, model.now);
                admitted_inputs.map(|admitted| model.planner.cancel(admitted.request)).is_ok()
            };
            if !is_admitted(Priority::Interactive, 300) {
                prop_assert!(!is_admitted(Priority::Bulk, 300) && !is_admitted(Priority::Bulk, 1), "bulk is admitted where an interactive request is shed");
            }
        }
    }
}

/// Batches of ten texts of ten tokens.
fn planner(queue: u64) -> BatchPlanner<Text> {
    BatchPlanner::new(BatchSettings { window_max: Duration::ZERO, ..settings() }, queue)
}

fn compute(planner: &mut BatchPlanner<Text>, now: Instant) -> Batch<Text> {
    match planner.next(now).next {
        NextAction::Compute(batch) => batch,
        other => panic!("{other:?} instead of a batch"),
    }
}

fn texts(numbers: std::ops::Range<u64>) -> Vec<Text> {
    numbers.map(|number| Text::new(number, 10)).collect()
}

fn numbers(batch: &Batch<Text>) -> Vec<u64> {
    batch.items.iter().map(|item| item.input.text).collect()
}

#[test]
fn a_shed_interactive_request_blocks_bulk_until_there_is_capacity_for_it() {
    let (mut planner, now) = (planner(QUEUE), origin());
    let one_batch = |planner: &mut BatchPlanner<Text>| {
        let batch = compute(planner, now);
        planner.finished(&batch, Duration::from_millis(10), now);
        planner.backlog().tokens
    };
    planner.push(Priority::Bulk, texts(0..70), None, now).expect("700 of 750");
    planner.push(Priority::Interactive, texts(100..122), None, now).expect("920 of 1000");
    let full = planner.push(Priority::Interactive, texts(200..230), None, now).expect_err("1220");
    assert_eq!(
        (full.priority, full.max_queue_tokens, full.pending_tokens),
        (Priority::Interactive, QUEUE, 920)
    );
    assert_eq!((one_batch(&mut planner), one_batch(&mut planner)), (820, 720));
    let full = planner
        .push(Priority::Bulk, texts(400..401), None, now)
        .expect_err("the interactive request would be rejected again");
    assert_eq!(full.wait, Some(Duration::from_millis(2)), "20 tokens too many at 10 000 a second");
    assert_eq!(one_batch(&mut planner), 700);
    planner.push(Priority::Bulk, texts(400..401), None, now).expect("the interactive request would fit now");
    planner.push(Priority::Interactive, texts(200..229), None, now).expect("exactly full");
}

/// The share of bulk is a quarter of the tokens: after three hundred interactive tokens its batch of a hundred
/// continues, and is not preempted any more.
#[test]
fn interactive_batches_preempt_bulk_until_it_is_owed_its_share() {
    let (mut planner, now) = (planner(QUEUE), origin());
    planner.push(Priority::Bulk, texts(0..30), None, now).expect("room");
    let bulk = compute(&mut planner, now);
    assert_eq!((bulk.priority, bulk.size().tokens), (Priority::Bulk, 100));
    assert_eq!(planner.next_between_steps(now).next, NextAction::Idle, "no interactive request is queued");
    planner.push(Priority::Interactive, texts(100..160), None, now).expect("room");
    for _ in 0..3 {
        let NextAction::Compute(interactive) = planner.next_between_steps(now).next else {
            panic!("interactive requests are queued")
        };
        assert_eq!(
            (interactive.priority, interactive.reason, interactive.size().tokens),
            (Priority::Interactive, StartReason::BetweenSteps, 100)
        );
        planner.finished(&interactive, Duration::from_millis(10), now);
    }
    assert_eq!(planner.next_between_steps(now).next, NextAction::Idle, "the running batch continues");
    planner.finished(&bulk, Duration::from_millis(10), now);
    assert_eq!(compute(&mut planner, now).priority, Priority::Bulk, "it was owed its share");
}

#[test]
fn bulk_leaves_capacity_for_interactive_requests() {
    let (mut planner, now) = (planner(QUEUE), origin());
    planner.push(Priority::Bulk, texts(0..75), None, now).expect("exactly three quarters");
    let full = planner.push(Priority::Bulk, texts(100..101), None, now).expect_err("one past it");
    assert_eq!((full.priority, full.max_queue_tokens), (Priority::Bulk, BULK_QUEUE));
    planner.push(Priority::Interactive, texts(200..225), None, now).expect("exactly full");
    planner.push(Priority::Interactive, texts(300..301), None, now).expect_err("one past it");
}

#[test]
fn a_full_queue_reports_the_time_until_there_is_capacity() {
    let (mut planner, now) = (planner(QUEUE), origin());
    planner.push(Priority::Interactive, texts(0..100), None, now).expect("exactly full");
    let full = planner.push(Priority::Interactive, texts(100..110), None, now).expect_err("ten past it");
    assert_eq!(
        (full.pending_tokens, full.max_queue_tokens, full.wait),
        (QUEUE, QUEUE, None),
        "no speed is known"
    );
    let batch = compute(&mut planner, now);
    planner.finished(&batch, Duration::from_millis(200), now); // 500 tokens/s
    let full = planner
        .push(Priority::Interactive, texts(100..135), None, now)
        .expect_err("900 are queued and 350 arrive");
    assert_eq!(full.wait, Some(Duration::from_millis(500)), "250 tokens too many");
    planner.push(Priority::Interactive, texts(100..110), None, now).expect("at the limit");
}

#[test]
fn a_request_larger_than_its_queue_is_admitted_when_its_priority_is_empty() {
    for priority in Priority::ALL {
        let (mut planner, now) = (planner(QUEUE), origin());
        planner.push(priority, texts(0..600), None, now).expect("alone");
        planner.push(priority, texts(1000..1001), None, now).expect_err("not alone");
    }
}

#[test]
fn equal_texts_of_several_requests_are_computed_once() {
    let (mut planner, now) = (planner(QUEUE), origin());
    let first =
        planner.push(Priority::Bulk, vec![Text::new(1, 10), Text::new(2, 10), Text::new(1, 10)], None, now);
    let first = first.expect("room");
    assert_eq!(first.joined, 1, "within the request");
    let second = planner.push(Priority::Interactive, vec![Text::new(2, 10)], None, now).expect("room");
    assert_eq!(second.joined, 1, "with another request");
    let batch = compute(&mut planner, now);
    assert_eq!(numbers(&batch), [2], "at the priority of the more urgent one");
    let third = planner.push(Priority::Interactive, vec![Text::new(2, 10)], None, now).expect("room");
    assert_eq!(third.joined, 1, "with the job that is being computed");
    let done = planner.finished(&batch, Duration::from_millis(1), now);
    let owners: Vec<_> = done.owners[0].iter().map(|owner| (owner.request, owner.index)).collect();
    assert_eq!(owners, [(first.request, 1), (second.request, 0), (third.request, 0)]);
    let batch = compute(&mut planner, now);
    assert_eq!(numbers(&batch), [1]);
    let done = planner.finished(&batch, Duration::from_millis(1), now);
    assert_eq!(done.owners[0].len(), 2, "both indices of the first request");
    assert!(done.complete.contains(&first.request));
    let again = planner.push(Priority::Bulk, vec![Text::new(1, 10)], None, now).expect("room");
    assert_eq!(again.joined, 0, "finished jobs are not remembered");
}

#[test]
fn a_running_job_without_owners_can_be_cancelled_and_is_not_joined() {
    let (mut planner, now) = (planner(QUEUE), origin());
    let one = planner.push(Priority::Interactive, vec![Text::new(1, 10)], None, now).expect("room");
    let other = planner.push(Priority::Interactive, vec![Text::new(1, 10)], None, now).expect("room");
    let given_up = compute(&mut planner, now);
    let job = given_up.items[0].job;
    planner.cancel(one.request);
    assert!(planner.has_waiting_owner(job), "the other owner waits");
    planner.cancel(other.request);
    assert!(!planner.has_waiting_owner(job));
    let third = planner.push(Priority::Interactive, vec![Text::new(1, 10)], None, now).expect("room");
    assert_eq!(third.joined, 0, "the engine may have cancelled it");
    let again = compute(&mut planner, now);
    let done = planner.finished(&given_up, Duration::from_millis(1), now);
    assert!(done.owners[0].is_empty() && done.complete.is_empty());
    let fourth = planner.push(Priority::Interactive, vec![Text::new(1, 10)], None, now).expect("room");
    assert_eq!(fourth.joined, 1, "with the one that is being computed for the third");
    let done = planner.finished(&again, Duration::from_millis(1), now);
    assert_eq!(done.complete.into_iter().collect::<Vec<_>>(), [third.request, fourth.request]);
    assert!(planner.backlog() == Backlog::default() && !planner.has_waiting_owner(job));
}

#[test]
fn an_equal_text_is_still_computed_when_its_first_owner_is_cancelled() {
    let (mut planner, now) = (planner(QUEUE), origin());
    let soon = now + Duration::from_millis(1);
    let cancelled = planner.push(Priority::Interactive, texts(1..2), None, now).expect("room");
    let expired = planner.push(Priority::Interactive, texts(1..2), Some(soon), now).expect("room");
    let stays = planner.push(Priority::Bulk, texts(1..2), None, now).expect("room");
    assert_eq!(planner.cancel(cancelled.request), 1);
    let BatchPlan { next, expired: gone } = planner.next(soon);
    assert_eq!(gone, [(expired.request, 1)]);
    let NextAction::Compute(batch) = next else { panic!("{next:?}") };
    assert_eq!(
        (numbers(&batch), batch.priority),
        (vec![1], Priority::Bulk),
        "at the priority of the remaining owner"
    );
    let done = planner.finished(&batch, Duration::from_millis(1), soon);
    assert_eq!(done.owners[0].iter().map(|owner| owner.request).collect::<Vec<_>>(), [stays.request]);
}

#[test]
fn texts_of_different_classes_are_in_separate_batches_and_none_starves() {
    let (mut planner, now) = (planner(u64::MAX), origin());
    let class = |numbers: std::ops::Range<u64>, class: u8| -> Vec<Text> {
        texts(numbers).into_iter().map(|text| text.of_class(class)).collect()
    };
    for request in 0..6u64 {
        let numbers = request * 100..request * 100 + 30;
        planner.push(Priority::Bulk, class(numbers, (request % 3 == 0).into()), None, now).expect("room");
    }
    let classes: Vec<u8> = (0..9).map(|_| compute(&mut planner, now).items[0].input.class).collect();
    let alike = classes.chunk_by(|a, b| a == b).map(<[u8]>::len).max();
    assert!(alike <= Some(2), "{classes:?}: two of six requests are of class 1, so every third batch is");
}

#[test]
fn a_text_that_does_not_fit_is_skipped_once() {
    let (mut planner, now) = (planner(u64::MAX), origin());
    planner.push(Priority::Bulk, texts(0..5), None, now).expect("room"); // 50 tokens
    planner.push(Priority::Bulk, vec![Text::new(100, 95)], None, now).expect("room");
    planner.push(Priority::Bulk, texts(200..220), None, now).expect("room");
    let batch = compute(&mut planner, now);
    assert_eq!(batch.size().tokens, 100, "smaller texts behind it fill the batch: {:?}", numbers(&batch));
    assert_eq!(numbers(&batch)[0], 0);
    assert!(!numbers(&batch).contains(&100));
    let batch = compute(&mut planner, now);
    assert_eq!(numbers(&batch)[0], 100, "first in the next one");
}
