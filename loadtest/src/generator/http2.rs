//! Generator for HTTP/2: many requests on few connections, to which further ones are added when their streams are used up.
//!
//! The protocol is hyper's, on a runtime with one thread. The timers of the runtime have a resolution of a millisecond, so
//! requests start up to a millisecond late. This lag is part of the latencies and is reported, as for HTTP/1.1. Everything
//! else is as there: starts, limits, validation.
//!
//! A server that declines HTTP/2 on a later connection than the first ends the run with an error: the report would be of two
//! versions, under the name of one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::Method;
use tokio::time::timeout_at;

use super::checker::ResponseChecker;
use super::connection::{Completion, LoadRequest};
use super::http1::{CompleteResponse, ReceivedHead};
use super::requests::Requests;
use super::starts::{DueRequest, StartDecision, Starts};
use super::{CONSECUTIVE_STARTS_MAX, GeneratorError, SharedState, WAIT_MAX};
use crate::client::{
    ClientTls, EndpointClient, HttpAttemptError, HttpProtocol, HttpResponse, RequestTemplate,
};
use crate::exchange::{RequestFailure, Sample};
use crate::options::Options;
use crate::response::ResponseDefect;

/// Status and response, or the cause of the failure.
type Exchanged = Result<(u16, HttpResponse), HttpAttemptError>;

pub(crate) struct Http2Generator {
    shared: Arc<SharedState>,
    timeout: Duration,
    in_flight_max: usize,
    starts: Starts,
    client: Arc<EndpointClient>,
    /// By task.
    templates: Vec<Arc<RequestTemplate>>,
    checker: ResponseChecker,
}

impl Http2Generator {
    /// Creates the generator of a run that begins at `start`.
    pub(crate) fn new(
        options: &Options,
        shared: Arc<SharedState>,
        start: Instant,
    ) -> io::Result<Http2Generator> {
        let trust = options.trust.as_ref().map(|trust| ClientTls::of(Arc::clone(&trust.0)));
        let key = options.authorization.clone();
        let client = EndpointClient::new(&options.base.to_string(), key, HttpProtocol::Http2, trust);
        let client = client.map_err(io::Error::other)?.requiring_http2();
        let template = |index| {
            let (path, headers) = Requests::path_and_headers(options, index);
            client.outgoing(&Method::POST, path, &headers).map(Arc::new).map_err(io::Error::other)
        };
        let templates = (0..options.tasks.len()).map(template).collect::<io::Result<_>>()?;
        Ok(Http2Generator {
            timeout: options.timeout,
            in_flight_max: options.in_flight_max,
            starts: Starts::new(options, start),
            client: Arc::new(client),
            templates,
            checker: ResponseChecker::start(Arc::clone(&shared))?,
            shared,
        })
    }

    /// Runs until all tasks end or a stop is requested, and awaits requests in flight. Returns whether all tasks ended.
    pub(crate) fn run(self) -> Result<bool, GeneratorError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(GeneratorError::System)?.block_on(self.drive())
    }

    async fn drive(mut self) -> Result<bool, GeneratorError> {
        let mut in_flight = FuturesUnordered::new();
        let mut stopped = false;
        loop {
            stopped = stopped || self.shared.stop.load(Ordering::Relaxed);
            let mut wait = if stopped { None } else { Some(Duration::ZERO) };
            for _ in 0..CONSECUTIVE_STARTS_MAX {
                if stopped {
                    break;
                }
                match self.starts.next(Instant::now(), !in_flight.is_empty()) {
                    StartDecision::Launch(due) => in_flight.extend(self.launch(due, in_flight.len())),
                    StartDecision::Wait(span) => {
                        wait = Some(span);
                        break;
                    }
                    StartDecision::Finished => {
                        wait = None;
                        break;
                    }
                }
            }
            self.shared.in_flight.store(in_flight.len(), Ordering::Relaxed);
            if wait.is_none() && in_flight.is_empty() {
                break;
            }
            tokio::select! {
                Some((request, exchanged)) = in_flight.next() => {
                    if matches!(exchanged, Err(HttpAttemptError::Http2Declined)) {
                        // The other requests in flight are dropped with the run.
                        self.checker.finish();
                        return Err(GeneratorError::Http2Declined);
                    }
                    self.end(request, exchanged);
                }
                () = tokio::time::sleep(wait.unwrap_or(WAIT_MAX).min(WAIT_MAX)) => {}
            }
        }
        self.checker.finish();
        Ok(!stopped)
    }

    /// Returns the exchange of a due request; `None` if too many are in flight.
    fn launch(
        &mut self,
        due: DueRequest,
        in_flight: usize,
    ) -> Option<impl Future<Output = (LoadRequest, Exchanged)> + use<>> {
        let now = Instant::now();
        let requests = &self.shared.requests[due.intended.task];
        if in_flight >= self.in_flight_max {
            self.shared.record().add(Sample::not_sent(due.intended, requests.priority(), now));
            self.starts.ended(due, now, true);
            return None;
        }
        let request = LoadRequest::begin(due, now, self.timeout);
        let body = requests.body(due.intended.number);
        let (client, template) = (Arc::clone(&self.client), Arc::clone(&self.templates[due.intended.task]));
        Some(async move {
            let exchanged = timeout_at(request.deadline.into(), client.exchange(&template, body, Vec::new()));
            (request, exchanged.await.unwrap_or(Err(HttpAttemptError::Timeout)))
        })
    }

    /// Records the end of a request.
    fn end(&mut self, request: LoadRequest, exchanged: Exchanged) {
        let completion = match exchanged {
            Err(error) => Completion::failed(failure(&error)),
            Ok((status, response)) => {
                let headers = response.headers().iter().map(|(name, value)| (name, Some(value)));
                let head = ReceivedHead::of_headers(status, headers);
                let requests = &self.shared.requests[request.intended.task];
                self.checker.check(requests, request, CompleteResponse { head, body: response.body() })
            }
        };
        let (at, failed) = (Instant::now(), completion.is_failure());
        self.shared.add(request, completion, at);
        self.starts.ended(request.due(), at, failed);
    }
}

fn failure(error: &HttpAttemptError) -> RequestFailure {
    match error {
        HttpAttemptError::Unreachable(_) => RequestFailure::Unreachable,
        HttpAttemptError::Timeout => RequestFailure::Timeout,
        HttpAttemptError::Malformed(_) => RequestFailure::InvalidResponse(ResponseDefect::NotHttp),
        HttpAttemptError::TooLarge => RequestFailure::InvalidResponse(ResponseDefect::TooLarge),
        // The first ends the run; the last two follow from a status, which the generator reads itself.
        HttpAttemptError::Http2Declined
        | HttpAttemptError::ConnectionClosed(_)
        | HttpAttemptError::ErrorStatus { .. }
        | HttpAttemptError::Redirected { .. } => RequestFailure::ConnectionClosed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_that_is_not_http_and_one_that_is_too_large_are_different_failures() {
        let check = |error, defect| assert_eq!(failure(&error), RequestFailure::InvalidResponse(defect));
        check(HttpAttemptError::Malformed("no status".to_owned()), ResponseDefect::NotHttp);
        check(HttpAttemptError::TooLarge, ResponseDefect::TooLarge);
    }
}
