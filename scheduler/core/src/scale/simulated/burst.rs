//! A burst on a deployment that sleeps, request by request: how many are lost, how long the others wait, and what it costs.
//!
//! The same arrivals come before three policies. *Ours* is the real [`Spoke`]: its line ([`crate::spoke::hold`]), its choice
//! of a replica, and its scaler. The other two scale as their field does (see the file above this one) behind a line of its
//! kind: first come first served, a replica being given as many at a time as it has under way when it is full. Whoever is not
//! answered when the client hangs up is lost, and so is whoever is turned away.
//!
//! Both doors hold as many as ours does, which is kind to the others: an activator of Knative keeps far fewer.

use super::*;
use crate::spoke::hold::{Band, CalledTo, Comes, Fate, HELD_MAX, Ticket};
use crate::spoke::{Outcome, ReplicaChoice, ReplicaObserved, Seen as SeenOf, Spoke};
use regions::DeploymentName;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// How finely time passes.
const MOMENT: Duration = Duration::from_millis(10);
/// What a request's client waits, unless it says otherwise.
const PATIENCE: Duration = Duration::from_secs(30);
/// Of so many tenants, one after another.
const TENANTS: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
/// How often a region hears its replicas.
const STATUS: Duration = Duration::from_millis(200);

/// Where requests wait until a replica takes them.
trait Door {
    /// One comes; false if it is turned away.
    fn comes(&mut self, number: usize, deadline: Instant, now: Instant) -> bool;
    /// It waits no longer: its client has hung up.
    fn leaves(&mut self, number: usize);
    /// The replica of this place has become ready, is let go, or still is.
    fn hears(&mut self, replica: usize, ready: bool, queued: usize, now: Instant);
    /// Those who go to a replica now, with its place; `queued` is what each that is ready has.
    fn lets_go(&mut self, queued: &BTreeMap<usize, usize>, now: Instant) -> Vec<(usize, usize)>;
    /// A replica has answered this one.
    fn answered(&mut self, number: usize, now: Instant);
    /// How many wait.
    fn waiting(&self) -> usize;
}

/// The region's own.
struct Ours {
    spoke: Spoke,
    name: DeploymentName,
    tickets: BTreeMap<usize, Ticket>,
    /// Whose ticket has this number.
    holders: BTreeMap<u64, usize>,
    /// Those who need not wait.
    through: Vec<usize>,
    choices: BTreeMap<usize, ReplicaChoice>,
}

impl Ours {
    fn new(start: Duration) -> Ours {
        let at = |port| SocketAddr::from(([10, 0, 0, 1], port));
        // One place for each that is started, while this goes on.
        let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 1, (1..400).map(at).collect());
        let name: DeploymentName = "d".parse().unwrap();
        spoke.set_start(&name, Some(start));
        let (tickets, holders, choices) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Ours { spoke, name, tickets, holders, through: Vec::new(), choices }
    }

    fn goes(&mut self, number: usize, now: Instant) -> (usize, usize) {
        let fine = |_| SeenOf::FINE;
        let choice = self.spoke.choose(&self.name, TOKENS as u64, fine, now).expect("somebody is ready");
        let replica = choice.index;
        self.choices.insert(number, choice);
        (number, replica)
    }
}

impl Door for Ours {
    fn comes(&mut self, number: usize, deadline: Instant, now: Instant) -> bool {
        let comes = Comes {
            deployment: &self.name,
            tenant: TENANTS[number % TENANTS.len()],
            band: Band::Interactive,
            bytes: 4 * TOKENS as u64,
            tokens: TOKENS as u64,
            deadline,
            elsewhere: None,
        };
        match self.spoke.comes(&comes, now) {
            Ok(Fate::Now) => self.through.push(number),
            Ok(Fate::Held { ticket, .. }) => {
                self.holders.insert(ticket.number(), number);
                self.tickets.insert(number, ticket);
            }
            Err(_) => return false,
        }
        true
    }

