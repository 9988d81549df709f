//! Burst on a deployment that is scaled to zero, request by request: lost requests, waiting times and cost.
//!
//! The same arrivals meet three policies. The first is the real [`Spoke`]: its hold queue ([`crate::spoke::hold`]), its
//! replica selection and its autoscaler. The other two scale as described in the parent module, behind a
//! first-come-first-served queue that gives each replica as many requests as it has in flight under full load. A
//! request that has no response when its client disconnects is lost, and so is a rejected one.
//!
//! All queues have the same size, which favours the others: Knative's activator keeps far fewer requests.

use super::*;
use crate::spoke::hold::{HELD_MAX, HoldDecision, HoldRequest, HoldTicket, ReleaseReason};
use crate::spoke::{PassiveHealth, ReplicaOutcome, ReplicaStatus, SelectedReplica, Spoke};
use regions::priority::Priority;
use regions::{DeploymentName, HostPort};
use std::collections::BTreeMap;

/// Time step.
const TIME_STEP: Duration = Duration::from_millis(10);
/// Client timeout.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Tenants, which take turns.
const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
/// Interval of replica status polls.
const STATUS_PERIOD: Duration = Duration::from_millis(200);

/// Queue in which requests wait for a replica.
trait RequestQueue {
    /// Adds a request; false if it is rejected.
    fn push(&mut self, number: usize, deadline: Instant, now: Instant) -> bool;
    /// Removes a request whose client has disconnected.
    fn remove(&mut self, number: usize);
    /// Reports the status of this replica: it became ready, is being drained, or is unchanged.
    fn observe_replica(&mut self, replica: usize, ready: bool, queued: usize, now: Instant);
    /// Returns the requests to dispatch now, with their replicas; `queued` is the queue length of each ready replica.
    fn dispatch(&mut self, queued: &BTreeMap<usize, usize>, now: Instant) -> Vec<(usize, usize)>;
    /// Records the response to this request.
    fn responded(&mut self, number: usize, now: Instant);
    /// Returns the number of waiting requests.
    fn waiting(&self) -> usize;
}

/// Queue and replica selection of a region.
struct SpokeQueue {
    spoke: Spoke,
    name: DeploymentName,
    tickets: BTreeMap<usize, HoldTicket>,
    /// Request of each ticket number.
    holders: BTreeMap<u64, usize>,
    /// Requests that are forwarded without waiting.
    forwarded: Vec<usize>,
    selections: BTreeMap<usize, SelectedReplica>,
}

impl SpokeQueue {
    fn new(start: Duration) -> SpokeQueue {
        let at = |port| HostPort::from(([10, 0, 0, 1], port));
        // One endpoint for each replica that is started during the simulation.
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, (1..400).map(at).collect());
        let name: DeploymentName = "d".parse().unwrap();
        spoke.set_start_time(&name, Some(start));
        let (tickets, holders, selections) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        SpokeQueue { spoke, name, tickets, holders, forwarded: Vec::new(), selections }
    }

    fn select(&mut self, number: usize, now: Instant) -> (usize, usize) {
        let healthy = |_| PassiveHealth::HEALTHY;
        let selected =
            self.spoke.select_replica(&self.name, TOKENS as u64, healthy, now).expect("a replica is ready");
        let replica = selected.index;
        self.selections.insert(number, selected);
        (number, replica)
    }
}

impl RequestQueue for SpokeQueue {
    fn push(&mut self, number: usize, deadline: Instant, now: Instant) -> bool {
        let request = HoldRequest {
            deployment: &self.name,
            tenant: TENANTS[number % TENANTS.len()],
            priority: Priority::Interactive,
            bytes: 4 * TOKENS as u64,
            tokens: TOKENS as u64,
            deadline,
            other_region_in: None,
        };
        match self.spoke.hold_or_forward(&request, now) {
            Ok(HoldDecision::Forward) => self.forwarded.push(number),
            Ok(HoldDecision::Held { ticket, .. }) => {
                self.holders.insert(ticket.number(), number);
                self.tickets.insert(number, ticket);
            }
            Err(_) => return false,
        }
        true
    }

