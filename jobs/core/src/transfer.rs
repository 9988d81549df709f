//! Transfer of requests of jobs to other regions than that of their queue.
//!
//! ```text
//!              is_backlogged                pull                    end
//!   queue ───────────────────▶ Offered ───────────────▶ Granted ───────────▶ result
//!                                 │ OFFER_LEASE            │ TICKET_LEASE, extended by renewals
//!                                 └──────▶ back to the job's attempt ◀───────┘
//! ```
//!
//! A region computes the jobs of its queue itself. Only while they would wait for longer than [`WAIT_THRESHOLD`] it lets
//! gateways take requests of jobs to other regions. The job stays leased by the worker of its queue in any case. What a gateway
//! has is a *ticket* for one request: a lease that the gateway renews and that ends by itself. A result is accepted only for a
//! ticket that has not ended, so a request whose gateway was lost is computed again, and its late result has no effect.
//!
//! Tickets are not in the log. They end with the process that granted them, and then the lease of the job ends as well.

use crate::decide::{self, AttemptPolicy, JobWorker};
use crate::job::{DurableJob, DurableJobId, UnixMillis};
use crate::pace::JobCapacity;
use crate::queue::DurableJobQueue;
use crate::record::{JobRecord, LeasePurpose};
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Estimated wait of a deployment's jobs above which other regions compute them as well. It is ten times the queue that the
/// region's own replicas may have ([`crate::pace::BACKLOG`]): the region computes a shorter backlog about as soon as a distant one
/// would, without the transfers.
pub const WAIT_THRESHOLD: Duration = Duration::from_secs(5);
/// Duration of a ticket. The gateway renews it at a third of it, so two renewals may be lost.
pub const TICKET_LEASE: Duration = Duration::from_secs(15);
/// Time for which a request is offered to the gateways that wait for one: longer than the pause between two of their polls.
pub const OFFER_LEASE: Duration = Duration::from_secs(5);
/// Tickets for one region: with requests of 64 short texts those of 64 replicas, with single texts 64 in each round trip.
pub const TICKETS_PER_REGION_MAX: usize = 64;
/// Largest payload of a job that is transferred. It is in the memory of a gateway until it is computed.
pub const TRANSFER_BYTES_MAX: u64 = 4 << 20;
/// Most inputs of a job that is transferred: their vectors, 4096 numbers as text each, are 32 MiB.
pub const TRANSFER_INPUTS_MAX: u64 = 512;
/// Jobs of a deployment that are considered for transfer, and of which its estimated wait is a sample.
pub const SCAN_MAX: usize = 256;

/// Jobs that gateways decide about together: they have the same allowed regions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransferGroup {
    /// Name of the deployment.
    pub deployment: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Residency policy under which they were accepted.
    pub residency: String,
}

/// Waiting jobs of a group, of the first [`SCAN_MAX`] of their deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitingGroup {
    /// Group.
    pub group: TransferGroup,
    /// Number of jobs.
    pub jobs: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Position of the first one among the jobs of its deployment.
    pub position: usize,
    /// Earliest submission.
    pub oldest: UnixMillis,
}

/// Waiting work of a deployment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobBacklog {
    /// Bytes of the payloads, estimated from a sample: the first [`SCAN_MAX`] jobs.
    pub bytes: u64,
    /// Earliest submission in the sample. The first job is often younger: the queue alternates between tenants, and takes
    /// interactive jobs before bulk jobs.
    pub oldest: Option<UnixMillis>,
    /// Jobs in the sample that may be transferred, by group, in the order of the first job of each.
    pub groups: Vec<WaitingGroup>,
}

