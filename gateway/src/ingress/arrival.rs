//! What is known of one request that an edge sent here, told when it is over, however it ends.

use super::Ingress;
use crate::events::ArrivalEnded;
use crate::metrics::{Asked, Ending};
use crate::receipts::{Before, NoReceipt, Promise, Received, Receiving, Told, now_ms};
use gateway_core::receipt::AttemptKey;
use pingora::protocols::http::ServerSession;
use regions::id::DeploymentName;
use replica_core::wire::headers;
use std::time::Instant;

/// One request's account at its region; the edge's is `edge::account`.
pub(super) struct Arrival<'a> {
    ingress: &'a Ingress,
    arrived: Instant,
    asked: Asked,
    /// The same moment as `arrived`, in milliseconds since 1970.
    at_ms: u64,
    id: String,
    /// 0 when the edge does not say.
    attempt: u32,
    tenant: Option<String>,
    deployment: Option<DeploymentName>,
    /// As it came.
    residency: Option<String>,
    /// The key of the attempt, if its gateway gave one.
    key: Option<AttemptKey>,
    /// A place for its receipt, if it needs one.
    promise: Option<Promise>,
    /// The number of the receipt that was written before it was forwarded.
    number: Option<u64>,
    bytes_in: u64,
    bytes_out: u64,
    ending: Ending,
}

impl<'a> Arrival<'a> {
    /// Opens the account of a request for what a replica serves at `path`.
    pub(super) fn open(
        ingress: &'a Ingress,
        session: &ServerSession,
        path: &'static str,
        arrived: Instant,
    ) -> Arrival<'a> {
        ingress.metrics.in_flight.add(1);
        let text = |name: &str| session.get_header(name).and_then(|value| value.to_str().ok());
        Arrival {
            ingress,
            arrived,
            asked: Asked::at(path),
            at_ms: now_ms(),
            id: text(headers::REQUEST_ID).unwrap_or_default().to_owned(),
            attempt: text(headers::ATTEMPT).and_then(|attempt| attempt.parse().ok()).unwrap_or(0),
            tenant: text(headers::TENANT).map(str::to_owned),
            deployment: text(headers::DEPLOYMENT).and_then(|name| name.parse().ok()),
            residency: text(headers::RESIDENCY).map(str::to_owned),
            key: text(headers::ATTEMPT_KEY).and_then(|key| key.parse().ok()),
            promise: None,
            number: None,
            bytes_in: 0,
            bytes_out: 0,
            ending: Ending::CutOff,
        }
    }

    /// Takes a place for the receipt of a request that must not go without; false if there is none.
    pub(super) fn promised(&mut self) -> bool {
        let locked = self.is_locked();
        match self.ingress.recorder.as_ref().filter(|recorder| locked && recorder.required()) {
            Some(recorder) => {
                self.promise = recorder.promise();
                self.promise.is_some()
            }
            None => true,
        }
    }

    /// Whether it may only be forwarded to where its policy permits.
    pub(super) fn is_locked(&self) -> bool {
        self.residency.is_some()
    }

    /// Makes the receipt of a request durable that must not go without, before it is forwarded.
    pub(super) async fn commit(&mut self) -> Result<(), NoReceipt> {
        let Some(recorder) = self.ingress.recorder.as_ref().filter(|_| self.promise.is_some()) else {
            return Ok(());
        };
        let number = recorder.number();
        self.number = Some(number);
        let receiving = Receiving {
            number,
            request: self.id.clone(),
            attempt: self.attempt,
            tenant: self.tenant.clone(),
            deployment: self.deployment.clone(),
            residency: self.residency.clone(),
            at_ms: self.at_ms,
            key: self.key,
        };
        recorder.commit(Before::Receiving(receiving)).await
    }

    /// The request is over.
    pub(super) fn ended(&mut self, session: &ServerSession, ending: Ending) {
        self.bytes_in = session.body_bytes_read() as u64;
        self.bytes_out = session.body_bytes_sent() as u64;
        self.ending = ending;
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.ingress.metrics.in_flight.less();
        let ended = ArrivalEnded {
            id: &self.id,
            attempt: self.attempt,
            region: &self.ingress.region,
            asked: self.asked,
            deployment: self.deployment.as_ref(),
            ending: self.ending,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            total: self.arrived.elapsed(),
        };
        ended.record(&self.ingress.metrics);
        if let Some(recorder) = &self.ingress.recorder {
            let received = Received {
                request: std::mem::take(&mut self.id),
                attempt: self.attempt,
                tenant: self.tenant.take(),
                deployment: self.deployment.take(),
                residency: self.residency.take(),
                at_ms: self.at_ms,
                took: self.arrived.elapsed(),
                outcome: Ending::name(self.ending.at()),
                key: self.key,
                number: self.number,
            };
            recorder.record(Told::Received(Box::new(received)), self.promise.take());
        }
    }
}
