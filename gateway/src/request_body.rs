//! Reads complete request bodies, within limits of size, memory and time.
//!
//! A body is kept until its request has its response, because a retry may send it to another region. Memory is reserved
//! for the bytes that have arrived, not for the declared length, with a limit per tenant and per connection
//! ([`gateway_core::memory`]): only the tenant that fills its share is rejected. A body that stalls or arrives too
//! slowly is aborted ([`gateway_core::progress`]).

use bytes::{Bytes, BytesMut};
use http::Version;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use replica_api::limits::MAX_BODY_BYTES;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::compress;
use crate::cpu::CpuPool;
use crate::listener::chunk_error;
use crate::metrics::{BodyRejection, Family};
use crate::respond::{ForwardError, Rejection};
use gateway_core::encoding::{self, Coding};
use gateway_core::memory::{self, BodyOwner, Budget, BudgetExceeded};
use gateway_core::progress::{self, BodyProgress, TooSlow};

/// Default memory limit of all bodies together: sixteen of the largest, or some hundred thousand of the usual ones.
pub(crate) const BODIES_BYTES_MAX: usize = 512 << 20;
/// First allocation of a body.
const FIRST_BYTES: usize = 16 << 10;
/// Factor by which the memory of a client's body grows, up to its declared length. Each step copies what has arrived into
/// fresh memory: with 4 a body of 4 MiB touches 5.4 MiB, with 2 it touches 8 MiB.
const GROWTH: usize = 4;

/// Limits of request bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// Memory limits.
    pub memory: memory::Limits,
    /// Timeouts and minimum rate.
    pub progress: progress::Limits,
    /// Whether senders are gateways. They hold the whole body when they send it, so its memory is allocated at once.
    pub senders_are_gateways: bool,
}

impl BodyLimits {
    /// Limits for the ingress. Gateways already account for bodies by tenant, so each tenant may use all of the memory.
    pub(crate) fn from_gateways(total: Duration) -> BodyLimits {
        let all = BODIES_BYTES_MAX;
        BodyLimits {
            memory: memory::Limits { total: all, per_tenant: all, per_connection: all },
            progress: progress::Limits { total, ..PROGRESS_DEFAULT },
            senders_are_gateways: true,
        }
    }
}

/// Default limits. A client over the slowest link in use (GPRS, some 4 KB/s) meets them, and so do a hundred parallel
/// bodies over a slow uplink (1 Mbit/s).
pub(crate) const PROGRESS_DEFAULT: progress::Limits = progress::Limits {
    stall: Duration::from_secs(10),
    bytes_per_second: 1024,
    total: Duration::from_secs(60),
};

/// Default limits: a quarter for one tenant, and two of the largest bodies for one connection, since HTTP/2 carries
/// many.
pub(crate) const MEMORY_DEFAULT: memory::Limits = memory::Limits {
    total: BODIES_BYTES_MAX,
    per_tenant: BODIES_BYTES_MAX / 4,
    per_connection: 2 * MAX_BODY_BYTES,
};

/// Reads request bodies and accounts for their memory.
pub(crate) struct BodyReader {
    memory: Memory,
    progress: progress::Limits,
    senders_are_gateways: bool,
    /// Threads that decompress and parse large bodies.
    pub(crate) cpu: CpuPool,
    /// Counter of rejected bodies.
    pub(crate) rejections: Family<BodyRejection>,
}

/// Memory budget, shared by all reservations.
#[derive(Clone)]
struct Memory(Arc<Mutex<Budget>>);

/// Memory reserved for a body; released on drop.
pub(crate) struct Reservation {
    memory: Memory,
    owner: BodyOwner,
    bytes: usize,
}

/// Memory accounting of a body.
enum BodyMemory {
    Reserved { _reservation: Reservation },
    Part { _permit: OwnedSemaphorePermit },
}

/// Request body and its memory.
pub(crate) struct BufferedBody {
    pub(crate) bytes: Bytes,
    _memory: BodyMemory,
}

impl BufferedBody {
    /// Creates a part of a larger body; `permit` accounts for its memory.
    pub(crate) fn piece(bytes: Bytes, permit: OwnedSemaphorePermit) -> BufferedBody {
        BufferedBody { bytes, _memory: BodyMemory::Part { _permit: permit } }
    }

