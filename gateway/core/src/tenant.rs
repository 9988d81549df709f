//! Tenants of a gateway: their permissions and their rate limits.
//!
//! A request costs one request, its inputs and its tokens, each against a limit of its own. It is charged in two steps,
//! because its content is known only after its body has been read, and a request above its limit should be rejected
//! before that: at the head one request is charged, if the limits allow the minimum cost of the declared length; after
//! the body its inputs and tokens. A request that fails the second step is refunded the first one, so a rejection by a
//! limit costs nothing; an invalid request has cost us as much as a valid one, and is charged as one. Inputs and tokens
//! are estimates until the response reports the real numbers.
//!
//! Where several gateways serve a tenant, each applies its [share](RateLimiter::set_shares) of the limits, which the hub
//! apportions by the [demand](TenantDemandMeter) that each gateway reports. Statuses and rejections name the limits of the
//! tenant and the units that this gateway admits now.

use crate::bucket::{RateQuota, Shortfall, TokenBucket};
use crate::priority::Priorities;
use regions::ewma::Ewma;
use regions::id::{DeploymentName, TenantId};
use regions::residency::ResidencyPolicy;
use regions::tenant::{LimitShare, PerLimit};
use std::collections::{BTreeMap, BTreeSet};
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

/// Shares of this gateway in the rate limits of all tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayShares {
    /// Share of a tenant that is not listed.
    pub default: LimitShare,
    /// Shares of tenants.
    pub tenants: BTreeMap<TenantId, PerLimit<LimitShare>>,
}

impl GatewayShares {
    /// Creates equal shares of `gateways` gateways.
    pub fn equal(gateways: u32) -> GatewayShares {
        GatewayShares { default: LimitShare::equal(gateways), tenants: BTreeMap::new() }
    }

    /// Returns the shares of a tenant.
    pub fn of(&self, tenant: &TenantId) -> PerLimit<LimitShare> {
        self.tenants.get(tenant).copied().unwrap_or(PerLimit::each(|| self.default))
    }
}

/// Rate limiter of one tenant.
#[derive(Clone, Debug)]
pub struct RateLimiter {
    requests: Option<TokenBucket>,
    inputs: Option<TokenBucket>,
    tokens: Option<TokenBucket>,
    demand: TenantDemandMeter,
}

/// Half-life of a tenant's reported demand: it follows a shift of traffic within seconds and ignores a single request.
const DEMAND_HALF_LIFE: Duration = Duration::from_millis(500);
/// Demand in units per minute below which a tenant is not reported: less than one request in ten minutes.
const DEMAND_MIN: f64 = 0.1;

/// Meter of the demand of one tenant at this gateway, admitted or rejected.
///
/// The cost of a request that was rejected at its head is unknown. It counts as the mean of the tenant's requests whose
/// body was read.
#[derive(Clone, Debug, Default)]
pub struct TenantDemandMeter {
    /// Requests since the last report, and those of them whose cost is known.
    requests: u64,
    sized: u64,
    inputs: u64,
    tokens: u64,
    /// Mean inputs and tokens of a request.
    mean: Option<(f64, f64)>,
    /// Units per minute.
    rates: Option<PerLimit<Ewma>>,
    last_report: Option<Instant>,
}

impl TenantDemandMeter {
    fn count_request(&mut self) {
        self.requests = self.requests.saturating_add(1);
    }

    fn count_cost(&mut self, Cost { inputs, tokens }: Cost) {
        self.sized = self.sized.saturating_add(1);
        self.inputs = self.inputs.saturating_add(inputs);
        self.tokens = self.tokens.saturating_add(tokens);
    }

    /// Returns the demand in units per minute; `None` if there is none. To be called about once a second.
    pub fn report(&mut self, now: Instant) -> Option<PerLimit<u64>> {
        let since = self.last_report.replace(now).map(|last| now.saturating_duration_since(last));
        let minutes = since.unwrap_or(Duration::from_secs(1)).as_secs_f64().max(0.01) / 60.0;
        let (requests, sized) = (self.requests as f64, self.sized as f64);
        if self.sized > 0 {
            self.mean = Some((self.inputs as f64 / sized, self.tokens as f64 / sized));
        }
        let (inputs, tokens) = self.mean.unwrap_or((1.0, 1.0));
        let sample = PerLimit {
            requests: requests / minutes,
            inputs: requests * inputs / minutes,
            tokens: requests * tokens / minutes,
        };
        let before = self.rates.unwrap_or(PerLimit::each(|| Ewma::new(DEMAND_HALF_LIFE, 0.0, now)));
        let rates = before.zip(sample).map(|(mut rate, sample)| {
            rate.add(sample, now);
            // The first sample after a pause has its full weight.
            if rate.get() < DEMAND_MIN && sample > 0.0 {
                Ewma::new(DEMAND_HALF_LIFE, sample, now)
            } else {
                rate
            }
        });
        (self.requests, self.sized, self.inputs, self.tokens) = (0, 0, 0, 0);
        self.rates = (rates.requests.get() >= DEMAND_MIN).then_some(rates);
        self.rates.map(|rates| rates.map(|rate| rate.get().ceil() as u64))
    }
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
    /// Makes a limiter with full buckets of the whole limits.
    pub fn new(limits: &RateLimits, now: Instant) -> RateLimiter {
        RateLimiter::with_shares(limits, PerLimit::each(|| LimitShare::WHOLE), now)
    }

