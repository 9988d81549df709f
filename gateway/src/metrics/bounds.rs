//! Counters of reached limits: what was closed, rejected or deferred because of one (invariant 6, Bounded).
//!
//! Each set of reasons is closed and counted in one [`Tally`]. If a limit is visible in the response of a request (an
//! error code, an outcome), the request metrics count it; here are the cases without a request, and those where one
//! code stands for several limits.

use super::{Count, Kind, Priority, Text};
use gateway_core::flood::Idle;
use gateway_core::shed::Reason;

/// Closed set of label values.
pub(crate) trait Label: Copy + 'static {
    const ALL: &'static [Self];

    fn word(self) -> &'static str;

    /// Returns its position in [`Label::ALL`].
    fn at(self) -> usize;
}

/// Counters of a closed set of label values.
#[derive(Debug)]
pub(crate) struct Tally<L> {
    counts: Box<[Count]>,
    of: std::marker::PhantomData<L>,
}

impl<L: Label> Default for Tally<L> {
    fn default() -> Tally<L> {
        Tally { counts: L::ALL.iter().map(|_| Count::default()).collect(), of: std::marker::PhantomData }
    }
}

impl<L: Label> Tally<L> {
    pub(crate) fn count(&self, label: L) {
        self.counts[label.at()].add(1);
    }

    fn get(&self, label: L) -> u64 {
        self.counts[label.at()].get()
    }

    pub(crate) fn render(&self, text: &mut Text, name: &str, help: &str, label: &str) {
        text.head(name, Kind::Counter, help);
        for each in L::ALL {
            text.sample(name, &[(label, each.word())], self.get(*each));
        }
    }
}

macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($(#[$of_variant:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($(#[$of_variant])* $variant,)+ }

        impl Label for $name {
            const ALL: &'static [$name] = &[$($name::$variant,)+];

            fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }

            fn at(self) -> usize {
                self as usize
            }
        }
    };
}

labels! {
    /// Reason why this side closed a connection.
    Closed {
        /// It was idle for too long.
        Idle = "idle",
        /// It was idle for longest when the limit of all connections was reached.
        Crowded = "crowded",
        /// It had not sent the complete head of a request when a permit was needed, or when its address had too many
        /// such connections.
        HalfOpen = "half_open",
        /// Its address had reached its limit.
        AddressFull = "address_full",
        /// Its TLS handshake failed.
        Handshake = "handshake",
        /// Its TLS handshake, or its HTTP/2 handshake, took too long.
        HandshakeSlow = "handshake_slow",
        /// Its request head was ambiguous or malformed.
        HeadMalformed = "head_malformed",
        /// Its request head had too many bytes or fields.
        HeadTooLarge = "head_too_large",
        /// Its request head was incomplete at the timeout.
        HeadSlow = "head_slow",
        /// Its client did not read a response.
        DoesNotRead = "does_not_read",
        /// It sent too many malformed requests over HTTP/2.
        Malformed = "malformed_requests",
        /// It still had requests in flight at the end of the drain timeout.
        CutOff = "cut_off",
    }
}

labels! {
    /// Events of a gateway's HTTP/2 connections to regions.
    HopEvent {
        /// A connection was opened.
        Opened = "opened",
        /// The region selected HTTP/1.1.
        Plain = "http1",
        /// A connection takes no new requests, because the region drains it or because it is old.
        Left = "left",
        /// A connection received no byte for so long that it gets no new requests.
        Silent = "silent",
        /// A connection received no byte for so long that it was closed.
        Dead = "dead",
        /// All connections were full when a request needed one.
        Full = "full",
    }
}

