//! Serialization of a task's requests, and validation of the responses.

use std::sync::atomic::{AtomicUsize, Ordering};

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use replica_api::headers;

use super::http1::CompleteResponse;
use crate::exchange::RequestFailure;
use crate::options::Options;
use crate::response::{self, ResponseDefect};
use crate::workload::{TaskWorkload, WorkloadType};
use replica_api::priority::Priority;

/// Constant parts of the requests of one task.
pub(crate) struct Requests {
    /// Request head up to the value of `content-length`.
    head: Vec<u8>,
    /// Name of the deployment, as a JSON string.
    model: String,
    workload: TaskWorkload,
    /// Length of the rows of this task, as in the first response; 0 before it.
    dimensions: AtomicUsize,
}

impl Requests {
    /// Creates the requests of the task with this index.
    pub(crate) fn of(options: &Options, index: usize) -> Requests {
        let Options { base, authorization, model, geo, tasks, .. } = options;
        let workload = tasks[index].workload.clone();
        let target = target(base, workload.kind);
        let mut head = Vec::new();
        let mut line = |name: &str, value: &[u8]| {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(value);
            head.extend_from_slice(b"\r\n");
        };
        line("POST ", format!("{} HTTP/1.1", target.path()).as_bytes());
        line("host: ", target.authority().map_or("", |authority| authority.as_str()).as_bytes());
        line("content-type: ", b"application/json");
        if let Some(authorization) = authorization {
            line("authorization: ", authorization.as_bytes());
        }
        if let Some(geo) = geo {
            line(&format!("{}: ", headers::CLIENT_GEO), format!("{},{}", geo.lat(), geo.lon()).as_bytes());
        }
        line(&format!("{}: ", headers::PRIORITY), workload.kind.priority().as_str().as_bytes());
        head.extend_from_slice(b"content-length: ");
        let model = serde_json::Value::from(model.as_str()).to_string();
        Requests { head, model, workload, dimensions: AtomicUsize::new(0) }
    }

    pub(crate) fn priority(&self) -> Priority {
        self.workload.kind.priority()
    }

    /// Returns the body of request `number`.
    pub(super) fn body(&self, number: u64) -> Vec<u8> {
        let mut body = Vec::new();
        self.workload.body(number, &self.model, &mut body);
        body
    }

    /// Returns the path of the requests below the base URL, and their headers besides those that every request has.
    pub(super) fn path_and_headers(options: &Options, index: usize) -> (&'static str, HeaderMap) {
        let kind = options.tasks[index].workload.kind;
        let mut lines = HeaderMap::new();
        let priority = HeaderValue::from_static(kind.priority().as_str());
        lines.insert(HeaderName::from_static(headers::PRIORITY), priority);
        if let Some(geo) = options.geo {
            let geo = HeaderValue::try_from(format!("{},{}", geo.lat(), geo.lon()));
            lines.insert(
                HeaderName::from_static(headers::CLIENT_GEO),
                geo.expect("numbers are valid in a header"),
            );
        }
        (kind.path(), lines)
    }

    /// Writes request `number` into `request`; `body` is a scratch buffer.
    pub(crate) fn write(&self, number: u64, body: &mut Vec<u8>, request: &mut Vec<u8>) {
        body.clear();
        self.workload.body(number, &self.model, body);
        request.clear();
        request.reserve(self.head.len() + body.len() + 24);
        request.extend_from_slice(&self.head);
        request.extend_from_slice(body.len().to_string().as_bytes());
        request.extend_from_slice(b"\r\n\r\n");
        request.extend_from_slice(body);
    }

    /// Validates the response to request `number`.
    pub(crate) fn check(&self, number: u64, received: &CompleteResponse<'_>) -> Result<(), RequestFailure> {
        match received.head.status {
            200 => self.check_body(number, received.body).map_err(RequestFailure::InvalidResponse),
            status => Err(RequestFailure::ErrorStatus { status, code: received.head.code }),
        }
    }

    fn check_body(&self, number: u64, body: &[u8]) -> Result<(), ResponseDefect> {
        let rows = self.workload.rows(number);
        let dimensions = match (self.workload.kind, &self.workload.expected) {
            (WorkloadType::Rerank, _) => return response::rerank::check(body, rows),
            (WorkloadType::Classify, _) => response::classify::check(body, rows)?,
            (_, None) => response::check(body, rows)?,
            (_, Some(expected)) => {
                let first = self.workload.texts.first(number, rows);
                response::embeddings::check(body, rows, |index, row| {
                    let row = response::embeddings::numbers(row);
                    let row: Option<Vec<f32>> = row.and_then(|row| row.into_iter().collect());
                    row.is_some_and(|row| expected.matches(first + index, &row))
                })?
            }
        };
        match self.dimensions.compare_exchange(0, dimensions, Ordering::Relaxed, Ordering::Relaxed) {
            Err(earlier) if earlier != dimensions => Err(ResponseDefect::WrongDimensions),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

/// Returns the URL of requests of this type.
pub(crate) fn target(base: &Uri, kind: WorkloadType) -> Uri {
    let below = base.path().trim_end_matches('/');
    let mut parts = base.clone().into_parts();
    let path = format!("{below}{}", kind.path());
    parts.path_and_query = path.try_into().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| base.clone())
}
