//! Shares of gateways in the rate limits of tenants, so that a limit holds for all gateways together.
//!
//! Once a second every gateway reports the demand of the tenants with traffic, and the hub divides each limit by demand
//! ([`apportion`]). A tenant without demand is not listed: every gateway has an equal share of its limits.
//!
//! Shares move in two steps. A gateway acknowledges its shares by the generation in its next report. Until then it may
//! still be applying the previous ones, and what it may be applying is not given to another gateway. So the shares that
//! gateways apply add up to at most the limit, and the [floors](FLOORS_MAX) of those that are still growing.
//!
//! The shares of a gateway whose report has expired are reserved for [`SHARE_RETENTION`]: after an outage of the store the
//! reports of all gateways expire at once, while the gateways continue with their shares. A gateway that reaches no hub for
//! longer keeps its shares too, although others have received them by then; the sum exceeds the limit until it is back.

mod apportion;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use apportion::{Claim, apportion, floor};
use regions::tenant::{LimitShare, PerLimit, TenantRules};
use regions::{Generation, TenantId};
use scheduler_api::plan::{GatewayInstance, PLAN_PERIOD, TenantDemand, TenantShare, TenantShares};

/// Largest floor of a gateway in millionths: a hundredth of the limit, for the first request of a tenant.
const FLOOR: u64 = 10_000;
/// Largest sum of the floors of all gateways in millionths.
const FLOORS_MAX: u64 = 50_000;
/// Time for which the shares of a gateway stay reserved after its report has expired: three reports.
pub const SHARE_RETENTION: Duration = Duration::from_secs(3);
/// Maximum number of shares that a gateway has not acknowledged; older ones are counted together.
const UNACKNOWLEDGED_MAX: usize = 8;
/// Minimum time between two divisions. One follows soon after a gateway has acknowledged smaller shares, so that others grow.
const DIVISION_PERIOD_MIN: Duration = Duration::from_millis(200);

/// Shares that changed: those to write, and gateways whose shares are to be deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShareChanges {
    /// New shares.
    pub issued: Vec<TenantShares>,
    /// Gateways that are gone.
    pub removed: Vec<GatewayInstance>,
}

impl ShareChanges {
    fn is_empty(&self) -> bool {
        let ShareChanges { issued, removed } = self;
        issued.is_empty() && removed.is_empty()
    }
}

/// Division of the limits of all tenants.
#[derive(Debug)]
pub struct ShareAllocator {
    epoch: u64,
    /// Highest number ever assigned.
    number: u64,
    gateways: BTreeMap<GatewayInstance, ShareHolder>,
    /// Changes that are being written.
    in_flight: Option<ShareChanges>,
    due: Instant,
    last: Instant,
}

/// Shares that a gateway may be applying, in millionths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UsableShares {
    default: u32,
    tenants: BTreeMap<TenantId, PerLimit<u32>>,
}

impl UsableShares {
    fn of(&self, tenant: Option<&TenantId>) -> PerLimit<u32> {
        let listed = tenant.and_then(|tenant| self.tenants.get(tenant));
        listed.copied().unwrap_or(PerLimit::each(|| self.default))
    }

    fn exactly(shares: &TenantShares) -> UsableShares {
        let listed = shares.tenants.iter();
        let listed = listed.map(|(tenant, share)| (tenant.clone(), share.limits.map(LimitShare::millionths)));
        UsableShares { default: shares.default.millionths(), tenants: listed.collect() }
    }

    /// Returns the larger share of each tenant.
    fn max(&self, other: &UsableShares) -> UsableShares {
        let names: BTreeSet<&TenantId> = self.tenants.keys().chain(other.tenants.keys()).collect();
        let larger = |name: &TenantId| {
            let both = self.of(Some(name)).zip(other.of(Some(name)));
            (name.clone(), both.map(|(one, other)| one.max(other)))
        };
        UsableShares {
            tenants: names.into_iter().map(larger).collect(),
            default: self.default.max(other.default),
        }
    }
}

#[derive(Debug, Default)]
struct ShareHolder {
    demand: BTreeMap<TenantId, PerLimit<u64>>,
    /// Shares in the store.
    issued: Option<TenantShares>,
    /// Shares that were issued since the acknowledged ones, which are the first.
    unacknowledged: VecDeque<(Generation, UsableShares)>,
    /// Largest of them.
    usable: UsableShares,
    /// Time at which its report expired.
    silent_since: Option<Instant>,
}