    fn remove(&mut self, number: usize) {
        let ticket = self.tickets.remove(&number).expect("a waiting request has a ticket");
        self.holders.remove(&ticket.number());
        self.spoke.return_ticket(ticket);
    }

    fn observe_replica(&mut self, replica: usize, ready: bool, queued: usize, now: Instant) {
        let observed = ReplicaStatus {
            model: None,
            failure: None,
            names: [self.name.clone()].into(),
            ready,
            draining: !ready,
            pending_tokens: queued as u64 * TOKENS as u64,
            interactive_tokens: None,
            tokens_per_second: SPEED as f64,
        };
        self.spoke.observe_replica(replica, observed, now);
    }

    fn dispatch(&mut self, _: &BTreeMap<usize, usize>, now: Instant) -> Vec<(usize, usize)> {
        let mut dispatched: Vec<_> = std::mem::take(&mut self.forwarded);
        for release in self.spoke.release(now) {
            assert!(
                matches!(release.reason, ReleaseReason::ReplicaReady { .. }),
                "a replica is always being started"
            );
            let number = self.holders.remove(&release.number).expect("a released request was waiting");
            let ticket = self.tickets.remove(&number).expect("a waiting request has a ticket");
            self.spoke.return_ticket(ticket);
            dispatched.push(number);
        }
        dispatched.into_iter().map(|number| self.select(number, now)).collect()
    }

    fn responded(&mut self, number: usize, now: Instant) {
        let selected = self.selections.remove(&number).expect("it was sent to a replica");
        self.spoke.finished(&selected, ReplicaOutcome::Responded, now);
    }

    fn waiting(&self) -> usize {
        self.tickets.len()
    }
}

/// Queue of the other policies: first come, first served.
#[derive(Default)]
struct FifoQueue(VecDeque<usize>);

impl RequestQueue for FifoQueue {
    fn push(&mut self, number: usize, _: Instant, _: Instant) -> bool {
        let has_capacity = self.0.len() < HELD_MAX;
        if has_capacity {
            self.0.push_back(number);
        }
        has_capacity
    }

    fn remove(&mut self, number: usize) {
        self.0.retain(|waits| *waits != number);
    }

    fn observe_replica(&mut self, _: usize, _: bool, _: usize, _: Instant) {}

    fn dispatch(&mut self, queued: &BTreeMap<usize, usize>, _: Instant) -> Vec<(usize, usize)> {
        let (mut queued, mut dispatched) = (queued.clone(), Vec::new());
        while let Some((replica, least)) = queued.iter_mut().min_by_key(|(index, count)| (**count, **index)) {
            if *least >= CONCURRENCY as usize {
                break;
            }
            let Some(number) = self.0.pop_front() else { break };
            *least += 1;
            dispatched.push((number, *replica));
        }
        dispatched
    }

    fn responded(&mut self, _: usize, _: Instant) {}

    fn waiting(&self) -> usize {
        self.0.len()
    }
}

/// Simulated replica.
struct SimulatedReplica {
    ready_at: Instant,
    is_observed: bool,
    /// It is being drained.
    is_draining: bool,
    /// Queued requests with their remaining tokens.
    queue: VecDeque<(usize, f64)>,
}

/// Result of a burst.
struct BurstResult {
    requests: usize,
    lost: usize,
    p50: Duration,
    p99: Duration,
    peak: usize,
    replica_seconds: f64,
}

impl fmt::Display for BurstResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BurstResult { requests, lost, p50, p99, peak, replica_seconds } = self;
        let (p50, p99) = (p50.as_secs_f64(), p99.as_secs_f64());
        write!(
            f,
            "{requests:>6} requests {lost:>5} lost   wait p50 {p50:>5.1} s  p99 {p99:>5.1} s   peak {peak:>3}   \
             {replica_seconds:>7.0} replica-seconds"
        )
    }
}

