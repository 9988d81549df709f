//! Counters of reached limits: what was closed, rejected or deferred because of one (invariant 6, Bounded).
//!
//! Each set of reasons is closed and counted in one [`LabelCounter`]. If a limit is visible in the response of a
//! request (an error code, an outcome), the request metrics count it; here are the cases without a request, and those
//! where one code stands for several limits.

use super::{Kind, MetricsText, Priority, RelaxedCounter};
use gateway_core::flood::IdleFrame;
use gateway_core::shed::ShedReason;

/// CloseReason set of label values.
pub(crate) trait LabelSet: Copy + 'static {
    const ALL: &'static [Self];

    fn as_str(self) -> &'static str;

    /// Returns its position in [`LabelSet::ALL`].
    fn index(self) -> usize;
}

/// Counters of a closed set of label values.
#[derive(Debug)]
pub(crate) struct LabelCounter<L> {
    counts: Box<[RelaxedCounter]>,
    of: std::marker::PhantomData<L>,
}

impl<L: LabelSet> Default for LabelCounter<L> {
    fn default() -> LabelCounter<L> {
        LabelCounter {
            counts: L::ALL.iter().map(|_| RelaxedCounter::default()).collect(),
            of: std::marker::PhantomData,
        }
    }
}

impl<L: LabelSet> LabelCounter<L> {
    pub(crate) fn count(&self, label: L) {
        self.counts[label.index()].add(1);
    }

    fn get(&self, label: L) -> u64 {
        self.counts[label.index()].get()
    }

    pub(crate) fn render(&self, text: &mut MetricsText, name: &str, help: &str, label: &str) {
        text.head(name, Kind::Counter, help);
        for each in L::ALL {
            text.sample(name, &[(label, each.as_str())], self.get(*each));
        }
    }
}

macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($(#[$of_variant:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($(#[$of_variant])* $variant,)+ }

        impl LabelSet for $name {
            const ALL: &'static [$name] = &[$($name::$variant,)+];

            fn as_str(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

labels! {
    /// Reason why this side closed a connection.
    CloseReason {
        /// It was idle for too long.
        Idle = "idle",
        /// It was idle for longest when the limit of all connections was reached.
        ConnectionLimit = "connection_limit",
        /// It had not sent the complete head of a request when a permit was needed, or when its address had too many
        /// such connections.
        HalfOpen = "half_open",
        /// Its address had reached its limit.
        AddressLimit = "address_limit",
        /// Its TLS handshake failed.
        HandshakeFailed = "handshake_failed",
        /// Its TLS handshake, or its HTTP/2 handshake, took too long.
        HandshakeTimeout = "handshake_timeout",
        /// Its request head was ambiguous or malformed.
        HeadMalformed = "head_malformed",
        /// Its request head had too many bytes or fields.
        HeadTooLarge = "head_too_large",
        /// Its request head was incomplete at the timeout.
        HeadTimeout = "head_timeout",
        /// Its client did not read a response.
        WriteTimeout = "write_timeout",
        /// It sent too many malformed requests over HTTP/2.
        MalformedRequests = "malformed_requests",
        /// It still had requests in flight at the end of the drain timeout.
        DrainTimeout = "drain_timeout",
    }
}

labels! {
    /// Events of a gateway's HTTP/2 connections to regions.
    HopEvent {
        /// A connection was opened.
        Opened = "opened",
        /// The region selected HTTP/1.1.
        Http1 = "http1",
        /// A connection takes no new requests, because the region drains it or because it is old.
        Retired = "retired",
        /// A connection received no byte for so long that it gets no new requests.
        Unresponsive = "unresponsive",
        /// A connection received no byte for so long that it was closed.
        TimedOut = "timed_out",
        /// All connections were full when a request needed one.
        Full = "full",
    }
}

labels! {
    /// Reason why a request body was rejected.
    BodyRejection {
        /// The memory limit of all bodies was reached.
        MemoryFull = "memory_full",
        /// The body is larger than the limit.
        TooLarge = "too_large",
        /// The body exceeded its total time, or its rate was below the minimum.
        TooSlow = "too_slow",
        /// No byte of the body arrived for too long.
        Stalled = "stalled",
        /// The memory limit of the tenant was reached.
        TenantFull = "tenant_full",
        /// The memory limit of the connection was reached.
        ConnectionFull = "connection_full",
        /// The framing or the encoding of the body is invalid.
        Malformed = "malformed",
    }
}

labels! {
    /// Admission of a request to split execution.
    SplitAdmission {
        /// Immediately.
        Immediate = "immediate",
        /// After another request finished, because no replica can compute it unsplit.
        Queued = "queued",
        /// Not admitted: it was sent unsplit.
        Unsplit = "unsplit",
    }
}

labels! {
    /// Outcome of a part of a split request.
    PartOutcome {
        Succeeded = "succeeded",
        /// It was retried.
        Rejected = "rejected",
        /// It failed, and with it the request.
        Failed = "failed",
    }
}

labels! {
    /// Reason why a request without a ready replica was not held.
    NotHeldReason {
        /// No scaler starts replicas.
        NoScaler = "no_scaler",
        /// Another region has a ready replica and responds sooner, or is the only one that can respond.
        OtherRegion = "other_region",
        /// The deadline of the request would pass.
        Deadline = "deadline",
        /// The limit of held requests of its tenant.
        TenantRequests = "tenant_requests",
        /// The limit of held bytes of its tenant.
        TenantBytes = "tenant_bytes",
        /// The limit of held requests.
        Requests = "requests",
        /// The limit of held bytes.
        Bytes = "bytes",
    }
}

impl LabelSet for IdleFrame {
    const ALL: &'static [IdleFrame] = &IdleFrame::ALL;

    fn as_str(self) -> &'static str {
        self.as_str()
    }

    fn index(self) -> usize {
        self as usize
    }
}

/// Metrics of a listener.
#[derive(Debug, Default)]
pub(crate) struct ListenerMetrics {
    pub(crate) closed: LabelCounter<CloseReason>,
    /// Connections closed for flooding, by the kind of the last frame.
    pub(crate) floods: LabelCounter<IdleFrame>,
    /// Connections that have not sent the complete head of a request.
    pub(crate) half_open: RelaxedCounter,
}

/// Metric names of a listener, for either role.
pub(crate) struct ListenerMetricNames {
    pub(crate) closed: &'static str,
    pub(crate) floods: &'static str,
    pub(crate) half_open: &'static str,
    pub(crate) bodies: &'static str,
}

impl ListenerMetricNames {
    pub(crate) const EDGE: ListenerMetricNames = ListenerMetricNames {
        closed: "meridian_gateway_connections_closed_total",
        floods: "meridian_gateway_floods_total",
        half_open: "meridian_gateway_connections_half_open",
        bodies: "meridian_gateway_bodies_rejected_total",
    };
    pub(crate) const INGRESS: ListenerMetricNames = ListenerMetricNames {
        closed: "meridian_ingress_connections_closed_total",
        floods: "meridian_ingress_floods_total",
        half_open: "meridian_ingress_connections_half_open",
        bodies: "meridian_ingress_bodies_rejected_total",
    };

    pub(crate) fn render(
        &self,
        text: &mut MetricsText,
        listener: &ListenerMetrics,
        bodies: &LabelCounter<BodyRejection>,
    ) {
        let ListenerMetricNames { closed, floods, half_open, bodies: rejections } = self;
        listener.closed.render(text, closed, "Connections that this side closed, by reason.", "reason");
        let help = "Connections that have not sent the complete head of a request yet.";
        text.single(half_open, Kind::Gauge, help, listener.half_open.get());
        let help = "HTTP/2 connections that were closed for flooding, by the kind of the last frame.";
        listener.floods.render(text, floods, help, "frame");
        bodies.render(text, rejections, "Request bodies that were rejected, by reason.", "reason");
    }
}

/// Requests that load shedding rejected, by priority and reason.
#[derive(Debug, Default)]
pub(crate) struct ShedMetrics([[RelaxedCounter; ShedReason::ALL.len()]; 2]);

impl ShedMetrics {
    pub(crate) fn count(&self, priority: replica_api::priority::Priority, reason: ShedReason) {
        self.0[priority as usize][reason as usize].add(1);
    }

    pub(crate) fn render(&self, text: &mut MetricsText) {
        let name = "meridian_gateway_shed_total";
        text.head(name, Kind::Counter, "Requests that load shedding rejected, by priority and reason.");
        for priority in [replica_api::priority::Priority::Interactive, replica_api::priority::Priority::Bulk]
        {
            for reason in ShedReason::ALL {
                let n = self.0[priority as usize][reason as usize].get();
                text.sample(
                    name,
                    &[("priority", Priority::from(priority).as_str()), ("reason", reason.as_str())],
                    n,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<L: LabelSet + std::fmt::Debug>() {
        for (at, label) in L::ALL.iter().enumerate() {
            assert_eq!(label.index(), at, "{label:?}");
        }
        let tally = LabelCounter::<L>::default();
        L::ALL.iter().enumerate().for_each(|(at, label)| (0..at).for_each(|_| tally.count(*label)));
        let mut text = MetricsText::default();
        tally.render(&mut text, "n", "h", "l");
        let expected =
            L::ALL.iter().enumerate().map(|(at, label)| format!("n{{l=\"{}\"}} {at}\n", label.as_str()));
        assert_eq!(text.finish(), format!("# HELP n h\n# TYPE n counter\n{}", expected.collect::<String>()));
    }

    #[test]
    fn every_label_is_counted_by_itself() {
        check::<CloseReason>();
        check::<BodyRejection>();
        check::<SplitAdmission>();
        check::<PartOutcome>();
        check::<NotHeldReason>();
        check::<IdleFrame>();
    }
}
