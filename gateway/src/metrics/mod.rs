//! Metrics of the process, for `/metrics`.
//!
//! Only [`crate::events`] counts events: every logged event is counted and vice versa. Labels are closed sets:
//! endpoints, error codes, causes and outcomes of attempts, the regions of the catalogue, the tenants and a limited number
//! of deployments of the newest table. Reached limits are counted where they apply ([`bounds`]), since often there is no request to report them.
//! States (budgets, health, capacity) are read from their owners at scrape time.

mod bounds;
mod deployments;
mod edge;
mod ingress;
mod jobs;
mod label;
mod tenants;

pub(crate) use bounds::{
    BodyRejection, CloseReason, HopEvent, ListenerMetrics, ListenerScrape, NotHeldReason, PartOutcome,
    ReportRejection, ReportStreamLimit, SplitAdmission,
};
pub(crate) use deployments::{DEPLOYMENTS_MAX, OTHER as OTHER_DEPLOYMENTS};
pub(crate) use edge::EdgeMetrics;
pub(crate) use ingress::{HoldMetrics, IngressMetrics};
pub(crate) use jobs::{
    BatchLineOutcome, JobAttemptOutcome, JobMetrics, JobScrape, JobTransferOutcome, WebhookAttemptOutcome,
};
pub(crate) use label::{
    ClientProtocol, EndpointLabel, ExplanationLoss, LatencyStage, ObjectiveResult, RequestOutcome,
};
pub(crate) use metrics::{Counter, Gauge, Histogram};

/// Names this crate as the one that makes labels of other crates' enums.
#[derive(Debug)]
pub(crate) struct InGateway;

/// One metric for each value of a label.
pub(crate) type Family<L, M = Counter> = metrics::Family<L, M, InGateway>;
