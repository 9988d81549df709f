//! A whole run: a thread that starts requests on time, tasks that carry them, and a loop that watches.
//!
//! The pacer is a thread of its own and not a task: the runtime's timer ticks in milliseconds and its threads are busy
//! with answers, and both would show up as latency of the server. The thread sleeps in the kernel and spawns each request
//! onto the runtime, where it starts 0.1 to 0.2 ms after its time at the median (2-core Linux machine, 100 to 10 000
//! requests/s, server on the same machine).
//!
//! Every request holds a clone of one channel's sender, through which nothing is ever sent; the channel closes when the
//! last of them is done, which is how the run knows that nothing is left behind.

use std::convert::Infallible;
use std::future::Future;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::arrival::Timetable;
use crate::client::{Client, Sample};
use crate::options::Options;
use crate::pace::{IntendedStart, Next, Pace};
use crate::record::{Record, Snapshot};
use crate::report::Report;

/// How often a run says how it goes: quick enough for a bar that moves, rare enough to cost nothing.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// The run did not start.
#[derive(Debug, thiserror::Error)]
pub enum CannotStart {
    /// Nobody listens at the target.
    #[error("nothing answers at {target}: {source}; is it up, and is the port right?")]
    Unreachable {
        /// Where requests would have gone.
        target: String,
        /// What the attempt to connect said.
        source: std::io::Error,
    },
    /// The machine gives no thread to pace with.
    #[error("no thread for the pacer: {0}")]
    NoThread(std::io::Error),
}

/// Runs the load that `options` ask for. `progress` is called five times a second and once at the end; when
/// `shutdown` completes no further request is started, and those in flight are waited for, at most their time-out.
pub async fn run(
    options: Options,
    mut progress: impl FnMut(&Snapshot),
    shutdown: impl Future<Output = ()>,
) -> Result<Report, CannotStart> {
    let client = Client::new(&options);
    reach(&client, &options).await?;

    let shared = Arc::new(Shared {
        client,
        record: Mutex::new(Record::of(&options.profile)),
        in_flight: Arc::new(Semaphore::new(options.in_flight_max)),
    });
    let (start, duration) = (Instant::now(), options.profile.lasts());
    let snapshot = || {
        let in_flight = options.in_flight_max - shared.in_flight.available_permits();
        Snapshot::of(&shared.record(), in_flight as u64, start.elapsed(), duration)
    };

    let timetable = Timetable::new(options.arrival, options.profile.clone(), options.seed);
    let (held_by_requests, mut requests_done) = mpsc::channel::<Infallible>(1);
    let (stop, stopped) = std::sync::mpsc::channel();
    let pacer = {
        let (shared, runtime) = (Arc::clone(&shared), Handle::current());
        let launch = move |intended| shared.launch(intended, &runtime, &held_by_requests);
        std::thread::Builder::new()
            .name("pacer".to_owned())
            .spawn(move || pace(Pace::new(timetable, start), &stopped, launch))
            .map_err(CannotStart::NoThread)?
    };

    let mut stop = Some(stop);
    let mut shutdown = std::pin::pin!(shutdown);
    let mut ticks = interval(PROGRESS_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = requests_done.recv() => break,
            _ = ticks.tick() => progress(&snapshot()),
            () = &mut shutdown, if stop.is_some() => stop = None,
        }
    }
    let elapsed = start.elapsed();
    // It dropped the last sender on its way out, so this does not wait.
    let paced_to_the_end = pacer.join().expect("the pacer only sleeps and spawns");
    progress(&snapshot());

    let record = std::mem::take(&mut *shared.record());
    Ok(Report { options, elapsed, stopped_early: !paced_to_the_end, record })
}

struct Shared {
    client: Client,
    record: Mutex<Record>,
    in_flight: Arc<Semaphore>,
}

impl Shared {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().expect("nobody panics while adding to the record")
    }

    fn launch(
        self: &Arc<Shared>,
        intended: IntendedStart,
        runtime: &Handle,
        held: &mpsc::Sender<Infallible>,
    ) {
        let Ok(permit) = Arc::clone(&self.in_flight).try_acquire_owned() else {
            self.record().add(Sample::not_sent(intended, Instant::now()));
            return;
        };
        let (shared, held) = (Arc::clone(self), held.clone());
        runtime.spawn(async move {
            let sample = shared.client.send(intended).await;
            shared.record().add(sample);
            drop((permit, held));
        });
    }
}

/// Launches every start on time, to the end of the timetable or until told to stop; says which of the two.
fn pace(mut pace: Pace, stopped: &Receiver<()>, launch: impl Fn(IntendedStart)) -> bool {
    loop {
        match pace.next(Instant::now()) {
            Next::Finished => return true,
            Next::Wait(span) => match stopped.recv_timeout(span) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return false,
            },
            Next::Start(intended) => match stopped.try_recv() {
                Err(TryRecvError::Empty) => launch(intended),
                Ok(()) | Err(TryRecvError::Disconnected) => return false,
            },
        }
    }
}

/// One connection, thrown away: a run of thirty seconds against a wrong port helps nobody.
async fn reach(client: &Client, options: &Options) -> Result<(), CannotStart> {
    let connect = async { TcpStream::connect(client.addresses().await?.as_slice()).await };
    let connected = match timeout(options.timeout, connect).await {
        Ok(connected) => connected.map(drop),
        Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
    };
    connected.map_err(|source| CannotStart::Unreachable { target: options.target.to_string(), source })
}
