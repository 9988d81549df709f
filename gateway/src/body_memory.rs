//! Memory of request bodies: limits, reservations, and the errors of a body that exceeds them.
//!
//! Memory is reserved for the bytes that have arrived, not for the declared length, with a limit per tenant and per
//! connection ([`gateway_core::memory`]): only the tenant that fills its share is rejected.

use crate::metrics::BodyRejection;
use crate::respond::{ForwardError, Rejection};
use bytes::Bytes;
use gateway_core::memory::{self, BodyOwner, Budget, BudgetExceeded};
use gateway_core::progress;
use replica_api::batches::BATCH_BODY_BYTES_MAX;
use replica_api::error::ErrorCode;
use replica_api::limits::MAX_BODY_BYTES;
use std::sync::Arc;
use std::time::Duration;
use supervision::{Mutex, MutexGuard};
use tokio::sync::OwnedSemaphorePermit;

/// Default memory limit of all bodies together: sixteen of the largest, or some hundred thousand of the usual ones.
pub(crate) const BODIES_BYTES_MAX: usize = 512 << 20;
/// Default limit of a file of a batch, bytes: less than the memory of one tenant, and as much as 50,000 lines of 2 KiB.
pub(crate) const FILE_BYTES_MAX: usize = 100 << 20;
/// First allocation of a body.
const FIRST_BYTES: usize = 16 << 10;
/// Factor by which the memory of a client's body or file grows, up to its declared length. Each step copies what has
/// arrived into fresh memory: with 4 a body of 4 MiB touches 5.4 MiB, with 2 it touches 8 MiB.
const GROWTH: usize = 4;

/// Limits of request bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// Memory limits.
    pub memory: memory::Limits,
    /// Timeouts and minimum rate.
    pub progress: progress::Limits,
    /// Bytes of a file of a batch.
    pub file_bytes_max: usize,
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
            file_bytes_max: FILE_BYTES_MAX,
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

/// Memory budget, shared by all reservations.
#[derive(Clone)]
pub(crate) struct BodyMemoryBudget(Arc<Mutex<Budget>>);

/// Memory reserved for a body; released on drop.
pub(crate) struct Reservation {
    memory: BodyMemoryBudget,
    owner: BodyOwner,
    bytes: usize,
}

/// Memory accounting of a body.
enum BodyMemory {
    Reserved {
        _reservation: Reservation,
    },
    Part {
        _permit: OwnedSemaphorePermit,
    },
    /// Bounded by what holds the body: the worker of jobs has a limited number in flight.
    Job,
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

    /// Creates the body of a job, which this process sends by itself.
    pub(crate) fn of_job(bytes: Bytes) -> BufferedBody {
        BufferedBody { bytes, _memory: BodyMemory::Job }
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
            BodyError::Rejected(reason, rejection) => {
                BodyError::Rejected(reason, rejection.with_processed(bytes))
            }
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

impl BodyMemoryBudget {
    /// Creates an unused budget.
    pub(crate) fn new(limits: memory::Limits) -> BodyMemoryBudget {
        BodyMemoryBudget(Arc::new(Mutex::new(Budget::new(limits))))
    }

    /// Returns an empty reservation.
    pub(crate) fn reservation(&self, owner: BodyOwner) -> Reservation {
        Reservation { memory: self.clone(), owner, bytes: 0 }
    }

    pub(crate) fn budget(&self) -> MutexGuard<'_, Budget> {
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
        self.memory.reservation(self.owner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.budget().release(self.owner, self.bytes);
    }
}

/// Returns the buffer size for a client's body or file of which `length` bytes have arrived: [`GROWTH`] times the current
/// size, and no more than is declared, or than `bytes_max` without a length or past it.
pub(crate) fn capacity(now: usize, length: usize, declared: Option<usize>, bytes_max: usize) -> usize {
    let limit = declared.filter(|declared| *declared >= length).unwrap_or(bytes_max);
    (GROWTH * now).max(FIRST_BYTES).min(limit).max(length)
}

fn no_memory(full: BudgetExceeded, limits: memory::Limits) -> BodyError {
    let memory::Limits { total, per_tenant, per_connection } = limits;
    let (reason, message) = match full {
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
    BodyError::Rejected(reason, Rejection::new(ErrorCode::Overloaded, message))
}

/// Returns the error for a file that is larger than its limit.
pub(crate) fn file_too_large(limit: usize) -> BodyError {
    let message =
        format!("The limit of a file is {limit} bytes and this one has more; split it into several files.");
    BodyError::Rejected(BodyRejection::TooLarge, Rejection::new(ErrorCode::BodyTooLarge, message).of("file"))
}

/// Rejects the body of the creation of a batch if it is too long to be parsed as a value.
pub(crate) fn check_batch_body(body: &[u8]) -> Result<(), Rejection> {
    if body.len() <= BATCH_BODY_BYTES_MAX {
        return Ok(());
    }
    let message = format!(
        "The limit of the body of a batch is {BATCH_BODY_BYTES_MAX} bytes and this one has {}; leave out what the API does not \
         name.",
        body.len()
    );
    Err(Rejection::new(ErrorCode::BodyTooLarge, message))
}

/// Returns the error for a body of this description: `has 5 bytes`.
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
            let size = capacity(now, length, declared, MAX_BODY_BYTES);
            assert_eq!(size, expected, "{now} {length} {declared:?}");
        };
        check(0, 35, Some(35), 35);
        check(0, 1, Some(MAX_BODY_BYTES), FIRST_BYTES);
        check(0, 1, None, FIRST_BYTES);
        check(FIRST_BYTES, FIRST_BYTES + 1, None, GROWTH * FIRST_BYTES);
        check(FIRST_BYTES, 10 * FIRST_BYTES, None, 10 * FIRST_BYTES);
        check(20 << 20, (20 << 20) + 1, Some(MAX_BODY_BYTES), MAX_BODY_BYTES);
        check(20 << 20, (20 << 20) + 1, None, MAX_BODY_BYTES);
        check(35, 36, Some(35), FIRST_BYTES);
    }
}
