//! Running operation.

use std::future::Future;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use loadtest::client::jobs::{ClientJobError, ClientJobResult};
use loadtest::client::{
    ClientError, EmbeddedVectors, LabelScore, OperationProgress, OperationStats, RankedText,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

use crate::failure::{Failed, failed, job_failed};
use crate::results::{self, PyVectors};

/// Result of an operation.
pub(crate) enum OperationResult {
    Embeddings(EmbeddedVectors),
    Ranked(Vec<RankedText>, OperationStats),
    Classified(Vec<Vec<LabelScore>>, OperationStats),
    Bodies(Vec<Vec<u8>>, OperationStats),
    /// Durable job or page of jobs, as JSON.
    Json(Vec<u8>),
    /// Result of a durable job.
    Finished(Result<ClientJobResult, ClientJobError>),
    /// Next finished job of an iteration; none at its end.
    Next(Option<(String, Result<ClientJobResult, ClientJobError>)>),
    /// An iteration whose timeout has passed.
    Unfinished,
}

/// Running operation, as a Python object.
#[pyclass(frozen, name = "Job")]
pub(crate) struct PyJob {
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    progress: OperationProgress,
    ended: bool,
    outcome: Option<Result<OperationResult, ClientError>>,
    /// Python callback for the end of the operation.
    notify: Option<Py<PyAny>>,
}

impl PyJob {
    pub(crate) fn start<F, R>(runtime: &Runtime, operation: F) -> PyResult<PyJob>
    where
        F: FnOnce(Box<dyn FnMut(OperationProgress) + Send>) -> R,
        R: Future<Output = Result<OperationResult, ClientError>> + Send + 'static,
    {
        let progress = OperationProgress { requests_done: 0, requests: 0, inputs_done: 0, inputs: 0 };
        let state = State { progress, ended: false, outcome: None, notify: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new() });
        let listener = {
            let shared = Arc::clone(&shared);
            move |progress| shared.state().progress = progress
        };
        let operation = operation(Box::new(listener));
        let task = runtime.spawn({
            // Dropped when the task ends in any way, including cancellation and panic.
            let guard = CompletionGuard(Arc::clone(&shared));
            async move {
                let outcome = operation.await;
                guard.0.state().outcome = Some(outcome);
            }
        });
        Ok(PyJob { shared, task: task.abort_handle() })
    }
}

struct CompletionGuard(Arc<Shared>);

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        let notify = {
            let mut state = self.0.state();
            state.ended = true;
            state.notify.take()
        };
        self.0.ended.notify_all();
        if let Some(notify) = notify {
            Python::attach(|py| {
                if let Err(error) = notify.call0(py) {
                    error.write_unraisable(py, None);
                }
            });
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[pymethods]
impl PyJob {
    /// Waits for the end, at most `seconds`; returns whether the operation has ended.
    fn wait(&self, py: Python<'_>, seconds: f64) -> bool {
        let until = Instant::now() + Duration::try_from_secs_f64(seconds).unwrap_or_default();
        py.detach(|| {
            let mut state = self.shared.state();
            while !state.ended {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let waited = self.shared.ended.wait_timeout(state, left);
                state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
            state.ended
        })
    }

    /// Calls `notify` from another thread when the operation ends, or now if it has ended.
    fn notify(&self, py: Python<'_>, notify: Py<PyAny>) -> PyResult<()> {
        {
            let mut state = self.shared.state();
            if !state.ended {
                state.notify = Some(notify);
                return Ok(());
            }
        }
        notify.call0(py).map(drop)
    }

    /// Returns requests done, requests in total, inputs done, inputs in total.
    fn progress(&self) -> (usize, usize, usize, usize) {
        let OperationProgress { requests_done, requests, inputs_done, inputs } = self.shared.state().progress;
        (requests_done, requests, inputs_done, inputs)
    }

    /// Cancels the operation: closes its connections; there will be no result.
    fn cancel(&self) {
        self.task.abort();
    }

    /// Returns the result; only once.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let outcome = self.shared.state().outcome.take();
        let outcome = outcome
            .ok_or_else(|| PyRuntimeError::new_err("the operation has no result: it was cancelled"))?;
        match outcome.map_err(|error| failed(&error))? {
            OperationResult::Embeddings(embedded) => {
                let (vectors, run) = PyVectors::new(embedded);
                Ok((vectors, run).into_pyobject(py)?.into_any())
            }
            OperationResult::Ranked(ranks, run) => {
                let ranks: Vec<_> =
                    ranks.into_iter().map(|RankedText { index, score, text }| (index, score, text)).collect();
                Ok((ranks, results::PyOperationStats::new(run)).into_pyobject(py)?.into_any())
            }
            OperationResult::Classified(rows, run) => {
                let labels = |row: Vec<LabelScore>| {
                    row.into_iter().map(|LabelScore { label, score }| (label, score)).collect()
                };
                let rows: Vec<Vec<(String, f64)>> = rows.into_iter().map(labels).collect();
                Ok((rows, results::PyOperationStats::new(run)).into_pyobject(py)?.into_any())
            }
            OperationResult::Bodies(responses, run) => {
                let responses: Vec<_> = responses.iter().map(|response| PyBytes::new(py, response)).collect();
                Ok((responses, results::PyOperationStats::new(run)).into_pyobject(py)?.into_any())
            }
            OperationResult::Json(text) => Ok((PyBytes::new(py, &text),).into_pyobject(py)?.into_any()),
            OperationResult::Finished(result) => {
                Ok(job_result(py, &result.map_err(|error| job_failed(&error))?)?.into_any())
            }
            OperationResult::Unfinished => {
                let message = "not all jobs are finished within the timeout; they continue";
                Err(Failed::new_err(("job_timeout", None::<u16>, message, "")))
            }
            OperationResult::Next(next) => {
                let next = next.map(|(id, result)| {
                    // An exception as a value: a failed job does not end the iteration.
                    let result = match result {
                        Ok(result) => job_result(py, &result)?.into_any(),
                        Err(error) => job_failed(&error).into_value(py).into_bound(py).into_any(),
                    };
                    PyResult::Ok((id, result))
                });
                Ok((next.transpose()?,).into_pyobject(py)?.into_any())
            }
        }
    }
}

/// Returns a durable job and its result, both as JSON.
fn job_result<'py>(py: Python<'py>, result: &ClientJobResult) -> PyResult<Bound<'py, PyTuple>> {
    let job = json(&result.job).map_err(|error| failed(&error))?;
    (PyBytes::new(py, &job), PyBytes::new(py, &result.body)).into_pyobject(py)
}

/// Renders a value as JSON.
pub(crate) fn json<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, ClientError> {
    serde_json::to_vec(value).map_err(|error| ClientError::Invalid(vec![format!("cannot be shown: {error}")]))
}
