//! Messages of the exchange stream.
//!
//! ```text
//!  gateway                                     spoke
//!  POST /spoke/v1/exchange  ─────────────────▶
//!  {"version":1,"gateway":...,"sequence":1} ──▶
//!  ◀───────────────── {"version":1,"region":...,"sequence":1,"deployments":[...],"state":{...}}
//!  {"sequence":2,"known":{...}} ──────────────▶
//!  ◀───────────────── {"sequence":2,"state":{...}}
//!  {"sequence":3} ────────────────────────────▶
//!  ◀───────────────── {"sequence":3}
//! ```
//!
//! A message is a line of JSON. The first of each direction is complete: it has a `version`, and an optional field that is
//! absent has its default. In a later one without a version, a field that is absent has the value of the message before,
//! except the loads, which are changes themselves ([`super::delta`]). So a message costs what has changed, and an idle one
//! its number. A message is complete again in response to a request without a known state, which follows every rejected
//! report, and at least every [`COMPLETE_INTERVAL`] messages: it has the checksums, so that a difference is noticed although
//! nothing changes. A body that ends after one message is an exchange as well.

use serde::{Deserialize, Serialize};

use super::{
    DeploymentReportV1, ExchangeRequest, ExchangeRequestV1, GATEWAY_BYTES_MAX, KnownState, OverflowV1,
    ReportStateV1, ReportV1,
};
use crate::{MessageVersion, WireError, present};
use regions::deployment::MAX_DEPLOYMENTS;
use regions::id::MAX_NAME_LEN;

/// Messages after which a complete one is sent: ten seconds, so that it adds 5 bytes to each.
pub const COMPLETE_INTERVAL: u32 = 50;
/// Maximum bytes of a 64-bit number.
const NUMBER_BYTES_MAX: usize = 20;
/// Maximum bytes of a 32-bit number.
const COUNT_BYTES_MAX: usize = 10;
/// Maximum bytes of a speed: 17 digits, a sign, a point and an exponent.
const SPEED_BYTES_MAX: usize = 24;
/// Maximum bytes of the fields of a message outside its lists: names and keys, and the location of a gateway, of which each
/// byte may be escaped (`\u0001`).
const HEADER_BYTES_MAX: usize = 1024 + "\\u0001".len() * GATEWAY_BYTES_MAX;
/// Maximum bytes of the overflow of a deployment.
const OVERFLOW_BYTES_MAX: usize = r#"{"name":"","tokens":},"#.len() + MAX_NAME_LEN + NUMBER_BYTES_MAX;
/// Maximum bytes of the load of a deployment.
pub const LOAD_BYTES_MAX: usize =
    r#"{"name":"","ready":,"ready_in_ms":,"pending_tokens":,"interactive_tokens":,"#.len()
        + r#""tokens_per_second":,"granted_tokens":},"#.len()
        + MAX_NAME_LEN
        + COUNT_BYTES_MAX
        + SPEED_BYTES_MAX
        + 4 * NUMBER_BYTES_MAX;
/// Maximum bytes of a removed name.
const REMOVED_BYTES_MAX: usize = r#""","#.len() + MAX_NAME_LEN;
/// Maximum bytes of a request, with the overflow of as many deployments as are allowed: 1.1 MB.
pub const REQUEST_BYTES_MAX: usize = HEADER_BYTES_MAX + MAX_DEPLOYMENTS * OVERFLOW_BYTES_MAX;
/// Maximum bytes of a report, with as many deployments as are allowed, and the names of as many that these have replaced:
/// 3.6 MB.
pub const REPORT_BYTES_MAX: usize = HEADER_BYTES_MAX + MAX_DEPLOYMENTS * (LOAD_BYTES_MAX + REMOVED_BYTES_MAX);
/// Streams of one gateway to one spoke instance at once: the one that is in use, its replacement while it is overdue, and
/// the replacement of a replacement that is overdue as well.
pub const STREAMS_MAX: usize = 3;

/// Why a message cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// It is not a message of this version.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// One of its fields is invalid.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// It is longer than allowed.
    #[error("it has more than {0} bytes; send fewer or shorter entries")]
    TooLong(usize),
}

/// Message of a gateway, relative to the one before if it has no version.
#[derive(Debug, Serialize, Deserialize)]
struct RequestMessageV1 {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<MessageVersion>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gateway: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<u64>,
    sequence: u64,
    /// `null`: the gateway has no state.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    known: Option<Option<KnownState>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requested: Option<Vec<OverflowV1>>,
}

/// Message of a spoke, relative to the one before if it has no version.
#[derive(Debug, Serialize, Deserialize)]
struct ReportMessageV1 {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<MessageVersion>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    region: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<u64>,
    sequence: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deployments: Vec<DeploymentReportV1>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    draining: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    jobs: Option<bool>,
    /// `null`: the spoke always sends all loads.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    state: Option<Option<ReportStateV1>>,
}

