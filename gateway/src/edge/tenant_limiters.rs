//! Rate limiters of the tenants, shared by all requests, and the rate limit headers of responses.
//!
//! A request is charged for itself when its head was read and for its content when its body was read (see
//! `gateway_core::tenant`). Unused tokens are refunded when it ends, however it ends: [`TokenReservation`] does that when it is
//! dropped. The headers are those of OpenAI, which its clients and many others read; they are on successful responses and on
//! rejections. `x-ratelimit-limit-*` is the limit of the tenant, for all gateways together; the remaining units and the time
//! until they are complete are those of this gateway's share.

use super::duration::openai_duration;
use super::refusals::limit_exceeded;
use crate::respond::Rejection;
use gateway_core::decimal;
use gateway_core::keys::KeyRing;
use gateway_core::tenant::{Cost, GatewayShares, LimitStatus, RateLimiter, RateLimits, Tenant};
use regions::id::TenantId;
use regions::tenant::PerLimit;
use replica_api::headers;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, RwLock};

/// Name and value of a header.
pub(super) type Header = (&'static str, String);

/// Rate limiters of the current tenants, by tenant index. A request in flight keeps the limiter that it was charged from, also
/// if its tenant has been removed.
pub(crate) struct TenantLimiters(RwLock<CurrentLimiters>);

/// Limiters of the current tenants, and the shares of this gateway.
struct CurrentLimiters {
    by_index: BTreeMap<usize, TenantLimiter>,
    /// Whether the hub divides the limits: those of the route table, not those of this gateway's own file.
    are_shared: bool,
    shares: GatewayShares,
}

impl CurrentLimiters {
    /// Returns the limiter of a tenant with full buckets.
    fn limiter(&self, tenant: &Tenant, now: Instant) -> TenantLimiter {
        let whole = GatewayShares::equal(1);
        let shares = if self.are_shared { &self.shares } else { &whole };
        let limiter = RateLimiter::with_shares(&tenant.limits, shares.of(&tenant.id), now);
        TenantLimiter { id: tenant.id.clone(), limits: tenant.limits, limiter: Arc::new(Mutex::new(limiter)) }
    }
}

/// Source of the current tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TenantSource {
    /// This gateway's own file. Its limits are those of this gateway.
    File,
    /// The route table. Its limits are divided among all gateways.
    Table,
}

/// Rate limiter of one tenant.
struct TenantLimiter {
    id: TenantId,
    limits: RateLimits,
    limiter: Arc<Mutex<RateLimiter>>,
}

/// Charge of a request of which only the head was read.
pub(super) struct HeadCharge {
    limiter: Arc<Mutex<RateLimiter>>,
}

/// Tokens reserved by a request.
pub(super) struct TokenReservation {
    limiter: Arc<Mutex<RateLimiter>>,
    estimate: u64,
    /// Tokens that are not refunded.
    used: u64,
}

impl TenantLimiters {
    pub(crate) fn new(keys: &KeyRing, shares: GatewayShares, now: Instant) -> TenantLimiters {
        let none = CurrentLimiters { by_index: BTreeMap::new(), are_shared: false, shares };
        let limiters = TenantLimiters(RwLock::new(none));
        limiters.update(keys, TenantSource::File, now);
        limiters
    }

    /// Replaces the set of tenants. A tenant with unchanged limits keeps its limiter; the limiters of removed tenants are deleted.
    pub(crate) fn update(&self, keys: &KeyRing, source: TenantSource, now: Instant) {
        let mut limiters = self.0.write();
        limiters.are_shared = source == TenantSource::Table;
        let mut previous = std::mem::take(&mut limiters.by_index);
        for tenant in keys.tenants() {
            let unchanged = previous.remove(&tenant.index).filter(|limiter| limiter.limits == tenant.limits);
            let limiter = unchanged.unwrap_or_else(|| limiters.limiter(tenant, now));
            limiters.by_index.insert(tenant.index, limiter);
        }
    }

    /// Replaces the shares of this gateway.
    pub(super) fn set_shares(&self, shares: GatewayShares, now: Instant) {
        let mut limiters = self.0.write();
        if limiters.shares == shares {
            return;
        }
        if limiters.are_shared {
            for TenantLimiter { id, limits: _, limiter } in limiters.by_index.values() {
                limiter.lock().set_shares(shares.of(id), now);
            }
        }
        limiters.shares = shares;
    }

