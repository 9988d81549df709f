//! Reads request bodies whole, within limits of size, of memory and of time.
//!
//! A body is kept until its request is answered, because another region may have to be given it. Memory is reserved for what
//! has arrived and not for what is declared, with a limit for each tenant and for each connection
//! ([`gateway_core::memory`]): a tenant that fills its part is refused and nobody else is. A body that stops arriving, or
//! trickles, is given up ([`gateway_core::progress`]).

use bytes::{Bytes, BytesMut};
use http::Version;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use pingora::ErrorType;
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::compress;
use crate::cpu::CpuPool;
use crate::listener::chunks_refused;
use crate::metrics::{NotTaken, Tally};
use crate::respond::Refusal;
use gateway_core::encoding::{self, Coding};
use gateway_core::memory::{self, BodyOwner, Budget, BudgetExceeded};
use gateway_core::progress::{self, BodyProgress, TooSlow};

/// The largest body that is taken: 2,048 inputs of 8,191 tokens, at two bytes a token. The field's gateways break
/// between 32 KiB and 2 MiB.
pub(crate) const BODY_BYTES_MAX: usize = 32 << 20;
/// What all bodies together may take unless the configuration says otherwise: sixteen of the largest, or some hundred
/// thousand of the usual.
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
    /// Where gateways send bodies that they have counted by tenant already: all of the memory is for whoever comes.
    pub(crate) fn from_gateways(total: Duration) -> BodyLimits {
        let all = BODIES_BYTES_MAX;
        BodyLimits {
            memory: memory::Limits { total: all, per_tenant: all, per_connection: all },
            progress: progress::Limits { total, ..PROGRESS_DEFAULT },
            senders_are_gateways: true,
        }
    }
}

/// A client over the slowest line that there is (GPRS, some 4 KB/s) keeps to it, and so do a hundred bodies side by side over
/// a slow uplink (1 Mbit/s).
pub(crate) const PROGRESS_DEFAULT: progress::Limits = progress::Limits {
    stall: Duration::from_secs(10),
    bytes_per_second: 1024,
    total: Duration::from_secs(60),
};

/// A quarter for one tenant, and two of the largest bodies for one connection, which over HTTP/2 carries many.
pub(crate) const MEMORY_DEFAULT: memory::Limits = memory::Limits {
    total: BODIES_BYTES_MAX,
    per_tenant: BODIES_BYTES_MAX / 4,
    per_connection: 2 * BODY_BYTES_MAX,
};

/// Where bodies are kept.
pub(crate) struct Intake {
    memory: Memory,
    progress: progress::Limits,
    senders_are_gateways: bool,
    /// Where large bodies are unpacked and read.
    pub(crate) cpu: CpuPool,
    /// Bodies that were not taken.
    pub(crate) not_taken: Tally<NotTaken>,
}

/// The memory budget, shared with everybody who holds some of it.
#[derive(Clone)]
struct Memory(Arc<Mutex<Budget>>);

/// Memory that a body has taken, given back when this is dropped.
pub(crate) struct Reservation {
    memory: Memory,
    owner: BodyOwner,
    bytes: usize,
}

/// Reservation of a body's memory.
enum Counted {
    OfClient { _reservation: Reservation },
    OfPiece { _place: OwnedSemaphorePermit },
}

/// A body, and its memory.
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    _counted: Counted,
}

impl Body {
    /// A piece of a larger body, whose memory is counted by `place`.
    pub(crate) fn piece(bytes: Bytes, place: OwnedSemaphorePermit) -> Body {
        Body { bytes, _counted: Counted::OfPiece { _place: place } }
    }

    /// A client's body.
    pub(crate) fn new(bytes: Bytes, reservation: Reservation) -> Body {
        Body { bytes, _counted: Counted::OfClient { _reservation: reservation } }
    }
}

/// Why there is no body.
#[derive(Debug)]
pub(crate) enum NoBody {
    /// Tell the client, and count why.
    Refused(NotTaken, Refusal),
    /// There is nobody to tell.
    ClientGone,
}

impl NoBody {
    /// So many bytes were processed before; their tenant pays for them.
    pub(crate) fn having_processed(self, bytes: usize) -> NoBody {
        match self {
            NoBody::Refused(why, refusal) => NoBody::Refused(why, refusal.having_processed(bytes)),
            NoBody::ClientGone => NoBody::ClientGone,
        }
    }
}

impl Memory {
    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.0.lock()
    }
}

impl Reservation {
    /// Takes what is missing of `bytes`.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), NoBody> {
        let missing = bytes.saturating_sub(self.bytes);
        let mut budget = self.memory.budget();
        budget.reserve(self.owner, missing).map_err(|full| no_memory(full, budget.limits()))?;
        self.bytes += missing;
        Ok(())
    }

    /// Nothing yet, for the same owner.
    pub(crate) fn another(&self) -> Reservation {
        Reservation { memory: self.memory.clone(), owner: self.owner, bytes: 0 }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.budget().release(self.owner, self.bytes);
    }
}

