//! Sampling: which traces are exported.
//!
//! **At the start** of a request, the first process decides by the trace identifier, so that all processes with the same
//! ratio agree; the flag of `traceparent` carries the decision to the others ([`HeadSampler`]).
//!
//! **At the end**, each process keeps what an operator looks for, although it was not sampled ([`KeepPolicy`]): errors,
//! slow requests, and requests that were sent again. The gateway sets the flag for the attempts after a failed one, so
//! that the later processes export theirs; what happened before is kept by the process in which it failed or took long.
//!
//! Both decisions have a limit where a client or an outage could have every trace exported ([`KeepLimiter`]). Since the flag of an
//! attempt after a failed one cannot be taken back, the limit decides before that attempt, and not again at the end.

use crate::context::{TraceContext, TraceId};
use std::time::{Duration, Instant};

/// Decision at the start of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSampler {
    /// Share of the traces, of 2⁶³.
    threshold: u64,
    parent_flag: ParentFlag,
}

/// Effect of the flag of a valid `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParentFlag {
    Ignored,
    /// It decides, up to a limit: callers are clients.
    Limited,
    /// It decides: callers are processes of the fleet.
    Followed,
}

impl HeadSampler {
    /// Samples a share of the traces, from 0 to 1, if there is no parent, or if the parent does not decide.
    pub fn new(ratio: f64, is_parent_based: bool) -> HeadSampler {
        let threshold = (ratio.clamp(0.0, 1.0) * (1_u64 << 63) as f64) as u64;
        let parent_flag = if is_parent_based { ParentFlag::Limited } else { ParentFlag::Ignored };
        HeadSampler { threshold, parent_flag }
    }

    /// Returns the same sampler where the flag of the parent decides: callers are processes of the fleet.
    #[must_use]
    pub fn following_parent(self) -> HeadSampler {
        HeadSampler { parent_flag: ParentFlag::Followed, ..self }
    }

    /// Returns whether a trace is sampled. Like the SDKs of OpenTelemetry, it uses the lower 63 bits of the identifier.
    /// `admit` takes a token of the limit of the traces that clients sample.
    pub fn is_sampled(
        &self,
        parent: Option<&TraceContext>,
        trace: TraceId,
        admit: impl FnOnce() -> bool,
    ) -> bool {
        match (self.parent_flag, parent) {
            (ParentFlag::Followed, Some(parent)) => parent.is_sampled,
            (ParentFlag::Limited, Some(parent)) => parent.is_sampled && admit(),
            (ParentFlag::Ignored, Some(_)) | (_, None) => (trace.get() as u64) >> 1 < self.threshold,
        }
    }
}

/// Reason why a trace is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeepReason {
    /// It was sampled at the start.
    Sampled,
    /// The request failed.
    Error,
    /// The request was sent again after a failure, a timeout or the loss of a region.
    FailedOver,
    /// The caller disconnected before the response was complete.
    Disconnected,
    /// The request took longer than the threshold.
    Slow,
}

impl KeepReason {
    /// All reasons.
    pub const ALL: [KeepReason; 5] = [
        KeepReason::Sampled,
        KeepReason::Error,
        KeepReason::FailedOver,
        KeepReason::Disconnected,
        KeepReason::Slow,
    ];

    /// Returns the name of the reason.
    pub fn as_str(self) -> &'static str {
        match self {
            KeepReason::Sampled => "sampled",
            KeepReason::Error => "error",
            KeepReason::FailedOver => "failed_over",
            KeepReason::Disconnected => "disconnected",
            KeepReason::Slow => "slow",
        }
    }
}

/// Whether a request was sent again after a failure, a timeout or the loss of a region, and with which flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailoverTrace {
    /// It was not.
    #[default]
    None,
    /// It was, without the flag, because of the limit.
    Limited,
    /// It was, with the flag.
    Exported,
}

/// Facts about a request when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FinishedTrace {
    /// It was sampled at the start.
    pub is_sampled: bool,
    /// It failed, and not by a mistake of its caller.
    pub is_error: bool,
    /// Its caller disconnected.
    pub is_disconnected: bool,
    /// Whether it was sent again.
    pub failover: FailoverTrace,
    /// Its duration in this process.
    pub total: Duration,
}

