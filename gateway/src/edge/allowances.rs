//! What each tenant has left, shared by all requests, and how clients are told.
//!
//! A request pays for itself at its head and for what it carries when it was read (see `gateway_core::tenant`), and gives
//! back what it did not use when it ends, however it ends: the [`Taken`] does that when it is dropped. The headers are
//! OpenAI's, which its clients and many others read; they stand on answers and on refusals alike.

use super::refusals::beyond_limits;
use crate::respond::Refusal;
use gateway_core::decimal;
use gateway_core::keys::KeyRing;
use gateway_core::tenant::{Allowance, Cost, Left, Tenant};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A header's name and its value.
pub(super) type Header = (&'static str, String);

/// Every tenant's allowance, in the order of their places.
pub(crate) struct Allowances(Vec<Mutex<Allowance>>);

/// A request that has paid for itself and not yet for what it carries.
pub(super) struct Entered<'a> {
    allowance: &'a Mutex<Allowance>,
}

/// What a request has taken.
pub(super) struct Taken<'a> {
    allowance: &'a Mutex<Allowance>,
    estimate: u64,
    /// Tokens that are not given back.
    used: u64,
}

impl Allowances {
    pub(crate) fn new(keys: &KeyRing, now: Instant) -> Allowances {
        let allowance = |tenant: &Tenant| Mutex::new(Allowance::new(&tenant.limits, now));
        Allowances(keys.tenants().map(|tenant| allowance(tenant)).collect())
    }

    /// Lets in a request of `tenant` of which only the head was read, or says why not. `body_bytes` is the length that it
    /// declares.
    pub(super) fn enter(&self, tenant: &Tenant, body_bytes: u64) -> Result<Entered<'_>, Refusal> {
        let allowance = self.of(tenant);
        let entered = lock(allowance).enter(Cost::at_least(body_bytes), Instant::now());
        match entered {
            Ok(()) => Ok(Entered { allowance }),
            Err(exceeded) => Err(beyond_limits(tenant, exceeded).with(self.headers(tenant))),
        }
    }

    /// Charges a request that has entered for what it carries, or says why it is turned away.
    pub(super) fn charge<'a>(
        &self,
        tenant: &Tenant,
        entered: Entered<'a>,
        cost: Cost,
    ) -> Result<Taken<'a>, Refusal> {
        let Entered { allowance } = entered;
        let charged = lock(allowance).charge(cost, Instant::now());
        match charged {
            Ok(()) => Ok(Taken { allowance, estimate: cost.tokens, used: 0 }),
            Err(exceeded) => Err(beyond_limits(tenant, exceeded).with(self.headers(tenant))),
        }
    }

    /// What `tenant` has left, in OpenAI's headers.
    pub(super) fn headers(&self, tenant: &Tenant) -> Vec<Header> {
        let (requests, tokens) = lock(self.of(tenant)).left(Instant::now());
        let number = |number: u64| decimal::text(|text| decimal::push(text, number));
        let mut headers = Vec::with_capacity(6);
        if let Some(Left { limit, remaining, reset }) = requests {
            headers.push(("x-ratelimit-limit-requests", number(limit.get())));
            headers.push(("x-ratelimit-remaining-requests", number(remaining)));
            headers.push(("x-ratelimit-reset-requests", duration(reset)));
        }
        if let Some(Left { limit, remaining, reset }) = tokens {
            headers.push(("x-ratelimit-limit-tokens", number(limit.get())));
            headers.push(("x-ratelimit-remaining-tokens", number(remaining)));
            headers.push(("x-ratelimit-reset-tokens", duration(reset)));
        }
        headers
    }

    fn of(&self, tenant: &Tenant) -> &Mutex<Allowance> {
        &self.0[tenant.place]
    }
}

impl Entered<'_> {
    /// The request is turned away for a reason that is not its own, and gets back what it has paid.
    pub(super) fn leave(self) {
        lock(self.allowance).leave(Instant::now());
    }
}

impl Taken<'_> {
    /// The request was computed, and had so many tokens; without a word of it, what was estimated.
    pub(super) fn used(&mut self, tokens: Option<u64>) {
        self.used = tokens.unwrap_or(self.estimate);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        lock(self.allowance).settle(self.estimate, self.used, Instant::now());
    }
}

fn lock(allowance: &Mutex<Allowance>) -> MutexGuard<'_, Allowance> {
    allowance.lock().expect("no decision panics while it holds the lock")
}

/// As OpenAI writes durations: `80ms`, `2.5s`, `1m30s`.
pub(super) fn duration(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    match millis {
        0..1_000 => decimal::text(|text| {
            decimal::push(text, millis);
            text.push_str("ms");
        }),
        1_000..60_000 => format!("{}s", (millis / 10) as f64 / 100.0),
        _ => format!("{}m{}s", millis / 60_000, millis % 60_000 / 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        let check = |millis, expected| assert_eq!(duration(Duration::from_millis(millis)), expected);
        check(0, "0ms");
        check(999, "999ms");
        check(1_000, "1s");
        check(2_512, "2.51s");
        check(90_900, "1m30s");
    }
}
