//! Which processes are killed, in which order and when, from a seed.

use crate::fleet::{self, Fleet};
use crate::nats::{NODES, NatsCluster};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Times that each process is killed.
const TIMES: usize = 2;
/// Longest time until a killed process is started again, milliseconds.
const DOWN_MS_MAX: u64 = 1000;
/// Period of checks of the progress of the load.
const PERIOD: Duration = Duration::from_millis(20);

/// Process or processes to kill.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kill {
    Gateway(usize),
    Spoke(&'static str, usize),
    Replica(&'static str, usize),
    /// All processes of a region.
    Region(&'static str),
    /// A NATS server, which the seed selects.
    NatsNode,
}

struct PlannedKill {
    kill: Kill,
    /// Number of the job at which it happens.
    at: usize,
    down: Duration,
    nats_node: usize,
}

/// Kills of a run.
pub(crate) struct KillPlan {
    kills: Vec<PlannedKill>,
    jobs: usize,
}

impl KillPlan {
    /// Plans each of the kills twice, during the load of this number of jobs.
    pub(crate) fn new(seed: u64, kinds: &[Kill], jobs: usize) -> KillPlan {
        let mut random = StdRng::seed_from_u64(seed);
        let mut kinds: Vec<Kill> = kinds.iter().flat_map(|kind| [*kind; TIMES]).collect();
        kinds.shuffle(&mut random);
        let mut times: Vec<_> = kinds.iter().map(|_| random.random_range(jobs / 20..jobs * 9 / 10)).collect();
        times.sort_unstable();
        let mut planned = |(kill, at)| PlannedKill {
            kill,
            at,
            down: Duration::from_millis(random.random_range(0..DOWN_MS_MAX)),
            nats_node: random.random_range(0..NODES),
        };
        KillPlan { kills: kinds.into_iter().zip(times).map(&mut planned).collect(), jobs }
    }

    /// Returns the number of kills.
    pub(crate) fn len(&self) -> usize {
        self.kills.len()
    }

    /// Performs the kills when so many jobs have begun. Until a process is ready again, the load may go on to the next kill.
    pub(crate) async fn perform(
        self,
        fleet: &mut Fleet,
        mut nats: Option<NatsCluster>,
        begun_jobs: &AtomicUsize,
        limit: &watch::Sender<usize>,
    ) -> Option<NatsCluster> {
        for (index, PlannedKill { kill, at, down, nats_node }) in self.kills.iter().enumerate() {
            limit.send_replace(self.kills.get(index + 1).map_or(self.jobs, |next| next.at.max(at + 1)));
            while begun_jobs.load(Ordering::Relaxed) < *at {
                tokio::time::sleep(PERIOD).await;
            }
            fleet.print(&format!("job {at}: {kill:?} is killed, for {} ms", down.as_millis()));
            let processes = match kill {
                Kill::Gateway(number) => vec![fleet::gateway(*number)],
                Kill::Spoke(region, number) => vec![fleet::spoke(region, *number)],
                Kill::Replica(region, number) => vec![fleet::replica(region, *number)],
                Kill::Region(region) => fleet.processes_of(region),
                Kill::NatsNode => {
                    let nats = nats.as_mut().expect("a cluster");
                    nats.kill(*nats_node);
                    tokio::time::sleep(*down).await;
                    nats.start_again(&[*nats_node]).await;
                    continue;
                }
            };
            for process in &processes {
                fleet.kill(process).await;
            }
            tokio::time::sleep(*down).await;
            for process in &processes {
                fleet.start_process(process).await;
            }
        }
        limit.send_replace(self.jobs);
        nats
    }
}