/// Decision at the end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepPolicy {
    /// Duration from which a request is slow.
    pub slow: Duration,
    /// Limit of traces that are kept in a second without having been sampled: if every request fails, a process exports a
    /// part of them. And limit of those that are sampled because of the flag of a client.
    pub per_second: u32,
}

impl KeepPolicy {
    /// Returns the reason to export a trace, if there is one.
    pub fn reason(&self, finished: &FinishedTrace) -> Option<KeepReason> {
        match finished {
            FinishedTrace { is_sampled: true, .. } => Some(KeepReason::Sampled),
            FinishedTrace { is_error: true, .. } => Some(KeepReason::Error),
            FinishedTrace { failover: FailoverTrace::Limited | FailoverTrace::Exported, .. } => {
                Some(KeepReason::FailedOver)
            }
            FinishedTrace { is_disconnected: true, .. } => Some(KeepReason::Disconnected),
            FinishedTrace { total, .. } if *total >= self.slow => Some(KeepReason::Slow),
            FinishedTrace { .. } => None,
        }
    }

    /// Returns the reason to export a trace, if there is one and the limit admits it. `admit` takes a token, unless the decision was
    /// made before. Requests whose caller disconnected have a limit of their own, so that clients that cancel requests do not
    /// displace the errors.
    pub fn decide(
        &self,
        finished: &FinishedTrace,
        admit: impl FnOnce(KeepReason) -> bool,
    ) -> Option<KeepReason> {
        let reason = self.reason(finished)?;
        let is_admitted = match finished {
            FinishedTrace { is_sampled: true, .. } => true,
            FinishedTrace { failover: FailoverTrace::Exported, .. } => true,
            FinishedTrace { failover: FailoverTrace::Limited, .. } => false,
            FinishedTrace { failover: FailoverTrace::None, .. } => admit(reason),
        };
        is_admitted.then_some(reason)
    }
}

/// Rate limit of traces: a bucket with the tokens of one second.
#[derive(Clone, Copy, Debug)]
pub struct KeepLimiter {
    per_second: u32,
    tokens: f64,
    filled: Instant,
}

impl KeepLimiter {
    /// Creates a full bucket.
    pub fn new(per_second: u32, now: Instant) -> KeepLimiter {
        KeepLimiter { per_second, tokens: per_second.into(), filled: now }
    }