/// Simulated region.
struct SimulatedRegion<'a> {
    queue: &'a mut dyn RequestQueue,
    policy: &'a mut dyn ScalingPolicy,
    start: Duration,
    now: Instant,
    replicas: BTreeMap<usize, SimulatedReplica>,
    started: usize,
    arrivals: Vec<Instant>,
    /// Requests in the hold queue, in the order of arrival.
    waiting: VecDeque<usize>,
    dispatched: BTreeMap<usize, Instant>,
    latencies: Vec<Duration>,
    lost: usize,
    arrived: f64,
    replica_seconds: f64,
    peak: usize,
}

impl SimulatedRegion<'_> {
    fn arrive(&mut self, count: usize) {
        for _ in 0..count {
            let number = self.arrivals.len();
            self.arrivals.push(self.now);
            self.arrived += 1.0;
            if self.queue.push(number, self.now + CLIENT_TIMEOUT, self.now) {
                self.waiting.push_back(number);
            } else {
                self.lost += 1;
            }
        }
    }

    /// Removes requests whose clients have disconnected.
    fn expire_clients(&mut self) {
        while let Some(&first) = self.waiting.front() {
            if self.dispatched.contains_key(&first) {
                self.waiting.pop_front();
            } else if self.now >= self.arrivals[first] + CLIENT_TIMEOUT {
                self.waiting.pop_front();
                self.queue.remove(first);
                self.lost += 1;
            } else {
                break;
            }
        }
    }

    fn serve(&mut self) {
        let now = self.now;
        for (index, replica) in &mut self.replicas {
            if now < replica.ready_at {
                continue;
            }
            let since = now.saturating_duration_since(replica.ready_at);
            let is_due = since.as_millis().is_multiple_of(STATUS_PERIOD.as_millis());
            if !replica.is_observed || is_due {
                self.queue.observe_replica(*index, !replica.is_draining, replica.queue.len(), now);
                replica.is_observed = true;
            }
            let mut budget = SPEED as f64 * TIME_STEP.as_secs_f64();
            while let Some((number, left)) = replica.queue.front_mut().filter(|_| budget > 0.0) {
                let done = left.min(budget);
                *left -= done;
                budget -= done;
                if *left > 1e-9 {
                    break;
                }
                let number = *number;
                replica.queue.pop_front();
                self.queue.responded(number, now);
                let latencies = now.saturating_duration_since(self.arrivals[number]);
                if latencies <= CLIENT_TIMEOUT { self.latencies.push(latencies) } else { self.lost += 1 }
            }
        }
        let ready =
            self.replicas.iter().filter(|(_, replica)| now >= replica.ready_at && !replica.is_draining);
        let queued = ready.map(|(index, replica)| (*index, replica.queue.len())).collect();
        for (number, index) in self.queue.dispatch(&queued, now) {
            self.dispatched.insert(number, now);
            self.replicas.get_mut(&index).expect("it is ready").queue.push_back((number, TOKENS));
        }
    }

    fn scale(&mut self) {
        let now = self.now;
        let stays = self.replicas.values().filter(|replica| !replica.is_draining);
        let (ready, provisioning): (Vec<_>, Vec<_>) = stays.partition(|replica| now >= replica.ready_at);
        let queued: usize = ready.iter().map(|replica| replica.queue.len()).sum();
        let full = ready.len() * CONCURRENCY as usize;
        let input = PolicyInput {
            now,
            arrived: std::mem::take(&mut self.arrived),
            waiting: (self.queue.waiting() + queued.saturating_sub(full)) as f64,
            ready: ready.len() as u32,
            provisioning: provisioning.iter().map(|replica| replica.ready_at - now).collect(),
            start: self.start,
        };
        let count = ready.len() + provisioning.len();
        let desired = self.policy.desired(&input).min(MAX) as usize;
        for _ in count..desired {
            let replica = SimulatedReplica {
                ready_at: now + self.start,
                is_observed: false,
                is_draining: false,
                queue: VecDeque::new(),
            };
            self.replicas.insert(self.started, replica);
            self.started += 1;
        }
        // The youngest replicas are drained first.
        for (index, replica) in
            self.replicas.iter_mut().rev().filter(|(_, r)| !r.is_draining).take(count.saturating_sub(desired))
        {
            replica.is_draining = true;
            if now >= replica.ready_at {
                self.queue.observe_replica(*index, false, replica.queue.len(), now);
            }
        }
    }

    fn count(&mut self) {
        self.replicas.retain(|_, replica| !(replica.is_draining && replica.queue.is_empty()));
        self.peak = self.peak.max(self.replicas.len());
        self.replica_seconds += self.replicas.len() as f64 * TIME_STEP.as_secs_f64();
    }
}

