//! Results, as Python objects.

use std::collections::BTreeMap;
use std::sync::Mutex;

use loadtest::client::{self, EmbeddedVectors};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Vectors in one contiguous block, exposed to numpy in place.
#[pyclass(frozen, name = "Vectors")]
pub(crate) struct PyVectors {
    /// Kept alive while an array refers to it. Not accessed from Rust afterwards, so numpy may write to it.
    _values: Mutex<Vec<f32>>,
    address: usize,
    rows: usize,
    #[pyo3(get)]
    dimensions: usize,
    #[pyo3(get)]
    model: String,
    #[pyo3(get)]
    prompt_tokens: u64,
    #[pyo3(get)]
    total_tokens: u64,
}

impl PyVectors {
    pub(crate) fn new(embedded: EmbeddedVectors) -> (PyVectors, PyOperationStats) {
        let EmbeddedVectors { mut values, dimensions, model, prompt_tokens, total_tokens, run } = embedded;
        let rows = values.len() / dimensions.max(1);
        let address = values.as_mut_ptr().expose_provenance();
        let vectors = PyVectors {
            _values: Mutex::new(values),
            address,
            rows,
            dimensions,
            model,
            prompt_tokens,
            total_tokens,
        };
        (vectors, PyOperationStats::new(run))
    }
}

#[pymethods]
impl PyVectors {
    /// Version 3 of numpy's array interface; the array keeps this object alive.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.rows, self.dimensions))?;
        interface.set_item("typestr", if cfg!(target_endian = "big") { ">f4" } else { "<f4" })?;
        interface.set_item("data", (self.address, false))?;
        Ok(interface)
    }
}

/// Statistics of an operation.
#[pyclass(frozen, name = "OperationStats")]
pub(crate) struct PyOperationStats {
    stats: client::OperationStats,
}

impl PyOperationStats {
    pub(crate) fn new(stats: client::OperationStats) -> PyOperationStats {
        PyOperationStats { stats }
    }
}

#[pymethods]
impl PyOperationStats {
    /// Total seconds.
    #[getter]
    fn total_time(&self) -> f64 {
        self.stats.elapsed.as_secs_f64()
    }

    /// Seconds of each request.
    #[getter]
    fn times(&self) -> Vec<f64> {
        self.stats.requests.iter().map(|request| request.elapsed.as_secs_f64()).collect()
    }

    /// Attempts of each request.
    #[getter]
    fn attempts(&self) -> Vec<u32> {
        self.stats.requests.iter().map(|request| request.attempts).collect()
    }

    /// Headers of each response.
    #[getter]
    fn headers(&self) -> Vec<BTreeMap<String, String>> {
        let of = |request: &client::RequestRecord| {
            request.headers.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        self.stats.requests.iter().map(of).collect()
    }
}