/// Returns the waiting work of a deployment.
pub fn backlog(
    queue: &mut DurableJobQueue,
    deployment: &str,
    policy: &AttemptPolicy,
    now: UnixMillis,
) -> JobBacklog {
    queue.advance(now);
    let (mut sample_inputs, mut sample_bytes, mut oldest) = (0u64, 0u64, None::<UnixMillis>);
    let mut groups = Vec::<WaitingGroup>::new();
    // By tenant and policy.
    let mut at = BTreeMap::<(&str, &str), usize>::new();
    let queue = &*queue;
    let scanned = decide::takeable(queue, deployment, policy, now).take(SCAN_MAX);
    for (position, (id, inputs)) in scanned.enumerate() {
        let Some(job) = queue.job(id) else { continue };
        let submitted = id.submitted();
        sample_inputs = sample_inputs.saturating_add(inputs.max(1));
        sample_bytes = sample_bytes.saturating_add(job.spec.payload.length);
        oldest = Some(oldest.map_or(submitted, |oldest| oldest.min(submitted)));
        let Some(residency) = job.spec.residency.as_deref().filter(|_| is_transferable(job)) else {
            continue;
        };
        let at = *at.entry((&job.spec.tenant, residency)).or_insert_with(|| {
            let (tenant, residency) = (job.spec.tenant.clone(), residency.to_owned());
            let group = TransferGroup { deployment: deployment.to_owned(), tenant, residency };
            groups.push(WaitingGroup { group, jobs: 0, bytes: 0, position, oldest: submitted });
            groups.len() - 1
        });
        let waiting = &mut groups[at];
        waiting.jobs += 1;
        waiting.bytes = waiting.bytes.saturating_add(job.spec.payload.length);
        waiting.oldest = waiting.oldest.min(submitted);
    }
    let inputs = queue.waiting_inputs(deployment).max(sample_inputs);
    let bytes = u128::from(sample_bytes) * u128::from(inputs) / u128::from(sample_inputs.max(1));
    JobBacklog { bytes: u64::try_from(bytes).unwrap_or(u64::MAX), oldest, groups }
}

/// Decides whether other regions compute jobs of a deployment. `own` is the capacity of the region of the queue, whose replicas
/// get no further job now; `tokens` is the waiting work. Without a measured speed the age of the oldest job decides.
pub fn is_backlogged(own: &JobCapacity, tokens: u64, oldest: Option<UnixMillis>, now: UnixMillis) -> bool {
    let Some(oldest) = oldest else { return false };
    if own.ready > 0 && own.tokens_per_second > 0.0 {
        return tokens as f64 > own.tokens_per_second * WAIT_THRESHOLD.as_secs_f64();
    }
    now.since(oldest) > WAIT_THRESHOLD
}

/// Returns the groups of all backlogged deployments in the order in which they are served: the first group of each tenant before the
/// second one of any, otherwise in the order in which the queue would start their jobs.
pub fn interleaved(mut groups: Vec<WaitingGroup>) -> Vec<WaitingGroup> {
    groups.sort_by(|a, b| (a.position, a.oldest, &a.group).cmp(&(b.position, b.oldest, &b.group)));
    let mut of_tenant = BTreeMap::<String, usize>::new();
    let ranked = groups.into_iter().map(|waiting| {
        let count = of_tenant.entry(waiting.group.tenant.clone()).or_insert(0);
        *count += 1;
        (*count, waiting)
    });
    let mut ranked: Vec<_> = ranked.collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, waiting)| waiting).collect()
}

/// Returns at most `max` groups. If there are more, the list begins at a random one, `draw`: otherwise a gateway that has no region
/// for the first ones would never see the others.
pub fn listed<T>(mut groups: Vec<T>, max: usize, draw: u64) -> Vec<T> {
    if groups.len() > max {
        let first = draw % groups.len() as u64;
        groups.rotate_left(first as usize);
        groups.truncate(max);
    }
    groups
}

/// Decides which jobs of a group a worker takes for another region: at most `count`, up to this number of inputs and at least
/// one. Returns no record if there are none.
pub fn take(
    queue: &mut DurableJobQueue,
    group: &TransferGroup,
    (count, inputs): (usize, u64),
    policy: &AttemptPolicy,
    worker: JobWorker,
    now: UnixMillis,
) -> Option<JobRecord> {
    queue.advance(now);
    let (mut jobs, mut left) = (Vec::new(), inputs);
    let scanned = decide::takeable(queue, &group.deployment, policy, now).take(SCAN_MAX);
    let is_of_group = |id: DurableJobId| {
        let job = queue.job(id).filter(|job| is_transferable(job));
        job.and_then(group_of).as_ref() == Some(group)
    };
    for (id, inputs) in scanned.filter(|(id, _)| is_of_group(*id)) {
        if jobs.len() == count || (!jobs.is_empty() && inputs > left) {
            break;
        }
        left = left.saturating_sub(inputs);
        jobs.push(id);
    }
    decide::lease(jobs, LeasePurpose::Compute, worker, now)
}

