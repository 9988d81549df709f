//! Extension module of `meridian_client`: runs operations concurrently with Python code.
//!
//! The public classes are written in Python ([`../python/meridian_client`]) and contain no hot path; this module makes
//! no policy decisions. An operation is a task of a process-wide tokio runtime. Starting one copies the texts out of
//! Python's strings; after that the interpreter lock is not needed until the end. [`PyJob`] reports the state and
//! returns the result. Vectors are exposed to numpy in place by the array interface, without a copy and without an
//! object per row.

mod durable;
mod failure;
mod job;
mod preference;
mod results;
mod texts;

use std::sync::{Arc, OnceLock};

use loadtest::client::jobs::{ClientJobError, ClientJobFilter};
use loadtest::client::{Client, ClientSettings, EmbedOptions, EndpointSettings, HttpProtocol, ScoreOptions};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::runtime::Runtime;

use self::failure::{Failed, failed};
use self::job::{OperationResult, PyJob, json};
use self::preference::{RawPreference, seconds};
use self::texts::PyTexts;

/// Returns the runtime of all operations.
fn runtime() -> PyResult<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let built =
        tokio::runtime::Builder::new_multi_thread().thread_name("meridian-client").enable_all().build();
    let built =
        built.map_err(|error| PyRuntimeError::new_err(format!("cannot start the runtime: {error}")))?;
    Ok(RUNTIME.get_or_init(|| built))
}

/// Bulk client. Connections are kept between operations.
#[pyclass(frozen)]
struct Native {
    client: Arc<Client>,
}

#[pymethods]
impl Native {
    /// Creates a client. `endpoints` are URL, API key and weight.
    #[new]
    fn new(
        endpoints: Vec<(String, Option<String>, f64)>,
        http_version: u8,
        roots_pem: Option<Vec<u8>>,
    ) -> PyResult<Native> {
        let endpoint = |(url, key, weight)| EndpointSettings { url, key, weight };
        let settings = ClientSettings {
            endpoints: endpoints.into_iter().map(endpoint).collect(),
            protocol: if http_version == 2 { HttpProtocol::Http2 } else { HttpProtocol::Http1 },
            roots_pem,
        };
        let client = Client::new(&settings).map_err(|error| failed(&error))?;
        Ok(Native { client: Arc::new(client) })
    }