impl ShareHolder {
    /// Adds shares that the gateway may apply from now on.
    fn issue(&mut self, shares: &TenantShares) {
        self.unacknowledged.push_back((shares.generation, UsableShares::exactly(shares)));
        if self.unacknowledged.len() > UNACKNOWLEDGED_MAX
            && let Some((_, oldest)) = self.unacknowledged.pop_front()
            && let Some((_, next)) = self.unacknowledged.front_mut()
        {
            *next = next.max(&oldest);
        }
        self.find_usable();
    }

    /// Takes the acknowledgement of a generation. Returns whether the gateway applies less than before.
    fn acknowledge(&mut self, running: Generation) -> bool {
        let Some(at) = self.unacknowledged.iter().position(|(generation, _)| *generation == running) else {
            return false;
        };
        if at == 0 {
            return false;
        }
        self.unacknowledged.drain(..at);
        let before = self.usable.clone();
        self.find_usable();
        self.usable != before
    }

    fn find_usable(&mut self) {
        let all = self.unacknowledged.iter().map(|(_, shares)| shares);
        self.usable = all.fold(UsableShares::default(), |sum, shares| sum.max(shares));
    }

    fn issued(&self, tenant: Option<&TenantId>) -> PerLimit<u32> {
        let Some(issued) = &self.issued else { return PerLimit::default() };
        match tenant {
            Some(tenant) => issued.of(tenant).map(LimitShare::millionths),
            None => PerLimit::each(|| issued.default.millionths()),
        }
    }
}

impl ShareAllocator {
    /// Creates an allocator that continues from the shares in the store. Gateways count as silent until they report.
    pub fn new(epoch: u64, stored: impl IntoIterator<Item = TenantShares>, now: Instant) -> ShareAllocator {
        let state = |shares: TenantShares| {
            let mut state = ShareHolder { silent_since: Some(now), ..ShareHolder::default() };
            state.issue(&shares);
            let gateway = shares.gateway.clone();
            (gateway, ShareHolder { issued: Some(shares), ..state })
        };
        let gateways: BTreeMap<_, _> = stored.into_iter().map(state).collect();
        let generations = gateways.values().filter_map(|state| state.issued.as_ref());
        let number = generations.map(|shares| shares.generation.number).max().unwrap_or(0);
        ShareAllocator { epoch, number, gateways, in_flight: None, due: now + PLAN_PERIOD, last: now }
    }

    /// Takes the report of a gateway.
    pub fn report(&mut self, demand: TenantDemand, now: Instant) {
        let TenantDemand { gateway, running, tenants } = demand;
        let is_new = !self.gateways.contains_key(&gateway);
        let state = self.gateways.entry(gateway).or_default();
        state.silent_since = None;
        state.demand = tenants;
        let frees_shares = running.is_some_and(|running| state.acknowledge(running));
        if is_new || frees_shares {
            self.due = self.due.min(self.last + DIVISION_PERIOD_MIN).max(now);
        }
    }

    /// Marks a gateway whose report has expired.
    pub fn expired(&mut self, gateway: &GatewayInstance, now: Instant) {
        if let Some(state) = self.gateways.get_mut(gateway) {
            state.silent_since.get_or_insert(now);
        }
    }

    /// Replaces all reports.
    pub fn replace(&mut self, all: Vec<TenantDemand>, now: Instant) {
        let named: BTreeSet<_> = all.iter().map(|demand| demand.gateway.clone()).collect();
        for (gateway, state) in &mut self.gateways {
            if !named.contains(gateway) {
                state.silent_since.get_or_insert(now);
            }
        }
        all.into_iter().for_each(|demand| self.report(demand, now));
    }

    /// Returns the due time of the next division; `None` without gateways.
    pub fn next_due(&self) -> Option<Instant> {
        let has_work =
            self.gateways.values().any(|state| state.silent_since.is_none()) || self.expiring() > 1;
        (self.in_flight.is_none() && has_work).then_some(self.due)
    }