    /// Creates a client's body.
    pub(crate) fn new(bytes: Bytes, reservation: Reservation) -> BufferedBody {
        BufferedBody { bytes, _memory: BodyMemory::Reserved { _reservation: reservation } }
    }
}

/// Reason why a body could not be read.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// The body is rejected: counted, and reported to the client.
    Rejected(BodyRejection, Rejection),
    /// The client disconnected.
    ClientDisconnected,
}

impl BodyError {
    /// Adds the number of bytes that were processed before the rejection; they count against the tenant's rate limit.
    pub(crate) fn with_processed(self, bytes: usize) -> BodyError {
        match self {
            BodyError::Rejected(why, rejection) => BodyError::Rejected(why, rejection.with_processed(bytes)),
            BodyError::ClientDisconnected => BodyError::ClientDisconnected,
        }
    }
}

impl From<BodyError> for ForwardError {
    fn from(error: BodyError) -> ForwardError {
        match error {
            BodyError::Rejected(_, rejection) => ForwardError::Rejected(rejection),
            BodyError::ClientDisconnected => ForwardError::ClientDisconnected,
        }
    }
}

impl Memory {
    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.0.lock()
    }
}

impl Reservation {
    /// Reserves the missing bytes up to `bytes`.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), BodyError> {
        let missing = bytes.saturating_sub(self.bytes);
        let mut budget = self.memory.budget();
        budget.reserve(self.owner, missing).map_err(|full| no_memory(full, budget.limits()))?;
        self.bytes += missing;
        Ok(())
    }

    /// Returns an empty reservation of the same owner.
    pub(crate) fn another(&self) -> Reservation {
        Reservation { memory: self.memory.clone(), owner: self.owner, bytes: 0 }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.budget().release(self.owner, self.bytes);
    }
}

impl BodyReader {
    /// Creates a reader with these limits.
    ///
    /// # Errors
    ///
    /// Fails if the threads for large bodies cannot be started.
    pub(crate) fn new(limits: BodyLimits) -> std::io::Result<BodyReader> {
        Ok(BodyReader {
            memory: Memory(Arc::new(Mutex::new(Budget::new(limits.memory)))),
            progress: limits.progress,
            senders_are_gateways: limits.senders_are_gateways,
            cpu: CpuPool::new()?,
            rejections: Family::default(),
        })
    }

    /// Returns the bytes reserved by all bodies, those of the tenant with the most, and the limits.
    pub(crate) fn used(&self) -> (usize, usize, memory::Limits) {
        let budget = self.memory.budget();
        (budget.used(), budget.largest_tenant(), budget.limits())
    }

    /// Reads and decompresses the body of the request whose head `session` has read.
    pub(crate) async fn body(
        &self,
        session: &mut ServerSession,
        owner: BodyOwner,
    ) -> Result<BufferedBody, BodyError> {
        let result = self.read_decoded(session, owner).await;
        if let Err(BodyError::Rejected(why, _)) = &result {
            self.rejections.count(*why);
        }
        result
    }

    async fn read_decoded(
        &self,
        session: &mut ServerSession,
        owner: BodyOwner,
    ) -> Result<BufferedBody, BodyError> {
        let coding = session.get_header(CONTENT_ENCODING).map(http::HeaderValue::as_bytes);
        let several = session.req_header().headers.get_all(CONTENT_ENCODING).iter().nth(1).is_some();
        let reservation = Reservation { memory: self.memory.clone(), owner, bytes: 0 };
        match encoding::of_content(coding).filter(|_| !several) {
            Some(Coding::Identity) => self.read_encoded(session, reservation).await,
            Some(Coding::Gzip) => {
                let unpacked = reservation.another();
                let packed = self.read_encoded(session, reservation).await?;
                compress::decompress(&self.cpu, owner.tenant, packed, unpacked).await
            }
            None => Err(compress::unsupported_encoding()),
        }
    }

