//! Tenants of a gateway: their permissions and their rate limits.
//!
//! A request costs one request, its inputs and its tokens, each against a limit of its own. It is charged in two steps,
//! because its content is known only after its body has been read, and a request above its limit should be rejected
//! before that: at the head one request is charged, if the limits allow the minimum cost of the declared length; after
//! the body its inputs and tokens. A request that fails the second step is refunded the first one, so a rejection by a
//! limit costs nothing; an invalid request has cost us as much as a valid one, and is charged as one. Inputs and tokens
//! are estimates until the response reports the real numbers.

use crate::bucket::{RateQuota, Shortfall, TokenBucket};
use crate::priority::Priorities;
use regions::id::{DeploymentName, TenantId};
use regions::residency::ResidencyPolicy;
use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::{Duration, Instant};

/// Configured tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Name.
    pub id: TenantId,
    /// Index among all tenants that this gateway has ever known, from 0; the per-tenant state is stored at this index.
    pub index: usize,
    /// Issuer whose tokens authenticate it; absent = it has keys only.
    pub issuer: Option<String>,
    /// Deployments that it may use; absent = all.
    pub deployments: Option<BTreeSet<DeploymentName>>,
    /// Residency policy of its requests; narrows that of the deployment.
    pub residency: ResidencyPolicy,
    /// Priorities that it may use.
    pub priorities: Priorities,
    /// Weight of its fair share of a scarce capacity.
    pub weight: NonZeroU32,
    /// Rate limits.
    pub limits: RateLimits,
}

impl Tenant {
    /// Returns whether it may use this deployment.
    pub fn may_use(&self, deployment: &DeploymentName) -> bool {
        self.deployments.as_ref().is_none_or(|allowed| allowed.contains(deployment))
    }
}

/// Rate limits of a tenant; absent = unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests in a second.
    pub requests_per_second: Option<NonZeroU64>,
    /// Inputs in a second.
    pub inputs_per_second: Option<NonZeroU64>,
    /// Tokens in a minute.
    pub tokens_per_minute: Option<NonZeroU64>,
}

/// Kind of rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// [`RateLimits::requests_per_second`].
    Requests,
    /// [`RateLimits::inputs_per_second`].
    Inputs,
    /// [`RateLimits::tokens_per_minute`].
    Tokens,
}

impl LimitKind {
    /// Returns the configuration key, which also states the unit.
    pub fn as_str(self) -> &'static str {
        match self {
            LimitKind::Requests => "requests_per_second",
            LimitKind::Inputs => "inputs_per_second",
            LimitKind::Tokens => "tokens_per_minute",
        }
    }
}

/// Cost of a request in addition to the request itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Inputs of the request.
    pub inputs: u64,
    /// Tokens of the inputs.
    pub tokens: u64,
}

impl Cost {
    /// Returns the minimum cost of a body of this size: one input, and a token for every [`BYTES_PER_TOKEN_MAX`].
    pub fn at_least(body_bytes: u64) -> Cost {
        Cost { inputs: 1, tokens: (body_bytes / BYTES_PER_TOKEN_MAX).max(1) }
    }
}

/// Maximum bytes of a body per token, on the average of a body: the longest is a token id in a pretty-printed list, on
/// a line of its own (eight spaces, six digits, a comma, a line feed). Text has four.
pub const BYTES_PER_TOKEN_MAX: u64 = 16;

/// A request exceeds a rate limit of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitExceeded {
    /// Exceeded limit; of several, one that waiting does not help with, or else the one with the longest wait.
    pub kind: LimitKind,
    /// Value of the limit.
    pub limit: NonZeroU64,
    /// Whether and when a retry would pass.
    pub shortfall: Shortfall,
}

/// Rate limiter of one tenant.
#[derive(Clone, Debug)]
pub struct RateLimiter {
    requests: Option<TokenBucket>,
    inputs: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
}

/// State of one limit, as sent in `x-ratelimit-*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// Value of the limit.
    pub limit: NonZeroU64,
    /// Units that may be taken now.
    pub remaining: u64,
    /// Time until all units may be taken.
    pub reset: Duration,
}

impl RateLimiter {
    /// Makes a limiter with full buckets.
    pub fn new(limits: &RateLimits, now: Instant) -> RateLimiter {
        let RateLimits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
        let bucket = |units: Option<NonZeroU64>, seconds| {
            units
                .map(|units| TokenBucket::new(RateQuota { units, period: Duration::from_secs(seconds) }, now))
        };
        RateLimiter {
            requests: bucket(requests_per_second, 1),
            inputs: bucket(inputs_per_second, 1),
            tokens: bucket(tokens_per_minute, 60),
        }
    }