    /// Returns the number of silent gateways. The shares of the last one stay in the store, since they hold the number.
    fn expiring(&self) -> usize {
        self.gateways.values().filter(|state| state.silent_since.is_some()).count()
    }

    /// Divides all limits if that is due. Returns what has changed, to be written to the store.
    pub fn divide(&mut self, rules: &BTreeMap<TenantId, TenantRules>, now: Instant) -> Option<ShareChanges> {
        if self.next_due().is_none_or(|due| due > now) {
            return None;
        }
        (self.last, self.due) = (now, now + PLAN_PERIOD);
        let mut changes = ShareChanges { issued: Vec::new(), removed: self.retired(now) };
        for gateway in &changes.removed {
            self.gateways.remove(gateway);
        }
        for state in self.gateways.values_mut().filter(|state| is_over(state, now)) {
            state.unacknowledged.clear();
            state.find_usable();
        }
        let live: Vec<GatewayInstance> = self
            .gateways
            .iter()
            .filter(|(_, state)| state.silent_since.is_none())
            .map(|(gateway, _)| gateway.clone())
            .collect();
        if !live.is_empty() {
            changes.issued = self.issue(&live, rules);
        }
        if changes.is_empty() {
            return None;
        }
        self.in_flight = Some(changes.clone());
        Some(changes)
    }

    /// Returns the gateways whose shares are no longer reserved, except the one with the highest number: a successor that
    /// found no shares in the store would assign its numbers again.
    fn retired(&self, now: Instant) -> Vec<GatewayInstance> {
        let number = |state: &ShareHolder| state.issued.as_ref().map(|issued| issued.generation.number);
        let highest = self.gateways.values().filter_map(number).max();
        let retired = self.gateways.iter().filter(|(_, state)| {
            is_over(state, now) && (number(state).is_none() || number(state) != highest)
        });
        retired.map(|(gateway, _)| gateway.clone()).collect()
    }

    /// Returns the new shares of the gateways for which they have changed.
    fn issue(
        &mut self,
        live: &[GatewayInstance],
        rules: &BTreeMap<TenantId, TenantRules>,
    ) -> Vec<TenantShares> {
        let generation = Generation { epoch: self.epoch, number: self.number + 1 };
        let defaults = self.shares_of(None, live, PerLimit::each(|| Some(1)));
        let mut listed: BTreeMap<TenantId, Vec<PerLimit<LimitShare>>> = BTreeMap::new();
        for tenant in self.listed(live) {
            let Some(limits) = rules.get(&tenant).map(|rules| rules.limits.per_minute()) else { continue };
            let shares = self.shares_of(Some(&tenant), live, limits);
            // A tenant without demand that has the shares of every other such tenant need not be listed.
            let is_idle = live.iter().all(|gateway| !self.gateways[gateway].demand.contains_key(&tenant));
            let is_default = |(gateway, (share, default)): (
                &GatewayInstance,
                (&PerLimit<LimitShare>, &PerLimit<LimitShare>),
            )| {
                let state = &self.gateways[gateway];
                let applies = limits.zip(share.zip(*default)).into_values();
                let is_equal =
                    applies.into_iter().all(|(limit, (share, default))| limit.is_none() || share == default);
                is_equal && state.usable.of(Some(&tenant)) == state.issued(Some(&tenant))
            };
            if is_idle && live.iter().zip(shares.iter().zip(&defaults)).all(is_default) {
                continue;
            }
            listed.insert(tenant, shares);
        }
        let mut issued = Vec::new();
        for (at, gateway) in live.iter().enumerate() {
            let before = self.gateways[gateway].issued.as_ref();
            let tenants: BTreeMap<TenantId, TenantShare> = listed
                .iter()
                .map(|(tenant, shares)| {
                    let limits = shares[at];
                    let known = before.and_then(|before| before.tenants.get(tenant));
                    let known = known.filter(|known| known.limits == limits);
                    (
                        tenant.clone(),
                        known.copied().unwrap_or(TenantShare { limits, since: generation.number }),
                    )
                })
                .collect();
            let is_subset =
                |before: &TenantShares| before.tenants.keys().all(|name| tenants.contains_key(name));
            let base = before.filter(|before| before.generation.epoch == self.epoch && is_subset(before));
            let next = TenantShares {
                generation,
                gateway: gateway.clone(),
                gateways: u32::try_from(live.len()).unwrap_or(u32::MAX),
                base: base.map_or(generation.number, |before| before.base),
                changes_since: None,
                default: defaults[at].requests,
                tenants,
            };
            let is_unchanged = before.is_some_and(|before| {
                *before == TenantShares { generation: before.generation, base: before.base, ..next.clone() }
                    && before.generation.epoch == self.epoch
            });
            if !is_unchanged {
                issued.push(next);
            }
        }
        if !issued.is_empty() {
            // The number is used up even if the write fails: a reader may have observed it.
            self.number = generation.number;
        }
        for shares in &issued {
            if let Some(state) = self.gateways.get_mut(&shares.gateway) {
                state.issue(shares);
            }
        }
        issued
    }