    async fn read_encoded(
        &self,
        session: &mut ServerSession,
        reservation: Reservation,
    ) -> Result<BufferedBody, BodyError> {
        let declared = session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(length) = declared.filter(|length| *length > MAX_BODY_BYTES) {
            return Err(too_large(&format!("has {length} bytes")));
        }
        // No 100 Continue over HTTP/2 (RFC 9110, 10.1.1 would require it): `h2` could send the interim response
        // (`SendResponse::send_informational`), but Pingora's session does not expose it and drops every 1xx. A client
        // must not wait for it indefinitely and none does; a rejected client gets its error before it has sent more
        // than its flow control window.
        let waits = session.req_header().version == Version::HTTP_11
            && session.get_header_bytes(EXPECT).eq_ignore_ascii_case(b"100-continue");
        if waits {
            session.write_continue_response().await.map_err(|_| BodyError::ClientDisconnected)?;
        }
        self.read(session, declared, reservation).await
    }

    /// Reads to the end of the body, and reserves memory for the bytes that have arrived.
    async fn read(
        &self,
        session: &mut ServerSession,
        declared: Option<usize>,
        mut reservation: Reservation,
    ) -> Result<BufferedBody, BodyError> {
        let mut body = BytesMut::new();
        let now = Instant::now();
        let mut progress = match session.is_http2() {
            true => BodyProgress::multiplexed(self.progress, now),
            false => BodyProgress::new(self.progress, now),
        };
        // One timer for all chunks: it is reset only when it fires.
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        loop {
            let chunk = tokio::select! {
                biased;
                chunk = session.read_request_body() => chunk,
                why = too_slow(&progress, &mut timer) => return Err(self.too_slow(why)),
            };
            let Some(chunk) = chunk.or_else(|error| read_error(session, &error))? else { break };
            let length = body.len() + chunk.len();
            if length > MAX_BODY_BYTES {
                return Err(too_large("has more"));
            }
            if length > body.capacity() {
                let capacity = match declared.filter(|_| self.senders_are_gateways) {
                    Some(declared) => declared.max(length),
                    None => capacity(body.capacity(), length, declared),
                };
                reservation.grow_to(capacity)?;
                body.reserve(capacity - body.len());
            }
            body.extend_from_slice(&chunk);
            progress.received(chunk.len(), Instant::now());
        }
        Ok(BufferedBody::new(body.freeze(), reservation))
    }

    fn too_slow(&self, why: TooSlow) -> BodyError {
        let progress::Limits { stall, bytes_per_second, total } = self.progress;
        let (label, message) = match why {
            TooSlow::Stalled => {
                (BodyRejection::Stalled, format!("No byte of the body arrived for {} s", stall.as_secs_f64()))
            }
            TooSlow::Rate => (
                BodyRejection::TooSlow,
                format!("The body arrived more slowly than {bytes_per_second} bytes a second"),
            ),
            TooSlow::Total => {
                (BodyRejection::TooSlow, format!("The body did not arrive within {} s", total.as_secs_f64()))
            }
        };
        let message = format!("{message}; send it faster or in smaller requests.");
        BodyError::Rejected(label, Rejection::new(ErrorCode::BodyTimeout, message))
    }
}

/// Returns the buffer size for a client's body of which `length` bytes have arrived: [`GROWTH`] times the current size, and no
/// more than is declared.
pub(crate) fn capacity(now: usize, length: usize, declared: Option<usize>) -> usize {
    let grown = (GROWTH * now).max(FIRST_BYTES).max(length).min(MAX_BODY_BYTES.max(length));
    // The body is never longer than declared: the framing ends there.
    declared.map_or(grown, |declared| grown.min(declared).max(length))
}

/// Waits until the body violates a progress limit, and returns that limit.
async fn too_slow(progress: &BodyProgress, timer: &mut Option<Pin<Box<Sleep>>>) -> TooSlow {
    loop {
        let (deadline, why) = progress.deadline();
        match timer {
            None => *timer = Some(Box::pin(tokio::time::sleep_until(deadline.into()))),
            Some(timer) => {
                timer.as_mut().await;
                if Instant::now() >= deadline {
                    return why;
                }
                timer.as_mut().reset(deadline.into());
            }
        }
    }
}

