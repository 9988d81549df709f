//! Tests of the batcher with an engine that the test controls.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use identity::Transport;
use metrics::Format;
use replica_core::batch::BatchSettings;
use replica_core::{EngineKind, EngineSpec, Precision, Task};
use tokio::runtime;

use super::*;
use crate::engine::{BatchCallbacks, Description, EngineError, FailedSequence, RaggedBatch};

/// Token ids that trigger a failure.
const FAILS: u32 = 666;
const PANICS: u32 = 667;
/// The row of its sequence is NaN.
const OVERFLOWS: u32 = 668;

/// Engine under the control of the test. The row of a sequence is its first token and its length; the row of a token is
/// the token three times. It announces each batch and waits for a permission; after the rows it allows interruptions.
struct Scripted {
    description: Description,
    begins: Mutex<Sender<Vec<u32>>>,
    released: Mutex<Receiver<()>>,
}

impl Engine for Scripted {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        callbacks: &dyn BatchCallbacks,
        out: &mut [f32],
    ) -> Result<Vec<FailedSequence>, EngineError> {
        self.compute(batch, output, out)?;
        if callbacks.has_urgent() {
            callbacks.run_urgent(&mut |batch, output, out| self.compute(batch, output, out));
        }
        Ok(Vec::new())
    }

    fn compute(&self, batch: &RaggedBatch<'_>, output: Output, out: &mut [f32]) -> Result<(), EngineError> {
        let firsts = batch.sequences().map(|range| batch.token_ids()[range.start]).collect();
        self.begins.lock().send(firsts).ok();
        // Without a sender all batches proceed.
        let _ = self.released.lock().recv();
        assert!(!batch.token_ids().contains(&PANICS), "a token that panics");
        if batch.token_ids().contains(&FAILS) {
            return Err(EngineError::Broken { reason: "a token that fails".to_owned() });
        }
        assert_eq!(out.len(), self.description.numbers(batch, output), "the output has the size of the rows");
        match output {
            Output::Pooled => {
                for (row, range) in out.chunks_exact_mut(2).zip(batch.sequences()) {
                    let first = batch.token_ids()[range.start];
                    let number = if first == OVERFLOWS { f32::NAN } else { first as f32 };
                    row.copy_from_slice(&[number, range.len() as f32]);
                }
            }
            Output::Tokens => {
                for (row, token) in out.chunks_exact_mut(3).zip(batch.token_ids()) {
                    row.fill(*token as f32);
                }
            }
        }
        Ok(())
    }
}

/// Batcher with a scripted engine.
struct Fixture {
    batcher: Batcher,
    metrics: Arc<Metrics>,
    began: Receiver<Vec<u32>>,
    release: Option<Sender<()>>,
}

impl Fixture {
    /// Starts a batcher with batches of ten tokens and a queue of a hundred.
    fn new(cache: Option<RowCache>) -> Fixture {
        let (begins, began) = channel();
        let (release, released) = channel();
        let description = Description {
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            architecture: "scripted".to_owned(),
            task: Task::Embed,
            width: 2,
            hidden: 3,
            token_rows: true,
            max_tokens: 100,
            vocabulary: 1000,
            token_types: 1,
            instruction_set: "none".to_owned(),
            threads: 1,
            accelerator: None,
        };
        let (begins, released) = (Mutex::new(begins), Mutex::new(released));
        let engine = Scripted { description, begins, released };
        let batch =
            BatchSettings { batch_tokens: 10, interactive_batch_tokens: 10, ..BatchSettings::default() };
        let metrics = Arc::<Metrics>::default();
        let options = Options { batch, max_queue_tokens: 100, cache, metrics: Arc::clone(&metrics) };
        let batcher = Batcher::start(Arc::new(engine), options).expect("threads");
        Fixture { batcher, metrics, began, release: Some(release) }
    }

    fn work(inputs: &[(u32, usize)]) -> ComputeRequest {
        let input = |(first, length): &(u32, usize)| Tokenized {
            ids: vec![*first; *length].into_boxed_slice(),
            types: None,
        };
        ComputeRequest {
            inputs: inputs.iter().map(input).collect(),
            output: Output::Pooled,
            priority: Priority::Interactive,
            deadline: None,
            tenant: None,
        }
    }