    /// Returns the tenants with demand or with shares of their own.
    fn listed(&self, live: &[GatewayInstance]) -> BTreeSet<TenantId> {
        let states = live.iter().map(|gateway| &self.gateways[gateway]);
        let known = |state: &ShareHolder| -> Vec<TenantId> {
            let issued = state.issued.iter().flat_map(|issued| issued.tenants.keys());
            issued.chain(state.demand.keys()).cloned().collect()
        };
        states.flat_map(known).collect()
    }

    /// Divides the limits of one tenant, or of all that are not listed. A limit that does not exist is not divided.
    fn shares_of(
        &self,
        tenant: Option<&TenantId>,
        live: &[GatewayInstance],
        limits: PerLimit<Option<u64>>,
    ) -> Vec<PerLimit<LimitShare>> {
        let silent = self.gateways.values().filter(|state| state.silent_since.is_some());
        let reserved = silent.fold(PerLimit::<u64>::default(), |sum, state| {
            sum.zip(state.usable.of(tenant)).map(|(sum, share)| sum + u64::from(share))
        });
        let states: Vec<_> = live.iter().map(|gateway| &self.gateways[gateway]).collect();
        let demand = |state: &ShareHolder| {
            tenant.and_then(|tenant| state.demand.get(tenant).copied()).unwrap_or_default()
        };
        let claims: Vec<PerLimit<Claim>> = states
            .iter()
            .map(|state| {
                let each = demand(state).zip(state.issued(tenant).zip(state.usable.of(tenant)));
                each.map(|(demand, (issued, usable))| Claim { demand, issued, usable })
            })
            .collect();
        let divided = |limit: Option<u64>, reserved: u64, pick: fn(&PerLimit<Claim>) -> Claim| match limit {
            Some(limit) => apportion(limit, reserved, &claims.iter().map(pick).collect::<Vec<_>>()),
            None => vec![LimitShare::WHOLE.millionths(); claims.len()],
        };
        let requests = divided(limits.requests, reserved.requests, |claims| claims.requests);
        let inputs = divided(limits.inputs, reserved.inputs, |claims| claims.inputs);
        let tokens = divided(limits.tokens, reserved.tokens, |claims| claims.tokens);
        let floor = u32::try_from(floor(live.len())).unwrap_or(1);
        let share = |millionths: u32| LimitShare::new(millionths.max(floor)).unwrap_or(LimitShare::WHOLE);
        let each = requests.into_iter().zip(inputs).zip(tokens);
        each.map(|((requests, inputs), tokens)| PerLimit { requests, inputs, tokens }.map(share)).collect()
    }

    /// Records that the store holds the last changes. Returns the shares to publish.
    pub fn written(&mut self) -> Vec<TenantShares> {
        let Some(ShareChanges { issued, removed: _ }) = self.in_flight.take() else { return Vec::new() };
        for shares in &issued {
            if let Some(state) = self.gateways.get_mut(&shares.gateway) {
                state.issued = Some(shares.clone());
            }
        }
        issued
    }

    /// Records that the outcome of the last write is unknown or a failure. The next division includes its changes.
    pub fn write_failed(&mut self) {
        self.in_flight = None;
    }
}

/// Returns whether the shares of a gateway are no longer reserved.
fn is_over(state: &ShareHolder, now: Instant) -> bool {
    state.silent_since.is_some_and(|since| now.saturating_duration_since(since) >= SHARE_RETENTION)
}

#[cfg(test)]
mod tests;