fn no_memory(full: BudgetExceeded, limits: memory::Limits) -> BodyError {
    let memory::Limits { total, per_tenant, per_connection } = limits;
    let (why, message) = match full {
        BudgetExceeded::Total => (
            BodyRejection::MemoryFull,
            format!(
                "The request bodies under way take {total} bytes, the limit for all (bodies.bytes_max); try again \
                 shortly."
            ),
        ),
        BudgetExceeded::Tenant => (
            BodyRejection::TenantFull,
            format!(
                "The request bodies under way of this tenant take {per_tenant} bytes, the limit for one tenant \
                 (bodies.bytes_per_tenant_max); wait for responses before sending more."
            ),
        ),
        BudgetExceeded::Connection => (
            BodyRejection::ConnectionFull,
            format!(
                "The request bodies under way on this connection take {per_connection} bytes, the limit for one \
                 connection (bodies.bytes_per_connection_max); wait for responses before sending more."
            ),
        ),
    };
    BodyError::Rejected(why, Rejection::new(ErrorCode::Overloaded, message))
}

/// Maps an error while reading a body: the client disconnected, or its framing is invalid. After invalid framing the
/// start of the next request is unknown, so the connection is closed.
fn read_error(session: &mut ServerSession, error: &pingora::Error) -> Result<Option<Bytes>, BodyError> {
    tracing::debug!(%error, "reading a request body failed");
    if let Some(why) = chunk_error(error) {
        session.set_keepalive(None);
        let message = format!("The chunked body is malformed: {why}; the connection is closed.");
        return Err(BodyError::Rejected(
            BodyRejection::Malformed,
            Rejection::new(ErrorCode::MalformedRequest, message),
        ));
    }
    if session.is_http2() || matches!(error.etype(), ErrorType::ConnectionClosed | ErrorType::ReadError) {
        return Err(BodyError::ClientDisconnected);
    }
    session.set_keepalive(None);
    let message = "The chunked body violates RFC 9112, 7.1; the connection is closed.";
    Err(BodyError::Rejected(BodyRejection::Malformed, Rejection::new(ErrorCode::MalformedRequest, message)))
}

pub(crate) fn too_large(given: &str) -> BodyError {
    let message = format!(
        "The limit of a body is {MAX_BODY_BYTES} bytes and this one {given}; split the inputs over several requests."
    );
    BodyError::Rejected(BodyRejection::TooLarge, Rejection::new(ErrorCode::BodyTooLarge, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reserved_for_arrived_bytes_not_for_the_declared_length() {
        let check = |now, length, declared, expected| {
            assert_eq!(capacity(now, length, declared), expected, "{now} {length} {declared:?}");
        };
        check(0, 35, Some(35), 35);
        check(0, 1, Some(MAX_BODY_BYTES), FIRST_BYTES);
        check(0, 1, None, FIRST_BYTES);
        check(FIRST_BYTES, FIRST_BYTES + 1, None, GROWTH * FIRST_BYTES);
        check(FIRST_BYTES, 10 * FIRST_BYTES, None, 10 * FIRST_BYTES);
        check(20 << 20, (20 << 20) + 1, Some(MAX_BODY_BYTES), MAX_BODY_BYTES);
        check(20 << 20, (20 << 20) + 1, None, MAX_BODY_BYTES);
    }

    #[test]
    fn memory_is_reserved_up_to_its_limit_and_released() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        let limits = BodyLimits { memory, progress, senders_are_gateways: false };
        let body_reader = BodyReader::new(limits).unwrap();
        let reserve = |tenant| {
            let owner = BodyOwner { tenant: Some(tenant), connection: None };
            let mut reservation = Reservation { memory: body_reader.memory.clone(), owner, bytes: 0 };
            reservation.grow_to(MAX_BODY_BYTES).map(|()| reservation)
        };
        let per_tenant = MEMORY_DEFAULT.per_tenant / MAX_BODY_BYTES;
        let first: Vec<_> = (0..per_tenant).map_while(|_| reserve(0).ok()).collect();
        assert_eq!(first.len(), per_tenant);
        assert!(matches!(reserve(0), Err(BodyError::Rejected(BodyRejection::TenantFull, _))));
        let others: Vec<_> = (1..4)
            .flat_map(|tenant| (0..per_tenant).map(move |_| tenant))
            .map_while(|tenant| reserve(tenant).ok())
            .collect();
        assert_eq!(others.len(), 3 * per_tenant);
        assert!(matches!(reserve(4), Err(BodyError::Rejected(BodyRejection::MemoryFull, _))));
        assert_eq!(body_reader.used().0, BODIES_BYTES_MAX);
        drop((first, others));
        assert!(reserve(0).is_ok());
        assert_eq!(body_reader.used().0, 0);
    }
}
