//! Tells the hub what this gateway is asked for, and hears how that is to be divided.
//!
//! One question a second does both: it says how much is asked for, by class and origin, and is answered with this gateway's
//! rows of the plan where they are newer than those in hand. They are taken when their generation is higher, whole or not at
//! all, and written to disk before they are used; what cannot be read is refused, counted, and those in hand stay. While
//! the hub is away, or where there is none that plans, they stay as well: the rows of yesterday are better than none, since
//! what they no longer fit is seen in reports, and credits put it right. Nothing waits for any of this.

use super::snapshot::{self, Since, beside, since_1970};
use super::watch::Watch;
use crate::config::EdgeConfig;
use crate::metrics::RelaxedCounter;
use gateway_core::circuit::Permille;
use gateway_core::demand::{self, ClassDemand, DemandMeter};
use gateway_core::priority::Priority;
use gateway_core::residency::Residency;
use gateway_core::weights::{GatewayWeights, ReceivedRow};
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use regions::weights::Share;
use scheduler_core::bound;
use scheduler_core::plan::TrafficClass;
use scheduler_core::wire::plan::{
    self as wire, DemandV1, GatewayBoot, GatewayDemand, NamedShare, ROWS_MAX, WeightsV1,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;

/// How often the hub is told and asked: as often as it plans.
const PERIOD: Duration = Duration::from_secs(1);
/// How long an answer may take. Whoever takes longer is asked again in a second anyway.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of an answer: as many rows as there may be, each with a handful of shares.
const ANSWER_BYTES_MAX: usize = 8 << 20;

const _: () = assert!(demand::CLASSES_MAX <= ROWS_MAX, "what is counted can be told");

/// What is in hand: nothing before the first plan.
pub(crate) type Planned = Option<Arc<GatewayWeights>>;

/// What is asked for, shared between those who ask and the one who tells.
#[derive(Default)]
pub(crate) struct Demands(Mutex<DemandMeter>);

/// What is counted of plans.
#[derive(Default)]
pub(crate) struct PlanCounts {
    /// Plans that could not be read or were not newer.
    pub(crate) refused: RelaxedCounter,
}

impl Demands {
    fn demand(&self) -> MutexGuard<'_, DemandMeter> {
        self.0.lock()
    }

    /// Somebody asks for about so many tokens. Returns what part of what is asked are lookups.
    pub(crate) fn asked(
        &self,
        deployment: &DeploymentName,
        policy: (&Residency, RegionSet),
        origin: RegionIndex,
        asked: (Priority, u64),
        now: Instant,
    ) -> Option<Permille> {
        self.demand().record(deployment, policy, origin, asked, now)
    }

    /// What part of what is asked are lookups.
    pub(crate) fn lookups(
        &self,
        deployment: &DeploymentName,
        allowed: RegionSet,
        origin: RegionIndex,
    ) -> Option<Permille> {
        self.demand().interactive_share(deployment, allowed, origin)
    }

    /// Requests that nobody plans for, since there are too many classes.
    pub(crate) fn missed(&self) -> u64 {
        self.demand().untracked()
    }
}

/// Where the rows are kept.
fn file(config: &EdgeConfig) -> std::path::PathBuf {
    beside(&config.snapshot, ".plan")
}

/// The rows on disk, if there are good ones of this place.
pub(crate) fn restore(config: &EdgeConfig, counts: &PlanCounts) -> Planned {
    match snapshot::load::<WeightsV1>(&file(config)) {
        Ok(weights) if weights.gateway == config.region => {
            tracing::info!(generation = %weights.generation, rows = weights.rows.len(), "a plan is on disk");
            Some(Arc::new(meaning(&weights, &config.catalogue)))
        }
        Ok(weights) => {
            tracing::warn!(place = %weights.gateway, "the plan on disk is that of a gateway elsewhere");
            None
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            counts.refused.add(1);
            tracing::warn!(file = %file(config).display(), %error, "the plan on disk is of no use");
            None
        }
    }
}

/// Rows as requests need them. A region that the catalogue does not know has no share.
fn meaning(weights: &wire::GatewayWeights, catalogue: &Catalogue) -> GatewayWeights {
    let wire::GatewayWeights { generation, gateway: _, rows } = weights;
    let told = rows.iter().filter_map(
        |((TrafficClass { deployment, residency }, origin), shares)| -> Option<ReceivedRow> {
            let shares = shares.iter().filter_map(|NamedShare { region, permille, reason }| {
                Some(Share { region: catalogue.index_of(region)?, permille: *permille, why: *reason })
            });
            Some((deployment.clone(), residency.clone(), catalogue.index_of(origin)?, shares.collect()))
        },
    );
    GatewayWeights::new(*generation, told, catalogue)
}

