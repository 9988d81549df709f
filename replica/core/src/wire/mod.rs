//! What crosses a process border on the inference side: the API's shapes, its errors, its headers.

pub mod error;
pub mod headers;
pub mod info;
pub mod openai;
pub mod status;
