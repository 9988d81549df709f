//! Reports to gateways: the state of the region, in response to each of their requests.

use crate::listener::AfterResponse;
use crate::metrics::IngressMetrics;
use crate::request_body::BodyReader;
use crate::respond::{self, ForwardError, Rejection};
use gateway_core::memory::BodyOwner;
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::{ExchangeRequest, ExchangeRequestV1};
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;

/// Responds to the report requests of gateways.
pub(super) struct ReportExchange {
    spoke: Arc<Mutex<Spoke>>,
    encoder: Mutex<ReportEncoder>,
    body_reader: Arc<BodyReader>,
    metrics: Arc<IngressMetrics>,
}

impl ReportExchange {
    pub(super) fn new(
        spoke: Arc<Mutex<Spoke>>,
        body_reader: Arc<BodyReader>,
        metrics: Arc<IngressMetrics>,
    ) -> ReportExchange {
        ReportExchange { spoke, encoder: Mutex::new(ReportEncoder::default()), body_reader, metrics }
    }

    /// Responds to a gateway with the report of the region.
    pub(super) async fn respond(&self, session: &mut ServerSession) -> Result<AfterResponse, ForwardError> {
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        let question: ExchangeRequestV1 = serde_json::from_slice(&body.bytes).map_err(|error| {
            Rejection::new(ErrorCode::InvalidJson, format!("Invalid exchange request: {error}."))
        })?;
        let question = ExchangeRequest::try_from(question).map_err(|error| {
            Rejection::new(ErrorCode::InvalidValue, format!("Invalid exchange request: {error}."))
        })?;
        self.metrics.exchanges.add(1);
        let now = Instant::now();
        let needs_loads = self.encoder.lock().needs_loads(now);
        let (report, loads) = {
            let mut spoke = self.spoke.lock();
            (spoke.exchange(&question, now), needs_loads.then(|| spoke.loads(now)))
        };
        // Not under the lock of the spoke, which every request takes: an update compares the loads of all deployments.
        let report = {
            let mut encoder = self.encoder.lock();
            if let Some(loads) = loads {
                encoder.update(loads, now);
            }
            encoder.encode(report, &question.gateway, question.known)
        };
        self.metrics.loads_sent.add(report.deployments.len() as u64);
        let body = serde_json::to_vec(&report).expect("a report serialises to JSON");
        Ok(respond::ok(session, body, &[]).await)
    }
}