    /// Makes a limiter with full buckets of shares of the limits.
    pub fn with_shares(limits: &RateLimits, shares: PerLimit<LimitShare>, now: Instant) -> RateLimiter {
        let RateLimits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
        let bucket = |units: Option<NonZeroU64>, seconds, share| {
            let quota = |units| RateQuota { units, period: Duration::from_secs(seconds) };
            units.map(|units| TokenBucket::with_share(quota(units), share, now))
        };
        RateLimiter {
            requests: bucket(requests_per_second, 1, shares.requests),
            inputs: bucket(inputs_per_second, 1, shares.inputs),
            tokens: bucket(tokens_per_minute, 60, shares.tokens),
            demand: TenantDemandMeter::default(),
        }
    }

    /// Replaces the shares of this gateway.
    pub fn set_shares(&mut self, shares: PerLimit<LimitShare>, now: Instant) {
        let PerLimit { requests, inputs, tokens } = shares;
        for (bucket, share) in
            [(&mut self.requests, requests), (&mut self.inputs, inputs), (&mut self.tokens, tokens)]
        {
            if let Some(bucket) = bucket {
                bucket.set_share(share, now);
            }
        }
    }

    /// Returns the demand in units per minute since the last report; `None` if there is none, or no limit.
    pub fn demand(&mut self, now: Instant) -> Option<PerLimit<u64>> {
        let RateLimiter { requests, inputs, tokens, demand } = self;
        let demand = demand.report(now)?;
        [requests, inputs, tokens].into_iter().any(|bucket| bucket.is_some()).then_some(demand)
    }

    /// Charges one request at the head if the limits allow `at_least` this cost.
    pub fn enter(&mut self, at_least: Cost, now: Instant) -> Result<(), LimitExceeded> {
        let Cost { inputs, tokens } = at_least;
        self.demand.count_request();
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
        self.demand.count_cost(cost);
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
    fn demand_counts_rejected_requests_at_the_mean_cost_of_the_others() {
        let begin = some_instant();
        let mut limiter = RateLimiter::new(&limits(10, 1000, 100_000), begin);
        assert_eq!(limiter.demand(begin), None);
        let cost = Cost { inputs: 4, tokens: 200 };
        let second = |limiter: &mut RateLimiter, at: u32| {
            let admitted = |_| admit(limiter, cost, begin + Duration::from_secs(at.into())).is_ok();
            assert_eq!((0..40).map(admitted).filter(|admitted| *admitted).count(), 10);
            limiter.demand(begin + Duration::from_secs(u64::from(at) + 1)).unwrap()
        };
        let first = second(&mut limiter, 0);
        assert_eq!(
            (first.requests, first.inputs, first.tokens),
            (2400, 9600, 480_000),
            "30 of 40 were rejected"
        );
        for at in 1..10 {
            assert_eq!(second(&mut limiter, at), first);
        }
        let later = begin + Duration::from_secs(11);
        assert_eq!(limiter.demand(later).unwrap().requests, 600, "two half-lives later");
        for at in 12..60 {
            limiter.demand(begin + Duration::from_secs(at));
        }
        assert_eq!(limiter.demand(begin + Duration::from_secs(60)), None);
        let mut unlimited = RateLimiter::new(&RateLimits::default(), begin);
        assert!(admit(&mut unlimited, cost, begin).is_ok());
        assert_eq!(unlimited.demand(later), None);
    }

    #[test]
    fn a_share_reduces_what_is_admitted_and_the_status_names_the_limit() {
        let now = some_instant();
        let quarter = LimitShare::new(250_000).unwrap();
        let mut limiter = RateLimiter::with_shares(&limits(20, 0, 400), PerLimit::each(|| quarter), now);
        for _ in 0..5 {
            assert_eq!(admit(&mut limiter, ONE, now), Ok(()));
        }
        let exceeded = admit(&mut limiter, ONE, now).expect_err("one past the share");
        assert_eq!((exceeded.kind, exceeded.limit.get()), (LimitKind::Requests, 20));
        let (requests, tokens) = limiter.status(now);
        assert_eq!(requests.map(|status| (status.limit.get(), status.remaining)), Some((20, 0)));
        assert_eq!(tokens.map(|status| (status.limit.get(), status.remaining)), Some((400, 95)));
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
