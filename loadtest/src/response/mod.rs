//! Validation of response bodies. Rows are counted and checked; none is stored.
//!
//! An overloaded or broken server may respond with status 200 and missing rows, rows in another order, a truncated
//! body or numbers that are not finite. Such a response is a failed request with its own cause in the report
//! ([`ResponseDefect`]); a tool that counts status codes would report a success. Numbers are not parsed where their
//! values do not matter, because validation runs on the machine that must also send the next request in time.

pub(crate) mod classify;
pub(crate) mod embeddings;
mod masks;
pub(crate) mod rerank;
mod row;

use serde_json::error::Category;

/// Defect of a response with status 200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum ResponseDefect {
    /// The body of the response is not JSON, or is incomplete.
    #[error("not JSON, or truncated")]
    NotJson,
    /// The response is JSON, but not a list of embeddings, scores or classes.
    #[error("not a list of embeddings, scores or classes")]
    WrongShape,
    /// The response has more or fewer rows than the request has inputs.
    #[error("wrong number of rows")]
    WrongCount,
    /// A row of the response is not at the position of its input, or a document occurs twice.
    #[error("rows out of order")]
    WrongOrder,
    /// A row of the response is empty, or has another length than earlier rows of this run.
    #[error("rows of different lengths")]
    WrongDimensions,
    /// The response has a number that is null or too large.
    #[error("non-finite numbers")]
    NotFinite,
    /// A row of the response differs from the expected one.
    #[error("unexpected vectors")]
    Unexpected,
    /// The response is not valid HTTP.
    #[error("not HTTP")]
    NotHttp,
    /// The response is longer than the limit.
    #[error("too large")]
    TooLarge,
}

/// Validates an embeddings response to `inputs` inputs; returns the numbers per row.
pub fn check(body: &[u8], inputs: usize) -> Result<usize, ResponseDefect> {
    embeddings::check(body, inputs, |_, _| true)
}

fn kind(error: &serde_json::Error) -> ResponseDefect {
    match error.classify() {
        Category::Io | Category::Syntax | Category::Eof => ResponseDefect::NotJson,
        Category::Data => ResponseDefect::WrongShape,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(rows: &[(usize, &str)]) -> String {
        let rows: Vec<String> = rows
            .iter()
            .map(|(index, row)| format!(r#"{{"object":"embedding","index":{index},"embedding":{row}}}"#))
            .collect();
        format!(r#"{{"object":"list","data":[{}],"model":"m","usage":{{"total_tokens":1}}}}"#, rows.join(","))
    }

    #[test]
    fn a_valid_response_has_one_finite_row_per_input_in_order_and_of_equal_length() {
        let good = body(&[(0, "[1.0,-2,3e-7]"), (1, "[0,0,0.5]")]);
        assert_eq!(check(good.as_bytes(), 2), Ok(3));
        for (wrong, expected) in [
            (body(&[(0, "[1,2,3]")]), ResponseDefect::WrongCount),
            (body(&[(0, "[1]"), (1, "[1]"), (2, "[1]")]), ResponseDefect::WrongCount),
            (body(&[(1, "[1]"), (0, "[1]")]), ResponseDefect::WrongOrder),
            (body(&[(0, "[1,2,3]"), (1, "[1,2]")]), ResponseDefect::WrongDimensions),
            (body(&[(0, "[]"), (1, "[]")]), ResponseDefect::WrongDimensions),
            (body(&[(0, "[1]"), (1, "[null]")]), ResponseDefect::NotFinite),
            (body(&[(0, "[1]"), (1, "[1e39]")]), ResponseDefect::NotFinite),
            (body(&[(0, "[1]"), (1, "[NaN]")]), ResponseDefect::NotJson),
            (body(&[(0, "[1]"), (1, "[\"1\"]")]), ResponseDefect::WrongShape),
            (good[..good.len() - 1].to_owned(), ResponseDefect::NotJson),
            ("{\"data\":{}}".to_owned(), ResponseDefect::WrongShape),
            ("{}".to_owned(), ResponseDefect::WrongShape),
            (String::new(), ResponseDefect::NotJson),
        ] {
            assert_eq!(check(wrong.as_bytes(), 2), Err(expected), "{wrong}");
        }
    }
}