    /// Submits a request of `(first token, length)` inputs.
    fn submit(&self, inputs: &[(u32, usize)]) -> Result<ComputeTicket, QueueFull> {
        self.batcher.submit(Fixture::work(inputs))
    }

    /// Waits until the engine begins a batch, and returns the first tokens of its sequences.
    fn begins(&self) -> Vec<u32> {
        self.began.recv().expect("the engine's thread")
    }

    /// Lets the engine compute all further batches.
    fn release_all(&mut self) {
        self.release = None;
    }

    fn counted(&self, line: &str) -> bool {
        self.metrics
            .snapshot(&Transport::Loopback, None)
            .text(Format::Prometheus)
            .lines()
            .any(|given| given == line)
    }
}

fn computed(ticket: ComputeTicket) -> Result<ComputedRows, ComputeError> {
    let runtime = runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(ticket.rows())
}

fn wait(ticket: ComputeTicket) -> Result<Vec<f32>, ComputeError> {
    computed(ticket).map(|computed| computed.rows)
}

#[test]
fn each_request_gets_the_rows_of_its_inputs_in_order() {
    let mut fixture = Fixture::new(None);
    fixture.release_all();
    let many: Vec<(u32, usize)> = (1..=9).map(|n| (n, n as usize % 4 + 1)).collect();
    let requests = [&many[..], &[(50, 25)], &[(60, 1), (61, 2)]];
    let tickets: Vec<ComputeTicket> =
        requests.iter().map(|inputs| fixture.submit(inputs).expect("room")).collect();
    for (ticket, inputs) in tickets.into_iter().zip(requests) {
        let expected: Vec<f32> = inputs.iter().flat_map(|(first, n)| [*first as f32, *n as f32]).collect();
        assert_eq!(wait(ticket), Ok(expected));
    }
    assert_eq!(fixture.batcher.backlog(), Backlog::default());
    assert!(fixture.batcher.tokens_per_second() > 0.0);
}

#[test]
fn token_rows_and_pooled_rows_are_computed_in_separate_batches() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let tokens = ComputeRequest { output: Output::Tokens, ..Fixture::work(&[(2, 2), (3, 1)]) };
    let tokens = fixture.batcher.submit(tokens).expect("room");
    let pooled = fixture.submit(&[(2, 2)]).expect("room");
    fixture.release_all();
    assert!(wait(running).is_ok());
    assert_eq!((fixture.begins(), fixture.begins()), (vec![2, 3], vec![2]));
    let ComputedRows { rows, width, counts, tokens, .. } = computed(tokens).expect("rows");
    assert_eq!((width, counts, tokens), (3, vec![2, 1], 3));
    assert_eq!(rows, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]);
    let ComputedRows { rows, width, counts, .. } = computed(pooled).expect("a row");
    assert_eq!((rows, width, counts), (vec![2.0, 2.0], 2, vec![1]));
}

#[test]
fn a_batch_that_fails_or_panics_fails_its_requests_only() {
    for poison in [FAILS, PANICS] {
        let mut fixture = Fixture::new(None);
        let first = fixture.submit(&[(1, 10)]).expect("room");
        assert_eq!(fixture.begins(), [1]);
        let poisoned = fixture.submit(&[(2, 5), (poison, 1), (3, 5)]).expect("room");
        fixture.release_all();
        assert!(wait(first).is_ok());
        assert_eq!(wait(poisoned), Err(ComputeError::EngineFailed));
        let last = fixture.submit(&[(4, 1)]).expect("room");
        assert_eq!(wait(last), Ok(vec![4.0, 1.0]), "the engine continues");
        assert_eq!(fixture.batcher.backlog(), Backlog::default());
        assert!(fixture.counted("meridian_replica_engine_failures_total 1"));
    }
}