    fn leaves(&mut self, number: usize) {
        let ticket = self.tickets.remove(&number).expect("whoever waits has a ticket");
        self.holders.remove(&ticket.number());
        self.spoke.left(ticket);
    }

    fn hears(&mut self, replica: usize, ready: bool, queued: usize, now: Instant) {
        let observed = ReplicaObserved {
            model: None,
            names: [self.name.clone()].into(),
            ready,
            draining: !ready,
            pending_tokens: queued as u64 * TOKENS as u64,
            lookup_tokens: None,
            tokens_per_second: SPEED as f64,
        };
        self.spoke.observe_replica(replica, observed, now);
    }

    fn lets_go(&mut self, _: &BTreeMap<usize, usize>, now: Instant) -> Vec<(usize, usize)> {
        let mut gone: Vec<_> = std::mem::take(&mut self.through);
        for call in self.spoke.call(now) {
            assert!(matches!(call.to, CalledTo::Replica { .. }), "somebody always starts one");
            let number = self.holders.remove(&call.number).expect("whoever is called waits");
            let ticket = self.tickets.remove(&number).expect("and has a ticket");
            self.spoke.left(ticket);
            gone.push(number);
        }
        gone.into_iter().map(|number| self.goes(number, now)).collect()
    }

    fn answered(&mut self, number: usize, now: Instant) {
        let choice = self.choices.remove(&number).expect("it went to a replica");
        self.spoke.finished(&choice, Outcome::Answered, now);
    }

    fn waiting(&self) -> usize {
        self.tickets.len()
    }
}

/// That of the others.
#[derive(Default)]
struct InTurn(VecDeque<usize>);

impl Door for InTurn {
    fn comes(&mut self, number: usize, _: Instant, _: Instant) -> bool {
        let room = self.0.len() < HELD_MAX;
        if room {
            self.0.push_back(number);
        }
        room
    }

    fn leaves(&mut self, number: usize) {
        self.0.retain(|waits| *waits != number);
    }

    fn hears(&mut self, _: usize, _: bool, _: usize, _: Instant) {}

    fn lets_go(&mut self, queued: &BTreeMap<usize, usize>, _: Instant) -> Vec<(usize, usize)> {
        let (mut queued, mut gone) = (queued.clone(), Vec::new());
        while let Some((replica, least)) = queued.iter_mut().min_by_key(|(place, count)| (**count, **place)) {
            if *least >= CONCURRENCY as usize {
                break;
            }
            let Some(number) = self.0.pop_front() else { break };
            *least += 1;
            gone.push((number, *replica));
        }
        gone
    }

    fn answered(&mut self, _: usize, _: Instant) {}

    fn waiting(&self) -> usize {
        self.0.len()
    }
}

/// One that was started.
struct Replica {
    ready_at: Instant,
    heard: bool,
    /// It finishes what it has.
    leaves: bool,
    /// Whose turn it is, with what is left of it, in tokens.
    queue: VecDeque<(usize, f64)>,
}

/// What a burst came to.
struct Burst {
    asked: usize,
    lost: usize,
    p50: Duration,
    p99: Duration,
    peak: usize,
    replica_seconds: f64,
}

impl fmt::Display for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Burst { asked, lost, p50, p99, peak, replica_seconds } = self;
        let (p50, p99) = (p50.as_secs_f64(), p99.as_secs_f64());
        write!(
            f,
            "{asked:>6} asked {lost:>5} lost   wait p50 {p50:>5.1} s  p99 {p99:>5.1} s   peak {peak:>3}   \
             {replica_seconds:>7.0} replica-seconds"
        )
    }
}

