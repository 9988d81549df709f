//! Responses of `POST /v1/embeddings` and `GET /v1/models`.
//!
//! A response is mostly numbers, so it is written from the engine's rows ([`EmbeddingsResponse::write`]) without a copy
//! per row; the owned types are for readers. A test checks that both agree.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::ser::{SerializeSeq, Serializer};
use serde::{Deserialize, Serialize};

use crate::vectors::{Encoding, RowsView, Vector};

/// Response of `POST /v1/embeddings`, for readers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct EmbeddingsResponse {
    /// One vector per input, in the order of the inputs.
    pub data: Vec<EmbeddingObject>,
    /// Name of the deployment.
    pub model: String,
    /// Token usage.
    pub usage: Usage,
}

/// One vector.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct EmbeddingObject {
    /// Index of the input.
    pub index: usize,
    /// The vector.
    pub embedding: Embedding,
}

/// A vector in one of its encodings.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Embedding {
    /// A list of numbers.
    Float(Vec<f32>),
    /// Base64 of little-endian f32 numbers.
    Base64(String),
}

impl Embedding {
    /// Returns the numbers; `None` if the base64 is invalid, or its length is not a multiple of 4 bytes.
    pub fn values(&self) -> Option<Vec<f32>> {
        match self {
            Embedding::Float(values) => Some(values.clone()),
            Embedding::Base64(text) => {
                let bytes = STANDARD.decode(text).ok()?;
                let (numbers, rest) = bytes.as_chunks::<4>();
                rest.is_empty().then(|| numbers.iter().map(|number| f32::from_le_bytes(*number)).collect())
            }
        }
    }
}

/// Token usage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the inputs, special tokens included.
    pub prompt_tokens: u64,
    /// The same number; there are no output tokens.
    pub total_tokens: u64,
}

impl EmbeddingsResponse {
    /// Returns the response as JSON.
    pub fn write(model: &str, rows: RowsView<'_>, encoding: Encoding, tokens: u64) -> Vec<u8> {
        #[derive(Serialize)]
        struct EmbeddingsResponseBody<'a> {
            object: &'static str,
            data: Data<'a>,
            model: &'a str,
            usage: Usage,
        }
        // 12 bytes suffice for nearly every f32 of a unit vector and its comma; base64 needs 5.4.
        let mut json = Vec::with_capacity(256 + rows.numbers() * 12);
        let usage = Usage { prompt_tokens: tokens, total_tokens: tokens };
        let response = EmbeddingsResponseBody { object: "list", data: Data { rows, encoding }, model, usage };
        serde_json::to_writer(&mut json, &response)
            .expect("writing strings and numbers to a Vec cannot fail");
        json
    }
}

struct Data<'a> {
    rows: RowsView<'a>,
    encoding: Encoding,
}

impl Serialize for Data<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct EmbeddingItem<T> {
            object: &'static str,
            index: usize,
            embedding: T,
        }
        let rows = self.rows.iter();
        let mut data = serializer.serialize_seq(Some(rows.len()))?;
        for (index, row) in rows.enumerate() {
            let embedding = Vector { row, encoding: self.encoding };
            data.serialize_element(&EmbeddingItem { object: "embedding", index, embedding })?;
        }
        data.end()
    }
}

/// Response of `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// The deployments.
    pub data: Vec<ModelObject>,
}

/// One deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelObject {
    /// Name of the deployment, the value of `model`.
    pub id: String,
    /// `model`.
    pub object: String,
    /// Start of serving, in seconds since 1970.
    pub created: u64,
    /// `meridian`.
    pub owned_by: String,
}

impl ModelObject {
    /// The deployment `name`, served since `created`.
    pub fn new(name: &str, created: u64) -> ModelObject {
        ModelObject {
            id: name.to_owned(),
            object: "model".to_owned(),
            created,
            owned_by: "meridian".to_owned(),
        }
    }
}

impl ModelList {
    /// The list of `names`, served since `created`.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>, created: u64) -> ModelList {
        let model = |name| ModelObject::new(name, created);
        ModelList { object: "list".to_owned(), data: names.into_iter().map(model).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [f32; 6] = [0.25, -1.0e-7, 0.1, f32::MIN_POSITIVE, -0.333_333_34, 1.0];

    fn read(encoding: Encoding) -> EmbeddingsResponse {
        let json = EmbeddingsResponse::write("mini\"lm", RowsView::new(&ROWS, 3), encoding, 17);
        serde_json::from_slice(&json).expect("a response that was written by this module")
    }

    #[test]
    fn every_number_survives_both_encodings() {
        for encoding in [Encoding::Float, Encoding::Base64] {
            let response = read(encoding);
            assert_eq!(response.model, "mini\"lm");
            assert_eq!(response.usage, Usage { prompt_tokens: 17, total_tokens: 17 });
            assert_eq!(response.data.iter().map(|row| row.index).collect::<Vec<_>>(), [0, 1]);
            let values: Vec<f32> =
                response.data.iter().flat_map(|row| row.embedding.values().expect("numbers")).collect();
            assert_eq!(values, ROWS, "{encoding:?}");
        }
    }

    #[test]
    fn the_response_has_the_members_that_stock_clients_read() {
        let json = EmbeddingsResponse::write("m", RowsView::new(&[1.0, 0.5], 2), Encoding::Float, 3);
        let text = String::from_utf8(json).expect("JSON is UTF-8");
        assert_eq!(
            text,
            concat!(
                r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0,0.5]}],"#,
                r#""model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}"#
            )
        );
    }

    #[test]
    fn base64_of_half_a_number_is_not_a_vector() {
        assert_eq!(Embedding::Base64(STANDARD.encode([0, 0, 128, 63, 1])).values(), None);
        assert_eq!(Embedding::Base64("?".into()).values(), None);
        assert_eq!(Embedding::Base64(STANDARD.encode([0, 0, 128, 63])).values(), Some(vec![1.0]));
    }
}