/// Sends `rate` requests a second for `lasts` to a region without replicas, and runs until it has none again.
fn burst(
    queue: &mut dyn RequestQueue,
    policy: &mut dyn ScalingPolicy,
    start: Duration,
    rate: usize,
    lasts: Duration,
) -> BurstResult {
    let begin = some_instant();
    let mut region = SimulatedRegion {
        queue,
        policy,
        start,
        now: begin,
        replicas: BTreeMap::new(),
        started: 0,
        arrivals: Vec::new(),
        waiting: VecDeque::new(),
        dispatched: BTreeMap::new(),
        latencies: Vec::new(),
        lost: 0,
        arrived: 0.0,
        replica_seconds: 0.0,
        peak: 0,
    };
    let (asks, over) = ((lasts.as_millis() / TIME_STEP.as_millis()) as usize, 120_000);
    for moment in 1..=over {
        if moment > asks && region.replicas.is_empty() && region.waiting.is_empty() {
            break;
        }
        region.now = begin + TIME_STEP * moment as u32;
        if moment <= asks {
            region.arrive(rate * moment / 100 - rate * (moment - 1) / 100);
        }
        region.expire_clients();
        // The first waiting request triggers an evaluation; further ones follow every two seconds.
        if moment == 1 || moment.is_multiple_of(200) {
            region.scale();
        }
        region.serve();
        region.count();
    }
    assert_eq!(
        region.latencies.len() + region.lost,
        region.arrivals.len(),
        "every request ends exactly once (invariant 2, One outcome)"
    );
    assert!(region.replicas.is_empty(), "the deployment is at zero replicas again");
    let mut latencies = region.latencies;
    latencies.sort_unstable();
    let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
    let (p50, p99) = (at(50), at(99));
    BurstResult {
        requests: region.arrivals.len(),
        lost: region.lost,
        p50,
        p99,
        peak: region.peak,
        replica_seconds: region.replica_seconds,
    }
}

/// Runs all three policies.
fn all_three(start: Duration, rate: usize, lasts: Duration) -> [BurstResult; 3] {
    let config =
        Scaling { min: 0, max: MAX, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() };
    let mut ours = Scaler::new(config, some_instant());
    let mut two = TwoWindows { observed: Window(VecDeque::new()), panics: None };
    let mut one = OneWindow { observed: Window(VecDeque::new()), history: VecDeque::new() };
    let bursts = [
        burst(&mut SpokeQueue::new(start), &mut ours, start, rate, lasts),
        burst(&mut FifoQueue::default(), &mut two, start, rate, lasts),
        burst(&mut FifoQueue::default(), &mut one, start, rate, lasts),
    ];
    println!(
        "{rate} requests a second for {} s from zero replicas, {} s to start, clients wait {} s",
        lasts.as_secs(),
        start.as_secs(),
        CLIENT_TIMEOUT.as_secs()
    );
    for (name, burst) in ["ours", "in flight, two windows", "in flight, fixed"].iter().zip(&bursts) {
        println!("  {name:<22} {burst}");
    }
    bursts
}

#[test]
fn a_burst_on_a_deployment_at_zero_loses_no_request_and_costs_less_than_with_other_policies() {
    for (start, rate, lasts) in [(1, 600, 10), (8, 600, 10), (20, 150, 10)] {
        let [ours, two, one] = all_three(Duration::from_secs(start), rate, Duration::from_secs(lasts));
        assert_eq!(ours.lost, 0);
        assert!(ours.peak <= two.peak.min(one.peak));
        assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds));
    }
}