    /// Charges one request at the head if the limits allow `at_least` this cost.
    pub fn enter(&mut self, at_least: Cost, now: Instant) -> Result<(), LimitExceeded> {
        let Cost { inputs, tokens } = at_least;
        longest([
            exceeded(LimitKind::Requests, self.requests.as_ref(), 1, now),
            exceeded(LimitKind::Inputs, self.inputs.as_ref(), inputs, now),
            exceeded(LimitKind::Tokens, self.tokens.as_ref(), tokens, now),
        ])?;
        if let Some(requests) = &mut self.requests {
            requests.take(1, now);
        }
        Ok(())
    }

    /// Charges the inputs and tokens of a request that has [entered](RateLimiter::enter), after its body is read;
    /// refunds the request if a limit is exceeded.
    pub fn charge(&mut self, cost: Cost, now: Instant) -> Result<(), LimitExceeded> {
        let Cost { inputs, tokens } = cost;
        let paid = longest([
            exceeded(LimitKind::Inputs, self.inputs.as_ref(), inputs, now),
            exceeded(LimitKind::Tokens, self.tokens.as_ref(), tokens, now),
        ]);
        if let Err(exceeded) = paid {
            self.refund(now);
            return Err(exceeded);
        }
        for (bucket, units) in [(&mut self.inputs, inputs), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.take(units, now);
            }
        }
        Ok(())
    }

    /// Charges usage that has already occurred, even beyond the limit.
    pub fn record_usage(&mut self, requests: u64, tokens: u64, now: Instant) {
        for (bucket, units) in [(&mut self.requests, requests), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.take(units, now);
            }
        }
    }

    /// Refunds a request that has [entered](RateLimiter::enter) and is rejected for a reason unrelated to it.
    pub fn refund(&mut self, now: Instant) {
        if let Some(requests) = &mut self.requests {
            requests.settle(1, 0, now);
        }
    }

    /// Corrects the charge of a request that was estimated at `estimate` tokens and had `actual`.
    pub fn settle(&mut self, estimate: u64, actual: u64, now: Instant) {
        if let Some(tokens) = &mut self.tokens {
            tokens.settle(estimate, actual, now);
        }
    }

    /// Returns the state of the limits of requests and tokens, where they are configured.
    pub fn status(&self, now: Instant) -> (Option<LimitStatus>, Option<LimitStatus>) {
        let left = |bucket: &TokenBucket| LimitStatus {
            limit: bucket.rate().units,
            remaining: bucket.left(now),
            reset: bucket.full_in(now),
        };
        (self.requests.as_ref().map(left), self.tokens.as_ref().map(left))
    }
}

fn exceeded(
    kind: LimitKind,
    bucket: Option<&TokenBucket>,
    units: u64,
    now: Instant,
) -> Option<LimitExceeded> {
    let bucket = bucket?;
    let shortfall = bucket.check(units, now).err()?;
    Some(LimitExceeded { kind, limit: bucket.rate().units, shortfall })
}