    /// Returns the demand of the tenants with limits and traffic, in units per minute; `None` if no limit is shared with other
    /// gateways. To be called about once a second.
    pub(super) fn demand(&self, now: Instant) -> Option<BTreeMap<TenantId, PerLimit<u64>>> {
        let limiters = self.0.read();
        let is_limited = |limiter: &TenantLimiter| limiter.limits != RateLimits::default();
        if !limiters.are_shared || !limiters.by_index.values().any(is_limited) {
            return None;
        }
        let limited = limiters.by_index.values().filter(|limiter| is_limited(limiter));
        let demand =
            limited.filter_map(|limited| Some((limited.id.clone(), limited.limiter.lock().demand(now)?)));
        Some(demand.collect())
    }

    /// Charges a request of `tenant` of which only the head was read, or returns the rejection. `body_bytes` is its declared
    /// length.
    pub(super) fn charge_head(&self, tenant: &Tenant, body_bytes: u64) -> Result<HeadCharge, Rejection> {
        let (limiter, now) = (self.limiter(tenant), Instant::now());
        let mut locked = limiter.lock();
        if let Err(exceeded) = locked.enter(Cost::at_least(body_bytes), now) {
            return Err(limit_exceeded(tenant, exceeded).with(headers(locked.status(now))));
        }
        drop(locked);
        Ok(HeadCharge { limiter })
    }

    fn limiter(&self, tenant: &Tenant) -> Arc<Mutex<RateLimiter>> {
        let limiters = self.0.read();
        let limiter = limiters.by_index.get(&tenant.index).map(|tenant| tenant.limiter.clone());
        // The table is being replaced: this is the last request of a removed tenant.
        limiter.unwrap_or_else(|| limiters.limiter(tenant, Instant::now()).limiter)
    }

    /// Returns the number of tenants with a limiter.
    pub(super) fn count(&self) -> usize {
        self.0.read().by_index.len()
    }
}

impl HeadCharge {
    /// Charges a request for its content, or returns the rejection.
    ///
    /// A compressed body (`is_packed`) has cost more to read than its declared length, before that could be known; its request
    /// charge is not refunded.
    pub(super) fn charge_body(
        self,
        tenant: &Tenant,
        cost: Cost,
        is_packed: bool,
    ) -> Result<TokenReservation, Rejection> {
        let HeadCharge { limiter } = self;
        let now = Instant::now();
        let mut locked = limiter.lock();
        if let Err(exceeded) = locked.charge(cost, now) {
            if is_packed {
                locked.record_usage(1, 0, now);
            }
            return Err(limit_exceeded(tenant, exceeded).with(headers(locked.status(now))));
        }
        drop(locked);
        Ok(TokenReservation { limiter, estimate: cost.tokens, used: 0 })
    }

    /// Charges a rejected request for the part of its body that was processed before the rejection.
    pub(super) fn settle_rejected(self, rejection: &Rejection) {
        if rejection.processed_bytes > 0 {
            let Cost { inputs: _, tokens } = Cost::at_least(rejection.processed_bytes);
            self.limiter.lock().record_usage(0, tokens, Instant::now());
        }
    }

    /// Refunds the charge of a request that is rejected for a reason outside the request.
    pub(super) fn refund(self) {
        self.limiter.lock().refund(Instant::now());
    }
}

impl TokenReservation {
    /// Returns the remaining limits of the tenant as OpenAI's headers.
    pub(super) fn headers(&self) -> Vec<Header> {
        let status = self.limiter.lock().status(Instant::now());
        headers(status)
    }

    /// Records the tokens of the computed request; the estimate if the region did not report them.
    pub(super) fn record_usage(&mut self, tokens: Option<u64>) {
        self.used = tokens.unwrap_or(self.estimate);
    }
}

impl Drop for TokenReservation {
    fn drop(&mut self) {
        self.limiter.lock().settle(self.estimate, self.used, Instant::now());
    }
}

/// Returns the remaining limits as OpenAI's headers.
fn headers((requests, tokens): (Option<LimitStatus>, Option<LimitStatus>)) -> Vec<Header> {
    let number = |number: u64| decimal::text(|text| decimal::push(text, number));
    let mut headers = Vec::with_capacity(6);
    if let Some(LimitStatus { limit, remaining, reset }) = requests {
        headers.push((headers::RATELIMIT_LIMIT_REQUESTS, number(limit.get())));
        headers.push((headers::RATELIMIT_REMAINING_REQUESTS, number(remaining)));
        headers.push((headers::RATELIMIT_RESET_REQUESTS, openai_duration(reset)));
    }
    if let Some(LimitStatus { limit, remaining, reset }) = tokens {
        headers.push((headers::RATELIMIT_LIMIT_TOKENS, number(limit.get())));
        headers.push((headers::RATELIMIT_REMAINING_TOKENS, number(remaining)));
        headers.push((headers::RATELIMIT_RESET_TOKENS, openai_duration(reset)));
    }
    headers
}