/// Returns whether a job is small enough to be transferred.
fn is_transferable(job: &DurableJob) -> bool {
    job.spec.payload.length <= TRANSFER_BYTES_MAX && job.spec.inputs <= TRANSFER_INPUTS_MAX
}

/// Returns the group of a job; none if an earlier version has accepted it, so that its policy is unknown.
pub fn group_of(job: &DurableJob) -> Option<TransferGroup> {
    let (deployment, tenant) = (job.spec.deployment.clone(), job.spec.tenant.clone());
    Some(TransferGroup { deployment, tenant, residency: job.spec.residency.clone()? })
}

/// Request that other regions may compute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TicketRequest {
    /// Group of its job.
    pub group: TransferGroup,
    /// Region that computes it.
    pub target: RegionIndex,
}

/// Returns the demands for requests in the order of their groups in `groups`, without those for other groups.
pub fn in_order<D>(
    demands: impl IntoIterator<Item = (TicketRequest, D)>,
    groups: &[WaitingGroup],
) -> Vec<(TicketRequest, D)> {
    let positions: BTreeMap<_, _> =
        groups.iter().enumerate().map(|(at, waiting)| (&waiting.group, at)).collect();
    let demands = demands.into_iter();
    let ranked = demands.filter_map(|demand| Some((*positions.get(&demand.0.group)?, demand)));
    let mut ranked: Vec<_> = ranked.collect();
    ranked.sort_by_key(|(position, (request, _))| (*position, request.target));
    ranked.into_iter().map(|(_, demand)| demand).collect()
}

/// Error: the region has [`TICKETS_PER_REGION_MAX`] tickets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TicketsFull;

/// A ticket that has ended without a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiredTicket {
    /// Number.
    pub number: u64,
    /// Its request.
    pub request: TicketRequest,
    /// Whether a gateway had it; otherwise no gateway has taken it.
    pub was_granted: bool,
}

#[derive(Debug, Clone)]
struct Ticket {
    request: TicketRequest,
    is_granted: bool,
    until: Instant,
}

/// Tickets of a queue. Time is an argument.
#[derive(Debug, Clone)]
pub struct TicketTable {
    tickets: BTreeMap<u64, Ticket>,
    next: u64,
}

impl TicketTable {
    /// Creates an empty table. `first` is the number of the first ticket: random, so that a result for a ticket of an earlier
    /// process is not one for a ticket of this process.
    pub fn new(first: u64) -> TicketTable {
        TicketTable { tickets: BTreeMap::new(), next: first }
    }

    /// Returns the number of tickets.
    pub fn len(&self) -> usize {
        self.tickets.len()
    }

