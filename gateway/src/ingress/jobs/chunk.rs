//! Computation of a chunk of a batch: its lines as requests to replicas, and their responses as lines.
//!
//! Embedding requests with the same parameters are sent as one ([`jobs_core::batch::pack`]). If a replica rejects it, or fails,
//! its lines are sent alone, so that a bad line is the only one that fails. In the last attempt at a chunk a line that fails is
//! an error line; before, the whole chunk is computed again, since the next attempt may reach another replica. [`ChunkWindow`]
//! decides how many of the requests are in flight, and whether one without capacity is repeated.

use super::attempt::{JobAttemptEnd, JobRequestEnd, ReplicaAttemptEnd};
use super::names::kind;
use super::traces::JobAttemptTrace;
use super::transfers::TargetRegion;
use super::worker::JobComputation;
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jobs::queue_host::{ChunkLines, ChunkWork, ComputationEnd, TakenJob};
use jobs_core::batch::id::BatchId;
use jobs_core::batch::line::BatchLine;
use jobs_core::batch::output;
use jobs_core::batch::pack::{self, PackedLine, PackedRequest};
use jobs_core::batch::segment;
use jobs_core::job::JobOperation;
use jobs_core::pace::ChunkWindow;
use replica_api::error::{ErrorBody, ErrorCode};
use scheduler_api::usage::UsageCounts;
use std::sync::Arc;
use std::time::Instant;

/// Attempts in which lines are packed into requests; in later ones each line is sent alone.
const PACKED_ATTEMPTS: u32 = 2;

/// Line of a result.
struct ResultLine {
    number: u32,
    is_error: bool,
    text: String,
}

/// Line to be computed.
struct ChunkLine {
    number: u32,
    custom_id: String,
    inputs: u64,
    body: String,
}

/// Lines of a chunk, and the requests for them.
#[derive(Default)]
struct PreparedChunk {
    lines: Vec<ChunkLine>,
    requests: Vec<PackedRequest>,
    /// Lines whose body is invalid.
    rejected: Vec<ResultLine>,
}

impl ChunkLine {
    /// Returns the line of the output file or of the error file for a response.
    fn response(&self, batch: BatchId, status: u16, body: &str) -> ResultLine {
        let mut text = String::with_capacity(body.len() + 256);
        output::push_response(&mut text, (self.number, batch), &self.custom_id, status, body);
        ResultLine { number: self.number, is_error: !(200..300).contains(&status), text }
    }

    fn rejection(&self, batch: BatchId, status: u16, body: &ErrorBody) -> ResultLine {
        let body = String::from_utf8_lossy(&body.to_json()).into_owned();
        self.response(batch, status, &body)
    }

    /// Returns the request for this line alone.
    fn alone(&self, at: usize) -> PackedRequest {
        let members = vec![PackedLine { at, inputs: 1, bytes: self.body.len() }];
        PackedRequest { members, body: self.body.clone() }
    }
}

impl JobComputation {
    /// Makes one attempt to compute a chunk; the last one if `is_last`.
    pub(super) async fn compute_chunk(
        &self,
        job: &TakenJob,
        work: ChunkWork,
        (target, trace): (&TargetRegion, Option<&JobAttemptTrace>),
        is_last: bool,
    ) -> JobAttemptEnd {
        let batch = work.batch;
        let (text, deployment) = (job.body.clone(), job.job.spec.deployment.clone());
        // The first attempt may have ended with its worker, as at a restart. After a second one, a line may be the cause.
        let packs = job.job.attempts <= PACKED_ATTEMPTS;
        let cpu = &self.body_reader.cpu;
        let prepared = cpu.run(None, move || prepare(&text, &work, &deployment, packs)).await;
        let PreparedChunk { lines, requests, rejected: mut results } = prepared;
        let lines = Arc::new(lines);
        let (mut waiting, mut in_flight) = (requests, FuturesUnordered::new());
        let mut usage = UsageCounts::default();
        let mut window = match target {
            TargetRegion::Local => ChunkWindow::of_region(),
            TargetRegion::Remote(..) => ChunkWindow::of_transfer(),
        };
        loop {
            let now = Instant::now();
            while window.permits(in_flight.len(), now)
                && let Some(request) = waiting.pop()
            {
                in_flight.push(async move {
                    let name = format!("{batch}-{}", job.id);
                    let body = Bytes::from(request.body.clone());
                    let end = self.attempt(name, &job.job.spec, body, (target, trace)).await;
                    (request, end)
                });
            }
            let pause = window.pause(now);
            let (request, end) = tokio::select! {
                biased;
                Some(ended) = in_flight.next() => ended,
                () = ended(pause), if pause.is_some() => continue,
                else => break,
            };
            let JobRequestEnd { end, is_gateway_lost } = end;
            let end = match end {
                ReplicaAttemptEnd::Computed { body, tokens } => {
                    let (shared, split) = (lines.clone(), request.clone());
                    let divided = cpu.run(None, move || divide(batch, &shared, &split, &body)).await;
                    match divided {
                        Some(divided) => {
                            usage.add(usage_of(&lines, &request, tokens));
                            results.extend(divided);
                            window.computed(Instant::now());
                            continue;
                        }
                        None => ReplicaAttemptEnd::Failed(
                            "the response has not one vector for each input".to_owned(),
                        ),
                    }
                }
                end => end,
            };
            let alone = request.members.len() == 1;
            let line = &lines[request.members[0].at];
            match end {
                ReplicaAttemptEnd::Rejected(_) | ReplicaAttemptEnd::Failed(_)
                    if !alone && (is_rejected(&end) || is_last) =>
                {
                    waiting.extend(request.members.iter().map(|member| lines[member.at].alone(member.at)));
                }
                ReplicaAttemptEnd::Rejected((status, body)) => {
                    results.push(line.rejection(batch, status, &body))
                }
                ReplicaAttemptEnd::Failed(reason) if is_last => {
                    let code = ErrorCode::Internal;
                    results.push(line.rejection(batch, code.status(), &ErrorBody::new(code, reason, None)));
                }
                ReplicaAttemptEnd::NoCapacity { retry_after, .. }
                    if window.rejected(in_flight.len(), retry_after, Instant::now()) =>
                {
                    waiting.push(request);
                }
                end @ (ReplicaAttemptEnd::Failed(_) | ReplicaAttemptEnd::NoCapacity { .. }) => {
                    // What was computed is computed again with the chunk.
                    return JobAttemptEnd { end: end.into(), usage: UsageCounts::default(), is_gateway_lost };
                }
                ReplicaAttemptEnd::Computed { .. } => {}
            }
        }
        let end = ComputationEnd::Chunk(cpu.run(None, move || joined(results)).await);
        JobAttemptEnd { end, usage, is_gateway_lost: false }
    }
}

