//! Budgets of retries and hedged requests, for every client of the API: gateway, ingress and bulk client.
//!
//! Retries turn a small failure into a large one: a server that slows down gets twice the requests. So a retry is paid for
//! by successful requests (the retry budget of Finagle and linkerd: a share of traffic, not a count per request), and one
//! client can never add more than that share to the load of the servers. Time adds a few retries: without them the first
//! failures after an idle period could not be retried at all, and no request would be left to probe a server that returns
//! after a minute without successes.
//!
//! A hedged request, a second attempt, hides a stall of one server, and doubles the work of a server that is merely slow. So
//! hedges are paid for by other requests, two in a hundred under all conditions: where more than that stall, the rest wait.
//! Time adds nothing to this budget: a client without responses may not hedge.

use std::time::{Duration, Instant};

/// Deposit of a success, as a share of one retry. Finagle and linkerd default to twice this.
pub const RETRIES_PER_SUCCESS: f64 = 0.10;
/// Largest balance: about one second of retries at 1,000 requests/s.
const RETRY_BALANCE_MAX: f64 = 100.0;
/// Retries that an idle client may spend at once and regains within a second.
const RETRIES_IDLE: f64 = 10.0;

/// Deposit of a request, as a share of one hedge: at most two of a hundred requests are hedged.
pub const HEDGES_PER_REQUEST: f64 = 0.02;
/// Largest balance, in hedges: enough for a stall of a server with a handful in flight, too few for a burst on the others.
const HEDGE_BALANCE_MAX: u64 = 8;
/// Units of a hedge: whole numbers, because fifty times 0.02 is less than 1 in binary.
const HEDGE_UNITS: u64 = 1_000_000;

/// Retry budget: retries as a share of successes.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    per_success: f64,
    balance: f64,
    topped_up: Instant,
}

impl RetryBudget {
    /// Returns the budget of an idle client with the usual share.
    pub fn new(now: Instant) -> RetryBudget {
        RetryBudget::with_share(RETRIES_PER_SUCCESS, now)
    }

    /// Returns the budget of an idle client into which each success pays `per_success` of a retry; 0 disables retries.
    pub fn with_share(per_success: f64, now: Instant) -> RetryBudget {
        let balance = if per_success > 0.0 { RETRIES_IDLE } else { 0.0 };
        RetryBudget { per_success, balance, topped_up: now }
    }

    /// Records a successful request.
    pub fn succeeded(&mut self) {
        self.balance = (self.balance + self.per_success).min(RETRY_BALANCE_MAX);
    }

    /// Withdraws one retry; returns whether there was one.
    pub fn withdraw(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.topped_up).as_secs_f64() * RETRIES_IDLE;
        if self.balance < RETRIES_IDLE && self.per_success > 0.0 {
            self.balance = (self.balance + earned).min(RETRIES_IDLE);
        }
        self.topped_up = self.topped_up.max(now);
        let enough = self.balance >= 1.0;
        if enough {
            self.balance -= 1.0;
        }
        debug_assert!(self.balance >= 0.0);
        enough
    }

    /// Returns the time, from the last withdrawal, after which time alone has earned a retry. It never does if the share is 0.
    pub fn time_to_next(&self) -> Duration {
        // One millisecond of margin, so that rounding does not wake the caller too early.
        Duration::from_secs_f64((1.0 - self.balance).max(0.0) / RETRIES_IDLE) + Duration::from_millis(1)
    }

    /// Returns the number of retries that could be withdrawn now.
    pub fn left(&self, now: Instant) -> u32 {
        let mut copy = self.clone();
        (0..).take_while(|_| copy.withdraw(now)).count() as u32
    }
}

/// Hedge budget: hedges as a share of requests.
#[derive(Clone, Debug)]
pub struct HedgeBudget {
    deposit: u64,
    balance: u64,
}

impl Default for HedgeBudget {
    fn default() -> HedgeBudget {
        HedgeBudget::with_share(HEDGES_PER_REQUEST)
    }
}

impl HedgeBudget {
    /// Returns an empty budget into which each request pays `per_request` of a hedge.
    pub fn with_share(per_request: f64) -> HedgeBudget {
        HedgeBudget { deposit: (per_request * HEDGE_UNITS as f64).round() as u64, balance: 0 }
    }

    /// Records a request that could have been hedged.
    pub fn deposit(&mut self) {
        self.balance = (self.balance + self.deposit).min(HEDGE_BALANCE_MAX * HEDGE_UNITS);
    }

    /// Withdraws one hedge; returns whether there was one.
    pub fn withdraw(&mut self) -> bool {
        let enough = self.balance >= HEDGE_UNITS;
        if enough {
            self.balance -= HEDGE_UNITS;
        }
        enough
    }

    /// Returns the number of hedges that could be withdrawn now.
    pub fn left(&self) -> u32 {
        (self.balance / HEDGE_UNITS) as u32
    }
}
