//! Interface to what computes vectors: an engine in this process, or a remote endpoint.

/// Computes the vectors of texts. The vector of a text does not depend on the other texts.
pub trait EmbeddingBackend {
    /// Computes the vectors of a window of texts.
    fn embed(&mut self, texts: &[&str]) -> Result<WindowVectors, BackendError>;

    /// Returns the length of a vector.
    fn dimension(&self) -> usize;
}

/// Vectors of a window of texts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WindowVectors {
    /// Vectors of the texts that were not rejected, in the order of the texts, contiguous. Unspecified if a text was
    /// rejected and rejected texts are not skipped.
    pub values: Vec<f32>,
    /// Texts that the model cannot read, in ascending order of their indices.
    pub rejected: Vec<RejectedText>,
}

/// Text that the model cannot read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedText {
    /// Index in the window.
    pub index: usize,
    /// Statement of what is wrong and the fix.
    pub reason: String,
}

/// Failure of a computation as a whole, not of a single text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BackendError(pub String);