/// Returns `now` if it differs from the value of the message before.
fn changed<T: PartialEq + Clone>(before: &T, now: &T) -> Option<T> {
    (before != now).then(|| now.clone())
}

/// Returns the value of a message, or of the one before.
fn restored<T: Clone>(field: &str, sent: Option<T>, before: Option<&T>) -> Result<T, WireError> {
    let missing = || {
        let problem =
            "it is missing; a complete message has it, and the first message of a stream is complete";
        WireError::new(field, problem.to_owned())
    };
    sent.or_else(|| before.cloned()).ok_or_else(missing)
}

fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("a message serialises to JSON");
    line.push(b'\n');
    line
}

/// Writer of one direction: the last message, and how many have been sent since a complete one.
#[derive(Debug)]
struct Sent<M> {
    last: Option<M>,
    since_complete: u32,
}

impl<M> Default for Sent<M> {
    fn default() -> Sent<M> {
        Sent { last: None, since_complete: 0 }
    }
}

impl<M> Sent<M> {
    /// Replaces the last message, and returns the one that the next is relative to; `None` if it is complete.
    fn base(&mut self, next: M, is_complete: bool) -> Option<M> {
        let base = self.last.replace(next);
        self.since_complete += 1;
        if is_complete || self.since_complete >= COMPLETE_INTERVAL {
            self.since_complete = 0;
            return None;
        }
        base
    }
}

/// Writer of the messages of a gateway on one stream.
#[derive(Debug, Default)]
pub struct ExchangeRequestWriter(Sent<ExchangeRequestV1>);

impl ExchangeRequestWriter {
    /// Returns the next message, with its line end.
    pub fn message(&mut self, request: ExchangeRequest) -> Vec<u8> {
        let request = ExchangeRequestV1::from(request);
        let base = self.0.base(request.clone(), false);
        let Some(base) = base else { return line(&request) };
        line(&RequestMessageV1 {
            version: None,
            gateway: changed(&base.gateway, &request.gateway),
            boot_id: changed(&base.boot_id, &request.boot_id),
            sequence: request.sequence,
            known: changed(&base.known, &request.known),
            requested: changed(&base.requested, &request.requested),
        })
    }
}

/// Reader of the messages of a gateway on one stream.
#[derive(Debug, Default)]
pub struct ExchangeRequestReader {
    last: Option<ExchangeRequestV1>,
}

impl ExchangeRequestReader {
    /// Reads the next message.
    ///
    /// # Errors
    ///
    /// When it is invalid. The stream must end, because the messages after it are relative to it.
    pub fn read(&mut self, message: &[u8]) -> Result<ExchangeRequest, MessageError> {
        let RequestMessageV1 { version, gateway, boot_id, sequence, known, requested } =
            serde_json::from_slice(message)?;
        let last = self.last.as_ref();
        let before = last.filter(|_| version.is_none());
        let request = ExchangeRequestV1 {
            version: restored("version", version, before.map(|before| &before.version))?,
            gateway: restored("gateway", gateway, before.map(|before| &before.gateway))?,
            boot_id: boot_id.or(before.map(|before| before.boot_id)).unwrap_or_default(),
            sequence,
            known: known.unwrap_or_else(|| before.and_then(|before| before.known)),
            requested: requested
                .or_else(|| before.map(|before| before.requested.clone()))
                .unwrap_or_default(),
        };
        let is_same = |before: &ExchangeRequestV1| {
            (&before.gateway, before.boot_id) == (&request.gateway, request.boot_id)
        };
        if !last.is_none_or(is_same) {
            let problem = "it differs from that of the messages before; open a stream for each gateway";
            return Err(WireError::new("gateway", problem.to_owned()).into());
        }
        let valid = ExchangeRequest::try_from(request.clone())?;
        self.last = Some(request);
        Ok(valid)
    }

    /// Returns the bytes that are kept for the next message.
    pub fn kept_bytes(&self) -> usize {
        let requested = self.last.iter().flat_map(|last| &last.requested);
        requested.map(|overflow| size_of::<OverflowV1>() + overflow.name.len()).sum()
    }
}

/// Writer of the messages of a spoke on one stream.
#[derive(Debug, Default)]
pub struct ReportWriter(Sent<ReportV1>);

