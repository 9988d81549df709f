//! Limits that were reached: what was ended, refused or put off because of one (invariant 6, Bounded).
//!
//! Each set of reasons is closed and counted in one [`Tally`]. What a limit leaves of itself in the answer of a request (an
//! error code, an outcome) is counted with the requests; here is what no request tells, because there was none, or because
//! one code stands for several limits.

use super::{Count, Kind, Priority, Text};
use gateway_core::flood::IdleFrame;
use gateway_core::shed::ShedReason;

/// A closed set of labels.
pub(crate) trait Label: Copy + 'static {
    const ALL: &'static [Self];

    fn word(self) -> &'static str;

    /// Its place in [`Label::ALL`].
    fn at(self) -> usize;
}

/// How often each of a closed set was.
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
    /// Why a connection was ended from this side.
    Closed {
        /// It had no request for too long.
        Idle = "idle",
        /// It was the longest without one when there was no place for another.
        Crowded = "crowded",
        /// It had not sent the whole head of a request when its place was needed, or when its address had too many such.
        HalfOpen = "half_open",
        /// Its address had as many as it may.
        AddressFull = "address_full",
        /// Its TLS handshake failed.
        Handshake = "handshake",
        /// Its TLS handshake, or its first words of HTTP/2, took too long.
        HandshakeSlow = "handshake_slow",
        /// A head that could be read in two ways, or in none.
        HeadMalformed = "head_malformed",
        /// A head with too many bytes or fields.
        HeadTooLarge = "head_too_large",
        /// A head that did not come to its end.
        HeadSlow = "head_slow",
        /// Its client did not read what it was told.
        DoesNotRead = "does_not_read",
        /// Too many requests over HTTP/2 that make no sense.
        Malformed = "malformed_requests",
        /// It was still busy when there was no time left to leave.
        CutOff = "cut_off",
    }
}

labels! {
    /// What an edge's HTTP/2 connections to regions have met.
    HopEvent {
        /// One was opened.
        Opened = "opened",
        /// The region chose HTTP/1.1.
        Plain = "http1",
        /// One takes nothing new, because the region is leaving it or because it is old.
        Left = "left",
        /// Nothing was heard for so long that it was given nothing more.
        Silent = "silent",
        /// Nothing was heard for so long that it was given up.
        Dead = "dead",
        /// A request found no place on any.
        Full = "full",
    }
}

labels! {
    /// Why a body was not taken.
    NotTaken {
        /// All bodies together have all the room.
        NoRoom = "no_room",
        /// More bytes than one may have.
        TooLarge = "too_large",
        /// It did not come in its time, or too slowly.
        TooSlow = "too_slow",
        /// No byte of it came for too long.
        Stalled = "stalled",
        /// The bodies of its tenant have all the memory that one tenant may have.
        TenantFull = "tenant_full",
        /// The bodies of its connection have all the memory that one connection may have.
        ConnectionFull = "connection_full",
        /// Not what its framing or its coding promises.
        Malformed = "malformed",
    }
}

labels! {
    /// How a request was given its turn to be computed in pieces.
    Turn {
        /// At once.
        AtOnce = "at_once",
        /// When another was over, since no replica takes it whole.
        Waited = "waited",
        /// Not at all: it went whole.
        Whole = "whole",
    }
}

labels! {
    /// What became of a piece that was sent.
    Piece {
        Answered = "answered",
        /// It was sent again.
        TurnedAway = "turned_away",
        /// And with it the whole.
        Failed = "failed",
    }
}

labels! {
    /// Why a request that found no replica was not held.
    NotHeldBy {
        /// Nobody starts one.
        NobodyStarts = "nobody_starts",
        /// A region that has one ready answers sooner, or is the only one that can.
        Elsewhere = "elsewhere",
        /// Its caller would be gone.
        TooLate = "too_late",
        /// As many of its tenant's requests are held as may be.
        TenantRequests = "tenant_requests",
        /// As many bytes of its tenant.
        TenantBytes = "tenant_bytes",
        /// As many requests of all.
        Requests = "requests",
        /// As many bytes of all.
        Bytes = "bytes",
    }
}

impl Label for IdleFrame {
    const ALL: &'static [IdleFrame] = &IdleFrame::ALL;

    fn word(self) -> &'static str {
        self.as_str()
    }

    fn at(self) -> usize {
        self as usize
    }
}

/// What a listener has ended.
#[derive(Debug, Default)]
pub(crate) struct ListenerMetrics {
    pub(crate) closed: Tally<Closed>,
    /// By the kind of the frame that was one too many.
    pub(crate) floods: Tally<IdleFrame>,
    /// Connections that have not sent the whole head of a request.
    pub(crate) half_open: Count,
}

/// What requests have met on their way in, at either role.
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
        listener.closed.render(text, closed, "Connections that were ended from this side, by why.", "why");
        let help = "Connections that have not sent the whole head of a request yet.";
        text.single(half_open, Kind::Gauge, help, listener.half_open.get());
        let help =
            "HTTP/2 connections that were ended for frames which bring nothing, by the last one's kind.";
        listener.floods.render(text, floods, help, "frame");
        bodies.render(text, not_taken, "Bodies of requests that were not taken, by why.", "why");
    }
}

/// Requests that were turned away because there was too much for all, by priority and by why.
#[derive(Debug, Default)]
pub(crate) struct ShedMetrics([[Count; ShedReason::ALL.len()]; 2]);

impl ShedMetrics {
    pub(crate) fn count(&self, priority: gateway_core::priority::Priority, reason: ShedReason) {
        self.0[priority as usize][reason as usize].add(1);
    }

    pub(crate) fn render(&self, text: &mut Text) {
        let name = "meridian_gateway_shed_total";
        text.head(
            name,
            Kind::Counter,
            "Requests that were turned away for want of room, by priority and by why.",
        );
        for priority in
            [gateway_core::priority::Priority::Interactive, gateway_core::priority::Priority::Bulk]
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
        check::<IdleFrame>();
    }
}
