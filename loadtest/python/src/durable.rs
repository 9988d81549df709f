//! Durable jobs: arguments, and the iteration over results.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use loadtest::client::jobs::{ClientJobResults, ClientJobStatus, JobKind, SubmitOptions};
use loadtest::client::{Client, Preference};
use pyo3::prelude::*;
use replica_api::priority::Priority;

use crate::failure::{Failed, failed};
use crate::job::{OperationResult, PyJob};
use crate::preference::seconds;
use crate::runtime;

fn invalid(problem: String) -> PyErr {
    Failed::new_err(("invalid", None::<u16>, problem))
}

/// Returns the kind of an operation, by the last part of its path.
pub(crate) fn kind(operation: &str) -> PyResult<JobKind> {
    let kind = JobKind::ALL.into_iter().find(|kind| kind.path().ends_with(&format!("/{operation}")));
    kind.ok_or_else(|| {
        let names = JobKind::ALL.map(|kind| kind.path().rsplit('/').next().unwrap_or_default());
        invalid(format!("operation {operation:?}: write one of {}", names.join(", ")))
    })
}

/// Returns the status with this name.
pub(crate) fn status(name: &str) -> PyResult<ClientJobStatus> {
    ClientJobStatus::of_name(name).ok_or_else(|| {
        let names = ClientJobStatus::ALL.map(ClientJobStatus::as_str);
        invalid(format!("status {name:?}: write one of {}", names.join(", ")))
    })
}

/// Returns the options of a submission.
pub(crate) fn options(
    idempotency_key: Option<String>,
    priority: Option<&str>,
    deadline_s: Option<f64>,
    max_time_in_queue_s: Option<f64>,
) -> PyResult<SubmitOptions> {
    let parse = |name: &str| {
        let parsed: Result<Priority, _> = name.parse();
        parsed.map_err(|_| invalid(format!("priority {name:?}: write interactive or bulk")))
    };
    Ok(SubmitOptions {
        idempotency_key,
        priority: priority.map(parse).transpose()?,
        deadline: deadline_s.map(|span| seconds("deadline_s", span)).transpose()?,
        max_time_in_queue: max_time_in_queue_s
            .map(|span| seconds("max_time_in_queue_s", span))
            .transpose()?,
    })
}

/// Identifiers that were added and are not polled yet.
#[derive(Clone, Default)]
struct AddedIds(Arc<Mutex<VecDeque<String>>>);

impl Iterator for AddedIds {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// Iteration over the results of durable jobs, as they finish. Python adds identifiers as they are needed.
#[pyclass(frozen, name = "Results")]
pub(crate) struct PyResults {
    ids: AddedIds,
    results: Arc<tokio::sync::Mutex<ClientJobResults<AddedIds>>>,
}

impl PyResults {
    pub(crate) fn new(
        client: &Arc<Client>,
        in_flight: usize,
        preference: &Preference,
    ) -> PyResult<PyResults> {
        let ids = AddedIds::default();
        let results = client.results(ids.clone(), in_flight, preference).map_err(|error| failed(&error))?;
        Ok(PyResults { ids, results: Arc::new(tokio::sync::Mutex::new(results)) })
    }
}

#[pymethods]
impl PyResults {
    /// Adds identifiers; returns how many wait to be polled for the first time.
    fn add(&self, ids: Vec<String>) -> usize {
        let mut added = self.ids.0.lock().unwrap_or_else(PoisonError::into_inner);
        added.extend(ids);
        added.len()
    }

    /// Starts waiting for the next finished job. Cancelling loses nothing: the next wait continues.
    #[pyo3(signature = (timeout))]
    fn next(&self, timeout: Option<f64>) -> PyResult<PyJob> {
        let results = Arc::clone(&self.results);
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        PyJob::start(runtime()?, move |_| async move {
            let next = async { results.lock().await.next().await };
            Ok(match timeout {
                None => OperationResult::Next(next.await),
                Some(timeout) => match tokio::time::timeout(timeout, next).await {
                    Ok(next) => OperationResult::Next(next),
                    Err(_) => OperationResult::Unfinished,
                },
            })
        })
    }
}