/// Tells the hub and hears it, for ever.
pub(crate) async fn follow(
    config: Arc<EdgeConfig>,
    client: reqwest::Client,
    demands: Arc<Demands>,
    regions: Arc<Watch>,
    planned: watch::Sender<Planned>,
    counts: Arc<PlanCounts>,
) {
    let boot_id = rand::random();
    let mut beat = tokio::time::interval(PERIOD);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut reachable = true;
    let mut since = Since::written(&file(&config));
    loop {
        beat.tick().await;
        let told = demands.demand().report(Instant::now());
        let heard = regions.known().fleet.reachable().collect();
        let told = in_words(&config, boot_id, told, heard);
        let hub = config.hub.current();
        match ask(&config, hub, &client, &told, &planned, &mut since).await {
            Ok(()) => {
                if !std::mem::replace(&mut reachable, true) {
                    tracing::info!(hub, "the hub plans again");
                }
            }
            Err(error) => {
                // Whether another is to be asked is for whoever follows the table to find out: a hub may be well and plan nothing.
                if matches!(error, AskError::Plan(_)) {
                    counts.refused.add(1);
                }
                if std::mem::replace(&mut reachable, false) {
                    tracing::warn!(hub, %error, "there is no plan from the hub; the one in hand stays");
                }
            }
        }
    }
}

/// What is asked for, as it is told, and who is heard. One policy may be written in several ways; it is one class.
fn in_words(config: &EdgeConfig, boot_id: u64, told: Vec<ClassDemand>, heard: Vec<RegionIndex>) -> DemandV1 {
    let mut classes = BTreeMap::new();
    for ClassDemand { deployment, residency, origin, tokens_per_second } in told {
        let residency = match residency.as_str().parse() {
            Ok(residency) => residency,
            Err(error) => {
                tracing::error!(%deployment, %error, "demand not reported, its residency cannot be read back");
                continue;
            }
        };
        let origin = config.catalogue.region(origin).id.clone();
        let sum: &mut u64 = classes.entry((TrafficClass { deployment, residency }, origin)).or_default();
        *sum = sum.saturating_add(tokens_per_second);
    }
    let gateway = GatewayBoot { region: config.region.clone(), boot_id };
    let heard: BTreeSet<_> =
        heard.into_iter().map(|region| config.catalogue.region(region).id.clone()).collect();
    // Who hears nobody may be cut off, and has nothing to say of others.
    let reachable_regions = (!heard.is_empty()).then_some(heard);
    DemandV1::from(&GatewayDemand { gateway, classes, reachable_regions })
}

#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("its plan is refused: {0}")]
    Plan(String),
}

async fn ask(
    config: &EdgeConfig,
    hub: &str,
    client: &reqwest::Client,
    told: &DemandV1,
    planned: &watch::Sender<Planned>,
    since: &mut Since,
) -> Result<(), AskError> {
    let after = planned.borrow().as_ref().map(|weights| weights.generation);
    let url = match after {
        Some(after) => format!("{hub}/v1/demand?after={after}"),
        None => format!("{hub}/v1/demand"),
    };
    let question = client.post(url).json(told).timeout(TIMEOUT);
    let question = config.fleet.iter().fold(question, |question, token| question.bearer_auth(token.secret()));
    let mut answer = question.send().await?.error_for_status()?;
    if answer.status() == http::StatusCode::NO_CONTENT {
        return Ok(());
    }
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        if body.len() + chunk.len() > ANSWER_BYTES_MAX {
            return Err(AskError::Plan(format!("it has more than {ANSWER_BYTES_MAX} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    let refused = |error: String| AskError::Plan(error);
    let wire: WeightsV1 = serde_json::from_slice(&body).map_err(|error| refused(error.to_string()))?;
    let weights = wire::GatewayWeights::try_from(wire.clone()).map_err(|error| refused(error.to_string()))?;
    let (generation, place) = (weights.generation, &weights.gateway);
    if *place != config.region {
        return Err(refused(format!("it is of a gateway at {place}, and this one is at {}", config.region)));
    }
    bound::accept(generation, since.held(after), since_1970()).map_err(|error| refused(error.to_string()))?;
    let path = file(config);
    let saved = tokio::task::spawn_blocking(move || snapshot::save(&path, &wire, generation)).await;
    if let Err(error) = saved.map_err(io::Error::other).flatten() {
        tracing::warn!(file = %file(config).display(), %error, "the plan cannot be kept on disk");
    }
    *since = Since::now();
    tracing::debug!(%generation, rows = weights.rows.len(), "a new plan");
    planned.send_replace(Some(Arc::new(meaning(&weights, &config.catalogue))));
    Ok(())
}
