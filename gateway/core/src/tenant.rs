//! Who a caller is to this gateway: what they may use, where it may go, and how much of it they may use.
//!
//! A request costs one request, its inputs and its tokens, each against a limit of its own. It pays in two steps, because
//! what it carries is known only when its body has been read, and whoever cannot pay is to be told before that: at the
//! head it pays for being a request, if it could pay at all for the least that its declared length can mean; when it is
//! read, for its inputs and tokens. Who fails at the second step gets back what the first one took, so to be refused by a
//! limit costs nothing; a request that is wrong has cost us as much as a right one, and pays for being one. Inputs and
//! tokens are estimates until the answer says what it really was.

use crate::bucket::{Bucket, Rate, Short};
use crate::priority::Priorities;
use regions::id::{DeploymentName, TenantId};
use regions::residency::ResidencyPolicy;
use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::{Duration, Instant};

/// A tenant, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name.
    pub id: TenantId,
    /// Where it stands among all the tenants that this gateway has ever known, from 0; what is kept for each is kept there.
    pub place: usize,
    /// Whose tokens speak for it; absent = it has keys only.
    pub issuer: Option<String>,
    /// The deployments that it may use; absent = all.
    pub deployments: Option<BTreeSet<DeploymentName>>,
    /// Where its requests may go; narrows what the deployment permits.
    pub residency: ResidencyPolicy,
    /// How urgent its requests may be.
    pub priorities: Priorities,
    /// How much of what there is too little of is its share, beside the weights of others.
    pub weight: NonZeroU32,
    /// How much it may use.
    pub limits: Limits,
}

/// The largest weight: with more, the shares of others would come to nothing.
pub const WEIGHT_MAX: u32 = 1000;

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

impl Cost {
    /// The least that a body of so many bytes carries: one input, and a token for every [`BYTES_PER_TOKEN_MAX`].
    pub fn at_least(body_bytes: u64) -> Cost {
        Cost { inputs: 1, tokens: (body_bytes / BYTES_PER_TOKEN_MAX).max(1) }
    }
}

/// A token takes no more bytes of a body than these, on the average of a body: the longest is a token id in a list that
/// was written for people to read, on a line of its own (eight spaces, six digits, a comma, a line feed). Text has four.
pub const BYTES_PER_TOKEN_MAX: u64 = 16;