#[test]
fn a_row_that_is_not_finite_fails_its_requests_and_is_never_sent_or_cached() {
    for cache in [None, RowCache::new(1 << 20, "digest", "f32")] {
        let mut fixture = Fixture::new(cache);
        let first = fixture.submit(&[(1, 1)]).expect("room");
        assert_eq!(fixture.begins(), [1]);
        let company = fixture.submit(&[(2, 1)]).expect("room");
        let poisoned = fixture.submit(&[(3, 1), (OVERFLOWS, 2)]).expect("room");
        fixture.release_all();
        assert!(wait(first).is_ok());
        assert_eq!(wait(poisoned), Err(ComputeError::NotFinite));
        assert_eq!(wait(company), Ok(vec![2.0, 1.0]), "other requests of the batch succeed");
        let again = fixture.submit(&[(OVERFLOWS, 2)]).expect("room");
        assert_eq!(wait(again), Err(ComputeError::NotFinite), "it was not cached");
        assert_eq!(fixture.batcher.backlog(), Backlog::default());
        assert!(fixture.counted("meridian_replica_engine_failures_total 2"));
    }
}

#[test]
fn inputs_of_cancelled_requests_are_not_computed() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let left = fixture.submit(&[(2, 1), (3, 1), (4, 1)]).expect("room");
    let last = fixture.submit(&[(5, 1)]).expect("room");
    drop(left);
    assert_eq!(fixture.batcher.backlog(), Backlog { tokens: 2, inputs: 2 });
    fixture.release_all();
    assert!(wait(running).is_ok() && wait(last).is_ok());
    assert_eq!(fixture.begins(), [5], "only the last request remains");
    assert_eq!(fixture.metrics.read().dropped_inputs_total, 3);
}

#[test]
fn expired_inputs_are_not_computed() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let until = |first: u32, deadline: Instant| {
        let work = ComputeRequest { deadline: Some(deadline), ..Fixture::work(&[(first, 1)]) };
        fixture.batcher.submit(work).expect("room")
    };
    let late = until(2, Instant::now());
    let last = until(3, Instant::now() + Duration::from_secs(3600));
    fixture.release_all();
    assert_eq!(wait(late), Err(ComputeError::Expired));
    assert!(wait(running).is_ok() && wait(last).is_ok());
    assert_eq!(fixture.begins(), [3]);
    assert_eq!(fixture.metrics.read().dropped_inputs_total, 1);
}

#[test]
fn a_full_queue_rejects_requests_and_computes_the_queued_ones() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let waiting = fixture.submit(&[(2, 10), (3, 90)]).expect("exactly full");
    let full = fixture.submit(&[(4, 1)]).err().expect("one token past it");
    assert_eq!((full.pending_tokens, full.max_queue_tokens), (101, 100));
    assert!(fixture.counted("meridian_replica_requests_shed_total{priority=\"interactive\"} 1"));
    assert!(fixture.counted("meridian_replica_queue_tokens{priority=\"interactive\"} 100"));
    fixture.release_all();
    assert!(wait(running).is_ok() && wait(waiting).is_ok());
}

#[test]
fn interactive_requests_precede_bulk_requests() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let bulk = ComputeRequest { priority: Priority::Bulk, ..Fixture::work(&[(2, 9), (3, 9), (4, 9)]) };
    let bulk = fixture.batcher.submit(bulk).expect("room");
    let interactive = fixture.submit(&[(5, 1)]).expect("room");
    fixture.release_all();
    assert!(wait(running).is_ok() && wait(interactive).is_ok() && wait(bulk).is_ok());
    assert_eq!(fixture.begins(), [5]);
}

#[test]
fn an_interactive_request_interrupts_a_bulk_batch_and_its_failure_does_not_affect_it() {
    for (token, row) in [
        (5, Ok(vec![5.0, 1.0])),
        (FAILS, Err(ComputeError::EngineFailed)),
        (PANICS, Err(ComputeError::EngineFailed)),
    ] {
        let mut fixture = Fixture::new(None);
        let bulk = ComputeRequest { priority: Priority::Bulk, ..Fixture::work(&[(1, 9)]) };
        let bulk = fixture.batcher.submit(bulk).expect("room");
        assert_eq!(fixture.begins(), [1]);
        let interactive = fixture.submit(&[(token, 1)]).expect("room");
        fixture.release.as_ref().expect("a gate").send(()).expect("the engine's thread");
        assert_eq!(fixture.begins(), [token], "the bulk batch is still running");
        assert_eq!(fixture.batcher.backlog(), Backlog { tokens: 10, inputs: 2 });
        fixture.release_all();
        assert_eq!((wait(interactive), wait(bulk)), (row, Ok(vec![1.0, 9.0])));
        assert_eq!(fixture.batcher.backlog(), Backlog::default());
        let between = "meridian_replica_batches_total{priority=\"interactive\",reason=\"between_steps\"} 1";
        assert_eq!(
            fixture.counted(between),
            token == 5,
            "{}",
            fixture.metrics.snapshot(&Transport::Loopback, None).text(Format::Prometheus)
        );
    }
}