    /// Starts an embedding operation.
    #[pyo3(signature = (texts, model, dimensions, user, as_floats, preference))]
    fn embed(
        &self,
        texts: PyTexts,
        model: String,
        dimensions: Option<usize>,
        user: Option<String>,
        as_floats: bool,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let options = EmbedOptions { model, dimensions, user, as_floats, truncate: false };
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |mut progress| async move {
            let embedded = client.embed(&texts.all(), &options, &preference, &mut progress).await;
            embedded.map(OperationResult::Embeddings)
        })
    }

    /// Starts a rerank operation.
    #[pyo3(signature = (query, texts, model, raw_scores, return_text, truncate, truncation_direction, preference))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of the request; the Python side passes them by name"
    )]
    fn rerank(
        &self,
        query: String,
        texts: PyTexts,
        model: Option<String>,
        raw_scores: bool,
        return_text: bool,
        truncate: bool,
        truncation_direction: String,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let options = ScoreOptions { model, raw_scores, return_text, truncate, truncation_direction };
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |mut progress| async move {
            let ranked = client.rerank(&query, &texts.all(), &options, &preference, &mut progress).await;
            ranked.map(|(ranks, run)| OperationResult::Ranked(ranks, run))
        })
    }

    /// Starts a classification.
    #[pyo3(signature = (texts, model, raw_scores, truncate, truncation_direction, preference))]
    fn classify(
        &self,
        texts: PyTexts,
        model: Option<String>,
        raw_scores: bool,
        truncate: bool,
        truncation_direction: String,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let options = ScoreOptions { model, raw_scores, return_text: false, truncate, truncation_direction };
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |mut progress| async move {
            let classes = client.classify(&texts.all(), &options, &preference, &mut progress).await;
            classes.map(|(classes, run)| OperationResult::Classified(classes, run))
        })
    }

    /// Starts sending each of `bodies` to `path`.
    fn batch(
        &self,
        method: &str,
        path: String,
        bodies: Vec<Bound<'_, PyBytes>>,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let invalid = |_| Failed::new_err(("invalid", None::<u16>, format!("method {method:?}: invalid")));
        let method = http::Method::try_from(method).map_err(invalid)?;
        let bodies: Vec<Vec<u8>> = bodies.iter().map(|body| body.as_bytes().to_vec()).collect();
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |mut progress| async move {
            let responses = client.batch(method, &path, &bodies, &preference, &mut progress).await;
            responses.map(|(responses, run)| OperationResult::Bodies(responses, run))
        })
    }

    /// Starts the submission of a durable job.
    #[pyo3(signature = (operation, body, idempotency_key, priority, deadline_s, max_time_in_queue_s, preference))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of the request; the Python side passes them by name"
    )]
    fn submit(
        &self,
        operation: &str,
        body: Vec<u8>,
        idempotency_key: Option<String>,
        priority: Option<&str>,
        deadline_s: Option<f64>,
        max_time_in_queue_s: Option<f64>,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let kind = durable::kind(operation)?;
        let options = durable::options(idempotency_key, priority, deadline_s, max_time_in_queue_s)?;
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |_| async move {
            let job = client.submit(kind, &body, &options, &preference).await?;
            json(&job).map(OperationResult::Json)
        })
    }

    /// Starts reading (`GET`) or cancelling (`DELETE`) a durable job.
    fn durable_job(&self, cancels: bool, id: String, preference: RawPreference) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |_| async move {
            let job = match cancels {
                true => client.cancel(&id, &preference).await,
                false => client.job(&id, &preference).await,
            };
            match job {
                Ok(job) => json(&job).map(OperationResult::Json),
                Err(ClientJobError::Request(error)) => Err(error),
                Err(error) => Ok(OperationResult::Finished(Err(error))),
            }
        })
    }

    /// Starts a wait for the result of a durable job.
    #[pyo3(signature = (id, timeout, preference))]
    fn wait(&self, id: String, timeout: Option<f64>, preference: RawPreference) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let preference = preference.checked()?;
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        PyJob::start(runtime()?, move |_| async move {
            Ok(OperationResult::Finished(client.wait(&id, timeout, &preference).await))
        })
    }

    /// Starts reading a page of the list of durable jobs.
    #[pyo3(signature = (status, model, created_after, created_before, limit, after, preference))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of the request; the Python side passes them by name"
    )]
    fn jobs(
        &self,
        status: Option<&str>,
        model: Option<String>,
        created_after: Option<u64>,
        created_before: Option<u64>,
        limit: Option<usize>,
        after: Option<String>,
        preference: RawPreference,
    ) -> PyResult<PyJob> {
        let client = Arc::clone(&self.client);
        let status = status.map(durable::status).transpose()?;
        let filter = ClientJobFilter { status, model, created_after, created_before, limit, after };
        let preference = preference.checked()?;
        PyJob::start(runtime()?, move |_| async move {
            let page = client.jobs(&filter, &preference).await?;
            json(&page).map(OperationResult::Json)
        })
    }

    /// Creates an iteration over the results of durable jobs.
    fn results(&self, in_flight: usize, preference: RawPreference) -> PyResult<durable::PyResults> {
        durable::PyResults::new(&self.client, in_flight, &preference.checked()?)
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Native>()?;
    module.add_class::<PyJob>()?;
    module.add_class::<durable::PyResults>()?;
    module.add_class::<results::PyVectors>()?;
    module.add_class::<results::PyOperationStats>()?;
    module.add("Failed", module.py().get_type::<Failed>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