/// A request costs more than its tenant can pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Which limit; of several, the one that waiting does not help with, or that has to be waited for longest.
    pub limited: Limited,
    /// The limit.
    pub limit: NonZeroU64,
    /// What helps.
    pub short: Short,
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

    /// At the head of a request that will cost `at_least` this: takes one request, or says why not.
    pub fn enter(&mut self, at_least: Cost, now: Instant) -> Result<(), Exceeded> {
        let Cost { inputs, tokens } = at_least;
        longest([
            exceeded(Limited::Requests, self.requests.as_ref(), 1, now),
            exceeded(Limited::Inputs, self.inputs.as_ref(), inputs, now),
            exceeded(Limited::Tokens, self.tokens.as_ref(), tokens, now),
        ])?;
        if let Some(requests) = &mut self.requests {
            requests.take(1, now);
        }
        Ok(())
    }

    /// When a request that has [entered](Allowance::enter) is read: takes its inputs and its tokens, or gives the request
    /// back and says why not.
    pub fn charge(&mut self, cost: Cost, now: Instant) -> Result<(), Exceeded> {
        let Cost { inputs, tokens } = cost;
        let paid = longest([
            exceeded(Limited::Inputs, self.inputs.as_ref(), inputs, now),
            exceeded(Limited::Tokens, self.tokens.as_ref(), tokens, now),
        ]);
        if let Err(exceeded) = paid {
            self.leave(now);
            return Err(exceeded);
        }
        for (bucket, units) in [(&mut self.inputs, inputs), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.take(units, now);
            }
        }
        Ok(())
    }

    /// Takes what was used already, beyond the limit if need be: it is owed.
    pub fn pay(&mut self, requests: u64, tokens: u64, now: Instant) {
        for (bucket, units) in [(&mut self.requests, requests), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.take(units, now);
            }
        }
    }

    /// A request that has [entered](Allowance::enter) is turned away for a reason that is not its own: it gets back what
    /// it took.
    pub fn leave(&mut self, now: Instant) {
        if let Some(requests) = &mut self.requests {
            requests.settle(1, 0, now);
        }
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

fn exceeded(limited: Limited, bucket: Option<&Bucket>, units: u64, now: Instant) -> Option<Exceeded> {
    let bucket = bucket?;
    let short = bucket.check(units, now).err()?;
    Some(Exceeded { limited, limit: bucket.rate().units, short })
}

fn longest<const N: usize>(exceeded: [Option<Exceeded>; N]) -> Result<(), Exceeded> {
    let longest = exceeded.into_iter().flatten().max_by_key(|exceeded| match exceeded.short {
        Short::NotYet { wait } => wait,
        Short::Never => Duration::MAX,
    });
    longest.map_or(Ok(()), Err)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::priority::Priorities;
    use crate::some_instant;
    use std::sync::Arc;

    /// A tenant that may do everything.
    pub(crate) fn named(name: &str) -> Arc<Tenant> {
        Arc::new(Tenant {
            id: name.parse().unwrap(),
            place: 0,
            issuer: None,
            deployments: None,
            residency: ResidencyPolicy::Anywhere,
            priorities: Priorities::default(),
            weight: NonZeroU32::MIN,
            limits: Limits::default(),
        })
    }

    const ONE: Cost = Cost { inputs: 1, tokens: 1 };

    fn limits(requests: u64, inputs: u64, tokens: u64) -> Limits {
        Limits {
            requests_per_second: NonZeroU64::new(requests),
            inputs_per_second: NonZeroU64::new(inputs),
            tokens_per_minute: NonZeroU64::new(tokens),
        }
    }

    /// Both steps of a request of which everything is known at its head.
    fn admit(allowance: &mut Allowance, cost: Cost, now: Instant) -> Result<(), Exceeded> {
        allowance.enter(cost, now)?;
        allowance.charge(cost, now)
    }

    fn left(allowance: &Allowance, now: Instant) -> (u64, u64) {
        let (requests, tokens) = allowance.left(now);
        (requests.unwrap().remaining, tokens.unwrap().remaining)
    }

    #[test]
    fn each_limit_holds_at_it_and_one_past_it() {
        let check = |limits: Limits, cost: Cost, fits: u32, limited: Limited| {
            let now = some_instant();
            let mut allowance = Allowance::new(&limits, now);
            for _ in 0..fits {
                assert_eq!(admit(&mut allowance, cost, now), Ok(()), "{limits:?}");
            }
            let exceeded = admit(&mut allowance, cost, now).expect_err("one past the limit");
            let Short::NotYet { wait } = exceeded.short else { panic!("{exceeded:?}") };
            assert_eq!(exceeded.limited, limited, "{limits:?}");
            assert_eq!(admit(&mut allowance, cost, now + wait), Ok(()), "{limits:?}");
        };
        check(limits(5, 0, 0), ONE, 5, Limited::Requests);
        check(limits(5, 6, 0), Cost { inputs: 2, tokens: 1 }, 3, Limited::Inputs);
        check(limits(5, 6, 40), Cost { inputs: 2, tokens: 20 }, 2, Limited::Tokens);
    }

    #[test]
    fn what_can_never_be_paid_is_said_so_and_as_early_as_the_length_tells() {
        let now = some_instant();
        let mut allowance = Allowance::new(&limits(5, 10, 100), now);
        let never = |limited, limit| {
            Err(Exceeded { limited, limit: NonZeroU64::new(limit).unwrap(), short: Short::Never })
        };
        let check = |at_least: Cost, cost: Cost, expected: (Result<(), Exceeded>, Result<(), Exceeded>)| {
            let mut allowance = allowance.clone();
            let entered = allowance.enter(at_least, now);
            let charged = entered.and_then(|()| allowance.charge(cost, now));
            assert_eq!((entered, charged), expected, "{cost:?}");
        };
        let cost = |inputs, tokens| Cost { inputs, tokens };
        check(Cost::at_least(100 * BYTES_PER_TOKEN_MAX), cost(10, 100), (Ok(()), Ok(())));
        let too_long = never(Limited::Tokens, 100);
        check(Cost::at_least(101 * BYTES_PER_TOKEN_MAX), cost(1, 101), (too_long, too_long));
        check(Cost::at_least(0), cost(11, 11), (Ok(()), never(Limited::Inputs, 10)));
        check(Cost::at_least(0), cost(1, 101), (Ok(()), never(Limited::Tokens, 100)));
        // Also while something else could be waited for.
        assert_eq!(admit(&mut allowance, cost(10, 1), now), Ok(()));
        assert_eq!(
            allowance.enter(cost(1, 1), now).map_err(|exceeded| exceeded.limited),
            Err(Limited::Inputs)
        );
        assert_eq!(allowance.enter(cost(1, 101), now), never(Limited::Tokens, 100));
    }

    #[test]
    fn a_request_that_is_refused_takes_nothing() {
        let now = some_instant();
        let mut allowance = Allowance::new(&limits(5, 0, 100), now);
        assert_eq!(admit(&mut allowance, Cost { inputs: 1, tokens: 60 }, now), Ok(()));
        assert!(admit(&mut allowance, Cost { inputs: 1, tokens: 60 }, now).is_err());
        assert_eq!(left(&allowance, now), (4, 40));
        assert_eq!(allowance.left(now).1.unwrap().reset, Duration::from_secs(36));
        allowance.settle(60, 10, now);
        assert_eq!(left(&allowance, now), (4, 90));
        assert_eq!(allowance.enter(ONE, now), Ok(()));
        assert_eq!(left(&allowance, now), (3, 90));
        allowance.leave(now);
        assert_eq!(left(&allowance, now), (4, 90));
    }

    #[test]
    fn whoever_has_no_limit_has_none() {
        let now = some_instant();
        let mut allowance = Allowance::new(&Limits::default(), now);
        for _ in 0..1000 {
            assert_eq!(admit(&mut allowance, Cost { inputs: u64::MAX, tokens: u64::MAX }, now), Ok(()));
        }
        assert_eq!(allowance.left(now), (None, None));
    }
}