fn longest<const N: usize>(exceeded: [Option<LimitExceeded>; N]) -> Result<(), LimitExceeded> {
    let longest = exceeded.into_iter().flatten().max_by_key(|exceeded| match exceeded.shortfall {
        Shortfall::NotYet { wait } => wait,
        Shortfall::Never => Duration::MAX,
    });
    longest.map_or(Ok(()), Err)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::priority::Priorities;
    use crate::some_instant;
    use std::sync::Arc;

    /// Returns a tenant without restrictions.
    pub(crate) fn named(name: &str) -> Arc<Tenant> {
        Arc::new(Tenant {
            id: name.parse().unwrap(),
            index: 0,
            issuer: None,
            deployments: None,
            residency: ResidencyPolicy::Anywhere,
            priorities: Priorities::default(),
            weight: NonZeroU32::MIN,
            limits: RateLimits::default(),
        })
    }

    const ONE: Cost = Cost { inputs: 1, tokens: 1 };

    fn limits(requests: u64, inputs: u64, tokens: u64) -> RateLimits {
        RateLimits {
            requests_per_second: NonZeroU64::new(requests),
            inputs_per_second: NonZeroU64::new(inputs),
            tokens_per_minute: NonZeroU64::new(tokens),
        }
    }

    /// Charges both steps of a request whose cost is known at its head.
    fn admit(limiter: &mut RateLimiter, cost: Cost, now: Instant) -> Result<(), LimitExceeded> {
        limiter.enter(cost, now)?;
        limiter.charge(cost, now)
    }

    fn left(limiter: &RateLimiter, now: Instant) -> (u64, u64) {
        let (requests, tokens) = limiter.status(now);
        (requests.unwrap().remaining, tokens.unwrap().remaining)
    }

    #[test]
    fn each_limit_holds_at_it_and_one_past_it() {
        let check = |limits: RateLimits, cost: Cost, fits: u32, kind: LimitKind| {
            let now = some_instant();
            let mut limiter = RateLimiter::new(&limits, now);
            for _ in 0..fits {
                assert_eq!(admit(&mut limiter, cost, now), Ok(()), "{limits:?}");
            }
            let exceeded = admit(&mut limiter, cost, now).expect_err("one past the limit");
            let Shortfall::NotYet { wait } = exceeded.shortfall else { panic!("{exceeded:?}") };
            assert_eq!(exceeded.kind, kind, "{limits:?}");
            assert_eq!(admit(&mut limiter, cost, now + wait), Ok(()), "{limits:?}");
        };
        check(limits(5, 0, 0), ONE, 5, LimitKind::Requests);
        check(limits(5, 6, 0), Cost { inputs: 2, tokens: 1 }, 3, LimitKind::Inputs);
        check(limits(5, 6, 40), Cost { inputs: 2, tokens: 20 }, 2, LimitKind::Tokens);
    }

    #[test]
    fn an_unaffordable_request_is_rejected_for_good_as_early_as_its_length_shows() {
        let now = some_instant();
        let mut limiter = RateLimiter::new(&limits(5, 10, 100), now);
        let never = |kind, limit| {
            Err(LimitExceeded { kind, limit: NonZeroU64::new(limit).unwrap(), shortfall: Shortfall::Never })
        };
        let check =
            |at_least: Cost, cost: Cost, expected: (Result<(), LimitExceeded>, Result<(), LimitExceeded>)| {
                let mut limiter = limiter.clone();
                let entered = limiter.enter(at_least, now);
                let charged = entered.and_then(|()| limiter.charge(cost, now));
                assert_eq!((entered, charged), expected, "{cost:?}");
            };
        let cost = |inputs, tokens| Cost { inputs, tokens };
        check(Cost::at_least(100 * BYTES_PER_TOKEN_MAX), cost(10, 100), (Ok(()), Ok(())));
        let too_long = never(LimitKind::Tokens, 100);
        check(Cost::at_least(101 * BYTES_PER_TOKEN_MAX), cost(1, 101), (too_long, too_long));
        check(Cost::at_least(0), cost(11, 11), (Ok(()), never(LimitKind::Inputs, 10)));
        check(Cost::at_least(0), cost(1, 101), (Ok(()), never(LimitKind::Tokens, 100)));
        // Also while another limit could be waited for.
        assert_eq!(admit(&mut limiter, cost(10, 1), now), Ok(()));
        assert_eq!(limiter.enter(cost(1, 1), now).map_err(|exceeded| exceeded.kind), Err(LimitKind::Inputs));
        assert_eq!(limiter.enter(cost(1, 101), now), never(LimitKind::Tokens, 100));
    }

    #[test]
    fn a_rejected_request_is_not_charged() {
        let now = some_instant();
        let mut limiter = RateLimiter::new(&limits(5, 0, 100), now);
        assert_eq!(admit(&mut limiter, Cost { inputs: 1, tokens: 60 }, now), Ok(()));
        assert!(admit(&mut limiter, Cost { inputs: 1, tokens: 60 }, now).is_err());
        assert_eq!(left(&limiter, now), (4, 40));
        assert_eq!(limiter.status(now).1.unwrap().reset, Duration::from_secs(36));
        limiter.settle(60, 10, now);
        assert_eq!(left(&limiter, now), (4, 90));
        assert_eq!(limiter.enter(ONE, now), Ok(()));
        assert_eq!(left(&limiter, now), (3, 90));
        limiter.refund(now);
        assert_eq!(left(&limiter, now), (4, 90));
    }

    #[test]
    fn a_tenant_without_limits_is_unlimited() {
        let now = some_instant();
        let mut limiter = RateLimiter::new(&RateLimits::default(), now);
        for _ in 0..1000 {
            assert_eq!(admit(&mut limiter, Cost { inputs: u64::MAX, tokens: u64::MAX }, now), Ok(()));
        }
        assert_eq!(limiter.status(now), (None, None));
    }
}