impl Intake {
    /// # Errors
    ///
    /// When the threads for large bodies cannot be started.
    pub(crate) fn new(limits: BodyLimits) -> std::io::Result<Intake> {
        Ok(Intake {
            memory: Memory(Arc::new(Mutex::new(Budget::new(limits.memory)))),
            progress: limits.progress,
            senders_are_gateways: limits.senders_are_gateways,
            cpu: CpuPool::new()?,
            not_taken: Tally::default(),
        })
    }

    /// What bodies have taken of the memory, and its limits; and what the tenant with most of them has.
    pub(crate) fn used(&self) -> (usize, usize, memory::Limits) {
        let budget = self.memory.budget();
        (budget.used(), budget.largest_tenant(), budget.limits())
    }

    /// The body of the request whose head `session` has read, unpacked.
    pub(crate) async fn body(&self, session: &mut ServerSession, owner: BodyOwner) -> Result<Body, NoBody> {
        let taken = self.taken(session, owner).await;
        if let Err(NoBody::Refused(why, _)) = &taken {
            self.not_taken.count(*why);
        }
        taken
    }

    async fn taken(&self, session: &mut ServerSession, owner: BodyOwner) -> Result<Body, NoBody> {
        let coding = session.get_header(CONTENT_ENCODING).map(http::HeaderValue::as_bytes);
        let several = session.req_header().headers.get_all(CONTENT_ENCODING).iter().nth(1).is_some();
        let reservation = Reservation { memory: self.memory.clone(), owner, bytes: 0 };
        match encoding::of_content(coding).filter(|_| !several) {
            Some(Coding::Identity) => self.as_sent(session, reservation).await,
            Some(Coding::Gzip) => {
                let unpacked = reservation.another();
                let packed = self.as_sent(session, reservation).await?;
                compress::unpack(&self.cpu, owner.tenant, packed, unpacked).await
            }
            None => Err(compress::unknown()),
        }
    }

