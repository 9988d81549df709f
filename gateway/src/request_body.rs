//! Reads complete request bodies, within limits of size, memory and time.
//!
//! A body is kept until its request has its response, because a retry may send it to another region; its memory is
//! accounted for in [`body_memory`](crate::body_memory). A body that stalls or arrives too slowly is aborted
//! ([`gateway_core::progress`]).

use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, Stream, StreamExt};
use http::Version;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use replica_api::limits::MAX_BODY_BYTES;
use std::pin::{Pin, pin};
use std::time::Instant;
use tokio::time::Sleep;

use crate::body_memory::{
    BodyError, BodyLimits, BodyMemoryBudget, BufferedBody, Reservation, capacity, file_too_large, too_large,
};
use crate::compress;
use crate::cpu::CpuPool;
use crate::listener::chunked::chunk_error;
use crate::metrics::{BodyRejection, Family};
use crate::respond::Rejection;
use gateway_core::encoding::{self, Coding};
use gateway_core::memory::{self, BodyOwner};
use gateway_core::progress::{self, BodyProgress, TooSlow};

/// Reads request bodies and accounts for their memory.
pub(crate) struct BodyReader {
    memory: BodyMemoryBudget,
    progress: progress::Limits,
    /// Limit of a file of a batch, bytes.
    pub(crate) file_bytes_max: usize,
    senders_are_gateways: bool,
    /// Threads that decompress and parse large bodies.
    pub(crate) cpu: CpuPool,
    /// Counter of rejected bodies.
    pub(crate) rejections: Family<BodyRejection>,
}