impl ReportWriter {
    /// Returns the next message, with its line end; a complete one if the gateway has no state (`known`).
    pub fn message(&mut self, report: &ReportV1, known: Option<KnownState>) -> Vec<u8> {
        let base = self.0.base(header(report), known.is_none());
        let Some(base) = base else { return line(report) };
        line(&ReportMessageV1 {
            version: None,
            region: changed(&base.region, &report.region),
            instance: changed(&base.instance, &report.instance),
            boot_id: changed(&base.boot_id, &report.boot_id),
            sequence: report.sequence,
            deployments: report.deployments.clone(),
            draining: changed(&base.draining, &report.draining),
            jobs: changed(&base.jobs, &report.jobs),
            state: changed(&base.state, &report.state),
        })
    }

    /// Returns the bytes that are kept for the next message.
    pub fn kept_bytes(&self) -> usize {
        let state = self.0.last.as_ref().and_then(|last| last.state.as_ref());
        let removed = state.iter().flat_map(|state| &state.removed);
        removed.map(|name| size_of::<String>() + name.len()).sum()
    }
}

/// Returns a report without its loads, which are not relative to the message before.
fn header(report: &ReportV1) -> ReportV1 {
    let ReportV1 { version, region, instance, boot_id, sequence, deployments: _, draining, jobs, state } =
        report;
    ReportV1 {
        version: *version,
        region: region.clone(),
        instance: instance.clone(),
        boot_id: *boot_id,
        sequence: *sequence,
        deployments: Vec::new(),
        draining: *draining,
        jobs: *jobs,
        state: state.clone(),
    }
}

/// Reader of the messages of a spoke on one stream. It restores reports, and [`super::delta::ReportDecoder`] checks them.
#[derive(Debug, Default)]
pub struct ReportReader {
    /// Last report, without its loads.
    last: Option<ReportV1>,
}

impl ReportReader {
    /// Reads the next message.
    ///
    /// # Errors
    ///
    /// When it is no message. The stream must end, because the messages after it are relative to it.
    pub fn read(&mut self, message: &[u8]) -> Result<ReportV1, MessageError> {
        let ReportMessageV1 {
            version,
            region,
            instance,
            boot_id,
            sequence,
            deployments,
            draining,
            jobs,
            state,
        } = serde_json::from_slice(message)?;
        let before = self.last.as_ref().filter(|_| version.is_none());
        let header = ReportV1 {
            version: restored("version", version, before.map(|before| &before.version))?,
            region: restored("region", region, before.map(|before| &before.region))?,
            instance: restored("instance", instance, before.map(|before| &before.instance))?,
            boot_id: restored("boot_id", boot_id, before.map(|before| &before.boot_id))?,
            sequence,
            deployments: Vec::new(),
            draining: restored("draining", draining, before.map(|before| &before.draining))?,
            jobs: jobs.or(before.map(|before| before.jobs)).unwrap_or_default(),
            state: state.unwrap_or_else(|| before.and_then(|before| before.state.clone())),
        };
        self.last = Some(header.clone());
        Ok(ReportV1 { deployments, ..header })
    }
}

/// Messages of a body that is received piece by piece.
#[derive(Debug)]
pub struct MessageBuffer {
    bytes: Vec<u8>,
    /// Bytes in which there is no line end.
    scanned: usize,
    bytes_max: usize,
}

impl MessageBuffer {
    /// Creates a buffer for messages of at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> MessageBuffer {
        MessageBuffer { bytes: Vec::new(), scanned: 0, bytes_max }
    }

    /// Adds a received piece. The caller takes all messages before it adds the next piece.
    pub fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// Takes the next complete message, without its line end.
    ///
    /// # Errors
    ///
    /// When it is too long.
    pub fn take(&mut self) -> Result<Option<Vec<u8>>, MessageError> {
        let end = self.bytes[self.scanned..].iter().position(|byte| *byte == b'\n');
        let length = end.map_or(self.bytes.len(), |end| self.scanned + end);
        if length > self.bytes_max {
            return Err(MessageError::TooLong(self.bytes_max));
        }
        self.scanned = length;
        if end.is_none() {
            return Ok(None);
        }
        self.scanned = 0;
        let rest = self.bytes.len() - (length + 1);
        if rest <= length {
            // A large message is not copied, and its capacity not kept.
            let rest = self.bytes.split_off(length + 1);
            let mut message = std::mem::replace(&mut self.bytes, rest);
            message.truncate(length);
            return Ok(Some(message));
        }
        let message = self.bytes[..length].to_vec();
        self.bytes.drain(..=length);
        Ok(Some(message))
    }

    /// Returns the bytes that are buffered.
    pub fn buffered(&self) -> usize {
        self.bytes.capacity()
    }

    /// Takes the message that the end of the body has ended.
    pub fn take_rest(&mut self) -> Option<Vec<u8>> {
        self.scanned = 0;
        Some(std::mem::take(&mut self.bytes)).filter(|message| !message.is_empty())
    }
}

#[cfg(test)]
mod tests;