    /// Whether there is no ticket.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    /// Offers a request for [`OFFER_LEASE`]. Returns the number of its ticket.
    ///
    /// # Errors
    ///
    /// If the region has the maximum number of tickets.
    pub fn offer(&mut self, request: TicketRequest, now: Instant) -> Result<u64, TicketsFull> {
        if self.free(request.target) == 0 {
            return Err(TicketsFull);
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.tickets.insert(number, Ticket { request, is_granted: false, until: now + OFFER_LEASE });
        Ok(number)
    }

    /// Returns the number of requests that can still be offered for a region.
    pub fn free(&self, target: RegionIndex) -> usize {
        let of_target = self.tickets.values().filter(|ticket| ticket.request.target == target);
        TICKETS_PER_REGION_MAX.saturating_sub(of_target.count())
    }

    /// Grants the oldest offered request of a group for a region to a gateway, for [`TICKET_LEASE`].
    pub fn pull(&mut self, wanted: &TicketRequest, now: Instant) -> Option<u64> {
        let is_offered =
            |ticket: &Ticket| !ticket.is_granted && now < ticket.until && ticket.request == *wanted;
        let (number, ticket) = self.tickets.iter_mut().find(|(_, ticket)| is_offered(ticket))?;
        (ticket.is_granted, ticket.until) = (true, now + TICKET_LEASE);
        Some(*number)
    }

    /// Extends a granted ticket by [`TICKET_LEASE`] from now. Returns false if it has ended.
    pub fn renew(&mut self, number: u64, now: Instant) -> bool {
        match self.tickets.get_mut(&number) {
            Some(ticket) if ticket.is_granted && now < ticket.until => {
                ticket.until = now + TICKET_LEASE;
                true
            }
            Some(_) | None => false,
        }
    }

    /// Ends a ticket with a result. None if it has ended before, or was never granted: then the result is discarded.
    pub fn end(&mut self, number: u64, now: Instant) -> Option<TicketRequest> {
        let is_held = |ticket: &Ticket| ticket.is_granted && now < ticket.until;
        self.tickets.get(&number).filter(|ticket| is_held(ticket))?;
        self.tickets.remove(&number).map(|ticket| ticket.request)
    }

    /// Ends a ticket because its request is no longer needed. Returns whether there was one.
    pub fn withdraw(&mut self, number: u64) -> bool {
        self.tickets.remove(&number).is_some()
    }

    /// Ends the tickets whose lease is over, and returns them.
    pub fn expire(&mut self, now: Instant) -> Vec<ExpiredTicket> {
        let expired = self.tickets.extract_if(.., |_, ticket| ticket.until <= now);
        let expired = expired.map(|(number, Ticket { request, is_granted, .. })| ExpiredTicket {
            number,
            request,
            was_granted: is_granted,
        });
        expired.collect()
    }

    /// Returns the time at which the next ticket ends.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.tickets.values().map(|ticket| ticket.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobOperation, JobSpec, StoredRange};
    use backoff::Backoff;
    use regions::Priority;

    const POLICY: AttemptPolicy = AttemptPolicy {
        attempts: 3,
        backoff: Backoff { first: Duration::from_secs(1), max: Duration::from_secs(1) },
    };
    const WORKER: JobWorker = JobWorker { number: 1, lease: Duration::from_secs(15) };
    const NOW: UnixMillis = UnixMillis(100_000);
    const SECOND: Duration = Duration::from_secs(1);

    #[expect(clippy::disallowed_methods, reason = "any instant will do")]
    fn start() -> Instant {
        Instant::now()
    }

    fn region(id: &str) -> RegionIndex {
        regions::catalogue::Catalogue::builtin().index_of(&id.parse().unwrap()).unwrap()
    }

    fn group(residency: &str) -> TransferGroup {
        let (deployment, tenant) = ("minilm".to_owned(), "a".to_owned());
        TransferGroup { deployment, tenant, residency: residency.to_owned() }
    }

    fn request(id: &str) -> TicketRequest {
        TicketRequest { group: group("anywhere"), target: region(id) }
    }

    struct TestQueue {
        queue: DurableJobQueue,
        sequence: u64,
    }

    impl TestQueue {
        fn new() -> TestQueue {
            TestQueue { queue: DurableJobQueue::default(), sequence: 0 }
        }

        fn submit(&mut self, residency: Option<&str>, inputs: u64, bytes: u64) -> DurableJobId {
            let submitted = UnixMillis(90_001 + self.sequence);
            self.append(("a", residency), Priority::Bulk, (inputs, bytes), submitted)
        }

        fn submit_as(&mut self, tenant: &str, priority: Priority, submitted: UnixMillis) -> DurableJobId {
            self.append((tenant, Some("anywhere")), priority, (1, 1), submitted)
        }

        fn append(
            &mut self,
            (tenant, residency): (&str, Option<&str>),
            priority: Priority,
            (inputs, bytes): (u64, u64),
            submitted: UnixMillis,
        ) -> DurableJobId {
            self.sequence += 1;
            let id = DurableJobId::new(submitted, u128::from(self.sequence));
            let spec = JobSpec {
                tenant: tenant.to_owned(),
                deployment: "minilm".to_owned(),
                operation: JobOperation::Embeddings,
                priority,
                inputs,
                payload: StoredRange { object: 1, offset: 0, length: bytes },
                deadline: None,
                start_by: None,
                idempotency: None,
                webhook: None,
                chunk: None,
                residency: residency.map(str::to_owned),
                trace: None,
            };
            self.queue.apply(self.sequence, &[JobRecord::Submitted { id, spec: Box::new(spec) }]);
            id
        }

        fn take(&mut self, residency: &str, count: usize, inputs: u64) -> Vec<DurableJobId> {
            match take(&mut self.queue, &group(residency), (count, inputs), &POLICY, WORKER, NOW) {
                Some(JobRecord::Leased { jobs, .. }) => jobs,
                Some(other) => panic!("{other:?}"),
                None => Vec::new(),
            }
        }
    }

    #[test]
    fn a_region_that_can_compute_its_jobs_in_time_keeps_them() {
        let own = JobCapacity { ready: 2, held: 0, pending_tokens: 900, tokens_per_second: 1000.0 };
        let oldest = Some(NOW);
        assert!(!is_backlogged(&own, 5000, oldest, NOW), "exactly the threshold");
        assert!(is_backlogged(&own, 5001, oldest, NOW));
        assert!(!is_backlogged(&own, 5001, None, NOW), "no job");
    }

    #[test]
    fn without_a_measured_speed_the_age_of_the_oldest_job_decides() {
        let asleep = JobCapacity { ready: 0, held: 1, pending_tokens: 0, tokens_per_second: 0.0 };
        let starting = JobCapacity { tokens_per_second: 1000.0, ..asleep };
        let unmeasured = JobCapacity { ready: 1, ..asleep };
        for own in [asleep, starting, unmeasured] {
            let submitted = |age: u64| Some(UnixMillis(NOW.0 - age));
            assert!(!is_backlogged(&own, 1 << 40, submitted(5000), NOW), "{own:?}");
            assert!(is_backlogged(&own, 1, submitted(5001), NOW), "{own:?}");
        }
    }

    #[test]
    fn the_backlog_is_estimated_from_the_first_jobs() {
        let mut jobs = TestQueue::new();
        assert_eq!(backlog(&mut jobs.queue, "minilm", &POLICY, NOW), JobBacklog::default());
        let first = jobs.submit(Some("anywhere"), 1, 100);
        for _ in 1..4 * SCAN_MAX {
            jobs.submit(Some("eu"), 1, 100);
        }
        let all = backlog(&mut jobs.queue, "minilm", &POLICY, NOW);
        assert_eq!((all.bytes, all.oldest), (100 * 4 * SCAN_MAX as u64, Some(first.submitted())));
        let sampled: Vec<_> = all.groups.iter().map(|group| group.jobs).collect();
        assert_eq!(sampled, [1, SCAN_MAX as u64 - 1], "jobs of the sample");
    }

    #[test]
    fn an_old_bulk_job_behind_a_new_interactive_one_of_another_tenant_is_backlogged() {
        let mut jobs = TestQueue::new();
        let old = jobs.submit_as("a", Priority::Bulk, UnixMillis(NOW.0 - 60_000));
        let new = jobs.submit_as("b", Priority::Interactive, NOW);
        let first = decide::takeable(&jobs.queue, "minilm", &POLICY, NOW).next();
        assert_eq!(first, Some((new, 1)), "the interactive job starts first");
        let waiting = backlog(&mut jobs.queue, "minilm", &POLICY, NOW);
        assert_eq!(waiting.oldest, Some(old.submitted()));
        let asleep = JobCapacity { ready: 0, held: 1, pending_tokens: 0, tokens_per_second: 0.0 };
        assert!(is_backlogged(&asleep, 1, waiting.oldest, NOW));
        let of = |waiting: &WaitingGroup| (waiting.group.tenant.clone(), waiting.position, waiting.oldest);
        let groups: Vec<_> = waiting.groups.iter().map(of).collect();
        assert_eq!(groups, [("b".to_owned(), 0, NOW), ("a".to_owned(), 1, old.submitted())]);
    }

    #[test]
    fn the_groups_of_one_tenant_are_not_all_before_those_of_another() {
        let waiting = |deployment: &str, tenant: &str, position, oldest| {
            let (deployment, tenant) = (deployment.to_owned(), tenant.to_owned());
            let group = TransferGroup { deployment, tenant, residency: "anywhere".to_owned() };
            WaitingGroup { group, jobs: 1, bytes: 1, position, oldest: UnixMillis(oldest) }
        };
        let groups = vec![
            waiting("x", "a", 0, 1),
            waiting("y", "a", 0, 2),
            waiting("z", "a", 0, 4),
            waiting("x", "b", 1, 9),
            waiting("z", "c", 1, 5),
        ];
        let order = |groups: Vec<WaitingGroup>| -> Vec<String> {
            let name =
                |waiting: WaitingGroup| format!("{}{}", waiting.group.tenant, waiting.group.deployment);
            interleaved(groups).into_iter().map(name).collect()
        };
        assert_eq!(order(groups.clone()), ["ax", "cz", "bx", "ay", "az"]);
        assert_eq!(order(groups.into_iter().rev().collect()), ["ax", "cz", "bx", "ay", "az"]);
    }

    #[test]
    fn demands_are_met_in_the_order_of_the_queue_and_not_of_names() {
        let waiting = |residency: &str| WaitingGroup {
            group: group(residency),
            jobs: 1,
            bytes: 1,
            position: 0,
            oldest: NOW,
        };
        let demand = |residency: &str, target: &str, number: u32| {
            (TicketRequest { group: group(residency), target: region(target) }, number)
        };
        let demands = [
            demand("anywhere", "aws/us-east-1", 1),
            demand("us", "aws/us-west-2", 2),
            demand("us", "aws/us-east-1", 3),
            demand("eu", "aws/us-east-1", 4),
        ];
        let order = in_order(demands, &[waiting("us"), waiting("anywhere")]);
        let numbers: Vec<_> = order.into_iter().map(|(_, number)| number).collect();
        let of_us = if region("aws/us-east-1") < region("aws/us-west-2") { [3, 2] } else { [2, 3] };
        assert_eq!(numbers, [of_us[0], of_us[1], 1]);
    }

    #[test]
    fn each_of_too_many_groups_is_listed_for_some_draw() {
        assert_eq!(listed(vec![1, 2, 3], 3, 2), [1, 2, 3], "as many as permitted, in their order");
        assert_eq!(listed(vec![1, 2, 3, 4], 3, 2), [3, 4, 1]);
        let last = |draw: u64| listed((0..65).collect(), 64, draw).contains(&64);
        assert!(!last(0) && (1..65).all(last));
    }

    #[test]
    fn jobs_are_taken_by_group_and_large_ones_stay() {
        let mut jobs = TestQueue::new();
        jobs.submit(None, 1, 10);
        let locked = jobs.submit(Some("eu"), 1, 10);
        jobs.submit(Some("anywhere"), TRANSFER_INPUTS_MAX + 1, 10);
        jobs.submit(Some("anywhere"), 1, TRANSFER_BYTES_MAX + 1);
        let open = jobs.submit(Some("anywhere"), TRANSFER_INPUTS_MAX, TRANSFER_BYTES_MAX);
        let second = jobs.submit(Some("anywhere"), 1, 10);
        let waiting = backlog(&mut jobs.queue, "minilm", &POLICY, NOW).groups;
        let (of_open, of_locked) = ((2, TRANSFER_BYTES_MAX + 10), (1, 10));
        let expected = [
            (group("eu"), of_locked, 1, locked.submitted()),
            (group("anywhere"), of_open, 4, open.submitted()),
        ];
        let expected = expected.map(|(group, (jobs, bytes), position, oldest)| WaitingGroup {
            group,
            jobs,
            bytes,
            position,
            oldest,
        });
        assert_eq!(waiting, expected);
        assert_eq!(jobs.take("eu", 10, 10), [locked]);
        assert_eq!(jobs.take("anywhere", 10, 1), [open], "at least one");
        assert_eq!(jobs.take("anywhere", 1, 10_000), [open], "one at most");
        assert_eq!(jobs.take("anywhere", 10, 10_000), [open, second]);
        assert_eq!(jobs.take("us", 10, 10), []);
    }

    #[test]
    fn jobs_behind_the_first_ones_are_not_considered() {
        let mut jobs = TestQueue::new();
        (0..SCAN_MAX).for_each(|_| {
            jobs.submit(Some("eu"), 1, 1);
        });
        jobs.submit(Some("anywhere"), 1, 1);
        assert_eq!(jobs.take("anywhere", 1, 1), []);
        assert_eq!(jobs.take("eu", SCAN_MAX + 1, u64::MAX).len(), SCAN_MAX);
    }

    #[test]
    fn a_ticket_is_pulled_once_and_ended_once() {
        let (mut table, now) = (TicketTable::new(7), start());
        let number = table.offer(request("aws/us-east-1"), now).unwrap();
        assert_eq!(table.pull(&request("aws/us-west-2"), now), None, "of another region");
        let locked = TicketRequest { group: group("eu"), ..request("aws/us-east-1") };
        assert_eq!(table.pull(&locked, now), None, "of another group");
        assert_eq!(table.end(number, now), None, "it is not granted");
        assert_eq!(table.pull(&request("aws/us-east-1"), now), Some(number));
        assert_eq!(table.pull(&request("aws/us-east-1"), now), None);
        assert_eq!(table.end(number, now), Some(request("aws/us-east-1")));
        assert_eq!((table.end(number, now), table.is_empty()), (None, true));
    }

    #[test]
    fn a_ticket_of_a_lost_gateway_expires_and_its_late_result_is_discarded() {
        let (mut table, now) = (TicketTable::new(u64::MAX), start());
        let number = table.offer(request("aws/us-east-1"), now).unwrap();
        table.pull(&request("aws/us-east-1"), now);
        let last = now + TICKET_LEASE - Duration::from_millis(1);
        assert!(table.renew(number, last), "a renewal in time");
        assert_eq!(table.next_expiry(), Some(last + TICKET_LEASE));
        assert_eq!(table.expire(last + TICKET_LEASE - Duration::from_millis(1)), []);
        let end = last + TICKET_LEASE;
        assert!(!table.renew(number, end) && table.end(number, end).is_none(), "also before it is removed");
        let expired = ExpiredTicket { number, request: request("aws/us-east-1"), was_granted: true };
        assert_eq!(table.expire(end), [expired]);
        assert_eq!(table.expire(end), []);
        // The request is offered again, with another number.
        let again = table.offer(request("aws/us-east-1"), end).unwrap();
        assert_eq!(table.pull(&request("aws/us-east-1"), end), Some(again));
        assert_eq!(table.end(number, end), None, "the late result of the first ticket");
        assert!(table.end(again, end).is_some());
    }

    #[test]
    fn a_request_that_no_gateway_takes_is_returned() {
        let (mut table, now) = (TicketTable::new(0), start());
        let number = table.offer(request("aws/us-east-1"), now).unwrap();
        assert_eq!(table.pull(&request("aws/us-east-1"), now + OFFER_LEASE), None);
        let expired = table.expire(now + OFFER_LEASE);
        assert_eq!((expired[0].number, expired[0].was_granted), (number, false));
        let number = table.offer(request("aws/us-east-1"), now).unwrap();
        assert!(table.withdraw(number) && !table.withdraw(number));
    }

    #[test]
    fn a_region_has_the_maximum_number_of_tickets_and_not_one_more() {
        let (mut table, now) = (TicketTable::new(0), start());
        let first = table.offer(request("aws/us-east-1"), now).unwrap();
        for _ in 1..TICKETS_PER_REGION_MAX {
            table.offer(request("aws/us-east-1"), now + SECOND).unwrap();
        }
        assert_eq!(table.offer(request("aws/us-east-1"), now), Err(TicketsFull));
        assert!(table.offer(request("aws/us-west-2"), now).is_ok(), "another region");
        assert_eq!(table.free(region("aws/us-east-1")), 0);
        assert_eq!(table.free(region("aws/us-west-2")), TICKETS_PER_REGION_MAX - 1);
        assert_eq!(table.pull(&request("aws/us-east-1"), now), Some(first), "the oldest first");
        table.end(first, now);
        assert!(table.offer(request("aws/us-east-1"), now).is_ok());
    }
}