impl BodyReader {
    /// Creates a reader with these limits.
    ///
    /// # Errors
    ///
    /// Fails if the threads for large bodies cannot be started.
    pub(crate) fn new(limits: BodyLimits) -> std::io::Result<BodyReader> {
        Ok(BodyReader {
            memory: BodyMemoryBudget::new(limits.memory),
            progress: limits.progress,
            file_bytes_max: limits.file_bytes_max,
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
        if let Err(BodyError::Rejected(cause, _)) = &result {
            self.rejections.count(*cause);
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
        let reservation = self.memory.reservation(owner);
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
        continue_if_expected(session).await?;
        self.read(session, declared, reservation).await
    }

    /// Counts a rejected body.
    pub(crate) fn count_rejection(&self, error: &BodyError) {
        if let BodyError::Rejected(cause, _) = error {
            self.rejections.count(*cause);
        }
    }

    /// Returns an empty reservation of memory for a body.
    pub(crate) fn reservation(&self, owner: BodyOwner) -> Reservation {
        self.memory.reservation(owner)
    }

    /// Returns the chunks of a body with a file of at most `file_bytes_max` bytes and `form_bytes_max` beside it as they arrive, within
    /// the limits of time for such a body. The receiver accounts for their memory.
    pub(crate) fn chunks<'a>(
        &'a self,
        session: &'a mut ServerSession,
        file_bytes_max: usize,
        form_bytes_max: usize,
    ) -> impl Stream<Item = Result<Bytes, BodyError>> + Send + 'a {
        let bytes_max = file_bytes_max.saturating_add(form_bytes_max);
        let now = Instant::now();
        let times = u32::try_from(bytes_max.div_ceil(MAX_BODY_BYTES)).unwrap_or(u32::MAX);
        let limits = progress::Limits { total: self.progress.total.saturating_mul(times), ..self.progress };
        let progress = match session.is_http2() {
            true => BodyProgress::multiplexed(limits, now),
            false => BodyProgress::new(limits, now),
        };
        let timer: Option<Pin<Box<Sleep>>> = None;
        stream::unfold(
            (session, progress, timer, Some((bytes_max, file_bytes_max))),
            async move |(session, mut progress, mut timer, left)| {
                // None after an error.
                let (left, limit) = left?;
                let chunk = tokio::select! {
                    biased;
                    chunk = session.read_request_body() => chunk,
                    cause = too_slow(&progress, &mut timer) => {
                        return Some((Err(self.too_slow(cause)), (session, progress, timer, None)));
                    }
                };
                match chunk.or_else(|error| read_error(session, &error)) {
                    Ok(Some(chunk)) => {
                        let Some(left) = left.checked_sub(chunk.len()) else {
                            return Some((Err(file_too_large(limit)), (session, progress, timer, None)));
                        };
                        progress.received(chunk.len(), Instant::now());
                        Some((Ok(chunk), (session, progress, timer, Some((left, limit)))))
                    }
                    Ok(None) => None,
                    Err(error) => Some((Err(error), (session, progress, timer, None))),
                }
            },
        )
    }

    /// Reads a file that a gateway has received.
    pub(crate) async fn file(
        &self,
        session: &mut ServerSession,
        owner: BodyOwner,
        bytes_max: usize,
    ) -> Result<BufferedBody, BodyError> {
        let declared = session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut file = FileBuffer::new(self.reservation(owner), bytes_max, declared);
        if declared.is_some_and(|length| length > bytes_max) {
            return Err(file_too_large(bytes_max));
        }
        let mut chunks = pin!(self.chunks(session, bytes_max, 0));
        while let Some(chunk) = chunks.next().await {
            file.push(&chunk?)?;
        }
        Ok(file.finish())
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
                cause = too_slow(&progress, &mut timer) => return Err(self.too_slow(cause)),
            };
            let Some(chunk) = chunk.or_else(|error| read_error(session, &error))? else { break };
            let length = body.len() + chunk.len();
            if length > MAX_BODY_BYTES {
                return Err(too_large("has more"));
            }
            if length > body.capacity() {
                let capacity = match declared.filter(|_| self.senders_are_gateways) {
                    Some(declared) => declared.max(length),
                    None => capacity(body.capacity(), length, declared, MAX_BODY_BYTES),
                };
                reservation.grow_to(capacity)?;
                body.reserve(capacity - body.len());
            }
            body.extend_from_slice(&chunk);
            progress.received(chunk.len(), Instant::now());
        }
        Ok(BufferedBody::new(body.freeze(), reservation))
    }

    fn too_slow(&self, cause: TooSlow) -> BodyError {
        let progress::Limits { stall, bytes_per_second, total } = self.progress;
        let (label, message) = match cause {
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

/// File that is being received.
pub(crate) struct FileBuffer {
    bytes: BytesMut,
    reservation: Reservation,
    bytes_max: usize,
    /// Announced length, or more.
    announced: Option<usize>,
}

impl FileBuffer {
    /// Creates an empty buffer for a file of at most `bytes_max` bytes, with its announced length or more.
    pub(crate) fn new(reservation: Reservation, bytes_max: usize, announced: Option<usize>) -> FileBuffer {
        let announced = announced.map(|length| length.min(bytes_max));
        FileBuffer { bytes: BytesMut::new(), reservation, bytes_max, announced }
    }

    /// Adds bytes, and reserves memory for what has arrived.
    pub(crate) fn push(&mut self, chunk: &[u8]) -> Result<(), BodyError> {
        let length = self.bytes.len() + chunk.len();
        if length > self.bytes_max {
            return Err(file_too_large(self.bytes_max));
        }
        if length > self.bytes.capacity() {
            let capacity = capacity(self.bytes.capacity(), length, self.announced, self.bytes_max);
            self.reservation.grow_to(capacity)?;
            self.bytes.reserve(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// Returns the file with its memory.
    pub(crate) fn finish(self) -> BufferedBody {
        BufferedBody::new(self.bytes.freeze(), self.reservation)
    }
}

/// Sends 100 Continue to a client of HTTP/1.1 that waits for it.
pub(crate) async fn continue_if_expected(session: &mut ServerSession) -> Result<(), BodyError> {
    let waits = session.req_header().version == Version::HTTP_11
        && session.get_header_bytes(EXPECT).eq_ignore_ascii_case(b"100-continue");
    if waits {
        session.write_continue_response().await.map_err(|_| BodyError::ClientDisconnected)?;
    }
    Ok(())
}

/// Waits until the body violates a progress limit, and returns that limit.
async fn too_slow(progress: &BodyProgress, timer: &mut Option<Pin<Box<Sleep>>>) -> TooSlow {
    loop {
        let (deadline, cause) = progress.deadline();
        match timer {
            None => *timer = Some(Box::pin(tokio::time::sleep_until(deadline.into()))),
            Some(timer) => {
                timer.as_mut().await;
                if Instant::now() >= deadline {
                    return cause;
                }
                timer.as_mut().reset(deadline.into());
            }
        }
    }
}

/// Maps an error while reading a body: the client disconnected, or its framing is invalid. After invalid framing the
/// start of the next request is unknown, so the connection is closed.
fn read_error(session: &mut ServerSession, error: &pingora::Error) -> Result<Option<Bytes>, BodyError> {
    // A client disconnected during its request body, or the body is malformed.
    tracing::debug!(%error, "reading a request body failed");
    if let Some(cause) = chunk_error(error) {
        session.set_keepalive(None);
        let message = format!("The chunked body is malformed: {cause}; the connection is closed.");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body_memory::{BODIES_BYTES_MAX, MEMORY_DEFAULT, PROGRESS_DEFAULT};

    #[test]
    fn memory_is_reserved_up_to_its_limit_and_released() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        let limits = BodyLimits { memory, progress, file_bytes_max: 1, senders_are_gateways: false };
        let body_reader = BodyReader::new(limits).unwrap();
        let reserve = |tenant| {
            let owner = BodyOwner { tenant: Some(tenant), connection: None };
            let mut reservation = body_reader.memory.reservation(owner);
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

    #[test]
    fn a_file_is_received_up_to_its_limit_and_reserves_no_more_memory_than_that() {
        let (memory, progress) = (MEMORY_DEFAULT, PROGRESS_DEFAULT);
        let bytes_max = 5 << 20;
        let limits = BodyLimits { memory, progress, file_bytes_max: bytes_max, senders_are_gateways: false };
        let body_reader = BodyReader::new(limits).unwrap();
        let chunk = vec![7; 64 << 10];
        for announced in [None, Some(1), Some(bytes_max), Some(usize::MAX)] {
            let owner = BodyOwner { tenant: Some(0), connection: None };
            let mut file = FileBuffer::new(body_reader.memory.reservation(owner), bytes_max, announced);
            for _ in 0..bytes_max / chunk.len() {
                file.push(&chunk).unwrap();
                assert!(body_reader.used().0 <= bytes_max, "{announced:?}");
            }
            let one_more = file.push(&[7]);
            assert!(
                matches!(one_more, Err(BodyError::Rejected(BodyRejection::TooLarge, _))),
                "{announced:?}"
            );
            assert_eq!(file.finish().bytes.len(), bytes_max);
        }
        assert_eq!(body_reader.used().0, 0);
    }
}
