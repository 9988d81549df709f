//! What each tenant has left, shared by all requests, and how clients are told.
//!
//! A request pays for itself at its head and for what it carries when it was read (see `gateway_core::tenant`), and gives
//! back what it did not use when it ends, however it ends: the [`Taken`] does that when it is dropped. The headers are
//! OpenAI's, which its clients and many others read; they stand on answers and on refusals alike.

use super::duration::openai_duration;
use super::refusals::beyond_limits;
use crate::respond::Rejection;
use gateway_core::decimal;
use gateway_core::keys::KeyRing;
use gateway_core::tenant::{Cost, LimitStatus, RateLimiter, RateLimits, Tenant};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, RwLock};

/// A header's name and its value.
pub(super) type Header = (&'static str, String);

/// The allowance of everybody who is a tenant now, by their places. A request that is under way keeps the one that it has
/// paid from, and with it that of somebody who is a tenant no longer.
pub(crate) struct Allowances(RwLock<BTreeMap<usize, Kept>>);

/// The allowance of one tenant.
struct Kept {
    limits: RateLimits,
    allowance: Arc<Mutex<RateLimiter>>,
}

/// A request that has paid for itself and not yet for what it carries.
pub(super) struct Entered {
    allowance: Arc<Mutex<RateLimiter>>,
}

/// What a request has taken.
pub(super) struct Taken {
    allowance: Arc<Mutex<RateLimiter>>,
    estimate: u64,
    /// TokenVerifier that are not given back.
    used: u64,
}

impl Allowances {
    pub(crate) fn new(keys: &KeyRing, now: Instant) -> Allowances {
        let allowances = Allowances(RwLock::default());
        allowances.adopt(keys, now);
        allowances
    }

    /// These are the tenants from now on. What somebody has left stays, unless its limits are others; what whoever is not
    /// among them has left is forgotten.
    pub(crate) fn adopt(&self, keys: &KeyRing, now: Instant) {
        let mut kept = self.0.write();
        let mut before = std::mem::take(&mut *kept);
        for tenant in keys.tenants() {
            let same = before.remove(&tenant.index).filter(|kept| kept.limits == tenant.limits);
            kept.insert(tenant.index, same.unwrap_or_else(|| Kept::new(&tenant.limits, now)));
        }
    }

    /// Lets in a request of `tenant` of which only the head was read, or says why not. `body_bytes` is the length that it
    /// declares.
    pub(super) fn enter(&self, tenant: &Tenant, body_bytes: u64) -> Result<Entered, Rejection> {
        let (allowance, now) = (self.of(tenant), Instant::now());
        let mut left = allowance.lock();
        if let Err(exceeded) = left.enter(Cost::at_least(body_bytes), now) {
            return Err(beyond_limits(tenant, exceeded).with(headers(left.status(now))));
        }
        drop(left);
        Ok(Entered { allowance })
    }

    fn of(&self, tenant: &Tenant) -> Arc<Mutex<RateLimiter>> {
        let kept = self.0.read();
        let kept = kept.get(&tenant.index).map(|kept| kept.allowance.clone());
        // Of a table that is being replaced: it is the last request of somebody who is a tenant no longer.
        kept.unwrap_or_else(|| Kept::new(&tenant.limits, Instant::now()).allowance)
    }

    /// Of how many tenants it is known what they have left.
    pub(super) fn kept(&self) -> usize {
        self.0.read().len()
    }
}

impl Kept {
    fn new(limits: &RateLimits, now: Instant) -> Kept {
        Kept { limits: *limits, allowance: Arc::new(Mutex::new(RateLimiter::new(limits, now))) }
    }
}

impl Entered {
    /// Charges a request for what it carries, or says why it is turned away.
    ///
    /// One that `is_packed` has cost us more than it declared before that could be known, and does not get back what it has
    /// paid for being a request.
    pub(super) fn charge(self, tenant: &Tenant, cost: Cost, is_packed: bool) -> Result<Taken, Rejection> {
        let Entered { allowance } = self;
        let now = Instant::now();
        let mut left = allowance.lock();
        if let Err(exceeded) = left.charge(cost, now) {
            if is_packed {
                left.record_usage(1, 0, now);
            }
            return Err(beyond_limits(tenant, exceeded).with(headers(left.status(now))));
        }
        drop(left);
        Ok(Taken { allowance, estimate: cost.tokens, used: 0 })
    }

    /// The request is refused, and pays for what of its body was processed before that.
    pub(super) fn processed(self, refusal: &Rejection) {
        if refusal.processed_bytes > 0 {
            let Cost { inputs: _, tokens } = Cost::at_least(refusal.processed_bytes);
            self.allowance.lock().record_usage(0, tokens, Instant::now());
        }
    }

    /// The request is turned away for a reason that is not its own, and gets back what it has paid.
    pub(super) fn leave(self) {
        self.allowance.lock().refund(Instant::now());
    }
}

impl Taken {
    /// What its tenant has left, in OpenAI's headers.
    pub(super) fn headers(&self) -> Vec<Header> {
        let left = self.allowance.lock().status(Instant::now());
        headers(left)
    }

    /// The request was computed, and had so many tokens; without a word of it, what was estimated.
    pub(super) fn used(&mut self, tokens: Option<u64>) {
        self.used = tokens.unwrap_or(self.estimate);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.allowance.lock().settle(self.estimate, self.used, Instant::now());
    }
}

/// What is left, in OpenAI's headers.
fn headers((requests, tokens): (Option<LimitStatus>, Option<LimitStatus>)) -> Vec<Header> {
    let number = |number: u64| decimal::text(|text| decimal::push(text, number));
    let mut headers = Vec::with_capacity(6);
    if let Some(LimitStatus { limit, remaining, reset }) = requests {
        headers.push(("x-ratelimit-limit-requests", number(limit.get())));
        headers.push(("x-ratelimit-remaining-requests", number(remaining)));
        headers.push(("x-ratelimit-reset-requests", openai_duration(reset)));
    }
    if let Some(LimitStatus { limit, remaining, reset }) = tokens {
        headers.push(("x-ratelimit-limit-tokens", number(limit.get())));
        headers.push(("x-ratelimit-remaining-tokens", number(remaining)));
        headers.push(("x-ratelimit-reset-tokens", openai_duration(reset)));
    }
    headers
}