    async fn as_sent(&self, session: &mut ServerSession, reservation: Reservation) -> Result<Body, NoBody> {
        let declared = session.get_header(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(length) = declared.filter(|length| *length > BODY_BYTES_MAX) {
            return Err(too_large(&format!("has {length} bytes")));
        }
        // Over HTTP/2 nobody is told to go on (RFC 9110, 10.1.1 would have it): `h2` could send the interim answer
        // (`SendResponse::send_informational`), Pingora's session keeps that to itself and drops every 1xx. A client must
        // not wait for it for ever and none does; and one that is refused hears so before it has sent more than its window.
        let waits = session.req_header().version == Version::HTTP_11
            && session.get_header_bytes(EXPECT).eq_ignore_ascii_case(b"100-continue");
        if waits {
            session.write_continue_response().await.map_err(|_| NoBody::ClientGone)?;
        }
        self.read(session, declared, reservation).await
    }

    /// Reads until the end, and reserves memory for what has arrived.
    async fn read(
        &self,
        session: &mut ServerSession,
        declared: Option<usize>,
        mut reservation: Reservation,
    ) -> Result<Body, NoBody> {
        let mut body = BytesMut::new();
        let now = Instant::now();
        let mut progress = match session.is_http2() {
            true => BodyProgress::multiplexed(self.progress, now),
            false => BodyProgress::new(self.progress, now),
        };
        // One timer for all pieces: it is set anew only when it goes off.
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        loop {
            let chunk = tokio::select! {
                biased;
                chunk = session.read_request_body() => chunk,
                why = too_slow(&progress, &mut timer) => return Err(self.too_slow(why)),
            };
            let Some(chunk) = chunk.or_else(|error| broken(session, &error))? else { break };
            let length = body.len() + chunk.len();
            if length > BODY_BYTES_MAX {
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
        Ok(Body::new(body.freeze(), reservation))
    }

    fn too_slow(&self, why: TooSlow) -> NoBody {
        let progress::Limits { stall, bytes_per_second, total } = self.progress;
        let (label, message) = match why {
            TooSlow::Stalled => {
                (NotTaken::Stalled, format!("No byte of the body arrived for {} s", stall.as_secs_f64()))
            }
            TooSlow::Rate => (
                NotTaken::TooSlow,
                format!("The body arrived more slowly than {bytes_per_second} bytes a second"),
            ),
            TooSlow::Total => {
                (NotTaken::TooSlow, format!("The body did not arrive within {} s", total.as_secs_f64()))
            }
        };
        let message = format!("{message}; send it faster or in smaller requests.");
        NoBody::Refused(label, Refusal::new(ErrorCode::BodyTimeout, message))
    }
}

/// Memory for a client's body of which `length` bytes have arrived: [`GROWTH`] times what it was, and no more than is declared.
pub(crate) fn capacity(now: usize, length: usize, declared: Option<usize>) -> usize {
    let grown = (GROWTH * now).max(FIRST_BYTES).max(length).min(BODY_BYTES_MAX.max(length));
    // The framing ends the body at the declared length.
    declared.map_or(grown, |declared| grown.min(declared).max(length))
}

/// Comes back when the body is too slow, with the limit that it did not keep to.
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

fn no_memory(full: BudgetExceeded, limits: memory::Limits) -> NoBody {
    let memory::Limits { total, per_tenant, per_connection } = limits;
    let (why, message) = match full {
        BudgetExceeded::Total => (
            NotTaken::NoRoom,
            format!(
                "The request bodies under way take {total} bytes, the limit for all (bodies.bytes_max); try again \
                 shortly."
            ),
        ),
        BudgetExceeded::Tenant => (
            NotTaken::TenantFull,
            format!(
                "The request bodies under way of this tenant take {per_tenant} bytes, the limit for one tenant \
                 (bodies.bytes_per_tenant_max); wait for responses before sending more."
            ),
        ),
        BudgetExceeded::Connection => (
            NotTaken::ConnectionFull,
            format!(
                "The request bodies under way on this connection take {per_connection} bytes, the limit for one \
                 connection (bodies.bytes_per_connection_max); wait for responses before sending more."
            ),
        ),
    };
    NoBody::Refused(why, Refusal::new(ErrorCode::Overloaded, message))
}

/// Why a body cannot be read to its end: whoever sent it is gone, or has sent what is none. After that nobody knows where
/// the next request would begin.
fn broken(session: &mut ServerSession, error: &pingora::Error) -> Result<Option<Bytes>, NoBody> {
    tracing::debug!(%error, "a body cannot be read");
    if let Some(why) = chunks_refused(error) {
        session.set_keepalive(None);
        let message = format!("The chunks of the body cannot be read: {why}; the connection is closed.");
        return Err(NoBody::Refused(NotTaken::Malformed, Refusal::new(ErrorCode::MalformedRequest, message)));
    }
    if session.is_http2() || matches!(error.etype(), ErrorType::ConnectionClosed | ErrorType::ReadError) {
        return Err(NoBody::ClientGone);
    }
    session.set_keepalive(None);
    let message = "The chunks of the body are not as RFC 9112 (7.1) has them; the connection is closed.";
    Err(NoBody::Refused(NotTaken::Malformed, Refusal::new(ErrorCode::MalformedRequest, message)))
}

pub(crate) fn too_large(given: &str) -> NoBody {
    let message = format!(
        "A body may have {BODY_BYTES_MAX} bytes and this one {given}; split the inputs over several requests."
    );
    NoBody::Refused(NotTaken::TooLarge, Refusal::new(ErrorCode::BodyTooLarge, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_follows_what_has_arrived_and_not_what_is_declared() {
        let check = |now, length, declared, expected| {
            assert_eq!(capacity(now, length, declared), expected, "{now} {length} {declared:?}");
        };
        check(0, 35, Some(35), 35);
        check(0, 1, Some(BODY_BYTES_MAX), FIRST_BYTES);
        check(0, 1, None, FIRST_BYTES);
        check(FIRST_BYTES, FIRST_BYTES + 1, None, GROWTH * FIRST_BYTES);
        check(FIRST_BYTES, 10 * FIRST_BYTES, None, 10 * FIRST_BYTES);
        check(20 << 20, (20 << 20) + 1, Some(BODY_BYTES_MAX), BODY_BYTES_MAX);
        check(20 << 20, (20 << 20) + 1, None, BODY_BYTES_MAX);
    }

    #[test]
    fn memory_is_given_up_to_its_limit_and_comes_back() {
        let intake = Intake::new(BodyLimits {
            memory: MEMORY_DEFAULT,
            progress: PROGRESS_DEFAULT,
            senders_are_gateways: false,
        })
        .unwrap();
        let reserve = |tenant| {
            let owner = BodyOwner { tenant: Some(tenant), connection: None };
            let mut reservation = Reservation { memory: intake.memory.clone(), owner, bytes: 0 };
            reservation.grow_to(BODY_BYTES_MAX).map(|()| reservation)
        };
        let per_tenant = MEMORY_DEFAULT.per_tenant / BODY_BYTES_MAX;
        let first: Vec<_> = (0..per_tenant).map_while(|_| reserve(0).ok()).collect();
        assert_eq!(first.len(), per_tenant);
        assert!(matches!(reserve(0), Err(NoBody::Refused(NotTaken::TenantFull, _))));
        let others: Vec<_> = (1..4)
            .flat_map(|tenant| (0..per_tenant).map(move |_| tenant))
            .map_while(|tenant| reserve(tenant).ok())
            .collect();
        assert_eq!(others.len(), 3 * per_tenant);
        assert!(matches!(reserve(4), Err(NoBody::Refused(NotTaken::NoRoom, _))));
        assert_eq!(intake.used().0, BODIES_BYTES_MAX);
        drop((first, others));
        assert!(reserve(0).is_ok());
        assert_eq!(intake.used().0, 0);
    }
}