/// A region while time passes.
struct Region<'a> {
    door: &'a mut dyn Door,
    policy: &'a mut dyn Policy,
    start: Duration,
    now: Instant,
    replicas: BTreeMap<usize, Replica>,
    started: usize,
    asked: Vec<Instant>,
    /// Those who wait at the door, in the order in which they came.
    waiting: VecDeque<usize>,
    at_a_replica: BTreeMap<usize, Instant>,
    took: Vec<Duration>,
    lost: usize,
    arrived: f64,
    replica_seconds: f64,
    peak: usize,
}

impl Region<'_> {
    fn come(&mut self, count: usize) {
        for _ in 0..count {
            let number = self.asked.len();
            self.asked.push(self.now);
            self.arrived += 1.0;
            if self.door.comes(number, self.now + PATIENCE, self.now) {
                self.waiting.push_back(number);
            } else {
                self.lost += 1;
            }
        }
    }

    /// Those whose clients hang up.
    fn leave(&mut self) {
        while let Some(&first) = self.waiting.front() {
            if self.at_a_replica.contains_key(&first) {
                self.waiting.pop_front();
            } else if self.now >= self.asked[first] + PATIENCE {
                self.waiting.pop_front();
                self.door.leaves(first);
                self.lost += 1;
            } else {
                break;
            }
        }
    }

    fn serve(&mut self) {
        let now = self.now;
        for (place, replica) in &mut self.replicas {
            if now < replica.ready_at {
                continue;
            }
            let since = now.saturating_duration_since(replica.ready_at);
            let beat = since.as_millis().is_multiple_of(STATUS.as_millis());
            if !replica.heard || beat {
                self.door.hears(*place, !replica.leaves, replica.queue.len(), now);
                replica.heard = true;
            }
            let mut does = SPEED as f64 * MOMENT.as_secs_f64();
            while let Some((number, left)) = replica.queue.front_mut().filter(|_| does > 0.0) {
                let done = left.min(does);
                *left -= done;
                does -= done;
                if *left > 1e-9 {
                    break;
                }
                let number = *number;
                replica.queue.pop_front();
                self.door.answered(number, now);
                let took = now.saturating_duration_since(self.asked[number]);
                if took <= PATIENCE { self.took.push(took) } else { self.lost += 1 }
            }
        }
        let ready = self.replicas.iter().filter(|(_, replica)| now >= replica.ready_at && !replica.leaves);
        let queued = ready.map(|(place, replica)| (*place, replica.queue.len())).collect();
        for (number, place) in self.door.lets_go(&queued, now) {
            self.at_a_replica.insert(number, now);
            self.replicas.get_mut(&place).expect("it is ready").queue.push_back((number, TOKENS));
        }
    }

    fn look(&mut self) {
        let now = self.now;
        let stays = self.replicas.values().filter(|replica| !replica.leaves);
        let (ready, ordered): (Vec<_>, Vec<_>) = stays.partition(|replica| now >= replica.ready_at);
        let queued: usize = ready.iter().map(|replica| replica.queue.len()).sum();
        let full = ready.len() * CONCURRENCY as usize;
        let look = Look {
            now,
            arrived: std::mem::take(&mut self.arrived),
            waiting: (self.door.waiting() + queued.saturating_sub(full)) as f64,
            ready: ready.len() as u32,
            ordered: ordered.iter().map(|replica| replica.ready_at - now).collect(),
            start: self.start,
        };
        let count = ready.len() + ordered.len();
        let wanted = self.policy.wanted(&look).min(MAX) as usize;
        for _ in count..wanted {
            let replica =
                Replica { ready_at: now + self.start, heard: false, leaves: false, queue: VecDeque::new() };
            self.replicas.insert(self.started, replica);
            self.started += 1;
        }
        // Whoever came last goes first, and finishes what it has.
        for (place, replica) in
            self.replicas.iter_mut().rev().filter(|(_, r)| !r.leaves).take(count.saturating_sub(wanted))
        {
            replica.leaves = true;
            if now >= replica.ready_at {
                self.door.hears(*place, false, replica.queue.len(), now);
            }
        }
    }

    fn count(&mut self) {
        self.replicas.retain(|_, replica| !(replica.leaves && replica.queue.is_empty()));
        self.peak = self.peak.max(self.replicas.len());
        self.replica_seconds += self.replicas.len() as f64 * MOMENT.as_secs_f64();
    }
}