#[test]
fn equal_inputs_are_computed_once_per_tenant() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let tickets = [&[(7, 2), (8, 1), (7, 2)][..], &[(8, 1)], &[(1, 1)]];
    let tickets = tickets.map(|inputs| fixture.submit(inputs).expect("room"));
    let other_tenant =
        ComputeRequest { tenant: Some(TenantKey::new("other_tenant")), ..Fixture::work(&[(8, 1)]) };
    let other_tenant = fixture.batcher.submit(other_tenant).expect("room");
    fixture.release_all();
    assert_eq!(
        tickets.map(wait),
        [Ok(vec![7.0, 2.0, 8.0, 1.0, 7.0, 2.0]), Ok(vec![8.0, 1.0]), Ok(vec![1.0, 1.0])]
    );
    assert!(wait(running).is_ok() && wait(other_tenant).is_ok());
    let mut computed: Vec<u32> = fixture.begins();
    while computed.len() < 3 {
        computed.extend(fixture.begins());
    }
    computed.sort_unstable();
    assert_eq!(computed, [7, 8, 8], "the running one is not repeated, and the other tenant's is separate");
    assert!(fixture.counted("meridian_replica_inputs_deduplicated_total 3"));
}

#[test]
fn cached_rows_are_returned_to_the_same_tenant_only() {
    let mut fixture = Fixture::new(RowCache::new(1 << 20, "digest", "f32"));
    fixture.release_all();
    let of = |tenant: &str, inputs: &[(u32, usize)]| {
        let work = ComputeRequest { tenant: Some(TenantKey::new(tenant)), ..Fixture::work(inputs) };
        computed(fixture.batcher.submit(work).expect("room")).expect("rows")
    };
    assert_eq!(of("a", &[(1, 1), (2, 2)]).cached_inputs, 0);
    let again = of("a", &[(2, 2), (3, 3), (1, 1)]);
    assert_eq!(again.cached_inputs, 2);
    assert_eq!(again.rows, [2.0, 2.0, 3.0, 3.0, 1.0, 1.0]);
    let all = of("a", &[(3, 3)]);
    assert_eq!((all.cached_inputs, all.rows, all.tokens), (1, vec![3.0, 3.0], 3));
    assert_eq!(of("b", &[(1, 1)]).cached_inputs, 0, "another tenant has no hits");
    assert_eq!((fixture.begins(), fixture.begins(), fixture.begins()), (vec![1, 2], vec![3], vec![1]));
    for line in [
        "meridian_replica_cache_hits_total 3",
        "meridian_replica_cache_misses_total 4",
        "meridian_replica_cache_rows 4",
    ] {
        assert!(
            fixture.counted(line),
            "{line} in {}",
            fixture.metrics.snapshot(&Transport::Loopback, None).text(Format::Prometheus)
        );
    }
}

#[test]
fn saved_padding_is_counted() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let mixed = fixture.submit(&[(2, 6), (3, 1), (4, 2)]).expect("room");
    fixture.release_all();
    assert!(wait(running).is_ok() && wait(mixed).is_ok());
    assert!(fixture.counted("meridian_replica_padding_saved_tokens_total 9"), "three times six, less nine");
    assert!(fixture.counted("meridian_replica_batch_tokens_sum{priority=\"interactive\"} 10"));
}

#[test]
fn queued_requests_fail_when_the_batcher_stops() {
    let mut fixture = Fixture::new(None);
    let running = fixture.submit(&[(1, 1)]).expect("room");
    assert_eq!(fixture.begins(), [1]);
    let waiting = fixture.submit(&[(2, 1)]).expect("room");
    let shared = Arc::clone(&fixture.batcher.shared);
    let release = fixture.release.take();
    thread::scope(|scope| {
        scope.spawn(|| drop(fixture));
        while !shared.lock().closed {
            thread::yield_now();
        }
        drop(release);
    });
    assert!(wait(running).is_ok(), "the running batch is finished");
    assert_eq!(wait(waiting), Err(ComputeError::Stopped));
}
