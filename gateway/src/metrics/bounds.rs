//! Counters of reached limits: what was closed, rejected or deferred because of one (invariant 6, Bounded).
//!
//! Each set of reasons is closed. If a limit is visible in the response of a
//! request (an error code, an outcome), the request metrics count it; here are the cases without a request, and those
//! where one code stands for several limits.

use super::{Family, Gauge};
use gateway_core::flood::IdleFrame;
use identity::ConnectionFailureCause;
use metrics::{labels, metric_set};

labels! {
    /// Reason why this side closed a connection.
    pub(crate) enum CloseReason {
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
    pub(crate) enum HopEvent {
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
    pub(crate) enum BodyRejection {
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
    pub(crate) enum SplitAdmission {
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
    pub(crate) enum PartOutcome {
        Succeeded = "succeeded",
        /// It was retried.
        Rejected = "rejected",
        /// It failed, and with it the request.
        Failed = "failed",
    }
}

labels! {
    /// Reason why a report of a spoke was rejected.
    pub(crate) enum ReportRejection {
        /// It names another region than the route table for this address.
        OtherRegion = "other_region",
        /// It names another spoke of the region.
        OtherInstance = "other_instance",
        /// It cannot be read, is too long, or has invalid values.
        Invalid = "invalid",
        /// Its changes do not result in the loads of the spoke.
        Checksum = "checksum",
        /// It has the number of a request that was not sent.
        Unrequested = "unrequested",
        /// Its state number stays below one that the spoke has reported before.
        Outdated = "outdated",
    }
}

labels! {
    /// Limit because of which a spoke rejected or ended a stream of reports.
    pub(crate) enum ReportStreamLimit {
        /// The streams of all gateways.
        Streams = "streams",
        /// The streams of the gateway: a newer one of the same gateway replaced it.
        GatewayStreams = "gateway_streams",
        /// The streams of gateways with the certificate: a newer one of them replaced it.
        CertificateStreams = "certificate_streams",
        /// The memory of the messages of all gateways.
        Memory = "memory",
        /// The memory of the messages of the gateway.
        GatewayMemory = "gateway_memory",
        /// The memory of the messages of gateways with the certificate.
        CertificateMemory = "certificate_memory",
        /// The time in which the gateway must read a report, or during draining must have read it.
        WriteTime = "write_time",
    }
}

labels! {
    /// Reason why a request without a ready replica was not held.
    pub(crate) enum NotHeldReason {
        /// No scaler starts replicas.
        NoScaler = "no_scaler",
        /// No replica can start.
        Failed = "failed",
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

metric_set! {
    /// Metrics of a listener.
    #[derive(Debug, Default)]
    pub(crate) struct ListenerMetrics {
        /// Connections that this side closed, by reason.
        pub(crate) closed: Family<CloseReason> = "meridian_{role}_connections_closed_total" ["reason"],
        /// Connections that have not sent the complete head of a request yet.
        pub(crate) half_open: Gauge = "meridian_{role}_connections_half_open",
        /// HTTP/2 connections that were closed for flooding, by the kind of the last frame.
        pub(crate) floods: Family<IdleFrame> = "meridian_{role}_floods_total" ["frame"],
    }
}

metric_set! {
    /// Metrics of a listener and of the bodies that it reads, with their limits.
    pub(crate) struct ListenerScrape<'a> {
        /// Metrics of the listener.
        pub(crate) listener: &'a ListenerMetrics = set,
        /// Open connections.
        pub(crate) connections: usize = "meridian_{role}_connections",
        /// Limit on open connections.
        pub(crate) connections_max: usize = "meridian_{role}_connections_max",
        /// Rejected connections, by cause.
        pub(crate) refused: &'a metrics::Family<ConnectionFailureCause> = "meridian_{role}_connections_refused_total" ["cause"],
        /// Request bodies that were rejected, by reason.
        pub(crate) bodies: &'a Family<BodyRejection> = "meridian_{role}_bodies_rejected_total" ["reason"],
        /// Memory reserved for the request bodies in flight.
        pub(crate) bodies_bytes: usize = "meridian_{role}_bodies_bytes",
        /// Limit on the memory reserved for request bodies.
        pub(crate) bodies_bytes_max: usize = "meridian_{role}_bodies_bytes_max",
    }
}
