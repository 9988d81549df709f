//! Python strings, copied into one Rust string while the interpreter lock is held.

use std::ops::Range;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

/// Texts, stored contiguously.
pub(crate) struct PyTexts {
    joined: String,
    ends: Vec<usize>,
}

impl PyTexts {
    pub(crate) fn all(&self) -> Vec<&str> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins.zip(&self.ends).map(|(begin, end)| &self.joined[Range { start: begin, end: *end }]).collect()
    }

    fn push(&mut self, text: &Bound<'_, PyAny>) -> PyResult<()> {
        let index = self.ends.len();
        let wrong = |_| PyTypeError::new_err(format!("text {index} is not a str"));
        let text = text.cast::<PyString>().map_err(wrong)?;
        self.joined.push_str(&text.to_cow()?);
        self.ends.push(self.joined.len());
        Ok(())
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for PyTexts {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<PyTexts> {
        let mut texts = PyTexts { joined: String::new(), ends: Vec::new() };
        if let Ok(list) = object.cast::<PyList>() {
            list.iter().try_for_each(|text| texts.push(&text))?;
        } else if let Ok(tuple) = object.cast::<PyTuple>() {
            tuple.iter().try_for_each(|text| texts.push(&text))?;
        } else {
            return Err(PyTypeError::new_err("texts must be a list of str"));
        }
        Ok(texts)
    }
}