    /// Takes a token; returns false if there is none.
    pub fn admit(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = self.filled.max(now);
        self.tokens = (self.tokens + passed * f64::from(self.per_second)).min(self.per_second.into());
        let is_admitted = self.tokens >= 1.0;
        if is_admitted {
            self.tokens -= 1.0;
        }
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::SpanId;

    #[test]
    fn the_sampled_share_of_the_traces_is_the_ratio() {
        // The lower 64 bits are evenly distributed: multiples of the golden ratio.
        let traces = |n: u128| TraceId::from_random(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for (ratio, low, high) in [(0.0, 0, 0), (0.01, 80, 120), (0.5, 4900, 5100), (1.0, 10_000, 10_000)] {
            let sampler = HeadSampler::new(ratio, true);
            let sampled = (1..=10_000).filter(|n| sampler.is_sampled(None, traces(*n), || false)).count();
            assert!((low..=high).contains(&sampled), "{sampled} of 10000 at {ratio}");
        }
    }

    #[test]
    fn the_flag_of_the_parent_decides_unless_the_sampler_ignores_it() {
        let trace = TraceId::from_random(5);
        let parent = |is_sampled| TraceContext { trace, span: SpanId::from_random(1), is_sampled };
        for flag in [false, true] {
            for ratio in [0.0, 1.0] {
                let sampled = |is_parent_based| {
                    HeadSampler::new(ratio, is_parent_based).is_sampled(Some(&parent(flag)), trace, || true)
                };
                assert_eq!((sampled(true), sampled(false)), (flag, ratio == 1.0), "{flag} {ratio}");
                let of_fleet = HeadSampler::new(ratio, false).following_parent();
                assert_eq!(of_fleet.is_sampled(Some(&parent(flag)), trace, || false), flag, "{ratio}");
            }
        }
    }

    #[test]
    fn the_flag_of_a_client_decides_within_a_limit_that_other_traces_do_not_use() {
        let trace = TraceId::from_random(5);
        let of_client = TraceContext { trace, span: SpanId::from_random(1), is_sampled: true };
        let unasked = || -> bool { panic!("no token is needed") };
        for ratio in [0.0, 1.0] {
            let sampler = HeadSampler::new(ratio, true);
            assert!(!sampler.is_sampled(Some(&of_client), trace, || false));
            assert!(sampler.is_sampled(Some(&of_client), trace, || true));
            let without_flag = TraceContext { is_sampled: false, ..of_client };
            assert!(!sampler.is_sampled(Some(&without_flag), trace, unasked));
            assert_eq!(sampler.is_sampled(None, trace, unasked), ratio == 1.0);
            assert_eq!(
                HeadSampler::new(ratio, false).is_sampled(Some(&of_client), trace, unasked),
                ratio == 1.0
            );
        }
    }

    #[test]
    fn errors_failovers_and_slow_requests_are_kept() {
        let policy = KeepPolicy { slow: Duration::from_millis(500), per_second: 1 };
        let calm = FinishedTrace {
            is_sampled: false,
            is_error: false,
            is_disconnected: false,
            failover: FailoverTrace::None,
            total: Duration::from_millis(499),
        };
        assert_eq!(policy.reason(&calm), None);
        let cases = [
            (FinishedTrace { is_sampled: true, is_error: true, ..calm }, KeepReason::Sampled),
            (FinishedTrace { is_error: true, failover: FailoverTrace::Exported, ..calm }, KeepReason::Error),
            (FinishedTrace { failover: FailoverTrace::Exported, ..calm }, KeepReason::FailedOver),
            (FinishedTrace { failover: FailoverTrace::Limited, ..calm }, KeepReason::FailedOver),
            (FinishedTrace { total: Duration::from_millis(500), ..calm }, KeepReason::Slow),
            (
                FinishedTrace { is_disconnected: true, total: Duration::from_secs(9), ..calm },
                KeepReason::Disconnected,
            ),
        ];
        for (finished, reason) in cases {
            assert_eq!(policy.reason(&finished), Some(reason), "{finished:?}");
        }
    }

    #[test]
    fn a_failover_is_decided_before_its_attempt_and_only_once() {
        let policy = KeepPolicy { slow: Duration::from_secs(1), per_second: 1 };
        let of = |is_sampled, is_error, failover, admits: Option<bool>| {
            let (is_disconnected, total) = (false, Duration::ZERO);
            let finished = FinishedTrace { is_sampled, is_error, is_disconnected, failover, total };
            policy.decide(&finished, |_| admits.expect("a decision without a token"))
        };
        assert_eq!(of(true, true, FailoverTrace::None, None), Some(KeepReason::Sampled));
        assert_eq!(of(true, false, FailoverTrace::Limited, None), Some(KeepReason::Sampled));
        assert_eq!(of(false, false, FailoverTrace::Exported, None), Some(KeepReason::FailedOver));
        assert_eq!(of(false, true, FailoverTrace::Exported, None), Some(KeepReason::Error));
        for is_error in [false, true] {
            assert_eq!(of(false, is_error, FailoverTrace::Limited, None), None);
        }
        assert_eq!(of(false, true, FailoverTrace::None, Some(true)), Some(KeepReason::Error));
        assert_eq!(of(false, true, FailoverTrace::None, Some(false)), None);
        assert_eq!(of(false, false, FailoverTrace::None, None), None);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "an instant is needed, any one")]
    fn the_limit_of_kept_traces_admits_its_rate_and_no_more() {
        let start = Instant::now();
        let mut limiter = KeepLimiter::new(10, start);
        let admitted = (0..11).filter(|_| limiter.admit(start)).count();
        assert_eq!(admitted, 10, "at the limit, and one past it");
        assert!(!limiter.admit(start + Duration::from_millis(50)));
        assert!(limiter.admit(start + Duration::from_millis(101)));
        let later = start + Duration::from_secs(60);
        assert_eq!(
            (0..20).filter(|_| limiter.admit(later)).count(),
            10,
            "unused tokens of a second, no more"
        );
        assert!(!limiter.admit(start), "a clock that goes back adds nothing");
        assert!(!KeepLimiter::new(0, start).admit(later));
    }
}
