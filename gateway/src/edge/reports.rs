//! Hears every region five times a second.
//!
//! The edge asks and the region answers with its report: so the edge needs no door for regions, the time from question
//! to answer is the round trip, and a region that is cut off in either direction falls silent. Questions leave on the
//! beat whether or not earlier ones were answered: over an ocean two or three are under way at once, and a stall is
//! seen in the beat that it happens.

use super::table::Current;
use super::watch::Watch;
use crate::config::EdgeConfig;
use gateway_core::health::{Heard, REPORT_PERIOD};
use regions::set::RegionIndex;
use scheduler_core::spoke::{Gateway, Question};
use scheduler_core::wire::report::{ExchangeRequestV1, ReportV1};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long a report is waited for; by then the region is long known to be down.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Questions under way to one region: all that fit into the timeout.
const UNDER_WAY_MAX: usize = (EXCHANGE_TIMEOUT.as_millis() / REPORT_PERIOD.as_millis()) as usize;

/// Listens to the regions of the current table, for ever.
pub(crate) async fn listen(
    config: Arc<EdgeConfig>,
    client: reqwest::Client,
    mut views: watch::Receiver<Current>,
    watch: Arc<Watch>,
) {
    let mut heard: BTreeMap<(RegionIndex, SocketAddr), tokio::task::AbortHandle> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let gateway = Gateway { place: config.place.to_string(), boot_id: rand::random() };
    loop {
        let wanted: Vec<_> = views.borrow_and_update().iter().flat_map(|view| view.regions()).collect();
        watch.watch(wanted.iter().map(|(region, _)| *region));
        heard.retain(|region, task| {
            let stays = wanted.contains(region);
            if !stays {
                task.abort();
            }
            stays
        });
        for (region, address) in wanted {
            heard.entry((region, address)).or_insert_with(|| {
                let ear = Ear {
                    region,
                    url: format!("http://{address}/spoke/v1/exchange"),
                    gateway: gateway.clone(),
                    client: client.clone(),
                    watch: watch.clone(),
                    newest: AtomicU64::new(0),
                };
                tasks.spawn(Arc::new(ear).listen())
            });
        }
        if views.changed().await.is_err() {
            return;
        }
    }
}

/// Listens to one region.
struct Ear {
    region: RegionIndex,
    url: String,
    gateway: Gateway,
    client: reqwest::Client,
    watch: Arc<Watch>,
    /// The newest report that was taken; an older one that comes later says nothing new.
    newest: AtomicU64,
}

impl Ear {
    async fn listen(self: Arc<Ear>) {
        let mut beat = tokio::time::interval(REPORT_PERIOD);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut under_way = JoinSet::new();
        for sequence in 1.. {
            beat.tick().await;
            while under_way.try_join_next().is_some() {}
            if under_way.len() < UNDER_WAY_MAX {
                under_way.spawn(self.clone().exchange(sequence));
            }
        }
    }

    async fn exchange(self: Arc<Ear>, sequence: u64) {
        let asked = Instant::now();
        let wanted = self.watch.wanted(self.region);
        let question = Question { gateway: self.gateway.clone(), sequence, wanted };
        match self.ask(&ExchangeRequestV1::from(question)).await {
            Ok(report) => self.take(report, asked),
            Err(error) => tracing::debug!(url = self.url, %error, "no report"),
        }
    }

    async fn ask(&self, question: &ExchangeRequestV1) -> reqwest::Result<ReportV1> {
        let answer = self.client.post(&self.url).json(question).timeout(EXCHANGE_TIMEOUT).send().await?;
        answer.error_for_status()?.json().await
    }

    fn take(&self, report: ReportV1, asked: Instant) {
        let report = match scheduler_core::spoke::Report::try_from(report) {
            Ok(report) => report,
            Err(error) => {
                return tracing::warn!(url = self.url, %error, "a report that cannot be read is refused");
            }
        };
        if self.newest.fetch_max(report.sequence, Ordering::Relaxed) >= report.sequence {
            return;
        }
        self.watch.loaded(self.region, &report, asked);
        self.watch.shedding.heard(self.region, &report);
        let ready = report.deployments.iter().filter(|(_, load)| load.ready > 0);
        let ready = ready.map(|(name, _)| name.clone()).collect();
        self.watch
            .reported(self.region, Heard { round_trip: asked.elapsed(), ready, draining: report.draining });
    }
}