/// Waits for the end of a pause.
async fn ended(pause: Option<Instant>) {
    if let Some(until) = pause {
        tokio::time::sleep_until(until.into()).await;
    }
}

fn is_rejected(end: &ReplicaAttemptEnd) -> bool {
    matches!(end, ReplicaAttemptEnd::Rejected(_))
}

/// Reads the lines of a chunk, and makes the requests for them.
fn prepare(text: &[u8], work: &ChunkWork, deployment: &str, packs: bool) -> PreparedChunk {
    let ChunkWork { batch, operation, segment, models } = work;
    let mut prepared = PreparedChunk::default();
    let mut valid: Vec<BatchLine<'_>> = Vec::new();
    for (number, request) in segment::requests(text, segment, models, *operation) {
        let Ok(line) = request else { continue };
        if line.deployment != deployment {
            continue;
        }
        let body = line.body.get();
        let parsed = kind(*operation).inputs(body.as_bytes());
        let inputs = *parsed.as_ref().unwrap_or(&0);
        let chunk_line =
            ChunkLine { number, custom_id: line.custom_id.clone(), inputs, body: body.to_owned() };
        match parsed {
            Ok(_) => {
                prepared.lines.push(chunk_line);
                valid.push(line);
            }
            Err(refusal) => {
                let error = ErrorBody::new(refusal.code, refusal.message, refusal.param);
                prepared.rejected.push(chunk_line.rejection(*batch, refusal.code.status(), &error));
            }
        }
    }
    prepared.requests = if packs && *operation == JobOperation::Embeddings {
        pack::pack(&valid.iter().collect::<Vec<_>>())
    } else {
        prepared.lines.iter().enumerate().map(|(at, line)| line.alone(at)).collect()
    };
    prepared
}

/// Returns the usage by a computed request: each of its lines is a request of the tenant.
fn usage_of(lines: &[ChunkLine], request: &PackedRequest, tokens: u64) -> UsageCounts {
    let inputs = request.members.iter().map(|member| lines[member.at].inputs).sum();
    UsageCounts { requests: request.members.len() as u64, inputs, tokens }
}

/// Returns the lines for the response to a request; none if it does not fit the request.
fn divide(
    batch: BatchId,
    lines: &[ChunkLine],
    request: &PackedRequest,
    response: &[u8],
) -> Option<Vec<ResultLine>> {
    let bodies = pack::split(request, response)?;
    let members = request.members.iter().zip(bodies);
    Some(members.map(|(member, body)| lines[member.at].response(batch, 200, &body)).collect())
}

/// Joins the lines of a chunk in their order.
fn joined(mut results: Vec<ResultLine>) -> ChunkLines {
    results.sort_by_key(|line| line.number);
    let failed = results.iter().filter(|line| line.is_error).count();
    let join = |errors: bool| {
        let lines = results.iter().filter(|line| line.is_error == errors);
        Bytes::from(lines.map(|line| line.text.as_str()).collect::<String>())
    };
    ChunkLines {
        output: join(false),
        errors: join(true),
        completed: (results.len() - failed) as u32,
        failed: failed as u32,
    }
}
