//! Who a caller is to this gateway: what they may use, where it may go, and how much of it they may use.
//!
//! A request costs one request, its inputs and its tokens, each against a limit of its own. It is let in when all three
//! have room, and takes from none otherwise. Inputs and tokens are estimates until the answer says what it really was.

use crate::bucket::{Bucket, NotYet, Rate};
use regions::id::{DeploymentName, TenantId};
use regions::residency::ResidencyPolicy;
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// A tenant, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name.
    pub id: TenantId,
    /// The deployments that it may use; absent = all.
    pub deployments: Option<BTreeSet<DeploymentName>>,
    /// Where its requests may go; narrows what the deployment permits.
    pub residency: ResidencyPolicy,
    /// How much it may use.
    pub limits: Limits,
}

impl Tenant {
    /// Whether it may use this deployment.
    pub fn may_use(&self, deployment: &DeploymentName) -> bool {
        self.deployments.as_ref().is_none_or(|allowed| allowed.contains(deployment))
    }
}

/// How much a tenant may use; absent = as much as there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests in a second.
    pub requests_per_second: Option<NonZeroU64>,
    /// Inputs in a second.
    pub inputs_per_second: Option<NonZeroU64>,
    /// Tokens in a minute.
    pub tokens_per_minute: Option<NonZeroU64>,
}

/// Which limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limited {
    /// [`Limits::requests_per_second`].
    Requests,
    /// [`Limits::inputs_per_second`].
    Inputs,
    /// [`Limits::tokens_per_minute`].
    Tokens,
}

impl Limited {
    /// The key of the configuration, which says the unit as well.
    pub fn as_str(self) -> &'static str {
        match self {
            Limited::Requests => "requests_per_second",
            Limited::Inputs => "inputs_per_second",
            Limited::Tokens => "tokens_per_minute",
        }
    }
}

/// What a request costs beside being one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Its inputs.
    pub inputs: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// A tenant has used up one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Which; of several, the one that has to be waited for longest.
    pub limited: Limited,
    /// The limit.
    pub limit: NonZeroU64,
    /// After this the request would be let in, if the tenant sends nothing else.
    pub wait: Duration,
}

/// What a tenant has left.
#[derive(Clone, Debug)]
pub struct Allowance {
    requests: Option<Bucket>,
    inputs: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// What is left of one limit, as `x-ratelimit-*` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// The limit.
    pub limit: NonZeroU64,
    /// What may be taken now.
    pub remaining: u64,
    /// When all of it may be.
    pub reset: Duration,
}

impl Allowance {
    /// All of it.
    pub fn new(limits: &Limits, now: Instant) -> Allowance {
        let Limits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
        let bucket = |units: Option<NonZeroU64>, seconds| {
            units.map(|units| Bucket::new(Rate { units, period: Duration::from_secs(seconds) }, now))
        };
        Allowance {
            requests: bucket(requests_per_second, 1),
            inputs: bucket(inputs_per_second, 1),
            tokens: bucket(tokens_per_minute, 60),
        }
    }

    /// Lets a request in, or says why not.
    pub fn admit(&mut self, cost: Cost, now: Instant) -> Result<(), Exceeded> {
        let Cost { inputs, tokens } = cost;
        let Allowance { requests: of_requests, inputs: of_inputs, tokens: of_tokens } = self;
        let mut wanted = [
            (Limited::Requests, of_requests, 1),
            (Limited::Inputs, of_inputs, inputs),
            (Limited::Tokens, of_tokens, tokens),
        ];
        let exceeded = wanted.iter().filter_map(|(limited, bucket, units)| {
            let bucket = bucket.as_ref()?;
            let NotYet { wait } = bucket.check(*units, now).err()?;
            Some(Exceeded { limited: *limited, limit: bucket.rate().units, wait })
        });
        if let Some(longest) = exceeded.max_by_key(|exceeded| exceeded.wait) {
            return Err(longest);
        }
        for (_, bucket, units) in &mut wanted {
            if let Some(bucket) = bucket.as_mut() {
                bucket.take(*units, now);
            }
        }
        Ok(())
    }

    /// A request that was let in for `estimate` tokens had `actual`.
    pub fn settle(&mut self, estimate: u64, actual: u64, now: Instant) {
        if let Some(tokens) = &mut self.tokens {
            tokens.settle(estimate, actual, now);
        }
    }

    /// What is left of the requests and of the tokens, where they are limited.
    pub fn left(&self, now: Instant) -> (Option<Left>, Option<Left>) {
        let left = |bucket: &Bucket| Left {
            limit: bucket.rate().units,
            remaining: bucket.left(now),
            reset: bucket.full_in(now),
        };
        (self.requests.as_ref().map(left), self.tokens.as_ref().map(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const ONE: Cost = Cost { inputs: 1, tokens: 1 };

    fn limits(requests: u64, inputs: u64, tokens: u64) -> Limits {
        Limits {
            requests_per_second: NonZeroU64::new(requests),
            inputs_per_second: NonZeroU64::new(inputs),
            tokens_per_minute: NonZeroU64::new(tokens),
        }
    }

    #[test]
    fn each_limit_holds_at_it_and_one_past_it() {
        let check = |limits: Limits, cost: Cost, fits: u32, limited: Limited| {
            let now = some_instant();
            let mut allowance = Allowance::new(&limits, now);
            for _ in 0..fits {
                assert_eq!(allowance.admit(cost, now), Ok(()), "{limits:?}");
            }
            let exceeded = allowance.admit(cost, now).expect_err("one past the limit");
            assert_eq!(exceeded.limited, limited, "{limits:?}");
            assert_eq!(allowance.admit(cost, now + exceeded.wait), Ok(()), "{limits:?}");
        };
        check(limits(5, 0, 0), ONE, 5, Limited::Requests);
        check(limits(5, 6, 0), Cost { inputs: 2, tokens: 1 }, 3, Limited::Inputs);
        check(limits(5, 6, 40), Cost { inputs: 2, tokens: 20 }, 2, Limited::Tokens);
    }

    #[test]
    fn a_request_that_is_refused_takes_nothing() {
        let now = some_instant();
        let mut allowance = Allowance::new(&limits(5, 0, 100), now);
        assert_eq!(allowance.admit(Cost { inputs: 1, tokens: 60 }, now), Ok(()));
        assert!(allowance.admit(Cost { inputs: 1, tokens: 60 }, now).is_err());
        let (requests, tokens) = allowance.left(now);
        assert_eq!((requests.unwrap().remaining, tokens.unwrap().remaining), (4, 40));
        assert_eq!(tokens.unwrap().reset, Duration::from_secs(36));
        allowance.settle(60, 10, now);
        assert_eq!(allowance.left(now).1.unwrap().remaining, 90);
    }

    #[test]
    fn whoever_has_no_limit_has_none() {
        let now = some_instant();
        let mut allowance = Allowance::new(&Limits::default(), now);
        for _ in 0..1000 {
            assert_eq!(allowance.admit(Cost { inputs: u64::MAX, tokens: u64::MAX }, now), Ok(()));
        }
        assert_eq!(allowance.left(now), (None, None));
    }
}
