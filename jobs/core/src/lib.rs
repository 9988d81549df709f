//! Durable jobs: the state of a queue and its decisions. Pure: no IO, no clock, no random numbers of its own.
//!
//! A jurisdiction has one queue. Its state is the result of a log of [`record::JobRecord`]s: a process that wants to
//! change a job appends a record, and every process that reads the log applies the same records in the same order
//! ([`queue::DurableJobQueue::apply`]). So whether a record has an effect is decided once, by its position in the log, and
//! two processes that take, finish or cancel the same job at the same time agree on the outcome without locks.
//!
//! `apply` has no configuration. Limits, retries and retention are decisions of the process that appends a record
//! ([`decide`]), so that processes with different configurations still have the same state.
//!
//! Payloads and results are outside of the queue, in objects ([`job::StoredRange`]): the log never contains an input
//! or a result.

pub mod batch;
pub mod decide;
pub mod delivery;
pub mod erasure;
pub mod job;
pub mod pace;
pub mod queue;
mod ranked;
pub mod record;
pub mod transfer;
pub mod webhook;