labels! {
    /// Reason why a request body was rejected.
    NotTaken {
        /// The memory limit of all bodies was reached.
        NoRoom = "no_room",
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
    Turn {
        /// Immediately.
        AtOnce = "at_once",
        /// After another request finished, because no replica can compute it unsplit.
        Waited = "waited",
        /// Not admitted: it was sent unsplit.
        Whole = "whole",
    }
}

labels! {
    /// Outcome of a part of a split request.
    Piece {
        Answered = "answered",
        /// It was retried.
        TurnedAway = "turned_away",
        /// It failed, and with it the request.
        Failed = "failed",
    }
}

labels! {
    /// Reason why a request without a ready replica was not held.
    NotHeldBy {
        /// No scaler starts replicas.
        NobodyStarts = "nobody_starts",
        /// Another region has a ready replica and responds sooner, or is the only one that can respond.
        Elsewhere = "elsewhere",
        /// The deadline of the request would pass.
        TooLate = "too_late",
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

impl Label for Idle {
    const ALL: &'static [Idle] = &Idle::ALL;

    fn word(self) -> &'static str {
        self.as_str()
    }

    fn at(self) -> usize {
        self as usize
    }
}

/// Metrics of a listener.
#[derive(Debug, Default)]
pub(crate) struct ListenerMetrics {
    pub(crate) closed: Tally<Closed>,
    /// Connections closed for flooding, by the kind of the last frame.
    pub(crate) floods: Tally<Idle>,
    /// Connections that have not sent the complete head of a request.
    pub(crate) half_open: Count,
}

/// Metric names of a listener, for either role.
pub(crate) struct Names {
    pub(crate) closed: &'static str,
    pub(crate) floods: &'static str,
    pub(crate) half_open: &'static str,
    pub(crate) bodies: &'static str,
}

impl Names {
    pub(crate) const EDGE: Names = Names {
        closed: "meridian_gateway_connections_closed_total",
        floods: "meridian_gateway_floods_total",
        half_open: "meridian_gateway_connections_half_open",
        bodies: "meridian_gateway_bodies_not_taken_total",
    };
    pub(crate) const INGRESS: Names = Names {
        closed: "meridian_ingress_connections_closed_total",
        floods: "meridian_ingress_floods_total",
        half_open: "meridian_ingress_connections_half_open",
        bodies: "meridian_ingress_bodies_not_taken_total",
    };

    pub(crate) fn render(&self, text: &mut Text, listener: &ListenerMetrics, bodies: &Tally<NotTaken>) {
        let Names { closed, floods, half_open, bodies: not_taken } = self;
        listener.closed.render(text, closed, "Connections that this side closed, by reason.", "reason");
        let help = "Connections that have not sent the complete head of a request yet.";
        text.single(half_open, Kind::Gauge, help, listener.half_open.get());
        let help =
            "HTTP/2 connections that were closed for flooding, by the kind of the last frame.";
        listener.floods.render(text, floods, help, "frame");
        bodies.render(text, not_taken, "Request bodies that were rejected, by reason.", "reason");
    }
}

/// Requests that load shedding rejected, by priority and reason.
#[derive(Debug, Default)]
pub(crate) struct ShedMetrics([[Count; Reason::ALL.len()]; 2]);

impl ShedMetrics {
    pub(crate) fn count(&self, priority: gateway_core::priority::Priority, reason: Reason) {
        self.0[priority as usize][reason as usize].add(1);
    }

    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_gateway_shed_total";
        text.head(
            name,
            Kind::Counter,
            "Requests that load shedding rejected, by priority and reason.",
        );
        for priority in
            [gateway_core::priority::Priority::Interactive, gateway_core::priority::Priority::Bulk]
        {
            for reason in Reason::ALL {
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

    fn check<L: Label + std::fmt::Debug>() {
        for (at, label) in L::ALL.iter().enumerate() {
            assert_eq!(label.at(), at, "{label:?}");
        }
        let tally = Tally::<L>::default();
        L::ALL.iter().enumerate().for_each(|(at, label)| (0..at).for_each(|_| tally.count(*label)));
        let mut text = Text::default();
        tally.render(&mut text, "n", "h", "l");
        let expected =
            L::ALL.iter().enumerate().map(|(at, label)| format!("n{{l=\"{}\"}} {at}\n", label.word()));
        assert_eq!(text.finish(), format!("# HELP n h\n# TYPE n counter\n{}", expected.collect::<String>()));
    }

    #[test]
    fn every_label_is_counted_by_itself() {
        check::<Closed>();
        check::<NotTaken>();
        check::<Turn>();
        check::<Piece>();
        check::<NotHeldBy>();
        check::<Idle>();
    }
}