/// `rate` requests a second for `lasts`, on a region in which nothing runs, until nothing runs again.
fn burst(
    door: &mut dyn Door,
    policy: &mut dyn Policy,
    start: Duration,
    rate: usize,
    lasts: Duration,
) -> Burst {
    let begin = some_instant();
    let mut region = Region {
        door,
        policy,
        start,
        now: begin,
        replicas: BTreeMap::new(),
        started: 0,
        asked: Vec::new(),
        waiting: VecDeque::new(),
        at_a_replica: BTreeMap::new(),
        took: Vec::new(),
        lost: 0,
        arrived: 0.0,
        replica_seconds: 0.0,
        peak: 0,
    };
    let (asks, over) = ((lasts.as_millis() / MOMENT.as_millis()) as usize, 120_000);
    for moment in 1..=over {
        if moment > asks && region.replicas.is_empty() && region.waiting.is_empty() {
            break;
        }
        region.now = begin + MOMENT * moment as u32;
        if moment <= asks {
            region.come(rate * moment / 100 - rate * (moment - 1) / 100);
        }
        region.leave();
        // The first who waits wakes whoever starts replicas; then they are looked at every two seconds.
        if moment == 1 || moment.is_multiple_of(200) {
            region.look();
        }
        region.serve();
        region.count();
    }
    assert_eq!(
        region.took.len() + region.lost,
        region.asked.len(),
        "everybody ends once (invariant 2, One fate)"
    );
    assert!(region.replicas.is_empty(), "all sleep again in the end");
    let mut took = region.took;
    took.sort_unstable();
    let at = |percent: usize| took[(took.len() - 1) * percent / 100];
    let (p50, p99) = (at(50), at(99));
    Burst {
        asked: region.asked.len(),
        lost: region.lost,
        p50,
        p99,
        peak: region.peak,
        replica_seconds: region.replica_seconds,
    }
}

/// The three of them.
fn all_three(start: Duration, rate: usize, lasts: Duration) -> [Burst; 3] {
    let knobs =
        Scaling { min: 0, max: MAX, zero_after: Some(Duration::from_secs(300)), ..Scaling::default() };
    let mut ours = Scaler::new(knobs, some_instant());
    let mut two = TwoWindows { seen: Window(VecDeque::new()), panics: None };
    let mut one = OneWindow { seen: Window(VecDeque::new()), kept: VecDeque::new() };
    let bursts = [
        burst(&mut Ours::new(start), &mut ours, start, rate, lasts),
        burst(&mut InTurn::default(), &mut two, start, rate, lasts),
        burst(&mut InTurn::default(), &mut one, start, rate, lasts),
    ];
    println!(
        "{rate} requests a second for {} s on none, {} s to start, clients wait {} s",
        lasts.as_secs(),
        start.as_secs(),
        PATIENCE.as_secs()
    );
    for (who, burst) in ["ours", "in flight, two windows", "in flight, fixed"].iter().zip(&bursts) {
        println!("  {who:<22} {burst}");
    }
    bursts
}

#[test]
fn a_burst_on_a_deployment_that_sleeps_loses_nobody_and_costs_less_than_others_pay_for_it() {
    for (start, rate, lasts) in [(1, 600, 10), (8, 600, 10), (20, 150, 10)] {
        let [ours, two, one] = all_three(Duration::from_secs(start), rate, Duration::from_secs(lasts));
        assert_eq!(ours.lost, 0);
        assert!(ours.peak <= two.peak.min(one.peak));
        assert!(ours.replica_seconds <= two.replica_seconds.min(one.replica_seconds));
    }
}
